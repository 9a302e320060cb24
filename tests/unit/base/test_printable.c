/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "base/printable.h"

static void expect(const char *from, const char *wanted)
{
    char text[EP_TEXT_ESCAPED_BYTES(32)];
    cr_assert_leq(strlen(from), 32u);
    cr_expect_str_eq(ep_text_escape(from, text, sizeof(text)), wanted, "'%s'", text);
    cr_expect_eq(ep_text_printable_bytes(text, true), strlen(text));
    cr_expect_eq(ep_text_printable_bytes(from, true) == strlen(from), strcmp(from, wanted) == 0);
}

Test(printable, what_steers_a_terminal_or_is_no_utf8_is_escaped)
{
    expect("", "");
    expect("node-1 größe 日本 🎉", "node-1 größe 日本 🎉");
    expect("\x1b[31mred\x7f\n\r\t", "\\x1b[31mred\\x7f\\x0a\\x0d\\x09");
    /* C1 */
    expect("a\xc2\x9b"
           "31m\xc2\x80",
           "a\\xc2\\x9b31m\\xc2\\x80");
    /* alone it is no UTF-8 */
    expect("\x9b", "\\x9b");
    /* never, and longer than need be */
    expect("\xff\xfe\xc0\xaf\xe0\x80\x80", "\\xff\\xfe\\xc0\\xaf\\xe0\\x80\\x80");
    /* a surrogate, beyond the last character */
    expect("\xed\xa0\x80\xf4\x90\x80\x80", "\\xed\\xa0\\x80\\xf4\\x90\\x80\\x80");
    /* its end is missing */
    expect("cut \xe6\x97", "cut \\xe6\\x97");
    /* direction, line */
    expect("a\xe2\x80\xae"
           "b\xe2\x80\xa8\xd8\x9c",
           "a\\xe2\\x80\\xaeb\\xe2\\x80\\xa8\\xd8\\x9c");
}

Test(printable, what_does_not_fit_is_left_out_whole)
{
    char text[16];
    cr_expect_str_eq(ep_text_escape("ab日", text, 5), "ab");
    cr_expect_str_eq(ep_text_escape("ab日", text, 6), "ab日");
    cr_expect_str_eq(ep_text_escape("ab\nc", text, 6), "ab");
    cr_expect_str_eq(ep_text_escape("ab\nc", text, 7), "ab\\x0a");
    cr_expect_str_eq(ep_text_escape("a", text, 1), "");
}

/* Each byte, and each two: what comes out is printable, and what was is as it was. */
Test(printable, whatever_goes_in)
{
    for (unsigned a = 1; a < 256; a++) {
        for (unsigned b = 0; b < 256; b++) {
            const char from[] = {(char)a, (char)b, 0};
            char text[EP_TEXT_ESCAPED_BYTES(2)];
            ep_text_escape(from, text, sizeof(text));
            cr_assert_eq(ep_text_printable_bytes(text, true), strlen(text), "%02x %02x", a, b);
            cr_assert(strcmp(from, text) == 0 || from[ep_text_printable_bytes(from, true)] != 0,
                      "%02x %02x", a, b);
        }
    }
}

Test(printable, names_have_no_blanks)
{
    static const char *const blanks[] = {" ",
                                         "\xc2\xa0",
                                         "\xc2\xad",
                                         "\xe1\x9a\x80",
                                         "\xe2\x80\x83",
                                         "\xe2\x80\x8b",
                                         "\xe2\x80\xaf",
                                         "\xe2\x81\x9f",
                                         "\xe2\x81\xa0",
                                         "\xe3\x80\x80",
                                         "\xef\xbb\xbf"};
    cr_expect_eq(ep_text_printable_bytes("node-1", false), 6u);
    for (size_t i = 0; i < sizeof(blanks) / sizeof(blanks[0]); i++) {
        char name[16];
        snprintf(name, sizeof(name), "node%s1", blanks[i]);
        cr_expect_eq(ep_text_printable_bytes(name, false), 4u, "blank %zu", i);
        cr_expect_eq(ep_text_printable_bytes(name, true), strlen(name), "blank %zu", i);
    }
    cr_expect_eq(ep_text_printable_bytes("\x1bnode", true), 0u);
}
