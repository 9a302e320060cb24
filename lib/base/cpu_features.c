/* SPDX-License-Identifier: Apache-2.0 */
#include "base/cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>

/* __builtin_cpu_supports also asks whether the system saves the wide registers; F16C lies in registers AVX2
 * covers. */
ep_cpu_features ep_cpu_features_read(void)
{
    unsigned eax = 0;
    unsigned ebx = 0;
    unsigned ecx = 0;
    unsigned edx = 0;
    ep_cpu_features features = {false, false};
    __builtin_cpu_init();
    bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
    features.avx2_fma_f16c = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
    features.avx512f = __builtin_cpu_supports("avx512f");
    return features;
}
#else
ep_cpu_features ep_cpu_features_read(void)
{
    return (ep_cpu_features){false, false};
}
#endif
