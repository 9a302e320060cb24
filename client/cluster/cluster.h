/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a client knows of the service: the newest routing table, as a view, and its peers. Tables
 * come from a coordinator (watch.c) or are made of the nodes' Hellos (hello_table.c). An older
 * epoch never replaces a newer one.
 *
 * Threads  any. on_change runs on library threads with no lock held.
 */
#ifndef EP_CLIENT_CLUSTER_H
#define EP_CLIENT_CLUSTER_H

#include "expertd/client.h"
#include "cluster/reaper.h"
#include "cluster/view.h"

typedef struct ep_cluster ep_cluster;

typedef struct ep_cluster_config {
    ep_rpc_common common;           /* timers and pool borrowed; strings copied by the channels */
    const ep_client_config *client; /* borrowed for the cluster's life */
    void (*on_change)(void *arg);   /* a newer table, or a node has become usable */
    void *arg;
    uint64_t *late_replies; /* atomic: counts replies that came too late */
} ep_cluster_config;

ep_err ep_cluster_create(const ep_cluster_config *config, ep_cluster **out_cluster,
                         ep_error *out_error);
/* Ends what is in flight, closes every connection and frees the cluster. Nothing may refer to its
 * peers any more. Not from a callback. NULL allowed. */
void ep_cluster_destroy(ep_cluster *cluster);

/* The newest view with a reference; NULL before the first table. */
ep_view *ep_cluster_acquire_view(ep_cluster *cluster);
/* The same. Errors: UNAVAILABLE before the first table. */
ep_err ep_cluster_current_view(ep_cluster *cluster, ep_view **out_view, ep_error *out_error);
/* Waits for the first table. Errors: UNAVAILABLE with the last report. */
ep_err ep_cluster_wait_view(ep_cluster *cluster, uint64_t deadline_ns, ep_view **out_view,
                            ep_error *out_error);
/* Waits until calls can be expected to succeed; see ep_client_wait_ready. */
ep_err ep_cluster_wait_ready(ep_cluster *cluster, uint64_t deadline_ns, ep_error *out_error);
/* Ends every wait with CLOSED. */
void ep_cluster_stop_waits(ep_cluster *cluster);

#endif
