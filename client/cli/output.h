/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Results for people and for programs: aligned tables, lines or JSON. Everything a command prints as its result, and what peers say in all
 * it prints, goes through here; stdout carries results only.
 *
 * Threads  one at a time.
 */
#ifndef EP_CLI_OUTPUT_H
#define EP_CLI_OUTPUT_H

#include <argp.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

#include "base/error.h"

#define EP_CLI_COLUMNS_MAX 24
#define EP_CLI_CELL_BYTES_MAX 4096 /* longer ones are cut */

typedef enum ep_cli_format { EP_CLI_TABLE, EP_CLI_JSON } ep_cli_format;
extern const char *const ep_cli_format_words[]; /* as ep_cli_format, NULL-terminated */

/* Option -o, --output; its input is an ep_cli_format. */
extern const struct argp ep_cli_output_argp;

/* One formatted line of up to EP_CLI_CELL_BYTES_MAX bytes, and its end; what is not printable becomes \xNN. */
void ep_cli_line(FILE *out, const char *format, ...) __attribute__((format(printf, 2, 3)));

typedef struct ep_cli_table ep_cli_table;

/* headings separated by '|', at most EP_CLI_COLUMNS_MAX; one that starts with '>' is a right-aligned column: "NODE|STATE|>ROWS". NULL: no
 * memory. */
ep_cli_table *ep_cli_table_create(const char *headings);
void ep_cli_table_destroy(ep_cli_table *table);
/* One formatted cell; rows fill from left to right. What is not printable becomes \xNN. Without memory the
 * table remembers it. */
void ep_cli_table_cell(ep_cli_table *table, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Columns two spaces apart, no trailing spaces. False when a row was lost for want of memory or the file
 * takes no more. */
bool ep_cli_table_print(const ep_cli_table *table, FILE *out);

/* Indented JSON and a line end. Takes json; NULL counts as a failure. */
bool ep_cli_json_print(json_t *taken_json, FILE *out);
/* A JSON string of text that may not be UTF-8; what is not printable becomes \xNN. */
json_t *ep_cli_json_text(const char *text);

#endif
