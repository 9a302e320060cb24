/* SPDX-License-Identifier: Apache-2.0 */
#include "clusters.h"

#include <stdio.h>
#include <string.h>

enum { READY_TIMEOUT_US = 60 * 1000 * 1000, NARROW_WINDOW_TOKENS = 5, NARROW_CHUNK_BYTES = 16 * 1024 };

static bool learn_versions(test_client *client, const test_model models[MODELS_COUNT])
{
    ep_model_desc desc = {.struct_bytes = sizeof(desc)};
    for (uint32_t i = 0; ep_client_model(client->client, i, &desc) == EP_OK; i++) {
        for (uint32_t m = 0; m < MODELS_COUNT; m++) {
            if (strcmp(desc.name, models[m].name) == 0) {
                snprintf(client->versions[m], sizeof(client->versions[m]), "%s", desc.version);
            }
        }
    }
    for (uint32_t m = 0; m < MODELS_COUNT; m++) {
        if (client->versions[m][0] == 0) {
            fprintf(stderr, "client %s does not know %s\n", client->name, models[m].name);
            return false;
        }
    }
    return true;
}

bool test_client_open(test_client *client, const char *name, const ep_client_config *service, bool narrow,
                      const test_model models[MODELS_COUNT])
{
    ep_client_config config = *service;
    ep_error error;
    snprintf(client->name, sizeof(client->name), "%s", name);
    config.deadline_us = READY_TIMEOUT_US;
    if (narrow) {
        config.prefill_window_tokens = NARROW_WINDOW_TOKENS;
        config.chunk_bytes_max = NARROW_CHUNK_BYTES;
    }
    ep_err err = ep_client_create(&config, &client->client, &error);
    if (err == EP_OK) {
        err = ep_client_wait_ready(client->client, READY_TIMEOUT_US, &error);
    }
    if (err != EP_OK) {
        fprintf(stderr, "client %s: %s: %s\n", name, ep_err_name(err), error.text);
        return false;
    }
    return learn_versions(client, models);
}

void test_client_close(test_client *client)
{
    ep_client_destroy(client->client);
    client->client = NULL;
}
