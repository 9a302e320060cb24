/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside of the shared-memory lane.
 *
 *   shm_ring      bytes in shared memory, one direction
 *   shm_memory    the sealed memory of a connection, and the message that hands it over
 *   shm_access    whose processes may connect; socket paths, stale sockets
 *   shm_loop      the lane's threads: epoll, work items, later work
 *   shm_conn      a connection: sending, receiving, ending
 *   shm_listener  accepting
 *   shm_dial      dialing
 *
 * A connection's socket carries the memory's descriptor once, and then single bytes that wake the
 * other side. send() with MSG_DONTWAIT is the one wake-up that a hostile peer can neither block nor
 * silence for others, as it could with a shared eventfd or futex. Sockets are polled edge-triggered
 * and seldom read, which makes it about as cheap. The socket's end is the peer's end.
 */
#ifndef EP_TRANSPORT_SHM_LANE_H
#define EP_TRANSPORT_SHM_LANE_H

#include <sys/types.h>

#include "transport/lane_accept.h"
#include "transport/lane_dial.h"
#include "transport/lane_fork.h"
#include "transport/lane_worker.h"
#include "transport/shm/shm_ring.h"

/* Something epoll tells of. Only touched by its loop's thread while registered. */
typedef struct shm_source {
    void (*on_event)(struct shm_source *source, uint32_t events);
} shm_source;

typedef struct shm_loop {
    pthread_mutex_t lock;
    pthread_t thread;
    bool stopping;
    bool woken; /* wake was rung and the thread has not looked at the queue since */
    bool timer_armed;
    ep_lane_jobs posted;
    ep_lane_job *later; /* the thread's */
    int epoll;
    int wake;
    int timer;
    shm_source wake_source;
    shm_source timer_source;
} shm_loop;

/* ---- shm_loop.c ---- */
/* Starts the lane's threads unless they run. Errors: IO. */
ep_err ep_shm_loops_start(ep_error *out_error);
/* The one for listeners and dials. */
shm_loop *ep_shm_loop_first(void);
/* The one for the next connection. */
shm_loop *ep_shm_loop_next(void);
/* fini of ep_lane_ops: ends the loops' threads. */
void ep_shm_fini(void);
/* Has job->run called soon. Its owner lives until then. False: it was posted already, and then
 * runs once for both. */
bool ep_shm_loop_post(shm_loop *loop, ep_lane_job *job);
/* The same within a millisecond, without waking the thread for it: it is likely to be awake
 * before. */
void ep_shm_loop_post_lazy(shm_loop *loop, ep_lane_job *job);
/* What was posted lazily runs soon. */
void ep_shm_loop_hurry(shm_loop *loop);
/* events: of epoll. Errors: IO. */
ep_err ep_shm_loop_watch(shm_loop *loop, int fd, shm_source *source, uint32_t events);
void ep_shm_loop_unwatch(shm_loop *loop, int fd);

/* ---- shm_memory.c ---- */
typedef struct shm_memory {
    uint8_t *base;
    size_t bytes;
    size_t ring_bytes;
    bool counted; /* in ep_shm_stats: we made it */
} shm_memory;

/* Sealed, mapped, and its descriptor, for ep_lane_fd_close. Errors: NO_MEMORY, IO. */
ep_err ep_shm_memory_create(size_t ring_bytes, shm_memory *out_memory, int *out_fd,
                            ep_error *out_error);
/* Maps a descriptor from a peer, which may be anything. Errors: PROTOCOL, NO_MEMORY. */
ep_err ep_shm_memory_adopt(int fd, uint64_t ring_bytes, shm_memory *out_memory,
                           ep_error *out_error);
void ep_shm_memory_close(shm_memory *memory);
/* One more in ep_shm_stats. */
void ep_shm_memory_count_refusal(void);
/* The two ends; listener: the end that created it. */
void ep_shm_memory_rings(const shm_memory *memory, bool listener, shm_producer *out_producer,
                         shm_consumer *out_consumer);
/* Hands over the memory, or with fd -1 the reason why not. False: the peer is gone. */
bool ep_shm_welcome_send(int socket, size_t ring_bytes, int fd, const ep_error *refusal);
/*
 * Reads it; the caller closes *out_fd. Errors: what the listener refused with, PROTOCOL,
 * UNAVAILABLE (gone), RESOURCE_EXHAUSTED (the descriptor did not fit into this process).
 * EP_ERR_CANCELLED: nothing there yet.
 */
ep_err ep_shm_welcome_receive(int socket, uint64_t *out_ring_bytes, int *out_fd,
                              ep_error *out_error);

/* ---- shm_access.c ---- */
typedef struct shm_access {
    size_t ring_bytes;
    size_t total_bytes;
    size_t uids_count;
    uint32_t uids[EP_SHM_IDS_MAX];
    size_t gids_count;
    uint32_t gids[EP_SHM_IDS_MAX];
} shm_access;

/* What a listener and a dial begin with: the path in url, a copy of the address's that lasts, a
 * checked copy of its settings, and the lane's threads. Errors: INVALID_ARGUMENT, as
 * ep_shm_loops_start. */
ep_err ep_shm_open(const ep_lane_address *address, const char *url, const char **out_path,
                   shm_access *out_access, ep_error *out_error);
/* Who is at the other end, for people, and whether it may be. Errors: PERMISSION_DENIED. */
ep_err ep_shm_access_check(const shm_access *access, int socket, char *out_peer, size_t peer_bytes,
                           ep_error *out_error);
/* A dialer's: the same; whoever owns the socket's directory may also be there. */
ep_err ep_shm_access_check_listener(const shm_access *access, int socket, const char *path,
                                    ep_error *out_error);
/*
 * Binds and listens; a socket that a dead process left is replaced. *out_lock holds the name until
 * ep_shm_path_close.
 * Errors: UNAVAILABLE (in use), INVALID_ARGUMENT (directory missing, or writable by everybody), IO.
 */
ep_err ep_shm_path_listen(const char *path, bool others, int *out_socket, int *out_lock,
                          ep_error *out_error);
/* Removes the names and gives them free. */
void ep_shm_path_close(const char *path, int lock);

/* ---- shm_conn.c ---- */
/* Takes socket, memory and count's place (NULL at the dialing end) in every case. Errors:
 * NO_MEMORY, IO. */
ep_err ep_shm_conn_create(const ep_lane_ops *lane, int taken_socket, shm_memory *taken_memory,
                          const ep_lane_limits *limits, const char *peer,
                          ep_accept_count *taken_count, ep_conn **out_conn, ep_error *out_error);
ep_err ep_shm_conn_send(ep_conn *conn, ep_send *send);

typedef struct shm_dial {
    ep_lane_dial lane;
    shm_loop *loop;
    shm_source source;
    ep_lane_job job; /* begins, and ends a cancelled one; posted with a reference */
    shm_access access;
    const char *path; /* in the URL */
    /* the loop's */
    int socket;
    bool begun;
    bool over;
} shm_dial;

/* ---- shm_dial.c ---- */
ep_err ep_shm_dial(ep_dial *dial, const ep_lane_address *address, ep_error *out_error);

#endif
