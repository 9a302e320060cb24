/* SPDX-License-Identifier: Apache-2.0 */
#include "base/host.h"

#include <stdio.h>
#include <string.h>

void ep_host_boot_id(char out_name[EP_HOST_BYTES])
{
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (file == NULL || fgets(out_name, EP_HOST_BYTES, file) == NULL) {
        out_name[0] = 0;
    }
    if (file != NULL) {
        fclose(file);
    }
    out_name[strcspn(out_name, "\n")] = 0;
}
