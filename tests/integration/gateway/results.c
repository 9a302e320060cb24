/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gateway's results have the bits of the direct client's (which other tests compare with the
 * oracle's), for ids and for logits, all element types, masks, T from 0 to many windows; and
 * through expertctl, those of the oracle program. A node killed under gateway calls costs none of
 * them.
 */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/numeric.h"
#include "base/random.h"
#include "gate_options.h"
#include "gateway_fixture.h"
#include "model/safetensors_writer.h"
#include "moe/convert.h"

enum { TOKENS_MAX = 5000, CALLERS = 6, CALLS_AFTER = 100 };

typedef struct batch {
    uint32_t tokens;
    uint8_t x[TOKENS_MAX * GATEWAY_HIDDEN * 4];
    float x_scales[TOKENS_MAX];
    int64_t ids64[TOKENS_MAX * GATEWAY_TOP_K];
    int32_t ids32[TOKENS_MAX * GATEWAY_TOP_K];
    float scales[TOKENS_MAX * GATEWAY_TOP_K];
    uint16_t scales16[TOKENS_MAX * GATEWAY_TOP_K];
    float logits[TOKENS_MAX * GATEWAY_EXPERTS];
    uint8_t mask[TOKENS_MAX];
} batch;

static float draw(uint64_t *state)
{
    return (float)(ep_splitmix64(state) >> 40) * 0x1p-23f - 1.0f;
}

static void fill(batch *b, ep_dtype x_dtype, uint32_t tokens, uint64_t seed)
{
    float row[GATEWAY_HIDDEN];
    b->tokens = tokens;
    for (uint32_t t = 0; t < tokens; t++) {
        for (uint32_t h = 0; h < GATEWAY_HIDDEN; h++) {
            row[h] = draw(&seed);
            if (x_dtype == EP_DTYPE_I8) {
                b->x[t * GATEWAY_HIDDEN + h] = (uint8_t)(int8_t)(row[h] * 127.0f);
            }
        }
        if (x_dtype != EP_DTYPE_I8) {
            ep_row_narrow(row, GATEWAY_HIDDEN, x_dtype,
                          b->x + (size_t)t * GATEWAY_HIDDEN * ep_dtype_bytes(x_dtype));
        }
        b->x_scales[t] = 0.01f + (float)(t % 7) * 0.001f;
        b->mask[t] = ep_splitmix64(&seed) % 4 != 0;
        uint32_t first = (uint32_t)(ep_splitmix64(&seed) % GATEWAY_EXPERTS);
        for (uint32_t k = 0; k < GATEWAY_TOP_K; k++) {
            uint32_t i = t * GATEWAY_TOP_K + k;
            b->ids32[i] = (int32_t)((first + k * 3) % GATEWAY_EXPERTS);
            b->ids64[i] = b->ids32[i];
            b->scales[i] = draw(&seed);
            b->scales16[i] = ep_f32_to_bf16(b->scales[i]);
        }
        for (uint32_t e = 0; e < GATEWAY_EXPERTS; e++) {
            b->logits[t * GATEWAY_EXPERTS + e] = 4.0f * draw(&seed);
        }
    }
}

static void arguments(batch *b, const char *model, uint32_t layer, ep_dtype x_dtype, bool wide,
                      bool masked, bool gated, ep_moe_args *args)
{
    ep_moe_args_init(args);
    args->model = model;
    args->layer = layer;
    args->x = ep_tensor_2d(b->x, x_dtype, b->tokens, GATEWAY_HIDDEN);
    if (x_dtype == EP_DTYPE_I8) {
        args->x_scales = ep_tensor_1d(b->x_scales, EP_DTYPE_F32, b->tokens);
    }
    if (!gated) {
        args->expert_ids = wide ? ep_tensor_2d(b->ids64, EP_DTYPE_I64, b->tokens, GATEWAY_TOP_K)
                                : ep_tensor_2d(b->ids32, EP_DTYPE_I32, b->tokens, GATEWAY_TOP_K);
        args->expert_scales =
            wide ? ep_tensor_2d(b->scales16, EP_DTYPE_BF16, b->tokens, GATEWAY_TOP_K)
                 : ep_tensor_2d(b->scales, EP_DTYPE_F32, b->tokens, GATEWAY_TOP_K);
    }
    if (masked) {
        args->active_mask = ep_tensor_1d(b->mask, EP_DTYPE_BOOL, b->tokens);
    }
}

typedef struct results {
    gateway_fixture *f;
    ep_cli_gateway *gateway;
    ep_client *client;
    ep_cli_gate gates[GATEWAY_MODELS];
    uint32_t calls;
} results;

static void compare(results *r, batch *b, uint32_t model, ep_dtype x_dtype, ep_dtype out_dtype,
                    ep_moe_mode mode, uint32_t variant)
{
    static uint8_t direct[TOKENS_MAX * GATEWAY_HIDDEN * 4];
    static uint8_t through[TOKENS_MAX * GATEWAY_HIDDEN * 4];
    bool gated = (variant & 1) != 0;
    bool masked = (variant & 2) != 0;
    size_t bytes = (size_t)b->tokens * GATEWAY_HIDDEN * ep_dtype_bytes(out_dtype);
    ep_moe_args args;
    ep_moe_result a = {.struct_bytes = sizeof(a)};
    ep_moe_result c;
    ep_tensor logits = ep_tensor_2d(b->logits, EP_DTYPE_F32, b->tokens, GATEWAY_EXPERTS);
    ep_tensor out = ep_tensor_2d(direct, out_dtype, b->tokens, GATEWAY_HIDDEN);
    ep_gate_config drawn = r->gates[model].layer.config;
    const ep_gate_config *gate = gated ? &drawn : NULL;
    if ((variant & 4) != 0) {
        drawn.noise_temperature = 1.5f;
        drawn.expert_dropout = 0.25f;
        drawn.seed = 1ull << 40 | variant;
    }
    arguments(b, r->f->models[model].name, gateway_layer(model), x_dtype, (variant & 4) != 0,
              masked, gated, &args);
    args.mode = mode;
    args.shared_source = (variant & 8) != 0 ? EP_MOE_SHARED_NONE : EP_MOE_SHARED_SERVICE;
    args.weight_on = (variant & 16) != 0 ? EP_MOE_WEIGHT_ON_INPUT : EP_MOE_WEIGHT_ON_OUTPUT;
    memset(direct, 0x5a, bytes);
    memset(through, 0xa5, bytes);
    ep_err err = gated ? ep_moe_forward_logits(r->client, &args, gate, &logits, &out, &a)
                       : ep_moe_forward(r->client, &args, &out, &a);
    EP_TEST_CHECK(err == EP_OK, "direct: %s", a.error.text);
    out.data = through;
    err = ep_cli_gateway_forward(r->gateway, &args, gate, &logits, &out, &c);
    EP_TEST_CHECK(err == EP_OK, "gateway: %s: %s", ep_err_name(err), c.error.text);
    EP_TEST_CHECK(memcmp(direct, through, bytes) == 0,
                  "model %u, x %s, out %s, mode %d, variant %u, T %u: other bits", model,
                  ep_dtype_name(x_dtype), ep_dtype_name(out_dtype), (int)mode, variant, b->tokens);
    EP_TEST_CHECK(strcmp(a.numerics, c.numerics) == 0 && a.epoch_term == c.epoch_term &&
                      a.mode == c.mode,
                  "numerics %s, term %llu, mode %d", c.numerics, (unsigned long long)c.epoch_term,
                  (int)c.mode);
    r->calls++;
}

static void compare_all(gateway_fixture *f)
{
    static const ep_dtype x_types[] = {EP_DTYPE_BF16, EP_DTYPE_F16, EP_DTYPE_F32, EP_DTYPE_I8};
    static const ep_dtype out_types[] = {EP_DTYPE_F32, EP_DTYPE_BF16, EP_DTYPE_F16};
    static const uint32_t counts[] = {0, 1, 17, 300, TOKENS_MAX};
    static batch b;
    ep_error error;
    results r = {
        .f = f, .gateway = gateway_open(f), .client = ep_test_cluster_client(&f->cluster, NULL)};
    for (uint32_t m = 0; m < GATEWAY_MODELS; m++) {
        EP_TEST_CHECK(ep_cli_gate_read(f->paths[m], gateway_layer(m), &r.gates[m], &error) == EP_OK,
                      "%s", error.text);
    }
    EP_TEST_CHECK(r.gates[1].layer.bias != NULL, "the second model has no bias");
    for (uint32_t t = 0; t < EP_ARRAY_COUNT(counts); t++) {
        for (uint32_t x = 0; x < EP_ARRAY_COUNT(x_types); x++) {
            fill(&b, x_types[x], counts[t], 100 * t + x);
            for (uint32_t variant = 0; variant<32; variant += counts[t]> 300 ? 5 : 1) {
                compare(&r, &b, (variant + x) % 2, x_types[x], out_types[(variant + x + t) % 3],
                        (ep_moe_mode)((variant + t) % 3), variant);
            }
        }
    }
    for (uint32_t m = 0; m < GATEWAY_MODELS; m++) {
        ep_cli_gate_fini(&r.gates[m]);
    }
    ep_client_destroy(r.client);
    ep_cli_gateway_close(r.gateway);
    printf("%u gateway calls equal the direct client's\n", r.calls);
}

/* ---- expertctl ---- */

static void run_expertctl(gateway_fixture *f)
{
    static batch b;
    enum { TOKENS = 40, PATH = EP_TEST_PATH_BYTES + 32 };
    char paths[4][PATH];
    static const char *const names[] = {"in", "gateway", "oracle", "logits"};
    ep_error error;
    for (uint32_t i = 0; i < 4; i++) {
        snprintf(paths[i], PATH, "%s/%s.safetensors", f->cluster.dir, names[i]);
    }
    fill(&b, EP_DTYPE_BF16, TOKENS, 5);
    const ep_named_tensor tensors[] = {
        {"x", ep_tensor_2d(b.x, EP_DTYPE_BF16, TOKENS, GATEWAY_HIDDEN)},
        {"expert_ids", ep_tensor_2d(b.ids32, EP_DTYPE_I32, TOKENS, GATEWAY_TOP_K)},
        {"expert_scales", ep_tensor_2d(b.scales, EP_DTYPE_F32, TOKENS, GATEWAY_TOP_K)},
        {"logits", ep_tensor_2d(b.logits, EP_DTYPE_F32, TOKENS, GATEWAY_EXPERTS)},
    };
    EP_TEST_CHECK(
        ep_safetensors_write(paths[0], tensors, EP_ARRAY_COUNT(tensors), NULL, 0, &error) == EP_OK,
        "%s", error.text);
    char *output = NULL;
    EP_TEST_CHECK(ep_test_process_run_line(f->cluster.dir, ep_test_ref_forward, NULL,
                                           EP_TEST_PATIENCE_MS, &output,
                                           "--model %s --layer 1 --in %s --out %s", f->paths[1],
                                           paths[0], paths[2]) == 0,
                  "%s", output);
    free(output);
    EP_TEST_CHECK(
        ep_test_cluster_ctl(
            &f->cluster, &output,
            "forward --gateway --model=deepseek --layer=1 --split-tokens=7 --in %s --out %s",
            paths[0], paths[1]) == 0,
        "%s", output);
    free(output);
    char compare_command[3 * PATH];
    snprintf(compare_command, sizeof(compare_command), "cmp '%s' '%s'", paths[1], paths[2]);
    EP_TEST_CHECK(system(compare_command) == 0,
                  "expertctl forward --gateway differs from the oracle");
    EP_TEST_CHECK(ep_test_cluster_ctl(
                      &f->cluster, &output,
                      "forward --gateway --model=deepseek --layer=1 --logits %s --in %s --out %s",
                      f->paths[1], paths[0], paths[3]) == 0,
                  "%s", output);
    free(output);
    snprintf(compare_command, sizeof(compare_command), "cmp -s '%s' '%s'", paths[1], paths[3]);
    EP_TEST_CHECK(system(compare_command) != 0, "logits gave the result of the ids");
}

/* ---- a node dies ---- */

typedef struct caller {
    gateway_fixture *f;
    uint32_t number;
} caller;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static uint32_t finished; /* under lock */
static _Atomic uint32_t rerouted;
static _Atomic bool stop;

static void *run_caller(void *arg)
{
    caller *self = arg;
    enum { TOKENS = 64 };
    batch *b = malloc(sizeof(*b));
    uint16_t *expected = calloc(TOKENS * GATEWAY_HIDDEN, sizeof(*expected));
    uint16_t *y = calloc(TOKENS * GATEWAY_HIDDEN, sizeof(*y));
    ep_cli_gateway *gateway = gateway_open(self->f);
    ep_moe_args args;
    ep_moe_result result;
    EP_TEST_CHECK(b != NULL && expected != NULL && y != NULL, "no memory");
    fill(b, EP_DTYPE_BF16, TOKENS, 1000 + self->number);
    arguments(b, "mixtral", 0, EP_DTYPE_BF16, false, false, false, &args);
    ep_tensor out = ep_tensor_2d(expected, EP_DTYPE_BF16, TOKENS, GATEWAY_HIDDEN);
    EP_TEST_CHECK(ep_cli_gateway_forward(gateway, &args, NULL, NULL, &out, &result) == EP_OK, "%s",
                  result.error.text);
    out.data = y;
    while (!atomic_load(&stop)) {
        memset(y, 0, TOKENS * GATEWAY_HIDDEN * sizeof(*y));
        ep_err err = ep_cli_gateway_forward(gateway, &args, NULL, NULL, &out, &result);
        EP_TEST_CHECK(err == EP_OK, "a call failed: %s: %s", ep_err_name(err), result.error.text);
        EP_TEST_CHECK(memcmp(y, expected, TOKENS * GATEWAY_HIDDEN * sizeof(*y)) == 0, "other bits");
        atomic_fetch_add(&rerouted, result.rerouted_frames);
        pthread_mutex_lock(&lock);
        finished++;
        pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&lock);
    }
    ep_cli_gateway_close(gateway);
    free(y);
    free(expected);
    free(b);
    return NULL;
}

/* Until so many calls have finished since the last time it was asked; how many there are. */
static uint32_t wait_finished(uint32_t more)
{
    pthread_mutex_lock(&lock);
    uint32_t wanted = finished + more;
    while (finished < wanted) {
        pthread_cond_wait(&changed, &lock);
    }
    uint32_t count = finished;
    pthread_mutex_unlock(&lock);
    return count;
}

static void kill_a_node(gateway_fixture *f)
{
    pthread_t threads[CALLERS];
    caller callers[CALLERS];
    for (uint32_t i = 0; i < CALLERS; i++) {
        callers[i] = (caller){f, i};
        EP_TEST_CHECK(pthread_create(&threads[i], NULL, run_caller, &callers[i]) == 0, "no thread");
    }
    uint32_t before = wait_finished(CALLS_AFTER);
    uint64_t in_flight = ep_test_cluster_wait_in_flight(&f->cluster, 1);
    EP_TEST_CHECK(ep_test_process_stop(&f->cluster.nodes[1], SIGKILL, EP_TEST_PATIENCE_MS) ==
                      128 + SIGKILL,
                  "the node lives");
    uint32_t after = wait_finished(CALLS_AFTER);
    atomic_store(&stop, true);
    for (uint32_t i = 0; i < CALLERS; i++) {
        pthread_join(threads[i], NULL);
    }
    printf("node killed with %llu requests in flight: %u gateway calls around it, none failed, %u "
           "frames re-routed\n",
           (unsigned long long)in_flight, after - before, atomic_load(&rerouted));
}

int main(void)
{
    static gateway_fixture f;
    gateway_fixture_init(&f, 2, NULL);
    gateway_wait_table(&f);
    compare_all(&f);
    run_expertctl(&f);
    kill_a_node(&f);
    gateway_fixture_fini(&f);
    return 0;
}
