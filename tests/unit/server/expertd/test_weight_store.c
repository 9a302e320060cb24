/* SPDX-License-Identifier: Apache-2.0 */
/* Loading, budget, bad tensors, references and letting go, on a real checkpoint. */
#include <criterion/criterion.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "expertd/weight_store_private.h"
#include "support/checkpoint_fixture.h"
#include "support/expect.h"
#include "support/store_watch.h"

static char dir[EP_FIXTURE_PATH_BYTES];
static ep_checkpoint *checkpoint;
static ep_backend *backend;
static ep_weight_store *store;
static ep_timer_service *timers;
static bool prefetches, warms_up;
static uint64_t load_bytes_per_s;
static uint32_t load_threads = 4; /* until the first request */
static uint32_t claimed_inner;    /* of layer 1, for what depends on the size of its experts */
static const char *backend_name = "reference";
static const uint8_t all[8] = {1, 1, 1, 1, 1, 1, 1, 1};

static ep_weight_stats settle(void)
{
    return store_settle(store);
}

static ep_weight_layer layer_of(uint32_t index)
{
    const ep_model_info *info = ep_checkpoint_info(checkpoint);
    ep_weight_layer layer = {.model = "demo",
                             .checkpoint = checkpoint,
                             .format = info->format,
                             .shape = info->moe_layers[index]};
    layer.shape.inner = index == 1 && claimed_inner != 0 ? claimed_inner : layer.shape.inner;
    return layer;
}

static void add_layers(void)
{
    ep_error e;
    uint32_t slot;
    for (uint32_t l = 0; l < ep_checkpoint_info(checkpoint)->moe_layers_count; l++) {
        const ep_weight_layer layer = layer_of(l);
        cr_assert_eq(ep_weight_store_add_layer(store, &layer, &slot, &e), EP_OK);
        cr_assert_eq(slot, l);
    }
}

/* A store over the fixture's two layers of 8 experts, without its threads. */
static void open_store_at_rest(uint64_t weight_bytes_max)
{
    ep_error e;
    ep_backend_config config = {.threads = 1};
    ASSERT_OK(ep_checkpoint_open(dir, &checkpoint, &e), e);
    ASSERT_OK(ep_backend_by_name(backend_name)->open(&config, &backend, &e), e);
    ep_weight_store_config sc = {.backends = &backend,
                                 .backends_count = 1,
                                 .weight_bytes_max = weight_bytes_max,
                                 .prefetches = prefetches,
                                 .warms_up = warms_up,
                                 .load_bytes_per_s = load_bytes_per_s,
                                 .load_threads = load_threads,
                                 .timers = timers,
                                 .on_change = store_on_change};
    cr_assert_eq(ep_weight_store_create(&sc, &store, &e), EP_OK);
    add_layers();
}

static void start_store(void)
{
    ep_error e;
    cr_assert_eq(ep_weight_store_start(store, &e), EP_OK);
}

static void open_store(uint64_t weight_bytes_max)
{
    open_store_at_rest(weight_bytes_max);
    start_store();
}

/* Another one may be opened over the same files. */
static void close_store(void)
{
    ep_weight_store_destroy(store);
    if (backend != NULL) {
        backend->ops->close(backend);
    }
    ep_checkpoint_close(checkpoint);
    store = NULL;
    backend = NULL;
    checkpoint = NULL;
}

static void setup(void)
{
    const ep_fixture_config fixture = ep_fixture_default();
    ep_fixture_new(&fixture, dir);
}

static void write_anew(const ep_fixture_config *fixture)
{
    ep_fixture_remove(dir);
    ep_fixture_new(fixture, dir);
}

static void teardown(void)
{
    close_store();
    ep_timer_service_destroy(timers);
    ep_fixture_remove(dir);
}

TestSuite(weight_store, .init = setup, .fini = teardown);

/* All experts of both layers. */
static void want_both(void)
{
    ep_weight_store_want(store, 0, all);
    ep_weight_store_want(store, 1, all);
}

static uint32_t missing; /* and what of it, where hold() returns false */
static ep_expert_state state;

static bool hold(uint32_t layer, const uint32_t *experts, uint32_t count, ep_resident **residents)
{
    return ep_weight_store_acquire(store, layer, experts, NULL, count, residents, &missing, &state);
}

Test(weight_store, wanted_experts_become_resident_with_their_hash)
{
    uint32_t owned[8], experts[2] = {1, 6};
    ep_resident *residents[2];
    ep_expert_data data;
    ep_error e;
    const uint8_t some[8] = {0, 1, 0, 0, 0, 0, 1, 0};
    open_store(0);
    cr_expect_not(hold(0, experts, 2, residents));
    cr_expect_eq(state, EP_EXPERT_ABSENT);
    ep_weight_store_want(store, 0, some);
    ep_weight_stats stats = settle();
    cr_expect_eq(stats.resident_count, 2);
    cr_expect_eq(stats.failed_count, 0);
    cr_expect_gt(stats.resident_bytes, 0);
    cr_expect_eq(ep_weight_store_owned(store, 0, owned, NULL), 2);
    cr_expect_eq(owned[1], 6);
    cr_expect_eq(ep_weight_store_owned(store, 1, owned, NULL), 0);
    cr_assert(hold(0, experts, 2, residents));
    cr_assert_eq(ep_checkpoint_read_expert(checkpoint, 0, 6, &data, &e), EP_OK);
    cr_expect_arr_eq(residents[1]->sha256, data.sha256, EP_SHA256_BYTES);
    ep_expert_data_free(&data);
    ep_resident_release(residents[0]);
    ep_resident_release(residents[1]);
}

Test(weight_store, acquiring_is_all_or_nothing_and_names_the_missing_one)
{
    const uint8_t some[8] = {1, 1};
    uint32_t experts[3] = {0, 1, 5};
    ep_resident *residents[3];
    open_store(0);
    ep_weight_store_want(store, 0, some);
    settle();
    cr_expect_not(hold(0, experts, 3, residents));
    cr_expect_eq(missing, 5);
    const uint8_t none[8] = {0};
    ep_weight_store_want(store, 0, none);
    ep_weight_store_drop_unwanted(store);
    cr_expect_eq(settle().resident_bytes, 0, "a failed acquire keeps no reference");
}

Test(weight_store, dropped_experts_live_until_their_last_user)
{
    uint32_t expert = 3, owned[8];
    ep_resident *resident;
    const uint8_t none[8] = {0};
    open_store(0);
    ep_weight_store_want(store, 1, all);
    settle();
    cr_assert(hold(1, &expert, 1, &resident));
    ep_weight_store_want(store, 1, none);
    cr_expect_eq(ep_weight_store_unwanted_count(store), 8);
    cr_expect_eq(ep_weight_store_owned(store, 1, owned, NULL), 8,
                 "they stay until they are dropped");
    ep_weight_store_drop_unwanted(store);
    ep_weight_stats stats = settle();
    cr_expect_eq(stats.resident_count, 0);
    cr_expect_eq(stats.resident_bytes, resident->bytes);
    ep_resident_release(resident);
    cr_expect_eq(settle().resident_bytes, 0);
    ep_weight_store_want(store, 1, all);
    cr_expect_eq(settle().resident_count, 8, "and can come back");
}

/* Bytes of one packed expert of the fixture. */
static uint64_t bytes_of_one(void)
{
    const ep_backend_config config = {.threads = 1};
    ep_checkpoint *of;
    ep_backend *by;
    ep_expert_source outline;
    cr_assert_eq(ep_checkpoint_open(dir, &of, NULL), EP_OK);
    cr_assert_eq(ep_backend_by_name(backend_name)->open(&config, &by, NULL), EP_OK);
    cr_assert_eq(ep_checkpoint_outline_expert(of, 0, 0, &outline, NULL), EP_OK);
    const uint64_t bytes = by->ops->weights_bytes(by, &outline);
    by->ops->close(by);
    ep_checkpoint_close(of);
    return bytes;
}

/* All experts of layer 0 are owned, with memory for so many; returns the bytes of one. */
static uint64_t open_with_room(uint32_t experts)
{
    const uint64_t each = bytes_of_one();
    open_store(each * experts);
    ep_weight_store_want(store, 0, all);
    settle();
    return each;
}

/* A wait and what came of it. */
typedef struct asked {
    ep_weight_wait wait;
    ep_resident *resident;
    ep_error error;
    uint32_t ready_count;
} asked;

static void on_ready(ep_weight_wait *wait, ep_resident *resident, const ep_error *error)
{
    asked *a = wait->arg;
    pthread_mutex_lock(&store_lock);
    a->resident = resident;
    a->error = error != NULL ? *error : (ep_error){.code = EP_OK};
    a->ready_count++;
    pthread_cond_broadcast(&store_changed);
    pthread_mutex_unlock(&store_lock);
}

static void ask(asked *a, uint32_t layer, uint32_t expert, uint64_t deadline_ns)
{
    *a = (asked){
        .wait = {.expert = expert, .deadline_ns = deadline_ns, .ready = on_ready, .arg = a}};
    ep_weight_store_wait(store, layer, &a->wait, 1);
}

/* For somebody who may give up. */
static void ask_dropped(asked *a, uint32_t expert, bool (*is_dropped)(const ep_weight_wait *wait))
{
    *a = (asked){.wait = {.expert = expert,
                          .deadline_ns = UINT64_MAX,
                          .is_dropped = is_dropped,
                          .ready = on_ready,
                          .arg = a}};
    ep_weight_store_wait(store, 0, &a->wait, 1);
}

static void await(asked *a)
{
    pthread_mutex_lock(&store_lock);
    while (a->ready_count == 0) {
        pthread_cond_wait(&store_changed, &store_lock);
    }
    pthread_mutex_unlock(&store_lock);
    cr_assert_eq(a->ready_count, 1);
}

static void get(asked *a, uint32_t layer, uint32_t expert)
{
    ask(a, layer, expert, UINT64_MAX);
    await(a);
}

/* It comes, and is let go. */
static void get_once(uint32_t layer, uint32_t expert)
{
    asked a;
    get(&a, layer, expert);
    cr_assert_eq(a.error.code, EP_OK, "expert %u: %s", expert, a.error.text);
    ep_resident_release(a.resident);
}

/* Two of layer 0 are used, at once or not at all. */
static void use_pair(const uint32_t pair[2])
{
    ep_resident *residents[2];
    cr_assert(hold(0, pair, 2, residents));
    ep_resident_release(residents[0]);
    ep_resident_release(residents[1]);
}

Test(weight_store, experts_beyond_the_budget_are_owned_and_come_when_they_are_asked_for)
{
    const uint64_t each = bytes_of_one();
    uint32_t owned[8], digests[8];
    asked a;
    open_store(each * 3 + each / 2);
    ep_weight_store_want(store, 0, all);
    ep_weight_stats stats = settle();
    cr_expect_eq(stats.resident_count, 3);
    cr_expect_eq(stats.owned_count, 8);
    cr_expect_eq(stats.failed_count, 0);
    cr_expect_eq(ep_weight_store_owned(store, 0, owned, digests), 8);
    cr_expect_eq(ep_weight_store_resident_count(store, 0), 3);
    cr_expect_neq(digests[0], 0);
    cr_expect_eq(digests[7], 0, "never read: its hash is not known");
    for (uint32_t round = 0; round < 40; round++) {
        const uint32_t expert = (round * 5 + round / 8) % 8;
        ep_resident *resident = NULL;
        ep_expert_data data;
        ep_error e;
        cr_assert(hold(0, &expert, 1, &resident));
        if (resident == NULL) {
            get(&a, 0, expert);
            ASSERT_OK(a.error.code, a.error);
            resident = a.resident;
        }
        cr_expect_eq(resident->expert, expert);
        cr_assert_eq(ep_checkpoint_read_expert(checkpoint, 0, expert, &data, &e), EP_OK);
        cr_expect_arr_eq(resident->sha256, data.sha256, EP_SHA256_BYTES);
        ep_expert_data_free(&data);
        ep_resident_release(resident);
        ep_weight_store_read_stats(store, &stats);
        cr_expect_leq(stats.resident_bytes, each * 3);
    }
    cr_expect_gt(stats.evictions_total, 0);
    cr_expect_gt(stats.hits_total, 0);
    cr_expect_eq(stats.hits_total + stats.misses_total, 40);
    cr_expect_eq(stats.misses_total + 3, stats.loads_total);
    cr_expect_eq(ep_weight_store_owned(store, 0, owned, digests), 8);
    cr_expect_neq(digests[7], 0);
}

Test(weight_store, a_load_for_which_all_memory_is_held_waits_for_the_last_job)
{
    const uint32_t two[2] = {0, 1};
    ep_resident *held[2];
    asked a, b;
    const uint64_t each = open_with_room(2);
    cr_assert(hold(0, two, 2, held));
    ask(&a, 0, 5, UINT64_MAX);
    ask(&b, 0, 5, UINT64_MAX);
    ep_weight_stats stats;
    do { /* one of the two leaves the table, so that no new job can hold it */
        ep_weight_store_read_stats(store, &stats);
    } while (stats.resident_count == 2);
    cr_expect_eq(stats.resident_bytes, each * 2, "its memory is still used");
    cr_expect_eq(a.ready_count, 0);
    ep_resident_release(held[0]);
    ep_resident_release(held[1]);
    await(&a);
    await(&b);
    cr_expect_eq(a.resident, b.resident, "one load serves both");
    ep_resident_release(a.resident);
    ep_resident_release(b.resident);
    ep_weight_store_read_stats(store, &stats);
    cr_expect_eq(stats.waiting_count, 0);
    cr_expect_eq(stats.loads_total, 3);
}

Test(weight_store, waits_end_at_their_deadline_and_when_the_store_closes)
{
    const uint32_t zero = 0;
    ep_resident *held;
    asked late, closed, after;
    cr_assert_eq(ep_timer_service_create("timers", &timers), EP_OK);
    open_with_room(1);
    cr_assert(hold(0, &zero, 1, &held));
    ask(&late, 0, 4, ep_clock_now_ns() + EP_NS_PER_MS);
    ask(&closed, 0, 6, UINT64_MAX);
    await(&late);
    cr_expect_null(late.resident);
    cr_expect_eq(late.error.code, EP_ERR_UNAVAILABLE);
    cr_expect_eq(late.error.layer, 0);
    cr_expect_eq(late.error.expert, 4);
    EXPECT_TEXT(late.error, "model demo layer 0 expert 4 is ");
    EXPECT_TEXT(late.error, "waited ");
    cr_expect_eq(closed.ready_count, 0);
    ep_weight_store_close(store, EP_ERR_DRAINING);
    await(&closed);
    cr_expect_eq(closed.error.code, EP_ERR_DRAINING);
    ask(&after, 0, 7, UINT64_MAX);
    await(&after);
    cr_expect_eq(after.error.code, EP_ERR_DRAINING);
    ep_resident_release(held);
}

/* What a store with such a budget says of the layer. */
static ep_err add_to_store_of(uint64_t weight_bytes_max, uint32_t index, ep_error *error)
{
    const ep_weight_store_config config = {.backends = &backend,
                                           .backends_count = 1,
                                           .weight_bytes_max = weight_bytes_max,
                                           .on_change = store_on_change};
    const ep_weight_layer layer = layer_of(index);
    ep_weight_store *small;
    uint32_t slot;
    cr_assert_eq(ep_weight_store_create(&config, &small, error), EP_OK);
    const ep_err err = ep_weight_store_add_layer(small, &layer, &slot, error);
    ep_weight_store_destroy(small);
    return err;
}

Test(weight_store, a_budget_below_one_expert_is_refused_by_name)
{
    ep_error e;
    open_store(0);
    cr_expect_eq(add_to_store_of(100, 1, &e), EP_ERR_BAD_CONFIG);
    cr_expect_str_eq(e.text, "weight_bytes_max is 100, one expert of layer 1 of model demo needs "
                             "3072 bytes; allowed: at least that, or 0");
}

Test(weight_store, a_cold_expert_that_cannot_be_read_fails_alone)
{
    const uint64_t each = bytes_of_one();
    char path[EP_FIXTURE_PATH_BYTES + 32];
    uint32_t owned[8];
    ep_resident *resident;
    asked a;
    open_store(each * 2);
    ep_weight_store_want(store, 0, all);
    ep_weight_stats before = settle();
    snprintf(path, sizeof(path), "%s/model.safetensors", dir);
    cr_assert_eq(truncate(path, 4096), 0);
    get(&a, 0, 7);
    cr_expect_null(a.resident);
    cr_expect_eq(a.error.code, EP_ERR_NOT_OWNER, "another copy may help");
    EXPECT_TEXT(a.error, "expert 7 could not be loaded");
    cr_expect_eq(ep_weight_store_owned(store, 0, owned, NULL), 7);
    ep_weight_stats stats = settle();
    cr_expect_eq(stats.failed_count, 1);
    cr_expect_gt(stats.owned_changes, before.owned_changes);
    const uint32_t seven = 7;
    cr_expect_not(hold(0, &seven, 1, &resident));
    cr_expect_eq(state, EP_EXPERT_FAILED);
}

static bool always(const ep_weight_wait *wait)
{
    (void)wait;
    return true;
}

Test(weight_store, nobody_is_loaded_for_a_request_that_was_dropped)
{
    const uint64_t each = bytes_of_one();
    asked a;
    open_store(each);
    ep_weight_store_want(store, 0, all);
    const uint64_t loads = settle().loads_total;
    ask_dropped(&a, 3, always);
    await(&a);
    cr_expect_eq(a.error.code, EP_ERR_CANCELLED);
    cr_expect_eq(settle().loads_total, loads);
}

static _Atomic bool gave_up;

static bool when_given_up(const ep_weight_wait *wait)
{
    (void)wait;
    return atomic_load(&gave_up);
}

Test(weight_store, an_expert_placed_again_while_its_waiters_gave_up_is_owned)
{
    const uint8_t none[8] = {0};
    const uint32_t zero = 0;
    ep_resident *held;
    asked a, b;
    open_with_room(1);
    cr_assert(hold(0, &zero, 1, &held));
    ask(&a, 0, 5, UINT64_MAX); /* keeps the loader waiting for the memory that is held */
    ask_dropped(&b, 6, when_given_up);
    ep_weight_store_want(store, 0, none);
    ep_weight_store_drop_unwanted(store);
    ep_weight_store_want(store, 0, all);
    atomic_store(&gave_up, true);
    ep_resident_release(held);
    await(&a);
    ep_resident_release(a.resident);
    await(&b);
    cr_expect_eq(b.error.code, EP_ERR_CANCELLED);
    cr_expect_eq(settle().owned_count, 8);
}

Test(weight_store, requests_that_miss_do_not_keep_an_assignment_from_its_end, .timeout = 60)
{
    const uint32_t two[2] = {0, 1};
    ep_resident *held[2];
    asked a, b;
    open_with_room(2);
    cr_assert(hold(0, two, 2, held));
    ask(&a, 0, 5, UINT64_MAX);
    ask(&b, 0, 6, UINT64_MAX);
    ep_weight_store_want(store, 1, all);
    ep_resident_release(held[0]);
    await(&a); /* the next miss cannot be served: all memory is held */
    cr_expect_eq(settle().owned_count, 16);
    cr_expect_eq(b.ready_count, 0);
    ep_resident_release(a.resident);
    ep_resident_release(held[1]);
    await(&b);
    ep_resident_release(b.resident);
}

static const ep_backend_ops *plain_ops;
static ep_backend_ops changed_ops;

/* The backend's functions, for a test to put its own in place of some. The store must be at rest;
 * plain_ops has the real ones. */
static ep_backend_ops *change_ops(void)
{
    plain_ops = backend->ops;
    changed_ops = *plain_ops;
    backend->ops = &changed_ops;
    return &changed_ops;
}

static _Atomic uint32_t fails_left;

static ep_err load_or_fail(ep_backend *base, const ep_expert_source *source,
                           ep_backend_weights **out_weights, ep_error *out_error)
{
    if (atomic_load(&fails_left) > 0) {
        atomic_fetch_sub(&fails_left, 1);
        return ep_error_set(out_error, EP_ERR_IO, "made up");
    }
    return plain_ops->weights_load(base, source, out_weights, out_error);
}

Test(weight_store, an_error_that_may_pass_leaves_the_expert_owned_and_is_tried_again)
{
    asked a;
    open_with_room(2);
    change_ops()->weights_load = load_or_fail;
    atomic_store(&fails_left, 1);
    get(&a, 0, 7);
    cr_expect_eq(a.error.code, EP_ERR_UNAVAILABLE);
    EXPECT_TEXT(a.error, "expert 7 could not be loaded: made up");
    cr_expect_eq(a.error.expert, 7);
    cr_expect_eq(settle().owned_count, 8);
    cr_expect_eq(settle().failed_count, 0);
    do {
        usleep(5000);
        get(&a, 0, 7);
    } while (a.error.code == EP_ERR_UNAVAILABLE);
    EXPECT_OK(a.error.code, a.error);
    ep_resident_release(a.resident);
}

static _Atomic uint64_t unavailable_count;
static _Atomic bool is_unavailable;

static ep_err load_if_available(ep_backend *base, const ep_expert_source *source,
                                ep_backend_weights **out_weights, ep_error *out_error)
{
    if (atomic_load(&is_unavailable)) {
        atomic_fetch_add(&unavailable_count, 1);
        return ep_error_set(out_error, EP_ERR_UNAVAILABLE, "made up: no node gives it");
    }
    return plain_ops->weights_load(base, source, out_weights, out_error);
}

/* Other loads wait behind each try. */
Test(weight_store, what_no_node_gives_is_tried_by_the_first_pass_now_and_then)
{
    open_store(0);
    change_ops()->weights_load = load_if_available;
    atomic_store(&is_unavailable, true);
    const uint64_t begin_ns = ep_clock_now_ns();
    ep_weight_store_want(store, 0, all);
    while (atomic_load(&unavailable_count) < 9) { /* all of them, and one again */
        usleep(5000);
    }
    usleep(50000); /* many tries, where it does not wait */
    const uint64_t tries = atomic_load(&unavailable_count),
                   passed_ns = ep_clock_now_ns() - begin_ns;
    cr_expect_leq(tries, 8 * (1 + passed_ns / (2 * EP_NS_PER_S)));
    ep_weight_stats stats;
    ep_weight_store_read_stats(store, &stats);
    cr_expect_eq(stats.pending_count, 8);
    cr_expect_eq(stats.failed_count, 0);
    cr_expect_eq(stats.owned_count, 0);
    atomic_store(&is_unavailable, false);
    cr_expect_eq(settle().owned_count, 8);
}

static _Atomic int load_nice;

static ep_err load_and_look(ep_backend *base, const ep_expert_source *source,
                            ep_backend_weights **out_weights, ep_error *out_error)
{
    /* of this thread */
    atomic_store(&load_nice, getpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid)));
    return plain_ops->weights_load(base, source, out_weights, out_error);
}

/* A request waits for it, and the lock it takes is the requests' too. */
Test(weight_store, an_expert_that_is_waited_for_loads_at_the_priority_of_the_process)
{
    open_with_room(2);
    change_ops()->weights_load = load_and_look;
    atomic_store(&load_nice, 99);
    get_once(0, 7);
    cr_expect_eq(atomic_load(&load_nice), getpriority(PRIO_PROCESS, (id_t)getpid()));
}

static _Atomic uint32_t places; /* that the system has memory for */

static ep_err load_into_place(ep_backend *base, const ep_expert_source *source,
                              ep_backend_weights **out_weights, ep_error *out_error)
{
    if (atomic_load(&places) == 0) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no place");
    }
    atomic_fetch_sub(&places, 1);
    return plain_ops->weights_load(base, source, out_weights, out_error);
}

static void unload_from_place(ep_backend *base, ep_backend_weights *weights)
{
    plain_ops->weights_unload(base, weights);
    atomic_fetch_add(&places, 1);
}

/* As under a limit on addresses, or with less memory than the budget says. */
Test(weight_store,
     a_cold_expert_comes_in_the_place_of_another_where_memory_is_refused_below_the_budget)
{
    const uint8_t less[8] = {0, 0, 1, 1, 1, 1, 1, 1};
    const uint32_t owned[6] = {2, 3, 4, 5, 6, 7};
    uint32_t cold = 0;
    ep_resident *held[6];
    asked a;
    const uint64_t each = open_with_room(4);
    ep_weight_store_want(store, 0, less);
    ep_weight_store_drop_unwanted(store);
    const ep_weight_stats before = settle();
    cr_assert_eq(before.resident_count, 2);
    ep_backend_ops *ops = change_ops();
    ops->weights_load = load_into_place;
    ops->weights_unload = unload_from_place;
    for (uint32_t e = 4; e < 8; e++) {
        get_once(0, e);
    }
    ep_weight_stats stats = settle();
    cr_expect_eq(stats.evictions_total, before.evictions_total + 4, "one for each");
    cr_expect_eq(stats.resident_count, 2);
    cr_expect_eq(stats.resident_bytes, 2 * each);
    cr_assert(hold(0, owned, 6, held));
    for (uint32_t i = 0; i < 6; i++) {
        cold = held[i] == NULL ? owned[i] : cold;
    }
    get(&a, 0, cold);
    cr_expect_eq(a.error.code, EP_ERR_UNAVAILABLE, "all are held");
    EXPECT_TEXT(a.error, "could not be loaded: no place");
    stats = settle();
    cr_expect_eq(stats.owned_count, 6);
    cr_expect_eq(stats.resident_count, 2);
    for (uint32_t i = 0; i < 6; i++) {
        ep_resident_release(held[i]);
    }
}

static ep_err load_never(ep_backend *base, const ep_expert_source *source,
                         ep_backend_weights **out_weights, ep_error *out_error)
{
    (void)base;
    (void)source;
    (void)out_weights;
    return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no place");
}

/* Evicting experts does not help then. */
Test(weight_store, while_all_memory_is_refused_most_experts_stay_and_the_store_says_so)
{
    asked a;
    open_with_room(7);
    change_ops()->weights_load = load_never;
    for (uint32_t i = 0; i < 16; i++) {
        get(&a, 0, i % 8);
        ep_resident_release(a.resident);
    }
    ep_weight_stats stats = settle();
    cr_expect_eq(stats.resident_count, 2, "one went for the budget, four for memory");
    cr_expect_eq(stats.owned_count, 8);
    cr_expect(stats.is_refused);
    cr_expect_not_null(strstr(stats.last_error, ": no place"), "%s", stats.last_error);
    cr_expect_eq(stats.last_reason, EP_ERR_NO_MEMORY);
    backend->ops = plain_ops;
    do {
        usleep(5000);
        get(&a, 0, 7);
    } while (a.error.code == EP_ERR_UNAVAILABLE);
    ASSERT_OK(a.error.code, a.error);
    ep_resident_release(a.resident);
    stats = settle();
    cr_expect_not(stats.is_refused);
    cr_expect_str_eq(stats.last_error, "");
}

/* The end of the memory is as the end of the budget, also where an assignment is loaded; the
 * experts of a node without a budget are all here. */
Test(weight_store, experts_for_which_memory_is_refused_at_the_start_are_cold_or_said_to_fail)
{
    const uint64_t each = bytes_of_one();
    for (uint32_t has_budget = 0; has_budget < 2; has_budget++) {
        open_store(has_budget ? each * 6 : 0);
        ep_backend_ops *ops = change_ops();
        ops->weights_load = load_into_place;
        ops->weights_unload = unload_from_place;
        atomic_store(&places, 3);
        ep_weight_store_want(store, 0, all);
        const ep_weight_stats stats = settle();
        cr_expect_eq(stats.resident_count, 3);
        cr_expect_eq(stats.owned_count, has_budget ? 8 : 3);
        cr_expect_eq(stats.failed_count, has_budget ? 0 : 5);
        for (uint32_t e = 0; has_budget && e < 8; e++) {
            get_once(0, e);
        }
        ep_weight_store_stop(store);
        backend->ops = plain_ops;
        close_store();
    }
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) /* which need the addresses */
static uint64_t process_addresses(void)
{
    uint64_t pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    cr_assert_not_null(f);
    cr_assert_eq(fscanf(f, "%" SCNu64, &pages), 1);
    fclose(f);
    return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* The same with real memory: neither a chunk for several experts nor all that the budget allows is
 * to be had. */
Test(weight_store, a_limit_on_addresses_below_the_budget_costs_loads_only, .timeout = 60)
{
    const uint64_t mib = 1 << 20;
    ep_fixture_config fixture = ep_fixture_default();
    struct rlimit limit;
    fixture.hidden = 1024;
    fixture.inner = 512; /* 3 MiB an expert, 16 of them */
    write_anew(&fixture);
    backend_name = "cpu";
    open_store(64 * mib);
    cr_assert_eq(getrlimit(RLIMIT_AS, &limit), 0);
    limit.rlim_cur = process_addresses() + 32 * mib;
    cr_assert_eq(setrlimit(RLIMIT_AS, &limit), 0);
    want_both();
    const ep_weight_stats stats = settle();
    cr_expect_geq(stats.resident_count, 4);
    cr_expect_lt(stats.resident_count, 16);
    cr_expect_eq(stats.owned_count, 16);
    for (uint32_t i = 0; i < 64; i++) {
        get_once(i / 8 % 2, i * 5 % 8);
    }
    cr_expect_gt(settle().evictions_total, 0);
    limit.rlim_cur = limit.rlim_max;
    cr_assert_eq(setrlimit(RLIMIT_AS, &limit), 0);
}
#endif

/* Lines of the log go into a file from here on. */
static int catch_log(int *out_saved)
{
    char path[EP_FIXTURE_PATH_BYTES + 16];
    snprintf(path, sizeof(path), "%s/log", dir);
    const int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    *out_saved = dup(STDERR_FILENO);
    cr_assert_geq(dup2(fd, STDERR_FILENO), 0);
    ep_log_start(EP_LOG_ERROR, EP_LOG_TEXT);
    return fd;
}

/* Ends that. All lines are of loads that failed for the reason; *out_said: of how many they
 * speak. */
static uint64_t count_failures(int fd, int saved, const char *reason, uint64_t *out_said)
{
    char line[512];
    uint64_t lines = 0;
    dup2(saved, STDERR_FILENO);
    close(saved);
    FILE *log = fdopen(fd, "r");
    rewind(log);
    *out_said = 0;
    while (fgets(line, sizeof(line), log) != NULL) {
        uint64_t others = 0;
        const char *more = strstr(line, " lines_left_out=");
        cr_expect(strstr(line, "event=expert-load model=demo layer=") != NULL &&
                      strstr(line, reason) != NULL,
                  "%s", line);
        cr_assert(more != NULL && sscanf(more, " lines_left_out=%" SCNu64, &others) == 1, "%s",
                  line);
        *out_said += 1 + others;
        lines++;
    }
    fclose(log);
    return lines;
}

/* A line a second at the most, which speak of so many loads. */
static void expect_few_lines(int fd, int saved, const char *reason, uint64_t begin_ns,
                             uint64_t said_max)
{
    uint64_t said;
    const uint64_t spent_s = (ep_clock_now_ns() - begin_ns) / EP_NS_PER_S;
    ep_weight_store_stop(store);
    const uint64_t lines = count_failures(fd, saved, reason, &said);
    cr_expect_geq(lines, 1);
    cr_expect_leq(lines, 1 + spent_s);
    cr_expect_leq(said, said_max);
}

/* A device that fails every load: a line a second, not one for each request. */
Test(weight_store, loads_that_fail_for_a_passing_reason_do_not_flood_the_log)
{
    const uint64_t each = bytes_of_one();
    int saved;
    open_store(each);
    want_both();
    settle();
    change_ops()->weights_load = load_or_fail;
    atomic_store(&fails_left, UINT32_MAX);
    const int fd = catch_log(&saved);
    const uint64_t begin_ns = ep_clock_now_ns();
    for (uint32_t i = 0; i < 16; i++) {
        asked a;
        get(&a, i / 8, i % 8);
        ep_resident_release(a.resident);
    }
    expect_few_lines(fd, saved, " reason=\"made up\" ", begin_ns, 15); /* of 16 one is resident */
}

static uint8_t bytes_of_6[32]; /* its first ones */
static _Atomic uint32_t failed_loads;

static ep_err load_or_fail_6(ep_backend *base, const ep_expert_source *source,
                             ep_backend_weights **out_weights, ep_error *out_error)
{
    if (memcmp(source->up, bytes_of_6, sizeof(bytes_of_6)) == 0) {
        atomic_fetch_add(&failed_loads, 1);
        return ep_error_set(out_error, EP_ERR_IO, "made up");
    }
    return plain_ops->weights_load(base, source, out_weights, out_error);
}

/* 6 and 7 are equally hot, and 6 is chosen first. */
Test(weight_store, an_expert_that_cannot_be_read_ahead_of_time_does_not_keep_others_from_it,
     .timeout = 60)
{
    const uint32_t pair[2] = {6, 7};
    ep_expert_data data;
    ep_weight_stats stats;
    ep_error e;
    prefetches = true;
    open_with_room(2);
    ASSERT_OK(ep_checkpoint_read_expert(checkpoint, 0, 6, &data, &e), e);
    memcpy(bytes_of_6, data.source.up, sizeof(bytes_of_6));
    ep_expert_data_free(&data);
    change_ops()->weights_load = load_or_fail_6;
    do {
        use_pair(pair);
        ep_weight_store_wait(store, 0, NULL, 0);
        ep_weight_store_read_stats(store, &stats);
    } while (stats.prefetches_useful_total == 0);
    cr_expect_eq(atomic_load(&failed_loads), 1, "it is not tried before somebody asks for it");
    cr_expect_eq(stats.owned_count, 8);
}

Test(weight_store, a_prefetch_that_waits_for_the_rate_gives_way_to_a_request)
{
    const uint32_t pair[2] = {6, 7};
    asked a;
    prefetches = true;
    load_bytes_per_s = 1;
    open_with_room(2);
    get(&a, 0, 3); /* no other load is allowed for hours */
    ep_resident_release(a.resident);
    for (uint32_t i = 0; i < 100; i++) {
        use_pair(pair);
    }
    ep_weight_store_wait(store, 0, NULL, 0); /* they have given up: the loader wakes for nothing */
    usleep(20000);                           /* so that it has most likely turned to a prefetch */
    /* The loader ends it as soon as it has turned to it. */
    ask_dropped(&a, 4, always);
    await(&a);
    cr_expect_eq(a.error.code, EP_ERR_CANCELLED, "%s", a.error.text);
    cr_expect_eq(settle().prefetches_total, 0);
}

static _Atomic bool has_left;

static void on_ready_slowly(ep_weight_wait *wait, ep_resident *resident, const ep_error *error)
{
    on_ready(wait, resident, error);
    usleep(50000); /* the longer, the surer is what the test looks for */
    atomic_store(&has_left, true);
}

Test(weight_store, nothing_runs_for_a_request_once_the_store_has_stopped)
{
    const uint64_t each = bytes_of_one();
    asked a;
    cr_assert_eq(ep_timer_service_create("timers", &timers), EP_OK);
    for (int by_timer = 0; by_timer < 2; by_timer++) {
        const uint32_t zero = 0;
        ep_resident *held = NULL;
        open_store(each);
        ep_weight_store_want(store, 0, all);
        settle();
        atomic_store(&has_left, false);
        if (by_timer) {
            cr_assert(hold(0, &zero, 1, &held));
        }
        a = (asked){
            .wait = {.expert = 3,
                     .deadline_ns = by_timer ? ep_clock_now_ns() + EP_NS_PER_MS : UINT64_MAX,
                     .ready = on_ready_slowly,
                     .arg = &a}};
        ep_weight_store_wait(store, 0, &a.wait, 1);
        await(&a);
        ep_weight_store_stop(store);
        cr_expect(atomic_load(&has_left), "%s", by_timer ? "timer" : "loader");
        ep_resident_release(a.resident);
        ep_resident_release(held);
        close_store();
    }
}

Test(weight_store, likely_experts_come_ahead_of_time)
{
    const uint32_t pair[2] = {6, 7};
    ep_weight_stats stats;
    prefetches = true;
    open_with_room(2);
    do { /* experts 6 and 7 are used again and again, though nobody waits for them here */
        use_pair(pair);
        ep_weight_store_wait(store, 0, NULL, 0);
        ep_weight_store_read_stats(store, &stats);
    } while (stats.prefetches_useful_total < 2);
    cr_expect_eq(stats.evictions_total, 2);
}

/* It is wider than the routed ones here: a budget that holds those only would fail at its load. */
Test(weight_store, a_budget_below_the_shared_expert_is_refused_by_name)
{
    ep_error e;
    ep_fixture_config fixture = ep_fixture_default();
    fixture.names = EP_NAMES_N1;
    fixture.router = EP_ROUTER_R3;
    fixture.shared_inner = 4 * fixture.inner;
    write_anew(&fixture);
    open_store(0);
    const ep_weight_layer layer = layer_of(1);
    cr_assert_eq(layer.shape.shared_experts, 1);
    const uint8_t shared[9] = {[8] = 1};
    ep_weight_store_want(store, 1, shared);
    const uint64_t in_memory = settle().resident_bytes;
    for (int is_enough = 0; is_enough < 2; is_enough++) {
        ep_expert_source outline;
        ASSERT_OK(ep_checkpoint_outline_expert(checkpoint, layer.shape.layer, 8, &outline, &e), e);
        const uint64_t bytes = backend->ops->weights_bytes(backend, &outline);
        cr_expect_eq(bytes, in_memory);
        cr_expect_eq(add_to_store_of(is_enough ? bytes : bytes - 1, 1, &e),
                     is_enough ? EP_OK : EP_ERR_BAD_CONFIG);
        cr_expect(is_enough ||
                      strstr(e.text, "one shared expert of layer 1 of model demo needs ") != NULL,
                  "%s", e.text);
    }
}

static struct {
    uint32_t inner;
    uint32_t rows;
} warm_runs[64];
static _Atomic uint32_t warm_runs_count;

static ep_err submit_noted(ep_backend *base, ep_job *job)
{
    const uint32_t i = atomic_fetch_add(&warm_runs_count, 1);
    if (i < sizeof(warm_runs) / sizeof(warm_runs[0])) {
        warm_runs[i].inner = job->weights->inner;
        warm_runs[i].rows = job->rows_count;
    }
    return plain_ops->submit(base, job);
}

static bool was_warmed(uint32_t inner, uint32_t rows)
{
    uint32_t i = 0;
    while (i < warm_runs_count && !(warm_runs[i].inner == inner && warm_runs[i].rows == rows)) {
        i++;
    }
    return i < warm_runs_count;
}

/* Two layers of equal experts, each with a wider shared one: two shapes, few rows and many of each,
 * and none of them twice. */
Test(weight_store, each_kernel_shape_runs_before_the_first_pass_is_over)
{
    const uint8_t wanted[9] = {1, 1, 0, 0, 0, 0, 0, 0, 1};
    ep_fixture_config fixture = ep_fixture_default();
    fixture.names = EP_NAMES_N1;
    fixture.router = EP_ROUTER_R3;
    fixture.shared_inner = 3 * fixture.inner;
    write_anew(&fixture);
    warms_up = true;
    open_store(0);
    change_ops()->submit = submit_noted;
    ep_weight_store_want(store, 1, wanted);
    ep_weight_store_want(store, 0, wanted);
    cr_expect_eq(settle().resident_count, 6); /* nothing is pending: it is over */
    const uint32_t rows[] = {1, 4, 16, 64, 256};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        cr_expect(was_warmed(fixture.inner, rows[i]), "routed, %u rows", rows[i]);
        cr_expect(was_warmed(fixture.shared_inner, rows[i]), "shared, %u rows", rows[i]);
    }
    cr_expect_eq(warm_runs_count, 20, "ten runs of each shape");
    ep_weight_store_destroy(store);
    store = NULL;
}

static size_t larger_bytes(ep_backend *base, const ep_expert_source *source)
{
    return 2 * plain_ops->weights_bytes(base, source);
}

/* One expert of another shape says nothing of the others. */
Test(weight_store, the_size_of_experts_is_that_of_the_first_whole_one)
{
    char path[EP_FIXTURE_PATH_BYTES + 32];
    char text[8192];
    ep_error e;
    ep_expert_source outline;
    snprintf(path, sizeof(path), "%s/model.safetensors", dir);
    const int fd = open(path, O_RDWR);
    const ssize_t bytes = pread(fd, text, sizeof(text) - 1, 8);
    cr_assert_gt(bytes, 0);
    text[bytes] = 0;
    char *name = strstr(text, "layers.0.block_sparse_moe.experts.0.w1.weight");
    cr_assert_not_null(name);
    char *shape = strstr(name, "[16,32]");
    cr_assert_not_null(shape);
    memcpy(shape, "[32,16]", 7);
    cr_assert_eq(pwrite(fd, text, (size_t)bytes, 8), bytes);
    close(fd);
    open_store(0);
    cr_assert_neq(ep_checkpoint_outline_expert(checkpoint, 0, 0, &outline, &e), EP_OK);
    ASSERT_OK(ep_checkpoint_outline_expert(checkpoint, 0, 1, &outline, &e), e);
    change_ops()->weights_bytes = larger_bytes;
    const uint64_t each = backend->ops->weights_bytes(backend, &outline);
    for (int is_enough = 0; is_enough < 2; is_enough++) {
        cr_expect_eq(add_to_store_of(is_enough ? each : each - 1, 0, &e),
                     is_enough ? EP_OK : EP_ERR_BAD_CONFIG);
    }
}

/* What the outline of an expert says is what its data turns out to take. */
Test(weight_store, the_size_of_an_expert_is_known_before_it_is_read)
{
    const uint8_t one[8] = {1};
    ep_expert_source outline;
    ep_error e;
    open_store(0);
    ep_weight_store_want(store, 0, one);
    ASSERT_OK(ep_checkpoint_outline_expert(checkpoint, 0, 0, &outline, &e), e);
    cr_expect_eq(settle().resident_bytes, backend->ops->weights_bytes(backend, &outline));
    cr_expect_eq(ep_checkpoint_outline_expert(checkpoint, 0, 8, &outline, &e),
                 EP_ERR_INVALID_ARGUMENT);
    cr_expect_eq(ep_checkpoint_outline_expert(checkpoint, 9, 0, &outline, &e),
                 EP_ERR_INVALID_ARGUMENT);
}

Test(weight_store, a_truncated_file_takes_down_its_experts_only)
{
    char path[EP_FIXTURE_PATH_BYTES + 32];
    uint32_t owned[8];
    open_store(0);
    snprintf(path, sizeof(path), "%s/model.safetensors", dir);
    const uint8_t first[8] = {1};
    ep_weight_store_want(store, 0, first);
    cr_expect_eq(settle().resident_count, 1);
    cr_assert_eq(truncate(path, 4096), 0);
    ep_weight_store_want(store, 1, all);
    ep_weight_stats stats = settle();
    cr_expect_gt(stats.failed_count, 0);
    cr_expect(strstr(stats.last_error, "model demo layer 1 expert") != NULL, "%s",
              stats.last_error);
    cr_expect_eq(ep_weight_store_owned(store, 0, owned, NULL), 1, "what was resident stays");
}

static pthread_barrier_t two;

static ep_err load_beside_another(ep_backend *base, const ep_expert_source *source,
                                  ep_backend_weights **out_weights, ep_error *out_error)
{
    pthread_barrier_wait(&two);
    return plain_ops->weights_load(base, source, out_weights, out_error);
}

Test(weight_store, experts_of_the_first_pass_load_side_by_side)
{
    pthread_barrier_init(&two, NULL, 2);
    open_store(0);
    change_ops()->weights_load = load_beside_another;
    ep_weight_store_want(store, 0, all);
    cr_expect_eq(settle().resident_count, 8);
}

static pthread_mutex_t asking = PTHREAD_MUTEX_INITIALIZER;
static bool has_asked;
static uint32_t threads_with_more; /* loads than one */
static _Thread_local uint32_t loads_here;

/* None ends before there was a request. */
static ep_err load_after_a_request(ep_backend *base, const ep_expert_source *source,
                                   ep_backend_weights **out_weights, ep_error *out_error)
{
    const uint32_t first = 0;
    ep_resident *resident;
    pthread_mutex_lock(&asking);
    if (!has_asked) {
        has_asked = true;
        cr_expect(hold(0, &first, 1, &resident));
        ep_resident_release(resident);
    }
    threads_with_more += ++loads_here == 2;
    pthread_mutex_unlock(&asking);
    return plain_ops->weights_load(base, source, out_weights, out_error);
}

Test(weight_store, from_the_first_request_on_one_thread_loads)
{
    const uint8_t one[8] = {1};
    open_store(0);
    ep_weight_store_want(store, 0, one);
    cr_expect_eq(settle().resident_count, 1);
    change_ops()->weights_load = load_after_a_request;
    want_both();
    cr_expect_eq(settle().resident_count, 16);
    cr_expect(has_asked);
    cr_expect_eq(threads_with_more, 1u, "%u", threads_with_more);
}

#define EXPERTS 8 /* routed ones of each of the two layers */

static uint8_t beginnings[2 * EXPERTS][32]; /* of up */

/* Which one it is: those of layer 0 come first, as they are queued; 2 * EXPERTS: a shared one. */
static uint32_t number_of(const ep_expert_source *source)
{
    uint32_t n = 0;
    while (n < 2 * EXPERTS && memcmp(source->up, beginnings[n], sizeof(beginnings[n])) != 0) {
        n++;
    }
    return n;
}

static void look_at_experts(void)
{
    for (uint32_t n = 0; n < 2 * EXPERTS; n++) {
        ep_expert_data data;
        ep_error e;
        ASSERT_OK(ep_checkpoint_read_expert(checkpoint, n / EXPERTS, n % EXPERTS, &data, &e), e);
        memcpy(beginnings[n], data.source.up, sizeof(beginnings[n]));
        ep_expert_data_free(&data);
    }
}

static uint32_t bad; /* bit n: its load fails */
static sem_t others_ended;
static uint32_t others_count;

/* The first of the queue ends when so many others have. */
static ep_err load_first_last(ep_backend *base, const ep_expert_source *source,
                              ep_backend_weights **out_weights, ep_error *out_error)
{
    const uint32_t n = number_of(source);
    for (uint32_t i = 0; n == 0 && i < others_count; i++) {
        while (sem_wait(&others_ended) != 0) {
        }
    }
    const ep_err err = (bad >> n & 1) != 0
                           ? ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, "made up")
                           : plain_ops->weights_load(base, source, out_weights, out_error);
    sem_post(&others_ended);
    return err;
}

Test(weight_store, experts_that_fail_beside_others_are_told_in_their_order)
{
    static const uint32_t failing[] = {0, 3, 4, EXPERTS + 2};
    char line[512];
    int saved;
    open_store_at_rest(0);
    look_at_experts();
    for (size_t i = 0; i < 4; i++) {
        bad |= 1u << failing[i];
    }
    others_count = 2 * EXPERTS - 1;
    sem_init(&others_ended, 0, 0);
    change_ops()->weights_load = load_first_last;
    const int fd = catch_log(&saved);
    want_both();
    start_store();
    const ep_weight_stats stats = settle();
    dup2(saved, STDERR_FILENO);
    close(saved);
    cr_expect_eq(stats.failed_count, 4);
    cr_expect_eq(stats.resident_count, 12);
    cr_expect_str_eq(stats.last_error, "model demo layer 1 expert 2: made up");
    FILE *log = fdopen(fd, "r");
    rewind(log);
    for (size_t i = 0; i < 4; i++) {
        char wanted[64];
        snprintf(wanted, sizeof(wanted), " layer=%u expert=%u ", failing[i] / EXPERTS,
                 failing[i] % EXPERTS);
        cr_assert_not_null(fgets(line, sizeof(line), log));
        cr_expect_not_null(strstr(line, wanted), "%s", line);
    }
    cr_expect_null(fgets(line, sizeof(line), log));
    fclose(log);
}

static uint32_t threads_at_rest;
static uint32_t helpers_max;
static uint32_t first_counted; /* by its number */
static _Atomic uint32_t loads_running, loads_running_max;

static uint32_t count_threads(void)
{
    uint32_t count = 0;
    DIR *tasks = opendir("/proc/self/task");
    cr_assert_not_null(tasks);
    for (struct dirent *e; (e = readdir(tasks)) != NULL;) {
        count += e->d_name[0] != '.';
    }
    closedir(tasks);
    return count;
}

/* A large one: it does not end before only as many helpers are left as may load such, or more of
 * them run. */
static ep_err load_counted(ep_backend *base, const ep_expert_source *source,
                           ep_backend_weights **out_weights, ep_error *out_error)
{
    if (number_of(source) >= first_counted) {
        const uint32_t running = atomic_fetch_add(&loads_running, 1) + 1;
        uint32_t most = atomic_load(&loads_running_max);
        while (running > most &&
               !atomic_compare_exchange_weak(&loads_running_max, &most, running)) {
        }
        while (count_threads() > threads_at_rest + helpers_max &&
               atomic_load(&loads_running_max) <= helpers_max) {
            sched_yield();
        }
        atomic_fetch_sub(&loads_running, 1);
    }
    return plain_ops->weights_load(base, source, out_weights, out_error);
}

/* Layer 1 with experts of so many bytes, behind those of layer 0 (first 0) or alone. */
static void expect_together(uint64_t bytes, uint32_t first, uint32_t helpers)
{
    claimed_inner = (uint32_t)(bytes / (3 * 32 * 2));
    open_store_at_rest(0);
    look_at_experts();
    change_ops()->weights_load = load_counted;
    atomic_store(&loads_running_max, 0);
    first_counted = EXPERTS;
    helpers_max = helpers;
    if (first == 0) {
        ep_weight_store_want(store, 0, all);
    }
    ep_weight_store_want(store, 1, all);
    threads_at_rest = count_threads() + 1; /* the loader */
    start_store();
    cr_expect_eq(settle().resident_count, 2 * EXPERTS - first);
    cr_expect_leq(atomic_load(&loads_running_max), helpers);
    cr_expect_geq(atomic_load(&loads_running_max), 1);
    ep_weight_store_stop(store);
    backend->ops = plain_ops;
    close_store();
}

/* Each reads a whole expert into memory. */
Test(weight_store, large_experts_load_side_by_side_as_far_as_the_bytes_of_their_files_go)
{
    expect_together(EP_WEIGHT_LOADING_BYTES / 2 - 4096, EXPERTS, 2);
    expect_together(EP_WEIGHT_LOADING_BYTES / 2 + 4096, 0, 1);
}

static uint32_t helpers_left = UINT32_MAX; /* that can be started */

int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *arg);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *arg);

/* Only helpers have attributes here. */
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *arg)
{
    if (attributes != NULL && helpers_left == 0) {
        return EAGAIN;
    }
    helpers_left -= attributes != NULL;
    return __real_pthread_create(thread, attributes, run, arg);
}

Test(weight_store, where_helpers_cannot_be_started_the_others_load_all)
{
    for (uint32_t can_be = 0; can_be < 2; can_be++) {
        open_store_at_rest(0);
        helpers_left = can_be;
        want_both();
        start_store();
        cr_expect_eq(settle().resident_count, 16);
        cr_expect_eq(helpers_left, 0);
        close_store();
    }
}

static void read_crowded(ep_backend *instance, ep_backend_device *out_device)
{
    (void)instance;
    *out_device =
        (ep_backend_device){.memory_bytes = 1000, .free_bytes = 111, .weight_bytes_max = 100};
}

/* Nobody has set a budget: that is not what is wrong. */
Test(weight_store, a_device_without_room_for_an_expert_is_told_as_what_it_is)
{
    ep_error e;
    open_store(0);
    change_ops()->device_read = read_crowded;
    cr_expect_eq(add_to_store_of(0, 1, &e), EP_ERR_BAD_CONFIG);
    cr_expect_str_eq(e.text, "a device has room for 100 bytes of weights, one expert of layer 1 of "
                             "model demo needs 3072 bytes; allowed: at least that; free its "
                             "memory, or leave the device out of ASCEND_RT_VISIBLE_DEVICES");
}

/* ---- several devices ---- */

#define DEVICES 3

static ep_backend *instances[DEVICES];
static _Atomic uint32_t loads_until_loss; /* of instance 1; 0: it is lost */

static void setup_devices(void)
{
    const ep_backend_config config = {.threads = 1};
    ep_error e;
    setup();
    for (int d = 0; d < DEVICES; d++) {
        ASSERT_OK(ep_backend_by_name(backend_name)->open(&config, &instances[d], &e), e);
    }
}

static void teardown_devices(void)
{
    close_store();
    for (int d = 0; d < DEVICES; d++) {
        instances[d]->ops->close(instances[d]);
    }
    ep_fixture_remove(dir);
}

TestSuite(weight_devices, .init = setup_devices, .fini = teardown_devices);

static uint64_t open_devices_at_rest(uint32_t experts_each)
{
    ep_expert_source outline;
    ep_error e;
    ASSERT_OK(ep_checkpoint_open(dir, &checkpoint, &e), e);
    cr_assert_eq(ep_checkpoint_outline_expert(checkpoint, 0, 0, &outline, &e), EP_OK);
    const uint64_t each = instances[0]->ops->weights_bytes(instances[0], &outline);
    const ep_weight_store_config config = {.backends = instances,
                                           .backends_count = DEVICES,
                                           .weight_bytes_max = each * experts_each,
                                           .load_threads = load_threads,
                                           .on_change = store_on_change};
    cr_assert_eq(ep_weight_store_create(&config, &store, &e), EP_OK);
    add_layers();
    return each;
}

static uint64_t open_devices(uint32_t experts_each)
{
    const uint64_t each = open_devices_at_rest(experts_each);
    start_store();
    return each;
}

static void lose_all(const char *reason)
{
    for (uint32_t d = 0; d < DEVICES; d++) {
        ep_weight_store_lose(store, d, reason);
    }
}

/* How many of the layer's experts each device has, by their weights' owner. */
static void count_places(uint32_t layer, uint32_t counts[DEVICES])
{
    static const uint32_t experts[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    ep_resident *residents[8];
    memset(counts, 0, DEVICES * sizeof(*counts));
    cr_assert(hold(layer, experts, 8, residents));
    for (uint32_t e = 0; e < 8; e++) {
        for (uint32_t d = 0; residents[e] != NULL && d < DEVICES; d++) {
            counts[d] += residents[e]->backend == instances[d];
        }
        ep_resident_release(residents[e]);
    }
}

/* A request for one expert. */
static ep_err use_one(uint32_t layer, uint32_t expert, const ep_backend **out_backend)
{
    ep_resident *resident = NULL;
    asked a;
    if (!hold(layer, &expert, 1, &resident)) {
        return EP_ERR_NOT_OWNER;
    }
    if (resident == NULL) {
        get(&a, layer, expert);
        if (a.error.code != EP_OK) {
            return a.error.code;
        }
        resident = a.resident;
    }
    cr_assert_eq(resident->expert, expert);
    *out_backend = resident->backend;
    ep_resident_release(resident);
    return EP_OK;
}

Test(weight_devices, a_layer_is_spread_over_the_devices_and_each_keeps_its_budget)
{
    const ep_backend *on;
    uint32_t counts[DEVICES];
    uint64_t each = open_devices(5);
    cr_expect_eq(ep_weight_store_capacity(store), DEVICES * 5 * each);
    want_both();
    ep_weight_stats stats = settle();
    cr_assert_eq(stats.resident_count, 15, "5 on each");
    cr_assert_eq(stats.owned_count, 16);
    for (uint32_t l = 0; l < 2; l++) {
        count_places(l, counts);
        for (uint32_t d = 0; d < DEVICES; d++) {
            cr_expect(counts[d] == 2 || counts[d] == 3, "layer %u: %u on device %u", l, counts[d],
                      d);
        }
    }
    for (uint32_t round = 0; round < 60; round++) {
        cr_assert_eq(use_one(round % 2, (round * 5 + round / 8) % 8, &on), EP_OK);
        for (uint32_t d = 0; d < DEVICES; d++) {
            cr_assert_leq(ep_weight_store_device_bytes(store, d), each * 5);
        }
    }
    ep_weight_store_read_stats(store, &stats);
    cr_expect_gt(stats.evictions_total, 0);
    cr_expect_eq(stats.resident_count, 15);
}

/* All devices load so; plain_ops has the real functions. */
static void change_loads(ep_err (*load)(ep_backend *base, const ep_expert_source *source,
                                        ep_backend_weights **out_weights, ep_error *out_error))
{
    plain_ops = instances[0]->ops;
    changed_ops = *plain_ops;
    changed_ops.weights_load = load;
    for (int d = 0; d < DEVICES; d++) {
        instances[d]->ops = &changed_ops;
    }
}

/* The instance that has each expert of both layers; DEVICES: it is cold. */
static void find_devices(uint32_t on[2 * (EXPERTS + 1)])
{
    for (uint32_t i = 0; i < 2 * (EXPERTS + 1); i++) {
        const uint32_t expert = i % (EXPERTS + 1);
        ep_resident *resident;
        cr_assert(hold(i / (EXPERTS + 1), &expert, 1, &resident));
        on[i] = resident == NULL ? DEVICES : 0;
        while (resident != NULL && resident->backend != instances[on[i]]) {
            on[i]++;
        }
        ep_resident_release(resident);
    }
}

/* Both layers are loaded by so many threads; how many experts are there then. */
static uint32_t load_by(uint32_t threads, uint32_t experts_each, uint32_t on[2 * (EXPERTS + 1)])
{
    static const uint8_t every[EXPERTS + 1] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
    load_threads = threads;
    open_devices_at_rest(experts_each);
    look_at_experts();
    ep_weight_store_want(store, 0, every);
    ep_weight_store_want(store, 1, every);
    start_store();
    const ep_weight_stats stats = settle();
    cr_expect_eq(stats.failed_count, 0);
    cr_expect_eq(stats.owned_count, 2 * (EXPERTS + 1));
    find_devices(on);
    close_store();
    return (uint32_t)stats.resident_count;
}

/* With smaller and with larger shared experts, without a budget, and where the last ones or one in
 * the middle do not fit. Nothing is settled before the first layer has been loaded by others. */
Test(weight_devices, experts_are_where_one_thread_would_have_them)
{
    static const uint32_t shared[] = {8, 48}, budgets[] = {0, 7, 5, 3};
    uint32_t alone[2 * (EXPERTS + 1)], together[2 * (EXPERTS + 1)];
    ep_fixture_config fixture = ep_fixture_default();
    fixture.names = EP_NAMES_N1;
    fixture.router = EP_ROUTER_R3;
    others_count = EXPERTS - 1;
    for (size_t i = 0; i < 2 * 4; i++) {
        fixture.shared_inner = shared[i / 4];
        write_anew(&fixture);
        const uint32_t count = load_by(1, budgets[i % 4], alone);
        sem_init(&others_ended, 0, 0);
        change_loads(load_first_last);
        cr_expect_eq(load_by(4, budgets[i % 4], together), count);
        cr_expect_arr_eq(together, alone, sizeof(alone), "shared %u, budget %u",
                         fixture.shared_inner, budgets[i % 4]);
        for (int d = 0; d < DEVICES; d++) {
            instances[d]->ops = plain_ops;
        }
    }
}

Test(weight_devices, what_a_lost_device_held_comes_on_the_others)
{
    const ep_backend *on = NULL;
    const uint32_t expert = 2;
    ep_resident *held;
    uint64_t each = open_devices(4);
    ep_weight_store_want(store, 0, all);
    settle();
    cr_assert(hold(0, &expert, 1, &held));
    uint32_t lost = 0;
    while (held->backend != instances[lost]) {
        lost++;
    }
    const uint64_t changes_before = settle().owned_changes;
    ep_weight_store_lose(store, lost, "device is lost: test");
    ep_weight_store_lose(store, lost, "again");
    ep_weight_stats stats = settle();
    cr_expect_eq(stats.owned_count, 8);
    cr_expect_eq(stats.failed_count, 0);
    cr_expect_eq(stats.owned_changes, changes_before);
    cr_expect_eq(ep_weight_store_device_bytes(store, lost), each, "only what a job holds");
    ep_resident_release(held);
    cr_expect_eq(ep_weight_store_device_bytes(store, lost), 0);
    for (uint32_t e = 0; e < 8; e++) {
        cr_assert_eq(use_one(0, e, &on), EP_OK);
        cr_assert_neq(on, instances[lost]);
    }
    cr_expect_eq(settle().resident_count, 8);
    ep_weight_store_want(store, 1, all);
    stats = settle();
    cr_expect_eq(stats.resident_count, 8, "the room of two");
    cr_expect_eq(stats.owned_count, 16);
    cr_expect_eq(ep_weight_store_device_bytes(store, lost), 0);
}

Test(weight_devices, with_the_last_device_ownership_ends)
{
    uint32_t owned[8];
    const ep_backend *on;
    open_devices(2);
    ep_weight_store_want(store, 0, all); /* two stay cold */
    const uint64_t changes_before = settle().owned_changes;
    lose_all("device 2 is lost: test");
    ep_weight_stats stats = settle();
    cr_expect_eq(stats.owned_count, 0);
    cr_expect_eq(stats.resident_count, 0);
    cr_expect_eq(stats.resident_bytes, 0);
    cr_expect_eq(stats.failed_count, 8);
    cr_expect_gt(stats.owned_changes, changes_before);
    cr_expect_str_eq(stats.last_error, "device 2 is lost: test");
    cr_expect_eq(ep_weight_store_owned(store, 0, owned, NULL), 0);
    cr_expect_eq(use_one(0, 1, &on), EP_ERR_NOT_OWNER);
    ep_weight_store_want(store, 1, all);
    stats = settle();
    cr_expect_eq(stats.failed_count, 16, "nor can others be loaded");
    cr_expect_eq(stats.pending_count, 0);
    cr_expect_not_null(strstr(stats.last_error, "device 2 is lost: test"), "%s", stats.last_error);
}

/* A node may have many thousands of them. */
Test(weight_devices, loads_without_a_device_do_not_flood_the_log)
{
    int saved;
    open_devices(2);
    lose_all("device is lost: test");
    const int fd = catch_log(&saved);
    const uint64_t begin_ns = ep_clock_now_ns();
    want_both();
    cr_expect_eq(settle().failed_count, 16);
    expect_few_lines(fd, saved, " reason=\"device is lost: test\" ", begin_ns, 16);
}

static ep_err load_lossy(ep_backend *base, const ep_expert_source *source,
                         ep_backend_weights **out_weights, ep_error *out_error)
{
    uint32_t left = atomic_load(&loads_until_loss);
    while (base == instances[1] && left > 0 &&
           !atomic_compare_exchange_weak(&loads_until_loss, &left, left - 1)) {
    }
    if (base == instances[1] && left <= 1) {
        return ep_error_set(out_error, EP_ERR_DEVICE_LOST, "the heartbeat is lost");
    }
    return plain_ops->weights_load(base, source, out_weights, out_error);
}

/* The store hears of it from the load itself, before anybody tells. */
Test(weight_devices, a_load_whose_device_is_lost_goes_on_elsewhere)
{
    uint32_t counts[DEVICES];
    change_loads(load_lossy);
    atomic_store(&loads_until_loss, 2);
    open_devices(0);
    ep_weight_store_want(store, 0, all);
    const ep_weight_stats stats = settle();
    cr_expect_eq(stats.failed_count, 0);
    cr_expect_eq(stats.owned_count, 8);
    count_places(0, counts);
    cr_expect_eq(counts[1], 0);
    cr_expect_eq(counts[0] + counts[2], 7, "one was there and is cold");
    ep_weight_store_stop(store);
}

static ep_err load_refused(ep_backend *base, const ep_expert_source *source,
                           ep_backend_weights **out_weights, ep_error *out_error)
{
    if (base != instances[2]) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "made up");
    }
    return plain_ops->weights_load(base, source, out_weights, out_error);
}

/* What others hold on a device is not in its budget. */
Test(weight_devices, where_a_device_refuses_memory_another_one_is_asked)
{
    const ep_backend *on = NULL;
    uint32_t counts[DEVICES];
    change_loads(load_refused);
    open_devices(10);
    want_both();
    ep_weight_stats stats = settle();
    cr_expect_eq(stats.resident_count, 10, "the room of the one that gives memory");
    cr_expect_eq(stats.owned_count, 16);
    for (uint32_t l = 0; l < 2; l++) {
        count_places(l, counts);
        cr_expect_eq(counts[0] + counts[1], 0);
    }
    ep_weight_store_want(store, 0, (const uint8_t[8]){0});
    ep_weight_store_drop_unwanted(store); /* room, for which nothing has to go */
    for (uint32_t e = 0; e < 8; e++) {
        cr_expect_eq(use_one(1, e, &on), EP_OK);
        cr_expect_eq(on, instances[2]);
    }
    ep_weight_store_stop(store);
}

static sem_t load_begun, load_may_end;

static ep_err load_held(ep_backend *base, const ep_expert_source *source,
                        ep_backend_weights **out_weights, ep_error *out_error)
{
    sem_post(&load_begun);
    while (sem_wait(&load_may_end) != 0) {
    }
    return plain_ops->weights_load(base, source, out_weights, out_error);
}

/* One is being loaded when the last device is lost, and one is queued for a request that has gone
 * away. */
Test(weight_devices, nothing_on_its_way_stays_owned_without_a_device)
{
    asked loading, queued;
    uint32_t cold[2], cold_count = 0;
    sem_init(&load_begun, 0, 0);
    sem_init(&load_may_end, 0, 6);
    change_loads(load_held);
    open_devices(2);
    ep_weight_store_want(store, 0, all);
    cr_assert_eq(settle().resident_count, 6);
    for (uint32_t e = 0; e < 8; e++) {
        ep_resident *resident = NULL;
        cr_assert(hold(0, &e, 1, &resident));
        if (resident == NULL) {
            cold[cold_count++] = e;
        }
        ep_resident_release(resident);
        (void)sem_trywait(&load_begun); /* of the first pass */
    }
    cr_assert_eq(cold_count, 2);
    ask(&loading, 0, cold[0], UINT64_MAX);
    while (sem_wait(&load_begun) != 0) {
    }
    ask_dropped(&queued, cold[1], always);
    lose_all("device is lost: test");
    pthread_mutex_lock(&store_lock);
    const uint64_t before_last = store_changes;
    pthread_mutex_unlock(&store_lock);
    sem_post(&load_may_end);
    await(&loading);
    ep_resident_release(loading.resident);
    await(&queued);
    cr_expect_eq(queued.error.code, EP_ERR_CANCELLED);
    const ep_weight_stats stats = settle();
    cr_expect_eq(stats.owned_count, 0);
    cr_expect_eq(stats.failed_count, 8);
    ep_weight_store_stop(store);
    cr_expect_geq(store_changes, before_last + 2,
                  "of the load, and of the one that was given up: the coordinator hears of both");
}

/* ---- rate ---- */

static ep_weight_layer quantised_layer(const char *quant)
{
    ep_error e;
    ASSERT_OK(ep_checkpoint_open(dir, &checkpoint, &e), e);
    const ep_weight_quant *into = quant != NULL ? ep_weight_quant_find(quant) : NULL;
    ASSERT_OK(ep_checkpoint_quantize(checkpoint, into, &e), e);
    const ep_layer_formats *formats = &ep_checkpoint_info(checkpoint)->layer_formats[0];
    ep_weight_layer layer = layer_of(0);
    layer.format = formats->format;
    layer.down_format = formats->down_format;
    layer.file_format = formats->file_format;
    layer.file_down_format = formats->file_down_format;
    return layer;
}

/* weight_load_rate is the disk's: experts in half or a quarter of the file's bytes are read as they
 * are there. */
Test(weight_store, a_load_counts_the_bytes_of_the_file)
{
    const uint64_t values = UINT64_C(3) * 32 * 16; /* of the fixture's experts, in bf16 */
    ep_weight_layer layer = quantised_layer(NULL);
    cr_expect_eq(ep_weight_layer_bytes_read(&layer), 2 * values);
    ep_checkpoint_close(checkpoint);
    layer = quantised_layer("mxfp4");
    cr_expect_eq(ep_weight_layer_bytes_read(&layer), 2 * values);
    cr_expect_lt(ep_weight_layer_bytes_at_least(&layer), values);
    layer.file_down_format = EP_WEIGHTS_F32;
    cr_expect_eq(ep_weight_layer_bytes_read(&layer), (2 * 2 + 4) * values / 3);
}
