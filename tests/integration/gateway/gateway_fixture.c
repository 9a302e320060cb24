/* SPDX-License-Identifier: Apache-2.0 */
#include "gateway_fixture.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/random.h"

static void make_models(gateway_fixture *f)
{
    static const char *const names[GATEWAY_MODELS] = {"mixtral", "deepseek"};
    ep_fixture_config config = ep_fixture_default();
    config.hidden = GATEWAY_HIDDEN;
    config.inner = 32;
    config.experts = GATEWAY_EXPERTS;
    config.top_k = GATEWAY_TOP_K;
    ep_test_checkpoint_new(&config, f->paths[0]);
    config.seed = 77;
    config.names = EP_NAMES_N1;
    config.router = EP_ROUTER_R4;
    config.dense_layers = 1;
    config.shared_inner = 32;
    config.router_bias = true;
    config.renormalise = true;
    config.scaling_factor = 2.5f;
    config.groups = 4;
    config.groups_kept = 2;
    ep_test_checkpoint_new(&config, f->paths[1]);
    for (uint32_t m = 0; m < GATEWAY_MODELS; m++) {
        f->models[m] = (ep_test_model){names[m], f->paths[m]};
    }
}

void gateway_fixture_init(gateway_fixture *f, uint32_t copies, const char *const *coordinator_args)
{
    make_models(f);
    const ep_test_cluster_options options = {.nodes_count = GATEWAY_NODES,
                                             .copies = copies,
                                             .models = f->models,
                                             .models_count = GATEWAY_MODELS,
                                             .coordinator_args = coordinator_args,
                                             .node_args = f->node_args};
    ep_test_cluster_start(&f->cluster, &options);
    f->connect = (ep_cli_connect){.timeout_us = EP_CLI_TIMEOUT_US_DEFAULT, .payload_crc = true};
    f->connect.coordinator_url = f->cluster.coordinator.rpc_url;
    f->connect.timeout_us = (uint64_t)EP_TEST_PATIENCE_MS * 1000;
}

void gateway_fixture_fini(gateway_fixture *f)
{
    ep_test_cluster_stop(&f->cluster);
    for (uint32_t m = 0; m < GATEWAY_MODELS; m++) {
        ep_test_dir_remove(f->paths[m]);
    }
}

/* The gateway itself says when: a call for no token. */
void gateway_wait_table(gateway_fixture *f)
{
    Expertd__V1__GatewayForwardRequest header = EXPERTD__V1__GATEWAY_FORWARD_REQUEST__INIT;
    ep_error error;
    ep_err err;
    uint64_t end_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    gateway_raw *raw = gateway_raw_open(f);
    header.model = (char *)(uintptr_t)f->models[0].name;
    header.hidden = GATEWAY_HIDDEN;
    header.top_k = GATEWAY_TOP_K;
    header.x_dtype = EP_DTYPE_BF16;
    header.out_dtype = EP_DTYPE_BF16;
    header.ids_dtype = EP_DTYPE_I32;
    header.scales_dtype = EP_DTYPE_F32;
    do {
        gateway_raw_begin(raw, &header, NULL, 0, EP_TEST_PATIENCE_MS);
        err = gateway_raw_wait(raw, &error, NULL);
        EP_TEST_CHECK(err == EP_OK || err == EP_ERR_UNAVAILABLE, "%s: %s", ep_err_name(err),
                      error.text);
        EP_TEST_CHECK(err == EP_OK || strstr(error.text, "of min_nodes 3 nodes") != NULL,
                      "it does not say what it waits for: %s", error.text);
        EP_TEST_CHECK(ep_clock_now_ns() < end_ns, "no table");
    } while (err != EP_OK);
    gateway_raw_close(raw);
}

ep_cli_gateway *gateway_open(gateway_fixture *f)
{
    ep_cli_gateway *gateway = NULL;
    ep_error error;
    EP_TEST_CHECK(ep_cli_gateway_open(&f->connect, &gateway, &error) == EP_OK, "%s", error.text);
    return gateway;
}

/* ---- metrics ---- */

double gateway_metric(gateway_fixture *f, const char *name)
{
    return ep_test_metric(&f->cluster.coordinator, name);
}

double gateway_nodes_metric(gateway_fixture *f, const char *name)
{
    double sum = 0;
    for (uint32_t i = 0; i < GATEWAY_NODES; i++) {
        sum += ep_test_metric(&f->cluster.nodes[i], name);
    }
    return sum;
}

void gateway_wait_metric(gateway_fixture *f, const char *name, double value)
{
    uint64_t end_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    double last;
    while ((last = gateway_metric(f, name)) != value) {
        EP_TEST_CHECK(ep_clock_now_ns() < end_ns, "%s is %g, never %g", name, last, value);
    }
}

/* ---- raw calls ---- */

struct gateway_raw {
    gateway_fixture *f;
    ep_rpc_channel *channel;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool is_done;
    ep_error error;
    uint32_t missing;
    ep_rpc_call_id id;
};

gateway_raw *gateway_raw_open(gateway_fixture *f)
{
    gateway_raw *raw = calloc(1, sizeof(*raw));
    ep_error error;
    EP_TEST_CHECK(raw != NULL, "no memory");
    raw->f = f;
    pthread_mutex_init(&raw->lock, NULL);
    pthread_cond_init(&raw->changed, NULL);
    ep_rpc_channel_config config = {
        .common = {.timers = f->cluster.timers,
                   .pool = f->cluster.pool,
                   .token = "",
                   .node = "",
                   .role = "client",
                   .incarnation = ep_random_id(),
                   .payload_crc = true},
        .address = {.url = f->cluster.coordinator.rpc_url},
        .connection_class = "bulk",
    };
    ep_rpc_limits_default(&config.common.limits);
    ep_err err = ep_rpc_channel_create(&config, &raw->channel, &error);
    err = err != EP_OK
              ? err
              : ep_rpc_channel_wait_ready(
                    raw->channel, ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS, &error);
    EP_TEST_CHECK(err == EP_OK, "%s", error.text);
    return raw;
}

void gateway_raw_close(gateway_raw *raw)
{
    ep_rpc_channel_destroy(raw->channel);
    pthread_cond_destroy(&raw->changed);
    pthread_mutex_destroy(&raw->lock);
    free(raw);
}

static void on_reply(void *arg, const ep_rpc_reply *reply, const ep_error *error)
{
    gateway_raw *raw = arg;
    pthread_mutex_lock(&raw->lock);
    if (error != NULL) {
        raw->error = *error;
    } else {
        raw->missing =
            ((const Expertd__V1__GatewayForwardReply *)(const void *)reply->header)->missing_count;
    }
    raw->is_done = true;
    pthread_cond_signal(&raw->changed);
    pthread_mutex_unlock(&raw->lock);
}

void gateway_raw_begin(gateway_raw *raw, const Expertd__V1__GatewayForwardRequest *header,
                       const void *tensors, size_t tensor_bytes, uint32_t timeout_ms)
{
    static const ep_rpc_metadata metadata[] = {
        {"traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
        {"tenant", "tests"}};
    ep_buffer *buffer = NULL;
    ep_error error;
    if (tensor_bytes > 0) {
        EP_TEST_CHECK(ep_buffer_acquire(raw->f->cluster.pool, tensor_bytes, &buffer) == EP_OK,
                      "no memory");
        memcpy(buffer->data, tensors, tensor_bytes);
    }
    raw->is_done = false;
    raw->missing = 0;
    ep_error_clear(&raw->error);
    const ep_rpc_request request = {.method =
                                        ep_rpc_method_by_name("expertd.v1.Gateway", "Forward"),
                                    .header = &header->base,
                                    .tensors = buffer,
                                    .deadline_ns = ep_clock_now_ns() + timeout_ms * EP_NS_PER_MS,
                                    .metadata = metadata,
                                    .metadata_count = 2};
    if (ep_rpc_call_start(raw->channel, &request, on_reply, raw, &raw->id, &error) != EP_OK) {
        raw->error = error;
        raw->is_done = true;
    }
    ep_buffer_unref(buffer);
}

void gateway_raw_cancel(gateway_raw *raw)
{
    ep_rpc_call_cancel(raw->channel, raw->id);
}

ep_err gateway_raw_wait(gateway_raw *raw, ep_error *out_error, uint32_t *out_missing)
{
    pthread_mutex_lock(&raw->lock);
    while (!raw->is_done) {
        pthread_cond_wait(&raw->changed, &raw->lock);
    }
    pthread_mutex_unlock(&raw->lock);
    *out_error = raw->error;
    if (out_missing != NULL) {
        *out_missing = raw->missing;
    }
    return raw->error.code;
}
