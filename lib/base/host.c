/* SPDX-License-Identifier: Apache-2.0 */
#include "base/host.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ID_DIGITS 32

void ep_host_choose_id(const char *kernels, const char *managers, char out_name[EP_HOST_BYTES])
{
    size_t bytes = strcspn(kernels, "\n");
    if (bytes > 0 && bytes < EP_HOST_BYTES) {
        snprintf(out_name, EP_HOST_BYTES, "%.*s", (int)bytes, kernels);
    } else if (strlen(managers) == ID_DIGITS && strspn(managers, "0123456789abcdef") == ID_DIGITS) {
        snprintf(out_name, EP_HOST_BYTES, "%.8s-%.4s-%.4s-%.4s-%.12s", managers, managers + 8,
                 managers + 12, managers + 16, managers + 20);
    } else {
        out_name[0] = 0;
    }
}

void ep_host_boot_id(char out_name[EP_HOST_BYTES])
{
    char kernels[EP_HOST_BYTES] = "";
    const char *managers = getenv(EP_BOOT_ID_VARIABLE);
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (file != NULL) {
        if (fgets(kernels, sizeof(kernels), file) == NULL) {
            kernels[0] = 0;
        }
        fclose(file);
    }
    ep_host_choose_id(kernels, managers != NULL ? managers : "", out_name);
}

uint32_t ep_host_cpus(void)
{
    cpu_set_t set;
    long count = sched_getaffinity(getpid(), sizeof(set), &set) == 0
                     ? CPU_COUNT(&set)
                     : sysconf(_SC_NPROCESSORS_ONLN);
    return count < 1 ? 1 : (uint32_t)count;
}
