/* SPDX-License-Identifier: Apache-2.0 */
#include "contract/backend/backend_variants.h"

#include <stdio.h>

#include "backends/cpu/cpu_backend.h"
#include "support/slow_backend.h"

enum { REFERENCE, SLOW, FIRST_CPU };

/* Number index among those of family `portable`; NULL past the end. */
static const ep_ffn_kernel *kernel_at(size_t index)
{
    const ep_ffn_kernel *kernel;
    for (size_t i = 0; (kernel = ep_ffn_kernel_at(i)) != NULL; i++) {
        if (kernel->family == EP_FFN_FAMILY_PORTABLE && index-- == 0) {
            return kernel;
        }
    }
    return NULL;
}

size_t backend_variants_count(void)
{
    size_t count = FIRST_CPU;
    while (kernel_at(count - FIRST_CPU) != NULL) {
        count++;
    }
    return count;
}

const char *backend_variant_name(size_t index)
{
    static _Thread_local char name[32];
    if (index == REFERENCE) {
        return "reference";
    }
    if (index == SLOW) {
        return "slow";
    }
    snprintf(name, sizeof(name), "cpu/%s", kernel_at(index - FIRST_CPU)->name);
    return name;
}

ep_err backend_variant_try_open(size_t index, const ep_backend_config *config,
                                ep_backend **out_backend, ep_error *out_error)
{
    if (index == REFERENCE) {
        return ep_backend_by_name("reference")->open(config, out_backend, out_error);
    }
    if (index == SLOW) {
        ep_slow_backend_reset(42);
        return ep_slow_backend_ops.open(config, out_backend, out_error);
    }
    return ep_cpu_backend_open_with(kernel_at(index - FIRST_CPU), config, out_backend, out_error);
}
