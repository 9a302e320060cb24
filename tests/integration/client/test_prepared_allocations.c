/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Prepared calls in a steady state: 10,000 of them, 128 in flight, allocate nothing and start no
 * thread, also where frames are late and go to a copy as well: every late one may here. Nor does a
 * run of fewer tokens that is one window, larger than the windows of a full run. Every other call
 * is told of its tokens. The nodes are another process; every allocation of this one is counted,
 * whoever makes it. Sanitizers bring their own allocator: skipped there. With EP_TEST_RECORDED in
 * the environment a session must record the calls: the test of recordings preloads the probes.
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "call/call.h"
#include "observe/trace.h"
#include "remote_nodes.h"
#include "support/alloc_count.h"

#define IN_FLIGHT 128
/* those beyond IN_FLIGHT only to warm up: each frame may be sent twice, and losers answer late */
#define PREPARED (6 * IN_FLIGHT)
#define CALLS 10000
#define NODES 3

#if !EP_TEST_ALLOC_COUNTED
int main(void)
{
    return 0;
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
static uint32_t told[PREPARED]; /* tokens */

static void on_tokens(void *arg, ep_call *call, uint32_t first, uint32_t count)
{
    (void)call;
    EP_ASSERT(first == 0 || first == *(uint32_t *)arg);
    *(uint32_t *)arg = first + count;
}

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

/* How many buffers are lent at once depends on who runs when; the pool is given what all calls in
 * flight can need at most. */
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

/* Each node joins the table as it answers, and calls made before know of fewer. */
static void wait_for_all_nodes(ep_client *client)
{
    for (uint32_t nodes = 0; nodes < NODES;) {
        ep_view *view = ep_cluster_acquire_view(client->cluster);
        nodes = view != NULL ? view->table->nodes_count : 0;
        ep_view_unref(view);
        usleep(1000);
    }
}

/* A full run's rows exceed the client's room and travel in small windows; so many tokens as fill it
 * are one. */
static bool one_large_window(remote_nodes *r)
{
    enum { TOKENS = 256, FITTING = 64, WARM = 4, COUNTED = 5 };
    static const ep_moe_mode modes[] = {EP_MOE_DECODE, EP_MOE_PREFILL};
    uint64_t allocations = 0;
    ep_error error;
    ep_client *client = remote_nodes_client(r, NULL);
    wait_for_all_nodes(client);
    client->flow.window_bytes_max = (size_t)FITTING * 2 * 256 * 2;
    client->config.hedge_permille = 0;
    for (size_t m = 0; m < EP_ARRAY_COUNT(modes); m++) {
        batch b;
        ep_call *call[WARM + COUNTED];
        ep_moe_result result = {.struct_bytes = sizeof(result)};
        batch_make(&b, &r->h, TOKENS, 2, 1);
        b.args.mode = modes[m];
        for (int i = 0; i < WARM + COUNTED; i++) {
            EP_ASSERT(ep_call_create(client, &b.args, &b.out_tensor, &call[i], &error) == EP_OK);
        }
        for (int i = 0; i < WARM; i++) { /* pool and connections come to their peak */
            EP_ASSERT(ep_call_begin(call[i], FITTING, &error) == EP_OK);
        }
        for (int i = 0; i < WARM; i++) {
            EP_ASSERT(ep_call_finish(call[i], &result) == EP_OK);
        }
        uint64_t fewest = UINT64_MAX; /* a connection's hello may come meanwhile */
        for (int i = WARM; i < WARM + COUNTED; i++) {
            ep_test_alloc_count_begin();
            EP_ASSERT(ep_call_begin(call[i], FITTING, &error) == EP_OK);
            EP_ASSERT(ep_call_finish(call[i], &result) == EP_OK);
            uint64_t n = ep_test_alloc_count_end();
            fewest = n < fewest ? n : fewest;
        }
        allocations += fewest;
        EP_ASSERT(call[WARM]->flow.windows_count == 1 && call[0]->flow.window_tokens == FITTING);
        for (int i = 0; i < WARM + COUNTED; i++) {
            ep_call_destroy(call[i]);
        }
        batch_free(&b);
    }
    printf("runs of one large window: allocations %llu\n", (unsigned long long)allocations);
    ep_client_destroy(client);
    return allocations == 0;
}

int main(void)
{
    remote_nodes r;
    ep_error error;
    ep_client_stats before, after;
    remote_nodes_start(&r, "n", NODES, 2, 256);
    bool large_ok = one_large_window(&r);
    r.h.client = remote_nodes_client(&r, NULL);
    r.h.client->config.hedge_permille = 1000;
    for (uint32_t i = 0; i < PREPARED; i++) {
        batch_make(&batches[i], &r.h, 4, 2, i);
        batches[i].args.on_tokens = i % 2 != 0 ? on_tokens : NULL;
        batches[i].args.on_tokens_arg = &told[i];
        if (ep_call_create(r.h.client, &batches[i].args, &batches[i].out_tensor, &calls[i],
                           &error) != EP_OK) {
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
    printf("calls %d in flight %d allocations %llu buffer allocations %llu threads %u then %u "
           "hedged frames %llu\n",
           CALLS, IN_FLIGHT, (unsigned long long)allocations, (unsigned long long)buffers, threads,
           count_threads(), (unsigned long long)hedged);
    bool ok =
        large_ok && allocations == 0 && buffers == 0 && count_threads() == threads && hedged > 0;
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
