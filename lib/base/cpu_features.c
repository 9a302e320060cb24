/* SPDX-License-Identifier: Apache-2.0 */
#include "base/cpu_features.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Each level includes all levels before it; those of the other architecture are never present. */
enum { PORTABLE, NEON, NEON_DOT, NEON_BF16, AVX2, AVX512F, AVX512VNNI, AVX512BF16, LEVELS };

static const char *const level_names[LEVELS] = {"portable", "neon",    "neon_dot",   "neon_bf16",
                                                "avx2",     "avx512f", "avx512vnni", "avx512bf16"};

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#if defined(__x86_64__)

/* __builtin_cpu_supports also checks that the system saves the wide registers. F16C uses registers
 * that AVX2 covers. */
static ep_cpu_features of_cpu(void)
{
    unsigned eax = 0;
    unsigned ebx = 0;
    unsigned ecx = 0;
    unsigned edx = 0;
    ep_cpu_features features = {0};
    __builtin_cpu_init();
    bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
    features.avx2_fma_f16c =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
    features.avx512f = features.avx2_fma_f16c && __builtin_cpu_supports("avx512f");
    bool wide = features.avx512f && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    features.avx512vnni = wide && __builtin_cpu_supports("avx512vnni");
    /* every CPU with it has both */
    features.avx512bf16 = features.avx512vnni && __builtin_cpu_supports("avx512bf16");
    return features;
}
#elif defined(__aarch64__)
static ep_cpu_features of_cpu(void)
{
    const unsigned long basic = getauxval(AT_HWCAP);
    const unsigned long more = getauxval(AT_HWCAP2);
    ep_cpu_features features = {.neon = (basic & HWCAP_ASIMD) != 0};
    features.arm_dot = features.neon && (basic & HWCAP_ASIMDDP) != 0;
    features.arm_bf16 = features.arm_dot && (more & HWCAP2_BF16) != 0;
    return features;
}
#else
static ep_cpu_features of_cpu(void)
{
    return (ep_cpu_features){0};
}
#endif

static bool has_level(const ep_cpu_features *features, int level)
{
    switch (level) {
    case PORTABLE:
        return true;
    case NEON:
        return features->neon;
    case NEON_DOT:
        return features->arm_dot;
    case NEON_BF16:
        return features->arm_bf16;
    case AVX2:
        return features->avx2_fma_f16c;
    case AVX512F:
        return features->avx512f;
    case AVX512VNNI:
        return features->avx512vnni;
    case AVX512BF16:
        return features->avx512bf16;
    default:
        return false;
    }
}

/* The requested level; LEVELS: none, or an unknown one. */
static int level_wanted(void)
{
    const char *wanted = getenv(EP_CPU_FEATURES_VARIABLE);
    int level = 0;
    while (level < LEVELS && (wanted == NULL || strcmp(wanted, level_names[level]) != 0)) {
        level++;
    }
    return level;
}

ep_cpu_features ep_cpu_features_read(void)
{
    ep_cpu_features features = of_cpu();
    const int level = level_wanted();
    if (level < LEVELS && has_level(&features, level)) {
        features.neon = features.neon && level >= NEON;
        features.arm_dot = features.arm_dot && level >= NEON_DOT;
        features.arm_bf16 = features.arm_bf16 && level >= NEON_BF16;
        features.avx2_fma_f16c = features.avx2_fma_f16c && level >= AVX2;
        features.avx512f = features.avx512f && level >= AVX512F;
        features.avx512bf16 = features.avx512bf16 && level >= AVX512BF16;
        features.avx512vnni = features.avx512vnni && level >= AVX512VNNI;
    }
    return features;
}

ep_err ep_cpu_features_check(ep_error *out_error)
{
    const char *wanted = getenv(EP_CPU_FEATURES_VARIABLE);
    const ep_cpu_features features = of_cpu();
    if (wanted == NULL || wanted[0] == '\0' || has_level(&features, level_wanted())) {
        return EP_OK;
    }
    char allowed[64] = "";
    for (int level = 0; level < LEVELS; level++) {
        size_t used = strlen(allowed);
        if (has_level(&features, level)) {
            snprintf(allowed + used, sizeof(allowed) - used, "%s%s", level == 0 ? "" : ", ",
                     level_names[level]);
        }
    }
    return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                        "%s is '%.40s', allowed on this CPU: %s", EP_CPU_FEATURES_VARIABLE, wanted,
                        allowed);
}
