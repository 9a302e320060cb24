/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <pthread.h>
#include <sched.h>

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

/* Bound to the first CPU that it may use. */
static void *count_when_bound(void *arg)
{
    cpu_set_t set;
    cpu_set_t one;
    int cpu = 0;
    cr_assert_eq(sched_getaffinity(0, sizeof(set), &set), 0);
    while (!CPU_ISSET(cpu, &set)) {
        cpu++;
    }
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    cr_assert_eq(sched_setaffinity(0, sizeof(one), &one), 0);
    *(uint32_t *)arg = ep_host_cpus();
    return NULL;
}

Test(host, its_cpus_are_counted_alike_by_every_thread)
{
    pthread_t bound;
    uint32_t counted = 0;
    cr_assert_eq(pthread_create(&bound, NULL, count_when_bound, &counted), 0);
    pthread_join(bound, NULL);
    cr_assert_eq(counted, ep_host_cpus());
}
