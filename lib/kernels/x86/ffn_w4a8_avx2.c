/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Family `w4a8` on AVX2: tiles of up to 6 rows x 16 outputs, whose 16-bit sums stay in registers.
 * Weights are made unsigned as in the AVX-512 VNNI form. In the other formats they are at most 15,
 * so the sum of pairs over a whole group, 16 products of at most 127 * 15, stays below 2^15. Those
 * of mxfp4, at most 28, are summed in this way for half a group.
 */
#include <immintrin.h>

#include "base/check.h"
#include "kernels/ffn_activation.h"
#include "kernels/ffn_tile.h"
#include "kernels/ffn_w4a8.h"
#include "kernels/x86/ffn_vector_avx2.h"
#include "kernels/x86/ffn_x86.h"

#define AHEAD_BYTES 4096u
#define BLOCK_GROUPS 16u /* stay in a near cache while all chunks use them */
_Static_assert(BLOCK_GROUPS % (EP_SCALE_BLOCK / EP_MX_GROUP) == 0, "factors begin with a block");
#define TILE_OUTPUTS (VECTORS * VECTOR_FLOATS)

/* The lower nibbles of 32 bytes as unsigned weights. */
INLINE __m256i widen(ep_weight_format format, __m256i bytes)
{
    const __m256i nibbles = _mm256_and_si256(bytes, _mm256_set1_epi8(15));
    if (format != EP_WEIGHTS_MXFP4) {
        return nibbles;
    }
    const __m256i e2m1 = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4));
    return _mm256_shuffle_epi8(e2m1, nibbles);
}

/* Adds one pair of quads in 16 bits. codes: the tile's outputs; a: the pair's lines. rows is a
 * constant. */
INLINE void add_pair(const int rows, const ep_weight_format format, const uint8_t *codes,
                     const float *a, __m256i sums[][VECTORS])
{
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        __m256i w[VECTORS];
#pragma GCC unroll 2
        for (int j = 0; j < VECTORS; j++) {
            const __m256i both = _mm256_load_si256((const __m256i *)(const void *)(codes + 32 * j));
            w[j] = widen(format, half == 0 ? both : _mm256_srli_epi16(both, 4));
        }
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const __m256i x = _mm256_castps_si256(vector_all(a + half * rows + r));
#pragma GCC unroll 2
            for (int j = 0; j < VECTORS; j++) {
                sums[r][j] = _mm256_add_epi16(sums[r][j], _mm256_maddubs_epi16(w[j], x));
                /* otherwise GCC adds up products first and keeps the sums in memory */
                __asm__("" : "+x"(sums[r][j]));
            }
        }
    }
}

/* Scales of outputs from o on, and for q4_k eighths of their offsets. scales: after the group's
 * codes; factors: the group's. */
INLINE void load_ends(const ep_weight_format format, const uint8_t *scales, const float *factors,
                      uint32_t o, vector *out_scale, vector *out_eighth)
{
    *out_eighth = vector_zero();
    if (format == EP_WEIGHTS_Q4_K) {
        const uint8_t *minima = scales + EP_FFN_PANEL;
        const vector offset =
            vector_mul(vector_of_uint8(minima + o), vector_load(factors + EP_FFN_PANEL + o));
        *out_scale = vector_mul(vector_of_uint8(scales + o), vector_load(factors + o));
        *out_eighth = vector_mul(offset, _mm256_set1_ps(0.125f));
    } else if (format == EP_WEIGHTS_MXFP4) { /* half of it; an infinity, code 255, becomes NaN */
        const vector whole = vector_of_e8m0(scales + o);
        *out_scale = vector_fma(whole, _mm256_set1_ps(0.5f), _mm256_sub_ps(whole, whole));
    } else {
        *out_scale = format == EP_WEIGHTS_INT4_F16 ? vector_of_f16(scales + 2 * o)
                                                   : vector_of_bf16(scales + 2 * o);
    }
}

/* total + the scaled sum of a group. a: row r of the group's lines. */
INLINE vector add_group(const int rows, const ep_weight_format format, vector total, __m256i sum,
                        vector scale, vector eighth, const float *a)
{
    const vector input_scale = vector_all(a + (int)EP_FFN_W4A8_SCALE_LINE * rows);
    const __m256i start = _mm256_castps_si256(vector_all(a + (int)EP_FFN_W4A8_START_LINE * rows));
    if (format == EP_WEIGHTS_Q4_K) {
        const vector less = vector_mul(eighth, _mm256_cvtepi32_ps(start));
        const vector scaled = vector_fma(_mm256_cvtepi32_ps(sum), scale, less);
        return vector_fma(scaled, input_scale, total);
    }
    sum = _mm256_add_epi32(sum, start);
    if (format == EP_WEIGHTS_MXFP4) {
        sum = _mm256_add_epi32(sum, start);
    }
    return vector_fma(vector_mul(_mm256_cvtepi32_ps(sum), input_scale), scale, total);
}

/* Outputs from first on of a group. factors: the group's; a: its lines. rows, format: constants. */
INLINE void strip_tile(const int rows, const ep_weight_format format, const uint8_t *group,
                       const float *factors, uint32_t first, const float *a, float *c)
{
    const int pairs = format == EP_WEIGHTS_MXFP4 ? 2 : 4; /* how many are summed in 16 bits */
    __m256i acc[EP_FFN_CHUNK_ROWS][VECTORS];
    /* otherwise GCC computes the addresses of all lines beforehand and keeps them in memory */
    __asm__("" : "+r"(a));
#pragma GCC unroll 2
    for (int p = 0; p < 4; p += pairs) {
        __m256i sums[EP_FFN_CHUNK_ROWS][VECTORS] = {{_mm256_setzero_si256()}};
#pragma GCC unroll 4
        for (int i = p; i < p + pairs; i++) {
            add_pair(rows, format, group + i * (int)EP_FFN_W4A8_PAIR_BYTES + 4 * first,
                     a + 2 * i * rows, sums);
        }
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
#pragma GCC unroll 2
            for (int j = 0; j < VECTORS; j++) {
                const __m256i wide = _mm256_madd_epi16(sums[r][j], _mm256_set1_epi16(1));
                acc[r][j] = p == 0 ? wide : _mm256_add_epi32(acc[r][j], wide);
            }
        }
    }
#pragma GCC unroll 2
    for (int j = 0; j < VECTORS; j++) {
        const uint32_t o = first + VECTOR_FLOATS * (uint32_t)j;
        vector scale, eighth;
        load_ends(format, group + EP_FFN_W4A8_CODE_BYTES, factors, o, &scale, &eighth);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            float *to = c + r * EP_FFN_PANEL + o;
            vector_store(to,
                         add_group(rows, format, vector_load(to), acc[r][j], scale, eighth, a + r));
        }
    }
}

/* One chunk over n groups; factors: of their blocks of columns. rows, format: constants. */
INLINE void tile(const int rows, const ep_weight_format format, const uint8_t *group, uint32_t n,
                 const float *factors, const float *a, float *c)
{
    const size_t group_bytes = ep_ffn_group_bytes(format);
    const size_t share = ep_align_up(group_bytes * TILE_OUTPUTS / EP_FFN_PANEL, 64);
    for (uint32_t g = 0; g < n; g++, group += group_bytes, a += (int)EP_FFN_W4A8_LINES * rows) {
        const float *by = factors + g * EP_MX_GROUP / EP_SCALE_BLOCK * ep_ffn_block_factors(format);
        const uint8_t *ahead = group + AHEAD_BYTES;
        for (uint32_t o = 0; o < EP_FFN_PANEL; o += TILE_OUTPUTS, ahead += share) {
#pragma GCC unroll 8
            for (size_t at = 0; at < share; at += 64) {
                _mm_prefetch((const char *)ahead + at, _MM_HINT_T1);
            }
            strip_tile(rows, format, group, by, o, a, c);
        }
    }
}

typedef void (*tile_func)(const uint8_t *group, uint32_t n, const float *factors, const float *a,
                          float *c);

#define TILE(rows, name, format)                                                                   \
    static void name##_##rows(const uint8_t *group, uint32_t n, const float *factors,              \
                              const float *a, float *c)                                            \
    {                                                                                              \
        tile(rows, format, group, n, factors, a, c);                                               \
    }

EP_FFN_BY_ROWS(tile_func, mxfp4, TILE, EP_WEIGHTS_MXFP4)
EP_FFN_BY_ROWS(tile_func, int4, TILE, EP_WEIGHTS_INT4)
EP_FFN_BY_ROWS(tile_func, int4_f16, TILE, EP_WEIGHTS_INT4_F16)
EP_FFN_BY_ROWS(tile_func, q4_k, TILE, EP_WEIGHTS_Q4_K)

static const tile_func *const tiles_of[EP_WEIGHTS_COUNT] = {[EP_WEIGHTS_MXFP4] = mxfp4,
                                                            [EP_WEIGHTS_INT4] = int4,
                                                            [EP_WEIGHTS_INT4_F16] = int4_f16,
                                                            [EP_WEIGHTS_Q4_K] = q4_k};

static void w4a8_group_panel(ep_weight_format format, const float *a, uint32_t rows,
                             const uint8_t *panel, uint32_t k_count, const uint8_t *next, float *c)
{
    const tile_func *tiles = tiles_of[format];
    const ep_ffn_chunks chunks = ep_ffn_chunks_of(rows);
    const uint32_t groups = ep_ffn_w4a8_groups(k_count);
    const uint8_t *group = panel;
    (void)next;
    memset(c, 0, (size_t)rows * EP_FFN_PANEL * sizeof(*c));
    for (uint32_t g = 0; g < groups;
         g += BLOCK_GROUPS, group += BLOCK_GROUPS * ep_ffn_group_bytes(format)) {
        const uint32_t n = groups - g < BLOCK_GROUPS ? groups - g : BLOCK_GROUPS;
        const float *factors = ep_ffn_factors_of(format, panel, groups, g * EP_MX_GROUP);
        for (uint32_t chunk = 0; chunk < chunks.count; chunk++) {
            const uint32_t chunk_rows = ep_ffn_chunk_rows(&chunks, chunk);
            const size_t first_row = ep_ffn_chunk_first_row(&chunks, chunk);
            tiles[chunk_rows - 1](group, n, factors,
                                  a + EP_FFN_W4A8_LINES *
                                          (first_row * groups + (size_t)g * chunk_rows),
                                  c + first_row * EP_FFN_PANEL);
        }
    }
}

/* ---- rows to int8 ---- */

/* ep_ffn_w4a8_round of 32 inputs. */
INLINE void round_group(const vector x[4], uint32_t words[EP_FFN_W4A8_LINES])
{
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i most = _mm256_setzero_si256();
    __m256i q[4];
    for (int i = 0; i < 4; i++) {
        most = _mm256_max_epu32(
            most, _mm256_and_si256(_mm256_castps_si256(x[i]), _mm256_set1_epi32(0x7fffffff)));
    }
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1));
    const float scale = ep_ffn_int8_scale((uint32_t)_mm_cvtsi128_si32(four));
    memset(words, 0, EP_FFN_W4A8_LINES * sizeof(words[0]));
    words[EP_FFN_W4A8_SCALE_LINE] = ep_f32_bits(scale);
    if (!(scale > 0.0f)) {
        return;
    }
    for (int i = 0; i < 4; i++) {
        q[i] = _mm256_cvtps_epi32(_mm256_div_ps(x[i], _mm256_set1_ps(scale)));
    }
    const __m256i packed =
        _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    const __m256i codes =
        _mm256_max_epi8(_mm256_permutevar8x32_epi32(packed, in_order), _mm256_set1_epi8(-127));
    const __m256i sums =
        _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), codes), _mm256_set1_epi16(1));
    four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1));
    _mm256_storeu_si256((__m256i *)(void *)words, codes);
    words[EP_FFN_W4A8_START_LINE] = (uint32_t)(-8 * _mm_cvtsi128_si32(four));
}

/* The same for n inputs, 1..32, padded with zeros, written to row r of the group's lines at a. */
INLINE void lay_group(const float *x, uint32_t n, uint32_t rows, uint32_t r, float *a)
{
    _Alignas(32) float padded[EP_MX_GROUP] = {0.0f};
    uint32_t words[EP_FFN_W4A8_LINES];
    vector v[4];
    if (n < EP_MX_GROUP) {
        x = memcpy(padded, x, n * sizeof(*x));
    }
    for (int i = 0; i < 4; i++) {
        v[i] = vector_load(x + VECTOR_FLOATS * i);
    }
    round_group(v, words);
    for (uint32_t i = 0; i < EP_FFN_W4A8_LINES; i++) {
        memcpy(a + (size_t)i * rows + r, &words[i], sizeof(words[i]));
    }
}

static void w4a8_pack_rows(const ep_ffn_batch *batch, uint32_t first_row, uint32_t rows,
                           uint32_t hidden, float *a)
{
    const bool is_plain = batch->x_dtype == EP_DTYPE_BF16 && !batch->weight_on_input;
    _Alignas(32) float wide[EP_MX_GROUP];
    for (uint32_t k = 0; k < hidden; k += EP_MX_GROUP, a += (size_t)EP_FFN_W4A8_LINES * rows) {
        const uint32_t n = hidden - k < EP_MX_GROUP ? hidden - k : EP_MX_GROUP;
        for (uint32_t r = 0; r < rows; r++) {
            const ep_ffn_row *row = &batch->rows[first_row + r];
            if (is_plain && n == EP_MX_GROUP) {
                for (uint32_t i = 0; i < EP_MX_GROUP; i += VECTOR_FLOATS) {
                    vector_store(wide + i, vector_of_bf16((const uint8_t *)row->x + 2 * (k + i)));
                }
            } else {
                ep_ffn_widen(batch, row, k, n, wide);
            }
            lay_group(wide, n, rows, r, a);
        }
    }
}

static void w4a8_lay(const float *h, uint32_t rows, uint32_t count, float *a)
{
    for (uint32_t k = 0; k < count; k += EP_MX_GROUP, a += (size_t)EP_FFN_W4A8_LINES * rows) {
        const uint32_t n = count - k < EP_MX_GROUP ? count - k : EP_MX_GROUP;
        for (uint32_t r = 0; r < rows; r++) {
            lay_group(h + (size_t)r * EP_FFN_PANEL + k, n, rows, r, a);
        }
    }
}

const ep_ffn_kernel ep_ffn_kernel_w4a8_avx2 = {
    .name = "avx2-w4a8",
    .family = EP_FFN_FAMILY_W4A8,
    .group_panel = w4a8_group_panel,
    .activate = ep_act_rows,
    .exp16 = ep_act_exp16,
    .pack_rows = w4a8_pack_rows,
    .lay = w4a8_lay,
};
