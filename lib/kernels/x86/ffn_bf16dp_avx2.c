/* SPDX-License-Identifier: Apache-2.0 */
/* Family `bf16dp` on AVX2 and FMA: tiles of up to 6 rows x 16 outputs. */
#include "kernels/x86/ffn_vector_avx2.h"
#include "kernels/x86/ffn_bf16dp_fma.h"

const ep_ffn_kernel ep_ffn_kernel_bf16dp_avx2 = {.name = "avx2-bf16dp", FMA_PARTS};
