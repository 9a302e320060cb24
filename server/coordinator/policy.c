/* SPDX-License-Identifier: Apache-2.0 */
#include "coordinator/policy.h"

#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/printable.h"
#include "coordinator/coordinator_config.h"
#include "options/options_internal.h"

static const ep_option elsewhere_options[] = {
    {.name = "hedge_permille",
     .type = EP_OPTION_INT,
     .max = EP_HEDGE_PERMILLE_MAX,
     .help = "Of 1000 frames of a caller, how many may be sent to another copy when the answer is "
             "late; 0: none"},
    {.name = "step_group_us",
     .type = EP_OPTION_US,
     .max = EP_STEP_GROUP_US_MAX,
     .help = "How long nodes let a call of a step group wait for the other ranks of its step; 0: "
             "not at all"},
    {.name = "decode_nodes_min",
     .type = EP_OPTION_INT,
     .unit = "nodes",
     .min = 1,
     .max = EP_NODES_MAX,
     .help = "Mode auto: where fewer nodes serve the model every batch is prefill, whatever its "
             "size"},
};

/* Keys of the coordinator's own configuration have their range and help there. */
static const struct {
    const char *name;
    const char *elsewhere;
} rows[EP_POLICY_KEYS] = {
    [EP_POLICY_DECODE_TOKENS_MAX] = {"decode_tokens_max", NULL},
    [EP_POLICY_COPIES] = {"copies", NULL},
    [EP_POLICY_SPARE_COPIES] = {"spare_copies", NULL},
    [EP_POLICY_MOVE_RATE] = {"move_rate", NULL},
    [EP_POLICY_LOADING_NODES_MAX] = {"loading_nodes_max", NULL},
    [EP_POLICY_HEDGE_PERMILLE] = {"hedge_permille", "each caller's configuration"},
    [EP_POLICY_STEP_GROUP_US] = {"step_group_us", "each node's configuration"},
    [EP_POLICY_DECODE_NODES_MIN] = {"decode_nodes_min", "1, the default"},
};

ep_policy_key ep_policy_find(const char *name)
{
    int key = 0;
    while (key < EP_POLICY_KEYS && strcmp(rows[key].name, name) != 0) {
        key++;
    }
    return (ep_policy_key)key;
}

const ep_option *ep_policy_option(ep_policy_key key)
{
    const bool is_own = rows[key].elsewhere == NULL;
    const ep_option *options = is_own ? ep_coordinator_options.options : elsewhere_options;
    const size_t count =
        is_own ? ep_coordinator_options.options_count : EP_ARRAY_COUNT(elsewhere_options);
    const size_t index = ep_options_find(options, count, rows[key].name);
    EP_ASSERT(index < count);
    return &options[index];
}

const char *ep_policy_elsewhere(ep_policy_key key)
{
    return rows[key].elsewhere;
}

const char *ep_policy_unused(ep_policy_key key, const ep_coordinator_state_config *configured)
{
    if (key == EP_POLICY_SPARE_COPIES && !configured->is_balanced) {
        return "is only used with placement: balanced";
    }
    return (key == EP_POLICY_COPIES || key == EP_POLICY_MOVE_RATE) && configured->expert_map != NULL
               ? "is not used with placement: static"
               : NULL;
}

char *ep_policy_format(ep_policy_key key, uint64_t number, char out[EP_QUANTITY_BYTES])
{
    const ep_option_type type = ep_policy_option(key)->type;
    return ep_quantity_format(number,
                              type == EP_OPTION_US     ? EP_UNIT_US
                              : type == EP_OPTION_SIZE ? EP_UNIT_BYTES
                                                       : EP_UNIT_NONE,
                              out);
}

bool ep_policy_value_is_good(ep_policy_key key, uint64_t number)
{
    const ep_option *option = ep_policy_option(key);
    return number >= option->min && number <= option->max;
}

static ep_err unknown_key(const char *name, ep_error *out_error)
{
    char known[256] = "";
    size_t used = 0;
    for (int key = 0; key < EP_POLICY_KEYS; key++) {
        used += (size_t)snprintf(known + used, sizeof(known) - used, "%s%s", key > 0 ? ", " : "",
                                 rows[key].name);
    }
    return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                        "the policy has no key '%.80s', allowed: %s", name, known);
}

static ep_err parse(ep_policy_key key, const char *text, uint64_t *out_number, ep_error *out_error)
{
    const ep_option *option = ep_policy_option(key);
    ep_option_value value = {0};
    ep_err err = ep_option_set_scalar(option, option->name, text,
                                      (ep_value_source){.origin = "policy"}, &value, out_error);
    if (err != EP_OK) {
        out_error->code = err == EP_ERR_BAD_CONFIG ? EP_ERR_INVALID_ARGUMENT : err;
        return out_error->code;
    }
    *out_number = value.number;
    ep_option_value_clear(option, &value);
    return EP_OK;
}

ep_err ep_policy_apply(const ep_policy *policy, const ep_coordinator_state_config *configured,
                       const ep_policy_change *changes, size_t count, const char *who,
                       uint64_t unix_now, ep_policy *out_policy, ep_error *out_error)
{
    ep_policy next = *policy;
    uint32_t seen = 0;
    bool is_change = false;
    for (size_t i = 0; i < count; i++) {
        uint64_t number = 0;
        const ep_policy_key key = ep_policy_find(changes[i].key);
        if (key == EP_POLICY_KEYS) {
            return unknown_key(changes[i].key, out_error);
        }
        if (seen & 1u << key) {
            return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                                "policy: %s is given twice, allowed: once", rows[key].name);
        }
        seen |= 1u << key;
        ep_policy_value *value = &next.values[key];
        if (changes[i].value == NULL) {
            is_change |= value->revision != 0;
            *value = (ep_policy_value){0};
            continue;
        }
        const ep_err err = parse(key, changes[i].value, &number, out_error);
        if (err != EP_OK) {
            return err;
        }
        const char *unused = ep_policy_unused(key, configured);
        if (unused != NULL) {
            return ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                                "policy: %s %s, and this coordinator has placement: %s",
                                rows[key].name, unused, ep_coordinator_state_policy(configured));
        }
        if (value->revision == 0 || value->number != number) {
            is_change = true;
            *value = (ep_policy_value){
                .revision = policy->revision + 1, .number = number, .set_at = unix_now};
            snprintf(value->who, sizeof(value->who), "%s",
                     who[0] != 0 && ep_text_printable_bytes(who, false) == strlen(who) ? who
                                                                                       : "unknown");
        }
    }
    next.revision += is_change;
    *out_policy = next;
    return EP_OK;
}

void ep_policy_in_force(const ep_policy *policy, const ep_coordinator_state_config *configured,
                        ep_coordinator_state_config *out_config)
{
    *out_config = *configured;
    const ep_policy_value *rate = &policy->values[EP_POLICY_MOVE_RATE];
    if (rate->revision != 0 && ep_policy_unused(EP_POLICY_MOVE_RATE, configured) == NULL) {
        out_config->move_rate = rate->number;
    }
    uint32_t *const fields[EP_POLICY_KEYS] = {
        [EP_POLICY_DECODE_TOKENS_MAX] = &out_config->decode_tokens_max,
        [EP_POLICY_COPIES] = &out_config->copies,
        [EP_POLICY_SPARE_COPIES] = &out_config->spare_copies,
        [EP_POLICY_LOADING_NODES_MAX] = &out_config->loading_nodes_max};
    for (int key = 0; key < EP_POLICY_KEYS; key++) {
        const ep_policy_value *value = &policy->values[key];
        if (fields[key] != NULL && value->revision != 0 &&
            ep_policy_unused((ep_policy_key)key, configured) == NULL) {
            *fields[key] = (uint32_t)value->number;
        }
    }
}
