/* SPDX-License-Identifier: Apache-2.0 */
/* Which kernels this CPU runs, fastest first. */
#include "base/cpu_features.h"
#include "kernels/ffn_kernel.h"
#include "kernels/generic/ffn_generic.h"
#if defined(__x86_64__)
#include "kernels/x86/ffn_x86.h"
#elif defined(__aarch64__)
#include "kernels/arm/ffn_arm.h"
#endif

const ep_ffn_kernel *ep_ffn_kernel_at(size_t index)
{
    const ep_ffn_kernel *usable[3];
    size_t count = 0;
#if defined(__x86_64__)
    ep_cpu_features features = ep_cpu_features_read();
    if (features.avx512f) {
        usable[count++] = &ep_ffn_kernel_avx512f;
    }
    if (features.avx2_fma_f16c) {
        usable[count++] = &ep_ffn_kernel_avx2;
    }
#elif defined(__aarch64__)
    ep_cpu_features features = ep_cpu_features_read();
    if (features.arm_dot) {
        usable[count++] = &ep_ffn_kernel_neon_dot;
    }
    if (features.neon) {
        usable[count++] = &ep_ffn_kernel_neon;
    }
#endif
    usable[count++] = &ep_ffn_kernel_generic;
    return index < count ? usable[index] : NULL;
}

const ep_ffn_kernel *ep_ffn_kernel_best(void)
{
    return ep_ffn_kernel_at(0);
}
