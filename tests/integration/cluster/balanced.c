/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Placement by heat over real daemons: most tokens want two of eight experts, these get more
 * copies, and when the load turns to two others, the copies follow. Meanwhile each node's speed
 * becomes known. Calls go on all the time; none fails and every bit is the oracle's.
 */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref_checkpoint.h"
#include "support/cluster.h"
#include "support/load.h"

enum { NODES = 4, TOKENS = 64, TOP_K = 2, BATCHES = 5, CALLS_IN_FLIGHT = 8, EXPERTS = 8 };

static ep_test_cluster cluster;

static void make_batches(const char *path, const int32_t hot[TOP_K], uint64_t seed,
                         ep_test_batch *out)
{
    struct ref_checkpoint checkpoint;
    struct ref_layer reference;
    ref_checkpoint_open(path, &checkpoint);
    ref_layer_load(&checkpoint, 0, &reference);
    for (uint32_t b = 0; b < BATCHES; b++) { /* the last one wants any */
        ep_test_batch_init(&out[b], &reference, "demo", 0, TOKENS, TOP_K, seed + b,
                           b + 1 < BATCHES ? hot : NULL, TOP_K);
    }
    ref_layer_free(&reference);
    ref_checkpoint_close(&checkpoint);
}

/* Copies of each expert of layer 0 in the table that clients see. */
static void read_copies(size_t out_copies[EXPERTS])
{
    char *output = NULL;
    EP_TEST_CHECK(ep_test_cluster_ctl(&cluster, &output, "table -o json") == 0, "%s", output);
    json_t *table = json_loads(output, 0, NULL);
    const json_t *experts =
        json_object_get(json_array_get(json_object_get(table, "layers"), 0), "nodes_of_expert");
    EP_TEST_CHECK(json_array_size(experts) == EXPERTS, "no placement in: %s", output);
    for (size_t e = 0; e < EXPERTS; e++) {
        out_copies[e] = json_array_size(json_array_get(experts, e));
        EP_TEST_CHECK(out_copies[e] >= 1, "expert %zu has no copy", e);
    }
    json_decref(table);
    free(output);
}

/* Every node's speed against the median one, as an operator sees it. */
static bool knows_speeds(void)
{
    char *output = NULL;
    (void)ep_test_cluster_ctl(&cluster, &output, "status -o json"); /* healthy or not */
    json_t *status = json_loads(output, 0, NULL);
    const json_t *nodes = json_object_get(status, "nodes");
    size_t known = 0;
    for (size_t n = 0; n < json_array_size(nodes); n++) {
        double speed = json_real_value(json_object_get(json_array_get(nodes, n), "speed"));
        EP_TEST_CHECK(speed >= 0 && speed < 1e6, "%s", output);
        known += speed > 0;
    }
    json_decref(status);
    free(output);
    return known == NODES;
}

/* Calls until both experts have a copy more than they were given for being there. */
static void load_until_copied(ep_client *client, const ep_test_batch *batches,
                              const int32_t hot[TOP_K])
{
    size_t copies[EXPERTS];
    ep_test_load_counts counts;
    ep_test_load *load = ep_test_load_start(
        &(ep_test_load_config){.client = client,
                               .batches = batches,
                               .batches_count = BATCHES,
                               .calls_in_flight = CALLS_IN_FLIGHT,
                               .deadline_us = (uint64_t)EP_TEST_PATIENCE_MS * 1000});
    do {
        ep_test_load_wait_succeeded(load, 20);
        ep_test_load_read(load, &counts);
        read_copies(copies);
        EP_TEST_CHECK(counts.succeeded < 2000000, "experts %d and %d have %zu and %zu copies",
                      hot[0], hot[1], copies[hot[0]], copies[hot[1]]);
    } while (copies[hot[0]] < 2 || copies[hot[1]] < 2 || !knows_speeds());
    ep_test_load_wait_succeeded(load, 200); /* with the new table too */
    ep_test_load_stop(load, &counts);
    EP_TEST_CHECK(counts.failed == 0, "%llu calls failed", (unsigned long long)counts.failed);
    printf("experts %d and %d have %zu and %zu copies after %llu calls, none failed\n", hot[0],
           hot[1], copies[hot[0]], copies[hot[1]], (unsigned long long)counts.succeeded);
}

int main(void)
{
    static const int32_t first[TOP_K] = {3, 5}, second[TOP_K] = {0, 6};
    static const char *const balanced[] = {"--placement=balanced", "--spare-copies=4", NULL};
    static ep_test_batch before[BATCHES], after[BATCHES];
    char path[EP_TEST_PATH_BYTES];
    ep_fixture_config config = ep_fixture_default();
    ep_test_checkpoint_new(&config, path);
    const ep_test_model model = {"demo", path};
    make_batches(path, first, 1, before);
    make_batches(path, second, 100, after);
    ep_test_cluster_start(&cluster, &(ep_test_cluster_options){.nodes_count = NODES,
                                                               .models = &model,
                                                               .models_count = 1,
                                                               .coordinator_args = balanced});
    ep_client *client = ep_test_cluster_client(&cluster, NULL);
    load_until_copied(client, before, first);
    load_until_copied(client, after, second);
    ep_client_destroy(client);
    ep_test_cluster_expect_alive(&cluster);
    ep_test_cluster_stop(&cluster);
    for (uint32_t b = 0; b < BATCHES; b++) {
        ep_test_batch_fini(&before[b]);
        ep_test_batch_fini(&after[b]);
    }
    ep_test_dir_remove(path);
    return 0;
}
