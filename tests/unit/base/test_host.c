/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>

#include "base/host.h"

#define DIGITS "0123456789abcdef0123456789abcdef"
#define DASHED "01234567-89ab-cdef-0123-456789abcdef"

static char name[EP_HOST_BYTES];

Test(host, the_kernel_is_believed_first)
{
    ep_host_choose_id("some-id\n", DIGITS, name);
    cr_assert_str_eq(name, "some-id");
}

/* As the kernel writes it: processes in and outside of a unit are of one host. */
Test(host, the_managers_word_is_written_as_the_kernels)
{
    ep_host_choose_id("", DIGITS, name);
    cr_assert_str_eq(name, DASHED);
    ep_host_choose_id("\n", DIGITS, name);
    cr_assert_str_eq(name, DASHED);
}

Test(host, anything_else_is_no_host)
{
    ep_host_choose_id("", "", name);
    cr_assert_str_eq(name, "");
    ep_host_choose_id("", DIGITS "0", name);
    cr_assert_str_eq(name, "");
    ep_host_choose_id("", "0123456789ABCDEF0123456789abcdef", name);
    cr_assert_str_eq(name, "");
    ep_host_choose_id("", "%b", name);
    cr_assert_str_eq(name, "");
}

Test(host, there_is_one_here)
{
    ep_host_boot_id(name);
    cr_assert_eq(strlen(name), sizeof(DASHED) - 1, "%s", name);
}
