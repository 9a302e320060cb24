/* SPDX-License-Identifier: Apache-2.0 */
/* A verb below `expertctl model`. */
#ifndef EP_CLI_CMD_MODEL_SHOW_H
#define EP_CLI_CMD_MODEL_SHOW_H

#include "command.h"

extern const ep_cli_command ep_cli_model_show_command;

#endif
