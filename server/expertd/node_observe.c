/* SPDX-License-Identifier: Apache-2.0 */
/* Probes and gauges of the node. */
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "common/version.h"
#include "expertd/node_private.h"
#include "common/rpc_metrics.h"

#define LOOP_STUCK_MS 30000

static const char *const class_names[EP_WORK_CLASSES] = {"decode", "prefill"};

static ep_metric_series *gauge(ep_node *node, const char *name, const char *help)
{
    return ep_metrics_gauge(node->metrics, name, help, NULL, 0);
}

static ep_metric_series *counter(ep_node *node, const char *name, const char *help)
{
    return ep_metrics_counter(node->metrics, name, help, NULL, 0);
}

static void collect_weights(ep_node *node)
{
    ep_weight_stats weights;
    ep_node_gauges *g = &node->gauges;
    ep_weight_store_read_stats(node->store, &weights);
    ep_gauge_set(g->experts_resident, (double)weights.resident_count);
    ep_gauge_set(g->experts_pending, (double)weights.pending_count);
    ep_gauge_set(g->experts_failed, (double)weights.failed_count);
    ep_gauge_set(g->weight_bytes, (double)weights.resident_bytes);
    ep_counter_set(g->weight_files[0], ep_weight_serve_bytes(node->weight_serve));
    ep_counter_set(g->weight_files[1], ep_weight_fetch_bytes(node->weight_fetch));
    ep_gauge_set(g->experts_owned, (double)weights.owned_count);
    ep_gauge_set(g->expert_waits, (double)weights.waiting_count);
    ep_counter_set(g->expert_uses[0], weights.hits_total);
    ep_counter_set(g->expert_uses[1], weights.misses_total);
    ep_counter_set(g->expert_evictions, weights.evictions_total);
    ep_counter_set(g->expert_prefetches[0], weights.prefetches_useful_total);
    ep_counter_set(g->expert_prefetches[1], weights.prefetches_useless_total);
    ep_counter_set(g->expert_loads, weights.loads_total);
    ep_gauge_set(g->expert_load_seconds,
                 weights.loads_total == 0
                     ? 0.0
                     : (double)weights.load_ns_total * 1e-9 / (double)weights.loads_total);
    if (node->cache != NULL) {
        ep_weight_cache_stats cache;
        ep_weight_cache_read_stats(node->cache, &cache);
        ep_gauge_set(g->cache_bytes, (double)cache.bytes);
        ep_counter_set(g->cache_files[0], cache.read_total);
        ep_counter_set(g->cache_files[1], cache.written_total);
        ep_counter_set(g->cache_files[2], cache.dropped_total);
    }
    size_t n = 0;
    for (uint32_t m = 0; m < node->models.count; m++) {
        for (uint32_t l = 0; l < node->models.models[m].layers_count; l++) {
            ep_counter_set(g->layer_rows[n++],
                           atomic_load_explicit(&node->models.models[m].layers[l].rows_served,
                                                memory_order_relaxed));
        }
    }
}

static void collect_devices(ep_node *node)
{
    for (uint32_t d = 0; d < node->devices.count; d++) {
        const ep_node_device *device = &node->devices.devices[d];
        ep_metric_series *const *series = node->gauges.devices[d];
        ep_backend_device figures = {0};
        uint64_t weights = 0;
        if (device->backend != NULL) {
            device->backend->ops->device_read(device->backend, &figures);
            weights = ep_weight_store_device_bytes(node->store, device->store_index);
        }
        ep_gauge_set(series[0], atomic_load(&device->is_lost) ? 1 : 0);
        ep_gauge_set(series[1], (double)figures.memory_bytes);
        ep_gauge_set(series[2], (double)figures.free_bytes);
        ep_gauge_set(series[3], (double)weights);
    }
}

static void make_device_gauges(ep_node *node)
{
    static const char *const names[4][2] = {
        {"expertd_device_lost",
         "1 when the device answers no more; its experts go to other devices or nodes"},
        {"expertd_device_memory_bytes",
         "Memory of the device, as its driver says; 0 when it is lost"},
        {"expertd_device_memory_free_bytes", "Of it, free"},
        {"expertd_device_weights_bytes", "Memory of packed weights on the device"}};
    for (uint32_t d = 0; d < node->devices.count; d++) {
        char number[16];
        snprintf(number, sizeof(number), "%u", d);
        const ep_metric_label label = {"device", number};
        for (int i = 0; i < 4; i++) {
            node->gauges.devices[d][i] =
                ep_metrics_gauge(node->metrics, names[i][0], names[i][1], &label, 1);
        }
    }
}

static void collect_rpc(ep_node *node)
{
    ep_rpc_server_stats rpc;
    ep_buffer_pool_stats buffers;
    ep_node_gauges *g = &node->gauges;
    ep_rpc_server_read_stats(node->server, &rpc);
    ep_buffer_pool_read_stats(node->pool, &buffers);
    ep_gauge_set(g->connections, (double)rpc.connections);
    ep_counter_set(g->rpc_calls, rpc.calls_total);
    ep_counter_set(g->rpc_bytes_in, rpc.bytes_received);
    ep_counter_set(g->rpc_bytes_out, rpc.bytes_sent);
    ep_counter_set(g->protocol_errors, rpc.protocol_errors);
    ep_rpc_metrics_refused(node->metrics, &rpc);
    ep_rpc_metrics_lanes(node->metrics, &rpc);
    ep_rpc_metrics_shm(node->metrics);
    ep_rpc_metrics_stream_lane(node->metrics);
    ep_rpc_metrics_door(node->metrics, node->server);
    ep_pool_watch_collect(&node->pool_watch, node->metrics);
    ep_tls_watch_collect(&node->tls_watch, node->metrics);
    ep_gauge_set(g->buffer_bytes, (double)buffers.lent_bytes);
    ep_gauge_set(g->buffer_bytes_peak, (double)buffers.lent_bytes_peak);
}

/* Tenants that are not listed are one series. */
static void collect_tenants(ep_node *node)
{
    const ep_tenants *tenants = &node->config->tenants;
    ep_admission_tenant_stats sum = {0};
    for (uint32_t t = 0; t < tenants->count && tenants->count > 1; t++) {
        ep_admission_tenant_stats stats;
        ep_admission_read_tenant(node->admission, t, &stats);
        sum.tokens_used += stats.tokens_used;
        sum.tokens_total += stats.tokens_total;
        sum.refused_total += stats.refused_total;
        if (t + 1 < tenants->count &&
            strcmp(ep_tenants_label(tenants, t), ep_tenants_label(tenants, t + 1)) == 0) {
            continue;
        }
        ep_metric_label label = {"tenant", ep_tenants_label(tenants, t)};
        ep_gauge_set(ep_metrics_gauge(node->metrics, "expertd_tenant_tokens_in_flight",
                                      "Token rows in work by tenant", &label, 1),
                     (double)sum.tokens_used);
        ep_counter_set(ep_metrics_counter(node->metrics, "expertd_tenant_tokens_total",
                                          "Token rows taken by tenant", &label, 1),
                       sum.tokens_total);
        ep_counter_set(ep_metrics_counter(node->metrics, "expertd_tenant_refused_total",
                                          "Forward calls refused by tenant", &label, 1),
                       sum.refused_total);
        sum = (ep_admission_tenant_stats){0};
    }
}

static void collect(void *arg)
{
    ep_node *node = arg;
    ep_node_gauges *g = &node->gauges;
    ep_forward_stats requests;
    ep_batcher_stats jobs;
    ep_admission_stats admission;
    ep_membership_view view = {0};
    ep_forward_handler_read_stats(node->handler, &requests);
    ep_batcher_read_stats(node->batcher, &jobs);
    ep_admission_read_stats(node->admission, &admission);
    if (node->membership != NULL) {
        ep_membership_read(node->membership, &view);
    }
    uint32_t state = atomic_load(&node->state);
    ep_gauge_set(g->ready, state == EP_NODE_SERVING || state == EP_NODE_DEGRADED ? 1 : 0);
    ep_gauge_set(g->in_flight, (double)requests.in_flight);
    for (int c = 0; c < EP_WORK_CLASSES; c++) {
        ep_gauge_set(g->queue_depth[c], (double)jobs.waiting[c]);
        ep_counter_set(g->jobs[c], jobs.jobs_total[c]);
        ep_counter_set(g->job_works[c], jobs.works_total[c]);
        ep_counter_set(g->job_rows[c], jobs.rows_total[c]);
    }
    ep_gauge_set(g->jobs_in_flight, (double)jobs.in_flight);
    ep_gauge_set(g->tokens_in_flight, (double)admission.tokens_used);
    ep_gauge_set(g->spill_bytes, (double)admission.spill_used_bytes);
    ep_counter_set(g->refused, admission.refused_total);
    ep_counter_set(g->spilled, admission.spilled_total);
    collect_tenants(node);
    ep_gauge_set(g->epoch, (double)ep_node_epoch_loaded(&node->epoch).number);
    ep_gauge_set(g->coordinator_connected, view.is_connected ? 1 : 0);
    collect_weights(node);
    collect_devices(node);
    collect_rpc(node);
}

static void make_gauges(ep_node *node)
{
    ep_node_gauges *g = &node->gauges;
    const ep_metric_label in = {"direction", "in"}, out = {"direction", "out"};
    const ep_metric_label build[] = {{"version", ep_version_text()},
                                     {"revision", ep_version_build()},
                                     {"isa", ep_version_isa()},
                                     {"backend", node->devices.backends[0]->ops->name}};
    ep_gauge_set(ep_metrics_gauge(node->metrics, "expertd_build_info",
                                  "What this build is; always 1", build, 4),
                 1);
    g->ready = gauge(node, "expertd_ready", "1 when the node takes work");
    g->in_flight = gauge(node, "expertd_requests_in_flight", "Forward calls in work");
    for (int c = 0; c < EP_WORK_CLASSES; c++) {
        ep_metric_label label = {"class", class_names[c]};
        g->queue_depth[c] = ep_metrics_gauge(
            node->metrics, "expertd_queue_depth",
            "Pieces of calls, each for one expert, that wait for the backend", &label, 1);
        g->jobs[c] = ep_metrics_counter(node->metrics, "expertd_jobs_total",
                                        "Jobs handed to the backend", &label, 1);
        g->job_works[c] = ep_metrics_counter(
            node->metrics, "expertd_job_works_total",
            "Pieces of calls in these jobs; more than jobs: callers were merged", &label, 1);
        g->job_rows[c] = ep_metrics_counter(node->metrics, "expertd_job_rows_total",
                                            "Rows in these jobs", &label, 1);
    }
    g->jobs_in_flight = gauge(node, "expertd_jobs_in_flight", "Jobs on the backend");
    g->tokens_in_flight =
        gauge(node, "expertd_tokens_in_flight", "Token rows within inflight_tokens of all devices");
    g->spill_bytes =
        gauge(node, "expertd_spill_bytes", "Memory of requests beyond inflight_tokens");
    g->refused = counter(node, "expertd_admission_refused_total",
                         "Forward calls refused because budgets were used up");
    g->spilled =
        counter(node, "expertd_admission_spilled_total",
                "Forward calls taken into spill_bytes because inflight_tokens were used up");
    g->experts_resident = gauge(node, "expertd_experts_resident", "Experts in memory");
    g->experts_owned = gauge(node, "expertd_experts_owned",
                             "Experts served: in memory, or loaded when they are asked for");
    g->expert_waits =
        gauge(node, "expertd_expert_waits", "Pieces of calls that wait for an expert to be loaded");
    for (int i = 0; i < 2; i++) {
        const ep_metric_label use = {"result", i == 0 ? "hit" : "miss"};
        const ep_metric_label prefetch = {"result", i == 0 ? "useful" : "useless"};
        g->expert_uses[i] =
            ep_metrics_counter(node->metrics, "expertd_expert_uses_total",
                               "Experts that calls needed: in memory (hit) or not (miss)", &use, 1);
        g->expert_prefetches[i] = ep_metrics_counter(
            node->metrics, "expertd_expert_prefetches_total",
            "Experts loaded ahead of time and since used, or evicted unused", &prefetch, 1);
    }
    g->expert_evictions =
        counter(node, "expertd_expert_evictions_total", "Experts that made room for others");
    g->expert_loads = counter(node, "expertd_expert_loads_total", "Experts loaded into memory");
    for (int i = 0; i < 3; i++) {
        static const char *const ops[] = {"read", "written", "dropped"};
        const ep_metric_label op = {"op", ops[i]};
        g->cache_files[i] = ep_metrics_counter(
            node->metrics, "expertd_weight_cache_files_total",
            "Files of packed experts: read, written, dropped as damaged or for room", &op, 1);
    }
    g->cache_bytes = gauge(node, "expertd_weight_cache_bytes", "Bytes in weight_cache_dir");
    g->expert_load_seconds = gauge(node, "expertd_expert_load_seconds",
                                   "Time that loading one expert took, mean since the start");
    g->experts_pending = gauge(node, "expertd_experts_loading", "Experts queued or loading");
    g->experts_failed = gauge(node, "expertd_experts_failed", "Experts that could not be loaded");
    g->weight_bytes = gauge(node, "expertd_weights_bytes", "Memory of packed weights");
    for (int i = 0; i < 2; i++) {
        const ep_metric_label direction = {"direction", i == 0 ? "sent" : "received"};
        g->weight_files[i] =
            ep_metrics_counter(node->metrics, "expertd_weight_files_bytes_total",
                               "Bytes of model files that nodes get from nodes", &direction, 1);
    }
    g->epoch = gauge(
        node, "expertd_routing_epoch",
        "Number of the newest assignment worked through; experts that failed are counted apart");
    g->coordinator_connected =
        gauge(node, "expertd_coordinator_connected", "1 when registered with the coordinator");
    g->connections = gauge(node, "expertd_rpc_connections", "Open connections");
    g->rpc_calls = counter(node, "expertd_rpc_calls_total", "Calls of all services");
    g->rpc_bytes_in = ep_metrics_counter(node->metrics, "expertd_rpc_bytes_total",
                                         "Bytes of frames by direction", &in, 1);
    g->rpc_bytes_out = ep_metrics_counter(node->metrics, "expertd_rpc_bytes_total",
                                          "Bytes of frames by direction", &out, 1);
    g->protocol_errors =
        counter(node, "expertd_rpc_protocol_errors_total", "Frames that broke the protocol");
    g->buffer_bytes = gauge(node, "expertd_buffer_bytes", "Frame memory in use");
    g->buffer_bytes_peak =
        gauge(node, "expertd_buffer_bytes_peak", "The most frame memory that was in use at once");
}

ep_err ep_node_observe_init(ep_node *node)
{
    size_t layers = 0;
    for (uint32_t m = 0; m < node->models.count; m++) {
        layers += node->models.models[m].layers_count;
    }
    node->gauges.layer_rows = calloc(layers + 1, sizeof(*node->gauges.layer_rows));
    if (node->gauges.layer_rows == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    make_gauges(node);
    make_device_gauges(node);
    size_t n = 0;
    for (uint32_t m = 0; m < node->models.count; m++) {
        const ep_node_model *model = &node->models.models[m];
        for (uint32_t l = 0; l < model->layers_count; l++) {
            char layer[16];
            snprintf(layer, sizeof(layer), "%u", model->layers[l].shape.layer);
            ep_metric_label labels[] = {{"model", model->config->name},
                                        {"version", model->info->version},
                                        {"layer", layer}};
            node->gauges.layer_rows[n++] =
                ep_metrics_counter(node->metrics, "expertd_layer_rows_served_total",
                                   "Expert rows computed by layer", labels, 3);
        }
    }
    return ep_metrics_on_collect(node->metrics, collect, node);
}

void ep_node_observe_fini(ep_node *node)
{
    free(node->gauges.layer_rows);
    node->gauges.layer_rows = NULL;
}

static ep_probe_check check_loop(const ep_node *node)
{
    uint64_t idle_ms = ep_service_loop_idle_ms(node->loop);
    ep_probe_check check = {.name = "loop", .ok = idle_ms < LOOP_STUCK_MS};
    snprintf(check.text, sizeof(check.text), "turned %" PRIu64 " ms ago", idle_ms);
    return check;
}

static ep_probe_check check_work(const ep_node *node)
{
    uint64_t stuck_ms;
    ep_liveness_state state = ep_liveness_read(&node->liveness, &stuck_ms);
    ep_probe_check check = {.name = "work", .ok = state == EP_LIVENESS_OK};
    if (check.ok) {
        snprintf(check.text, sizeof(check.text), "goes on");
    } else {
        snprintf(check.text, sizeof(check.text), "%s for %" PRIu64 " ms", ep_liveness_name(state),
                 stuck_ms);
    }
    return check;
}

static ep_probe_check check_state(const ep_node *node)
{
    ep_node_state state = (ep_node_state)atomic_load(&node->state);
    ep_probe_check check = {.name = "state",
                            .ok = state == EP_NODE_SERVING || state == EP_NODE_DEGRADED};
    snprintf(check.text, sizeof(check.text), "%s", ep_node_state_text(node));
    return check;
}

static ep_probe_check check_experts(const ep_node *node)
{
    ep_weight_stats weights;
    ep_weight_store_read_stats(node->store, &weights);
    /* A node may own no expert at all; what makes it useless is wanting some and having none. */
    ep_probe_check check = {.name = "experts",
                            .ok = weights.owned_count > 0 ||
                                  (weights.failed_count == 0 && weights.pending_count == 0)};
    snprintf(check.text, sizeof(check.text),
             "%" PRIu64 " resident, %" PRIu64 " loading, %" PRIu64 " failed",
             weights.resident_count, weights.pending_count, weights.failed_count);
    return check;
}

static ep_probe_check check_devices(const ep_node *node)
{
    const uint32_t lost = (uint32_t)__builtin_popcountll(ep_node_devices_lost(&node->devices));
    ep_probe_check check = {.name = "devices", .ok = lost < node->devices.count};
    ep_node_devices_describe(&node->devices, check.text, sizeof(check.text));
    return check;
}

size_t ep_node_probe_checks(void *arg, ep_probe_kind kind, ep_probe_check *out)
{
    ep_node *node = arg;
    switch (kind) {
    case EP_PROBE_LIVE:
        out[0] = check_loop(node);
        out[1] = check_work(node);
        return 2;
    case EP_PROBE_STARTUP:
        out[0] = (ep_probe_check){.name = "started", .ok = atomic_load(&node->has_started)};
        return 1;
    case EP_PROBE_READY:
        break;
    }
    out[0] = check_loop(node);
    out[1] = check_state(node);
    out[2] = check_experts(node);
    out[3] = ep_pool_watch_check(&node->pool_watch);
    out[4] = ep_tls_watch_check(&node->tls_watch);
    if (node->devices.count == 0) {
        return 5;
    }
    out[5] = check_devices(node);
    return 6;
}
