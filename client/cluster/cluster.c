/* SPDX-License-Identifier: Apache-2.0 */
/* Installs tables: refuses old epochs, attaches peers, pins numerics ids, and wakes waiters. */
#include "cluster/cluster.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "cluster/hello_table.h"
#include "cluster/numerics_pick.h"
#include "cluster/seed_refresh.h"
#include "transport/address.h"
#include "cluster/watch.h"

/* The numerics id that a (model, version) keeps for the client's life. */
typedef struct numerics_pin {
    char model[EP_MODEL_NAME_BYTES];
    char version[EP_VERSION_BYTES];
    char numerics[EP_NUMERICS_BYTES];
    struct numerics_pin *next;
} numerics_pin;

struct ep_cluster {
    ep_cluster_config config;
    ep_tls_config tls;
    ep_watch *watch;
    ep_peer_reaper reaper;
    ep_peer **seeds;          /* [client->node_urls_count] without a coordinator; references */
    ep_seed_refresh *refresh; /* asks the seeds for their models; NULL with a coordinator */
    /* held while a table is installed */
    pthread_mutex_t install_lock;
    numerics_pin *pins;
    uint64_t local_number;
    /* held only briefly; taken after install_lock */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    ep_view *view;
    ep_error last_error;
    uint64_t changes; /* counts changes, so that none between a check and a wait is missed */
    bool stopped;
};

/* ---- peers ---- */

static void broadcast(ep_cluster *cluster)
{
    pthread_mutex_lock(&cluster->lock);
    cluster->changes++;
    pthread_cond_broadcast(&cluster->changed);
    pthread_mutex_unlock(&cluster->lock);
    cluster->config.on_change(cluster->config.arg);
}

static bool is_any(const ep_cluster *cluster)
{
    return cluster->config.client->numerics != NULL &&
           strcmp(cluster->config.client->numerics, "any") == 0;
}

static ep_err install(void *arg, ep_routing_table *taken_table, ep_error *out_error);

/* Keeps an error for callers that find no table. */
static void report(void *arg, const ep_error *error)
{
    ep_cluster *cluster = arg;
    pthread_mutex_lock(&cluster->lock);
    cluster->last_error = *error;
    pthread_mutex_unlock(&cluster->lock);
}

/* Makes a new table of all Hellos so far. */
static ep_err install_from_hellos(ep_cluster *cluster, ep_error *out_error)
{
    size_t count = cluster->config.client->node_urls_count;
    ep_hello_source *sources = calloc(count, sizeof(*sources));
    ep_routing_table *table = NULL;
    uint32_t known = 0;
    if (sources == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for %zu nodes", count);
    }
    pthread_mutex_lock(&cluster->install_lock);
    for (size_t i = 0; cluster->seeds != NULL && i < count; i++) {
        ep_peer *seed = cluster->seeds[i];
        if (seed != NULL && seed->hello != NULL) {
            sources[known++] = (ep_hello_source){seed->url, seed->hello};
        }
    }
    ep_err err = EP_OK;
    if (known > 0) {
        err = ep_hello_table_build(sources, known, (ep_epoch){0, ++cluster->local_number}, &table,
                                   out_error);
    }
    pthread_mutex_unlock(&cluster->install_lock);
    free(sources);
    return table == NULL ? err : install(cluster, table, out_error);
}

static void install_known(ep_cluster *cluster)
{
    ep_error error;
    if (install_from_hellos(cluster, &error) != EP_OK) {
        report(cluster, &error);
    }
}

/* Replaces a node's Hello by a newer one and makes a new table of all Hellos. */
static void replace_hello(ep_cluster *cluster, ep_peer *peer, Expertd__V1__Hello *taken_hello)
{
    pthread_mutex_lock(&cluster->install_lock);
    Expertd__V1__Hello *old = peer->hello;
    peer->hello = taken_hello;
    if (taken_hello != NULL && peer->name[0] == 0) { /* set once, before any view has this peer */
        snprintf(peer->name, sizeof(peer->name), "%.*s", (int)sizeof(peer->name) - 1,
                 taken_hello->node);
    }
    pthread_mutex_unlock(&cluster->install_lock);
    if (old != NULL) {
        protobuf_c_message_free_unpacked(&old->base, NULL);
    }
    install_known(cluster);
}

static void on_peer_ready(void *arg, ep_peer *peer, ep_peer_class class_index,
                          const Expertd__V1__Hello *hello)
{
    ep_cluster *cluster = arg;
    if (cluster->config.client->coordinator_url == NULL && class_index == EP_PEER_DECODE &&
        hello != NULL) {
        replace_hello(cluster, peer,
                      (Expertd__V1__Hello *)(void *)ep_rpc_message_copy(&hello->base));
    }
    broadcast(cluster);
}

/* A target for packing that keeps only a digest (FNV-1a), so that comparing allocates nothing. */
typedef struct digest_sink {
    ProtobufCBuffer base;
    uint64_t digest;
} digest_sink;

static void digest_append(ProtobufCBuffer *buffer, size_t count, const uint8_t *bytes)
{
    digest_sink *sink = (digest_sink *)buffer;
    for (size_t i = 0; i < count; i++) {
        sink->digest = (sink->digest ^ bytes[i]) * 0x100000001b3ull;
    }
}

static uint64_t models_digest(Expertd__V1__ModelInfo **models, size_t count)
{
    digest_sink sink = {{digest_append}, 0xcbf29ce484222325ull};
    Expertd__V1__DescribeReply message = EXPERTD__V1__DESCRIBE_REPLY__INIT;
    message.models = models;
    message.n_models = count;
    expertd__v1__describe_reply__pack_to_buffer(&message, &sink.base);
    return sink.digest;
}

/* Install lock held. Whether a model with copies has no pin yet. */
static bool lacks_pin(const ep_cluster *cluster)
{
    const ep_view *view = cluster->view;
    for (uint32_t m = 0; view != NULL && !is_any(cluster) && m < view->table->models_count; m++) {
        if (view->pins[m][0] == 0 && ep_numerics_pick(view->table, m) != NULL) {
            return true;
        }
    }
    return false;
}

static void on_seed_models(void *arg, ep_peer *seed, const Expertd__V1__DescribeReply *reply)
{
    ep_cluster *cluster = arg;
    pthread_mutex_lock(&cluster->install_lock);
    Expertd__V1__Hello *hello = NULL;
    if (seed->hello != NULL && models_digest(seed->hello->models, seed->hello->n_models) !=
                                   models_digest(reply->models, reply->n_models)) {
        Expertd__V1__Hello now = *seed->hello;
        now.models = reply->models;
        now.n_models = reply->n_models;
        hello = (Expertd__V1__Hello *)(void *)ep_rpc_message_copy(&now.base);
    }
    /* a node that could not be reached is not waited for any more */
    const bool retries = hello == NULL && lacks_pin(cluster);
    pthread_mutex_unlock(&cluster->install_lock);
    if (hello != NULL) {
        replace_hello(cluster, seed, hello);
        broadcast(cluster);
    } else if (retries) {
        install_known(cluster);
    }
}

static void on_peer_unused(void *arg, ep_peer *peer)
{
    ep_cluster *cluster = arg;
    ep_peer_reaper_add(&cluster->reaper, peer);
}

/* The lane refuses addresses that must not be dialled. Without TLS the program has chosen to show
 * its token in plain text. */
static ep_lane_address address_of(const ep_cluster *cluster, const char *url)
{
    ep_lane_address address;
    (void)ep_address_for_dial(url, &cluster->tls, false, &address, NULL);
    return address;
}

static ep_peer_config peer_config(ep_cluster *cluster, const char *name, const char *url)
{
    return (ep_peer_config){.common = cluster->config.common,
                            .address = address_of(cluster, url),
                            .name = name,
                            .allows_shm = cluster->config.client->lanes == NULL ||
                                          strcmp(cluster->config.client->lanes, "stream") != 0,
                            .on_ready = on_peer_ready,
                            .on_unused = on_peer_unused,
                            .arg = cluster,
                            .late_replies = cluster->config.late_replies};
}

/* ---- tables ---- */

static ep_peer *find_peer(const ep_cluster *cluster, const ep_view *old,
                          const ep_routing_node *node)
{
    for (size_t i = 0; cluster->seeds != NULL && i < cluster->config.client->node_urls_count; i++) {
        if (cluster->seeds[i] != NULL && strcmp(cluster->seeds[i]->url, node->url) == 0) {
            return cluster->seeds[i];
        }
    }
    for (uint32_t n = 0; old != NULL && n < old->table->nodes_count; n++) {
        if (!old->peers[n]->refused && strcmp(old->peers[n]->name, node->name) == 0 &&
            strcmp(old->peers[n]->url, node->url) == 0) {
            return old->peers[n];
        }
    }
    return NULL;
}

/* A node whose URL this client cannot use becomes a refused peer; the other nodes can be used. */
static ep_err create_table_peer(ep_cluster *cluster, const ep_routing_node *node,
                                ep_peer **out_peer, ep_error *out_error)
{
    ep_error why;
    ep_peer_config config = peer_config(cluster, node->name, node->url);
    ep_err err = ep_peer_create(&config, out_peer, &why);
    if (err == EP_OK) {
        return EP_OK;
    }
    if (err == EP_ERR_NO_MEMORY) {
        return ep_error_set(out_error, err, "no memory for node %s", node->url);
    }
    return ep_peer_create_refused(&config, &why, out_peer, out_error);
}

/* Nodes that are in both tables keep their peer and its connections. */
static ep_err attach_peers(ep_cluster *cluster, const ep_view *old, ep_view *view,
                           ep_error *out_error)
{
    for (uint32_t n = 0; n < view->table->nodes_count; n++) {
        const ep_routing_node *node = &view->table->nodes[n];
        ep_peer *peer = find_peer(cluster, old, node);
        if (peer != NULL) {
            view->peers[n] = ep_peer_ref(peer);
            continue;
        }
        ep_err err = create_table_peer(cluster, node, &view->peers[n], out_error);
        if (err != EP_OK) {
            return err;
        }
    }
    return EP_OK;
}

/*
 * Whether the id may be pinned. Without a coordinator the first Hello must not decide alone: every
 * node must have sent one or failed, or those that have must hold the whole model.
 */
static bool may_pin(const ep_cluster *cluster, const ep_routing_table *table, uint32_t model_index,
                    const char *numerics)
{
    for (size_t i = 0; cluster->seeds != NULL && i < cluster->config.client->node_urls_count; i++) {
        if (cluster->seeds[i] != NULL && !ep_peer_was_tried(cluster->seeds[i])) {
            return ep_numerics_cover(table, model_index, numerics);
        }
    }
    return true;
}

/* *out_pin is "" as long as nothing can be pinned: no node is allowed then, and calls wait. */
static ep_err pin_numerics(ep_cluster *cluster, const ep_routing_table *table, uint32_t model_index,
                           const char **out_pin)
{
    const ep_routing_model *model = &table->models[model_index];
    const char *wanted = cluster->config.client->numerics;
    *out_pin = "";
    if (is_any(cluster)) {
        return EP_OK;
    }
    if (wanted != NULL) {
        *out_pin = wanted;
        return EP_OK;
    }
    for (const numerics_pin *pin = cluster->pins; pin != NULL; pin = pin->next) {
        if (strcmp(pin->model, model->name) == 0 && strcmp(pin->version, model->version) == 0) {
            *out_pin = pin->numerics;
            return EP_OK;
        }
    }
    const char *first = ep_numerics_pick(table, model_index);
    if (first == NULL || !may_pin(cluster, table, model_index, first)) {
        return EP_OK;
    }
    numerics_pin *pin = calloc(1, sizeof(*pin));
    if (pin == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    strcpy(pin->model, model->name);
    strcpy(pin->version, model->version);
    strcpy(pin->numerics, first);
    pin->next = cluster->pins;
    cluster->pins = pin;
    *out_pin = pin->numerics;
    return EP_OK;
}

static ep_err allow_nodes(ep_cluster *cluster, ep_view *view)
{
    const ep_routing_table *table = view->table;
    for (uint32_t m = 0; m < table->models_count; m++) {
        const ep_routing_model *model = &table->models[m];
        ep_err err = pin_numerics(cluster, table, m, &view->pins[m]);
        if (err != EP_OK) {
            return err;
        }
        for (uint32_t n = 0; n < table->nodes_count; n++) {
            uint32_t id = model->numerics_of_node != NULL ? model->numerics_of_node[n] : UINT32_MAX;
            bool serves = id < model->numerics_count;
            view->allowed[(size_t)m * table->nodes_count + n] =
                is_any(cluster) ? serves || model->numerics_of_node == NULL
                                : serves && strcmp(model->numerics[id], view->pins[m]) == 0;
        }
    }
    return EP_OK;
}

static ep_err make_view(ep_cluster *cluster, ep_routing_table *taken_table, const ep_view *old,
                        ep_view **out_view, ep_error *out_error)
{
    ep_view *view = NULL;
    ep_err err = ep_view_create(taken_table, &view);
    if (err == EP_OK) {
        err = allow_nodes(cluster, view);
    }
    if (err != EP_OK) {
        ep_error_set(out_error, err, "no memory for a routing table");
    } else {
        err = attach_peers(cluster, old, view, out_error);
    }
    if (err != EP_OK) {
        ep_view_unref(view);
        return err;
    }
    *out_view = view;
    return EP_OK;
}

static bool lists_copies(const ep_routing_table *table)
{
    for (uint32_t l = 0; l < table->layers_count; l++) {
        const ep_routing_layer *layer = &table->layers[l];
        if (layer->offsets[layer->shape.experts + layer->shape.shared_experts] > 0) {
            return true;
        }
    }
    return false;
}

static bool some_owner_answers(const ep_view *view)
{
    for (uint32_t l = 0; l < view->table->layers_count; l++) {
        const ep_routing_layer *layer = &view->table->layers[l];
        for (uint32_t i = 0; i < layer->offsets[layer->shape.experts + layer->shape.shared_experts];
             i++) {
            if (ep_peer_link_is_ready(&view->peers[layer->copies[i]]->links[EP_PEER_DECODE])) {
                return true;
            }
        }
    }
    return false;
}

/*
 * Whether to keep the old table: a coordinator that has just restarted, or has lost contact to
 * nodes that this client still reaches, publishes a table without copies. The old one serves as
 * long as its nodes answer. Each next table is judged anew.
 */
static bool keeps_old(const ep_view *old, const ep_routing_table *offered)
{
    return old != NULL && !lists_copies(offered) && some_owner_answers(old);
}

static ep_err install_locked(ep_cluster *cluster, ep_routing_table *taken_table,
                             ep_error *out_error)
{
    ep_view *old = cluster->view; /* safe: it changes only under install_lock */
    ep_view *view = NULL;
    if (old != NULL && ep_epoch_compare(taken_table->epoch, old->table->epoch) <= 0) {
        ep_epoch offered = taken_table->epoch;
        ep_epoch used = old->table->epoch;
        ep_routing_table_unref(taken_table);
        if (ep_epoch_compare(offered, used) == 0) {
            return EP_OK;
        }
        return ep_error_set(out_error, EP_ERR_STALE_EPOCH,
                            "epoch (%" PRIu64 ", %" PRIu64 ") was offered while (%" PRIu64
                            ", %" PRIu64 ") is in use",
                            offered.term, offered.number, used.term, used.number);
    }
    if (keeps_old(old, taken_table)) {
        ep_routing_table_unref(taken_table);
        return EP_OK;
    }
    ep_err err = make_view(cluster, taken_table, old, &view, out_error);
    if (err != EP_OK) {
        return err;
    }
    if (old != NULL) {
        ep_view_note_former(view, old);
    }
    pthread_mutex_lock(&cluster->lock);
    cluster->view = view;
    pthread_mutex_unlock(&cluster->lock);
    ep_view_unref(old);
    return EP_OK;
}

/* Takes ownership of the table in any case. A table that is not newer is ignored. */
static ep_err install(void *arg, ep_routing_table *taken_table, ep_error *out_error)
{
    ep_cluster *cluster = arg;
    pthread_mutex_lock(&cluster->install_lock);
    ep_err err = install_locked(cluster, taken_table, out_error);
    pthread_mutex_unlock(&cluster->install_lock);
    if (err == EP_OK) {
        broadcast(cluster);
    }
    return err;
}

ep_view *ep_cluster_acquire_view(ep_cluster *cluster)
{
    pthread_mutex_lock(&cluster->lock);
    ep_view *view = cluster->view != NULL ? ep_view_ref(cluster->view) : NULL;
    pthread_mutex_unlock(&cluster->lock);
    return view;
}

ep_err ep_cluster_current_view(ep_cluster *cluster, ep_view **out_view, ep_error *out_error)
{
    ep_view *view = ep_cluster_acquire_view(cluster);
    if (view == NULL) {
        return ep_error_set(out_error, EP_ERR_UNAVAILABLE,
                            "no routing table yet: ep_client_wait_ready waits for it");
    }
    *out_view = view;
    return EP_OK;
}

static ep_epoch epoch_of(void *arg)
{
    ep_cluster *cluster = arg;
    pthread_mutex_lock(&cluster->lock);
    ep_epoch epoch = cluster->view != NULL ? cluster->view->table->epoch : (ep_epoch){0, 0};
    pthread_mutex_unlock(&cluster->lock);
    return epoch;
}

/* ---- waiting ---- */

static bool expert_has_connected_copy(const ep_view *view, const ep_routing_layer *layer,
                                      uint32_t expert)
{
    for (uint32_t i = layer->offsets[expert]; i < layer->offsets[expert + 1]; i++) {
        uint32_t node = layer->copies[i];
        if (ep_view_allows(view, layer->model_index, node) &&
            ep_peer_link_is_ready(&view->peers[node]->links[EP_PEER_DECODE])) {
            return true;
        }
    }
    return false;
}

/* Whether every expert has a connected copy; if not, *out_missing names the first one. */
static bool all_experts_connected(const ep_view *view, ep_error *out_missing)
{
    for (uint32_t l = 0; l < view->table->layers_count; l++) {
        const ep_routing_layer *layer = &view->table->layers[l];
        for (uint32_t e = 0; e < layer->shape.experts + layer->shape.shared_experts; e++) {
            if (!expert_has_connected_copy(view, layer, e)) {
                ep_error_set(out_missing, EP_ERR_UNAVAILABLE,
                             "no connected node holds expert %" PRIu32 " of layer %" PRIu32
                             " of model %s",
                             e, layer->shape.layer, view->table->models[layer->model_index].name);
                return false;
            }
        }
    }
    return true;
}

static bool model_is_connected(ep_view *view, uint32_t model_index, ep_error *out_missing)
{
    const ep_routing_model *model = &view->table->models[model_index];
    if (!ep_view_has_numerics(view, model_index, out_missing)) {
        return false;
    }
    /* A model without any copy has no pin. One connected node of it is enough here, so that it does
     * not keep other models waiting. */
    const bool is_loading = view->pins[model_index][0] == 0 && model->numerics_of_node != NULL &&
                            ep_numerics_pick(view->table, model_index) == NULL;
    char last[256] = "no node serves it";
    for (uint32_t n = 0; n < view->table->nodes_count; n++) {
        const bool serves = ep_view_allows(view, model_index, n) ||
                            (is_loading && model->numerics_of_node[n] < model->numerics_count);
        if (!serves) {
            continue;
        }
        if (ep_peer_link_is_ready(&view->peers[n]->links[EP_PEER_DECODE])) {
            return true;
        }
        ep_peer_link_describe(&view->peers[n]->links[EP_PEER_DECODE], ep_clock_now_ns(), last,
                              sizeof(last));
    }
    ep_error_set(out_missing, EP_ERR_UNAVAILABLE, "no node of model %s is connected: %s",
                 model->name, last);
    return false;
}

/* Without a coordinator: whether all given nodes have sent Hellos, or those that have hold all
 * experts. */
static bool seeds_are_heard(ep_cluster *cluster, ep_view *view, ep_error *out_missing)
{
    for (size_t i = 0; i < cluster->config.client->node_urls_count; i++) {
        ep_peer *seed = cluster->seeds[i];
        if (__atomic_load_n(&seed->heard_ns, __ATOMIC_RELAXED) != 0) {
            continue;
        }
        if (view != NULL && view->table->layers_count > 0 &&
            all_experts_connected(view, out_missing)) {
            return true;
        }
        char why[256];
        ep_peer_link_describe(&seed->links[EP_PEER_DECODE], ep_clock_now_ns(), why, sizeof(why));
        ep_error_set(out_missing, EP_ERR_UNAVAILABLE, "node %s: %s", seed->url, why);
        return false;
    }
    return true;
}

/* The reason why there is no table. */
static void read_last_error(ep_cluster *cluster, ep_error *out_error)
{
    const ep_client_config *client = cluster->config.client;
    pthread_mutex_lock(&cluster->lock);
    *out_error = cluster->last_error;
    pthread_mutex_unlock(&cluster->lock);
    if (out_error->code == EP_OK) {
        ep_error_set(out_error, EP_ERR_UNAVAILABLE, "nothing was heard from %s yet",
                     client->coordinator_url != NULL ? client->coordinator_url
                                                     : client->node_urls[0]);
    }
}

static bool is_ready(ep_cluster *cluster, ep_error *out_missing)
{
    ep_view *view = ep_cluster_acquire_view(cluster);
    bool ready = cluster->seeds == NULL || seeds_are_heard(cluster, view, out_missing);
    if (ready && view == NULL) {
        read_last_error(cluster, out_missing);
        ready = false;
    }
    for (uint32_t m = 0; ready && m < view->table->models_count; m++) {
        ready = model_is_connected(view, m, out_missing);
    }
    ep_view_unref(view);
    return ready;
}

static bool has_view(ep_cluster *cluster, ep_error *out_missing)
{
    ep_view *view = ep_cluster_acquire_view(cluster);
    bool has = view != NULL;
    ep_view_unref(view);
    if (!has) {
        read_last_error(cluster, out_missing);
    }
    return has;
}

/* Waits until something has changed since `seen`, or until the deadline. */
static ep_err wait_change(ep_cluster *cluster, uint64_t seen, uint64_t deadline_ns)
{
    bool in_time = true;
    pthread_mutex_lock(&cluster->lock);
    while (cluster->changes == seen && !cluster->stopped && in_time) {
        in_time = ep_clock_wait(&cluster->changed, &cluster->lock, deadline_ns);
    }
    ep_err err = cluster->stopped ? EP_ERR_CLOSED : in_time ? EP_OK : EP_ERR_DEADLINE_EXCEEDED;
    pthread_mutex_unlock(&cluster->lock);
    return err;
}

static ep_err wait_for(ep_cluster *cluster, bool (*condition)(ep_cluster *, ep_error *),
                       uint64_t deadline_ns, ep_error *out_missing)
{
    for (;;) {
        pthread_mutex_lock(&cluster->lock);
        uint64_t seen = cluster->changes;
        pthread_mutex_unlock(&cluster->lock);
        if (condition(cluster, out_missing)) {
            return EP_OK;
        }
        ep_err err = wait_change(cluster, seen, deadline_ns);
        if (err == EP_ERR_DEADLINE_EXCEEDED) {
            /* once more, for the newest report */
            return condition(cluster, out_missing) ? EP_OK : err;
        }
        if (err != EP_OK) {
            return err;
        }
    }
}

static ep_err report_wait(ep_err err, const char *what, const ep_error *missing,
                          ep_error *out_error)
{
    if (err == EP_ERR_CLOSED) {
        return ep_error_set(out_error, err, "the client is being destroyed");
    }
    if (err != EP_OK) {
        return ep_error_set(out_error, err, "%s; last report: %.400s", what,
                            missing->text[0] != 0 ? missing->text : "none");
    }
    return EP_OK;
}

ep_err ep_cluster_wait_view(ep_cluster *cluster, uint64_t deadline_ns, ep_view **out_view,
                            ep_error *out_error)
{
    ep_error missing;
    ep_view *view;
    ep_error_clear(&missing);
    while ((view = ep_cluster_acquire_view(cluster)) == NULL) {
        ep_err err = wait_for(cluster, has_view, deadline_ns, &missing);
        if (err != EP_OK) {
            return report_wait(err == EP_ERR_DEADLINE_EXCEEDED ? EP_ERR_UNAVAILABLE : err,
                               "no routing table yet", &missing, out_error);
        }
    }
    *out_view = view;
    return EP_OK;
}

ep_err ep_cluster_wait_ready(ep_cluster *cluster, uint64_t deadline_ns, ep_error *out_error)
{
    ep_error missing;
    ep_error_clear(&missing);
    return report_wait(wait_for(cluster, is_ready, deadline_ns, &missing),
                       "the service is not ready", &missing, out_error);
}

void ep_cluster_stop_waits(ep_cluster *cluster)
{
    pthread_mutex_lock(&cluster->lock);
    cluster->stopped = true;
    pthread_cond_broadcast(&cluster->changed);
    pthread_mutex_unlock(&cluster->lock);
}

/* ---- life ---- */

/*
 * Makes the peers without a lock, since one that fails waits for its callbacks, which take
 * install_lock. A node that answers before the list is complete only leaves its Hello; these are
 * installed at the end.
 */
static ep_err create_seeds(ep_cluster *cluster, ep_error *out_error)
{
    const ep_client_config *client = cluster->config.client;
    ep_peer **seeds = calloc(client->node_urls_count, sizeof(*seeds));
    if (seeds == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for %zu nodes",
                            client->node_urls_count);
    }
    ep_err err = EP_OK;
    for (size_t i = 0; i < client->node_urls_count && err == EP_OK; i++) {
        ep_peer_config config = peer_config(cluster, "", client->node_urls[i]);
        err = ep_peer_create(&config, &seeds[i], out_error);
        if (err != EP_OK) {
            ep_error_prefix(out_error, err, "node_urls[%zu]", i);
        }
    }
    pthread_mutex_lock(&cluster->install_lock);
    cluster->seeds = seeds; /* also after a failure: ep_cluster_destroy frees them */
    pthread_mutex_unlock(&cluster->install_lock);
    if (err == EP_OK) {
        install_known(cluster);
    }
    return err;
}

static ep_err start_refresh(ep_cluster *cluster, ep_error *out_error)
{
    ep_seed_refresh_config config = {.timers = cluster->config.common.timers,
                                     .seeds = cluster->seeds,
                                     .seeds_count = cluster->config.client->node_urls_count,
                                     .on_models = on_seed_models,
                                     .arg = cluster};
    ep_err err = ep_seed_refresh_create(&config, &cluster->refresh);
    return err == EP_OK ? EP_OK : ep_error_set(out_error, err, "no memory for a client");
}

ep_err ep_cluster_create(const ep_cluster_config *config, ep_cluster **out_cluster,
                         ep_error *out_error)
{
    ep_cluster *cluster = calloc(1, sizeof(*cluster));
    if (cluster == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a client");
    }
    const ep_client_config *client = config->client;
    cluster->config = *config;
    cluster->tls = (ep_tls_config){.ca_file = client->tls_ca_file,
                                   .cert_key_file = client->tls_cert_key_file,
                                   .server_name = client->tls_server_name};
    ep_error_clear(&cluster->last_error);
    pthread_cond_init(&cluster->changed, NULL);
    pthread_mutex_init(&cluster->lock, NULL);
    pthread_mutex_init(&cluster->install_lock, NULL);
    ep_peer_reaper_init(&cluster->reaper);
    ep_err err;
    if (client->coordinator_url != NULL) {
        ep_lane_address address = address_of(cluster, client->coordinator_url);
        const ep_watch_config watch = {.common = &config->common,
                                       .coordinator = &address,
                                       .install = install,
                                       .epoch = epoch_of,
                                       .report = report,
                                       .arg = cluster};
        err = ep_watch_create(&watch, &cluster->watch, out_error);
        if (err != EP_OK) {
            ep_error_prefix(out_error, err, "coordinator_url");
        }
    } else {
        err = create_seeds(cluster, out_error);
        err = err == EP_OK ? start_refresh(cluster, out_error) : err;
    }
    if (err != EP_OK) {
        ep_cluster_destroy(cluster);
        return err;
    }
    *out_cluster = cluster;
    return EP_OK;
}

void ep_cluster_destroy(ep_cluster *cluster)
{
    if (cluster == NULL) {
        return;
    }
    ep_watch_destroy(cluster->watch); /* no tables come after this */
    cluster->watch = NULL;
    ep_seed_refresh_stop(cluster->refresh);
    ep_view *view = ep_cluster_acquire_view(cluster);
    for (uint32_t n = 0; view != NULL && n < view->table->nodes_count; n++) {
        ep_peer_close(view->peers[n]);
    }
    ep_view_unref(view);
    for (size_t i = 0; cluster->seeds != NULL && i < cluster->config.client->node_urls_count; i++) {
        ep_peer_close(cluster->seeds[i]);
    }
    for (size_t i = 0; cluster->seeds != NULL && i < cluster->config.client->node_urls_count; i++) {
        ep_peer_unref(cluster->seeds[i]);
    }
    ep_view_unref(cluster->view);
    ep_peer_reaper_fini(&cluster->reaper);
    ep_seed_refresh_destroy(cluster->refresh);
    while (cluster->pins != NULL) {
        numerics_pin *next = cluster->pins->next;
        free(cluster->pins);
        cluster->pins = next;
    }
    free(cluster->seeds);
    pthread_mutex_destroy(&cluster->install_lock);
    pthread_mutex_destroy(&cluster->lock);
    pthread_cond_destroy(&cluster->changed);
    free(cluster);
}
