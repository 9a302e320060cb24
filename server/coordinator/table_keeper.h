/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The thread that writes the coordinator's state into its store.
 *
 * Handlers must not wait for the disk, which may take seconds for a sync. So they change the state
 * in memory and wake this thread. It copies the state under the service's lock, writes it without a
 * lock, and only then passes the table to the watchers. Changes made meanwhile go with the next
 * write, so a slow disk delays only new tables. A failed write is tried again at every change and
 * every EP_TABLE_KEEPER_RETRY_MS.
 */
#ifndef EP_COORDINATOR_TABLE_KEEPER_H
#define EP_COORDINATOR_TABLE_KEEPER_H

#include "coordinator/table_store.h"

#define EP_TABLE_KEEPER_RETRY_MS 1000

/* One write. */
typedef struct ep_table_job {
    ep_coordinator_kept kept;
    uint64_t revision;
    ep_epoch committed;
} ep_table_job;

typedef struct ep_table_keeper_config {
    ep_table_store *store; /* borrowed */
    /* The three run on the keeper's thread. take fills *out_job; false: nothing to write. */
    bool (*take)(void *arg, ep_table_job *out_job, ep_error *out_error);
    /* false: it could not be used, so it is written again later */
    bool (*written)(void *arg, const ep_table_job *job);
    void (*failed)(void *arg, const ep_error *error);
    void *arg;
} ep_table_keeper_config;

typedef struct ep_table_keeper ep_table_keeper;

/* Errors: NO_MEMORY. */
ep_err ep_table_keeper_create(const ep_table_keeper_config *config, ep_table_keeper **out_keeper);
/* Tells that there is something to write. Any thread; returns at once. */
void ep_table_keeper_wake(ep_table_keeper *keeper);
/* Tries once more to write, then ends the thread. NULL allowed. */
void ep_table_keeper_destroy(ep_table_keeper *keeper);

#endif
