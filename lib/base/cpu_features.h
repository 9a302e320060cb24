/* SPDX-License-Identifier: Apache-2.0 */
/* What this CPU and its operating system support. Compiled without instruction set flags, so that
 * asking cannot fault. */
#ifndef EP_BASE_CPU_FEATURES_H
#define EP_BASE_CPU_FEATURES_H

#include <stdbool.h>

#include "base/error.h"

/* Names the highest level that code may use, for tests and for mixed hosts. */
#define EP_CPU_FEATURES_VARIABLE "EXPERTD_CPU_FEATURES"

typedef struct ep_cpu_features {
    bool avx2_fma_f16c; /* level avx2 */
    bool avx512f;       /* level avx512f */
    bool avx512vnni;    /* level avx512vnni: with BW, DQ and VL, and all above */
    bool avx512bf16;    /* level avx512bf16: with all above */
    bool neon;          /* level neon */
    bool arm_dot;       /* level neon_dot. SDOT: sums of four int8 products */
    bool arm_bf16;      /* level neon_bf16, with arm_dot. BFDOT, BFMMLA */
} ep_cpu_features;

/* What code may use: what the CPU supports, limited to the level that EP_CPU_FEATURES_VARIABLE
 * names. Level portable: nothing. A value that ep_cpu_features_check refuses counts as unset. */
ep_cpu_features ep_cpu_features_read(void);

/* EP_OK, or INVALID_ARGUMENT when EP_CPU_FEATURES_VARIABLE names a level that is unknown or that
 * this CPU lacks. */
ep_err ep_cpu_features_check(ep_error *out_error);

/* For loops that poll for another CPU, between two polls. */
static inline void ep_cpu_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
