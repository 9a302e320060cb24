/* SPDX-License-Identifier: Apache-2.0 */
/* What the writer does with a table that was written but cannot be handed on, and with one that
 * cannot be written. */
#include "coordinator/table_keeper.h"

#include <criterion/criterion.h>
#include <pthread.h>

typedef struct scene {
    ep_table_store store; /* first: on_write gets a pointer to it */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool can_write;
    bool can_use;
    bool has_work;
    int writes;
    int failures;
    int used;
} scene;

static scene s;

static ep_err on_write(ep_table_store *store, const ep_coordinator_kept *kept, ep_error *out_error)
{
    (void)store, (void)kept;
    pthread_mutex_lock(&s.lock);
    bool good = s.can_write;
    s.writes++;
    pthread_cond_broadcast(&s.changed);
    pthread_mutex_unlock(&s.lock);
    return good ? EP_OK : ep_error_set(out_error, EP_ERR_IO, "no");
}

static bool on_take(void *arg, ep_table_job *out_job, ep_error *out_error)
{
    (void)arg, (void)out_job, (void)out_error;
    pthread_mutex_lock(&s.lock);
    bool has_work = s.has_work;
    pthread_mutex_unlock(&s.lock);
    return has_work;
}

static bool on_written(void *arg, const ep_table_job *job)
{
    (void)arg, (void)job;
    pthread_mutex_lock(&s.lock);
    bool good = s.can_use;
    s.used += good;
    s.has_work = !good;
    pthread_cond_broadcast(&s.changed);
    pthread_mutex_unlock(&s.lock);
    return good;
}

static void on_failed(void *arg, const ep_error *error)
{
    (void)arg;
    pthread_mutex_lock(&s.lock);
    s.failures += error->code != EP_OK;
    pthread_cond_broadcast(&s.changed);
    pthread_mutex_unlock(&s.lock);
}

static ep_table_keeper *start(bool can_write, bool can_use)
{
    static const ep_table_store_ops ops = {.write = on_write};
    static const ep_table_keeper_config config = {
        .store = &s.store, .take = on_take, .written = on_written, .failed = on_failed};
    ep_table_keeper *keeper;
    s = (scene){
        .store = {.ops = &ops}, .can_write = can_write, .can_use = can_use, .has_work = true};
    pthread_mutex_init(&s.lock, NULL);
    pthread_cond_init(&s.changed, NULL);
    cr_assert_eq(ep_table_keeper_create(&config, &keeper), EP_OK);
    ep_table_keeper_wake(keeper);
    return keeper;
}

static void wait_writes(int count)
{
    pthread_mutex_lock(&s.lock);
    while (s.writes < count) {
        pthread_cond_wait(&s.changed, &s.lock);
    }
    pthread_mutex_unlock(&s.lock);
}

/* A table that cannot be encoded for the watchers is written again after a pause, not round and
 * round. */
Test(table_keeper, what_cannot_be_handed_on_is_written_again_later, .timeout = 60)
{
    ep_table_keeper *keeper = start(true, false);
    wait_writes(1);
    ep_table_keeper_destroy(keeper);
    cr_assert_leq(s.writes, 10, "%d writes without a pause", s.writes);
    keeper = start(true, false);
    wait_writes(1);
    pthread_mutex_lock(&s.lock);
    s.can_use = true;
    pthread_mutex_unlock(&s.lock);
    pthread_mutex_lock(&s.lock);
    while (s.used == 0) { /* nobody wakes it */
        pthread_cond_wait(&s.changed, &s.lock);
    }
    pthread_mutex_unlock(&s.lock);
    ep_table_keeper_destroy(keeper);
    cr_assert_eq(s.failures, 0, "a write that worked is no failure");
}

Test(table_keeper, what_cannot_be_written_is_tried_again, .timeout = 60)
{
    ep_table_keeper *keeper = start(false, true);
    wait_writes(1);
    pthread_mutex_lock(&s.lock);
    s.can_write = true;
    pthread_mutex_unlock(&s.lock);
    wait_writes(2); /* nobody wakes it */
    ep_table_keeper_destroy(keeper);
    cr_assert_eq(s.used, 1);
    cr_assert_eq(s.failures, 1);
}
