/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Results for people and for programs: aligned tables, lines or JSON. Everything a command prints
 * as its result, and what peers say in all it prints, goes through here; stdout carries results
 * only.
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
#define EP_CLI_CELL_BYTES_MAX 4096 /* longer ones are cut */
#define EP_CLI_BRIEF_BYTES 32

typedef enum ep_cli_format { EP_CLI_TABLE, EP_CLI_JSON } ep_cli_format;

/* One formatted line of up to EP_CLI_CELL_BYTES_MAX bytes, and its end; what is not printable
 * becomes \xNN. A terminal gets it in lines that fit, the later ones set in: under the second
 * column of "word    text", else by two. */
void ep_cli_line(FILE *out, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The same, but one line of so many columns at most. 0: as long as it is. */
void ep_cli_line_cut(FILE *out, size_t columns, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

typedef struct ep_cli_table ep_cli_table;

/*
 * headings separated by '|', at most EP_CLI_COLUMNS_MAX: "NODE|STATE|>ROWS|2URL". One that starts
 * with '>' is right-aligned. One that starts with a digit, before '>', may be left out where a
 * terminal is too narrow for all: the least digit first, of equal ones the rightmost. NULL: no
 * memory.
 */
ep_cli_table *ep_cli_table_create(const char *headings);
void ep_cli_table_destroy(ep_cli_table *table);
/* One formatted cell; rows fill from left to right. What is not printable becomes \xNN. Without
 * memory the table remembers it. */
void ep_cli_table_cell(ep_cli_table *table, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* A text, and what a terminal gets of it. */
void ep_cli_table_brief(ep_cli_table *table, const char *text, const char *brief);
/* A count: all digits, but on a terminal 9999, 48.2k, 1.23M. */
void ep_cli_table_count(ep_cli_table *table, uint64_t count);
/* Bytes: all digits, but on a terminal 512B, 1.5KiB. */
void ep_cli_table_bytes(ep_cli_table *table, uint64_t bytes);
/*
 * Columns two spaces apart, no trailing spaces. On a terminal no line is wider than it: texts lose
 * their middle, columns are left out. Elsewhere every row is whole. False when a row was lost for
 * want of memory or the file takes no more.
 */
bool ep_cli_table_print(const ep_cli_table *table, FILE *out);
/* The same for a terminal of so many columns, whatever out is; 0: none. Only rows first ..
 * first+count after the headings. */
bool ep_cli_table_print_part(const ep_cli_table *table, size_t columns, size_t first, size_t count,
                             FILE *out);

/* 48211 -> "48.2k". */
const char *ep_cli_count_text(uint64_t count, char out[EP_CLI_BRIEF_BYTES]);
/* 1610612736 -> "1.5GiB". */
const char *ep_cli_bytes_text(uint64_t bytes, char out[EP_CLI_BRIEF_BYTES]);
/* 1234 seconds -> "20m34s". */
const char *ep_cli_duration_text(double seconds, char out[EP_CLI_BRIEF_BYTES]);

/* Indented JSON and a line end. Takes json; NULL counts as a failure. */
bool ep_cli_json_print(json_t *taken_json, FILE *out);
/* The same in one line, for a command that prints one object after the other. */
bool ep_cli_json_print_line(json_t *taken_json, FILE *out);
/* A JSON string of text that may not be UTF-8; what is not printable becomes \xNN. */
json_t *ep_cli_json_text(const char *text);
/* Of a peer: above 0, or null. */
json_t *ep_cli_json_ratio(double ratio);

#endif
