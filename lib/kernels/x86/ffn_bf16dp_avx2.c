/* SPDX-License-Identifier: Apache-2.0 */
/* Family `bf16dp` on AVX2 and FMA: tiles of up to 6 rows x 16 outputs. */
#include <immintrin.h>

#define VECTOR __m256
#define VECTOR_FLOATS 8
#define VECTORS 2
#define vector_zero() _mm256_setzero_ps()
#define vector_load(p) _mm256_load_ps(p)
#define vector_store(p, v) _mm256_store_ps(p, v)
#define vector_fma(a, b, c) _mm256_fmadd_ps(a, b, c)
#define vector_odd_of(v)                                                                           \
    _mm256_castsi256_ps(                                                                           \
        _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32((int)0xffff0000u)))
#define vector_even_of(v) _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(v), 16))
#define vector_all(p) _mm256_set1_ps(*(p))

#include "kernels/x86/ffn_bf16dp_fma.h"

const ep_ffn_kernel ep_ffn_kernel_bf16dp_avx2 = {
    .name = "avx2-bf16dp",
    .family = EP_FFN_FAMILY_BF16DP,
    .panel = fma_panel,
    .group_panel = fma_group_panel,
    .activate = ep_act_rows,
    .exp16 = ep_act_exp16,
    .pack_rows = ep_ffn_generic_pack_pairs,
    .lay = ep_ffn_generic_lay_pairs,
};
