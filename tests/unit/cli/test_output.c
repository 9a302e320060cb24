/* SPDX-License-Identifier: Apache-2.0 */
/* Tables and JSON, byte for byte. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "cli/exit_code.h"
#include "cli/output.h"

static char *printed_table(const ep_cli_table *table)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    cr_assert(ep_cli_table_print(table, out));
    fclose(out);
    return text;
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
    char *text = printed_table(table);
    cr_assert_str_eq(text, expected);
    free(text);
    ep_cli_table_destroy(table);
}

Test(output, as_many_columns_as_allowed_keep_their_places)
{
    char headings[2 * EP_CLI_COLUMNS_MAX], expected[8 * EP_CLI_COLUMNS_MAX];
    size_t at = 0;
    for (int i = 0; i < EP_CLI_COLUMNS_MAX; i++) {
        at += (size_t)snprintf(headings + at, sizeof(headings) - at, "%s%c", i > 0 ? "|" : "", 'A' + i);
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
    char *text = printed_table(table);
    cr_assert_str_eq(text, expected);
    free(text);
    ep_cli_table_destroy(table);
}

Test(output, an_empty_table_has_its_headings)
{
    ep_cli_table *table = ep_cli_table_create("A|>B");
    char *text = printed_table(table);
    cr_assert_str_eq(text, "A  B\n");
    free(text);
    ep_cli_table_destroy(table);
}

Test(output, control_bytes_cannot_reach_the_terminal)
{
    ep_cli_table *table = ep_cli_table_create("A|B");
    ep_cli_table_cell(table, "x\033[31my\n");
    ep_cli_table_cell(table, "\xc3\xa4|"); /* one character wide */
    char *text = printed_table(table);
    cr_assert_str_eq(text, "A               B\nx\\x1b[31my\\x0a  \xc3\xa4|\n");
    free(text);
    ep_cli_table_destroy(table);
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
    char *text = printed_table(table);
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
    ep_cli_table_destroy(table);
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
