/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The routing table that a client's calls go by, as benches of whole services wait for it and judge
 * it. What is not there within a minute fails the bench.
 */
#ifndef EP_BENCH_LIVE_TABLE_H
#define EP_BENCH_LIVE_TABLE_H

#include "moe/routing_table.h"
#include "support/load.h"

#define LIVE_EXPERTS_MAX 64
#define LIVE_TOP_K 2

typedef bool (*live_table_test)(const ep_routing_table *table, void *arg);

bool live_table_is(ep_client *client, live_table_test test, void *arg);
/* When it came to be so. */
uint64_t live_table_wait(ep_client *client, const char *what, live_table_test test, void *arg);
ep_epoch live_table_epoch(ep_client *client);

/* A table newer than `after` of so many nodes, where every expert has so many copies, and every
 * node too. */
typedef struct live_copies {
    ep_epoch after;
    uint32_t copies_min;
    uint32_t nodes;
    uint32_t node_copies_min;
} live_copies;
bool live_table_has_copies(const ep_routing_table *table, void *live_copies);

/* Layer 0 is within `good` of what no placement of so many copies over so many nodes can beat. */
typedef struct live_balance {
    double heat[LIVE_EXPERTS_MAX];
    uint32_t nodes;
    double good;
    double ratio; /* what was seen last */
} live_balance;
bool live_table_is_balanced(const ep_routing_table *table, void *live_balance);

/* Batches of layer 0. hot: LIVE_TOP_K experts for each batch, from which all its tokens take
 * theirs; NULL: any. */
void live_batches_init(ep_test_batch *out, uint32_t count, const char *path, const char *model,
                       uint32_t tokens, const int32_t *hot);
void live_batches_fini(ep_test_batch *batches, uint32_t count);
/* LIVE_TOP_K experts of each batch by zipf; and what each expert gets of all of them. */
void live_draw_zipf(double exponent, uint32_t experts, uint32_t batches, int32_t *out_hot,
                    double *out_heat);

#endif
