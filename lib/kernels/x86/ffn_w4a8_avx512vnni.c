/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Family `w4a8` on AVX-512 VNNI. The instruction takes unsigned by signed: weights are codes moved up by what makes the least of
 * them 0, and sums begin at minus that times the sum of the group's inputs. Codes become bytes in registers, anew for each chunk:
 * a few instructions for 16 outputs and two quads, beside two dot products for each row.
 */
#include "kernels/ffn_w4a8.h"
#include "kernels/x86/ffn_avx512.h"
#include "kernels/x86/ffn_x86.h"

#define INLINE EP_AVX512_INLINE
#define VECTORS 4       /* of 16 outputs: a panel */
#define HALF_VECTORS 2  /* whose totals stay in registers beside the sums of any number of rows */
#define STREAM_ROWS 4   /* up to which totals of a whole panel do */
#define STREAM_GROUPS 4 /* fetched that many groups ahead while weights stream in */
#define BLOCK_GROUPS 64 /* the most of a block, which stays in the second level cache while all chunks pass */

/* Groups that a tile passes over, and what it fetches into the second level cache meanwhile. */
typedef struct {
    const uint8_t *groups;
    uint32_t count;
    const uint8_t *ahead;
    size_t step; /* bytes fetched per group */
} walk;

INLINE int32_t moved_up(ep_weight_format format)
{
    return format == EP_WEIGHTS_INT4 ? 8 : 12;
}

/* Unsigned weights of 64 codes: the lower nibbles of bytes. */
INLINE __m512i widen(ep_weight_format format, __m512i nibbles)
{
    if (format == EP_WEIGHTS_INT4) {
        return nibbles;
    }
    const __m512i e2m1 = _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    return _mm512_shuffle_epi8(e2m1, nibbles);
}

static __attribute__((noinline, cold)) void rare_scales(const uint8_t *scales, float *to)
{
    for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
        to[o] = ep_ffn_w4a8_e8m0(scales[o]);
    }
}

/* Scales of outputs 16 first.. of a group; scales: of the whole group. */
INLINE void load_scales(const ep_weight_format format, const uint8_t *scales, int first, const int vectors, __m512 to[])
{
    if (format == EP_WEIGHTS_INT4) {
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) {
            const __m256i halves = _mm256_load_si256((const __m256i *)(const void *)(scales + 32 * (first + j)));
            to[j] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
        }
        return;
    }
    /* 2^(code - 128) is a normal number of the exponent code - 1, but for the codes 0, 1 and 255. */
    const __m512i from_two = _mm512_sub_epi8(_mm512_load_si512(scales), _mm512_set1_epi8(2));
    if (__builtin_expect(_mm512_cmpgt_epu8_mask(from_two, _mm512_set1_epi8((char)252)) != 0, 0)) {
        _Alignas(64) float all[EP_FFN_PANEL];
        rare_scales(scales, all);
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) {
            to[j] = _mm512_load_ps(all + 16 * (first + j));
        }
        return;
    }
#pragma GCC unroll 4
    for (int j = 0; j < vectors; j++) {
        const __m512i codes = _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i *)(const void *)(scales + 16 * (first + j))));
        to[j] = _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_slli_epi32(codes, 23), _mm512_set1_epi32(1 << 23)));
    }
}

/* The sums of one group for `vectors` vectors of outputs from first on. a: the group's lines. fetched: cache lines per pair of quads. */
INLINE void sum_group(const int rows, const ep_weight_format format, const uint8_t *group, int first, const int vectors,
                      const uint8_t *ahead, const int fetched, const float *a, __m512i acc[][VECTORS])
{
    const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        int32_t sum;
        __builtin_memcpy(&sum, a + (int)EP_FFN_W4A8_SUM_LINE * rows + r, sizeof(sum));
        const __m512i start = _mm512_set1_epi32(-moved_up(format) * sum);
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) {
            acc[r][j] = start;
        }
    }
#pragma GCC unroll 4
    for (int p = 0; p < 4; p++) {
        const uint8_t *codes = group + p * (int)EP_FFN_W4A8_PAIR_BYTES + 64 * first;
#pragma GCC unroll 4
        for (int q = 0; q < fetched; q++) {
            _mm_prefetch((const char *)ahead + p * (int)EP_FFN_W4A8_PAIR_BYTES + 64 * q, _MM_HINT_T1);
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            __m512i w[VECTORS];
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) {
                const __m512i both = _mm512_load_si512(codes + 64 * j);
                w[j] = widen(format, _mm512_and_si512(half == 0 ? both : _mm512_srli_epi16(both, 4), low));
            }
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                int32_t quad;
                __builtin_memcpy(&quad, a + (2 * p + half) * rows + r, sizeof(quad));
                const __m512i x = _mm512_set1_epi32(quad);
#pragma GCC unroll 4
                for (int j = 0; j < vectors; j++) {
                    acc[r][j] = _mm512_dpbusd_epi32(acc[r][j], w[j], x);
                }
            }
        }
    }
}

/* total[r][at + j] += sums of a group, scaled. */
INLINE void add_group(const int rows, const int vectors, const int at, const float *a, const __m512 scales[],
                      __m512i acc[][VECTORS], __m512 total[][VECTORS])
{
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        const __m512 input_scale = _mm512_set1_ps(a[(int)EP_FFN_W4A8_SCALE_LINE * rows + r]);
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) {
            const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(acc[r][j]), input_scale);
            total[r][at + j] = _mm512_fmadd_ps(scaled, scales[j], total[r][at + j]);
        }
    }
}

INLINE void load_totals(const int rows, const int vectors, const float *c, __m512 total[][VECTORS])
{
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) {
            total[r][j] = _mm512_load_ps(c + r * EP_FFN_PANEL + 16 * j);
        }
    }
}

INLINE void store_totals(const int rows, const int vectors, __m512 total[][VECTORS], float *c)
{
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) {
            _mm512_store_ps(c + r * EP_FFN_PANEL + 16 * j, total[r][j]);
        }
    }
}

/* Up to STREAM_ROWS rows: whole groups, each fetching one as long as itself. rows and format are constants. */
INLINE void stream_tile(const int rows, const ep_weight_format format, const walk *over, const float *a, float *c)
{
    const size_t group_bytes = ep_ffn_group_bytes(format);
    const int vectors = rows > 3 ? HALF_VECTORS : VECTORS; /* whose sums fit beside the totals */
    const uint8_t *group = over->groups;
    const uint8_t *ahead = over->ahead;
    __m512 total[STREAM_ROWS][VECTORS];
    load_totals(rows, VECTORS, c, total);
    for (uint32_t g = 0; g < over->count; g++, group += group_bytes, ahead += group_bytes) {
#pragma GCC unroll 2
        for (int first = 0; first < VECTORS; first += vectors) {
            __m512i acc[STREAM_ROWS][VECTORS];
            __m512 scales[VECTORS];
            sum_group(rows, format, group, first, vectors, ahead + 64 * first, vectors, a, acc);
            load_scales(format, group + EP_FFN_W4A8_CODE_BYTES, first, vectors, scales);
            add_group(rows, vectors, first, a, scales, acc, total);
        }
#pragma GCC unroll 2
        for (size_t at = EP_FFN_W4A8_CODE_BYTES; at < group_bytes; at += 64) {
            _mm_prefetch((const char *)ahead + at, _MM_HINT_T1);
        }
        a += (int)EP_FFN_W4A8_LINES * rows;
    }
    store_totals(rows, VECTORS, total, c);
}

/* Half a panel after the other. rows and format are constants. */
INLINE void half_tile(const int rows, const ep_weight_format format, const walk *over, const float *a, float *c)
{
    const size_t group_bytes = ep_ffn_group_bytes(format);
    const uint8_t *ahead = over->ahead;
    for (int first = 0; first < VECTORS; first += HALF_VECTORS) {
        const uint8_t *group = over->groups;
        const float *x = a;
        __m512 total[EP_FFN_CHUNK_ROWS][VECTORS];
        load_totals(rows, HALF_VECTORS, c + 16 * first, total);
        for (uint32_t g = 0; g < over->count; g++, group += group_bytes) {
            __m512i acc[EP_FFN_CHUNK_ROWS][VECTORS];
            __m512 scales[HALF_VECTORS];
            for (size_t at = 0; at < over->step; at += 64) {
                _mm_prefetch((const char *)ahead + at, _MM_HINT_T1);
            }
            ahead += over->step;
            sum_group(rows, format, group, first, HALF_VECTORS, NULL, 0, x, acc);
            load_scales(format, group + EP_FFN_W4A8_CODE_BYTES, first, HALF_VECTORS, scales);
            add_group(rows, HALF_VECTORS, 0, x, scales, acc, total);
            x += (int)EP_FFN_W4A8_LINES * rows;
        }
        store_totals(rows, HALF_VECTORS, total, c + 16 * first);
    }
}

typedef void (*tile_func)(const walk *over, const float *a, float *c);

#define TILE(name, rows, func, format)                                                                       \
    static void name##_##rows(const walk *over, const float *a, float *c)                                    \
    {                                                                                                        \
        func(rows, format, over, a, c);                                                                      \
    }
#define TILES(name, format)                                                                                  \
    TILE(stream_##name, 1, stream_tile, format)                                                              \
    TILE(stream_##name, 2, stream_tile, format)                                                              \
    TILE(stream_##name, 3, stream_tile, format)                                                              \
    TILE(stream_##name, 4, stream_tile, format)                                                              \
    TILE(half_##name, 1, half_tile, format)                                                                  \
    TILE(half_##name, 2, half_tile, format)                                                                  \
    TILE(half_##name, 3, half_tile, format)                                                                  \
    TILE(half_##name, 4, half_tile, format)                                                                  \
    TILE(half_##name, 5, half_tile, format)                                                                  \
    TILE(half_##name, 6, half_tile, format)                                                                  \
    static const tile_func stream_##name[STREAM_ROWS] = {stream_##name##_1, stream_##name##_2,               \
                                                         stream_##name##_3, stream_##name##_4};              \
    static const tile_func half_##name[EP_FFN_CHUNK_ROWS] = {half_##name##_1, half_##name##_2,               \
                                                             half_##name##_3, half_##name##_4,               \
                                                             half_##name##_5, half_##name##_6};

TILES(mxfp4, EP_WEIGHTS_MXFP4)
TILES(int4, EP_WEIGHTS_INT4)

/* The weights stream through once. The last groups fetch the first ones of the next panel. */
static void stream_panel(tile_func tile, size_t group_bytes, const float *a, uint32_t rows, const uint8_t *panel, uint32_t groups,
                         const uint8_t *next, float *c)
{
    const uint32_t inside = groups > STREAM_GROUPS ? groups - STREAM_GROUPS : 0;
    const walk most = {.groups = panel, .count = inside, .ahead = panel + STREAM_GROUPS * group_bytes};
    const walk rest = {.groups = panel + inside * group_bytes, .count = groups - inside, .ahead = next == NULL ? panel : next};
    tile(&most, a, c);
    tile(&rest, a + (size_t)inside * EP_FFN_W4A8_LINES * rows, c);
}

/* Blocks of one length, so that each fetches all of the next one. */
static uint32_t block_groups(uint32_t rows, uint32_t groups)
{
    const uint32_t most = rows <= EP_FFN_CHUNK_ROWS ? STREAM_GROUPS : BLOCK_GROUPS;
    const uint32_t count = (groups + most - 1) / most;
    return (groups + count - 1) / count;
}

/*
 * Blocks of groups, all chunks per block; each half of each chunk fetches its share of the next block, evenly. Behind the last
 * block lies the next panel.
 */
static void block_panel(const tile_func *tiles, size_t group_bytes, const float *a, uint32_t rows, const uint8_t *panel,
                        uint32_t groups, const uint8_t *next, float *c)
{
    const ep_ffn_chunks chunks = ep_ffn_chunks_of(rows);
    const uint32_t block = block_groups(rows, groups);
    for (uint32_t g = 0; g < groups; g += block) {
        const uint32_t n = groups - g < block ? groups - g : block;
        const uint8_t *behind = g + n < groups ? panel + (size_t)(g + n) * group_bytes : next;
        walk over = {.groups = panel + (size_t)g * group_bytes, .count = n, .ahead = behind == NULL ? panel : behind,
                     .step = behind == NULL ? 0 : (group_bytes + 2 * chunks.count - 1) / (2 * chunks.count)};
        for (uint32_t chunk = 0; chunk < chunks.count; chunk++) {
            const uint32_t chunk_rows = ep_ffn_chunk_rows(&chunks, chunk);
            const size_t first_row = ep_ffn_chunk_first_row(&chunks, chunk);
            const float *x = a + EP_FFN_W4A8_LINES * (first_row * groups + (size_t)g * chunk_rows);
            tiles[chunk_rows - 1](&over, x, c + first_row * EP_FFN_PANEL);
            over.ahead += 2 * n * over.step;
        }
    }
}

static void w4a8_group_panel(ep_weight_format format, const float *a, uint32_t rows, const uint8_t *panel, uint32_t k_count,
                             const uint8_t *next, float *c)
{
    const bool is_int4 = format == EP_WEIGHTS_INT4;
    const size_t group_bytes = ep_ffn_group_bytes(format);
    const uint32_t groups = ep_ffn_w4a8_groups(k_count);
    __builtin_memset(c, 0, (size_t)rows * EP_FFN_PANEL * sizeof(*c));
    if (rows <= STREAM_ROWS) {
        stream_panel((is_int4 ? stream_int4 : stream_mxfp4)[rows - 1], group_bytes, a, rows, panel, groups, next, c);
    } else {
        block_panel(is_int4 ? half_int4 : half_mxfp4, group_bytes, a, rows, panel, groups, next, c);
    }
}

/* ---- rows to int8 ---- */

/* ep_ffn_w4a8_round of 32 inputs. */
INLINE __m512i round_group(__m512 first, __m512 second)
{
    const __m512i sign_off = _mm512_set1_epi32(0x7fffffff);
    const __m512i both = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(first), sign_off),
                                          _mm512_and_si512(_mm512_castps_si512(second), sign_off));
    const float scale = ep_ffn_int8_scale((uint32_t)_mm512_reduce_max_epu32(both));
    if (!(scale > 0.0f)) {
        return _mm512_maskz_set1_epi32((__mmask16)(1u << EP_FFN_W4A8_SCALE_LINE), (int)ep_f32_bits(scale));
    }
    const __m512 by = _mm512_set1_ps(scale);
    const __m512i least = _mm512_set1_epi32(-127);
    const __m128i low = _mm512_cvtsepi32_epi8(_mm512_max_epi32(_mm512_cvtps_epi32(_mm512_div_ps(first, by)), least));
    const __m128i high = _mm512_cvtsepi32_epi8(_mm512_max_epi32(_mm512_cvtps_epi32(_mm512_div_ps(second, by)), least));
    const __m256i codes = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
    /* Sums of quads, then of all. */
    __m256i sums = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), codes);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1));
    const __m128i ends = _mm_insert_epi32(four, (int)ep_f32_bits(scale), 0); /* the scale, the sum */
    return _mm512_inserti64x4(_mm512_castsi256_si512(codes), _mm256_castsi128_si256(ends), 1);
}

/* rows is a constant wherever this is inlined. */
INLINE void pack_chunk(const uint32_t rows, const ep_ffn_batch *batch, uint32_t first_row, uint32_t hidden, float *a)
{
    const size_t input_bytes = ep_dtype_bytes(batch->x_dtype);
    for (uint32_t k = 0; k < hidden; k += EP_MX_GROUP, a += EP_FFN_W4A8_LINES * rows) {
        const uint32_t left = hidden - k;
        const uint32_t first = left < EP_AVX512_FLOATS ? left : EP_AVX512_FLOATS;
        const uint32_t second = left - first < EP_AVX512_FLOATS ? left - first : EP_AVX512_FLOATS;
        __m512i lanes[EP_FFN_CHUNK_ROWS];
        ep_avx512_fetch_rows(rows, batch, first_row + rows, k * input_bytes);
        for (uint32_t r = 0; r < rows; r++) {
            const ep_ffn_row *row = &batch->rows[first_row + r];
            lanes[r] = round_group(ep_avx512_widen(batch, row, k, first),
                                   second > 0 ? ep_avx512_widen(batch, row, k + first, second) : _mm512_setzero_ps());
        }
        ep_avx512_interleave(rows, lanes, EP_FFN_W4A8_LINES, a);
    }
}

/* rows is a constant wherever this is inlined. */
INLINE void lay_chunk(const uint32_t rows, const float *h, uint32_t count, float *a)
{
    for (uint32_t k = 0; k < count; k += EP_MX_GROUP, a += EP_FFN_W4A8_LINES * rows) {
        const uint32_t left = count - k < EP_MX_GROUP ? count - k : EP_MX_GROUP;
        const uint32_t valid = (uint32_t)(((uint64_t)1 << left) - 1u);
        __m512i lanes[EP_FFN_CHUNK_ROWS];
        for (uint32_t r = 0; r < rows; r++) {
            const float *from = h + r * EP_FFN_PANEL + k;
            lanes[r] = round_group(_mm512_maskz_load_ps((__mmask16)valid, from),
                                   _mm512_maskz_load_ps((__mmask16)(valid >> 16), from + EP_AVX512_FLOATS));
        }
        ep_avx512_interleave(rows, lanes, EP_FFN_W4A8_LINES, a);
    }
}

static void w4a8_pack_rows(const ep_ffn_batch *batch, uint32_t first_row, uint32_t rows, uint32_t hidden, float *a)
{
    EP_AVX512_FOR_ROWS(rows, pack_chunk, batch, first_row, hidden, a)
}

static void w4a8_lay(const float *h, uint32_t rows, uint32_t count, float *a)
{
    EP_AVX512_FOR_ROWS(rows, lay_chunk, h, count, a)
}

static void w4a8_activate(ep_activation activation, const ep_activation_numbers *numbers, const float *c, uint32_t rows,
                          float *h, size_t stride)
{
    ep_avx512_activate(activation, numbers, c, rows, h, stride);
}

static void w4a8_exp16(const float *x, float *out)
{
    ep_avx512_exp16(x, out);
}

static void w4a8_write_row(const float *y, uint32_t count, ep_dtype dtype, void *out, uint32_t first)
{
    ep_avx512_write_row(y, count, dtype, out, first);
}

const ep_ffn_kernel ep_ffn_kernel_w4a8_avx512vnni = {
    .name = "avx512vnni-w4a8",
    .family = EP_FFN_FAMILY_W4A8,
    .group_panel = w4a8_group_panel,
    .activate = w4a8_activate,
    .exp16 = w4a8_exp16,
    .pack_rows = w4a8_pack_rows,
    .lay = w4a8_lay,
    .write_row = w4a8_write_row,
};
