/* SPDX-License-Identifier: Apache-2.0 */
/* Load statistics of one gated batch. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "base/error.h"
#include "base/float_env.h"
#include "base/struct_size.h"
#include "expertd/gate.h"
#include "moe/gate_check.h"
#include "moe/load_statistics.h"

static double log_sum_exp(const float *logits, uint32_t experts)
{
    double max = (double)logits[0], sum = 0;
    for (uint32_t e = 1; e < experts; e++) {
        max = fmax(max, (double)logits[e]);
    }
    for (uint32_t e = 0; isfinite(max) && e < experts; e++) {
        sum += exp((double)logits[e] - max);
    }
    return isfinite(max) ? max + log(sum) : max;
}

static ep_err check(const ep_gate_config *config, uint32_t tokens, const float *logits,
                    const int32_t *ids, ep_error *out_error)
{
    ep_err err = ep_gate_check_logits(config, tokens, logits, out_error);
    for (size_t i = 0; err == EP_OK && i < (size_t)tokens * config->top_k; i++) {
        if (ids[i] < 0 || (uint32_t)ids[i] >= config->experts) {
            err = ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                               "expert of token %zu, slot %zu is %" PRId32 ": allowed 0..%" PRIu32,
                               i / config->top_k, i % config->top_k, ids[i], config->experts - 1);
        }
    }
    return err;
}

/* counts and sums [E] must be 0. */
static EP_FLOAT_WORK ep_err compute(const ep_gate_config *config, uint32_t tokens,
                                    const float *logits, const int32_t *ids, const uint8_t *active,
                                    uint64_t *counts, double *sums, ep_gate_load *out_load)
{
    const uint32_t experts = config->experts;
    ep_load_statistics statistics = {0};
    uint64_t counted = 0;
    double z_sum = 0;
    for (uint32_t t = 0; t < tokens; t++) {
        const float *row = logits + (size_t)t * experts;
        if (active != NULL && active[t] == 0) {
            continue;
        }
        for (uint32_t k = 0; k < config->top_k; k++) {
            counts[ids[(size_t)t * config->top_k + k]]++;
        }
        ep_load_add_probabilities(config->select == EP_GATE_SIGMOID, row, experts, sums);
        const double z = log_sum_exp(row, experts);
        z_sum += z * z;
        counted++;
    }
    ep_err err = ep_load_statistics_compute(counts, experts, sums, counted, &statistics);
    if (err != EP_OK) {
        return err;
    }
    for (uint32_t e = 0; e < experts; e++) {
        if (out_load->fractions != NULL) {
            out_load->fractions[e] =
                statistics.slots > 0 ? (double)counts[e] / (double)statistics.slots : 0;
        }
        if (out_load->mean_probabilities != NULL) {
            out_load->mean_probabilities[e] = counted > 0 ? sums[e] / (double)counted : 0;
        }
    }
    out_load->slots = statistics.slots;
    out_load->max_over_mean = statistics.max_over_mean;
    out_load->auxiliary_loss = statistics.auxiliary_loss;
    out_load->z_loss = counted > 0 ? z_sum / (double)counted : 0;
    return EP_OK;
}

ep_err ep_gate_load_compute(const ep_gate_config *given, uint32_t tokens, const float *logits,
                            const int32_t *ids, const uint8_t *active, ep_gate_load *out_load,
                            ep_error *out_error)
{
    ep_gate_config config;
    ep_gate_load load;
    ep_err err = ep_gate_take_config(given, &config, out_error);
    err = err == EP_OK ? ep_gate_take_load(out_load, &load, out_error) : err;
    err = err == EP_OK ? check(&config, tokens, logits, ids, out_error) : err;
    if (err != EP_OK) {
        return err;
    }
    uint64_t *counts = calloc(config.experts, sizeof(*counts));
    double *sums = calloc(config.experts, sizeof(*sums));
    err = EP_ERR_NO_MEMORY;
    if (counts != NULL && sums != NULL) {
        const ep_float_env env = ep_float_env_begin();
        err = compute(&config, tokens, logits, ids, active, counts, sums, &load);
        ep_float_env_end(env);
    }
    free(counts);
    free(sums);
    if (err != EP_OK) {
        return ep_error_set(out_error, err, "no memory for the load of %" PRIu32 " experts",
                            config.experts);
    }
    ep_struct_out(out_load, &load, sizeof(load));
    return EP_OK;
}
