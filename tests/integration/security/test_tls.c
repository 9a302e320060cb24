/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Certificates against the real programs, over TLS that asks callers for theirs: who is let in on
 * the main and on the admin listener, which files and addresses are refused before anything runs,
 * and a whole cluster over TLS.
 */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "secure_peer.h"
#include "support/checkpoint_fixture.h"
#include "support/expect.h"
#include "support/process.h"
#include "support/tls_certs.h"

#define CLIENT_TOKEN "client-token-1111"
#define ADMIN_TOKEN "admin-token-333333333"
#define PATH_BYTES (EP_TEST_PATH_BYTES + 32)
#define FLAG_BYTES (PATH_BYTES + 32)
#define FLAGS_MAX 16

static char dir[EP_TEST_PATH_BYTES];
static ep_test_process coordinator;
static ep_test_process node;

static const char *path_of(const char *name)
{
    static char paths[32][PATH_BYTES]; /* enough for all files of a test at once */
    static size_t next;
    char *path = paths[next++ % 32];
    snprintf(path, PATH_BYTES, "%s/%s", dir, name);
    return path;
}

/* A certificate and its key in one file, as the network library wants them. */
static void write_pair(const ep_test_cert *issuer, const char *name, const char *host,
                       int from_days, int until_days)
{
    ep_test_cert *cert = ep_test_cert_new(host, issuer, from_days, until_days);
    ep_test_cert_write(cert, path_of(name));
    ep_test_cert_write_key(cert, path_of(name));
    ep_test_cert_free(cert);
}

static ep_test_cert *write_ca(const char *name)
{
    ep_test_cert *ca = ep_test_cert_new(name, NULL, -1, 100);
    ep_test_cert_write(ca, path_of(name));
    return ca;
}

static void setup(void)
{
    cr_assert(ep_test_dir_create(dir));
    ep_test_cert *ca = write_ca("ca.pem"), *other = write_ca("other-ca.pem"),
                 *admin = write_ca("admin-ca.pem");
    write_pair(ca, "server.pem", "localhost", -1, 100);
    write_pair(ca, "client.pem", "client", -1, 100);
    write_pair(ca, "expired.pem", "client", -10, -1);
    write_pair(ca, "early.pem", "client", 2, 10);
    write_pair(ca, "soon.pem", "localhost", -1, 3);
    write_pair(other, "stranger.pem", "client", -1, 100);
    write_pair(admin, "operator.pem", "operator", -1, 100);
    ep_test_cert_free(ca);
    ep_test_cert_free(other);
    ep_test_cert_free(admin);
    cr_assert(ep_test_write_file(path_of("client.token"), CLIENT_TOKEN "\n", 0600));
    cr_assert(ep_test_write_file(path_of("admin.token"), ADMIN_TOKEN "\n", 0600));
}

static void teardown(void)
{
    ep_test_process_destroy(&node);
    ep_test_process_destroy(&coordinator);
    ep_test_dir_remove(dir);
    secure_end();
}

typedef struct flags {
    char text[FLAGS_MAX][FLAG_BYTES];
    const char *args[FLAGS_MAX + 1];
    size_t count;
} flags;

static void add(flags *list, const char *flag, const char *value)
{
    cr_assert(list->count < FLAGS_MAX);
    snprintf(list->text[list->count], FLAG_BYTES, "%s=%s", flag, value);
    list->args[list->count] = list->text[list->count];
    list->args[++list->count] = NULL;
}

static void add_files(flags *list)
{
    add(list, "--tls-ca-file", path_of("ca.pem"));
    add(list, "--tls-cert-key-file", path_of("server.pem"));
    add(list, "--tls-server-name", "localhost");
    add(list, "--token-file", path_of("client.token"));
    add(list, "--admin-token-file", path_of("admin.token"));
    add(list, "--admin-tls-ca-file", path_of("admin-ca.pem"));
    add(list, "--tls-client-certs", "true");
}

/* Its main listener is TLS; a second one is plain. */
static void start_coordinator(void)
{
    flags list = {.count = 0};
    add(&list, "--listen", "tls+tcp://127.0.0.1:0");
    add(&list, "--admin-listen", "tls+tcp://127.0.0.1:0");
    add(&list, "--probe-address", "127.0.0.1:0");
    add_files(&list);
    cr_assert(ep_test_process_start(&coordinator, dir, "coordinator", EP_COORDINATOR_PROGRAM,
                                    list.args, NULL, true));
    cr_assert(ep_test_process_wait_ports(&coordinator, SECURE_WAIT_MS));
}

static ep_tls_config files(const char *ca, const char *cert_key, const char *server_name)
{
    return (ep_tls_config){.ca_file = path_of(ca),
                           .cert_key_file = cert_key != NULL ? path_of(cert_key) : NULL,
                           .server_name = server_name};
}

static bool may_enter(const char *url, const ep_tls_config *tls, bool admin, ep_error *error)
{
    const secure_claim claim = {.url = url,
                                .tls = tls,
                                .role = admin ? "operator" : "client",
                                .token = admin ? ADMIN_TOKEN : CLIENT_TOKEN};
    return secure_is_admitted(&claim, error);
}

TestSuite(security_tls, .init = setup, .fini = teardown, .timeout = 240);

Test(security_tls, only_the_right_certificates_are_let_in)
{
    const struct {
        const char *what;
        bool admin;
        const char *ca;
        const char *cert_key;
        const char *server_name;
        bool admitted;
    } rows[] = {
        {"good certificate", false, "ca.pem", "client.pem", "localhost", true},
        {"no certificate", false, "ca.pem", NULL, "localhost", false},
        {"certificate of another CA", false, "ca.pem", "stranger.pem", "localhost", false},
        {"expired certificate", false, "ca.pem", "expired.pem", "localhost", false},
        {"certificate of tomorrow", false, "ca.pem", "early.pem", "localhost", false},
        {"wrong server name", false, "ca.pem", "client.pem", "elsewhere", false},
        {"no server name", false, "ca.pem", "client.pem", NULL, false},
        {"client trusts another CA", false, "other-ca.pem", "client.pem", "localhost", false},
        {"operator's certificate on the main port", false, "ca.pem", "operator.pem", "localhost",
         false},
        {"operator's certificate on the admin port", true, "ca.pem", "operator.pem", "localhost",
         true},
        {"client's certificate on the admin port", true, "ca.pem", "client.pem", "localhost",
         false},
        {"no certificate on the admin port", true, "ca.pem", NULL, "localhost", false},
    };
    ep_error error;
    start_coordinator();
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        ep_tls_config tls = files(rows[i].ca, rows[i].cert_key, rows[i].server_name);
        bool admitted = may_enter(rows[i].admin ? coordinator.admin_url : coordinator.rpc_url, &tls,
                                  rows[i].admin, &error);
        cr_expect_eq(admitted, rows[i].admitted, "%s: %s", rows[i].what, error.text);
        if (rows[i].server_name == NULL) {
            EXPECT_TEXT(error, "server_name");
        }
    }
    ep_tls_config good = files("ca.pem", "client.pem", "localhost");
    secure_claim wrong_token = {
        .url = coordinator.rpc_url, .tls = &good, .role = "client", .token = "0000000000000000"};
    cr_expect_not(secure_is_admitted(&wrong_token, &error));
    cr_expect_eq(error.code, EP_ERR_UNAUTHENTICATED, "a certificate is no token: %s", error.text);
    cr_expect(may_enter(coordinator.rpc_url, &good, false, &error), "the others did no harm: %s",
              error.text);
    cr_expect_eq(ep_test_process_stop(&coordinator, SIGTERM, SECURE_WAIT_MS), 0);
}

Test(security_tls, plain_and_tls_do_not_meet)
{
    ep_error error;
    char plain[EP_TEST_PATH_BYTES], tls_url[EP_TEST_PATH_BYTES];
    flags list = {.count = 0};
    ep_tls_config good = files("ca.pem", "client.pem", "localhost");
    start_coordinator();
    snprintf(plain, sizeof(plain), "tcp://%s", strstr(coordinator.rpc_url, "://") + 3);
    cr_expect_not(may_enter(plain, NULL, false, &error), "plain TCP on a TLS port");
    cr_expect(may_enter(coordinator.rpc_url, &good, false, &error), "the port works on: %s",
              error.text);
    add(&list, "--listen", "tcp://127.0.0.1:0");
    add(&list, "--admin-listen", "");
    add(&list, "--probe-address", "");
    add(&list, "--token-file", path_of("client.token"));
    cr_assert(
        ep_test_process_start(&node, dir, "plain", EP_COORDINATOR_PROGRAM, list.args, NULL, true));
    cr_assert(ep_test_process_wait_ports(&node, SECURE_WAIT_MS));
    snprintf(tls_url, sizeof(tls_url), "tls+tcp://%s", strstr(node.rpc_url, "://") + 3);
    cr_expect_not(may_enter(tls_url, &good, false, &error), "TLS on a plain port");
    cr_expect(may_enter(node.rpc_url, NULL, false, &error), "the port works on: %s", error.text);
}

/* A coordinator and the node n1 of it, ready. */
static void start_cluster(void)
{
    ep_fixture_config fixture = ep_fixture_default();
    ep_error error;
    char model[FLAG_BYTES];
    flags list = {.count = 0};
    ASSERT_OK(ep_fixture_write(&fixture, dir, &error), error);
    start_coordinator();
    snprintf(model, sizeof(model), "m=%s", dir);
    add(&list, "--listen", "tls+tcp://127.0.0.1:0");
    add(&list, "--admin-listen", "");
    add(&list, "--probe-address", "127.0.0.1:0");
    add(&list, "--node-name", "n1");
    add(&list, "--coordinator-url", coordinator.rpc_url);
    add(&list, "--model", model);
    add_files(&list);
    cr_assert(ep_test_process_start(&node, dir, "node", EP_EXPERTD_PROGRAM, list.args, NULL, true));
    cr_assert(ep_test_process_wait_ports(&node, SECURE_WAIT_MS));
    /* the test's timeout bounds it */
    while (ep_test_http_get(node.probe_url, "/readyz", NULL) != 200) {
        usleep(10000);
    }
}

Test(security_tls, a_cluster_runs_over_tls)
{
    flags ask = {.count = 0};
    start_cluster();
    ask.args[ask.count++] = "status";
    add(&ask, "--coordinator", coordinator.rpc_url);
    add(&ask, "--token-file", path_of("client.token"));
    add(&ask, "--tls-ca", path_of("ca.pem"));
    add(&ask, "--tls-cert-key", path_of("client.pem"));
    add(&ask, "--tls-server-name", "localhost");
    char *output = NULL;
    int code = ep_test_process_run(dir, "ctl", EP_EXPERTCTL_PROGRAM, ask.args, NULL, SECURE_WAIT_MS,
                                   &output);
    cr_expect_eq(code, 0, "%s", output);
    cr_expect(strstr(output, "n1") != NULL && strstr(output, "tls+tcp://") != NULL, "%s", output);
    free(output);
}

/* With the contexts of dir, and one more variable unless it is NULL. */
static void expect_ctl(int code, const char *part, const char *variable, const char *const *args)
{
    char home[FLAG_BYTES];
    char *output = NULL;
    snprintf(home, sizeof(home), "XDG_CONFIG_HOME=%s", dir);
    const char *const environment[] = {home, "EXPERTCTL_CONTEXT=", variable, NULL};
    int got = ep_test_process_run(dir, "ctl", EP_EXPERTCTL_PROGRAM, args, environment,
                                  SECURE_WAIT_MS, &output);
    cr_expect_eq(got, code, "%s %s: exit code %d, expected %d: %s", args[0],
                 variable != NULL ? variable : "", got, code, output);
    cr_expect(strstr(output, part) != NULL, "%s: no '%s' in: %s", args[0], part, output);
    free(output);
}
#define EXPECT_CTL(code, part, variable, ...)                                                      \
    expect_ctl(code, part, variable, (const char *const[]){__VA_ARGS__, NULL})

/* After one `context add --use` nothing more is to be said; what is said all the same beats it, and
 * only that. */
Test(security_tls, a_context_is_all_that_a_call_needs)
{
    flags context = {.count = 0};
    char said[FLAG_BYTES + 64], variable[FLAG_BYTES + 64];
    const char *operator_pair = path_of("operator.pem");
    start_cluster();
    context.args[context.count++] = "context";
    context.args[context.count++] = "add";
    context.args[context.count++] = "production";
    add(&context, "--coordinator", coordinator.rpc_url);
    add(&context, "--admin", coordinator.admin_url);
    add(&context, "--token-file", path_of("client.token"));
    add(&context, "--admin-token-file", path_of("admin.token"));
    add(&context, "--tls-ca", path_of("ca.pem"));
    add(&context, "--tls-cert-key", path_of("client.pem"));
    add(&context, "--tls-server-name", "localhost");
    context.args[context.count++] = "--use";
    context.args[context.count] = NULL;
    expect_ctl(0, "context production is in use", NULL, context.args);

    snprintf(said, sizeof(said), "expertctl status: context production, %s\n", coordinator.rpc_url);
    EXPECT_CTL(0, said, NULL, "status");
    EXPECT_CTL(0, "n1", NULL, "status");
    /* Without it these would be needed. */
    EXPECT_CTL(2, "needs --tls-ca and --tls-server-name", NULL, "status", "--context", "none",
               "--coordinator", coordinator.rpc_url);
    /* A variable beats the context, a flag the variable, each in one setting alone. */
    snprintf(variable, sizeof(variable), "EXPERTCTL_TLS_CA=%s", path_of("other-ca.pem"));
    EXPECT_CTL(3, "(not from it: EXPERTCTL_TLS_CA)", variable, "status");
    EXPECT_CTL(0, "(not from it: --tls-ca)", variable, "status", "--tls-ca", path_of("ca.pem"));
    snprintf(variable, sizeof(variable), "EXPERTCTL_COORDINATOR=%s", "tls+tcp://127.0.0.1:1");
    EXPECT_CTL(3, "tls+tcp://127.0.0.1:1 (not from it: EXPERTCTL_COORDINATOR)", variable, "status");
    EXPECT_CTL(0, "n1", variable, "status", "--coordinator", coordinator.rpc_url);
    /* A node is named; token and certificates are the context's. */
    EXPECT_CTL(0, "expertctl status: context production, ", NULL, "status", "--node", node.rpc_url);
    /* Operators have another certificate here. */
    snprintf(said, sizeof(said),
             "expertctl drain: context production, %s (not from it: --tls-cert-key)",
             coordinator.admin_url);
    EXPECT_CTL(0, said, NULL, "drain", "n1", "--undo", "--tls-cert-key", operator_pair);
    snprintf(variable, sizeof(variable), "EXPERTCTL_TLS_CERT_KEY=%s", operator_pair);
    EXPECT_CTL(0, "(not from it: EXPERTCTL_TLS_CERT_KEY)", variable, "reload");
    snprintf(said, sizeof(said), "expertctl model default: context production, %s (not from it",
             coordinator.admin_url);
    EXPECT_CTL(1, said, variable, "model", "default", "m", "no-such-version");
    EXPECT_CTL(0, "drain_ms", variable, "config");
    EXPECT_CTL(2, "--context: there is no context 'staging', there are: production", NULL, "drain",
               "n1", "--context", "staging");
}

/* True: a node with these files has a shared-memory socket. */
static bool offers_shm(const char *mode, bool certs, bool token)
{
    flags list = {.count = 0};
    char model[FLAG_BYTES];
    snprintf(model, sizeof(model), "m=%s", dir);
    add(&list, "--listen", "tls+tcp://127.0.0.1:0");
    add(&list, "--admin-listen", "");
    add(&list, "--probe-address", "");
    add(&list, "--node-name", "n1");
    add(&list, "--model", model);
    add(&list, "--tls-ca-file", path_of("ca.pem"));
    add(&list, "--tls-cert-key-file", path_of("server.pem"));
    add(&list, "--shm", mode);
    add(&list, "--shm-dir", dir);
    add(&list, "--tls-client-certs", certs ? "true" : "false");
    if (token) {
        add(&list, "--token-file", path_of("client.token"));
    }
    cr_assert(ep_test_process_start(&node, dir, "node", EP_EXPERTD_PROGRAM, list.args, NULL, true));
    cr_assert(ep_test_process_wait_ports(&node, SECURE_WAIT_MS));
    bool there = access(path_of("n1.sock"), F_OK) == 0;
    char *log = ep_test_process_output(&node);
    cr_expect_eq(strstr(log, "shared memory knows users, not certificates") != NULL,
                 strcmp(mode, "auto") == 0 && certs && !token, "%s", log);
    free(log);
    cr_expect_eq(ep_test_process_stop(&node, SIGTERM, SECURE_WAIT_MS), 0);
    ep_test_process_destroy(&node);
    return there;
}

Test(security_tls, shared_memory_is_no_way_around_certificates)
{
    ep_fixture_config fixture = ep_fixture_default();
    ep_error error;
    ASSERT_OK(ep_fixture_write(&fixture, dir, &error), error);
    cr_expect_not(offers_shm("auto", true, false), "certificates are all that callers show");
    cr_expect(offers_shm("auto", true, true), "a token is asked for there too");
    cr_expect(offers_shm("auto", false, false), "nothing is asked for anywhere");
    cr_expect(offers_shm("on", true, false), "the operator wants it");
}

/* Runs --check-config and looks for what it must say. */
static void expect_check(int code, const char *part, const char *flag, const char *value,
                         const char *second, const char *second_value)
{
    flags list = {.count = 0};
    char *output = NULL;
    list.args[list.count++] = "--check-config";
    add(&list, flag, value);
    if (second != NULL) {
        add(&list, second, second_value);
    }
    int got = ep_test_process_run(dir, "check", EP_COORDINATOR_PROGRAM, list.args, NULL,
                                  SECURE_WAIT_MS, &output);
    cr_expect_eq(got, code, "%s=%s: exit code %d: %s", flag, value, got, output);
    cr_expect(strstr(output, part) != NULL, "%s=%s: no '%s' in: %s", flag, value, part, output);
    free(output);
}

Test(security_tls, files_are_checked_before_anything_runs)
{
    char *text = ep_test_read_file(path_of("client.pem"));
    char *server = ep_test_read_file(path_of("server.pem"));
    char *mixed = malloc(strlen(text) + strlen(server) + 1);
    char *key = strstr(text, "-----BEGIN PRIVATE KEY");
    cr_assert(key != NULL && mixed != NULL);
    sprintf(mixed, "%.*s%s", (int)(strstr(server, "-----BEGIN PRIVATE KEY") - server), server, key);
    cr_assert(ep_test_write_file(path_of("mixed.pem"), mixed, 0600));
    cr_assert(ep_test_write_file(path_of("open.pem"), server, 0644));
    cr_assert(ep_test_write_file(path_of("group.pem"), server, 0660));
    cr_assert(ep_test_write_file(path_of("text.pem"), "hello\n", 0600));
    cr_assert(
        ep_test_write_file(path_of("cut-ca.pem"), "-----BEGIN CERTIFICATE-----\nAAAA\n", 0600));
    const char *pair = "--tls-cert-key-file", *ca = "--tls-ca-file",
               *admin_ca = "--admin-tls-ca-file";
    expect_check(0, "is right", pair, path_of("server.pem"), ca, path_of("ca.pem"));
    expect_check(1, "tls_cert_key_file: cannot read", pair, path_of("absent.pem"), NULL, NULL);
    expect_check(1, "holds a key and has mode 0644; allowed: 0600 or 0400", pair,
                 path_of("open.pem"), NULL, NULL);
    expect_check(1, "mode 0660; allowed: 0600 or 0400", pair, path_of("group.pem"), NULL, NULL);
    expect_check(1, "cannot read", pair, dir, NULL, NULL);
    expect_check(1, "no certificate in PEM form", pair, path_of("text.pem"), NULL, NULL);
    expect_check(1, "no key in PEM form", pair, path_of("ca.pem"), NULL, NULL);
    expect_check(1, "does not belong to its certificate", pair, path_of("mixed.pem"), NULL, NULL);
    expect_check(1, "it has expired", pair, path_of("expired.pem"), NULL, NULL);
    expect_check(1, "is valid only from", pair, path_of("early.pem"), NULL, NULL);
    expect_check(0, "days_left", pair, path_of("soon.pem"), NULL, NULL);
    expect_check(1, "tls_ca_file: cannot read", ca, path_of("absent.pem"), NULL, NULL);
    expect_check(1, "no certificate in PEM form", ca, path_of("cut-ca.pem"), NULL, NULL);
    expect_check(1, "admin_tls_ca_file: ", admin_ca, path_of("text.pem"), NULL, NULL);
    free(mixed);
    free(server);
    free(text);
}

Test(security_tls, what_reaches_other_hosts_needs_tls_and_token)
{
    const char *files_flag = "--tls-ca-file";
    expect_check(1, "listen[0].url", "--listen", "tcp://0.0.0.0:0", NULL, NULL);
    expect_check(1, "there is neither TLS nor token; use tls+tcp:// with token_file", "--listen",
                 "tcp://0.0.0.0:0", NULL, NULL);
    expect_check(1, "admin_listen", "--admin-listen", "tcp://0.0.0.0:0", NULL, NULL);
    expect_check(1, "use tls+tcp:// with admin_token_file", "--admin-listen", "tcp://0.0.0.0:0",
                 "--token-file", path_of("client.token"));
    expect_check(1, "there is no TLS", "--admin-listen", "tcp://0.0.0.0:0", "--admin-token-file",
                 path_of("admin.token"));
    expect_check(1, "admin_tls_ca_file or tls_ca_file, and tls_cert_key_file", "--admin-listen",
                 "tls+tcp://127.0.0.1:0", files_flag, path_of("ca.pem"));
    expect_check(0, "is right", "--admin-listen", "tcp://0.0.0.0:0", "--insecure", "true");
    expect_check(0, "is right", "--admin-listen", "", NULL, NULL);
}

Test(security_tls, what_insecure_admits_is_in_the_log)
{
    flags list = {.count = 0};
    add(&list, "--listen", "tcp://0.0.0.0:0");
    add(&list, "--admin-listen", "tcp://0.0.0.0:0");
    add(&list, "--probe-address", "");
    add(&list, "--token-file", path_of("client.token"));
    add(&list, "--insecure", "true");
    cr_assert(ep_test_process_start(&coordinator, dir, "open", EP_COORDINATOR_PROGRAM, list.args,
                                    NULL, true));
    cr_assert(ep_test_process_wait_ports(&coordinator, SECURE_WAIT_MS));
    char *log = ep_test_process_output(&coordinator);
    cr_expect(strstr(log, "level=warn event=insecure key=listen url=tcp://0.0.0.0:0 reason=\"there "
                          "is no TLS\"") != NULL &&
                  strstr(log, "level=warn event=insecure key=admin_listen url=tcp://0.0.0.0:0 "
                              "reason=\"there is neither TLS nor token\"") != NULL,
              "%s", log);
    free(log);
}

/* Every place that dials refuses an address of TLS without a name to prove. */
Test(security_tls, nobody_dials_tls_without_a_server_name)
{
    flags daemon = {.count = 0}, ask = {.count = 0};
    char *output = NULL, model[FLAG_BYTES];
    snprintf(model, sizeof(model), "m=%s", dir);
    daemon.args[daemon.count++] = "--check-config";
    add(&daemon, "--model", model);
    add(&daemon, "--tls-ca-file", path_of("ca.pem"));
    add(&daemon, "--coordinator-url", "tls+tcp://127.0.0.1:1");
    cr_expect_eq(ep_test_process_run(dir, "node", EP_EXPERTD_PROGRAM, daemon.args, NULL,
                                     SECURE_WAIT_MS, &output),
                 1);
    cr_expect(strstr(output, "coordinator_url") != NULL &&
                  strstr(output, "tls_server_name") != NULL,
              "%s", output);
    free(output);
    ask.args[ask.count++] = "status";
    add(&ask, "--coordinator", "tls+tcp://127.0.0.1:1");
    add(&ask, "--tls-ca", path_of("ca.pem"));
    cr_expect_neq(ep_test_process_run(dir, "ctl", EP_EXPERTCTL_PROGRAM, ask.args, NULL,
                                      SECURE_WAIT_MS, &output),
                  0);
    cr_expect(strstr(output, "--tls-server-name") != NULL, "%s", output);
    free(output);
}

Test(security_tls, token_files)
{
    static char long_line[EP_TOKEN_BYTES_MAX + 2];
    memset(long_line, 'x', EP_TOKEN_BYTES_MAX + 1);
    static char too_many_lines[(EP_TOKENS_PER_ROLE + 1) * 18];
    for (int i = 0; i <= EP_TOKENS_PER_ROLE; i++) {
        strcat(too_many_lines, "0123456789abcdef\n");
    }
    const struct {
        const char *text; /* NULL: no file */
        mode_t mode;
        const char *says; /* NULL: it is right */
    } rows[] = {
        {"0123456789abcdef\n", 0600, NULL},
        {"0123456789abcdef", 0400, NULL},
        {"0123456789abcdef\r\n", 0600, NULL},
        {"0123456789abcdef\nfedcba9876543210\n", 0600, NULL},
        {NULL, 0600, "cannot open"},
        {"0123456789abcdef\n", 0660, "mode 0660; allowed: 0600 or 0400"},
        {"0123456789abcdef\n", 0604, "mode 0604"},
        {"", 0600, "is empty"},
        {"0123456789abcde\r\n", 0600, "line 1 of"},
        {"0123456789abcdef\nshort\n", 0600, "line 2 of"},
        {"0123456789abcdef\n\n", 0600, "line 2 of"},
        {"0123456789abcdef alice\nfedcba9876543210 b.o-b@example_1\n0123456789abcdefg\n", 0600,
         NULL},
        {too_many_lines, 0600, "more than 16 lines"},
        {"0123456789\tabcdef\n", 0600, "no printable ASCII"},
        {"0123456789 abcdef\n", 0600, "line 1 of"},
        {"0123456789abcdef \n", 0600, "the label in line 1 of"},
        {"0123456789abcdef a b\n", 0600, "the label in line 1 of"},
        {"0123456789abcdef abcdefghijklmnopqrstuvwxyz0123456\n", 0600,
         "not 1..32 letters, digits or -+.@_"},
        {long_line, 0600, "has 1025 characters; allowed: 16..1024"},
    };
    static const char *const keys[] = {"--token-file", "--node-token-file", "--admin-token-file"};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        const char *path = path_of("token");
        unlink(path);
        if (rows[i].text != NULL) {
            cr_assert(ep_test_write_file(path, rows[i].text, rows[i].mode));
        }
        expect_check(rows[i].says != NULL, rows[i].says != NULL ? rows[i].says : "is right",
                     keys[i % 3], path, NULL, NULL);
    }
}

/* As Kubernetes and systemd hand them out: root's, readable by the group of a daemon that is not
 * root. */
Test(security_tls, secrets_of_root_that_the_group_may_read)
{
    enum { NOBODY = 65534 };
    const struct {
        mode_t mode;
        gid_t group;
        uid_t owner;
        int code;
    } rows[] = {{0440, NOBODY, 0, 0}, {0640, NOBODY, 0, 0},      {0660, NOBODY, 0, 1},
                {0444, NOBODY, 0, 1}, {0440, NOBODY, NOBODY, 1}, {0440, 0, 0, 1}};
    char token[FLAG_BYTES], pair[FLAG_BYTES];
    const char *args[] = {"--reuid=65534",
                          "--regid=65534",
                          "--clear-groups",
                          EP_COORDINATOR_PROGRAM,
                          "--version",
                          "--check-config",
                          token,
                          pair,
                          NULL};
    const char *try_args[] = {args[0], args[1], args[2], args[3], args[4], NULL};
    snprintf(token, sizeof(token), "--token-file=%s", path_of("client.token"));
    snprintf(pair, sizeof(pair), "--tls-cert-key-file=%s", path_of("server.pem"));
    if (geteuid() != 0 || chmod(dir, 0711) != 0 ||
        ep_test_process_run(dir, "try", "/usr/bin/setpriv", try_args, NULL, SECURE_WAIT_MS, NULL) !=
            0) {
        cr_skip_test("needs root, setpriv, and programs that others may run");
    }
    memmove(&args[4], &args[5], 4 * sizeof(args[0]));
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        char *output = NULL;
        for (int file = 0; file < 2; file++) {
            const char *path = path_of(file == 0 ? "client.token" : "server.pem");
            cr_assert_eq(chown(path, rows[i].owner, rows[i].group), 0);
            cr_assert_eq(chmod(path, rows[i].mode), 0);
        }
        int code = ep_test_process_run(dir, "group", "/usr/bin/setpriv", args, NULL, SECURE_WAIT_MS,
                                       &output);
        cr_expect_eq(code, rows[i].code, "row %zu, exit code %d: %s", i, code, output);
        free(output);
    }
}
