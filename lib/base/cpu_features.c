/* SPDX-License-Identifier: Apache-2.0 */
#include "base/cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#if defined(__x86_64__)

/* __builtin_cpu_supports also asks whether the system saves the wide registers; F16C lies in registers AVX2
 * covers. */
ep_cpu_features ep_cpu_features_read(void)
{
    unsigned eax = 0;
    unsigned ebx = 0;
    unsigned ecx = 0;
    unsigned edx = 0;
    ep_cpu_features features = {0};
    __builtin_cpu_init();
    bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
    features.avx2_fma_f16c = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
    features.avx512f = __builtin_cpu_supports("avx512f");
    return features;
}
#elif defined(__aarch64__)
ep_cpu_features ep_cpu_features_read(void)
{
    const unsigned long basic = getauxval(AT_HWCAP);
    const unsigned long more = getauxval(AT_HWCAP2);
    return (ep_cpu_features){.neon = (basic & HWCAP_ASIMD) != 0,
                             .arm_dot = (basic & HWCAP_ASIMDDP) != 0,
                             .arm_bf16 = (more & HWCAP2_BF16) != 0};
}
#else
ep_cpu_features ep_cpu_features_read(void)
{
    return (ep_cpu_features){0};
}
#endif
