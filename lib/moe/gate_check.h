/* SPDX-License-Identifier: Apache-2.0 */
/* What ep_gate refuses before it writes anything; for lib/moe and the client. */
#ifndef EP_MOE_GATE_CHECK_H
#define EP_MOE_GATE_CHECK_H

#include "expertd/gate.h"

/* The caller's structs, of whatever size its header has them, checked. Errors: INVALID_ARGUMENT
 * naming the field, value and allowed range; UNIMPLEMENTED (newer struct). */
ep_err ep_gate_take_load(const ep_gate_load *given, ep_gate_load *out_load, ep_error *out_error);
ep_err ep_gate_take_config(const ep_gate_config *given, ep_gate_config *out_config,
                           ep_error *out_error);
/* A NaN logit anywhere and, for a softmax, a row without a finite maximum; a chosen id that is no
 * expert: INVALID_ARGUMENT naming token and expert. */
ep_err ep_gate_check_logits(const ep_gate_config *config, uint32_t tokens, const float *logits,
                            ep_error *out_error);

#endif
