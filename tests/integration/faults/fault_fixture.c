/* SPDX-License-Identifier: Apache-2.0 */
#include "fault_fixture.h"

#include <stdio.h>

#include "base/check.h"
#include "ref_checkpoint.h"

enum {
    HIDDEN = FAULT_HIDDEN,
    INNER = FAULT_INNER,
    EXPERTS = FAULT_EXPERTS,
    TOP_K = 2,
    TOKENS = 48
};

#define LAYER(id)                                                                                  \
    "{\"layer_id\":" #id                                                                           \
    ",\"device_count\":3,\"device_list\":[{\"device_id\":0,\"device_expert\":[0,1,2]},"            \
    "{\"device_id\":1,\"device_expert\":[3,4,5]},{\"device_id\":2,\"device_expert\":[6,7]}]}"
const char fault_map[] = "{\"moe_layer_count\":2,\"layer_list\":[" LAYER(0) "," LAYER(1) "]}";

static const int32_t victim_experts[] = {3, 4, 5};
static const int32_t other_experts[] = {0, 1, 2, 6, 7};

static void make_model(fault_fixture *f)
{
    ep_fixture_config config = ep_fixture_default();
    config.hidden = HIDDEN;
    config.inner = INNER;
    config.experts = EXPERTS;
    config.layers = FAULT_LAYERS;
    ep_test_checkpoint_new(&config, f->model_path);
    f->model = (ep_test_model){"demo", f->model_path};
    fault_fixture_load_batches(f);
}

void fault_fixture_load_batches(fault_fixture *f)
{
    static struct ref_checkpoint checkpoint;
    ref_checkpoint_open(f->model_path, &checkpoint);
    for (uint32_t layer = 0; layer < FAULT_LAYERS; layer++) {
        struct ref_layer reference;
        ref_layer_load(&checkpoint, layer, &reference);
        for (uint32_t b = 0; b < FAULT_BATCHES; b++) {
            uint32_t i = layer * FAULT_BATCHES + b;
            ep_test_batch_init(&f->all[i], &reference, "demo", layer, TOKENS + b, TOP_K, 3 * i,
                               NULL, 0);
            ep_test_batch_init(&f->victims[i], &reference, "demo", layer, TOKENS + b, TOP_K,
                               3 * i + 1, victim_experts, EP_ARRAY_COUNT(victim_experts));
            ep_test_batch_init(&f->others[i], &reference, "demo", layer, TOKENS + b, TOP_K,
                               3 * i + 2, other_experts, EP_ARRAY_COUNT(other_experts));
        }
        ref_layer_free(&reference);
    }
    ref_checkpoint_close(&checkpoint);
}

void fault_fixture_init_cluster(fault_fixture *f, const ep_test_cluster_options *options)
{
    make_model(f);
    ep_test_cluster_options all = *options;
    all.models = &f->model;
    all.models_count = 1;
    ep_test_cluster_start(&f->cluster, &all);
}

void fault_fixture_init_options(fault_fixture *f, const ep_test_cluster_options *options)
{
    fault_fixture_init_cluster(f, options);
    f->client = ep_test_cluster_client(&f->cluster, NULL);
}

void fault_fixture_init(fault_fixture *f, const char *map, uint32_t copies)
{
    fault_fixture_init_options(f, &(ep_test_cluster_options){.nodes_count = FAULT_NODES,
                                                             .copies = copies,
                                                             .expert_map = map});
}

void fault_fixture_fini(fault_fixture *f)
{
    ep_client_destroy(f->client);
    ep_test_cluster_stop(&f->cluster);
    fault_fixture_free_batches(f);
    ep_test_dir_remove(f->model_path);
}

void fault_fixture_free_batches(fault_fixture *f)
{
    for (uint32_t i = 0; i < FAULT_LAYERS * FAULT_BATCHES; i++) {
        ep_test_batch_fini(&f->all[i]);
        ep_test_batch_fini(&f->victims[i]);
        ep_test_batch_fini(&f->others[i]);
    }
}

ep_test_load *fault_load(fault_fixture *f, const ep_test_batch *batches, uint32_t calls_in_flight,
                         uint64_t deadline_us, ep_test_failure_func on_failure, void *arg)
{
    return ep_test_load_start(&(ep_test_load_config){.client = f->client,
                                                     .batches = batches,
                                                     .batches_count = FAULT_LAYERS * FAULT_BATCHES,
                                                     .calls_in_flight = calls_in_flight,
                                                     .deadline_us = deadline_us,
                                                     .on_failure = on_failure,
                                                     .arg = arg});
}

void fault_report(const char *fault, uint32_t in_flight, uint64_t victim_in_flight,
                  uint64_t finished_after)
{
    printf("%s: at the fault %u calls in flight, %llu of their requests at the victim; %llu calls "
           "finished "
           "afterwards\n",
           fault, in_flight, (unsigned long long)victim_in_flight,
           (unsigned long long)finished_after);
    EP_TEST_CHECK(in_flight >= FAULT_IN_FLIGHT_MIN && victim_in_flight > 0 &&
                      finished_after >= FAULT_FINISHED_AFTER_MIN,
                  "void: at least %d calls in flight, 1 at the victim and %u afterwards are needed",
                  FAULT_IN_FLIGHT_MIN, FAULT_FINISHED_AFTER_MIN);
}
