/* SPDX-License-Identifier: Apache-2.0 */
/* Family `bf16dp` on AVX-512F: tiles of up to 6 rows x 64 outputs. */
#include <immintrin.h>

#define VECTOR __m512
#define VECTOR_FLOATS 16
#define VECTORS 4
#define vector_zero() _mm512_setzero_ps()
#define vector_load(p) _mm512_load_ps(p)
#define vector_store(p, v) _mm512_store_ps(p, v)
#define vector_fma(a, b, c) _mm512_fmadd_ps(a, b, c)
#define vector_odd_of(v)                                                                           \
    _mm512_castsi512_ps(                                                                           \
        _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32((int)0xffff0000u)))
#define vector_even_of(v) _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(v), 16))
#define vector_all(p) _mm512_set1_ps(*(p))

#include "kernels/x86/ffn_bf16dp_fma.h"

const ep_ffn_kernel ep_ffn_kernel_bf16dp_avx512f = {
    .name = "avx512f-bf16dp",
    .family = EP_FFN_FAMILY_BF16DP,
    .panel = fma_panel,
    .group_panel = fma_group_panel,
    .activate = ep_act_rows,
    .exp16 = ep_act_exp16,
    .pack_rows = ep_ffn_generic_pack_pairs,
    .lay = ep_ffn_generic_lay_pairs,
};
