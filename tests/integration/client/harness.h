/* SPDX-License-Identifier: Apache-2.0 */
/* A small fake service, a client on it, random batches, and the result a plain loop gives. */
#ifndef EP_TESTS_CLIENT_HARNESS_H
#define EP_TESTS_CLIENT_HARNESS_H

#include "fake_service.h"

#define NODES_MAX 6

typedef struct harness {
    ep_layer_shape shape;
    uint32_t nodes_count;
    fake_node *nodes[NODES_MAX];
    char names[NODES_MAX][16];
    const char *urls[NODES_MAX];
    uint32_t owners[64];           /* per table index: mask of nodes */
    fake_coordinator *coordinator; /* NULL: node_urls */
    ep_epoch epoch;
    ep_client *client;
} harness;

typedef struct harness_options {
    const char *scheme; /* "tcp" or "loopback" */
    uint32_t nodes_count;
    uint32_t copies; /* of each expert; expert e on nodes e % N, e+1 % N, ... */
    uint32_t experts;
    uint32_t shared_experts;
    uint32_t hidden;
    bool coordinator;
    uint32_t chunk_bytes_max; /* 0: default */
    uint32_t window_tokens;
    uint64_t buffer_bytes_max;
    const char *numerics; /* of the client's config */
    const char *const *node_numerics;
    bool no_wait; /* do not wait until the service is ready */
} harness_options;

void harness_open(harness *h, const harness_options *options);
#define HARNESS_OPEN(h, ...) harness_open((h), &(harness_options){__VA_ARGS__})
/* Leaves zeros behind, which may be closed again. */
void harness_close(harness *h);
/* Publishes owners as a newer table. */
void harness_publish(harness *h);
/* Sends owners to the nodes. */
void harness_own(harness *h);
void harness_stop_node(harness *h, uint32_t index);
fake_node *harness_start_node(harness *h, uint32_t index, const char *url, const char *numerics);

/* A batch with its own memory; ids of a token differ. */
typedef struct batch {
    uint32_t tokens;
    uint32_t top_k;
    uint32_t hidden;
    ep_dtype x_dtype;
    ep_dtype out_dtype;
    uint8_t *x;
    int32_t *ids;
    float *scales;
    uint8_t *out;
    uint8_t *expected;
    ep_moe_args args;
    ep_tensor out_tensor;
    size_t out_bytes;
} batch;

void batch_make(batch *b, const harness *h, uint32_t tokens, uint32_t top_k, uint64_t seed);
void batch_free(batch *b); /* like harness_close */
/* Fills expected by a plain loop over args. */
void batch_expect(batch *b, const harness *h);
/* out == expected, bit for bit; prints the first difference. */
bool batch_equal(const batch *b);
/* out was not written since batch_make. */
bool batch_untouched(const batch *b);

#endif
