/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Quantises float weights while they are loaded. In each group of 32 columns of a row (the last may
 * be shorter), amax is the greatest magnitude. It determines the scale, and the scale the codes.
 *
 *   int8-g32   scale = amax / 127 in f16, or the next greater f16 if 127.5 scales are below amax
 *              (scales below 2^-14 are coarse). Codes -127..127
 *   int4-g32   m is the first value of magnitude amax. Of the scales m / -7.2, -7.6, -8, -8.4 and
 *              -8.8 in bf16, the one with the least error, the first of equals. Codes -8..7
 *   mxfp4      scale 2^(floor(log2 amax) - 2), or twice that if its error is less. Codes are
 *              magnitudes with a sign; the sign of 0 is +
 *   q4_k       weight = code * scale - minimum, codes 0..15, as in GGUF's q4_K. Up to three lines
 *              (scale and minimum) are tried. The first has minimum = -min(0, least value), scale =
 *              (greatest value + minimum) / 15. Each next one is the least squares line of the
 *              codes before it, with minimum 0 if it would be negative; there is none if all codes
 *              are equal. The line with the least error is taken, the first of equals. Over 256
 *              columns of a row (the last may be fewer), d = greatest scale / 63 and dmin =
 *              greatest minimum / 63 in f16, at most 65504. The 6-bit parts are scale * (1 / d) and
 *              minimum * (1 / dmin), limited and rounded like codes; 0 if d or dmin is 0. Then the
 *              codes are computed for part * d and part * dmin. From these codes follows another
 *              minimum, (q part d - x) / 32. If its part and the codes for that have less error,
 *              they are taken
 *
 * A code is value * (1 / scale), in q4_k (value + minimum) * (1 / scale), limited to its range and
 * rounded to nearest, ties to the even code. With scale 0 all codes are 0, in q4_k also with a
 * scale below 2^-30; mxfp4 has no scale below 2^-127. For int4-g32 and mxfp4, value and scale are
 * first divided by 2^floor(log2 amax), at least by 2^-126. The error is the sum of (value - code *
 * scale)^2 over the group, in q4_k of (value - (code * scale - minimum))^2. Least squares use sums
 * over codes q and values x: scale (32 qx - q x) / (32 qq - q q), minimum (q qx - qq x) / (32 qq -
 * q q); with minimum 0, scale qx / qq. A short group is filled up with zeros. A sum consists of
 * eight, each over the columns that are equal modulo 8, ascending; these are then added in order.
 * All is f32 with each operation rounded, so that every CPU makes the same bits. A change of these
 * rules must also change the words of the table, which are part of a model's version.
 *
 * Root mean square of the error over that of the weights, for weights drawn from a normal
 * distribution and from Student's with 3 degrees of freedom: int8-g32 .0054, .0084; int4-g32 .082,
 * .124 (amax / 7 has .097, .144; m / -8 has .086, .128; nineteen scales instead of five .081,
 * .123); mxfp4 .111, .137 (without the second scale .114, .141); q4_k .074, .095 (only the first
 * line .077, .100; one more step of least squares .0735 instead of .0740).
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
    double error_max; /* limit of ep_weight_quant_result.error; an expert beyond it is refused */
} ep_weight_quant;

#define EP_WEIGHT_QUANT_NONE "none"
#define EP_WEIGHT_QUANT_WORDS EP_WEIGHT_QUANT_NONE "|int8-g32|int4-g32|mxfp4|q4_k"

/* The entry for word number index; NULL: "none", or no such word. */
const ep_weight_quant *ep_weight_quant_at(size_t index);
/* NULL: "none", or not one of the words. */
const ep_weight_quant *ep_weight_quant_find(const char *name);
#define EP_MODEL_VERSION_BYTES 32
/* The version of a model: that of its files, with the format that its experts are converted to
 * (NULL: not converted). */
void ep_weight_quant_version(const char *files_version, const ep_weight_quant *quant,
                             char out_version[EP_MODEL_VERSION_BYTES]);

typedef struct ep_weight_quant_result {
    /* Root mean square over the columns of: length of the column's error / length of the column. So
     * each input counts alike, however large its weights are: a column of large values that costs
     * its neighbours precision shows. Columns of zeros do not count. q4_k has no exact zero: it
     * changes them by up to half a step, and columns near zero count with a large error. */
    double error;
    uint32_t row; /* position of a refused value, like column */
    uint32_t column;
    float value;
} ep_weight_quant_result;

/*
 * values: [rows,columns] of bf16, f16 or f32, any alignment. codes and scales: room for
 * ep_weight_row_bytes and ep_weight_scales_bytes.
 * Errors: BAD_FILE (a value that is not finite or above value_max; it is in the result), NO_MEMORY.
 */
ep_err ep_weight_quantize(const ep_weight_quant *quant, ep_dtype dtype, const void *values,
                          uint32_t rows, uint32_t columns, uint8_t *codes, uint8_t *scales,
                          ep_weight_quant_result *out_result);

#endif
