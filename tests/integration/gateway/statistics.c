/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Counts over real daemons: what the coordinator adds up is exactly what was asked for, with every
 * expert in two copies, after a restart of the coordinator, and after a node ends and others take
 * over; probabilities are those of the logits sent; expertctl stats and /metrics say the same.
 */
#include <jansson.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "coordinator.pb-c.h"
#include "gate_options.h"
#include "gateway_fixture.h"

enum { TOKENS = 30, LAYER = 0 };

static uint16_t x[TOKENS * GATEWAY_HIDDEN];
static uint16_t y[TOKENS * GATEWAY_HIDDEN];
static float logits[TOKENS * GATEWAY_EXPERTS];
static uint8_t mask[TOKENS];

/* The masked tokens are not counted. Expert 0 is the fullest. */
static void run_ids(gateway_fixture *f, uint64_t *counts)
{
    int32_t ids[TOKENS * GATEWAY_TOP_K];
    float scales[TOKENS * GATEWAY_TOP_K];
    ep_moe_args args;
    ep_moe_result result;
    ep_cli_gateway *gateway = gateway_open(f);
    for (int32_t t = 0; t < TOKENS; t++) {
        mask[t] = t % 5 != 0;
        ids[2 * t] = t % 3 == 0 ? 0 : t % 4;
        ids[2 * t + 1] = 4 + t % 3;
        scales[2 * t] = scales[2 * t + 1] = 0.5f;
        counts[ids[2 * t]] += mask[t];
        counts[ids[2 * t + 1]] += mask[t];
    }
    ep_moe_args_init(&args);
    args.model = "mixtral";
    args.layer = LAYER;
    args.x = ep_tensor_2d(x, EP_DTYPE_BF16, TOKENS, GATEWAY_HIDDEN);
    args.expert_ids = ep_tensor_2d(ids, EP_DTYPE_I32, TOKENS, GATEWAY_TOP_K);
    args.expert_scales = ep_tensor_2d(scales, EP_DTYPE_F32, TOKENS, GATEWAY_TOP_K);
    args.active_mask = ep_tensor_1d(mask, EP_DTYPE_BOOL, TOKENS);
    ep_tensor out = ep_tensor_2d(y, EP_DTYPE_BF16, TOKENS, GATEWAY_HIDDEN);
    EP_TEST_CHECK(ep_cli_gateway_forward(gateway, &args, NULL, NULL, &out, &result) == EP_OK, "%s",
                  result.error.text);
    ep_cli_gateway_close(gateway);
}

/* Logits of token t favour experts t and t + 1. */
static void run_logits(gateway_fixture *f, uint64_t *counts, double *means)
{
    ep_cli_gate gate;
    ep_error error;
    ep_moe_args args;
    ep_moe_result result;
    ep_cli_gateway *gateway = gateway_open(f);
    EP_TEST_CHECK(ep_cli_gate_read(f->paths[0], LAYER, &gate, &error) == EP_OK, "%s", error.text);
    for (uint32_t t = 0; t < TOKENS; t++) {
        double sum = 0;
        for (uint32_t e = 0; e < GATEWAY_EXPERTS; e++) {
            uint32_t distance = (e + GATEWAY_EXPERTS - t % GATEWAY_EXPERTS) % GATEWAY_EXPERTS;
            logits[t * GATEWAY_EXPERTS + e] =
                distance < 2 ? 3.0f - (float)distance : -0.1f * (float)e;
            sum += exp((double)logits[t * GATEWAY_EXPERTS + e]);
            counts[e] += distance < 2;
        }
        for (uint32_t e = 0; e < GATEWAY_EXPERTS; e++) {
            means[e] += exp((double)logits[t * GATEWAY_EXPERTS + e]) / sum / TOKENS;
        }
    }
    ep_moe_args_init(&args);
    args.model = "mixtral";
    args.layer = LAYER;
    args.x = ep_tensor_2d(x, EP_DTYPE_BF16, TOKENS, GATEWAY_HIDDEN);
    ep_tensor chosen = ep_tensor_2d(logits, EP_DTYPE_F32, TOKENS, GATEWAY_EXPERTS);
    ep_tensor out = ep_tensor_2d(y, EP_DTYPE_BF16, TOKENS, GATEWAY_HIDDEN);
    EP_TEST_CHECK(
        ep_cli_gateway_forward(gateway, &args, &gate.layer.config, &chosen, &out, &result) == EP_OK,
        "%s", result.error.text);
    ep_cli_gateway_close(gateway);
    ep_cli_gate_fini(&gate);
}

static Expertd__V1__StatisticsReply *ask(gateway_fixture *f)
{
    Expertd__V1__StatisticsRequest request = EXPERTD__V1__STATISTICS_REQUEST__INIT;
    request.per_expert = true;
    return (Expertd__V1__StatisticsReply *)(void *)ep_test_cluster_call(
        &f->cluster, f->cluster.coordinator.rpc_url, "expertd.v1.Coordinator", "Statistics",
        &request.base);
}

/* Nodes report within a second: asks until all slots are there; their counts must then be exact,
 * and never above before. */
static void expect_counts(gateway_fixture *f, const uint64_t *counts, const double *means)
{
    uint64_t total = 0;
    uint64_t end_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    for (uint32_t e = 0; e < GATEWAY_EXPERTS; e++) {
        total += counts[e];
    }
    for (;;) {
        Expertd__V1__StatisticsReply *reply = ask(f);
        const Expertd__V1__LayerStatistics *layer = reply->n_layers == 1 ? reply->layers[0] : NULL;
        EP_TEST_CHECK(reply->n_layers <= 1 && (layer == NULL || layer->slots <= total),
                      "%zu layers, more slots than computed", reply->n_layers);
        if (layer != NULL && layer->slots == total) {
            double loss = 0;
            for (uint32_t e = 0; e < GATEWAY_EXPERTS; e++) {
                EP_TEST_CHECK(layer->counts[e] == counts[e], "expert %u: %llu slots, not %llu", e,
                              (unsigned long long)layer->counts[e], (unsigned long long)counts[e]);
                if (means != NULL) {
                    EP_TEST_CHECK(fabs(layer->mean_probability[e] - means[e]) < 1e-6,
                                  "expert %u: p %g, not %g", e, layer->mean_probability[e],
                                  means[e]);
                    loss += GATEWAY_EXPERTS * (double)counts[e] / (double)total * means[e];
                }
            }
            EP_TEST_CHECK(layer->logit_tokens == (means != NULL ? TOKENS : 0) &&
                              fabs(layer->auxiliary_loss - loss) < 1e-6,
                          "loss %g, not %g", layer->auxiliary_loss, loss);
            protobuf_c_message_free_unpacked(&reply->base, NULL);
            return;
        }
        protobuf_c_message_free_unpacked(&reply->base, NULL);
        EP_TEST_CHECK(ep_clock_now_ns() < end_ns, "the slots never came");
    }
}

static void expect_shown(gateway_fixture *f, const uint64_t *counts)
{
    char *output = NULL;
    uint64_t total = 0;
    EP_TEST_CHECK(ep_test_cluster_ctl(&f->cluster, &output,
                                      "stats --model=mixtral --layer=0 --experts -o json") == 0,
                  "%s", output);
    json_t *json = json_loads(output, 0, NULL);
    json_t *load = json_object_get(json_array_get(json_object_get(json, "layers"), 0), "load");
    EP_TEST_CHECK(json_array_size(load) == GATEWAY_EXPERTS, "%s", output);
    for (uint32_t e = 0; e < GATEWAY_EXPERTS; e++) {
        json_int_t slots = json_integer_value(json_object_get(json_array_get(load, e), "slots"));
        EP_TEST_CHECK((uint64_t)slots == counts[e], "expertctl: expert %u: %s", e, output);
        total += counts[e];
    }
    json_decref(json);
    free(output);
    EP_TEST_CHECK(ep_test_cluster_ctl(&f->cluster, &output, "stats") == 0 &&
                      strstr(output, "MAX/MEAN") != NULL && strstr(output, "mixtral") != NULL,
                  "%s", output);
    free(output);
    EP_TEST_CHECK(ep_test_cluster_ctl(&f->cluster, &output, "stats --model=nobody") != 0 &&
                      strstr(output, "any layer of model 'nobody'; there") != NULL,
                  "%s", output); /* only what was asked for is named */
    free(output);
    EP_TEST_CHECK(ep_test_cluster_ctl(&f->cluster, &output, "stats --layer=77 --version=9") != 0 &&
                      strstr(output, "layer 77 of any model version '9'; there") != NULL,
                  "%s", output);
    free(output);
    EP_TEST_CHECK(ep_test_http_get(f->cluster.coordinator.probe_url, "/metrics", &output) == 200,
                  "no metrics");
    char line[64];
    snprintf(line, sizeof(line), "layer=\"0\"} %llu\n", (unsigned long long)total);
    const char *series = strstr(output, "\nexpertd_layer_slots_total{");
    EP_TEST_CHECK(series != NULL && strstr(series, line) != NULL &&
                      strstr(output, "expertd_layer_load_gini{") != NULL &&
                      strstr(output, "expertd_expert_slots_total{") != NULL,
                  "%s", output);
    free(output);
}

/* Another coordinator hears everything again, of the nodes that are there. */
static void expect_told_again(gateway_fixture *f)
{
    uint64_t end_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    uint64_t slots = 0;
    EP_TEST_CHECK(ep_test_process_stop(&f->cluster.coordinator, SIGTERM, EP_TEST_PATIENCE_MS) == 0,
                  "the coordinator did not end well");
    ep_test_cluster_restart_coordinator(&f->cluster);
    while (slots == 0) {
        Expertd__V1__StatisticsReply *reply = ask(f);
        slots = reply->n_layers > 0 ? reply->layers[0]->slots : 0;
        protobuf_c_message_free_unpacked(&reply->base, NULL);
        EP_TEST_CHECK(ep_clock_now_ns() < end_ns, "the slots were not told again");
    }
}

int main(void)
{
    static const char *const args[] = {"--metrics-per-expert=true", NULL};
    static gateway_fixture f;
    uint64_t counts[GATEWAY_EXPERTS] = {0};
    double means[GATEWAY_EXPERTS] = {0};
    gateway_fixture_init(&f, 2, args);
    gateway_wait_table(&f);
    run_ids(&f, counts);
    expect_counts(&f, counts, NULL);
    run_logits(&f, counts, means);
    expect_counts(&f, counts, means);
    expect_shown(&f, counts);
    expect_told_again(&f);
    gateway_wait_table(&f);
    expect_counts(&f, counts, NULL); /* probabilities were the gateway's own */
    /* What an ended node computed stays; the copies elsewhere go on. */
    EP_TEST_CHECK(ep_test_process_stop(&f.cluster.nodes[0], SIGTERM, EP_TEST_PATIENCE_MS) == 0,
                  "the node did not drain");
    expect_counts(&f, counts, NULL);
    run_ids(&f, counts);
    expect_counts(&f, counts, NULL);
    gateway_fixture_fini(&f);
    return 0;
}
