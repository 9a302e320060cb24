/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Panels of MX formats in family `bf16dp`, AVX-512 BF16. Many rows: the first chunk widens blocks
 * of lines, with their scales, and leaves them in memory, where the other chunks use them like bf16
 * weights. A look-up turns codes into bf16 with a large exponent; a saturating integer subtraction,
 * which keeps zeros, applies the scale to 32 of them.
 * Few rows: each chunk in ffn_mx_few_avx512bf16.c.
 */
#include "kernels/ffn_element.h"
#include "kernels/x86/ffn_avx512bf16.h"
#include "kernels/x86/ffn_codes_avx512bf16.h"
#include "kernels/x86/ffn_lines.h"
#include "kernels/x86/ffn_x86.h"

#define GROUP_LINES (EP_MX_GROUP / 2u)
/* 128 KiB: fits the second-level cache together with what is fetched of the next block */
#define BLOCK_LINES 512u

TILES(tiles_one, EP_DTYPE_BF16, 1)

/* The groups that a chunk widens. */
typedef struct mx_walk {
    const uint8_t *groups;
    uint32_t lines;       /* of all groups; the last may be short */
    const uint8_t *ahead; /* fetched into the second level cache meanwhile: step bytes per line */
    size_t step;
    uint8_t *wide; /* where the widened lines are stored */
} mx_walk;

/* The exponent field of 1.0 in the tables: the largest with which no code overflows. */
INLINE uint8_t table_exponent(ep_weight_format format)
{
    return format == EP_WEIGHTS_MXFP4 ? 252 : 246;
}

/* The smallest scale with which all codes are normal numbers; with scales above table_exponent some
 * codes overflow. */
INLINE uint8_t least_scale(ep_weight_format format)
{
    return format == EP_WEIGHTS_MXFP4 ? 2 : 10;
}

/* mxfp8: the exponent field for a code exponent of 0 that makes 1.0 as large as in the table. */
INLINE __m512i e4m3_more(void)
{
    return _mm512_set1_epi16(0x7780);
}

/* ep_codes_table with a large exponent. Both codes of zero are +0. */
INLINE __m512i great_table(ep_weight_format format)
{
    static const uint16_t e2m1[16] = {0x0000, 0x7d80, 0x7e00, 0x7e40, 0x7e80, 0x7ec0,
                                      0x7f00, 0x7f40, 0x0000, 0xfd80, 0xfe00, 0xfe40,
                                      0xfe80, 0xfec0, 0xff00, 0xff40};
    static const uint16_t small[8] = {0x0000, 0x7670, 0x76e0, 0x7710,
                                      0x7740, 0x7750, 0x7760, 0x7770};
    return format == EP_WEIGHTS_MXFP4
               ? _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(const void *)e2m1))
               : _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)small));
}

/* ep_codes_widen_e4m3 with a scale. */
INLINE __m512i scaled_e4m3(__m512i table, __m512i words, __m512i high, __m512i index)
{
    const __mmask32 is_small = _mm512_testn_epi16_mask(high, _mm512_set1_epi16(0x7800));
    const __mmask32 is_some = _mm512_test_epi16_mask(high, _mm512_set1_epi16(0x7f00));
    const __m512i bits =
        _mm512_and_si512(_mm512_srai_epi16(high, 4), _mm512_set1_epi16((int16_t)0x87f0));
    const __m512i more = _mm512_mask_permutexvar_epi16(e4m3_more(), is_small, index, table);
    return _mm512_maskz_sub_epi16(is_some, _mm512_add_epi16(bits, more), words);
}

/* words: how much too large the exponents of 16 outputs are, at the exponent's place. */
INLINE __m512i scaled(ep_weight_format format, __m512i table, __m512i words, __m512i codes, int j)
{
    if (format == EP_WEIGHTS_MXFP4) {
        /* A saturating subtraction in two instructions: the single one uses a unit of the dot
         * products, these do not (Zen 4). */
        const __m512i great =
            _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, (unsigned)(4 * (j & 1))), table);
        return _mm512_sub_epi16(_mm512_max_epu16(great, words), words);
    }
    return (j & 1) == 0 ? scaled_e4m3(table, words, _mm512_slli_epi16(codes, 8), codes)
                        : scaled_e4m3(table, words, codes, _mm512_srli_epi16(codes, 8));
}

/* Whether the subtraction can apply every output's scale. */
INLINE bool is_easy(ep_weight_format format, const uint8_t *scales)
{
    const uint8_t low = least_scale(format);
    const __m512i from_low =
        _mm512_sub_epi8(_mm512_loadu_si512(scales), _mm512_set1_epi8((char)low));
    return _mm512_cmpgt_epu8_mask(from_low,
                                  _mm512_set1_epi8((char)(table_exponent(format) - low))) == 0;
}

INLINE __m512i load_words(ep_weight_format format, const uint8_t *scales, int j)
{
    /* Copies a scale's byte to both words of a pair. */
    const __m512i twice =
        _mm512_set4_epi32((int)0x800c800cu, (int)0x80088008u, (int)0x80048004u, (int)0x80008000u);
    const __m512i e =
        _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(scales + 16 * j)));
    const __m512i pairs = _mm512_shuffle_epi8(e, twice);
    return _mm512_sub_epi16(_mm512_set1_epi16((int16_t)(table_exponent(format) << 7)),
                            _mm512_slli_epi16(pairs, 7));
}

/* n lines of one group. rows and format are constants wherever this is inlined. */
INLINE void code_lines(const int rows, const ep_weight_format format, const mx_walk *walk,
                       const uint8_t *scales, __m512i table, const float *a, uint32_t n,
                       __m512 acc[][VECTORS])
{
    const size_t line_bytes = ep_ffn_group_code_bytes(format) / GROUP_LINES;
    const uint8_t *b = walk->groups;
    const uint8_t *ahead = walk->ahead;
    uint8_t *wide = walk->wide;
    __m512i words[VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
        words[j] = load_words(format, scales, j);
    }
    for (uint32_t i = 0; i < n; i++, b += line_bytes, wide += LINE_BYTES, a += rows) {
        __m512i codes = _mm512_setzero_si512();
        _mm_prefetch((const char *)ahead, _MM_HINT_T1);
        ahead += walk->step;
        /* Prepare a whole line before its dot products: stores between would cost 13 cycles a
         * line. */
        vector w[VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            codes = j % 2 == 0 ? ep_codes_load(ep_weight_format_codes(format), b, j) : codes;
            w[j] = _mm512_castsi512_ps(scaled(format, table, words[j], codes, j));
            vector_store((float *)(void *)wide + 16 * j, w[j]);
        }
        add_line(rows, w, a, acc);
    }
}

/* Returns the lines done: all, or those before a group with a scale that the subtraction cannot
 * apply. rows and format are constants. */
INLINE uint32_t code_tile(const int rows, const ep_weight_format format, mx_walk walk,
                          const float *a, bool first, float *c)
{
    const __m512i table = great_table(format);
    __m512 acc[EP_FFN_CHUNK_ROWS][VECTORS];
    uint32_t line = 0;
    load_sums(rows, first, 0, c, acc);
    for (; line < walk.lines; line += GROUP_LINES) {
        const uint8_t *scales = walk.groups + ep_ffn_group_code_bytes(format);
        const uint32_t n = walk.lines - line < GROUP_LINES ? walk.lines - line : GROUP_LINES;
        if (!is_easy(format, scales)) {
            break;
        }
        code_lines(rows, format, &walk, scales, table, a, n, acc);
        a += (size_t)n * rows;
        walk.groups += ep_ffn_group_bytes(format);
        walk.ahead += n * walk.step;
        walk.wide += (size_t)n * LINE_BYTES;
    }
    store_sums(rows, 0, acc, c);
    return line < walk.lines ? line : walk.lines;
}

typedef uint32_t (*code_func)(mx_walk walk, const float *a, bool first, float *c);

#define CODE_TILE(rows, name, format)                                                              \
    static uint32_t name##_##rows(mx_walk walk, const float *a, bool first, float *c)              \
    {                                                                                              \
        return code_tile(rows, format, walk, a, first, c);                                         \
    }

EP_FFN_BY_ROWS(code_func, mxfp4, CODE_TILE, EP_WEIGHTS_MXFP4)
EP_FFN_BY_ROWS(code_func, mxfp8, CODE_TILE, EP_WEIGHTS_MXFP8)

/* ep_bf16dp_mx_weight of 16 pairs. */
INLINE __m512i scale_pairs(__m512i pairs, __m512 scale)
{
    const __m512 even = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)), scale);
    const __m512i upper = _mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000u));
    const __m512 odd = _mm512_mul_ps(_mm512_castsi512_ps(upper), scale);
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(even));
    const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd));
    const __m512i both = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
    return _mm512_maskz_mov_epi16(_mm512_test_epi16_mask(both, _mm512_set1_epi16(0x7fff)), both);
}

/* n lines of a group with any scales. format is a constant. */
INLINE void widen_hard(const ep_weight_format format, const uint8_t *group, uint32_t n, uint8_t *to)
{
    const size_t line_bytes = ep_ffn_group_code_bytes(format) / GROUP_LINES;
    const __m512i table = ep_codes_table(ep_weight_format_codes(format));
    __m512 scale[VECTORS];
    for (int o = 0; o < EP_FFN_PANEL; o++) {
        scale[o / 16][o % 16] =
            ep_ffn_read_e8m0(group[ep_ffn_group_code_bytes(format) + (size_t)o]);
    }
    for (uint32_t i = 0; i < n; i++, group += line_bytes, to += LINE_BYTES) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            const __m512i pairs =
                ep_codes_widen(ep_weight_format_codes(format), table,
                               ep_codes_load(ep_weight_format_codes(format), group, j & 2), j);
            _mm512_store_si512(to + 64 * j, scale_pairs(pairs, scale[j]));
        }
    }
}

static void widen_hard_group(ep_weight_format format, const uint8_t *group, uint32_t n, uint8_t *to)
{
    if (format == EP_WEIGHTS_MXFP4) {
        widen_hard(EP_WEIGHTS_MXFP4, group, n, to);
    } else {
        widen_hard(EP_WEIGHTS_MXFP8, group, n, to);
    }
}

/* One chunk over groups of codes with any scales. */
static void chunk_of_codes(ep_weight_format format, mx_walk walk, const float *a, uint32_t rows,
                           bool first, float *c)
{
    while (walk.lines > 0) {
        const uint32_t done =
            (format == EP_WEIGHTS_MXFP4 ? mxfp4 : mxfp8)[rows - 1](walk, a, first, c);
        const uint32_t hard = walk.lines - done < GROUP_LINES ? walk.lines - done : GROUP_LINES;
        if (hard == 0) {
            return;
        }
        walk.groups += (size_t)(done / GROUP_LINES) * ep_ffn_group_bytes(format);
        walk.wide += (size_t)done * LINE_BYTES;
        widen_hard_group(format, walk.groups, hard, walk.wide);
        a += (size_t)done * rows;
        tiles_one[rows - 1]((prefetch){.next = walk.wide}, a, walk.wide, hard, false, c);
        a += (size_t)hard * rows;
        walk.groups += ep_ffn_group_bytes(format);
        walk.wide += (size_t)hard * LINE_BYTES;
        walk.ahead += (done + hard) * walk.step;
        walk.lines -= done + hard;
        first = false;
    }
}

/* Block by block, all chunks per block; each chunk fetches a share of the next block's codes. */
static void block_panel(ep_weight_format format, const float *a, uint32_t rows,
                        const uint8_t *panel, uint32_t lines, const uint8_t *next, float *c)
{
    _Alignas(64) uint8_t block[BLOCK_LINES * LINE_BYTES];
    const ep_ffn_chunks chunks = ep_ffn_chunks_of(rows);
    const size_t block_bytes = BLOCK_LINES / GROUP_LINES * ep_ffn_group_bytes(format);
    for (uint32_t line = 0; line < lines; line += BLOCK_LINES, panel += block_bytes) {
        const uint32_t n = lines - line < BLOCK_LINES ? lines - line : BLOCK_LINES;
        const uint8_t *behind = line + n < lines ? panel + block_bytes : next;
        const size_t step = behind == NULL ? 0 : block_bytes / ((size_t)chunks.count * n) + 1;
        for (uint32_t chunk = 0; chunk < chunks.count; chunk++) {
            const uint32_t chunk_rows = ep_ffn_chunk_rows(&chunks, chunk);
            const size_t first_row = ep_ffn_chunk_first_row(&chunks, chunk);
            const float *x = a + first_row * lines + (size_t)line * chunk_rows;
            const uint8_t *ahead =
                behind == NULL ? block : behind + chunk * (block_bytes / chunks.count);
            float *sums = c + first_row * EP_FFN_PANEL;
            if (chunk == 0) {
                const mx_walk walk = {
                    .groups = panel, .lines = n, .ahead = ahead, .step = step, .wide = block};
                chunk_of_codes(format, walk, x, chunk_rows, line == 0, sums);
            } else {
                tiles_one[chunk_rows - 1]((prefetch){.next = ahead, .step = step}, x, block, n,
                                          line == 0, sums);
            }
        }
    }
}

/* From this many chunks on, widening for each costs more than leaving the lines in memory. */
INLINE uint32_t many_chunks(ep_weight_format format)
{
    return format == EP_WEIGHTS_MXFP4 ? 3 : 2;
}

void ep_ffn_avx512bf16_mx_panel(ep_weight_format format, const float *a, uint32_t rows,
                                const uint8_t *panel, uint32_t k_count, const uint8_t *next,
                                float *c)
{
    const uint32_t lines = ep_ffn_lines(EP_FFN_FAMILY_BF16DP, k_count);
    const ep_ffn_chunks chunks = ep_ffn_chunks_of(rows);
    if (chunks.count >= many_chunks(format)) {
        block_panel(format, a, rows, panel, lines, next, c);
        return;
    }
    for (uint32_t chunk = 0; chunk < chunks.count; chunk++) {
        const uint32_t chunk_rows = ep_ffn_chunk_rows(&chunks, chunk);
        const size_t first_row = ep_ffn_chunk_first_row(&chunks, chunk);
        const float *x = a + first_row * lines;
        float *sums = c + first_row * EP_FFN_PANEL;
        if (!ep_ffn_avx512bf16_mx_few(format, x, chunk_rows, panel, lines, next, sums)) {
            block_panel(format, x, chunk_rows, panel, lines, next, sums);
        }
    }
}
