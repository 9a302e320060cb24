/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Float weights in a smaller format, made while they are loaded. Of each 32 columns of a row (the
 * last group may be short) amax is the greatest magnitude; the scale follows from it, then the
 * codes.
 *
 *   int8-g32   scale = amax / 127 in f16, the next greater f16 where 127.5 scales are below amax
 *              (scales below 2^-14 are coarse). Codes -127..127
 *   int4-g32   m is the first value of that magnitude. Of the scales m / -7.2, -7.6, -8, -8.4 and
 *              -8.8 in bf16 the one with the least error, the first of equals. Codes -8..7
 *   mxfp4      scale 2^(floor(log2 amax) - 2), or twice that where its error is less. Codes are
 *              magnitudes with a sign, but for 0, whose sign is +
 *   q4_k       weight = code * scale - minimum, codes 0..15, as GGUF's q4_K. The first line is
 *              minimum = -min(0, least value), scale = (greatest value + minimum) / 15. From its
 *              codes comes the line of least squares, with minimum 0 where it would be below; from
 *              the codes of that one more, ending where all codes are equal. The line with the
 *              least error is taken, the first of equals. Over 256 columns of a row (the last may
 *              be fewer) d = greatest scale / 63 and dmin = greatest minimum / 63 in f16, at most
 *              65504. Parts of 6 bits are scale * (1 / d) and minimum * (1 / dmin), cut and rounded
 *              as codes are, 0 where d or dmin is. Then come the codes of part * d and part * dmin,
 *              and from them the minimum (q part d - x) / 32: where its part and that one's codes
 *              have less error, they are taken
 *
 * A code is value * (1 / scale), of q4_k (value + minimum) * (1 / scale), cut to its range, rounded
 * to the nearest and of two such to the even code. With scale 0 all codes are 0, of q4_k below
 * 2^-30 too, and mxfp4 has no scale below 2^-127. For int4-g32 and mxfp4 value and scale are first
 * divided by 2^floor(log2 amax), at least by 2^-126. The error is the sum of (value - code *
 * scale)^2 over the group, of q4_k of (value - (code * scale - minimum))^2. Least squares, of the
 * sums of codes q and values x: scale (32 qx - q x) / (32 qq - q q), minimum (q qx - qq x) / (32 qq
 * - q q); with minimum 0 scale qx / qq. Behind a short group are zeros. A sum is eight, of the
 * columns that are equal modulo 8, ascending, then added up in order. All is f32, each operation
 * rounded, so that every CPU makes the same bits. What changes them must change the words of the
 * table too, which are part of a model's version.
 *
 * Root mean square of the error over that of the weights, drawn from a normal distribution and from
 * Student's with 3 degrees of freedom: int8-g32 .0054, .0084; int4-g32 .082, .124 (amax / 7 has
 * .097, .144; m / -8 has .086, .128; nineteen scales instead of five .081, .123); mxfp4 .111, .137
 * (without the second scale .114, .141); q4_k .074, .095 (the first line alone
 * .077, .100; one more step of least squares .0735 instead of .0740).
 *
 * Threads  pure.
 */
#ifndef EP_MODEL_WEIGHT_QUANT_H
#define EP_MODEL_WEIGHT_QUANT_H

#include "base/error.h"
#include "base/expert_form.h"

typedef struct ep_weight_quant {
    const char *name; /* "int8-g32" */
    ep_weight_format format;
    float value_max;  /* greater magnitudes are refused */
    double error_max; /* as ep_weight_quant_result has it; beyond it an expert is refused */
} ep_weight_quant;

#define EP_WEIGHT_QUANT_NONE "none"
#define EP_WEIGHT_QUANT_WORDS EP_WEIGHT_QUANT_NONE "|int8-g32|int4-g32|mxfp4|q4_k"

/* Number index of the words above; NULL: none, or no such. */
const ep_weight_quant *ep_weight_quant_at(size_t index);
/* NULL: "none", or not one of the words. */
const ep_weight_quant *ep_weight_quant_find(const char *name);
#define EP_MODEL_VERSION_BYTES 32
/* A model's version from that of its files, and what its experts are put into (NULL: nothing). */
void ep_weight_quant_version(const char *files_version, const ep_weight_quant *quant,
                             char out_version[EP_MODEL_VERSION_BYTES]);

typedef struct ep_weight_quant_result {
    /* Root mean square over the columns of: length of the column's error / length of the column.
     * So each input counts alike, however large its weights are: a column of large values that
     * costs its neighbours their digits shows. Columns of zeros do not count; q4_k has no
     * exact zero, so there they change by up to half a step, and columns of next to nothing count
     * as far off. */
    double error;
    uint32_t row; /* of a value that is refused */
    uint32_t column;
    float value;
} ep_weight_quant_result;

/*
 * values: [rows,columns] of bf16, f16 or f32, any alignment. codes and scales: room as
 * ep_weight_row_bytes and ep_weight_scales_bytes say.
 * Errors: BAD_FILE (a value that is not finite or above value_max: in the result), NO_MEMORY.
 */
ep_err ep_weight_quantize(const ep_weight_quant *quant, ep_dtype dtype, const void *values,
                          uint32_t rows, uint32_t columns, uint8_t *codes, uint8_t *scales,
                          ep_weight_quant_result *out_result);

#endif
