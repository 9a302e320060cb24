/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The policy against real processes: a caller's next call, the nodes and the table follow it while
 * calls go on; it outlives a SIGKILL of the coordinator; what is taken back is gone; a change that
 * expects another revision is refused.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "admin_ctl.h"
#include "base/clock.h"
#include "call/client_core.h"

/* Of config -o json. */
#define ENTRY(key, value, origin)                                                                  \
    "\"key\": \"" key "\",\n      \"value\": \"" value "\",\n      \"origin\": \"" origin "\""

static fault_fixture f;

#define POLICY(code, text, ...)                                                                    \
    ADMIN_CTL(&f.cluster, code, text, "policy", __VA_ARGS__, "--admin",                            \
              f.cluster.coordinator.admin_url)

static uint64_t patience(void)
{
    return ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
}

/* The client is asked again and again: a call goes by the table that is there when it begins. */
static void wait_mode(ep_moe_mode mode, const char *what)
{
    ep_moe_result result = {.mode = EP_MOE_AUTO};
    for (const uint64_t end_ns = patience(); result.mode != mode;) {
        EP_TEST_CHECK(ep_test_batch_call(&f.all[0], f.client, 0, &result), "%s: %s", what,
                      result.error.text);
        EP_TEST_CHECK(ep_clock_now_ns() < end_ns, "%s: calls still go in mode %d", what,
                      (int)result.mode);
    }
}

/* What the caller says itself. */
static void expect_own_mode(ep_moe_mode mode)
{
    ep_moe_args args;
    ep_moe_result result = {.struct_bytes = sizeof(result)};
    uint16_t *y = calloc((size_t)f.all[0].tokens * f.all[0].hidden, sizeof(*y));
    const ep_tensor out = ep_tensor_2d(y, EP_DTYPE_BF16, f.all[0].tokens, f.all[0].hidden);
    ep_test_batch_args(&f.all[0], &args);
    args.mode = mode;
    EP_TEST_CHECK(ep_moe_forward(f.client, &args, &out, &result) == EP_OK, "%s", result.error.text);
    EP_TEST_CHECK(result.mode == mode, "the policy took the caller's own mode away");
    free(y);
}

/* Of the client, when a call has begun by the newest table. */
static void wait_hedges(ep_client *client, uint32_t permille)
{
    ep_moe_result result;
    uint32_t share = UINT32_MAX;
    for (const uint64_t end_ns = patience(); share != permille;) {
        EP_TEST_CHECK(ep_test_batch_call(&f.all[0], client, 0, &result), "%s", result.error.text);
        share = __atomic_load_n(&client->budget.hedge_permille, __ATOMIC_RELAXED);
        EP_TEST_CHECK(ep_clock_now_ns() < end_ns, "%u of 1000 frames may be hedged, not %u", share,
                      permille);
    }
}

static void hedge_77(ep_client_config *config)
{
    config->hedge_permille = 77;
}

static void wait_copies(uint32_t copies)
{
    ep_layer_desc layer = {.struct_bytes = sizeof(layer)};
    for (const uint64_t end_ns = patience(); layer.copies_min != copies;) {
        EP_TEST_CHECK(ep_client_layer(f.client, "demo", NULL, 0, &layer) == EP_OK, "no layer");
        EP_TEST_CHECK(ep_clock_now_ns() < end_ns, "an expert has %u copies, wanted are %u",
                      layer.copies_min, copies);
        usleep(2000);
    }
}

/* Of every node. */
static void wait_window(const char *text)
{
    for (uint32_t n = 0; n < FAULT_NODES; n++) {
        bool found = false;
        for (const uint64_t end_ns = patience(); !found;) {
            char *output = NULL;
            EP_TEST_CHECK(ep_test_process_run_line(
                              f.cluster.dir, ep_test_expertctl, NULL, EP_TEST_PATIENCE_MS, &output,
                              "config -o json --admin %s", f.cluster.nodes[n].admin_url) == 0,
                          "%s", output);
            found = strstr(output, text) != NULL;
            EP_TEST_CHECK(found || ep_clock_now_ns() < end_ns, "node%u never said %s: %s", n, text,
                          output);
            free(output);
        }
    }
}

static void refusals(void)
{
    POLICY(1, "the policy has no key 'copys', allowed: decode_tokens_max, copies", "set",
           "copys=2");
    POLICY(1, "decode_nodes_min: '0' is out of range; allowed: 1..", "set", "decode_nodes_min=0");
    POLICY(1, "copies: '65' is out of range; allowed: 1..64", "set", "decode_tokens_max=3",
           "copies=65");
    POLICY(1, "only used with placement: balanced", "set", "spare_copies=2");
    POLICY(1, "the policy is at revision 0, and 4 was expected", "set", "copies=3",
           "--expect-revision", "4");
    POLICY(2, "KEY=VALUE is missing", "set");
    ADMIN_CTL(&f.cluster, 1, "ask the coordinator", "policy", "show", "--admin",
              f.cluster.nodes[0].admin_url);
    ADMIN_CTL(&f.cluster, 1, "operators connect to admin_listen", "policy", "show", "--admin",
              f.cluster.coordinator.rpc_url);
    POLICY(0, "policy revision 0", "show");
}

static void set_live(void)
{
    char many[48];
    wait_mode(EP_MOE_DECODE, "before");
    wait_hedges(f.client, 30);
    POLICY(0, "decode_tokens_max is 1, policy revision 1", "set", "decode_tokens_max=1");
    wait_mode(EP_MOE_PREFILL, "decode_tokens_max=1");
    expect_own_mode(EP_MOE_DECODE);
    POLICY(0, "policy revision 2", "unset", "decode_tokens_max");
    wait_mode(EP_MOE_DECODE, "no policy");
    snprintf(many, sizeof(many), "decode_nodes_min=%d", FAULT_NODES + 1);
    POLICY(0, "policy revision 3", "set", many); /* there are fewer */
    wait_mode(EP_MOE_PREFILL, many);
    snprintf(many, sizeof(many), "decode_nodes_min=%d", FAULT_NODES);
    POLICY(0, "policy revision 4", "set", many);
    wait_mode(EP_MOE_DECODE, many);
    POLICY(0, "policy revision 5", "set", "decode_tokens_max=1");
    wait_mode(EP_MOE_PREFILL, "both keys");
    wait_copies(2);
    POLICY(0, "policy revision 6", "set", "copies=3", "step_group_us=7ms", "hedge_permille=5",
           "--expect-revision", "5");
    POLICY(1, "the policy is at revision 6, and 1 was expected", "set", "copies=1",
           "--expect-revision", "1");
    wait_copies(3);
    wait_hedges(f.client, 5);
    ep_client *own = ep_test_cluster_client(&f.cluster, hedge_77);
    wait_hedges(own, 77);
    ep_client_destroy(own);
    wait_window(ENTRY("step_group_us", "7ms", "policy revision 6"));
    ADMIN_CTL(&f.cluster, 0, ENTRY("copies", "3", "policy revision 6"), "config", "-o", "json",
              "--admin", f.cluster.coordinator.admin_url);
}

static void kill_coordinator(void)
{
    int code = ep_test_process_stop(&f.cluster.coordinator, SIGKILL, EP_TEST_PATIENCE_MS);
    EP_TEST_CHECK(code == 128 + SIGKILL, "the coordinator ended with %d", code);
    ep_test_cluster_restart_coordinator(&f.cluster);
    POLICY(0, "policy revision 6, kept in /", "show");
    POLICY(0, "\"revision\": 6,\n  \"kept\": true", "show", "-o", "json");
    ep_client *second = ep_test_cluster_client(&f.cluster, NULL);
    ep_moe_result result;
    EP_TEST_CHECK(ep_test_batch_call(&f.all[0], second, 0, &result) &&
                      result.mode == EP_MOE_PREFILL,
                  "the policy is gone: mode %d", (int)result.mode);
    ep_client_destroy(second);
    wait_window(ENTRY("step_group_us", "7ms", "policy revision 6"));
    for (uint32_t n = 0; n < FAULT_NODES; n++) {
        admin_wait_node(&f.cluster, n, "serving", true);
    }
    wait_copies(3);
}

static void unset(void)
{
    POLICY(0, "decode_tokens_max is 256, default", "unset", "decode_tokens_max", "copies",
           "step_group_us", "hedge_permille", "decode_nodes_min", "--expect-revision", "6");
    wait_mode(EP_MOE_DECODE, "unset");
    expect_own_mode(EP_MOE_PREFILL);
    wait_copies(2);
    wait_hedges(f.client, 30);
    wait_window(ENTRY("step_group_us", "200us", "default"));
    POLICY(0, "policy revision 7", "unset", "copies"); /* again: nothing changes */
    ADMIN_CTL(&f.cluster, 0, ENTRY("copies", "2", "flag --copies"), "config", "-o", "json",
              "--admin", f.cluster.coordinator.admin_url);
}

/* It measures with the service as it is, and says a value or why there is none; which one, is the
 * machine's affair. */
static void tune(void)
{
    char *output = NULL;
    const int code = ep_test_process_run_line(f.cluster.dir, ep_test_expertctl, NULL,
                                              EP_TEST_PATIENCE_MS, &output,
                                              "tune --model demo --layer 0 --tokens 2,4 --rounds 6 "
                                              "--seconds 5ms -o json --coordinator %s",
                                              f.cluster.coordinator.rpc_url);
    const bool is_chosen = strstr(output, "\"decode_tokens_max\": 2") != NULL;
    const bool is_refused = strstr(output, "\"decode_tokens_max\": null") != NULL &&
                            strstr(output, "\"why\": \"") != NULL;
    EP_TEST_CHECK(is_chosen != is_refused && code == (is_chosen ? 0 : 1) &&
                      strstr(output, "\"wins_needed\": 6") != NULL &&
                      strstr(output, "\"machine_why\": \"layer 0 is not whole") != NULL,
                  "%d: %s", code, output);
    free(output);
}

int main(void)
{
    ep_test_load_counts counts;
    char state_dir[EP_TEST_PATH_BYTES], state_flag[EP_TEST_PATH_BYTES + 16];
    ep_test_dir_new(state_dir);
    snprintf(state_flag, sizeof(state_flag), "--state-dir=%s", state_dir);
    const char *const args[] = {state_flag, NULL};
    const ep_test_cluster_options options = {
        .nodes_count = FAULT_NODES, .copies = 2, .coordinator_args = args};
    fault_fixture_init_options(&f, &options);
    ep_test_load *load = fault_load(&f, f.all, 8, 0, NULL, NULL);
    ep_test_load_wait_succeeded(load, 50);
    refusals();
    set_live();
    kill_coordinator();
    unset();
    tune();
    ep_test_load_wait_succeeded(load, 50);
    ep_test_load_stop(load, &counts);
    printf("%llu calls, %llu failed\n", (unsigned long long)counts.succeeded,
           (unsigned long long)counts.failed);
    fault_fixture_fini(&f);
    ep_test_dir_remove(state_dir);
    return 0;
}
