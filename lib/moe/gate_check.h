/* SPDX-License-Identifier: Apache-2.0 */
/* Checks that ep_gate makes before it writes anything; for lib/moe and the client. */
#ifndef EP_MOE_GATE_CHECK_H
#define EP_MOE_GATE_CHECK_H

#include "expertd/gate.h"

/* Copies and checks a caller's struct of the size that its header knows. Errors: INVALID_ARGUMENT
 * naming the field, value and allowed range; UNIMPLEMENTED (newer struct). */
ep_err ep_gate_take_load(const ep_gate_load *given, ep_gate_load *out_load, ep_error *out_error);
ep_err ep_gate_take_config(const ep_gate_config *given, ep_gate_config *out_config,
                           ep_error *out_error);
/* Errors: INVALID_ARGUMENT naming token and expert, for a NaN logit, for a softmax row without a
 * finite maximum, and for a chosen id that is no expert. */
ep_err ep_gate_check_logits(const ep_gate_config *config, uint32_t tokens, const float *logits,
                            ep_error *out_error);

#endif
