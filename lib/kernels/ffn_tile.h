/* SPDX-License-Identifier: Apache-2.0 */
/* What files with register tiles share, for all instruction sets. In a tile the number of a chunk's
 * rows is a constant, so that sums stay in registers. Included only by kernels' files. */
#ifndef EP_KERNELS_FFN_TILE_H
#define EP_KERNELS_FFN_TILE_H

#include "kernels/ffn_kernel.h"

#define INLINE static inline __attribute__((always_inline))

/* Defines functions name_1 to name_6, for that many rows, each by DEFINE(rows, name, ..), and a
 * table of them indexed by rows - 1. */
#define EP_FFN_BY_ROWS(type, name, DEFINE, ...)                                                    \
    DEFINE(1, name, ##__VA_ARGS__)                                                                 \
    DEFINE(2, name, ##__VA_ARGS__)                                                                 \
    DEFINE(3, name, ##__VA_ARGS__)                                                                 \
    DEFINE(4, name, ##__VA_ARGS__)                                                                 \
    DEFINE(5, name, ##__VA_ARGS__)                                                                 \
    DEFINE(6, name, ##__VA_ARGS__)                                                                 \
    static const type name[EP_FFN_CHUNK_ROWS] = {name##_1, name##_2, name##_3,                     \
                                                 name##_4, name##_5, name##_6};

/* What a tile fetches into the second-level cache while it computes: cache lines from next on,
 * `step` bytes for each line of the panel. */
typedef struct {
    const uint8_t *next;
    size_t step;
} prefetch;

#endif
