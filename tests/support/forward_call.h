/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A bare caller of ExpertService.Forward for tests: one channel, hand-made requests, and their
 * expected rows, computed by the reference backend from the checkpoint. Threads: one per peer, but
 * calls may begin on any thread.
 */
#ifndef EP_TESTS_SUPPORT_FORWARD_CALL_H
#define EP_TESTS_SUPPORT_FORWARD_CALL_H

#include <pthread.h>

#include "backends/backend.h"
#include "expert.pb-c.h"
#include "model/model.h"
#include "rpc/rpc.h"
#include "wire/forward_codec.h"

typedef struct ep_test_peer {
    ep_timer_service *timers;
    ep_buffer_pool *pool;
    ep_rpc_common common;
    ep_rpc_channel *channel;
} ep_test_peer;

/* Connects and waits until ready. */
ep_err ep_test_peer_open(ep_test_peer *peer, const char *url, ep_error *out_error);
void ep_test_peer_close(ep_test_peer *peer);

typedef struct ep_test_forward {
    const char *model;    /* NULL: "demo" */
    const char *version;  /* NULL: "" */
    const char *numerics; /* NULL: "" */
    /* numerics of ep_test_expected_rows; NULL: a node's default */
    const ep_numerics *expected_with;
    uint32_t layer;
    ep_epoch epoch; /* 0.0: none */
    uint32_t rows;
    uint32_t slots;
    uint32_t hidden;
    ep_dtype x_dtype;
    ep_dtype reply_dtype;
    bool weight_on_input;
    bool prefill;
    bool want_timing;
    uint64_t step_group;
    uint32_t step_group_size;
    const char *tenant;             /* NULL none */
    const void *x;                  /* [rows,hidden] */
    const float *row_scales;        /* i8 */
    const ep_wire_slot *wire_slots; /* [slots] */
    const float *slot_scales;       /* weight_on_input, node_sum */
    ep_combine_quant reply_quant;
    bool node_sum;
    const uint16_t *slot_places;    /* node_sum */
    Expertd__V1__RelayPart **relay; /* [relay_count] */
    size_t relay_count;
    uint32_t timeout_ms; /* 0: 20 s */
} ep_test_forward;

typedef struct ep_test_pending {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool is_done;
    ep_err result;
    ep_error error;
    ep_rpc_call_id id;
    /* the reply's tensors (wire/forward_codec.h): plain ones are [slots,hidden] reply_dtype */
    void *out_rows;
    size_t out_bytes;
    size_t reply_bytes; /* tensor bytes that came */
    uint64_t queue_us;
    uint64_t compute_us;
} ep_test_pending;

/* Begins a call; pending must live until ep_test_forward_wait. out_rows may be NULL. */
ep_err ep_test_forward_begin(ep_test_peer *peer, const ep_test_forward *forward, void *out_rows,
                             ep_test_pending *pending, ep_error *out_error);
/* True: ep_test_forward_wait will not block; it must still be called. */
bool ep_test_forward_is_done(ep_test_pending *pending);
ep_err ep_test_forward_wait(ep_test_pending *pending, ep_error *out_error);
ep_err ep_test_forward_run(ep_test_peer *peer, const ep_test_forward *forward, void *out_rows,
                           ep_error *out_error);

/* Fills x with deterministic values around 0, as dtype (bf16, f16, f32). */
void ep_test_fill_rows(uint64_t seed, ep_dtype dtype, size_t count, void *out);
/* Computes the rows a node must return, by the reference backend on the checkpoint's own
 * experts. */
ep_err ep_test_expected_rows(const char *checkpoint_path, const ep_test_forward *forward,
                             void *out_rows, ep_error *out_error);
/* Makes the whole reply of these rows: plain, summed, quantised (bf16, hidden up to 64). Returns
 * its bytes, at most those of the rows. */
size_t ep_test_expected_reply(const ep_test_forward *forward, const uint16_t *rows,
                              void *out_reply);

#endif
