/* SPDX-License-Identifier: Apache-2.0 */
/* Probes and metrics of the node. */
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "common/rpc_metrics.h"
#include "common/version.h"
#include "expertd/node_private.h"

#define LOOP_STUCK_MS 30000

const char *ep_node_state_name(ep_node_state state)
{
    static const char *const names[] = {"starting", "serving", "degraded", "draining"};
    return names[state];
}

const char *ep_node_state_text(const ep_node *node)
{
    ep_node_state state = (ep_node_state)atomic_load(&node->state);
    return atomic_load(&node->is_leaving) && state != EP_NODE_DRAINING ? "leaving"
                                                                       : ep_node_state_name(state);
}

static void gauge(const ep_node *node, const char *name, const char *help, double value)
{
    ep_gauge_set(node->metrics, name, help, NULL, 0, value);
}

static void counter(const ep_node *node, const char *name, const char *help, uint64_t total)
{
    ep_counter_set(node->metrics, name, help, NULL, 0, total);
}

/* Sets one series of a counter, selected by a label. */
static void counter_of(const ep_node *node, const char *name, const char *help, const char *label,
                       const char *value, uint64_t total)
{
    const ep_metric_label labels[] = {{label, value}};
    ep_counter_set(node->metrics, name, help, labels, 1, total);
}

/* labels: of the layer. Sets nothing before an expert of the layer is loaded. */
static void collect_quant(const ep_node *node, const ep_metric_label layer[3],
                          ep_weight_quant_stats quant)
{
    static const char help[] = "Root mean square error that weight_quant makes: the greatest of an "
                               "expert's weights, and of a sample's outputs";
    ep_metric_label labels[] = {layer[0], layer[1], layer[2], {"of", "weights"}};
    if (quant.error > 0) {
        ep_gauge_set(node->metrics, "expertd_weight_quant_error_ratio", help, labels, 4,
                     quant.error);
        labels[3].value = "outputs";
        ep_gauge_set(node->metrics, "expertd_weight_quant_error_ratio", help, labels, 4,
                     quant.output_error);
    }
}

static void collect_layers(const ep_node *node)
{
    for (uint32_t m = 0; m < node->models.count; m++) {
        const ep_node_model *model = &node->models.models[m];
        for (uint32_t l = 0; l < model->layers_count; l++) {
            char number[16];
            snprintf(number, sizeof(number), "%u", model->layers[l].shape.layer);
            const ep_metric_label labels[] = {{"model", model->config->name},
                                              {"version", model->info->version},
                                              {"layer", number}};
            ep_counter_set(
                node->metrics, "expertd_layer_rows_served_total", "Expert rows computed by layer",
                labels, 3,
                atomic_load_explicit(&model->layers[l].rows_served, memory_order_relaxed));
            if (model->info->quant != NULL) {
                collect_quant(node, labels,
                              ep_weight_store_quant(node->store, model->layers[l].store_slot));
            }
        }
    }
}

static void collect_weights(const ep_node *node)
{
    static const char uses[] = "Experts that calls needed: in memory (hit) or not (miss)";
    static const char prefetches[] =
        "Experts loaded ahead of time and since used, or evicted unused";
    static const char files[] = "Bytes of model files that nodes get from nodes";
    ep_weight_stats weights;
    ep_weight_store_read_stats(node->store, &weights);
    const double loads = weights.loads_total == 0 ? 1 : (double)weights.loads_total;
    gauge(node, "expertd_experts_resident", "Experts in memory", (double)weights.resident_count);
    gauge(node, "expertd_experts_owned",
          "Experts served: in memory, or loaded when they are asked for",
          (double)weights.owned_count);
    gauge(node, "expertd_expert_waits", "Pieces of calls that wait for an expert to be loaded",
          (double)weights.waiting_count);
    gauge(node, "expertd_experts_loading", "Experts queued or loading",
          (double)weights.pending_count);
    gauge(node, "expertd_experts_failed", "Experts that could not be loaded",
          (double)weights.failed_count);
    gauge(node, "expertd_weights_bytes", "Memory of packed weights",
          (double)weights.resident_bytes);
    gauge(node, "expertd_expert_load_seconds",
          "Time that loading one expert took, mean since the start (before the first call beside "
          "others)",
          (double)weights.load_ns_total * 1e-9 / loads);
    counter(node, "expertd_expert_evictions_total", "Experts that made room for others",
            weights.evictions_total);
    counter(node, "expertd_expert_loads_total", "Experts loaded into memory", weights.loads_total);
    counter_of(node, "expertd_expert_uses_total", uses, "result", "hit", weights.hits_total);
    counter_of(node, "expertd_expert_uses_total", uses, "result", "miss", weights.misses_total);
    counter_of(node, "expertd_expert_prefetches_total", prefetches, "result", "useful",
               weights.prefetches_useful_total);
    counter_of(node, "expertd_expert_prefetches_total", prefetches, "result", "useless",
               weights.prefetches_useless_total);
    counter_of(node, "expertd_weight_files_bytes_total", files, "direction", "sent",
               ep_weight_serve_bytes(node->weight_serve));
    counter_of(node, "expertd_weight_files_bytes_total", files, "direction", "received",
               ep_weight_fetch_bytes(node->weight_fetch));
}

static void collect_cache(const ep_node *node)
{
    static const char files[] =
        "Files of packed experts: read, written, dropped as damaged or for room";
    ep_weight_cache_stats cache = {0};
    if (node->cache != NULL) {
        ep_weight_cache_read_stats(node->cache, &cache);
    }
    gauge(node, "expertd_weight_cache_bytes", "Bytes in weight_cache_dir", (double)cache.bytes);
    counter_of(node, "expertd_weight_cache_files_total", files, "op", "read", cache.read_total);
    counter_of(node, "expertd_weight_cache_files_total", files, "op", "written",
               cache.written_total);
    counter_of(node, "expertd_weight_cache_files_total", files, "op", "dropped",
               cache.dropped_total);
}

static void collect_devices(const ep_node *node)
{
    for (uint32_t d = 0; d < node->devices.count; d++) {
        const ep_node_device *device = &node->devices.devices[d];
        ep_backend_device figures = {0};
        uint64_t weights = 0;
        char number[16];
        snprintf(number, sizeof(number), "%u", d);
        const ep_metric_label label = {"device", number};
        if (device->backend != NULL) {
            device->backend->ops->device_read(device->backend, &figures);
            weights = ep_weight_store_device_bytes(node->store, device->store_index);
        }
        ep_gauge_set(node->metrics, "expertd_device_lost",
                     "1 when the device answers no more; its experts go to other devices or nodes",
                     &label, 1, atomic_load(&device->is_lost) ? 1 : 0);
        ep_gauge_set(node->metrics, "expertd_device_memory_bytes",
                     "Memory of the device, as its driver says; 0 when it is lost", &label, 1,
                     (double)figures.memory_bytes);
        ep_gauge_set(node->metrics, "expertd_device_memory_free_bytes", "Of it, free", &label, 1,
                     (double)figures.free_bytes);
        ep_gauge_set(node->metrics, "expertd_device_weights_bytes",
                     "Memory of packed weights on the device", &label, 1, (double)weights);
    }
}

static void collect_rpc(ep_node *node)
{
    static const char bytes[] = "Bytes of frames by direction";
    ep_rpc_server_stats rpc;
    ep_buffer_pool_stats buffers;
    ep_rpc_server_read_stats(node->server, &rpc);
    ep_buffer_pool_read_stats(node->pool, &buffers);
    gauge(node, "expertd_rpc_connections", "Open connections", (double)rpc.connections);
    counter(node, "expertd_rpc_calls_total", "Calls of all services", rpc.calls_total);
    counter_of(node, "expertd_rpc_bytes_total", bytes, "direction", "in", rpc.bytes_received);
    counter_of(node, "expertd_rpc_bytes_total", bytes, "direction", "out", rpc.bytes_sent);
    counter(node, "expertd_rpc_protocol_errors_total", "Frames that broke the protocol",
            rpc.protocol_errors);
    ep_rpc_metrics_refused(node->metrics, &rpc);
    ep_rpc_metrics_lanes(node->metrics, &rpc);
    ep_rpc_metrics_shm(node->metrics);
    ep_rpc_metrics_stream_lane(node->metrics);
    ep_rpc_metrics_door(node->metrics, node->server);
    ep_pool_watch_collect(&node->pool_watch, node->metrics);
    ep_tls_watch_collect(&node->tls_watch, node->metrics);
    gauge(node, "expertd_buffer_bytes", "Frame memory in use", (double)buffers.lent_bytes);
    gauge(node, "expertd_buffer_bytes_peak", "The most frame memory that was in use at once",
          (double)buffers.lent_bytes_peak);
}

/* All tenants that are not listed share one series. */
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
        ep_gauge_set(node->metrics, "expertd_tenant_tokens_in_flight",
                     "Token rows in work by tenant", &label, 1, (double)sum.tokens_used);
        counter_of(node, "expertd_tenant_tokens_total", "Token rows taken by tenant", label.name,
                   label.value, sum.tokens_total);
        counter_of(node, "expertd_tenant_refused_total", "Forward calls refused by tenant",
                   label.name, label.value, sum.refused_total);
        sum = (ep_admission_tenant_stats){0};
    }
}

static void collect_jobs(const ep_node *node)
{
    static const char *const class_names[EP_WORK_CLASSES] = {"decode", "prefill"};
    ep_batcher_stats jobs;
    ep_batcher_read_stats(node->batcher, &jobs);
    for (int c = 0; c < EP_WORK_CLASSES; c++) {
        const ep_metric_label label = {"class", class_names[c]};
        ep_gauge_set(node->metrics, "expertd_queue_depth",
                     "Pieces of calls, each for one expert, that wait for the backend", &label, 1,
                     (double)jobs.waiting[c]);
        counter_of(node, "expertd_jobs_total", "Jobs handed to the backend", label.name,
                   label.value, jobs.jobs_total[c]);
        counter_of(node, "expertd_job_works_total",
                   "Pieces of calls in these jobs; more than jobs: callers were merged", label.name,
                   label.value, jobs.works_total[c]);
        counter_of(node, "expertd_job_rows_total", "Rows in these jobs", label.name, label.value,
                   jobs.rows_total[c]);
    }
    gauge(node, "expertd_jobs_in_flight", "Jobs on the backend", (double)jobs.in_flight);
}

static void collect(void *arg)
{
    ep_node *node = arg;
    ep_forward_stats requests;
    ep_admission_stats admission;
    ep_membership_view view = {0};
    ep_forward_handler_read_stats(node->handler, &requests);
    ep_admission_read_stats(node->admission, &admission);
    if (node->membership != NULL) {
        ep_membership_read(node->membership, &view);
    }
    const uint32_t state = atomic_load(&node->state);
    const ep_metric_label build[] = {{"version", ep_version_text()},
                                     {"revision", ep_version_build()},
                                     {"isa", ep_version_isa()},
                                     {"backend", node->devices.backends[0]->ops->name}};
    ep_gauge_set(node->metrics, "expertd_build_info", "What this build is; always 1", build, 4, 1);
    gauge(node, "expertd_ready", "1 when the node takes work",
          state == EP_NODE_SERVING || state == EP_NODE_DEGRADED ? 1 : 0);
    gauge(node, "expertd_requests_in_flight", "Forward calls in work", (double)requests.in_flight);
    collect_jobs(node);
    gauge(node, "expertd_tokens_in_flight", "Token rows within inflight_tokens of all devices",
          (double)admission.tokens_used);
    gauge(node, "expertd_spill_bytes", "Memory of requests beyond inflight_tokens",
          (double)admission.spill_used_bytes);
    counter(node, "expertd_admission_refused_total",
            "Forward calls refused because budgets were used up", admission.refused_total);
    counter(node, "expertd_admission_spilled_total",
            "Forward calls taken into spill_bytes because inflight_tokens were used up",
            admission.spilled_total);
    collect_tenants(node);
    gauge(node, "expertd_routing_epoch",
          "Number of the newest assignment worked through; experts that failed are counted apart",
          (double)ep_node_epoch_loaded(&node->epoch).number);
    gauge(node, "expertd_coordinator_connected", "1 when registered with the coordinator",
          view.is_connected ? 1 : 0);
    collect_weights(node);
    collect_cache(node);
    collect_layers(node);
    collect_devices(node);
    collect_rpc(node);
}

ep_err ep_node_observe_init(ep_node *node)
{
    return ep_metrics_on_collect(node->metrics, collect, node);
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
    /* Owning no expert is fine; the check fails when experts are wanted and none is owned. */
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
