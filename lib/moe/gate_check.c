/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of a router's configuration and logits. */
#include "moe/gate_check.h"

#include <inttypes.h>
#include <math.h>

#include "base/error.h"
#include "moe/flow.h"

#define BAD(...) ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, __VA_ARGS__)

static ep_err check_sizes(const ep_gate_config *config, ep_error *out_error)
{
    if (config->struct_bytes != sizeof(*config)) {
        return BAD("struct_bytes of the gate is %" PRIu32 ": this library expects %zu", config->struct_bytes,
                   sizeof(*config));
    }
    if (config->family < EP_GATE_R1 || config->family > EP_GATE_R4) {
        return BAD("router family %u: allowed 1..4", (unsigned)config->family);
    }
    if (config->experts < 1 || config->experts > EP_EXPERTS_MAX) {
        return BAD("router has %" PRIu32 " experts: allowed 1..%d", config->experts, EP_EXPERTS_MAX);
    }
    uint32_t top_k_max = config->experts < EP_TOP_K_MAX ? config->experts : EP_TOP_K_MAX;
    if (config->top_k < 1 || config->top_k > top_k_max) {
        return BAD("router's top_k %" PRIu32 ": allowed 1..%" PRIu32, config->top_k, top_k_max);
    }
    return EP_OK;
}

static ep_err check_groups(const ep_gate_config *config, ep_error *out_error)
{
    if (config->groups < 1 || config->groups > EP_GATE_GROUPS_MAX || config->experts % config->groups != 0) {
        return BAD("router has %" PRIu32 " groups: allowed 1..%d, a divisor of %" PRIu32 " experts",
                   config->groups, EP_GATE_GROUPS_MAX, config->experts);
    }
    if (config->groups_kept < 1 || config->groups_kept > config->groups) {
        return BAD("router keeps %" PRIu32 " groups: allowed 1..%" PRIu32, config->groups_kept,
                   config->groups);
    }
    if ((unsigned)config->group_mask > EP_GROUP_MASK_MINUS_INF) {
        return BAD("group mask %u: allowed 0 (zero), 1 (minus infinity)", (unsigned)config->group_mask);
    }
    uint32_t selectable = config->groups_kept * (config->experts / config->groups);
    if (config->group_mask == EP_GROUP_MASK_MINUS_INF && config->top_k > selectable) {
        return BAD("router's top_k %" PRIu32 ": allowed 1..%" PRIu32 ", the experts of the groups kept",
                   config->top_k, selectable);
    }
    return EP_OK;
}

/* The fields of grouped families must be unset (0) or neutral (1) where a family has no such step. */
static ep_err check_no_groups(const ep_gate_config *config, ep_error *out_error)
{
    if (config->groups > 1 || config->groups_kept > 1) {
        return BAD("router family R%u has no groups: allowed 1, given %" PRIu32, (unsigned)config->family,
                   config->groups);
    }
    if (config->scaling_factor != 0.0f && config->scaling_factor != 1.0f) {
        return BAD("router family R%u has no scaling factor: allowed 1, given %g", (unsigned)config->family,
                   (double)config->scaling_factor);
    }
    return EP_OK;
}

static ep_err check_numbers(const ep_gate_config *config, ep_error *out_error)
{
    bool grouped = config->family == EP_GATE_R3 || config->family == EP_GATE_R4;
    if (grouped && !(config->scaling_factor > 0.0f && isfinite(config->scaling_factor))) {
        return BAD("router's scaling factor %g: allowed above 0, 1 for none", (double)config->scaling_factor);
    }
    if (!(config->epsilon >= 0.0f && isfinite(config->epsilon))) {
        return BAD("router's epsilon %g: allowed 0 or more", (double)config->epsilon);
    }
    if (config->noise_temperature != 0.0f &&
        !(config->noise_temperature >= EP_GATE_NOISE_MIN && config->noise_temperature <= EP_GATE_NOISE_MAX)) {
        return BAD("router's noise temperature %g: allowed 0 (off) or %g..%g",
                   (double)config->noise_temperature, (double)EP_GATE_NOISE_MIN, (double)EP_GATE_NOISE_MAX);
    }
    if (!(config->expert_dropout >= 0.0f && config->expert_dropout <= EP_GATE_DROPOUT_MAX)) {
        return BAD("router's expert dropout %g: allowed 0..%g", (double)config->expert_dropout,
                   (double)EP_GATE_DROPOUT_MAX);
    }
    if (config->bias != NULL && config->family != EP_GATE_R4) {
        return BAD("router family R%u has no selection bias", (unsigned)config->family);
    }
    for (uint32_t e = 0; config->bias != NULL && e < config->experts; e++) {
        if (!isfinite(config->bias[e])) {
            return BAD("router's bias of expert %" PRIu32 " is %g: only finite values are allowed", e,
                       (double)config->bias[e]);
        }
    }
    return EP_OK;
}

ep_err ep_gate_check_config(const ep_gate_config *config, ep_error *out_error)
{
    ep_err err = check_sizes(config, out_error);
    if (err == EP_OK) {
        bool grouped = config->family == EP_GATE_R3 || config->family == EP_GATE_R4;
        err = grouped ? check_groups(config, out_error) : check_no_groups(config, out_error);
    }
    return err == EP_OK ? check_numbers(config, out_error) : err;
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
        if (config->family != EP_GATE_R4 && !isfinite(row[best])) {
            return BAD("router logit is %g at token %" PRIu32 ", expert %" PRIu32
                       ": a softmax needs a finite maximum",
                       (double)row[best], t, best);
        }
    }
    return EP_OK;
}
