/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <string.h>

#include "base/printable.h"

static void expect(const char *from, const char *wanted)
{
    char text[64];
    strcpy(text, from);
    ep_text_make_printable(text, '?');
    cr_expect_str_eq(text, wanted, "'%s'", text);
    cr_expect_eq(ep_text_printable_bytes(text, true), strlen(text));
    cr_expect_eq(ep_text_printable_bytes(from, true) == strlen(from), strcmp(from, wanted) == 0);
}

Test(printable, what_steers_a_terminal_or_is_no_utf8_is_replaced)
{
    expect("", "");
    expect("node-1 größe 日本 🎉", "node-1 größe 日本 🎉");
    expect("\x1b[31mred\x7f\n\r\t", "?[31mred????");
    expect("a\xc2\x9b" "31m\xc2\x80", "a??31m??");              /* C1 */
    expect("\x9b", "?");                                         /* alone it is no UTF-8 */
    expect("\xff\xfe\xc0\xaf\xe0\x80\x80", "???????");           /* never, and longer than need be */
    expect("\xed\xa0\x80\xf4\x90\x80\x80", "???????");           /* a surrogate, beyond the last character */
    expect("cut \xe6\x97", "cut ??");                            /* its end is missing */
    expect("a\xe2\x80\xae" "b\xe2\x80\xa8\xe2\x81\xa6", "a???b??????"); /* direction, line */
}

Test(printable, names_have_no_blanks)
{
    cr_expect_eq(ep_text_printable_bytes("node-1", false), 6u);
    cr_expect_eq(ep_text_printable_bytes("node 1", false), 4u);
    cr_expect_eq(ep_text_printable_bytes("node\xc2\xa0" "1", false), 4u);
    cr_expect_eq(ep_text_printable_bytes("node\xe3\x80\x80" "1", false), 4u);
    cr_expect_eq(ep_text_printable_bytes("\x1bnode", true), 0u);
}
