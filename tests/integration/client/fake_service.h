/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Nodes and a coordinator inside the test's process: real rpc servers with experts that are one
 * formula each, and with switches for everything that can go wrong.
 *
 *   expert e:  y[h] = x[h] * (0.5 + e/8) + x[(h + e + 1) % H] * 0.25
 *              in f32, rounded to the wire type
 */
#ifndef EP_TESTS_FAKE_SERVICE_H
#define EP_TESTS_FAKE_SERVICE_H

#include "expertd/client.h"
#include "moe/routing_table.h"
#include "rpc/rpc.h"

#define FAKE_MODEL "demo"
#define FAKE_VERSION "v1"
#define FAKE_NUMERICS "fake-1"
#define FAKE_LAYER 3

typedef enum fake_fault {
    FAKE_OK,
    FAKE_HANG,        /* keeps requests unanswered; connections stay alive */
    FAKE_ERROR,       /* answers with error_code, retry_after_us */
    FAKE_ERROR_ONCE,  /* the next request only */
    FAKE_SHORT_REPLY, /* one slot too few */
    FAKE_WRONG_HIDDEN,
    FAKE_WRONG_DTYPE,
    FAKE_WRONG_BYTES, /* tensor section too short */
    FAKE_WRONG_NUMERICS
} fake_fault;

typedef struct fake_node_config {
    const char *name;
    const char *url;     /* "tcp://127.0.0.1:0", "loopback://name" */
    const char *shm_url; /* beside it; NULL none */
    ep_layer_shape shape;
    const uint32_t *owned; /* table indexes */
    size_t owned_count;
    const char *numerics;
} fake_node_config;

typedef struct fake_node fake_node;

/* Dies with a message on failure: a test cannot go on without it. */
fake_node *fake_node_start(const fake_node_config *config);
/* Closes its connections under whatever is in flight. NULL allowed. */
void fake_node_stop(fake_node *node);
const char *fake_node_url(fake_node *node);
void fake_node_set_fault(fake_node *node, fake_fault fault, ep_err error_code,
                         uint64_t retry_after_us);
/* Answers what FAKE_HANG kept. */
void fake_node_release(fake_node *node);
/* Waits until FAKE_HANG keeps that many, then answers so many of them, in an order that seed draws;
 * the fault stays. */
void fake_node_answer_held(fake_node *node, uint32_t count, uint64_t *seed);
/* Waits until that many requests have arrived since the start and the node has taken up each. */
void fake_node_wait_requests(fake_node *node, uint64_t count);
uint64_t fake_node_requests(fake_node *node);
/* Waits until FAKE_HANG keeps a request. */
void fake_node_wait_held(fake_node *node);
/* Waits until that many requests were told that their caller went away. */
void fake_node_wait_cancelled(fake_node *node, uint64_t count);
/* What it says it owns from now on; others get NOT_OWNER. */
void fake_node_own(fake_node *node, const uint32_t *owned, size_t owned_count);
/* The newest request's epoch, prefill flag and tenant. */
void fake_node_last(fake_node *node, ep_epoch *out_epoch, bool *out_prefill, char out_tenant[64]);

typedef struct fake_coordinator fake_coordinator;
fake_coordinator *fake_coordinator_start(const char *url);
void fake_coordinator_stop(fake_coordinator *coordinator);
const char *fake_coordinator_url(fake_coordinator *coordinator);
/* Sends a table to everyone who watches, and to those who come later. Copies what it needs. */
void fake_coordinator_publish(fake_coordinator *coordinator, const ep_routing_table *table);

/* One layer (FAKE_LAYER) of FAKE_MODEL over nodes; owners[e] is a bit mask of node indexes.
 * numerics[n] NULL: FAKE_NUMERICS. */
ep_routing_table *fake_table(ep_epoch epoch, const ep_layer_shape *shape, const char *const *names,
                             const char *const *urls, const char *const *numerics,
                             uint32_t nodes_count, const uint32_t *owners);

/* The formula, rounded to dtype: out has hidden elements. */
void fake_expert(uint32_t expert, const float *x, uint32_t hidden, ep_dtype dtype, void *out);

#endif
