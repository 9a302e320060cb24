/* SPDX-License-Identifier: Apache-2.0 */
/* Family `bf16dp` on AVX-512F: tiles of up to 6 rows x 64 outputs. */
#include "kernels/x86/ffn_vector_avx512.h"
#include "kernels/x86/ffn_bf16dp_fma.h"

const ep_ffn_kernel ep_ffn_kernel_bf16dp_avx512f = {.name = "avx512f-bf16dp", FMA_PARTS};
