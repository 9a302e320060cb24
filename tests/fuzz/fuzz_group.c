/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A rank of a group, from its listener's first stranger to the end of a dispatch and a combine; all
 * the other ranks, and whoever else dials in, are hostile. The input's first byte chooses the
 * scene; a script of frames follows, each record's kind being the connection and what is sent on
 * it.
 *
 * All frames are sent before the rank's calls begin: what belongs to them waits as that of a faster
 * rank does.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "fuzz.h"
#include "fuzz_group_scene.h"
#include "fuzz_script.h"
#include "integration/group/case_draw.h"
#include "integration/group/rank_call.h"
#include "transport/transport.h"
#include "wire/frame.h"

#define PATIENCE_US 2000 /* for ranks that do not come, and for rows */
#define LEARN_US 50000   /* the same for what one must send before it waits for it */
#define GOOD_US 20000000 /* for what comes */
#define MEMBERSHIP 0x1122334455667788ull

typedef struct peer {
    ep_conn *conn;
    ep_dial *dial;
} peer;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    const group_scene *scene;
    peer peers[CONNECTIONS];
    const uint8_t *script;
    size_t script_bytes;
    int records;
    uint64_t membership; /* atomic */
    uint32_t open;       /* connections, sends and dials: all must come to an end */
    uint32_t sends;
    uint32_t dials;
    bool playing;
} w = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static bool is_learning;

static ep_buffer_pool *pool;
static oracle_case mesh_case, pair_case;
static ep_group *alone; /* the EP group of a pair's rank */
static ep_lane_limits limits;
static ep_listener *listeners[RANKS_MAX - 1];

static void play(void);

static uint32_t rank_of(size_t connection)
{
    uint32_t rank = (uint32_t)connection % (w.scene->world - 1);
    return rank + (rank >= w.scene->rank);
}

static uint64_t membership(void)
{
    return __atomic_load_n(&w.membership, __ATOMIC_RELAXED);
}

static void ended(uint32_t *count)
{
    pthread_mutex_lock(&w.lock);
    --*count;
    pthread_cond_broadcast(&w.changed);
    pthread_mutex_unlock(&w.lock);
}

/* Lock held. False: late. */
static bool wait_change(uint64_t until_ns)
{
    struct timespec until = {(time_t)(until_ns / EP_NS_PER_S), (long)(until_ns % EP_NS_PER_S)};
    return pthread_cond_clockwait(&w.changed, &w.lock, CLOCK_MONOTONIC, &until) == 0;
}

/* A wait that long means that it never ends. */
static void wait_for(const uint32_t *count, const bool *flag)
{
    uint64_t until_ns = ep_clock_now_ns() + 60 * EP_NS_PER_S;
    pthread_mutex_lock(&w.lock);
    while (*count > 0 || (flag != NULL && *flag)) {
        FUZZ_CHECK(wait_change(until_ns));
    }
    pthread_mutex_unlock(&w.lock);
}

/* ---- the other side's connections ---- */

static void learn(size_t connection, const ep_group_frame *head, const ep_buffer *frame)
{
    group_seen *seen = &group_scenes_seen[w.scene - group_scenes];
    bool has_rows = head->kind == EP_GROUP_FRAME_ROWS || head->kind == EP_GROUP_FRAME_HOST_ROWS;
    if (!is_learning || !has_rows || head->number >= CALLS) {
        return;
    }
    memcpy(seen->record[head->number], frame->data + EP_GROUP_FRAME_FIXED_BYTES,
           EP_GROUP_RECORD_BYTES);
    if (head->number == 0) {
        seen->body_bytes[connection] = frame->bytes - EP_GROUP_BODY_OFFSET;
        FUZZ_CHECK(seen->body_bytes[connection] <= sizeof(seen->body[connection]));
        memcpy(seen->body[connection], frame->data + EP_GROUP_BODY_OFFSET,
               seen->body_bytes[connection]);
    }
}

static void on_frame(void *arg, ep_conn *conn, ep_buffer *taken_frame)
{
    peer *p = arg;
    ep_group_frame head;
    (void)conn;
    FUZZ_CHECK(ep_group_frame_decode(taken_frame->data, &head, NULL) == EP_OK);
    pthread_mutex_lock(&w.lock);
    if (head.kind == EP_GROUP_FRAME_TABLE) {
        __atomic_store_n(&w.membership, head.membership, __ATOMIC_RELAXED);
        pthread_cond_broadcast(&w.changed);
    }
    learn((size_t)(p - w.peers), &head, taken_frame);
    pthread_mutex_unlock(&w.lock);
    ep_buffer_unref(taken_frame);
    if (head.kind == EP_GROUP_FRAME_HELLO) {
        play();
    }
}

static void on_closed(void *arg, ep_conn *conn, const ep_error *error)
{
    (void)arg;
    (void)conn;
    (void)error;
    ended(&w.open);
}

static void adopt(peer *p, ep_conn *taken_conn)
{
    ep_conn_handler handler = {.on_frame = on_frame, .on_closed = on_closed, .arg = p};
    pthread_mutex_lock(&w.lock);
    p->conn = taken_conn;
    w.open++;
    pthread_mutex_unlock(&w.lock);
    ep_conn_start(taken_conn, &handler);
}

static void on_accept(void *arg, ep_conn *taken_conn)
{
    peer *p = arg;
    if (p->conn == NULL) {
        adopt(p, taken_conn);
    } else { /* it tries again */
        ep_conn_release(taken_conn);
    }
}

static void on_dial(void *arg, ep_conn *taken_conn, const ep_error *error)
{
    (void)error;
    FUZZ_CHECK(taken_conn != NULL);
    adopt(arg, taken_conn);
    ended(&w.dials);
}

/* ---- playing ---- */

typedef struct sending {
    ep_send send; /* first member */
    uint8_t bytes[];
} sending;

static void on_sent(ep_send *send, ep_err result)
{
    (void)result;
    free(send);
    ended(&w.sends);
}

/* bytes: a frame's, with room for its fixed part in front; head NULL: it is there. */
static void send_bytes(peer *p, ep_group_frame *head, const uint8_t *bytes, size_t count)
{
    size_t fixed = head != NULL ? EP_GROUP_FRAME_FIXED_BYTES : 0;
    sending *s = calloc(1, sizeof(*s) + fixed + count);
    FUZZ_CHECK(s != NULL);
    memcpy(s->bytes + fixed, bytes, count);
    fuzz_stay_inside(s->bytes + fixed, count);
    if (head != NULL) {
        head->payload_bytes = count;
        if (head->flags & EP_GROUP_FRAME_FLAG_CRC) {
            head->payload_crc ^= ep_crc32c(0, s->bytes + fixed, count);
        }
        ep_group_frame_encode(head, s->bytes);
    }
    s->send.parts[0] = (ep_send_part){.data = s->bytes, .bytes = fixed + count};
    s->send.parts_count = 1;
    s->send.done = on_sent;
    pthread_mutex_lock(&w.lock);
    w.sends++;
    pthread_mutex_unlock(&w.lock);
    if (ep_conn_send(p->conn, &s->send) != EP_OK) {
        on_sent(&s->send, EP_ERR_CLOSED);
    }
}

static void send_hello(peer *p, const uint8_t *rest, size_t bytes)
{
    uint8_t payload[EP_GROUP_HELLO_BYTES];
    uint32_t rank = rank_of((size_t)(p - w.peers));
    ep_group_hello hello = {
        .world_size = w.scene->world, .rank = rank, .name = "fuzz", .url = "loopback://fuzz-peer"};
    ep_group_frame head = {.kind = EP_GROUP_FRAME_HELLO, .rank = rank, .membership = membership()};
    snprintf(hello.host, sizeof(hello.host), "%s", w.scene->hosts[rank]);
    ep_group_hello_encode(&hello, payload);
    for (size_t i = 0; i + 3 <= bytes; i += 3) {
        payload[((size_t)rest[i] | (size_t)rest[i + 1] << 8) % sizeof(payload)] ^= rest[i + 2];
    }
    send_bytes(p, &head, payload, sizeof(payload));
}

/* Small ones, and the greatest. */
static uint64_t number_of(uint8_t byte)
{
    return byte < 0xf0 ? byte : UINT64_MAX - (0xffu - byte);
}

static void send_frame(peer *p, const uint8_t *rest, size_t bytes, bool with_record)
{
    uint8_t payload[EP_GROUP_BODY_OFFSET + FUZZ_BYTES_MAX] = {0};
    size_t before = with_record ? EP_GROUP_BODY_OFFSET - EP_GROUP_FRAME_FIXED_BYTES : 0;
    if (bytes < HEAD_BYTES) {
        return;
    }
    ep_group_frame head = {.kind = (ep_group_frame_kind)rest[0],
                           .flags =
                               rest[1] & (EP_GROUP_FRAME_FLAG_CRC | EP_GROUP_FRAME_FLAG_PASSED_ON),
                           .number = number_of(rest[2]),
                           .generation = (uint32_t)number_of(rest[3]),
                           .origin = (uint32_t)number_of(rest[4]),
                           .membership = membership() ^ (rest[5] & 15),
                           .rank = rank_of((size_t)(p - w.peers)) ^ (rest[5] >> 4),
                           .payload_crc = rest[1] >> 7};
    if (with_record) {
        memcpy(payload, group_scenes_seen[w.scene - group_scenes].record[rest[2] % CALLS],
               EP_GROUP_RECORD_BYTES);
    }
    memcpy(payload + before, rest + HEAD_BYTES, bytes - HEAD_BYTES);
    send_bytes(p, &head, payload, before + bytes - HEAD_BYTES);
}

static void play_record(peer *p, const fuzz_record *r)
{
    switch (r->kind / CONNECTIONS % RECORD_KINDS) {
    case RECORD_HELLO:
        send_hello(p, r->rest, r->bytes);
        break;
    case RECORD_FRAME:
    case RECORD_ROWS:
        send_frame(p, r->rest, r->bytes, r->kind / CONNECTIONS % RECORD_KINDS == RECORD_ROWS);
        break;
    case RECORD_BROKEN:
        send_bytes(p, NULL, r->rest, r->bytes);
        break;
    case RECORD_CLOSE:
        ep_conn_close(p->conn);
        break;
    }
}

/* Rank 0 tells the membership in its table, once all have said hello; else it is ours to tell. */
static void wait_membership(void)
{
    uint64_t until_ns =
        ep_clock_now_ns() + (is_learning ? GOOD_US : PATIENCE_US / 2) * EP_NS_PER_US;
    pthread_mutex_lock(&w.lock);
    while (membership() == 0 && wait_change(until_ns)) {
    }
    pthread_mutex_unlock(&w.lock);
}

/* Goes on until a record is for a connection that is not there yet: its hello goes on. */
static void play(void)
{
    pthread_mutex_lock(&w.lock);
    w.playing = true;
    while (w.script_bytes > 0 && w.records < FUZZ_RECORDS_MAX &&
           w.peers[w.script[0] % CONNECTIONS].conn != NULL) {
        fuzz_record r;
        if (!fuzz_record_next(&w.script, &w.script_bytes, &r)) {
            break;
        }
        w.records++;
        bool all_hellos = w.records == (int)w.scene->world - 1;
        pthread_mutex_unlock(&w.lock);
        play_record(&w.peers[r.kind % CONNECTIONS], &r);
        if (w.scene->rank == 0) { /* on this program's own thread, which may wait */
            wait_for(&w.sends, NULL);
            if (all_hellos) {
                wait_membership();
            }
        }
        pthread_mutex_lock(&w.lock);
    }
    w.playing = false;
    pthread_cond_broadcast(&w.changed);
    pthread_mutex_unlock(&w.lock);
}

static void on_listening(void *arg, const char *url)
{
    ep_lane_address address = {.url = url};
    (void)arg;
    w.dials = CONNECTIONS - w.scene->rank;
    for (size_t c = w.scene->rank; c < CONNECTIONS; c++) {
        ep_error error;
        FUZZ_CHECK(ep_lane_dial_begin(&ep_loopback_lane, &address, &limits, on_dial, &w.peers[c],
                                      &w.peers[c].dial, &error) == EP_OK);
    }
    wait_for(&w.dials, NULL);
    if (w.scene->rank == 0) {
        play();
    }
}

/* ---- the rank ---- */

static ep_err make_calls(ep_group *group, uint64_t deadline_us, ep_error *error)
{
    rank_call call;
    rank_call_init_rows(&call, w.scene->pair ? &pair_case : &mesh_case, w.scene->rank, 24);
    int32_t *ids = call.dispatch.expert_ids.data;
    int32_t counts[4 * LOCAL * RANKS_MAX];
    for (int64_t i = 0; w.scene->by_host && i < call.dispatch.expert_ids.shape[0] * LOCAL; i++) {
        /* nobody has to send rows back */
        ids[i] = (int32_t)(w.scene->rank * LOCAL + (uint32_t)(i % LOCAL));
    }
    call.params.comm_alg = w.scene->by_host ? "hierarchy" : NULL;
    call.dispatch.deadline_us = call.combine.deadline_us = deadline_us;
    if (w.scene->pair) {
        call.params.group_tp = group;
        call.params.tp_world_size = 2;
        call.dispatch.ep_recv_counts = ep_tensor_1d(counts, EP_DTYPE_I32, 2);
        call.dispatch.tp_recv_counts = ep_tensor_1d(counts + 2, EP_DTYPE_I32, 2);
    }
    ep_err err = rank_call_dispatch(&call, w.scene->pair ? alone : group, error);
    if (err == EP_OK && !w.scene->pair) {
        rank_call_experts(&call);
        err = rank_call_combine(&call, group, error);
        fuzz_touch(call.combine.x_out.data, (size_t)call.combine.x_out.shape[0] * ROW_BYTES);
    }
    rank_call_free(&call);
    return err;
}

static ep_err run(const uint8_t *data, size_t bytes, uint64_t meet_us, uint64_t call_us)
{
    static const char *const urls[] = {"loopback://fuzz-group", "loopback://fuzz-group-0"};
    ep_group *group = NULL;
    ep_group_config config;
    ep_error error;
    ep_error_clear(&error);
    w.scene = &group_scenes[data[0] % GROUP_SCENES];
    w.script = data + 1;
    w.script_bytes = bytes - 1;
    w.records = 0;
    __atomic_store_n(&w.membership, w.scene->rank == 0 ? 0 : MEMBERSHIP, __ATOMIC_RELAXED);
    ep_group_config_init(&config);
    config.name = "fuzz";
    config.world_size = w.scene->world;
    config.rank = w.scene->rank;
    config.urls = &urls[w.scene->rank > 0];
    config.urls_count = 1;
    config.listen_url = urls[0];
    config.host = w.scene->hosts[w.scene->rank];
    /* for rank 0 all is played before it looks who is there */
    config.deadline_us = w.scene->rank == 0 ? 1 : meet_us;
    config.frame_bytes_max = 65536;
    config.on_listening = on_listening;
    ep_err err = ep_group_create(&config, &group, &error);
    wait_for(&w.sends, &w.playing);
    if (err == EP_OK) {
        err = make_calls(group, call_us, &error);
        ep_group_destroy(group);
    }
    FUZZ_CHECK(err == EP_OK || error.text[0] != 0);
    for (size_t c = 0; c < CONNECTIONS; c++) {
        if (w.peers[c].dial != NULL) {
            ep_dial_release(w.peers[c].dial);
        }
        if (w.peers[c].conn != NULL) {
            ep_conn_close(w.peers[c].conn);
        }
    }
    wait_for(&w.open, NULL);
    wait_for(&w.sends, NULL);
    for (size_t c = 0; c < CONNECTIONS; c++) {
        if (w.peers[c].conn != NULL) {
            ep_conn_release(w.peers[c].conn);
        }
        w.peers[c] = (peer){NULL, NULL};
    }
    return err;
}

void fuzz_one(const uint8_t *data, size_t bytes)
{
    if (bytes > 0) {
        run(data, bytes, PATIENCE_US, PATIENCE_US);
    }
}

/* ---- seeds ---- */

/* Plays every scene honestly: first to learn the records of its two calls, then both must
 * succeed. */
static void prepare(void)
{
    static uint8_t script[FUZZ_BYTES_MAX];
    uint64_t state = 7;
    if (pool != NULL) {
        return;
    }
    FUZZ_CHECK(ep_buffer_pool_create(0, 1 << 20, &pool) == EP_OK);
    limits = (ep_lane_limits){.frame_bytes = ep_group_frame_read_bytes,
                              .prefix_bytes = EP_GROUP_FRAME_FIXED_BYTES,
                              .pool = pool,
                              .frame_bytes_max = 1 << 20,
                              .send_queue_bytes_max = 8 << 20,
                              .connections_max = 16};
    for (size_t i = 0; i < RANKS_MAX - 1; i++) {
        char url[64];
        snprintf(url, sizeof(url), "loopback://fuzz-group-%zu", i);
        ep_lane_address address = {.url = url};
        FUZZ_CHECK(ep_lane_listen(&ep_loopback_lane, &address, &limits, on_accept, &w.peers[i],
                                  &listeners[i], NULL) == EP_OK);
    }
    mesh_case = (oracle_case){
        .ranks = RANKS_MAX, .experts = RANKS_MAX * LOCAL, .top_k = LOCAL, .hidden = ROW_BYTES / 2};
    pair_case = (oracle_case){.ranks = 1, .experts = 1, .top_k = 1, .hidden = ROW_BYTES / 2};
    case_draw_batch(&state, &pair_case, 4, &pair_case.batch[0]);
    for (int r = 0; r < RANKS_MAX; r++) {
        case_draw_batch(&state, &mesh_case, 4, &mesh_case.batch[r]);
    }
    const char *url = "loopback://fuzz-alone";
    ep_group_config config;
    ep_group_config_init(&config);
    config.name = "alone";
    config.world_size = config.urls_count = 1;
    config.urls = &url;
    FUZZ_CHECK(ep_group_create(&config, &alone, NULL) == EP_OK);
    is_learning = true;
    for (size_t s = 0; s < GROUP_SCENES; s++) {
        for (int calls = 0; calls <= CALLS; calls++) {
            size_t bytes = group_script_put(s, calls, 0, script);
            ep_err err = run(script, bytes, GOOD_US, calls < CALLS ? LEARN_US : GOOD_US);
            FUZZ_CHECK(err == EP_OK || calls < CALLS);
        }
    }
    is_learning = false;
}

void fuzz_start(void)
{
    prepare();
}

size_t fuzz_seed(size_t index, uint8_t *out)
{
    prepare();
    return index < GROUP_SCENES * (EP_GROUP_FRAME_KIND_LAST + 2)
               ? group_script_put(index % GROUP_SCENES, CALLS, (uint8_t)(index / GROUP_SCENES), out)
               : 0;
}

static size_t change(uint8_t kind, uint8_t *rest, size_t bytes, size_t bytes_max, uint32_t random)
{
    (void)kind;
    (void)random;
    return fuzz_mutate_bytes(rest, bytes, bytes_max);
}

static size_t mutate(uint8_t *data, size_t bytes, size_t bytes_max, uint32_t random)
{
    if (bytes < 2) {
        return fuzz_mutate_bytes(data, bytes, bytes_max);
    }
    return 1 + fuzz_script_mutate(data + 1, bytes - 1, bytes_max - 1, random, change);
}

size_t (*const fuzz_mutate)(uint8_t *, size_t, size_t, uint32_t) = mutate;
