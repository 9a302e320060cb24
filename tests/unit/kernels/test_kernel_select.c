/* SPDX-License-Identifier: Apache-2.0 */
/* Which kernels are offered. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cpu_features.h"
#include "kernels/ffn_kernel.h"

Test(kernel_select, best_is_first_and_the_generic_one_last)
{
    const ep_ffn_kernel *kernel;
    const ep_ffn_kernel *last = NULL;
    for (size_t n = 0; (kernel = ep_ffn_kernel_at(n)) != NULL; n++) {
        last = kernel;
    }
    cr_assert_not_null(last);
    cr_assert_str_eq(last->name, "generic");
    for (unsigned family = 0; family < EP_FFN_FAMILIES; family++) {
        size_t n = 0;
        while ((unsigned)ep_ffn_kernel_at(n)->family != family) {
            n++;
        }
        cr_assert_eq(ep_ffn_kernel_of((ep_ffn_family)family), ep_ffn_kernel_at(n));
    }
}

/* A level that this CPU has is the best it may use; x86's levels are named as their kernels. */
Test(kernel_select, the_variable_names_the_best_kernel_of_portable)
{
    const char *level = getenv(EP_CPU_FEATURES_VARIABLE);
    const char *name = ep_ffn_kernel_of(EP_FFN_FAMILY_PORTABLE)->name;
    ep_error error;
    cr_assert_eq(ep_cpu_features_check(&error), EP_OK, "%s", error.text);
    if (level != NULL && strcmp(level, "portable") == 0) {
        cr_assert_str_eq(name, "generic");
    } else if (level != NULL && strncmp(level, "avx", 3) == 0 && strcmp(level, "avx512bf16") != 0) {
        cr_assert_str_eq(name, level);
    }
}

/* EP_TEST_KERNELS: who emulates a processor knows what it must find there. */
Test(kernel_select, a_known_processor_offers_what_it_can)
{
    const char *want = getenv("EP_TEST_KERNELS");
    char got[256] = "";
    const ep_ffn_kernel *kernel;
    for (size_t n = 0; (kernel = ep_ffn_kernel_at(n)) != NULL; n++) {
        size_t used = strlen(got);
        snprintf(got + used, sizeof(got) - used, "%s%s", n == 0 ? "" : " ", kernel->name);
    }
    cr_assert(want == NULL || strcmp(got, want) == 0, "offered: %s, expected: %s", got, want);
}

#if defined(__x86_64__)
/* What auto takes, said once more. wide: where int8 inputs are not allowed. */
static ep_ffn_family expected_family(const char *level, ep_weight_format format, bool wide)
{
    const bool has_vnni = strcmp(level, "avx512vnni") == 0;
    const bool ends_at_avx2 = strcmp(level, "avx2") == 0;
    const bool has_bf16 = strcmp(level, "avx512bf16") == 0;
    const bool is_4_bit = format == EP_WEIGHTS_MXFP4 || format == EP_WEIGHTS_INT4 ||
                          format == EP_WEIGHTS_INT4_F16 || format == EP_WEIGHTS_Q4_K;
    const bool has_no_pairs =
        format == EP_WEIGHTS_F16 || format == EP_WEIGHTS_F32 || format == EP_WEIGHTS_W8A8;
    return is_4_bit && !wide && (ends_at_avx2 || has_vnni || has_bf16) ? EP_FFN_FAMILY_W4A8
           : has_bf16 && !has_no_pairs                                 ? EP_FFN_FAMILY_BF16DP
                                                                       : EP_FFN_FAMILY_PORTABLE;
}

Test(kernel_select, the_fastest_family_of_each_format_and_level)
{
    static const char *const levels[] = {"portable", "avx2", "avx512f", "avx512vnni", "avx512bf16"};
    ep_error error;
    for (size_t i = 0; i < sizeof(levels) / sizeof(levels[0]); i++) {
        setenv(EP_CPU_FEATURES_VARIABLE, levels[i], 1);
        if (ep_cpu_features_check(&error) != EP_OK) {
            continue; /* this CPU is lower still */
        }
        for (unsigned f = EP_WEIGHTS_NONE + 1; f < EP_WEIGHTS_COUNT; f++) {
            for (int wide = 0; wide < 2; wide++) {
                const ep_weight_format format = (ep_weight_format)f;
                const ep_ffn_family want = expected_family(levels[i], format, wide != 0);
                const ep_ffn_family got = ep_ffn_family_fastest(format, wide != 0);
                cr_expect_eq(got, want, "%s, %s%s: %s, not %s", levels[i],
                             ep_weight_format_name(format), wide != 0 ? ", wide" : "",
                             ep_ffn_family_name(got), ep_ffn_family_name(want));
            }
        }
    }
}
#endif
