/* SPDX-License-Identifier: Apache-2.0 */
/* Converts an expert read in a float format to the format that its checkpoint must have. */
#ifndef EP_MODEL_EXPERT_QUANT_H
#define EP_MODEL_EXPERT_QUANT_H

#include "model/expert_plan.h"

/* io_expert: in a float format, in a block of the room; the result is in the room's other block.
 * Errors: BAD_FILE (file and tensor, what is wrong, what to do), NO_MEMORY, INTERNAL. */
ep_err ep_expert_quantize(const ep_weight_quant *quant, const ep_expert_plan *plan,
                          ep_expert_room *room, ep_expert_data *io_expert, ep_error *out_error);

#endif
