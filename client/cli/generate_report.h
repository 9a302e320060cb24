/* SPDX-License-Identifier: Apache-2.0 */
/* What a generation cost: latency per layer, rows served per node. */
#ifndef EP_CLI_GENERATE_REPORT_H
#define EP_CLI_GENERATE_REPORT_H

#include "generate.h"
#include "node_list.h"
#include "output.h"

typedef struct ep_cli_generate_report {
    const ep_cli_generate_request *request;
    ep_cli_generate_result *result; /* percentiles sort its samples */
    const ep_dense_shape *shape;
    const ep_cli_node_list *nodes;
} ep_cli_generate_report;

/* False when out takes no more, or without memory. */
bool ep_cli_generate_report_print(const ep_cli_generate_report *report, ep_cli_format format,
                                  FILE *out);

#endif
