/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/live_table.h"

#include <math.h>
#include <string.h>

#include "base/clock.h"
#include "base/random.h"
#include "bench/live_log.h"
#include "call/client_core.h"
#include "placement/balance.h"
#include "ref_checkpoint.h"
#include "support/cluster.h"

#define LOOK_NS (5 * EP_NS_PER_MS)

bool live_table_is(ep_client *client, live_table_test test, void *arg)
{
    ep_view *view = ep_cluster_acquire_view(client->cluster);
    EP_TEST_CHECK(view != NULL, "no table");
    const bool is = test(view->table, arg);
    ep_view_unref(view);
    return is;
}

uint64_t live_table_wait(ep_client *client, const char *what, live_table_test test, void *arg)
{
    const uint64_t end_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    while (!live_table_is(client, test, arg)) {
        EP_TEST_CHECK(ep_clock_now_ns() < end_ns, "not within a minute: %s", what);
        live_sleep_until(ep_clock_now_ns() + LOOK_NS);
    }
    return ep_clock_now_ns();
}

static bool read_epoch(const ep_routing_table *table, void *arg)
{
    *(ep_epoch *)arg = table->epoch;
    return true;
}

ep_epoch live_table_epoch(ep_client *client)
{
    ep_epoch epoch;
    live_table_is(client, read_epoch, &epoch);
    return epoch;
}

static bool nodes_have(const ep_routing_layer *layer, uint32_t nodes, uint32_t copies_min)
{
    uint32_t counts[EP_TEST_NODES_MAX] = {0};
    bool good = nodes <= EP_TEST_NODES_MAX;
    for (uint32_t c = 0; good && c < layer->offsets[layer->shape.experts]; c++) {
        counts[layer->copies[c]]++;
    }
    for (uint32_t n = 0; n < nodes; n++) {
        good = good && counts[n] >= copies_min;
    }
    return good;
}

bool live_table_has_copies(const ep_routing_table *table, void *arg)
{
    const live_copies *wanted = arg;
    bool good =
        ep_epoch_compare(table->epoch, wanted->after) > 0 && table->nodes_count == wanted->nodes;
    good = good && table->layers_count > 0;
    for (uint32_t l = 0; good && l < table->layers_count; l++) {
        const ep_routing_layer *layer = &table->layers[l];
        good = nodes_have(layer, table->nodes_count, wanted->node_copies_min);
        for (uint32_t e = 0; e < layer->shape.experts; e++) {
            good = good && layer->offsets[e + 1] - layer->offsets[e] >= wanted->copies_min;
        }
    }
    return good;
}

bool live_table_is_balanced(const ep_routing_table *table, void *arg)
{
    live_balance *c = arg;
    double speeds[EP_TEST_NODES_MAX];
    uint32_t slots[EP_TEST_NODES_MAX];
    ep_balance *b = NULL;
    const ep_routing_layer *layer = &table->layers[0];
    const uint32_t experts = layer->shape.experts;
    for (uint32_t n = 0; n < EP_TEST_NODES_MAX; n++) {
        speeds[n] = 1;
        slots[n] = experts;
    }
    ep_balance_input in = {.experts = experts,
                           .nodes = table->nodes_count,
                           .heat = c->heat,
                           .speeds = speeds,
                           .slots = slots,
                           .copies_min = 1,
                           .copies_total = layer->offsets[experts]};
    if (table->nodes_count != c->nodes || ep_balance_create(&in, &b, NULL) != EP_OK) {
        return false; /* an expert has no copy just now */
    }
    for (uint32_t e = 0; e < experts; e++) {
        for (uint32_t i = layer->offsets[e]; i < layer->offsets[e + 1]; i++) {
            ep_balance_put(b, e, layer->copies[i]);
        }
    }
    c->ratio = ep_balance_busiest(b) / ep_balance_bound(&in, true);
    ep_balance_destroy(b);
    return c->ratio <= c->good;
}

void live_batches_init(ep_test_batch *out, uint32_t count, const char *path, const char *model,
                       uint32_t tokens, const int32_t *hot)
{
    struct ref_checkpoint checkpoint;
    struct ref_layer reference;
    ref_checkpoint_open(path, &checkpoint);
    ref_layer_load(&checkpoint, 0, &reference);
    for (uint32_t b = 0; b < count; b++) {
        ep_test_batch_init(&out[b], &reference, model, 0, tokens, LIVE_TOP_K, tokens + b,
                           hot != NULL ? hot + b * LIVE_TOP_K : NULL, LIVE_TOP_K);
    }
    ref_layer_free(&reference);
    ref_checkpoint_close(&checkpoint);
}

void live_batches_fini(ep_test_batch *batches, uint32_t count)
{
    for (uint32_t b = 0; b < count; b++) {
        ep_test_batch_fini(&batches[b]);
    }
}

static uint32_t draw(const double *weights, uint32_t count, uint64_t *random)
{
    double sum = 0;
    for (uint32_t e = 0; e < count; e++) {
        sum += weights[e];
    }
    double point = (double)(ep_splitmix64(random) >> 11) * 0x1p-53 * sum;
    uint32_t e = 0;
    while (e + 1 < count && (point -= weights[e]) >= 0) {
        e++;
    }
    return e;
}

void live_draw_zipf(double exponent, uint32_t experts, uint32_t batches, int32_t *out_hot,
                    double *out_heat)
{
    uint64_t random = 7;
    memset(out_heat, 0, experts * sizeof(*out_heat));
    for (uint32_t b = 0; b < batches; b++) {
        double weights[LIVE_EXPERTS_MAX];
        for (uint32_t e = 0; e < experts; e++) {
            weights[e] = pow(e + 1, -exponent);
        }
        for (uint32_t k = 0; k < LIVE_TOP_K; k++) {
            const uint32_t e = draw(weights, experts, &random);
            out_hot[b * LIVE_TOP_K + k] = (int32_t)e;
            weights[e] = 0;
            out_heat[e] += 1;
        }
    }
}
