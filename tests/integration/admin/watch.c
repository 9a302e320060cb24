/* SPDX-License-Identifier: Apache-2.0 */
/* doctor, top and stats against real processes: a healthy service, wrong addresses, a lost
 * coordinator, a broken checkpoint. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "admin_ctl.h"
#include "base/clock.h"

static fault_fixture f;

static void as_tcp(const char *url, char out_url[EP_TEST_PATH_BYTES])
{
    snprintf(out_url, EP_TEST_PATH_BYTES, "tcp://%s", strstr(url, "://") + 3);
}

static void ask_doctor(void)
{
    char probes[EP_TEST_PATH_BYTES];
    const char *coordinator = f.cluster.coordinator.rpc_url;
    as_tcp(f.cluster.coordinator.probe_url, probes);
    ADMIN_CTL(&f.cluster, 0, "healthy", "doctor", "--coordinator", coordinator);
    ADMIN_CTL(&f.cluster, 0, "healthy", "doctor", "--node", f.cluster.nodes[0].rpc_url, "--node",
              f.cluster.nodes[1].rpc_url);
    ADMIN_CTL(&f.cluster, 1, "is a node, not a coordinator", "doctor", "--coordinator",
              f.cluster.nodes[0].rpc_url);
    ADMIN_CTL(&f.cluster, 1, "is a coordinator, not a node", "doctor", "--node", coordinator);
    ADMIN_CTL(&f.cluster, 1, "this is the probe port of the coordinator: calls go to", "doctor",
              "--timeout", "3s", "--coordinator", probes);
    ADMIN_CTL(&f.cluster, 1, "admin_listen takes operators only", "doctor", "--coordinator",
              f.cluster.coordinator.admin_url);
    ADMIN_CTL(&f.cluster, 1, "tcp://127.0.0.1:1: nobody listens there", "doctor", "--timeout", "3s",
              "--coordinator", "tcp://127.0.0.1:1");
    ADMIN_CTL(&f.cluster, 0, "drain", "drain", "node1", "--wait", "--timeout", "60s", "--admin",
              f.cluster.coordinator.admin_url);
    ADMIN_CTL(&f.cluster, 1, "\"node-drained\"", "doctor", "-o", "json", "--coordinator",
              coordinator);
    ADMIN_CTL(&f.cluster, 0, NULL, "drain", "node1", "--undo", "--admin",
              f.cluster.coordinator.admin_url);
    admin_wait_node(&f.cluster, 1, "serving", true);
}

static void check_files(void)
{
    char path[EP_TEST_PATH_BYTES + 32];
    char text[3 * EP_TEST_PATH_BYTES];
    const char *coordinator = f.cluster.coordinator.rpc_url;
    snprintf(path, sizeof(path), "%s/node.yaml", f.cluster.dir);
    snprintf(text, sizeof(text), "models:\n  - name: demo\n    path: %s\n", f.model_path);
    EP_TEST_CHECK(ep_test_write_file(path, text, 0600), "%s", path);
    ADMIN_CTL(&f.cluster, 0, "can be opened: files of version ", "doctor", "--config", path,
              "--program", ep_test_expertd, "--coordinator", coordinator);
    snprintf(text, sizeof(text),
             "models:\n  - name: demo\n    path: %s\nweight_cache_dir: %s/none/packed\n",
             f.model_path, f.cluster.dir);
    EP_TEST_CHECK(ep_test_write_file(path, text, 0600), "%s", path);
    ADMIN_CTL(&f.cluster, 1,
              "/none/packed: cannot be made: No such file or directory; experts are packed anew at "
              "each start",
              "doctor", "--config", path, "--program", ep_test_expertd, "--coordinator",
              coordinator); /* what the daemon's check only warns of */
    snprintf(text, sizeof(text), "models:\n  - name: demo\n    path: %s\n", f.model_path);
    EP_TEST_CHECK(ep_test_write_file(path, text, 0600), "%s", path);
    snprintf(text, sizeof(text), "sed -i 's/\"moe_intermediate_size\": /&1/' '%s/config.json'",
             f.model_path);
    EP_TEST_CHECK(system(text) == 0, "%s", text);
    ADMIN_CTL(&f.cluster, 1, "no expert of model demo can be read: model.safetensors: tensor ",
              "doctor", "--config", path, "--program", ep_test_expertd, "--coordinator",
              coordinator);
    snprintf(text, sizeof(text), "%s/model.safetensors", f.model_path);
    EP_TEST_CHECK(truncate(text, 100) == 0, "%s", text); /* the nodes have read what they need */
    ADMIN_CTL(&f.cluster, 1, "model.safetensors: is cut short, or no safetensors file", "doctor",
              "--config", path, "--program", ep_test_expertd, "--coordinator", coordinator);
    EP_TEST_CHECK(ep_test_write_file(path, "drain_ms: soon\n", 0600), "%s", path);
    ADMIN_CTL(&f.cluster, 1, "drain_ms: 'soon' is not a time", "doctor", "--config", path,
              "--program", ep_test_expertd, "--coordinator", coordinator);
}

static void wait_output(const ep_test_process *process, const char *text)
{
    uint64_t end_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    for (;;) {
        char *output = ep_test_process_output(process);
        bool found = output != NULL && strstr(output, text) != NULL;
        EP_TEST_CHECK(found || ep_clock_now_ns() < end_ns, "top never said '%s': %s", text, output);
        free(output);
        if (found) {
            return;
        }
        usleep(50000);
    }
}

/* The node learns of it by itself, not from top. */
static void wait_lost(void)
{
    uint64_t end_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    for (;;) {
        char *output = NULL;
        int code =
            ep_test_process_run_line(f.cluster.dir, ep_test_expertctl, NULL, EP_TEST_PATIENCE_MS,
                                     &output, "doctor --node %s", f.cluster.nodes[0].rpc_url);
        bool found = code == 1 && output != NULL &&
                     strstr(output, "has no connection to its coordinator") != NULL;
        EP_TEST_CHECK(found || ep_clock_now_ns() < end_ns,
                      "doctor ended with %d and never named the lost coordinator: %s", code,
                      output);
        free(output);
        if (found) {
            return;
        }
        usleep(50000);
    }
}

/* The coordinator goes, top stays; ^C is a good end. */
static void lose_coordinator(void)
{
    ep_test_process top = {0};
    const char *const args[] = {"top",
                                "-o",
                                "json",
                                "--interval",
                                "200ms",
                                "--timeout",
                                "2s",
                                "--coordinator",
                                f.cluster.coordinator.rpc_url,
                                NULL};
    EP_TEST_CHECK(
        ep_test_process_start(&top, f.cluster.dir, "top", ep_test_expertctl, args, NULL, false),
        "top does not start");
    wait_output(&top, "\"state\": \"serving\"");
    ep_test_process_stop(&f.cluster.coordinator, SIGKILL, EP_TEST_PATIENCE_MS);
    wait_output(&top, "\"coordinator_error\": \"tcp://");
    int code = ep_test_process_stop(&top, SIGINT, EP_TEST_PATIENCE_MS);
    EP_TEST_CHECK(code == 0, "top ended with %d", code);
    ep_test_process_destroy(&top);
    wait_lost();
}

int main(void)
{
    ep_test_load_counts counts;
    const ep_test_cluster_options options = {.nodes_count = 2, .copies = 1};
    fault_fixture_init_options(&f, &options);
    admin_wait_node(&f.cluster, 0, "serving", true);
    admin_wait_node(&f.cluster, 1, "serving", true);
    ep_test_load *load = fault_load(&f, f.all, 16, 0, NULL, NULL);
    ep_test_load_wait_succeeded(load, 100);
    ADMIN_CTL(&f.cluster, 0, "\"layers\": [{\"model\": \"demo\"", "top", "--once", "-o", "json",
              "--interval", "300ms", "--coordinator", f.cluster.coordinator.rpc_url);
    ADMIN_CTL(&f.cluster, 0, "\"model\": \"demo\"", "stats", "-o", "json", "--coordinator",
              f.cluster.coordinator.rpc_url);
    ADMIN_CTL(&f.cluster, 0, "\"store\": \"memory\"", "status", "-o", "json", "--coordinator",
              f.cluster.coordinator.rpc_url);
    ep_test_load_stop(load, &counts);
    EP_TEST_CHECK(counts.failed == 0, "%llu calls failed", (unsigned long long)counts.failed);
    ask_doctor();
    check_files();
    lose_coordinator();
    fault_fixture_fini(&f);
    return 0;
}
