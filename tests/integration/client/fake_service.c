/* SPDX-License-Identifier: Apache-2.0 */
/* Fake nodes and coordinator; see fake_service.h. */
#include "fake_service.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/numeric.h"
#include "base/random.h"
#include "coordinator.pb-c.h"
#include "expert.pb-c.h"
#include "moe/convert.h"
#include "moe/quantize.h"
#include "wire/forward_codec.h"
#include "wire/placement_codec.h"

#define OWNED_MAX 4096

static void must(ep_err err, const ep_error *error, const char *what)
{
    if (err != EP_OK) {
        fprintf(stderr, "%s: %s: %s\n", what, ep_err_name(err), error != NULL ? error->text : "");
        abort();
    }
}

void fake_expert(uint32_t expert, const float *x, uint32_t hidden, ep_dtype dtype, void *out)
{
    float *y = malloc(hidden * sizeof(*y));
    float scale = 0.5f + (float)expert / 8.0f;
    for (uint32_t h = 0; h < hidden; h++) {
        float first = x[h] * scale;
        float second = x[(h + expert + 1) % hidden] * 0.25f;
        y[h] = first + second;
    }
    ep_row_narrow(y, hidden, dtype, out);
    free(y);
}

/* ---- a node ---- */

typedef struct job {
    struct fake_node *node;
    ep_rpc_call *call;
    const Expertd__V1__ForwardRequest *in;
    Expertd__V1__ForwardReply_Closure closure;
    bool held;
    bool let_go; /* out of turn: not held again */
    bool cancelled;
    struct job *next;
} job;

struct fake_node {
    Expertd__V1__ExpertService_Service service; /* first */
    fake_node_config config;
    char name[64];
    char url[256];
    ep_timer_service *timers;
    ep_buffer_pool *pool;
    ep_rpc_server *server;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    job *ready;
    job *held;
    bool stopping;
    fake_fault fault;
    ep_err error_code;
    uint64_t retry_after_us;
    uint32_t owned[OWNED_MAX];
    size_t owned_count;
    uint64_t requests;
    uint64_t cancelled;
    ep_epoch last_epoch;
    bool last_prefill;
    char last_tenant[64];
};

static bool owns(const fake_node *node, uint32_t expert)
{
    for (size_t i = 0; i < node->owned_count; i++) {
        if (node->owned[i] == expert) {
            return true;
        }
    }
    return false;
}

static void finish_error(job *j, ep_err code, const char *text, int32_t expert,
                         uint64_t retry_after_us)
{
    ep_error error;
    ep_error_set(&error, code, "%s", text);
    error.expert = expert;
    error.retry_after_us = retry_after_us;
    snprintf(error.node, sizeof(error.node), "%s", j->node->name);
    ep_rpc_call_finish(j->call, code, &error);
}

static float *row_of(const ep_forward_view *view, uint32_t row, float *x)
{
    const uint8_t *at = view->x + (size_t)row * view->x_row_bytes;
    if (view->x_dtype == EP_DTYPE_I8) {
        for (uint32_t h = 0; h < view->hidden; h++) {
            x[h] = (float)((const int8_t *)at)[h] * view->row_scales[row];
        }
    } else {
        ep_row_widen(at, view->x_dtype, view->hidden, x);
    }
    return x;
}

static bool check_owned(job *j, const ep_forward_view *view)
{
    for (uint32_t s = 0; s < view->slots; s++) {
        uint32_t expert = view->wire_slots[s].expert;
        pthread_mutex_lock(&j->node->lock);
        bool owned = owns(j->node, expert);
        pthread_mutex_unlock(&j->node->lock);
        if (!owned) {
            finish_error(j, EP_ERR_NOT_OWNER, "not mine", (int32_t)expert, 0);
            return false;
        }
    }
    return true;
}

static void compute(job *j, const ep_forward_view *view, fake_fault fault)
{
    ep_buffer *tensors = NULL;
    uint32_t slots = view->slots - (fault == FAKE_SHORT_REPLY ? 1 : 0);
    ep_reply_layout at;
    ep_reply_layout_make(slots, view->hidden, view->reply_dtype, view->reply_quant, &at);
    float *x = malloc(view->hidden * sizeof(*x));
    uint8_t *plain = malloc(view->hidden * ep_dtype_bytes(view->reply_dtype));
    must(ep_buffer_acquire(ep_rpc_call_incoming(j->call)->pool, at.total_bytes + 1, &tensors), NULL,
         "reply buffer");
    memset(tensors->data, 0, at.total_bytes);
    tensors->bytes = at.total_bytes - (fault == FAKE_WRONG_BYTES ? at.row_bytes : 0);
    for (uint32_t s = 0; s < slots; s++) {
        float *row = row_of(view, view->wire_slots[s].row, x);
        for (uint32_t h = 0; view->weight_on_input && h < view->hidden; h++) {
            row[h] = row[h] * view->slot_scales[s];
        }
        uint8_t *to = tensors->data + s * at.row_bytes;
        fake_expert(view->wire_slots[s].expert, row, view->hidden, view->reply_dtype,
                    at.scale_row_bytes == 0 ? to : plain);
        if (at.scale_row_bytes != 0) {
            ep_row_quantize_i8_blocks(plain, view->reply_dtype, view->hidden, (int8_t *)to,
                                      tensors->data + at.scales_offset + s * at.scale_row_bytes);
        }
    }
    free(plain);
    free(x);
    Expertd__V1__ForwardReply reply = EXPERTD__V1__FORWARD_REPLY__INIT;
    reply.slots = slots;
    reply.hidden = view->hidden + (fault == FAKE_WRONG_HIDDEN ? 1 : 0);
    reply.dtype = fault == FAKE_WRONG_DTYPE ? EP_DTYPE_I32 : view->reply_dtype;
    reply.numerics =
        (char *)(uintptr_t)(fault == FAKE_WRONG_NUMERICS ? "other" : j->node->config.numerics);
    ep_rpc_call_attach(j->call, tensors);
    j->closure(&reply, j->call);
    ep_rpc_call_finish(j->call, EP_OK, NULL);
}

static void answer(job *j, fake_fault fault, ep_err code, uint64_t retry_after_us)
{
    ep_forward_view view;
    ep_error error;
    const ep_rpc_incoming *asked = ep_rpc_call_incoming(j->call);
    if (ep_rpc_call_is_cancelled(j->call)) {
        finish_error(j, EP_ERR_CANCELLED, "the caller went away", -1, 0);
        return;
    }
    if (fault == FAKE_ERROR) {
        finish_error(j, code, "told to fail", -1, retry_after_us);
        return;
    }
    ep_err err = ep_forward_view_make(j->in, asked->tensors, asked->tensor_bytes,
                                      &j->node->config.shape, &view, &error);
    if (err != EP_OK) {
        finish_error(j, err, error.text, -1, 0);
    } else if (check_owned(j, &view)) {
        compute(j, &view, fault);
    }
}

static void *node_main(void *arg)
{
    fake_node *node = arg;
    pthread_mutex_lock(&node->lock);
    while (!node->stopping || node->ready != NULL) {
        job *j = node->ready;
        if (j == NULL) {
            pthread_cond_wait(&node->changed, &node->lock);
            continue;
        }
        node->ready = j->next;
        fake_fault fault = node->fault;
        ep_err code = node->error_code;
        uint64_t retry_after_us = node->retry_after_us;
        if (fault == FAKE_HANG && !j->cancelled && !j->let_go) {
            j->held = true;
            j->next = node->held;
            node->held = j;
            pthread_cond_broadcast(&node->changed);
            continue;
        }
        if (fault == FAKE_ERROR_ONCE) {
            node->fault = FAKE_OK;
            fault = FAKE_ERROR;
        }
        pthread_mutex_unlock(&node->lock);
        answer(j, fault, code, retry_after_us);
        free(j);
        pthread_mutex_lock(&node->lock);
        pthread_cond_broadcast(&node->changed);
    }
    pthread_mutex_unlock(&node->lock);
    return NULL;
}

static void unlink_held(fake_node *node, job *j)
{
    for (job **at = &node->held; *at != NULL; at = &(*at)->next) {
        if (*at == j) {
            *at = j->next;
            j->held = false;
            return;
        }
    }
}

static void push_ready(fake_node *node, job *j)
{
    job **at = &node->ready;
    while (*at != NULL) {
        at = &(*at)->next;
    }
    j->next = NULL;
    *at = j;
    pthread_cond_broadcast(&node->changed);
}

/* The rpc layer waits for this before finish returns, so the job is alive; it is finished by the
 * node's thread. */
static void on_cancel(void *arg, ep_rpc_call *call)
{
    job *j = arg;
    fake_node *node = j->node;
    (void)call;
    pthread_mutex_lock(&node->lock);
    j->cancelled = true;
    node->cancelled++;
    if (j->held) {
        unlink_held(node, j);
        push_ready(node, j);
    }
    pthread_cond_broadcast(&node->changed);
    pthread_mutex_unlock(&node->lock);
}

static void forward(Expertd__V1__ExpertService_Service *service,
                    const Expertd__V1__ForwardRequest *in,
                    Expertd__V1__ForwardReply_Closure closure, void *closure_data)
{
    fake_node *node = (fake_node *)(void *)service;
    job *j = calloc(1, sizeof(*j));
    *j = (job){.node = node, .call = closure_data, .in = in, .closure = closure};
    const char *tenant = ep_rpc_call_metadata(j->call, "tenant");
    ep_rpc_call_on_cancel(j->call, on_cancel, j);
    pthread_mutex_lock(&node->lock);
    node->requests++;
    node->last_epoch =
        in->epoch != NULL ? (ep_epoch){in->epoch->term, in->epoch->number} : (ep_epoch){0, 0};
    node->last_prefill = in->prefill;
    snprintf(node->last_tenant, sizeof(node->last_tenant), "%s", tenant != NULL ? tenant : "");
    push_ready(node, j);
    pthread_mutex_unlock(&node->lock);
}

static void hello_fill(void *arg, Expertd__V1__Hello *hello);
static void hello_free(void *arg, Expertd__V1__Hello *hello);

static void describe(Expertd__V1__ExpertService_Service *service, const Expertd__V1__Empty *in,
                     Expertd__V1__DescribeReply_Closure closure, void *closure_data)
{
    fake_node *node = (fake_node *)(void *)service;
    Expertd__V1__Hello hello = EXPERTD__V1__HELLO__INIT;
    Expertd__V1__DescribeReply reply = EXPERTD__V1__DESCRIBE_REPLY__INIT;
    (void)in;
    hello_fill(node, &hello);
    reply.models = hello.models;
    reply.n_models = hello.n_models;
    closure(&reply, closure_data);
    hello_free(node, &hello);
    ep_rpc_call_finish(closure_data, EP_OK, NULL);
}

static void hello_fill(void *arg, Expertd__V1__Hello *hello)
{
    fake_node *node = arg;
    Expertd__V1__ModelInfo *model = calloc(1, sizeof(*model));
    Expertd__V1__LayerInfo *layer = calloc(1, sizeof(*layer));
    expertd__v1__model_info__init(model);
    expertd__v1__layer_info__init(layer);
    hello->models = calloc(1, sizeof(*hello->models));
    hello->models[0] = model;
    hello->n_models = 1;
    model->layers = calloc(1, sizeof(*model->layers));
    model->layers[0] = layer;
    model->n_layers = 1;
    model->name = (char *)(uintptr_t)FAKE_MODEL;
    model->version = (char *)(uintptr_t)FAKE_VERSION;
    model->config_hash = (char *)(uintptr_t) "hash";
    model->numerics = (char *)(uintptr_t)node->config.numerics;
    layer->layer = node->config.shape.layer;
    layer->hidden = node->config.shape.hidden;
    layer->inner = node->config.shape.inner;
    layer->experts = node->config.shape.experts;
    layer->shared_experts = node->config.shape.shared_experts;
    layer->top_k = node->config.shape.top_k;
    pthread_mutex_lock(&node->lock);
    layer->owned = calloc(node->owned_count + 1, sizeof(*layer->owned));
    memcpy(layer->owned, node->owned, node->owned_count * sizeof(*layer->owned));
    layer->n_owned = node->owned_count;
    pthread_mutex_unlock(&node->lock);
}

static void hello_free(void *arg, Expertd__V1__Hello *hello)
{
    (void)arg;
    free(hello->models[0]->layers[0]->owned);
    free(hello->models[0]->layers[0]);
    free(hello->models[0]->layers);
    free(hello->models[0]);
    free(hello->models);
    hello->models = NULL;
    hello->n_models = 0;
}

static ep_rpc_server *start_server(const char *name, const char *role, ep_timer_service *timers,
                                   ep_buffer_pool *pool, ProtobufCService *service, void *hello_arg,
                                   const char *url, char out_url[256])
{
    ep_error error;
    ep_rpc_server *server = NULL;
    ep_rpc_server_config config = {.common = {.timers = timers,
                                              .pool = pool,
                                              .token = "",
                                              .node = name,
                                              .role = role,
                                              .incarnation = ep_random_id(),
                                              .payload_crc = true},
                                   .hello_fill = hello_arg != NULL ? hello_fill : NULL,
                                   .hello_free = hello_arg != NULL ? hello_free : NULL,
                                   .arg = hello_arg};
    ep_rpc_limits_default(&config.common.limits);
    must(ep_rpc_server_create(&config, &server, &error), &error, "server");
    must(ep_rpc_server_add_service(server, service, &error), &error, "service");
    must(ep_rpc_server_listen(server, &(ep_lane_address){.url = url}, EP_ROLES_MAIN, &error),
         &error, "listen");
    ep_rpc_server_url(server, 0, out_url, 256);
    ep_rpc_server_set_state(server, "serving");
    return server;
}

fake_node *fake_node_start(const fake_node_config *config)
{
    fake_node *node = calloc(1, sizeof(*node));
    node->service = (Expertd__V1__ExpertService_Service)EXPERTD__V1__EXPERT_SERVICE__INIT();
    node->config = *config;
    if (node->config.numerics == NULL) {
        node->config.numerics = FAKE_NUMERICS;
    }
    snprintf(node->name, sizeof(node->name), "%s", config->name);
    fake_node_own(node, config->owned, config->owned_count);
    pthread_mutex_init(&node->lock, NULL);
    pthread_cond_init(&node->changed, NULL);
    must(ep_timer_service_create("fake-node", &node->timers), NULL, "timers");
    must(ep_buffer_pool_create(0, (size_t)64 << 20, &node->pool), NULL, "pool");
    pthread_create(&node->thread, NULL, node_main, node);
    node->server = start_server(node->name, "node", node->timers, node->pool, &node->service.base,
                                node, config->url, node->url);
    if (config->shm_url != NULL) {
        ep_error error;
        must(ep_rpc_server_listen(node->server, &(ep_lane_address){.url = config->shm_url},
                                  EP_ROLES_MAIN, &error),
             &error, "listen");
    }
    return node;
}

void fake_node_stop(fake_node *node)
{
    if (node == NULL) {
        return;
    }
    ep_rpc_server_destroy(node->server);
    pthread_mutex_lock(&node->lock);
    node->stopping = true;
    pthread_cond_broadcast(&node->changed);
    pthread_mutex_unlock(&node->lock);
    pthread_join(node->thread, NULL);
    ep_timer_service_destroy(node->timers);
    ep_buffer_pool_destroy(node->pool);
    pthread_mutex_destroy(&node->lock);
    pthread_cond_destroy(&node->changed);
    free(node);
}

const char *fake_node_url(fake_node *node)
{
    return node->url;
}

void fake_node_set_fault(fake_node *node, fake_fault fault, ep_err error_code,
                         uint64_t retry_after_us)
{
    pthread_mutex_lock(&node->lock);
    node->fault = fault;
    node->error_code = error_code;
    node->retry_after_us = retry_after_us;
    pthread_mutex_unlock(&node->lock);
}

void fake_node_release(fake_node *node)
{
    pthread_mutex_lock(&node->lock);
    node->fault = FAKE_OK;
    while (node->held != NULL) {
        job *j = node->held;
        unlink_held(node, j);
        push_ready(node, j);
    }
    pthread_cond_broadcast(&node->changed);
    pthread_mutex_unlock(&node->lock);
}

/* Lock held. */
static uint32_t held_count(const fake_node *node)
{
    uint32_t count = 0;
    for (const job *j = node->held; j != NULL; j = j->next) {
        count++;
    }
    return count;
}

void fake_node_answer_held(fake_node *node, uint32_t count, uint64_t *seed)
{
    pthread_mutex_lock(&node->lock);
    while (held_count(node) < count) {
        pthread_cond_wait(&node->changed, &node->lock);
    }
    for (uint32_t i = 0; i < count; i++) {
        job *j = node->held;
        for (uint64_t skip = ep_splitmix64(seed) % held_count(node); skip > 0; skip--) {
            j = j->next;
        }
        unlink_held(node, j);
        j->let_go = true;
        push_ready(node, j);
    }
    pthread_mutex_unlock(&node->lock);
}

void fake_node_wait_requests(fake_node *node, uint64_t count)
{
    pthread_mutex_lock(&node->lock);
    while (node->requests < count || node->ready != NULL) {
        pthread_cond_wait(&node->changed, &node->lock);
    }
    pthread_mutex_unlock(&node->lock);
}

static uint64_t read_locked(fake_node *node, const uint64_t *counter)
{
    pthread_mutex_lock(&node->lock);
    uint64_t value = *counter;
    pthread_mutex_unlock(&node->lock);
    return value;
}

uint64_t fake_node_requests(fake_node *node)
{
    return read_locked(node, &node->requests);
}

void fake_node_wait_held(fake_node *node)
{
    pthread_mutex_lock(&node->lock);
    while (node->held == NULL) {
        pthread_cond_wait(&node->changed, &node->lock);
    }
    pthread_mutex_unlock(&node->lock);
}

void fake_node_wait_cancelled(fake_node *node, uint64_t count)
{
    pthread_mutex_lock(&node->lock);
    while (node->cancelled < count) {
        pthread_cond_wait(&node->changed, &node->lock);
    }
    pthread_mutex_unlock(&node->lock);
}

void fake_node_own(fake_node *node, const uint32_t *owned, size_t owned_count)
{
    pthread_mutex_lock(&node->lock);
    memcpy(node->owned, owned, owned_count * sizeof(*owned));
    node->owned_count = owned_count;
    pthread_mutex_unlock(&node->lock);
}

void fake_node_last(fake_node *node, ep_epoch *out_epoch, bool *out_prefill, char out_tenant[64])
{
    pthread_mutex_lock(&node->lock);
    *out_epoch = node->last_epoch;
    *out_prefill = node->last_prefill;
    memcpy(out_tenant, node->last_tenant, sizeof(node->last_tenant));
    pthread_mutex_unlock(&node->lock);
}

/* ---- a coordinator ---- */

typedef struct watcher {
    fake_coordinator *coordinator;
    ep_rpc_call *call;
    Expertd__V1__PlacementSnapshot_Closure closure;
    bool cancelled;
    struct watcher *next;
} watcher;

struct fake_coordinator {
    Expertd__V1__Coordinator_Service service; /* first */
    char url[256];
    ep_timer_service *timers;
    ep_buffer_pool *pool;
    ep_rpc_server *server;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool stopping;
    watcher *watchers;
    Expertd__V1__PlacementSnapshot *snapshot;
};

static void watcher_cancelled(void *arg, ep_rpc_call *call)
{
    watcher *w = arg;
    (void)call;
    pthread_mutex_lock(&w->coordinator->lock);
    w->cancelled = true;
    pthread_cond_broadcast(&w->coordinator->changed);
    pthread_mutex_unlock(&w->coordinator->lock);
}

static void watch_placement(Expertd__V1__Coordinator_Service *service,
                            const Expertd__V1__WatchPlacementRequest *in,
                            Expertd__V1__PlacementSnapshot_Closure closure, void *closure_data)
{
    fake_coordinator *coordinator = (fake_coordinator *)(void *)service;
    watcher *w = calloc(1, sizeof(*w));
    (void)in;
    *w = (watcher){.coordinator = coordinator, .call = closure_data, .closure = closure};
    ep_rpc_call_on_cancel(w->call, watcher_cancelled, w);
    pthread_mutex_lock(&coordinator->lock);
    w->next = coordinator->watchers;
    coordinator->watchers = w;
    if (coordinator->snapshot != NULL) {
        closure(coordinator->snapshot, w->call);
    }
    pthread_mutex_unlock(&coordinator->lock);
}

/* Clients call none of these. */
#define REFUSED(method, request, reply_closure)                                                    \
    static void method(Expertd__V1__Coordinator_Service *service, const request *in,               \
                       reply_closure closure, void *closure_data)                                  \
    {                                                                                              \
        (void)service;                                                                             \
        (void)in;                                                                                  \
        (void)closure;                                                                             \
        ep_rpc_call_finish(closure_data, EP_ERR_UNIMPLEMENTED, NULL);                              \
    }
REFUSED(register_node, Expertd__V1__RegisterRequest, Expertd__V1__RegisterReply_Closure)
REFUSED(heartbeat, Expertd__V1__HeartbeatRequest, Expertd__V1__HeartbeatReply_Closure)
REFUSED(statistics, Expertd__V1__StatisticsRequest, Expertd__V1__StatisticsReply_Closure)
REFUSED(cluster_status, Expertd__V1__Empty, Expertd__V1__ClusterStatusReply_Closure)

/* Ends the streams of watchers that went away. */
static void *coordinator_main(void *arg)
{
    fake_coordinator *coordinator = arg;
    pthread_mutex_lock(&coordinator->lock);
    while (!coordinator->stopping || coordinator->watchers != NULL) {
        watcher **at = &coordinator->watchers;
        while (*at != NULL && !(*at)->cancelled) {
            at = &(*at)->next;
        }
        watcher *w = *at;
        if (w == NULL) {
            pthread_cond_wait(&coordinator->changed, &coordinator->lock);
            continue;
        }
        *at = w->next;
        pthread_mutex_unlock(&coordinator->lock);
        ep_rpc_call_finish(w->call, EP_ERR_CANCELLED, NULL);
        free(w);
        pthread_mutex_lock(&coordinator->lock);
    }
    pthread_mutex_unlock(&coordinator->lock);
    return NULL;
}

fake_coordinator *fake_coordinator_start(const char *url)
{
    fake_coordinator *coordinator = calloc(1, sizeof(*coordinator));
    coordinator->service = (Expertd__V1__Coordinator_Service)EXPERTD__V1__COORDINATOR__INIT();
    pthread_mutex_init(&coordinator->lock, NULL);
    pthread_cond_init(&coordinator->changed, NULL);
    must(ep_timer_service_create("fake-coord", &coordinator->timers), NULL, "timers");
    must(ep_buffer_pool_create(0, (size_t)16 << 20, &coordinator->pool), NULL, "pool");
    pthread_create(&coordinator->thread, NULL, coordinator_main, coordinator);
    coordinator->server =
        start_server("coordinator", "coordinator", coordinator->timers, coordinator->pool,
                     &coordinator->service.base, NULL, url, coordinator->url);
    return coordinator;
}

void fake_coordinator_stop(fake_coordinator *coordinator)
{
    if (coordinator == NULL) {
        return;
    }
    ep_rpc_server_destroy(coordinator->server);
    pthread_mutex_lock(&coordinator->lock);
    coordinator->stopping = true;
    pthread_cond_broadcast(&coordinator->changed);
    pthread_mutex_unlock(&coordinator->lock);
    pthread_join(coordinator->thread, NULL);
    ep_timer_service_destroy(coordinator->timers);
    ep_buffer_pool_destroy(coordinator->pool);
    if (coordinator->snapshot != NULL) {
        ep_placement_snapshot_free(coordinator->snapshot);
    }
    pthread_mutex_destroy(&coordinator->lock);
    pthread_cond_destroy(&coordinator->changed);
    free(coordinator);
}

const char *fake_coordinator_url(fake_coordinator *coordinator)
{
    return coordinator->url;
}

void fake_coordinator_publish(fake_coordinator *coordinator, const ep_routing_table *table)
{
    Expertd__V1__PlacementSnapshot *snapshot = NULL;
    must(ep_placement_encode(table, &snapshot), NULL, "encode a table");
    pthread_mutex_lock(&coordinator->lock);
    Expertd__V1__PlacementSnapshot *old = coordinator->snapshot;
    coordinator->snapshot = snapshot;
    for (watcher *w = coordinator->watchers; w != NULL; w = w->next) {
        w->closure(snapshot, w->call);
    }
    pthread_mutex_unlock(&coordinator->lock);
    if (old != NULL) {
        ep_placement_snapshot_free(old);
    }
}

/* ---- tables ---- */

static uint32_t numerics_index(ep_routing_model *model, const char *id)
{
    for (uint32_t i = 0; i < model->numerics_count; i++) {
        if (strcmp(model->numerics[i], id) == 0) {
            return i;
        }
    }
    strcpy(model->numerics[model->numerics_count], id);
    return model->numerics_count++;
}

ep_routing_table *fake_table(ep_epoch epoch, const ep_layer_shape *shape, const char *const *names,
                             const char *const *urls, const char *const *numerics,
                             uint32_t nodes_count, const uint32_t *owners)
{
    ep_error error;
    ep_routing_table *table = NULL;
    uint32_t experts = shape->experts + shape->shared_experts;
    uint32_t total = 0;
    for (uint32_t e = 0; e < experts; e++) {
        total += (uint32_t)__builtin_popcount(owners[e]);
    }
    must(ep_routing_table_create(nodes_count, 1, 1, &table), NULL, "table");
    table->epoch = epoch;
    snprintf(table->policy, sizeof(table->policy), "static");
    must(ep_routing_table_model_init(table, 0, FAKE_MODEL, FAKE_VERSION, nodes_count), NULL,
         "model");
    table->models[0].numerics_count = 0;
    for (uint32_t n = 0; n < nodes_count; n++) {
        table->nodes[n].node_id = n + 1;
        snprintf(table->nodes[n].name, sizeof(table->nodes[n].name), "%s", names[n]);
        snprintf(table->nodes[n].url, sizeof(table->nodes[n].url), "%s", urls[n]);
        const char *id = numerics != NULL && numerics[n] != NULL ? numerics[n] : FAKE_NUMERICS;
        table->models[0].numerics_of_node[n] = numerics_index(&table->models[0], id);
    }
    must(ep_routing_table_layer_init(table, 0, 0, shape, total), NULL, "layer");
    uint32_t at = 0;
    for (uint32_t e = 0; e < experts; e++) {
        table->layers[0].offsets[e] = at;
        for (uint32_t n = 0; n < nodes_count; n++) {
            if ((owners[e] & (1u << n)) != 0) {
                table->layers[0].copies[at++] = n;
            }
        }
    }
    table->layers[0].offsets[experts] = at;
    must(ep_routing_table_check(table, &error), &error, "table check");
    return table;
}
