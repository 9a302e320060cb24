/* SPDX-License-Identifier: Apache-2.0 */
/* A batch for a layer that needs no file: random tokens, each for distinct random experts, as bench
 * sends them. */
#ifndef EP_CLI_RANDOM_BATCH_H
#define EP_CLI_RANDOM_BATCH_H

#include "batch_file.h"
#include "connect.h"

/*
 * Shapes are those that the service names for model, version and layer of args. A pure function of
 * them, tokens and seed. *out_batch: ep_cli_batch_free. Errors: those of ep_cli_placement_read;
 * NOT_FOUND (which layers there are); NO_MEMORY.
 */
ep_err ep_cli_batch_random(const ep_cli_connect *connect, const ep_moe_args *args, uint32_t tokens,
                           uint64_t seed, ep_cli_batch *out_batch, ep_error *out_error);

#endif
