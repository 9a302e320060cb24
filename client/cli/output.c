/* SPDX-License-Identifier: Apache-2.0 */
/* Tables and JSON. */
#include "output.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/printable.h"
#include "base/screen.h"

#define CELLS_MAX ((size_t)4 << 20)
#define GAP 2
#define LEAST_KEPT 24 /* width to which texts are truncated before columns are left out */
#define LEAST 12      /* least width of a truncated text */
#define WORTH_KEPT 10 /* worth of a column that is never left out */
#define INDENT_MAX 20

typedef struct table_cell {
    char *text;
    char *brief; /* for terminals; NULL: as text */
} table_cell;

typedef struct table_column {
    bool right;
    int worth;
    size_t width;       /* of the widest text */
    size_t brief_width; /* of the widest on a terminal */
} table_column;

struct ep_cli_table {
    size_t columns_count;
    table_column columns[EP_CLI_COLUMNS_MAX];
    table_cell *cells; /* headings first */
    size_t cells_count;
    size_t cells_capacity;
    bool lost;
};

/* Escapes a text; used for all texts of peers. NULL: no memory. */
static char *escaped(const char *text)
{
    size_t bytes = EP_TEXT_ESCAPED_BYTES(strlen(text));
    char *out = malloc(bytes);
    return out == NULL ? NULL : ep_text_escape(text, out, bytes);
}

/* The same of a formatted text. */
static char *formatted(const char *format, va_list args) __attribute__((format(printf, 1, 0)));
static char *formatted(const char *format, va_list args)
{
    char text[EP_CLI_CELL_BYTES_MAX];
    vsnprintf(text, sizeof(text), format, args);
    return escaped(text);
}

/* ---- lines ---- */

/* Indent of the lines after the first. */
static size_t indent_of(const char *text)
{
    const char *gap = strstr(text, "  ");
    size_t at = gap != NULL ? (size_t)(gap - text) + strspn(gap, " ") : 0;
    return at > 0 && at <= INDENT_MAX ? at : 2;
}

/* Bytes of the next line, broken between words if possible. */
static size_t line_bytes(const char *text, size_t columns)
{
    size_t fit = ep_text_fit(text, columns);
    size_t end = fit;
    if (text[fit] == '\0') {
        return fit;
    }
    while (end > 0 && text[end] != ' ') {
        end--;
    }
    return end > 0 ? end : fit;
}

static void print_wrapped(const char *text, size_t columns, FILE *out)
{
    size_t indent = indent_of(text);
    indent = indent < columns / 2 ? indent : 0;
    size_t bytes = line_bytes(text, columns);
    fprintf(out, "%.*s\n", (int)bytes, text);
    for (text += bytes; *text != '\0'; text += bytes) {
        text += strspn(text, " ");
        bytes = line_bytes(text, columns - indent);
        bytes = bytes > 0 ? bytes : strlen(text); /* for a character wider than the terminal */
        fprintf(out, "%*s%.*s\n", (int)indent, "", (int)bytes, text);
    }
}

void ep_cli_line(FILE *out, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    char *plain = formatted(format, args);
    va_end(args);
    size_t columns = ep_screen_of(fileno(out)).columns;
    if (plain == NULL || columns == 0) {
        fprintf(out, "%s\n", plain != NULL ? plain : "(no memory)");
    } else {
        print_wrapped(plain, columns, out);
    }
    free(plain);
}

void ep_cli_line_cut(FILE *out, size_t columns, const char *format, ...)
{
    char cut[4 * EP_CLI_CELL_BYTES_MAX];
    va_list args;
    va_start(args, format);
    char *plain = formatted(format, args);
    va_end(args);
    fprintf(out, "%s\n",
            plain == NULL ? "(no memory)"
            : columns > 0 ? ep_text_cut(plain, columns, cut, sizeof(cut))
                          : plain);
    free(plain);
}

/* Writes a value above whole_max with three digits: "48.2k". units covers all 64-bit values. */
static const char *brief_text(uint64_t value, uint64_t whole_max, double step,
                              const char *const *units, char out[EP_CLI_BRIEF_BYTES])
{
    double scaled = (double)value;
    size_t unit = 0;
    while (unit == 0 ? value > whole_max : scaled >= 999.5) {
        scaled /= step;
        unit++;
    }
    snprintf(out, EP_CLI_BRIEF_BYTES,
             unit == 0 || scaled >= 99.95 ? "%.0f%s"
             : scaled >= 9.995            ? "%.1f%s"
                                          : "%.2f%s",
             scaled, units[unit]);
    return out;
}

const char *ep_cli_count_text(uint64_t count, char out[EP_CLI_BRIEF_BYTES])
{
    static const char *const units[] = {"", "k", "M", "G", "T", "P", "E"};
    return brief_text(count, 9999, 1000.0, units, out);
}

const char *ep_cli_duration_text(double seconds, char out[EP_CLI_BRIEF_BYTES])
{
    uint64_t s = (uint64_t)seconds;
    if (s < 60) {
        snprintf(out, EP_CLI_BRIEF_BYTES, seconds < 10.0 ? "%.1fs" : "%.0fs", seconds);
    } else if (s < 3600) {
        snprintf(out, EP_CLI_BRIEF_BYTES, "%" PRIu64 "m%02" PRIu64 "s", s / 60, s % 60);
    } else if (s < 86400) {
        snprintf(out, EP_CLI_BRIEF_BYTES, "%" PRIu64 "h%02" PRIu64 "m", s / 3600, s / 60 % 60);
    } else {
        snprintf(out, EP_CLI_BRIEF_BYTES, "%" PRIu64 "d%02" PRIu64 "h", s / 86400, s / 3600 % 24);
    }
    return out;
}

/* ---- tables: content ---- */

static void widen(size_t *io_width, const char *text)
{
    size_t width = ep_text_columns(text);
    *io_width = width > *io_width ? width : *io_width;
}

void ep_cli_table_brief(ep_cli_table *table, const char *text, const char *brief)
{
    if (table == NULL) {
        return;
    }
    char *plain = escaped(text);
    char *plain_brief = brief != NULL ? escaped(brief) : NULL;
    bool lost = plain == NULL || (brief != NULL && plain_brief == NULL);
    if (table->cells_count == table->cells_capacity) {
        size_t capacity = table->cells_capacity == 0 ? 64 : table->cells_capacity * 2;
        table_cell *cells = !lost && capacity <= CELLS_MAX
                                ? realloc(table->cells, capacity * sizeof(*cells))
                                : NULL;
        lost = cells == NULL;
        table->cells = lost ? table->cells : cells;
        table->cells_capacity = lost ? table->cells_capacity : capacity;
    }
    if (lost) {
        free(plain);
        free(plain_brief);
        table->lost = true;
        return;
    }
    table_column *column = &table->columns[table->cells_count % table->columns_count];
    widen(&column->width, plain);
    widen(&column->brief_width, plain_brief != NULL ? plain_brief : plain);
    table->cells[table->cells_count++] = (table_cell){.text = plain, .brief = plain_brief};
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
    for (char *name; (name = strsep(&rest, "|")) != NULL; table->columns_count++) {
        /* otherwise all later cells would be in wrong columns */
        EP_ASSERT(table->columns_count < EP_CLI_COLUMNS_MAX);
        table_column *column = &table->columns[table->columns_count];
        bool has_worth = name[0] >= '1' && name[0] <= '9';
        column->worth = has_worth ? name[0] - '0' : WORTH_KEPT;
        name += has_worth;
        column->right = name[0] == '>';
        names[table->columns_count] = name + column->right;
    }
    for (size_t i = 0; i < table->columns_count; i++) {
        ep_cli_table_brief(table, names[i], NULL);
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
        free(table->cells[i].text);
        free(table->cells[i].brief);
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
    ep_cli_table_brief(table, text, NULL);
}

void ep_cli_table_count(ep_cli_table *table, uint64_t count)
{
    char text[EP_CLI_BRIEF_BYTES];
    char brief[EP_CLI_BRIEF_BYTES];
    snprintf(text, sizeof(text), "%" PRIu64, count);
    ep_cli_table_brief(table, text, ep_cli_count_text(count, brief));
}

const char *ep_cli_bytes_text(uint64_t bytes, char out[EP_CLI_BRIEF_BYTES])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    return brief_text(bytes, 1023, 1024.0, units, out);
}

void ep_cli_table_bytes(ep_cli_table *table, uint64_t bytes)
{
    char text[EP_CLI_BRIEF_BYTES];
    char brief[EP_CLI_BRIEF_BYTES];
    snprintf(text, sizeof(text), "%" PRIu64, bytes);
    ep_cli_table_brief(table, text, ep_cli_bytes_text(bytes, brief));
}

/* ---- tables: layout ---- */

/* The next column in order of worth, then from the left; count: no more. */
static size_t next_column(const ep_cli_table *table, int *io_worth, size_t at)
{
    for (; *io_worth > 0; (*io_worth)--, at = 0) {
        for (; at < table->columns_count; at++) {
            if (table->columns[at].worth == *io_worth) {
                return at;
            }
        }
    }
    return table->columns_count;
}

/*
 * Widths for a terminal; 0: left out. First each column, by worth, gets its least width while there
 * is room; then the remaining room goes to truncated texts, by worth too.
 */
static void fit_widths(const ep_cli_table *table, size_t columns, size_t *out_widths)
{
    size_t used = 0;
    size_t shown = 0;
    int worth = WORTH_KEPT;
    for (size_t i = next_column(table, &worth, 0); i < table->columns_count;
         i = next_column(table, &worth, i + 1)) {
        const table_column *column = &table->columns[i];
        size_t most_least = column->worth < WORTH_KEPT ? LEAST
                            : LEAST_KEPT < columns / 2 ? LEAST_KEPT
                                                       : columns / 2;
        size_t least =
            column->right || column->brief_width < most_least ? column->brief_width : most_least;
        size_t gap = shown > 0 ? GAP : 0;
        least = least == 0 ? 1 : shown == 0 && least > columns ? columns : least;
        out_widths[i] = used + gap + least <= columns ? least : 0;
        used += out_widths[i] > 0 ? gap + least : 0;
        shown += out_widths[i] > 0;
    }
    worth = WORTH_KEPT;
    for (size_t i = next_column(table, &worth, 0); i < table->columns_count;
         i = next_column(table, &worth, i + 1)) {
        size_t more = table->columns[i].brief_width - out_widths[i];
        more = out_widths[i] == 0 ? 0 : more < columns - used ? more : columns - used;
        out_widths[i] += more;
        used += more;
    }
}

static void print_row(const ep_cli_table *table, const table_cell *cells, const size_t *widths,
                      bool brief, FILE *out)
{
    size_t fill = 0; /* blanks before the next column */
    for (size_t i = 0; i < table->columns_count; i++) {
        char cut[4 * EP_CLI_CELL_BYTES_MAX];
        const char *text = brief && cells[i].brief != NULL ? cells[i].brief : cells[i].text;
        size_t width = ep_text_columns(text);
        if (widths[i] == 0) {
            continue;
        }
        if (width > widths[i]) {
            text = ep_text_cut(text, widths[i], cut, sizeof(cut));
            width = ep_text_columns(text);
        }
        size_t rest = widths[i] - width;
        fprintf(out, "%*s%s", (int)(fill + (table->columns[i].right ? rest : 0)), "", text);
        fill = GAP + (table->columns[i].right ? 0 : rest);
    }
    fputc('\n', out);
}

bool ep_cli_table_print_part(const ep_cli_table *table, size_t columns, size_t first, size_t count,
                             FILE *out)
{
    size_t widths[EP_CLI_COLUMNS_MAX] = {0};
    if (table == NULL) {
        return false;
    }
    for (size_t i = 0; columns == 0 && i < table->columns_count; i++) {
        widths[i] = table->columns[i].width;
    }
    if (columns > 0) {
        fit_widths(table, columns, widths);
    }
    size_t rows = table->cells_count / table->columns_count;
    for (size_t row = 0; row < rows; row++) {
        if (row == 0 || (row - 1 >= first && row - 1 - first < count)) {
            print_row(table, table->cells + row * table->columns_count, widths, columns > 0, out);
        }
    }
    return !table->lost && ferror(out) == 0;
}

bool ep_cli_table_print(ep_cli_table *taken_table, FILE *out)
{
    bool good =
        ep_cli_table_print_part(taken_table, ep_screen_of(fileno(out)).columns, 0, SIZE_MAX, out);
    ep_cli_table_destroy(taken_table);
    return good;
}

/* ---- JSON ---- */

/* 15 digits, so that 0.1 is not 0.10000000000000001. */
static bool print_json(json_t *taken_json, size_t flags, FILE *out)
{
    bool good = taken_json != NULL &&
                json_dumpf(taken_json, out, flags | JSON_REAL_PRECISION(15)) == 0 &&
                fputc('\n', out) != EOF;
    json_decref(taken_json);
    return good;
}

bool ep_cli_json_print(json_t *taken_json, FILE *out)
{
    return print_json(taken_json, JSON_INDENT(2), out);
}

bool ep_cli_json_print_line(json_t *taken_json, FILE *out)
{
    return print_json(taken_json, 0, out);
}

json_t *ep_cli_json_ratio(double ratio)
{
    return isfinite(ratio) && ratio > 0 ? json_real(ratio) : json_null();
}

json_t *ep_cli_json_text(const char *text)
{
    char *plain = escaped(text);
    json_t *json = plain != NULL ? json_string(plain) : NULL;
    free(plain);
    return json;
}
