/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One expert node: connects the parts, owns the event loop, and decides the node's state.
 *
 *     starting   weights are loading, or no assignment yet
 *     serving    every wanted expert is resident, or cold
 *     degraded   some expert could not be loaded, or no cold one can be now; the others serve
 *     draining   stopping: no new work, calls in flight are finished
 *
 * Threads    create, run and destroy on one thread.
 */
#ifndef EP_EXPERTD_NODE_H
#define EP_EXPERTD_NODE_H

#include "options/options.h"
#include "expertd/node_config.h"

/* Memory for requests in work, without their frames. */
#define EP_NODE_BOOKKEEPING_BYTES (64u << 20)

typedef struct ep_node ep_node;

/* A reload reads this command line, and its files, again. */
typedef struct ep_node_source {
    const ep_options *options; /* values in force; borrowed */
    int argc;
    char **argv;
} ep_node_source;

/* Listens, opens the checkpoints and begins to load. Borrows config. Errors: those of the parts. */
ep_err ep_node_create(const ep_node_config *config, const ep_node_source *source,
                      ep_node **out_node, ep_error *out_error);
/* Returns when the node has drained. */
void ep_node_run(ep_node *node);
/* NULL allowed. */
void ep_node_destroy(ep_node *node);

#endif
