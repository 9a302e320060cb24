/* SPDX-License-Identifier: Apache-2.0 */
/* Epochs of routing tables that this node knows; written by membership, read by the handler. */
#ifndef EP_EXPERTD_NODE_EPOCH_H
#define EP_EXPERTD_NODE_EPOCH_H

#include <pthread.h>

#include "moe/routing_table.h"

typedef struct ep_node_epoch {
    pthread_mutex_t lock;
    /* newest assignment that is done: every expert loaded or failed; 0.0: none */
    ep_epoch loaded;
    ep_epoch in_force; /* newest table that clients have; 0.0: none */
} ep_node_epoch;

static inline void ep_node_epoch_init(ep_node_epoch *epoch)
{
    *epoch = (ep_node_epoch){.lock = PTHREAD_MUTEX_INITIALIZER};
}

static inline ep_epoch ep_node_epoch_loaded(ep_node_epoch *epoch)
{
    pthread_mutex_lock(&epoch->lock);
    ep_epoch value = epoch->loaded;
    pthread_mutex_unlock(&epoch->lock);
    return value;
}

static inline ep_epoch ep_node_epoch_in_force(ep_node_epoch *epoch)
{
    pthread_mutex_lock(&epoch->lock);
    ep_epoch value = epoch->in_force;
    pthread_mutex_unlock(&epoch->lock);
    return value;
}

static inline void ep_node_epoch_set_loaded(ep_node_epoch *epoch, ep_epoch value)
{
    pthread_mutex_lock(&epoch->lock);
    epoch->loaded = value;
    pthread_mutex_unlock(&epoch->lock);
}

static inline void ep_node_epoch_set_in_force(ep_node_epoch *epoch, ep_epoch value)
{
    pthread_mutex_lock(&epoch->lock);
    epoch->in_force = value;
    pthread_mutex_unlock(&epoch->lock);
}

#endif
