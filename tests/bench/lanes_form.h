/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One way to echo messages between two processes, for bench_lanes. Every form keeps `depth`
 * messages outstanding on one connection and measures each round trip from its first byte sent to
 * its last byte back.
 */
#ifndef EP_BENCH_LANES_FORM_H
#define EP_BENCH_LANES_FORM_H

#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "transport/transport.h"

#define LANES_DEPTH_MAX 8
#define LANES_BYTES_MAX ((size_t)16 << 20)

typedef struct lanes_form lanes_form;
struct lanes_form {
    const char *name;
    void (*connect)(lanes_form *form); /* NULL: nothing to do */
    /* Echoes count messages of bytes; each one's microseconds in out_us (count of them). Returns
     * seconds, < 0 when a reply never came. */
    double (*run)(lanes_form *form, size_t bytes, int count, int depth, double *out_us);
    void (*close)(lanes_form *form);
    pid_t server;                 /* whose CPU time counts */
    const cpu_set_t *server_cpus; /* where a server runs that run starts */
    pid_t client;                 /* as server; 0: this process */
    uint32_t busy_poll_us;        /* of both sides */
    void *state;
};

/*
 * Each _open starts the server process, and is called before the first connect: a fork must come
 * before the lanes' threads.
 */
/* Plain sockets: the limit of the stream lanes. whole: only ways that echo a message once they have
 * all of it. */
void lanes_tcp_open(lanes_form *form, bool whole);
/* Futexes and copies in shared memory: the limit of the shm lane. */
void lanes_futex_open(lanes_form *form);
/* A lane alone: frames with checked headers. url: to listen on. */
void lanes_lane_open(lanes_form *form, const ep_lane_ops *lane, const char *url);
/* The whole RPC layer, Hello to credits. stream_lane: "uv" or "nng" for a tcp url. */
void lanes_rpc_open(lanes_form *form, const char *stream_lane, const char *url);
/* gRPC C++ through a program of its own. False when it was not built. */
bool lanes_grpc_open(lanes_form *form);

/* Says what failed and ends the process. */
void lanes_fail(const char *what, const char *why) __attribute__((noreturn));

/* ---- for forms whose replies arrive by callback: a fixed number outstanding, counted ---- */

typedef struct lanes_pipeline {
    int count, depth;
    int started, finished; /* atomic */
    double begin_us[LANES_DEPTH_MAX];
    double *out_us;
    void (*send)(void *arg, int slot);
    void *arg;
    void *done; /* sem_t */
} lanes_pipeline;

/* Sends, waits for all. Returns seconds, < 0 when a reply never came. */
double lanes_pipeline_run(lanes_pipeline *p);
/* The reply to what was sent in this slot is there: sends the next. */
void lanes_pipeline_reply(lanes_pipeline *p, int slot);

#endif
