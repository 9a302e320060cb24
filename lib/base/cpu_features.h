/* SPDX-License-Identifier: Apache-2.0 */
/* What this CPU and its operating system offer. Compiled without instruction set flags, so that asking cannot
 * fault. */
#ifndef EP_BASE_CPU_FEATURES_H
#define EP_BASE_CPU_FEATURES_H

#include <stdbool.h>

typedef struct ep_cpu_features {
    bool avx2_fma_f16c;
    bool avx512f;
} ep_cpu_features;

ep_cpu_features ep_cpu_features_read(void);

#endif
