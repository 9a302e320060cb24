/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Many threads start, cancel and time out calls on shared channels while connections come and go:
 * every call must end exactly once, and everything must be freed. Also the program that runs under
 * ThreadSanitizer.
 * Argument: seed.
 */
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "rpc_fixture.h"
#include "support/check.h"

#define THREADS 4
#define CALLS 1500
#define CHANNELS 2
#define OPEN_MAX 64 /* calls one thread has in flight */

#ifdef __SANITIZE_THREAD__
/*
 * The nng library is not instrumented, so its reference counts are invisible: ThreadSanitizer then
 * takes the mutex that nng's reaper destroys for one still in use. Only races on a mutex's own
 * memory at its end are left out; ours are seen with loopback.
 */
const char *__tsan_default_suppressions(void);
__attribute__((visibility("default"))) const char *__tsan_default_suppressions(void)
{
    return "race_top:pthread_mutex_destroy\n";
}
#endif

typedef struct stress_call {
    _Atomic uint32_t ends;
    _Atomic uint32_t messages;
    _Atomic int code;
    sem_t *room; /* of the thread that started it; NULL: nobody waits */
    bool stream;
    bool wrong;
    uint8_t fill;
    size_t bytes;
} stress_call;

typedef struct worker {
    pthread_t thread;
    fixture *f;
    ep_rpc_channel **channels;
    uint64_t random;
    stress_call calls[CALLS];
    uint32_t started;
    sem_t room;
} worker;

typedef struct reader {
    pthread_t thread;
    ep_rpc_server *server;
    _Atomic bool stop;
} reader;

static void on_reply(void *arg, const ep_rpc_reply *reply, const ep_error *error)
{
    stress_call *call = arg;
    if (reply->header != NULL) {
        atomic_fetch_add(&call->messages, 1);
        if (!call->stream && (reply->tensor_bytes != call->bytes ||
                              (call->bytes > 0 && reply->tensors[call->bytes - 1] != call->fill))) {
            call->wrong = true;
        }
    }
    if (reply->end) {
        atomic_store(&call->code, error != NULL ? (int)error->code : 0);
        sem_t *room = call->room;
        atomic_fetch_add(&call->ends, 1);
        if (room != NULL) {
            sem_post(room);
        }
    }
}

static ep_err start_forward(worker *w, ep_rpc_channel *channel, stress_call *call, uint64_t dice,
                            ep_rpc_call_id *out_id)
{
    static const char *const models[] = {"echo", "late", "hold", "error"};
    Expertd__V1__ForwardRequest header = EXPERTD__V1__FORWARD_REQUEST__INIT;
    ep_rpc_request request = {.method = ep_rpc_method_by_id(0x0101),
                              .header = &header.base,
                              .wait_for_ready = (dice & 16) != 0};
    header.model = (char *)(uintptr_t)models[dice % 4];
    call->fill = (uint8_t)dice;
    call->bytes = (size_t)(dice >> 8) % 20000;
    /* held calls end by their deadline or by cancel; the others mostly get their answer */
    bool soon = dice % 4 == 2 || (dice >> 40) % 8 == 0;
    request.deadline_ns =
        soon ? ep_clock_now_ns() + (1 + (dice >> 32) % 20) * EP_NS_PER_MS : in_ms(SECONDS * 1000);
    if (call->bytes > 0) {
        CHECK(ep_buffer_acquire(w->f->pool, call->bytes, &request.tensors) == EP_OK);
        memset(request.tensors->data, call->fill, call->bytes);
    }
    ep_err err = ep_rpc_call_start(channel, &request, on_reply, call, out_id, NULL);
    ep_buffer_unref(request.tensors);
    return err;
}

static ep_err start_watch(ep_rpc_channel *channel, stress_call *call, uint64_t dice,
                          ep_rpc_call_id *out_id)
{
    Expertd__V1__WatchPlacementRequest header = EXPERTD__V1__WATCH_PLACEMENT_REQUEST__INIT;
    Expertd__V1__Epoch have = EXPERTD__V1__EPOCH__INIT;
    ep_rpc_request request = {
        .method = ep_rpc_method_by_id(0x0303), .header = &header.base, .wait_for_ready = true};
    have.number = dice % 30;
    have.term = (dice >> 8) & 1;
    header.have = &have;
    call->stream = true;
    request.deadline_ns = ep_clock_now_ns() + (1 + (dice >> 32) % 20) * EP_NS_PER_MS;
    return ep_rpc_call_start(channel, &request, on_reply, call, out_id, NULL);
}

static void *worker_main(void *arg)
{
    worker *w = arg;
    ep_rpc_call_id ids[16] = {0};
    ep_rpc_channel *of_id[16] = {0};
    for (uint32_t i = 0; i < CALLS; i++) {
        uint64_t dice = ep_splitmix64(&w->random);
        ep_rpc_channel *channel = w->channels[(dice >> 60) % CHANNELS];
        stress_call *call = &w->calls[i];
        while (sem_wait(&w->room) != 0) {
        }
        call->room = &w->room;
        ep_err err = dice % 7 == 0 ? start_watch(channel, call, dice >> 3, &ids[i % 16])
                                   : start_forward(w, channel, call, dice >> 3, &ids[i % 16]);
        of_id[i % 16] = channel;
        if (err != EP_OK) {
            atomic_store(&call->ends, 1);
            atomic_store(&call->code, (int)err);
            sem_post(&w->room);
        }
        w->started++;
        uint64_t old = ep_splitmix64(&w->random);
        if (old % 3 == 0 && of_id[old / 3 % 16] != NULL) {
            ep_rpc_call_cancel(of_id[old / 3 % 16], ids[old / 3 % 16]);
        }
    }
    return NULL;
}

/* Opens a channel, starts a call and destroys it at once, again and again. */
static void *churn_main(void *arg)
{
    worker *w = arg;
    for (uint32_t i = 0; i < 60; i++) {
        ep_rpc_channel *channel;
        ep_rpc_channel_config config = {.address = {.url = w->f->url}, .reconnect = true};
        fixture_common(w->f, &config.common);
        CHECK(ep_rpc_channel_create(&config, &channel, NULL) == EP_OK);
        for (uint32_t n = 0; n < 3; n++) {
            stress_call *call = &w->calls[w->started++];
            ep_rpc_call_id id;
            if (start_forward(w, channel, call, ep_splitmix64(&w->random) | 16, &id) != EP_OK) {
                atomic_store(&call->ends, 1);
            }
        }
        if (i % 2 == 0) {
            ep_rpc_channel_wait_ready(channel, in_ms(5), NULL);
        }
        ep_rpc_channel_destroy(channel);
    }
    return NULL;
}

/* Reads what looks at every connection, those that end just now too, until the others are done. */
static void *reader_main(void *arg)
{
    reader *r = arg;
    ep_rpc_server_stats stats;
    while (!atomic_load(&r->stop)) {
        ep_rpc_server_read_stats(r->server, &stats);
    }
    return NULL;
}

static void limits(ep_rpc_server_config *config)
{
    config->common.limits.credit_bytes = 1000000;
    config->common.limits.ping_ms = 5;
    config->common.limits.ping_dead_count = 1000;
}

static ep_rpc_channel *open_channel(fixture *f)
{
    ep_rpc_channel *channel;
    ep_rpc_channel_config config = {.address = {.url = f->url}, .reconnect = true};
    fixture_common(f, &config.common);
    config.common.limits.ping_ms = 5;
    config.common.limits.ping_dead_count = 1000;
    CHECK(ep_rpc_channel_create(&config, &channel, NULL) == EP_OK);
    return channel;
}

static int judge(const worker *w, uint32_t *codes)
{
    int bad = 0;
    for (uint32_t i = 0; i < w->started; i++) {
        const stress_call *call = &w->calls[i];
        uint32_t ends = atomic_load(&call->ends);
        if (ends != 1 || call->wrong) {
            fprintf(stderr, "call %u ended %u times%s\n", i, ends,
                    call->wrong ? ", with wrong bytes" : "");
            bad++;
        }
        codes[atomic_load(&call->code) & 63]++;
    }
    return bad;
}

static int run(const char *url, uint64_t seed)
{
    fixture f;
    ep_rpc_channel *channels[CHANNELS];
    worker *workers = calloc(THREADS + 1, sizeof(*workers));
    uint32_t codes[64] = {0};
    int bad = 0;
    fixture_init(&f, &(fixture_options){.url = url, .server = limits, .no_channel = true});
    for (int i = 0; i < CHANNELS; i++) {
        channels[i] = open_channel(&f);
    }
    for (uint64_t i = 0; i <= THREADS; i++) {
        workers[i].f = &f;
        workers[i].channels = channels;
        workers[i].random = seed + i;
        sem_init(&workers[i].room, 0, OPEN_MAX);
        CHECK(pthread_create(&workers[i].thread, NULL, i < THREADS ? worker_main : churn_main,
                             &workers[i]) == 0);
    }
    reader r = {.server = f.server};
    CHECK(pthread_create(&r.thread, NULL, reader_main, &r) == 0);
    for (int i = 0; i <= THREADS; i++) {
        pthread_join(workers[i].thread, NULL);
    }
    atomic_store(&r.stop, true);
    pthread_join(r.thread, NULL);
    if (seed % 2 == 0) { /* once the server ends first, once the channels */
        fixture_server_stop(&f);
    }
    for (int i = 0; i < CHANNELS; i++) {
        ep_rpc_channel_destroy(channels[i]);
    }
    for (int i = 0; i <= THREADS; i++) {
        bad += judge(&workers[i], codes);
    }
    fixture_fini(&f);
    free(workers);
    printf("%s seed %llu: ok %u, cancelled %u, deadline %u, other %u, bad %d\n", url,
           (unsigned long long)seed, codes[0], codes[1], codes[4],
           codes[14] + codes[33] + codes[36] + codes[8], bad);
    return bad + (codes[0] == 0); /* calls that all fail show nothing */
}

int main(int argc, char **argv)
{
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : 1;
    int bad = 0;
    printf("seed %llu\n", (unsigned long long)seed);
    for (uint64_t i = 0; i < 2; i++) {
        bad += run("loopback://rpc-stress", seed + i);
        bad += run("tcp://127.0.0.1:0", seed + i);
    }
    return bad == 0 ? 0 : 1;
}
