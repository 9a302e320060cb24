/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A program of somebody else: public headers and libexpertd.so, and not a word about tracing. Its
 * calls are recorded when libexpertd-trace.so is preloaded.
 *
 *     preloaded_client URL CALLS    CALLS calls of layer 0 of model demo, then one that is given up
 *                                   under way
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "expertd/client.h"

#define TOKENS 2
#define TOP_K 2

static int fail(const char *what, const ep_error *error)
{
    fprintf(stderr, "%s: %s\n", what, error->text);
    return 1;
}

static int run(ep_client *client, int calls)
{
    static int32_t ids[TOKENS * TOP_K] = {0, 1, 2, 3};
    static float scales[TOKENS * TOP_K] = {0.5f, 0.5f, 0.25f, 0.75f};
    ep_layer_desc layer = {.struct_bytes = sizeof(layer)};
    ep_moe_result result = {.struct_bytes = sizeof(result)};
    ep_call *call = NULL;
    ep_moe_args args;
    ep_error error;
    if (ep_client_layer(client, "demo", NULL, 0, &layer) != EP_OK) {
        fprintf(stderr, "no layer\n");
        return 1;
    }
    uint16_t *x = calloc((size_t)TOKENS * layer.hidden, sizeof(*x));
    uint16_t *y = calloc((size_t)TOKENS * layer.hidden, sizeof(*y));
    if (x == NULL || y == NULL) {
        return 1;
    }
    ep_moe_args_init(&args);
    args.model = "demo";
    args.layer = layer.layer;
    args.x = ep_tensor_2d(x, EP_DTYPE_BF16, TOKENS, layer.hidden);
    args.expert_ids = ep_tensor_2d(ids, EP_DTYPE_I32, TOKENS, TOP_K);
    args.expert_scales = ep_tensor_2d(scales, EP_DTYPE_F32, TOKENS, TOP_K);
    ep_tensor out = ep_tensor_2d(y, EP_DTYPE_BF16, TOKENS, layer.hidden);
    if (ep_call_create(client, &args, &out, &call, &error) != EP_OK) {
        return fail("create", &error);
    }
    for (int i = 0; i < calls; i++) {
        if (ep_call_begin(call, TOKENS, &error) != EP_OK) {
            return fail("begin", &error);
        }
        if (ep_call_finish(call, &result) != EP_OK) {
            return fail("call", &result.error);
        }
    }
    if (ep_call_begin(call, TOKENS, &error) != EP_OK) {
        return fail("begin", &error);
    }
    ep_call_destroy(call);
    free(x);
    free(y);
    return 0;
}

int main(int argc, char **argv)
{
    const char *urls[] = {argc > 1 ? argv[1] : ""};
    ep_client_config config;
    ep_client *client = NULL;
    ep_error error;
    if (argc != 3) {
        return 2;
    }
    ep_client_config_init(&config);
    config.node_urls = urls;
    config.node_urls_count = 1;
    if (ep_client_create(&config, &client, &error) != EP_OK) {
        return fail("client", &error);
    }
    if (ep_client_wait_ready(client, 30000000, &error) != EP_OK) {
        return fail("ready", &error);
    }
    int code = run(client, atoi(argv[2]));
    ep_client_destroy(client);
    return code;
}
