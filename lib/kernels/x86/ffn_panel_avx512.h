/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A panel on AVX-512, in blocks of lines that fit the second-level cache together with what is
 * fetched of the next block (1 MB on CPUs with BF16 or VNNI). Included after ffn_lines.h; the
 * including file defines end_row.
 */
#ifndef EP_KERNELS_X86_FFN_PANEL_AVX512_H
#define EP_KERNELS_X86_FFN_PANEL_AVX512_H

/* Long blocks save moving accumulators to memory and back. With few rows a block is soon done, and
 * one that was not fetched ahead costs much. */
#define FEW_ROWS 32u
#define FEW_ROWS_BLOCK 512u
#define WIDE_BLOCK 1024u
/* How far ahead to fetch while weights stream in and each line is used by one chunk. */
#define STREAM_BYTES 2048u

/* Where the rows of a panel's products are written when they are complete; batch NULL: nowhere. */
typedef struct {
    const ep_ffn_batch *batch;
    uint32_t first;
    uint32_t count;
    /* w8a8: what is added to sums, and what they are multiplied by */
    const int32_t *offsets;
    const float *weight_scales;
    const float *row_scales;
} destination;

/* Finishes the complete sums y of row r. */
static void end_row(const destination *to, uint32_t r, float *y);

/* Tiles by how many cache lines they fetch per line of b: a share of the next block in one or two,
 * or whole lines. */
typedef struct {
    const tile_func *one;
    const tile_func *two;
    const tile_func *whole;
    size_t line_bytes;
} panel_tiles;

/* For one chunk: weights are read once. The last lines fetch the first of the next panel. */
static void stream_panel(const panel_tiles *tiles, const float *a, uint32_t rows,
                         const uint8_t *panel, uint32_t lines, const uint8_t *next, float *c)
{
    const size_t bytes = tiles->line_bytes;
    const uint32_t stream_lines = STREAM_BYTES / (uint32_t)bytes;
    const uint32_t inside = lines > stream_lines ? lines - stream_lines : 0;
    if (inside > 0) {
        const prefetch ahead = {.next = panel + STREAM_BYTES, .step = bytes};
        tiles->whole[rows - 1](ahead, a, panel, inside, true, c);
    }
    const prefetch behind = {.next = next == NULL ? panel : next, .step = next == NULL ? 0 : bytes};
    tiles->whole[rows - 1](behind, a + (size_t)inside * rows, panel + inside * bytes,
                           lines - inside, inside == 0, c);
}

static void end_rows(const destination *to, uint32_t first_row, uint32_t rows, float *c)
{
    for (uint32_t r = first_row; r < first_row + rows; r++) {
        end_row(to, r, c + (size_t)r * EP_FFN_PANEL);
    }
}

/* Called before the arithmetic whose results are written there. */
static void fetch_outputs(const destination *to, uint32_t first_row, uint32_t rows)
{
    if (to->batch != NULL) {
        ep_avx512_fetch_outputs(to->batch, first_row, rows, to->first, to->count);
    }
}

/* Blocks of equal length, so that each can fetch the whole next one. */
static uint32_t block_lines(uint32_t rows, uint32_t lines)
{
    const uint32_t most = rows <= FEW_ROWS ? FEW_ROWS_BLOCK : WIDE_BLOCK;
    const uint32_t count = (lines + most - 1) / most;
    return (lines + count - 1) / count;
}

/*
 * Block by block, all chunks per block. While a block is used from the near caches, every chunk
 * fetches an equal share of the next block, so that loading overlaps arithmetic. After the last
 * block comes the next panel.
 */
static void panel_to(const panel_tiles *tiles, const destination *to, const float *a, uint32_t rows,
                     const uint8_t *panel, uint32_t lines, const uint8_t *next, float *c)
{
    const size_t bytes = tiles->line_bytes;
    const ep_ffn_chunks chunks = ep_ffn_chunks_of(rows);
    if (chunks.count == 1) {
        fetch_outputs(to, 0, rows);
        stream_panel(tiles, a, rows, panel, lines, next, c);
        end_rows(to, 0, rows, c);
        return;
    }
    const size_t share = (bytes + chunks.count - 1) / chunks.count;
    const tile_func *fetching = share > 64 ? tiles->two : tiles->one;
    const uint32_t block = block_lines(rows, lines);
    for (uint32_t line = 0; line < lines; line += block) {
        const uint32_t n = lines - line < block ? lines - line : block;
        const uint8_t *b = panel + line * bytes;
        const bool is_last = line + n == lines;
        const uint8_t *behind = is_last ? next : b + n * bytes;
        for (uint32_t chunk = 0; chunk < chunks.count; chunk++) {
            const uint32_t chunk_rows = ep_ffn_chunk_rows(&chunks, chunk);
            const uint32_t first_row = ep_ffn_chunk_first_row(&chunks, chunk);
            prefetch ahead = {.next = b};
            if (behind != NULL) {
                ahead.next = behind + chunk * (n * bytes) / chunks.count;
                ahead.step = share;
            }
            if (is_last) {
                fetch_outputs(to, first_row, chunk_rows);
            }
            fetching[chunk_rows - 1](ahead,
                                     a + (size_t)first_row * lines + (size_t)line * chunk_rows, b,
                                     n, line == 0, c + (size_t)first_row * EP_FFN_PANEL);
            if (is_last) {
                end_rows(to, first_row, chunk_rows, c);
            }
        }
    }
}

#endif
