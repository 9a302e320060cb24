/* SPDX-License-Identifier: Apache-2.0 */
/* What this CPU and its operating system offer. Compiled without instruction set flags, so that asking cannot
 * fault. */
#ifndef EP_BASE_CPU_FEATURES_H
#define EP_BASE_CPU_FEATURES_H

#include <stdbool.h>

typedef struct ep_cpu_features {
    bool avx2_fma_f16c;
    bool avx512f;
    bool neon;
    bool arm_dot;  /* SDOT: sums of four int8 products */
    bool arm_bf16; /* BFDOT, BFMMLA */
} ep_cpu_features;

ep_cpu_features ep_cpu_features_read(void);

/* Between two looks of a loop that waits for another CPU. */
static inline void ep_cpu_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
