/* SPDX-License-Identifier: Apache-2.0 */
/* What happens when nodes, tables and coordinators fail: other copies serve, or the error says what
 * was waited for. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <semaphore.h>
#include <string.h>

#include "base/clock.h"
#include "call/call.h"
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

TestSuite(client_failure, .fini = close_all);

static ep_err run(batch *of)
{
    return ep_moe_forward(h.client, &of->args, &of->out_tensor, &result);
}

static void expect_ok(batch *of, const char *what)
{
    ep_err err = run(of);
    cr_assert_eq(err, EP_OK, "%s: %s: %s", what, ep_err_name(err), result.error.text);
    cr_assert(batch_equal(of), "%s", what);
}

/* Until each of the first nodes has been asked: it is connected. */
static void call_until_asked(batch *of, uint32_t nodes)
{
    for (uint32_t n = 0; n < nodes; n++) {
        while (fake_node_requests(h.nodes[n]) == 0) {
            expect_ok(of, "before");
        }
    }
}

/* Until the client has this table. */
static void await_epoch(uint64_t wanted)
{
    uint64_t term, number = 0;
    while (number != wanted) {
        cr_assert_eq(ep_client_epoch(h.client, &term, &number), EP_OK);
    }
}

static bool has(const char *part)
{
    return strstr(result.error.text, part) != NULL;
}

/* Of decode calls; the client's table lists the node. */
static ep_answer_times *times_of(uint32_t node)
{
    ep_view *view = ep_cluster_acquire_view(h.client->cluster);
    ep_answer_times *times = &view->peers[node]->links[EP_PEER_DECODE].times;
    ep_view_unref(view);
    return times;
}

static uint32_t answers_of(uint32_t node)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < EP_ANSWER_SIZES; i++) {
        count += __atomic_load_n(&times_of(node)->sizes[i].total, __ATOMIC_RELAXED);
    }
    return count;
}

/* ---- load while something breaks ---- */

typedef struct load {
    pthread_t threads[4];
    bool stop;
    uint64_t calls;
    uint64_t failed;
    uint64_t wrong;
    char text[EP_ERROR_TEXT_BYTES];
} load;

static void *load_main(void *arg)
{
    load *l = arg;
    batch own;
    uint64_t seed = (uint64_t)(uintptr_t)&own;
    while (!__atomic_load_n(&l->stop, __ATOMIC_ACQUIRE)) {
        ep_moe_result r;
        batch_make(&own, &h, 1 + (uint32_t)(seed % 40), 2, seed);
        own.args.mode = seed % 5 == 0 ? EP_MOE_PREFILL : EP_MOE_AUTO;
        seed++;
        if (ep_moe_forward(h.client, &own.args, &own.out_tensor, &r) != EP_OK) {
            if (__atomic_add_fetch(&l->failed, 1, __ATOMIC_ACQ_REL) == 1) {
                memcpy(l->text, r.error.text, sizeof(l->text));
            }
        } else if (!batch_equal(&own)) {
            __atomic_add_fetch(&l->wrong, 1, __ATOMIC_ACQ_REL);
        }
        batch_free(&own);
        __atomic_add_fetch(&l->calls, 1, __ATOMIC_ACQ_REL);
    }
    return NULL;
}

static void load_start(load *l)
{
    *l = (load){.stop = false};
    for (size_t i = 0; i < 4; i++) {
        pthread_create(&l->threads[i], NULL, load_main, l);
    }
}

/* Until that many more calls have ended: progress, not time. */
static void load_pass(load *l, uint64_t calls)
{
    uint64_t goal = __atomic_load_n(&l->calls, __ATOMIC_ACQUIRE) + calls;
    while (__atomic_load_n(&l->calls, __ATOMIC_ACQUIRE) < goal) {
        sched_yield();
    }
}

static void load_end(load *l)
{
    __atomic_store_n(&l->stop, true, __ATOMIC_RELEASE);
    for (size_t i = 0; i < 4; i++) {
        pthread_join(l->threads[i], NULL);
    }
    cr_assert_eq(l->failed, 0, "%llu of %llu calls failed, the first: %s",
                 (unsigned long long)l->failed, (unsigned long long)l->calls, l->text);
    cr_assert_eq(l->wrong, 0);
}

static void stop_nodes_under_load(const char *scheme)
{
    load l;
    HARNESS_OPEN(&h, .scheme = scheme, .nodes_count = 3, .copies = 2, .shared_experts = 1,
                 .coordinator = true);
    load_start(&l);
    load_pass(&l, 50);
    fake_node_set_fault(h.nodes[1], FAKE_HANG, EP_OK, 0);
    fake_node_wait_held(h.nodes[1]); /* now a call depends on its answer */
    harness_stop_node(&h, 1);
    load_pass(&l, 100);
    load_end(&l);
}

Test(client_failure, a_node_dies_under_load_and_no_call_fails_tcp)
{
    stop_nodes_under_load("tcp");
}

Test(client_failure, a_node_dies_under_load_and_no_call_fails_loopback)
{
    stop_nodes_under_load("loopback");
}

Test(client_failure, nodes_come_and_go_under_load)
{
    load l;
    HARNESS_OPEN(&h, .scheme = "tcp", .nodes_count = 3, .copies = 2, .coordinator = true);
    load_start(&l);
    for (uint32_t round = 0; round < 6; round++) {
        uint32_t n = round % 3;
        load_pass(&l, 30);
        fake_node_stop(h.nodes[n]);
        load_pass(&l, 30);
        harness_start_node(&h, n, h.urls[n], NULL); /* the same port */
        uint64_t served = 0;
        while (served == 0) { /* until it is in use again */
            load_pass(&l, 1);
            served = fake_node_requests(h.nodes[n]);
        }
    }
    load_end(&l);
}

Test(client_failure, tables_change_under_load)
{
    load l;
    HARNESS_OPEN(&h, .scheme = "tcp", .nodes_count = 4, .copies = 1, .coordinator = true);
    load_start(&l);
    for (uint32_t round = 0; round < 20; round++) {
        uint32_t old[64];
        memcpy(old, h.owners, sizeof(old));
        load_pass(&l, 10);
        for (uint32_t e = 0; e < h.shape.experts;
             /* new owners load first, the table follows, old ones drop theirs */
             e++) {
            h.owners[e] |= 1u << ((e + round) % 4);
        }
        harness_own(&h);
        for (uint32_t e = 0; e < h.shape.experts; e++) {
            h.owners[e] = 1u << ((e + round) % 4);
        }
        harness_publish(&h);
        harness_own(&h); /* at once: calls under the old table get NOT_OWNER */
    }
    load_end(&l);
}

/* ---- one fault at a time, with another copy ---- */

Test(client_failure, wrong_replies_are_not_used_and_another_copy_serves)
{
    static const fake_fault faults[] = {FAKE_SHORT_REPLY, FAKE_WRONG_HIDDEN, FAKE_WRONG_DTYPE,
                                        FAKE_WRONG_BYTES, FAKE_WRONG_NUMERICS};
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 2, .copies = 2);
    batch_make(&b, &h, 9, 2, 1);
    call_until_asked(&b, 1); /* one connected node makes the service ready */
    const uint32_t answers = answers_of(0);
    for (size_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++) {
        fake_node_set_fault(h.nodes[0], faults[i], EP_OK, 0);
        expect_ok(&b, "wrong reply");
        cr_assert_geq(result.rerouted_frames, 1u);
    }
    cr_assert_eq(answers_of(0), answers, "they say nothing about how quick it is");
}

Test(client_failure, errors_of_a_node_are_rerouted_at_once)
{
    static const ep_err codes[] = {EP_ERR_NOT_OWNER,   EP_ERR_STALE_EPOCH, EP_ERR_DRAINING,
                                   EP_ERR_DEVICE_LOST, EP_ERR_DATA_LOSS,   EP_ERR_INTERNAL,
                                   EP_ERR_UNAVAILABLE};
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 2, .copies = 2, .coordinator = true);
    batch_make(&b, &h, 9, 2, 1);
    for (size_t i = 0; i < sizeof(codes) / sizeof(codes[0]); i++) {
        fake_node_set_fault(h.nodes[0], FAKE_ERROR, codes[i], 0);
        expect_ok(&b, ep_err_name(codes[i]));
    }
}

Test(client_failure, an_error_no_copy_can_mend_ends_the_call_at_once)
{
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 2, .copies = 2);
    batch_make(&b, &h, 9, 2, 1);
    fake_node_set_fault(h.nodes[0], FAKE_ERROR, EP_ERR_INVALID_ARGUMENT, 0);
    fake_node_set_fault(h.nodes[1], FAKE_ERROR, EP_ERR_INVALID_ARGUMENT, 0);
    cr_assert_eq(run(&b), EP_ERR_INVALID_ARGUMENT);
    cr_assert(has("told to fail") && has("node n"), "%s", result.error.text);
    cr_assert_eq(result.error.layer, FAKE_LAYER);
    cr_assert_lt(result.total_us, b.args.deadline_us);
    cr_assert(batch_untouched(&b));
}

Test(client_failure,
     where_a_node_would_be_too_late_another_copy_is_asked_and_without_one_the_call_ends)
{
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 2, .copies = 2);
    batch_make(&b, &h, 9, 2, 1);
    /* both are connected */
    call_until_asked(&b, 2);
    fake_node_set_fault(h.nodes[0], FAKE_ERROR, EP_ERR_RESOURCE_EXHAUSTED, b.args.deadline_us);
    expect_ok(&b, "the other node has room");
    const uint64_t asked = fake_node_requests(h.nodes[0]) + fake_node_requests(h.nodes[1]);
    fake_node_set_fault(h.nodes[1], FAKE_ERROR, EP_ERR_RESOURCE_EXHAUSTED, b.args.deadline_us);
    memset(b.out, 0xa5, b.out_bytes);
    cr_assert_eq(run(&b), EP_ERR_RESOURCE_EXHAUSTED);
    cr_assert(has("told to fail") && has("node n"), "%s", result.error.text);
    cr_assert_lt(result.total_us, b.args.deadline_us, "there is nothing to wait for");
    cr_assert_leq(fake_node_requests(h.nodes[0]) + fake_node_requests(h.nodes[1]), asked + 4,
                  "each copy once");
    cr_assert(batch_untouched(&b));
}

/* Even experts are on nodes 0 and 2, odd ones on node 1 alone. */
static void open_with_a_sole_owner(batch *out_batch)
{
    HARNESS_OPEN(&h, .scheme = "tcp", .nodes_count = 3, .copies = 1, .coordinator = true);
    for (uint32_t e = 0; e < h.shape.experts; e++) {
        h.owners[e] = e % 2 == 0 ? 1u << 0 | 1u << 2 : 1u << 1;
    }
    harness_own(&h);
    harness_publish(&h);
    batch_make(out_batch, &h, 9, 2, 1);
    call_until_asked(out_batch, 3);
}

Test(client_failure, a_node_that_had_no_room_ends_no_call_whose_slots_wait_for_another)
{
    open_with_a_sole_owner(&b);
    harness_stop_node(&h, 1);
    fake_node_set_fault(h.nodes[0], FAKE_ERROR, EP_ERR_RESOURCE_EXHAUSTED, b.args.deadline_us);
    b.args.deadline_us = 300000;
    const uint64_t asked = fake_node_requests(h.nodes[0]);
    while (fake_node_requests(h.nodes[0]) == asked) {
        cr_assert_eq(run(&b), EP_ERR_UNAVAILABLE, "%s", result.error.text);
        cr_assert(has("no live copy"), "%s", result.error.text);
    }
}

Test(client_failure, rows_of_a_node_without_room_before_the_deadline_may_be_missing)
{
    open_with_a_sole_owner(&b);
    fake_node_set_fault(h.nodes[1], FAKE_ERROR, EP_ERR_RESOURCE_EXHAUSTED, b.args.deadline_us);
    b.args.allow_missing = true;
    b.args.deadline_us = 500000;
    uint32_t odd = 0;
    for (uint32_t s = 0; s < 18; s++) {
        odd += b.ids[s] % 2 == 1;
    }
    const uint64_t asked = fake_node_requests(h.nodes[1]);
    ASSERT_OK(run(&b), result.error);
    cr_assert_eq(result.missing_count, odd);
    cr_assert_eq(fake_node_requests(h.nodes[1]), asked + 1, "it said when");
}

/* ---- sole owner ---- */

Test(client_failure, a_sole_owner_that_fails_once_is_asked_again)
{
    static const ep_err codes[] = {EP_ERR_DEVICE_LOST, EP_ERR_NOT_OWNER, EP_ERR_RESOURCE_EXHAUSTED,
                                   EP_ERR_INTERNAL};
    HARNESS_OPEN(&h, .scheme = "tcp", .nodes_count = 2, .copies = 1, .coordinator = true);
    batch_make(&b, &h, 9, 2, 1);
    for (size_t i = 0; i < sizeof(codes) / sizeof(codes[0]); i++) {
        fake_node_set_fault(h.nodes[0], FAKE_ERROR_ONCE, codes[i], 3000);
        expect_ok(&b, ep_err_name(codes[i]));
    }
}

Test(client_failure, a_sole_owner_that_does_not_answer_ends_the_call_at_its_deadline)
{
    HARNESS_OPEN(&h, .scheme = "tcp", .nodes_count = 2, .copies = 1, .coordinator = true);
    batch_make(&b, &h, 9, 2, 1);
    expect_ok(&b, "before"); /* both are connected */
    fake_node_set_fault(h.nodes[1], FAKE_HANG, EP_OK, 0);
    memset(b.out, 0xa5, b.out_bytes);
    b.args.deadline_us = 300000;
    uint64_t begin = ep_clock_now_ns();
    cr_assert_eq(run(&b), EP_ERR_DEADLINE_EXCEEDED, "%s", result.error.text);
    uint64_t waited_us = (ep_clock_now_ns() - begin) / EP_NS_PER_US;
    cr_assert_geq(waited_us, b.args.deadline_us); /* how late it may be is measured elsewhere */
    cr_assert_str_eq(result.error.node, "n1");
    cr_assert_eq(result.error.layer, FAKE_LAYER);
    cr_assert_eq((uint32_t)result.error.expert % 2, 1u);
    cr_assert_geq(result.error.waited_us, 300000);
    cr_assert(has("no reply from node n1 within ") && has("last heard"), "%s", result.error.text);
    cr_assert(batch_untouched(&b));
    fake_node_release(h.nodes[1]);
    b.args.deadline_us = 20000000;
    expect_ok(&b, "after it answers again");
}

Test(client_failure, a_sole_owner_that_is_gone_ends_the_call_at_its_deadline)
{
    HARNESS_OPEN(&h, .scheme = "tcp", .nodes_count = 2, .copies = 1, .coordinator = true);
    batch_make(&b, &h, 9, 2, 1);
    expect_ok(&b, "before");
    harness_stop_node(&h, 1);
    memset(b.out, 0xa5, b.out_bytes);
    b.args.deadline_us = 400000;
    cr_assert_eq(run(&b), EP_ERR_UNAVAILABLE, "%s", result.error.text);
    cr_assert_str_eq(result.error.node, "n1", "%s", result.error.text);
    cr_assert_eq(result.error.layer, FAKE_LAYER);
    cr_assert_eq((uint32_t)result.error.expert % 2, 1u);
    cr_assert_geq(result.error.waited_us, 400000);
    cr_assert(has("no live copy within ") && has("node n1: not connected to tcp://") &&
                  has("last heard"),
              "%s", result.error.text);
    cr_assert(batch_untouched(&b));
    /* other forms, other modes */
    b.args.mode = EP_MOE_PREFILL;
    cr_assert_eq(run(&b), EP_ERR_UNAVAILABLE, "%s", result.error.text);
}

typedef struct restarter {
    pthread_t thread;
    sem_t go;
} restarter;

static void *restart_main(void *arg)
{
    restarter *r = arg;
    sem_wait(&r->go);
    harness_start_node(&h, 1, h.urls[1], NULL);
    return NULL;
}

Test(client_failure, calls_wait_for_a_sole_owner_that_comes_back)
{
    restarter r;
    HARNESS_OPEN(&h, .scheme = "tcp", .nodes_count = 2, .copies = 1, .coordinator = true);
    batch_make(&b, &h, 9, 2, 1);
    expect_ok(&b, "before");
    fake_node_stop(h.nodes[1]);
    sem_init(&r.go, 0, 0);
    pthread_create(&r.thread, NULL, restart_main, &r);
    sem_post(&r.go);
    expect_ok(&b, "while it restarts");
    pthread_join(r.thread, NULL);
}

Test(client_failure, missing_rows_are_allowed_only_when_asked_for_and_listed)
{
    HARNESS_OPEN(&h, .scheme = "tcp", .nodes_count = 2, .copies = 1, .coordinator = true);
    batch_make(&b, &h, 9, 2, 1);
    harness_stop_node(&h, 1);
    b.args.allow_missing = true;
    uint32_t missing = 0;
    uint32_t first = UINT32_MAX;
    for (uint32_t s = 0; s < 18; s++) {
        if (b.ids[s] % 2 == 1) {
            first = missing++ == 0 ? s : first;
            b.ids[s] = -1;
        }
    }
    batch_expect(&b, &h); /* as if those slots were inactive */
    batch c;
    batch_make(&c, &h, 9, 2, 1); /* the same batch with its odd ids */
    c.args.allow_missing = true;
    c.args.deadline_us = 2000000; /* the node that lives must answer in it */
    uint32_t listed[18];
    memset(listed, 0xff, sizeof(listed));
    cr_assert(missing > 1);
    c.args.missing_slots = listed;
    c.args.missing_slots_max = missing - 1; /* one too few: the rest stays untouched */
    ASSERT_OK(run(&c), result.error);
    uint32_t found = 0;
    for (uint32_t s = 0; s < 18 && found < missing - 1; s++) {
        if (c.ids[s] % 2 == 1) {
            cr_assert_eq(listed[found++], s);
        }
    }
    cr_assert_eq(listed[missing - 1], UINT32_MAX);
    cr_assert_eq(result.missing_count, missing);
    cr_assert_eq(result.missing_first_slot, first);
    cr_assert_arr_eq(c.out, b.expected, b.out_bytes);
    batch_free(&b);
    batch_free(&c);
}

/* ---- second sends ---- */

static void *run_main(void *arg)
{
    EXPECT_OK(run(arg), result.error);
    return NULL;
}

Test(client_failure, a_hedge_that_its_original_overtakes_does_not_make_its_node_slow)
{
    pthread_t thread;
    const int32_t slow = 3 * EP_PACE_OCTAVE;
    HARNESS_OPEN(&h, .scheme = "tcp", .nodes_count = 2, .copies = 2, .coordinator = true);
    batch_make(&b, &h, 1, 1, 1);
    call_until_asked(&b, 2);
    for (uint32_t i = 0; i < EP_ANSWER_TIMES_MIN; i++) {
        ep_answer_times_add(times_of(0), 1, EP_NS_PER_MS);
    }
    __atomic_store_n(&times_of(0)->pace, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&times_of(1)->pace, slow, __ATOMIC_RELAXED); /* calls go to the other node */
    __atomic_store_n(&h.client->budget.hedge_units, EP_HEDGE_COST, __ATOMIC_RELAXED);
    __atomic_store_n(&h.client->sequence, 1, __ATOMIC_RELAXED); /* no probe */
    fake_node_set_fault(h.nodes[0], FAKE_HANG, EP_OK, 0);
    fake_node_set_fault(h.nodes[1], FAKE_HANG, EP_OK, 0);
    cr_assert_eq(pthread_create(&thread, NULL, run_main, &b), 0);
    fake_node_wait_held(h.nodes[0]);
    fake_node_wait_held(h.nodes[1]);
    fake_node_release(h.nodes[0]);
    pthread_join(thread, NULL);
    cr_assert_eq(result.hedged_frames, 1u);
    cr_assert_eq(__atomic_load_n(&times_of(1)->pace, __ATOMIC_RELAXED), slow);
    fake_node_release(h.nodes[1]);
}

/* ---- paces ---- */

/* A newer table with another model beside FAKE_MODEL, of the same nodes and owners. */
static void publish_another_model(const char *name)
{
    const char *names[] = {h.names[0]};
    ep_routing_table *both;
    h.epoch.number++;
    ep_routing_table *one = fake_table(h.epoch, &h.shape, names, h.urls, NULL, 1, h.owners);
    const uint32_t experts = h.shape.experts, copies = one->layers[0].offsets[experts];
    cr_assert_eq(ep_routing_table_create(1, 2, 2, &both), EP_OK);
    both->epoch = h.epoch;
    both->nodes[0] = one->nodes[0];
    memcpy(both->policy, one->policy, sizeof(both->policy));
    for (uint32_t m = 0; m < 2; m++) {
        const char *model = m == 0 ? FAKE_MODEL : name;
        cr_assert_eq(ep_routing_table_model_init(both, m, model, FAKE_VERSION, 1), EP_OK);
        strcpy(both->models[m].numerics[0], FAKE_NUMERICS);
        both->models[m].numerics_count = 1;
        both->models[m].numerics_of_node[0] = 0;
        cr_assert_eq(ep_routing_table_layer_init(both, m, m, &h.shape, copies), EP_OK);
        memcpy(both->layers[m].offsets, one->layers[0].offsets, (experts + 1) * sizeof(uint32_t));
        memcpy(both->layers[m].copies, one->layers[0].copies, copies * sizeof(uint32_t));
    }
    fake_coordinator_publish(h.coordinator, both);
    ep_routing_table_unref(one);
    ep_routing_table_unref(both);
}

Test(client_failure, an_answer_is_compared_with_those_of_the_same_model_alone)
{
    batch large, small;
    HARNESS_OPEN(&h, .scheme = "tcp", .nodes_count = 1, .coordinator = true);
    const ep_answer_norm *norms = h.client->norms[EP_PEER_DECODE];
    publish_another_model("small");
    batch_make(&large, &h, 1, 1, 1);
    batch_make(&small, &h, 1, 1, 1);
    small.args.model = "small";
    while (run(&small) == EP_ERR_NOT_FOUND) { /* until the table is here */
    }
    expect_ok(&large, "the first answers");
    const int32_t of_large = norms[0].sizes[0], of_small = norms[1].sizes[0];
    cr_assert(of_large != 0 && of_small != 0, "each has a norm of its own");
    expect_ok(&small, "of the small one");
    cr_expect_eq(norms[0].sizes[0], of_large, "the large one's is not touched");
    cr_expect_neq(norms[1].sizes[0], of_small);
    /* Whatever they took: it is less than the large model's norm, and more than the small one's. */
    __atomic_store_n(&h.client->norms[EP_PEER_DECODE][0].sizes[0], INT32_MAX / 2, __ATOMIC_RELAXED);
    __atomic_store_n(&h.client->norms[EP_PEER_DECODE][1].sizes[0], 1, __ATOMIC_RELAXED);
    __atomic_store_n(&times_of(0)->pace, 0, __ATOMIC_RELAXED);
    expect_ok(&large, "a quick answer of a large model");
    const int32_t quick = __atomic_load_n(&times_of(0)->pace, __ATOMIC_RELAXED);
    cr_expect_lt(quick, 0);
    expect_ok(&small, "a slow answer of a small model");
    cr_expect_gt(__atomic_load_n(&times_of(0)->pace, __ATOMIC_RELAXED), quick);
    batch_free(&large);
    batch_free(&small);
}

/* ---- tables ---- */

Test(client_failure, a_call_waits_for_a_table_that_lists_its_expert)
{
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 2, .copies = 1, .coordinator = true);
    batch_make(&b, &h, 9, 2, 1);
    uint32_t owners[64];
    memcpy(owners, h.owners, sizeof(owners));
    h.owners[0] = 0;
    harness_publish(&h);
    harness_own(&h);
    b.ids[0] = 0;
    b.ids[1] = 1;
    batch_expect(&b, &h);
    await_epoch(2);
    ep_call *call = NULL;
    cr_assert_eq(ep_call_create(h.client, &b.args, &b.out_tensor, &call, &error), EP_OK);
    ASSERT_OK(ep_call_begin(call, 9, &error), error);
    memcpy(h.owners, owners, sizeof(owners));
    harness_own(&h);
    harness_publish(&h);
    ASSERT_OK(ep_call_finish(call, &result), result.error);
    cr_assert(batch_equal(&b));
    cr_assert_eq(result.epoch_number, 3);
    ep_call_destroy(call);
}

/* What a node holds changes after its Hello: it was still loading when the client came. */
Test(client_failure, without_a_coordinator_a_call_waits_for_a_node_that_still_loads)
{
    HARNESS_OPEN(&h, .scheme = "tcp", .nodes_count = 2, .copies = 1);
    batch_make(&b, &h, 9, 2, 1);
    uint32_t owners[64];
    memcpy(owners, h.owners, sizeof(owners));
    h.owners[0] = 0;
    harness_own(&h);
    b.ids[0] = 0;
    b.ids[1] = 1;
    batch_expect(&b, &h);
    ep_layer_desc layer = {.struct_bytes = sizeof(layer), .copies_min = 1};
    while (layer.copies_min != 0) {
        cr_assert_eq(ep_client_layer(h.client, "demo", NULL, 0, &layer), EP_OK);
    }
    ep_call *call = NULL;
    cr_assert_eq(ep_call_create(h.client, &b.args, &b.out_tensor, &call, &error), EP_OK);
    ASSERT_OK(ep_call_begin(call, 9, &error), error);
    memcpy(h.owners, owners, sizeof(owners));
    harness_own(&h);
    ASSERT_OK(ep_call_finish(call, &result), result.error);
    cr_assert(batch_equal(&b));
    ep_call_destroy(call);
}

Test(client_failure, an_expert_nobody_holds_is_named)
{
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 2, .copies = 1, .coordinator = true);
    batch_make(&b, &h, 9, 2, 1);
    h.owners[5] = 0;
    harness_publish(&h);
    harness_own(&h);
    b.ids[0] = 5;
    b.ids[1] = 6;
    b.args.deadline_us = 200000;
    await_epoch(h.epoch.number); /* so that no copy is known when the call begins */
    cr_assert_eq(run(&b), EP_ERR_UNAVAILABLE);
    cr_assert_eq(result.error.expert, 5);
    cr_assert(has("layer 3, expert 5 of model demo:v1"), "%s", result.error.text);
    cr_assert(has("lists no copy of it any more; last report of node"), "%s", result.error.text);
    cr_assert_str_eq(result.error.node, h.names[1], "the node that held it last is named");
    h.epoch.number += 5; /* the name outlives a second table without the expert */
    harness_publish(&h);
    await_epoch(h.epoch.number);
    cr_assert_eq(run(&b), EP_ERR_UNAVAILABLE);
    cr_assert_str_eq(result.error.node, h.names[1]);
}

Test(client_failure, an_older_table_never_replaces_a_newer_one)
{
    uint64_t term, number;
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 2, .copies = 2, .coordinator = true);
    h.epoch = (ep_epoch){5, 9};
    harness_publish(&h);
    do {
        cr_assert_eq(ep_client_epoch(h.client, &term, &number), EP_OK);
    } while (term != 5);
    cr_assert_eq(number, 10);
    uint32_t owners[64];
    memcpy(owners, h.owners, sizeof(owners));
    memset(h.owners, 0, sizeof(h.owners)); /* were it used, no call could succeed */
    h.epoch = (ep_epoch){4, 99};
    harness_publish(&h);
    memcpy(h.owners, owners, sizeof(owners));
    h.epoch = (ep_epoch){5, 10};
    harness_publish(&h); /* arrives after the old one: streams keep order */
    do {
        cr_assert_eq(ep_client_epoch(h.client, &term, &number), EP_OK);
        cr_assert_eq(term, 5);
    } while (number != 11);
    batch_make(&b, &h, 9, 2, 1);
    expect_ok(&b, "newest table");
}

/* Of a coordinator that has restarted and heard of no node yet. Epochs tell what was adopted: below
 * a newer one none is. */
Test(client_failure, a_table_without_copies_is_no_trade_for_nodes_that_answer)
{
    uint64_t term, number;
    uint32_t owners[64];
    HARNESS_OPEN(&h, .scheme = "tcp", .nodes_count = 2, .copies = 2, .coordinator = true);
    memcpy(owners, h.owners, sizeof(owners));
    memset(h.owners, 0, sizeof(h.owners));
    h.epoch.number = 99;
    harness_publish(&h);
    memcpy(h.owners, owners, sizeof(owners));
    h.epoch.number = 49;
    harness_publish(&h);
    do {
        cr_assert_eq(ep_client_epoch(h.client, &term, &number), EP_OK);
        cr_assert_leq(number, 50u, "the empty table was adopted");
    } while (number != 50);
    batch_make(&b, &h, 9, 2, 1);
    expect_ok(&b, "beside a coordinator that knows no node");
    for (uint32_t n = 0; n < 2; n++) {
        harness_stop_node(&h, n);
    }
    memset(h.owners, 0, sizeof(h.owners));
    do { /* once no node answers, what the coordinator says counts */
        harness_publish(&h);
        cr_assert_eq(ep_client_epoch(h.client, &term, &number), EP_OK);
    } while (number == 50);
}

Test(client_failure, nodes_leave_and_join_by_table)
{
    HARNESS_OPEN(&h, .scheme = "tcp", .nodes_count = 3, .copies = 3, .coordinator = true);
    batch_make(&b, &h, 9, 2, 1);
    for (uint32_t round = 0; round < 10; round++) {
        h.nodes_count = 2 + round % 2;
        for (uint32_t e = 0; e < h.shape.experts; e++) {
            h.owners[e] = h.nodes_count == 2 ? 3 : 7;
        }
        harness_publish(&h);
        expect_ok(&b, "round");
    }
    h.nodes_count = 3;
}

Test(client_failure, a_node_with_a_url_no_lane_serves_costs_only_itself)
{
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 2, .copies = 2, .coordinator = true);
    const char *url = h.urls[1];
    h.urls[1] = "carrier-pigeon://roof:1";
    harness_publish(&h);
    await_epoch(h.epoch.number);
    batch_make(&b, &h, 9, 2, 1);
    expect_ok(&b, "the other node serves");
    cr_assert_eq(result.nodes, 1);
    for (uint32_t e = 0; e < h.shape.experts; e++) {
        h.owners[e] = 2;
    }
    harness_publish(&h);
    b.args.deadline_us = 200000;
    await_epoch(h.epoch.number);
    cr_assert_eq(run(&b), EP_ERR_UNAVAILABLE);
    cr_assert(has("carrier-pigeon"), "%s", result.error.text);
    h.urls[1] = url;
}

Test(client_failure, nodes_counts_each_node_that_got_rows_over_all_rounds)
{
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 2, .copies = 2, .coordinator = true);
    batch_make(&b, &h, 1, 1, 1); /* one frame to one node, then to the other */
    uint32_t both = 0;
    for (int i = 0; i < 4; i++) {
        fake_node_set_fault(h.nodes[0], FAKE_ERROR_ONCE, EP_ERR_DEVICE_LOST, 0);
        expect_ok(&b, "re-routed");
        cr_assert_eq(result.nodes, 1 + result.rerouted_frames);
        both += result.nodes == 2;
    }
    cr_assert(both > 0);
}

Test(client_failure, the_data_path_goes_on_without_a_coordinator)
{
    HARNESS_OPEN(&h, .scheme = "tcp", .nodes_count = 2, .copies = 2, .coordinator = true);
    batch_make(&b, &h, 9, 2, 1);
    fake_coordinator_stop(h.coordinator);
    h.coordinator = NULL;
    expect_ok(&b, "coordinator gone");
    harness_stop_node(&h, 0);
    expect_ok(&b, "and a node too");
}

Test(client_failure, waiting_for_a_service_that_is_not_there_says_why)
{
    ep_client_config config;
    ep_client *client = NULL;
    const char *urls[] = {"tcp://127.0.0.1:1"};
    h = (harness){.shape = {.hidden = 8, .experts = 4}};
    ep_client_config_init(&config);
    config.coordinator_url = "tcp://127.0.0.1:1";
    for (int form = 0; form < 2; form++) {
        cr_assert_eq(ep_client_create(&config, &client, &error), EP_OK);
        ASSERT_FAILS(ep_client_wait_ready(client, 100000, &error), EP_ERR_DEADLINE_EXCEEDED, error,
                     "127.0.0.1:1");
        batch_make(&b, &h, 2, 1, 1);
        b.args.deadline_us = 50000;
        cr_assert_eq(ep_moe_forward(client, &b.args, &b.out_tensor, &result), EP_ERR_UNAVAILABLE);
        cr_assert(has("no routing table yet"), "%s", result.error.text);
        ep_model_desc model;
        cr_assert_eq(ep_client_model(client, 0, &model), EP_ERR_UNAVAILABLE);
        batch_free(&b);
        ep_client_destroy(client);
        config.coordinator_url = NULL;
        config.node_urls = urls;
        config.node_urls_count = 1;
    }
    ep_transport_fini();
}

/* ---- numerics ---- */

static const char *const two_ids[] = {FAKE_NUMERICS, "fake-2"};

static void publish_ids(const char *const *ids)
{
    const char *names[] = {"n0", "n1"};
    h.epoch.number++;
    ep_routing_table *table = fake_table(h.epoch, &h.shape, names, h.urls, ids, 2, h.owners);
    fake_coordinator_publish(h.coordinator, table);
    ep_routing_table_unref(table);
    await_epoch(h.epoch.number);
}

Test(client_failure, only_nodes_of_the_pinned_numerics_are_used)
{
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 2, .copies = 2, .coordinator = true,
                 .node_numerics = two_ids);
    publish_ids(two_ids);
    batch_make(&b, &h, 9, 2, 1);
    for (int i = 0; i < 10; i++) {
        expect_ok(&b, "pinned");
    }
    cr_assert_eq(fake_node_requests(h.nodes[1]), 0);
    cr_assert_str_eq(result.numerics, FAKE_NUMERICS);
    /* only others remain */
    static const char *const others[] = {"fake-2", "fake-2"};
    publish_ids(others);
    cr_assert_eq(run(&b), EP_ERR_UNAVAILABLE);
    cr_assert(has("pinned to numerics 'fake-1', but its nodes offer only: fake-2"), "%s",
              result.error.text);
}

Test(client_failure, any_numerics_uses_every_node)
{
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 2, .copies = 1, .numerics = "any",
                 .node_numerics = two_ids);
    batch_make(&b, &h, 9, 2, 1);
    expect_ok(&b, "any");
    cr_assert_gt(fake_node_requests(h.nodes[0]), 0u);
    cr_assert_gt(fake_node_requests(h.nodes[1]), 0u);
}

Test(client_failure, a_named_numerics_id_is_required)
{
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 1, .numerics = "other", .no_wait = true);
    ASSERT_FAILS(ep_client_wait_ready(h.client, 200000, &error), EP_ERR_DEADLINE_EXCEEDED, error,
                 "pinned to numerics 'other'");
    batch_make(&b, &h, 9, 2, 1);
    cr_assert_eq(run(&b), EP_ERR_UNAVAILABLE);
}

/* ---- limits ---- */

Test(client_failure, calls_max_is_named)
{
    ep_client_config config;
    ep_client *client = NULL;
    ep_call *calls[3];
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 1);
    fake_node_set_fault(h.nodes[0], FAKE_HANG, EP_OK, 0);
    ep_client_config_init(&config);
    config.node_urls = h.urls;
    config.node_urls_count = 1;
    config.calls_max = 2;
    cr_assert_eq(ep_client_create(&config, &client, &error), EP_OK);
    cr_assert_eq(ep_client_wait_ready(client, 20000000, &error), EP_OK);
    batch_make(&b, &h, 1, 2, 1);
    for (int i = 0; i < 3; i++) {
        cr_assert_eq(ep_call_create(client, &b.args, &b.out_tensor, &calls[i], &error), EP_OK);
        cr_assert_eq(ep_call_begin(calls[i], 1, &error), i < 2 ? EP_OK : EP_ERR_RESOURCE_EXHAUSTED);
    }
    ASSERT_TEXT(error, "calls_max, 2");
    fake_node_release(h.nodes[0]);
    for (int i = 0; i < 3; i++) {
        ep_call_destroy(calls[i]);
    }
    ep_client_destroy(client);
}

Test(client_failure, reply_rows_beyond_the_buffer_budget_are_refused_not_awaited)
{
    enum { CALLS = 16 };
    static batch many[CALLS];
    ep_call *calls[CALLS];
    uint32_t refused = 0;
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 1, .hidden = 1024,
                 .buffer_bytes_max = 16u << 20);
    fake_node_set_fault(h.nodes[0], FAKE_HANG, EP_OK, 0);
    for (int i = 0; i < CALLS; i++) {
        batch_make(&many[i], &h, 512, 2, 1); /* 2 MiB of rows */
        cr_assert_eq(
            ep_call_create(h.client, &many[i].args, &many[i].out_tensor, &calls[i], &error), EP_OK);
        ASSERT_OK(ep_call_begin(calls[i], 512, &error), error);
    }
    fake_node_release(h.nodes[0]);
    for (int i = 0; i < CALLS; i++) {
        ep_err err = ep_call_finish(calls[i], &result);
        cr_assert(err == EP_OK || err == EP_ERR_RESOURCE_EXHAUSTED, "%s", result.error.text);
        if (err == EP_OK) {
            cr_assert(batch_equal(&many[i]));
        } else {
            cr_assert(has("buffer_bytes_max 16777216"), "%s", result.error.text);
            refused++;
        }
        ep_call_destroy(calls[i]);
        batch_free(&many[i]);
    }
    cr_assert(refused > 0 && refused < CALLS, "%u", refused);
}
