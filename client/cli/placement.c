/* SPDX-License-Identifier: Apache-2.0 */
/* The routing table from a coordinator's watch, or from the nodes' own descriptions. */
#include "placement.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/check.h"
#include "expert.pb-c.h"
#include "cluster/hello_table.h"
#include "wire/placement_codec.h"

/* Adds to the error what a coordinator without a table waits for. */
static void explain_silence(ep_cli_control *control, const char *url, ep_error *out_error)
{
    ProtobufCMessage *message = NULL;
    if (ep_cli_control_ask_one(control, url, "expertd.v1.Coordinator", "ClusterStatus", NULL,
                               &message, NULL) != EP_OK) {
        return;
    }
    const Expertd__V1__ClusterStatusReply *cluster =
        (const Expertd__V1__ClusterStatusReply *)message;
    if (cluster->epoch == NULL || cluster->epoch->number == 0) {
        ep_error_set(out_error, EP_ERR_DEADLINE_EXCEEDED,
                     "%s has no routing table yet: %zu nodes are here, and it waits until "
                     "min_nodes %u have loaded%s%s",
                     url, cluster->n_nodes, cluster->min_nodes,
                     cluster->placement_error[0] != '\0' ? "; " : "", cluster->placement_error);
    }
    protobuf_c_message_free_unpacked(message, NULL);
}

static ep_err read_from_coordinator(ep_cli_control *control, const char *url,
                                    ep_routing_table **out_table, ep_error *out_error)
{
    Expertd__V1__WatchPlacementRequest request = EXPERTD__V1__WATCH_PLACEMENT_REQUEST__INIT;
    ProtobufCMessage *message = NULL;
    ep_err err = ep_cli_control_ask_one(control, url, "expertd.v1.Coordinator", "WatchPlacement",
                                        &request.base, &message, out_error);
    if (err == EP_ERR_DEADLINE_EXCEEDED) { /* a watch sends nothing until there is a table */
        explain_silence(control, url, out_error);
    }
    if (err != EP_OK) {
        return err;
    }
    EP_ASSERT(message->descriptor == &expertd__v1__placement_snapshot__descriptor);
    err = ep_placement_decode((Expertd__V1__PlacementSnapshot *)message, out_table, out_error);
    protobuf_c_message_free_unpacked(message, NULL);
    return err != EP_OK ? ep_error_prefix(out_error, err, "the table of %s", url) : EP_OK;
}

static ep_err build_from_answers(const ep_cli_connect *connect, const ep_cli_answer *answers,
                                 ep_routing_table **out_table, ep_error *out_error)
{
    size_t count = connect->node_urls_count;
    Expertd__V1__Hello *hellos = calloc(count, sizeof(*hellos));
    ep_hello_source *sources = calloc(count, sizeof(*sources));
    if (hellos == NULL || sources == NULL) {
        free(hellos);
        free(sources);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a table of %zu nodes",
                            count);
    }
    for (size_t i = 0; i < count; i++) {
        const Expertd__V1__DescribeReply *reply =
            (const Expertd__V1__DescribeReply *)answers[i].message;
        expertd__v1__hello__init(&hellos[i]);
        hellos[i].node = reply->node;
        hellos[i].incarnation = reply->incarnation;
        hellos[i].models = reply->models;
        hellos[i].n_models = reply->n_models;
        sources[i] = (ep_hello_source){.url = connect->node_urls[i], .hello = &hellos[i]};
    }
    ep_err err =
        ep_hello_table_build(sources, (uint32_t)count, (ep_epoch){0, 0}, out_table, out_error);
    free(hellos);
    free(sources);
    return err;
}

static ep_err read_from_nodes(ep_cli_control *control, const ep_cli_connect *connect,
                              ep_routing_table **out_table, ep_error *out_error)
{
    ep_cli_answer answers[EP_CLI_NODES_MAX];
    Expertd__V1__Empty empty = EXPERTD__V1__EMPTY__INIT;
    size_t count = connect->node_urls_count;
    ep_err err = EP_OK;
    ep_cli_control_ask(control, connect->node_urls, count, "expertd.v1.ExpertService", "Describe",
                       &empty.base, connect->timeout_us, answers);
    for (size_t i = 0; i < count && err == EP_OK; i++) {
        err = answers[i].error.code;
        if (err != EP_OK && out_error != NULL) {
            *out_error = answers[i].error;
        }
    }
    if (err == EP_OK) {
        err = build_from_answers(connect, answers, out_table, out_error);
    }
    ep_cli_answers_free(answers, count);
    return err;
}

ep_err ep_cli_placement_read(ep_cli_control *control, const ep_cli_connect *connect,
                             ep_routing_table **out_table, ep_error *out_error)
{
    ep_cli_control *own = NULL;
    ep_err err = control == NULL ? ep_cli_control_open(connect, &own, out_error) : EP_OK;
    control = control == NULL ? own : control;
    if (err == EP_OK) {
        err = connect->coordinator_url != NULL
                  ? read_from_coordinator(control, connect->coordinator_url, out_table, out_error)
                  : read_from_nodes(control, connect, out_table, out_error);
    }
    ep_cli_control_close(own);
    return err;
}

/* "demo version v1 layers 0..3, ..." */
static void list_models(const ep_routing_table *table, char *out, size_t bytes)
{
    size_t used = 0;
    snprintf(out, bytes, "none");
    for (uint32_t l = 0; l < table->layers_count && used < bytes; l++) {
        uint32_t m = table->layers[l].model_index;
        bool is_first = l == 0 || table->layers[l - 1].model_index != m;
        bool is_last = l + 1 == table->layers_count || table->layers[l + 1].model_index != m;
        if (is_first) {
            used += (size_t)snprintf(out + used, bytes - used, "%s%s version %s layers %" PRIu32,
                                     l > 0 ? ", " : "", table->models[m].name,
                                     table->models[m].version, table->layers[l].shape.layer);
        } else if (is_last) {
            used += (size_t)snprintf(out + used, bytes - used, "..%" PRIu32,
                                     table->layers[l].shape.layer);
        }
    }
}

ep_err ep_cli_placement_missing(const ep_routing_table *table, const char *model,
                                const char *version, int64_t layer, ep_error *out_error)
{
    char wanted[32] = "";
    char names[EP_ERROR_TEXT_BYTES / 2];
    list_models(table, names, sizeof(names));
    if (layer >= 0) {
        snprintf(wanted, sizeof(wanted), "layer %" PRId64 " of ", layer);
    }
    return ep_error_set(out_error, EP_ERR_NOT_FOUND,
                        "there is no %smodel '%.100s'%s%.40s; the table has %s", wanted,
                        model != NULL ? model : "any", version != NULL ? " version " : "",
                        version != NULL ? version : "", names);
}

void ep_cli_placement_copies(const ep_routing_layer *layer, uint32_t *out_min, uint32_t *out_max)
{
    uint32_t total = layer->shape.experts + layer->shape.shared_experts;
    uint32_t min = UINT32_MAX;
    uint32_t max = 0;
    for (uint32_t i = 0; i < total; i++) {
        uint32_t copies = layer->offsets[i + 1] - layer->offsets[i];
        min = copies < min ? copies : min;
        max = copies > max ? copies : max;
    }
    *out_min = total > 0 ? min : 0;
    *out_max = max;
}
