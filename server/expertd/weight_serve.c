/* SPDX-License-Identifier: Apache-2.0 */
#include "expertd/weight_serve.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "expert.pb-c.h"
#include "wire/frame.h"

#define LIST_FILES_MAX 128 /* in one reply, so that its header stays far below header_bytes_max */

typedef struct waiting_read {
    const Expertd__V1__WeightReadRequest *request; /* the call's */
    const ep_node_model *model;
    size_t file;
    Expertd__V1__WeightReadReply_Closure closure;
    ep_rpc_call *call;
} waiting_read;

struct ep_weight_serve {
    Expertd__V1__WeightFiles_Service base; /* first member */
    ep_weight_serve_config config;
    _Atomic uint64_t bytes;
    pthread_mutex_t lock; /* everything below */
    pthread_cond_t work;
    pthread_t thread;
    bool runs;
    bool stop;
    waiting_read queue[EP_WEIGHT_READS_MAX]; /* a ring */
    uint32_t first;
    uint32_t count;
};

static void fail(ep_rpc_call *call, const ep_error *error)
{
    ep_rpc_call_finish(call, error->code, error);
}

/* ---- what is asked for ---- */

/* Refuses every call where nodes may show a client's token: there the role proves nothing. */
static ep_err find_model(const ep_weight_serve *serve, const char *name, const char *version,
                         ep_node_model **out_model, ep_error *out_error)
{
    if (!ep_rpc_credentials_prove_nodes(serve->config.credentials)) {
        return ep_error_set(
            out_error, EP_ERR_PERMISSION_DENIED,
            "clients could pass as nodes here, so nobody gets weights: set node_token_file, with a "
            "token that no client has");
    }
    return ep_node_models_find_files(serve->config.models, name, version, out_model, out_error);
}

/* Compares the name with those of the model's files; never opens a path from a peer. */
static ep_err find_file(const ep_node_model *model, const Expertd__V1__WeightReadRequest *request,
                        size_t *out_file, ep_error *out_error)
{
    const size_t count = ep_checkpoint_files_count(model->checkpoint);
    const char *name = "";
    uint64_t bytes = 0;
    size_t file = 0;
    while (file < count && (ep_checkpoint_file(model->checkpoint, file, &name, &bytes),
                            strcmp(name, request->file) != 0)) {
        file++;
    }
    if (file == count) {
        return ep_error_set(out_error, EP_ERR_NOT_FOUND,
                            "model %s version %s has no file '%.200s' among its %zu",
                            model->config->name, model->info->files_version, request->file, count);
    }
    if (request->bytes == 0 || request->bytes > EP_WEIGHT_PIECE_BYTES || request->offset > bytes ||
        request->bytes > bytes - request->offset) {
        return ep_error_set(out_error, EP_ERR_OUT_OF_RANGE,
                            "model %s file %s: %" PRIu32 " bytes from %" PRIu64
                            ", allowed 1..%u bytes inside its %" PRIu64,
                            model->config->name, name, request->bytes, request->offset,
                            EP_WEIGHT_PIECE_BYTES, bytes);
    }
    *out_file = file;
    return EP_OK;
}

/* ---- the thread ---- */

/* False: nothing was read. */
static bool read_one(ep_weight_serve *serve, const waiting_read *read)
{
    Expertd__V1__WeightReadReply reply = EXPERTD__V1__WEIGHT_READ_REPLY__INIT;
    const Expertd__V1__WeightReadRequest *request = read->request;
    const uint32_t bytes = request->bytes;
    ep_buffer *buffer = NULL;
    ep_error error;
    if (ep_rpc_call_is_cancelled(read->call)) {
        ep_rpc_call_finish(read->call, EP_ERR_CANCELLED, NULL);
        return false;
    }
    ep_err err = ep_buffer_acquire(ep_rpc_call_incoming(read->call)->pool, bytes, &buffer);
    if (err != EP_OK) {
        ep_error_set(&error, err, "no buffer of %" PRIu32 " bytes: %s", bytes, ep_err_text(err));
    } else {
        err = ep_checkpoint_read_file(read->model->checkpoint, read->file, request->offset,
                                      buffer->data, bytes, &error);
    }
    if (err != EP_OK) {
        ep_error_prefix(&error, err, "model %s", read->model->config->name);
        ep_buffer_unref(buffer);
        fail(read->call, &error);
        return false;
    }
    reply.crc32c = ep_crc32c(0, buffer->data, bytes);
    ep_rpc_call_attach(read->call, buffer);
    read->closure(&reply, read->call);
    ep_rpc_call_finish(read->call, EP_OK, NULL);
    atomic_fetch_add_explicit(&serve->bytes, bytes, memory_order_relaxed);
    return true;
}

/* Lock held, but for the wait. False: the thread ends. */
static bool await_rate(ep_weight_serve *serve, uint64_t until_ns)
{
    while (!serve->stop && ep_clock_now_ns() < until_ns) {
        ep_clock_wait(&serve->work, &serve->lock, until_ns);
    }
    return !serve->stop;
}

static void *serve_main(void *arg)
{
    ep_weight_serve *serve = arg;
    uint64_t paid_until_ns = 0;
    pthread_mutex_lock(&serve->lock);
    while (!serve->stop) {
        if (serve->count == 0) {
            pthread_cond_wait(&serve->work, &serve->lock);
            continue;
        }
        if (!await_rate(serve, paid_until_ns)) {
            break;
        }
        const waiting_read read = serve->queue[serve->first];
        const uint64_t now_ns = ep_clock_now_ns(), rate = serve->config.bytes_per_s;
        const uint64_t bytes = read.request->bytes; /* copied, as the request ends with its call */
        serve->first = (serve->first + 1) % EP_WEIGHT_READS_MAX;
        serve->count--;
        pthread_mutex_unlock(&serve->lock);
        if (read_one(serve, &read) && rate != 0) {
            paid_until_ns = now_ns + bytes * EP_NS_PER_S / rate;
        }
        pthread_mutex_lock(&serve->lock);
    }
    pthread_mutex_unlock(&serve->lock);
    return NULL;
}

/* ---- calls ---- */

static ep_err enqueue(ep_weight_serve *serve, const waiting_read *read, ep_error *out_error)
{
    ep_err err = EP_OK;
    pthread_mutex_lock(&serve->lock);
    if (serve->stop) {
        err = ep_error_set(out_error, EP_ERR_DRAINING, "the node ends");
    } else if (serve->count == EP_WEIGHT_READS_MAX) {
        err = ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                           "%d reads of weights wait here: ask again, or another node",
                           EP_WEIGHT_READS_MAX);
    } else {
        serve->queue[(serve->first + serve->count++) % EP_WEIGHT_READS_MAX] = *read;
        pthread_cond_signal(&serve->work);
    }
    pthread_mutex_unlock(&serve->lock);
    return err;
}

static void on_read(Expertd__V1__WeightFiles_Service *rpc,
                    const Expertd__V1__WeightReadRequest *request,
                    Expertd__V1__WeightReadReply_Closure closure, void *closure_data)
{
    ep_weight_serve *serve = (ep_weight_serve *)(void *)rpc;
    waiting_read read = {.request = request, .closure = closure, .call = closure_data};
    ep_node_model *model = NULL;
    ep_error error;
    ep_err err = find_model(serve, request->model, request->version, &model, &error);
    read.model = model;
    err = err == EP_OK ? find_file(model, request, &read.file, &error) : err;
    err = err == EP_OK ? enqueue(serve, &read, &error) : err;
    if (err != EP_OK) {
        fail(closure_data, &error);
    }
}

static void on_list(Expertd__V1__WeightFiles_Service *rpc,
                    const Expertd__V1__WeightListRequest *request,
                    Expertd__V1__WeightListReply_Closure closure, void *closure_data)
{
    const ep_weight_serve *serve = (const ep_weight_serve *)(const void *)rpc;
    Expertd__V1__WeightListReply reply = EXPERTD__V1__WEIGHT_LIST_REPLY__INIT;
    Expertd__V1__WeightFile files[LIST_FILES_MAX];
    Expertd__V1__WeightFile *list[LIST_FILES_MAX];
    ep_node_model *model = NULL;
    ep_error error;
    if (find_model(serve, request->model, request->version, &model, &error) != EP_OK) {
        fail(closure_data, &error);
        return;
    }
    const size_t count = ep_checkpoint_files_count(model->checkpoint);
    reply.version = (char *)(uintptr_t)model->info->files_version;
    reply.files_count = (uint32_t)count;
    reply.files = list;
    for (size_t i = request->first; i < count && reply.n_files < LIST_FILES_MAX; i++) {
        Expertd__V1__WeightFile *file = &files[reply.n_files];
        const char *name;
        expertd__v1__weight_file__init(file);
        ep_checkpoint_file(model->checkpoint, i, &name, &file->bytes);
        file->name = (char *)(uintptr_t)name;
        list[reply.n_files++] = file;
    }
    closure(&reply, closure_data);
    ep_rpc_call_finish(closure_data, EP_OK, NULL);
}

/* ---- life ---- */

ep_err ep_weight_serve_create(const ep_weight_serve_config *config, ep_weight_serve **out_serve,
                              ep_error *out_error)
{
    ep_weight_serve *serve = calloc(1, sizeof(*serve));
    if (serve == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the service of weights");
    }
    serve->base = (Expertd__V1__WeightFiles_Service)EXPERTD__V1__WEIGHT_FILES__INIT(on_);
    serve->config = *config;
    pthread_mutex_init(&serve->lock, NULL);
    pthread_cond_init(&serve->work, NULL);
    if (pthread_create(&serve->thread, NULL, serve_main, serve) != 0) {
        ep_weight_serve_destroy(serve);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY,
                            "cannot start the thread that reads weights for other nodes");
    }
    serve->runs = true;
    *out_serve = serve;
    return EP_OK;
}

void ep_weight_serve_stop(ep_weight_serve *serve)
{
    if (serve == NULL) {
        return;
    }
    pthread_mutex_lock(&serve->lock);
    serve->stop = true;
    pthread_cond_signal(&serve->work);
    pthread_mutex_unlock(&serve->lock);
    if (serve->runs) {
        pthread_join(serve->thread, NULL);
        serve->runs = false;
    }
    for (; serve->count > 0; serve->count--) { /* nothing is added any more */
        ep_error error;
        ep_error_set(&error, EP_ERR_DRAINING, "the node ends");
        fail(serve->queue[serve->first].call, &error);
        serve->first = (serve->first + 1) % EP_WEIGHT_READS_MAX;
    }
}

void ep_weight_serve_destroy(ep_weight_serve *serve)
{
    if (serve != NULL) {
        ep_weight_serve_stop(serve);
        pthread_mutex_destroy(&serve->lock);
        pthread_cond_destroy(&serve->work);
        free(serve);
    }
}

ProtobufCService *ep_weight_serve_rpc(ep_weight_serve *serve)
{
    return &serve->base.base;
}

uint64_t ep_weight_serve_bytes(const ep_weight_serve *serve)
{
    return atomic_load_explicit(&serve->bytes, memory_order_relaxed);
}
