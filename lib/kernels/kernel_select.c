/* SPDX-License-Identifier: Apache-2.0 */
/* Which kernels this CPU can run, fastest first. */
#include "base/check.h"
#include "base/cpu_features.h"
#include "kernels/ffn_kernel.h"
#include "kernels/generic/ffn_generic.h"
#if defined(__x86_64__)
#include "kernels/x86/ffn_x86.h"
#elif defined(__aarch64__)
#include "kernels/arm/ffn_arm.h"
#endif

#define KERNELS_MAX 16

static size_t usable_kernels(const ep_ffn_kernel *out_usable[KERNELS_MAX])
{
    size_t count = 0;
#if defined(__x86_64__)
    ep_cpu_features features = ep_cpu_features_read();
    if (features.avx512bf16) {
        out_usable[count++] = &ep_ffn_kernel_avx512bf16;
    }
    if (features.avx512vnni) {
        out_usable[count++] = &ep_ffn_kernel_avx512vnni;
        out_usable[count++] = &ep_ffn_kernel_w4a8_avx512vnni;
    }
    if (features.avx512f) {
        out_usable[count++] = &ep_ffn_kernel_avx512f;
        out_usable[count++] = &ep_ffn_kernel_bf16dp_avx512f;
    }
    if (features.avx2_fma_f16c) {
        out_usable[count++] = &ep_ffn_kernel_avx2;
        out_usable[count++] = &ep_ffn_kernel_bf16dp_avx2;
        out_usable[count++] = &ep_ffn_kernel_w4a8_avx2;
    }
#elif defined(__aarch64__)
    ep_cpu_features features = ep_cpu_features_read();
    if (features.arm_bf16) {
        out_usable[count++] = &ep_ffn_kernel_neon_bf16;
    }
    if (features.arm_dot) {
        out_usable[count++] = &ep_ffn_kernel_neon_dot;
    }
    if (features.neon) {
        out_usable[count++] = &ep_ffn_kernel_neon;
    }
#endif
    out_usable[count++] = &ep_ffn_kernel_bf16dp_generic;
    out_usable[count++] = &ep_ffn_kernel_bf16odd_generic;
    out_usable[count++] = &ep_ffn_kernel_w4a8_generic;
    out_usable[count++] = &ep_ffn_kernel_generic;
    return count;
}

const ep_ffn_kernel *ep_ffn_kernel_at(size_t index)
{
    const ep_ffn_kernel *usable[KERNELS_MAX];
    return index < usable_kernels(usable) ? usable[index] : NULL;
}

const ep_ffn_kernel *ep_ffn_kernel_of(ep_ffn_family family)
{
    const ep_ffn_kernel *usable[KERNELS_MAX];
    size_t count = usable_kernels(usable);
    size_t i = 0;
    while (usable[i]->family != family) {
        i++;
        EP_ASSERT(i < count);
    }
    return usable[i];
}

/* Whether the kernel's family is the fastest here for the formats it supports; otherwise `portable`
 * is as fast, and the same on every CPU. With AVX-512F alone, w4a8 has not been measured. */
static bool is_native(const ep_ffn_kernel *kernel)
{
#if defined(__x86_64__)
    return kernel == &ep_ffn_kernel_avx512bf16 || kernel == &ep_ffn_kernel_w4a8_avx512vnni ||
           (kernel == &ep_ffn_kernel_w4a8_avx2 && !ep_cpu_features_read().avx512f);
#elif defined(__aarch64__)
    return kernel == &ep_ffn_kernel_neon_bf16;
#else
    (void)kernel;
    return false;
#endif
}

ep_ffn_family ep_ffn_family_fastest(ep_weight_format format, bool wide_inputs)
{
    if (!wide_inputs && ep_ffn_family_has(EP_FFN_FAMILY_W4A8, format) &&
        is_native(ep_ffn_kernel_of(EP_FFN_FAMILY_W4A8))) {
        return EP_FFN_FAMILY_W4A8;
    }
    const bool has_dp = is_native(ep_ffn_kernel_of(EP_FFN_FAMILY_BF16DP));
    const bool has_odd = is_native(ep_ffn_kernel_of(EP_FFN_FAMILY_BF16ODD));
    const ep_ffn_family family = has_dp    ? EP_FFN_FAMILY_BF16DP
                                 : has_odd ? EP_FFN_FAMILY_BF16ODD
                                           : EP_FFN_FAMILY_PORTABLE;
    return ep_ffn_family_has(family, format) ? family : EP_FFN_FAMILY_PORTABLE;
}
