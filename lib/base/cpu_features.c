/* SPDX-License-Identifier: Apache-2.0 */
#include "base/cpu_features.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"

/* Each level includes all levels before it; those of the other architecture are never present. */
static const char *const names[] = {"portable", "neon",    "neon_dot",   "neon_bf16",
                                    "avx2",     "avx512f", "avx512vnni", "avx512bf16"};
#define LEVELS EP_ARRAY_COUNT(names)

/* That the CPU has a level; NULL for the first, which each CPU has. */
static bool *flag_of(ep_cpu_features *f, size_t level)
{
    bool *const flags[LEVELS] = {NULL,           &f->neon,          &f->arm_dot,
                                 &f->arm_bf16,   &f->avx2_fma_f16c, &f->avx512f,
                                 &f->avx512vnni, &f->avx512bf16};
    return flags[level];
}

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

static bool has_level(ep_cpu_features features, size_t level)
{
    return level == 0 || (level < LEVELS && *flag_of(&features, level));
}

/* The requested level; LEVELS: none, or an unknown one. */
static size_t level_wanted(void)
{
    const char *wanted = getenv(EP_CPU_FEATURES_VARIABLE);
    size_t level = 0;
    while (level < LEVELS && (wanted == NULL || strcmp(wanted, names[level]) != 0)) {
        level++;
    }
    return level;
}

ep_cpu_features ep_cpu_features_read(void)
{
    ep_cpu_features features = of_cpu();
    const size_t level = level_wanted();
    if (has_level(features, level)) {
        for (size_t above = level + 1; above < LEVELS; above++) {
            *flag_of(&features, above) = false;
        }
    }
    return features;
}

ep_err ep_cpu_features_check(ep_error *out_error)
{
    const char *wanted = getenv(EP_CPU_FEATURES_VARIABLE);
    const ep_cpu_features features = of_cpu();
    if (wanted == NULL || wanted[0] == '\0' || has_level(features, level_wanted())) {
        return EP_OK;
    }
    char allowed[64] = "";
    for (size_t level = 0; level < LEVELS; level++) {
        size_t used = strlen(allowed);
        if (has_level(features, level)) {
            snprintf(allowed + used, sizeof(allowed) - used, "%s%s", level == 0 ? "" : ", ",
                     names[level]);
        }
    }
    return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                        "%s is '%.40s', allowed on this CPU: %s", EP_CPU_FEATURES_VARIABLE, wanted,
                        allowed);
}
