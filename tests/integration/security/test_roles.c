/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The role matrix against the real programs: every token x every claimed role x both listeners x
 * every method of methods.def. What is expected is computed from the roles in that list; a few
 * facts are written down beside it.
 */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "health.pb-c.h"
#include "model/safetensors_writer.h"
#include "secure_peer.h"
#include "support/checkpoint_fixture.h"
#include "support/expect.h"
#include "support/process.h"

#define TOKENS 5
/* by what it is good for: nothing (missing), nothing (wrong), client, node, operator */
static const char *const tokens[TOKENS] = {"", "wrong-token-000000", "client-token-1111",
                                           "node-token-22222222", "admin-token-333333333"};
static const int token_rank[TOKENS] = {-1, -1, EP_ROLE_CLIENT, EP_ROLE_NODE, EP_ROLE_OPERATOR};

static char dir[EP_TEST_PATH_BYTES];
static ep_test_process daemon_process;
static ep_test_process nodes[2];            /* of a cluster; the second in the place of the first */
static uint64_t refused[EP_REFUSALS_COUNT]; /* what this test expects /metrics to say */

static void setup(void)
{
    cr_assert(ep_test_dir_create(dir));
}

static void teardown(void)
{
    ep_test_process_destroy(&daemon_process);
    ep_test_process_destroy(&nodes[0]);
    ep_test_process_destroy(&nodes[1]);
    ep_test_dir_remove(dir);
    secure_end();
}

static const char *path_of(const char *name)
{
    static char path[EP_TEST_PATH_BYTES + 32];
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    return path;
}

static void write_token(const char *name, const char *text)
{
    char line[128];
    snprintf(line, sizeof(line), "%s\n", text);
    cr_assert(ep_test_write_file(path_of(name), line, 0600));
}

/* more: up to three further flags, NULL none */
static void start(const char *program, const char *a, const char *b, const char *c)
{
    char model[EP_TEST_PATH_BYTES + 64];
    const char *args[10] = {"--listen=tcp://127.0.0.1:0", "--admin-listen=tcp://127.0.0.1:0",
                            "--probe-address=127.0.0.1:0"};
    size_t count = 3;
    ep_fixture_config fixture = ep_fixture_default();
    ep_error error;
    if (strcmp(program, EP_EXPERTD_PROGRAM) == 0) {
        ASSERT_OK(ep_fixture_write(&fixture, dir, &error), error);
        snprintf(model, sizeof(model), "--model=m=%s", dir);
        args[count++] = model;
    }
    const char *more[] = {a, b, c};
    for (size_t i = 0; i < 3; i++) {
        if (more[i] != NULL) {
            args[count++] = more[i];
        }
    }
    cr_assert(ep_test_process_start(&daemon_process, dir, "daemon", program, args, NULL, true));
    cr_assert(ep_test_process_wait_ports(&daemon_process, SECURE_WAIT_MS));
}

static void start_with_tokens(const char *program)
{
    char client[EP_TEST_PATH_BYTES + 64], node[EP_TEST_PATH_BYTES + 64],
        admin[EP_TEST_PATH_BYTES + 64];
    write_token("client.token", tokens[2]);
    write_token("node.token", tokens[3]);
    char labelled[64];
    snprintf(labelled, sizeof(labelled), "another-token-5555 bob\n%s alice", tokens[4]);
    write_token("admin.token", labelled);
    snprintf(client, sizeof(client), "--token-file=%s/client.token", dir);
    snprintf(node, sizeof(node), "--node-token-file=%s/node.token", dir);
    snprintf(admin, sizeof(admin), "--admin-token-file=%s/admin.token", dir);
    start(program, client, node, admin);
}

static secure_claim claim_of(bool admin, ep_rpc_role role, const char *token)
{
    return (secure_claim){.url = admin ? daemon_process.admin_url : daemon_process.rpc_url,
                          .role = ep_rpc_role_name(role),
                          .token = token,
                          .node = "peer-1"};
}

/* Whether the process serves this service, by its own word. */
static bool is_served(const Expertd__V1__ListServicesReply *list, const char *service)
{
    for (size_t i = 0; i < list->n_services; i++) {
        if (strcmp(list->services[i]->name, service) == 0) {
            return true;
        }
    }
    return false;
}

static Expertd__V1__ListServicesReply *ask_services(ep_rpc_channel *channel)
{
    Expertd__V1__Empty empty = EXPERTD__V1__EMPTY__INIT;
    ProtobufCMessage *reply = NULL;
    ep_error error;
    ASSERT_OK(ep_rpc_call_sync(channel, "expertd.v1.Reflection", "ListServices", &empty.base,
                               EP_TIME_NEVER, &reply, &error),
              error);
    return (Expertd__V1__ListServicesReply *)reply;
}

static void check_methods(ep_rpc_channel *channel, ep_rpc_role role, bool admin, const char *who)
{
    size_t count;
    ep_error error;
    const ep_rpc_method *methods = ep_rpc_methods(&count);
    Expertd__V1__ListServicesReply *services = ask_services(channel);
    for (size_t i = 0; i < count; i++) {
        const ep_rpc_method *method = &methods[i];
        bool allowed = method->role == EP_ROLE_CLIENT || method->role == role;
        bool served = is_served(services, method->service->name);
        ep_err err = secure_call(channel, method, &error);
        bool was_refused =
            err == EP_ERR_PERMISSION_DENIED && strstr(error.text, "needs role") != NULL;
        refused[EP_REFUSED_METHOD] += !allowed;
        cr_expect_eq(was_refused, !allowed, "%s: %s.%s: %s %s", who, method->service->name,
                     method->method->name, ep_err_name(err), error.text);
        bool was_unknown = err == EP_ERR_UNIMPLEMENTED &&
                           strstr(error.text, "is not served by this process") != NULL;
        cr_expect_eq(was_unknown, allowed && !served, "%s: %s.%s: %s %s", who,
                     method->service->name, method->method->name, ep_err_name(err), error.text);
        cr_expect(admin || method->role != EP_ROLE_OPERATOR || was_refused,
                  "%s: an operator's method on a main listener", who);
    }
    protobuf_c_message_free_unpacked(&services->base, NULL);
}

/* The refusal that the rules ask for, or -1 when the connection is to be admitted. */
static int expected_refusal(int token, ep_rpc_role claimed, bool admin)
{
    if (token_rank[token] < (int)claimed) {
        return token_rank[token] >= 0  ? EP_REFUSED_TOKEN_ROLE
               : tokens[token][0] == 0 ? EP_REFUSED_TOKEN_MISSING
                                       : EP_REFUSED_TOKEN_WRONG;
    }
    return admin == (claimed == EP_ROLE_OPERATOR) ? -1 : EP_REFUSED_LISTENER;
}

static void check_connection(int token, ep_rpc_role claimed, bool admin)
{
    char who[160];
    ep_error error;
    secure_claim claim = claim_of(admin, claimed, tokens[token]);
    int refusal = expected_refusal(token, claimed, admin);
    snprintf(who, sizeof(who), "token %d as %s on the %s listener", token, claim.role,
             admin ? "admin" : "main");
    ep_rpc_channel *channel = secure_connect(&claim, &error);
    cr_expect_eq(channel != NULL, refusal < 0, "%s: %s", who, error.text);
    if (refusal >= 0) {
        bool unknown = token_rank[token] < 0;
        refused[refusal]++;
        cr_expect_eq(error.code, unknown ? EP_ERR_UNAUTHENTICATED : EP_ERR_PERMISSION_DENIED,
                     "%s: %s", who, error.text);
    }
    if (channel != NULL) {
        check_methods(channel, claimed, admin, who);
        secure_close(channel);
    }
}

static void check_metrics(void)
{
    char *text = NULL;
    cr_assert_eq(ep_test_http_get(daemon_process.probe_url, "/metrics", &text), 200);
    for (size_t i = 0; i < EP_REFUSALS_COUNT; i++) {
        char line[128];
        snprintf(line, sizeof(line), "expertd_rpc_refused_total{reason=\"%s\"} %llu\n",
                 ep_rpc_refusal_name((ep_rpc_refusal)i), (unsigned long long)refused[i]);
        cr_expect(strstr(text, line) != NULL, "no line %s", line);
    }
    free(text);
}

static size_t count_lines(const char *text, const char *part)
{
    size_t count = 0;
    for (; (text = strstr(text, part)) != NULL; text++) {
        count++;
    }
    return count;
}

/* The log names who was turned away and why, at a limited rate, and never a token. */
static void check_audit(void)
{
    size_t all = 0, left_out = 0;
    cr_expect_eq(ep_test_process_stop(&daemon_process, SIGTERM, SECURE_WAIT_MS), 0);
    char *log = ep_test_process_output(&daemon_process);
    for (size_t i = 0; i < EP_REFUSALS_COUNT; i++) {
        all += refused[i];
    }
    for (const char *at = log;
         (at = strstr(at, "event=audit-refused-more lines_left_out=")) != NULL; at++) {
        left_out += strtoul(at + strlen("event=audit-refused-more lines_left_out="), NULL, 10);
    }
    cr_expect_eq(count_lines(log, "event=audit-refused peer=127.0.0.1:") + left_out, all,
                 "%zu lines and %zu left out of %zu",
                 count_lines(log, "event=audit-refused peer=127.0.0.1:"), left_out, all);
    cr_expect(left_out > 0, "a flood of %zu was logged whole", all);
    cr_expect(strstr(log, " node=peer-1 role=client method=Hello reason=token-missing") != NULL,
              "%s", log);
    for (int t = 1; t < TOKENS; t++) {
        cr_expect(strstr(log, tokens[t]) == NULL, "token %d is in the log", t);
    }
    free(log);
}

static void check_matrix(const char *program)
{
    start_with_tokens(program);
    for (int admin = 0; admin < 2; admin++) {
        for (int token = 0; token < TOKENS; token++) {
            for (int role = 0; role < EP_ROLES_COUNT; role++) {
                check_connection(token, (ep_rpc_role)role, admin);
            }
        }
    }
    check_metrics();
    check_audit();
}

TestSuite(security_roles, .init = setup, .fini = teardown, .timeout = 240);

Test(security_roles, coordinator)
{
    check_matrix(EP_COORDINATOR_PROGRAM);
}

Test(security_roles, node)
{
    check_matrix(EP_EXPERTD_PROGRAM);
}

static void expect_call(ep_rpc_role role, int token, bool admin, const char *service,
                        const char *method, const char *refusal)
{
    ep_error error;
    secure_claim claim = claim_of(admin, role, tokens[token]);
    ep_rpc_channel *channel = secure_connect(&claim, &error);
    if (channel != NULL) {
        const ep_rpc_method *m = ep_rpc_method_by_name(service, method);
        cr_assert(m != NULL, "%s.%s", service, method);
        secure_call(channel, m, &error);
        secure_close(channel);
    }
    if (refusal == NULL) {
        cr_expect(channel != NULL && strstr(error.text, "needs role") == NULL, "%s: %s", method,
                  error.text);
    } else {
        cr_expect(strstr(error.text, refusal) != NULL, "%s: no '%s' in: %s", method, refusal,
                  error.text);
    }
}

/* Written down by hand, so that a mistake in methods.def or in the rule itself is seen. */
Test(security_roles, facts)
{
    start_with_tokens(EP_COORDINATOR_PROGRAM);
    expect_call(EP_ROLE_CLIENT, 2, false, "expertd.v1.Coordinator", "WatchPlacement", NULL);
    expect_call(EP_ROLE_CLIENT, 2, false, "expertd.v1.Coordinator", "RegisterNode",
                "needs role node");
    expect_call(EP_ROLE_CLIENT, 2, false, "expertd.v1.Coordinator", "Heartbeat", "needs role node");
    expect_call(EP_ROLE_NODE, 3, false, "expertd.v1.Coordinator", "Heartbeat", NULL);
    expect_call(EP_ROLE_NODE, 2, false, "expertd.v1.Coordinator", "Heartbeat",
                "good for role client, not for role node");
    expect_call(EP_ROLE_CLIENT, 4, false, "expertd.v1.Admin", "Drain", "needs role operator");
    expect_call(EP_ROLE_NODE, 4, false, "expertd.v1.Admin", "Reload", "needs role operator");
    expect_call(EP_ROLE_OPERATOR, 4, false, "expertd.v1.Admin", "GetConfig",
                "operators connect to admin_listen");
    expect_call(EP_ROLE_OPERATOR, 2, true, "expertd.v1.Admin", "GetConfig",
                "not for role operator");
    expect_call(EP_ROLE_OPERATOR, 0, true, "expertd.v1.Admin", "GetConfig", "the token is missing");
    expect_call(EP_ROLE_OPERATOR, 4, true, "expertd.v1.Admin", "GetConfig", NULL);
    expect_call(EP_ROLE_OPERATOR, 4, true, "expertd.v1.Coordinator", "ClusterStatus", NULL);
    expect_call(EP_ROLE_OPERATOR, 4, true, "expertd.v1.Coordinator", "RegisterNode",
                "needs role node");
    expect_call(EP_ROLE_CLIENT, 2, true, "expertd.v1.Health", "Check", "it is for operators");
    cr_expect_eq(ep_test_process_stop(&daemon_process, SIGTERM, SECURE_WAIT_MS), 0);
    char *log = ep_test_process_output(&daemon_process);
    cr_expect(strstr(log, "event=audit-admin peer=127.0.0.1:") != NULL, "%s", log);
    cr_expect(
        strstr(log, " node=peer-1 role=operator who=alice method=expertd.v1.Admin.GetConfig") !=
            NULL,
        "%s", log);
    cr_expect(
        strstr(log,
               " node=peer-1 role=client who=alice method=expertd.v1.Admin.Drain reason=method") !=
            NULL,
        "%s", log);
    free(log);
}

Test(security_roles, without_tokens_listeners_still_decide)
{
    start(EP_EXPERTD_PROGRAM, NULL, NULL, NULL);
    expect_call(EP_ROLE_CLIENT, 0, false, "expertd.v1.ExpertService", "Describe", NULL);
    expect_call(EP_ROLE_OPERATOR, 0, true, "expertd.v1.Admin", "GetConfig", NULL);
    expect_call(EP_ROLE_OPERATOR, 0, false, "expertd.v1.Admin", "GetConfig",
                "operators connect to admin_listen");
    expect_call(EP_ROLE_CLIENT, 0, false, "expertd.v1.Admin", "GetConfig", "needs role operator");
}

Test(security_roles, a_full_service_lets_operators_in)
{
    ep_error error;
    start(EP_EXPERTD_PROGRAM, "--connections-max=1", NULL, NULL);
    secure_claim client = claim_of(false, EP_ROLE_CLIENT, ""), operator= claim_of(
                                                                   true, EP_ROLE_OPERATOR, "");
    ep_rpc_channel *first = secure_connect(&client, &error);
    cr_assert(first != NULL, "%s", error.text);
    cr_expect_not(secure_is_admitted(&client, &error), "one too many");
    cr_expect(secure_is_admitted(&operator, & error), "%s", error.text);
    secure_close(first);
}

/* Peers that say nothing, on the listener that operators need most. */
Test(security_roles, silent_connections_are_closed_and_counted)
{
    enum { SILENT = 40 }; /* more than there are places */
    int fds[SILENT];
    char byte, *text = NULL;
    ep_error error;
    start(EP_EXPERTD_PROGRAM, NULL, NULL, NULL);
    for (int i = 0; i < SILENT; i++) {
        fds[i] = ep_test_tcp_connect(daemon_process.admin_url);
        cr_assert(fds[i] >= 0);
    }
    for (int i = 0; i < SILENT; i++) { /* the test's timeout bounds it */
        cr_expect(recv(fds[i], &byte, 1, 0) <= 0, "a peer without Hello was sent something");
        close(fds[i]);
    }
    secure_claim claim = claim_of(true, EP_ROLE_OPERATOR, "");
    /* places are free a moment after their peers saw the end */
    while (!secure_is_admitted(&claim, &error)) {
        cr_assert(error.code == EP_ERR_CONNECTION_LOST || error.code == EP_ERR_UNAVAILABLE, "%s",
                  error.text);
    }
    cr_assert_eq(ep_test_http_get(daemon_process.probe_url, "/metrics", &text), 200);
    cr_expect(strstr(text, "expertd_rpc_refused_total{reason=\"no-hello\"} 0\n") == NULL, "%s",
              text);
    free(text);
}

Test(security_roles, operators_do_not_inherit_the_clients_token)
{
    char flag[EP_TEST_PATH_BYTES + 64];
    write_token("client.token", tokens[2]);
    snprintf(flag, sizeof(flag), "--token-file=%s/client.token", dir);
    start(EP_COORDINATOR_PROGRAM, flag, NULL, NULL);
    expect_call(EP_ROLE_OPERATOR, 2, true, "expertd.v1.Admin", "GetConfig", "admin_token_file");
    expect_call(EP_ROLE_NODE, 2, false, "expertd.v1.Coordinator", "Heartbeat", NULL); /* nodes do */
}

Test(security_roles, tokens_change_while_the_program_runs)
{
    char flag[EP_TEST_PATH_BYTES + 64], both[128];
    ep_error error;
    write_token("client.token", tokens[2]);
    snprintf(flag, sizeof(flag), "--token-file=%s/client.token", dir);
    start(EP_COORDINATOR_PROGRAM, flag, NULL, NULL);
    secure_claim before = claim_of(false, EP_ROLE_CLIENT, tokens[2]);
    secure_claim after = claim_of(false, EP_ROLE_CLIENT, tokens[3]);
    cr_expect(secure_is_admitted(&before, &error), "%s", error.text);
    cr_expect_not(secure_is_admitted(&after, &error));
    snprintf(both, sizeof(both), "%s\r\n%s\r\n", tokens[3], tokens[2]);
    cr_assert(ep_test_write_file(path_of("client.token"), both, 0600));
    cr_assert(ep_test_process_signal(&daemon_process, SIGHUP));
    uint64_t tries = 0;
    while (!secure_is_admitted(&after,
                               /* until the signal was handled; the test's timeout bounds it */
                               &error)) {
        cr_assert_eq(error.code, EP_ERR_UNAUTHENTICATED, "%s", error.text);
        tries++;
    }
    cr_expect(secure_is_admitted(&before, &error), "the token before it is good too: %s",
              error.text);
    cr_assert(ep_test_write_file(path_of("client.token"), "short\n", 0600));
    cr_assert(ep_test_process_signal(&daemon_process, SIGHUP));
    char *log = NULL;
    do { /* a file that is wrong changes nothing */
        free(log);
        log = ep_test_process_output(&daemon_process);
    } while (strstr(log, "event=config-reload outcome=refused") == NULL ||
             strstr(log, "has 5 characters") == NULL);
    cr_expect(strstr(log, "short\n") == NULL);
    free(log);
    cr_expect(secure_is_admitted(&after, &error), "%s", error.text);
}

static void change_token(const char *text, const char *const *urls,
                         const ep_test_process *const *processes, bool old_is_good)
{
    ep_error error;
    cr_assert(ep_test_write_file(path_of("client.token"), text, 0600));
    for (int i = 0; i < 2; i++) {
        secure_claim before = {
            .url = urls[i], .role = "client", .token = tokens[2], .node = "peer-1"};
        secure_claim after = {
            .url = urls[i], .role = "client", .token = tokens[3], .node = "peer-1"};
        cr_assert(ep_test_process_signal(processes[i], SIGHUP));
        while (!secure_is_admitted(&after, &error) ||
               secure_is_admitted(&before, &error) != old_is_good) {
            usleep(1000); /* until the signal was handled; the test's timeout bounds it */
        }
    }
}

static void start_node(ep_test_process *process, const char *name)
{
    char model[EP_TEST_PATH_BYTES + 64], url[EP_TEST_PATH_BYTES + 64],
        token[EP_TEST_PATH_BYTES + 64];
    const char *args[] = {"--listen=tcp://127.0.0.1:0",
                          "--admin-listen=",
                          "--probe-address=127.0.0.1:0",
                          "--node-name=n1",
                          "--threads=1",
                          model,
                          url,
                          token,
                          NULL};
    snprintf(model, sizeof(model), "--model=m=%s", dir);
    snprintf(url, sizeof(url), "--coordinator-url=%s", daemon_process.rpc_url);
    snprintf(token, sizeof(token), "--token-file=%s/client.token", dir);
    cr_assert(ep_test_process_start(process, dir, name, EP_EXPERTD_PROGRAM, args, NULL, true));
    cr_assert(ep_test_process_wait_ports(process, SECURE_WAIT_MS));
    /* the test's timeout bounds it */
    while (ep_test_http_get(process->probe_url, "/readyz", NULL) != 200) {
        usleep(10000);
    }
}

static void write_batch(const char *path)
{
    static float x[32], scales[2] = {0.5f, 0.5f};
    static int32_t ids[2] = {0, 5};
    ep_error error;
    const ep_named_tensor batch[] = {{"x", ep_tensor_2d(x, EP_DTYPE_F32, 1, 32)},
                                     {"expert_ids", ep_tensor_2d(ids, EP_DTYPE_I32, 1, 2)},
                                     {"expert_scales", ep_tensor_2d(scales, EP_DTYPE_F32, 1, 2)}};
    ASSERT_OK(ep_safetensors_write(path, batch, 3, NULL, 0, &error), error);
}

/* False while the table still names a node that is gone. */
static bool gateway_answers(void)
{
    char in[EP_TEST_PATH_BYTES + 64], out[EP_TEST_PATH_BYTES + 64], url[EP_TEST_PATH_BYTES + 64],
        token[EP_TEST_PATH_BYTES + 64], *output = NULL;
    snprintf(in, sizeof(in), "--in=%s/batch.safetensors", dir);
    snprintf(out, sizeof(out), "--out=%s/y.safetensors", dir);
    snprintf(url, sizeof(url), "--coordinator=%s", daemon_process.rpc_url);
    snprintf(token, sizeof(token), "--token-file=%s/client.token", dir);
    int code = ep_test_process_run_line(dir, EP_EXPERTCTL_PROGRAM, NULL, SECURE_WAIT_MS, &output,
                                        "forward --gateway --model=m --layer=0 %s %s %s %s", url,
                                        token, in, out);
    fputs(output, stderr);
    free(output);
    return code == 0;
}

/* The coordinator's gateway dials nodes: after the old token went it must show the one that took
 * its place. */
Test(security_roles, the_gateway_shows_the_token_that_took_the_place_of_the_old_one)
{
    char flag[EP_TEST_PATH_BYTES + 64], both[128], last[64], *metrics = NULL;
    ep_fixture_config fixture = ep_fixture_default();
    ep_error error;
    write_token("client.token", tokens[2]);
    snprintf(flag, sizeof(flag), "--token-file=%s/client.token", dir);
    start(EP_COORDINATOR_PROGRAM, flag, "--heartbeat-ms=50", NULL);
    ASSERT_OK(ep_fixture_write(&fixture, dir, &error), error);
    write_batch(path_of("batch.safetensors"));
    start_node(&nodes[0], "before");
    while (!gateway_answers()) {
    }
    const char *const urls[] = {daemon_process.rpc_url, nodes[0].rpc_url};
    const ep_test_process *const processes[] = {&daemon_process, &nodes[0]};
    snprintf(both, sizeof(both), "%s\n%s\n", tokens[3], tokens[2]);
    snprintf(last, sizeof(last), "%s\n", tokens[3]);
    change_token(both, urls, processes, true);
    change_token(last, urls, processes, false);
    cr_assert_eq(ep_test_process_stop(&nodes[0], SIGKILL, SECURE_WAIT_MS), 128 + SIGKILL);
    start_node(&nodes[1], "after");
    while (!gateway_answers()) {
        cr_assert_eq(ep_test_http_get(nodes[1].probe_url, "/metrics", &metrics), 200);
        cr_assert_null(strstr(metrics, "reason=\"token-wrong\"} 1"), "the old token is shown");
        free(metrics);
    }
}
