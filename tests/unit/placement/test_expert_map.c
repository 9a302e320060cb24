/* SPDX-License-Identifier: Apache-2.0 */
/* Expert maps: read as documented, every mistake named with its place, random damage never
 * crashes. */
#include "placement/expert_map.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/random.h"
#include "support/expect.h"
#include "support/json_refusal.h"

static const char good[] = "{\"moe_layer_count\": 2, \"layer_list\": [\n"
                           " {\"layer_id\": 1, \"device_count\": 2, \"device_list\": [\n"
                           "  {\"device_id\": 1, \"device_expert\": [3, 2]}, {\"device_id\": 0, "
                           "\"device_expert\": [1, 0, 3]}]},\n"
                           " {\"layer_id\": 0, \"device_count\": 1, \"device_list\": "
                           "[{\"device_id\": 0, \"device_expert\": "
                           "[]}]}]}\n";

Test(expert_map, reads_layers_and_devices_in_any_order)
{
    ep_expert_map *map;
    ep_error error = {0};
    ASSERT_OK(ep_expert_map_parse(good, strlen(good), "map.json", &map, &error), error);
    cr_assert_str_eq(map->file, "map.json");
    cr_assert_eq(map->layers_count, 2);
    cr_assert_eq(map->layers[0].devices_count, 1);
    cr_assert_eq(map->layers[0].offsets[1], 0);
    const uint32_t offsets[] = {0, 3, 5};
    const uint32_t experts[] = {1, 0, 3, 3, 2};
    cr_assert_eq(map->layers[1].devices_count, 2);
    cr_assert_eq(memcmp(map->layers[1].offsets, offsets, sizeof(offsets)), 0);
    cr_assert_eq(memcmp(map->layers[1].experts, experts, sizeof(experts)), 0);
    ep_expert_map_destroy(map);
    ep_expert_map_destroy(NULL);
}

static void expect_refused(const char *text, const char *expected)
{
    ep_expert_map *map = NULL;
    ep_error error = {0};
    cr_assert_eq(ep_expert_map_parse(text, strlen(text), "map.json", &map, &error), EP_ERR_BAD_FILE,
                 "accepted, expected: %s", expected);
    ASSERT_TEXT(error, expected);
    cr_assert_null(map);
}

#define LAYER(fields) "{\"moe_layer_count\": 1, \"layer_list\": [{" fields "}]}"
#define DEVICES(list) LAYER("\"layer_id\": 0, \"device_count\": 2, \"device_list\": [" list "]")
#define OTHER "{\"device_id\": 1, \"device_expert\": [0]}"

Test(expert_map, names_every_mistake)
{
    static const struct {
        const char *text;
        const char *expected;
    } cases[] = {
        {"{\"moe_layer_count\": 1,\n \"layer_list\": [}", "map.json:2:"},
        {"", "map.json:1:"},
        {"[]", "map.json: the top level: expected an object, found an array"},
        {"{}", "map.json: the top level: key \"moe_layer_count\" is missing"},
        {"{\"moe_layer_count\": 1, \"moe_layer_count\": 1, \"layer_list\": []}",
         "duplicate object key"},
        {"{\"moe_layer_count\": 1, \"layer_list\": [], \"x\": 1}",
         "map.json: the top level: unknown key \"x\""},
        {"{\"moe_layer_count\": \"1\", \"layer_list\": []}",
         "map.json: moe_layer_count: expected an integer, found a string"},
        {"{\"moe_layer_count\": 1.0, \"layer_list\": []}",
         "map.json: moe_layer_count: expected an integer, found a real number"},
        {"{\"moe_layer_count\": 0, \"layer_list\": []}",
         "map.json: moe_layer_count is 0: allowed 1..65536"},
        {"{\"moe_layer_count\": -1, \"layer_list\": []}",
         "map.json: moe_layer_count is -1: allowed 1..65536"},
        {"{\"moe_layer_count\": 2, \"layer_list\": []}",
         "map.json: layer_list has 0 entries, moe_layer_count says 2"},
        {"{\"moe_layer_count\": 2, \"layer_list\": {}}",
         "map.json: layer_list: expected an array, found an object"},
        {"{\"moe_layer_count\": 1, \"layer_list\": [7]}",
         "map.json: layer_list entry 0: expected an object, found an integer"},
        {LAYER("\"layer_id\": 0, \"device_count\": 2"),
         "map.json: layer_list entry 0: key \"device_list\" is missing"},
        {LAYER("\"layer_id\": 1, \"device_count\": 1, \"device_list\": []"),
         "map.json: layer_list entry 0: layer_id is 1: allowed 0..0"},
        {LAYER("\"layer_id\": 0, \"device_count\": 0, \"device_list\": []"),
         "map.json: layer_id 0: device_count is 0: allowed 1..4096"},
        {LAYER("\"layer_id\": 0, \"device_count\": 3, \"device_list\": [" OTHER "]"),
         "map.json: layer_id 0: device_list has 1 entries, device_count says 3"},
        {DEVICES(OTHER ", {\"device_id\": 2, \"device_expert\": []}"),
         "map.json: layer_id 0, device_list entry 1: device_id is 2: allowed 0..1"},
        {DEVICES(OTHER ", " OTHER), "map.json: layer_id 0: device_id 1 is listed twice"},
        {DEVICES(OTHER ", {\"device_id\": 0, \"device_expert\": 3}"),
         "map.json: layer_id 0, device_id 0: device_expert: expected an array, found an integer"},
        {DEVICES(OTHER ", {\"device_id\": 0, \"device_expert\": [1, 65535]}"),
         "map.json: layer_id 0, device_id 0, device_expert 1 is 65535: allowed 0..65534"},
        {DEVICES(OTHER ", {\"device_id\": 0, \"device_expert\": [null]}"),
         "map.json: layer_id 0, device_id 0, device_expert 0: expected an integer, found null"},
        {DEVICES(OTHER ", {\"device_id\": 0, \"device_expert\": [5, 6, 5]}"),
         "map.json: layer_id 0, device_id 0: expert 5 is listed twice"},
        {"{\"moe_layer_count\": 2, \"layer_list\": ["
         "{\"layer_id\": 0, \"device_count\": 1, \"device_list\": [{\"device_id\": 0, "
         "\"device_expert\": "
         "[]}]},"
         "{\"layer_id\": 0, \"device_count\": 1, \"device_list\": [{\"device_id\": 0, "
         "\"device_expert\": "
         "[]}]}]}",
         "map.json: layer_id 0 is listed twice"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        expect_refused(cases[i].text, cases[i].expected);
    }
}

Test(expert_map, random_damage_never_crashes)
{
    uint64_t state = 1;
    unsigned accepted = 0;
    for (int round = 0; round < 20000; round++) {
        char text[sizeof(good)];
        memcpy(text, good, sizeof(good));
        for (uint64_t i = 1 + ep_splitmix64(&state) % 3; i > 0; i--) {
            text[ep_splitmix64(&state) % (sizeof(good) - 1)] =
                "0123456789,[]{}\" "[ep_splitmix64(&state) % 17];
        }
        size_t bytes =
            ep_splitmix64(&state) % 4 ? sizeof(good) - 1 : ep_splitmix64(&state) % sizeof(good);
        char *exact = malloc(bytes + 1); /* no terminator within the allowed length */
        memcpy(exact, text, bytes);
        ep_expert_map *map = NULL;
        ep_error error = {0};
        if (ep_expert_map_parse(exact, bytes, "map.json", &map, &error) == EP_OK) {
            accepted++;
            ep_expert_map_destroy(map);
        } else {
            cr_assert(error.text[0] != '\0' && map == NULL);
        }
        free(exact);
    }
    cr_assert_gt(accepted, 50u);
}

Test(expert_map, reads_a_file_longer_than_one_read_and_names_a_missing_one)
{
    char path[] = "/tmp/expert_map_XXXXXX";
    int fd = mkstemp(path);
    cr_assert_geq(fd, 0);
    FILE *file = fdopen(fd, "w");
    for (int i = 0; i < 200000; i++) {
        fputc(' ', file);
    }
    fputs(good, file);
    fclose(file);
    ep_expert_map *map = NULL;
    ep_error error = {0};
    ep_err err = ep_expert_map_read_file(path, &map, &error);
    unlink(path);
    ASSERT_OK(err, error);
    cr_assert_str_eq(map->file, path);
    ep_expert_map_destroy(map);

    cr_assert_eq(ep_expert_map_read_file("/nonexistent/map.json", &map, &error), EP_ERR_NOT_FOUND);
    cr_assert_str_eq(error.text, "/nonexistent/map.json: cannot open: No such file or directory");
    cr_assert_eq(ep_expert_map_read_file("/tmp", &map, &error), EP_ERR_IO);
}

Test(expert_map, what_is_written_reads_back)
{
    static const uint32_t offsets[2][4] = {{0, 1, 3, 4}, {0, 2, 3, 4}},
                          devices[2][4] = {{2, 0, 2, 0}, {0, 1, 0, 0}};
    char path[] = "/tmp/expert-map-XXXXXX";
    ep_expert_map *map = NULL, *back = NULL;
    ep_error error = {0};
    cr_assert_geq(mkstemp(path), 0);
    cr_assert_eq(ep_expert_map_create(2, &map, &error), EP_OK);
    for (uint32_t l = 0; l < 2; l++) {
        ASSERT_OK(ep_expert_map_set_layer(map, l, 3, offsets[l], devices[l], 3 - l, &error), error);
    }
    ASSERT_OK(ep_expert_map_write_file(map, path, &error), error);
    ASSERT_OK(ep_expert_map_read_file(path, &back, &error), error);
    static const uint32_t begin[2][4] = {{0, 2, 2, 4}, {0, 3, 4, 0}},
                          experts[2][4] = {{1, 2, 0, 1}, {0, 1, 2, 0}};
    cr_assert_eq(back->layers_count, 2);
    for (uint32_t l = 0; l < 2; l++) {
        cr_assert_eq(back->layers[l].devices_count, 3 - l);
        cr_assert_eq(memcmp(back->layers[l].offsets, begin[l], (4 - l) * sizeof(uint32_t)), 0);
        cr_assert_eq(memcmp(back->layers[l].experts, experts[l], 4 * sizeof(uint32_t)), 0);
    }
    ep_expert_map_destroy(back);
    ep_expert_map_destroy(map);
    unlink(path);
}

Test(expert_map, no_refused_allocation_changes_what_is_written)
{
    static const uint32_t offsets[] = {0, 1, 3, 4}, devices[] = {1, 0, 1, 0};
    char path[] = "/tmp/expert-map-XXXXXX";
    ep_expert_map *map = NULL, *back = NULL;
    ep_error error = {0};
    cr_assert_geq(mkstemp(path), 0);
    cr_assert_eq(ep_expert_map_create(1, &map, &error), EP_OK);
    ASSERT_OK(ep_expert_map_set_layer(map, 0, 3, offsets, devices, 2, &error), error);
    do {
        json_refusal_begin();
        const ep_err err = ep_expert_map_write_file(map, path, &error);
        json_refusal_end();
        if (err == EP_OK) {
            ASSERT_OK(ep_expert_map_read_file(path, &back, &error), error);
            cr_expect_eq(back->layers[0].offsets[2], 4, "allocation %zu", json_refused_at);
            ep_expert_map_destroy(back);
        }
    } while (json_refusal_was_reached());
    cr_expect_gt(json_refused_at, 10);
    ep_expert_map_destroy(map);
    unlink(path);
}

Test(expert_map, what_no_map_can_say_is_not_written)
{
    static const uint32_t offsets[] = {0, 1, 1}, devices[] = {0};
    ep_expert_map *map = NULL;
    ep_error error = {0};
    cr_assert_eq(ep_expert_map_create(0, &map, &error), EP_ERR_INVALID_ARGUMENT);
    cr_assert_eq(ep_expert_map_create(1, &map, &error), EP_OK);
    cr_assert_eq(ep_expert_map_set_layer(map, 0, 2, offsets, devices, 1, &error),
                 EP_ERR_INVALID_ARGUMENT);
    cr_assert_str_eq(error.text,
                     "layer_id 0: expert 1 has no copy, and an expert map needs one of each");
    cr_assert_eq(ep_expert_map_set_layer(map, 0, 2, offsets, devices, 0, &error),
                 EP_ERR_INVALID_ARGUMENT);
    ep_expert_map_destroy(map);
}
