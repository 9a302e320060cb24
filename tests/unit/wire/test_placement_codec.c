/* SPDX-License-Identifier: Apache-2.0 */
/* Tables go to the wire and back unchanged; damaged snapshots are refused, never trusted. */
#include "support/expect.h"
#include "wire/placement_codec.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"

static uint32_t below(uint64_t *state, uint32_t bound)
{
    return (uint32_t)((ep_splitmix64(state) >> 33) % bound);
}

static void random_model(ep_routing_table *table, uint32_t index, uint64_t *state)
{
    char name[32];
    uint32_t numerics = 1 + below(state, table->nodes_count);
    snprintf(name, sizeof(name), "model-%u", index / 2);
    cr_assert_eq(ep_routing_table_model_init(table, index, name, index % 2 ? "b" : "a", numerics),
                 EP_OK);
    /* the first, the second, or none of a name */
    table->models[index].is_default = index % 2 == index / 2 % 3;
    for (uint32_t i = 0; i < numerics; i++) {
        snprintf(table->models[index].numerics[i], EP_NUMERICS_BYTES, "portable-%u", i);
    }
    for (uint32_t n = 0; n < table->nodes_count; n++) {
        table->models[index].numerics_of_node[n] =
            n > 0 && below(state, 4) == 0 ? UINT32_MAX : below(state, numerics);
    }
}

static void random_layer(ep_routing_table *table, uint32_t index, uint32_t model, uint64_t *state)
{
    const uint32_t *served = table->models[model].numerics_of_node;
    ep_layer_shape shape = {.layer = index * 2,
                            .hidden = 8,
                            .inner = 16,
                            .experts = 1 + below(state, 9),
                            .shared_experts = below(state, 3),
                            .top_k = 2,
                            .form_told = index % 2 == 0};
    if (shape.form_told) {
        shape.shared_inner = below(state, 99);
        shape.numbers = (ep_activation_numbers){1.702f, (float)below(state, 9), 0.1f};
    }
    uint32_t experts = shape.experts + shape.shared_experts;
    uint32_t copies[16 * 8];
    uint32_t offsets[17] = {0};
    for (uint32_t e = 0; e < experts; e++) {
        offsets[e + 1] = offsets[e];
        for (uint32_t n = 0; n < table->nodes_count; n++) {
            if (served[n] != UINT32_MAX && below(state, 2) == 0) {
                copies[offsets[e + 1]++] = n;
            }
        }
    }
    cr_assert_eq(ep_routing_table_layer_init(table, index, model, &shape, offsets[experts]), EP_OK);
    memcpy(table->layers[index].offsets, offsets, (experts + 1) * sizeof(offsets[0]));
    memcpy(table->layers[index].copies, copies, offsets[experts] * sizeof(copies[0]));
}

static ep_routing_table *random_table(uint64_t seed)
{
    uint64_t state = seed;
    ep_routing_table *table;
    uint32_t models = below(&state, 4);
    uint32_t layers = models == 0 ? 0 : below(&state, 6);
    cr_assert_eq(ep_routing_table_create(1 + below(&state, 6), models, layers, &table), EP_OK);
    table->epoch = (ep_epoch){below(&state, 3), below(&state, 1000)};
    table->decode_tokens_max = below(&state, 500);
    if (below(&state, 2) == 0) {
        table->caller_policy = (ep_caller_policy){.revision = 1 + below(&state, 9),
                                                  .has_hedge_permille = below(&state, 2) == 0};
        table->caller_policy.hedge_permille =
            table->caller_policy.has_hedge_permille ? below(&state, 1001) : 0;
        table->caller_policy.decode_nodes_min = below(&state, 2) * below(&state, 100);
    }
    strcpy(table->policy, below(&state, 2) ? "uniform" : "");
    for (uint32_t n = 0; n < table->nodes_count; n++) {
        table->nodes[n].node_id = 1000 - 7 * n; /* ids are not indexes, and not ascending */
        snprintf(table->nodes[n].name, EP_NODE_NAME_BYTES, "n%u", n);
        snprintf(table->nodes[n].url, EP_URL_BYTES, "tcp://10.0.0.%u:1", n);
        snprintf(table->nodes[n].host, EP_HOST_BYTES, "%.*s", (int)below(&state, 6), "rack-7");
    }
    for (uint32_t m = 0; m < models; m++) {
        random_model(table, m, &state);
    }
    for (uint32_t l = 0; l < layers; l++) {
        random_layer(table, l, l * models / layers, &state);
    }
    return table;
}

/* Through real bytes, as between processes. */
static uint8_t *to_bytes(const ep_routing_table *table, size_t *out_bytes)
{
    Expertd__V1__PlacementSnapshot *snapshot;
    cr_assert_eq(ep_placement_encode(table, &snapshot), EP_OK);
    *out_bytes = expertd__v1__placement_snapshot__get_packed_size(snapshot);
    uint8_t *bytes = malloc(*out_bytes + 1);
    expertd__v1__placement_snapshot__pack(snapshot, bytes);
    ep_placement_snapshot_free(snapshot);
    return bytes;
}

static void check_equal(const ep_routing_table *a, const ep_routing_table *b)
{
    cr_assert_eq(ep_routing_table_checksum(a), ep_routing_table_checksum(b));
    cr_assert_eq(ep_routing_table_policy_checksum(a), ep_routing_table_policy_checksum(b));
    cr_assert_eq(a->caller_policy.decode_nodes_min, b->caller_policy.decode_nodes_min);
    cr_assert_eq(a->nodes_count, b->nodes_count);
    cr_assert_eq(memcmp(a->nodes, b->nodes, a->nodes_count * sizeof(*a->nodes)), 0);
    cr_assert_eq(a->models_count, b->models_count);
    for (uint32_t m = 0; m < a->models_count; m++) {
        cr_assert_eq(a->models[m].is_default, b->models[m].is_default, "model %u", m);
    }
    cr_assert_eq(a->layers_count, b->layers_count);
    for (uint32_t l = 0; l < a->layers_count; l++) {
        const ep_routing_layer *x = &a->layers[l];
        const ep_routing_layer *y = &b->layers[l];
        uint32_t experts = x->shape.experts + x->shape.shared_experts;
        cr_assert_eq(memcmp(&x->shape, &y->shape, offsetof(ep_layer_shape, form_told)), 0);
        cr_assert_eq(x->shape.form_told, y->shape.form_told);
        cr_assert_eq(x->shape.shared_inner, y->shape.shared_inner);
        cr_assert_eq(memcmp(&x->shape.numbers, &y->shape.numbers, sizeof(x->shape.numbers)), 0);
        cr_assert_eq(x->model_index, y->model_index);
        cr_assert_eq(memcmp(x->offsets, y->offsets, (experts + 1) * sizeof(uint32_t)), 0);
        cr_assert_eq(memcmp(x->copies, y->copies, x->offsets[experts] * sizeof(uint32_t)), 0);
    }
}

Test(placement_codec, random_tables_survive_the_round_trip)
{
    for (uint64_t seed = 0; seed < 1500; seed++) {
        ep_routing_table *table = random_table(seed);
        ep_routing_table *back;
        ep_error error = {0};
        size_t size;
        ASSERT_OK(ep_routing_table_check(table, &error), error);
        uint8_t *bytes = to_bytes(table, &size);
        Expertd__V1__PlacementSnapshot *snapshot =
            expertd__v1__placement_snapshot__unpack(NULL, size, bytes);
        cr_assert_not_null(snapshot);
        ASSERT_OK(ep_placement_decode(snapshot, &back, &error), error);
        check_equal(table, back);
        ep_placement_snapshot_free(snapshot);
        free(bytes);
        ep_routing_table_unref(table);
        ep_routing_table_unref(back);
    }
}

Test(placement_codec, two_defaults_of_a_name_are_refused)
{
    unsigned refused = 0;
    for (uint64_t seed = 0; seed < 100; seed++) {
        ep_routing_table *table = random_table(seed);
        ep_routing_table *back = NULL;
        ep_error error = {0};
        size_t size;
        if (table->models_count >= 2) {
            table->models[0].is_default = table->models[1].is_default = true;
            uint8_t *bytes = to_bytes(table, &size);
            Expertd__V1__PlacementSnapshot *snapshot =
                expertd__v1__placement_snapshot__unpack(NULL, size, bytes);
            cr_assert_eq(ep_placement_decode(snapshot, &back, &error), EP_ERR_INVALID_ARGUMENT);
            cr_assert_str_eq(error.text,
                             "model model-0 of the snapshot has two default versions: a and b");
            ep_placement_snapshot_free(snapshot);
            free(bytes);
            refused++;
        }
        ep_routing_table_unref(table);
    }
    cr_assert_gt(refused, 10u);
}

Test(placement_codec, damaged_bytes_are_refused_or_decode_to_a_table_that_passes)
{
    uint64_t state = 11;
    unsigned refused = 0;
    for (uint64_t seed = 0; seed < 300; seed++) {
        ep_routing_table *table = random_table(seed);
        size_t size;
        uint8_t *bytes = to_bytes(table, &size);
        for (int round = 0; round < 60; round++) {
            uint8_t *damaged = malloc(size + 1);
            memcpy(damaged, bytes, size);
            for (uint32_t i = 1 + below(&state, 3); i > 0; i--) {
                damaged[below(&state, (uint32_t)size)] = (uint8_t)ep_splitmix64(&state);
            }
            size_t length = below(&state, 4) == 0 ? below(&state, (uint32_t)size) : size;
            Expertd__V1__PlacementSnapshot *snapshot =
                expertd__v1__placement_snapshot__unpack(NULL, length, damaged);
            ep_routing_table *back = NULL;
            ep_error error = {0};
            if (snapshot != NULL) {
                snapshot->checksum = 0; /* the checks must hold by themselves */
                ep_err err = ep_placement_decode(snapshot, &back, &error);
                cr_assert(err != EP_OK && error.text[0] != '\0' && back == NULL);
                refused += err == EP_ERR_INVALID_ARGUMENT;
                ep_placement_snapshot_free(snapshot);
            }
            free(damaged);
        }
        free(bytes);
        ep_routing_table_unref(table);
    }
    cr_assert_gt(refused, 500u);
}

/* ---- each mistake by name ---- */

static Expertd__V1__PlacementSnapshot *good_snapshot(void)
{
    ep_routing_table *table;
    Expertd__V1__PlacementSnapshot *snapshot;
    cr_assert_eq(ep_routing_table_create(2, 1, 1, &table), EP_OK);
    for (uint32_t n = 0; n < 2; n++) {
        table->nodes[n].node_id = 5 + n;
        snprintf(table->nodes[n].name, EP_NODE_NAME_BYTES, "n%u", n);
        strcpy(table->nodes[n].url, "tcp://127.0.0.1:1");
        strcpy(table->nodes[n].host, "h");
    }
    cr_assert_eq(ep_routing_table_model_init(table, 0, "tiny", "v1", 1), EP_OK);
    strcpy(table->models[0].numerics[0], "portable");
    table->models[0].numerics_of_node[0] = 0;
    table->models[0].numerics_of_node[1] = 0;
    ep_layer_shape shape = {.layer = 1, .hidden = 4, .inner = 4, .experts = 2, .top_k = 1};
    cr_assert_eq(ep_routing_table_layer_init(table, 0, 0, &shape, 2), EP_OK);
    table->layers[0].offsets[1] = 1;
    table->layers[0].offsets[2] = 2;
    table->layers[0].copies[1] = 1;
    cr_assert_eq(ep_placement_encode(table, &snapshot), EP_OK);
    ep_routing_table_unref(table);
    return snapshot;
}

static void expect_refused(Expertd__V1__PlacementSnapshot *snapshot, ep_err code, const char *text)
{
    ep_routing_table *table = NULL;
    ep_error error = {0};
    cr_assert_eq(ep_placement_decode(snapshot, &table, &error), code, "expected: %s; found: %s",
                 text, error.text);
    ASSERT_TEXT(error, text);
    cr_assert_null(table);
    ep_placement_snapshot_free(snapshot);
}

static void set_text(char **field, const char *text)
{
    free(*field);
    *field = strdup(text);
}

Test(placement_codec, names_every_mistake)
{
    char longest[400];
    memset(longest, 'x', sizeof(longest) - 1);
    longest[sizeof(longest) - 1] = '\0';
    Expertd__V1__PlacementSnapshot *s;
#define REFUSED(change, text)                                                                      \
    s = good_snapshot();                                                                           \
    change;                                                                                        \
    expect_refused(s, EP_ERR_INVALID_ARGUMENT, text)
    REFUSED((free(s->epoch), s->epoch = NULL), "the snapshot has no epoch");
    REFUSED(set_text(&s->nodes[0]->name, longest),
            "a node's name of the snapshot has 399 characters: allowed up to 63");
    REFUSED(set_text(&s->nodes[0]->url, longest),
            "a node's url of the snapshot has 399 characters: allowed up to 255");
    REFUSED(set_text(&s->nodes[0]->host, longest),
            "a node's host of the snapshot has 399 characters: allowed up to 63");
    REFUSED(set_text(&s->models[0]->name, longest),
            "name or version of model 0 of the snapshot is too long");
    REFUSED(set_text(&s->models[0]->version, longest),
            "name or version of model 0 of the snapshot is too long");
    REFUSED(set_text(&s->models[0]->numerics[0], longest),
            "a numerics id of the snapshot has 399 characters");
    REFUSED(set_text(&s->layers[0]->version, "v9"),
            "layer 1 of the snapshot belongs to model tiny version 'v9', which is not listed");
    REFUSED(s->models[0]->node_ids[1] = 99,
            "model tiny of the snapshot is served by node id 99, which is not listed");
    REFUSED(s->models[0]->node_ids[1] = 5, "model tiny of the snapshot lists node id 5 twice");
    REFUSED(s->models[0]->n_node_ids = 1,
            "model tiny of the snapshot has 1 nodes and 2 numerics of nodes");
    REFUSED(s->models[0]->numerics_of_node[1] = 4,
            "model tiny, node n1: numerics index 4: the model has 1");
    REFUSED(s->layers[0]->node_ids[1] = 7,
            "model tiny, layer 1: a copy is on node id 7, which is not listed");
    REFUSED(s->layers[0]->n_offsets = 2, "model tiny, layer 1: 2 offsets: 2 experts need 3");
    REFUSED(s->layers[0]->experts = 65535,
            "model tiny, layer 1: 3 offsets: 65535 experts need 65536");
    REFUSED(s->layers[0]->experts = 0, "model tiny: layer 1: 0 experts: allowed 1..65535");
    REFUSED(s->layers[0]->offsets[2] = 3,
            "model tiny, layer 1: last offset 3: the layer lists 2 copies");
    REFUSED(s->layers[0]->offsets[1] = 4000000000u,
            "model tiny, layer 1, expert 1: offset 4000000000 is above the next one, 2");
    REFUSED(s->nodes[1]->node_id = 5, "which is not listed");
#undef REFUSED
    s = good_snapshot();
    s->checksum ^= 1;
    expect_refused(s, EP_ERR_DATA_LOSS, "checksum of the snapshot is");
    s = good_snapshot();
    s->epoch->number = 3;
    expect_refused(s, EP_ERR_DATA_LOSS, "checksum of the snapshot is");
}

/* ---- the policy ---- */

static Expertd__V1__PlacementSnapshot *with_policy(void)
{
    Expertd__V1__PlacementSnapshot *snapshot = good_snapshot();
    ep_routing_table *table;
    ep_error error;
    ASSERT_OK(ep_placement_decode(snapshot, &table, &error), error);
    ep_placement_snapshot_free(snapshot);
    table->caller_policy =
        (ep_caller_policy){.revision = 3, .has_hedge_permille = true, .hedge_permille = 7};
    cr_assert_eq(ep_placement_encode(table, &snapshot), EP_OK);
    ep_routing_table_unref(table);
    return snapshot;
}

/* A policy that another sender signed: only what is in it is wrong. */
static Expertd__V1__PlacementSnapshot *with_signed_policy(ep_caller_policy policy)
{
    Expertd__V1__PlacementSnapshot *snapshot = with_policy();
    ep_routing_table *table;
    ep_error error;
    ASSERT_OK(ep_placement_decode(snapshot, &table, &error), error);
    table->caller_policy = policy;
    snapshot->caller_policy->revision = policy.revision;
    snapshot->caller_policy->has_hedge_permille = policy.has_hedge_permille;
    snapshot->caller_policy->hedge_permille = policy.hedge_permille;
    snapshot->caller_policy->checksum = ep_routing_table_policy_checksum(table);
    snapshot->caller_policy->decode_nodes_min = policy.decode_nodes_min;
    snapshot->caller_policy->mode_checksum = ep_routing_table_mode_checksum(table);
    ep_routing_table_unref(table);
    return snapshot;
}

Test(placement_codec, a_damaged_policy_is_refused_with_its_table)
{
    Expertd__V1__PlacementSnapshot *s;
#define DAMAGED(change)                                                                            \
    do {                                                                                           \
        s = with_policy();                                                                         \
        change;                                                                                    \
        expect_refused(s, EP_ERR_DATA_LOSS, "checksum of the snapshot's policy is");               \
    } while (0)
    DAMAGED(s->caller_policy->revision = 4);
    DAMAGED(s->caller_policy->hedge_permille = 1000);
    DAMAGED(s->caller_policy->has_hedge_permille = false);
    DAMAGED(s->caller_policy->checksum ^= 1);
#undef DAMAGED
    s = with_policy();
    s->caller_policy->decode_nodes_min = 64;
    expect_refused(s, EP_ERR_DATA_LOSS, "checksum of the mode in the snapshot's policy is");
    s = with_policy();
    s->caller_policy->mode_checksum ^= 1;
    expect_refused(s, EP_ERR_DATA_LOSS, "checksum of the mode in the snapshot's policy is");
    expect_refused(
        with_signed_policy((ep_caller_policy){.revision = 1, .decode_nodes_min = UINT32_MAX}),
        EP_ERR_INVALID_ARGUMENT, "decode_nodes_min 4294967295: allowed 0..");
    expect_refused(with_signed_policy((ep_caller_policy){.revision = 0}), EP_ERR_INVALID_ARGUMENT,
                   "policy has revision 0: allowed 1 or more");
    expect_refused(with_signed_policy((ep_caller_policy){
                       .revision = 1, .has_hedge_permille = true, .hedge_permille = 1001}),
                   EP_ERR_INVALID_ARGUMENT, "hedge_permille 1001: allowed 0..1000");
    expect_refused(with_signed_policy((ep_caller_policy){.revision = 1, .hedge_permille = 5}),
                   EP_ERR_INVALID_ARGUMENT, "hedge_permille 5: allowed 0..0");
}

/* As builds write it that do not know the mode's part. */
Test(placement_codec, a_policy_without_its_mode_is_taken)
{
    Expertd__V1__PlacementSnapshot *s = with_policy();
    ep_routing_table *table;
    ep_error error;
    s->caller_policy->mode_checksum = 0;
    ASSERT_OK(ep_placement_decode(s, &table, &error), error);
    cr_assert_eq(table->caller_policy.hedge_permille, 7u);
    cr_assert_eq(table->caller_policy.decode_nodes_min, 0u);
    ep_routing_table_unref(table);
    ep_placement_snapshot_free(s);
}

Test(placement_codec, the_policy_of_another_table_does_not_fit)
{
    Expertd__V1__PlacementSnapshot *s = with_policy(), *other = good_snapshot();
    ep_routing_table *table;
    ep_error error;
    other->epoch->number++;
    cr_assert_eq(ep_placement_decode(s, &table, &error), EP_OK);
    table->epoch.number++;
    other->checksum = ep_routing_table_checksum(table);
    ep_routing_table_unref(table);
    other->caller_policy = s->caller_policy;
    s->caller_policy = NULL;
    ep_placement_snapshot_free(s);
    expect_refused(other, EP_ERR_DATA_LOSS, "checksum of the snapshot's policy is");
}

Test(placement_codec, builds_that_know_no_policy_find_the_same_checksum)
{
    Expertd__V1__PlacementSnapshot *s = with_policy(), *plain = good_snapshot();
    cr_assert_eq(s->checksum, plain->checksum);
    ep_placement_snapshot_free(s);
    ep_placement_snapshot_free(plain);
}
