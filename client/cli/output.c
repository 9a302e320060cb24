/* SPDX-License-Identifier: Apache-2.0 */
/* Tables and JSON. */
#include "output.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "arguments.h"
#include "base/check.h"
#include "base/printable.h"

#define CELLS_MAX ((size_t)4 << 20)
#define GAP 2

const char *const ep_cli_format_words[] = {"table", "json", NULL};

struct ep_cli_table {
    size_t columns;
    bool right[EP_CLI_COLUMNS_MAX];
    size_t widths[EP_CLI_COLUMNS_MAX];
    char **cells; /* headings first */
    size_t cells_count;
    size_t cells_capacity;
    bool lost;
};

static error_t parse_output(int key, char *arg, struct argp_state *state)
{
    ep_cli_format *format = state->input;
    if (key != 'o') {
        return ARGP_ERR_UNKNOWN;
    }
    *format = (ep_cli_format)ep_cli_arg_word(state, "--output", arg, ep_cli_format_words);
    return 0;
}

static const struct argp_option output_options[] = {
    {"output", 'o', "table|json", 0, "Form of the result (default: table)", 1},
    {0},
};
const struct argp ep_cli_output_argp = {output_options, parse_output, NULL, NULL, NULL, NULL, NULL};

/* Lines, cells and JSON get a peer's words through this alone. NULL: no memory. */
static char *escaped(const char *text)
{
    size_t bytes = EP_TEXT_ESCAPED_BYTES(strlen(text));
    char *out = malloc(bytes);
    return out == NULL ? NULL : ep_text_escape(text, out, bytes);
}

/* ---- lines ---- */

void ep_cli_line(FILE *out, const char *format, ...)
{
    char text[EP_CLI_CELL_BYTES_MAX];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    char *plain = escaped(text);
    fprintf(out, "%s\n", plain != NULL ? plain : "(no memory)");
    free(plain);
}

/* ---- tables ---- */

/* Characters, not bytes: UTF-8 continuation bytes take no place. */
static size_t width_of(const char *text)
{
    size_t width = 0;
    for (; *text != '\0'; text++) {
        width += ((unsigned char)*text & 0xc0) != 0x80;
    }
    return width;
}

static void add_cell(ep_cli_table *table, const char *text)
{
    if (table->cells_count == table->cells_capacity) {
        size_t capacity = table->cells_capacity == 0 ? 64 : table->cells_capacity * 2;
        char **cells = capacity <= CELLS_MAX ? realloc(table->cells, capacity * sizeof(*cells)) : NULL;
        if (cells == NULL) {
            table->lost = true;
            return;
        }
        table->cells = cells;
        table->cells_capacity = capacity;
    }
    char *copy = escaped(text);
    if (copy == NULL) {
        table->lost = true;
        return;
    }
    size_t column = table->cells_count % table->columns;
    size_t width = width_of(copy);
    table->widths[column] = width > table->widths[column] ? width : table->widths[column];
    table->cells[table->cells_count++] = copy;
}

ep_cli_table *ep_cli_table_create(const char *headings)
{
    ep_cli_table *table = calloc(1, sizeof(*table));
    char *copy = strdup(headings);
    char *rest = copy;
    if (table == NULL || copy == NULL) {
        free(copy);
        free(table);
        return NULL;
    }
    char *names[EP_CLI_COLUMNS_MAX];
    for (char *name; (name = strsep(&rest, "|")) != NULL; table->columns++) {
        EP_ASSERT(table->columns < EP_CLI_COLUMNS_MAX); /* else every later cell would stand in a wrong column */
        table->right[table->columns] = name[0] == '>';
        names[table->columns] = name + (name[0] == '>');
    }
    for (size_t i = 0; i < table->columns; i++) {
        add_cell(table, names[i]);
    }
    free(copy);
    return table;
}

void ep_cli_table_destroy(ep_cli_table *table)
{
    if (table == NULL) {
        return;
    }
    for (size_t i = 0; i < table->cells_count; i++) {
        free(table->cells[i]);
    }
    free(table->cells);
    free(table);
}

void ep_cli_table_cell(ep_cli_table *table, const char *format, ...)
{
    char text[EP_CLI_CELL_BYTES_MAX];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    add_cell(table, text);
}

static void print_cell(const ep_cli_table *table, size_t index, FILE *out)
{
    const char *text = table->cells[index];
    size_t column = index % table->columns;
    bool last = column + 1 == table->columns;
    int fill = (int)(table->widths[column] - width_of(text));
    if (table->right[column]) {
        fprintf(out, "%*s%s", fill, "", text);
        fill = 0;
    } else {
        fputs(text, out);
    }
    if (last) {
        fputc('\n', out);
    } else {
        fprintf(out, "%*s", fill + GAP, "");
    }
}

bool ep_cli_table_print(const ep_cli_table *table, FILE *out)
{
    if (table == NULL) {
        return false;
    }
    for (size_t i = 0; i < table->cells_count; i++) {
        print_cell(table, i, out);
    }
    return !table->lost && ferror(out) == 0;
}

/* ---- JSON ---- */

bool ep_cli_json_print(json_t *taken_json, FILE *out)
{
    bool good =
        taken_json != NULL && json_dumpf(taken_json, out, JSON_INDENT(2)) == 0 && fputc('\n', out) != EOF;
    json_decref(taken_json);
    return good;
}

json_t *ep_cli_json_text(const char *text)
{
    char *plain = escaped(text);
    json_t *json = plain != NULL ? json_string(plain) : NULL;
    free(plain);
    return json;
}
