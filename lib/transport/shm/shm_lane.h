/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside of the shared-memory lane.
 *
 *   shm_ring      bytes in shared memory, one direction
 *   shm_memory    the sealed memory of a connection, and the message that hands it over
 *   shm_access    whose processes may connect; socket paths, stale sockets
 *   shm_loop      the lane's threads: epoll, work items, later work
 *   shm_conn      a connection: sending, receiving, ending
 *   shm_lane      listeners and dials
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

/* An event source of epoll. While registered, only its loop's thread touches it. */
typedef struct shm_source {
    void (*on_event)(struct shm_source *source, uint32_t events);
} shm_source;

typedef struct shm_loop {
    pthread_mutex_t lock;
    pthread_t thread;
    bool stopping;
    bool woken; /* wake was signalled, and the thread has not read the queue since */
    bool timer_armed;
    ep_lane_jobs posted;
    ep_lane_job *later; /* only for the loop's thread */
    int epoll;
    int wake;
    int timer;
    shm_source wake_source;
    shm_source timer_source;
} shm_loop;

/* ---- shm_loop.c ---- */
/* Starts the lane's threads unless they run. Errors: IO. */
ep_err ep_shm_loops_start(ep_error *out_error);
/* The loop for listeners and dials. */
shm_loop *ep_shm_loop_first(void);
/* The loop for the next connection. */
shm_loop *ep_shm_loop_next(void);
/* fini of ep_lane_ops: ends the loops' threads. */
void ep_shm_fini(void);
/* Runs the job soon. Its owner must live until then. False: it was posted already; it runs once. */
bool ep_shm_loop_post(shm_loop *loop, ep_lane_job *job);
/* Runs the job within a millisecond, without waking the thread: it is usually awake before that. */
void ep_shm_loop_post_lazy(shm_loop *loop, ep_lane_job *job);
/* Runs lazily posted jobs soon. */
void ep_shm_loop_hurry(shm_loop *loop);
/* events: epoll flags. Errors: IO. */
ep_err ep_shm_loop_watch(shm_loop *loop, int fd, shm_source *source, uint32_t events);
void ep_shm_loop_unwatch(shm_loop *loop, int fd);

/* ---- shm_memory.c ---- */
typedef struct shm_memory {
    uint8_t *base;
    size_t bytes;
    size_t ring_bytes;
    bool counted; /* counted in ep_shm_stats, because we created it */
} shm_memory;

/* Creates sealed memory and maps it; *out_fd: close with ep_lane_fd_close. Errors: NO_MEMORY,
 * IO. */
ep_err ep_shm_memory_create(size_t ring_bytes, shm_memory *out_memory, int *out_fd,
                            ep_error *out_error);
/* Maps a descriptor received from a peer; it may be anything. Errors: PROTOCOL, NO_MEMORY. */
ep_err ep_shm_memory_adopt(int fd, uint64_t ring_bytes, shm_memory *out_memory,
                           ep_error *out_error);
void ep_shm_memory_close(shm_memory *memory);
/* Counts a refusal in ep_shm_stats. */
void ep_shm_memory_count_refusal(void);
/* The rings for one end; listener: the end that created the memory. */
void ep_shm_memory_rings(const shm_memory *memory, bool listener, shm_producer *out_producer,
                         shm_consumer *out_consumer);
/* Sends the memory or, with fd -1, the reason of a refusal. False: the peer is gone. */
bool ep_shm_welcome_send(int socket, size_t ring_bytes, int fd, const ep_error *refusal);
/*
 * Receives it; the caller closes *out_fd. Errors: the listener's refusal, PROTOCOL, UNAVAILABLE
 * (peer gone), RESOURCE_EXHAUSTED (this process had no room for the descriptor). EP_ERR_CANCELLED:
 * nothing has arrived yet.
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

/* First step of a listener and a dial: finds the path in url (a lasting copy of the address's URL),
 * checks and copies the settings, and starts the lane's threads. Errors: INVALID_ARGUMENT, as
 * ep_shm_loops_start. */
ep_err ep_shm_open(const ep_lane_address *address, const char *url, const char **out_path,
                   shm_access *out_access, ep_error *out_error);
/* Describes the process at the other end for messages, and checks whether it may connect. Errors:
 * PERMISSION_DENIED. */
ep_err ep_shm_access_check(const shm_access *access, int socket, char *out_peer, size_t peer_bytes,
                           ep_error *out_error);
/* The same for a dialler, which also accepts the owner of the socket's directory. */
ep_err ep_shm_access_check_listener(const shm_access *access, int socket, const char *path,
                                    ep_error *out_error);
/*
 * Binds and listens. A socket left by a dead process is replaced. *out_lock holds the name until
 * ep_shm_path_close.
 * Errors: UNAVAILABLE (in use), INVALID_ARGUMENT (directory missing, or writable by everybody), IO.
 */
ep_err ep_shm_path_listen(const char *path, bool others, int *out_socket, int *out_lock,
                          ep_error *out_error);
/* Removes the names and releases the lock. */
void ep_shm_path_close(const char *path, int lock);

/* ---- shm_conn.c ---- */
/* Takes socket, memory and count's place (NULL at the dialling end), also on error. Errors:
 * NO_MEMORY, IO. */
ep_err ep_shm_conn_create(const ep_lane_ops *lane, int taken_socket, shm_memory *taken_memory,
                          const ep_lane_limits *limits, const char *peer,
                          ep_accept_count *taken_count, ep_conn **out_conn, ep_error *out_error);
ep_err ep_shm_conn_send(ep_conn *conn, ep_send *send);

#endif
