/* SPDX-License-Identifier: Apache-2.0 */
/* Creating and destroying a client, its configuration, and the questions about what it knows. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/struct_out.h"
#include "common/args.h"
#include "base/clock.h"
#include "base/cpu_features.h"
#include "base/random.h"
#include "call/client_core.h"

#define DESTROY_TIMEOUT_US 5000000u
#define NODE_URLS_MAX EP_NODES_MAX
#define KIB ((uint64_t)1024)
#define MIB (1024 * KIB)

#define BAD(...) ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, __VA_ARGS__)

void ep_client_config_init(ep_client_config *out_config)
{
    *out_config = (ep_client_config){.struct_bytes = sizeof(*out_config),
                                     .deadline_us = 10 * 1000 * 1000,
                                     .buffer_bytes_max = 1024 * MIB,
                                     .calls_max = 1024,
                                     .chunk_bytes_max = 1 * MIB,
                                     .payload_crc = true,
                                     .hedge_permille = EP_HEDGE_BY_POLICY};
}

void ep_moe_args_init(ep_moe_args *out_args)
{
    *out_args = (ep_moe_args){.struct_bytes = sizeof(*out_args)};
    ep_tensor *tensors[] = {&out_args->x,
                            &out_args->x_scales,
                            &out_args->expert_ids,
                            &out_args->expert_scales,
                            &out_args->active_mask,
                            &out_args->partial_slots,
                            &out_args->shared,
                            &out_args->const_alpha1,
                            &out_args->const_alpha2,
                            &out_args->const_v,
                            &out_args->smooth_scales};
    for (size_t i = 0; i < sizeof(tensors) / sizeof(tensors[0]); i++) {
        *tensors[i] = ep_tensor_none();
    }
}

/* ---- configuration ---- */

static ep_err check_number(const char *name, uint64_t value, uint64_t min, uint64_t max,
                           ep_error *out_error)
{
    if (value < min || value > max) {
        return BAD("%s is %" PRIu64 ": allowed %" PRIu64 "..%" PRIu64, name, value, min, max);
    }
    return EP_OK;
}

/* Without a name to prove, any certificate of the CA would pass for the service. */
static bool lacks_server_name(const ep_client_config *config, const char *url)
{
    return strncmp(url, "tls+tcp://", strlen("tls+tcp://")) == 0 &&
           (config->tls_ca_file == NULL || config->tls_server_name == NULL ||
            config->tls_server_name[0] == 0);
}

static ep_err check_urls(const ep_client_config *config, ep_error *out_error)
{
    bool has_nodes = config->node_urls != NULL && config->node_urls_count > 0;
    if (config->coordinator_url != NULL && has_nodes) {
        return BAD("coordinator_url and node_urls are both set: allowed one of them");
    }
    if (config->coordinator_url == NULL && !has_nodes) {
        return BAD("neither coordinator_url nor node_urls is set");
    }
    if (config->coordinator_url != NULL && lacks_server_name(config, config->coordinator_url)) {
        return BAD("coordinator_url %s needs tls_ca_file and tls_server_name",
                   config->coordinator_url);
    }
    if (has_nodes && config->node_urls_count > NODE_URLS_MAX) {
        return BAD("node_urls has %zu entries: allowed 1..%d", config->node_urls_count,
                   NODE_URLS_MAX);
    }
    for (size_t i = 0; has_nodes && i < config->node_urls_count; i++) {
        if (config->node_urls[i] == NULL) {
            return BAD("node_urls[%zu] is NULL", i);
        }
        if (lacks_server_name(config, config->node_urls[i])) {
            return BAD("node_urls[%zu] %s needs tls_ca_file and tls_server_name", i,
                       config->node_urls[i]);
        }
        for (size_t j = 0; j < i; j++) {
            if (strcmp(config->node_urls[i], config->node_urls[j]) == 0) {
                return BAD("node_urls[%zu] and [%zu] are both %s", j, i, config->node_urls[i]);
            }
        }
    }
    return EP_OK;
}

/* The environment's word on lanes; NULL none. */
static const char *told_lanes(void)
{
    const char *lanes = getenv("LIBEXPERTD_LANES");
    return lanes != NULL && lanes[0] != 0 ? lanes : NULL;
}

static ep_err check_config(const ep_client_config *config, ep_error *out_error)
{
    ep_err err;
    if (config == NULL) {
        return BAD("config is NULL");
    }
    if (config->struct_bytes != sizeof(*config)) {
        return ep_error_set(out_error,
                            config->struct_bytes > sizeof(*config) ? EP_ERR_UNIMPLEMENTED
                                                                   : EP_ERR_INVALID_ARGUMENT,
                            "config has struct_bytes %" PRIu32 ": ep_client_config_init sets %zu",
                            config->struct_bytes, sizeof(*config));
    }
    if ((err = check_urls(config, out_error)) != EP_OK ||
        (err = check_number("deadline_us", config->deadline_us, 1, UINT32_MAX - 1, out_error)) !=
            EP_OK ||
        (err = check_number("buffer_bytes_max", config->buffer_bytes_max, 16 * MIB,
                            (uint64_t)1 << 40, out_error)) != EP_OK ||
        (err = check_number("calls_max", config->calls_max, 1, 65536, out_error)) != EP_OK ||
        (err = check_number("chunk_bytes_max", config->chunk_bytes_max, 16 * KIB, 16 * MIB,
                            out_error)) != EP_OK ||
        (err = check_number("prefill_window_tokens", config->prefill_window_tokens, 0,
                            EP_TOKENS_MAX, out_error)) != EP_OK ||
        (config->hedge_permille != EP_HEDGE_BY_POLICY &&
         (err = check_number("hedge_permille", config->hedge_permille, 0, EP_HEDGE_PERMILLE_MAX,
                             out_error)) != EP_OK)) {
        return err;
    }
    if (config->numerics != NULL &&
        (config->numerics[0] == 0 || strlen(config->numerics) >= EP_NUMERICS_BYTES)) {
        return BAD("numerics is '%.100s': allowed NULL, \"any\", or an id of 1..%d bytes",
                   config->numerics, EP_NUMERICS_BYTES - 1);
    }
    if (config->lanes != NULL && strcmp(config->lanes, "stream") != 0) {
        return BAD("lanes is '%.40s': allowed NULL and \"stream\"", config->lanes);
    }
    if (config->lanes == NULL && told_lanes() != NULL && strcmp(told_lanes(), "stream") != 0) {
        return BAD("LIBEXPERTD_LANES is '%.40s', allowed: stream, or nothing", told_lanes());
    }
    return ep_cpu_features_check(out_error);
}

static bool copy_text(const char *text, const char **out_copy)
{
    *out_copy = text != NULL ? strdup(text) : NULL;
    return text == NULL || *out_copy != NULL;
}

static ep_err copy_config(const ep_client_config *config, ep_client_config *out_copy)
{
    *out_copy = *config;
    out_copy->node_urls = NULL;
    out_copy->node_urls_count = 0;
    bool ok = copy_text(config->coordinator_url, &out_copy->coordinator_url);
    ok = copy_text(config->token, &out_copy->token) && ok;
    ok = copy_text(config->tls_ca_file, &out_copy->tls_ca_file) && ok;
    ok = copy_text(config->tls_cert_key_file, &out_copy->tls_cert_key_file) && ok;
    ok = copy_text(config->tls_server_name, &out_copy->tls_server_name) && ok;
    ok = copy_text(config->numerics, &out_copy->numerics) && ok;
    ok = copy_text(config->lanes != NULL ? config->lanes : told_lanes(), &out_copy->lanes) && ok;
    if (config->coordinator_url == NULL) {
        const char **urls = calloc(config->node_urls_count, sizeof(*urls));
        out_copy->node_urls = urls;
        out_copy->node_urls_count = urls != NULL ? config->node_urls_count : 0;
        for (size_t i = 0; i < out_copy->node_urls_count; i++) {
            ok = copy_text(config->node_urls[i], &urls[i]) && ok;
        }
        ok = ok && urls != NULL;
    }
    return ok ? EP_OK : EP_ERR_NO_MEMORY;
}

static void free_text(const char *text)
{
    free((void *)(uintptr_t)text);
}

static void free_config(ep_client_config *config)
{
    for (size_t i = 0; i < config->node_urls_count; i++) {
        free_text(config->node_urls[i]);
    }
    free((void *)(uintptr_t)config->node_urls);
    free_text(config->coordinator_url);
    free_text(config->token);
    free_text(config->tls_ca_file);
    free_text(config->tls_cert_key_file);
    free_text(config->tls_server_name);
    free_text(config->numerics);
    free_text(config->lanes);
}

/* ---- life ---- */

ep_client *ep_client_ref(ep_client *client)
{
    __atomic_fetch_add(&client->refs, 1, __ATOMIC_RELAXED);
    return client;
}

/* Everything that runs has ended in ep_client_destroy; the memory goes with the last prepared
 * call. */
void ep_client_unref(ep_client *client)
{
    if (__atomic_fetch_sub(&client->refs, 1, __ATOMIC_ACQ_REL) != 1) {
        return;
    }
    ep_call_registry_fini(&client->registry);
    ep_rpc_credentials_destroy(client->credentials);
    free_config(&client->config);
    ep_fork_guard_fini(&client->guard);
    free(client);
}

static void on_change(void *arg)
{
    ep_client *client = arg;
    ep_call_registry_wake(&client->registry);
}

static ep_err start_client(ep_client *client, ep_error *out_error)
{
    const ep_client_config *config = &client->config;
    const ep_rpc_tokens tokens = {.of = {[EP_ROLE_CLIENT] = {config->token}}};
    /* What is kept free for reuse: a steady state of this size allocates nothing. */
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
    return ep_cluster_create(&cluster, &client->cluster, out_error);
}

ep_err ep_client_create(const ep_client_config *config, ep_client **out_client, ep_error *out_error)
{
    ep_err err = check_config(config, out_error);
    if (err == EP_OK) {
        err = ep_stream_lane_read_environment(out_error);
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
    ep_call_registry_init(&client->registry, config->calls_max);
    ep_retry_budget_init(&client->budget, 0); /* each call sets the share by its table */
    err = copy_config(config, &client->config);
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
 * First the calls end, with their callbacks; then the connections, which ends what was still in
 * flight on them; then the threads. Should a callback of the program never return, the rest is left
 * as it is rather than pulled from under it.
 */
void ep_client_destroy(ep_client *client)
{
    if (client == NULL || ep_fork_guard_in_child(&client->guard)) {
        return;
    }
    if (client->cluster != NULL) {
        ep_cluster_stop_waits(client->cluster);
    }
    if (!ep_call_registry_close(&client->registry, DESTROY_TIMEOUT_US)) {
        return;
    }
    ep_cluster_destroy(client->cluster);
    client->cluster = NULL;
    ep_call_workers_destroy(client->workers);
    ep_timer_service_destroy(client->timers);
    ep_buffer_pool_destroy(client->pool);
    ep_client_unref(client);
}

ep_err ep_client_enter(ep_client *client, ep_error *out_error)
{
    if (client == NULL) {
        return BAD("client is NULL");
    }
    if (ep_fork_guard_in_child(&client->guard)) {
        return ep_error_set(
            out_error, EP_ERR_FAILED_PRECONDITION,
            "this process was forked from the one that made the client: a child makes its own");
    }
    ep_client_ref(client); /* leaving still reads the client after the use that destroy waits for */
    ep_call_registry_use(&client->registry);
    if (ep_call_registry_is_closing(&client->registry)) {
        ep_client_leave(client);
        return ep_error_set(out_error, EP_ERR_CLOSED, "the client is being destroyed");
    }
    return EP_OK;
}

void ep_client_leave(ep_client *client)
{
    ep_call_registry_unuse(&client->registry);
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
    uint64_t now_ns = ep_clock_now_ns();
    uint64_t timeout_ns =
        timeout_us > UINT64_MAX / 4 / EP_NS_PER_US ? UINT64_MAX / 4 : timeout_us * EP_NS_PER_US;
    err = ep_cluster_wait_ready(client->cluster, now_ns + timeout_ns, out_error);
    ep_client_leave(client);
    return err;
}

/* The newest view, or UNAVAILABLE. */
static ep_err enter_with_view(ep_client *client, ep_view **out_view)
{
    ep_err err = ep_client_enter(client, NULL);
    if (err != EP_OK) {
        return err;
    }
    *out_view = ep_cluster_acquire_view(client->cluster);
    if (*out_view == NULL) {
        ep_client_leave(client);
        return EP_ERR_UNAVAILABLE;
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
    ep_err err = enter_with_view(client, &view);
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
        memcpy(desc.numerics, view->pins[index], sizeof(desc.numerics));
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
                                 .copies_min = least == UINT32_MAX ? 0 : least};
}

ep_err ep_client_layer(ep_client *client, const char *model, const char *version,
                       uint32_t layer_index, ep_layer_desc *out_layer)
{
    ep_view *view = NULL;
    ep_err err = enter_with_view(client, &view);
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
    ep_err err = enter_with_view(client, &view);
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
    ep_err err = enter_with_view(client, &view);
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
