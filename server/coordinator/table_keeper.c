/* SPDX-License-Identifier: Apache-2.0 */
#include "coordinator/table_keeper.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "base/clock.h"

struct ep_table_keeper {
    ep_table_keeper_config config;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    bool is_woken;
    bool is_stopping;
};

/* Waits until woken, after a failure at most EP_TABLE_KEEPER_RETRY_MS. False: stop. */
static bool wait_for_work(ep_table_keeper *keeper, bool has_failed)
{
    const uint64_t until_ns =
        has_failed ? ep_clock_now_ns() + EP_TABLE_KEEPER_RETRY_MS * EP_NS_PER_MS : EP_TIME_NEVER;
    pthread_mutex_lock(&keeper->lock);
    while (!keeper->is_woken && !keeper->is_stopping &&
           ep_clock_wait(&keeper->wake, &keeper->lock, until_ns)) {
    }
    keeper->is_woken = false;
    bool goes_on = !keeper->is_stopping;
    pthread_mutex_unlock(&keeper->lock);
    return goes_on;
}

/* Writes until there is nothing to write; false after a failure. */
static bool write_all(ep_table_keeper *keeper)
{
    const ep_table_keeper_config *config = &keeper->config;
    for (;;) {
        ep_table_job job = {0};
        ep_error error;
        ep_error_clear(&error);
        if (!config->take(config->arg, &job, &error)) {
            if (error.code != EP_OK) {
                config->failed(config->arg, &error);
            }
            return error.code == EP_OK;
        }
        ep_err err = ep_table_store_write(config->store, &job.kept, &error);
        bool good = err == EP_OK && config->written(config->arg, &job);
        if (err != EP_OK) {
            config->failed(config->arg, &error);
        }
        ep_coordinator_kept_fini(&job.kept);
        if (!good) {
            return false;
        }
    }
}

static void *run(void *arg)
{
    ep_table_keeper *keeper = arg;
    bool has_failed = false;
    while (wait_for_work(keeper, has_failed)) {
        has_failed = !write_all(keeper);
    }
    write_all(keeper);
    return NULL;
}

ep_err ep_table_keeper_create(const ep_table_keeper_config *config, ep_table_keeper **out_keeper)
{
    ep_table_keeper *keeper = calloc(1, sizeof(*keeper));
    if (keeper == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    keeper->config = *config;
    pthread_mutex_init(&keeper->lock, NULL);
    pthread_cond_init(&keeper->wake, NULL);
    if (pthread_create(&keeper->thread, NULL, run, keeper) != 0) {
        pthread_cond_destroy(&keeper->wake);
        pthread_mutex_destroy(&keeper->lock);
        free(keeper);
        return EP_ERR_NO_MEMORY;
    }
    pthread_setname_np(keeper->thread, "coord-store");
    *out_keeper = keeper;
    return EP_OK;
}

void ep_table_keeper_wake(ep_table_keeper *keeper)
{
    pthread_mutex_lock(&keeper->lock);
    keeper->is_woken = true;
    pthread_cond_signal(&keeper->wake);
    pthread_mutex_unlock(&keeper->lock);
}

void ep_table_keeper_destroy(ep_table_keeper *keeper)
{
    if (keeper == NULL) {
        return;
    }
    pthread_mutex_lock(&keeper->lock);
    keeper->is_stopping = true;
    pthread_cond_signal(&keeper->wake);
    pthread_mutex_unlock(&keeper->lock);
    pthread_join(keeper->thread, NULL);
    pthread_cond_destroy(&keeper->wake);
    pthread_mutex_destroy(&keeper->lock);
    free(keeper);
}
