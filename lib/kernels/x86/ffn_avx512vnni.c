/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The w8a8 part of the AVX-512 VNNI kernel: by register tiles of up to 6 rows x 64 outputs, four k per step. The instruction takes unsigned by signed, so
 * rows are stored as q + 128 and sums begin at -128 times the sum of an output's weights. All of it is modulo 2^32 and the true sum
 * fits (EP_W8A8_COLUMNS_MAX), so sums are exact and the bits those of every other kernel.
 */
#include "kernels/ffn_int8.h"
#include "kernels/x86/ffn_avx512.h"
#include "kernels/x86/ffn_x86.h"

#define INLINE EP_AVX512_INLINE
#define VECTORS 4       /* of 16 outputs: one panel line */
#define LINE_BYTES 256u /* of a panel: a quad of 64 outputs */
#define ROUNDED 64u     /* inputs rounded at a time: 16 quads */
/* With more rows the sums leave the nearest cache between blocks: fewer, longer blocks, from the second level. */
#define FEW_ROWS 32u
#define WIDE_BLOCK 512u
/* Fetched that far ahead while weights stream in and each line is used by one chunk. */
#define STREAM_LINES 8u

/* What a tile fetches into the second level cache while it computes: cache lines from next on, per line of b. */
typedef struct {
    const uint8_t *next;
    size_t step;
} prefetch;

/* What follows a panel's lines, and the scales of a tile's rows. */
typedef struct {
    const float *weight_scales;
    const int32_t *offsets;
    const float *row_scales;
    bool first; /* no sums in c yet */
    bool last;  /* c gets the results */
} edges;

/* One register tile over n lines. rows and fetched are constants wherever this is inlined. */
INLINE void tile(const int rows, const int fetched, prefetch ahead, const int8_t *a, const uint8_t *b, uint32_t n, const edges *e,
                 float *c)
{
    __m512i acc[EP_FFN_CHUNK_ROWS][VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            acc[r][j] = e->first ? _mm512_load_si512(e->offsets + 16 * j) : _mm512_load_si512(c + r * EP_FFN_PANEL + 16 * j);
        }
    }
    for (uint32_t line = 0; line < n; line++) {
        __m512i w[VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            w[j] = _mm512_load_si512(b + 64 * j);
        }
#pragma GCC unroll 4
        for (int q = 0; q < fetched; q++) {
            _mm_prefetch((const char *)ahead.next + 64 * q, _MM_HINT_T1);
        }
        ahead.next += ahead.step;
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            int32_t quad;
            __builtin_memcpy(&quad, a + 4 * r, sizeof(quad));
            const __m512i x = _mm512_set1_epi32(quad);
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++) {
                acc[r][j] = _mm512_dpbusd_epi32(acc[r][j], x, w[j]);
            }
        }
        a += 4 * rows;
        b += LINE_BYTES;
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            float *to = c + r * EP_FFN_PANEL + 16 * j;
            if (e->last) {
                const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(acc[r][j]), _mm512_load_ps(e->weight_scales + 16 * j));
                _mm512_store_ps(to, _mm512_mul_ps(scaled, _mm512_set1_ps(e->row_scales[r])));
            } else {
                _mm512_store_si512(to, acc[r][j]);
            }
        }
    }
}

typedef void (*tile_func)(prefetch ahead, const int8_t *a, const uint8_t *b, uint32_t n, const edges *e, float *c);

/* How many cache lines a tile fetches per line of b: none, its share of the next block in one or two, whole lines. */
#define TILE(rows, name, fetched)                                                                            \
    static void tile_##name##_##rows(prefetch ahead, const int8_t *a, const uint8_t *b, uint32_t n,          \
                                     const edges *e, float *c)                                               \
    {                                                                                                        \
        tile(rows, fetched, ahead, a, b, n, e, c);                                                           \
    }
#define TILES(name, fetched)                                                                                 \
    TILE(1, name, fetched)                                                                                   \
    TILE(2, name, fetched)                                                                                   \
    TILE(3, name, fetched)                                                                                   \
    TILE(4, name, fetched)                                                                                   \
    TILE(5, name, fetched)                                                                                   \
    TILE(6, name, fetched)                                                                                   \
    static const tile_func tiles_##name[EP_FFN_CHUNK_ROWS] = {tile_##name##_1, tile_##name##_2,              \
                                                              tile_##name##_3, tile_##name##_4,              \
                                                              tile_##name##_5, tile_##name##_6};

TILES(none, 0)
TILES(one, 1)
TILES(two, 2)
TILES(whole, 4)

/* One chunk: the weights stream through once. The last lines fetch the first ones of the next panel. */
static void stream_panel(const int8_t *a, uint32_t rows, const uint8_t *panel, uint32_t lines, const uint8_t *next, edges e, float *c)
{
    const uint32_t inside = lines > STREAM_LINES ? lines - STREAM_LINES : 0;
    prefetch ahead = {.next = panel + STREAM_LINES * LINE_BYTES, .step = LINE_BYTES};
    e.first = true;
    if (inside > 0) {
        e.last = false;
        tiles_whole[rows - 1](ahead, a, panel, inside, &e, c);
        e.first = false;
    }
    e.last = true;
    ahead.next = next == NULL ? panel : next;
    (next == NULL ? tiles_none : tiles_whole)[rows - 1](ahead, a + (size_t)inside * 4 * rows, panel + (size_t)inside * LINE_BYTES,
                                                        lines - inside, &e, c);
}

/*
 * Blocks of lines, all chunks per block. While a block is used from the near caches every chunk fetches its share
 * of the next one, evenly, so that loading hides behind arithmetic. Behind the last block lies the next panel.
 */
void ep_ffn_avx512vnni_int8_panel(const int8_t *a, uint32_t rows, const uint8_t *panel, uint32_t k_count,
                                  const float *row_scales, const uint8_t *next, float *c)
{
    const uint32_t lines = ep_ffn_quads(k_count);
    const ep_ffn_chunks chunks = ep_ffn_chunks_of(rows);
    edges e = {.weight_scales = ep_ffn_int8_weight_scales(panel, k_count),
               .offsets = ep_ffn_int8_offsets(panel, k_count),
               .row_scales = row_scales};
    for (uint32_t i = 0; i < 8; i++) {
        _mm_prefetch((const char *)e.weight_scales + 64 * (size_t)i, _MM_HINT_T1);
    }
    if (chunks.count == 1) {
        stream_panel(a, rows, panel, lines, next, e, c);
        return;
    }
    const size_t share = (LINE_BYTES + chunks.count - 1) / chunks.count;
    const tile_func *fetching = share > 64 ? tiles_two : tiles_one;
    const uint32_t block = rows <= FEW_ROWS ? EP_FFN_K_BLOCK : WIDE_BLOCK;
    for (uint32_t line = 0; line < lines; line += block) {
        const uint32_t n = lines - line < block ? lines - line : block;
        const uint8_t *b = panel + (size_t)line * LINE_BYTES;
        const uint8_t *behind = line + n < lines ? b + (size_t)n * LINE_BYTES : next;
        const tile_func *tiles = behind == NULL ? tiles_none : fetching;
        e.first = line == 0;
        e.last = line + n == lines;
        for (uint32_t chunk = 0; chunk < chunks.count; chunk++) {
            const uint32_t chunk_rows = ep_ffn_chunk_rows(&chunks, chunk);
            const size_t first_row = ep_ffn_chunk_first_row(&chunks, chunk);
            const int8_t *x = a + 4 * (first_row * lines + (size_t)line * chunk_rows);
            prefetch ahead = {.next = behind == NULL ? b : behind + (size_t)chunk * n * LINE_BYTES / chunks.count, .step = share};
            e.row_scales = row_scales + first_row;
            tiles[chunk_rows - 1](ahead, x, b, n, &e, c + first_row * EP_FFN_PANEL);
        }
    }
}

/* ---- rows to int8 ---- */

INLINE float row_scale(const ep_ffn_batch *batch, const ep_ffn_row *row, uint32_t k_count)
{
    __m512i greatest = _mm512_setzero_si512();
    for (uint32_t k = 0; k < k_count; k += EP_AVX512_FLOATS) {
        const uint32_t count = k_count - k < EP_AVX512_FLOATS ? k_count - k : EP_AVX512_FLOATS;
        const __m512i bits = _mm512_castps_si512(ep_avx512_widen(batch, row, k, count));
        greatest = _mm512_max_epu32(greatest, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    }
    return ep_ffn_int8_scale((uint32_t)_mm512_reduce_max_epu32(greatest));
}

/* x / scale of 16 values to the nearest integers; scale > 0. */
INLINE __m512i round16(const ep_ffn_batch *batch, const ep_ffn_row *row, uint32_t k, uint32_t k_count, float scale)
{
    if (k >= k_count) {
        return _mm512_setzero_si512();
    }
    const uint32_t count = k_count - k < EP_AVX512_FLOATS ? k_count - k : EP_AVX512_FLOATS;
    return _mm512_cvtps_epi32(_mm512_div_ps(ep_avx512_widen(batch, row, k, count), _mm512_set1_ps(scale)));
}

/* ep_ffn_int8_round of inputs k..k + 63, plus 128. */
INLINE __m512i round64(const ep_ffn_batch *batch, const ep_ffn_row *row, uint32_t k, uint32_t k_count, float scale)
{
    const __m512i plus = _mm512_set1_epi8((char)0x80);
    if (!(scale > 0.0f)) {
        return plus;
    }
    const __m512i low = _mm512_packs_epi32(round16(batch, row, k, k_count, scale), round16(batch, row, k + 16, k_count, scale));
    const __m512i high = _mm512_packs_epi32(round16(batch, row, k + 32, k_count, scale), round16(batch, row, k + 48, k_count, scale));
    const __m512i codes = _mm512_max_epi8(_mm512_packs_epi16(low, high), _mm512_set1_epi8(-127));
    /* Packing went by lanes of 128 bits: quad 4 j + l is word 4 l + j. */
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    return _mm512_xor_si512(_mm512_permutexvar_epi32(order, codes), plus);
}

/* rows is a constant wherever this is inlined. */
INLINE void round_chunk(const uint32_t rows, const ep_ffn_batch *batch, uint32_t first_row, uint32_t k_count, int8_t *a, float *scales)
{
    for (uint32_t r = 0; r < rows; r++) {
        scales[r] = row_scale(batch, &batch->rows[first_row + r], k_count);
    }
    for (uint32_t k = 0; k < k_count; k += ROUNDED) {
        const uint32_t count = k_count - k < ROUNDED ? k_count - k : ROUNDED;
        __m512i quads[EP_FFN_CHUNK_ROWS];
#pragma GCC unroll 6
        for (uint32_t r = 0; r < rows; r++) {
            quads[r] = round64(batch, &batch->rows[first_row + r], k, k_count, scales[r]);
        }
        ep_avx512_interleave(rows, quads, ep_ffn_quads(count), (float *)(void *)(a + (size_t)k * rows));
    }
}

void ep_ffn_avx512vnni_int8_rows(const ep_ffn_batch *batch, uint32_t first_row, uint32_t rows, uint32_t k_count, int8_t *a,
                                 float *scales)
{
    EP_AVX512_FOR_ROWS(rows, round_chunk, batch, first_row, k_count, a, scales)
}
