/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The random checkpoints of this test: written to disk for the nodes, and read again by the
 * oracle's own reader. Both depend on the seed alone.
 */
#ifndef PROPERTY_MODELS_H
#define PROPERTY_MODELS_H

#include "reference_layer.h"
#include "support/checkpoint_fixture.h"

/* Where a case runs: nodes of this process, or daemons. Each has its numerics family. */
enum { PLACE_LOCAL, PLACE_DAEMONS, PLACES_COUNT };

enum { MODELS_COUNT = 16, MODEL_LAYERS_MAX = 4, MODEL_NAME_BYTES = 16 };

typedef struct test_model {
    char name[MODEL_NAME_BYTES];
    char path[EP_FIXTURE_PATH_BYTES + 32];
    ep_fixture_config config;
    uint32_t layers_count; /* MoE layers */
    uint32_t layer_numbers[MODEL_LAYERS_MAX];
    /* the oracle's, in the family of each place; no special experts */
    struct ref_layer layers[PLACES_COUNT][MODEL_LAYERS_MAX];
} test_model;

/* Writes all checkpoints below dir and loads them. False with the reason on stderr. */
bool test_models_create(uint64_t seed, const char *dir,
                        const enum ref_family families[PLACES_COUNT],
                        test_model models[MODELS_COUNT]);
void test_models_destroy(test_model models[MODELS_COUNT]);

#endif
