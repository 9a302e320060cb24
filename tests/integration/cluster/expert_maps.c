/* SPDX-License-Identifier: Apache-2.0 */
/* An expert map that does not fit the model, which is known when the node has registered: the
 * coordinator lives, says why there is no table, and a caller is told that there is none. What else
 * may be wrong in a map, unit.placement.static_map names. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "support/cluster.h"

static const char map[] = "{\"moe_layer_count\":2,\"layer_list\":["
                          "{\"layer_id\":0,\"device_count\":1,\"device_list\":"
                          "[{\"device_id\":0,\"device_expert\":[0,1,2,3,4,5,6]}]},"
                          "{\"layer_id\":1,\"device_count\":1,\"device_list\":"
                          "[{\"device_id\":0,\"device_expert\":[0,1,2,3,4,5,6,7]}]}]}";
static const char wanted[] = "layer_id 0: routing table has 7 experts, model has 8";

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
    const ep_test_model model = {"demo", path};
    ep_test_cluster cluster;
    Expertd__V1__Empty empty = EXPERTD__V1__EMPTY__INIT;
    char *output = NULL;
    ep_test_cluster_start(
        &cluster, &(ep_test_cluster_options){
                      .nodes_count = 1, .expert_map = map, .models = &model, .models_count = 1});
    for (int asked = 0; output == NULL || strstr(output, wanted) == NULL;
         asked++) { /* the node registers meanwhile */
        EP_TEST_CHECK(asked < 5000, "not said: %s", wanted);
        ProtobufCMessage *status =
            ep_test_cluster_call(&cluster, cluster.coordinator.rpc_url, "expertd.v1.Coordinator",
                                 "ClusterStatus", &empty.base);
        protobuf_c_message_free_unpacked(status, NULL);
        free(output);
        output = ep_test_process_output(&cluster.coordinator);
    }
    free(output);
    int code = ep_test_cluster_ctl(&cluster, &output, "table --timeout=0.3");
    EP_TEST_CHECK(code == 3 || code == 4, "exit code %d: %s", code, output);
    free(output);
    ep_test_cluster_expect_alive(&cluster);
    ep_test_cluster_stop(&cluster);
    ep_test_dir_remove(dir);
    return 0;
}
