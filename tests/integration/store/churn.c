/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Many requests at once on a store whose budget holds few experts, with packed files, loads ahead
 * of time that give way, experts that are taken away and placed again, and waits that end at their
 * deadline. Every expert that comes is the one asked for; at the end nothing is held and nobody
 * waits. The same on several devices, one of which is lost on the way. For the thread sanitizer: no
 * framework.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/random.h"
#include "expertd/weight_cache.h"
#include "support/checkpoint_fixture.h"
#include "support/check.h"
#include "support/store_watch.h"

#define LAYERS 6
#define EXPERTS 16
#define EACH 4 /* of a request */
#define CALLERS 4
#define BUDGET 12
#define DEVICES 3 /* in the last run */
#define LOST_AT 5 /* placements */

static ep_weight_store *store;
static uint8_t digests[LAYERS][EXPERTS][EP_SHA256_BYTES];
static atomic_int wrong, served, ended_without, not_owned;
static atomic_bool ends;
static int rounds = 150;

typedef struct request {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint32_t left;
    ep_weight_wait waits[EACH];
} request;

static void check(const ep_resident *resident, uint32_t layer, uint32_t expert)
{
    const bool is_right = resident->layer_slot == layer && resident->expert == expert &&
                          memcmp(resident->sha256, digests[layer][expert], EP_SHA256_BYTES) == 0;
    atomic_fetch_add(&wrong, !is_right);
    atomic_fetch_add(&served, 1);
}

static void on_ready(ep_weight_wait *wait, ep_resident *resident, const ep_error *error)
{
    request *r = wait->arg;
    if (resident != NULL) {
        check(resident, wait->layer_slot, wait->expert);
        ep_resident_release(resident);
    } else {
        CHECK(error->code == EP_ERR_UNAVAILABLE || error->code == EP_ERR_NOT_OWNER ||
              error->code == EP_ERR_CANCELLED);
        atomic_fetch_add(&ended_without, 1);
    }
    pthread_mutex_lock(&r->lock);
    r->left--;
    pthread_cond_signal(&r->changed);
    pthread_mutex_unlock(&r->lock);
}

static void use_layer(request *r, uint64_t *state, uint32_t layer)
{
    uint32_t experts[EACH], missing, count = 0;
    ep_resident *residents[EACH];
    ep_expert_state why;
    const uint32_t first = (uint32_t)(ep_splitmix64(state) % 3);
    for (uint32_t i = 0; i < EACH; i++) {
        experts[i] =
            4 * i + (ep_splitmix64(state) % 4 == 0 ? (uint32_t)(ep_splitmix64(state) % 4) : first);
    }
    if (!ep_weight_store_acquire(store, layer, experts, NULL, EACH, residents, &missing, &why)) {
        atomic_fetch_add(&not_owned, 1);
        return;
    }
    const uint64_t now_ns = ep_clock_now_ns();
    for (uint32_t i = 0; i < EACH; i++) {
        if (residents[i] != NULL) {
            check(residents[i], layer, experts[i]);
            ep_resident_release(residents[i]);
            continue;
        }
        const bool is_short = ep_splitmix64(state) % 8 == 0;
        r->waits[count++] =
            (ep_weight_wait){.expert = experts[i],
                             .deadline_ns = is_short ? now_ns + EP_NS_PER_MS : UINT64_MAX,
                             .ready = on_ready,
                             .arg = r};
    }
    r->left = count;
    ep_weight_store_wait(store, layer, r->waits, count);
    pthread_mutex_lock(&r->lock);
    while (r->left > 0) {
        pthread_cond_wait(&r->changed, &r->lock);
    }
    pthread_mutex_unlock(&r->lock);
}

static void *call(void *arg)
{
    uint64_t state = *(const uint64_t *)arg;
    request r = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    for (int i = 0; i < rounds; i++) {
        for (uint32_t l = 0; l < LAYERS; l++) {
            use_layer(&r, &state, l);
        }
        if (ep_splitmix64(&state) % 2 == 0) { /* so that there is time for loads ahead */
            usleep(4000);
        }
    }
    return NULL;
}

static void want_all(uint32_t without)
{
    uint8_t wanted[EXPERTS];
    for (uint32_t l = 0; l < LAYERS; l++) {
        for (uint32_t e = 0; e < EXPERTS; e++) {
            wanted[e] = e != without;
        }
        ep_weight_store_want(store, l, wanted);
    }
}

/* Takes one expert of each layer away and places it again. */
static void *place(void *arg)
{
    const bool *loses = arg;
    for (uint32_t i = 0; !atomic_load(&ends); i++) {
        if (*loses && i == LOST_AT) {
            ep_weight_store_lose(store, 1, "lost on purpose");
        }
        want_all(i % EXPERTS);
        ep_weight_store_drop_unwanted(store);
        want_all(EXPERTS);
        store_settle(store);
    }
    return NULL;
}

static void run(ep_timer_service *timers, ep_backend *const *backends, uint32_t count,
                ep_checkpoint *checkpoint, ep_weight_cache *cache, uint64_t each)
{
    ep_backend *backend = backends[0];
    bool loses = count > 1;
    pthread_t threads[CALLERS], placer;
    uint64_t seeds[CALLERS];
    ep_error e;
    uint32_t slot;
    ep_weight_stats stats;
    const ep_weight_store_config config = {.backends = backends,
                                           .backends_count = count,
                                           .weight_bytes_max = BUDGET / count * each,
                                           .prefetches = true,
                                           .cache = cache,
                                           .timers = timers,
                                           .on_change = store_on_change};
    const ep_model_info *info = ep_checkpoint_info(checkpoint);
    CHECK(ep_weight_store_create(&config, &store, &e) == EP_OK);
    for (uint32_t l = 0; l < LAYERS; l++) {
        ep_weight_layer layer = {.model = "demo",
                                 .checkpoint = checkpoint,
                                 .format = info->format,
                                 .shape = info->moe_layers[l]};
        CHECK(backend->ops->numerics_id(backend, info->format, false, 0, layer.numerics) == EP_OK);
        CHECK(ep_checkpoint_identity(checkpoint, layer.identity, &e) == EP_OK);
        CHECK(ep_weight_store_add_layer(store, &layer, &slot, &e) == EP_OK);
    }
    CHECK(ep_weight_store_start(store, &e) == EP_OK);
    want_all(EXPERTS);
    store_settle(store);
    atomic_store(&ends, false);
    pthread_create(&placer, NULL, place, &loses);
    for (uint64_t i = 0; i < CALLERS; i++) {
        seeds[i] = 70 + i;
        pthread_create(&threads[i], NULL, call, &seeds[i]);
    }
    for (int i = 0; i < CALLERS; i++) {
        pthread_join(threads[i], NULL);
    }
    atomic_store(&ends, true);
    pthread_join(placer, NULL);
    ep_weight_store_stop(store);
    ep_weight_store_read_stats(store, &stats);
    printf("%d served, %d waits ended without, %d requests refused; %llu loads, %llu ahead (%llu "
           "used, %llu not), %llu evictions\n",
           atomic_load(&served), atomic_load(&ended_without), atomic_load(&not_owned),
           (unsigned long long)stats.loads_total, (unsigned long long)stats.prefetches_total,
           (unsigned long long)stats.prefetches_useful_total,
           (unsigned long long)stats.prefetches_useless_total,
           (unsigned long long)stats.evictions_total);
    CHECK(stats.waiting_count == 0 && stats.failed_count == 0);
    for (uint32_t d = 0; d < count; d++) {
        CHECK(ep_weight_store_device_bytes(store, d) <=
              (loses && d == 1 ? 0 : config.weight_bytes_max));
    }
    CHECK(stats.prefetches_useful_total + stats.prefetches_useless_total <= stats.prefetches_total);
    CHECK(stats.evictions_total > 0);
    ep_weight_store_destroy(store); /* asserts that no byte is held */
}

int main(void)
{
    char dir[EP_FIXTURE_PATH_BYTES], cache_dir[EP_FIXTURE_PATH_BYTES];
    ep_fixture_config fixture = ep_fixture_default();
    const ep_backend_config config = {.threads = 1};
    ep_checkpoint *checkpoint;
    ep_backend *backend, *backends[DEVICES];
    ep_weight_cache *cache;
    ep_timer_service *timers;
    ep_error e;
    uint64_t each = 0;
    rounds = getenv("EP_TEST_LONG") != NULL ? 4000 : rounds;
    fixture.layers = LAYERS;
    fixture.experts = EXPERTS;
    ep_fixture_temp_dir(dir);
    ep_fixture_temp_dir(cache_dir);
    CHECK(ep_fixture_write(&fixture, dir, &e) == EP_OK);
    CHECK(ep_checkpoint_open(dir, &checkpoint, &e) == EP_OK);
    for (int d = 0; d < DEVICES; d++) {
        CHECK(ep_backend_by_name("cpu")->open(&config, &backends[d], &e) == EP_OK);
    }
    backend = backends[0];
    CHECK(ep_weight_cache_open(cache_dir, 0, backend, &cache, &e) == EP_OK);
    CHECK(ep_timer_service_create("timers", &timers) == EP_OK);
    for (uint32_t l = 0; l < LAYERS; l++) {
        for (uint32_t i = 0; i < EXPERTS; i++) {
            ep_expert_data data;
            CHECK(ep_checkpoint_read_expert(checkpoint, l, i, &data, &e) == EP_OK);
            memcpy(digests[l][i], data.sha256, EP_SHA256_BYTES);
            each = backend->ops->weights_bytes(backend, &data.source);
            ep_expert_data_free(&data);
        }
    }
    for (int i = 0; i < 2; i++) { /* the second time from packed files */
        run(timers, backends, 1, checkpoint, cache, each);
    }
    run(timers, backends, DEVICES, checkpoint, NULL, each);
    ep_timer_service_destroy(timers);
    ep_weight_cache_close(cache);
    for (int d = 0; d < DEVICES; d++) {
        backends[d]->ops->close(backends[d]);
    }
    ep_checkpoint_close(checkpoint);
    ep_fixture_remove(dir);
    ep_fixture_remove(cache_dir);
    CHECK(atomic_load(&wrong) == 0);
    CHECK(atomic_load(&served) > 0);
    return 0;
}
