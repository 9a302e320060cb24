/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A server with real services whose handlers do what the request asks for, a channel to it, and a
 * collector of replies.
 *
 * Forward, by request.model:
 *   "echo"    sends the tensors back
 *   "hold"    kept until fixture_release or cancel
 *   "late"    answered by another thread, shuffled
 *   "error"   NOT_OWNER with every detail
 *   "none"    finishes without a reply
 *   "big"     a reply above the peer's frame limit
 * WatchPlacement: sends have.number snapshots and ends; have.term 1: then waits for the caller to
 * cancel.
 */
#ifndef EP_TESTS_RPC_FIXTURE_H
#define EP_TESTS_RPC_FIXTURE_H

#include <pthread.h>

#include "base/clock.h"
#include "base/host.h"
#include "coordinator.pb-c.h"
#include "expert.pb-c.h"
#include "health.pb-c.h"
#include "rpc/rpc.h"

#define HELD_MAX 4096
#define SECONDS 60 /* nothing is timed: a wait that long means it never comes */

/* One test over each lane; the body has its url. */
#define RPC_LANE_TEST(suite, name)                                                                 \
    static void name(const char *url);                                                             \
    Test(suite##_loopback, name)                                                                   \
    {                                                                                              \
        name("loopback://" #suite);                                                                \
    }                                                                                              \
    Test(suite##_tcp, name)                                                                        \
    {                                                                                              \
        name("tcp://127.0.0.1:0");                                                                 \
    }                                                                                              \
    static void name(const char *url)

typedef struct fixture fixture;

typedef struct expert_impl {
    Expertd__V1__ExpertService_Service service;
    fixture *f;
} expert_impl;
typedef struct coordinator_impl {
    Expertd__V1__Coordinator_Service service;
    fixture *f;
} coordinator_impl;

struct fixture {
    ep_timer_service *timers;
    ep_buffer_pool *pool;
    ep_rpc_server *server;
    ep_rpc_channel *channel;
    char url[EP_ADDRESS_BYTES];
    expert_impl expert;
    coordinator_impl coordinator;
    Expertd__V1__WeightFiles_Service weights; /* without methods: for what is refused before */

    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_mutex_t hold_lock;
    ep_rpc_call *registering;
    ep_rpc_call *held[HELD_MAX];
    uint32_t held_count;
    uint32_t cancels;   /* on_cancel runs */
    uint32_t answered;  /* of them: the caller uses another answer */
    uint32_t forwards;  /* handlers started */
    uint32_t states[4]; /* how often each channel state was reported */
    uint64_t late_replies;
    char peer_host[EP_HOST_BYTES];
    char seen_metadata[64];
    char seen_peer[EP_NODE_NAME_BYTES];
    uint64_t seen_deadline_ns;
    ep_error broken; /* of the last BROKEN report */
    pthread_t late_thread;
    Expertd__V1__ForwardReply_Closure forward_closure;
    bool late_stop;
    ep_rpc_call *late[HELD_MAX];
    uint32_t late_count;
    uint32_t late_batch; /* the thread answers once so many wait */
};

/* One caller's view of one call. */
typedef struct answer {
    fixture *f;
    uint32_t messages;
    uint32_t ends;
    ep_error error;   /* code EP_OK on success */
    uint32_t slots;   /* of the ForwardReply */
    uint64_t numbers; /* sum over epoch numbers of the stream */
    size_t tensor_bytes;
    uint8_t first_byte;
    uint8_t last_byte;
    bool aligned;
    bool draining;
    ep_rpc_call_id cancel_inside; /* cancel this call from the callback of its first message */
} answer;

typedef struct fixture_options {
    const char *url;
    void (*server)(ep_rpc_server_config *config);
    void (*channel)(ep_rpc_channel_config *config);
    bool no_channel;
    bool not_ready; /* do not wait until the channel is READY */
} fixture_options;

/* Ends the process with a message when it cannot. */
void fixture_init(fixture *f, const fixture_options *options);
void fixture_server_stop(fixture *f);
void fixture_fini(fixture *f);

void fixture_common(fixture *f, ep_rpc_common *out_common);
/* Waits for *counter >= value. */
void fixture_wait(fixture *f, const uint32_t *counter, uint32_t value);
/* Finishes every held call; returns how many. */
uint32_t fixture_release(fixture *f, ep_err code);

/* Starts Forward with bytes of tensors, each byte = fill. */
ep_err forward_start(fixture *f, const char *model, size_t bytes, uint8_t fill,
                     uint64_t deadline_ns, answer *out_answer, ep_rpc_call_id *out_id,
                     ep_error *out_error);
/* The same, and waits. */
ep_err forward(fixture *f, const char *model, size_t bytes, uint8_t fill, uint64_t deadline_ns,
               answer *out_answer);
ep_err watch_start(fixture *f, uint64_t count, bool stay, uint64_t deadline_ns, answer *out_answer,
                   ep_rpc_call_id *out_id);
void answer_init(answer *a, fixture *f);
void answer_wait_end(answer *a);
void answer_wait_messages(answer *a, uint32_t count);
void answer_reply(void *arg, const ep_rpc_reply *reply, const ep_error *error);

uint64_t in_ms(uint64_t ms);

#endif
