/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Family `w4a8` on AVX-512 VNNI. The instruction multiplies unsigned by signed. So 8 (int4: giving
 * the code itself) or 16 (mxfp4) is added to weights, and sums begin at minus that times the sum of
 * the group's inputs; weights of q4_k are unsigned already. Codes become bytes in registers, again
 * for each chunk: a few instructions for 16 outputs and two quads, for two dot products per row.
 */
#include "kernels/ffn_w4a8.h"
#include "kernels/x86/ffn_avx512.h"
#include "kernels/x86/ffn_x86.h"

#define VECTORS 4 /* of 16 outputs: a panel */
/* how many vectors keep totals in registers besides the sums, for any number of rows */
#define HALF_VECTORS 2
#define STREAM_GROUPS 6 /* how many groups ahead to fetch while weights stream in */
/* largest block; it stays in the second-level cache while all chunks use it */
#define BLOCK_GROUPS 64

/* The groups that a tile processes, and what it fetches meanwhile. */
typedef struct {
    const uint8_t *groups;
    uint32_t count;
    uint32_t first;              /* index of the first one in its panel */
    const float *factors;        /* for the whole panel */
    const uint8_t *next_factors; /* fetched while weights stream in, one cache line per group */
    const uint8_t *ahead;
    /* bytes per group. Unused while weights stream in: then each group fetches its own size */
    size_t step;
} walk;

/* Unsigned weights of 64 codes: the lower nibbles of bytes. */
INLINE __m512i widen(ep_weight_format format, __m512i nibbles)
{
    if (format != EP_WEIGHTS_MXFP4) {
        return nibbles;
    }
    const __m512i e2m1 = _mm512_broadcast_i32x4(
        _mm_setr_epi8(16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4));
    return _mm512_shuffle_epi8(e2m1, nibbles);
}

static __attribute__((noinline, cold)) void rare_scales(const uint8_t *scales, float *to)
{
    for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
        to[o] = ep_ffn_w4a8_e8m0(scales[o]);
    }
}

/* Scales of a group, and for q4_k eighths of offsets. */
typedef struct {
    __m512 scales[VECTORS];
    __m512 eighths[VECTORS];
} group_ends;

/* 16 bytes, each multiplied by its float. */
INLINE __m512 join_parts(const uint8_t *parts, const float *factors)
{
    const __m128i bytes = _mm_load_si128((const __m128i *)(const void *)parts);
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)), _mm512_load_ps(factors));
}

/* Those of outputs from 16 first on. scales: of the whole group; factors: its own. */
INLINE void load_ends(const ep_weight_format format, const uint8_t *scales, const float *factors,
                      int first, const int vectors, group_ends *to)
{
    if (format == EP_WEIGHTS_Q4_K) {
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) {
            const int o = 16 * (first + j);
            to->scales[j] = join_parts(scales + o, factors + o);
            to->eighths[j] =
                _mm512_mul_ps(join_parts(scales + EP_FFN_PANEL + o, factors + EP_FFN_PANEL + o),
                              _mm512_set1_ps(0.125f));
        }
        return;
    }
    if (format != EP_WEIGHTS_MXFP4) {
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) {
            const __m256i halves =
                _mm256_load_si256((const __m256i *)(const void *)(scales + 32 * (first + j)));
            to->scales[j] =
                format == EP_WEIGHTS_INT4_F16
                    ? _mm512_cvtph_ps(halves)
                    : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
        }
        return;
    }
    /* 2^(code - 128) is a normal number with exponent field code - 1, except for codes 0, 1,
     * 255. */
    const __m512i from_two = _mm512_sub_epi8(_mm512_load_si512(scales), _mm512_set1_epi8(2));
    if (__builtin_expect(_mm512_cmpgt_epu8_mask(from_two, _mm512_set1_epi8((char)252)) != 0, 0)) {
        _Alignas(64) float all[EP_FFN_PANEL];
        rare_scales(scales, all);
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) {
            to->scales[j] = _mm512_load_ps(all + 16 * (first + j));
        }
        return;
    }
#pragma GCC unroll 4
    for (int j = 0; j < vectors; j++) {
        const __m512i codes = _mm512_cvtepu8_epi32(
            _mm_load_si128((const __m128i *)(const void *)(scales + 16 * (first + j))));
        to->scales[j] = _mm512_castsi512_ps(
            _mm512_sub_epi32(_mm512_slli_epi32(codes, 23), _mm512_set1_epi32(1 << 23)));
    }
}

/*
 * Fetches a cache line of streaming weights into the second-level cache. The first level has few
 * places for lines in flight, and other loads would wait for one. For a single row, which waits for
 * memory more than it computes, the first level is as quick or slightly quicker.
 */
INLINE void fetch_line(const int rows, const uint8_t *line)
{
    if (rows == 1) {
        _mm_prefetch((const char *)line, _MM_HINT_T0);
    } else {
        _mm_prefetch((const char *)line, _MM_HINT_T1);
    }
}

/*
 * The sums of one group for `vectors` vectors of outputs from first on. a: the group's lines.
 * ahead: as many cache lines of another group are fetched if fetches is set, spread evenly: fetched
 * all at once they would delay loads.
 */
INLINE void sum_group(const int rows, const ep_weight_format format, const uint8_t *group,
                      int first, const int vectors, const bool fetches, const uint8_t *ahead,
                      const float *a, __m512i acc[][VECTORS])
{
    const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        const __m512i eight =
            _mm512_castps_si512(_mm512_set1_ps(a[(int)EP_FFN_W4A8_START_LINE * rows + r]));
        const __m512i start = format == EP_WEIGHTS_Q4_K    ? _mm512_setzero_si512()
                              : format == EP_WEIGHTS_MXFP4 ? _mm512_add_epi32(eight, eight)
                                                           : eight;
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) {
            acc[r][j] = start;
        }
    }
#pragma GCC unroll 1
    for (int p = 0; p < 4; p++) {
        const uint8_t *codes = group + p * (int)EP_FFN_W4A8_PAIR_BYTES + 64 * first;
#pragma GCC unroll 4
        for (int j = 0; fetches && j < vectors; j++) {
            fetch_line(rows, ahead + p * (int)EP_FFN_W4A8_PAIR_BYTES + 64 * (first + j));
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            __m512i w[VECTORS];
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) {
                const __m512i both = _mm512_load_si512(codes + 64 * j);
                w[j] = widen(format,
                             _mm512_and_si512(half == 0 ? both : _mm512_srli_epi16(both, 4), low));
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

/* Adds the scaled sums of a group to total; the first ones to total[r][first]. */
INLINE void add_group(const int rows, const ep_weight_format format, const int vectors,
                      const float *a, const group_ends *by, __m512i acc[][VECTORS], const int first,
                      __m512 total[][VECTORS])
{
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        const __m512 input_scale = _mm512_set1_ps(a[(int)EP_FFN_W4A8_SCALE_LINE * rows + r]);
        const __m512 start = _mm512_cvtepi32_ps(
            _mm512_castps_si512(_mm512_set1_ps(a[(int)EP_FFN_W4A8_START_LINE * rows + r])));
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) {
            const __m512 sum = _mm512_cvtepi32_ps(acc[r][j]);
            __m512 *to = &total[r][first + j];
            if (format == EP_WEIGHTS_Q4_K) {
                const __m512 less = _mm512_mul_ps(by->eighths[j], start);
                *to = _mm512_fmadd_ps(_mm512_fmadd_ps(sum, by->scales[j], less), input_scale, *to);
            } else {
                *to = _mm512_fmadd_ps(_mm512_mul_ps(sum, input_scale), by->scales[j], *to);
            }
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

/* Fetches group g's share of the scales and factors. */
INLINE void fetch_ends(const int rows, const ep_weight_format format, const walk *over, uint32_t g,
                       const uint8_t *ahead)
{
#pragma GCC unroll 2
    for (size_t at = EP_FFN_W4A8_CODE_BYTES; at < ep_ffn_group_bytes(format); at += 64) {
        fetch_line(rows, ahead + at);
    }
    if (format == EP_WEIGHTS_Q4_K) {
        _mm_prefetch((const char *)over->next_factors + 64 * (size_t)(over->first + g),
                     _MM_HINT_T1);
    }
}

/* The factors of parts for group g of the processed groups. */
INLINE const float *factors_of(const ep_weight_format format, const walk *over, uint32_t g)
{
    return over->factors +
           (over->first + g) / (EP_SCALE_BLOCK / EP_MX_GROUP) * ep_ffn_block_factors(format);
}

/* Up to 3 rows of one chunk: the totals of a whole panel stay in registers. rows and format are
 * constants wherever this is inlined. */
INLINE void stream_few(const int rows, const ep_weight_format format, const walk *over,
                       const float *a, float *c)
{
    const size_t group_bytes = ep_ffn_group_bytes(format);
    const uint8_t *group = over->groups;
    const uint8_t *ahead = over->ahead;
    __m512 total[EP_FFN_CHUNK_ROWS][VECTORS];
    load_totals(rows, VECTORS, c, total);
    for (uint32_t g = 0; g < over->count; g++, group += group_bytes, ahead += group_bytes) {
        __m512i acc[EP_FFN_CHUNK_ROWS][VECTORS];
        group_ends by;
        sum_group(rows, format, group, 0, VECTORS, true, ahead, a, acc);
        fetch_ends(rows, format, over, g, ahead);
        load_ends(format, group + EP_FFN_W4A8_CODE_BYTES, factors_of(format, over, g), 0, VECTORS,
                  &by);
        add_group(rows, format, VECTORS, a, &by, acc, 0, total);
        a += (int)EP_FFN_W4A8_LINES * rows;
    }
    store_totals(rows, VECTORS, total, c);
}

/* 4 rows: the totals of a whole panel and the sums of half a panel fit the registers. */
INLINE void stream_four(const int rows, const ep_weight_format format, const walk *over,
                        const float *a, float *c)
{
    const size_t group_bytes = ep_ffn_group_bytes(format);
    const uint8_t *group = over->groups;
    const uint8_t *ahead = over->ahead;
    __m512 total[EP_FFN_CHUNK_ROWS][VECTORS];
    load_totals(rows, VECTORS, c, total);
    for (uint32_t g = 0; g < over->count; g++, group += group_bytes, ahead += group_bytes) {
#pragma GCC unroll 2
        for (int first = 0; first < VECTORS; first += HALF_VECTORS) {
            __m512i acc[EP_FFN_CHUNK_ROWS][VECTORS];
            group_ends by;
            sum_group(rows, format, group, first, HALF_VECTORS, true, ahead, a, acc);
            load_ends(format, group + EP_FFN_W4A8_CODE_BYTES, factors_of(format, over, g), first,
                      HALF_VECTORS, &by);
            add_group(rows, format, HALF_VECTORS, a, &by, acc, first, total);
        }
        fetch_ends(rows, format, over, g, ahead);
        a += (int)EP_FFN_W4A8_LINES * rows;
    }
    store_totals(rows, VECTORS, total, c);
}

/* More rows of one chunk: both halves of each group in turn, since memory is then read in order;
 * totals stay in c. */
INLINE void stream_many(const int rows, const ep_weight_format format, const walk *over,
                        const float *a, float *c)
{
    const size_t group_bytes = ep_ffn_group_bytes(format);
    const uint8_t *group = over->groups;
    const uint8_t *ahead = over->ahead;
    for (uint32_t g = 0; g < over->count; g++, group += group_bytes, ahead += group_bytes) {
#pragma GCC unroll 2
        for (int first = 0; first < VECTORS; first += HALF_VECTORS) {
            __m512 total[EP_FFN_CHUNK_ROWS][VECTORS];
            __m512i acc[EP_FFN_CHUNK_ROWS][VECTORS];
            group_ends by;
            sum_group(rows, format, group, first, HALF_VECTORS, true, ahead, a, acc);
            load_ends(format, group + EP_FFN_W4A8_CODE_BYTES, factors_of(format, over, g), first,
                      HALF_VECTORS, &by);
            load_totals(rows, HALF_VECTORS, c + 16 * first, total);
            add_group(rows, format, HALF_VECTORS, a, &by, acc, 0, total);
            store_totals(rows, HALF_VECTORS, total, c + 16 * first);
        }
        fetch_ends(rows, format, over, g, ahead);
        a += (int)EP_FFN_W4A8_LINES * rows;
    }
}

/* One of several chunks: one half of a panel after the other, so that totals of any number of rows
 * stay in registers. */
INLINE void block_tile(const int rows, const ep_weight_format format, const walk *over,
                       const float *a, float *c)
{
    const size_t group_bytes = ep_ffn_group_bytes(format);
    const uint8_t *ahead = over->ahead;
    for (int first = 0; first < VECTORS; first += HALF_VECTORS) {
        const uint8_t *group = over->groups;
        const float *x = a;
        __m512 total[EP_FFN_CHUNK_ROWS][VECTORS];
        load_totals(rows, HALF_VECTORS, c + 16 * first, total);
        for (uint32_t g = 0; g < over->count; g++, group += group_bytes, ahead += over->step) {
            __m512i acc[EP_FFN_CHUNK_ROWS][VECTORS];
            group_ends by;
            for (size_t at = 0; at < over->step; at += 64) {
                _mm_prefetch((const char *)ahead + at, _MM_HINT_T1);
            }
            sum_group(rows, format, group, first, HALF_VECTORS, false, NULL, x, acc);
            load_ends(format, group + EP_FFN_W4A8_CODE_BYTES, factors_of(format, over, g), first,
                      HALF_VECTORS, &by);
            add_group(rows, format, HALF_VECTORS, x, &by, acc, 0, total);
            x += (int)EP_FFN_W4A8_LINES * rows;
        }
        store_totals(rows, HALF_VECTORS, total, c + 16 * first);
    }
}

typedef void (*tile_func)(const walk *over, const float *a, float *c);

#define TILE(name, rows, func, format)                                                             \
    static void name##_##rows(const walk *over, const float *a, float *c)                          \
    {                                                                                              \
        func(rows, format, over, a, c);                                                            \
    }
/* If there are several chunks, each has at least 3 rows. */
#define TILES(name, format)                                                                        \
    TILE(stream_##name, 1, stream_few, format)                                                     \
    TILE(stream_##name, 2, stream_few, format)                                                     \
    TILE(stream_##name, 3, stream_few, format)                                                     \
    TILE(stream_##name, 4, stream_four, format)                                                    \
    TILE(stream_##name, 5, stream_many, format)                                                    \
    TILE(stream_##name, 6, stream_many, format)                                                    \
    TILE(block_##name, 3, block_tile, format)                                                      \
    TILE(block_##name, 4, block_tile, format)                                                      \
    TILE(block_##name, 5, block_tile, format)                                                      \
    TILE(block_##name, 6, block_tile, format)                                                      \
    static const tile_func stream_##name[EP_FFN_CHUNK_ROWS] = {                                    \
        stream_##name##_1, stream_##name##_2, stream_##name##_3,                                   \
        stream_##name##_4, stream_##name##_5, stream_##name##_6};                                  \
    static const tile_func block_##name[EP_FFN_CHUNK_ROWS] = {                                     \
        NULL, NULL, block_##name##_3, block_##name##_4, block_##name##_5, block_##name##_6};

TILES(mxfp4, EP_WEIGHTS_MXFP4)
TILES(int4, EP_WEIGHTS_INT4)
TILES(int4_f16, EP_WEIGHTS_INT4_F16)
TILES(q4_k, EP_WEIGHTS_Q4_K)

static const struct {
    const tile_func *stream;
    const tile_func *block;
} tiles_of[EP_WEIGHTS_COUNT] = {[EP_WEIGHTS_MXFP4] = {stream_mxfp4, block_mxfp4},
                                [EP_WEIGHTS_INT4] = {stream_int4, block_int4},
                                [EP_WEIGHTS_INT4_F16] = {stream_int4_f16, block_int4_f16},
                                [EP_WEIGHTS_Q4_K] = {stream_q4_k, block_q4_k}};

/* A panel of one of the formats. */
typedef struct {
    const uint8_t *groups;
    uint32_t count;
    size_t group_bytes;
    const float *factors;
} whole_panel;

/* Where the factors of a panel of this length begin: after all groups. */
static const uint8_t *factors_behind(const whole_panel *panel, const uint8_t *next)
{
    return (next == NULL ? panel->groups : next) + panel->count * panel->group_bytes;
}

/* The weights are read once. The last groups fetch the first groups of the next panel. */
static void stream_panel(tile_func over_groups, const whole_panel *panel, const float *a,
                         uint32_t rows, const uint8_t *next, float *c)
{
    const uint32_t count = panel->count;
    const uint32_t inside = count > STREAM_GROUPS ? count - STREAM_GROUPS : 0;
    const walk most = {.groups = panel->groups,
                       .count = inside,
                       .factors = panel->factors,
                       .next_factors = factors_behind(panel, next),
                       .ahead = panel->groups + STREAM_GROUPS * panel->group_bytes};
    const walk rest = {.groups = panel->groups + inside * panel->group_bytes,
                       .count = count - inside,
                       .first = inside,
                       .factors = panel->factors,
                       .next_factors = factors_behind(panel, next),
                       .ahead = next == NULL ? panel->groups : next};
    over_groups(&most, a, c);
    over_groups(&rest, a + (size_t)inside * EP_FFN_W4A8_LINES * rows, c);
}

/*
 * Blocks of groups of equal length, so that each can fetch the whole next one; all chunks per
 * block. Each half of each chunk fetches an equal share. After the last block comes the next panel.
 */
static void block_panel(const tile_func *tiles, const whole_panel *panel, const float *a,
                        uint32_t rows, const uint8_t *next, float *c)
{
    const ep_ffn_chunks chunks = ep_ffn_chunks_of(rows);
    const size_t group_bytes = panel->group_bytes;
    const uint32_t groups = panel->count;
    const uint32_t blocks = (groups + BLOCK_GROUPS - 1) / BLOCK_GROUPS;
    const uint32_t block = (groups + blocks - 1) / blocks;
    const size_t step = (group_bytes + 2 * chunks.count - 1) / (2 * chunks.count);
    for (uint32_t g = 0; g < groups; g += block) {
        const uint32_t n = groups - g < block ? groups - g : block;
        const uint8_t *behind =
            g + n < groups ? panel->groups + (size_t)(g + n) * group_bytes : next;
        walk over = {.groups = panel->groups + (size_t)g * group_bytes,
                     .count = n,
                     .first = g,
                     .factors = panel->factors,
                     .ahead = behind,
                     .step = step};
        if (behind == NULL) {
            over.ahead = over.groups;
            over.step = 0;
        }
        for (uint32_t chunk = 0; chunk < chunks.count; chunk++) {
            const uint32_t chunk_rows = ep_ffn_chunk_rows(&chunks, chunk);
            const size_t first_row = ep_ffn_chunk_first_row(&chunks, chunk);
            const float *x = a + EP_FFN_W4A8_LINES * (first_row * groups + (size_t)g * chunk_rows);
            tiles[chunk_rows - 1](&over, x, c + first_row * EP_FFN_PANEL);
            over.ahead += 2 * n * over.step;
        }
    }
}

static void w4a8_group_panel(ep_weight_format format, const float *a, uint32_t rows,
                             const uint8_t *panel, uint32_t k_count, const uint8_t *next, float *c)
{
    const uint32_t groups = ep_ffn_w4a8_groups(k_count);
    const whole_panel whole = {.groups = panel,
                               .count = groups,
                               .group_bytes = ep_ffn_group_bytes(format),
                               .factors = ep_ffn_factors_of(format, panel, groups, 0)};
    __builtin_memset(c, 0, (size_t)rows * EP_FFN_PANEL * sizeof(*c));
    if (rows <= EP_FFN_CHUNK_ROWS) {
        stream_panel(tiles_of[format].stream[rows - 1], &whole, a, rows, next, c);
    } else {
        block_panel(tiles_of[format].block, &whole, a, rows, next, c);
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
        return _mm512_maskz_set1_epi32((__mmask16)(1u << EP_FFN_W4A8_SCALE_LINE),
                                       (int)ep_f32_bits(scale));
    }
    const __m512 by = _mm512_set1_ps(scale);
    const __m512i least = _mm512_set1_epi32(-127);
    const __m128i low = _mm512_cvtsepi32_epi8(
        _mm512_max_epi32(_mm512_cvtps_epi32(_mm512_div_ps(first, by)), least));
    const __m128i high = _mm512_cvtsepi32_epi8(
        _mm512_max_epi32(_mm512_cvtps_epi32(_mm512_div_ps(second, by)), least));
    const __m256i codes = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
    /* Sums of quads, then of all. */
    __m256i sums = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), codes);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1));
    const __m128i start = _mm_sub_epi32(_mm_setzero_si128(), _mm_slli_epi32(four, 3));
    const __m128i ends = _mm_insert_epi32(start, (int)ep_f32_bits(scale), 0);
    return _mm512_inserti64x4(_mm512_castsi256_si512(codes), _mm256_castsi128_si256(ends), 1);
}

/* rows is a constant wherever this is inlined. */
INLINE void pack_chunk(const uint32_t rows, const ep_ffn_batch *batch, uint32_t first_row,
                       uint32_t hidden, float *a)
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
                                   second > 0 ? ep_avx512_widen(batch, row, k + first, second)
                                              : _mm512_setzero_ps());
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
            lanes[r] = round_group(
                _mm512_maskz_load_ps((__mmask16)valid, from),
                _mm512_maskz_load_ps((__mmask16)(valid >> 16), from + EP_AVX512_FLOATS));
        }
        ep_avx512_interleave(rows, lanes, EP_FFN_W4A8_LINES, a);
    }
}

static void w4a8_pack_rows(const ep_ffn_batch *batch, uint32_t first_row, uint32_t rows,
                           uint32_t hidden, float *a)
{
    EP_AVX512_FOR_ROWS(rows, pack_chunk, batch, first_row, hidden, a)
}

static void w4a8_lay(const float *h, uint32_t rows, uint32_t count, float *a)
{
    EP_AVX512_FOR_ROWS(rows, lay_chunk, h, count, a)
}

const ep_ffn_kernel ep_ffn_kernel_w4a8_avx512vnni = {
    .name = "avx512vnni-w4a8",
    .family = EP_FFN_FAMILY_W4A8,
    .group_panel = w4a8_group_panel,
    .activate = ep_avx512_activate,
    .exp16 = ep_avx512_exp16,
    .pack_rows = w4a8_pack_rows,
    .lay = w4a8_lay,
    .write_row = ep_avx512_write_row,
};
