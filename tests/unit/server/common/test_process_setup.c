/* SPDX-License-Identifier: Apache-2.0 */
/* How much memory a process may have, by the files of control groups of both versions. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "common/process_setup.h"
#include "support/process.h"

static char root[EP_TEST_PATH_BYTES];

static void setup(void)
{
    cr_assert(ep_test_dir_create(root));
}

static void teardown(void)
{
    ep_test_dir_remove(root);
}

TestSuite(process_setup, .init = setup, .fini = teardown);

static void write_file(const char *dir, const char *name, const char *text)
{
    char path[2 * EP_TEST_PATH_BYTES], command[2 * EP_TEST_PATH_BYTES + 16];
    snprintf(command, sizeof(command), "mkdir -p %s/%s", root, dir);
    cr_assert_eq(system(command), 0);
    snprintf(path, sizeof(path), "%s/%s/%s", root, dir, name);
    cr_assert(ep_test_write_file(path, text, 0600));
}

Test(process_setup, without_limits_it_is_the_hosts_memory)
{
    const uint64_t host = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    cr_expect_eq(ep_process_memory_limit(root), host, "there are no files");
    write_file("proc/self", "cgroup", "0::/a/b\n");
    write_file("sys/fs/cgroup/a/b", "memory.max", "max\n");
    cr_expect_eq(ep_process_memory_limit(root), host);
}

Test(process_setup, the_least_limit_of_all_groups_around_counts)
{
    write_file("proc/self", "cgroup", "no group\n0::/a/b/c\n");
    write_file("sys/fs/cgroup/a/b/c", "memory.max", "300000\n");
    cr_expect_eq(ep_process_memory_limit(root), 300000);
    write_file("sys/fs/cgroup/a", "memory.max", "200000\n");
    write_file("sys/fs/cgroup/a/b", "memory.max", "max\n");
    cr_expect_eq(ep_process_memory_limit(root), 200000);
    /* in a container its own group is all it sees */
    write_file("sys/fs/cgroup", "memory.max", "100000\n");
    cr_expect_eq(ep_process_memory_limit(root), 100000);
}

Test(process_setup, groups_of_version_1_count_too)
{
    write_file("proc/self", "cgroup", "5:cpu,cpuacct:/x\n4:memory:/m/n\n0::/\n");
    write_file("sys/fs/cgroup/memory/m/n", "memory.limit_in_bytes", "9223372036854771712\n");
    write_file("sys/fs/cgroup/memory/m", "memory.limit_in_bytes", "70000\n");
    write_file("sys/fs/cgroup/memory/x", "memory.limit_in_bytes", "10\n");
    cr_expect_eq(ep_process_memory_limit(root), 70000);
}
