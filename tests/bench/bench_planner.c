/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What `expertctl plan --model` predicts beside what services of this machine do: latency of a
 * layer, and load of the busiest node over the mean. Nodes are processes on loopback that share the
 * cores, one thread each at least; the caller runs beside them.
 *
 * The planner is given what a user can give it: config.json, the number of nodes, the load that a
 * running service counted (expertctl stats), and figures that expertctl tune measured at one node
 * of all cores with another model, the same for all configurations. They are measured anew before
 * each take, since others use the machine too; a ratio is the median of the takes. mxfp4 of the
 * fixtures has scales that no real model has, and takes three times as long.
 *
 *     bench_planner [JSON] [takes=N] [NUMBER of a configuration...]
 */
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/numeric.h"
#include "base/random.h"
#include "bench/bench_report.h"
#include "support/cluster.h"

enum {
    TAKES = 5,
    TAKES_MAX = 50,
    BATCHES = 16,
    BATCHES_MAX = 256,
    CALLS_MIN = 6,
    CALLS_MAX = 4096,
    COUNTED_TOKENS = 1024
};
#define TAKE_US 500000.0
#define BAR 1.2
#define MODEL "demo"
#define PATIENCE_MS 120000

typedef struct configuration {
    uint32_t nodes, hidden, inner, experts, top_k, tokens;
    double zipf; /* 0: even */
    ep_weight_format format;
    const char *weight_bits;
} configuration;

static const configuration measured_at = {1, 1024, 1024, 64, 4, 0, 0, EP_WEIGHTS_NONE, "16"};
static const configuration all[] = {
    {1, 2048, 768, 32, 8, 1, 0, EP_WEIGHTS_NONE, "16"},
    {2, 1024, 512, 128, 8, 8, 1, EP_WEIGHTS_NONE, "16"},
    {4, 2048, 512, 64, 6, 64, 0, EP_WEIGHTS_NONE, "16"},
    {2, 1536, 1024, 32, 2, 256, 0.8, EP_WEIGHTS_NONE, "16"},
    {4, 1024, 768, 64, 8, 256, 1, EP_WEIGHTS_NONE, "16"},
    {2, 2048, 1024, 32, 4, 8, 0, EP_WEIGHTS_INT4, "4.5"},
};

typedef struct service {
    const configuration *form;
    char path[EP_TEST_PATH_BYTES]; /* of the checkpoint */
    ep_test_model model;
    ep_test_cluster cluster;
    ep_client *client;
} service;

static bench_report *report;
static service reference; /* where figures are measured */

/* ---- a service ---- */

static void patient(ep_client_config *config)
{
    config->deadline_us = PATIENCE_MS * 1000u;
}

static void service_begin(service *s, const configuration *form)
{
    ep_fixture_config fixture = ep_fixture_layer(form->hidden, form->inner, form->experts, 2);
    const uint32_t cores = (uint32_t)sysconf(_SC_NPROCESSORS_ONLN);
    fixture.distinct_experts = 1; /* each has its own memory */
    fixture.top_k = form->top_k;
    fixture.expert_format = form->format;
    *s = (service){.form = form};
    ep_test_checkpoint_new(&fixture, s->path);
    s->model = (ep_test_model){MODEL, s->path};
    ep_test_cluster_start(&s->cluster, &(ep_test_cluster_options){
                                           .nodes_count = form->nodes,
                                           .threads = form->nodes < cores ? cores / form->nodes : 1,
                                           .models = &s->model,
                                           .models_count = 1});
    s->client = ep_test_cluster_client(&s->cluster, patient);
}

static void service_end(service *s)
{
    ep_client_destroy(s->client);
    ep_test_cluster_stop(&s->cluster);
    ep_test_dir_remove(s->path);
}

static void rows_of_nodes(service *s, uint64_t *out_rows)
{
    for (uint32_t n = 0; n < s->form->nodes; n++) {
        Expertd__V1__NodeStatusReply *status = ep_test_cluster_node_status(&s->cluster, n);
        out_rows[n] = status->rows_served;
        protobuf_c_message_free_unpacked(&status->base, NULL);
    }
}

/* ---- traffic ---- */

typedef struct batch {
    uint32_t tokens;
    uint16_t *x, *y;
    int32_t *ids;
    float *scales;
} batch;

static double drawn(uint64_t *random)
{
    return (double)(ep_splitmix64(random) >> 11) * 0x1p-53;
}

/* A token's experts, one after another, each by r^-zipf of those left. Ranks are spread over the
 * experts. */
static void draw_experts(const configuration *form, uint64_t *random, int32_t *out_ids)
{
    double sum = 0;
    bool taken[256] = {false};
    for (uint32_t e = 0; e < form->experts; e++) {
        sum += pow(e + 1.0, -form->zipf);
    }
    for (uint32_t k = 0; k < form->top_k; k++) {
        double point = drawn(random) * sum;
        uint32_t rank = 0, last = 0;
        for (; rank < form->experts; rank++) {
            if (!taken[rank]) {
                last = rank;
                point -= pow(rank + 1.0, -form->zipf);
                if (point < 0) {
                    break;
                }
            }
        }
        taken[last] = true;
        sum -= pow(last + 1.0, -form->zipf);
        /* counts of experts are powers of two */
        out_ids[k] = (int32_t)((last * 37u + 11u) % form->experts);
    }
}

static void batch_init(batch *b, const configuration *form, uint32_t tokens, uint64_t seed)
{
    const size_t values = (size_t)tokens * form->hidden, slots = (size_t)tokens * form->top_k;
    uint64_t random = seed;
    *b = (batch){.tokens = tokens,
                 .x = calloc(values, sizeof(uint16_t)),
                 .y = calloc(values, sizeof(uint16_t)),
                 .ids = calloc(slots, sizeof(int32_t)),
                 .scales = calloc(slots, sizeof(float))};
    EP_TEST_CHECK(b->x != NULL && b->y != NULL && b->ids != NULL && b->scales != NULL, "no memory");
    for (size_t i = 0; i < values; i++) {
        b->x[i] = ep_f32_to_bf16((float)(drawn(&random) - 0.5));
    }
    for (uint32_t t = 0; t < tokens; t++) {
        draw_experts(form, &random, b->ids + (size_t)t * form->top_k);
    }
    for (size_t i = 0; i < slots; i++) {
        b->scales[i] = 1.0f / (float)form->top_k;
    }
}

static void batch_fini(batch *b)
{
    free(b->x);
    free(b->y);
    free(b->ids);
    free(b->scales);
}

static double call_us(service *s, const batch *b)
{
    const uint32_t tokens = b->tokens, top_k = s->form->top_k, hidden = s->form->hidden;
    ep_moe_args args;
    ep_moe_result result = {.struct_bytes = sizeof(result)};
    ep_tensor y = ep_tensor_2d(b->y, EP_DTYPE_BF16, tokens, hidden);
    ep_moe_args_init(&args);
    args.model = MODEL;
    args.x = ep_tensor_2d(b->x, EP_DTYPE_BF16, tokens, hidden);
    args.expert_ids = ep_tensor_2d(b->ids, EP_DTYPE_I32, tokens, top_k);
    args.expert_scales = ep_tensor_2d(b->scales, EP_DTYPE_F32, tokens, top_k);
    const double begin_us = bench_now_us();
    const ep_err err = ep_moe_forward(s->client, &args, &y, &result);
    const double us = bench_now_us() - begin_us;
    EP_TEST_CHECK(err == EP_OK, "%s", result.error.text);
    return us;
}

/* ---- what is measured, and what is planned ---- */

static void run_ctl(ep_test_cluster *cluster, const char *line, int code_max, const char *to_path)
{
    char *output = NULL;
    const int code = ep_test_cluster_ctl(cluster, &output, "%s", line);
    EP_TEST_CHECK(code <= code_max && ep_test_write_file(to_path, output, 0600),
                  "expertctl %s: %d: %s", line, code, output);
    free(output);
}

/* Other traffic of the same kind, as the service counts it. */
static void count_load(service *s, const char *to_path)
{
    json_int_t slots = 0;
    for (uint32_t t = 0; t < COUNTED_TOKENS; t += 256) {
        batch b;
        batch_init(&b, s->form, 256, 1000 + t);
        call_us(s, &b);
        batch_fini(&b);
    }
    /* nodes report with their heartbeats */
    while (slots < (json_int_t)COUNTED_TOKENS * s->form->top_k) {
        run_ctl(&s->cluster, "stats --experts -o json", 0, to_path);
        json_t *root = json_load_file(to_path, 0, NULL);
        slots = json_integer_value(
            json_object_get(json_array_get(json_object_get(root, "layers"), 0), "slots"));
        json_decref(root);
    }
}

typedef struct planned {
    double us;
    double balance;
} planned;

static planned ask_planner(service *s, const char *load_path)
{
    char machine[EP_TEST_PATH_BYTES + 16], config[EP_TEST_PATH_BYTES + 16], nodes[16], at_once[16],
        tokens[16];
    char *output = NULL;
    snprintf(machine, sizeof(machine), "%s/machine.json", reference.cluster.dir);
    snprintf(config, sizeof(config), "%s/config.json", s->path);
    snprintf(nodes, sizeof(nodes), "%u", s->form->nodes);
    snprintf(at_once, sizeof(at_once), "%ld",
             sysconf(_SC_NPROCESSORS_ONLN) < s->form->nodes ? sysconf(_SC_NPROCESSORS_ONLN)
                                                            : (long)s->form->nodes);
    snprintf(tokens, sizeof(tokens), "%u", s->form->tokens);
    do { /* other load may have been in the way */
        run_ctl(&reference.cluster,
                "tune --model " MODEL " --layer 0 --tokens 1,512 --rounds 6 --seconds 50ms -o json",
                1, machine);
        free(output);
        output = NULL;
        const int code = ep_test_process_run_line(
            s->cluster.dir, ep_test_expertctl, NULL, PATIENCE_MS, &output,
            "plan --model %s --nodes %s --trace %s --measured %s --tokens %s --weight-bits %s "
            "--nodes-per-host %s --nodes-at-once %s -o json",
            config, nodes, load_path, machine, tokens, s->form->weight_bits, nodes, at_once);
        if (code != 0) {
            fprintf(stderr, "%s", output);
        }
    } while (output[0] != '{');
    json_t *root = json_loads(output, 0, NULL), *uniform = json_object_get(root, "uniform");
    const planned p = {1e6 * json_real_value(json_object_get(uniform, "step_seconds")),
                       json_real_value(json_object_get(uniform, "worst_busiest_over_mean"))};
    EP_TEST_CHECK(p.us > 0 && p.balance > 0, "no plan: %s", output);
    json_decref(root);
    free(output);
    return p;
}

/* Median latency of a call, over as many batches as there are. */
static double take_us(service *s, const batch *batches, uint32_t count, uint32_t *turn)
{
    static double us[CALLS_MAX];
    uint32_t calls = 0;
    const double end_us = bench_now_us() + TAKE_US;
    while (calls < CALLS_MIN || (calls < CALLS_MAX && bench_now_us() < end_us)) {
        us[calls++] = call_us(s, &batches[(*turn)++ % count]);
    }
    return bench_quantile(us, calls, 0.5);
}

/* ---- rows ---- */

static void add_row(const char *name, double value, const char *unit, double rival)
{
    bench_report_rival(report, value, unit, rival, fmax(value / rival, rival / value), BENCH_LOWER,
                       BAR, "%s", name);
}

/* Busiest node over the mean, by the rows that nodes computed of all batches. */
static double measure_balance(service *s, const batch *batches, uint32_t count)
{
    uint64_t before[EP_TEST_NODES_MAX], after[EP_TEST_NODES_MAX];
    double busiest = 0, sum = 0;
    rows_of_nodes(s, before);
    for (uint32_t b = 0; b < count; b++) {
        call_us(s, &batches[b]);
    }
    rows_of_nodes(s, after);
    for (uint32_t n = 0; n < s->form->nodes; n++) {
        busiest = fmax(busiest, (double)(after[n] - before[n]));
        sum += (double)(after[n] - before[n]);
    }
    return busiest * s->form->nodes / sum;
}

static void compare(const configuration *form, uint32_t number, uint32_t takes)
{
    static service s;
    static batch batches[BATCHES_MAX];
    const uint32_t count =
        form->tokens * BATCHES < BATCHES_MAX ? BATCHES_MAX / form->tokens : BATCHES;
    double ratios[TAKES_MAX], us[TAKES_MAX];
    uint32_t turn = 0;
    char name[64], text[96], load[EP_TEST_PATH_BYTES + 16];
    planned p = {0, 0};
    service_begin(&s, form);
    snprintf(load, sizeof(load), "%s/load.json", s.cluster.dir);
    count_load(&s, load);
    for (uint32_t b = 0; b < count; b++) {
        batch_init(&batches[b], form, form->tokens, 1 + b);
    }
    const double balance = measure_balance(&s, batches, count);
    for (uint32_t i = 0; i < takes; i++) {
        p = ask_planner(&s, load);
        us[i] = take_us(&s, batches, count, &turn);
        ratios[i] = us[i] / p.us;
    }
    const double median_us = bench_quantile(us, takes, 0.5),
                 ratio = bench_quantile(ratios, takes, 0.5);
    snprintf(name, sizeof(name), "%u: %u nodes, %ux%u, %u of %u, T %u%s%s", number, form->nodes,
             form->hidden, form->inner, form->top_k, form->experts, form->tokens,
             form->zipf > 0 ? ", skewed" : "", form->format != EP_WEIGHTS_NONE ? ", int4" : "");
    snprintf(text, sizeof(text), "%s: a layer", name);
    add_row(text, median_us, "us", median_us / ratio);
    snprintf(text, sizeof(text), "%s: balance", name);
    add_row(text, balance, "times", p.balance);
    for (uint32_t b = 0; b < count; b++) {
        batch_fini(&batches[b]);
    }
    service_end(&s);
}

int main(int argc, char **argv)
{
    const uint32_t count = sizeof(all) / sizeof(all[0]);
    uint32_t takes = TAKES, wanted = 0;
    for (int i = 2; i < argc; i++) {
        unsigned number;
        if (sscanf(argv[i], "takes=%u", &number) == 1 && number >= 1 && number <= TAKES_MAX) {
            takes = number;
        } else if (sscanf(argv[i], "%u", &number) == 1 && number >= 1 && number <= count) {
            wanted |= 1u << number;
        } else {
            fprintf(stderr, "bench_planner: '%s' is no option; there are: takes=1..%d and 1..%u\n",
                    argv[i], TAKES_MAX, count);
            return 2;
        }
    }
    setenv("LIBEXPERTD_LANES", "stream", 1); /* as between hosts */
    report = bench_report_create("plans beside measurements; rival: what expertctl plan said");
    service_begin(&reference, &measured_at);
    for (uint32_t c = 0; c < count; c++) {
        if (wanted == 0 || (wanted >> (c + 1) & 1) != 0) {
            compare(&all[c], c + 1, takes);
        }
    }
    service_end(&reference);
    return bench_report_finish(report, argc > 1 ? argv[1] : NULL);
}
