/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Many threads, all call forms, nodes that come and go, tables that change, calls that are
 * cancelled: for the race detector. Results are compared with a plain loop. stress_client [ROUNDS
 * [tcp|loopback]]
 */
#include <inttypes.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/random.h"
#include "harness.h"

#define THREADS 6
#define NODES 4

static harness h;
static uint64_t rounds = 300;
static uint64_t done_threads;
static uint64_t cancelled_calls;

static void die(const char *what, const ep_error *error)
{
    fprintf(stderr, "%s: %s: %s\n", what, ep_err_name(error->code), error->text);
    abort();
}

/* Half of the calls are told of their tokens. */
typedef struct told {
    uint32_t tokens;
    bool cancels; /* it ends its call when it is told of the first */
} told;

static void on_tokens(void *arg, ep_call *call, uint32_t first, uint32_t count)
{
    told *t = arg;
    EP_ASSERT(first == t->tokens && count > 0);
    EP_ASSERT(first == 0 || !t->cancels);
    t->tokens += count;
    if (t->cancels) {
        ep_call_cancel(call);
    }
}

static void check_told(const batch *b, const ep_moe_result *result)
{
    const told *t = b->args.on_tokens_arg;
    bool is_streamed = b->args.on_tokens != NULL;
    EP_ASSERT(result->tokens_delivered == t->tokens);
    EP_ASSERT(result->error.code != EP_OK || t->tokens == (is_streamed ? b->tokens : 0));
}

static void blocking(batch *b)
{
    ep_moe_result result;
    if (ep_moe_forward(h.client, &b->args, &b->out_tensor, &result) != EP_OK) {
        die("blocking", &result.error);
    }
    check_told(b, &result);
    EP_ASSERT(batch_equal(b));
}

typedef struct pending {
    sem_t done;
    ep_moe_result result;
} pending;

static void on_done(void *arg, const ep_moe_result *result)
{
    pending *p = arg;
    p->result = *result;
    sem_post(&p->done);
}

static void callback(batch *b)
{
    pending p;
    ep_error error;
    sem_init(&p.done, 0, 0);
    if (ep_moe_forward_async(h.client, &b->args, &b->out_tensor, on_done, &p, NULL, &error) !=
        EP_OK) {
        die("begin", &error);
    }
    sem_wait(&p.done);
    if (p.result.error.code != EP_OK) {
        die("callback", &p.result.error);
    }
    check_told(b, &p.result);
    EP_ASSERT(batch_equal(b));
    sem_destroy(&p.done);
}

static void prepared(batch *b, bool cancel)
{
    told *t = b->args.on_tokens_arg;
    ep_error error;
    ep_moe_result result;
    ep_call *call = NULL;
    if (ep_call_create(h.client, &b->args, &b->out_tensor, &call, &error) != EP_OK) {
        die("create", &error);
    }
    for (int i = 0; i < 3; i++) {
        *t = (told){.cancels = cancel && i > 0};
        if (ep_call_begin(call, b->tokens, &error) != EP_OK) {
            die("begin prepared", &error);
        }
        if (cancel && (i == 0 || b->args.on_tokens == NULL)) {
            ep_call_cancel(call);
        }
        ep_err err = ep_call_finish(call, &result);
        check_told(b, &result);
        if (err == EP_OK) {
            EP_ASSERT(batch_equal(b));
        } else if (!cancel || err != EP_ERR_CANCELLED) {
            die("prepared", &result.error);
        } else {
            __atomic_fetch_add(&cancelled_calls, 1, __ATOMIC_RELAXED);
        }
    }
    *t = (told){.tokens = 0};
    if (cancel && ep_call_begin(call, b->tokens, &error) != EP_OK) {
        die("begin before destroy", &error);
    }
    ep_call_destroy(call);
}

static void *caller_main(void *arg)
{
    uint64_t seed = (uint64_t)(uintptr_t)arg * 1000003;
    for (uint64_t i = 0; i < rounds; i++) {
        batch b;
        told t = {.tokens = 0};
        batch_make(&b, &h, (uint32_t)(ep_splitmix64(&seed) % 50), 2, seed);
        b.args.mode = (ep_moe_mode)(ep_splitmix64(&seed) % 3);
        b.args.on_tokens = ep_splitmix64(&seed) % 2 == 0 ? on_tokens : NULL;
        b.args.on_tokens_arg = &t;
        switch (ep_splitmix64(&seed) % 4) {
        case 0:
            blocking(&b);
            break;
        case 1:
            callback(&b);
            break;
        case 2:
            prepared(&b, false);
            break;
        default:
            prepared(&b, true);
            break;
        }
        batch_free(&b);
    }
    __atomic_fetch_add(&done_threads, 1, __ATOMIC_ACQ_REL);
    return NULL;
}

/* One node at a time is away; each expert has two copies. */
static void disturb(uint64_t round)
{
    uint32_t n = (uint32_t)(round % NODES);
    switch (round % 3) {
    case 0:
        fake_node_stop(h.nodes[n]);
        harness_start_node(&h, n, h.urls[n], NULL);
        break;
    case 1:
        harness_publish(&h);
        break;
    default:
        fake_node_set_fault(h.nodes[n], FAKE_ERROR_ONCE, EP_ERR_DEVICE_LOST, 0);
        break;
    }
}

int main(int argc, char **argv)
{
    pthread_t threads[THREADS];
    ep_client_stats stats;
    if (argc > 1) {
        rounds = strtoull(argv[1], NULL, 0);
    }
    HARNESS_OPEN(&h, .scheme = argc > 2 ? argv[2] : "tcp", .nodes_count = NODES, .copies = 2,
                 .shared_experts = 1, .coordinator = true, .chunk_bytes_max = 16384,
                 .window_tokens = 16);
    for (uintptr_t i = 0; i < THREADS; i++) {
        EP_ASSERT(pthread_create(&threads[i], NULL, caller_main, (void *)(i + 1)) == 0);
    }
    uint64_t disturbed = 0;
    while (__atomic_load_n(&done_threads, __ATOMIC_ACQUIRE) < THREADS) {
        disturb(disturbed++);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    ep_client_read_stats(h.client, &stats);
    printf("calls %" PRIu64 " failed or cancelled %" PRIu64 " disturbances %" PRIu64
           " frames %" PRIu64 " rerouted %" PRIu64 " late %" PRIu64 "\n",
           stats.calls, stats.calls_failed, disturbed, stats.frames_sent, stats.frames_rerouted,
           stats.late_replies);
    EP_ASSERT(stats.calls_failed >= cancelled_calls);
    harness_close(&h);
    return 0;
}
