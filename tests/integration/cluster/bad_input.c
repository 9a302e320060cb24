/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Wrong configurations, checkpoints, expert maps and batches, given to the real programs: each ends with the
 * documented exit code and a message that names the thing, the value and what is allowed.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "model/safetensors_writer.h"
#include "support/cluster.h"

enum { PARTS_MAX = 4, ARGS_MAX = 8, TOKENS = 3, TOP_K = 2, HIDDEN = 32, TEXT_BYTES = 2048 };

static char dir[EP_TEST_PATH_BYTES];

/* "@" in arguments and expected texts stands for the directory. */
static const char *expand(const char *text, char out[TEXT_BYTES])
{
    size_t used = 0;
    for (const char *c = text; *c != 0; c++) {
        used +=
            (size_t)snprintf(out + used, TEXT_BYTES - used, *c == '@' ? "%s" : "%.1s", *c == '@' ? dir : c);
        EP_TEST_CHECK(used < TEXT_BYTES, "a text is too long");
    }
    out[used] = 0;
    return out;
}

static void write_text(const char *name, const char *text)
{
    char path[TEXT_BYTES];
    char expanded[TEXT_BYTES];
    EP_TEST_CHECK(ep_test_write_file(expand(name, path), expand(text, expanded), 0600), "%s", path);
}

static void expect_texts(const char *name, const char *output, const char *const parts[PARTS_MAX])
{
    char expanded[TEXT_BYTES];
    for (size_t i = 0; i < PARTS_MAX && parts[i] != NULL; i++) {
        EP_TEST_CHECK(strstr(output, expand(parts[i], expanded)) != NULL, "%s: no \"%s\" in: %s", name,
                      expanded, output);
    }
}

/* ---- programs that must not start ---- */

typedef struct start_case {
    const char *name;
    const char *program;
    const char *args[ARGS_MAX];
    const char *parts[PARTS_MAX];
} start_case;

#define NODE_PORTS "--listen=tcp://127.0.0.1:0", "--admin-listen=tcp://127.0.0.1:0", "--probe-address=127.0.0.1:0"

static const start_case start_cases[] = {
    /* configuration */
    {"no model", ep_test_expertd, {NODE_PORTS}, {"models", "there is no model to serve"}},
    {"not a number",
     ep_test_expertd,
     {"--threads=flase"},
     {"flag --threads", "'flase'", "allowed: 0..", "whole number"}},
    {"out of range",
     ep_test_expertd,
     {"--inflight-tokens=0"},
     {"flag --inflight-tokens", "0", "allowed: 1..16777216"}},
    {"unknown backend",
     ep_test_expertd,
     {"--backend=gpu", "--model=m=@"},
     {"'gpu'", "allowed: cpu, reference"}},
    {"unknown flag", ep_test_expertd, {"--no-such-flag"}, {"no-such-flag"}},
    {"open to the world",
     ep_test_expertd,
     {"--model=m=@", "--listen=tcp://0.0.0.0:0"},
     {"'tcp://0.0.0.0:0'", "token_file", "insecure"}},
    {"unknown key in the file",
     ep_test_expertd,
     {"--config=@/unknown-key.yaml"},
     {"@/unknown-key.yaml:1", "unknown key 'modles'", "did you mean 'models'"}},
    {"wrong value in the file",
     ep_test_expertd,
     {"--config=@/wrong-value.yaml"},
     {"@/wrong-value.yaml:4", "threads", "'3x'", "allowed: 0.."}},
    {"a wrong set of experts",
     ep_test_expertd,
     {"--config=@/wrong-experts.yaml"},
     {"@/wrong-experts.yaml:4", "'3-1'", "0-3,5"}},
    {"no such file", ep_test_expertd, {"--config=@/none.yaml"}, {"@/none.yaml"}},
    {"a token for all to read",
     ep_test_expertd,
     {"--model=m=@", "--token-file=@/token"},
     {"@/token", "0644", "allowed: 0600 or 0400"}},
    {"no directory",
     ep_test_expertd,
     {"--model=m=@/nothing"},
     {"models[0].path", "'@/nothing': No such file or directory"}},
    {"static without a map",
     ep_test_coordinator,
     {"--placement=static"},
     {"placement", "needs expert_map_file"}},
    {"a map without static",
     ep_test_coordinator,
     {"--expert-map-file=@/map.json"},
     {"expert_map_file", "only used with placement: static"}},
    {"too few nodes",
     ep_test_coordinator,
     {"--min-nodes=7", "--nodes-max=3"},
     {"min_nodes", "7 is above nodes_max, which is 3"}},
    {"copies", ep_test_coordinator, {"--copies=65"}, {"copies", "65", "allowed: 1..64"}},
    /* expert maps that are wrong by themselves */
    {"no map", ep_test_coordinator, {"--placement=static", "--expert-map-file=@/none.json"}, {"@/none.json"}},
    {"a map that is no JSON",
     ep_test_coordinator,
     {"--placement=static", "--expert-map-file=@/broken.json"},
     {"@/broken.json:2:", "unexpected token"}},
    {"a map with a wrong count",
     ep_test_coordinator,
     {"--placement=static", "--expert-map-file=@/count.json"},
     {"@/count.json", "layer_id 0", "device_count"}},
    {"a map with a negative expert",
     ep_test_coordinator,
     {"--placement=static", "--expert-map-file=@/negative.json"},
     {"@/negative.json", "device_id 0", "-1"}},
    /* checkpoints */
    {"no config.json",
     ep_test_expertd,
     {NODE_PORTS, "--model=m=@/no-config"},
     {"model m", "config.json", "no such file in @/no-config"}},
    {"a wrong config.json",
     ep_test_expertd,
     {NODE_PORTS, "--model=m=@/bad-config"},
     {"config.json", "num_experts_per_tok is 9", "allowed 1..8"}},
    {"a shard that is not there",
     ep_test_expertd,
     {NODE_PORTS, "--model=m=@/no-shard"},
     {"model.safetensors.index.json", "model-00002-of-00002.safetensors", "no such file in @/no-shard"}},
    {"a truncated shard",
     ep_test_expertd,
     {NODE_PORTS, "--model=m=@/short-shard"},
     {"model-00002-of-00002.safetensors", "tensor model.layers.1.", "is beyond the data (24988 bytes)"}},
    {"a shard of noise",
     ep_test_expertd,
     {NODE_PORTS, "--model=m=@/noise"},
     {"model m", "model-00001-of-00002.safetensors", "header"}},
};

static void make_checkpoint(const char *name, char out_path[TEXT_BYTES])
{
    ep_fixture_config config = ep_fixture_default();
    ep_error error;
    config.shards = 2;
    expand(name, out_path);
    EP_TEST_CHECK(mkdir(out_path, 0700) == 0 && ep_fixture_write(&config, out_path, &error) == EP_OK, "%s",
                  out_path);
}

static void make_checkpoints(void)
{
    char path[TEXT_BYTES];
    char file[TEXT_BYTES + 64];
    struct stat st;
    make_checkpoint("@/good", path);
    make_checkpoint("@/no-config", path);
    snprintf(file, sizeof(file), "%s/config.json", path);
    EP_TEST_CHECK(unlink(file) == 0, "%s", file);

    make_checkpoint("@/bad-config", path);
    snprintf(file, sizeof(file), "%s/config.json", path);
    char *config = ep_test_read_file(file);
    char *top_k = config != NULL ? strstr(config, "\"num_experts_per_tok\": 2") : NULL;
    EP_TEST_CHECK(top_k != NULL, "%s has no num_experts_per_tok", file);
    *strchr(top_k, '2') = '9';
    EP_TEST_CHECK(ep_test_write_file(file, config, 0600), "%s", file);
    free(config);

    make_checkpoint("@/no-shard", path);
    snprintf(file, sizeof(file), "%s/model-00002-of-00002.safetensors", path);
    EP_TEST_CHECK(unlink(file) == 0, "%s", file);

    make_checkpoint("@/short-shard", path);
    snprintf(file, sizeof(file), "%s/model-00002-of-00002.safetensors", path);
    EP_TEST_CHECK(stat(file, &st) == 0 && truncate(file, st.st_size - 100) == 0, "%s", file);

    make_checkpoint("@/noise", path);
    snprintf(file, sizeof(file), "%s/model-00001-of-00002.safetensors", path);
    EP_TEST_CHECK(ep_test_write_file(file, "this is no tensor file, and much too short for one", 0600), "%s",
                  file);
}

#define DEVICE_EXPERTS(list) "{\"device_id\":0,\"device_expert\":[" list "]}"
#define ONE_LAYER(id, list)                                                                                  \
    "{\"layer_id\":" #id ",\"device_count\":1,\"device_list\":[" DEVICE_EXPERTS(list) "]}"
#define TWO_LAYERS(first, second)                                                                            \
    "{\"moe_layer_count\":2,\"layer_list\":[" ONE_LAYER(0, first) "," ONE_LAYER(1, second) "]}"

static void make_files(void)
{
    char path[TEXT_BYTES];
    write_text("@/unknown-key.yaml", "modles:\n  - name: m\n    path: @\n");
    write_text("@/wrong-value.yaml", "models:\n  - name: m\n    path: @\nthreads: 3x\n");
    write_text("@/wrong-experts.yaml", "models:\n  - name: m\n    path: @\n    experts: 3-1\n");
    write_text("@/token", "0123456789abcdef0123456789abcdef\n");
    EP_TEST_CHECK(chmod(expand("@/token", path), 0644) == 0, "%s", path);
    write_text("@/map.json", TWO_LAYERS("0,1,2,3,4,5,6,7", "0,1,2,3,4,5,6,7"));
    write_text("@/broken.json", "{\"moe_layer_count\": 2,\n\"layer_list\": [}\n");
    write_text("@/count.json", "{\"moe_layer_count\":1,\"layer_list\":[{\"layer_id\":0,\"device_count\":2,"
                               "\"device_list\":[" DEVICE_EXPERTS("0,1") "]}]}");
    write_text("@/negative.json", "{\"moe_layer_count\":1,\"layer_list\":[" ONE_LAYER(0, "0,-1") "]}");
}

static void run_start_cases(void)
{
    for (size_t c = 0; c < EP_ARRAY_COUNT(start_cases); c++) {
        const start_case *row = &start_cases[c];
        char texts[ARGS_MAX][TEXT_BYTES];
        const char *args[ARGS_MAX + 1] = {NULL};
        char *output = NULL;
        for (size_t i = 0; i < ARGS_MAX && row->args[i] != NULL; i++) {
            args[i] = expand(row->args[i], texts[i]);
        }
        int code =
            ep_test_process_run(dir, "program", row->program, args, NULL, EP_TEST_PATIENCE_MS, &output);
        EP_TEST_CHECK(code == 1 || code == 2, "%s: exit code %d: %s", row->name, code, output);
        expect_texts(row->name, output, row->parts);
        free(output);
    }
}

/* ---- expert maps that do not fit the model: known when the nodes have registered ---- */

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
    {"a layer too few", "{\"moe_layer_count\":1,\"layer_list\":[" ONE_LAYER(0, "0,1,2,3,4,5,6,7") "]}",
     "moe_layer_count 1: the model has 2 MoE layers"},
    {"more devices than nodes",
     "{\"moe_layer_count\":2,\"layer_list\":[{\"layer_id\":0,\"device_count\":2,\"device_list\":"
     "[" DEVICE_EXPERTS("0,1,2,3,4,5,6,7") ",{\"device_id\":1,\"device_expert\":[]}]}," ONE_LAYER(
         1, "0,1,2,3,4,5,6,7") "]}",
     "device_count 2: the cluster has 1 nodes"},
};

/* The coordinator lives, says why there is no table, and a caller is told that there is none. */
static void run_map_case(size_t index)
{
    char model_path[TEXT_BYTES];
    const ep_test_model model = {"demo", expand("@/good", model_path)};
    ep_test_cluster cluster;
    Expertd__V1__Empty empty = EXPERTD__V1__EMPTY__INIT;
    char *output = NULL;
    ep_test_cluster_start(&cluster, &(ep_test_cluster_options){.nodes_count = 1,
                                                               .expert_map = map_cases[index].map,
                                                               .models = &model,
                                                               .models_count = 1});
    for (int asked = 0; output == NULL || strstr(output, map_cases[index].part) == NULL;
         asked++) { /* the node registers meanwhile */
        EP_TEST_CHECK(asked < 5000, "%s: not said: %s", map_cases[index].name, map_cases[index].part);
        ProtobufCMessage *status = ep_test_cluster_call(
            &cluster, cluster.coordinator.rpc_url, "expertd.v1.Coordinator", "ClusterStatus", &empty.base);
        protobuf_c_message_free_unpacked(status, NULL);
        free(output);
        output = ep_test_process_output(&cluster.coordinator);
    }
    free(output);
    const char *args[] = {"table", "--timeout=0.3", NULL};
    int code = ep_test_cluster_ctl(&cluster, args, &output);
    EP_TEST_CHECK(code == 3 || code == 4, "%s: exit code %d: %s", map_cases[index].name, code, output);
    free(output);
    ep_test_cluster_expect_alive(&cluster);
    ep_test_cluster_stop(&cluster);
}

/* ---- batches ---- */

typedef struct batch_case {
    const char *name;
    int32_t ids[TOKENS * TOP_K];
    uint32_t hidden;        /* 0: right */
    uint32_t scales_tokens; /* 0: right */
    ep_dtype ids_dtype;     /* NONE: i32 */
    const char *without;    /* this tensor is left out */
    const char *args[3];    /* beside model, layer, files; later ones win */
    int code;
    const char *parts[PARTS_MAX];
    bool not_finite;
} batch_case;

#define GOOD_IDS                                                                                             \
    {                                                                                                        \
        0, 1, 2, 3, 4, 5                                                                                     \
    }

static const batch_case batch_cases[] = {
    {.name = "right", .ids = GOOD_IDS, .code = 0},
    {.name = "an id of E",
     .ids = {0, 1, 2, 9, 4, 5},
     .code = 1,
     .parts = {"expert id 9 at token 1, slot 1", "allowed 0..7"}},
    {.name = "an id below -1",
     .ids = {0, 1, 2, 3, -7, 5},
     .code = 1,
     .parts = {"expert id -7 at token 2, slot 0", "allowed 0..7"}},
    {.name = "an expert twice",
     .ids = {0, 1, 3, 3, 4, 5},
     .code = 1,
     .parts = {"expert id 3 at token 1, slot 1", "already in slot 0"}},
    {.name = "an expert twice, allowed",
     .ids = {0, 1, 3, 3, 4, 5},
     .args = {"--allow-duplicates"},
     .code = 0},
    {.name = "a wrong width",
     .ids = GOOD_IDS,
     .hidden = 33,
     .code = 1,
     .parts = {"x has hidden 33", "layer 0 of model demo has 32"}},
    {.name = "other T",
     .ids = GOOD_IDS,
     .scales_tokens = 2,
     .code = 1,
     .parts = {"@/batch.safetensors", "expert_scales has shape [2,2]", "[3,2]"}},
    {.name = "a wrong type",
     .ids = GOOD_IDS,
     .ids_dtype = EP_DTYPE_F32,
     .code = 1,
     .parts = {"expert_ids has type f32", "allowed i32, i64"}},
    {.name = "no ids",
     .ids = GOOD_IDS,
     .without = "expert_ids",
     .code = 1,
     .parts = {"@/batch.safetensors", "no tensor expert_ids"}},
    {.name = "an unknown model",
     .ids = GOOD_IDS,
     .args = {"--model=domo"},
     .code = 1,
     .parts = {"no model domo", "it has: demo:"}},
    {.name = "an unknown layer",
     .ids = GOOD_IDS,
     .args = {"--layer=7"},
     .code = 1,
     .parts = {"demo", "no MoE layer 7"}},
    {.name = "an unknown version",
     .ids = GOOD_IDS,
     .args = {"--version=00ff"},
     .code = 1,
     .parts = {"no model demo:00ff", "it has: demo:"}},
    {.name = "not a number",
     .ids = GOOD_IDS,
     .not_finite = true,
     .args = {"--nan=reject"},
     .code = 1,
     .parts = {"x is nan at token 1, element 3", "finite"}},
    {.name = "a wrong split",
     .ids = GOOD_IDS,
     .args = {"--split=1,1"},
     .code = 2,
     .parts = {"--split adds up to 2", "allowed: 3"}},
    {.name = "a wrong mode",
     .ids = GOOD_IDS,
     .args = {"--mode=fast"},
     .code = 2,
     .parts = {"fast", "decode", "prefill"}},
    {.name = "no input",
     .ids = GOOD_IDS,
     .args = {"--in=@/none.safetensors"},
     .code = 1,
     .parts = {"@/none.safetensors"}},
    {.name = "input of noise",
     .ids = GOOD_IDS,
     .args = {"--in=@/map.json"},
     .code = 1,
     .parts = {"map.json", "header length", "allowed 2.."}},
    {.name = "no place for the output",
     .ids = GOOD_IDS,
     .args = {"--out=@/none/y.safetensors"},
     .code = 1,
     .parts = {"@/none/y.safetensors"}},
};

static void write_batch(const batch_case *row)
{
    char path[TEXT_BYTES];
    ep_error error;
    uint16_t x[TOKENS * (HIDDEN + 1)] = {0};
    float scales[TOKENS * TOP_K] = {1, 1, 1, 1, 1, 1};
    int32_t ids[TOKENS * TOP_K];
    ep_named_tensor tensors[3];
    size_t count = 0;
    int64_t hidden = row->hidden > 0 ? row->hidden : HIDDEN;
    memcpy(ids, row->ids, sizeof(ids));
    x[hidden + 3] = row->not_finite ? 0x7fc0 : 0;
    const ep_named_tensor all[] = {
        {"x", ep_tensor_2d(x, EP_DTYPE_BF16, TOKENS, hidden)},
        {"expert_ids",
         ep_tensor_2d(ids, row->ids_dtype != EP_DTYPE_NONE ? row->ids_dtype : EP_DTYPE_I32, TOKENS, TOP_K)},
        {"expert_scales",
         ep_tensor_2d(scales, EP_DTYPE_F32, row->scales_tokens > 0 ? row->scales_tokens : TOKENS, TOP_K)},
    };
    for (size_t i = 0; i < EP_ARRAY_COUNT(all); i++) {
        if (row->without == NULL || strcmp(row->without, all[i].name) != 0) {
            tensors[count++] = all[i];
        }
    }
    EP_TEST_CHECK(
        ep_safetensors_write(expand("@/batch.safetensors", path), tensors, count, NULL, 0, &error) == EP_OK,
        "%s", error.text);
}

static void run_batch_case(ep_test_cluster *cluster, const batch_case *row)
{
    static const char *const usual[] = {"forward", "--model=demo", "--layer=0", "--in=@/batch.safetensors",
                                        "--out=@/y.safetensors"};
    char texts[EP_ARRAY_COUNT(usual) + 3][TEXT_BYTES];
    const char *args[EP_ARRAY_COUNT(usual) + 4] = {NULL};
    char out[TEXT_BYTES];
    char *output = NULL;
    size_t count = 0;
    for (; count < EP_ARRAY_COUNT(usual); count++) {
        args[count] = expand(usual[count], texts[count]);
    }
    for (size_t i = 0; i < EP_ARRAY_COUNT(row->args) && row->args[i] != NULL; i++, count++) {
        args[count] = expand(row->args[i], texts[count]);
    }
    write_batch(row);
    unlink(expand("@/y.safetensors", out));
    int code = ep_test_cluster_ctl(cluster, args, &output);
    EP_TEST_CHECK(code == row->code, "%s: exit code %d, expected %d: %s", row->name, code, row->code, output);
    expect_texts(row->name, output, row->parts);
    EP_TEST_CHECK((access(out, F_OK) == 0) == (row->code == 0), "%s: the output file", row->name);
    free(output);
}

static void run_batch_cases(void)
{
    char model_path[TEXT_BYTES];
    const ep_test_model model = {"demo", expand("@/good", model_path)};
    ep_test_cluster cluster;
    ep_test_cluster_start(&cluster,
                          &(ep_test_cluster_options){.nodes_count = 1, .models = &model, .models_count = 1});
    for (size_t i = 0; i < EP_ARRAY_COUNT(batch_cases); i++) {
        run_batch_case(&cluster, &batch_cases[i]);
    }
    ep_test_cluster_expect_alive(&cluster);
    ep_test_cluster_stop(&cluster);
}

/* ---- nobody there ---- */

static void run_unreachable(void)
{
    char *output = NULL;
    const char *args[] = {"status", "--coordinator=tcp://127.0.0.1:1", "--timeout=0.2", NULL};
    int code =
        ep_test_process_run(dir, "expertctl", ep_test_expertctl, args, NULL, EP_TEST_PATIENCE_MS, &output);
    EP_TEST_CHECK(code == 3 && strstr(output, "tcp://127.0.0.1:1") != NULL, "exit code %d: %s", code, output);
    free(output);
}

int main(void)
{
    ep_test_dir_new(dir);
    make_files();
    make_checkpoints();
    run_start_cases();
    run_batch_cases();
    for (size_t i = 0; i < EP_ARRAY_COUNT(map_cases); i++) {
        run_map_case(i);
    }
    run_unreachable();
    ep_test_dir_remove(dir);
    printf("%zu starts, %zu expert maps and %zu batches: exit codes and messages are right\n",
           EP_ARRAY_COUNT(start_cases), EP_ARRAY_COUNT(map_cases), EP_ARRAY_COUNT(batch_cases));
    return 0;
}
