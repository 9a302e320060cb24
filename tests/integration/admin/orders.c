/* SPDX-License-Identifier: Apache-2.0 */
/* reload, config and refused orders, at the real coordinator and at nodes with and without one. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "admin_ctl.h"

/* Of config -o json. */
#define ENTRY(key, value) "\"key\": \"" key "\",\n      \"value\": \"" value "\""

static fault_fixture f;
static char config_path[EP_TEST_PATH_BYTES + 32];
static const char token_text[] = "a-secret-operator-token";

static void write_config(const char *text)
{
    EP_TEST_CHECK(ep_test_write_file(config_path, text, 0600), "%s", config_path);
}

static void expect_no_token(const char *admin, const char *token_path)
{
    char *output = NULL;
    int code = ep_test_process_run_line(f.cluster.dir, ep_test_expertctl, NULL, EP_TEST_PATIENCE_MS,
                                        &output, "config -o json --admin %s --admin-token-file %s",
                                        admin, token_path);
    EP_TEST_CHECK(code == 0 && strstr(output, token_path) != NULL, "%d: %s", code, output);
    EP_TEST_CHECK(strstr(output, token_text) == NULL, "the token is shown: %s", output);
    free(output);
}

static void reload_and_config(const char *admin, const char *token)
{
    ADMIN_CTL(&f.cluster, 0, "environment EXPERTD_COORDINATOR_LOG_LEVEL", "config", "--changed",
              "-o", "json", "--admin", admin, "--admin-token-file", token);
    ADMIN_CTL(&f.cluster, 0, ENTRY("drain_ms", "7s"), "config", "-o", "json", "--admin", admin,
              "--admin-token-file", token);
    write_config("drain_ms: 8000\nframe_bytes_max: 32MiB\n");
    ADMIN_CTL(&f.cluster, 0, "changed: drain_ms\nwait for a restart: frame_bytes_max\n", "reload",
              "--admin", admin, "--admin-token-file", token);
    ADMIN_CTL(&f.cluster, 0, ENTRY("drain_ms", "8s"), "config", "-o", "json", "--admin", admin,
              "--admin-token-file", token);
    ADMIN_CTL(&f.cluster, 0, ENTRY("frame_bytes_max", "16M"), "config", "-o", "json", "--admin",
              admin, "--admin-token-file", token);
    write_config("drain_ms: soon\n");
    ADMIN_CTL(&f.cluster, 1, "nothing changed: file ", "reload", "--admin", admin,
              "--admin-token-file", token);
    ADMIN_CTL(&f.cluster, 1, "drain_ms: 'soon' is not a time", "reload", "--admin", admin,
              "--admin-token-file", token);
    ADMIN_CTL(&f.cluster, 0, ENTRY("drain_ms", "8s"), "config", "-o", "json", "--admin", admin,
              "--admin-token-file", token);
    ADMIN_CTL(&f.cluster, 1, "admin_token_file (--admin-token-file)", "config", "--admin", admin);
    ADMIN_CTL(&f.cluster, 1, "operators connect to admin_listen", "config", "--admin",
              f.cluster.coordinator.rpc_url, "--admin-token-file", token);
    ADMIN_CTL(&f.cluster, 0, NULL, "status", "--coordinator", f.cluster.coordinator.rpc_url);
    expect_no_token(admin, token);
}

/* A node that belongs to nobody cannot be emptied, but its options can be read. */
static void lonely_node(void)
{
    char model[EP_TEST_PATH_BYTES + 32];
    ep_test_process node = {0};
    snprintf(model, sizeof(model), "--model=demo=%s", f.model_path);
    const char *const args[] = {"--node-name=lonely",
                                "--listen=tcp://127.0.0.1:0",
                                "--admin-listen=tcp://127.0.0.1:0",
                                "--probe-address=",
                                model,
                                NULL};
    EP_TEST_CHECK(
        ep_test_process_start(&node, f.cluster.dir, "lonely", ep_test_expertd, args, NULL, true) &&
            ep_test_process_wait_ports(&node, EP_TEST_PATIENCE_MS),
        "the node does not start");
    ADMIN_CTL(&f.cluster, 1,
              "node lonely has no coordinator (coordinator_url) that could move its experts",
              "drain", "--wait", "--timeout", "100s", "--admin", node.admin_url);
    ADMIN_CTL(&f.cluster, 1, "drains only itself", "drain", "node0", "--admin", node.admin_url);
    ADMIN_CTL(&f.cluster, 0, "flag --model", "config", "--changed", "-o", "json", "--admin",
              node.admin_url);
    ADMIN_CTL(&f.cluster, 0, "changed: none\nwait for a restart: none\n", "reload", "--admin",
              node.admin_url);
    int code = ep_test_process_stop(&node, SIGTERM, EP_TEST_PATIENCE_MS);
    EP_TEST_CHECK(code == 0, "the node ended with %d", code);
    ep_test_process_destroy(&node);
}

int main(void)
{
    char dir[EP_TEST_PATH_BYTES];
    char flag[2 * EP_TEST_PATH_BYTES];
    char token_flag[2 * EP_TEST_PATH_BYTES];
    char token_path[EP_TEST_PATH_BYTES + 32];
    static const char *const environment[] = {"EXPERTD_COORDINATOR_LOG_LEVEL=debug", NULL};
    ep_test_dir_new(dir);
    snprintf(config_path, sizeof(config_path), "%s/coordinator.yaml", dir);
    snprintf(token_path, sizeof(token_path), "%s/admin.token", dir);
    snprintf(flag, sizeof(flag), "--config=%s", config_path);
    snprintf(token_flag, sizeof(token_flag), "--admin-token-file=%s", token_path);
    write_config("drain_ms: 7000\n");
    EP_TEST_CHECK(ep_test_write_file(token_path, token_text, 0600), "%s", token_path);
    const char *const args[] = {flag, token_flag, NULL};
    const ep_test_cluster_options options = {.nodes_count = 1,
                                             .copies = 1,
                                             .coordinator_args = args,
                                             .coordinator_environment = environment};
    fault_fixture_init_options(&f, &options);
    reload_and_config(f.cluster.coordinator.admin_url, token_path);
    lonely_node();
    fault_fixture_fini(&f);
    ep_test_dir_remove(dir);
    return 0;
}
