/* SPDX-License-Identifier: Apache-2.0 */
/* The nodes of the service and their own reports, asked all at once. */
#ifndef EP_CLI_NODE_LIST_H
#define EP_CLI_NODE_LIST_H

#include "control.h"
#include "expert.pb-c.h"
#include "moe/routing_table.h"

typedef struct ep_cli_node {
    char name[EP_NODE_NAME_BYTES]; /* "" when not known */
    char url[EP_URL_BYTES];
    uint64_t rows_served;                 /* by the coordinator */
    Expertd__V1__NodeStatusReply *status; /* NULL: did not answer, or was not asked */
    ep_error error;                       /* why it did not answer */
    uint64_t answered_us;                 /* local wall clock when it answered */
} ep_cli_node;

typedef struct ep_cli_node_list {
    ep_cli_node *nodes;
    size_t count;
    /* nodes that the coordinator lists as lost; they cannot be asked, so they are not in nodes */
    size_t lost_count;
} ep_cli_node_list;

/* From a coordinator's answer. Errors: NO_MEMORY. */
ep_err ep_cli_node_list_from_cluster(const Expertd__V1__ClusterStatusReply *cluster,
                                     ep_cli_node_list *out_list, ep_error *out_error);
/* From --node URLs. Errors: NO_MEMORY. */
ep_err ep_cli_node_list_from_urls(const char *const *urls, size_t count, ep_cli_node_list *out_list,
                                  ep_error *out_error);
/* The coordinator's list, or the --node URLs. Errors: those of asking the coordinator,
 * NO_MEMORY. */
ep_err ep_cli_node_list_read(ep_cli_control *control, const ep_cli_connect *connect,
                             ep_cli_node_list *out_list, ep_error *out_error);
void ep_cli_node_list_free(ep_cli_node_list *list);

/* Fills status or error of every node. Waits timeout_us at most. */
void ep_cli_node_list_ask(ep_cli_control *control, ep_cli_node_list *list, uint64_t timeout_us);

#endif
