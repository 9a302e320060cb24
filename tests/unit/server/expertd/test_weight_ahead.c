/* SPDX-License-Identifier: Apache-2.0 */
/* Loads ahead of time from packed files give way, in the middle, to what requests wait for; and
 * what the rate counts of such files. */
#include <criterion/criterion.h>
#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "expertd/weight_cache.h"
#include "expertd/weight_store_private.h"
#include "support/checkpoint_fixture.h"
#include "support/store_watch.h"
#include "support/expect.h"

#define EXPERTS 8
#define WAITS_MAX 10000 /* of 2 ms: only a writer that stopped gets there */

static char dir[EP_FIXTURE_PATH_BYTES], cache_dir[EP_FIXTURE_PATH_BYTES];
static ep_checkpoint *checkpoint;
static ep_backend *backend;
static ep_weight_cache *cache;
static ep_weight_store *store;
static const ep_backend_ops *plain_ops;
static ep_backend_ops ops;
static uint64_t load_bytes_per_s;

static void open_store(uint64_t weight_bytes_max)
{
    ep_error e;
    uint32_t slot;
    uint8_t all[EXPERTS];
    const ep_weight_store_config config = {.backends = &backend,
                                           .backends_count = 1,
                                           .weight_bytes_max = weight_bytes_max,
                                           .prefetches = true,
                                           .cache = cache,
                                           .load_bytes_per_s = load_bytes_per_s,
                                           .on_change = store_on_change};
    cr_assert_eq(ep_weight_store_create(&config, &store, &e), EP_OK);
    const ep_model_info *info = ep_checkpoint_info(checkpoint);
    ep_weight_layer layer = {.model = "demo",
                             .checkpoint = checkpoint,
                             .format = info->format,
                             .file_format = info->layer_formats[0].file_format,
                             .file_down_format = info->layer_formats[0].file_down_format,
                             .shape = info->moe_layers[0]};
    cr_assert_eq(plain_ops->numerics_id(backend, info->format, false, 0, layer.numerics), EP_OK);
    ASSERT_OK(ep_checkpoint_identity(checkpoint, layer.identity, &e), e);
    ASSERT_OK(ep_weight_store_add_layer(store, &layer, &slot, &e), e);
    cr_assert_eq(ep_weight_store_start(store, &e), EP_OK);
    memset(all, 1, sizeof(all));
    ep_weight_store_want(store, 0, all);
}

/* Every expert has its file in the cache then. quant: NULL as in the checkpoint. */
static void setup_as(const ep_fixture_config *fixture, const char *quant)
{
    ep_error e;
    const ep_backend_config config = {.threads = 1};
    ep_weight_cache_stats stats;
    ep_fixture_new(fixture, dir);
    ep_fixture_temp_dir(cache_dir);
    ASSERT_OK(ep_checkpoint_open(dir, &checkpoint, &e), e);
    ASSERT_OK(
        ep_checkpoint_quantize(checkpoint, quant != NULL ? ep_weight_quant_find(quant) : NULL, &e),
        e);
    ASSERT_OK(ep_backend_by_name("cpu")->open(&config, &backend, &e), e);
    cr_assert_eq(ep_weight_cache_open(cache_dir, 0, backend, &cache, &e), EP_OK);
    plain_ops = backend->ops;
    ops = *plain_ops;
    open_store(0);
    ep_weight_cache_read_stats(cache, &stats);
    for (uint32_t waits = 0; stats.written_total < EXPERTS; waits++) {
        cr_assert_lt(waits, WAITS_MAX, "%llu of %d experts have their file",
                     (unsigned long long)stats.written_total, EXPERTS);
        usleep(2000);
        ep_weight_cache_read_stats(cache, &stats);
    }
    ep_weight_store_destroy(store);
    store = NULL;
}

static void setup(void)
{
    const ep_fixture_config fixture = ep_fixture_default();
    setup_as(&fixture, NULL);
}

static void teardown(void)
{
    ep_weight_store_destroy(store);
    ep_weight_cache_close(cache);
    backend->ops->close(backend);
    ep_checkpoint_close(checkpoint);
    ep_fixture_remove(dir);
    ep_fixture_remove(cache_dir);
}

TestSuite(weight_ahead, .init = setup, .fini = teardown, .timeout = 60);

static ep_weight_wait wait_for_5;
static bool is_armed, has_returned, was_ready_before, is_ready;
static ep_err import_err, ready_err;

static void on_ready(ep_weight_wait *wait, ep_resident *resident, const ep_error *error)
{
    (void)wait;
    ep_resident_release(resident);
    pthread_mutex_lock(&store_lock);
    is_ready = true;
    ready_err = error != NULL ? error->code : EP_OK;
    pthread_cond_broadcast(&store_changed);
    pthread_mutex_unlock(&store_lock);
}

/* Of a load ahead of time, on the loader's thread: a request comes before its first piece is
 * read. */
static ep_err
import_and_ask(ep_backend *base, const void *head, size_t head_bytes, size_t body_bytes,
               ep_err (*fill)(void *arg, void *body, size_t body_bytes, ep_error *out_error),
               void *arg, ep_backend_weights **out_weights, ep_error *out_error)
{
    if (!is_armed) {
        return plain_ops->weights_import(base, head, head_bytes, body_bytes, fill, arg, out_weights,
                                         out_error);
    }
    is_armed = false;
    wait_for_5 = (ep_weight_wait){.expert = 5, .deadline_ns = UINT64_MAX, .ready = on_ready};
    ep_weight_store_wait(store, 0, &wait_for_5, 1);
    const ep_err err = plain_ops->weights_import(base, head, head_bytes, body_bytes, fill, arg,
                                                 out_weights, out_error);
    pthread_mutex_lock(&store_lock);
    was_ready_before = is_ready;
    has_returned = true;
    import_err = err;
    pthread_cond_broadcast(&store_changed);
    pthread_mutex_unlock(&store_lock);
    return err;
}

/* Experts 6 and 7 become hot without being there, until one is loaded ahead of time. */
static void provoke(void)
{
    const uint32_t pair[2] = {6, 7};
    store_settle(store);
    ops.weights_import = import_and_ask;
    backend->ops = &ops;
    is_armed = true;
    for (bool is_done = false; !is_done;) {
        ep_resident *residents[2];
        uint32_t missing;
        ep_expert_state state;
        cr_assert(ep_weight_store_acquire(store, 0, pair, NULL, 2, residents, &missing, &state));
        ep_resident_release(residents[0]);
        ep_resident_release(residents[1]);
        /* these requests have given up: the loader wakes for nothing */
        ep_weight_store_wait(store, 0, NULL, 0);
        pthread_mutex_lock(&store_lock);
        is_done = has_returned;
        pthread_mutex_unlock(&store_lock);
    }
    pthread_mutex_lock(&store_lock);
    while (!is_ready) {
        pthread_cond_wait(&store_changed, &store_lock);
    }
    pthread_mutex_unlock(&store_lock);
}

static uint64_t bytes_of_one(void)
{
    open_store(0);
    const uint64_t bytes = store_settle(store).resident_bytes / EXPERTS;
    ep_weight_store_destroy(store);
    return bytes;
}

Test(weight_ahead, a_request_is_served_in_the_middle_of_a_load_ahead_of_time)
{
    open_store(bytes_of_one() * 3);
    provoke();
    cr_expect(was_ready_before, "it did not wait for the end of a load that nobody asked for");
    cr_expect_eq(ready_err, EP_OK);
    cr_expect_eq(import_err, EP_OK, "which went on afterwards");
    cr_expect_eq(store_settle_with(store, 1).failed_count, 0);
}

static void expect_left_for_the_request(void)
{
    provoke();
    cr_expect_not(was_ready_before);
    cr_expect_eq(ready_err, EP_OK);
    cr_expect_eq(import_err, EP_ERR_RESOURCE_EXHAUSTED);
    cr_expect_eq(store_settle(store).failed_count, 0);
    cr_expect_eq(store_settle(store).owned_count, EXPERTS);
}

Test(weight_ahead, a_load_ahead_of_time_is_left_when_the_budget_does_not_hold_both)
{
    open_store(bytes_of_one());
    expect_left_for_the_request();
}

/* At ten bytes a second the load ahead of time would have to be paid for minutes. */
Test(weight_ahead, a_request_does_not_wait_for_the_rate_of_bytes_that_are_not_read)
{
    const uint64_t each = bytes_of_one();
    load_bytes_per_s = 10;
    open_store(each * 3);
    provoke();
    cr_expect(was_ready_before);
    cr_expect_eq(ready_err, EP_OK);
    cr_expect_eq(import_err, EP_OK);
}

/* Loads of these experts take the way from the checkpoint. */
static void remove_files(const char *name, uint32_t count)
{
    char path[EP_FIXTURE_PATH_BYTES + 300];
    uint32_t removed = 0;
    DIR *d = opendir(cache_dir);
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        if (strstr(e->d_name, name) != NULL) {
            snprintf(path, sizeof(path), "%s/%s", cache_dir, e->d_name);
            removed += unlink(path) == 0;
        }
    }
    closedir(d);
    cr_assert_eq(removed, count);
}

static size_t twice_the_bytes(ep_backend *base, const ep_expert_source *source)
{
    return 2 * plain_ops->weights_bytes(base, source);
}

/* As the store measured experts before it started, there is room for both. */
Test(weight_ahead, a_load_ahead_of_time_is_left_when_the_request_needs_more_than_was_measured)
{
    open_store(bytes_of_one() * 2);
    store_settle(store);
    ops.weights_bytes = twice_the_bytes;
    remove_files("-e5.pack", 1);
    expect_left_for_the_request();
}

/* ---- rate ---- */

static void setup_quantised(void)
{
    ep_fixture_config fixture = ep_fixture_default();
    fixture.hidden = 64;
    fixture.inner = 64;
    setup_as(&fixture, "mxfp4");
}

TestSuite(weight_rate, .init = setup_quantised, .fini = teardown, .timeout = 60);

static double load_ns(void)
{
    pthread_mutex_lock(&store->lock);
    const double ns = store->room_ahead.load_ns;
    pthread_mutex_unlock(&store->lock);
    return ns;
}

/* At one byte a second a load lasts as many seconds as bytes count for it, however long it took. */
static double expect_loads(ep_load_room *room, uint64_t bytes)
{
    for (uint32_t e = 0; e < EXPERTS; e++) {
        ep_load_room_loaded(room, bytes * EP_NS_PER_S);
    }
    return room->load_ns;
}

/* Of the cache's file also in a process that has neither read nor written it, of the checkpoint's
 * where the cache's is gone. */
Test(weight_rate, a_load_counts_the_bytes_of_the_file_that_it_reads)
{
    const uint64_t in_file = UINT64_C(2) * 3 * 64 * 64; /* bf16 */
    const uint64_t in_cache = bytes_of_one();
    const uint8_t none[EXPERTS] = {0};
    uint8_t all[EXPERTS];
    ep_load_room room = {0};
    cr_assert_lt(2 * in_cache, in_file);
    memset(all, 1, sizeof(all));
    load_bytes_per_s = 1;
    open_store(0);
    store_settle(store);
    cr_expect_float_eq(load_ns(), expect_loads(&room, in_cache), 1e3);
    ep_weight_store_want(store, 0, none);
    ep_weight_store_drop_unwanted(store);
    remove_files(".pack", EXPERTS);
    ep_weight_store_want(store, 0, all);
    cr_assert_eq(store_settle(store).resident_count, EXPERTS);
    cr_expect_float_eq(load_ns(), expect_loads(&room, in_file), 1e3);
}
