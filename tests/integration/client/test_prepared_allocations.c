/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Prepared calls in a steady state: 10,000 of them, 128 in flight, allocate nothing and start no thread, also where
 * frames are late and go to a copy as well: every late one may here. The nodes are another process; every allocation of this one is counted, whoever makes it. Sanitizers bring
 * their own allocator: skipped there. With EP_TEST_RECORDED in the environment a session must record the calls:
 * the test of recordings preloads the probes.
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "client_core.h"
#include "observe/trace.h"
#include "remote_nodes.h"
#include "support/alloc_count.h"

#define IN_FLIGHT 128
#define PREPARED (2 * IN_FLIGHT) /* the second half only to warm up: each frame may be sent twice */
#define CALLS 10000
#define NODES 3
#define SKIPPED 77

#if !EP_TEST_ALLOC_COUNTED
int main(void)
{
    return SKIPPED;
}
#else

static uint32_t count_threads(void)
{
    uint32_t threads = 0;
    DIR *dir = opendir("/proc/self/task");
    EP_ASSERT(dir != NULL);
    while (readdir(dir) != NULL) {
        threads++;
    }
    closedir(dir);
    return threads;
}

static ep_call *calls[PREPARED];
static batch batches[PREPARED];

static void begin(uint32_t i, uint32_t tokens)
{
    ep_error error;
    if (ep_call_begin(calls[i], tokens, &error) != EP_OK) {
        fprintf(stderr, "begin: %s\n", error.text);
        exit(1);
    }
}

static void finish(uint32_t i)
{
    ep_moe_result result;
    if (ep_call_finish(calls[i], &result) != EP_OK) {
        fprintf(stderr, "finish: %s\n", result.error.text);
        exit(1);
    }
}

static void run_many(uint32_t total)
{
    for (uint32_t i = 0; i < total + IN_FLIGHT; i++) {
        if (i >= IN_FLIGHT) {
            finish(i % IN_FLIGHT);
        }
        if (i < total) {
            begin(i % IN_FLIGHT, 1 + i % 4);
        }
    }
}

/* How many buffers are lent at once depends on who runs when; the pool is given what all calls in flight can
 * need at most. */
static void fill_pool(ep_buffer_pool *pool)
{
    enum { EACH = PREPARED * NODES * 3 }; /* of a frame: request, its header, reply */
    static const size_t sizes[] = {4096, 8192, 16384};
    static ep_buffer *buffers[EACH];
    for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
        for (uint32_t i = 0; i < EACH; i++) {
            EP_ASSERT(ep_buffer_acquire(pool, sizes[s], &buffers[i]) == EP_OK);
        }
        for (uint32_t i = 0; i < EACH; i++) {
            ep_buffer_unref(buffers[i]);
        }
    }
}

/* Brings everything else to its peak: all calls in flight, with all replies but one node's held. */
static void warm_up(remote_nodes *r)
{
    fill_pool(r->h.client->pool);
    for (uint32_t n = 0; n < r->h.nodes_count; n++) {
        remote_nodes_hang(r, n);
        for (uint32_t i = 0; i < PREPARED; i++) {
            begin(i, 4);
        }
        remote_nodes_release(r);
        for (uint32_t i = 0; i < PREPARED; i++) {
            finish(i);
        }
    }
    for (uint32_t i = IN_FLIGHT; i < PREPARED; i++) {
        ep_call_destroy(calls[i]);
        batch_free(&batches[i]);
    }
    run_many(20 * IN_FLIGHT);
}

int main(void)
{
    remote_nodes r;
    ep_error error;
    ep_client_stats before, after;
    remote_nodes_start(&r, "n", NODES, 2, 256);
    r.h.client = remote_nodes_client(&r, NULL);
    r.h.client->budget.hedge_permille = 1000;
    for (uint32_t i = 0; i < PREPARED; i++) {
        batch_make(&batches[i], &r.h, 4, 2, i);
        if (ep_call_create(r.h.client, &batches[i].args, &batches[i].out_tensor, &calls[i], &error) !=
            EP_OK) {
            fprintf(stderr, "create: %s\n", error.text);
            return 1;
        }
    }
    warm_up(&r);
    ep_client_read_stats(r.h.client, &before);
    uint32_t threads = count_threads();
    ep_test_alloc_count_begin();
    run_many(CALLS);
    uint64_t allocations = ep_test_alloc_count_end();
    ep_client_read_stats(r.h.client, &after);
    uint64_t buffers = after.buffer_allocations - before.buffer_allocations;
    uint64_t hedged = after.hedged_frames - before.hedged_frames;
    printf("calls %d in flight %d allocations %llu buffer allocations %llu threads %u then %u hedged frames %llu\n",
           CALLS, IN_FLIGHT, (unsigned long long)allocations, (unsigned long long)buffers, threads,
           count_threads(), (unsigned long long)hedged);
    bool ok = allocations == 0 && buffers == 0 && count_threads() == threads && hedged > 0;
    if (getenv("EP_TEST_RECORDED") != NULL && !EP_TRACE_SPAN_ON(forward)) {
        fprintf(stderr, "no session records the calls\n");
        ok = false;
    }
    for (uint32_t i = 0; i < IN_FLIGHT; i++) {
        ep_call_destroy(calls[i]);
        ok = ok && batch_equal(&batches[i]);
        batch_free(&batches[i]);
    }
    ep_client_destroy(r.h.client);
    ep_transport_fini();
    return remote_nodes_stop(&r) == 0 && ok ? 0 : 1;
}
#endif
