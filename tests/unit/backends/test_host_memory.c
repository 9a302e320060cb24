/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of weights and scratch: alignment, and the advice to use huge pages as the kernel has
 * noted it. */
#include <criterion/criterion.h>
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "backends/host_common.h"
#include "base/large_memory.h"

/* Whether all of [begin, end) lies in mappings that are advised to use huge pages. */
static bool is_advised(uintptr_t begin, uintptr_t end)
{
    char line[512];
    uintptr_t from = 0, to = 0;
    FILE *smaps = fopen("/proc/self/smaps", "re");
    cr_assert_not_null(smaps);
    while (begin < end && fgets(line, sizeof(line), smaps) != NULL) {
        uintptr_t a, b;
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " ", &a, &b) == 2) {
            from = a;
            to = b;
        } else if (strncmp(line, "VmFlags:", 8) == 0 && from <= begin && begin < to &&
                   strstr(line, " hg") != NULL) {
            begin = to;
        }
    }
    fclose(smaps);
    return begin >= end;
}

Test(host_memory, large_blocks_ask_for_huge_pages)
{
    const size_t bytes = 5 * EP_LARGE_BYTES + 12345;
    uint8_t *block = ep_large_alloc(bytes, EP_HOST_ALIGN);
    cr_assert_not_null(block);
    cr_expect_eq((uintptr_t)block % EP_LARGE_BYTES, 0);
    /* else the kernel has none */
    if (access("/sys/kernel/mm/transparent_hugepage/enabled", R_OK) == 0) {
        cr_expect(is_advised((uintptr_t)block, (uintptr_t)block + bytes));
    }
    memset(block, 1, bytes);
    ep_large_free(block, bytes);
}

Test(host_memory, small_blocks_are_aligned)
{
    for (size_t bytes = 1; bytes < EP_LARGE_BYTES; bytes = 3 * bytes + 1) {
        void *block = ep_large_alloc(bytes, EP_HOST_ALIGN);
        cr_assert_not_null(block);
        cr_expect_eq((uintptr_t)block % EP_HOST_ALIGN, 0);
        ep_large_free(block, bytes);
    }
}
