/* SPDX-License-Identifier: Apache-2.0 */
/* The verbs below `expertctl frame`; each is a command of its own, with its own --help. */
#ifndef EP_CLI_CMD_FRAME_H
#define EP_CLI_CMD_FRAME_H

#include "command.h"
#include "rpc/rpc.h"

extern const ep_cli_command ep_cli_frame_encode_command;
extern const ep_cli_command ep_cli_frame_decode_command;

/* The method of "expertd.v1.Health/Check"; another text ends the program. */
const ep_rpc_method *ep_cli_frame_method(struct argp_state *state, const char *text);

#endif
