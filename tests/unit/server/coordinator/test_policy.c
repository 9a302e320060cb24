/* SPDX-License-Identifier: Apache-2.0 */
/* Keys, ranges and revisions of the policy, and what of it is in force. */
#include <criterion/criterion.h>
#include <string.h>

#include "coordinator/policy.h"
#include "support/expect.h"

static const ep_coordinator_state_config uniform = {.copies = 2, .decode_tokens_max = 256};
static const ep_coordinator_state_config balanced = {
    .copies = 2, .decode_tokens_max = 256, .is_balanced = true, .spare_copies = 3};

static ep_policy policy;
static ep_error error;

static ep_err apply(const ep_coordinator_state_config *config, const char *key, const char *value)
{
    const ep_policy_change change = {.key = key, .value = value};
    ep_error_clear(&error);
    return ep_policy_apply(&policy, config, &change, 1, "alice@host", 1700000000, &policy, &error);
}

static void refuse(const ep_coordinator_state_config *config, const char *key, const char *value,
                   ep_err code, const char *text)
{
    const ep_policy before = policy;
    cr_assert_eq(apply(config, key, value), code, "%s=%s: %s", key, value, error.text);
    ASSERT_TEXT(error, text);
    cr_assert_eq(memcmp(&policy, &before, sizeof(policy)), 0, "a refusal changed something");
}

Test(coordinator_policy, each_change_is_a_revision_and_none_is_none)
{
    cr_assert_eq(apply(&uniform, "copies", "3"), EP_OK);
    cr_assert_eq(policy.revision, 1u);
    cr_assert_eq(apply(&uniform, "copies", "3"), EP_OK);
    cr_assert_eq(policy.revision, 1u, "the same again is no change");
    cr_assert_eq(apply(&uniform, "hedge_permille", NULL), EP_OK);
    cr_assert_eq(policy.revision, 1u, "it was not set");
    cr_assert_eq(apply(&uniform, "step_group_us", "1.5ms"), EP_OK);
    cr_assert_eq(policy.revision, 2u);
    const ep_policy_value *window = &policy.values[EP_POLICY_STEP_GROUP_US];
    cr_assert(window->number == 1500 && window->revision == 2 && window->set_at == 1700000000);
    cr_assert_str_eq(window->who, "alice@host");
    cr_assert_eq(apply(&uniform, "copies", NULL), EP_OK);
    cr_assert_eq(policy.revision, 3u);
    cr_assert_eq(policy.values[EP_POLICY_COPIES].revision, 0u);
}

Test(coordinator_policy, changes_are_taken_all_or_none)
{
    const ep_policy_change both[] = {{"copies", "3"}, {"hedge_permille", "1001"}},
                           twice[] = {{"copies", "3"}, {"copies", NULL}};
    ep_policy next = {.revision = 77};
    cr_assert_eq(ep_policy_apply(&policy, &uniform, both, 2, "", 1, &next, &error),
                 EP_ERR_INVALID_ARGUMENT);
    cr_assert_eq(next.revision, 77u);
    ASSERT_FAILS(ep_policy_apply(&policy, &uniform, twice, 2, "", 1, &next, &error),
                 EP_ERR_INVALID_ARGUMENT, error, "copies is given twice");
}

Test(coordinator_policy, mistakes_are_named_with_what_is_allowed)
{
    refuse(&uniform, "copys", "3", EP_ERR_INVALID_ARGUMENT,
           "no key 'copys', allowed: decode_tokens_max, copies");
    refuse(&uniform, "heartbeat_ms", "3", EP_ERR_INVALID_ARGUMENT, "no key 'heartbeat_ms'");
    refuse(&uniform, "copies", "65", EP_ERR_INVALID_ARGUMENT,
           "copies: '65' is out of range; allowed: 1..64");
    refuse(&uniform, "copies", "0", EP_ERR_INVALID_ARGUMENT,
           "copies: '0' is out of range; allowed: 1..64");
    refuse(&uniform, "copies", "", EP_ERR_INVALID_ARGUMENT, "copies: ''");
    refuse(&uniform, "copies", "-1", EP_ERR_INVALID_ARGUMENT, "copies: '-1'");
    refuse(&uniform, "decode_tokens_max", "0", EP_ERR_INVALID_ARGUMENT, "allowed: 1..65536 tokens");
    refuse(&uniform, "hedge_permille", "1001", EP_ERR_INVALID_ARGUMENT, "allowed: 0..1000");
    refuse(&uniform, "decode_nodes_min", "0", EP_ERR_INVALID_ARGUMENT,
           "decode_nodes_min: '0' is out of range; allowed: 1..");
    refuse(&uniform, "decode_nodes_min", "many", EP_ERR_INVALID_ARGUMENT,
           "decode_nodes_min: 'many'");
    refuse(&uniform, "step_group_us", "2s", EP_ERR_INVALID_ARGUMENT,
           "step_group_us: '2s' is out of range; allowed: 0..1s");
    refuse(&uniform, "spare_copies", "3", EP_ERR_FAILED_PRECONDITION,
           "only used with placement: balanced, and this coordinator has placement: uniform");
    ep_expert_map map = {0};
    ep_coordinator_state_config fixed = uniform;
    fixed.expert_map = &map;
    refuse(&fixed, "move_rate", "1G", EP_ERR_FAILED_PRECONDITION,
           "move_rate is not used with placement: static");
    refuse(&fixed, "copies", "3", EP_ERR_FAILED_PRECONDITION,
           "copies is not used with placement: static");
}

Test(coordinator_policy, who_is_text_for_people)
{
    ep_policy next;
    const ep_policy_change change = {"copies", "3"};
    cr_assert_eq(ep_policy_apply(&policy, &uniform, &change, 1, "", 1, &next, &error), EP_OK);
    cr_assert_str_eq(next.values[EP_POLICY_COPIES].who, "unknown");
    cr_assert_eq(ep_policy_apply(&policy, &uniform, &change, 1, "a\x1b[2J", 1, &next, &error),
                 EP_OK);
    cr_assert_str_eq(next.values[EP_POLICY_COPIES].who, "unknown");
}

Test(coordinator_policy, what_is_set_stands_in_for_the_configuration)
{
    ep_coordinator_state_config config;
    ep_policy_in_force(&policy, &balanced, &config);
    cr_assert(config.copies == 2 && config.spare_copies == 3 && config.decode_tokens_max == 256);
    cr_assert_eq(apply(&balanced, "copies", "1"), EP_OK);
    cr_assert_eq(apply(&balanced, "spare_copies", "0"), EP_OK);
    cr_assert_eq(apply(&balanced, "decode_tokens_max", "9"), EP_OK);
    cr_assert_eq(apply(&balanced, "move_rate", "5G"), EP_OK);
    cr_assert_eq(apply(&balanced, "loading_nodes_max", "4"), EP_OK);
    ep_policy_in_force(&policy, &balanced, &config);
    cr_assert(config.move_rate == 5ull << 30 && config.loading_nodes_max == 4);
    cr_assert(config.copies == 1 && config.spare_copies == 0 && config.decode_tokens_max == 9 &&
              config.is_balanced);
    cr_assert_eq(apply(&balanced, "spare_copies", "8"), EP_OK);
    /* another configuration, which does not use them */
    ep_policy_in_force(&policy, &uniform, &config);
    cr_assert(config.copies == 1 && config.spare_copies == 0);
}
