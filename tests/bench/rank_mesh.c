/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/rank_mesh.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "transport/transport.h"

#define CHUNK_BYTES (1u << 20)
#define SENDS_MAX 4096u

/* A frame: its length, the sender's rank, then the bytes. */
typedef struct mesh_prefix {
    uint64_t bytes;
    uint32_t rank;
    uint32_t zero[13];
} mesh_prefix;

_Static_assert(sizeof(mesh_prefix) == EP_FRAME_PREFIX_BYTES,
               "the lane reads that many bytes first");

typedef struct mesh_peer {
    rank_mesh *mesh;
    ep_conn *conn;
    ep_dial *dial;
    uint8_t *bytes; /* [room]: own, or the caller's */
    uint8_t *own;
    size_t room;
    size_t come;
    size_t taken;
} mesh_peer;

typedef struct mesh_send {
    ep_send send;
    mesh_prefix prefix;
    rank_mesh *mesh;
} mesh_send;

struct rank_mesh {
    uint32_t rank;
    uint32_t ranks;
    uint16_t port;
    ep_buffer_pool *pool;
    ep_lane_limits limits;
    ep_listener *listener;
    mesh_peer peers[RANK_MESH_MAX];
    mesh_send *sends; /* [SENDS_MAX] */
    uint32_t sends_used;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint32_t sends_open;
    uint32_t connected;
    uint32_t open;
};

static void broken(const char *what, const ep_error *error)
{
    fprintf(stderr, "rank_mesh: %s %s\n", what, error != NULL ? error->text : "");
    _exit(1);
}

static ep_err frame_bytes(const uint8_t prefix[EP_FRAME_PREFIX_BYTES], size_t *out_bytes,
                          ep_error *out_error)
{
    mesh_prefix p;
    memcpy(&p, prefix, sizeof(p));
    if (p.bytes < sizeof(p) || p.rank >= RANK_MESH_MAX) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL, "not a frame of this benchmark");
    }
    *out_bytes = p.bytes;
    return EP_OK;
}

/* A connection says with its first frame, which has no bytes, who is there. */
static void on_frame(void *arg, ep_conn *conn, ep_buffer *taken_frame)
{
    rank_mesh *mesh = arg;
    mesh_prefix p;
    memcpy(&p, taken_frame->data, sizeof(p));
    size_t bytes = p.bytes - sizeof(p);
    mesh_peer *peer = &mesh->peers[p.rank];
    pthread_mutex_lock(&mesh->lock);
    if (peer->conn == NULL) {
        peer->conn = conn;
        mesh->connected++;
    }
    if (bytes > peer->room - peer->come) {
        broken("a rank sent more than there is room for", NULL);
    }
    if (bytes > 0) {
        memcpy(peer->bytes + peer->come, taken_frame->data + sizeof(p), bytes);
    }
    ep_buffer_unref(taken_frame);
    peer->come += bytes;
    pthread_cond_broadcast(&mesh->changed);
    pthread_mutex_unlock(&mesh->lock);
}

static void on_closed(void *arg, ep_conn *conn, const ep_error *error)
{
    rank_mesh *mesh = arg;
    (void)conn;
    (void)error;
    pthread_mutex_lock(&mesh->lock);
    mesh->open--;
    pthread_cond_broadcast(&mesh->changed);
    pthread_mutex_unlock(&mesh->lock);
}

static void start(rank_mesh *mesh, ep_conn *conn)
{
    const ep_conn_handler handler = {.on_frame = on_frame, .on_closed = on_closed, .arg = mesh};
    pthread_mutex_lock(&mesh->lock);
    mesh->open++;
    pthread_mutex_unlock(&mesh->lock);
    ep_conn_start(conn, &handler);
}

static void on_accept(void *arg, ep_conn *taken_conn)
{
    start(arg, taken_conn);
}

static void on_sent(ep_send *send, ep_err result)
{
    rank_mesh *mesh = ((mesh_send *)send)->mesh;
    (void)result;
    pthread_mutex_lock(&mesh->lock);
    mesh->sends_open--;
    pthread_cond_broadcast(&mesh->changed);
    pthread_mutex_unlock(&mesh->lock);
}

static void send_frame(rank_mesh *mesh, ep_conn *conn, const void *data, size_t bytes)
{
    if (mesh->sends_used == SENDS_MAX) {
        broken("too many frames in one exchange", NULL);
    }
    mesh_send *s = &mesh->sends[mesh->sends_used++];
    memset(s, 0, sizeof(*s));
    s->mesh = mesh;
    s->prefix = (mesh_prefix){.bytes = sizeof(s->prefix) + bytes, .rank = mesh->rank};
    s->send.parts[0] = (ep_send_part){&s->prefix, sizeof(s->prefix)};
    s->send.parts[1] = (ep_send_part){data, bytes};
    s->send.parts_count = 2;
    s->send.done = on_sent;
    pthread_mutex_lock(&mesh->lock);
    mesh->sends_open++;
    pthread_mutex_unlock(&mesh->lock);
    if (ep_conn_send(conn, &s->send) != EP_OK) {
        broken("send", NULL);
    }
}

/* Runs again when nobody listens there yet. */
static void on_dialled(void *arg, ep_conn *taken_conn, const ep_error *error)
{
    mesh_peer *peer = arg;
    rank_mesh *mesh = peer->mesh;
    (void)error;
    if (taken_conn != NULL) {
        start(mesh, taken_conn);
    }
    pthread_mutex_lock(&mesh->lock);
    peer->conn = taken_conn;
    mesh->connected += taken_conn != NULL;
    peer->taken = 1; /* answered */
    pthread_cond_broadcast(&mesh->changed);
    pthread_mutex_unlock(&mesh->lock);
}

static void dial(rank_mesh *mesh, uint32_t to, const char *address)
{
    char url[64];
    ep_error error;
    mesh_peer *peer = &mesh->peers[to];
    snprintf(url, sizeof(url), "tcp://%s:%u", address, mesh->port);
    const ep_lane_address lane_address = {.url = url};
    const ep_lane_ops *lane = ep_lane_for_url(url);
    while (peer->conn == NULL) {
        peer->taken = 0;
        if (ep_lane_dial_begin(lane, &lane_address, &mesh->limits, on_dialled, peer, &peer->dial,
                               &error) != EP_OK) {
            broken("dial", &error);
        }
        pthread_mutex_lock(&mesh->lock);
        while (peer->taken == 0) {
            pthread_cond_wait(&mesh->changed, &mesh->lock);
        }
        pthread_mutex_unlock(&mesh->lock);
        ep_dial_release(peer->dial);
        if (peer->conn == NULL) {
            usleep(10000);
        }
    }
    peer->taken = 0;
    send_frame(mesh, peer->conn, "", 0);
}

rank_mesh *rank_mesh_open(uint32_t rank, uint32_t ranks, const char *const *addresses,
                          uint16_t port, size_t recv_bytes)
{
    char url[64];
    ep_error error;
    rank_mesh *mesh = calloc(1, sizeof(*mesh));
    mesh_send *sends = calloc(SENDS_MAX, sizeof(*sends));
    if (mesh == NULL || sends == NULL ||
        ep_buffer_pool_create(0, 512u << 20, &mesh->pool) != EP_OK) {
        broken("no memory", NULL);
        return NULL;
    }
    mesh->rank = rank;
    mesh->ranks = ranks;
    mesh->port = port;
    mesh->sends = sends;
    mesh->limits = (ep_lane_limits){.frame_bytes = frame_bytes,
                                    .pool = mesh->pool,
                                    .frame_bytes_max = CHUNK_BYTES + sizeof(mesh_prefix),
                                    .send_queue_bytes_max = 1u << 30,
                                    .connections_max = RANK_MESH_MAX};
    pthread_mutex_init(&mesh->lock, NULL);
    pthread_cond_init(&mesh->changed, NULL);
    for (uint32_t i = 0; i < ranks; i++) {
        mesh->peers[i].mesh = mesh;
        mesh->peers[i].own = malloc(recv_bytes + 1);
        if (mesh->peers[i].own == NULL) {
            broken("no memory", NULL);
        }
        memset(mesh->peers[i].own, 0, recv_bytes); /* pages are there before anything is timed */
        mesh->peers[i].bytes = mesh->peers[i].own;
        mesh->peers[i].room = recv_bytes;
    }
    snprintf(url, sizeof(url), "tcp://%s:%u", addresses[rank], port);
    const ep_lane_address own = {.url = url};
    const ep_lane_ops *lane = ep_lane_for_url(url);
    if (ep_lane_listen(lane, &own, &mesh->limits, on_accept, mesh, &mesh->listener, &error) !=
        EP_OK) {
        broken("listen", &error);
    }
    for (uint32_t i = 0; i < rank; i++) {
        dial(mesh, i, addresses[i]);
    }
    pthread_mutex_lock(&mesh->lock);
    while (mesh->connected < ranks - 1) {
        pthread_cond_wait(&mesh->changed, &mesh->lock);
    }
    pthread_mutex_unlock(&mesh->lock);
    rank_mesh_flush(mesh);
    return mesh;
}

void rank_mesh_close(rank_mesh *mesh)
{
    rank_mesh_flush(mesh);
    ep_listener_close(mesh->listener);
    for (uint32_t i = 0; i < mesh->ranks; i++) {
        if (mesh->peers[i].conn != NULL) {
            ep_conn_close(mesh->peers[i].conn);
        }
    }
    pthread_mutex_lock(&mesh->lock);
    while (mesh->open > 0) {
        pthread_cond_wait(&mesh->changed, &mesh->lock);
    }
    pthread_mutex_unlock(&mesh->lock);
    for (uint32_t i = 0; i < mesh->ranks; i++) {
        if (mesh->peers[i].conn != NULL) {
            ep_conn_release(mesh->peers[i].conn);
        }
        free(mesh->peers[i].own);
    }
    ep_buffer_pool_destroy(mesh->pool);
    free(mesh->sends);
    free(mesh);
}

void rank_mesh_receive_at(rank_mesh *mesh, void *places, size_t each)
{
    pthread_mutex_lock(&mesh->lock);
    for (uint32_t i = 0; i < mesh->ranks; i++) {
        mesh_peer *peer = &mesh->peers[i];
        if (peer->come != peer->taken) {
            broken("receives elsewhere while bytes are not waited for", NULL);
        }
        peer->bytes = (uint8_t *)places + i * each;
        peer->room = each;
        peer->come = 0;
        peer->taken = 0;
    }
    pthread_mutex_unlock(&mesh->lock);
}

void rank_mesh_post(rank_mesh *mesh, uint32_t to, const void *data, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += CHUNK_BYTES) {
        send_frame(mesh, mesh->peers[to].conn, (const char *)data + at,
                   bytes - at > CHUNK_BYTES ? CHUNK_BYTES : bytes - at);
    }
}

/* Makes room of what was waited for; what came beyond is moved to the front. Lock held. */
static void drop_taken(mesh_peer *peer)
{
    if (peer->taken > 0) {
        memmove(peer->bytes, peer->bytes + peer->taken, peer->come - peer->taken);
        peer->come -= peer->taken;
        peer->taken = 0;
    }
}

void rank_mesh_flush(rank_mesh *mesh)
{
    pthread_mutex_lock(&mesh->lock);
    while (mesh->sends_open > 0) {
        pthread_cond_wait(&mesh->changed, &mesh->lock);
    }
    mesh->sends_used = 0;
    for (uint32_t i = 0; i < mesh->ranks; i++) {
        drop_taken(&mesh->peers[i]);
    }
    pthread_mutex_unlock(&mesh->lock);
}

/* Ranks may run ahead by one exchange. */
const void *rank_mesh_wait(rank_mesh *mesh, uint32_t from, size_t bytes)
{
    mesh_peer *peer = &mesh->peers[from];
    pthread_mutex_lock(&mesh->lock);
    drop_taken(peer);
    while (peer->come < bytes) {
        pthread_cond_wait(&mesh->changed, &mesh->lock);
    }
    peer->taken = bytes;
    pthread_mutex_unlock(&mesh->lock);
    return peer->bytes;
}
