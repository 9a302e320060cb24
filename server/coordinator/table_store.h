/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A store of the coordinator's state, which outlives the process. One coordinator at a time opens
 * it.
 *
 *   open  ->  begin_term (what was kept, and a term above every earlier one)
 *         ->  write, write, ...  ->  close
 *
 * A write is atomic, and durable when it returns. Calls block on I/O.
 *
 * Threads    one at a time.
 */
#ifndef EP_COORDINATOR_TABLE_STORE_H
#define EP_COORDINATOR_TABLE_STORE_H

#include "coordinator/state_kept.h"

#define EP_TABLE_STORE_PLACE_BYTES 320

typedef struct ep_table_store ep_table_store;

typedef struct ep_table_store_ops {
    /*
     * Makes the next term durable: the stored one + 1, at least term_min. *out_kept: free it with
     * ep_coordinator_kept_fini. Errors: IO, DATA_LOSS, NO_MEMORY, naming the place.
     */
    ep_err (*begin_term)(ep_table_store *store, uint64_t term_min, ep_coordinator_kept *out_kept,
                         uint64_t *out_term, ep_error *out_error);
    /* Replaces the stored state, under the term that was begun. Errors: IO naming the place and
     * cause, NO_MEMORY. */
    ep_err (*write)(ep_table_store *store, const ep_coordinator_kept *kept, ep_error *out_error);
    void (*close)(ep_table_store *store);
} ep_table_store_ops;

/* First member of every implementation. */
struct ep_table_store {
    const ep_table_store_ops *ops;
    char place[EP_TABLE_STORE_PLACE_BYTES]; /* for messages: a file, a URL */
};

ep_err ep_table_store_begin_term(ep_table_store *store, uint64_t term_min,
                                 ep_coordinator_kept *out_kept, uint64_t *out_term,
                                 ep_error *out_error);
ep_err ep_table_store_write(ep_table_store *store, const ep_coordinator_kept *kept,
                            ep_error *out_error);
/* NULL allowed. */
void ep_table_store_close(ep_table_store *store);

/*
 * Converts a table to bytes (for free()) and back, for every kind of store. Unpacking checks
 * everything. Errors: NO_MEMORY; DATA_LOSS saying what is wrong.
 */
ep_err ep_table_store_pack(const ep_routing_table *table, uint8_t **out_bytes, size_t *out_count);
ep_err ep_table_store_unpack(const uint8_t *bytes, size_t count, ep_routing_table **out_table,
                             ep_error *out_error);

#endif
