/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Three nodes with two models behind a coordinator whose gateway is asked: "mixtral" (softmax after
 * top-k) and "deepseek" (sigmoid scores with a bias, groups, a shared expert, a first dense layer).
 */
#ifndef GATEWAY_FIXTURE_H
#define GATEWAY_FIXTURE_H

#include "gateway.pb-c.h"
#include "gateway_call.h"
#include "support/cluster.h"

enum {
    GATEWAY_NODES = 3,
    GATEWAY_HIDDEN = 64,
    GATEWAY_EXPERTS = 8,
    GATEWAY_TOP_K = 2,
    GATEWAY_MODELS = 2
};

typedef struct gateway_fixture {
    ep_test_cluster cluster;
    ep_test_model models[GATEWAY_MODELS];
    char paths[GATEWAY_MODELS][EP_TEST_PATH_BYTES];
    ep_cli_connect connect;       /* to the coordinator */
    const char *const *node_args; /* set before _init; NULL: none */
} gateway_fixture;

void gateway_fixture_init(gateway_fixture *f, uint32_t copies, const char *const *coordinator_args);
/* Survivors must end with 0. */
void gateway_fixture_fini(gateway_fixture *f);
/* Waits until the first table is there. */
void gateway_wait_table(gateway_fixture *f);
ep_cli_gateway *gateway_open(gateway_fixture *f);
/* Layer that has experts. */
static inline uint32_t gateway_layer(uint32_t model)
{
    return model == 0 ? 0 : 1;
}

/* Value of a metric line that begins with name (with its labels), or -1: of the coordinator, or of
 * all nodes together. */
double gateway_nodes_metric(gateway_fixture *f, const char *name);
double gateway_metric(gateway_fixture *f, const char *name);
/* Asks again and again until the metric has the value. */
void gateway_wait_metric(gateway_fixture *f, const char *name, double value);

/* A request made by hand, over a channel of its own. tensors may be NULL. */
typedef struct gateway_raw gateway_raw;
gateway_raw *gateway_raw_open(gateway_fixture *f);
void gateway_raw_close(gateway_raw *raw);
/* Begins a call that ends by timeout_ms; one at a time. Without a connection it has ended at
 * once. */
void gateway_raw_begin(gateway_raw *raw, const Expertd__V1__GatewayForwardRequest *header,
                       const void *tensors, size_t tensor_bytes, uint32_t timeout_ms);
void gateway_raw_cancel(gateway_raw *raw);
/* Waits for its end. *out_missing (may be NULL): missing_count. */
ep_err gateway_raw_wait(gateway_raw *raw, ep_error *out_error, uint32_t *out_missing);

#endif
