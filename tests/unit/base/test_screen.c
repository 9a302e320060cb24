/* SPDX-License-Identifier: Apache-2.0 */
/* Widths of texts, cutting them, and the size of a terminal. */
#include <criterion/criterion.h>

#include <pty.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/screen.h"

Test(screen, columns_are_those_on_a_terminal)
{
    static const struct {
        const char *text;
        size_t columns;
    } cases[] = {
        {"", 0},
        {"node-a", 6},
        {"n\xc3\xa4", 2},
        {"e\xcc\x81", 1} /* combining */,
        {"\xe6\xa8\xa1\xe5\x9e\x8b", 4} /* wide */,
        {"a\xff", 2},
    };
    for (size_t i = 0; i < EP_ARRAY_COUNT(cases); i++) {
        cr_expect_eq(ep_text_columns(cases[i].text), cases[i].columns, "'%s': %zu", cases[i].text,
                     ep_text_columns(cases[i].text));
    }
    cr_expect_eq(ep_text_fit("n\xc3\xa4mes", 2), 3);
    cr_expect_eq(ep_text_fit("\xe6\xa8\xa1\xe5\x9e\x8b", 3), 3,
                 "a wide character is taken whole or not");
}

Test(screen, a_wide_text_loses_its_middle)
{
    static const struct {
        const char *text;
        size_t columns;
        const char *cut;
    } cases[] = {
        {"expertd-0.expertd.default", 25, "expertd-0.expertd.default"},
        {"expertd-0.expertd.default", 24, "expertd-0.e..rtd.default"},
        {"expertd-0.expertd.default", 9, "expe..ult"},
        {"expertd-0.expertd.default", 5, "ex..t"},
        {"expertd-0.expertd.default", 4, "expe"},
        {"expertd-0.expertd.default", 0, ""},
        {"\xe6\xa8\xa1\xe5\x9e\x8b\xe6\xa8\xa1\xe5\x9e\x8b", 7, "\xe6\xa8\xa1..\xe5\x9e\x8b"},
        {"\xe6\xa8\xa1\xe5\x9e\x8b\xe6\xa8\xa1\xe5\x9e\x8b", 5, "\xe6\xa8\xa1.."},
    };
    for (size_t i = 0; i < EP_ARRAY_COUNT(cases); i++) {
        char out[64];
        ep_text_cut(cases[i].text, cases[i].columns, out, sizeof(out));
        cr_expect_str_eq(out, cases[i].cut, "%zu columns: '%s'", cases[i].columns, out);
        cr_expect_leq(ep_text_columns(out), cases[i].columns);
    }
}

Test(screen, the_size_is_the_terminals)
{
    struct winsize size = {.ws_col = 40, .ws_row = 12};
    int fds[2];
    int pty[2];
    cr_assert_eq(pipe(fds), 0);
    cr_assert_eq(ep_screen_of(fds[1]).columns, 0, "a pipe has no width");
    cr_assert_eq(ep_screen_of(-1).columns, 0);
    cr_assert_eq(openpty(&pty[0], &pty[1], NULL, NULL, &size), 0);
    cr_assert_eq(ep_screen_of(pty[1]).columns, 40);
    cr_assert_eq(ep_screen_of(pty[1]).rows, 12);
    cr_assert_eq(openpty(&pty[0], &pty[1], NULL, NULL, NULL), 0);
    cr_assert_eq(ep_screen_of(pty[1]).columns, 80, "one that does not know");
    cr_assert_eq(ep_screen_of(pty[1]).rows, 24);
}
