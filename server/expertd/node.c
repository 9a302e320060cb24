/* SPDX-License-Identifier: Apache-2.0 */
/* Life cycle of the node: start, state, drain, reload, and the end in reverse order. */
#include "expertd/node.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backends/host_common.h"
#include "base/clock.h"
#include "base/host.h"
#include "base/log.h"
#include "base/random.h"
#include "common/ports_file.h"
#include "common/process_setup.h"
#include "common/sd_notify.h"
#include "common/version.h"
#include "expertd/node_private.h"
#include "common/service_tokens.h"

/* start time-out asked of the service manager while experts load */
#define LOAD_EXTEND_US 60000000ull
#define LOAD_REPORT_NS EP_NS_PER_S /* how often */
#define REPLY_HEADER_BYTES 4096    /* room left in a reply frame beside its tensors */
#define FDS_KEPT_FREE 64
/* cost that makes a class wide: 16 million multiplications, some 100 us of one thread */
#define WIDE_COST 256u
#define SWEEP_MS 10000   /* how often unused links to neighbours are closed */
#define LEAVE_LOOK_MS 10 /* how often a draining node checks whether its replies are out */

/* ---- state ---- */

static ep_node_state derive_state(const ep_node *node, const ep_weight_stats *weights)
{
    ep_membership_view view = {.was_assigned = true};
    if (node->is_draining) {
        return EP_NODE_DRAINING;
    }
    if (node->membership != NULL) {
        ep_membership_read(node->membership, &view);
    }
    if (!atomic_load(&node->has_started) && (!view.was_assigned || weights->pending_count > 0)) {
        return EP_NODE_STARTING;
    }
    return weights->failed_count > 0 || weights->is_refused ||
                   ep_node_devices_lost(&node->devices) != 0
               ? EP_NODE_DEGRADED
               : EP_NODE_SERVING;
}

/* What to do about experts that are not served. */
static const char *hint_of(bool has_lost, const ep_weight_stats *weights)
{
    if (has_lost || weights->last_reason == EP_ERR_DEVICE_LOST) {
        return "restart the node once the device is well, or without it";
    }
    if (weights->is_refused) {
        return "put that right: cold experts are loaded again when they are asked for";
    }
    return weights->last_reason == EP_ERR_NO_MEMORY
               ? "restart the node with more memory, with fewer experts, or with weight_bytes_max: "
                 "those beyond it are loaded when they are asked for"
               : "put the checkpoint's files right and restart the node";
}

static void announce_state(ep_node *node, ep_node_state state, const ep_weight_stats *weights)
{
    ep_rpc_server_set_state(node->server, ep_node_state_name(state));
    const bool is_degraded = state == EP_NODE_DEGRADED;
    const bool has_lost = ep_node_devices_lost(&node->devices) != 0;
    char reason[EP_ERROR_TEXT_BYTES];
    snprintf(reason, sizeof(reason), "%s", weights->last_error);
    if (has_lost) {
        ep_node_devices_describe(&node->devices, reason, sizeof(reason));
    }
    ep_log(is_degraded ? EP_LOG_WARN : EP_LOG_INFO, "node-state", EP_KV(node, node->config->name),
           EP_KV(state, ep_node_state_name(state)), EP_KV(experts, weights->owned_count),
           EP_KV(experts_failed, weights->failed_count),
           EP_KV(experts_resident, weights->resident_count),
           EP_KV(weights_bytes, weights->resident_bytes),
           EP_KV(reason, is_degraded ? reason : NULL),
           EP_KV(hint, is_degraded ? hint_of(has_lost, weights) : NULL));
    bool takes_work = state == EP_NODE_SERVING || state == EP_NODE_DEGRADED;
    if (takes_work && !atomic_exchange(&node->has_started, true)) {
        char status[160];
        snprintf(status, sizeof(status), "%s: %" PRIu64 " experts, %" PRIu64 " failed",
                 ep_node_state_name(state), weights->owned_count, weights->failed_count);
        ep_process_trim(); /* gives back memory that loading needed beside the packed weights */
        ep_sd_notify_ready(status);
    }
    if (node->membership != NULL) {
        ep_membership_hurry(node->membership);
    }
}

/* Loop thread. Derives the state again, as something that it depends on may have changed. */
static void update_state(ep_node *node)
{
    ep_weight_stats weights;
    ep_weight_store_read_stats(node->store, &weights);
    ep_node_state state = derive_state(node, &weights);
    if (state != (ep_node_state)atomic_exchange(&node->state, (uint32_t)state)) {
        announce_state(node, state, &weights);
    }
}

/* Tells the service manager that loading goes on; not per expert, because its queue is short. */
static void report_loading(ep_node *node, const ep_weight_stats *weights)
{
    uint64_t now_ns = ep_clock_now_ns();
    if (now_ns - node->last_report_ns < LOAD_REPORT_NS) {
        return;
    }
    node->last_report_ns = now_ns;
    if (!atomic_load(&node->has_started)) {
        ep_sd_notify_extend_timeout(LOAD_EXTEND_US);
    }
    ep_sd_notify_status("loading: %" PRIu64 " experts resident, %" PRIu64 " to go",
                        weights->resident_count, weights->pending_count);
}

static void on_weights_task(void *arg)
{
    ep_node *node = arg;
    ep_weight_stats weights;
    ep_weight_store_read_stats(node->store, &weights);
    if (weights.pending_count > 0) {
        report_loading(node, &weights);
        return;
    }
    if (node->membership != NULL) {
        ep_membership_on_weights(node->membership);
    }
    update_state(node);
    /* otherwise the service manager would show "loading" for ever */
    if (node->last_report_ns != 0) {
        node->last_report_ns = 0;
        ep_sd_notify_status("%s: %" PRIu64 " experts, %" PRIu64 " failed",
                            ep_node_state_name((ep_node_state)atomic_load(&node->state)),
                            weights.owned_count, weights.failed_count);
    }
}

/* Loop thread. */
static void on_lost_task(void *arg)
{
    ep_node *node = arg;
    for (uint32_t d = 0; d < node->devices.count; d++) {
        const ep_node_device *device = &node->devices.devices[d];
        if (device->backend != NULL && atomic_load(&device->is_lost)) {
            char why[EP_ERROR_TEXT_BYTES];
            snprintf(why, sizeof(why), "device %u is lost: %.480s", d, device->lost_why);
            ep_weight_store_lose(node->store, device->store_index, why);
        }
    }
    update_state(node);
}

static void on_lost(void *arg)
{
    ep_node *node = arg;
    ep_service_loop_post(node->loop, &node->lost_task);
}

static void on_weights(void *arg)
{
    ep_node *node = arg;
    ep_service_loop_post(node->loop, &node->change_task);
}

/* ---- drain ---- */

static bool may_leave(ep_node *node)
{
    ep_forward_stats requests;
    ep_rpc_server_stats rpc;
    ep_membership_view view = {0};
    /* Read in this order, so that no reply is missed: a request counts as in flight until its reply
     * is queued; then the reply counts; then its bytes until the caller's system has them. */
    ep_forward_handler_read_stats(node->handler, &requests);
    ep_rpc_server_read_stats(node->server, &rpc);
    if (node->membership != NULL) {
        ep_membership_read(node->membership, &view);
    }
    /* A connected coordinator hears of the drain first, so that it routes around this node. */
    return requests.in_flight == 0 && rpc.sends_queued == 0 && rpc.unacked_bytes == 0 &&
           (!view.is_connected || view.said_draining);
}

static void leave_when_done(void *arg)
{
    ep_node *node = arg;
    if (node->is_draining && may_leave(node)) {
        ep_service_loop_quit(node->loop);
    }
}

static void on_drain_timeout(void *arg)
{
    ep_node *node = arg;
    ep_forward_stats requests;
    ep_rpc_server_stats rpc;
    ep_forward_handler_read_stats(node->handler, &requests);
    ep_rpc_server_read_stats(node->server, &rpc);
    ep_log(EP_LOG_WARN, "node-drain", EP_KV(calls_in_flight, requests.in_flight),
           EP_KV(sends_queued, rpc.sends_queued), EP_KV(unacked_bytes, rpc.unacked_bytes),
           EP_KV(drain_ms, node->drain_ms), EP_KV(reason, "calls took longer than drain_ms"),
           EP_KV(effect, "they are ended"), EP_KV(hint, "a longer drain_ms lets them finish"));
    ep_batcher_close(node->batcher, EP_ERR_DRAINING);
    ep_weight_store_close(node->store, EP_ERR_DRAINING);
    ep_service_loop_quit(node->loop);
}

static void on_stop(void *arg, const char *signal_name)
{
    ep_node *node = arg;
    ep_log(EP_LOG_INFO, "node-drain", EP_KV(signal, signal_name), EP_KV(drain_ms, node->drain_ms));
    node->is_draining = true;
    update_state(node); /* probes report the drain before the service manager hears of it */
    ep_sd_notify_stopping("draining");
    ep_sd_notify_extend_timeout((uint64_t)node->drain_ms * 1000 + 5000000);
    ep_loop_timer_start(node->drain_timer, node->drain_ms, 0);
    ep_loop_timer_start(node->leave_timer, LEAVE_LOOK_MS, LEAVE_LOOK_MS);
    leave_when_done(node);
}

/* ---- reload ---- */

ep_err ep_node_reload(void *arg, ep_reload_report *out_report, ep_error *out_error)
{
    ep_node *node = arg;
    const ep_options *options = ep_reload_run(&node->reload, out_report, out_error);
    if (options != NULL) {
        node->drain_ms = (uint32_t)ep_options_number(options, "drain_ms");
        node->compute_stall_ms = (uint32_t)ep_options_number(options, "compute_stall_ms");
        ep_service_tokens_reload(options, node->config->service.credentials);
    }
    /* also when the reload was refused because of the files: the watch remembers that */
    ep_tls_watch_reload(&node->tls_watch);
    char status[80];
    snprintf(status, sizeof(status), "%s%s",
             ep_node_state_name((ep_node_state)atomic_load(&node->state)),
             options != NULL ? "" : ", the last reload was refused: see the log");
    if (atomic_load(&node->has_started)) {
        ep_sd_notify_ready(status);
    } else { /* the unit is not started before the node is */
        ep_sd_notify_status("%s", status);
    }
    return options != NULL ? EP_OK : out_error->code;
}

static void on_reload(void *arg)
{
    ep_error error;
    (void)ep_node_reload(arg, NULL, &error); /* it logs a refusal itself */
}

/* ---- watchdog ---- */

static bool is_alive(void *arg)
{
    ep_node *node = arg;
    ep_batcher_stats jobs;
    ep_batcher_read_stats(node->batcher, &jobs);
    uint64_t started = jobs.jobs_total[EP_WORK_DECODE] + jobs.jobs_total[EP_WORK_PREFILL];
    return ep_liveness_check(&node->liveness, ep_clock_now_ns(), started - jobs.in_flight,
                             jobs.in_flight, node->compute_stall_ms) == EP_LIVENESS_OK;
}

/* ---- membership ---- */

static void fill_report(void *arg, Expertd__V1__HeartbeatRequest *request,
                        ep_membership_texts *texts)
{
    ep_node *node = arg;
    ep_forward_stats requests;
    ep_weight_stats weights;
    ep_admission_stats admission;
    ep_batcher_stats jobs;
    ep_batcher_read_stats(node->batcher, &jobs);
    ep_forward_handler_read_stats(node->handler, &requests);
    ep_weight_store_read_stats(node->store, &weights);
    ep_admission_read_stats(node->admission, &admission);
    request->state = (char *)(uintptr_t)ep_node_state_text(node);
    request->rows_served = requests.rows_served;
    request->requests_failed = requests.failed;
    request->requests_hedged = requests.hedged;
    request->requests_refused = admission.refused_total;
    request->tls_expiry = ep_tls_watch_expiry(&node->tls_watch);
    request->busy_us = jobs.busy_ns / EP_NS_PER_US;
    request->busy_work = jobs.busy_work;
    request->experts_to_load = (uint32_t)weights.pending_count;
    request->weight_bytes = weights.resident_bytes;
    request->weight_quant_error = weights.quant.error;
    request->weight_quant_output_error = weights.quant.output_error;
    request->devices = node->devices.count;
    request->devices_lost = ep_node_devices_lost(&node->devices);
    ep_tls_watch_refusal(&node->tls_watch, texts->tls_error);
    snprintf(texts->last_error, sizeof(texts->last_error), "%s", weights.last_error);
    request->tls_error = texts->tls_error;
    request->last_error = texts->last_error;
}

static void on_membership(void *arg)
{
    ep_node *node = arg;
    update_state(node);
    leave_when_done(node);
}

static void on_neighbours(void *arg, Expertd__V1__Neighbour *const *neighbours, size_t count)
{
    ep_node *node = arg;
    size_t used = 0;
    ep_relay_neighbour *list = calloc(count + 1, sizeof(*list));
    for (size_t i = 0; list != NULL && i < count; i++) {
        if (strlen(neighbours[i]->node) < sizeof(list->name) &&
            strlen(neighbours[i]->url) < sizeof(list->url)) {
            strcpy(list[used].name, neighbours[i]->node);
            strcpy(list[used++].url, neighbours[i]->url);
        }
    }
    if (list != NULL) { /* without memory the former neighbours stay until the next heartbeat */
        ep_relay_set_neighbours(node->relay, list, used);
    }
}

static ep_err start_membership(ep_node *node, ep_error *out_error)
{
    const ep_node_config *config = node->config;
    if (config->coordinator_url[0] == 0) {
        return EP_OK;
    }
    ep_membership_config membership = {
        .coordinator_url = config->coordinator_url,
        .node_url = config->advertise_url[0] != 0 ? config->advertise_url : node->url,
        .tls = ep_url_is_tls(config->coordinator_url) ? &config->service.tls : NULL,
        .common = &node->common,
        .capacity_bytes = ep_weight_store_capacity(node->store),
        .drop_grace_ms = config->drop_grace_ms,
        .loop = node->loop,
        .models = &node->models,
        .store = node->store,
        .epoch = &node->epoch,
        .report = fill_report,
        .on_change = on_membership,
        .on_neighbours = on_neighbours,
        .on_policy = ep_node_on_policy,
        .arg = node,
    };
    return ep_membership_create(&membership, &node->membership, out_error);
}

/* ---- start ---- */

static uint32_t compute_threads(const ep_node_config *config)
{
    return config->threads != 0 ? config->threads : ep_host_cpus_count();
}

/* Reading and packing is the CPUs' work whatever computes. */
static uint32_t load_threads(const ep_node_config *config)
{
    const uint32_t threads = compute_threads(config), cpus = ep_host_cpus_count();
    return threads < cpus ? threads : cpus;
}

/*
 * Limits for jobs on the backend. A small job is one task, so each thread gets one to work on and
 * one ready behind it. A wide job keeps some eight threads busy, so few of them are enough, and the
 * others stay in the queues as long as they can, where they grow. A device sets its own limit.
 */
static void fill_policy(const ep_node_config *config, const ep_node_devices *devices,
                        ep_batch_policy_config *out_policy)
{
    const uint32_t ahead = devices->backends[0]->ops->jobs_ahead,
                   instances = devices->backends_count;
    const uint32_t threads = compute_threads(config);
    *out_policy = (ep_batch_policy_config){.no_merging = !config->merges_callers,
                                           .jobs_max = ahead != 0 ? ahead * instances : threads * 2,
                                           .jobs_wide_max = ahead != 0 ? 0 : 2 + threads / 8,
                                           .wide_cost = ahead != 0 ? 0 : WIDE_COST,
                                           .prefill_share_percent = config->prefill_share_percent,
                                           .age_ns = config->queue_age_us * EP_NS_PER_US,
                                           .group_window_ns = config->step_group_us * EP_NS_PER_US,
                                           .tenants_count = config->tenants.count};
    for (uint32_t i = 0; i < config->tenants.count; i++) {
        out_policy->weights[i] = config->tenants.limits[i].weight;
    }
}

static void sweep_relay(void *arg)
{
    ep_node *node = arg;
    ep_relay_sweep(node->relay, ep_clock_now_ns());
}

static void fill_common(ep_node *node)
{
    const ep_service_config *service = &node->config->service;
    node->common = (ep_rpc_common){
        .timers = node->timers,
        .pool = node->pool,
        .limits = service->limits,
        .credentials = service->credentials,
        .node = node->config->name,
        .host = node->config->host,
        .role = "node",
        .incarnation = node->incarnation,
        .payload_crc = service->payload_crc,
    };
}

static ep_err start_base(ep_node *node, ep_error *out_error)
{
    const ep_node_config *config = node->config;
    ep_service_loop_handler handler = {
        .on_stop = on_stop, .on_reload = on_reload, .is_alive = is_alive, .arg = node};
    node->change_task = (ep_loop_task){.func = on_weights_task, .arg = node};
    node->lost_task = (ep_loop_task){.func = on_lost_task, .arg = node};
    ep_err err = ep_service_loop_create(&handler, &node->loop, out_error);
    if (err != EP_OK) {
        return err;
    }
    if ((err = ep_service_loop_timer_create(node->loop, on_drain_timeout, node,
                                            &node->drain_timer)) != EP_OK ||
        (err = ep_service_loop_timer_create(node->loop, leave_when_done, node,
                                            &node->leave_timer)) != EP_OK ||
        (err = ep_timer_service_create("ep-timers", &node->timers)) != EP_OK ||
        (err = ep_buffer_pool_create(config->service.buffer_bytes_max,
                                     config->service.buffer_bytes_max / 4, &node->pool)) != EP_OK ||
        (err = ep_metrics_create(&node->metrics)) != EP_OK) {
        return ep_error_set(out_error, err, "cannot start: %s", ep_err_text(err));
    }
    ep_liveness_init(&node->liveness, node->timers, ep_clock_now_ns());
    fill_common(node);
    return EP_OK;
}

/* Opens the first backend that works. Wrong settings are an error even so. */
static ep_err open_backend(ep_node *node, const ep_backend_config *backend, ep_error *out_error)
{
    const ep_node_config *config = node->config;
    for (uint32_t i = 0;; i++) {
        const ep_err err =
            ep_node_devices_open(&node->devices, config->backends[i], backend, out_error);
        if (err == EP_OK) {
            return EP_OK;
        }
        if (err == EP_ERR_INVALID_ARGUMENT || i + 1 == config->backends_count) {
            return ep_error_prefix(out_error, err, "backend %s", config->backends[i]->name);
        }
        ep_node_config_say_missing(config, i, out_error->text);
    }
}

static ep_err start_fetch(ep_node *node, ep_error *out_error)
{
    const ep_node_config *config = node->config;
    bool is_needed = false;
    for (uint32_t m = 0; m < config->models_count; m++) {
        is_needed = is_needed || config->models[m].is_mirrored;
    }
    const ep_weight_fetch_config fetch = {.common = &node->common,
                                          .tls = &config->service.tls,
                                          .coordinator_url = config->coordinator_url,
                                          .insecure = config->service.insecure};
    return is_needed ? ep_weight_fetch_create(&fetch, &node->weight_fetch, out_error) : EP_OK;
}

/* A mirror may wait for other nodes and survives any end, so here SIGTERM ends the process at
 * once. */
static ep_err open_models(ep_node *node, ep_error *out_error)
{
    ep_err err = start_fetch(node, out_error);
    ep_service_loop_catch_stop(node->loop, node->weight_fetch == NULL);
    err = err == EP_OK ? ep_node_models_open(&node->models, node->config, node->devices.backends,
                                             node->devices.backends_count, node->store,
                                             node->weight_fetch, out_error)
                       : err;
    ep_service_loop_catch_stop(node->loop, true);
    ep_weight_fetch_opened(node->weight_fetch);
    return err;
}

static ep_err start_compute(ep_node *node, ep_error *out_error)
{
    const ep_node_config *config = node->config;
    ep_backend_config backend = {.numerics = config->numerics,
                                 .threads = config->threads,
                                 .memory_bytes = config->weight_bytes_max,
                                 .unpinned = !config->pins_threads};
    ep_weight_store_config store = {.weight_bytes_max = config->weight_bytes_max,
                                    .load_threads = load_threads(config),
                                    .load_bytes_per_s = config->load_bytes_per_s,
                                    .prefetches = config->prefetches,
                                    .warms_up = true,
                                    .node_name = config->name,
                                    .timers = node->timers,
                                    .shows_bar = config->shows_bar,
                                    .on_change = on_weights,
                                    .arg = node};
    node->devices.on_lost = on_lost;
    node->devices.arg = node;
    ep_err err = open_backend(node, &backend, out_error);
    if (err != EP_OK) {
        return err;
    }
    store.backends = node->devices.backends;
    store.backends_count = node->devices.backends_count;
    node->inflight_tokens = config->inflight_tokens * node->devices.backends_count;
    if (config->weight_cache_dir[0] != 0 &&
        (err = ep_weight_cache_open(config->weight_cache_dir, config->weight_cache_bytes,
                                    node->devices.backends[0], &node->cache, out_error)) != EP_OK) {
        return err;
    }
    store.cache = node->cache;
    err = ep_weight_store_create(&store, &node->store, out_error);
    err = err == EP_OK ? open_models(node, out_error) : err;
    if (err != EP_OK) {
        return err;
    }
    ep_batch_policy_config policy;
    fill_policy(config, &node->devices, &policy);
    if ((err = ep_admission_create(node->inflight_tokens, config->spill_bytes, &config->tenants,
                                   &node->admission)) != EP_OK ||
        (err = ep_batcher_create(&policy, node->timers, &node->batcher)) != EP_OK) {
        return ep_error_set(out_error, err, "cannot start: %s", ep_err_text(err));
    }
    const ep_relay_config relay = {
        .common = &node->common, .tls = &config->service.tls, .insecure = config->service.insecure};
    if ((err = ep_relay_create(&relay, &node->relay)) != EP_OK ||
        (err = ep_service_loop_timer_create(node->loop, sweep_relay, node, &node->sweep_timer)) !=
            EP_OK) {
        return ep_error_set(out_error, err, "cannot start: %s", ep_err_text(err));
    }
    ep_loop_timer_start(node->sweep_timer, SWEEP_MS, SWEEP_MS);
    ep_forward_handler_config handler = {
        .node_name = config->name,
        .models = &node->models,
        .store = node->store,
        .batcher = node->batcher,
        .admission = node->admission,
        .tenants = &config->tenants,
        .epoch = &node->epoch,
        .metrics = node->metrics,
        .relay = node->relay,
        .reply_bytes_max = config->service.limits.frame_bytes_max - REPLY_HEADER_BYTES,
        .bookkeeping_bytes_max = EP_NODE_BOOKKEEPING_BYTES,
    };
    return ep_forward_handler_create(&handler, &node->handler, out_error);
}

static ep_err start_server(ep_node *node, ep_error *out_error)
{
    const ep_service_config *service = &node->config->service;
    ep_rpc_server_config server = {.common = node->common,
                                   .hello_fill = ep_node_hello_fill,
                                   .hello_free = ep_node_hello_free,
                                   .arg = node};
    ep_node_services_init(node);
    ep_err err = ep_rpc_server_create(&server, &node->server, out_error);
    if (err != EP_OK) {
        return err;
    }
    ep_rpc_server_set_state(node->server, "starting");
    if ((err = ep_pool_watch_start(&node->pool_watch, node->loop, node->server)) != EP_OK ||
        (err = ep_tls_watch_start(&node->tls_watch, node->reload.started, node->loop,
                                  node->server)) != EP_OK) {
        return ep_error_set(out_error, err, "cannot start a timer: %s", ep_err_text(err));
    }
    const ep_admin_config admin = {.loop = node->loop,
                                   .reload = &node->reload,
                                   .drain = ep_node_drain_order,
                                   .run_reload = ep_node_reload,
                                   .overrides = ep_node_overrides,
                                   .arg = node};
    const ep_weight_serve_config weight_serve = {.models = &node->models,
                                                 .credentials = service->credentials,
                                                 .bytes_per_s = node->config->serve_bytes_per_s};
    if ((err = ep_admin_service_create(&admin, &node->admin)) != EP_OK) {
        return ep_error_set(out_error, err, "no memory for the admin service");
    }
    if ((err = ep_rpc_server_add_service(node->server, ep_admin_service_rpc(node->admin),
                                         out_error)) != EP_OK ||
        (err = ep_rpc_server_add_service(node->server, &node->expert_service.base.base,
                                         out_error)) != EP_OK ||
        (err = ep_rpc_server_add_service(node->server, &node->info_service.base.base, out_error)) !=
            EP_OK ||
        (err = ep_weight_serve_create(&weight_serve, &node->weight_serve, out_error)) != EP_OK ||
        (err = ep_rpc_server_add_service(node->server, ep_weight_serve_rpc(node->weight_serve),
                                         out_error)) != EP_OK) {
        return err;
    }
    ep_process_raise_fd_limit(); /* the limit decides how many connections listeners accept */
    err = ep_service_listen(service, node->server, out_error);
    if (err != EP_OK) {
        return err;
    }
    ep_service_admin_url(service, node->server, node->admin_url, sizeof(node->admin_url));
    if (node->config->host[0] == 0) {
        ep_log(EP_LOG_WARN, "host-unknown",
               EP_KV(reason,
                     "the kernel's boot id cannot be read (a unit's ProcSubset=pid hides it), and "
                     "EXPERTD_BOOT_ID does not say it"),
               EP_KV(effect, "neither shared memory nor comm_alg hierarchy work here"),
               EP_KV(hint, "set EXPERTD_BOOT_ID, or host"));
    }
    err = ep_node_shm_listen(&node->config->shm, node->config->name, node->server, out_error);
    if (err != EP_OK) {
        return err; /* it comes last, because the others are found by their index */
    }
    ep_rpc_server_door_url(node->server, node->door_url, sizeof(node->door_url));
    ep_rpc_server_url(node->server, 0, node->url, sizeof(node->url));
    return EP_OK;
}

static ep_err start_probes(ep_node *node, ep_error *out_error)
{
    ep_probes_config probes = {.address = node->config->service.probe_address,
                               .checks = ep_node_probe_checks,
                               .arg = node,
                               .metrics = node->metrics,
                               .timers = node->timers,
                               .node = node->config->name,
                               .rpc_url = node->url,
                               .admin_url = node->admin_url};
    ep_err err = ep_node_observe_init(node);
    if (err != EP_OK) {
        return ep_error_set(out_error, err, "no memory for metrics");
    }
    if (probes.address[0] == 0) {
        return EP_OK;
    }
    err = ep_probes_start(&probes, &node->probes, out_error);
    if (err == EP_OK) {
        ep_probes_url(node->probes, node->probe_url, sizeof(node->probe_url));
    }
    return err;
}

/* Starts loading the configured experts; those that a coordinator assigns come later. */
static ep_err start_loading(ep_node *node, ep_error *out_error)
{
    ep_err err = ep_weight_store_start(node->store, out_error);
    for (uint32_t m = 0; err == EP_OK && m < node->models.count; m++) {
        const ep_node_model *model = &node->models.models[m];
        for (uint32_t l = 0; l < model->layers_count; l++) {
            uint8_t *wanted = malloc(model->layers[l].experts_total);
            if (wanted == NULL) {
                return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory to load model %s",
                                    model->config->name);
            }
            ep_node_model_configured(model, &model->layers[l], wanted);
            ep_weight_store_want(node->store, model->layers[l].store_slot, wanted);
            free(wanted);
        }
    }
    ep_service_loop_post(node->loop, &node->change_task); /* also when there is nothing to load */
    return err;
}

/* Warns when weights need more memory than the process may have. Says nothing without a budget
 * while a coordinator may still assign experts: then it is not known yet how many. */
static void warn_of_memory(const ep_node *node)
{
    const ep_node_config *config = node->config;
    if (node->devices.count > 0) {
        return; /* weights are in the devices' memory, which has a budget */
    }
    const uint64_t files = ep_node_models_file_bytes(&node->models);
    const uint64_t limit = ep_process_memory_limit("");
    const uint64_t budget = config->weight_bytes_max;
    const uint64_t weights = budget != 0 && budget < files ? budget : files;
    bool is_known = true;
    for (uint32_t m = 0; m < config->models_count; m++) {
        is_known = is_known && (budget != 0 || config->models[m].choice == EP_EXPERTS_ALL);
    }
    if (is_known && weights > limit) {
        ep_log(EP_LOG_WARN, "node-memory", EP_KV(weights_bytes, weights),
               EP_KV(memory_limit_bytes, limit),
               EP_KV(reason, "weights are more than the memory this process may have (host, "
                             "control group, RLIMIT_AS)"),
               EP_KV(effect, "the system may kill this process"),
               EP_KV(hint, "set weight_bytes_max well below the limit"));
    }
}

static void log_start(const ep_node *node)
{
    const ep_node_config *config = node->config;
    /* Without a budget only the files' size is known before loading; packed weights may need a
     * little more. */
    bool has_budget = config->weight_bytes_max != 0;
    uint64_t weights = has_budget ? config->weight_bytes_max * node->devices.backends_count
                                  : ep_node_models_file_bytes(&node->models);
    uint64_t frames = (uint64_t)config->service.limits.connections_max *
                      config->service.limits.frame_bytes_max * 2;
    uint64_t buffers =
        frames < config->service.buffer_bytes_max ? frames : config->service.buffer_bytes_max;
    ep_log(EP_LOG_INFO, "node-start", EP_KV(node, config->name), EP_KV(rpc_url, node->url),
           EP_KV(admin_url, node->admin_url[0] != 0 ? node->admin_url : "off"),
           EP_KV(door_url, node->door_url[0] != 0 ? node->door_url : "off"),
           EP_KV(probe_url, node->probe_url[0] != 0 ? node->probe_url : "off"),
           EP_KV(backend, node->devices.backends[0]->ops->name), EP_KV(models, node->models.count),
           EP_KV(devices, node->devices.count), EP_KV(pid, getpid()),
           EP_KV(software, ep_version_software()));
    ep_log(EP_LOG_INFO, "node-memory", EP_KV(weights_bytes, weights),
           EP_KV(weights_from, has_budget ? "weight_bytes_max" : "files"),
           EP_KV(frames_bytes, buffers), EP_KV(requests_bytes, EP_NODE_BOOKKEEPING_BYTES),
           EP_KV(sum_bytes,
                 (node->devices.count > 0 ? 0 : weights) + buffers + EP_NODE_BOOKKEEPING_BYTES));
    warn_of_memory(node);
    uint64_t fds = ep_process_raise_fd_limit();
    if (fds < (uint64_t)config->service.limits.connections_max + FDS_KEPT_FREE) {
        ep_log(EP_LOG_WARN, "node-fds", EP_KV(fd_limit, fds),
               EP_KV(fds_wanted, config->service.limits.connections_max + FDS_KEPT_FREE),
               EP_KV(connections_max, config->service.limits.connections_max),
               EP_KV(reason, "this process may not open as many files"),
               EP_KV(effect, "connections beyond the limit are refused"),
               EP_KV(hint, "raise LimitNOFILE of the unit (ulimit -n)"));
    }
}

static ep_err write_ports(ep_node *node, ep_error *out_error)
{
    const char *path = node->config->service.ports_file;
    ep_ports_entry entries[] = {{"node", node->config->name},
                                {"rpc_url", node->url},
                                {"probe_url", node->probe_url},
                                {"admin_url", node->admin_url},
                                {"door_url", node->door_url}};
    if (path[0] == 0) {
        return EP_OK;
    }
    ep_err err = ep_ports_file_write(path, "expertd", entries, sizeof(entries) / sizeof(entries[0]),
                                     out_error);
    node->ports_written = err == EP_OK;
    return err;
}

ep_err ep_node_create(const ep_node_config *config, const ep_node_source *source,
                      ep_node **out_node, ep_error *out_error)
{
    ep_node *node = calloc(1, sizeof(*node));
    if (node == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the node");
    }
    node->config = config;
    node->source = *source;
    node->incarnation = ep_random_id();
    node->started_ns = ep_clock_now_ns();
    node->reload = (ep_reload){.started = source->options,
                               .argc = source->argc,
                               .argv = source->argv,
                               .check = ep_node_config_check};
    node->drain_ms = config->service.drain_ms;
    node->compute_stall_ms = config->compute_stall_ms;
    ep_node_epoch_init(&node->epoch);
    ep_err err;
    /* Membership comes before the probes, whose thread reads it. It only dials here; its events
     * come in the loop. */
    if ((err = start_base(node, out_error)) != EP_OK ||
        (err = start_compute(node, out_error)) != EP_OK ||
        (err = start_server(node, out_error)) != EP_OK ||
        (err = start_membership(node, out_error)) != EP_OK ||
        (err = start_probes(node, out_error)) != EP_OK) {
        ep_node_destroy(node);
        return err;
    }
    log_start(node);
    if ((err = start_loading(node, out_error)) != EP_OK ||
        (err = write_ports(node, out_error)) != EP_OK) {
        ep_node_destroy(node);
        return err;
    }
    *out_node = node;
    return EP_OK;
}

void ep_node_run(ep_node *node)
{
    ep_service_loop_run(node->loop);
}

void ep_node_destroy(ep_node *node)
{
    if (node == NULL) {
        return;
    }
    if (node->ports_written) {
        ep_ports_file_remove(node->config->service.ports_file);
    }
    ep_probes_stop(node->probes); /* its thread reads the membership */
    ep_liveness_fini(&node->liveness);
    ep_reload_fini(&node->reload);
    ep_membership_destroy(node->membership);
    if (node->batcher != NULL) {
        ep_batcher_close(node->batcher, EP_ERR_DRAINING);
    }
    if (node->store != NULL) {
        ep_weight_store_close(node->store, EP_ERR_DRAINING);
    }
    ep_admin_service_stop(node->admin);
    ep_weight_serve_stop(node->weight_serve);
    /* waits for every call, so no request is in work any more */
    ep_rpc_server_destroy(node->server);
    ep_weight_fetch_stop(node->weight_fetch); /* the store's thread may wait for a fetch */
    if (node->store != NULL) {
        /* its threads may still be returning from requests that they ended */
        ep_weight_store_stop(node->store);
    }
    ep_admin_service_destroy(node->admin);
    ep_weight_serve_destroy(node->weight_serve);
    ep_batcher_destroy(node->batcher);
    /* after everything that ends requests, before what requests use to end */
    ep_relay_destroy(node->relay);
    ep_forward_handler_destroy(node->handler);
    ep_admission_destroy(node->admission);
    ep_weight_store_destroy(node->store);
    ep_weight_cache_close(node->cache);
    ep_node_models_close(&node->models);
    ep_weight_fetch_destroy(node->weight_fetch);
    ep_node_devices_close(&node->devices);
    ep_metrics_destroy(node->metrics);
    ep_buffer_pool_destroy(node->pool);
    ep_timer_service_destroy(node->timers);
    ep_service_loop_destroy(node->loop);
    free(node);
}
