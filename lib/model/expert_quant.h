/* SPDX-License-Identifier: Apache-2.0 */
/* An expert that was read in a float format, put into the one its checkpoint is to have. */
#ifndef EP_MODEL_EXPERT_QUANT_H
#define EP_MODEL_EXPERT_QUANT_H

#include "model/expert_plan.h"

/* io_expert: in float formats, in a block of the room; made in its last one.
 * Errors: BAD_FILE (file and tensor, what is wrong, what to do), NO_MEMORY, INTERNAL. */
ep_err ep_expert_quantize(const ep_weight_quant *quant, const ep_expert_plan *plan,
                          ep_expert_room *room, ep_expert_data *io_expert, ep_error *out_error);

#endif
