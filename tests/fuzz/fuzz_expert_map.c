/* SPDX-License-Identifier: Apache-2.0 */
/* Expert maps in the vllm-ascend format. */
#include <string.h>

#include "fuzz.h"
#include "placement/expert_map.h"

static const char *const seeds[] = {
    "{\"moe_layer_count\":1,\"layer_list\":[{\"layer_id\":0,\"device_count\":2,\"device_list\":["
    "{\"device_id\":0,\"device_expert\":[0,1,2]},{\"device_id\":1,\"device_expert\":[3,1]}]}]}",
    "{\"moe_layer_count\":2,\"layer_list\":[{\"layer_id\":1,\"device_count\":1,\"device_list\":["
    "{\"device_id\":0,\"device_expert\":[]}]},{\"layer_id\":0,\"device_count\":1,\"device_list\":["
    "{\"device_id\":0,\"device_expert\":[7,7]}]}]}",
    "{\"moe_layer_count\":0,\"layer_list\":[]}",
    "{\"moe_layer_count\":1,\"layer_list\":[{\"layer_id\":0,\"device_count\":1,\"device_list\":["
    "{\"device_id\":0,\"device_expert\":[1.5,-1,\"3\",99999999999]}]}]}",
};

size_t fuzz_seed(size_t index, uint8_t *out)
{
    return index < sizeof(seeds) / sizeof(seeds[0]) ? fuzz_seed_text(seeds[index], out) : 0;
}

void fuzz_one(const uint8_t *data, size_t bytes)
{
    ep_expert_map *map;
    ep_error error = {0};
    if (ep_expert_map_parse((const char *)data, bytes, "fuzz.json", &map, &error) != EP_OK) {
        FUZZ_CHECK(error.text[0] != 0);
        return;
    }
    uint32_t devices = ep_expert_map_devices_max(map);
    for (uint32_t l = 0; l < map->layers_count; l++) {
        const ep_expert_map_layer *layer = &map->layers[l];
        FUZZ_CHECK(layer->devices_count <= devices && layer->offsets[0] == 0);
        for (uint32_t d = 0; d < layer->devices_count; d++) {
            FUZZ_CHECK(layer->offsets[d] <= layer->offsets[d + 1]);
        }
        fuzz_touch(layer->experts, layer->offsets[layer->devices_count] * sizeof(uint32_t));
    }
    ep_expert_map_destroy(map);
}
