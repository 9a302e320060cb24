/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl plan without a service, from a model's config.json, a load, and numbers of nodes. */
#ifndef EP_CLI_PLAN_OFFLINE_H
#define EP_CLI_PLAN_OFFLINE_H

#include "command.h"
#include "plan_cost.h"

typedef struct ep_cli_plan_offline {
    const char *config_file;
    const char *trace_file; /* NULL: load is drawn */
    double zipf;
    uint64_t seed;
    uint32_t nodes;
    uint32_t copies;           /* of each expert */
    uint32_t spare_copies;     /* further copies per layer, by load */
    double weight_bits;        /* 0: those of the config's dtype */
    uint64_t tokens;           /* of a step */
    const char *measured_file; /* NULL: none */
    ep_plan_machine machine;   /* fields of 0: from the file, else the default */
    const char *map_file;      /* NULL: none */
} ep_cli_plan_offline;

/* Computes and prints the plan and writes the map. */
ep_err ep_cli_plan_offline_run(ep_cli_call *call, const ep_cli_plan_offline *options,
                               ep_error *out_error);

#endif
