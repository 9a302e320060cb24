/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The demo model on a node with an (emulated) NPU and one with a CPU, each with all experts:
 * expertctl generate takes rows of both, also when the device is lost half way, and its text is
 * that of the CPU alone as far as the model is sure of it. At every byte of the text the logits by
 * both nodes are compared with those by the CPU alone, with the same experts for the same tokens.
 * Left alone, a router that finds two experts nearly as good may choose the other one, and logits
 * jump: so texts may part, but only where the likeliest byte does not lead by much.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/check.h"
#include "dense/dense_model.h"
#include "fault_device.h"

enum { DEVICE = 0, CPU = 1, BYTES = 160 };

#define DEMO EP_SOURCE_DIR "/deploy/demo-model/checkpoint"
#define PROMPT "The file descriptor "
/*
 * Logits by both nodes may be off by this part of their spread (root mean square about the mean).
 * The device rounds inside an expert to bf16, 2^-9 of a value each time, which the CPU's f32 does
 * not; four layers carry that on.
 */
#define LOGITS_OFF 0x1.8p-5
/* The lead of the likeliest byte, in parts of the spread, beyond which another expert of nearly the
 * same weight changes nothing. */
#define LEAD_SURE 0.25

#define ALL "[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15]"
#define LAYER(id)                                                                                  \
    "{\"layer_id\":" #id                                                                           \
    ",\"device_count\":2,\"device_list\":[{\"device_id\":0,\"device_expert\":" ALL "},{"           \
    "\"device_id\":1,\"device_expert\":" ALL "}]}"
static const char map[] =
    "{\"moe_layer_count\":4,\"layer_list\":[" LAYER(0) "," LAYER(1) "," LAYER(2) "," LAYER(3) "]}";

static ep_test_cluster cluster;

static uint64_t rows_of(uint32_t node)
{
    Expertd__V1__NodeStatusReply *status = ep_test_cluster_node_status(&cluster, node);
    const uint64_t rows = status->rows_served;
    expertd__v1__node_status_reply__free_unpacked(status, NULL);
    return rows;
}

/* ---- texts ---- */

static char *generate(const char *numerics)
{
    char out[EP_TEST_PATH_BYTES + 16];
    char option[160];
    char bytes[16];
    char *output = NULL;
    snprintf(out, sizeof(out), "%s/text", cluster.dir);
    snprintf(option, sizeof(option), "--numerics=%s", numerics);
    snprintf(bytes, sizeof(bytes), "%d", BYTES);
    EP_TEST_CHECK(ep_test_cluster_ctl(&cluster, &output,
                                      "generate --checkpoint %s --model=demo --prompt '%s' --bytes "
                                      "%s --temperature=0 %s --out %s",
                                      DEMO, PROMPT, bytes, option, out) == 0,
                  "expertctl generate: %s", output);
    free(output);
    return ep_test_read_file(out);
}

/* The same, and the device is lost once half of the text is there. */
static char *generate_and_lose(const fault_device *device)
{
    char pipe[EP_TEST_PATH_BYTES + 16];
    char coordinator[EP_TEST_PATH_BYTES + 32];
    char bytes[16];
    ep_test_process process;
    snprintf(pipe, sizeof(pipe), "%s/pipe", cluster.dir);
    snprintf(coordinator, sizeof(coordinator), "--coordinator=%s", cluster.coordinator.rpc_url);
    snprintf(bytes, sizeof(bytes), "%d", BYTES);
    EP_TEST_CHECK(mkfifo(pipe, 0600) == 0, "no pipe");
    const char *const args[] = {"generate",        "--checkpoint", DEMO,      "--model=demo",
                                "--prompt",        PROMPT,         "--bytes", bytes,
                                "--temperature=0", "--stream",     "--out",   pipe,
                                "--numerics=any",  coordinator,    NULL};
    EP_TEST_CHECK(ep_test_process_start(&process, cluster.dir, "generate", ep_test_expertctl, args,
                                        NULL, false),
                  "expertctl does not start");
    char *text = calloc(1, strlen(PROMPT) + BYTES + 1);
    FILE *file = fopen(pipe, "r");
    EP_TEST_CHECK(text != NULL && file != NULL, "%s cannot be read", pipe);
    size_t used = 0;
    for (int c; (c = fgetc(file)) != EOF && used < strlen(PROMPT) + BYTES; text[used++] = (char)c) {
        if (used == strlen(PROMPT) + BYTES / 2) {
            fault_device_lose(device, "");
        }
    }
    fclose(file);
    const int code = ep_test_process_wait(&process, EP_TEST_PATIENCE_MS);
    char *said = ep_test_process_output(&process);
    EP_TEST_CHECK(code == 0, "expertctl generate ended with %d: %s", code, said);
    printf("%s", said);
    free(said);
    return text;
}

/* ---- logits ---- */

enum { LAYERS = 4, TOP_K = 2 };

/* The routes of one token: what the CPU's run chose is what the other one takes. */
typedef struct expert_caller {
    ep_client *client;
    bool follows;
    int32_t ids[LAYERS][TOP_K];
    float scales[LAYERS][TOP_K];
} expert_caller;

static ep_err call_experts(void *arg, const ep_layer_shape *shape, uint32_t tokens,
                           const uint16_t *rows, const int32_t *ids, const float *scales,
                           uint16_t *out, ep_error *out_error)
{
    expert_caller *caller = arg;
    ep_moe_args args;
    ep_moe_result result = {.struct_bytes = sizeof(result)};
    ep_tensor y = ep_tensor_2d(out, EP_DTYPE_BF16, tokens, shape->hidden);
    EP_TEST_CHECK(tokens == 1 && shape->top_k == TOP_K && shape->layer < LAYERS, "another model");
    if (!caller->follows) {
        memcpy(caller->ids[shape->layer], ids, sizeof(caller->ids[0]));
        memcpy(caller->scales[shape->layer], scales, sizeof(caller->scales[0]));
    }
    ep_moe_args_init(&args);
    args.model = "demo";
    args.layer = shape->layer;
    args.x = ep_tensor_2d((void *)(uintptr_t)rows, EP_DTYPE_BF16, tokens, shape->hidden);
    args.expert_ids = ep_tensor_2d(caller->ids[shape->layer], EP_DTYPE_I32, tokens, TOP_K);
    args.expert_scales = ep_tensor_2d(caller->scales[shape->layer], EP_DTYPE_F32, tokens, TOP_K);
    const ep_err err = ep_moe_forward(caller->client, &args, &y, &result);
    *out_error = result.error;
    return err;
}

static void run_model(ep_dense_model *model, expert_caller *caller, const char *text,
                      uint32_t position, float logits[EP_DENSE_VOCAB])
{
    ep_error error;
    EP_TEST_CHECK(ep_dense_model_forward(model, (const uint8_t *)text + position, 1, position,
                                         call_experts, caller, logits, &error) == EP_OK,
                  "byte %u: %s", position, error.text);
}

/* Spread of the logits, how far those by both nodes are off at most, and by how much the likeliest
 * byte leads. */
typedef struct comparison {
    double spread;
    double off;
    double lead;
} comparison;

static comparison compare(const float *cpu, const float *both)
{
    comparison c = {.spread = 0.0};
    double mean = 0.0;
    double first = -INFINITY;
    double second = -INFINITY;
    for (int i = 0; i < EP_DENSE_VOCAB; i++) {
        mean += (double)cpu[i] / EP_DENSE_VOCAB;
        c.off = fmax(c.off, fabs((double)both[i] - (double)cpu[i]));
        second = fmax(second, fmin(first, (double)cpu[i]));
        first = fmax(first, (double)cpu[i]);
    }
    for (int i = 0; i < EP_DENSE_VOCAB; i++) {
        c.spread += ((double)cpu[i] - mean) * ((double)cpu[i] - mean) / EP_DENSE_VOCAB;
    }
    c.spread = sqrt(c.spread);
    c.lead = first - second;
    return c;
}

/* Where the texts may part: lead[p] is that of the byte at p, in parts of the spread. */
static void compare_logits(ep_client *cpu, ep_client *both, const char *text, double *lead)
{
    ep_dense_model *models[2] = {NULL, NULL};
    float logits[2][EP_DENSE_VOCAB];
    expert_caller caller;
    double worst = 0.0;
    ep_error error;
    for (int i = 0; i < 2; i++) {
        EP_TEST_CHECK(ep_dense_model_open(DEMO, &models[i], &error) == EP_OK, "%s", error.text);
    }
    for (uint32_t p = 0; text[p + 1] != '\0'; p++) {
        caller = (expert_caller){.client = cpu};
        run_model(models[0], &caller, text, p, logits[0]);
        caller.client = both;
        caller.follows = true;
        run_model(models[1], &caller, text, p, logits[1]);
        const comparison c = compare(logits[0], logits[1]);
        EP_TEST_CHECK(c.off <= LOGITS_OFF * c.spread,
                      "after byte %u logits are off by %g of a spread of %g", p, c.off, c.spread);
        worst = fmax(worst, c.off / c.spread);
        lead[p + 1] = c.lead / c.spread;
    }
    printf("logits by both nodes are off by %.4f of their spread at most, allowed %.4f\n", worst,
           LOGITS_OFF);
    ep_dense_model_close(models[0]);
    ep_dense_model_close(models[1]);
}

static void expect_near(const char *what, const char *text, const char *cpu_text,
                        const double *lead)
{
    const size_t bytes = strlen(PROMPT) + BYTES;
    EP_TEST_CHECK(strlen(text) == bytes && strlen(cpu_text) == bytes,
                  "%s: %zu and %zu bytes, wanted %zu", what, strlen(text), strlen(cpu_text), bytes);
    size_t same = 0;
    while (same < bytes && text[same] == cpu_text[same]) {
        same++;
    }
    printf("%s: %zu of %zu bytes as by the CPU alone", what, same, bytes);
    printf(same == bytes ? "\n" : ", whose next byte leads by %.3f of the spread\n", lead[same]);
    EP_TEST_CHECK(
        same == bytes || lead[same] <= LEAD_SURE,
        "%s parts from the CPU's text at byte %zu, where the likeliest byte leads by %g of the "
        "spread:\n%s\n%s",
        what, same, lead[same], text, cpu_text);
}

static void any_numerics(ep_client_config *config)
{
    config->numerics = "any";
}

static void cpu_node(ep_client_config *config)
{
    static const char *url;
    url = cluster.nodes[CPU].rpc_url;
    config->coordinator_url = NULL;
    config->node_urls = &url;
    config->node_urls_count = 1;
}

int main(void)
{
    static const ep_test_model model = {"demo", DEMO};
    static double lead[sizeof(PROMPT) + BYTES];
    char dir[EP_TEST_PATH_BYTES];
    fault_device device;
    ep_model_desc desc = {.struct_bytes = sizeof(desc)};
    ep_test_dir_new(dir);
    fault_device_init(&device, dir, "expertd-ascend", 1, 0);
    const char *const programs[] = {device.program, NULL};
    ep_test_cluster_start(&cluster, &(ep_test_cluster_options){.nodes_count = 2,
                                                               .copies = 2,
                                                               .expert_map = map,
                                                               .models = &model,
                                                               .models_count = 1,
                                                               .node_programs = programs});
    ep_client *both = ep_test_cluster_client(&cluster, any_numerics);
    ep_client *cpu = ep_test_cluster_client(&cluster, cpu_node);
    EP_TEST_CHECK(ep_client_model(cpu, 0, &desc) == EP_OK && desc.numerics[0] != '\0',
                  "the CPU's node has no id");

    char *cpu_text = generate(desc.numerics); /* exact: this id and no other */
    EP_TEST_CHECK(rows_of(DEVICE) == 0, "the device took rows of another id");
    const uint64_t cpu_rows = rows_of(CPU);
    char *text = generate("any");
    printf("%llu rows by the device, %llu by the CPU beside it\n",
           (unsigned long long)rows_of(DEVICE), (unsigned long long)(rows_of(CPU) - cpu_rows));
    EP_TEST_CHECK(rows_of(DEVICE) > 0, "the device computed nothing");
    compare_logits(cpu, both, cpu_text, lead);
    expect_near("both nodes", text, cpu_text, lead);
    char *lost_text = generate_and_lose(&device);
    expect_near("the device lost half way", lost_text, cpu_text, lead);
    char *log = ep_test_read_file(cluster.nodes[DEVICE].output_path);
    EP_TEST_CHECK(strstr(log, "event=device-lost") != NULL, "the device was not lost: %s", log);

    free(log);
    free(lost_text);
    free(text);
    free(cpu_text);
    ep_client_destroy(cpu);
    ep_client_destroy(both);
    ep_test_cluster_stop(&cluster);
    ep_test_dir_remove(dir);
    return 0;
}
