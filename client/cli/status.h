/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The state of the service, and its problems as sentences; without problems it is healthy.
 *
 * Threads  one at a time.
 */
#ifndef EP_CLI_STATUS_H
#define EP_CLI_STATUS_H

#include "node_list.h"
#include "output.h"
#include "placement.h"

#define EP_CLI_PROBLEMS_MAX 64
#define EP_CLI_PROBLEM_BYTES 640

typedef struct ep_cli_problems {
    size_t count; /* of all; only the first EP_CLI_PROBLEMS_MAX are kept */
    char texts[EP_CLI_PROBLEMS_MAX][EP_CLI_PROBLEM_BYTES];
} ep_cli_problems;

void ep_cli_problem_add(ep_cli_problems *problems, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* ["...", ...] */
json_t *ep_cli_problems_json(const ep_cli_problems *problems);
/* Prints "healthy", or a line per problem. */
void ep_cli_problems_print(const ep_cli_problems *problems, FILE *out);

/* Takes the problems that the coordinator reports. Pure. */
void ep_cli_cluster_check(const Expertd__V1__ClusterStatusReply *cluster,
                          ep_cli_problems *out_problems);
/* table NULL: none yet. */
bool ep_cli_cluster_print(const char *url, const Expertd__V1__ClusterStatusReply *cluster,
                          const ep_routing_table *table, const ep_cli_problems *problems,
                          ep_cli_format format, FILE *out);

/* Finds problems in the nodes' own reports. Pure. */
void ep_cli_nodes_check(const ep_cli_node_list *nodes, ep_cli_problems *out_problems);
bool ep_cli_nodes_print(const ep_cli_node_list *nodes, const ep_cli_problems *problems,
                        ep_cli_format format, FILE *out);

#endif
