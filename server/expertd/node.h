/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One expert node: wires the parts, owns the event loop, and decides the node's state.
 *
 *     starting   weights are loading, or no assignment yet
 *     serving    every wanted expert is resident
 *     degraded   some expert could not be loaded; the others serve
 *     draining   stopping: no new work, calls in flight are finished
 *
 * Threads    create, run and destroy on one thread.
 */
#ifndef EP_EXPERTD_NODE_H
#define EP_EXPERTD_NODE_H

#include "options/options.h"
#include "expertd/node_config.h"

/* Beside frames: memory for requests in work. */
#define EP_NODE_BOOKKEEPING_BYTES (64u << 20)

typedef struct ep_node ep_node;

/* Where a reload finds its new values: the same command line again. */
typedef struct ep_node_source {
    const ep_options *options; /* what runs now; borrowed */
    int argc;
    char **argv;
} ep_node_source;

/* Listens, opens the checkpoints and begins to load. config is borrowed. Errors: with text,
 * whatever a part reports. */
ep_err ep_node_create(const ep_node_config *config, const ep_node_source *source,
                      ep_node **out_node, ep_error *out_error);
/* Until the node has drained. */
void ep_node_run(ep_node *node);
/* NULL allowed. */
void ep_node_destroy(ep_node *node);

#endif
