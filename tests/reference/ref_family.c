/* SPDX-License-Identifier: Apache-2.0 */
#include "ref_family.h"

#include <stdlib.h>
#include <string.h>
#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

static const char *const names[REF_FAMILIES] = {"portable", "bf16dp", "bf16odd", "w4a8"};

const char *ref_family_name(enum ref_family family)
{
    return names[family];
}

bool ref_family_has_pairs(enum ref_family family)
{
    return family == REF_BF16DP || family == REF_BF16ODD;
}

bool ref_family_parse(const char *text, enum ref_family *out_family)
{
    if (strcmp(text, "auto") == 0) {
        *out_family = ref_family_default();
        return true;
    }
    for (int i = 0; i < REF_FAMILIES; i++) {
        size_t length = strlen(names[i]);
        if (strncmp(text, names[i], length) == 0 && (text[length] == '\0' || text[length] == '/')) {
            *out_family = (enum ref_family)i;
            return true;
        }
    }
    return false;
}

/* The CPU has the family's instructions. */
#if defined(__x86_64__)
static const char level[] = "avx512bf16";
static const enum ref_family family_of_level = REF_BF16DP;

static bool has_level(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bf16");
}
#elif defined(__aarch64__)
static const char level[] = "neon_bf16";
static const enum ref_family family_of_level = REF_BF16ODD;

static bool has_level(void)
{
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0 && (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0;
}
#else
static const char level[] = "";
static const enum ref_family family_of_level = REF_PORTABLE;

static bool has_level(void)
{
    return false;
}
#endif

enum ref_family ref_family_default(void)
{
    const char *numerics = getenv("EXPERTD_NUMERICS");
    const char *limit = getenv("EXPERTD_CPU_FEATURES");
    enum ref_family family;
    if (numerics != NULL && strcmp(numerics, "auto") != 0 && ref_family_parse(numerics, &family)) {
        return family;
    }
    return has_level() && (limit == NULL || strcmp(limit, level) == 0) ? family_of_level
                                                                       : REF_PORTABLE;
}
