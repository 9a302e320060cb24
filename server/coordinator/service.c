/* SPDX-License-Identifier: Apache-2.0 */
/* Handlers of the Coordinator service and the list of watchers. */
#include "coordinator/service.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "common/version.h"
#include "coordinator/drain_report.h"
#include "coordinator/failpoint.h"
#include "coordinator/table_keeper.h"
#include "coordinator/statistics.h"
#include "transport/address.h"
#include "wire/placement_codec.h"

#define BALANCE_NS (2 * EP_NS_PER_S) /* how often heat is taken from the loads */

typedef struct watcher {
    ep_rpc_call *call;
    Expertd__V1__PlacementSnapshot_Closure closure;
    ep_epoch have;
    struct watcher *next;
} watcher;

/* The last logged state of a node. */
typedef struct logged_node {
    uint32_t node_id;
    char name[EP_NODE_NAME_BYTES];
    const char *state; /* static text */
    bool is_there;     /* scratch of one pass */
} logged_node;

struct ep_coordinator_service {
    Expertd__V1__Coordinator_Service rpc; /* first: handlers get a pointer to it */
    pthread_mutex_t lock;
    ep_coordinator_state *cluster;
    ep_coordinator_state_config config;
    ep_load_sums *loads;
    watcher *watchers;
    bool stopping;
    uint64_t started_ns;
    uint64_t ticked_ns;
    uint64_t balanced_ns;
    ep_table_store *store;   /* NULL: memory */
    ep_table_keeper *keeper; /* NULL: memory */
    uint64_t revision_kept;  /* the newest revision of the cluster that is written */
    uint64_t revision_asked; /* the newest revision that the keeper was woken for */
    uint64_t policy_changed; /* the cluster's revision when the policy was last set */
    ep_policy policy_served; /* the policy that nodes have; as served */
    /* the table that watchers have; with a store older than the cluster's until that is written */
    ep_routing_table *served;
    ep_epoch committed; /* committed epoch when served was taken */
    ep_err placement_error_logged;
    char copy_error_logged[EP_ERROR_TEXT_BYTES];
    char left_out_logged[EP_ERROR_TEXT_BYTES];
    char refusal_logged[EP_ERROR_TEXT_BYTES];
    const ep_pool_watch *pool_watch; /* NULL: memory is not judged */
    ep_tls_watch *tls_watch;         /* NULL: certificates are not judged */
    size_t logged_count;
    logged_node *logged;
    ep_coordinator_stats stats;
};

static ep_coordinator_service *self_of(Expertd__V1__Coordinator_Service *rpc)
{
    return (ep_coordinator_service *)rpc;
}

static void finish_error(ep_rpc_call *call, const ep_error *error)
{
    ep_rpc_call_finish(call, error->code, error);
}

static Expertd__V1__Epoch epoch_message(ep_epoch epoch)
{
    Expertd__V1__Epoch message = EXPERTD__V1__EPOCH__INIT;
    message.term = epoch.term;
    message.number = epoch.number;
    return message;
}

/* Sends the table to one watcher that has an older one. */
static void send_snapshot(watcher *w, const ep_routing_table *table,
                          const Expertd__V1__PlacementSnapshot *snapshot)
{
    if (ep_epoch_compare(w->have, table->epoch) < 0) {
        w->have = table->epoch;
        w->closure(snapshot, w->call);
    }
}

/* likely: the node's index in the cluster, where the entry usually is. */
static logged_node *find_logged(ep_coordinator_service *self, size_t likely, uint32_t node_id)
{
    for (size_t n = 0; n < self->logged_count; n++) {
        logged_node *node = &self->logged[(likely + n) % self->logged_count];
        if (node->node_id == node_id) {
            return node;
        }
    }
    return NULL;
}

static void log_state(ep_coordinator_service *self, size_t index,
                      const Expertd__V1__NodeEntry *entry)
{
    logged_node *node = find_logged(self, index, entry->node_id);
    if (node == NULL) {
        logged_node *grown = realloc(self->logged, (self->logged_count + 1) * sizeof(*grown));
        if (grown == NULL) {
            return; /* without memory the line is not logged */
        }
        self->logged = grown;
        node = &grown[self->logged_count++];
        *node = (logged_node){.node_id = entry->node_id, .state = entry->state};
        strcpy(node->name, entry->name);
    } else if (node->state != entry->state) {
        bool is_bad = strcmp(entry->state, "suspect") == 0 || strcmp(entry->state, "degraded") == 0;
        node->state = entry->state;
        ep_log(is_bad ? EP_LOG_WARN : EP_LOG_INFO, "node-state", EP_KV(node, node->name),
               EP_KV(state, entry->state), EP_KV(silent_ms, entry->last_seen_ms),
               EP_KV(hint, is_bad ? "see expertctl doctor, and the node's log" : NULL));
    }
    node->is_there = true;
}

/* Lock held. Logs each node whose state has changed since the last call, and each forgotten one. */
static void log_nodes(ep_coordinator_service *self)
{
    Expertd__V1__NodeEntry entry;
    uint64_t now_ns = ep_clock_now_ns();
    for (size_t i = 0; ep_coordinator_state_node(self->cluster, i, now_ns, &entry); i++) {
        log_state(self, i, &entry);
    }
    for (size_t i = self->logged_count; i-- > 0;) {
        if (!self->logged[i].is_there) {
            ep_log(EP_LOG_INFO, "node-forgotten", EP_KV(node, self->logged[i].name),
                   EP_KV(state_before, self->logged[i].state));
            self->logged[i] = self->logged[--self->logged_count];
        } else {
            self->logged[i].is_there = false;
        }
    }
}

/* Lock held. Serves a table and sends it to watchers. From now on nodes may drop copies that only
 * older tables needed, and they get this policy. */
static void adopt(ep_coordinator_service *self, ep_routing_table *table,
                  const Expertd__V1__PlacementSnapshot *snapshot, ep_epoch committed,
                  const ep_policy *policy)
{
    self->committed = committed;
    self->policy_served = *policy;
    if (snapshot == NULL) {
        return;
    }
    (void)EP_FAILPOINT(publish_before_announce);
    ep_routing_table_unref(self->served);
    self->served = ep_routing_table_ref(table);
    self->stats.tables_published++;
    for (watcher *w = self->watchers; w != NULL; w = w->next) {
        send_snapshot(w, table, snapshot);
        (void)EP_FAILPOINT(publish_first_watcher);
    }
    ep_log(EP_LOG_INFO, "table-published", EP_KV(term, table->epoch.term),
           EP_KV(epoch, table->epoch.number), EP_KV(nodes, table->nodes_count),
           EP_KV(layers, table->layers_count));
    (void)EP_FAILPOINT(publish_announced);
}

/* Encodes the table if it is not the served one; otherwise *out_snapshot is NULL. False: no
 * memory. */
static bool encode_news(const ep_routing_table *served, const ep_routing_table *table,
                        Expertd__V1__PlacementSnapshot **out_snapshot)
{
    *out_snapshot = NULL;
    if (table == NULL || (served != NULL && ep_epoch_compare(served->epoch, table->epoch) == 0)) {
        return true;
    }
    const ep_err err = ep_placement_encode(table, out_snapshot);
    if (err == EP_OK) {
        return true;
    }
    *out_snapshot = NULL;
    ep_log(EP_LOG_ERROR, "table-encode-failed", EP_KV(term, table->epoch.term),
           EP_KV(epoch, table->epoch.number), EP_KV(reason, ep_err_text(err)),
           EP_KV(effect, "the table before is served"));
    return false;
}

/* Lock held. Wakes the keeper for a new revision; without a store serves the table at once. */
static void publish(ep_coordinator_service *self)
{
    Expertd__V1__PlacementSnapshot *snapshot;
    ep_routing_table *table = ep_coordinator_state_table(self->cluster);
    if (self->keeper != NULL) {
        uint64_t revision = ep_coordinator_state_revision(self->cluster);
        /* the keeper itself repeats a failed write */
        if (revision != self->revision_asked) {
            self->revision_asked = revision;
            ep_table_keeper_wake(self->keeper);
        }
        return;
    }
    if (encode_news(self->served, table, &snapshot)) {
        adopt(self, table, snapshot, ep_coordinator_state_committed_epoch(self->cluster),
              ep_coordinator_state_get_policy(self->cluster));
    }
    if (snapshot != NULL) {
        ep_placement_snapshot_free(snapshot);
    }
}

/* Lock held. Publishes a new table and logs what has changed. */
static void announce(ep_coordinator_service *self)
{
    log_nodes(self);
    const ep_error *problem = ep_coordinator_state_placement_error(self->cluster);
    if (problem->code != self->placement_error_logged) {
        self->placement_error_logged = problem->code;
        if (problem->code != EP_OK) {
            ep_log(EP_LOG_ERROR, "placement-failed", EP_KV(reason, problem->text));
        }
    }
    const ep_error *left_out = ep_coordinator_state_left_out(self->cluster);
    if (strcmp(left_out->text, self->left_out_logged) != 0) {
        strcpy(self->left_out_logged, left_out->text);
        if (left_out->code != EP_OK) {
            ep_log(EP_LOG_WARN, "nodes-left-out", EP_KV(reason, left_out->text));
        }
    }
    const ep_error *copy = ep_coordinator_state_copy_error(self->cluster);
    if (strcmp(copy->text, self->copy_error_logged) != 0) {
        strcpy(self->copy_error_logged, copy->text);
        if (copy->code != EP_OK) {
            ep_log(EP_LOG_ERROR, "copy-differs", EP_KV(reason, copy->text));
        }
    }
    publish(self);
}

/* ---- the keeper's thread ---- */

static bool on_take(void *arg, ep_table_job *out_job, ep_error *out_error)
{
    ep_coordinator_service *self = arg;
    pthread_mutex_lock(&self->lock);
    uint64_t revision = ep_coordinator_state_revision(self->cluster);
    ep_err err = EP_OK;
    bool is_new = revision != self->revision_kept;
    if (is_new) {
        err = ep_coordinator_state_save(self->cluster, &out_job->kept);
        out_job->revision = revision;
        out_job->committed = ep_coordinator_state_committed_epoch(self->cluster);
    }
    pthread_mutex_unlock(&self->lock);
    if (err != EP_OK) {
        ep_error_set(out_error, err, "no memory to write the state");
        return false;
    }
    (void)EP_FAILPOINT(write_saved);
    return is_new;
}

static void on_write_failed(void *arg, const ep_error *error)
{
    ep_coordinator_service *self = arg;
    pthread_mutex_lock(&self->lock);
    bool is_news = strcmp(self->stats.store_error.text, error->text) != 0;
    self->stats.store_error = *error;
    self->stats.store_errors++;
    pthread_mutex_unlock(&self->lock);
    if (is_news) {
        ep_log(EP_LOG_ERROR, "store-failed", EP_KV(reason, error->text),
               EP_KV(effect, "the table before is served, and writing is tried again"),
               EP_KV(hint, "see free space and rights of state_dir"));
    }
}

static bool on_written(void *arg, const ep_table_job *job)
{
    ep_coordinator_service *self = arg;
    ep_routing_table *table = job->kept.published;
    Expertd__V1__PlacementSnapshot *snapshot;
    /* no lock: only this thread changes served */
    bool good = encode_news(self->served, table, &snapshot);
    pthread_mutex_lock(&self->lock);
    bool had_failed = self->stats.store_error.code != EP_OK;
    ep_error_clear(&self->stats.store_error);
    self->stats.store_writes++;
    if (good) {
        self->revision_kept = job->revision;
        adopt(self, table, snapshot, job->committed, &job->kept.policy);
    }
    pthread_mutex_unlock(&self->lock);
    if (snapshot != NULL) {
        ep_placement_snapshot_free(snapshot);
    }
    if (had_failed) {
        ep_log(EP_LOG_INFO, "store-works", EP_KV(path, self->store->place),
               EP_KV(effect, "it is written again"));
    }
    return good;
}

/* A connection may speak only for the node of its Hello. */
static ep_err check_name_said(const ep_rpc_call *call, const char *what, const char *node,
                              ep_error *out_error)
{
    const char *said = ep_rpc_call_incoming(call)->peer_node;
    if (strcmp(said, node) == 0) {
        return EP_OK;
    }
    return ep_error_set(out_error, EP_ERR_PERMISSION_DENIED,
                        "node '%s' may not %s '%s': the name differs from its Hello", said, what,
                        node);
}

static ep_err check_host(const ep_coordinator_state_config *config,
                         const Expertd__V1__RegisterRequest *request, ep_error *out_error)
{
    char rules[256] = "";
    size_t used = 0;
    for (size_t i = 0; i < config->advertise_allow_count; i++) {
        if (ep_address_fits_rule(request->url, config->advertise_allow[i])) {
            return EP_OK;
        }
        if (used < sizeof(rules)) {
            used += (size_t)snprintf(rules + used, sizeof(rules) - used, "%s%s", i > 0 ? ", " : "",
                                     config->advertise_allow[i]);
        }
    }
    return config->advertise_allow_count == 0
               ? EP_OK
               : ep_error_set(out_error, EP_ERR_PERMISSION_DENIED,
                              "node %s: the url '%.100s' is outside this coordinator's "
                              "advertise_allow; allowed hosts: %s",
                              request->node, request->url, rules);
}

/* Checks a URL that every client would dial, showing its token. */
static ep_err check_url(const ep_coordinator_state_config *config,
                        const Expertd__V1__RegisterRequest *request, ep_error *out_error)
{
    ep_node_urls allowed = config->node_urls;
    bool tls = strncmp(request->url, "tls+tcp://", strlen("tls+tcp://")) == 0;
    bool plain = strncmp(request->url, "tcp://", strlen("tcp://")) == 0;
    if (ep_lane_for_url(request->url) == NULL || (allowed != EP_NODE_URLS_ANY && !tls && !plain)) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "node %s: no lane serves the url '%.100s' between hosts, allowed "
                            "tcp://host:port and tls+tcp://host:port",
                            request->node, request->url);
    }
    if (allowed == EP_NODE_URLS_TLS && !tls) {
        return ep_error_set(out_error, EP_ERR_PERMISSION_DENIED,
                            "node %s: the url '%.100s' is plain text, and this coordinator listens "
                            "with TLS; allowed tls+tcp://host:port "
                            "(advertise_url, or listen, of the node)",
                            request->node, request->url);
    }
    return check_host(config, request, out_error);
}

/* Lock held. The policy's part for nodes, as far as it is written; NULL: none. */
static Expertd__V1__NodePolicy *node_policy(const ep_coordinator_service *self,
                                            Expertd__V1__NodePolicy *out_policy)
{
    const ep_policy *policy = &self->policy_served;
    const ep_policy_value *window = &policy->values[EP_POLICY_STEP_GROUP_US];
    if (policy->revision == 0) {
        return NULL;
    }
    expertd__v1__node_policy__init(out_policy);
    out_policy->revision = policy->revision;
    out_policy->has_step_group_us = window->revision != 0;
    out_policy->step_group_us = (uint32_t)window->number;
    return out_policy;
}

static void on_register_node(Expertd__V1__Coordinator_Service *rpc,
                             const Expertd__V1__RegisterRequest *request,
                             Expertd__V1__RegisterReply_Closure closure, void *closure_data)
{
    ep_coordinator_service *self = self_of(rpc);
    Expertd__V1__RegisterReply reply = EXPERTD__V1__REGISTER_REPLY__INIT;
    ep_error error;
    ep_err err = check_name_said(closure_data, "register", request->node, &error);
    err = err == EP_OK ? check_url(&self->config, request, &error) : err;
    (void)EP_FAILPOINT(register_received);
    pthread_mutex_lock(&self->lock);
    if (err == EP_OK) {
        err = ep_coordinator_state_register(self->cluster, ep_clock_now_ns(), request,
                                            &reply.node_id, &error);
    }
    const bool has_turn = err == EP_OK && ep_coordinator_state_take_turn(
                                              self->cluster, ep_clock_now_ns(), request->node);
    if (has_turn) {
        err = ep_coordinator_state_assignments(self->cluster, request->node, &reply.assignments,
                                               &reply.n_assignments);
        if (err != EP_OK) {
            ep_error_set(&error, err, "no memory for the assignment of node %s", request->node);
        }
    }
    if (err != EP_OK) {
        /* logged once: a refused node tries again with every heartbeat */
        bool is_new = strcmp(self->refusal_logged, error.text) != 0;
        strcpy(self->refusal_logged, error.text);
        pthread_mutex_unlock(&self->lock);
        if (is_new) {
            ep_log(EP_LOG_WARN, "register-refused", EP_KV(node, request->node),
                   EP_KV(reason, error.text));
        }
        finish_error(closure_data, &error);
        return;
    }
    Expertd__V1__Epoch epoch = epoch_message(ep_coordinator_state_assignment_epoch(self->cluster));
    (void)EP_FAILPOINT(register_applied);
    reply.heartbeat_ms = self->config.heartbeat_ms;
    reply.epoch = has_turn ? &epoch : NULL;
    self->stats.registrations++;
    ep_log(EP_LOG_INFO, "node-registered", EP_KV(node, request->node), EP_KV(url, request->url),
           EP_KV(node_id, reply.node_id));
    announce(self);
    Expertd__V1__Epoch committed = epoch_message(self->committed);
    Expertd__V1__NodePolicy policy;
    reply.committed = has_turn ? &committed : NULL;
    reply.policy = node_policy(self, &policy);
    /* Without memory the node gets its neighbours with the first heartbeat. */
    (void)ep_coordinator_state_neighbours(self->cluster, request->node, &reply.neighbours,
                                          &reply.n_neighbours);
    (void)EP_FAILPOINT(register_before_reply);
    /* under the lock, as names in the assignments belong to the cluster */
    closure(&reply, closure_data);
    ep_coordinator_state_assignments_free(reply.assignments, reply.n_assignments);
    free(reply.neighbours);
    pthread_mutex_unlock(&self->lock);
    ep_rpc_call_finish(closure_data, EP_OK, NULL);
    (void)EP_FAILPOINT(register_replied);
}

/* Lock held. Fills in the drain report for a node that asked to be emptied. */
static void fill_leaving(ep_coordinator_service *self, const Expertd__V1__HeartbeatRequest *request,
                         ep_coordinator_drain *drain, Expertd__V1__HeartbeatReply *reply)
{
    if (strcmp(request->state, "leaving") == 0) {
        ep_coordinator_state_leaving(self->cluster, request->node, drain);
        ep_drain_report_complete(self->cluster, ep_coordinator_state_in_force(self->cluster),
                                 self->served, false, drain);
        reply->copies_listed = drain->copies_to_move;
        reply->note = drain->note;
    }
}

static void on_heartbeat(Expertd__V1__Coordinator_Service *rpc,
                         const Expertd__V1__HeartbeatRequest *request,
                         Expertd__V1__HeartbeatReply_Closure closure, void *closure_data)
{
    ep_coordinator_service *self = self_of(rpc);
    Expertd__V1__HeartbeatReply reply = EXPERTD__V1__HEARTBEAT_REPLY__INIT;
    Expertd__V1__NodePolicy policy;
    ep_coordinator_drain drain;
    ep_error error;
    bool reregister = false;
    if (check_name_said(closure_data, "send a heartbeat of", request->node, &error) != EP_OK) {
        finish_error(closure_data, &error);
        return;
    }
    pthread_mutex_lock(&self->lock);
    self->stats.heartbeats++;
    ep_err err = ep_coordinator_state_heartbeat(self->cluster, ep_clock_now_ns(), request,
                                                &reregister, &error);
    if (err == EP_OK && !reregister) {
        err = ep_load_sums_take(self->loads, ep_coordinator_state_layer_experts, self->cluster,
                                request, &error);
    }
    ep_epoch current = ep_coordinator_state_assignment_epoch(self->cluster);
    bool outdated = request->epoch == NULL || request->epoch->term != current.term ||
                    request->epoch->number != current.number;
    const bool has_turn =
        err != EP_OK || reregister || !outdated ||
        ep_coordinator_state_take_turn(self->cluster, ep_clock_now_ns(), request->node);
    if (err == EP_OK && !reregister && outdated && has_turn) {
        err = ep_coordinator_state_assignments(self->cluster, request->node, &reply.assignments,
                                               &reply.n_assignments);
        reply.has_assignments = err == EP_OK;
        if (err != EP_OK) {
            ep_error_set(&error, err, "no memory for the assignment of node %s", request->node);
        }
    }
    announce(self);
    if (err == EP_OK) {
        err = ep_coordinator_state_neighbours(self->cluster, request->node, &reply.neighbours,
                                              &reply.n_neighbours);
        if (err != EP_OK) {
            ep_error_set(&error, err, "no memory for the neighbours of node %s", request->node);
        }
    }
    if (err == EP_OK) {
        Expertd__V1__Epoch epoch = epoch_message(current);
        Expertd__V1__Epoch committed = epoch_message(self->committed);
        /* not to a node whose assignment is of another term or older than committed: it must not
         * drop by that one, as tables may list again what it took away */
        if (has_turn || (request->epoch != NULL && request->epoch->term == current.term &&
                         request->epoch->number >= committed.number)) {
            reply.epoch = &epoch;
            reply.committed = &committed;
        }
        reply.reregister = reregister;
        reply.policy = node_policy(self, &policy);
        fill_leaving(self, request, &drain, &reply);
        closure(&reply, closure_data);
    }
    ep_coordinator_state_assignments_free(reply.assignments, reply.n_assignments);
    free(reply.neighbours);
    pthread_mutex_unlock(&self->lock);
    if (err != EP_OK) {
        finish_error(closure_data, &error);
        return;
    }
    ep_rpc_call_finish(closure_data, EP_OK, NULL);
}

/* Takes a watcher out of the list; NULL: it is gone already. */
static watcher *take_watcher(ep_coordinator_service *self, ep_rpc_call *call)
{
    watcher *found = NULL;
    pthread_mutex_lock(&self->lock);
    for (watcher **link = &self->watchers; *link != NULL; link = &(*link)->next) {
        if ((*link)->call == call) {
            found = *link;
            *link = found->next;
            self->stats.watchers--;
            break;
        }
    }
    pthread_mutex_unlock(&self->lock);
    return found;
}

static void on_watch_cancelled(void *arg, ep_rpc_call *call)
{
    watcher *w = take_watcher(arg, call);
    if (w != NULL) {
        free(w);
        ep_rpc_call_finish(call, EP_ERR_CANCELLED, NULL);
    }
}

static void on_watch_placement(Expertd__V1__Coordinator_Service *rpc,
                               const Expertd__V1__WatchPlacementRequest *request,
                               Expertd__V1__PlacementSnapshot_Closure closure, void *closure_data)
{
    ep_coordinator_service *self = self_of(rpc);
    ep_error error;
    watcher *w = calloc(1, sizeof(*w));
    if (w == NULL) {
        ep_error_set(&error, EP_ERR_NO_MEMORY, "no memory for a watch");
        finish_error(closure_data, &error);
        return;
    }
    w->call = closure_data;
    w->closure = closure;
    if (request->have != NULL) {
        w->have = (ep_epoch){.term = request->have->term, .number = request->have->number};
    }
    pthread_mutex_lock(&self->lock);
    if (self->stopping) {
        pthread_mutex_unlock(&self->lock);
        free(w);
        ep_error_set(&error, EP_ERR_DRAINING, "the coordinator is stopping");
        finish_error(closure_data, &error);
        return;
    }
    w->next = self->watchers;
    self->watchers = w;
    self->stats.watchers++;
    ep_routing_table *table = self->served;
    Expertd__V1__PlacementSnapshot *snapshot;
    if (table != NULL && ep_placement_encode(table, &snapshot) == EP_OK) {
        send_snapshot(w, table, snapshot);
        ep_placement_snapshot_free(snapshot);
    }
    pthread_mutex_unlock(&self->lock);
    /* without the lock, since on_watch_cancelled may run at once */
    ep_rpc_call_on_cancel(closure_data, on_watch_cancelled, self);
}

/* A status and the memory that it borrows. */
typedef struct status_parts {
    Expertd__V1__ClusterStatusReply reply;
    Expertd__V1__Epoch epoch;
    Expertd__V1__NodeEntry *entries; /* first of the present nodes, then of the lost ones */
    size_t here;
    Expertd__V1__NodeEntry **list;
    Expertd__V1__Problem *problems;
    Expertd__V1__Problem **problem_list;
    ep_health *health;
    char tls_error[EP_ERROR_TEXT_BYTES];
    uint32_t copies_waiting[EP_MODELS_MAX];
} status_parts;

/* Lock held. */
static bool collect_nodes(ep_coordinator_service *self, status_parts *parts, uint64_t now_ns)
{
    Expertd__V1__NodeEntry entry;
    size_t here = 0;
    size_t lost = 0;
    while (ep_coordinator_state_node(self->cluster, here, now_ns, &entry)) {
        here++;
    }
    while (ep_coordinator_state_lost(self->cluster, lost, now_ns, &entry)) {
        lost++;
    }
    parts->entries = calloc(here + lost + 1, sizeof(*parts->entries));
    parts->list = calloc(here + lost + 1, sizeof(*parts->list));
    if (parts->entries == NULL || parts->list == NULL) {
        return false;
    }
    for (size_t i = 0; i < here + lost; i++) {
        (void)(i < here ? ep_coordinator_state_node(self->cluster, i, now_ns, &parts->entries[i])
                        : ep_coordinator_state_lost(self->cluster, i - here, now_ns,
                                                    &parts->entries[i]));
        parts->list[i] = &parts->entries[i];
    }
    parts->here = here;
    parts->reply.nodes = parts->list;
    parts->reply.n_nodes = here + lost;
    return true;
}

/* Lock held, also while the parts are used, since they borrow names. False: no memory. Call
 * status_fini in any case. */
static bool status_init(ep_coordinator_service *self, status_parts *parts)
{
    uint64_t now_ns = ep_clock_now_ns();
    Expertd__V1__ClusterStatusReply *reply = &parts->reply;
    *parts = (status_parts){.health = malloc(sizeof(*parts->health))};
    expertd__v1__cluster_status_reply__init(reply);
    if (parts->health == NULL || !collect_nodes(self, parts, now_ns)) {
        return false;
    }
    parts->epoch = epoch_message(self->served != NULL ? self->served->epoch : (ep_epoch){0});
    reply->epoch = &parts->epoch;
    reply->policy = (char *)(uintptr_t)ep_coordinator_state_policy(&self->config);
    reply->copies_waiting = ep_coordinator_state_copies_waiting(self->cluster, NULL, NULL);
    for (uint32_t m = 0; self->served != NULL && m < self->served->models_count; m++) {
        const ep_routing_model *model = &self->served->models[m];
        parts->copies_waiting[m] =
            ep_coordinator_state_copies_waiting(self->cluster, model->name, model->version);
    }
    reply->copies = ep_coordinator_state_in_force(self->cluster)->copies;
    reply->watchers = self->stats.watchers;
    reply->uptime_us = (now_ns - self->started_ns) / EP_NS_PER_US;
    reply->store = self->store != NULL ? self->store->place : "memory";
    reply->store_error = self->stats.store_error.text;
    reply->placement_error =
        (char *)(uintptr_t)ep_coordinator_state_placement_error(self->cluster)->text;
    reply->min_nodes = self->config.min_nodes;
    reply->copy_error = (char *)(uintptr_t)ep_coordinator_state_copy_error(self->cluster)->text;
    reply->software = (char *)(uintptr_t)ep_version_software();
    ep_probe_check memory = {.ok = true};
    if (self->pool_watch != NULL) {
        memory = ep_pool_watch_check(self->pool_watch);
    }
    if (self->tls_watch != NULL) {
        ep_tls_watch_refusal(self->tls_watch, parts->tls_error);
    }
    const ep_health_facts facts = {
        .cluster = reply,
        .table = self->served,
        .copies_waiting = parts->copies_waiting,
        .move_rate = ep_coordinator_state_in_force(self->cluster)->move_rate,
        .memory_error = memory.ok ? NULL : memory.text,
        .tls_expiry = self->tls_watch != NULL ? ep_tls_watch_expiry(self->tls_watch) : 0,
        .tls_error = parts->tls_error,
        .unix_now = (uint64_t)time(NULL)};
    ep_health_judge(&facts, parts->health);
    return true;
}

static void status_fini(status_parts *parts)
{
    free(parts->entries);
    free(parts->list);
    free(parts->problems);
    free(parts->problem_list);
    free(parts->health);
}

/* Adds the problems as messages, which borrow their texts. */
static bool add_problems(status_parts *parts)
{
    const ep_health *health = parts->health;
    parts->problems = calloc(health->problems_count + 1, sizeof(*parts->problems));
    parts->problem_list = calloc(health->problems_count + 1, sizeof(*parts->problem_list));
    if (parts->problems == NULL || parts->problem_list == NULL) {
        return false;
    }
    for (uint32_t i = 0; i < health->problems_count; i++) {
        const ep_health_rule *rule = &ep_health_rules[health->problems[i].code];
        Expertd__V1__Problem *problem = &parts->problems[i];
        expertd__v1__problem__init(problem);
        problem->code = (char *)(uintptr_t)rule->word;
        problem->is_error = rule->is_error;
        problem->ends_service = rule->ends_service;
        problem->text = (char *)(uintptr_t)health->problems[i].text;
        problem->advice = (char *)(uintptr_t)rule->advice;
        parts->problem_list[i] = problem;
    }
    parts->reply.judged = true;
    parts->reply.problems = parts->problem_list;
    parts->reply.n_problems = health->problems_count;
    parts->reply.problems_dropped = health->problems_dropped;
    return true;
}

/* As status_init, with everything that ClusterStatus returns. */
static bool status_init_whole(ep_coordinator_service *self, status_parts *parts)
{
    if (!status_init(self, parts) || !add_problems(parts)) {
        return false;
    }
    for (size_t i = 0; i < parts->here; i++) {
        ep_coordinator_state_moves(self->cluster, i, &parts->entries[i].copies_to_load,
                                   &parts->entries[i].copies_to_drop);
    }
    return true;
}

static void on_cluster_status(Expertd__V1__Coordinator_Service *rpc,
                              const Expertd__V1__Empty *request,
                              Expertd__V1__ClusterStatusReply_Closure closure, void *closure_data)
{
    ep_coordinator_service *self = self_of(rpc);
    (void)request;
    status_parts parts;
    pthread_mutex_lock(&self->lock);
    bool good = status_init_whole(self, &parts);
    if (good) {
        closure(&parts.reply, closure_data); /* packs it */
    }
    pthread_mutex_unlock(&self->lock);
    status_fini(&parts);
    ep_rpc_call_finish(closure_data, good ? EP_OK : EP_ERR_NO_MEMORY, NULL);
}

Expertd__V1__ClusterStatusReply *ep_coordinator_service_status(ep_coordinator_service *self,
                                                               ep_routing_table **out_table)
{
    status_parts parts;
    uint8_t *packed = NULL;
    size_t bytes = 0;
    pthread_mutex_lock(&self->lock);
    if (status_init_whole(self, &parts)) {
        packed = malloc(expertd__v1__cluster_status_reply__get_packed_size(&parts.reply) + 1);
        bytes = packed != NULL ? expertd__v1__cluster_status_reply__pack(&parts.reply, packed) : 0;
    }
    *out_table = packed != NULL && self->served != NULL ? ep_routing_table_ref(self->served) : NULL;
    pthread_mutex_unlock(&self->lock);
    status_fini(&parts);
    Expertd__V1__ClusterStatusReply *reply =
        packed != NULL ? expertd__v1__cluster_status_reply__unpack(NULL, bytes, packed) : NULL;
    free(packed);
    if (reply == NULL) {
        ep_routing_table_unref(*out_table);
        *out_table = NULL;
    }
    return reply;
}

bool ep_coordinator_service_layer(ep_coordinator_service *self, const char *model,
                                  const char *version, uint32_t layer,
                                  ep_coordinator_layer_view *out_view)
{
    pthread_mutex_lock(&self->lock);
    bool good = ep_coordinator_state_layer(self->cluster, model, version, layer, out_view);
    pthread_mutex_unlock(&self->lock);
    return good;
}

static void on_statistics(Expertd__V1__Coordinator_Service *rpc,
                          const Expertd__V1__StatisticsRequest *request,
                          Expertd__V1__StatisticsReply_Closure closure, void *closure_data)
{
    ep_coordinator_service *self = self_of(rpc);
    ep_statistics_answer(self->loads, ep_coordinator_service_balance, self, request, closure,
                         closure_data);
}

static const Expertd__V1__Coordinator_Service rpc_template = EXPERTD__V1__COORDINATOR__INIT(on_);

/* Serves the stored table at once, as its content and term are already written. */
static ep_err restore(ep_coordinator_service *self, const ep_coordinator_kept *kept)
{
    const ep_table_keeper_config config = {.store = self->store,
                                           .take = on_take,
                                           .written = on_written,
                                           .failed = on_write_failed,
                                           .arg = self};
    ep_err err = ep_coordinator_state_restore(self->cluster, self->started_ns, kept);
    if (err != EP_OK) {
        return err;
    }
    ep_routing_table *table = ep_coordinator_state_table(self->cluster);
    self->served = table != NULL ? ep_routing_table_ref(table) : NULL;
    self->committed = ep_coordinator_state_committed_epoch(self->cluster);
    self->policy_served = kept->policy;
    (void)EP_FAILPOINT(served_restored);
    err = ep_table_keeper_create(&config, &self->keeper);
    if (err == EP_OK) {
        ep_table_keeper_wake(self->keeper);
    }
    return err;
}

ep_err ep_coordinator_service_create(const ep_coordinator_state_config *config,
                                     ep_table_store *store, const ep_coordinator_kept *kept,
                                     ep_coordinator_service **out_service)
{
    ep_coordinator_service *self = calloc(1, sizeof(*self));
    if (self == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    self->rpc = rpc_template;
    self->config = *config;
    self->started_ns = ep_clock_now_ns();
    pthread_mutex_init(&self->lock, NULL);
    ep_error_clear(&self->stats.store_error);
    self->store = store;
    ep_err err = ep_coordinator_state_create(config, &self->cluster);
    err = err == EP_OK ? ep_load_sums_create(config->nodes_max, &self->loads) : err;
    if (err == EP_OK && store != NULL) {
        err = restore(self, kept);
    }
    if (err != EP_OK) {
        ep_coordinator_service_destroy(self);
        return err;
    }
    *out_service = self;
    return EP_OK;
}

void ep_coordinator_service_destroy(ep_coordinator_service *self)
{
    if (self == NULL) {
        return;
    }
    ep_table_keeper_destroy(self->keeper);
    ep_routing_table_unref(self->served);
    ep_coordinator_state_destroy(self->cluster);
    ep_load_sums_destroy(self->loads);
    free(self->logged);
    pthread_mutex_destroy(&self->lock);
    free(self);
}

ProtobufCService *ep_coordinator_service_rpc(ep_coordinator_service *self)
{
    return &self->rpc.base;
}

ep_load_sums *ep_coordinator_service_loads(ep_coordinator_service *self)
{
    return self->loads;
}

/* Lock held. Hands heat to the state. Plan and balance need it with any placement. */
static void balance_by_heat(ep_coordinator_service *self)
{
    ep_load_layer *layers = NULL;
    size_t count = 0;
    if (ep_load_sums_read(self->loads, &layers, &count) != EP_OK) {
        return; /* tried again next time */
    }
    for (size_t l = 0; l < count; l++) {
        ep_coordinator_state_take_heat(self->cluster, layers[l].model, layers[l].version,
                                       layers[l].layer, layers[l].counts, layers[l].passes,
                                       layers[l].experts);
    }
    ep_load_layers_free(layers, count);
    ep_coordinator_state_rebalance(self->cluster);
}

void ep_coordinator_service_tick(ep_coordinator_service *self)
{
    pthread_mutex_lock(&self->lock);
    uint64_t now_ns = ep_clock_now_ns();
    uint64_t period_ns = self->config.heartbeat_ms * EP_NS_PER_MS;
    uint64_t gap_ns = self->ticked_ns != 0 ? now_ns - self->ticked_ns : 0;
    /* this process did not run, so heartbeats may still be in sockets or have come too late */
    if (gap_ns > 2 * period_ns) {
        ep_log(EP_LOG_WARN, "coordinator-blind", EP_KV(blind_ms, gap_ns / EP_NS_PER_MS),
               EP_KV(reason, "this process did not run"),
               EP_KV(effect, "that time counts as no node's silence"),
               EP_KV(hint, "give it CPU time, or see who stopped it"));
        ep_coordinator_state_excuse(self->cluster, now_ns, gap_ns);
    }
    self->ticked_ns = now_ns;
    ep_coordinator_state_tick(self->cluster, now_ns);
    if (now_ns - self->balanced_ns >= BALANCE_NS) {
        self->balanced_ns = now_ns;
        balance_by_heat(self);
    }
    announce(self);
    pthread_mutex_unlock(&self->lock);
}

ep_err ep_coordinator_service_drain(ep_coordinator_service *self, const char *node, bool undo,
                                    ep_coordinator_drain *out_drain, ep_error *out_error)
{
    pthread_mutex_lock(&self->lock);
    ep_err err = ep_coordinator_state_drain(self->cluster, node, undo, out_drain, out_error);
    if (err == EP_OK) {
        announce(self);
        ep_drain_report_complete(self->cluster, ep_coordinator_state_in_force(self->cluster),
                                 self->served, undo, out_drain);
        if (out_drain->is_news) { /* logged once: a waiting operator repeats the order */
            ep_log(EP_LOG_INFO, undo ? "drain-undone" : "drain", EP_KV(node, out_drain->node),
                   EP_KV(state, out_drain->state),
                   EP_KV(copies_to_move, out_drain->copies_to_move));
        }
    }
    pthread_mutex_unlock(&self->lock);
    return err;
}

ep_err ep_coordinator_service_set_default(ep_coordinator_service *self, const char *model,
                                          const char *version, char *out_before,
                                          ep_error *out_error)
{
    pthread_mutex_lock(&self->lock);
    ep_err err =
        ep_coordinator_state_set_default(self->cluster, model, version, out_before, out_error);
    if (err == EP_OK) {
        announce(self);
        ep_log(EP_LOG_INFO, "default-version", EP_KV(model, model), EP_KV(version, version),
               EP_KV(version_before, out_before[0] != 0 ? out_before : NULL));
    }
    pthread_mutex_unlock(&self->lock);
    return err;
}

/* Lock held. */
static bool policy_is_kept(const ep_coordinator_service *self)
{
    return self->keeper == NULL || self->revision_kept >= self->policy_changed;
}

/* Lock held. */
static ep_err change_policy(ep_coordinator_service *self, const ep_policy_order *order,
                            ep_error *out_error)
{
    ep_policy next;
    const ep_policy *before = ep_coordinator_state_get_policy(self->cluster);
    const uint64_t revision = before->revision;
    if (order->has_expect_revision && order->expect_revision != revision) {
        return ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                            "the policy is at revision %llu, and %llu was expected: somebody "
                            "changed it; see expertctl policy show",
                            (unsigned long long)revision,
                            (unsigned long long)order->expect_revision);
    }
    ep_err err =
        ep_policy_apply(before, ep_coordinator_state_configured(self->cluster), order->changes,
                        order->count, order->who, (uint64_t)time(NULL), &next, out_error);
    if (err != EP_OK || next.revision == revision) {
        return err;
    }
    err = ep_coordinator_state_set_policy(self->cluster, &next, out_error);
    if (err != EP_OK) {
        return err;
    }
    self->policy_changed = ep_coordinator_state_revision(self->cluster);
    for (size_t i = 0; i < order->count; i++) {
        ep_log(EP_LOG_INFO, "policy", EP_KV(revision, next.revision),
               EP_KV(key, order->changes[i].key),
               EP_KV(value, order->changes[i].value != NULL ? order->changes[i].value : "unset"),
               EP_KV(who, order->who[0] != 0 ? order->who : NULL));
    }
    announce(self);
    return EP_OK;
}

ep_err ep_coordinator_service_policy(ep_coordinator_service *self, const ep_policy_order *order,
                                     ep_policy_view *out_view, ep_error *out_error)
{
    pthread_mutex_lock(&self->lock);
    ep_err err = order->count > 0 || order->has_expect_revision
                     ? change_policy(self, order, out_error)
                     : EP_OK;
    if (err == EP_OK) {
        *out_view = (ep_policy_view){.policy = *ep_coordinator_state_get_policy(self->cluster),
                                     .is_kept = policy_is_kept(self),
                                     .store = self->store != NULL ? self->store->place : "memory",
                                     .configured = *ep_coordinator_state_configured(self->cluster)};
        memcpy(out_view->store_error, self->stats.store_error.text, sizeof(out_view->store_error));
    }
    pthread_mutex_unlock(&self->lock);
    return err;
}

ep_err ep_coordinator_service_plan(ep_coordinator_service *self, bool apply, bool with_copies,
                                   Expertd__V1__PlanReply **out_reply, ep_error *out_error)
{
    pthread_mutex_lock(&self->lock);
    ep_err err = ep_coordinator_state_plan(self->cluster, apply, with_copies, out_reply, out_error);
    if (apply) {
        announce(self);
    }
    if (err == EP_OK && (*out_reply)->applied) {
        uint64_t copies = 0, bytes = 0;
        for (size_t l = 0; l < (*out_reply)->n_layers; l++) {
            copies += (*out_reply)->layers[l]->copies_to_load;
            bytes += (*out_reply)->layers[l]->bytes_to_load;
        }
        ep_log(EP_LOG_INFO, "plan-applied", EP_KV(policy, (*out_reply)->policy),
               EP_KV(copies_to_load, copies), EP_KV(bytes_to_load, bytes));
    }
    pthread_mutex_unlock(&self->lock);
    return err;
}

bool ep_coordinator_service_balance(void *service, const char *model, const char *version,
                                    uint32_t layer, ep_coordinator_balance *out_balance)
{
    ep_coordinator_service *self = service;
    pthread_mutex_lock(&self->lock);
    const bool is_known =
        ep_coordinator_state_balance(self->cluster, model, version, layer, out_balance);
    pthread_mutex_unlock(&self->lock);
    return is_known;
}

void ep_coordinator_service_stop(ep_coordinator_service *self)
{
    pthread_mutex_lock(&self->lock);
    self->stopping = true;
    pthread_mutex_unlock(&self->lock);
}

void ep_coordinator_service_watch(ep_coordinator_service *self, const ep_pool_watch *pool,
                                  ep_tls_watch *tls)
{
    self->pool_watch = pool;
    self->tls_watch = tls;
}

ep_health *ep_coordinator_service_judge(ep_coordinator_service *self)
{
    status_parts parts;
    pthread_mutex_lock(&self->lock);
    bool good = status_init(self, &parts);
    pthread_mutex_unlock(&self->lock);
    ep_health *health = good ? parts.health : NULL;
    parts.health = good ? NULL : parts.health;
    status_fini(&parts);
    return health;
}

ep_routing_table *ep_coordinator_service_table(ep_coordinator_service *self)
{
    pthread_mutex_lock(&self->lock);
    ep_routing_table *table = self->served != NULL ? ep_routing_table_ref(self->served) : NULL;
    pthread_mutex_unlock(&self->lock);
    return table;
}

void ep_coordinator_service_read_stats(ep_coordinator_service *self,
                                       ep_coordinator_stats *out_stats)
{
    Expertd__V1__NodeEntry entry;
    pthread_mutex_lock(&self->lock);
    *out_stats = self->stats;
    out_stats->epoch = self->served != NULL ? self->served->epoch : (ep_epoch){0};
    for (size_t i = 0; ep_coordinator_state_node(self->cluster, i, 0, &entry); i++) {
        bool away = strcmp(entry.state, "suspect") == 0 || strcmp(entry.state, "draining") == 0 ||
                    strcmp(entry.state, "drained") == 0;
        out_stats->nodes_listed += !away;
    }
    pthread_mutex_unlock(&self->lock);
}
