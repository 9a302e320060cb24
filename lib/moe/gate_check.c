/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of a router's configuration and logits. */
#include "moe/gate_check.h"

#include <inttypes.h>
#include <math.h>

#include "base/error.h"
#include "base/struct_size.h"
#include "moe/flow.h"

#define BAD(...) ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, __VA_ARGS__)

static ep_err check_sizes(const ep_gate_config *config, ep_error *out_error)
{
    if (config->experts < 1 || config->experts > EP_EXPERTS_MAX) {
        return BAD("router has %" PRIu32 " experts: allowed 1..%d", config->experts,
                   EP_EXPERTS_MAX);
    }
    uint32_t top_k_max = config->experts < EP_TOP_K_MAX ? config->experts : EP_TOP_K_MAX;
    if (config->top_k < 1 || config->top_k > top_k_max) {
        return BAD("router's top_k %" PRIu32 ": allowed 1..%" PRIu32, config->top_k, top_k_max);
    }
    return EP_OK;
}

static ep_err check_scores(const ep_gate_config *config, ep_error *out_error)
{
    if (config->select < EP_GATE_LOGIT || config->select > EP_GATE_SPARSEMIXER ||
        config->select == EP_GATE_SOFTMAX_SELECTED) {
        return BAD("router selects by score %u: allowed 1..4, 6", (unsigned)config->select);
    }
    if (config->weight < EP_GATE_LOGIT || config->weight > EP_GATE_SPARSEMIXER) {
        return BAD("router weighs by score %u: allowed 1..6", (unsigned)config->weight);
    }
    bool is_mixer = config->select == EP_GATE_SPARSEMIXER;
    if (is_mixer != (config->weight == EP_GATE_SPARSEMIXER)) {
        return BAD(
            "router selects by score %u and weighs by %u: allowed with 6 (sparsemixer): both 6",
            (unsigned)config->select, (unsigned)config->weight);
    }
    if (is_mixer && (config->bias != NULL || config->groups > 1 || config->chosen != NULL ||
                     config->expert_dropout != 0.0f)) {
        return BAD(
            "a sparsemixer router has a bias, groups, chosen experts or dropout: allowed none");
    }
    if (config->chosen != NULL &&
        (config->noise_temperature != 0.0f || config->expert_dropout != 0.0f)) {
        return BAD("a router with chosen experts has noise or dropout: allowed neither, for "
                   "nothing is left to choose");
    }
    return EP_OK;
}

static ep_err check_groups(const ep_gate_config *config, ep_error *out_error)
{
    if (config->groups <= 1) {
        return config->groups_kept <= 1
                   ? EP_OK
                   : BAD("router keeps %" PRIu32 " groups: allowed 0, 1 without groups",
                         config->groups_kept);
    }
    if (config->groups > EP_GATE_GROUPS_MAX || config->experts % config->groups != 0) {
        return BAD("router has %" PRIu32 " groups: allowed 0..%d, a divisor of %" PRIu32 " experts",
                   config->groups, EP_GATE_GROUPS_MAX, config->experts);
    }
    if (config->groups_kept < 1 || config->groups_kept > config->groups) {
        return BAD("router keeps %" PRIu32 " groups: allowed 1..%" PRIu32, config->groups_kept,
                   config->groups);
    }
    if (config->group_best < 1 || config->group_best > 2) {
        return BAD("a group's score is of its best %" PRIu32 ": allowed 1, 2", config->group_best);
    }
    if ((unsigned)config->group_mask > EP_GROUP_MASK_MINUS_INF) {
        return BAD("group mask %u: allowed 0 (zero), 1 (minus infinity)",
                   (unsigned)config->group_mask);
    }
    uint32_t selectable = config->groups_kept * (config->experts / config->groups);
    if (config->group_mask == EP_GROUP_MASK_MINUS_INF && config->top_k > selectable) {
        return BAD("router's top_k %" PRIu32 ": allowed 1..%" PRIu32
                   ", the experts of the groups kept",
                   config->top_k, selectable);
    }
    return EP_OK;
}

static ep_err check_finite(const char *what, const float *values, uint32_t experts,
                           ep_error *out_error)
{
    for (uint32_t e = 0; values != NULL && e < experts; e++) {
        if (!isfinite(values[e])) {
            return BAD("router's %s of expert %" PRIu32 " is %g: only finite values are allowed",
                       what, e, (double)values[e]);
        }
    }
    return EP_OK;
}

static ep_err check_positive(const char *what, float value, ep_error *out_error)
{
    return value >= 0.0f && isfinite(value)
               ? EP_OK
               : BAD("router's %s %g: allowed 0 or more", what, (double)value);
}

static ep_err check_numbers(const ep_gate_config *config, ep_error *out_error)
{
    const struct {
        const char *what;
        float value;
    } numbers[] = {{"scaling factor", config->scaling_factor},
                   {"epsilon", config->epsilon},
                   {"smallest sum", config->sum_min},
                   {"softcap", config->softcap},
                   {"jitter", config->jitter}};
    ep_err err = EP_OK;
    for (size_t i = 0; err == EP_OK && i < sizeof(numbers) / sizeof(numbers[0]); i++) {
        err = check_positive(numbers[i].what, numbers[i].value, out_error);
    }
    if (err != EP_OK) {
        return err;
    }
    if (config->noise_temperature != 0.0f && !(config->noise_temperature >= EP_GATE_NOISE_MIN &&
                                               config->noise_temperature <= EP_GATE_NOISE_MAX)) {
        return BAD("router's noise temperature %g: allowed 0 (off) or %g..%g",
                   (double)config->noise_temperature, (double)EP_GATE_NOISE_MIN,
                   (double)EP_GATE_NOISE_MAX);
    }
    if (!(config->expert_dropout >= 0.0f && config->expert_dropout <= EP_GATE_DROPOUT_MAX)) {
        return BAD("router's expert dropout %g: allowed 0..%g", (double)config->expert_dropout,
                   (double)EP_GATE_DROPOUT_MAX);
    }
    err = check_finite("bias", config->bias, config->experts, out_error);
    return err == EP_OK ? check_finite("factor", config->expert_factors, config->experts, out_error)
                        : err;
}

ep_err ep_gate_take_load(const ep_gate_load *given, ep_gate_load *out_load, ep_error *out_error)
{
    *out_load = (ep_gate_load){0};
    return ep_struct_in("the gate's load", given, EP_STRUCT_UPTO(ep_gate_load, mean_probabilities),
                        out_load, sizeof(*out_load), out_error);
}

ep_err ep_gate_take_config(const ep_gate_config *given, ep_gate_config *out_config,
                           ep_error *out_error)
{
    ep_gate_load load;
    *out_config = (ep_gate_config){0};
    ep_err err = ep_struct_in("the gate", given, EP_STRUCT_UPTO(ep_gate_config, weight), out_config,
                              sizeof(*out_config), out_error);
    err = err == EP_OK ? check_sizes(out_config, out_error) : err;
    err = err == EP_OK ? check_scores(out_config, out_error) : err;
    err = err == EP_OK ? check_groups(out_config, out_error) : err;
    err = err == EP_OK && out_config->load != NULL
              ? ep_gate_take_load(out_config->load, &load, out_error)
              : err;
    return err == EP_OK ? check_numbers(out_config, out_error) : err;
}

static bool has_softmax(const ep_gate_config *config)
{
    return config->select == EP_GATE_SOFTMAX || config->weight == EP_GATE_SOFTMAX ||
           config->weight == EP_GATE_SOFTMAX_SELECTED || config->weight == EP_GATE_SPARSEMIXER;
}

ep_err ep_gate_check_logits(const ep_gate_config *config, uint32_t tokens, const float *logits,
                            ep_error *out_error)
{
    for (uint32_t t = 0; t < tokens; t++) {
        const float *row = logits + (size_t)t * config->experts;
        uint32_t best = 0;
        for (uint32_t e = 0; e < config->experts; e++) {
            if (isnan(row[e])) {
                return BAD("router logit is NaN at token %" PRIu32 ", expert %" PRIu32, t, e);
            }
            if (row[e] > row[best]) {
                best = e;
            }
        }
        if (has_softmax(config) && !isfinite(row[best])) {
            return BAD("router logit is %g at token %" PRIu32 ", expert %" PRIu32
                       ": a softmax needs a finite maximum",
                       (double)row[best], t, best);
        }
    }
    for (uint32_t t = 0; config->chosen != NULL && t < tokens; t++) {
        for (uint32_t k = 0; k < config->top_k; k++) {
            int32_t id = config->chosen[(size_t)t * config->top_k + k];
            if (id < 0 || (uint32_t)id >= config->experts) {
                return BAD("expert chosen for token %" PRIu32 ", slot %" PRIu32 " is %" PRId32
                           ": allowed 0..%" PRIu32,
                           t, k, id, config->experts - 1);
            }
        }
    }
    return EP_OK;
}
