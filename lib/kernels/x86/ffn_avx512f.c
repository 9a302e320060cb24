/* SPDX-License-Identifier: Apache-2.0 */
/* AVX-512F kernel: register tiles of up to 6 rows x 64 outputs, weights widened in registers. */
#include "kernels/x86/ffn_avx512.h"
#include "kernels/x86/ffn_x86.h"

#define INLINE EP_AVX512_INLINE
#define VECTORS 4 /* of 16 floats: one panel line */
/* prefetched that far ahead while weights stream in and each line is used by one chunk */
#define STREAM_BYTES 2048

/* Widens line k of a panel; dtype is a constant wherever this is inlined. */
INLINE void load_line(ep_dtype dtype, const uint8_t *line, __m512 w[VECTORS])
{
    if (dtype == EP_DTYPE_BF16) {
        const __m512i high = _mm512_set1_epi32((int)0xffff0000u);
        __m512i first = _mm512_loadu_si512(line);
        __m512i second = _mm512_loadu_si512(line + 64);
        w[0] = _mm512_castsi512_ps(_mm512_slli_epi32(first, 16));
        w[1] = _mm512_castsi512_ps(_mm512_and_si512(first, high));
        w[2] = _mm512_castsi512_ps(_mm512_slli_epi32(second, 16));
        w[3] = _mm512_castsi512_ps(_mm512_and_si512(second, high));
    } else if (dtype == EP_DTYPE_F16) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            w[j] =
                _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(line + 32 * j)));
        }
    } else {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            w[j] = _mm512_loadu_ps(line + 64 * j);
        }
    }
}

/* What a tile fetches into the second level cache while it computes: `lines` cache lines from next
 * on, per line of b. */
typedef struct {
    const uint8_t *next;
    size_t step;
} prefetch;

/* One register tile over n lines. first: c is not read. rows, dtype and lines are constants
 * wherever this is inlined. */
INLINE void tile(const int rows, const ep_dtype dtype, const int lines, prefetch ahead,
                 const float *a, const uint8_t *b, uint32_t n, bool first, float *c)
{
    const int line_bytes = dtype == EP_DTYPE_F32 ? 256 : 128;
    __m512 acc[EP_FFN_CHUNK_ROWS][VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            acc[r][j] = first ? _mm512_setzero_ps() : _mm512_load_ps(c + r * EP_FFN_PANEL + 16 * j);
        }
    }
    for (uint32_t k = 0; k < n; k++) {
        __m512 w[VECTORS];
        load_line(dtype, b, w);
#pragma GCC unroll 4
        for (int q = 0; q < lines; q++) {
            _mm_prefetch((const char *)ahead.next + 64 * q, _MM_HINT_T1);
        }
        ahead.next += ahead.step;
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            __m512 x = _mm512_set1_ps(a[r]);
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++) {
                acc[r][j] = _mm512_fmadd_ps(w[j], x, acc[r][j]);
            }
        }
        a += rows;
        b += line_bytes;
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            _mm512_store_ps(c + r * EP_FFN_PANEL + 16 * j, acc[r][j]);
        }
    }
}

typedef void (*tile_func)(const float *a, const uint8_t *b, uint32_t n, bool first, bool stream,
                          prefetch ahead, float *c);

/* stream: whole lines are fetched; else one cache line per line of b, two where lines are twice as
 * long. */
#define TILE(name, dtype, rows)                                                                    \
    static void tile_##name##_##rows(const float *a, const uint8_t *b, uint32_t n, bool first,     \
                                     bool stream, prefetch ahead, float *c)                        \
    {                                                                                              \
        const int lines = (dtype) == EP_DTYPE_F32 ? 4 : 2;                                         \
        if (stream) {                                                                              \
            tile(rows, dtype, lines, ahead, a, b, n, first, c);                                    \
        } else {                                                                                   \
            tile(rows, dtype, lines / 2, ahead, a, b, n, first, c);                                \
        }                                                                                          \
    }
#define TILES(name, dtype)                                                                         \
    TILE(name, dtype, 1)                                                                           \
    TILE(name, dtype, 2)                                                                           \
    TILE(name, dtype, 3)                                                                           \
    TILE(name, dtype, 4)                                                                           \
    TILE(name, dtype, 5)                                                                           \
    TILE(name, dtype, 6)                                                                           \
    static const tile_func tiles_##name[EP_FFN_CHUNK_ROWS] = {tile_##name##_1, tile_##name##_2,    \
                                                              tile_##name##_3, tile_##name##_4,    \
                                                              tile_##name##_5, tile_##name##_6};

TILES(bf16, EP_DTYPE_BF16)
TILES(f16, EP_DTYPE_F16)
TILES(f32, EP_DTYPE_F32)

/*
 * Blocks of k, all chunks per block. One chunk: the weights stream through once. More: while a
 * block is used from the near caches every chunk fetches its share of the next one, evenly, so that
 * loading hides behind arithmetic. Behind the last block lies the next panel.
 */
static void avx512f_panel(ep_dtype dtype, const float *a, uint32_t rows, const uint8_t *panel,
                          uint32_t k_count, const uint8_t *next, float *c)
{
    const tile_func *tiles = dtype == EP_DTYPE_BF16  ? tiles_bf16
                             : dtype == EP_DTYPE_F16 ? tiles_f16
                                                     : tiles_f32;
    const size_t line_bytes = EP_FFN_PANEL * ep_dtype_bytes(dtype);
    const ep_ffn_chunks chunks = ep_ffn_chunks_of(rows);
    const uint32_t block = chunks.count == 1 ? k_count : EP_FFN_K_BLOCK;

    for (uint32_t k = 0; k < k_count; k += block) {
        const uint32_t n = k_count - k < block ? k_count - k : block;
        const uint8_t *b = panel + k * line_bytes;
        const uint8_t *behind = k + n < k_count ? b + n * line_bytes : next;
        const size_t share = (line_bytes + chunks.count - 1) / chunks.count;
        for (uint32_t chunk = 0; chunk < chunks.count; chunk++) {
            const uint32_t chunk_rows = ep_ffn_chunk_rows(&chunks, chunk);
            const uint32_t first_row = ep_ffn_chunk_first_row(&chunks, chunk);
            const float *x = a + (size_t)first_row * k_count + (size_t)k * chunk_rows;
            const bool stream = chunk == 0 && (k == 0 || chunks.count == 1);
            prefetch ahead = {.next = b + STREAM_BYTES, .step = line_bytes};
            if (!stream) {
                ahead.next =
                    behind == NULL ? b : behind + (size_t)chunk * n / chunks.count * line_bytes;
                ahead.step = behind == NULL ? 0 : share;
            }
            tiles[chunk_rows - 1](x, b, n, k == 0, stream, ahead,
                                  c + (size_t)first_row * EP_FFN_PANEL);
        }
    }
}

/* rows is a constant wherever this is inlined. */
INLINE void pack_chunk(const uint32_t rows, const ep_ffn_batch *batch, uint32_t first_row,
                       uint32_t hidden, float *a)
{
    const size_t input_bytes = ep_dtype_bytes(batch->x_dtype);
    for (uint32_t k = 0; k < hidden; k += EP_AVX512_FLOATS) {
        const uint32_t count = hidden - k < EP_AVX512_FLOATS ? hidden - k : EP_AVX512_FLOATS;
        __m512i lanes[EP_FFN_CHUNK_ROWS];
        ep_avx512_fetch_rows(rows, batch, first_row + rows, k * input_bytes);
#pragma GCC unroll 6
        for (uint32_t r = 0; r < rows; r++) {
            lanes[r] =
                _mm512_castps_si512(ep_avx512_widen(batch, &batch->rows[first_row + r], k, count));
        }
        ep_avx512_interleave(rows, lanes, count, a + (size_t)k * rows);
    }
}

/* rows is a constant wherever this is inlined. */
INLINE void lay_chunk(const uint32_t rows, const float *h, uint32_t count, float *a)
{
    for (uint32_t i = 0; i < count; i += EP_AVX512_FLOATS) {
        __m512i lanes[EP_FFN_CHUNK_ROWS];
#pragma GCC unroll 6
        for (uint32_t r = 0; r < rows; r++) {
            lanes[r] = _mm512_load_si512(h + r * EP_FFN_PANEL + i);
        }
        const uint32_t left = count - i;
        ep_avx512_interleave(rows, lanes, left < EP_AVX512_FLOATS ? left : EP_AVX512_FLOATS,
                             a + (size_t)i * rows);
    }
}

static void avx512f_pack_rows(const ep_ffn_batch *batch, uint32_t first_row, uint32_t rows,
                              uint32_t hidden, float *a)
{
    EP_AVX512_FOR_ROWS(rows, pack_chunk, batch, first_row, hidden, a)
}

static void avx512f_lay(const float *h, uint32_t rows, uint32_t count, float *a)
{
    EP_AVX512_FOR_ROWS(rows, lay_chunk, h, count, a)
}

#define COMMON_PARTS                                                                               \
    .panel = avx512f_panel, .group_panel = ep_ffn_avx512f_group_panel,                             \
    .activate = ep_avx512_activate, .exp16 = ep_avx512_exp16, .pack_rows = avx512f_pack_rows,      \
    .lay = avx512f_lay, .write_row = ep_avx512_write_row

const ep_ffn_kernel ep_ffn_kernel_avx512f = {
    .name = "avx512f",
    COMMON_PARTS,
    .int8_rows = ep_ffn_avx2_int8_rows,
    .int8_panel = ep_ffn_avx2_int8_panel,
};

const ep_ffn_kernel ep_ffn_kernel_avx512vnni = {
    .name = "avx512vnni",
    COMMON_PARTS,
    .int8_rows = ep_ffn_avx512vnni_int8_rows,
    .int8_panel = ep_ffn_avx512vnni_int8_panel,
    .int8_panel_to_rows = ep_ffn_avx512vnni_int8_panel_to_rows,
};
