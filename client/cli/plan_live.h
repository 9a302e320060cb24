/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl plan at a running coordinator. */
#ifndef EP_CLI_PLAN_LIVE_H
#define EP_CLI_PLAN_LIVE_H

#include "command.h"

/* Asks, prints, and writes the plan as an expert map; map_file NULL: none. */
ep_err ep_cli_plan_live_run(ep_cli_call *call, bool apply, const char *map_file,
                            ep_error *out_error);

#endif
