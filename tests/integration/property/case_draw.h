/* SPDX-License-Identifier: Apache-2.0 */
/* Draws the batch of a case: shapes, ids, values, masks and choices, as packed arrays. Private to
 * layer_case.
 */
#ifndef PROPERTY_CASE_DRAW_H
#define PROPERTY_CASE_DRAW_H

#include "layer_case.h"

/* The constant experts' tables in a narrow type; layer_case.layer has them widened. */
typedef struct case_constants {
    enum ref_dtype dtype;
    const void *alpha1; /* [N,H] */
    const void *alpha2;
    const void *v;
} case_constants;

void case_draw(layer_case *c, random_source *random, case_constants *out_constants);
/* Zeroed memory that lives as long as the case. */
uint8_t *case_alloc(layer_case *c, size_t bytes);

#endif
