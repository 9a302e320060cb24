/* SPDX-License-Identifier: Apache-2.0 */
/* See harness.h. The combine here is written from the contract, not from lib/moe. */
#include "harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/numeric.h"
#include "base/random.h"
#include "moe/convert.h"

#define UNTOUCHED 0xa5

static void must(ep_err err, const ep_error *error, const char *what)
{
    if (err != EP_OK) {
        fprintf(stderr, "%s: %s: %s\n", what, ep_err_name(err), error->text);
        abort();
    }
}

static size_t owned_by(const harness *h, uint32_t node, uint32_t *out_owned)
{
    size_t count = 0;
    for (uint32_t e = 0; e < h->shape.experts + h->shape.shared_experts; e++) {
        if ((h->owners[e] & (1u << node)) != 0) {
            out_owned[count++] = e;
        }
    }
    return count;
}

fake_node *harness_start_node(harness *h, uint32_t index, const char *url, const char *numerics)
{
    uint32_t owned[64];
    fake_node_config config = {.name = h->names[index],
                               .url = url,
                               .shape = h->shape,
                               .owned = owned,
                               .owned_count = owned_by(h, index, owned),
                               .numerics = numerics};
    h->nodes[index] = fake_node_start(&config);
    return h->nodes[index];
}

void harness_stop_node(harness *h, uint32_t index)
{
    fake_node_stop(h->nodes[index]);
    h->nodes[index] = NULL;
}

void harness_own(harness *h)
{
    for (uint32_t n = 0; n < h->nodes_count; n++) {
        uint32_t owned[64];
        size_t count = owned_by(h, n, owned);
        fake_node_own(h->nodes[n], owned, count);
    }
}

void harness_publish(harness *h)
{
    const char *names[NODES_MAX];
    for (uint32_t n = 0; n < h->nodes_count; n++) {
        names[n] = h->names[n];
    }
    h->epoch.number++;
    ep_routing_table *table =
        fake_table(h->epoch, &h->shape, names, h->urls, NULL, h->nodes_count, h->owners);
    fake_coordinator_publish(h->coordinator, table);
    ep_routing_table_unref(table);
}

static void start_nodes(harness *h, const harness_options *o, uint64_t id)
{
    for (uint32_t n = 0; n < h->nodes_count; n++) {
        char url[128];
        snprintf(h->names[n], sizeof(h->names[n]), "n%u", n);
        if (strcmp(o->scheme, "tcp") == 0) {
            snprintf(url, sizeof(url), "tcp://127.0.0.1:0");
        } else {
            snprintf(url, sizeof(url), "loopback://%llx-n%u", (unsigned long long)id, n);
        }
        harness_start_node(h, n, url, o->node_numerics != NULL ? o->node_numerics[n] : NULL);
        h->urls[n] = strdup(fake_node_url(h->nodes[n]));
    }
}

void harness_open(harness *h, const harness_options *o)
{
    ep_error error;
    ep_client_config config;
    uint64_t id = ep_random_id();
    *h = (harness){.shape = {.layer = FAKE_LAYER,
                             .hidden = o->hidden != 0 ? o->hidden : 32,
                             .inner = 8,
                             .experts = o->experts != 0 ? o->experts : 8,
                             .shared_experts = o->shared_experts,
                             .top_k = 2},
                   .nodes_count = o->nodes_count,
                   .epoch = {1, 0}};
    for (uint32_t e = 0; e < h->shape.experts + h->shape.shared_experts; e++) {
        for (uint32_t c = 0; c < (o->copies != 0 ? o->copies : 1); c++) {
            h->owners[e] |= 1u << ((e + c) % o->nodes_count);
        }
    }
    start_nodes(h, o, id);
    ep_client_config_init(&config);
    config.chunk_bytes_max = o->chunk_bytes_max != 0 ? o->chunk_bytes_max : config.chunk_bytes_max;
    config.prefill_window_tokens = o->window_tokens;
    config.buffer_bytes_max =
        o->buffer_bytes_max != 0 ? o->buffer_bytes_max : config.buffer_bytes_max;
    config.numerics = o->numerics;
    if (o->coordinator) {
        char url[128];
        snprintf(url, sizeof(url),
                 strcmp(o->scheme, "tcp") == 0 ? "tcp://127.0.0.1:0"
                                               : "loopback://%llx-coordinator",
                 (unsigned long long)id);
        h->coordinator = fake_coordinator_start(url);
        harness_publish(h);
        config.coordinator_url = fake_coordinator_url(h->coordinator);
    } else {
        config.node_urls = h->urls;
        config.node_urls_count = h->nodes_count;
    }
    must(ep_client_create(&config, &h->client, &error), &error, "client");
    if (!o->no_wait) {
        must(ep_client_wait_ready(h->client, 20 * 1000 * 1000, &error), &error, "ready");
    }
}

void harness_close(harness *h)
{
    ep_client_destroy(h->client);
    fake_coordinator_stop(h->coordinator);
    for (uint32_t n = 0; n < h->nodes_count; n++) {
        fake_node_stop(h->nodes[n]);
        free((void *)(uintptr_t)h->urls[n]);
    }
    ep_transport_fini();
    *h = (harness){0};
}

/* ---- batches ---- */

static float random_value(uint64_t *state)
{
    return (float)((double)(ep_splitmix64(state) >> 40) / (double)(1 << 23) - 1.0);
}

static void fill(batch *b, const harness *h, uint64_t seed)
{
    uint64_t state = seed;
    size_t element = ep_dtype_bytes(b->x_dtype);
    for (size_t i = 0; i < (size_t)b->tokens * b->hidden; i++) {
        float value = random_value(&state);
        ep_row_narrow(&value, 1, b->x_dtype, b->x + i * element);
    }
    for (uint32_t t = 0; t < b->tokens; t++) {
        for (uint32_t k = 0; k < b->top_k; k++) {
            int32_t id;
            bool again;
            do {
                id = (int32_t)(ep_splitmix64(&state) % h->shape.experts);
                again = false;
                for (uint32_t j = 0; j < k; j++) {
                    again = again || b->ids[t * b->top_k + j] == id;
                }
            } while (again);
            b->ids[t * b->top_k + k] = id;
            b->scales[t * b->top_k + k] = random_value(&state);
        }
    }
}

void batch_make(batch *b, const harness *h, uint32_t tokens, uint32_t top_k, uint64_t seed)
{
    *b = (batch){.tokens = tokens,
                 .top_k = top_k,
                 .hidden = h->shape.hidden,
                 .x_dtype = EP_DTYPE_BF16,
                 .out_dtype = EP_DTYPE_BF16};
    size_t slots = (size_t)tokens * top_k + 1;
    b->out_bytes = (size_t)tokens * b->hidden * 2;
    b->x = calloc((size_t)tokens * b->hidden + 1, 4);
    b->ids = calloc(slots, sizeof(*b->ids));
    b->scales = calloc(slots, sizeof(*b->scales));
    b->out = malloc(b->out_bytes + 1);
    b->expected = malloc(b->out_bytes + 1);
    memset(b->out, UNTOUCHED, b->out_bytes);
    fill(b, h, seed);
    ep_moe_args_init(&b->args);
    b->args.model = FAKE_MODEL;
    b->args.layer = FAKE_LAYER;
    b->args.x = ep_tensor_2d(b->x, b->x_dtype, tokens, b->hidden);
    b->args.expert_ids = ep_tensor_2d(b->ids, EP_DTYPE_I32, tokens, top_k);
    b->args.expert_scales = ep_tensor_2d(b->scales, EP_DTYPE_F32, tokens, top_k);
    b->args.deadline_us = 20 * 1000 * 1000;
    b->out_tensor = ep_tensor_2d(b->out, b->out_dtype, tokens, b->hidden);
    batch_expect(b, h);
}

void batch_free(batch *b)
{
    free(b->x);
    free(b->ids);
    free(b->scales);
    free(b->out);
    free(b->expected);
    *b = (batch){0};
}

static void add_row(uint32_t expert, const float *x, float scale, uint32_t hidden, float *acc)
{
    uint16_t *row = malloc(hidden * sizeof(*row));
    fake_expert(expert, x, hidden, EP_DTYPE_BF16, row);
    for (uint32_t i = 0; i < hidden; i++) {
        float product = scale * ep_bf16_to_f32(row[i]);
        acc[i] = acc[i] + product;
    }
    free(row);
}

void batch_expect(batch *b, const harness *h)
{
    float *x = malloc(b->hidden * sizeof(*x));
    float *acc = malloc(b->hidden * sizeof(*acc));
    for (uint32_t t = 0; t < b->tokens; t++) {
        ep_row_widen(b->x + (size_t)t * b->hidden * ep_dtype_bytes(b->x_dtype), b->x_dtype,
                     b->hidden, x);
        memset(acc, 0, b->hidden * sizeof(*acc));
        for (uint32_t k = 0; k < b->top_k; k++) {
            int32_t id = b->ids[t * b->top_k + k];
            if (id >= 0 && id < (int32_t)h->shape.experts) {
                add_row((uint32_t)id, x, b->scales[t * b->top_k + k], b->hidden, acc);
            }
        }
        for (uint32_t s = 0; s < h->shape.shared_experts; s++) {
            add_row(h->shape.experts + s, x, 1.0f, b->hidden, acc);
        }
        ep_row_narrow(acc, b->hidden, b->out_dtype,
                      b->expected + (size_t)t * b->hidden * ep_dtype_bytes(b->out_dtype));
    }
    free(x);
    free(acc);
}

bool batch_equal(const batch *b)
{
    for (size_t i = 0; i < b->out_bytes; i++) {
        if (b->out[i] != b->expected[i]) {
            fprintf(stderr, "byte %zu of token %zu differs\n", i,
                    i / (b->hidden * ep_dtype_bytes(b->out_dtype)));
            return false;
        }
    }
    return true;
}

bool batch_untouched(const batch *b)
{
    for (size_t i = 0; i < b->out_bytes; i++) {
        if (b->out[i] != UNTOUCHED) {
            return false;
        }
    }
    return true;
}
