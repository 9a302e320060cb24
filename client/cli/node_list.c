/* SPDX-License-Identifier: Apache-2.0 */
/* Node lists and their NodeStatus. */
#include "node_list.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static ep_err allocate(size_t count, ep_cli_node_list *out_list, ep_error *out_error)
{
    ep_cli_node *nodes = calloc(count + 1, sizeof(*nodes));
    if (nodes == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a list of %zu nodes",
                            count);
    }
    for (size_t i = 0; i < count; i++) {
        ep_error_clear(&nodes[i].error);
    }
    *out_list = (ep_cli_node_list){.nodes = nodes, .count = count};
    return EP_OK;
}

ep_err ep_cli_node_list_from_cluster(const Expertd__V1__ClusterStatusReply *cluster,
                                     ep_cli_node_list *out_list, ep_error *out_error)
{
    ep_err err = allocate(cluster->n_nodes, out_list, out_error);
    size_t count = 0;
    for (size_t i = 0; err == EP_OK && i < cluster->n_nodes; i++) {
        const Expertd__V1__NodeEntry *entry = cluster->nodes[i];
        if (strcmp(entry->state, "lost") == 0) {
            out_list->lost_count++;
            continue;
        }
        ep_cli_node *node = &out_list->nodes[count++];
        snprintf(node->name, sizeof(node->name), "%s", entry->name);
        snprintf(node->url, sizeof(node->url), "%s", entry->url);
        node->rows_served = entry->rows_served;
    }
    out_list->count = count;
    return err;
}

ep_err ep_cli_node_list_from_urls(const char *const *urls, size_t count, ep_cli_node_list *out_list,
                                  ep_error *out_error)
{
    ep_err err = allocate(count, out_list, out_error);
    for (size_t i = 0; err == EP_OK && i < count; i++) {
        snprintf(out_list->nodes[i].url, sizeof(out_list->nodes[i].url), "%s", urls[i]);
    }
    return err;
}

ep_err ep_cli_node_list_read(ep_cli_control *control, const ep_cli_connect *connect,
                             ep_cli_node_list *out_list, ep_error *out_error)
{
    ProtobufCMessage *message = NULL;
    if (connect->coordinator_url == NULL) {
        return ep_cli_node_list_from_urls(connect->node_urls, connect->node_urls_count, out_list,
                                          out_error);
    }
    ep_err err = ep_cli_control_ask_one(control, connect->coordinator_url, "expertd.v1.Coordinator",
                                        "ClusterStatus", NULL, &message, out_error);
    if (err == EP_OK) {
        err = ep_cli_node_list_from_cluster((const Expertd__V1__ClusterStatusReply *)message,
                                            out_list, out_error);
        protobuf_c_message_free_unpacked(message, NULL);
    }
    return err;
}

static void free_status(ep_cli_node *node)
{
    expertd__v1__node_status_reply__free_unpacked(node->status, NULL);
    node->status = NULL;
}

void ep_cli_node_list_free(ep_cli_node_list *list)
{
    for (size_t i = 0; i < list->count; i++) {
        free_status(&list->nodes[i]);
    }
    free(list->nodes);
    *list = (ep_cli_node_list){0};
}

void ep_cli_node_list_ask(ep_cli_control *control, ep_cli_node_list *list, uint64_t timeout_us)
{
    const char **urls = calloc(list->count + 1, sizeof(*urls));
    ep_cli_answer *answers = calloc(list->count + 1, sizeof(*answers));
    for (size_t i = 0; i < list->count; i++) {
        free_status(&list->nodes[i]);
        ep_error_set(&list->nodes[i].error, EP_ERR_NO_MEMORY, "no memory to ask %zu nodes",
                     list->count);
    }
    if (urls == NULL || answers == NULL) {
        free(urls);
        free(answers);
        return;
    }
    for (size_t i = 0; i < list->count; i++) {
        urls[i] = list->nodes[i].url;
    }
    ep_cli_control_ask(control, urls, list->count, "expertd.v1.NodeInfo", "NodeStatus", NULL,
                       timeout_us, answers);
    for (size_t i = 0; i < list->count; i++) {
        list->nodes[i].status = (Expertd__V1__NodeStatusReply *)answers[i].message;
        list->nodes[i].error = answers[i].error;
        list->nodes[i].answered_us = answers[i].arrived_us;
    }
    free(urls);
    free(answers);
}
