/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Prints results for people and programs: aligned tables, lines or JSON. All results of commands,
 * and all texts from peers in their output, are printed by these functions; stdout gets only
 * results.
 *
 * Threads  one at a time.
 */
#ifndef EP_CLI_OUTPUT_H
#define EP_CLI_OUTPUT_H

#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

#include "base/error.h"

#define EP_CLI_COLUMNS_MAX 24
#define EP_CLI_CELL_BYTES_MAX 4096 /* longer ones are truncated */
#define EP_CLI_BRIEF_BYTES 32

typedef enum ep_cli_format { EP_CLI_TABLE, EP_CLI_JSON } ep_cli_format;

/* Prints a formatted line of up to EP_CLI_CELL_BYTES_MAX bytes; what is not printable becomes \xNN.
 * On a terminal it is wrapped, later lines being indented to the second column of "word text", else
 * by two. */
void ep_cli_line(FILE *out, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The same in one line, truncated to so many columns; 0: not truncated. */
void ep_cli_line_cut(FILE *out, size_t columns, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

typedef struct ep_cli_table ep_cli_table;

/*
 * headings: at most EP_CLI_COLUMNS_MAX, separated by '|': "NODE|STATE|>ROWS|2URL". '>' means
 * right-aligned. A digit, before '>', means that the column may be left out on a narrow terminal:
 * the least digit first, among equal ones the rightmost. NULL: no memory.
 */
ep_cli_table *ep_cli_table_create(const char *headings);
void ep_cli_table_destroy(ep_cli_table *table);
/* Adds a formatted cell; rows fill from left to right. What is not printable becomes \xNN. Printing
 * fails if there was no memory, also for the table itself. */
void ep_cli_table_cell(ep_cli_table *table, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* Adds a text with a shorter form for terminals; brief NULL: the same. */
void ep_cli_table_brief(ep_cli_table *table, const char *text, const char *brief);
/* Adds a count: all digits, on a terminal 9999, 48.2k, 1.23M. */
void ep_cli_table_count(ep_cli_table *table, uint64_t count);
/* Adds a number of bytes: all digits, on a terminal 512B, 1.5KiB. */
void ep_cli_table_bytes(ep_cli_table *table, uint64_t bytes);
/*
 * Prints columns two spaces apart, without trailing spaces. Lines fit a terminal: texts lose their
 * middle, columns are left out. Elsewhere rows are complete. False: a row was lost for want of
 * memory, or writing failed.
 */
bool ep_cli_table_print(ep_cli_table *taken_table, FILE *out);
/* The same for a terminal of so many columns (0: no terminal), with only rows first ..
 * first+count, of a table that is kept. */
bool ep_cli_table_print_part(const ep_cli_table *table, size_t columns, size_t first, size_t count,
                             FILE *out);

/* 48211 -> "48.2k". */
const char *ep_cli_count_text(uint64_t count, char out[EP_CLI_BRIEF_BYTES]);
/* 1610612736 -> "1.5GiB". */
const char *ep_cli_bytes_text(uint64_t bytes, char out[EP_CLI_BRIEF_BYTES]);
/* 1234 seconds -> "20m34s". */
const char *ep_cli_duration_text(double seconds, char out[EP_CLI_BRIEF_BYTES]);

/* Prints indented JSON and a newline. Takes json; NULL counts as a failure. */
bool ep_cli_json_print(json_t *taken_json, FILE *out);
/* The same in one line, for commands that print several objects. */
bool ep_cli_json_print_line(json_t *taken_json, FILE *out);
/* A JSON string of text that may not be UTF-8; what is not printable becomes \xNN. */
json_t *ep_cli_json_text(const char *text);
/* A ratio from a peer: a positive number, or null. */
json_t *ep_cli_json_ratio(double ratio);

#endif
