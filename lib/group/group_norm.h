/* SPDX-License-Identifier: Apache-2.0 */
/* Residual and RMS norm after a combine; formula and order: expertd/group.h. Threads: pure. */
#ifndef EP_GROUP_NORM_H
#define EP_GROUP_NORM_H

#include <stddef.h>

#include "expertd/tensor.h"

/* sum [H] is the canonical sum, and is overwritten. gamma [H] and residual [H] are widened. y and x
 * (NULL: not wanted) are rows of dtype. Returns rstd. */
float ep_group_add_rms_norm(float *sum, const float *residual, const float *gamma, float eps,
                            size_t hidden, ep_dtype dtype, void *out_y, void *out_x);

#endif
