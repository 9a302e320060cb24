/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Client and node in one process, over the lane that the argument names (uv, nng, shm), in a steady
 * state: prepared, blocking, callback and prefill calls allocate nothing on either side, and rows
 * are copied as often as the design says: packed once per node, widened once per slot, written once
 * per slot; shared memory takes each byte of a frame in once and gives it out once, and streams
 * move none. Sanitizers bring their own allocator: only the copies are compared then.
 */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/check.h"
#include "base/path_count.h"
#include "base/random.h"
#include "call/client_core.h"
#include "common/process_setup.h"
#include "expertd/client.h"
#include "expertd/node.h"
#include "expertd/node_private.h"
#include "support/alloc_count.h"
#include "support/checkpoint_fixture.h"
#include "transport/lane_assembler.h"
#include "transport/nng/nng_lane.h"
#include "transport/transport.h"

#define H 256
#define EXPERTS 8
#define TOP_K 3
#define TOKENS 512
#define DECODE_TOKENS 4
#define PREPARED_CALLS 10000
#define BLOCKING_CALLS 1000
#define CALLBACK_CALLS 1000
#define PREFILL_CALLS 20
#define WARM_UPS 100
#define FILL_CALLS 16
#define FILL_BUFFERS 64

static bool lane_is_shm;
static ep_node *node;
static ep_client *client;
static uint16_t x[TOKENS * H], out[TOKENS * H];
static int32_t ids[TOKENS * TOP_K];
static float scales[TOKENS * TOP_K];
static int failures;

/* Twice a second the client asks what the node holds: no part of a token's path. */
ep_err __real_ep_node_models_describe(const ep_node_models *models, bool for_placement,
                                      Expertd__V1__ModelInfo ***out_infos, size_t *out_count);
ep_err __wrap_ep_node_models_describe(const ep_node_models *models, bool for_placement,
                                      Expertd__V1__ModelInfo ***out_infos, size_t *out_count);
ep_err __wrap_ep_node_models_describe(const ep_node_models *models, bool for_placement,
                                      Expertd__V1__ModelInfo ***out_infos, size_t *out_count)
{
    ep_test_alloc_count_pause();
    ep_err err = __real_ep_node_models_describe(models, for_placement, out_infos, out_count);
    ep_test_alloc_count_resume();
    return err;
}

static void check(bool ok, const char *what, uint64_t got, uint64_t wanted)
{
    printf("  %-28s %12llu, wanted %llu%s\n", what, (unsigned long long)got,
           (unsigned long long)wanted, ok ? "" : "   WRONG");
    failures += !ok;
}

static void make_inputs(void)
{
    uint64_t state = 3;
    for (size_t i = 0; i < TOKENS * H; i++) {
        x[i] = (uint16_t)(0x3f00 + ep_splitmix64(&state) % 256);
    }
    for (uint32_t t = 0; t < TOKENS; t++) {
        uint32_t first = (uint32_t)(ep_splitmix64(&state) % EXPERTS);
        for (uint32_t k = 0; k < TOP_K; k++) {
            ids[t * TOP_K + k] = (int32_t)((first + k) % EXPERTS);
            scales[t * TOP_K + k] = 0.25f;
        }
    }
}

static ep_moe_args args_of(uint32_t tokens, ep_moe_mode mode)
{
    ep_moe_args args;
    ep_moe_args_init(&args);
    args.model = "demo";
    args.layer = 1;
    args.x = ep_tensor_2d(x, EP_DTYPE_BF16, tokens, H);
    args.expert_ids = ep_tensor_2d(ids, EP_DTYPE_I32, tokens, TOP_K);
    args.expert_scales = ep_tensor_2d(scales, EP_DTYPE_F32, tokens, TOP_K);
    args.mode = mode;
    args.deadline_us = 60000000;
    return args;
}

static void must(ep_err err, const ep_error *error)
{
    if (err != EP_OK) {
        fprintf(stderr, "%s\n", error->text);
        exit(1);
    }
}

static void run_blocking(uint32_t calls, uint32_t tokens, ep_moe_mode mode)
{
    ep_moe_args args = args_of(tokens, mode);
    ep_tensor tensor = ep_tensor_2d(out, EP_DTYPE_BF16, tokens, H);
    for (uint32_t i = 0; i < calls; i++) {
        ep_moe_result result = {.struct_bytes = sizeof(result)};
        must(ep_moe_forward(client, &args, &tensor, &result), &result.error);
    }
}

static void run_decode(uint32_t calls)
{
    run_blocking(calls, DECODE_TOKENS, EP_MOE_DECODE);
}

static void run_prefill(uint32_t calls)
{
    run_blocking(calls, TOKENS, EP_MOE_PREFILL);
}

static pthread_mutex_t done_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t done_changed = PTHREAD_COND_INITIALIZER;
static uint32_t done_count;

static void on_done(void *arg, const ep_moe_result *result)
{
    (void)arg;
    must(result->error.code, &result->error);
    pthread_mutex_lock(&done_lock);
    done_count++;
    pthread_cond_signal(&done_changed);
    pthread_mutex_unlock(&done_lock);
}

static void run_callback(uint32_t calls)
{
    ep_moe_args args = args_of(DECODE_TOKENS, EP_MOE_DECODE);
    ep_tensor tensor = ep_tensor_2d(out, EP_DTYPE_BF16, DECODE_TOKENS, H);
    done_count = 0;
    for (uint32_t i = 0; i < calls; i++) {
        ep_error error;
        must(ep_moe_forward_async(client, &args, &tensor, on_done, NULL, NULL, &error), &error);
        pthread_mutex_lock(&done_lock);
        while (done_count <= i) {
            pthread_cond_wait(&done_changed, &done_lock);
        }
        pthread_mutex_unlock(&done_lock);
    }
}

/* How many buffers are lent at once depends on who runs when: many calls at once bring every pool
 * above what one call after the other can need. */
static void fill_pools(uint32_t calls, uint32_t tokens, ep_moe_mode mode)
{
    static uint16_t outs[FILL_CALLS][TOKENS * H];
    ep_moe_args args = args_of(tokens, mode);
    for (int round = 0; round < 5; round++) {
        done_count = 0;
        for (uint32_t i = 0; i < calls; i++) {
            ep_error error;
            ep_tensor tensor = ep_tensor_2d(outs[i], EP_DTYPE_BF16, tokens, H);
            must(ep_moe_forward_async(client, &args, &tensor, on_done, NULL, NULL, &error), &error);
        }
        pthread_mutex_lock(&done_lock);
        while (done_count < calls) {
            pthread_cond_wait(&done_changed, &done_lock);
        }
        pthread_mutex_unlock(&done_lock);
    }
}

/* The same for the buffers of frames, of every size that occurs. */
static void fill_pool(ep_buffer_pool *pool)
{
    ep_buffer *buffers[FILL_BUFFERS];
    for (size_t bytes = 4096; bytes <= 131072; bytes *= 2) {
        for (uint32_t i = 0; i < FILL_BUFFERS; i++) {
            EP_ASSERT(ep_buffer_acquire(pool, bytes, &buffers[i]) == EP_OK);
        }
        for (uint32_t i = 0; i < FILL_BUFFERS; i++) {
            ep_buffer_unref(buffers[i]);
        }
    }
}

/* The client moves to shared memory by itself, one connection after the other. */
static void wait_for_shm(void)
{
    const struct timespec pause = {.tv_nsec = 5000000};
    for (uint32_t c = 0; c < EP_PEER_CLASSES; c++) {
        ep_view *view = ep_cluster_acquire_view(client->cluster);
        bool ready = __atomic_load_n(&view->peers[0]->links[c].shm_ready, __ATOMIC_ACQUIRE);
        ep_view_unref(view);
        if (!ready) {
            nanosleep(&pause, NULL);
            c = UINT32_MAX; /* from the first again */
        }
    }
}

/* What the lane may move of frames: on shared memory all of it, twice. Headers and slots of a frame
 * take less than allowed here. */
static void check_lane(uint64_t moved, uint64_t frames, uint64_t wire_row_bytes)
{
    /* A frame's first bytes land where small frames do; its own small parts are joined before they
     * are sent. */
    uint64_t beside =
        frames * 2 * (EP_ASSEMBLER_STAGING_BYTES + 4 * STREAM_COALESCE_BYTES_MAX) + (64u << 10);
    uint64_t least = lane_is_shm ? 2 * wire_row_bytes : 0;
    check(moved >= least, "at least", moved, least);
    check(moved <= least + beside, "bytes moved by the lane", moved, least + beside);
}

static ep_call *prepared;

static void run_prepared(uint32_t calls)
{
    for (uint32_t i = 0; i < calls; i++) {
        ep_error error;
        ep_moe_result result = {.struct_bytes = sizeof(result)};
        must(ep_call_begin(prepared, DECODE_TOKENS, &error), &error);
        must(ep_call_finish(prepared, &result), &result.error);
    }
}

static void steady(const char *name, void (*run)(uint32_t calls), uint32_t calls, uint32_t tokens,
                   bool is_prefill)
{
    uint64_t before[EP_PATH_STAGES];
    uint64_t allocations = 0;
    ep_client_stats first = {.struct_bytes = sizeof(first)}, last = {.struct_bytes = sizeof(last)};
    run(calls < WARM_UPS ? calls : WARM_UPS);
    ep_client_read_stats(client, &first);
    for (int s = 0; s < EP_PATH_STAGES; s++) {
        before[s] = ep_path_read((ep_path_stage)s);
    }
#if EP_TEST_ALLOC_COUNTED
    ep_test_alloc_count_begin();
#endif
    run(calls);
#if EP_TEST_ALLOC_COUNTED
    allocations = ep_test_alloc_count_end();
#endif
    ep_client_read_stats(client, &last);
    uint64_t row_bytes = (uint64_t)calls * tokens * H * 2;
    uint64_t frames = last.frames_sent - first.frames_sent;
    uint64_t moved[EP_PATH_STAGES];
    for (int s = 0; s < EP_PATH_STAGES; s++) {
        moved[s] = ep_path_read((ep_path_stage)s) - before[s];
    }
    printf("%s: %u calls of %u tokens, %llu frames\n", name, calls, tokens,
           (unsigned long long)frames);
    check(allocations == 0, "allocations", allocations, 0);
    check(moved[EP_PATH_PACKED] == row_bytes, "row bytes packed", moved[EP_PATH_PACKED], row_bytes);
    check(moved[EP_PATH_PANEL] == row_bytes * TOP_K, "row bytes to panels", moved[EP_PATH_PANEL],
          row_bytes * TOP_K);
    check(moved[EP_PATH_RESULT] == row_bytes * TOP_K, "row bytes of results", moved[EP_PATH_RESULT],
          row_bytes * TOP_K);
    check(moved[EP_PATH_SCRATCH] == (is_prefill ? row_bytes : 0), "row bytes from scratch",
          moved[EP_PATH_SCRATCH], is_prefill ? row_bytes : 0);
    check_lane(moved[EP_PATH_LANE], frames, row_bytes + row_bytes * TOP_K);
}

static void *drive(void *arg)
{
    ep_error error;
    ep_client_config config;
    const char *urls[] = {node->url};
    (void)arg;
    ep_client_config_init(&config);
    config.node_urls = urls;
    config.node_urls_count = 1;
    config.prefill_window_tokens = TOKENS / 4;
    config.chunk_bytes_max = 65536;
    config.lanes = lane_is_shm ? NULL : "stream";
    must(ep_client_create(&config, &client, &error), &error);
    must(ep_client_wait_ready(client, 60000000, &error), &error);
    if (lane_is_shm) {
        wait_for_shm();
    }
    ep_moe_args args = args_of(DECODE_TOKENS, EP_MOE_DECODE);
    ep_tensor tensor = ep_tensor_2d(out, EP_DTYPE_BF16, DECODE_TOKENS, H);
    must(ep_call_create(client, &args, &tensor, &prepared, &error), &error);
    fill_pool(client->pool);
    fill_pool(node->pool);
    fill_pools(4, TOKENS, EP_MOE_PREFILL);
    fill_pools(FILL_CALLS, DECODE_TOKENS, EP_MOE_DECODE);
    steady("prepared", run_prepared, PREPARED_CALLS, DECODE_TOKENS, false);
    steady("blocking", run_decode, BLOCKING_CALLS, DECODE_TOKENS, false);
    steady("callback", run_callback, CALLBACK_CALLS, DECODE_TOKENS, false);
    steady("prefill", run_prefill, PREFILL_CALLS, TOKENS, true);
    ep_call_destroy(prepared);
    ep_client_destroy(client);
    kill(getpid(), SIGTERM);
    return NULL;
}

static int run(const ep_options *options, int argc, char **argv)
{
    ep_node_config config;
    ep_node_source source = {.options = options, .argc = argc, .argv = argv};
    ep_error error;
    pthread_t driver;
    must(ep_node_config_load(options, &config, &error), &error);
    must(ep_node_create(&config, &source, &node, &error), &error);
    pthread_create(&driver, NULL, drive, NULL);
    ep_node_run(node);
    pthread_join(driver, NULL);
    ep_node_destroy(node);
    ep_node_config_fini(&config);
    return failures == 0 ? 0 : 1;
}

int main(int argc_main, char **argv_main)
{
    const char *lane = argc_main > 1 ? argv_main[1] : "uv";
    ep_fixture_config fixture = ep_fixture_default();
    char model_path[EP_FIXTURE_PATH_BYTES], model_flag[EP_FIXTURE_PATH_BYTES + 32];
    ep_options *options = NULL;
    ep_error error;
    char shm_flag[32], dir_flag[EP_FIXTURE_PATH_BYTES + 32];
    ep_process_setup();
    lane_is_shm = strcmp(lane, "shm") == 0;
    if (!lane_is_shm) {
        must(ep_stream_lane_choose(lane, &error), &error);
    }
    ep_fixture_temp_dir(model_path);
    snprintf(model_flag, sizeof(model_flag), "--model=demo=%s", model_path);
    snprintf(shm_flag, sizeof(shm_flag), "--shm=%s", lane_is_shm ? "on" : "off");
    snprintf(dir_flag, sizeof(dir_flag), "--shm-dir=%s", model_path);
    char *argv[] = {(char *)(uintptr_t) "steady",
                    model_flag,
                    (char *)(uintptr_t) "--listen=tcp://127.0.0.1:0",
                    (char *)(uintptr_t) "--probe-address=",
                    (char *)(uintptr_t) "--admin-listen=",
                    (char *)(uintptr_t) "--door-listen=",
                    (char *)(uintptr_t) "--threads=1",
                    shm_flag,
                    dir_flag};
    int argc = (int)(sizeof(argv) / sizeof(argv[0]));
    fixture.hidden = H;
    make_inputs();
    must(ep_fixture_write(&fixture, model_path, &error), &error);
    must(ep_options_load(&ep_node_options, argc, argv, NULL, &options, &error), &error);
    int code = run(options, argc, argv);
    ep_options_free(options);
    ep_fixture_remove(model_path);
    ep_transport_fini();
    return code;
}
