/* SPDX-License-Identifier: Apache-2.0 */
/* expertd serves checkpoints of several name families and formats at once; every row equals the oracle's. */
#include <criterion/criterion.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/check.h"
#include "support/format_fixture.h"
#include "support/forward_call.h"
#include "support/process.h"

#define WAIT_MS 60000
#define PATH_BYTES (EP_TEST_PATH_BYTES + 64)
#define HIDDEN_MAX 256

static const char *const served[] = {"n1-bf16",   "n2-bf16", "n3-transposed", "n7-mxfp4",      "n1-f8-block", "n1-f8-channel",
                                     "n5-int4",   "n1-w8a8", "n2-mxfp8-oai",  "n6-mxfp4-situ", "n4-mxfp4-limit"};
enum { MODELS = EP_ARRAY_COUNT(served), ROWS = 3, SLOTS = 5 };

static char dir[EP_TEST_PATH_BYTES];
static ep_test_process node;

static void setup(void)
{
    node.pid_fd = -1;
    cr_assert(ep_test_dir_create(dir));
}

static void teardown(void)
{
    ep_test_process_destroy(&node);
    ep_test_dir_remove(dir);
}

TestSuite(formats_service, .init = setup, .fini = teardown, .timeout = 110);

static const ep_format_case *case_of(const char *name)
{
    for (size_t i = 0; i < ep_format_cases_count; i++) {
        if (strcmp(ep_format_cases[i].name, name) == 0) {
            return &ep_format_cases[i];
        }
    }
    cr_assert_fail("no case %s", name);
    return NULL;
}

static void write_model(const char *name, char path[PATH_BYTES])
{
    ep_error error;
    ep_format_model *model = ep_format_model_make(case_of(name), 11);
    snprintf(path, PATH_BYTES, "%s/%s", dir, name);
    cr_assert_eq(mkdir(path, 0700), 0);
    cr_assert_eq(ep_format_model_write(model, path, &error), EP_OK, "%s", error.text);
    ep_format_model_free(model);
}

static void expect_exact(ep_test_peer *peer, ep_numerics numerics, const char *name, const char *path)
{
    static const ep_wire_slot slots[SLOTS] = {{0, 0}, {2, 1}, {1, 3}, {0, 2}, {1, 1}};
    static uint16_t x[ROWS * HIDDEN_MAX], got[SLOTS * HIDDEN_MAX], wanted[SLOTS * HIDDEN_MAX];
    const uint32_t hidden = case_of(name)->hidden;
    ep_error error;
    ep_test_fill_rows(5, EP_DTYPE_BF16, (size_t)ROWS * hidden, x);
    const ep_test_forward forward = {.expected_with = &numerics,
                                     .model = name,
                                     .layer = EP_FORMAT_LAYER,
                                     .rows = ROWS,
                                     .slots = SLOTS,
                                     .hidden = hidden,
                                     .x_dtype = EP_DTYPE_BF16,
                                     .reply_dtype = EP_DTYPE_BF16,
                                     .x = x,
                                     .wire_slots = slots};
    cr_assert_eq(ep_test_forward_run(peer, &forward, got, &error), EP_OK, "%s: %s", name, error.text);
    cr_assert_eq(ep_test_expected_rows(path, &forward, wanted, &error), EP_OK, "%s: %s", name, error.text);
    cr_expect_arr_eq(got, wanted, (size_t)SLOTS * hidden * sizeof(*got), "%s", name);
}

/* A socket that plays the service manager, and the variable that leads a child to it. */
static int play_manager(char out_variable[PATH_BYTES])
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int n = snprintf(address.sun_path, sizeof(address.sun_path), "%s/notify", dir);
    cr_assert(n > 0 && n < (int)sizeof(address.sun_path));
    int manager = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    cr_assert_eq(bind(manager, (struct sockaddr *)&address, sizeof(address)), 0);
    snprintf(out_variable, PATH_BYTES, "NOTIFY_SOCKET=%s", address.sun_path);
    return manager;
}

static void await_ready(int manager)
{
    char message[1024] = "";
    while (strncmp(message, "READY=1", 7) != 0) {
        struct pollfd fd = {.fd = manager, .events = POLLIN};
        cr_assert_eq(poll(&fd, 1, WAIT_MS), 1, "the program never said READY=1");
        ssize_t n = recv(manager, message, sizeof(message) - 1, 0);
        message[n > 0 ? n : 0] = 0;
    }
}

static void expect_service(ep_numerics numerics, const char *flag)
{
    static char paths[MODELS][PATH_BYTES];
    static char flags[MODELS][PATH_BYTES + 64];
    const char *args[MODELS + 9] = {"--listen=tcp://127.0.0.1:0", "--admin-listen=tcp://127.0.0.1:0",
                                    "--probe-address=127.0.0.1:0", "--node-name=n1", flag};
    char manager_variable[PATH_BYTES];
    const int manager = play_manager(manager_variable);
    const char *environment[] = {manager_variable, NULL};
    ep_test_peer peer;
    ep_error error;
    for (size_t i = 0; i < MODELS; i++) {
        write_model(served[i], paths[i]);
        snprintf(flags[i], sizeof(flags[i]), "--model=%s=%s", served[i], paths[i]);
        args[5 + i] = flags[i];
    }
    cr_assert(ep_test_process_start(&node, dir, "node", EP_EXPERTD_PATH, args, environment, true));
    cr_assert(ep_test_process_wait_ports(&node, WAIT_MS));
    await_ready(manager);
    close(manager);
    cr_assert_eq(ep_test_peer_open(&peer, node.rpc_url, &error), EP_OK, "%s", error.text);
    for (size_t i = 0; i < MODELS; i++) {
        expect_exact(&peer, numerics, served[i], paths[i]);
    }
    ep_test_peer_close(&peer);
    cr_expect_eq(ep_test_process_stop(&node, SIGTERM, WAIT_MS), 0);
}

Test(formats_service, one_node_serves_all_formats_with_the_oracles_bits)
{
    expect_service(EP_NUMERICS_PORTABLE, "--numerics=portable");
}

Test(formats_service, one_node_serves_all_formats_with_the_oracles_bits_of_bf16dp)
{
    expect_service(EP_NUMERICS_BF16DP, "--numerics=bf16dp");
}
