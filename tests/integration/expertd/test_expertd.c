/* SPDX-License-Identifier: Apache-2.0 */
/* The real program, as its users meet it: command line, ports, calls, probes, signals, bad
 * input. */
#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/cpu_features.h"
#include "support/checkpoint_fixture.h"
#include "support/expect.h"
#include "support/format_fixture.h"
#include "support/forward_call.h"
#include "support/process.h"

#define WAIT_MS 60000
#define PATH_BYTES (EP_TEST_PATH_BYTES + 64)

static char dir[EP_TEST_PATH_BYTES];
static char model_flag[PATH_BYTES + 32];
static char model_path[PATH_BYTES];
static ep_test_process node;
static int manager = -1; /* plays the service manager */
static char manager_variable[PATH_BYTES + 32];

static void make_model(const char *name, const ep_fixture_config *config, char out_path[PATH_BYTES])
{
    ep_error e;
    snprintf(out_path, PATH_BYTES, "%s/%s", dir, name);
    char command[PATH_BYTES + 16];
    snprintf(command, sizeof(command), "mkdir %s", out_path);
    cr_assert_eq(system(command), 0);
    ASSERT_OK(ep_fixture_write(config, out_path, &e), e);
}

static void setup(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    ep_fixture_config config = ep_fixture_default();
    node.pid_fd = -1;
    cr_assert(ep_test_dir_create(dir));
    make_model("model", &config, model_path);
    snprintf(model_flag, sizeof(model_flag), "--model=demo=%s", model_path);
    cr_assert(snprintf(address.sun_path, sizeof(address.sun_path), "%s/notify", dir) <
              (int)sizeof(address.sun_path));
    manager = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    cr_assert_eq(bind(manager, (struct sockaddr *)&address, sizeof(address)), 0);
    snprintf(manager_variable, sizeof(manager_variable), "NOTIFY_SOCKET=%s", address.sun_path);
}

static void teardown(void)
{
    ep_test_process_destroy(&node);
    close(manager);
    ep_test_dir_remove(dir);
}

TestSuite(expertd, .init = setup, .fini = teardown, .timeout = 110);

/* Until the manager is told something that begins with text, and nothing before that begins with
 * unless. */
static void await_notice_without(const char *text, const char *unless)
{
    char message[1024];
    uint64_t end_ns = ep_clock_now_ns() + WAIT_MS * EP_NS_PER_MS;
    for (;;) {
        struct pollfd fd = {.fd = manager, .events = POLLIN};
        uint64_t now_ns = ep_clock_now_ns();
        cr_assert(now_ns < end_ns && poll(&fd, 1, (int)((end_ns - now_ns) / EP_NS_PER_MS)) == 1,
                  "the program never said %s", text);
        ssize_t n = recv(manager, message, sizeof(message) - 1, 0);
        message[n > 0 ? n : 0] = 0;
        if (strncmp(message, text, strlen(text)) == 0) {
            return;
        }
        cr_assert(unless == NULL || strncmp(message, unless, strlen(unless)) != 0, "%s", message);
    }
}

static void await_notice(const char *text)
{
    await_notice_without(text, NULL);
}

/* Starts expertd on free ports with up to 5 more flags. */
static void start(const char *a, const char *b, const char *c, const char *d, const char *e)
{
    const char *const more[] = {a, b, c, d, e};
    const char *args[10] = {"--listen=tcp://127.0.0.1:0", "--admin-listen=tcp://127.0.0.1:0",
                            "--probe-address=127.0.0.1:0", "--node-name=n1"};
    const char *environment[] = {manager_variable, NULL};
    size_t count = 4;
    for (size_t i = 0; i < EP_ARRAY_COUNT(more); i++) {
        if (more[i] != NULL) {
            args[count++] = more[i];
        }
    }
    cr_assert(ep_test_process_start(&node, dir, "node", EP_EXPERTD_PATH, args, environment, true));
    cr_assert(ep_test_process_wait_ports(&node, WAIT_MS));
}

static void expect_output(const char *part)
{
    char *output = ep_test_process_output(&node);
    cr_expect(strstr(output, part) != NULL, "no '%s' in:\n%s", part, output);
    free(output);
}

static ep_test_forward sample(uint16_t *x, uint32_t hidden, const ep_wire_slot *slots,
                              uint32_t slots_count, uint32_t rows)
{
    ep_test_fill_rows(3, EP_DTYPE_BF16, (size_t)rows * hidden, x);
    return (ep_test_forward){.layer = 1,
                             .rows = rows,
                             .slots = slots_count,
                             .hidden = hidden,
                             .x_dtype = EP_DTYPE_BF16,
                             .reply_dtype = EP_DTYPE_BF16,
                             .x = x,
                             .wire_slots = slots};
}

static const ep_wire_slot four_slots[] = {{0, 0}, {2, 1}, {1, 4}, {0, 7}};

static void expect_exact(ep_test_peer *peer, const char *model, const char *path)
{
    uint16_t x[3 * 32], got[4 * 32], wanted[4 * 32];
    ep_error e;
    ep_test_forward f = sample(x, 32, four_slots, 4, 3);
    f.model = model;
    ASSERT_OK(ep_test_forward_run(peer, &f, got, &e), e);
    ASSERT_OK(ep_test_expected_rows(path, &f, wanted, &e), e);
    cr_expect_arr_eq(got, wanted, sizeof(got));
}

static void stop_cleanly(void)
{
    cr_expect_eq(ep_test_process_stop(&node, SIGTERM, WAIT_MS), 0);
    cr_expect(access(node.ports_path, F_OK) != 0, "the ports file is removed");
    expect_output("event=node-end outcome=drained");
}

Test(expertd, serves_exact_rows_shows_itself_and_drains)
{
    ep_test_peer peer;
    ep_error e;
    Expertd__V1__Empty empty = EXPERTD__V1__EMPTY__INIT;
    Expertd__V1__NodeStatusReply *status = NULL;
    char *metrics;
    start(model_flag, NULL, NULL, NULL, NULL);
    await_notice("READY=1");
    cr_expect_eq(ep_test_http_get(node.probe_url, "/livez", NULL), 200);
    cr_expect_eq(ep_test_http_get(node.probe_url, "/readyz", NULL), 200);
    cr_expect_eq(ep_test_http_get(node.probe_url, "/startupz", NULL), 200);
    ASSERT_OK(ep_test_peer_open(&peer, node.rpc_url, &e), e);
    expect_exact(&peer, "demo", model_path);

    ASSERT_OK(ep_rpc_call_sync(peer.channel, "expertd.v1.NodeInfo", "NodeStatus", &empty.base,
                               EP_TIME_NEVER, (ProtobufCMessage **)(void *)&status, &e),
              e);
    cr_expect_str_eq(status->node, "n1");
    cr_expect_str_eq(status->state, "serving");
    cr_expect_eq(status->rows_served, 4);
    cr_expect_eq(status->requests_served, 1);
    cr_assert_eq(status->n_layers, 2);
    cr_expect_eq(status->layers[0]->rows_served, 0);
    cr_expect_eq(status->layers[1]->rows_served, 4);
    cr_expect_eq(status->layers[1]->experts_resident, 8);
    protobuf_c_message_free_unpacked(&status->base, NULL);

    Expertd__V1__DescribeReply *described = NULL;
    ASSERT_OK(ep_rpc_call_sync(peer.channel, "expertd.v1.ExpertService", "Describe", &empty.base,
                               EP_TIME_NEVER, (ProtobufCMessage **)(void *)&described, &e),
              e);
    cr_assert_eq(described->n_models, 1);
    cr_expect_str_eq(described->models[0]->name, "demo");
    cr_expect_eq(described->models[0]->layers[0]->n_owned, 8);
    protobuf_c_message_free_unpacked(&described->base, NULL);

    cr_expect_eq(ep_test_http_get(node.probe_url, "/metrics", &metrics), 200);
    static const char *const wanted[] = {
        "expertd_build_info{version=",
        "expertd_ready 1\n",
        "expertd_requests_total{result=\"OK\"} 1\n",
        "expertd_rows_served_total 4\n",
        "expertd_experts_resident 16\n",
        "expertd_request_duration_seconds_count{stage=\"total\"} 1\n",
        "expertd_coordinator_connected 0\n",
        "expertd_layer_rows_served_total{model=\"demo\",version=\""};
    for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++) {
        cr_expect(strstr(metrics, wanted[i]) != NULL, "no %s in\n%s", wanted[i], metrics);
    }
    free(metrics);
    ep_test_peer_close(&peer);
    expect_output("event=node-start node=n1 rpc_url=tcp://127.0.0.1:");
    expect_output("event=node-memory weights_bytes=");
    expect_output(" weights_from=files ");
    stop_cleanly();
}

/* Begins the call, again when it ended unseen, until the node is seen to have it in work. */
static void begin_in_work(ep_test_peer *peer, ep_test_forward *f, ep_test_pending *pending)
{
    ep_error e;
    f->step_group = 1;
    ASSERT_OK(ep_test_forward_begin(peer, f, NULL, pending, &e), e);
    do {
        if (ep_test_forward_is_done(pending)) {
            ASSERT_OK(ep_test_forward_wait(pending, &e), e);
            f->step_group++; /* a group that has had its window holds nothing any more */
            ASSERT_OK(ep_test_forward_begin(peer, f, NULL, pending, &e), e);
        }
    } while (ep_test_metric(&node, "expertd_requests_in_flight") != 1);
}

Test(expertd, a_stopping_node_finishes_its_calls_and_is_no_longer_ready)
{
    /* In work when the signal comes, at any speed: it waits a second for a rank that never
     * comes. */
    uint16_t x[3 * 32];
    ep_test_peer peer;
    ep_test_pending pending;
    ep_error e;
    start(model_flag, "--step-group-us=1000000", "--drain-ms=100000", NULL, NULL);
    await_notice("READY=1");
    ASSERT_OK(ep_test_peer_open(&peer, node.rpc_url, &e), e);
    ep_test_forward f = sample(x, 32, four_slots, 4, 3);
    f.timeout_ms = WAIT_MS;
    f.step_group_size = 2;
    begin_in_work(&peer, &f, &pending);
    ep_test_process_signal(&node, SIGTERM);
    await_notice("STOPPING=1");
    char *body;
    cr_expect_eq(ep_test_http_get(node.probe_url, "/readyz", &body), 503);
    cr_expect(strstr(body, "[-] state: draining") != NULL, "%s", body);
    free(body);
    ep_test_pending late;
    ep_error refused;
    if (ep_test_forward_begin(&peer, &f, NULL, &late, &refused) == EP_OK) {
        cr_expect_eq(ep_test_forward_wait(&late, &refused), EP_ERR_DRAINING, "%s", refused.text);
    }
    EXPECT_OK(ep_test_forward_wait(&pending, &e), e);
    cr_expect_eq(ep_test_process_wait(&node, WAIT_MS), 0);
    ep_test_peer_close(&peer);
}

Test(expertd, waits_for_its_coordinator_without_being_ready)
{
    start(model_flag, "--coordinator-url=tcp://127.0.0.1:9", NULL, NULL,
          NULL); /* nobody listens on the discard port */
    cr_expect_eq(ep_test_http_get(node.probe_url, "/livez", NULL), 200);
    cr_expect_eq(ep_test_http_get(node.probe_url, "/readyz", NULL), 503);
    cr_expect_eq(ep_test_http_get(node.probe_url, "/startupz", NULL), 503);
    ep_test_peer peer;
    ep_error e;
    uint16_t x[3 * 32];
    ep_test_forward f = sample(x, 32, four_slots, 4, 3);
    ASSERT_OK(ep_test_peer_open(&peer, node.rpc_url, &e), e);
    cr_expect_eq(ep_test_forward_run(&peer, &f, NULL, &e), EP_ERR_NOT_OWNER);
    cr_expect_str_eq(e.node, "n1");
    ep_test_peer_close(&peer);
    ep_test_process_signal(&node, SIGHUP);
    await_notice_without("STATUS=starting", "READY=1");
    stop_cleanly();
    await_notice_without("STOPPING=1", "READY=1");
}

/* Runs the program to its end with these flags: its code and, in *out_text, what it printed. */
static int run(char **out_text, const char *a, const char *b, const char *c)
{
    const char *args[] = {a, b, c, NULL};
    return ep_test_process_run(dir, "run", EP_EXPERTD_PATH, args, NULL, WAIT_MS, out_text);
}

static void expect_run(int code, const char *part, const char *a, const char *b, const char *c)
{
    char *text;
    cr_expect_eq(run(&text, a, b, c), code, "%s", text);
    cr_expect(strstr(text, part) != NULL, "no '%s' in:\n%s", part, text);
    free(text);
}

Test(expertd, bad_configuration_ends_with_1_and_says_what_is_wrong)
{
    char file[PATH_BYTES], flag[PATH_BYTES + 32], where[PATH_BYTES + 128];
    snprintf(file, sizeof(file), "%s/bad.yaml", dir);
    snprintf(flag, sizeof(flag), "--config=%s", file);
    snprintf(where, sizeof(where), "file %s:2: drain_ms: 'soon' is not a time; allowed: 0..1h",
             file);
    cr_assert(ep_test_write_file(file, "node_name: a\ndrain_ms: soon\n", 0600));
    expect_run(1, where, flag, "--check-config", NULL);
    expect_run(1, where, "--check-config", file, NULL);
    expect_run(1, where, flag, NULL, NULL);
    expect_run(1, "models: there is no model to serve", "--check-config", NULL, NULL);
    expect_run(1, "'gpu' is no backend of this build", model_flag, "--backend=gpu", NULL);
    expect_run(1, "unrecognized option", "--nonsense", NULL, NULL);
    expect_run(1, "insecure: true", model_flag, "--listen=tcp://0.0.0.0:0", NULL);
    expect_run(0, "the configuration is right", model_flag, "--check-config", NULL);
    expect_run(0, "drain_ms: 5ms  # flag --drain-ms", model_flag, "--print-config", "--drain-ms=5");
    expect_run(0, "\"wire_version\": 1", "--version", "--json", NULL);
    expect_run(0, "--weight-bytes-max", "--help", NULL, NULL);
    char listed[2 * PATH_BYTES];
    snprintf(listed, sizeof(listed), "models:\n- name: demo\n  path: %s\n  experts: 0-1,9999\n",
             model_path);
    snprintf(where, sizeof(where),
             "file %s:4: models[0].experts: expert 9999 is listed; allowed: 0..", file);
    cr_assert(ep_test_write_file(file, listed, 0600));
    expect_run(1, where, flag, "--check-config", NULL);
    setenv("EXPERTD_DRAIN_MSS", "5", 1);
    expect_run(0,
               "level=warn event=config reason=\"environment EXPERTD_DRAIN_MSS names no option and "
               "is ignored; did you "
               "mean EXPERTD_DRAIN_MS?\"",
               model_flag, "--check-config", NULL);
    unsetenv("EXPERTD_DRAIN_MSS");
    setenv("EXPERTD_BOOT_ID", "5b1c39a2", 1); /* the shipped unit sets it */
    char *text;
    cr_expect_eq(run(&text, model_flag, "--check-config", NULL), 0, "%s", text);
    cr_expect(strstr(text, "names no option") == NULL, "%s", text);
    free(text);
    unsetenv("EXPERTD_BOOT_ID");
    char command[3 * PATH_BYTES];
    snprintf(command, sizeof(command),
             "sed -i.kept 's/\"moe_intermediate_size\": /&1/' '%s/config.json'", model_path);
    cr_assert_eq(system(command), 0);
    expect_run(1, "models[0].path: no expert of model demo can be read: model.safetensors: tensor ",
               model_flag, "--check-config", NULL);
    snprintf(command, sizeof(command), "mv '%s/config.json.kept' '%s/config.json'", model_path,
             model_path);
    cr_assert_eq(system(command), 0);
    char broken[PATH_BYTES + 16];
    snprintf(broken, sizeof(broken), "%s/config.json", model_path);
    cr_assert(ep_test_write_file(broken, "{", 0600));
    expect_run(1, "config.json", model_flag, "--listen=tcp://127.0.0.1:0",
               "--probe-address=127.0.0.1:0");
}

Test(expertd, a_device_that_is_not_there_is_said_by_the_check_and_ends_a_start)
{
    char *text;
    setenv("ASCEND_HOME_PATH", "/nonexistent", 1);
    expect_run(0,
               "level=warn event=backend backend=ascend reason=\"neither libacl_rt.so nor "
               "libascendcl.so can be opened: ",
               model_flag, "--backend=ascend", "--check-config");
    expect_run(1,
               "backend ascend: not available (backend: cpu computes without a device): neither "
               "libacl_rt.so nor libascendcl.so",
               model_flag, "--backend=ascend", "--listen=tcp://127.0.0.1:0");
    setenv("ASCEND_HOME_PATH", EP_TEST_CANN, 1);
    cr_expect_eq(run(&text, model_flag, "--backend=ascend", "--check-config"), 0, "%s", text);
    cr_expect_null(strstr(text, "event=backend"), "%s", text);
    free(text);
}

/* One line says so, and the next backend of the list computes; where the device is there, that one
 * does. */
Test(expertd, a_device_that_is_not_there_may_be_made_good_by_the_cpu)
{
    setenv("ASCEND_HOME_PATH", "/nonexistent", 1);
    expect_run(0, "effect=\"cpu computes in its place\"", model_flag, "--backend=ascend, cpu",
               "--check-config");
    start(model_flag, "--backend=ascend, cpu", NULL, NULL, NULL);
    expect_output("level=warn event=backend backend=ascend reason=\"not available (backend: cpu "
                  "computes without a device): neither "
                  "libacl_rt.so nor libascendcl.so can be opened: ");
    expect_output("effect=\"cpu computes in its place\"");
    expect_output(" backend=cpu models=1");
    cr_expect_eq(ep_test_process_stop(&node, SIGTERM, WAIT_MS), 0);
    setenv("ASCEND_HOME_PATH", EP_TEST_CANN, 1);
    start(model_flag, "--backend=ascend, cpu", NULL, NULL, NULL);
    expect_output(" backend=ascend models=1");
    cr_expect_eq(ep_test_process_stop(&node, SIGTERM, WAIT_MS), 0);
}

#define EXPERTS "\" effect=\"experts"

/* Accepted, for the node serves without it, and said with path and reason. The service manager's
 * check before a start shows it too. */
static void expect_cache_dir(const char *path, const char *problem)
{
    char flag[PATH_BYTES + 64], line[PATH_BYTES + 256];
    char *text;
    snprintf(flag, sizeof(flag), "--weight-cache-dir=%s", path);
    snprintf(line, sizeof(line),
             "level=warn event=weight-cache key=weight_cache_dir path=%s reason=\"%s are packed "
             "anew at each start\"",
             path, problem);
    cr_expect_eq(run(&text, model_flag, flag, "--check-config"), 0, "%s", text);
    if (problem[0] != 0) {
        cr_expect(strstr(text, line) != NULL, "no '%s' in:\n%s", line, text);
    } else {
        cr_expect(strstr(text, "weight-cache") == NULL, "%s", text);
    }
    free(text);
}

Test(expertd, a_cache_directory_that_cannot_be_used_is_said_by_the_check)
{
    char path[PATH_BYTES + 32], file[PATH_BYTES];
    snprintf(file, sizeof(file), "%s/file", dir);
    cr_assert(ep_test_write_file(file, "", 0600));
    expect_cache_dir(dir, "");
    expect_cache_dir(file, "is not a directory: Not a directory" EXPERTS);
    snprintf(path, sizeof(path), "%s/below", file);
    expect_cache_dir(path, "cannot be used: Not a directory" EXPERTS);
    snprintf(path, sizeof(path), "%s/none/packed", dir);
    expect_cache_dir(path, "cannot be made: No such file or directory" EXPERTS);
    snprintf(path, sizeof(path), "%s/packed/", dir);
    expect_cache_dir(path, "");
    cr_expect_neq(access(path, F_OK), 0, "a check makes nothing");
    if (geteuid() != 0) { /* root may write everywhere */
        cr_assert_eq(chmod(model_path, 0500), 0);
        expect_cache_dir(model_path,
                         "cannot be written: Permission denied" EXPERTS " without a file");
        cr_assert_eq(chmod(model_path, 0300), 0);
        expect_cache_dir(model_path, "cannot be used: Permission denied" EXPERTS);
        cr_assert_eq(chmod(model_path, 0500), 0);
        snprintf(path, sizeof(path), "%s/packed", model_path);
        expect_cache_dir(path, "cannot be made: Permission denied" EXPERTS);
        cr_assert_eq(chmod(model_path, 0700), 0);
    }
}

/* A case of the fixture's formats, and the flag that names its file. */
static void make_formats(const char *name, const char *file, char out_flag[PATH_BYTES + 32])
{
    ep_error error;
    char path[PATH_BYTES];
    const ep_format_case *form = ep_format_cases;
    while (strcmp(form->name, name) != 0) {
        form++;
        cr_assert_lt(form, ep_format_cases + ep_format_cases_count, "no case %s", name);
    }
    ep_format_model *model = ep_format_model_make(form, 11);
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    cr_assert_eq(mkdir(path, 0700), 0);
    ASSERT_OK(ep_format_model_write(model, path, &error), error);
    ep_format_model_free(model);
    snprintf(out_flag, PATH_BYTES + 32, "--model=demo=%s%s", path, file);
}

/* Whether a start with these numerics has a line about them at this level of the log, with all
 * parts, each NULL or a text; parts NULL: none. */
static void expect_family_line(const char *flag, const char *numerics, const char *level,
                               const char *const parts[4])
{
    char numerics_flag[64], start_of_line[64];
    snprintf(numerics_flag, sizeof(numerics_flag), "--numerics=%s", numerics);
    snprintf(start_of_line, sizeof(start_of_line), "level=%s event=numerics model=demo ", level);
    start(flag, numerics_flag, NULL, NULL, NULL);
    await_notice("READY=1");
    stop_cleanly();
    char *output = ep_test_process_output(&node);
    char *line = strstr(output, " event=numerics ");
    cr_expect_eq(line != NULL, parts != NULL, "%s:\n%s", numerics, output);
    line = strstr(output, start_of_line);
    cr_expect_eq(line != NULL, parts != NULL, "%s:\n%s", numerics, output);
    if (line != NULL && parts != NULL) {
        line[strcspn(line, "\n")] = 0;
        for (size_t i = 0; i < 4; i++) {
            cr_expect(parts[i] == NULL || strstr(line, parts[i]) != NULL, "%s: no '%s' in: %s",
                      numerics, parts[i], line);
        }
    }
    free(output);
    ep_test_process_destroy(&node);
    node.pid_fd = -1;
}

#define NONE_ROUNDED "both gate/up and down are MXFP4, int4 g32 or q4_K"

Test(expertd, a_numerics_family_that_has_none_of_a_models_experts_is_said)
{
    static const char *const plain[4] = {
        "weight_format=bf16 numerics=bf16dp/bf16/", NONE_ROUNDED,
        "effect=\"the model's experts are computed as with bf16dp\""};
    static const char *const mixed[4] = {
        "weight_format=q4_k down_format=q6_k numerics=w4a8/q4_k/", NONE_ROUNDED,
        "effect=\"the model's experts are computed as with bf16dp\""};
    ep_fixture_config config = ep_fixture_default();
    char path[PATH_BYTES], flag[PATH_BYTES + 32];
    config.expert_format = EP_WEIGHTS_MXFP4;
    config.inner = 32;
    make_model("narrow", &config, path);
    snprintf(flag, sizeof(flag), "--model=demo=%s", path);
    expect_family_line(model_flag, "w4a8", "warn", plain);
    expect_family_line(flag, "w4a8", "warn", NULL);
    make_formats("gguf-q4_k-q6_k", "/model.gguf", flag);
    expect_family_line(flag, "w4a8", "warn", mixed);
}

/* What a start with this level of the CPU says of 4-bit models. takes: auto takes w4a8 there. */
static void expect_auto_lines(const char *level, bool takes, const char *int4_flag,
                              const char *q4_0_flag, const char *q4_k_flag, const char *mixed_flag)
{
    char kept[64], as_with[64];
    const char *const int4[4] = {"weight_format=int4-g32 numerics=w4a8/int4-g32/",
                                 "where gate, up and down all are", "an error of .172 for .171",
                                 kept};
    const char *const q4_0[4] = {"weight_format=int4-g32-f16 numerics=w4a8/int4-g32-f16/",
                                 "(not timed with AVX-512)", "an error of .151 for .151", kept};
    const char *const q4_k[4] = {"weight_format=q4_k numerics=w4a8/q4_k/",
                                 "(not timed) as fast as bf16dp", "an error of .129 for .128",
                                 kept};
    const char *const mixed[4] = {"weight_format=q4_k down_format=q6_k numerics=w4a8/q4_k/",
                                  NONE_ROUNDED, as_with};
    setenv(EP_CPU_FEATURES_VARIABLE, level, 1);
    /* what it took before w4a8 */
    const char *family = strcmp(level, "avx512bf16") == 0 ? "bf16dp" : "portable";
    snprintf(kept, sizeof(kept), "; numerics: %s does not\"", family);
    snprintf(as_with, sizeof(as_with), "effect=\"the model's experts are computed as with %s\"",
             family);
    expect_family_line(int4_flag, "auto", "info", takes ? int4 : NULL);
    expect_family_line(q4_0_flag, "auto", "info", takes ? q4_0 : NULL);
    expect_family_line(q4_k_flag, "auto", "info", takes ? q4_k : NULL);
    expect_family_line(mixed_flag, "auto", "info", takes ? mixed : NULL);
}

/* A group of a name that tells of 16-bit inputs, added to a model's configuration. */
static void name_16_bits(const char *path)
{
    static const char group[] = ",\"quantization_config\":{\"quant_method\":\"compressed-tensors\","
                                "\"config_groups\":{\"W4A16\":{\"weights\":{\"num_bits\":4,"
                                "\"group_size\":32}}}}}";
    char file[PATH_BYTES + 32];
    snprintf(file, sizeof(file), "%s/config.json", path);
    char *text = ep_test_read_file(file);
    char *end = strrchr(text, '}');
    char *named = NULL;
    cr_assert(end != NULL && asprintf(&named, "%.*s%s", (int)(end - text), text, group) > 0);
    cr_assert(ep_test_write_file(file, named, 0600));
    free(named);
    free(text);
}

Test(expertd, what_auto_chose_for_4_bits_is_said_with_both_figures)
{
    static const struct {
        const char *name;
        bool takes;
    } levels[] = {{"portable", false},
                  {"avx2", true},
                  {"avx512f", false},
                  {"avx512vnni", true},
                  {"avx512bf16", true}};
    static const char *const wide[4] = {"/int4-g32/", "activations of 16 bits",
                                        "inputs are not rounded to int8"};
    ep_fixture_config config = ep_fixture_default();
    char path[PATH_BYTES], flag[PATH_BYTES + 32], q4_0[PATH_BYTES + 32], q4_k[PATH_BYTES + 32],
        mixed[PATH_BYTES + 32];
    size_t highest = 0;
    config.expert_format = EP_WEIGHTS_INT4;
    config.inner = 32;
    make_model("narrow", &config, path);
    snprintf(flag, sizeof(flag), "--model=demo=%s", path);
    make_formats("gguf-q4_0", "/model.gguf", q4_0);
    make_formats("gguf-q4_k-fused", "", q4_k);
    make_formats("gguf-q4_k-q6_k", "/model.gguf", mixed);
    for (size_t i = 0; i < EP_ARRAY_COUNT(levels); i++) {
        ep_error error;
        setenv(EP_CPU_FEATURES_VARIABLE, levels[i].name, 1);
        if (ep_cpu_features_check(&error) == EP_OK) {
            expect_auto_lines(levels[i].name, levels[i].takes, flag, q4_0, q4_k, mixed);
            highest = i;
        }
    }
    setenv(EP_CPU_FEATURES_VARIABLE, levels[highest].name, 1);
    name_16_bits(path);
    expect_family_line(flag, "auto", "info", levels[highest].takes ? wide : NULL);
}

Test(expertd, a_taken_port_is_named)
{
    char flag[EP_TEST_PATH_BYTES + 16];
    start(model_flag, NULL, NULL, NULL, NULL);
    snprintf(flag, sizeof(flag), "--listen=%s", node.rpc_url);
    expect_run(1, node.rpc_url, model_flag, flag, "--probe-address=");
    stop_cleanly();
}

Test(expertd, hangup_checks_first_and_reports_what_needs_a_restart)
{
    char file[PATH_BYTES], flag[PATH_BYTES + 32], text[PATH_BYTES + 128];
    snprintf(file, sizeof(file), "%s/c.yaml", dir);
    snprintf(flag, sizeof(flag), "--config=%s", file);
    cr_assert(ep_test_write_file(file, "threads: 1\ndrain_ms: 5000\n", 0600));
    start(model_flag, flag, NULL, NULL, NULL);
    await_notice("READY=1");
    cr_assert(ep_test_write_file(file, "threads: 1x\n", 0600));
    ep_test_process_signal(&node, SIGHUP);
    await_notice("RELOADING=1");
    await_notice("READY=1");
    expect_output("level=error event=config-reload outcome=refused reason=\"file ");
    snprintf(text, sizeof(text), "threads: 2\ndrain_ms: 7000\n");
    cr_assert(ep_test_write_file(file, text, 0600));
    ep_test_process_signal(&node, SIGHUP);
    await_notice("RELOADING=1");
    await_notice("READY=1");
    expect_output("level=warn event=config-reload outcome=waiting key=threads ");
    expect_output("event=config-reload outcome=changed key=drain_ms value=7s origin=\"file ");
    cr_expect_eq(ep_test_http_get(node.probe_url, "/readyz", NULL), 200);
    ep_test_process_signal(&node, SIGTERM);
    cr_expect_eq(ep_test_process_wait(&node, WAIT_MS), 0);
    expect_output("event=node-drain signal=SIGTERM drain_ms=7000");
}

Test(expertd, a_long_drain_is_ended_by_a_second_signal)
{
    /* A call that takes long, a long drain: the second signal does not wait for either. */
    ep_fixture_config config = ep_fixture_default();
    char path[PATH_BYTES], flag[PATH_BYTES + 32];
    enum { ROWS = 4000, WIDTH = 256 };
    static uint16_t x[ROWS * WIDTH];
    static ep_wire_slot slots[ROWS];
    ep_test_peer peer;
    ep_test_pending pending;
    ep_error e;
    config.hidden = WIDTH;
    config.inner = 2048;
    make_model("wide", &config, path);
    snprintf(flag, sizeof(flag), "--model=demo=%s", path);
    for (uint32_t i = 0; i < ROWS; i++) {
        slots[i] = (ep_wire_slot){i, 0};
    }
    start(flag, "--backend=reference", "--threads=1", "--inflight-tokens=4096",
          "--drain-ms=100000");
    await_notice("READY=1");
    ASSERT_OK(ep_test_peer_open(&peer, node.rpc_url, &e), e);
    ep_test_forward f = sample(x, WIDTH, slots, ROWS, ROWS);
    f.timeout_ms = WAIT_MS;
    begin_in_work(&peer, &f, &pending);
    ep_test_process_signal(&node, SIGTERM);
    await_notice("STOPPING=1");
    ep_test_process_signal(&node, SIGTERM);
    cr_expect_eq(ep_test_process_wait(&node, WAIT_MS), 128 + SIGTERM);
    cr_expect_eq(ep_test_forward_wait(&pending, &e), EP_ERR_CONNECTION_LOST, "%s", e.text);
    ep_test_peer_close(&peer);
}

/* A relay between one caller and the node, that can leave unread what the node sends. */
typedef struct relay {
    int listener;
    int pipe[2]; /* a byte for each change: 'h' hold, 'g' go on, 'q' end */
    pthread_t thread;
    char url[64];
} relay;

/* Passes on what has come; false at the end of the connection. */
static bool pass(int from, int to)
{
    static char bytes[65536];
    ssize_t n = recv(from, bytes, sizeof(bytes), 0);
    for (ssize_t sent = 0; sent < n;) {
        ssize_t m = send(to, bytes + sent, (size_t)(n - sent), MSG_NOSIGNAL);
        if (m <= 0) {
            return false;
        }
        sent += m;
    }
    return n > 0;
}

static void *relay_run(void *arg)
{
    relay *r = arg;
    char order = 'g';
    int caller = accept(r->listener, NULL, NULL);
    int server = ep_test_tcp_connect(node.rpc_url);
    int small = 65536;
    setsockopt(server, SOL_SOCKET, SO_RCVBUF, &small, sizeof(small));
    /* a node that has left takes nothing, but what it said before is still to be read */
    bool takes = true;
    for (bool open = true; order != 'q';) {
        struct pollfd fds[] = {{.fd = r->pipe[0], .events = POLLIN},
                               {.fd = open && takes ? caller : -1, .events = POLLIN},
                               {.fd = open && order == 'g' ? server : -1, .events = POLLIN}};
        poll(fds, 3, -1);
        if (fds[0].revents != 0 && read(r->pipe[0], &order, 1) != 1) {
            break;
        }
        if (fds[2].revents != 0 && order == 'g' && !pass(server, caller)) {
            open = false;
        } else if (fds[1].revents != 0 && !pass(caller, server)) {
            takes = false;
        }
        if (!open) {
            shutdown(caller, SHUT_RDWR);
            shutdown(server, SHUT_RDWR);
        }
    }
    close(caller);
    close(server);
    return NULL;
}

static void relay_start(relay *r)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof(address);
    r->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    cr_assert_eq(bind(r->listener, (struct sockaddr *)&address, sizeof(address)), 0);
    cr_assert_eq(listen(r->listener, 1), 0);
    cr_assert_eq(getsockname(r->listener, (struct sockaddr *)&address, &bytes), 0);
    snprintf(r->url, sizeof(r->url), "tcp://127.0.0.1:%u", ntohs(address.sin_port));
    cr_assert_eq(pipe(r->pipe), 0);
    cr_assert_eq(pthread_create(&r->thread, NULL, relay_run, r), 0);
}

static void relay_order(relay *r, char order)
{
    cr_assert_eq(write(r->pipe[1], &order, 1), 1);
}

static void relay_end(relay *r)
{
    relay_order(r, 'q');
    pthread_join(r->thread, NULL);
    close(r->listener);
    close(r->pipe[0]);
    close(r->pipe[1]);
}

/* One that goes on with a node it hears nothing of, so that the relay may hold for any time. */
static void open_patient_peer(ep_test_peer *peer, const char *url)
{
    ep_error e;
    ASSERT_OK(ep_test_peer_open(peer, node.rpc_url, &e), e);
    ep_rpc_channel_destroy(peer->channel);
    peer->channel = NULL;
    peer->common.limits.ping_dead_count = 100;
    ep_rpc_channel_config config = {
        .common = peer->common, .address = {.url = url}, .connection_class = "decode"};
    ASSERT_OK(ep_rpc_channel_create(&config, &peer->channel, &e), e);
    ASSERT_OK(
        ep_rpc_channel_wait_ready(peer->channel, ep_clock_now_ns() + WAIT_MS * EP_NS_PER_MS, &e),
        e);
}

Test(expertd, a_stopping_node_sends_the_replies_it_has_queued)
{
    /* A reply of 12 MB, more than the sockets between hold, to a caller that does not read it
     * yet. */
    enum { ROWS = 3000, WIDTH = 1024, STILL_MS = 1000 };
    static uint16_t x[ROWS * WIDTH];
    static float rows[ROWS * WIDTH], wanted[ROWS * WIDTH];
    static ep_wire_slot slots[ROWS];
    ep_fixture_config config = ep_fixture_default();
    char path[PATH_BYTES], flag[PATH_BYTES + 32];
    ep_test_peer peer;
    ep_test_pending pending;
    ep_error e;
    relay between;
    config.hidden = WIDTH;
    make_model("wide", &config, path);
    snprintf(flag, sizeof(flag), "--model=demo=%s", path);
    for (uint32_t i = 0; i < ROWS; i++) {
        slots[i] = (ep_wire_slot){i, i / 375};
    }
    start(flag, "--inflight-tokens=4096", "--drain-ms=100000", NULL, NULL);
    await_notice("READY=1");
    relay_start(&between);
    open_patient_peer(&peer, between.url);
    relay_order(&between, 'h');
    ep_test_forward f = sample(x, WIDTH, slots, ROWS, ROWS);
    f.reply_dtype = EP_DTYPE_F32;
    f.timeout_ms = WAIT_MS;
    ASSERT_OK(ep_test_forward_begin(&peer, &f, rows, &pending, &e), e);
    while (ep_test_metric(&node, "expertd_requests_total{result=\"OK\"}") != 1 ||
           ep_test_metric(&node, "expertd_requests_in_flight") != 0) { /* until the reply is queued
                                                                        */
    }
    ep_test_process_signal(&node, SIGTERM);
    await_notice("STOPPING=1");
    /* It stays for as long as the reply waits; the time only gives a node that would leave the
     * chance to. */
    cr_expect_eq(ep_test_process_wait(&node, STILL_MS), -1, "it left with a reply in its queue");
    relay_order(&between, 'g');
    EXPECT_OK(ep_test_forward_wait(&pending, &e), e);
    ASSERT_OK(ep_test_expected_rows(path, &f, wanted, &e), e);
    cr_expect(memcmp(rows, wanted, sizeof(rows)) == 0, "the rows are not exact");
    cr_expect_eq(ep_test_process_wait(&node, WAIT_MS), 0);
    expect_output("event=node-end outcome=drained");
    ep_test_peer_close(&peer);
    relay_end(&between);
}
