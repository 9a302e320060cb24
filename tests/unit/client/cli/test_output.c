/* SPDX-License-Identifier: Apache-2.0 */
/* Tables and JSON, byte for byte. */
#include <criterion/criterion.h>
#include <pty.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/screen.h"
#include "cli/command.h"
#include "cli/output.h"

/* What is printed of rows from first on, at most rows_max of them, for so many columns; freed by
 * the caller. */
static char *printed(const ep_cli_table *table, size_t columns, size_t first, size_t rows_max)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    cr_assert(ep_cli_table_print_part(table, columns, first, rows_max, out));
    fclose(out);
    return text;
}

/* All of table, which is destroyed. */
static void expect_all(ep_cli_table *taken_table, const char *wanted)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    cr_assert(ep_cli_table_print(taken_table, out));
    fclose(out);
    cr_expect_str_eq(text, wanted, "%s", text);
    free(text);
}

Test(output, columns_are_aligned)
{
    ep_cli_table *table = ep_cli_table_create("NODE|>ROWS|URL");
    const char *expected = "NODE    ROWS  URL\n"
                           "a          1  tcp://x:1\n"
                           "longer  1234  y\n";
    ep_cli_table_cell(table, "a");
    ep_cli_table_cell(table, "%d", 1);
    ep_cli_table_cell(table, "tcp://x:1");
    ep_cli_table_cell(table, "longer");
    ep_cli_table_cell(table, "%d", 1234);
    ep_cli_table_cell(table, "y");
    expect_all(table, expected);
}

Test(output, as_many_columns_as_allowed_keep_their_places)
{
    char headings[2 * EP_CLI_COLUMNS_MAX], expected[8 * EP_CLI_COLUMNS_MAX];
    size_t at = 0;
    for (int i = 0; i < EP_CLI_COLUMNS_MAX; i++) {
        at += (size_t)snprintf(headings + at, sizeof(headings) - at, "%s%c", i > 0 ? "|" : "",
                               'A' + i);
    }
    ep_cli_table *table = ep_cli_table_create(headings);
    for (int i = 0; i < EP_CLI_COLUMNS_MAX; i++) {
        ep_cli_table_cell(table, "%c", 'a' + i);
    }
    at = 0;
    for (int row = 0; row < 2; row++) {
        for (int i = 0; i < EP_CLI_COLUMNS_MAX; i++) {
            at += (size_t)snprintf(expected + at, sizeof(expected) - at, "%s%c", i > 0 ? "  " : "",
                                   (row == 0 ? 'A' : 'a') + i);
        }
        at += (size_t)snprintf(expected + at, sizeof(expected) - at, "\n");
    }
    expect_all(table, expected);
}

Test(output, an_empty_table_has_its_headings)
{
    ep_cli_table *table = ep_cli_table_create("A|>B");
    expect_all(table, "A  B\n");
}

static void expect_fit(const ep_cli_table *table, size_t columns, const char *wanted)
{
    char *text = printed(table, columns, 0, SIZE_MAX);
    cr_expect_str_eq(text, wanted, "%zu columns:\n%s", columns, text);
    free(text);
}

Test(output, a_narrow_terminal_gets_what_is_worth_most)
{
    ep_cli_table *table = ep_cli_table_create("NODE|STATE|3>ROWS|1HOST|2URL");
    ep_cli_table_cell(table, "node-a");
    ep_cli_table_cell(table, "serving");
    ep_cli_table_count(table, 48211);
    ep_cli_table_cell(table, "d1e57db4-2ba5");
    ep_cli_table_cell(table, "tcp://127.0.0.1:7420");
    expect_fit(table, 0,
               "NODE    STATE     ROWS  HOST           URL\nnode-a  serving  48211  d1e57db4-2ba5  "
               "tcp://127.0.0.1:7420\n");
    expect_fit(table, 59,
               "NODE    STATE     ROWS  HOST           URL\nnode-a  serving  48.2k  d1e57db4-2ba5  "
               "tcp://127.0.0.1:7420\n");
    expect_fit(table, 58,
               "NODE    STATE     ROWS  HOST          URL\nnode-a  serving  48.2k  d1e57..-2ba5  "
               "tcp://127.0.0.1:7420\n");
    expect_fit(table, 50,
               "NODE    STATE     ROWS  HOST          URL\nnode-a  serving  48.2k  d1e57..-2ba5  "
               "tcp:/..:7420\n");
    expect_fit(table, 49,
               "NODE    STATE     ROWS  URL\nnode-a  serving  48.2k  tcp://127.0.0.1:7420\n");
    expect_fit(table, 40,
               "NODE    STATE     ROWS  URL\nnode-a  serving  48.2k  tcp://1...1:7420\n");
    expect_fit(table, 30, "NODE    STATE     ROWS\nnode-a  serving  48.2k\n");
    expect_fit(table, 20, "NODE    STATE\nnode-a  serving\n");
    expect_fit(table, 5, "NODE\nno..a\n");
    expect_fit(table, 1, "N\nn\n");
    ep_cli_table_destroy(table);
}

Test(output, no_line_is_wider_than_the_terminal)
{
    ep_cli_table *table = ep_cli_table_create("NODE|STATE|3>ROWS|1HOST|2URL|>CALLS");
    for (int i = 0; i < 6 * 8; i++) {
        ep_cli_table_cell(table, "%.*s", 7 * (i % 11),
                          "\xe6\xa8\xa1-node-of-a-very-long-name-which-nobody-would-type-by-hand-"
                          "if-there-were-another-way");
    }
    for (size_t columns = 1; columns < 400; columns++) {
        char *text = printed(table, columns, 0, SIZE_MAX);
        char *rest = text;
        for (char *line; (line = strsep(&rest, "\n")) != NULL;) {
            cr_expect_leq(ep_text_columns(line), columns, "%zu columns: %s", columns, line);
        }
        free(text);
    }
    ep_cli_table_destroy(table);
}

Test(output, only_some_rows)
{
    ep_cli_table *table = ep_cli_table_create(">A");
    for (int i = 0; i < 5; i++) {
        ep_cli_table_cell(table, "%d", i);
    }
    char *text = printed(table, 80, 1, 2);
    cr_assert_str_eq(text, "A\n1\n2\n");
    free(text);
    ep_cli_table_destroy(table);
}

Test(output, brief_figures)
{
    static const struct {
        uint64_t value;
        const char *count;
        const char *duration;
    } cases[] = {
        {0, "0", "0.0s"},
        {9, "9", "9.0s"},
        {10, "10", "10s"},
        {59, "59", "59s"},
        {60, "60", "1m00s"},
        {3599, "3599", "59m59s"},
        {9999, "9999", "2h46m"},
        {10000, "10.0k", "2h46m"},
        {48211, "48.2k", "13h23m"},
        {99949, "99.9k", "1d03h"},
        {99951, "100k", "1d03h"},
        {999499, "999k", "11d13h"},
        {999500, "1.00M", "11d13h"},
        {9996000, "10.0M", "115d16h"},
        {UINT64_MAX, "18.4E", "213503982334601d07h"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char text[EP_CLI_BRIEF_BYTES];
        cr_expect_str_eq(ep_cli_count_text(cases[i].value, text), cases[i].count, "%s", text);
        if (i + 1 < sizeof(cases) / sizeof(cases[0])) {
            cr_expect_str_eq(ep_cli_duration_text((double)cases[i].value, text), cases[i].duration,
                             "%s", text);
        }
    }
    ep_cli_table *table = ep_cli_table_create(">BYTES");
    ep_cli_table_bytes(table, 1023);
    ep_cli_table_bytes(table, 6291456);
    expect_fit(table, 80, "  BYTES\n  1023B\n6.00MiB\n");
    expect_fit(table, 0, "  BYTES\n   1023\n6291456\n");
    ep_cli_table_destroy(table);
}

/* What ep_cli_line writes on a terminal of so many columns. */
static void expect_lines(unsigned short columns, const char *text, const char *wanted)
{
    struct winsize size = {.ws_col = columns, .ws_row = 24};
    char got[1024];
    int pty[2];
    cr_assert_eq(openpty(&pty[0], &pty[1], NULL, NULL, &size), 0);
    FILE *out = fdopen(pty[1], "w");
    ep_cli_line(out, "%s", text);
    fclose(out);
    size_t bytes = 0;
    /* at its end comes an error */
    for (ssize_t n; (n = read(pty[0], got + bytes, sizeof(got) - 1 - bytes)) > 0;) {
        bytes += (size_t)n;
    }
    close(pty[0]);
    got[bytes] = '\0';
    cr_expect_str_eq(got, wanted, "%s", got);
}

Test(output, a_terminal_gets_lines_that_fit)
{
    expect_lines(20, "short", "short\r\n");
    expect_lines(20, "node a is silent since 3 s", "node a is silent\r\n  since 3 s\r\n");
    expect_lines(24, "warning  node a is silent since 3 s",
                 "warning  node a is\r\n         silent since 3\r\n         s\r\n");
    expect_lines(10, "tcp://127.0.0.1:7420 refused",
                 "tcp://127.\r\n  0.0.1:74\r\n  20\r\n  refused\r\n");
    expect_lines(8, "a\xe6\xa8\xa1\xe5\x9e\x8b\xe6\xa8\xa1\xe5\x9e\x8b",
                 "a\xe6\xa8\xa1\xe5\x9e\x8b\xe6\xa8\xa1\r\n  \xe5\x9e\x8b\r\n");
}

Test(output, control_bytes_cannot_reach_the_terminal)
{
    ep_cli_table *table = ep_cli_table_create("A|B");
    ep_cli_table_cell(table, "x\033[31my\n");
    ep_cli_table_cell(table, "\xc3\xa4|"); /* one character wide */
    expect_all(table, "A               B\nx\\x1b[31my\\x0a  \xc3\xa4|\n");
}

Test(output, a_line_stays_one)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    ep_cli_line(out, "node %s: %d", "a\nb\xc2\x9b\xc3\xa4", 1);
    fclose(out);
    cr_assert_str_eq(text, "node a\\x0ab\\xc2\\x9b\xc3\xa4: 1\n");
    free(text);
}

Test(output, many_rows)
{
    ep_cli_table *table = ep_cli_table_create(">A");
    for (int i = 0; i < 5000; i++) {
        ep_cli_table_cell(table, "%d", i);
    }
    char *text = printed(table, 0, 0, SIZE_MAX);
    cr_assert_str_eq(text + strlen(text) - 5, "4999\n");
    free(text);
    ep_cli_table_destroy(table);
}

Test(output, a_full_file_is_noticed)
{
    FILE *full = fopen("/dev/full", "w");
    setvbuf(full, NULL, _IONBF, 0);
    ep_cli_table *table = ep_cli_table_create("A");
    cr_assert_not(ep_cli_table_print(table, full));
    cr_assert_not(ep_cli_json_print(json_object(), full));
    cr_assert_not(ep_cli_json_print(NULL, stdout));
    fclose(full);
}

Test(output, json_text_that_is_not_utf8)
{
    json_t *good = ep_cli_json_text("n\xc3\xa4me");
    json_t *bad = ep_cli_json_text("n\xffme");
    cr_assert_str_eq(json_string_value(good), "n\xc3\xa4me");
    cr_assert_str_eq(json_string_value(bad), "n\\xffme");
    json_decref(good);
    json_decref(bad);
}

Test(output, exit_codes_of_errors)
{
    cr_assert_eq(ep_cli_exit_of(EP_OK), 0);
    cr_assert_eq(ep_cli_exit_of(EP_ERR_NOT_FOUND), 1);
    cr_assert_eq(ep_cli_exit_of(EP_ERR_BAD_FILE), 1);
    cr_assert_eq(ep_cli_exit_of(EP_ERR_UNAUTHENTICATED), 1);
    cr_assert_eq(ep_cli_exit_of(EP_ERR_UNAVAILABLE), 3);
    cr_assert_eq(ep_cli_exit_of(EP_ERR_CONNECTION_LOST), 3);
    cr_assert_eq(ep_cli_exit_of(EP_ERR_DEADLINE_EXCEEDED), 4);
}
