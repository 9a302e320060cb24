/* SPDX-License-Identifier: Apache-2.0 */
/* The canonical combine in a few lines, over rows that the oracle computes one by one, right or
 * with one mistake. */
#ifndef PROPERTY_SMALL_COMBINE_H
#define PROPERTY_SMALL_COMBINE_H

#include "layer_case.h"

typedef enum combine_mistake {
    COMBINE_RIGHT,
    COMBINE_OTHER_ORDER,   /* slots from last to first */
    COMBINE_FUSED,         /* multiply and add rounded once */
    COMBINE_ROUNDED_TWICE, /* the sum goes through f16 on its way to the output type */
    COMBINE_SLOT_LOST,     /* a token's last row is left out */
    COMBINE_GATE_LATE,     /* the shared expert's gate multiplies the row after its rounding */
    COMBINE_MISTAKES_COUNT
} combine_mistake;

const char *combine_mistake_name(combine_mistake mistake);
/* Covers combined and partial results without copy and constant experts. */
bool small_combine_covers(const layer_case *c);

typedef struct small_combine small_combine;
/* Computes the rows once for all mistakes; c is borrowed. */
small_combine *small_combine_open(const layer_case *c);
/* out: packed [T,H] of the case's output type. */
void small_combine_run(small_combine *combine, combine_mistake mistake, uint8_t *out);
void small_combine_close(small_combine *combine);

#endif
