/* SPDX-License-Identifier: Apache-2.0 */
#include "coordinator/coordinator.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/random.h"
#include "common/admin_service.h"
#include "common/metrics.h"
#include "common/ports_file.h"
#include "common/pool_watch.h"
#include "common/service_tls.h"
#include "common/probes.h"
#include "common/sd_notify.h"
#include "common/service_loop.h"
#include "common/version.h"
#include "coordinator/gateway.h"
#include "coordinator/policy_report.h"
#include "coordinator/service.h"
#include "coordinator/statistics.h"
#include "coordinator/status_page.h"
#include "coordinator/table_store_sqlite.h"
#include "common/rpc_metrics.h"
#include "common/service_tokens.h"

/* how often a stopping coordinator checks whether gateway calls and replies are out */
#define LEAVE_LOOK_MS 10
#define REPLY_HEADER_BYTES (32u << 10) /* room for a reply's header in a frame */

typedef struct coordinator {
    const ep_coordinator_config *config;
    ep_reload *reload;
    ep_timer_service *timers;
    ep_buffer_pool *pool;
    ep_pool_watch pool_watch;
    ep_tls_watch tls_watch;
    ep_table_store *store; /* NULL: state in memory */
    ep_coordinator_service *service;
    ep_gateway *gateway;
    /* loopback address for the gateway's own client */
    char gateway_url[EP_ADDRESS_BYTES];
    ep_admin_service *admin;
    ep_rpc_server *server;
    ep_metrics *metrics;
    ep_status_page *page;
    ep_probes *probes;
    ep_service_loop *loop;
    ep_loop_timer *tick;
    ep_loop_timer *leave_timer;
    uint32_t drain_ms; /* reloadable */
    uint64_t leave_by_ns;
    char rpc_url[EP_URL_BYTES];
    char probe_url[EP_URL_BYTES];
    char admin_url[EP_URL_BYTES];
    char door_url[EP_URL_BYTES];
    bool stopping;
    bool ports_written; /* the file may be another coordinator's */
} coordinator;

/* Ends the process once no gateway call is in flight and every reply is out, or after drain_ms. */
static void on_leave_look(void *arg)
{
    coordinator *self = arg;
    ep_rpc_server_stats rpc;
    /* read first: a call counts as in flight until its reply is queued, and then the reply
     * counts */
    uint32_t in_flight = ep_gateway_in_flight(self->gateway);
    ep_rpc_server_read_stats(self->server, &rpc);
    bool late = ep_clock_now_ns() >= self->leave_by_ns;
    if (in_flight > 0 && late) {
        ep_log(EP_LOG_WARN, "stopping", EP_KV(calls_in_flight, in_flight),
               EP_KV(drain_ms, self->drain_ms),
               EP_KV(reason, "gateway calls took longer than drain_ms"),
               EP_KV(effect, "they are ended"), EP_KV(hint, "a longer drain_ms lets them finish"));
    }
    if (late || (in_flight == 0 && rpc.sends_queued == 0 && rpc.unacked_bytes == 0)) {
        ep_service_loop_quit(self->loop);
    }
}

static void on_stop(void *arg, const char *signal_name)
{
    coordinator *self = arg;
    ep_log(EP_LOG_INFO, "stopping", EP_KV(signal, signal_name), EP_KV(drain_ms, self->drain_ms));
    ep_sd_notify_stopping("stopping");
    ep_sd_notify_extend_timeout((uint64_t)self->drain_ms * 1000 + 5000000);
    __atomic_store_n(&self->stopping, true, __ATOMIC_RELEASE);
    ep_rpc_server_set_state(self->server, "draining");
    ep_gateway_drain(self->gateway);
    self->leave_by_ns = ep_clock_now_ns() + self->drain_ms * EP_NS_PER_MS;
    ep_loop_timer_start(self->leave_timer, 0, LEAVE_LOOK_MS);
}

static ep_err run_reload(void *arg, ep_reload_report *out_report, ep_error *out_error)
{
    coordinator *self = arg;
    const ep_options *options = ep_reload_run(self->reload, out_report, out_error);
    if (options != NULL) {
        char token[EP_TOKEN_BYTES_MAX + 1];
        self->drain_ms = (uint32_t)ep_options_number(options, "drain_ms");
        ep_service_tokens_reload(options, self->config->service.credentials);
        ep_rpc_credentials_show(self->config->service.credentials, EP_ROLE_CLIENT, token);
        ep_gateway_set_token(self->gateway, token);
        explicit_bzero(token, sizeof(token));
    }
    /* also when the reload was refused because of the files: the watch remembers that */
    ep_tls_watch_reload(&self->tls_watch);
    ep_sd_notify_ready(options != NULL ? "serving"
                                       : "serving, the last reload was refused: see the log");
    return options != NULL ? EP_OK : out_error->code;
}

static void on_reload(void *arg)
{
    ep_error error;
    (void)run_reload(arg, NULL, &error); /* it logs a refusal itself */
}

/* A drain order of an operator. */
static ep_err on_drain(void *arg, const char *node, bool undo, ep_admin_drain *out_drain,
                       ep_error *out_error)
{
    coordinator *self = arg;
    ep_coordinator_drain drain;
    ep_err err = ep_coordinator_service_drain(self->service, node, undo, &drain, out_error);
    if (err == EP_OK) {
        *out_drain = (ep_admin_drain){.state = drain.state, .copies_to_move = drain.copies_to_move};
        snprintf(out_drain->node, sizeof(out_drain->node), "%s", drain.node);
        snprintf(out_drain->note, sizeof(out_drain->note), "%s", drain.note);
    }
    return err;
}

static ep_err on_set_default(void *arg, const char *model, const char *version, char *out_before,
                             ep_error *out_error)
{
    coordinator *self = arg;
    return ep_coordinator_service_set_default(self->service, model, version, out_before, out_error);
}

static ep_err on_policy(void *arg, const Expertd__V1__PolicyRequest *request,
                        Expertd__V1__PolicyReply_Closure closure, void *closure_data,
                        ep_error *out_error)
{
    coordinator *self = arg;
    return ep_policy_report_answer(self->service, self->reload, request, closure, closure_data,
                                   out_error);
}

static bool on_overrides(void *arg, const char *key, ep_admin_override *out_override)
{
    coordinator *self = arg;
    return ep_policy_report_override(self->service, key, out_override);
}

static ep_err on_plan(void *arg, bool apply, bool with_copies, Expertd__V1__PlanReply **out_reply,
                      ep_error *out_error)
{
    coordinator *self = arg;
    return ep_coordinator_service_plan(self->service, apply, with_copies, out_reply, out_error);
}

static ep_err add_admin(coordinator *self, ep_error *out_error)
{
    const ep_admin_config admin = {.loop = self->loop,
                                   .reload = self->reload,
                                   .drain = on_drain,
                                   .run_reload = run_reload,
                                   .set_default = on_set_default,
                                   .policy = on_policy,
                                   .overrides = on_overrides,
                                   .plan = on_plan,
                                   .arg = self};
    ep_err err = ep_admin_service_create(&admin, &self->admin);
    return err == EP_OK ? ep_rpc_server_add_service(self->server, ep_admin_service_rpc(self->admin),
                                                    out_error)
                        : ep_error_set(out_error, err, "no memory for the admin service");
}

/* The gateway's own client watches placement over the loopback lane, and calls the nodes with this
 * coordinator's token and TLS settings. */
static ep_err connect_gateway(coordinator *self, ep_error *out_error)
{
    const ep_service_config *service = &self->config->service;
    char token[EP_TOKEN_BYTES_MAX + 1];
    ep_client_config client;
    ep_client_config_init(&client);
    client.coordinator_url = self->gateway_url;
    ep_rpc_credentials_show(service->credentials, EP_ROLE_CLIENT, token);
    client.token = token[0] != 0 ? token : NULL;
    client.buffer_bytes_max = service->buffer_bytes_max;
    client.payload_crc = service->payload_crc;
    /* without a server name this process only listens with TLS */
    if (service->has_tls && service->tls.server_name != NULL) {
        client.tls_ca_file = service->tls.ca_file;
        client.tls_cert_key_file = service->tls.cert_key_file;
        client.tls_server_name = service->tls.server_name;
    }
    ep_err err = ep_gateway_connect(self->gateway, &client, out_error);
    explicit_bzero(token, sizeof(token));
    return err;
}

static void look_after_gateway(coordinator *self)
{
    ep_error error;
    ep_routing_table *table = ep_coordinator_service_table(self->service);
    ep_gateway_tick(self->gateway);
    if (!self->stopping && ep_gateway_is_stranded(self->gateway, table)) {
        const ep_err err = connect_gateway(self, &error);
        ep_log(err == EP_OK ? EP_LOG_INFO : EP_LOG_WARN, "gateway-numerics",
               EP_KV(reason, err == EP_OK
                                 ? "no node of the chosen numerics id holds a model any more"
                                 : error.text),
               EP_KV(effect, err == EP_OK ? "the gateway chooses anew"
                                          : "its calls fail, and it tries again"));
    }
    ep_routing_table_unref(table);
}

static void on_tick(void *arg)
{
    coordinator *self = arg;
    ep_coordinator_service_tick(self->service);
    if (self->config->gateway) {
        look_after_gateway(self);
    }
}

/*
 * Not ready while every call would end with UNAVAILABLE. Nodes must be able to register meanwhile,
 * so they must reach the coordinator whatever this says.
 */
static size_t check_health(coordinator *self, ep_probe_check *out)
{
    ep_health *health = ep_coordinator_service_judge(self->service);
    const ep_health_problem *end = health != NULL ? ep_health_end_of_service(health) : NULL;
    out[0] = (ep_probe_check){.name = "service", .ok = health != NULL && end == NULL};
    /* problems that do not end service leave this check ok */
    out[1] = (ep_probe_check){.name = "problems", .ok = true};
    if (health == NULL) {
        snprintf(out[0].text, sizeof(out[0].text), "no memory to judge it");
        return 1;
    }
    snprintf(out[0].text, sizeof(out[0].text), "%.300s",
             end != NULL ? end->text : "experts are served");
    if (health->problems_count == 0) {
        snprintf(out[1].text, sizeof(out[1].text), "none");
    } else {
        const ep_health_problem *worst = &health->problems[0];
        snprintf(out[1].text, sizeof(out[1].text), "%u errors, %u warnings; %s: %.240s",
                 ep_health_count(health, true), ep_health_count(health, false),
                 ep_health_rules[worst->code].word, worst->text);
    }
    free(health);
    return 2;
}

/* Started and alive once it listens; ready when no problem ends the service (health.h). */
static size_t on_checks(void *arg, ep_probe_kind kind, ep_probe_check *out)
{
    coordinator *self = arg;
    size_t count = 0;
    uint64_t idle_ms = ep_service_loop_idle_ms(self->loop);
    out[count] = (ep_probe_check){.name = "loop", .ok = idle_ms < 10 * EP_SERVICE_LOOP_TICK_MS};
    snprintf(out[count].text, sizeof(out[count].text), "turned %llu ms ago",
             (unsigned long long)idle_ms);
    count++;
    if (kind == EP_PROBE_READY) {
        bool stopping = __atomic_load_n(&self->stopping, __ATOMIC_ACQUIRE);
        ep_coordinator_stats stats;
        ep_coordinator_service_read_stats(self->service, &stats);
        out[count] = (ep_probe_check){.name = "serving", .ok = !stopping};
        snprintf(out[count].text, sizeof(out[count].text), "%s, %u nodes, epoch %llu",
                 stopping ? "stopping" : "serving", stats.nodes_listed,
                 (unsigned long long)stats.epoch.number);
        count++;
        count += check_health(self, &out[count]);
        out[count++] = ep_pool_watch_check(&self->pool_watch);
        out[count++] = ep_tls_watch_check(&self->tls_watch);
        /* a failing store does not end service */
        out[count] = (ep_probe_check){.name = "store", .ok = true};
        snprintf(out[count].text, sizeof(out[count].text), "%.120s",
                 self->store == NULL               ? "memory"
                 : stats.store_error.code != EP_OK ? stats.store_error.text
                                                   : "written");
        count++;
    }
    return count;
}

static bool on_page(void *arg, const char *path, const ep_probe_query *query,
                    ep_probe_page *out_page)
{
    coordinator *self = arg;
    return ep_status_page_answer(self->page, __atomic_load_n(&self->stopping, __ATOMIC_ACQUIRE),
                                 path, query, out_page);
}

static void collect_health(coordinator *self)
{
    ep_metrics *m = self->metrics;
    ep_health *health = ep_coordinator_service_judge(self->service);
    bool stopping = __atomic_load_n(&self->stopping, __ATOMIC_ACQUIRE);
    ep_gauge_set(m, "expertd_coordinator_ready", "1 when calls can be answered, as /readyz says",
                 NULL, 0, health != NULL && !stopping && ep_health_end_of_service(health) == NULL);
    if (health == NULL) {
        return;
    }
    for (int code = 0; code < EP_HEALTH_CODES; code++) {
        const ep_health_rule *rule = &ep_health_rules[code];
        const ep_metric_label labels[] = {{"code", rule->word},
                                          {"severity", rule->is_error ? "error" : "warning"}};
        ep_gauge_set(m, "expertd_coordinator_problems",
                     "What is wrong now, as expertctl status lists it", labels, 2,
                     health->counts[code]);
    }
    ep_gauge_set(m, "expertd_coordinator_nodes", "Nodes that take part", NULL, 0,
                 health->nodes_seen);
    ep_gauge_set(m, "expertd_coordinator_nodes_expected",
                 "Those, and the ones that fell silent and no operator drained; at least min_nodes",
                 NULL, 0, health->nodes_expected);
    ep_gauge_set(m, "expertd_coordinator_experts_without_copy",
                 "Experts of the table that no node serves", NULL, 0,
                 (double)health->experts_without_copy);
    ep_gauge_set(m, "expertd_coordinator_experts_with_few_copies",
                 "Experts with a copy, and fewer than wanted", NULL, 0,
                 (double)health->experts_with_few_copies);
    ep_gauge_set(
        m, "expertd_coordinator_node_speed_min",
        "What the slowest node computes in a time against the median node; 1 when not known", NULL,
        0, health->speed_min);
    free(health);
}

static void on_collect(void *arg)
{
    coordinator *self = arg;
    ep_metrics *m = self->metrics;
    ep_coordinator_stats stats;
    ep_rpc_server_stats rpc;
    ep_coordinator_service_read_stats(self->service, &stats);
    ep_rpc_server_read_stats(self->server, &rpc);
    ep_gateway_collect(self->gateway);
    ep_pool_watch_collect(&self->pool_watch, m);
    ep_tls_watch_collect(&self->tls_watch, m);
    ep_statistics_collect(ep_coordinator_service_loads(self->service),
                          ep_coordinator_service_balance, self->service, m,
                          self->config->metrics_per_expert);
    collect_health(self);
    ep_gauge_set(m, "expertd_coordinator_watchers", "Placement watches open", NULL, 0,
                 (double)stats.watchers);
    ep_gauge_set(m, "expertd_routing_epoch", "Number of the newest routing table", NULL, 0,
                 (double)stats.epoch.number);
    ep_counter_set(m, "expertd_coordinator_registrations_total", "Registrations accepted", NULL, 0,
                   stats.registrations);
    ep_counter_set(m, "expertd_coordinator_heartbeats_total", "Heartbeats received", NULL, 0,
                   stats.heartbeats);
    ep_counter_set(m, "expertd_coordinator_tables_total", "Routing tables published", NULL, 0,
                   stats.tables_published);
    ep_counter_set(m, "expertd_coordinator_store_writes_total", "Times the state was written", NULL,
                   0, stats.store_writes);
    ep_counter_set(m, "expertd_coordinator_store_errors_total",
                   "Failed attempts to write the state", NULL, 0, stats.store_errors);
    ep_gauge_set(m, "expertd_coordinator_store_failing",
                 "1 while the newest state cannot be written", NULL, 0,
                 stats.store_error.code != EP_OK);
    ep_gauge_set(m, "expertd_rpc_connections", "Connections open", NULL, 0,
                 (double)rpc.connections);
    ep_counter_set(m, "expertd_rpc_calls_total", "Calls received", NULL, 0, rpc.calls_total);
    ep_counter_set(m, "expertd_rpc_protocol_errors_total", "Frames that broke the protocol", NULL,
                   0, rpc.protocol_errors);
    ep_rpc_metrics_refused(m, &rpc);
    ep_rpc_metrics_door(m, self->server);
}

static uint32_t nodes_listed(void *arg)
{
    coordinator *self = arg;
    ep_coordinator_stats stats;
    ep_coordinator_service_read_stats(self->service, &stats);
    return stats.nodes_listed;
}

static ep_err create_gateway(coordinator *self, ep_error *out_error)
{
    const ep_gateway_config config = {
        .enabled = self->config->gateway,
        .calls_max = self->config->gateway_calls_max,
        .reply_bytes_max = self->config->service.limits.frame_bytes_max - REPLY_HEADER_BYTES,
        .nodes_wanted = self->config->cluster.min_nodes,
        .nodes_listed = nodes_listed,
        .arg = self,
        .metrics = self->metrics,
        .loads = ep_coordinator_service_loads(self->service),
    };
    return ep_gateway_create(&config, &self->gateway, out_error);
}

/* Listens on loopback for the gateway's own client. */
static ep_err start_gateway(coordinator *self, ep_error *out_error)
{
    if (!self->config->gateway) {
        return EP_OK;
    }
    snprintf(self->gateway_url, sizeof(self->gateway_url), "loopback://gateway-%016llx",
             (unsigned long long)ep_random_id());
    const ep_lane_address address = {.url = self->gateway_url};
    ep_err err =
        ep_rpc_server_listen(self->server, &address, EP_ROLE_BIT(EP_ROLE_CLIENT), out_error);
    return err != EP_OK ? err : connect_gateway(self, out_error);
}

/* Starts the service with the stored state, under a term that no client has seen. */
static ep_err start_service(coordinator *self, ep_error *out_error)
{
    ep_coordinator_state_config cluster = self->config->cluster;
    ep_coordinator_kept kept = {0};
    if (self->config->state_dir == NULL) {
        ep_log(EP_LOG_INFO, "state-in-memory",
               EP_KV(effect, "after a restart nodes register again and experts are placed anew"),
               EP_KV(hint, "set state_dir to keep the state"));
    } else {
        ep_err err = ep_table_store_sqlite_open(self->config->state_dir, &self->store, out_error);
        err = err != EP_OK ? err
                           : ep_table_store_begin_term(self->store, cluster.term, &kept,
                                                       &cluster.term, out_error);
        if (err != EP_OK) {
            return err != EP_ERR_IO
                       ? err
                       : ep_error_prefix(
                             out_error, err,
                             "make room on the disk of state_dir, or repair its rights");
        }
        ep_log(EP_LOG_INFO, "state-restored", EP_KV(path, self->store->place),
               EP_KV(term, cluster.term), EP_KV(nodes, kept.nodes_count),
               EP_KV(nodes_drained, kept.drained_count),
               EP_KV(policy_revision, kept.policy.revision),
               EP_KV(has_table, (bool)(kept.published != NULL)));
    }
    ep_err err = ep_coordinator_service_create(&cluster, self->store, &kept, &self->service);
    ep_coordinator_kept_fini(&kept);
    return err == EP_OK ? EP_OK
                        : ep_error_set(out_error, err, "cannot start: %s", ep_err_text(err));
}

static ep_err start_rpc(coordinator *self, ep_error *out_error)
{
    const ep_service_config *service = &self->config->service;
    ep_err err = ep_timer_service_create("coord-timer", &self->timers);
    err = err != EP_OK ? err
                       : ep_buffer_pool_create(service->buffer_bytes_max, 64u << 20, &self->pool);
    if (err != EP_OK) {
        return ep_error_set(out_error, err, "cannot start: %s", ep_err_text(err));
    }
    err = start_service(self, out_error);
    err = err != EP_OK ? err : create_gateway(self, out_error);
    if (err != EP_OK) {
        return err;
    }
    ep_rpc_server_config config = {
        .common = {.timers = self->timers,
                   .pool = self->pool,
                   .limits = service->limits,
                   .credentials = service->credentials,
                   .node = "coordinator",
                   .role = "coordinator",
                   .incarnation = ep_random_id(),
                   .payload_crc = service->payload_crc},
    };
    ep_rpc_limits_raise_for_control(&config.common.limits);
    err = ep_rpc_server_create(&config, &self->server, out_error);
    err = err != EP_OK ? err
                       : ep_rpc_server_add_service(
                             self->server, ep_coordinator_service_rpc(self->service), out_error);
    err = err != EP_OK
              ? err
              : ep_rpc_server_add_service(self->server, ep_gateway_rpc(self->gateway), out_error);
    err = err != EP_OK ? err : add_admin(self, out_error);
    if (err == EP_OK &&
        ((err = ep_pool_watch_start(&self->pool_watch, self->loop, self->server)) != EP_OK ||
         (err = ep_tls_watch_start(&self->tls_watch, self->reload->started, self->loop,
                                   self->server)) != EP_OK)) {
        return ep_error_set(out_error, err, "cannot start a timer: %s", ep_err_text(err));
    }
    if (err == EP_OK) {
        ep_coordinator_service_watch(self->service, &self->pool_watch, &self->tls_watch);
    }
    err = err != EP_OK ? err : ep_service_listen(service, self->server, out_error);
    return err != EP_OK ? err : start_gateway(self, out_error);
}

static ep_err start_doors(coordinator *self, ep_error *out_error)
{
    const ep_service_config *service = &self->config->service;
    ep_err err = ep_metrics_on_collect(self->metrics, on_collect, self);
    if (err != EP_OK) {
        return ep_error_set(out_error, err, "cannot start metrics: %s", ep_err_text(err));
    }
    const ep_metric_label labels[] = {
        {"version", ep_version_text()}, {"git", ep_version_build()}, {"isa", ep_version_isa()}};
    ep_gauge_set(self->metrics, "expertd_build_info", "What this build is", labels,
                 EP_ARRAY_COUNT(labels), 1);
    ep_rpc_server_url(self->server, 0, self->rpc_url, sizeof(self->rpc_url));
    ep_service_admin_url(service, self->server, self->admin_url, sizeof(self->admin_url));
    ep_rpc_server_door_url(self->server, self->door_url, sizeof(self->door_url));
    if (service->probe_address[0] != 0) {
        ep_probes_config config = {.address = service->probe_address,
                                   .checks = on_checks,
                                   .page = on_page,
                                   .front = "status",
                                   .arg = self,
                                   .metrics = self->metrics,
                                   .timers = self->timers,
                                   .rpc_url = self->rpc_url,
                                   .admin_url = self->admin_url};
        err = ep_status_page_create(self->service, &self->page);
        if (err != EP_OK) {
            return ep_error_set(out_error, err, "cannot start the status page: %s",
                                ep_err_text(err));
        }
        err = ep_probes_start(&config, &self->probes, out_error);
        if (err != EP_OK) {
            return err;
        }
        ep_probes_url(self->probes, self->probe_url, sizeof(self->probe_url));
    }
    if (service->ports_file[0] == 0) {
        return EP_OK;
    }
    const ep_ports_entry entries[] = {{"rpc_url", self->rpc_url},
                                      {"probe_url", self->probe_url},
                                      {"admin_url", self->admin_url},
                                      {"door_url", self->door_url}};
    err = ep_ports_file_write(service->ports_file, "expertd-coordinator", entries,
                              EP_ARRAY_COUNT(entries), out_error);
    self->ports_written = err == EP_OK;
    return err;
}

static ep_err start(coordinator *self, ep_error *out_error)
{
    const ep_service_loop_handler handler = {
        .on_stop = on_stop, .on_reload = on_reload, .arg = self};
    ep_err err = ep_service_loop_create(&handler, &self->loop, out_error);
    if (err == EP_OK && (err = ep_metrics_create(&self->metrics)) != EP_OK) {
        return ep_error_set(out_error, err, "cannot start metrics: %s", ep_err_text(err));
    }
    err = err != EP_OK ? err : start_rpc(self, out_error);
    err = err != EP_OK ? err : start_doors(self, out_error);
    if (err == EP_OK) {
        err = ep_service_loop_timer_create(self->loop, on_tick, self, &self->tick);
        err = err != EP_OK ? err
                           : ep_service_loop_timer_create(self->loop, on_leave_look, self,
                                                          &self->leave_timer);
        if (err != EP_OK) {
            return ep_error_set(out_error, err, "cannot start a timer: %s", ep_err_text(err));
        }
    }
    return err;
}

static void stop(coordinator *self)
{
    if (self->ports_written) {
        ep_ports_file_remove(self->config->service.ports_file);
    }
    ep_probes_stop(self->probes);
    ep_status_page_destroy(self->page);
    if (self->service != NULL) {
        ep_coordinator_service_stop(self->service);
    }
    ep_gateway_stop(self->gateway);
    ep_admin_service_stop(self->admin);
    ep_rpc_server_destroy(self->server);
    ep_admin_service_destroy(self->admin);
    ep_gateway_destroy(self->gateway);
    ep_coordinator_service_destroy(self->service);
    ep_table_store_close(self->store);
    ep_metrics_destroy(self->metrics);
    ep_timer_service_destroy(self->timers);
    ep_buffer_pool_destroy(self->pool);
    ep_service_loop_destroy(self->loop);
    ep_transport_fini();
}

int ep_coordinator_run(const ep_coordinator_config *config, ep_reload *reload)
{
    coordinator self = {.config = config, .reload = reload, .drain_ms = config->service.drain_ms};
    ep_error error;
    ep_err err = start(&self, &error);
    if (err != EP_OK) {
        ep_log(EP_LOG_ERROR, "start-failed", EP_KV(code, ep_err_name(err)),
               EP_KV(reason, error.text));
        stop(&self);
        return 1;
    }
    ep_rpc_server_set_state(self.server, "serving");
    ep_log(EP_LOG_INFO, "serving", EP_KV(rpc_url, self.rpc_url),
           EP_KV(admin_url, self.admin_url[0] != 0 ? self.admin_url : "off"),
           EP_KV(door_url, self.door_url[0] != 0 ? self.door_url : "off"),
           EP_KV(probe_url, self.probe_url[0] != 0 ? self.probe_url : "off"),
           EP_KV(placement, ep_coordinator_state_policy(&config->cluster)),
           EP_KV(copies, config->cluster.copies), EP_KV(min_nodes, config->cluster.min_nodes),
           EP_KV(pid, getpid()), EP_KV(software, ep_version_software()));
    ep_sd_notify_ready("serving");
    ep_loop_timer_start(self.tick, config->cluster.heartbeat_ms, config->cluster.heartbeat_ms);
    ep_service_loop_run(self.loop);
    stop(&self);
    ep_log(EP_LOG_INFO, "stopped", EP_KV(exit_code, 0));
    return 0;
}
