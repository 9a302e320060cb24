/* SPDX-License-Identifier: Apache-2.0 */
/* Loading, budget, bad tensors, references and letting go, on a real checkpoint. */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "expertd/weight_store.h"
#include "support/checkpoint_fixture.h"

static char dir[EP_FIXTURE_PATH_BYTES];
static ep_checkpoint *checkpoint;
static ep_backend *backend;
static ep_weight_store *store;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static uint64_t changes;
static const uint8_t all[8] = {1, 1, 1, 1, 1, 1, 1, 1};

static void on_change(void *arg)
{
    (void)arg;
    pthread_mutex_lock(&lock);
    changes++;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* Until nothing is queued or loading. */
static ep_weight_stats settle(void)
{
    ep_weight_stats stats;
    pthread_mutex_lock(&lock);
    for (;;) {
        uint64_t seen = changes;
        pthread_mutex_unlock(&lock);
        ep_weight_store_read_stats(store, &stats);
        pthread_mutex_lock(&lock);
        if (stats.pending_count == 0) {
            break;
        }
        while (changes == seen) {
            pthread_cond_wait(&changed, &lock);
        }
    }
    pthread_mutex_unlock(&lock);
    return stats;
}

/* A store over the fixture's two layers of 8 experts. */
static void open_store(uint64_t weight_bytes_max)
{
    ep_error e;
    uint32_t slot;
    ep_backend_config config = {.threads = 1};
    cr_assert_eq(ep_checkpoint_open(dir, &checkpoint, &e), EP_OK, "%s", e.text);
    cr_assert_eq(ep_backend_by_name("reference")->open(&config, &backend, &e), EP_OK, "%s", e.text);
    ep_weight_store_config sc = {
        .backend = backend, .weight_bytes_max = weight_bytes_max, .on_change = on_change};
    cr_assert_eq(ep_weight_store_create(&sc, &store, &e), EP_OK);
    const ep_model_info *info = ep_checkpoint_info(checkpoint);
    for (uint32_t l = 0; l < info->moe_layers_count; l++) {
        ep_weight_layer layer = {
            .model = "demo", .checkpoint = checkpoint, .format = info->format, .shape = info->moe_layers[l]};
        cr_assert_eq(ep_weight_store_add_layer(store, &layer, &slot, &e), EP_OK);
        cr_assert_eq(slot, l);
    }
    cr_assert_eq(ep_weight_store_start(store, &e), EP_OK);
}

static void setup(void)
{
    ep_error e;
    ep_fixture_config fixture = ep_fixture_default();
    ep_fixture_temp_dir(dir);
    cr_assert_eq(ep_fixture_write(&fixture, dir, &e), EP_OK, "%s", e.text);
}

static void teardown(void)
{
    ep_weight_store_destroy(store);
    if (backend != NULL) {
        backend->ops->close(backend);
    }
    ep_checkpoint_close(checkpoint);
    ep_fixture_remove(dir);
}

TestSuite(weight_store, .init = setup, .fini = teardown);

Test(weight_store, wanted_experts_become_resident_with_their_hash)
{
    uint32_t owned[8], experts[2] = {1, 6}, missing;
    ep_expert_state state;
    ep_resident *residents[2];
    ep_expert_data data;
    ep_error e;
    const uint8_t some[8] = {0, 1, 0, 0, 0, 0, 1, 0};
    open_store(0);
    cr_expect_not(ep_weight_store_acquire(store, 0, experts, 2, residents, &missing, &state));
    cr_expect_eq(state, EP_EXPERT_ABSENT);
    ep_weight_store_want(store, 0, some);
    ep_weight_stats stats = settle();
    cr_expect_eq(stats.resident_count, 2);
    cr_expect_eq(stats.failed_count, 0);
    cr_expect_gt(stats.resident_bytes, 0);
    cr_expect_eq(ep_weight_store_owned(store, 0, owned, NULL), 2);
    cr_expect_eq(owned[1], 6);
    cr_expect_eq(ep_weight_store_owned_count(store, 1), 0);
    cr_assert(ep_weight_store_acquire(store, 0, experts, 2, residents, &missing, &state));
    cr_assert_eq(ep_checkpoint_read_expert(checkpoint, 0, 6, &data, &e), EP_OK);
    cr_expect_arr_eq(residents[1]->sha256, data.sha256, EP_SHA256_BYTES);
    ep_expert_data_free(&data);
    ep_resident_release(residents[0]);
    ep_resident_release(residents[1]);
}

Test(weight_store, acquiring_is_all_or_nothing_and_names_the_missing_one)
{
    const uint8_t some[8] = {1, 1};
    uint32_t experts[3] = {0, 1, 5}, missing = 99;
    ep_expert_state state;
    ep_resident *residents[3];
    open_store(0);
    ep_weight_store_want(store, 0, some);
    settle();
    cr_expect_not(ep_weight_store_acquire(store, 0, experts, 3, residents, &missing, &state));
    cr_expect_eq(missing, 5);
    const uint8_t none[8] = {0};
    ep_weight_store_want(store, 0, none);
    ep_weight_store_drop_unwanted(store);
    cr_expect_eq(settle().resident_bytes, 0, "a failed acquire keeps no reference");
}

Test(weight_store, dropped_experts_live_until_their_last_user)
{
    uint32_t expert = 3, missing;
    ep_expert_state state;
    ep_resident *resident;
    const uint8_t none[8] = {0};
    open_store(0);
    ep_weight_store_want(store, 1, all);
    settle();
    cr_assert(ep_weight_store_acquire(store, 1, &expert, 1, &resident, &missing, &state));
    ep_weight_store_want(store, 1, none);
    cr_expect_eq(ep_weight_store_unwanted_count(store), 8);
    cr_expect_eq(ep_weight_store_owned_count(store, 1), 8, "they stay until they are dropped");
    ep_weight_store_drop_unwanted(store);
    ep_weight_stats stats = settle();
    cr_expect_eq(stats.resident_count, 0);
    cr_expect_eq(stats.resident_bytes, resident->bytes);
    ep_resident_release(resident);
    cr_expect_eq(settle().resident_bytes, 0);
    ep_weight_store_want(store, 1, all);
    cr_expect_eq(settle().resident_count, 8, "and can come back");
}

Test(weight_store, the_budget_refuses_by_name_and_keeps_the_rest)
{
    open_store(0);
    const uint8_t one[8] = {1};
    ep_weight_store_want(store, 0, one);
    uint64_t bytes_each = settle().resident_bytes;
    teardown();
    setup();
    open_store(bytes_each * 3);
    ep_weight_store_want(store, 0, all);
    ep_weight_stats stats = settle();
    cr_expect_eq(stats.resident_count, 3);
    cr_expect_eq(stats.failed_count, 5);
    cr_expect(strstr(stats.last_error, "model demo layer 0 expert 7") != NULL, "%s", stats.last_error);
    cr_expect(strstr(stats.last_error, "weight_bytes_max") != NULL, "%s", stats.last_error);
    const uint8_t last[8] = {0, 0, 0, 0, 0, 0, 0, 1};
    ep_weight_store_want(store, 0, last);
    ep_weight_store_drop_unwanted(store);
    settle();
    ep_weight_store_want(store, 0, last); /* a new wish tries failed ones again, now there is room */
    stats = settle();
    cr_expect_eq(stats.resident_count, 1);
    cr_expect_eq(stats.failed_count, 0);
    cr_expect_str_eq(stats.last_error, "");
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
    cr_expect(strstr(stats.last_error, "model demo layer 1 expert") != NULL, "%s", stats.last_error);
    cr_expect_eq(ep_weight_store_owned(store, 0, owned, NULL), 1, "what was resident stays");
}
