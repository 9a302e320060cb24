/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The services this test calls, each with several models and all of their experts:
 *   one       one node of this process over TCP, cpu backend, 2 threads
 *   many      five nodes of this process over loopback and TCP, cpu and reference backends, experts
 *             split unevenly with one or two copies each
 *   daemons   a coordinator and three expertd processes, uniform placement with 2 copies, cpu and
 *             reference backends; one node over libuv, one over nng, one over shared memory
 * and the clients that talk to them, with windows and frames of several sizes.
 */
#ifndef PROPERTY_CLUSTERS_H
#define PROPERTY_CLUSTERS_H

#include "expertd/client.h"
#include "models.h"

enum { CLUSTER_CLIENTS_MAX = 12, VERSION_BYTES = 32 };

/* What a client is made with; 0 and NULL: as it comes. */
typedef struct client_kind {
    const char *name;
    const char *lanes;
    uint32_t window_tokens; /* of prefill */
    uint32_t chunk_bytes;
} client_kind;

typedef struct test_client {
    char name[40];
    ep_client *client;
    char versions[MODELS_COUNT][VERSION_BYTES]; /* of test_model i, as the service tells */
} test_client;

typedef struct local_cluster local_cluster;
typedef struct daemon_cluster daemon_cluster;

/* family: what the nodes are told to compute bf16 weights with. Both false on failure, with the
 * reason on stderr; destroy copes with what is there. dir holds their files.
 */
bool local_cluster_create(const char *dir, uint64_t seed, const test_model models[MODELS_COUNT],
                          enum ref_family family, local_cluster **out_cluster);
void local_cluster_destroy(local_cluster *cluster);
/* Client by any number; one_node: of those that talk to a single node. */
const test_client *local_cluster_client(const local_cluster *cluster, uint32_t choice,
                                        bool one_node);

bool daemon_cluster_create(const char *dir, const test_model models[MODELS_COUNT],
                           enum ref_family family, daemon_cluster **out_cluster);
/* Ends the daemons with SIGTERM. False when one of them did not exit with 0; its output goes to
 * stderr. */
bool daemon_cluster_destroy(daemon_cluster *cluster);
/* That came to the node with shared memory over it. */
double daemon_cluster_shm_bytes(const daemon_cluster *cluster);
const test_client *daemon_cluster_client(const daemon_cluster *cluster, uint32_t choice);

/* For both: connects, waits until all is ready, and asks for the versions. */
bool test_client_open(test_client *client, const client_kind *kind, const ep_client_config *service,
                      const test_model models[MODELS_COUNT]);
void test_client_close(test_client *client);

#endif
