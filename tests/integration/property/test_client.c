/* SPDX-License-Identifier: Apache-2.0 */
#include "clusters.h"

#include <stdio.h>
#include <string.h>

#include "base/clock.h"

enum { READY_TIMEOUT_US = 60 * 1000 * 1000 };

static bool is_whole(ep_client *client, const ep_model_desc *model)
{
    ep_layer_desc layer = {.struct_bytes = sizeof(layer)};
    for (uint32_t l = 0; l < model->layers_count; l++) {
        if (ep_client_layer(client, model->name, model->version, l, &layer) != EP_OK ||
            layer.copies_min == 0) {
            return false;
        }
    }
    return true;
}

/* True when every expert of every model has a copy. */
static bool learn_versions(test_client *client, const test_model models[MODELS_COUNT])
{
    uint32_t whole = 0;
    ep_model_desc desc = {.struct_bytes = sizeof(desc)};
    for (uint32_t i = 0; ep_client_model(client->client, i, &desc) == EP_OK; i++) {
        for (uint32_t m = 0; m < MODELS_COUNT; m++) {
            if (strcmp(desc.name, models[m].name) == 0) {
                snprintf(client->versions[m], sizeof(client->versions[m]), "%s", desc.version);
                whole += is_whole(client->client, &desc);
            }
        }
    }
    return whole == MODELS_COUNT;
}

static ep_err open_once(test_client *client, const ep_client_config *config, ep_error *out_error)
{
    ep_err err = ep_client_create(config, &client->client, out_error);
    return err == EP_OK ? ep_client_wait_ready(client->client, READY_TIMEOUT_US, out_error) : err;
}

/* Without a coordinator a client knows what the nodes said when it connected, which while they load
 * is not all: ask anew. */
bool test_client_open(test_client *client, const client_kind *kind, const ep_client_config *service,
                      const test_model models[MODELS_COUNT])
{
    ep_client_config config = *service;
    ep_error error;
    snprintf(client->name, sizeof(client->name), "%s", kind->name);
    config.deadline_us = READY_TIMEOUT_US;
    config.lanes = kind->lanes;
    config.prefill_window_tokens = kind->window_tokens;
    config.chunk_bytes_max = kind->chunk_bytes != 0 ? kind->chunk_bytes : config.chunk_bytes_max;
    uint64_t give_up_ns = ep_clock_now_ns() + READY_TIMEOUT_US * 1000ull;
    ep_err err = open_once(client, &config, &error);
    while (err == EP_OK && !learn_versions(client, models) && ep_clock_now_ns() < give_up_ns) {
        test_client_close(client);
        err = open_once(client, &config, &error);
    }
    if (err != EP_OK) {
        fprintf(stderr, "client %s: %s: %s\n", kind->name, ep_err_name(err), error.text);
        return false;
    }
    if (!learn_versions(client, models)) {
        fprintf(stderr, "client %s: some experts of some model have no copy\n", kind->name);
        return false;
    }
    return true;
}

void test_client_close(test_client *client)
{
    ep_client_destroy(client->client);
    client->client = NULL;
}
