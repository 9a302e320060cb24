/* SPDX-License-Identifier: Apache-2.0 */
/* The three call forms against fake nodes: equal to a plain loop, bit for bit, however the batch
 * travels. */
#include <criterion/criterion.h>
#include <dirent.h>
#include <fenv.h>
#include <math.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/numeric.h"
#include "base/random.h"
#include "harness.h"
#include "support/expect.h"

static harness h;
static batch b;
static ep_moe_result result;
static ep_error error;

static void close_all(void)
{
    harness_close(&h);
    batch_free(&b);
}

TestSuite(client_forward, .fini = close_all);

static void check(uint32_t tokens, uint32_t top_k, ep_moe_mode mode, uint64_t seed)
{
    batch own;
    batch_make(&own, &h, tokens, top_k, seed);
    own.args.mode = mode;
    ep_err err = ep_moe_forward(h.client, &own.args, &own.out_tensor, &result);
    cr_assert_eq(err, EP_OK, "T %u K %u mode %d: %s", tokens, top_k, (int)mode, result.error.text);
    cr_assert(batch_equal(&own), "T %u K %u mode %d", tokens, top_k, (int)mode);
    batch_free(&own);
}

static void check_many(void)
{
    static const uint32_t tokens[] = {1, 2, 7, 64, 257, 700};
    for (size_t i = 0; i < sizeof(tokens) / sizeof(tokens[0]); i++) {
        for (uint32_t top_k = 1; top_k <= 4; top_k++) {
            check(tokens[i], top_k, EP_MOE_AUTO, tokens[i] * 10 + top_k);
            check(tokens[i], top_k, EP_MOE_PREFILL, tokens[i] * 10 + top_k);
            check(tokens[i], top_k, EP_MOE_DECODE, tokens[i] * 10 + top_k);
        }
    }
}

Test(client_forward, equals_a_plain_loop_on_1_to_6_nodes_over_loopback)
{
    for (uint32_t nodes = 1; nodes <= 6; nodes++) {
        HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = nodes, .copies = nodes > 2 ? 2 : 1,
                     .shared_experts = nodes % 3, .coordinator = nodes % 2 == 0,
                     .chunk_bytes_max = 16384, .window_tokens = 100);
        check_many();
        cr_assert_geq(result.nodes, nodes > 1 ? 2u : 1u);
        harness_close(&h);
    }
}

Test(client_forward, equals_a_plain_loop_over_tcp)
{
    HARNESS_OPEN(&h, .scheme = "tcp", .nodes_count = 3, .copies = 2, .shared_experts = 1,
                 .coordinator = true);
    check_many();
}

/* Sums are made by the calling thread and by the library's own threads, which inherit what the
 * thread had that started them. */
Test(client_forward, the_callers_float_environment_changes_no_bit)
{
    (void)fesetround(FE_DOWNWARD);
    HARNESS_OPEN(&h, .scheme = "tcp", .nodes_count = 2, .copies = 1);
    for (int i = 0; i < 6; i++) {
        batch own;
        (void)fesetround(FE_TONEAREST);
        batch_make(&own, &h, 40, 4, 70 + (uint64_t)i);
        own.args.mode = i % 2 == 0 ? EP_MOE_DECODE : EP_MOE_PREFILL;
        (void)fesetround(i < 4 ? FE_DOWNWARD : FE_UPWARD);
        const ep_err err = ep_moe_forward(h.client, &own.args, &own.out_tensor, &result);
        const int rounding = fegetround();
        (void)fesetround(FE_TONEAREST);
        ASSERT_OK(err, result.error);
        cr_expect_eq(rounding, i < 4 ? FE_DOWNWARD : FE_UPWARD);
        cr_expect(batch_equal(&own), "call %d", i);
        batch_free(&own);
    }
}

Test(client_forward, a_node_may_own_nothing)
{
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 3, .experts = 2, .coordinator = true);
    check(50, 2, EP_MOE_AUTO, 1);
    cr_assert_eq(fake_node_requests(h.nodes[2]), 0);
}

Test(client_forward, tells_the_node_class_epoch_and_tenant)
{
    ep_epoch epoch;
    bool prefill;
    char tenant[64];
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 1, .coordinator = true);
    batch_make(&b, &h, 4, 2, 1);
    b.args.mode = EP_MOE_PREFILL;
    b.args.tenant = "someone";
    ASSERT_OK(ep_moe_forward(h.client, &b.args, &b.out_tensor, &result), result.error);
    fake_node_last(h.nodes[0], &epoch, &prefill, tenant);
    cr_assert(prefill);
    cr_assert_eq(epoch.term, 1);
    cr_assert_eq(epoch.number, 1);
    cr_assert_str_eq(tenant, "someone");
    cr_assert_eq(result.mode, EP_MOE_PREFILL);
    cr_assert_eq(result.epoch_number, 1);
    cr_assert_str_eq(result.numerics, FAKE_NUMERICS);
}

Test(client_forward, frames_are_cut_to_the_chunk_and_windows_follow_one_another)
{
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 2, .hidden = 512,
                 .chunk_bytes_max = 65536, .window_tokens = 64);
    batch_make(&b, &h, 256, 2, 1);
    b.args.mode = EP_MOE_PREFILL;
    ASSERT_OK(ep_moe_forward(h.client, &b.args, &b.out_tensor, &result), result.error);
    cr_assert(batch_equal(&b));
    /* 128 slots of 1 KiB in a window over two nodes: at least 3 frames of 59 slots, 4 windows */
    cr_assert_geq(result.frames, 12u);
    b.args.mode = EP_MOE_DECODE;
    ASSERT_OK(ep_moe_forward(h.client, &b.args, &b.out_tensor, &result), result.error);
    cr_assert(batch_equal(&b));
    cr_assert_eq(result.frames, 2);
}

Test(client_forward, empty_batches_and_masks)
{
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 2);
    batch_make(&b, &h, 0, 2, 1);
    ASSERT_OK(ep_moe_forward(h.client, &b.args, &b.out_tensor, &result), result.error);
    cr_assert_eq(result.frames, 0);
    b.args.x.shape[1] = 5;
    cr_assert_eq(ep_moe_forward(h.client, &b.args, &b.out_tensor, &result), EP_ERR_INVALID_ARGUMENT,
                 "T = 0 is checked too");
    batch_free(&b);
    uint8_t mask[8] = {0};
    batch_make(&b, &h, 8, 2, 1);
    b.args.active_mask = ep_tensor_1d(mask, EP_DTYPE_BOOL, 8);
    ASSERT_OK(ep_moe_forward(h.client, &b.args, &b.out_tensor, &result), result.error);
    cr_assert_eq(result.frames, 0);
    for (size_t i = 0; i < b.out_bytes; i++) {
        cr_assert_eq(b.out[i], 0);
    }
    /* the same in several windows */
    b.args.mode = EP_MOE_PREFILL;
    ASSERT_OK(ep_moe_forward(h.client, &b.args, &b.out_tensor, &result), result.error);
}

Test(client_forward, other_types_and_strides)
{
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 2, .coordinator = true);
    batch_make(&b, &h, 16, 2, 1);
    /* i64 ids, out with a gap between tokens */
    int64_t ids[32];
    uint8_t wide[16 * 100];
    memset(wide, 0x77, sizeof(wide));
    for (size_t i = 0; i < 32; i++) {
        ids[i] = b.ids[i];
    }
    b.args.expert_ids = ep_tensor_2d(ids, EP_DTYPE_I64, 16, 2);
    ep_tensor out = ep_tensor_2d(wide, EP_DTYPE_BF16, 16, b.hidden);
    out.stride_bytes[0] = 100;
    for (int mode = EP_MOE_DECODE; mode <= EP_MOE_PREFILL; mode++) {
        b.args.mode = (ep_moe_mode)mode;
        ASSERT_OK(ep_moe_forward(h.client, &b.args, &out, &result), result.error);
        for (size_t t = 0; t < 16; t++) {
            cr_assert_arr_eq(wide + t * 100, b.expected + t * b.hidden * 2, b.hidden * 2);
            cr_assert_eq(wide[t * 100 + b.hidden * 2], 0x77);
        }
    }
}

Test(client_forward, uncombined_rows_in_windows)
{
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 2, .window_tokens = 3);
    batch_make(&b, &h, 10, 2, 1);
    uint16_t *rows = calloc(10 * 2 * b.hidden, 2);
    float *x = malloc(b.hidden * sizeof(*x));
    uint16_t *row = malloc(b.hidden * sizeof(*row));
    ep_tensor out = ep_tensor_3d(rows, EP_DTYPE_BF16, 10, 2, b.hidden);
    b.args.result = EP_MOE_UNCOMBINED;
    b.args.mode = EP_MOE_PREFILL;
    ASSERT_OK(ep_moe_forward(h.client, &b.args, &out, &result), result.error);
    for (uint32_t t = 0; t < 10; t++) {
        for (uint32_t i = 0; i < b.hidden; i++) {
            x[i] = ep_bf16_to_f32(((const uint16_t *)(const void *)b.x)[t * b.hidden + i]);
        }
        for (uint32_t k = 0; k < 2; k++) {
            fake_expert((uint32_t)b.ids[t * 2 + k], x, b.hidden, EP_DTYPE_BF16, row);
            cr_assert_arr_eq(rows + (t * 2 + k) * b.hidden, row, b.hidden * 2);
        }
    }
    free(rows);
    free(x);
    free(row);
}

/* ---- errors of the caller ---- */

Test(client_forward, names_what_is_wrong_and_leaves_out_alone)
{
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 2);
    batch_make(&b, &h, 4, 2, 1);
    b.args.model = "nobody";
    cr_assert_eq(ep_moe_forward(h.client, &b.args, &b.out_tensor, &result), EP_ERR_NOT_FOUND);
    ASSERT_TEXT(result.error, "no model nobody in the routing table; it has: demo:v1");
    b.args.model = FAKE_MODEL;
    b.args.layer = 4;
    cr_assert_eq(ep_moe_forward(h.client, &b.args, &b.out_tensor, &result), EP_ERR_NOT_FOUND);
    ASSERT_TEXT(result.error, "has no MoE layer 4");
    b.args.layer = FAKE_LAYER;
    b.ids[5] = 99;
    cr_assert_eq(ep_moe_forward(h.client, &b.args, &b.out_tensor, &result),
                 EP_ERR_INVALID_ARGUMENT);
    ASSERT_TEXT(result.error, "expert id 99 at token 2, slot 1");
    b.ids[5] = b.ids[4];
    cr_assert_eq(ep_moe_forward(h.client, &b.args, &b.out_tensor, NULL), EP_ERR_INVALID_ARGUMENT);
    cr_assert(batch_untouched(&b));
    cr_assert_eq(ep_moe_forward(NULL, &b.args, &b.out_tensor, &result), EP_ERR_INVALID_ARGUMENT);
}

/* ---- callback form ---- */

typedef struct waiter {
    sem_t done;
    ep_err code;
    uint32_t called;
    pthread_t thread;
} waiter;

static void on_done(void *arg, const ep_moe_result *r)
{
    waiter *w = arg;
    w->code = r->error.code;
    w->called++;
    w->thread = pthread_self();
    sem_post(&w->done);
}

Test(client_forward, callbacks_come_exactly_once_from_another_thread)
{
    enum { CALLS = 200 };
    static batch many[CALLS];
    static waiter w[CALLS];
    HARNESS_OPEN(&h, .scheme = "tcp", .nodes_count = 3, .copies = 2, .coordinator = true);
    for (int i = 0; i < CALLS; i++) {
        batch_make(&many[i], &h, (uint32_t)(i % 9), 2, (uint64_t)i);
        sem_init(&w[i].done, 0, 0);
        ASSERT_OK(ep_moe_forward_async(h.client, &many[i].args, &many[i].out_tensor, on_done, &w[i],
                                       NULL, &error),
                  error);
    }
    for (int i = 0; i < CALLS; i++) {
        sem_wait(&w[i].done);
        cr_assert_eq(w[i].code, EP_OK);
        cr_assert(!pthread_equal(w[i].thread, pthread_self()));
        cr_assert(batch_equal(&many[i]));
    }
    ep_client_stats stats;
    ep_client_read_stats(h.client, &stats);
    cr_assert_eq(stats.calls, CALLS);
    cr_assert_eq(stats.calls_failed, 0);
    harness_close(&h);
    for (int i = 0; i < CALLS; i++) {
        cr_assert_eq(w[i].called, 1);
        batch_free(&many[i]);
    }
}

typedef struct chain {
    batch *b;
    uint32_t left;
    sem_t done;
} chain;

static void begin_next(void *arg, const ep_moe_result *r)
{
    chain *c = arg;
    if (r->error.code != EP_OK || c->left-- == 0 ||
        ep_moe_forward_async(h.client, &c->b->args, &c->b->out_tensor, begin_next, c, NULL, NULL) !=
            EP_OK) {
        sem_post(&c->done);
    }
}

Test(client_forward, a_callback_may_begin_the_next_call)
{
    chain c = {.b = &b, .left = 100};
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 2);
    batch_make(&b, &h, 3, 2, 1);
    sem_init(&c.done, 0, 0);
    cr_assert_eq(
        ep_moe_forward_async(h.client, &b.args, &b.out_tensor, begin_next, &c, NULL, &error),
        EP_OK);
    sem_wait(&c.done);
    cr_assert_eq(c.left, UINT32_MAX);
    cr_assert(batch_equal(&b));
}

Test(client_forward, cancel_ends_a_call_and_tells_the_node)
{
    waiter w = {.called = 0};
    ep_call *call = NULL;
    HARNESS_OPEN(&h, .scheme = "tcp", .nodes_count = 1);
    fake_node_set_fault(h.nodes[0], FAKE_HANG, EP_OK, 0);
    batch_make(&b, &h, 3, 2, 1);
    sem_init(&w.done, 0, 0);
    cr_assert_eq(ep_moe_forward_async(h.client, &b.args, &b.out_tensor, on_done, &w, &call, &error),
                 EP_OK);
    fake_node_wait_requests(h.nodes[0], 1);
    ep_call_cancel(call);
    sem_wait(&w.done);
    cr_assert_eq(w.code, EP_ERR_CANCELLED);
    cr_assert(!pthread_equal(w.thread, pthread_self()));
    cr_assert(batch_untouched(&b));
    fake_node_wait_cancelled(h.nodes[0], 1);
    fake_node_set_fault(h.nodes[0], FAKE_OK, EP_OK, 0);
    ASSERT_OK(ep_moe_forward(h.client, &b.args, &b.out_tensor, &result), result.error);
    harness_close(&h);
    cr_assert_eq(w.called, 1);
    batch_free(&b);
}

Test(client_forward, destroy_cancels_calls_in_flight_and_waits_for_their_callbacks)
{
    waiter w = {.called = 0};
    HARNESS_OPEN(&h, .scheme = "tcp", .nodes_count = 1);
    fake_node_set_fault(h.nodes[0], FAKE_HANG, EP_OK, 0);
    batch_make(&b, &h, 3, 2, 1);
    sem_init(&w.done, 0, 0);
    cr_assert_eq(ep_moe_forward_async(h.client, &b.args, &b.out_tensor, on_done, &w, NULL, &error),
                 EP_OK);
    fake_node_wait_requests(h.nodes[0], 1);
    ep_client_destroy(h.client);
    h.client = NULL;
    cr_assert_eq(w.called, 1);
    cr_assert_eq(w.code, EP_ERR_CANCELLED);
}

/* ---- prepared form ---- */

Test(client_forward, prepared_calls_run_again_and_again_with_fewer_tokens)
{
    ep_call *call = NULL;
    HARNESS_OPEN(&h, .scheme = "tcp", .nodes_count = 3, .copies = 2);
    batch_make(&b, &h, 32, 2, 1);
    ASSERT_OK(ep_call_create(h.client, &b.args, &b.out_tensor, &call, &error), error);
    cr_assert_eq(ep_call_finish(call, &result), EP_ERR_FAILED_PRECONDITION);
    ASSERT_FAILS(ep_call_begin(call, 33, &error), EP_ERR_INVALID_ARGUMENT, error,
                 "n_active is 33: allowed 0..32");
    for (uint32_t n = 0; n <= 32; n++) {
        memset(b.out, 0xa5, b.out_bytes);
        ASSERT_OK(ep_call_begin(call, n, &error), error);
        cr_assert_eq(ep_call_begin(call, n, &error), EP_ERR_FAILED_PRECONDITION);
        ASSERT_OK(ep_call_finish(call, &result), result.error);
        cr_assert_arr_eq(b.out, b.expected, n * b.hidden * 2);
        for (size_t i = n * b.hidden * 2; i < b.out_bytes; i++) {
            cr_assert_eq(b.out[i], 0xa5, "rows after n_active were written");
        }
    }
    b.ids[0] = 77;
    cr_assert_eq(ep_call_begin(call, 1, &error), EP_ERR_INVALID_ARGUMENT,
                 "ids are read anew in each run");
    cr_assert_eq(ep_call_begin(call, 0, &error), EP_OK, "rows after n_active are not read");
    cr_assert_eq(ep_call_finish(call, NULL), EP_OK);
    ep_call_destroy(call);
    ep_call_destroy(NULL);
}

Test(client_forward, prepared_calls_can_be_destroyed_in_flight_and_after_the_client)
{
    ep_call *calls[4];
    HARNESS_OPEN(&h, .scheme = "tcp", .nodes_count = 1);
    batch_make(&b, &h, 3, 2, 1);
    for (int i = 0; i < 4; i++) {
        cr_assert_eq(ep_call_create(h.client, &b.args, &b.out_tensor, &calls[i], &error), EP_OK);
    }
    fake_node_set_fault(h.nodes[0], FAKE_HANG, EP_OK, 0);
    cr_assert_eq(ep_call_begin(calls[0], 3, &error), EP_OK);
    cr_assert_eq(ep_call_begin(calls[1], 3, &error), EP_OK);
    cr_assert_eq(ep_call_begin(calls[3], 3, &error), EP_OK);
    fake_node_wait_requests(h.nodes[0], 3);
    ep_call_destroy(calls[0]);
    ep_client_destroy(h.client);
    h.client = NULL;
    ep_call_destroy(calls[3]); /* nobody has finished its run, which has ended */
    cr_assert_eq(ep_call_finish(calls[1], &result), EP_ERR_CANCELLED);
    cr_assert_eq(ep_call_begin(calls[2], 3, &error), EP_ERR_CLOSED);
    ep_call_destroy(calls[1]);
    ep_call_destroy(calls[2]);
}

Test(client_forward, hundreds_of_prepared_calls_in_flight)
{
    enum { CALLS = 300 };
    static batch many[CALLS];
    static ep_call *calls[CALLS];
    HARNESS_OPEN(&h, .scheme = "tcp", .nodes_count = 2);
    for (int i = 0; i < CALLS; i++) {
        batch_make(&many[i], &h, 4, 2, (uint64_t)i);
        cr_assert_eq(
            ep_call_create(h.client, &many[i].args, &many[i].out_tensor, &calls[i], &error), EP_OK);
    }
    fake_node_set_fault(h.nodes[0], FAKE_HANG, EP_OK, 0);
    for (int i = 0; i < CALLS; i++) {
        cr_assert_eq(ep_call_begin(calls[i], 4, &error), EP_OK, "%d: %s", i, error.text);
    }
    fake_node_release(h.nodes[0]);
    for (int i = CALLS - 1; i >= 0; i--) {
        ASSERT_OK(ep_call_finish(calls[i], &result), result.error);
        cr_assert(batch_equal(&many[i]));
        ep_call_destroy(calls[i]);
        batch_free(&many[i]);
    }
}

enum { MANY = 128 };

static void shuffle(uint32_t *numbers, uint32_t count, uint64_t *seed)
{
    for (uint32_t i = 0; i < count; i++) {
        numbers[i] = i;
    }
    for (uint32_t i = count; i > 1; i--) {
        uint32_t other = (uint32_t)(ep_splitmix64(seed) % i), kept = numbers[i - 1];
        numbers[i - 1] = numbers[other];
        numbers[other] = kept;
    }
}

/* Every call waits for a frame of each node. Both nodes keep all requests, then answer in orders of
 * their own, in two parts; the calls are finished in yet another order, and run again. */
static void check_any_order(const char *scheme)
{
    static batch many[MANY];
    static ep_call *calls[MANY];
    uint64_t seed = 11;
    HARNESS_OPEN(&h, .scheme = scheme, .nodes_count = 2);
    for (uint32_t i = 0; i < MANY; i++) {
        batch_make(&many[i], &h, 16, 4, i);
        cr_assert_eq(
            ep_call_create(h.client, &many[i].args, &many[i].out_tensor, &calls[i], &error), EP_OK);
    }
    fake_node_set_fault(h.nodes[0], FAKE_HANG, EP_OK, 0);
    fake_node_set_fault(h.nodes[1], FAKE_HANG, EP_OK, 0);
    for (uint32_t round = 0; round < 10; round++) {
        uint32_t order[MANY];
        shuffle(order, MANY, &seed);
        for (uint32_t i = 0; i < MANY; i++) {
            memset(many[i].out, 0xee, many[i].out_bytes);
            cr_assert_eq(ep_call_begin(calls[order[i]], 16, &error), EP_OK, "%u: %s", i,
                         error.text);
        }
        fake_node_answer_held(h.nodes[0], MANY / 2, &seed);
        fake_node_answer_held(h.nodes[1], MANY, &seed);
        fake_node_answer_held(h.nodes[0], MANY / 2, &seed);
        shuffle(order, MANY, &seed);
        for (uint32_t i = 0; i < MANY; i++) {
            ASSERT_OK(ep_call_finish(calls[order[i]], &result), result.error);
            cr_assert_eq(result.nodes, 2);
            cr_assert(batch_equal(&many[order[i]]), "%s: round %u call %u", scheme, round,
                      order[i]);
        }
    }
    for (uint32_t i = 0; i < MANY; i++) {
        ep_call_destroy(calls[i]);
        batch_free(&many[i]);
    }
    harness_close(&h);
}

Test(client_forward, prepared_calls_in_flight_take_their_replies_in_any_order)
{
    check_any_order("tcp");
    check_any_order("loopback");
}

/* ---- logits ---- */

static ep_gate_config gate_of(ep_gate_score select, ep_gate_score weight)
{
    return (ep_gate_config){.struct_bytes = sizeof(ep_gate_config),
                            .select = select,
                            .weight = weight,
                            .experts = 8,
                            .top_k = 2,
                            .scaling_factor = 1,
                            .groups = 1,
                            .groups_kept = 1};
}

Test(client_forward, logits_give_what_gate_and_forward_give)
{
    float logits[20 * 8];
    uint64_t state = 5;
    ep_gate_config gate = gate_of(EP_GATE_LOGIT, EP_GATE_SOFTMAX_SELECTED);
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 2);
    batch_make(&b, &h, 20, 2, 1);
    for (size_t i = 0; i < 160; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        logits[i] = (float)(state >> 40) / 1e6f;
    }
    ASSERT_OK(ep_gate(&gate, 20, logits, b.ids, b.scales, &error), error);
    batch_expect(&b, &h);
    ep_moe_args args = b.args;
    ep_tensor l = ep_tensor_2d(logits, EP_DTYPE_F32, 20, 8);
    cr_assert_eq(ep_moe_forward_logits(h.client, &args, &gate, &l, &b.out_tensor, &result),
                 EP_ERR_INVALID_ARGUMENT);
    args.expert_ids = ep_tensor_none();
    args.expert_scales = ep_tensor_none();
    ASSERT_OK(ep_moe_forward_logits(h.client, &args, &gate, &l, &b.out_tensor, &result),
              result.error);
    cr_assert(batch_equal(&b));

    /* the load is that of the tokens that are not masked out, */
    double fractions[2][8];
    ep_gate_load loads[2];
    uint8_t active[20] = {1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0};
    args.active_mask = ep_tensor_1d(active, EP_DTYPE_BOOL, 20);
    for (int i = 0; i < 2; i++) {
        loads[i] = (ep_gate_load){.struct_bytes = sizeof(loads[i]), .fractions = fractions[i]};
    }
    ASSERT_OK(ep_gate_load_compute(&gate, 20, logits, b.ids, active, &loads[0], &error), error);
    cr_assert_eq(loads[0].slots, 36u);
    gate.load = &loads[1];
    ASSERT_OK(ep_moe_forward_logits(h.client, &args, &gate, &l, &b.out_tensor, &result),
              result.error);
    loads[0].fractions = loads[1].fractions = NULL;
    cr_assert(memcmp(&loads[0], &loads[1], sizeof(loads[0])) == 0 &&
              memcmp(fractions[0], fractions[1], sizeof(fractions[0])) == 0);
    gate.load = NULL;
    /* a mask is read before the call has its checks */
    uint8_t *lone = malloc(20);
    cr_assert_not_null(lone);
    memset(lone, 1, 20);
    ep_tensor masks[] = {
        ep_tensor_1d(lone, EP_DTYPE_BOOL, 20), ep_tensor_1d(lone, EP_DTYPE_I32, 20),
        ep_tensor_1d(lone, EP_DTYPE_BOOL, 19), ep_tensor_2d(lone, EP_DTYPE_U8, 20, 3),
        ep_tensor_1d(NULL, EP_DTYPE_BOOL, 20)};
    masks[0].stride_bytes[0] = 4096;
    for (size_t i = 0; i < sizeof(masks) / sizeof(masks[0]); i++) {
        args.active_mask = masks[i];
        cr_assert_eq(ep_moe_forward_logits(h.client, &args, &gate, &l, &b.out_tensor, &result),
                     EP_ERR_INVALID_ARGUMENT);
        ASSERT_TEXT(result.error, "active_mask has ");
    }
    free(lone);
    args.active_mask = ep_tensor_none();
    gate.experts = 7;
    cr_assert_eq(ep_moe_forward_logits(h.client, &args, &gate, &l, &b.out_tensor, &result),
                 EP_ERR_INVALID_ARGUMENT);
    ASSERT_TEXT(result.error, "logits have 8 experts, the gate has 7");
    l = ep_tensor_2d(logits, EP_DTYPE_F32, 20, 7);
    cr_assert_eq(ep_moe_forward_logits(h.client, &args, &gate, &l, &b.out_tensor, &result),
                 EP_ERR_INVALID_ARGUMENT);
    ASSERT_TEXT(result.error, "the gate has 7 experts, layer 3 of model demo has 8");
}

static float out_at(uint32_t token, uint32_t element)
{
    float value;
    size_t width = ep_dtype_bytes(b.out_dtype);
    const uint8_t *at = b.out + ((size_t)token * b.hidden + element) * width;
    if (b.out_dtype == EP_DTYPE_F32) {
        memcpy(&value, at, sizeof(value));
        return value;
    }
    uint16_t half;
    memcpy(&half, at, sizeof(half));
    return ep_bf16_to_f32(half);
}

static bool is_finite(uint32_t token)
{
    for (uint32_t i = 0; i < b.hidden; i++) {
        if (!isfinite(out_at(token, i))) {
            return false;
        }
    }
    return true;
}

static ep_err call_with(ep_moe_mode mode, ep_moe_nan rows_policy)
{
    memset(b.out, 0x5a, b.out_bytes);
    b.args.mode = mode;
    b.args.rows_nan_policy = rows_policy;
    return ep_moe_forward(h.client, &b.args, &b.out_tensor, &result);
}

Test(client_forward, rows_of_experts_follow_their_policy)
{
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 2, .window_tokens = 8);
    batch_make(&b, &h, 20, 2, 1);
    uint16_t infinity = 0x7f80; /* x passes, so the experts' rows of token 7 have it */
    cr_assert_eq(b.x_dtype, EP_DTYPE_BF16);
    memcpy(b.x + (7 * (size_t)b.hidden + 5) * 2, &infinity, sizeof(infinity));
    for (ep_moe_mode mode = EP_MOE_DECODE; mode <= EP_MOE_PREFILL; mode++) {
        ASSERT_OK(call_with(mode, EP_MOE_NAN_PASS), result.error);
        cr_expect(!is_finite(7) && is_finite(6), "pass, mode %d", (int)mode);
        ASSERT_OK(call_with(mode, EP_MOE_NAN_ZERO), result.error);
        cr_expect(is_finite(7) && is_finite(6), "zero, mode %d", (int)mode);
        ASSERT_OK(call_with(mode, EP_MOE_NAN_MEAN), result.error);
        cr_expect(is_finite(7) && is_finite(6), "mean, mode %d", (int)mode);
        cr_expect_eq(call_with(mode, EP_MOE_NAN_REJECT), EP_ERR_OUT_OF_RANGE);
        ASSERT_TEXT(result.error, "row of token 7, slot 0");
        for (size_t i = 0; i < b.out_bytes; i++) {
            cr_assert_eq(b.out[i], 0x5a, "mode %d wrote byte %zu", (int)mode, i);
        }
    }
    b.args.combine_at = EP_MOE_COMBINE_NODE_SUM;
    cr_expect_eq(call_with(EP_MOE_DECODE, EP_MOE_NAN_ZERO), EP_ERR_INVALID_ARGUMENT);
    ASSERT_TEXT(result.error, "rows_nan_policy is 2 with combine_at node_sum");
    b.args.combine_at = EP_MOE_COMBINE_ROWS;
    cr_expect_eq(call_with(EP_MOE_DECODE, (ep_moe_nan)4), EP_ERR_INVALID_ARGUMENT);
    ASSERT_TEXT(result.error, "rows_nan_policy 4: allowed 0 (pass)");
}

static ep_err route_with(const ep_gate_config *gate, const ep_tensor *logits, ep_moe_nan policy)
{
    ep_moe_args args = b.args;
    args.expert_ids = ep_tensor_none();
    args.expert_scales = ep_tensor_none();
    args.nan_policy = policy;
    return ep_moe_forward_logits(h.client, &args, gate, logits, &b.out_tensor, &result);
}

static float mean_without(const float *row, int left_out)
{
    double sum = 0;
    for (int e = 0; e < 8; e++) {
        sum += e == left_out ? 0 : (double)row[e];
    }
    return (float)(sum / 7);
}

Test(client_forward, logits_follow_the_policy)
{
    float logits[6 * 8];
    ep_gate_config gate = gate_of(EP_GATE_SOFTMAX, EP_GATE_SOFTMAX);
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 2);
    batch_make(&b, &h, 6, 2, 1);
    for (int i = 0; i < 48; i++) {
        logits[i] = (float)((i * 5) % 7);
    }
    logits[2 * 8 + 3] = NAN;
    logits[4 * 8 + 1] = INFINITY;
    logits[5 * 8 + 6] = -INFINITY; /* a mask, which no policy touches */
    ep_tensor l = ep_tensor_2d(logits, EP_DTYPE_F32, 6, 8);
    ASSERT_OK(route_with(&gate, &l, EP_MOE_NAN_PASS), result.error);
    cr_expect(isnan(out_at(2, 0)) && isnan(out_at(4, 0)), "pass: those tokens are NaN");
    cr_expect(is_finite(1) && is_finite(3) && is_finite(5), "pass: only those");
    cr_expect_eq(route_with(&gate, &l, EP_MOE_NAN_REJECT), EP_ERR_INVALID_ARGUMENT);
    ASSERT_TEXT(result.error, "router logit is NaN at token 2, expert 3");
    for (ep_moe_nan policy = EP_MOE_NAN_ZERO; policy <= EP_MOE_NAN_MEAN; policy++) {
        ASSERT_OK(route_with(&gate, &l, policy), result.error);
        memcpy(b.expected, b.out, b.out_bytes);
        float repaired[6 * 8];
        memcpy(repaired, logits, sizeof(repaired));
        repaired[2 * 8 + 3] = policy == EP_MOE_NAN_ZERO ? 0.0f : mean_without(logits + 2 * 8, 3);
        repaired[4 * 8 + 1] = policy == EP_MOE_NAN_ZERO ? 0.0f : mean_without(logits + 4 * 8, 1);
        ep_tensor r = ep_tensor_2d(repaired, EP_DTYPE_F32, 6, 8);
        ASSERT_OK(route_with(&gate, &r, EP_MOE_NAN_REJECT), result.error);
        cr_expect(memcmp(b.expected, b.out, b.out_bytes) == 0, "policy %d", (int)policy);
    }
}

/* Behind the smaller struct of a caller built with an older library there may be nothing. */
Test(client_forward, a_gate_of_an_older_caller_is_read_no_further)
{
    float logits[20 * 8] = {0};
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), smaller = sizeof(ep_gate_config) - 8;
    uint8_t *pages =
        mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    cr_assert(pages != MAP_FAILED && mprotect(pages + page, page, PROT_NONE) == 0);
    void *older = pages + page - smaller;
    const ep_gate_config gate = {.struct_bytes = (uint32_t)smaller,
                                 .select = EP_GATE_LOGIT,
                                 .weight = EP_GATE_SOFTMAX_SELECTED,
                                 .experts = 8,
                                 .top_k = 2};
    memcpy(older, &gate, smaller);
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 2);
    batch_make(&b, &h, 20, 2, 1);
    ep_moe_args args = b.args;
    args.expert_ids = ep_tensor_none();
    args.expert_scales = ep_tensor_none();
    ep_tensor l = ep_tensor_2d(logits, EP_DTYPE_F32, 20, 8);
    cr_assert_eq(ep_moe_forward_logits(h.client, &args, older, &l, &b.out_tensor, &result), EP_OK,
                 "%s", result.error.text);
    batch_free(&b);
    harness_close(&h);
    munmap(pages, 2 * page);
}

/* ---- the process ---- */

Test(client_forward, a_forked_child_gets_a_clear_error_and_harms_nothing)
{
    ep_call *call = NULL;
    HARNESS_OPEN(&h, .scheme = "tcp", .nodes_count = 1);
    batch_make(&b, &h, 3, 2, 1);
    cr_assert_eq(ep_call_create(h.client, &b.args, &b.out_tensor, &call, &error), EP_OK);
    pid_t child = fork();
    if (child == 0) {
        ep_model_desc model;
        bool ok = ep_moe_forward(h.client, &b.args, &b.out_tensor, &result) ==
                      EP_ERR_FAILED_PRECONDITION &&
                  strstr(result.error.text, "forked") != NULL &&
                  ep_call_begin(call, 1, &error) == EP_ERR_FAILED_PRECONDITION &&
                  ep_client_model(h.client, 0, &model) == EP_ERR_FAILED_PRECONDITION &&
                  ep_client_wait_ready(h.client, 1, &error) == EP_ERR_FAILED_PRECONDITION;
        ep_call_destroy(call);
        ep_client_destroy(h.client);
        _exit(ok ? 7 : 8);
    }
    int status = 0;
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 7);
    ASSERT_OK(ep_moe_forward(h.client, &b.args, &b.out_tensor, &result), result.error);
    cr_assert(batch_equal(&b));
    ep_call_destroy(call);
}

Test(client_forward, describes_models_and_layers)
{
    ep_model_desc model;
    ep_layer_desc layer;
    uint64_t term, number;
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 3, .copies = 2, .shared_experts = 1,
                 .coordinator = true);
    cr_assert_eq(ep_client_model(h.client, 0, &model), EP_OK);
    cr_assert_str_eq(model.name, FAKE_MODEL);
    cr_assert_str_eq(model.version, FAKE_VERSION);
    cr_assert_str_eq(model.numerics, FAKE_NUMERICS);
    cr_assert_eq(model.layers_count, 1);
    cr_assert_eq(ep_client_model(h.client, 1, &model), EP_ERR_NOT_FOUND);
    cr_assert_eq(ep_client_layer(h.client, FAKE_MODEL, NULL, 0, &layer), EP_OK);
    cr_assert_eq(layer.layer, FAKE_LAYER);
    cr_assert_eq(layer.experts, 8);
    cr_assert_eq(layer.shared_experts, 1);
    cr_assert_eq(layer.copies_min, 2);
    cr_assert_str_eq(layer.activation, "silu");
    cr_assert_eq(ep_client_layer(h.client, FAKE_MODEL, "v2", 0, &layer), EP_ERR_NOT_FOUND);
    cr_assert_eq(ep_client_layer(h.client, FAKE_MODEL, NULL, 1, &layer), EP_ERR_NOT_FOUND);
    cr_assert_eq(ep_client_epoch(h.client, &term, &number), EP_OK);
    cr_assert(term == 1 && number == 1);
}

Test(client_forward, wrong_configuration_is_named)
{
    ep_client_config config;
    ep_client *client = NULL;
    const char *urls[] = {"tcp://127.0.0.1:1", "tcp://127.0.0.1:1"};
    ep_client_config_init(&config);
    ASSERT_FAILS(ep_client_create(&config, &client, &error), EP_ERR_INVALID_ARGUMENT, error,
                 "neither coordinator_url nor node_urls");
    config.node_urls = urls;
    config.node_urls_count = 2;
    ASSERT_FAILS(ep_client_create(&config, &client, &error), EP_ERR_INVALID_ARGUMENT, error,
                 "node_urls[0] and [1] are both tcp://127.0.0.1:1");
    config.node_urls_count = 1;
    urls[0] = "nothing://x";
    cr_assert_eq(ep_client_create(&config, &client, &error), EP_ERR_INVALID_ARGUMENT);
    cr_assert(strstr(error.text, "node_urls[0]: ") == error.text, "%s", error.text);
    urls[0] = "tcp://127.0.0.1:1";
    config.calls_max = 0;
    ASSERT_FAILS(ep_client_create(&config, &client, &error), EP_ERR_INVALID_ARGUMENT, error,
                 "calls_max is 0: allowed 1..65536");
    config.calls_max = 1;
    config.struct_bytes = 3;
    cr_assert_eq(ep_client_create(&config, &client, &error), EP_ERR_INVALID_ARGUMENT);
    cr_assert_eq(ep_client_create(NULL, &client, &error), EP_ERR_INVALID_ARGUMENT);
    ep_client_destroy(NULL);
}

/* Signals that a thread of this process blocks, as the kernel lists them; its name in out_name. */
static unsigned long long blocked_signals(const char *thread, char *out_name, size_t bytes)
{
    char path[64], line[256];
    unsigned long long blocked = 0;
    snprintf(path, sizeof(path), "/proc/self/task/%.20s/status", thread);
    FILE *status = fopen(path, "r");
    out_name[0] = 0;
    while (status != NULL && fgets(line, sizeof(line), status) != NULL) {
        if (strncmp(line, "Name:\t", 6) == 0) {
            snprintf(out_name, bytes, "%.*s", (int)strcspn(line + 6, "\n"), line + 6);
        }
        sscanf(line, "SigBlk: %llx", &blocked);
    }
    if (status != NULL) {
        fclose(status);
    }
    return blocked;
}

Test(client_forward, leaves_signals_to_the_programs_threads)
{
    uint32_t seen = 0;
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 1);
    DIR *threads = opendir("/proc/self/task");
    cr_assert_not_null(threads);
    for (const struct dirent *thread; (thread = readdir(threads)) != NULL;) {
        char name[32];
        unsigned long long blocked = blocked_signals(thread->d_name, name, sizeof(name));
        if (strncmp(name, "ep-client", 9) == 0) {
            seen++;
            cr_expect((blocked & 1ull << (SIGUSR1 - 1)) != 0 &&
                          (blocked & 1ull << (SIGTERM - 1)) != 0,
                      "thread %s blocks %llx", name, blocked);
        }
    }
    closedir(threads);
    cr_assert_geq(seen, 3u, "the timers' thread and two workers");
}
