/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A continuous load of calls: a fixed number in flight, each begun from the completion of the one
 * before, or a fixed number per second, whether or not earlier ones have ended. Every result is
 * compared with the oracle's, bit for bit unless the test says otherwise.
 *
 * Threads    start, wait and stop on one thread; the calls run on the library's threads.
 */
#ifndef EP_TESTS_SUPPORT_LOAD_H
#define EP_TESTS_SUPPORT_LOAD_H

#include "expertd/client.h"
#include "reference_layer.h"

/*
 * One call's input and the oracle's output: x, y [tokens,hidden] bf16, ids, scales [tokens,top_k].
 * With top_k 2, joint and apart are the two possible results of a token summed at nodes: both
 * experts on one node, or on two. NULL for another top_k.
 */
typedef struct ep_test_batch {
    const char *model;
    uint32_t layer;
    uint32_t tokens;
    uint32_t top_k;
    uint32_t hidden;
    uint16_t *x;
    int32_t *ids;
    float *scales;
    uint16_t *expected;
    uint16_t *joint;
    uint16_t *apart;
} ep_test_batch;

/* Draws tokens, and distinct experts per token from allowed[allowed_count] (NULL: all). */
void ep_test_batch_init(ep_test_batch *batch, const struct ref_layer *reference, const char *model,
                        uint32_t layer, uint32_t tokens, uint32_t top_k, uint64_t seed,
                        const int32_t *allowed, uint32_t allowed_count);
/* Makes batches for a checkpoint's layer 0; each has `longer` more tokens than the one before and
 * the next seed. */
void ep_test_batches_init(ep_test_batch *batches, uint32_t count, const char *checkpoint_path,
                          const char *model, uint32_t tokens, uint32_t longer, uint32_t top_k,
                          uint64_t seed);
void ep_test_batch_fini(ep_test_batch *batch);
/* Makes the arguments of a call for the batch; out is [tokens,hidden]. */
void ep_test_batch_args(const ep_test_batch *batch, ep_moe_args *out_args);
/* Fails the test if y [tokens,hidden] is not the oracle's output. */
void ep_test_batch_expect(const ep_test_batch *batch, const uint16_t *y);
/* Fails the test if a token of y is neither its joint nor its apart result. */
void ep_test_batch_expect_sums(const ep_test_batch *batch, const uint16_t *y);
/* Makes one blocking call. False: it failed, see *out_result. Fails the test if the bits differ. */
bool ep_test_batch_call(const ep_test_batch *batch, ep_client *client, uint64_t deadline_us,
                        ep_moe_result *out_result);

/* Called for a failed call, on a library thread; the times are ep_clock_now_ns just before its
 * begin and in its completion. */
typedef void (*ep_test_failure_func)(void *arg, const ep_test_batch *batch,
                                     const ep_moe_result *result, uint64_t began_ns,
                                     uint64_t ended_ns);

/* Called for every call, on a library thread, instead of the comparison. y: the result; NULL: the
 * call failed. */
typedef void (*ep_test_end_func)(void *arg, const ep_test_batch *batch, const ep_moe_result *result,
                                 const uint16_t *y, uint64_t began_ns, uint64_t ended_ns);

typedef struct ep_test_load_config {
    ep_client *client;
    const ep_test_batch *batches; /* used in turn */
    uint32_t batches_count;
    uint32_t calls_in_flight; /* with calls_per_s a limit: a call beyond it fails at once */
    /* 0: each call begins when another ends; else times count from when a call was due */
    double calls_per_s;
    const char *version;  /* of the model; NULL: the call names none */
    uint64_t deadline_us; /* 0: the client's */
    ep_moe_mode mode;
    ep_moe_comm comm_alg;
    ep_moe_combine_at combine_at; /* NODE_SUM: of batches with joint and apart */
    /* compares and fails the test; NULL: the bits are compared */
    void (*expect)(const ep_test_batch *batch, const uint16_t *y);
    ep_test_failure_func on_failure; /* NULL: a failed call fails the test */
    ep_test_end_func on_end;         /* NULL: the two above */
    void *arg;
} ep_test_load_config;

typedef struct ep_test_load_counts {
    /* without on_end: with the right result; a wrong one fails the test at once */
    uint64_t succeeded;
    uint64_t failed;
    uint64_t rerouted_frames;
    uint64_t hedged_frames;
    uint32_t in_flight;
} ep_test_load_counts;

typedef struct ep_test_load ep_test_load;
ep_test_load *ep_test_load_start(const ep_test_load_config *config);
void ep_test_load_read(ep_test_load *load, ep_test_load_counts *out_counts);
/* Waits until so many more calls have succeeded, or so many more have failed. */
void ep_test_load_wait_succeeded(ep_test_load *load, uint64_t more);
void ep_test_load_wait_failed(ep_test_load *load, uint64_t more);
/* Stops beginning calls, waits for those in flight, frees. */
void ep_test_load_stop(ep_test_load *load, ep_test_load_counts *out_counts);

#endif
