/* SPDX-License-Identifier: Apache-2.0 */
/* Expert maps that do not fit the model, which is known when the nodes have registered: the
 * coordinator lives and says why there is no table. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/check.h"
#include "support/cluster.h"

#define DEVICE_EXPERTS(list) "{\"device_id\":0,\"device_expert\":[" list "]}"
#define ONE_LAYER(id, list)                                                                        \
    "{\"layer_id\":" #id ",\"device_count\":1,\"device_list\":[" DEVICE_EXPERTS(list) "]}"
#define TWO_LAYERS(first, second)                                                                  \
    "{\"moe_layer_count\":2,\"layer_list\":[" ONE_LAYER(0, first) "," ONE_LAYER(1, second) "]}"

static const struct {
    const char *name;
    const char *map;
    const char *part;
} map_cases[] = {
    {"7 experts for 8", TWO_LAYERS("0,1,2,3,4,5,6", "0,1,2,3,4,5,6,7"),
     "layer_id 0: routing table has 7 experts, model has 8"},
    {"9 experts for 8", TWO_LAYERS("0,1,2,3,4,5,6,7", "0,1,2,3,4,5,6,7,8"),
     "layer_id 1: routing table has 9 experts, model has 8"},
    {"a hole", TWO_LAYERS("0,1,2,4,5,6,7", "0,1,2,3,4,5,6,7"),
     "layer_id 0: expert 3 is on no device: every expert of 0..7 needs one"},
    {"a layer too few",
     "{\"moe_layer_count\":1,\"layer_list\":[" ONE_LAYER(0, "0,1,2,3,4,5,6,7") "]}",
     "moe_layer_count 1: the model has 2 MoE layers"},
    {"more devices than nodes",
     "{\"moe_layer_count\":2,\"layer_list\":[{\"layer_id\":0,\"device_count\":2,\"device_list\":"
     "[" DEVICE_EXPERTS("0,1,2,3,4,5,6,7") ",{\"device_id\":1,\"device_expert\":[]}]}," ONE_LAYER(
         1, "0,1,2,3,4,5,6,7") "]}",
     "device_count 2: the cluster has 1 nodes"},
};

/* The coordinator lives, says why there is no table, and a caller is told that there is none. */
static void run_map_case(const char *path, size_t index)
{
    const ep_test_model model = {"demo", path};
    ep_test_cluster cluster;
    Expertd__V1__Empty empty = EXPERTD__V1__EMPTY__INIT;
    char *output = NULL;
    ep_test_cluster_start(&cluster, &(ep_test_cluster_options){.nodes_count = 1,
                                                               .expert_map = map_cases[index].map,
                                                               .models = &model,
                                                               .models_count = 1});
    for (int asked = 0; output == NULL || strstr(output, map_cases[index].part) == NULL;
         asked++) { /* the node registers meanwhile */
        EP_TEST_CHECK(asked < 5000, "%s: not said: %s", map_cases[index].name,
                      map_cases[index].part);
        ProtobufCMessage *status =
            ep_test_cluster_call(&cluster, cluster.coordinator.rpc_url, "expertd.v1.Coordinator",
                                 "ClusterStatus", &empty.base);
        protobuf_c_message_free_unpacked(status, NULL);
        free(output);
        output = ep_test_process_output(&cluster.coordinator);
    }
    free(output);
    int code = ep_test_cluster_ctl(&cluster, &output, "table --timeout=0.3");
    EP_TEST_CHECK(code == 3 || code == 4, "%s: exit code %d: %s", map_cases[index].name, code,
                  output);
    free(output);
    ep_test_cluster_expect_alive(&cluster);
    ep_test_cluster_stop(&cluster);
}

int main(void)
{
    char dir[EP_TEST_PATH_BYTES];
    char path[EP_TEST_PATH_BYTES + 16];
    ep_fixture_config config = ep_fixture_default();
    ep_error error;
    ep_test_dir_new(dir);
    snprintf(path, sizeof(path), "%s/model", dir);
    EP_TEST_CHECK(mkdir(path, 0700) == 0 && ep_fixture_write(&config, path, &error) == EP_OK, "%s",
                  path);
    for (size_t i = 0; i < EP_ARRAY_COUNT(map_cases); i++) {
        run_map_case(path, i);
    }
    ep_test_dir_remove(dir);
    printf("%zu expert maps: each is refused with its reason\n", EP_ARRAY_COUNT(map_cases));
    return 0;
}
