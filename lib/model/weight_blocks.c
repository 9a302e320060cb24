/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Blocks of GGUF into the forms of base/expert_form.h. A block has 32 or 256 columns of a row:
 *   Q4_0   f16 d; 16 bytes: column j in the lower half, j + 16 in the upper     (code - 8) d
 *   Q5_0   f16 d; 32 bits, the fifth of each column; as Q4_0                    (code - 16) d
 *   Q8_0   f16 d; 32 int8                                                       code d
 *   MXFP4  e8m0; as Q4_0, e2m1                                                  code 2^(e - 127)
 *   Q4_K   f16 d, dmin; 12 bytes of eight 6-bit parts and eight 6-bit minima;
 *          128 bytes: of each 64 columns 32 in lower halves, then 32 in upper   code part d -
 *                                                                               minimum dmin
 *   Q5_K   as Q4_K, with 32 bytes before the last: bit i of byte j is the fifth of column 32 i + j
 *   Q6_K   128 bytes of lower 4 bits, 64 bytes of upper 2, 16 int8 parts, f16 d (code - 32) part d
 */
#include "model/weight_unpack.h"

#include <math.h>
#include <string.h>

#include "base/check.h"
#include "base/numeric.h"

typedef struct block_shape {
    uint32_t columns;
    uint32_t bytes;
    uint32_t factor_at; /* offset of f16 d */
    uint32_t second_at; /* offset of f16 dmin; equal to factor_at: there is none */
} block_shape;

static const block_shape shapes[] = {
    [EP_BLOCK_Q4_0] = {32, 18, 0, 0},   [EP_BLOCK_Q5_0] = {32, 22, 0, 0},
    [EP_BLOCK_Q8_0] = {32, 34, 0, 0},   [EP_BLOCK_Q4_K] = {256, 144, 0, 2},
    [EP_BLOCK_Q5_K] = {256, 176, 0, 2}, [EP_BLOCK_Q6_K] = {256, 210, 208, 208},
    [EP_BLOCK_MXFP4] = {32, 17, 0, 0}};

static uint16_t read_half(const uint8_t *from)
{
    uint16_t half;
    memcpy(&half, from, sizeof(half));
    return half;
}

ep_err ep_weight_check_blocks(const ep_plan_matrix *m, const ep_plan_run *run, const uint8_t *from,
                              ep_error *out_error)
{
    const block_shape *shape = &shapes[m->container.block];
    const bool is_power = m->container.block == EP_BLOCK_MXFP4;
    for (size_t at = 0; at + shape->bytes <= run->bytes; at += shape->bytes) {
        const uint8_t *block = from + at;
        const bool is_bad = is_power
                                ? block[0] == 0xff
                                : !isfinite(ep_f16_to_f32(read_half(block + shape->factor_at))) ||
                                      !isfinite(ep_f16_to_f32(read_half(block + shape->second_at)));
        if (is_bad) {
            return ep_error_set(out_error, EP_ERR_BAD_FILE,
                                "%s: tensor %.200s: a scale is not finite in block %zu",
                                ep_safetensors_name(run->entry->shard), run->entry->name,
                                (run->offset + at) / shape->bytes);
        }
    }
    return EP_OK;
}

/* Part j of eight, 6 bits, and its minimum. */
static uint8_t part_of(const uint8_t *packed, size_t j)
{
    return (uint8_t)(j < 4 ? packed[j] & 63u
                           : (packed[j + 4] & 15u) | (uint32_t)(packed[j - 4] >> 6) << 4);
}

static uint8_t minimum_of(const uint8_t *packed, size_t j)
{
    return (uint8_t)(j < 4 ? packed[j + 4] & 63u
                           : (uint32_t)(packed[j + 4] >> 4) | (uint32_t)(packed[j] >> 6) << 4);
}

/* The lower halves of count bytes, then the upper ones. */
static void take_halves(const uint8_t *from, size_t count, uint8_t *codes)
{
    for (size_t j = 0; j < count; j++) {
        codes[j] = from[j] & 15u;
        codes[count + j] = from[j] >> 4;
    }
}

/* The codes of a block, as in our format, a byte each. */
static void take_codes(ep_block_type type, const uint8_t *block, uint8_t *codes)
{
    uint32_t bits;
    switch (type) {
    case EP_BLOCK_Q4_0:
        take_halves(block + 2, 16, codes);
        return;
    case EP_BLOCK_MXFP4:
        take_halves(block + 1, 16, codes);
        return;
    case EP_BLOCK_Q5_0:
        take_halves(block + 6, 16, codes);
        memcpy(&bits, block + 2, sizeof(bits));
        for (size_t k = 0; k < 32; k++) {
            codes[k] = (uint8_t)((codes[k] | (bits >> k & 1u) << 4) - 16u);
        }
        return;
    case EP_BLOCK_Q8_0:
        memcpy(codes, block + 2, 32);
        return;
    case EP_BLOCK_Q4_K:
        for (size_t part = 0; part < 4; part++) {
            take_halves(block + 16 + 32 * part, 32, codes + 64 * part);
        }
        return;
    case EP_BLOCK_Q5_K:
        for (size_t part = 0; part < 4; part++) {
            take_halves(block + 48 + 32 * part, 32, codes + 64 * part);
        }
        for (size_t k = 0; k < 256; k++) {
            codes[k] |= (uint8_t)((block[16 + k % 32] >> k / 32 & 1) << 4);
        }
        return;
    default: /* Q6_K: two halves of 128 columns, each of four times 32 */
        take_halves(block, 64, codes);
        take_halves(block + 64, 64, codes + 128);
        for (size_t k = 0; k < 256; k++) {
            const uint32_t upper = block[128 + k / 128 * 32 + k % 32] >> (2 * (k / 32 & 3u)) & 3u;
            codes[k] = (uint8_t)((codes[k] | upper << 4) - 32u);
        }
    }
}

/* Packs 4-bit codes two to a byte; their number is a multiple of eight. */
static void pair_codes(const uint8_t *codes, size_t count, uint8_t *to)
{
    for (size_t k = 0; k < count; k += 8) {
        uint64_t eight;
        memcpy(&eight, codes + k, sizeof(eight));
        eight = (eight | eight >> 4) & 0x00ff00ff00ff00ffu;
        eight = (eight | eight >> 8) & 0x0000ffff0000ffffu;
        eight |= eight >> 16;
        memcpy(to + k / 2, &eight, 4);
    }
}

static void unpack_block_scales(const ep_plan_matrix *m, const uint8_t *block, size_t group,
                                size_t factor, uint8_t *scales)
{
    const ep_block_type type = m->container.block;
    const block_shape *shape = &shapes[type];
    if (type == EP_BLOCK_MXFP4) {
        scales[group] = block[0];
        return;
    }
    if (shape->columns == 32) {
        memcpy(scales + 2 * group, block, 2);
        return;
    }
    const ep_scale_arrays arrays = ep_weight_scale_arrays(m->container.format, m->rows, m->columns);
    uint8_t *offsets = scales + arrays.scales;
    uint8_t *factors = offsets + arrays.offsets;
    for (size_t j = 0; type != EP_BLOCK_Q6_K && j < 8; j++) {
        scales[group + j] = part_of(block + 4, j);
        offsets[group + j] = minimum_of(block + 4, j);
    }
    if (type == EP_BLOCK_Q6_K) {
        memcpy(scales + group, block + 192, 16);
    }
    const float d = ep_f16_to_f32(read_half(block + shape->factor_at));
    const float second = ep_f16_to_f32(read_half(block + shape->second_at));
    memcpy(factors + 4 * factor, &d, sizeof(d));
    if (arrays.offset_factors != 0) {
        memcpy(factors + arrays.scale_factors + 4 * factor, &second, sizeof(second));
    }
}

void ep_weight_unpack_blocks(const ep_plan_matrix *m, const uint8_t *from, uint8_t *values,
                             uint8_t *scales)
{
    const ep_weight_format format = m->container.format;
    const block_shape *shape = &shapes[m->container.block];
    const bool is_nibbles = ep_weight_codes_are_nibbles(ep_weight_format_codes(format));
    const size_t row_bytes = ep_weight_row_bytes(format, m->columns);
    const size_t blocks = m->columns / shape->columns;
    const size_t groups = shape->columns / ep_weight_group_columns(format);
    uint8_t codes[EP_SCALE_BLOCK]; /* the largest block */
    for (size_t n = 0; n < m->rows; n++) {
        const uint8_t *block = from + (m->first + n * m->step) * blocks * shape->bytes;
        uint8_t *row = values + n * row_bytes;
        for (size_t b = 0; b < blocks; b++, block += shape->bytes) {
            take_codes(m->container.block, block, codes);
            if (is_nibbles) {
                pair_codes(codes, shape->columns, row + b * shape->columns / 2);
            } else {
                memcpy(row + b * shape->columns, codes, shape->columns);
            }
            unpack_block_scales(m, block, (n * blocks + b) * groups, n * blocks + b, scales);
        }
    }
}
