/* SPDX-License-Identifier: Apache-2.0 */
/* The router of a checkpoint's layer as a gate: from its config.json, and the bias from its weights. */
#ifndef EP_CLI_GATE_OPTIONS_H
#define EP_CLI_GATE_OPTIONS_H

#include "expertd/gate.h"

/* out_gate->bias is *out_bias, which is malloc'ed, or NULL. Errors: as ep_checkpoint_open; NOT_FOUND (no such MoE layer); UNIMPLEMENTED (a router
 * this build does not compute). */
ep_err ep_cli_gate_read(const char *checkpoint_path, uint32_t layer, ep_gate_config *out_gate, float **out_bias, ep_error *out_error);

#endif
