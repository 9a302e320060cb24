/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A hostile coordinator: what it answers to Hello and WatchPlacement goes to a client of the
 * library, over the loopback lane; what it says of the cluster and its load to the commands that
 * show it. An input is a script of its frames and messages. The node that good tables list is
 * honest: after each script the client calls the first layers of whatever table it holds.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/printable.h"
#include "cli/doctor.h"
#include "cli/message_json.h"
#include "cli/status.h"
#include "cli/top.h"
#include "fuzz.h"
#include "fuzz_peer.h"
#include "fuzz_script.h"
#include "integration/client/fake_service.h"
#include "proto_mutator.h"
#include "rpc/rpc_budget.h"
#include "wire/placement_codec.h"

#define URL "loopback://fuzz-coordinator"
#define NODE_URL "loopback://fuzz-node"
#define HIDDEN_MAX 256
#define TOKENS 2
#define PATIENCE_US 1500
#define WATCH_US 50000 /* the client asks again, some milliseconds after a stream has ended */
#define GOOD_US 20000000

enum {
    RECORD_HELLO, /* gRPC code, then Hello: the reply to the client's */
    RECORD_TABLE, /* flags, then PlacementSnapshot: the next of the stream */
    /* gRPC code, then Status: the end of the stream, after which the client asks again */
    RECORD_END,
    RECORD_CONTROL, /* frame kind, call id, credit: cancel, ping, pong, credit, goodbye */
    RECORD_BROKEN,  /* a frame's bytes as they are */
    RECORD_CLUSTER, /* ClusterStatusReply, shown with the last good table */
    RECORD_LOAD,    /* StatisticsReply, shown */
    RECORD_KINDS
};
enum { TABLE_CHECKSUM = 1, TABLE_NEWER = 2 }; /* made right */

static const ProtobufCMessageDescriptor *const types[RECORD_KINDS] = {
    [RECORD_HELLO] = &expertd__v1__hello__descriptor,
    [RECORD_TABLE] = &expertd__v1__placement_snapshot__descriptor,
    [RECORD_END] = &expertd__v1__status__descriptor,
    [RECORD_CLUSTER] = &expertd__v1__cluster_status_reply__descriptor,
    [RECORD_LOAD] = &expertd__v1__statistics_reply__descriptor};

static const ep_layer_shape shape = {
    .layer = FAKE_LAYER, .hidden = 32, .inner = 8, .experts = 8, .top_k = 2};
static ep_buffer_pool *pool;
static fake_node *good_node;

typedef struct game {
    raw_peer peer;
    ep_client *client; /* NULL: no record has been for one */
    uint64_t patience_us;
    ep_frame asked;  /* the client's newest request */
    uint64_t newest; /* number of the tables' epoch */
    uint32_t sequence;
    ep_routing_table *table; /* the last good one */
} game;

/* ---- the frames ---- */

/* The client's next request, or nothing for a while. */
static bool next_request(game *g, uint64_t patience_us)
{
    raw_peer *p = &g->peer;
    ep_frame frame = {.kind = EP_FRAME_PING};
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    uint64_t ns = (uint64_t)until.tv_nsec + patience_us * 1000;
    until.tv_sec += (time_t)(ns / 1000000000);
    until.tv_nsec = (long)(ns % 1000000000);
    while (frame.kind != EP_FRAME_REQUEST) {
        int late = 0;
        pthread_mutex_lock(&p->lock);
        while (p->frames_read == p->frames_count && !p->closed && late == 0) {
            late = pthread_cond_timedwait(&p->changed, &p->lock, &until);
        }
        pthread_mutex_unlock(&p->lock);
        ep_buffer *buffer = late == 0 ? raw_peer_receive(p, &frame) : NULL;
        if (buffer == NULL) {
            return false;
        }
        ep_buffer_unref(buffer);
    }
    g->asked = frame;
    g->sequence = 0;
    return true;
}

static void reply(game *g, ep_frame_kind kind, uint32_t status, const uint8_t *message,
                  size_t bytes)
{
    ep_frame frame = {.kind = kind,
                      .call_id = g->asked.call_id,
                      .attempt = g->asked.attempt,
                      .method_id = g->asked.method_id,
                      .status = kind == EP_FRAME_REPLY ? status % 17 : 0,
                      .flags = kind == EP_FRAME_REPLY && g->asked.method_id != 0
                                   ? EP_FRAME_FLAG_END_OF_STREAM
                                   : 0,
                      .stream_sequence = g->asked.method_id != 0 ? g->sequence++ : 0,
                      .header_bytes = (uint32_t)bytes};
    raw_peer_send(&g->peer, frame, message, NULL, false);
}

/* A changed table keeps its place: its epoch and checksum are made right where its flags say so. */
static void reply_table(game *g, const uint8_t *rest, size_t bytes)
{
    ep_routing_table *table = NULL;
    ep_error error;
    Expertd__V1__Epoch epoch = EXPERTD__V1__EPOCH__INIT;
    Expertd__V1__PlacementSnapshot *snapshot =
        bytes > 0 ? expertd__v1__placement_snapshot__unpack(NULL, bytes - 1, rest + 1) : NULL;
    if (snapshot == NULL) {
        reply(g, EP_FRAME_REPLY_MORE, 0, rest, bytes);
        return;
    }
    Expertd__V1__Epoch *given = snapshot->epoch;
    epoch.number = ++g->newest;
    epoch.term = 1;
    snapshot->epoch = rest[0] & TABLE_NEWER ? &epoch : given;
    ep_err err = ep_placement_decode(snapshot, &table, &error);
    const char *needed = err != EP_OK ? strstr(error.text, "content gives ") : NULL;
    if (needed != NULL && rest[0] & TABLE_CHECKSUM) {
        snapshot->checksum = strtoull(needed + strlen("content gives "), NULL, 16);
        err = ep_placement_decode(snapshot, &table, &error);
    }
    if (err == EP_OK) {
        ep_routing_table_unref(g->table);
        g->table = table;
    }
    size_t packed_bytes = expertd__v1__placement_snapshot__get_packed_size(snapshot);
    uint8_t *packed = malloc(packed_bytes + 1);
    FUZZ_CHECK(packed != NULL);
    expertd__v1__placement_snapshot__pack(snapshot, packed);
    reply(g, EP_FRAME_REPLY_MORE, 0, packed, packed_bytes);
    free(packed);
    snapshot->epoch = given;
    expertd__v1__placement_snapshot__free_unpacked(snapshot, NULL);
}

/* ---- what commands show ---- */

static void check_shown(char *text, const ep_screen *screen)
{
    size_t rows = 0;
    for (char *line = strtok(text, "\n"); line != NULL; line = strtok(NULL, "\n"), rows++) {
        FUZZ_CHECK(line[ep_text_printable_bytes(line, true)] == 0);
        FUZZ_CHECK(screen->columns == 0 || ep_text_columns(line) <= screen->columns);
    }
    FUZZ_CHECK(screen->rows == 0 || rows <= screen->rows);
    free(text);
}

static void show_cluster(const game *g, const Expertd__V1__ClusterStatusReply *cluster)
{
    static ep_cli_problems problems;
    static ep_doctor_findings findings;
    static const ep_cli_format formats[] = {EP_CLI_TABLE, EP_CLI_JSON};
    ep_cli_node_list nodes = {0};
    problems.count = 0;
    findings.count = 0;
    ep_cli_cluster_check(cluster, &problems);
    for (size_t i = 0; i < 2; i++) {
        char *text = NULL;
        size_t bytes;
        FILE *out = open_memstream(&text, &bytes);
        ep_cli_cluster_print("tcp://c:1", cluster, g->table, &problems, formats[i], out);
        ep_cli_problems_print(&problems, out);
        ep_cli_json_print(ep_cli_message_to_json(&cluster->base), out);
        fclose(out);
        check_shown(text, &(ep_screen){0});
    }
    if (ep_cli_node_list_from_cluster(cluster, &nodes, NULL) == EP_OK) {
        ep_rpc_look *looks = calloc(nodes.count + 1, sizeof(*looks));
        FUZZ_CHECK(looks != NULL);
        ep_doctor_facts facts = {.coordinator_url = "tcp://c:1",
                                 .cluster = cluster,
                                 .nodes = &nodes,
                                 .node_looks = looks};
        ep_doctor_examine(&facts, &findings);
        free(looks);
        ep_cli_node_list_free(&nodes);
    }
}

static void show_load(Expertd__V1__StatisticsReply *load)
{
    Expertd__V1__StatisticsReply none = EXPERTD__V1__STATISTICS_REPLY__INIT;
    ep_top_sample before = {.at_ns = 1, .statistics = &none},
                  now = {.at_ns = 1000000001, .statistics = load};
    static const ep_screen screens[] = {{0}, {80, 24}, {20, 3}};
    for (size_t i = 0; i < 4; i++) {
        ep_top_view view = {.hottest = 10, .screen = screens[i % 3]};
        char *text = NULL;
        size_t bytes;
        FILE *out = open_memstream(&text, &bytes);
        ep_top_print(i < 3 ? &before : &now, &now, &view, NULL, out);
        fclose(out);
        check_shown(text, &view.screen);
    }
}

static void show(const game *g, size_t kind, const uint8_t *rest, size_t bytes)
{
    ep_rpc_budget budget;
    ProtobufCMessage *message;
    ep_rpc_budget_init(&budget, pool, (size_t)32 << 20);
    if (ep_rpc_unpack(&budget, types[kind], rest, bytes, &message, NULL) == EP_OK) {
        if (kind == RECORD_CLUSTER) {
            show_cluster(g, (const Expertd__V1__ClusterStatusReply *)(const void *)message);
        } else {
            show_load((Expertd__V1__StatisticsReply *)(void *)message);
        }
    }
    ep_rpc_budget_fini(&budget);
}

/* ---- the game ---- */

static void start_client(game *g)
{
    ep_client_config config;
    ep_error error;
    raw_peer_listen(&g->peer, URL);
    ep_client_config_init(&config);
    config.coordinator_url = URL;
    config.buffer_bytes_max = 16 << 20;
    FUZZ_CHECK(ep_client_create(&config, &g->client, &error) == EP_OK);
    raw_peer_accept(&g->peer);
}

static void play_record(game *g, size_t kind, const uint8_t *rest, size_t bytes)
{
    if (kind == RECORD_CLUSTER || kind == RECORD_LOAD) {
        show(g, kind, rest, bytes);
        return;
    }
    if (g->client == NULL) {
        start_client(g);
    }
    bool is_watched = g->asked.kind != 0 && g->asked.method_id != 0;
    switch (kind) {
    case RECORD_HELLO:
        if (g->asked.kind == 0 && bytes > 0 && next_request(g, GOOD_US)) {
            reply(g, EP_FRAME_REPLY, rest[0], rest + 1, bytes - 1);
        }
        break;
    case RECORD_TABLE:
        if (is_watched || next_request(g, g->patience_us > WATCH_US ? g->patience_us : WATCH_US)) {
            reply_table(g, rest, bytes);
        }
        break;
    case RECORD_END:
        if (is_watched && bytes > 0) {
            reply(g, EP_FRAME_REPLY, rest[0], rest + 1, bytes - 1);
            g->asked.method_id = 0;
        }
        break;
    case RECORD_CONTROL:
        fuzz_peer_control(&g->peer, rest, bytes);
        break;
    case RECORD_BROKEN:
        if (bytes >= EP_FRAME_FIXED_BYTES) {
            raw_peer_send_bytes(&g->peer, rest, bytes);
        }
        break;
    }
}

/* Calls a layer as its table describes it. */
static ep_err call_layer(ep_client *client, const ep_model_desc *model, const ep_layer_desc *layer,
                         uint64_t deadline_us)
{
    static float x[TOKENS * HIDDEN_MAX], y[TOKENS * HIDDEN_MAX], scales[TOKENS] = {1.0f, 0.5f};
    int32_t ids[TOKENS] = {0, (int32_t)layer->experts - 1};
    ep_moe_result result = {.struct_bytes = sizeof(result)};
    ep_moe_args args;
    ep_moe_args_init(&args);
    args.model = model->name;
    args.version = model->version;
    args.layer = layer->layer;
    args.x = ep_tensor_2d(x, EP_DTYPE_F32, TOKENS, layer->hidden);
    args.expert_ids = ep_tensor_2d(ids, EP_DTYPE_I32, TOKENS, 1);
    args.expert_scales = ep_tensor_2d(scales, EP_DTYPE_F32, TOKENS, 1);
    args.deadline_us = deadline_us;
    ep_tensor out = ep_tensor_2d(y, EP_DTYPE_F32, TOKENS, layer->hidden);
    ep_err err = ep_moe_forward(client, &args, &out, &result);
    FUZZ_CHECK(err == EP_OK || result.error.text[0] != 0);
    return err;
}

static ep_err use_table(ep_client *client, uint64_t deadline_us)
{
    ep_model_desc model = {.struct_bytes = sizeof(model)};
    ep_layer_desc layer = {.struct_bytes = sizeof(layer)};
    ep_error error;
    ep_error_clear(&error);
    ep_err err = ep_client_wait_ready(client, deadline_us, &error);
    FUZZ_CHECK(err == EP_OK || error.text[0] != 0);
    for (uint32_t m = 0; m < 2 && ep_client_model(client, m, &model) == EP_OK; m++) {
        for (uint32_t l = 0;
             l < 2 && ep_client_layer(client, model.name, model.version, l, &layer) == EP_OK; l++) {
            FUZZ_CHECK(layer.experts > 0 && layer.hidden > 0); /* a table without is refused */
            if (layer.hidden <= HIDDEN_MAX) {
                err = call_layer(client, &model, &layer, deadline_us);
            }
        }
    }
    return err;
}

static ep_err run(const uint8_t *data, size_t bytes, uint64_t patience_us)
{
    static game g;
    fuzz_record r;
    ep_err err = EP_OK;
    memset(&g, 0, sizeof(g));
    g.patience_us = patience_us;
    for (int records = 0; records < FUZZ_RECORDS_MAX && fuzz_record_next(&data, &bytes, &r);
         records++) {
        uint8_t *rest = malloc(r.bytes + 1);
        FUZZ_CHECK(rest != NULL);
        memcpy(rest, r.rest, r.bytes);
        fuzz_stay_inside(rest, r.bytes);
        play_record(&g, r.kind % RECORD_KINDS, rest, r.bytes);
        free(rest);
    }
    if (g.client != NULL) {
        fuzz_peer_wait_read(&g.peer);
        err = use_table(g.client, patience_us);
        ep_client_destroy(g.client);
        raw_peer_fini(&g.peer);
    }
    ep_routing_table_unref(g.table);
    return err;
}

void fuzz_one(const uint8_t *data, size_t bytes)
{
    run(data, bytes, PATIENCE_US);
}

/* ---- seeds ---- */

static size_t put_message(uint8_t *out, uint8_t kind, int first, const ProtobufCMessage *message)
{
    uint8_t rest[4096] = {(uint8_t)first};
    size_t before = first >= 0;
    return fuzz_record_put(out, kind, rest,
                           before + protobuf_c_message_pack(message, rest + before));
}

static size_t put_hello(uint8_t *out)
{
    Expertd__V1__Hello hello;
    raw_hello_init(&hello);
    hello.node = (char *)(uintptr_t) "coordinator";
    hello.role = (char *)(uintptr_t) "coordinator";
    return put_message(out, RECORD_HELLO, 0, &hello.base);
}

static size_t put_table(uint8_t *out, uint32_t nodes)
{
    static const char *const names[] = {"n0", "n1"}, *const urls[] = {NODE_URL,
                                                                      "loopback://nobody"};
    uint32_t owners[8];
    for (uint32_t e = 0; e < shape.experts; e++) {
        owners[e] = nodes == 2 && e % 2 ? 3 : nodes == 0 ? 0 : 1;
    }
    ep_routing_table *table =
        fake_table((ep_epoch){1, 1}, &shape, names, urls, NULL, nodes == 0 ? 1 : nodes, owners);
    Expertd__V1__PlacementSnapshot *snapshot;
    FUZZ_CHECK(ep_placement_encode(table, &snapshot) == EP_OK);
    size_t bytes = put_message(out, RECORD_TABLE, TABLE_CHECKSUM | TABLE_NEWER, &snapshot->base);
    ep_placement_snapshot_free(snapshot);
    ep_routing_table_unref(table);
    return bytes;
}

static size_t put_drawn(uint8_t *out, uint8_t kind, size_t before, uint32_t random)
{
    uint8_t rest[2048] = {0};
    size_t bytes = 0;
    for (uint32_t i = 0; i < 8; i++) {
        bytes = proto_mutate(types[kind], rest + before, bytes, sizeof(rest) - before,
                             random + i * 2654435761u);
    }
    return fuzz_record_put(out, kind, rest, before + bytes);
}

size_t fuzz_seed(size_t index, uint8_t *out)
{
    static const uint8_t controls[][2] = {
        {EP_FRAME_CANCEL, 4}, {EP_FRAME_PING, 0}, {EP_FRAME_CREDIT, 0}, {EP_FRAME_GOODBYE, 0}};
    uint32_t random = (uint32_t)index * 40503u + 1;
    if (index >= 12) {
        return 0;
    }
    if (index >= 8) { /* for the commands alone */
        size_t at = index % 2 ? put_hello(out) : 0;
        return at + put_drawn(out + at, index % 2 ? RECORD_CLUSTER : RECORD_LOAD, 0, random);
    }
    size_t at = index == 7 ? put_drawn(out, RECORD_HELLO, 1, random) : put_hello(out);
    at += put_table(out + at, index % 3);
    at += index == 5 ? put_drawn(out + at, RECORD_END, 1, random) : 0;
    at += index == 6 ? put_drawn(out + at, RECORD_TABLE, 1, random) : put_table(out + at, 1);
    return at + (index < 4 ? fuzz_record_put(out + at, RECORD_CONTROL, controls[index], 2)
                           : put_drawn(out + at, RECORD_CLUSTER, 0, random));
}

static size_t change(uint8_t kind, uint8_t *rest, size_t bytes, size_t bytes_max, uint32_t random)
{
    kind %= RECORD_KINDS;
    size_t before = kind <= RECORD_END;
    if (types[kind] == NULL || bytes < before || random % 4 == 0) {
        return fuzz_mutate_bytes(rest, bytes, bytes_max);
    }
    return before +
           proto_mutate(types[kind], rest + before, bytes - before, bytes_max - before, random / 4);
}

static size_t mutate(uint8_t *data, size_t bytes, size_t bytes_max, uint32_t random)
{
    return fuzz_script_mutate(data, bytes, bytes_max, random, change);
}

size_t (*const fuzz_mutate)(uint8_t *, size_t, size_t, uint32_t) = mutate;

void fuzz_start(void)
{
    static uint8_t script[FUZZ_BYTES_MAX];
    uint32_t owned[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    fake_node_config node = {.name = "n0",
                             .url = NODE_URL,
                             .shape = shape,
                             .owned = owned,
                             .owned_count = shape.experts};
    FUZZ_CHECK(ep_buffer_pool_create(0, 1 << 20, &pool) == EP_OK);
    good_node = fake_node_start(&node);
    size_t bytes = put_hello(script);
    bytes += put_table(script + bytes, 1);
    FUZZ_CHECK(run(script, bytes, GOOD_US) == EP_OK);
}
