/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of the decode benchmark share: the layer's shape and real nodes that serve it. */
#ifndef EP_BENCH_DECODE_CASE_H
#define EP_BENCH_DECODE_CASE_H

#include "bench/bench_service.h"

#define DECODE_HIDDEN 7168
#define DECODE_INNER 256
#define DECODE_EXPERTS 256
#define DECODE_TOP_K 8
#define DECODE_TOKENS_MAX 128
#define DECODE_NODES_MAX 8
#define DECODE_ROW_BYTES (DECODE_HIDDEN * 2)

/* Bytes of frames that nodes counted, both ways, by lane. */
typedef struct decode_lanes {
    double shm;
    double stream;
} decode_lanes;

typedef struct decode_nodes {
    uint32_t count;
    ep_test_process processes[DECODE_NODES_MAX];
    ep_client *client;
} decode_nodes;

/* Nodes with equal shares of the first `experts` of the checkpoint, all loaded. stream: over
 * that lane alone. */
void decode_nodes_start(decode_nodes *nodes, uint32_t count, uint32_t experts, const char *dir,
                        const char *checkpoint, bool stream);
void decode_nodes_stop(decode_nodes *nodes);
void decode_nodes_call(const decode_nodes *nodes, const bench_tokens *tokens, uint16_t *out);
/* Sums over the nodes; waits until what is on its way has been counted. */
decode_lanes decode_nodes_lanes(const decode_nodes *nodes);

#endif
