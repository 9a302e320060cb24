/* SPDX-License-Identifier: Apache-2.0 */
/* Panels of formats with groups, for AVX-512F. */
#include "kernels/x86/ffn_vector_avx512.h"
#include "kernels/x86/ffn_x86.h"

/* Exact values of 4-bit codes, indexed by code. */
typedef vector code_lookup;

INLINE code_lookup code_lookup_of(ep_weight_format format)
{
    const ep_weight_codes codes = ep_weight_format_codes(format);
    const vector unsigned_values =
        _mm512_setr_ps(0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f, 7.0f, 8.0f, 9.0f, 10.0f, 11.0f,
                       12.0f, 13.0f, 14.0f, 15.0f);
    return codes == EP_CODES_E2M1
               ? _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f,
                                -1.5f, -2.0f, -3.0f, -4.0f, -6.0f)
           : codes == EP_CODES_INT4 ? _mm512_sub_ps(unsigned_values, _mm512_set1_ps(8.0f))
                                    : unsigned_values;
}

INLINE void load_nibbles(ep_weight_codes codes, code_lookup lookup, const uint8_t *group,
                         uint32_t k, uint32_t strip, vector w[VECTORS])
{
    (void)codes;
    (void)strip;
    const __m512i words = _mm512_loadu_si512(group + (size_t)(k / 2) * 64);
#pragma GCC unroll 4
    for (unsigned j = 0; j < VECTORS; j++) {
        w[j] = _mm512_permutexvar_ps(_mm512_srli_epi32(words, 16 * (k & 1u) + 4 * j), lookup);
    }
}

#include "kernels/x86/ffn_group_portable.h"

void ep_ffn_avx512f_group_panel(ep_weight_format format, const float *a, uint32_t rows,
                                const uint8_t *panel, uint32_t k_count, const uint8_t *next,
                                float *c)
{
    portable_group_panel(format, a, rows, panel, k_count, next, c);
}
