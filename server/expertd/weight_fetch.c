/* SPDX-License-Identifier: Apache-2.0 */
#include "expertd/weight_fetch.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "common/sd_notify.h"
#include "common/service_config.h"
#include "coordinator.pb-c.h"
#include "expert.pb-c.h"
#include "expertd/weight_serve.h"
#include "transport/address.h"
#include "wire/frame.h"

#define CALL_NS (10 * EP_NS_PER_S)
#define DIAL_NS (3 * EP_NS_PER_S)
/* time for one piece, while models are opened or a source is busy */
#define FETCH_NS (20 * EP_NS_PER_S)
/* pause after a node, coordinator or storage could not be reached */
#define AGAIN_NS (5 * EP_NS_PER_S)
#define LIST_NS (10 * EP_NS_PER_S) /* time for the whole list of one node */
#define FIND_NS (60 * EP_NS_PER_S) /* time to find a model at the first start */
#define ROUND_NS (EP_NS_PER_S / 5) /* pause after a round without success */
#define PROGRESS_NS (10 * EP_NS_PER_S)
#define EXTEND_US 30000000ull

typedef struct source {
    char name[EP_NODE_NAME_BYTES];
    char url[EP_URL_BYTES];
    ep_rpc_channel *channel; /* NULL: none is open */
    uint64_t ask_ns;         /* not asked before this, once all models are open */
    bool is_passed;          /* passed over in this round */
    bool was_said;           /* the reason has been logged since it last gave bytes */
    bool is_gone;            /* the coordinator no longer names it */
    struct source *next;
} source;

typedef struct mirrored_model {
    ep_weight_fetch *fetch;
    const ep_node_model_config *config;
    const char *name;
    char version[EP_MIRROR_VERSION_BYTES];
    ep_checkpoint *storage;  /* NULL: there is none, or it could not be opened */
    ep_error storage_why;    /* why it could not be opened */
    uint64_t storage_ask_ns; /* not opened again before */
    bool storage_was_said;   /* as source.was_said */
    struct mirrored_model *next;
} mirrored_model;

struct ep_weight_fetch {
    ep_weight_fetch_config config;
    ep_rpc_channel *coordinator;
    mirrored_model *models;
    pthread_mutex_t one; /* one fetch at a time; taken before lock. Protects what follows: */
    source *sources;
    source *last;    /* that gave bytes; NULL: none yet */
    bool is_opened;  /* all models are */
    uint64_t ask_ns; /* the coordinator is not asked before this */
    uint64_t progress_ns;
    uint64_t progress_bytes;
    uint64_t got_bytes;     /* from nodes and storage */
    _Atomic uint64_t bytes; /* from nodes */
    pthread_mutex_t lock;   /* everything below */
    pthread_cond_t stopped;
    bool stop;
    ep_rpc_channel *reading; /* channel and id of the running call; NULL: none */
    ep_rpc_call_id reading_id;
};

/* ---- waiting ---- */

static bool is_stopped(ep_weight_fetch *fetch)
{
    pthread_mutex_lock(&fetch->lock);
    const bool stop = fetch->stop;
    pthread_mutex_unlock(&fetch->lock);
    return stop;
}

/* False: stopped. */
static bool pause_round(ep_weight_fetch *fetch)
{
    const uint64_t until_ns = ep_clock_now_ns() + ROUND_NS;
    pthread_mutex_lock(&fetch->lock);
    while (!fetch->stop && ep_clock_now_ns() < until_ns) {
        ep_clock_wait(&fetch->stopped, &fetch->lock, until_ns);
    }
    const bool goes_on = !fetch->stop;
    pthread_mutex_unlock(&fetch->lock);
    return goes_on;
}

static ep_err ends(ep_error *out_error)
{
    return ep_error_set(out_error, EP_ERR_UNAVAILABLE, "the node ends");
}

/* ---- sources ---- */

static void hang_up(source *s)
{
    ep_rpc_channel_destroy(s->channel);
    s->channel = NULL;
}

static ep_err take_entry(ep_weight_fetch *fetch, const Expertd__V1__NodeEntry *entry,
                         ep_error *out_error)
{
    source **at = &fetch->sources;
    if (strcmp(entry->name, fetch->config.common->node) == 0 || strcmp(entry->state, "lost") == 0 ||
        strlen(entry->name) >= sizeof((*at)->name) || strlen(entry->url) >= sizeof((*at)->url)) {
        return EP_OK;
    }
    while (*at != NULL &&
           (strcmp((*at)->name, entry->name) != 0 || strcmp((*at)->url, entry->url) != 0)) {
        at = &(*at)->next;
    }
    if (*at == NULL) {
        *at = calloc(1, sizeof(**at));
        if (*at == NULL) {
            return ep_error_set(out_error, EP_ERR_NO_MEMORY,
                                "no memory for the nodes of the cluster");
        }
        strcpy((*at)->name, entry->name);
        strcpy((*at)->url, entry->url);
    }
    (*at)->is_gone = false;
    (*at)->is_passed = false;
    return EP_OK;
}

/* Begins a round with the nodes that the coordinator names; without an answer, with the nodes known
 * before. */
static ep_err begin_round(ep_weight_fetch *fetch, ep_error *out_error)
{
    Expertd__V1__Empty empty = EXPERTD__V1__EMPTY__INIT;
    ProtobufCMessage *reply = NULL;
    ep_err err = ep_rpc_call_sync(fetch->coordinator, "expertd.v1.Coordinator", "ClusterStatus",
                                  &empty.base, ep_clock_now_ns() + DIAL_NS, &reply, out_error);
    for (source *s = fetch->sources; s != NULL; s = s->next) {
        s->is_passed = false;
        s->is_gone = err == EP_OK;
    }
    fetch->ask_ns = ep_clock_now_ns() + (err == EP_OK ? EP_NS_PER_S : AGAIN_NS);
    if (err != EP_OK) {
        return ep_error_prefix(out_error, err, "coordinator at %s", fetch->config.coordinator_url);
    }
    const Expertd__V1__ClusterStatusReply *status =
        (const Expertd__V1__ClusterStatusReply *)(const void *)reply;
    for (size_t i = 0; err == EP_OK && i < status->n_nodes; i++) {
        err = take_entry(fetch, status->nodes[i], out_error);
    }
    protobuf_c_message_free_unpacked(reply, NULL);
    for (source **at = &fetch->sources; *at != NULL;) {
        source *s = *at;
        if (s->is_gone) {
            *at = s->next;
            fetch->last = fetch->last == s ? NULL : fetch->last;
            hang_up(s);
            free(s);
        } else {
            at = &s->next;
        }
    }
    return err;
}

/* waits: dials even if a try has failed a moment ago, because there is no other source. */
static ep_err dial(ep_weight_fetch *fetch, source *s, bool waits, ep_error *out_error)
{
    ep_lane_address address;
    if (!waits && ep_clock_now_ns() < s->ask_ns) {
        return ep_error_set(out_error, EP_ERR_UNAVAILABLE, "it gave no answer a moment ago");
    }
    if (s->channel != NULL) {
        return EP_OK;
    }
    ep_err err = ep_address_for_dial(s->url, fetch->config.tls, !fetch->config.insecure, &address,
                                     out_error);
    const ep_rpc_channel_config channel = {
        .common = *fetch->config.common, .address = address, .connection_class = "bulk"};
    err = err == EP_OK ? ep_rpc_channel_create(&channel, &s->channel, out_error) : err;
    err = err == EP_OK
              ? ep_rpc_channel_wait_ready(s->channel, ep_clock_now_ns() + DIAL_NS, out_error)
              : err;
    if (err != EP_OK) {
        hang_up(s);
        s->ask_ns = ep_clock_now_ns() + AGAIN_NS;
    }
    return err;
}

/* Passes over a source. The reason is logged once, until the node gives bytes again. */
static void pass_over(source *s, const mirrored_model *model, const char *file,
                      const ep_error *error)
{
    s->is_passed = true;
    if (s->channel != NULL && ep_rpc_channel_get_state(s->channel) != EP_CHANNEL_READY) {
        hang_up(s);
    }
    if (error->code == EP_ERR_DEADLINE_EXCEEDED) {
        s->ask_ns = ep_clock_now_ns() + AGAIN_NS;
    }
    if (!s->was_said && error->code != EP_ERR_RESOURCE_EXHAUSTED) { /* RESOURCE_EXHAUSTED: busy */
        s->was_said = true;
        ep_log(EP_LOG_WARN, "weights-source", EP_KV(model, model->name),
               EP_KV(version, model->version), EP_KV(file, file), EP_KV(node, s->name),
               EP_KV(url, s->url), EP_KV(reason, error->text),
               EP_KV(effect, "another node is asked"));
    }
}

/* A start waits for nodes when nothing else has the files. */
static bool waits_for_nodes(const mirrored_model *model)
{
    return !model->fetch->is_opened && model->storage == NULL;
}

/* ---- one read ---- */

typedef struct piece_call {
    pthread_mutex_t lock;
    pthread_cond_t done;
    bool ended;
    ep_error error;
    void *out;
    size_t bytes;
} piece_call;

static void on_piece(void *arg, const ep_rpc_reply *reply, const ep_error *error)
{
    piece_call *call = arg;
    pthread_mutex_lock(&call->lock);
    if (error != NULL) {
        call->error = *error;
    } else if (reply->tensor_bytes != call->bytes) {
        ep_error_set(&call->error, EP_ERR_DATA_LOSS, "it gave %zu bytes, asked for were %zu",
                     reply->tensor_bytes, call->bytes);
    } else if (ep_crc32c(0, reply->tensors, call->bytes) !=
               ((const Expertd__V1__WeightReadReply *)(const void *)reply->header)->crc32c) {
        ep_error_set(&call->error, EP_ERR_DATA_LOSS, "the checksum of what it gave is wrong");
    } else {
        memcpy(call->out, reply->tensors, call->bytes);
    }
    call->ended = true;
    pthread_cond_signal(&call->done);
    pthread_mutex_unlock(&call->lock);
}

static void await_end(piece_call *call)
{
    pthread_mutex_lock(&call->lock);
    while (!call->ended) {
        pthread_cond_wait(&call->done, &call->lock);
    }
    pthread_mutex_unlock(&call->lock);
}

/* Registers the running call so that stop can cancel it. False: stopped. */
static bool set_reading(ep_weight_fetch *fetch, ep_rpc_channel *channel, ep_rpc_call_id id)
{
    pthread_mutex_lock(&fetch->lock);
    const bool goes_on = !fetch->stop;
    fetch->reading = channel;
    fetch->reading_id = id;
    pthread_mutex_unlock(&fetch->lock);
    return goes_on;
}

static ep_err read_from(ep_weight_fetch *fetch, source *s, const mirrored_model *model,
                        const char *file, uint64_t offset, void *out, size_t bytes,
                        ep_error *out_error)
{
    Expertd__V1__WeightReadRequest request = EXPERTD__V1__WEIGHT_READ_REQUEST__INIT;
    piece_call call = {.out = out, .bytes = bytes};
    ep_err err = dial(fetch, s, waits_for_nodes(model), out_error);
    if (err != EP_OK) {
        return err;
    }
    request.model = (char *)(uintptr_t)model->name;
    request.version = (char *)(uintptr_t)model->version;
    request.file = (char *)(uintptr_t)file;
    request.offset = offset;
    request.bytes = (uint32_t)bytes;
    const ep_rpc_request sent = {.id = ep_rpc_call_id_next(),
                                 .method = ep_rpc_method_by_name("expertd.v1.WeightFiles", "Read"),
                                 .header = &request.base,
                                 .deadline_ns = ep_clock_now_ns() + CALL_NS};
    pthread_mutex_init(&call.lock, NULL);
    pthread_cond_init(&call.done, NULL);
    ep_error_clear(&call.error);
    err = ep_rpc_call_start(s->channel, &sent, on_piece, &call, NULL, out_error);
    if (err == EP_OK) {
        if (!set_reading(fetch, s->channel, sent.id)) {
            ep_rpc_call_cancel(s->channel, sent.id);
        }
        await_end(&call);
        (void)set_reading(fetch, NULL, 0);
        err = call.error.code;
        if (err != EP_OK) {
            *out_error = call.error;
        }
    }
    pthread_cond_destroy(&call.done);
    pthread_mutex_destroy(&call.lock);
    return err;
}

/* ---- a piece ---- */

/* Counts bytes and logs progress. s NULL: from storage. */
static void tell_progress(ep_weight_fetch *fetch, const source *s, const mirrored_model *model,
                          size_t bytes)
{
    const uint64_t now_ns = ep_clock_now_ns(), passed_ns = now_ns - fetch->progress_ns;
    fetch->got_bytes += bytes;
    if (fetch->progress_ns != 0 && passed_ns < PROGRESS_NS) {
        return;
    }
    ep_sd_notify_extend_timeout(EXTEND_US); /* the start of the service may take that long */
    const uint64_t rate = fetch->progress_ns == 0
                              ? 0
                              : (uint64_t)((double)(fetch->got_bytes - fetch->progress_bytes) /
                                           (double)passed_ns * (double)EP_NS_PER_S);
    ep_log(EP_LOG_INFO, "weights-fetch", EP_KV(model, model->name), EP_KV(version, model->version),
           EP_KV(node, s != NULL ? s->name : NULL), EP_KV(url, s != NULL ? s->url : NULL),
           EP_KV(storage_path, s == NULL ? model->config->storage_path : NULL),
           EP_KV(bytes, fetch->got_bytes), EP_KV(bytes_per_s, rate));
    fetch->progress_ns = now_ns;
    fetch->progress_bytes = fetch->got_bytes;
}

static void count(ep_weight_fetch *fetch, source *s, const mirrored_model *model, size_t bytes)
{
    atomic_fetch_add_explicit(&fetch->bytes, bytes, memory_order_relaxed);
    s->was_said = false;
    fetch->last = s;
    tell_progress(fetch, s, model, bytes);
}

/*
 * The source that gave bytes last, else the next one not passed over; NULL: the round is over. Each
 * node begins at another source, by a hash of its name; otherwise all would ask the first one.
 */
static source *next_source(ep_weight_fetch *fetch)
{
    const char *own = fetch->config.common->node;
    uint32_t count = 0, at = 0;
    source *first = NULL;
    if (fetch->last != NULL && !fetch->last->is_passed) {
        return fetch->last;
    }
    for (const source *s = fetch->sources; s != NULL; s = s->next) {
        count++;
    }
    const uint32_t begin = count > 0 ? ep_crc32c(0, own, strlen(own)) % count : 0;
    for (source *s = fetch->sources; s != NULL; s = s->next, at++) {
        if (!s->is_passed && at >= begin) {
            return s;
        }
        first = first == NULL && !s->is_passed ? s : first;
    }
    return first;
}

/*
 * Whether to ask the sources once more after all failed. A start waits for a source, and a busy
 * source is waited for. Otherwise a load fails once the nodes that the coordinator names now were
 * asked, because other loads wait behind it. False: out_why is set.
 */
static bool goes_round(ep_weight_fetch *fetch, const mirrored_model *model, bool is_busy,
                       uint64_t deadline_ns, bool *io_has_asked, ep_error *out_why)
{
    const uint64_t now_ns = ep_clock_now_ns();
    if (waits_for_nodes(model) || (is_busy && model->storage == NULL)) {
        if (now_ns > deadline_ns || !pause_round(fetch)) {
            return false;
        }
    } else if (*io_has_asked || now_ns < fetch->ask_ns) {
        return false;
    }
    *io_has_asked = true;
    ep_error why;
    if (begin_round(fetch, &why) != EP_OK) {
        *out_why = why;
    }
    return true;
}

static ep_err fetch_locked(ep_weight_fetch *fetch, const mirrored_model *model, const char *file,
                           uint64_t offset, void *out, size_t bytes, ep_error *out_error)
{
    const uint64_t deadline_ns = ep_clock_now_ns() + FETCH_NS;
    char asked[EP_NODE_NAME_BYTES] = "none";
    bool has_asked = false, is_busy = false;
    ep_error why;
    ep_error_set(&why, EP_ERR_UNAVAILABLE, "the coordinator names no other node");
    for (source *s = fetch->sources; s != NULL; s = s->next) {
        s->is_passed = false;
    }
    for (;;) {
        source *s = next_source(fetch);
        if (is_stopped(fetch)) {
            return ends(out_error);
        }
        if (s != NULL && read_from(fetch, s, model, file, offset, out, bytes, &why) == EP_OK) {
            count(fetch, s, model, bytes);
            return EP_OK;
        }
        if (s != NULL) {
            snprintf(asked, sizeof(asked), "%s", s->name);
            is_busy = is_busy || why.code == EP_ERR_RESOURCE_EXHAUSTED;
            if (!is_stopped(fetch)) {
                pass_over(s, model, file, &why);
            }
        } else if (!goes_round(fetch, model, is_busy, deadline_ns, &has_asked, &why)) {
            return is_stopped(fetch)
                       ? ends(out_error)
                       : ep_error_set(out_error, EP_ERR_UNAVAILABLE,
                                      "no node gives %s of version %s from byte %" PRIu64
                                      "; asked last: %s: %.200s; start a node that has the files",
                                      file, model->version, offset, asked, why.text);
        } else {
            is_busy = false;
        }
    }
}

/* ---- storage ---- */

static void storage_fails(mirrored_model *model, const char *file, const ep_error *error)
{
    if (!model->storage_was_said) {
        model->storage_was_said = true;
        ep_log(
            EP_LOG_WARN, "weights-source", EP_KV(model, model->name),
            EP_KV(version, model->version), EP_KV(file, file),
            EP_KV(storage_path, model->config->storage_path), EP_KV(reason, error->text),
            EP_KV(effect, model->config->is_from_nodes ? "nodes are asked" : "it is tried again"));
    }
}

/* Does not try again soon after a failure, because other reads wait behind this one. */
static ep_err open_storage(mirrored_model *model, ep_error *out_error)
{
    const char *path = model->config->storage_path;
    if (ep_clock_now_ns() < model->storage_ask_ns) {
        *out_error = model->storage_why;
        return out_error->code;
    }
    ep_err err = ep_checkpoint_open(path, &model->storage, out_error);
    const char *is = err == EP_OK ? ep_checkpoint_info(model->storage)->files_version : "";
    if (err == EP_OK && model->version[0] != 0 && strcmp(model->version, is) != 0) {
        err = ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION, "it has version %s, needed is %s",
                           is, model->version);
        ep_checkpoint_close(model->storage);
        model->storage = NULL;
    }
    if (err != EP_OK) {
        ep_error_prefix(out_error, err, "storage_path %.200s", path);
        model->storage_why = *out_error;
        model->storage_ask_ns = ep_clock_now_ns() + AGAIN_NS;
    }
    return err;
}

static ep_err read_storage(mirrored_model *model, const char *file, uint64_t offset, void *out,
                           size_t bytes, ep_error *out_error)
{
    const char *name = "";
    uint64_t size = 0;
    size_t i = 0;
    if (is_stopped(model->fetch)) {
        return ends(out_error);
    }
    ep_err err = model->storage == NULL ? open_storage(model, out_error) : EP_OK;
    if (err != EP_OK) {
        storage_fails(model, file, out_error);
        /* UNAVAILABLE whatever the code was: NOT_FOUND would mean the file */
        return ep_error_set(out_error, EP_ERR_UNAVAILABLE, "%s", model->storage_why.text);
    }
    const size_t count = ep_checkpoint_files_count(model->storage);
    while (i < count &&
           (ep_checkpoint_file(model->storage, i, &name, &size), strcmp(name, file) != 0)) {
        i++;
    }
    err = i == count || offset > size || bytes > size - offset
              ? ep_error_set(out_error, EP_ERR_DATA_LOSS, "%s: has no %zu bytes from %" PRIu64,
                             file, bytes, offset)
              : ep_checkpoint_read_file(model->storage, i, offset, out, bytes, out_error);
    if (err != EP_OK) {
        ep_error_prefix(out_error, err, "storage_path %.200s", model->config->storage_path);
        storage_fails(model, file, out_error);
        return err;
    }
    model->storage_was_said = false;
    tell_progress(model->fetch, NULL, model, bytes);
    return EP_OK;
}

/* Reads a piece from nodes or storage; where there are both, from the second if the first fails. */
static ep_err on_fetch(void *arg, const char *file, uint64_t offset, void *out, size_t bytes,
                       ep_error *out_error)
{
    mirrored_model *model = arg;
    ep_weight_fetch *fetch = model->fetch;
    const bool has_storage = model->config->storage_path[0] != 0;
    ep_err err = EP_ERR_UNAVAILABLE;
    pthread_mutex_lock(&fetch->one);
    if (has_storage && model->config->is_storage_first) {
        err = read_storage(model, file, offset, out, bytes, out_error);
    }
    if (err != EP_OK && model->config->is_from_nodes) {
        err = fetch_locked(fetch, model, file, offset, out, bytes, out_error);
    }
    if (err != EP_OK && has_storage && !model->config->is_storage_first) {
        err = read_storage(model, file, offset, out, bytes, out_error);
    }
    pthread_mutex_unlock(&fetch->one);
    return err;
}

/* ---- the list of files ---- */

typedef struct found_model {
    char version[EP_MIRROR_VERSION_BYTES];
    char node[EP_NODE_NAME_BYTES];
    ep_mirror_entry *entries;
    size_t count;
    size_t said; /* as the node says */
} found_model;

/* Takes over the files of one reply. ep_mirror_create checks names and sizes. */
static ep_err take_files(const Expertd__V1__WeightListReply *reply, found_model *found,
                         ep_error *out_error)
{
    if (reply->files_count < 1 || reply->files_count > EP_MIRROR_FILES_MAX ||
        (found->said != 0 && found->said != reply->files_count) || reply->n_files < 1 ||
        reply->n_files > reply->files_count - found->count ||
        strlen(reply->version) >= sizeof(found->version) ||
        (found->said != 0 && strcmp(reply->version, found->version) != 0)) {
        return ep_error_set(
            out_error, EP_ERR_DATA_LOSS,
            "its list of %zu files of %u, after %zu, of version '%.40s' is not to be had",
            reply->n_files, reply->files_count, found->count, reply->version);
    }
    if (found->entries == NULL) {
        found->entries = calloc(reply->files_count, sizeof(*found->entries));
        if (found->entries == NULL) {
            return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for %u files",
                                reply->files_count);
        }
    }
    found->said = reply->files_count;
    strcpy(found->version, reply->version);
    for (size_t i = 0; i < reply->n_files; i++) {
        ep_mirror_entry *entry = &found->entries[found->count];
        if (strlen(reply->files[i]->name) >= sizeof(entry->name)) {
            return ep_error_set(out_error, EP_ERR_DATA_LOSS,
                                "a file's name has %zu bytes, allowed up to %zu",
                                strlen(reply->files[i]->name), sizeof(entry->name) - 1);
        }
        strcpy(entry->name, reply->files[i]->name);
        entry->bytes = reply->files[i]->bytes;
        found->count++;
    }
    return EP_OK;
}

static ep_err list_from(ep_weight_fetch *fetch, source *s, const char *model, const char *version,
                        uint64_t deadline_ns, found_model *found, ep_error *out_error)
{
    Expertd__V1__WeightListRequest request = EXPERTD__V1__WEIGHT_LIST_REQUEST__INIT;
    request.model = (char *)(uintptr_t)model;
    request.version = (char *)(uintptr_t)version;
    const uint64_t own_ns = ep_clock_now_ns() + LIST_NS;
    const uint64_t until_ns = own_ns < deadline_ns ? own_ns : deadline_ns;
    ep_err err = dial(fetch, s, !fetch->is_opened, out_error);
    do {
        ProtobufCMessage *reply = NULL;
        if (err == EP_OK && is_stopped(fetch)) {
            err = ends(out_error);
        }
        request.first = (uint32_t)found->count;
        err = err == EP_OK ? ep_rpc_call_sync(s->channel, "expertd.v1.WeightFiles", "List",
                                              &request.base, until_ns, &reply, out_error)
                           : err;
        if (err == EP_OK) {
            err = take_files((const Expertd__V1__WeightListReply *)(const void *)reply, found,
                             out_error);
            protobuf_c_message_free_unpacked(reply, NULL);
        }
    } while (err == EP_OK && found->count < found->said);
    snprintf(found->node, sizeof(found->node), "%s", s->name);
    if (err == EP_OK && version[0] != 0 && strcmp(found->version, version) != 0) {
        return ep_error_set(out_error, EP_ERR_DATA_LOSS, "it lists version %s for %s",
                            found->version, version);
    }
    return err;
}

/* Asks every node for its version. If they differ, this node cannot know which one is meant. */
static ep_err list_round(ep_weight_fetch *fetch, const mirrored_model *model, uint64_t deadline_ns,
                         found_model *out_found, ep_error *out_error)
{
    ep_err err = begin_round(fetch, out_error);
    found_model first = {.count = 0};
    if (err == EP_OK) {
        err = ep_error_set(out_error, EP_ERR_UNAVAILABLE, "the coordinator names no other node");
    }
    for (source *s = fetch->sources;
         s != NULL && !is_stopped(fetch) && ep_clock_now_ns() < deadline_ns; s = s->next) {
        found_model found = {.count = 0};
        ep_error why;
        const ep_err one =
            list_from(fetch, s, model->name, model->version, deadline_ns, &found, &why);
        if (one != EP_OK) {
            pass_over(s, model, "", &why);
            err = first.count == 0 ? ep_error_set(out_error, EP_ERR_UNAVAILABLE, "node %s: %.300s",
                                                  s->name, why.text)
                                   : err;
        } else if (first.count == 0) {
            first = found;
            err = EP_OK;
            continue;
        } else if (strcmp(first.version, found.version) != 0) {
            err = ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                               "node %s serves version %s, node %s version %s; name one of them as "
                               "version of this model in models",
                               first.node, first.version, found.node, found.version);
        }
        free(found.entries);
        if (err == EP_ERR_FAILED_PRECONDITION) {
            break;
        }
    }
    if (err != EP_OK) {
        free(first.entries);
        return err;
    }
    *out_found = first;
    return EP_OK;
}

static ep_err find_model(ep_weight_fetch *fetch, const mirrored_model *model,
                         found_model *out_found, ep_error *out_error)
{
    const uint64_t deadline_ns = ep_clock_now_ns() + FIND_NS;
    uint64_t said_ns = 0;
    for (;;) {
        const ep_err err = list_round(fetch, model, deadline_ns, out_found, out_error);
        const uint64_t now_ns = ep_clock_now_ns();
        if (err == EP_OK || err == EP_ERR_FAILED_PRECONDITION) {
            return err;
        }
        if (now_ns > deadline_ns) {
            return ep_error_prefix(
                out_error, EP_ERR_UNAVAILABLE,
                "no node gives its files: start one that has them, with node_token_file");
        }
        if (now_ns - said_ns > PROGRESS_NS) {
            said_ns = now_ns;
            ep_sd_notify_extend_timeout(EXTEND_US);
            ep_log(EP_LOG_WARN, "weights-fetch", EP_KV(model, model->name), EP_KV(state, "waiting"),
                   EP_KV(reason, out_error->text),
                   EP_KV(hint, "start a node that has the model's files, with node_token_file"));
        }
        if (!pause_round(fetch)) {
            return ends(out_error);
        }
    }
}

static ep_err list_storage(const mirrored_model *model, found_model *out_found, ep_error *out_error)
{
    found_model found = {.node = "", .count = ep_checkpoint_files_count(model->storage)};
    found.entries = calloc(found.count + 1, sizeof(*found.entries));
    if (found.entries == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for %zu files", found.count);
    }
    snprintf(found.version, sizeof(found.version), "%s",
             ep_checkpoint_info(model->storage)->files_version);
    for (size_t i = 0; i < found.count; i++) {
        const char *name;
        ep_checkpoint_file(model->storage, i, &name, &found.entries[i].bytes);
        snprintf(found.entries[i].name, sizeof(found.entries[i].name), "%s", name);
    }
    *out_found = found;
    return EP_OK;
}

static ep_err make_mirror(ep_weight_fetch *fetch, const mirrored_model *model, const char *path,
                          ep_error *out_error)
{
    found_model found = {.count = 0};
    pthread_mutex_lock(&fetch->one);
    ep_err err = model->storage != NULL ? list_storage(model, &found, out_error)
                                        : find_model(fetch, model, &found, out_error);
    pthread_mutex_unlock(&fetch->one);
    if (err != EP_OK) {
        return err;
    }
    const char *node = model->storage != NULL ? NULL : found.node;
    err = ep_mirror_create(path, found.version, found.entries, found.count, out_error);
    if (err == EP_OK) {
        ep_log(EP_LOG_INFO, "weights-fetch", EP_KV(model, model->name),
               EP_KV(version, found.version), EP_KV(state, "listed"), EP_KV(node, node),
               EP_KV(storage_path, node == NULL ? model->config->storage_path : NULL),
               EP_KV(files, found.count), EP_KV(path, path));
    }
    free(found.entries);
    return err == EP_OK || node == NULL
               ? err
               : ep_error_prefix(out_error, err, "as node %s lists it", node);
}

/* ---- life ---- */

/*
 * Opens storage for a start. An existing mirror may hold all that is needed, so then missing
 * storage is no error. Without nodes it is one when a mirror is to be made, or when storage has
 * another version than configured.
 */
static ep_err try_storage(mirrored_model *model, bool is_new, ep_error *out_error)
{
    if (model->config->storage_path[0] == 0) {
        return EP_OK;
    }
    const ep_err err = open_storage(model, out_error);
    const bool is_needed = is_new || err == EP_ERR_FAILED_PRECONDITION;
    if (err == EP_OK || (is_needed && !model->config->is_from_nodes)) {
        return err;
    }
    storage_fails(model, "", out_error);
    return EP_OK;
}

/* Errors: mirror, storage and configuration differ in the model's version. */
static ep_err check_version(const mirrored_model *model, const ep_mirror *mirror,
                            ep_error *out_error)
{
    const char *is = ep_mirror_version(mirror);
    if (model->version[0] != 0 && strcmp(model->version, is) != 0) {
        return ep_error_set(
            out_error, EP_ERR_FAILED_PRECONDITION,
            "it mirrors version %s, configured is %s; use an empty directory for the latter", is,
            model->version);
    }
    if (model->storage != NULL &&
        strcmp(ep_checkpoint_info(model->storage)->files_version, is) != 0) {
        return ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                            "it mirrors version %s, storage_path %.200s has %s; use an empty "
                            "directory for the latter",
                            is, model->config->storage_path,
                            ep_checkpoint_info(model->storage)->files_version);
    }
    return EP_OK;
}

ep_err ep_weight_fetch_open(ep_weight_fetch *fetch, const ep_node_model_config *config,
                            ep_mirror **out_mirror, ep_error *out_error)
{
    mirrored_model *model = calloc(1, sizeof(*model));
    ep_mirror *mirror = NULL;
    if (model == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "model %s: no memory", config->name);
    }
    model->fetch = fetch;
    model->config = config;
    model->name = config->name;
    model->next = fetch->models;
    fetch->models = model;
    snprintf(model->version, sizeof(model->version), "%s",
             config->version != NULL ? config->version : "");
    ep_err err =
        ep_mirror_open(config->path, EP_WEIGHT_PIECE_BYTES, on_fetch, model, &mirror, out_error);
    const bool is_new = err == EP_ERR_NOT_FOUND;
    err = err == EP_OK || is_new ? try_storage(model, is_new, out_error) : err;
    if (err == EP_OK && is_new) {
        err = make_mirror(fetch, model, config->path, out_error);
        err = err == EP_OK ? ep_mirror_open(config->path, EP_WEIGHT_PIECE_BYTES, on_fetch, model,
                                            &mirror, out_error)
                           : err;
    }
    err = err == EP_OK ? check_version(model, mirror, out_error) : err;
    if (err != EP_OK) {
        ep_mirror_close(mirror);
        return err;
    }
    strcpy(model->version, ep_mirror_version(mirror));
    *out_mirror = mirror;
    return EP_OK;
}

ep_err ep_weight_fetch_create(const ep_weight_fetch_config *config, ep_weight_fetch **out_fetch,
                              ep_error *out_error)
{
    ep_weight_fetch *fetch = calloc(1, sizeof(*fetch));
    if (fetch == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for fetching weights");
    }
    fetch->config = *config;
    pthread_mutex_init(&fetch->one, NULL);
    pthread_mutex_init(&fetch->lock, NULL);
    pthread_cond_init(&fetch->stopped, NULL);
    ep_rpc_channel_config channel = {
        .common = *config->common,
        .address = {.url = config->coordinator_url,
                    .tls = ep_url_is_tls(config->coordinator_url) ? config->tls : NULL},
        .connection_class = "control",
        .reconnect = true};
    ep_rpc_limits_raise_for_control(&channel.common.limits);
    const ep_err err = config->coordinator_url[0] == 0
                           ? EP_OK
                           : ep_rpc_channel_create(&channel, &fetch->coordinator, out_error);
    if (err != EP_OK) {
        ep_weight_fetch_destroy(fetch);
        return err;
    }
    *out_fetch = fetch;
    return EP_OK;
}

void ep_weight_fetch_opened(ep_weight_fetch *fetch)
{
    if (fetch != NULL) {
        pthread_mutex_lock(&fetch->one);
        fetch->is_opened = true;
        pthread_mutex_unlock(&fetch->one);
    }
}

void ep_weight_fetch_stop(ep_weight_fetch *fetch)
{
    if (fetch == NULL) {
        return;
    }
    pthread_mutex_lock(&fetch->lock);
    fetch->stop = true;
    pthread_cond_broadcast(&fetch->stopped);
    /* the channel lives: its thread takes the lock before it releases it */
    if (fetch->reading != NULL) {
        ep_rpc_call_cancel(fetch->reading, fetch->reading_id);
    }
    pthread_mutex_unlock(&fetch->lock);
}

void ep_weight_fetch_destroy(ep_weight_fetch *fetch)
{
    if (fetch == NULL) {
        return;
    }
    ep_weight_fetch_stop(fetch);
    ep_rpc_channel_destroy(fetch->coordinator);
    for (source *s = fetch->sources, *next; s != NULL; s = next) {
        next = s->next;
        hang_up(s);
        free(s);
    }
    for (mirrored_model *m = fetch->models, *next; m != NULL; m = next) {
        next = m->next;
        ep_checkpoint_close(m->storage);
        free(m);
    }
    pthread_cond_destroy(&fetch->stopped);
    pthread_mutex_destroy(&fetch->lock);
    pthread_mutex_destroy(&fetch->one);
    free(fetch);
}

uint64_t ep_weight_fetch_bytes(const ep_weight_fetch *fetch)
{
    return fetch == NULL ? 0 : atomic_load_explicit(&fetch->bytes, memory_order_relaxed);
}
