/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl plan at a running coordinator. */
#ifndef EP_CLI_PLAN_LIVE_H
#define EP_CLI_PLAN_LIVE_H

#include "connect.h"
#include "output.h"

typedef struct ep_cli_plan_live {
    bool apply;
    const char *map_file; /* the plan as an expert map; NULL: none */
} ep_cli_plan_live;

/* Asks, prints, writes; an ep_cli_exit. */
int ep_cli_plan_live_run(const char *program, const ep_cli_connect *connect, ep_cli_format format,
                         const ep_cli_plan_live *options);

#endif
