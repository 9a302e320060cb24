/* SPDX-License-Identifier: Apache-2.0 */
/* Placement snapshots. An accepted one, encoded and decoded again, is the same table. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "proto_mutator.h"
#include "wire/placement_codec.h"

#define EXPERTS 6

static size_t mutate(uint8_t *data, size_t bytes, size_t bytes_max, uint32_t random)
{
    return proto_mutate(&expertd__v1__placement_snapshot__descriptor, data, bytes, bytes_max,
                        random);
}

size_t (*const fuzz_mutate)(uint8_t *, size_t, size_t, uint32_t) = mutate;

static ep_routing_table *make_table(uint32_t nodes, uint32_t layers, uint32_t copies)
{
    ep_routing_table *table;
    FUZZ_CHECK(ep_routing_table_create(nodes, 1, layers, &table) == EP_OK);
    table->epoch = (ep_epoch){3, 17};
    snprintf(table->policy, sizeof(table->policy), "uniform");
    table->decode_tokens_max = 256;
    table->caller_policy = (ep_caller_policy){.revision = layers, .has_hedge_permille = layers > 1};
    table->caller_policy.hedge_permille = layers > 1 ? 30 : 0;
    for (uint32_t n = 0; n < nodes; n++) {
        table->nodes[n].node_id = n + 1;
        snprintf(table->nodes[n].name, sizeof(table->nodes[n].name), "node%u", n);
        snprintf(table->nodes[n].url, sizeof(table->nodes[n].url), "tcp://127.0.0.1:%u", 7000 + n);
    }
    FUZZ_CHECK(ep_routing_table_model_init(table, 0, "demo", "v1", 1) == EP_OK);
    snprintf(table->models[0].numerics[0], EP_NUMERICS_BYTES, "portable");
    for (uint32_t n = 0; n < nodes; n++) {
        table->models[0].numerics_of_node[n] = 0;
    }
    for (uint32_t l = 0; l < layers; l++) {
        ep_layer_shape shape = {
            .layer = l, .hidden = 8, .inner = 16, .experts = EXPERTS, .top_k = 2};
        FUZZ_CHECK(ep_routing_table_layer_init(table, l, 0, &shape, EXPERTS * copies) == EP_OK);
        for (uint32_t e = 0; e < EXPERTS; e++) {
            table->layers[l].offsets[e + 1] = (e + 1) * copies;
            for (uint32_t c = 0; c < copies; c++) {
                table->layers[l].copies[e * copies + c] = (e + c) % nodes;
            }
        }
    }
    return table;
}

size_t fuzz_seed(size_t index, uint8_t *out)
{
    if (index >= 6) {
        return 0;
    }
    uint32_t nodes = 1 + (uint32_t)index;
    ep_routing_table *table = make_table(nodes, (uint32_t)index % 3, index >= 2 ? 2 : 1);
    Expertd__V1__PlacementSnapshot *snapshot;
    FUZZ_CHECK(ep_placement_encode(table, &snapshot) == EP_OK);
    size_t bytes = expertd__v1__placement_snapshot__pack(snapshot, out);
    ep_placement_snapshot_free(snapshot);
    ep_routing_table_unref(table);
    return bytes;
}

static void check_round_trip(ep_routing_table *table)
{
    Expertd__V1__PlacementSnapshot *snapshot;
    ep_routing_table *again;
    ep_error error;
    FUZZ_CHECK(ep_routing_table_check(table, &error) == EP_OK);
    FUZZ_CHECK(ep_placement_encode(table, &snapshot) == EP_OK);
    FUZZ_CHECK(ep_placement_decode(snapshot, &again, &error) == EP_OK);
    FUZZ_CHECK(ep_routing_table_policy_checksum(table) == ep_routing_table_policy_checksum(again));
    FUZZ_CHECK(ep_epoch_compare(table->epoch, again->epoch) == 0);
    ep_routing_table_unref(again);
    ep_placement_snapshot_free(snapshot);
}

void fuzz_one(const uint8_t *data, size_t bytes)
{
    ep_routing_table *table;
    ep_error error;
    Expertd__V1__PlacementSnapshot *snapshot =
        expertd__v1__placement_snapshot__unpack(NULL, bytes, data);
    if (snapshot == NULL) {
        return;
    }
    /* Checksums that fit, the table's and then the policy's, or a mutated table would never pass
     * them. */
    ep_err err = ep_placement_decode(snapshot, &table, &error);
    for (int checksums = 0; err != EP_OK && checksums < 2; checksums++) {
        FUZZ_CHECK(error.text[0] != 0);
        unsigned long long need;
        const char *at = strstr(error.text, "content gives ");
        if (at != NULL && sscanf(at, "content gives %llx", &need) == 1) {
            const bool is_policy = strstr(error.text, "snapshot's policy") != NULL;
            *(is_policy ? &snapshot->caller_policy->checksum : &snapshot->checksum) = need;
            err = ep_placement_decode(snapshot, &table, &error);
        }
    }
    if (err == EP_OK) {
        check_round_trip(table);
        ep_routing_table_unref(table);
    }
    expertd__v1__placement_snapshot__free_unpacked(snapshot, NULL);
}
