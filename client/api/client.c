/* SPDX-License-Identifier: Apache-2.0 */
/* Creates and destroys clients, and answers questions about what they know. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/struct_size.h"
#include "base/clock.h"
#include "base/random.h"
#include "call/call.h"
#include "expert.pb-c.h"
#include "wire/gateway_codec.h"

#define DESTROY_TIMEOUT_US 5000000u

void ep_moe_args_init_sized(ep_moe_args *out_args, size_t struct_bytes)
{
    ep_moe_args args = {0};
    ep_moe_tensors_none(&args);
    ep_struct_init(out_args, struct_bytes, &args, sizeof(args));
}

/* ---- life ---- */

static void on_change(void *arg)
{
    ep_calls_wake(arg);
}

static ep_err start_client(ep_client *client, ep_error *out_error)
{
    const ep_client_config *config = &client->config;
    const ep_rpc_tokens tokens = {.of = {[EP_ROLE_CLIENT] = {config->token}}};
    /* Free buffers kept for reuse; a steady state of this size allocates nothing. */
    size_t keep_bytes = config->buffer_bytes_max / 4;
    ep_err err = ep_buffer_pool_create(config->buffer_bytes_max, keep_bytes, &client->pool);
    if (err == EP_OK) {
        err = ep_timer_service_create("ep-client", &client->timers);
    }
    if (err == EP_OK) {
        err = ep_call_workers_create(&client->workers);
    }
    if (err != EP_OK) {
        return ep_error_set(out_error, err, "a client's threads or pool cannot be made: %s",
                            ep_err_text(err));
    }
    err = ep_rpc_credentials_create(&tokens, &client->credentials, out_error);
    if (err != EP_OK) {
        return err;
    }
    ep_cluster_config cluster = {.common = {.timers = client->timers,
                                            .pool = client->pool,
                                            .credentials = client->credentials,
                                            .node = "",
                                            .role = "client",
                                            .incarnation = ep_random_id(),
                                            .payload_crc = config->payload_crc},
                                 .client = config,
                                 .on_change = on_change,
                                 .arg = client,
                                 .late_replies = &client->counters.late_replies};
    ep_rpc_limits_default(&cluster.common.limits);
    client->flow = (ep_flow_limits){.frame_bytes_max = cluster.common.limits.frame_bytes_max,
                                    .chunk_bytes_max = config->chunk_bytes_max,
                                    .window_bytes_max = config->buffer_bytes_max / 8,
                                    .window_tokens = config->prefill_window_tokens};
    client->window_bytes_max = config->buffer_bytes_max / 4 * 3;
    ep_host_boot_id(client->host);
    return ep_cluster_create(&cluster, &client->cluster, out_error);
}

ep_err ep_client_create(const ep_client_config *given, ep_client **out_client, ep_error *out_error)
{
    ep_client_config config;
    ep_client_config_init(&config);
    ep_err err = ep_struct_in("config", given, EP_STRUCT_UPTO(ep_client_config, node_urls_count),
                              &config, sizeof(config), out_error);
    if (err == EP_OK) {
        err = ep_stream_lane_read_environment(out_error); /* the check below depends on it */
    }
    if (err == EP_OK) {
        err = ep_client_config_check(&config, out_error);
    }
    if (err != EP_OK) {
        return err;
    }
    ep_client *client = calloc(1, sizeof(*client));
    if (client == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a client");
    }
    client->refs = 1;
    client->forward_method = ep_rpc_method_by_name("expertd.v1.ExpertService", "Forward");
    ep_fork_guard_init(&client->guard);
    ep_call_registry_init(&client->registry, config.calls_max);
    ep_retry_budget_init(&client->budget, 0); /* each call sets the share from its table's policy */
    err = ep_client_config_copy(&config, &client->config);
    if (err != EP_OK) {
        ep_error_set(out_error, err, "no memory for a client");
    } else {
        err = start_client(client, out_error);
    }
    if (err != EP_OK) {
        ep_client_destroy(client);
        return err;
    }
    *out_client = client;
    return EP_OK;
}

/*
 * Ends the calls with their callbacks first, then the connections with what is in flight on them,
 * then the threads. If a callback of the program never returns, the rest is not freed.
 */
void ep_client_destroy(ep_client *client)
{
    if (client == NULL || ep_fork_guard_in_child(&client->guard)) {
        return;
    }
    if (client->cluster != NULL) {
        ep_cluster_stop_waits(client->cluster);
    }
    if (!ep_calls_close(client, DESTROY_TIMEOUT_US)) {
        return;
    }
    ep_cluster_destroy(client->cluster);
    client->cluster = NULL;
    ep_call_workers_destroy(client->workers);
    ep_timer_service_destroy(client->timers);
    ep_buffer_pool_destroy(client->pool);
    ep_client_unref(client);
}

ep_err ep_client_set_token(ep_client *client, const char *token, ep_error *out_error)
{
    const ep_rpc_tokens tokens = {.of = {[EP_ROLE_CLIENT] = {token}}};
    ep_err err = ep_client_enter(client, out_error);
    if (err == EP_OK) {
        err = ep_rpc_credentials_replace(client->credentials, &tokens, out_error);
        ep_client_leave(client);
    }
    return err;
}

/* ---- questions ---- */

ep_err ep_client_wait_ready(ep_client *client, uint64_t timeout_us, ep_error *out_error)
{
    ep_err err = ep_client_enter(client, out_error);
    if (err != EP_OK) {
        return err;
    }
    err = ep_cluster_wait_ready(client->cluster, ep_clock_after_us(timeout_us), out_error);
    ep_client_leave(client);
    return err;
}

/* Enters the client and gets its newest view. Errors: UNAVAILABLE without one. */
static ep_err enter_with_view(ep_client *client, ep_view **out_view, ep_error *out_error)
{
    ep_err err = ep_client_enter(client, out_error);
    if (err != EP_OK) {
        return err;
    }
    *out_view = ep_cluster_acquire_view(client->cluster);
    if (*out_view == NULL) {
        ep_client_leave(client);
        return ep_error_set(out_error, EP_ERR_UNAVAILABLE, "no routing table yet");
    }
    return EP_OK;
}

static void leave_with_view(ep_client *client, ep_view *view)
{
    ep_view_unref(view);
    ep_client_leave(client);
}

static uint32_t count_layers(const ep_routing_table *table, uint32_t model_index)
{
    uint32_t count = 0;
    for (uint32_t l = 0; l < table->layers_count; l++) {
        count += table->layers[l].model_index == model_index;
    }
    return count;
}

ep_err ep_client_model(ep_client *client, uint32_t index, ep_model_desc *out_model)
{
    ep_view *view = NULL;
    ep_err err = enter_with_view(client, &view, NULL);
    if (err != EP_OK) {
        return err;
    }
    if (index < view->table->models_count) {
        const ep_routing_model *model = &view->table->models[index];
        ep_model_desc desc = {.struct_bytes = sizeof(desc),
                              .layers_count = count_layers(view->table, index),
                              .is_default = model->is_default};
        memcpy(desc.name, model->name, sizeof(model->name));
        memcpy(desc.version, model->version, sizeof(model->version));
        snprintf(desc.numerics, sizeof(desc.numerics), "%s", view->pins[index]);
        ep_struct_out(out_model, &desc, sizeof(desc));
    } else {
        err = EP_ERR_NOT_FOUND;
    }
    leave_with_view(client, view);
    return err;
}

static void describe_layer(const ep_routing_layer *layer, ep_layer_desc *out_layer)
{
    const ep_layer_shape *shape = &layer->shape;
    uint32_t least = UINT32_MAX;
    for (uint32_t e = 0; e < shape->experts + shape->shared_experts; e++) {
        uint32_t copies = layer->offsets[e + 1] - layer->offsets[e];
        least = copies < least ? copies : least;
    }
    *out_layer = (ep_layer_desc){.struct_bytes = sizeof(*out_layer),
                                 .layer = shape->layer,
                                 .hidden = shape->hidden,
                                 .inner = shape->inner,
                                 .experts = shape->experts,
                                 .shared_experts = shape->shared_experts,
                                 .top_k = shape->top_k,
                                 .copies_min = least == UINT32_MAX ? 0 : least,
                                 .form_told = shape->form_told,
                                 .shared_inner = shape->shared_inner,
                                 .alpha = shape->numbers.alpha,
                                 .beta = shape->numbers.beta,
                                 .limit = shape->numbers.limit};
    snprintf(out_layer->activation, sizeof(out_layer->activation), "%s",
             ep_activation_name(shape->activation));
}

ep_err ep_client_layer(ep_client *client, const char *model, const char *version,
                       uint32_t layer_index, ep_layer_desc *out_layer)
{
    ep_view *view = NULL;
    ep_err err = enter_with_view(client, &view, NULL);
    if (err != EP_OK) {
        return err;
    }
    uint32_t model_index = 0;
    uint32_t left = layer_index;
    err = EP_ERR_NOT_FOUND;
    if (model != NULL &&
        ep_routing_table_find_model(view->table, model, version, &model_index) != NULL) {
        for (uint32_t l = 0; l < view->table->layers_count && err != EP_OK; l++) {
            if (view->table->layers[l].model_index == model_index && left-- == 0) {
                ep_layer_desc desc;
                describe_layer(&view->table->layers[l], &desc);
                if (out_layer->struct_bytes == 0) { /* a caller built for version 0.1 */
                    out_layer->struct_bytes = EP_STRUCT_UPTO(ep_layer_desc, activation);
                }
                ep_struct_out(out_layer, &desc, sizeof(desc));
                err = EP_OK;
            }
        }
    }
    leave_with_view(client, view);
    return err;
}

ep_err ep_client_epoch(ep_client *client, uint64_t *out_term, uint64_t *out_number)
{
    ep_view *view = NULL;
    ep_err err = enter_with_view(client, &view, NULL);
    if (err != EP_OK) {
        return err;
    }
    *out_term = view->table->epoch.term;
    *out_number = view->table->epoch.number;
    leave_with_view(client, view);
    return EP_OK;
}

ep_err ep_client_read_waits(ep_client *client, uint32_t index, ep_client_node_waits *out_waits)
{
    ep_view *view = NULL;
    ep_err err = enter_with_view(client, &view, NULL);
    if (err != EP_OK) {
        return err;
    }
    if (index < view->table->nodes_count) {
        ep_client_node_waits waits = {.struct_bytes = sizeof(waits)};
        snprintf(waits.node, sizeof(waits.node), "%s", view->table->nodes[index].name);
        ep_peer_timing_read(&view->peers[index]->timing, &waits);
        ep_struct_out(out_waits, &waits, sizeof(waits));
    } else {
        err = EP_ERR_NOT_FOUND;
    }
    leave_with_view(client, view);
    return err;
}

static ep_err ask_memory(const ep_view *view, uint32_t index, uint64_t deadline_ns,
                         ep_client_node_memory *out_memory, ep_error *out_error)
{
    const ep_peer *peer = view->peers[index];
    ep_rpc_channel *channel = peer->links[EP_PEER_DECODE].channel;
    Expertd__V1__Empty empty = EXPERTD__V1__EMPTY__INIT;
    ProtobufCMessage *reply = NULL;
    ep_error error;
    ep_err err = channel == NULL ? ep_error_set(&error, EP_ERR_UNAVAILABLE,
                                                "no connection can be made to %s", peer->url)
                                 : ep_rpc_call_sync(channel, "expertd.v1.NodeInfo", "NodeStatus",
                                                    &empty.base, deadline_ns, &reply, &error);
    if (err != EP_OK) {
        ep_error_prefix(&error, err, "node %s", view->table->nodes[index].name);
        snprintf(error.node, sizeof(error.node), "%s", view->table->nodes[index].name);
        if (out_error != NULL) {
            *out_error = error;
        }
        return err;
    }
    const Expertd__V1__NodeStatusReply *status =
        (const Expertd__V1__NodeStatusReply *)(const void *)reply;
    ep_client_node_memory memory = {.struct_bytes = sizeof(memory),
                                    .weight_bytes = status->weight_bytes};
    snprintf(memory.node, sizeof(memory.node), "%s", view->table->nodes[index].name);
    protobuf_c_message_free_unpacked(reply, NULL);
    ep_struct_out(out_memory, &memory, sizeof(memory));
    return EP_OK;
}

ep_err ep_client_ask_memory(ep_client *client, uint32_t index, uint64_t timeout_us,
                            ep_client_node_memory *out_memory, ep_error *out_error)
{
    ep_view *view = NULL;
    ep_err err = enter_with_view(client, &view, out_error);
    if (err != EP_OK) {
        return err;
    }
    err = index < view->table->nodes_count
              ? ask_memory(view, index, ep_clock_after_us(timeout_us), out_memory, out_error)
              : ep_error_set(out_error, EP_ERR_NOT_FOUND, "the table has %" PRIu32 " nodes",
                             view->table->nodes_count);
    leave_with_view(client, view);
    return err;
}

static uint64_t read_counter(const uint64_t *counter)
{
    return __atomic_load_n(counter, __ATOMIC_RELAXED);
}

void ep_client_read_stats(ep_client *client, ep_client_stats *out_stats)
{
    ep_buffer_pool_stats pool;
    ep_client_stats stats = {.struct_bytes = sizeof(stats)};
    if (ep_client_enter(client, NULL) != EP_OK) {
        ep_struct_out(out_stats, &stats, sizeof(stats));
        return;
    }
    const ep_client_counters *c = &client->counters;
    stats.calls = read_counter(&c->calls);
    stats.calls_failed = read_counter(&c->calls_failed);
    stats.frames_sent = read_counter(&c->frames_sent);
    stats.frames_rerouted = read_counter(&c->frames_rerouted);
    stats.hedged_frames = read_counter(&c->frames_hedged);
    stats.late_replies = read_counter(&c->late_replies);
    stats.nonfinite_rows = read_counter(&c->nonfinite_rows);
    stats.bytes_sent = read_counter(&c->bytes_sent);
    stats.bytes_received = read_counter(&c->bytes_received);
    ep_buffer_pool_read_stats(client->pool, &pool);
    stats.buffer_bytes_lent = pool.lent_bytes;
    stats.buffer_bytes_peak = pool.lent_bytes_peak;
    stats.buffer_allocations = pool.system_allocations;
    ep_client_leave(client);
    ep_struct_out(out_stats, &stats, sizeof(stats));
}

const char *ep_version(void)
{
    return EP_VERSION_TEXT; /* from the top CMakeLists.txt */
}
