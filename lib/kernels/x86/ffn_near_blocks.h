/* SPDX-License-Identifier: Apache-2.0 */
/* A panel in short blocks of lines, which stay in the nearest cache while all chunks use them.
 * Included after ffn_lines.h. */
#ifndef EP_KERNELS_X86_FFN_NEAR_BLOCKS_H
#define EP_KERNELS_X86_FFN_NEAR_BLOCKS_H

#define AHEAD_BYTES 2048

INLINE void near_blocks(const tile_func *tiles, size_t bytes, uint32_t block, const float *a,
                        uint32_t rows, const uint8_t *panel, uint32_t lines, float *c)
{
    const ep_ffn_chunks chunks = ep_ffn_chunks_of(rows);
    for (uint32_t line = 0; line < lines; line += block) {
        const uint32_t n = lines - line < block ? lines - line : block;
        const uint8_t *b = panel + line * bytes;
        const prefetch ahead = {.next = b + AHEAD_BYTES, .step = bytes};
        for (uint32_t chunk = 0; chunk < chunks.count; chunk++) {
            const uint32_t chunk_rows = ep_ffn_chunk_rows(&chunks, chunk);
            const size_t first_row = ep_ffn_chunk_first_row(&chunks, chunk);
            tiles[chunk_rows - 1](ahead, a + first_row * lines + (size_t)line * chunk_rows, b, n,
                                  line == 0, c + first_row * EP_FFN_PANEL);
        }
    }
}

#endif
