/* SPDX-License-Identifier: Apache-2.0 */
#include "unit/backends/made_up_machine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "backends/cpu/cpu_topology.h"
#include "support/process.h"

static char root[EP_TEST_PATH_BYTES];

/* With the directories it is in. */
static void write_below(const char *file, const char *text)
{
    char path[2 * EP_TEST_PATH_BYTES];
    snprintf(path, sizeof(path), "%s/%s", root, file);
    for (char *slash = path + strlen(root) + 1; (slash = strchr(slash, '/')) != NULL; slash++) {
        *slash = 0;
        (void)mkdir(path, 0700);
        *slash = '/';
    }
    if (!ep_test_write_file(path, text, 0600)) {
        abort();
    }
}

void made_up_machine(const char *cpus, const char *memories, const char *nodes)
{
    char text[256], file[128], list[64];
    unsigned node;
    int length;
    made_up_machine_remove();
    if (!ep_test_dir_create(root)) {
        abort();
    }
    setenv(EP_CPU_TOPOLOGY_ROOT_VARIABLE, root, 1);
    snprintf(text, sizeof(text),
             "Name:\tmade-up\nCpus_allowed:\tff\nCpus_allowed_list:\t%s\nMems_allowed_list:\t%s\n",
             cpus, memories);
    write_below("proc/thread-self/status", text);
    write_below("sys/devices/system/cpu/online", "0-511\n");
    for (; sscanf(nodes, " %u:%63s%n", &node, list, &length) == 2; nodes += length) {
        snprintf(file, sizeof(file), "sys/devices/system/node/node%u/cpulist", node);
        snprintf(text, sizeof(text), "%s\n", list);
        write_below(file, text);
    }
}

void made_up_machine_remove(void)
{
    unsetenv(EP_CPU_TOPOLOGY_ROOT_VARIABLE);
    if (root[0] != 0) {
        ep_test_dir_remove(root);
        root[0] = 0;
    }
}
