/* SPDX-License-Identifier: Apache-2.0 */
/* Opening a checkpoint, reading an expert and packing it for the backend, with each allocation
 * failing once. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "alloc_fail.h"
#include "backends/backend.h"
#include "model/model.h"
#include "placement/expert_map.h"
#include "support/checkpoint_fixture.h"

typedef struct rig {
    char dir[EP_FIXTURE_PATH_BYTES];
    ep_backend *backend;
    uint8_t sha256[EP_SHA256_BYTES];
    bool has_sha256;
} rig;

/* The whole way; what was opened is closed again. */
static ep_err load(rig *r, ep_error *out_error)
{
    ep_checkpoint *checkpoint = NULL;
    ep_expert_data expert = {0};
    ep_backend_weights *weights = NULL;
    float *router = NULL, *bias = NULL;
    ep_err err = ep_checkpoint_open(r->dir, &checkpoint, out_error);
    if (err != EP_OK) {
        return err;
    }
    const ep_layer_shape *shape = &ep_checkpoint_info(checkpoint)->moe_layers[1];
    err = ep_checkpoint_read_expert(checkpoint, shape->layer, 3, &expert, out_error);
    if (err == EP_OK) {
        if (!r->has_sha256) {
            memcpy(r->sha256, expert.sha256, sizeof(r->sha256));
            r->has_sha256 = true;
        }
        if (memcmp(r->sha256, expert.sha256, sizeof(r->sha256)) != 0) {
            torture_broken("an expert was read that is another");
        }
        err = r->backend->ops->weights_load(r->backend, &expert.source, &weights, out_error);
        r->backend->ops->weights_unload(r->backend, weights);
        ep_expert_data_free(&expert);
    }
    if (err == EP_OK) {
        err = ep_checkpoint_read_router(checkpoint, shape->layer, &router, &bias, out_error);
        free(router);
        free(bias);
    }
    ep_checkpoint_close(checkpoint);
    return err;
}

static bool is_fair(ep_err err, const ep_error *error)
{
    return err == EP_OK || (err == EP_ERR_NO_MEMORY && error->text[0] != 0);
}

static void attempt(void *arg)
{
    ep_error error = {0};
    ep_err err = load(arg, &error);
    if (!is_fair(err, &error)) {
        torture_broken("without memory the load said %s: '%s'", ep_err_name(err), error.text);
    }
}

static void recover(void *arg)
{
    ep_error error = {0};
    if (load(arg, &error) != EP_OK) {
        torture_broken("the next load fails: %s", error.text);
    }
}

/* A static expert map, parsed. */
static void attempt_map(void *arg)
{
    static const char map_text[] =
        "{\"moe_layer_count\":1,\"layer_list\":[{\"layer_id\":0,\"device_count\":2,\"device_list\":"
        "["
        "{\"device_id\":0,\"device_expert\":[0,1,2]},{\"device_id\":1,\"device_expert\":[3,1]}]}]}";
    ep_expert_map *map = NULL;
    ep_error error = {0};
    ep_err err = ep_expert_map_parse(map_text, sizeof(map_text) - 1, "map.json", &map, &error);
    /* The map's parser asks jansson itself, which without memory reports a syntax error in some
     * places. */
    if (!(is_fair(err, &error) || err == EP_ERR_BAD_FILE) || (arg != NULL && err != EP_OK)) {
        torture_broken("the expert map says %s: '%s'", ep_err_name(err), error.text);
    }
    ep_expert_map_destroy(map);
}

static void recover_map(void *arg)
{
    (void)arg;
    attempt_map(&arg);
}

int main(void)
{
    rig r = {0};
    ep_error error;
    ep_backend_config config = {.threads = 1};
    uint64_t failures = 0;
    ep_fixture_config fixtures[2] = {ep_fixture_default(), ep_fixture_default()};
    fixtures[1].shards = 3;
    fixtures[1].shared_inner = 8;
    fixtures[1].names = EP_NAMES_N2;
    fixtures[1].router = EP_ROUTER_R2;
    if (ep_backend_by_name("cpu")->open(&config, &r.backend, &error) != EP_OK) {
        torture_broken("%s", error.text);
    }
    for (int i = 0; i < 2; i++) {
        ep_fixture_temp_dir(r.dir);
        r.has_sha256 = false;
        if (ep_fixture_write(&fixtures[i], r.dir, &error) != EP_OK) {
            torture_broken("%s", error.text);
        }
        failures +=
            alloc_fail_sweep(i == 0 ? "load, one file" : "load, shards", attempt, recover, &r);
        ep_fixture_remove(r.dir);
    }
    failures += alloc_fail_sweep("expert map", attempt_map, recover_map, NULL);
    r.backend->ops->close(r.backend);
    return failures > 20 ? 0 : 1;
}
