/* SPDX-License-Identifier: Apache-2.0 */
#include "ref_family.h"

#include <stdlib.h>
#include <string.h>
#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

static const char *const names[REF_FAMILIES + 1] = {"portable", "bf16dp", "bf16odd", "w4a8",
                                                    "auto"};

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

/* CPU levels of EXPERTD_CPU_FEATURES, in ascending order, that change the choice of auto. */
#if defined(__x86_64__)
static bool has_avx2(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static bool has_vnni(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}

static bool has_bf16(void)
{
    return has_vnni() && __builtin_cpu_supports("avx512bf16");
}

static enum ref_family family_below(const char *limit)
{
    const bool is_cut = limit != NULL && strcmp(limit, "avx512bf16") != 0;
    const bool is_less = is_cut && strcmp(limit, "avx512vnni") != 0;
    const bool is_avx2 =
        limit != NULL ? strcmp(limit, "avx2") == 0 : !__builtin_cpu_supports("avx512f");
    return has_avx2() && is_avx2    ? REF_AUTO_VNNI
           : is_less || !has_vnni() ? REF_PORTABLE
           : is_cut || !has_bf16()  ? REF_AUTO_VNNI
                                    : REF_W4A8; /* formats that w4a8 lacks use bf16dp */
}
#elif defined(__aarch64__)
static enum ref_family family_below(const char *limit)
{
    const bool is_cut = limit != NULL && strcmp(limit, "neon_bf16") != 0;
    const bool has_level =
        (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0 && (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0;
    return has_level && !is_cut ? REF_BF16ODD : REF_PORTABLE;
}
#else
static enum ref_family family_below(const char *limit)
{
    (void)limit;
    return REF_PORTABLE;
}
#endif

enum ref_family ref_family_default(void)
{
    const char *numerics = getenv("EXPERTD_NUMERICS");
    enum ref_family family;
    if (numerics != NULL && strcmp(numerics, "auto") != 0 && ref_family_parse(numerics, &family)) {
        return family;
    }
    const char *limit = getenv("EXPERTD_CPU_FEATURES");
    return family_below(limit != NULL && limit[0] == '\0' ? NULL : limit);
}
