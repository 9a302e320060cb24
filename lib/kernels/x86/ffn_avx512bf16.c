/* SPDX-License-Identifier: Apache-2.0 */
/* AVX-512 BF16 kernel of family `bf16dp`: register tiles of up to 6 rows x 64 outputs, two k per
 * step. */
#include "kernels/bf16dp.h"
#include "kernels/x86/ffn_avx512.h"
#include "kernels/x86/ffn_avx512bf16_tile.h"
#include "kernels/x86/ffn_x86.h"

#define INLINE EP_AVX512_INLINE
/*
 * The most lines of a block. It and what is fetched of the next one lie in the second level cache
 * (1 MB on the CPUs that have this instruction): long ones spare the accumulators trips to memory.
 * With few rows a block is soon done, and one that was not fetched ahead is dear.
 */
#define FEW_ROWS 32u
#define FEW_ROWS_BLOCK 512u
#define WIDE_BLOCK 1024u
/* Fetched that far ahead while weights stream in and each line is used by one chunk. */
#define STREAM_LINES 8u

/* How many cache lines a tile fetches per line of b: none, its share of the next block in one or
 * two, whole lines. */
TILES(none, 0)
TILES(one, 1)
TILES(two, 2)
TILES(whole, 4)

/* 32 floats to 16 pairs. The instruction is ep_bf16dp_narrow. */
INLINE __m512i narrow(__m512 first, __m512 second)
{
    return (__m512i)_mm512_cvtne2ps_pbh(second, first);
}

/* Whether narrow is not ep_ffn_round_bf16: it flushes denormals and keeps a NaN's bits. */
INLINE bool is_hard(__m512 y)
{
    enum { NAN_OR_DENORMAL = 0xa1 };
    return _mm512_fpclass_ps_mask(y, NAN_OR_DENORMAL) != 0;
}

static void bf16dp_write_row(const float *y, uint32_t count, ep_dtype dtype, void *out,
                             uint32_t first)
{
    uint32_t i = 0;
    if (dtype == EP_DTYPE_BF16) {
        for (; i + 2 * EP_AVX512_FLOATS <= count; i += 2 * EP_AVX512_FLOATS) {
            const __m512 low = _mm512_load_ps(y + i);
            const __m512 high = _mm512_load_ps(y + i + EP_AVX512_FLOATS);
            if (is_hard(low) || is_hard(high)) {
                break;
            }
            _mm512_storeu_si512((uint16_t *)out + first + i, narrow(low, high));
        }
    }
    ep_avx512_write_row(y + i, count - i, dtype, out, first + i);
}

/* One chunk: the weights stream through once. The last lines fetch the first ones of the next
 * panel. */
static void stream_panel(const float *a, uint32_t rows, const uint8_t *panel, uint32_t lines,
                         const uint8_t *next, float *c)
{
    const uint32_t inside = lines > STREAM_LINES ? lines - STREAM_LINES : 0;
    prefetch ahead = {.next = panel + STREAM_LINES * LINE_BYTES, .step = LINE_BYTES};
    if (inside > 0) {
        tiles_whole[rows - 1](ahead, a, panel, inside, true, c);
    }
    ahead.next = next == NULL ? panel : next;
    (next == NULL ? tiles_none : tiles_whole)[rows - 1](ahead, a + (size_t)inside * rows,
                                                        panel + (size_t)inside * LINE_BYTES,
                                                        lines - inside, inside == 0, c);
}

/* Where the rows of a panel's products go when they are complete; batch NULL: nowhere. */
typedef struct {
    const ep_ffn_batch *batch;
    uint32_t first;
    uint32_t count;
} destination;

static void write_rows(const destination *to, uint32_t first_row, uint32_t rows, const float *c)
{
    for (uint32_t r = first_row; to->batch != NULL && r < first_row + rows; r++) {
        bf16dp_write_row(c + (size_t)r * EP_FFN_PANEL, to->count, to->batch->out_dtype,
                         to->batch->rows[r].out, to->first);
    }
}

/* Before the arithmetic that ends in them. */
static void fetch_outputs(const destination *to, uint32_t first_row, uint32_t rows)
{
    if (to->batch != NULL) {
        ep_avx512_fetch_outputs(to->batch, first_row, rows, to->first, to->count);
    }
}

/* Blocks of one length, so that each fetches all of the next one. */
static uint32_t block_lines(uint32_t rows, uint32_t lines)
{
    const uint32_t most = rows <= FEW_ROWS ? FEW_ROWS_BLOCK : WIDE_BLOCK;
    const uint32_t count = (lines + most - 1) / most;
    return (lines + count - 1) / count;
}

/*
 * Blocks of lines, all chunks per block. While a block is used from the near caches every chunk
 * fetches its share of the next one, evenly, so that loading hides behind arithmetic. Behind the
 * last block lies the next panel.
 */
static void panel_to(const destination *to, const float *a, uint32_t rows, const uint8_t *panel,
                     uint32_t lines, const uint8_t *next, float *c)
{
    const ep_ffn_chunks chunks = ep_ffn_chunks_of(rows);
    if (chunks.count == 1) {
        fetch_outputs(to, 0, rows);
        stream_panel(a, rows, panel, lines, next, c);
        write_rows(to, 0, rows, c);
        return;
    }
    const size_t share = (LINE_BYTES + chunks.count - 1) / chunks.count;
    const tile_func *fetching = share > 64 ? tiles_two : tiles_one;
    const uint32_t block = block_lines(rows, lines);
    for (uint32_t line = 0; line < lines; line += block) {
        const uint32_t n = lines - line < block ? lines - line : block;
        const uint8_t *b = panel + (size_t)line * LINE_BYTES;
        const bool is_last = line + n == lines;
        const uint8_t *behind = is_last ? next : b + (size_t)n * LINE_BYTES;
        const tile_func *tiles = behind == NULL ? tiles_none : fetching;
        for (uint32_t chunk = 0; chunk < chunks.count; chunk++) {
            const uint32_t chunk_rows = ep_ffn_chunk_rows(&chunks, chunk);
            const uint32_t first_row = ep_ffn_chunk_first_row(&chunks, chunk);
            const float *x = a + (size_t)first_row * lines + (size_t)line * chunk_rows;
            prefetch ahead = {
                .next = behind == NULL ? b : behind + (size_t)chunk * n * LINE_BYTES / chunks.count,
                .step = share};
            if (is_last) {
                fetch_outputs(to, first_row, chunk_rows);
            }
            tiles[chunk_rows - 1](ahead, x, b, n, line == 0, c + (size_t)first_row * EP_FFN_PANEL);
            if (is_last) {
                write_rows(to, first_row, chunk_rows, c);
            }
        }
    }
}

static void bf16dp_panel(ep_dtype dtype, const float *a, uint32_t rows, const uint8_t *panel,
                         uint32_t lines, const uint8_t *next, float *c)
{
    (void)dtype;
    panel_to(&(destination){.batch = NULL}, a, rows, panel, lines, next, c);
}

static void bf16dp_panel_to_rows(ep_dtype dtype, const float *a, const ep_ffn_batch *batch,
                                 const uint8_t *panel, uint32_t lines, const uint8_t *next,
                                 uint32_t first, uint32_t count, float *c)
{
    (void)dtype;
    panel_to(&(destination){.batch = batch, .first = first, .count = count}, a, batch->rows_count,
             panel, lines, next, c);
}

/* Inputs k..k + count - 1 of a row, narrowed; 0 behind them. count 1..32. */
INLINE __m512i load_pairs(const ep_ffn_batch *batch, const ep_ffn_row *row, uint32_t k,
                          uint32_t count)
{
    if (count == 32 && batch->x_dtype == EP_DTYPE_BF16 && !batch->weight_on_input) {
        const __m512i pairs = _mm512_loadu_si512((const uint8_t *)row->x + 2 * (size_t)k);
        const __mmask32 normal = _mm512_test_epi16_mask(pairs, _mm512_set1_epi16(0x7f80));
        return _mm512_mask_mov_epi16(_mm512_and_si512(pairs, _mm512_set1_epi16((int16_t)0x8000)),
                                     normal, pairs);
    }
    const uint32_t first = count < EP_AVX512_FLOATS ? count : EP_AVX512_FLOATS;
    const __m512 second =
        count > first ? ep_avx512_widen(batch, row, k + first, count - first) : _mm512_setzero_ps();
    return narrow(ep_avx512_widen(batch, row, k, first), second);
}

/* rows is a constant wherever this is inlined. */
INLINE void pack_chunk(const uint32_t rows, const ep_ffn_batch *batch, uint32_t first_row,
                       uint32_t hidden, float *a)
{
    const size_t input_bytes = ep_dtype_bytes(batch->x_dtype);
    for (uint32_t k = 0; k < hidden; k += 2 * EP_AVX512_FLOATS) {
        const uint32_t count =
            hidden - k < 2 * EP_AVX512_FLOATS ? hidden - k : 2 * EP_AVX512_FLOATS;
        __m512i pairs[EP_FFN_CHUNK_ROWS];
        ep_avx512_fetch_rows(rows, batch, first_row + rows, k * input_bytes);
#pragma GCC unroll 6
        for (uint32_t r = 0; r < rows; r++) {
            pairs[r] = load_pairs(batch, &batch->rows[first_row + r], k, count);
        }
        ep_avx512_interleave(rows, pairs, (count + 1) / 2, a + (size_t)k / 2 * rows);
    }
}

/* rows is a constant wherever this is inlined. */
INLINE void lay_chunk(const uint32_t rows, const float *h, uint32_t count, float *a)
{
    for (uint32_t i = 0; i < count; i += 2 * EP_AVX512_FLOATS) {
        /* What lies behind count may be a NaN of a row with one: the other member of the last pair
         * must be +0. */
        const uint32_t left = count - i < 2 * EP_AVX512_FLOATS ? count - i : 2 * EP_AVX512_FLOATS;
        const __mmask32 valid = (__mmask32)(((uint64_t)1 << left) - 1u);
        __m512i pairs[EP_FFN_CHUNK_ROWS];
#pragma GCC unroll 6
        for (uint32_t r = 0; r < rows; r++) {
            const float *from = h + r * EP_FFN_PANEL + i;
            pairs[r] = _mm512_maskz_mov_epi16(
                valid, narrow(_mm512_load_ps(from), _mm512_load_ps(from + 16)));
        }
        ep_avx512_interleave(rows, pairs, (left + 1) / 2, a + (size_t)i / 2 * rows);
    }
}

static void bf16dp_pack_rows(const ep_ffn_batch *batch, uint32_t first_row, uint32_t rows,
                             uint32_t hidden, float *a)
{
    EP_AVX512_FOR_ROWS(rows, pack_chunk, batch, first_row, hidden, a)
}

static void bf16dp_lay(const float *h, uint32_t rows, uint32_t count, float *a)
{
    EP_AVX512_FOR_ROWS(rows, lay_chunk, h, count, a)
}

const ep_ffn_kernel ep_ffn_kernel_avx512bf16 = {
    .name = "avx512bf16",
    .family = EP_FFN_FAMILY_BF16DP,
    .panel = bf16dp_panel,
    .group_panel = ep_ffn_avx512bf16_group_panel,
    .activate = ep_avx512_activate,
    .exp16 = ep_avx512_exp16,
    .pack_rows = bf16dp_pack_rows,
    .lay = bf16dp_lay,
    .write_row = bf16dp_write_row,
    .panel_to_rows = bf16dp_panel_to_rows,
};
