/* SPDX-License-Identifier: Apache-2.0 */
/* The verbs below `expertctl frame`; each is a command of its own, with its own --help. */
#ifndef EP_CLI_CMD_FRAME_H
#define EP_CLI_CMD_FRAME_H

#include "command.h"
#include "rpc/rpc.h"

extern const ep_cli_command ep_cli_frame_encode_command;
extern const ep_cli_command ep_cli_frame_decode_command;

/* --method "expertd.v1.Health/Check" of both; NULL: not given. */
extern const ep_rpc_method *ep_cli_frame_method;
void ep_cli_frame_take_method(struct argp_state *state, const char *option, char *text);

#endif
