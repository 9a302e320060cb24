/* SPDX-License-Identifier: Apache-2.0 */
/* Rules between options: who may listen where, the token file, and expertd's own rules. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "expertd/node_config.h"
#include "support/expect.h"
#include "support/process.h"
#include "transport/address.h"

static char dir[EP_TEST_PATH_BYTES];
static char model_flag[EP_TEST_PATH_BYTES + 32];
static char token_path[EP_TEST_PATH_BYTES + 32];
static char token_flag[EP_TEST_PATH_BYTES + 64];

static void setup(void)
{
    cr_assert(ep_test_dir_create(dir));
    snprintf(model_flag, sizeof(model_flag), "--model=m=%s", dir);
    snprintf(token_path, sizeof(token_path), "%s/token", dir);
    snprintf(token_flag, sizeof(token_flag), "--token-file=%s", token_path);
}
static void teardown(void)
{
    ep_test_dir_remove(dir);
}

static char *variables[2]; /* the environment of load */

static ep_error e; /* of the last load */

/* Loads expertd's configuration from flags; file NULL: none. */
static ep_err load(const char *file, const char *a, const char *b, const char *c, bool with_model)
{
    char *argv[8] = {(char *)(uintptr_t) "expertd"};
    int argc = 1;
    char config[EP_TEST_PATH_BYTES + 64];
    ep_options *options = NULL;
    if (file != NULL) {
        char path[EP_TEST_PATH_BYTES + 32];
        snprintf(path, sizeof(path), "%s/c.yaml", dir);
        cr_assert(ep_test_write_file(path, file, 0600));
        snprintf(config, sizeof(config), "--config=%s", path);
        argv[argc++] = config;
    }
    const char *flags[] = {with_model ? model_flag : NULL, a, b, c};
    for (size_t i = 0; i < 4; i++) {
        if (flags[i] != NULL) {
            argv[argc++] = (char *)(uintptr_t)flags[i];
        }
    }
    ep_error_clear(&e);
    ep_err err = ep_options_load(&ep_node_options, argc, argv, variables, &options, &e);
    err = err == EP_OK ? ep_node_config_check(options, &e) : err;
    ep_options_free(options);
    return err;
}

/* Those of the other daemon, which may have the same environment, and what limits the use of the
 * CPU. */
Test(service_config, variables_that_others_read_bring_no_warning)
{
    char *argv[] = {(char *)(uintptr_t) "expertd"};
    char *others[] = {(char *)(uintptr_t) "EXPERTD_COORDINATOR_COPIES=2",
                      (char *)(uintptr_t) "EXPERTD_CPU_FEATURES=portable", NULL};
    ep_options *options = NULL;
    ep_error error;
    ASSERT_OK(ep_options_load(&ep_node_options, 1, argv, others, &options, &error), error);
    cr_expect_null(ep_options_warning(options, 0), "%s", ep_options_warning(options, 0));
    ep_options_free(options);
}

static void expect_bad(ep_err err, const char *part)
{
    cr_expect_eq(err, EP_ERR_BAD_CONFIG, "%s: %s", part, e.text);
    EXPECT_TEXT(e, part);
}

/* One or two flags beside a model. */
static void refuses(const char *a, const char *b, const char *part)
{
    expect_bad(load(NULL, a, b, NULL, true), part);
}

static void accepts(const char *a, const char *b)
{
    EXPECT_OK(load(NULL, a, b, NULL, true), e);
}

TestSuite(service_config, .init = setup, .fini = teardown);

Test(service_config, loopback_is_recognised)
{
    static const char *const near[] = {"tcp://127.0.0.1:1", "tcp://127.8.9.1:0",
                                       "tcp://localhost:5", "tcp://[::1]:9",
                                       "127.0.0.1:7",       "tcp://127.0.0.1"};
    static const char *const far[] = {"tcp://0.0.0.0:1", "tcp://10.0.0.1:1", "tcp://[::]:1",
                                      "tcp://127.0.0.1.example.com:1", "tcp://host:1",
                                      "tcp://1270.0.0.1:1", "tcp://127.0.0.1x:1",
                                      "tcp://127.0.0.1:80@host", "tcp://localhost:",
                                      /* names for the resolver, which may lead anywhere */
                                      "tcp://127.999.0.1:1", "tcp://127.0.0.+1:1"};
    for (size_t i = 0; i < sizeof(near) / sizeof(near[0]); i++) {
        cr_expect(ep_address_is_loopback(near[i]), "%s", near[i]);
    }
    for (size_t i = 0; i < sizeof(far) / sizeof(far[0]); i++) {
        cr_expect_not(ep_address_is_loopback(far[i]), "%s", far[i]);
    }
}

Test(service_config, hosts_fit_rules)
{
    static const char *const good[] = {"10.0.0.0/8",  "0.0.0.0/0", "10.1.2.3", "10.1.2.3/32",
                                       "fd00::/8",    "::/0",      "::1",      "node1",
                                       "n-1.example", ".svc"};
    static const char *const bad[] = {"",
                                      ".",
                                      "10.0.0.0/33",
                                      "10.0.0.0/",
                                      "10.0.0.0/8x",
                                      "10.0.0.0/-1",
                                      "10.0.0.0/0008",
                                      "fd00::/129",
                                      "10.300.0.0",
                                      "10.1",
                                      "node1/8",
                                      "no de",
                                      "tcp://10.0.0.1:1",
                                      "[::1]",
                                      "node1:1",
                                      "a@b"};
    static const struct {
        const char *url;
        const char *rule;
        bool fits;
    } rows[] = {
        {"tcp://10.1.2.3:1", "10.0.0.0/8", true},
        {"tls+tcp://11.1.2.3:1", "10.0.0.0/8", false},
        {"tcp://11.1.2.3:1", "0.0.0.0/0", true},
        {"tcp://10.1.2.3:1", "10.1.2.3", true},
        {"tcp://10.1.2.2:1", "10.1.2.3", false},
        {"tcp://10.1.2.130:1", "10.1.2.128/25", true},
        {"tcp://10.1.2.127:1", "10.1.2.128/25", false},
        {"tcp://10.1.3.130:1", "10.1.2.128/25", false},
        {"tcp://[fd12::1]:1", "fd00::/8", true},
        {"tcp://[fe80::1]:1", "fd00::/8", false},
        {"tcp://[::ffff:10.0.0.1]:1", "10.0.0.0/8", false},
        {"tcp://10.0.0.1:1", "::/0", false},
        {"tcp://0x0a000001:1", "10.0.0.0/8", false},
        {"tcp://10.1:1", "10.0.0.0/8", false},
        {"tcp://node1:1", "0.0.0.0/0", false},
        {"tcp://node1:1", "node1", true},
        {"tcp://NODE1:1", "node1", true},
        {"tcp://node12:1", "node1", false},
        {"tcp://a.node1:1", "node1", false},
        {"tls+tcp://n0.expertd.x.svc:1", ".svc", true},
        {"tls+tcp://n0.expertd.x.svcs:1", ".svc", false},
        {"tls+tcp://.svc:1", ".svc", true}, /* no name that is found */
        {"tcp://elsewhere:1/x.svc:1", ".svc", false},
        {"tcp://10.0.0.1:1@elsewhere", "10.0.0.0/8", false},
        {"tcp://10.0.0.1:1@elsewhere:2", "10.0.0.0/8", false},
        {"tcp://10.0.0.1@elsewhere:2", "10.0.0.0/8", false},
        {"tcp://10.0.0.1@elsewhere:2", "elsewhere", false},
        {"tcp://10.0.0.1", "10.0.0.0/8", false},
        {"tcp://:1", "0.0.0.0/0", false},
        {"tcp://[]:1", "::/0", false},
    };
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        cr_expect(ep_address_rule_is_good(good[i]), "%s", good[i]);
    }
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        cr_expect_not(ep_address_rule_is_good(bad[i]), "%s", bad[i]);
    }
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        cr_expect_eq(ep_address_fits_rule(rows[i].url, rows[i].rule), rows[i].fits, "%s, %s",
                     rows[i].url, rows[i].rule);
    }
}

/* No URL that a table or a peer names takes TLS away, or shows a token in plain text to another
 * host. */
Test(service_config, what_must_not_be_dialed_is_refused)
{
    const ep_tls_config tls = {.ca_file = "/ca.pem"};
    const struct {
        const char *url;
        const ep_tls_config *tls;
        bool guards_token;
        ep_err err;
    } rows[] = {
        {"tls+tcp://10.0.0.1:1", &tls, true, EP_OK},
        {"tcp://10.0.0.1:1", &tls, false, EP_ERR_PERMISSION_DENIED},
        {"tcp://127.0.0.1:1", &tls, false, EP_ERR_PERMISSION_DENIED},
        {"tcp://10.0.0.1:1", NULL, true, EP_ERR_PERMISSION_DENIED},
        {"tcp://127.0.0.1:1", NULL, true, EP_OK},
        {"tcp://10.0.0.1:1", NULL, false, EP_OK},
        {"loopback://x", &tls, true, EP_OK},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        ep_lane_address address;
        ep_error error;
        ep_err err =
            ep_address_for_dial(rows[i].url, rows[i].tls, rows[i].guards_token, &address, &error);
        cr_expect_eq(err, rows[i].err, "row %zu", i);
        cr_expect(err == EP_OK || strstr(error.text, rows[i].url) != NULL, "%s", error.text);
        cr_expect_eq(address.tls != NULL,
                     rows[i].tls != NULL && strncmp(rows[i].url, "loopback", 8) != 0, "row %zu", i);
    }
}

Test(service_config, beyond_loopback_needs_tls_and_token_or_insecure)
{
    refuses("--listen=tcp://0.0.0.0:0", NULL, "neither TLS nor token");
    cr_expect(strstr(e.text, "flag --listen: listen[0].url") != NULL &&
                  strstr(e.text, "insecure: true") != NULL,
              "%s", e.text);
    accepts("--listen=tcp://0.0.0.0:0", "--insecure");
    cr_assert(ep_test_write_file(token_path, "0123456789abcdef\n", 0600));
    refuses("--listen=tcp://0.0.0.0:0", token_flag, "there is no TLS");
    refuses("--listen=tls+tcp://0.0.0.0:0", token_flag, "tls_ca_file");
    refuses("--door-listen=tcp://0.0.0.0:0", NULL, "neither TLS nor token");
    cr_expect(strstr(e.text, "flag --door-listen: door_listen") != NULL &&
                  strstr(e.text, "insecure: true") != NULL,
              "%s", e.text);
    accepts("--door-listen=tcp://0.0.0.0:0", "--insecure");
    refuses("--door-listen=tcp://0.0.0.0:0", token_flag, "there is no TLS");
    refuses("--door-listen=tls+tcp://0.0.0.0:0", token_flag, "tls_ca_file");
    accepts("--door-listen=", NULL);
    expect_bad(
        load("listen:\n  - tcp://127.0.0.1:0\n  - tcp://10.1.1.1:0\n", NULL, NULL, NULL, true),
        "c.yaml:3: listen[1].url");
}

Test(service_config, token_files_are_private_and_long_enough)
{
    refuses(token_flag, NULL, "token_file: cannot open");
    cr_assert(ep_test_write_file(token_path, "0123456789abcdef\n", 0660));
    refuses(token_flag, NULL, "mode 0660; allowed: 0600 or 0400");
    cr_assert(ep_test_write_file(token_path, "short\n", 0600));
    refuses(token_flag, NULL, "has 5 characters; allowed: 16..1024");
    cr_expect(strstr(e.text, "short") == NULL, "the token must not be shown: %s", e.text);
    cr_assert(ep_test_write_file(token_path, "0123456789abcdef\n", 0600));
    accepts(token_flag, NULL);
}

Test(service_config, nodes_need_models_backends_and_urls_that_exist)
{
    expect_bad(load(NULL, NULL, NULL, NULL, false), "no model to serve");
    expect_bad(load(NULL, "--model=m=/does/not/exist", NULL, NULL, false),
               "'/does/not/exist': No such file or directory; allowed: the directory with the "
               "model's config.json");
    refuses("--backend=gpu", NULL,
            "'gpu' is no backend of this build; allowed: cpu, ascend, reference");
    refuses("--backend=ascend,", NULL, "'' is no backend of this build; allowed: cpu");
    refuses("--backend=ascend cpu", NULL, "'ascend cpu' is no backend of this build; allowed: cpu");
    refuses("--backend=cpu, ascend, cpu", NULL, "'cpu, ascend, cpu' names cpu twice");
    refuses("--listen=udp://127.0.0.1:1", NULL, "'udp://127.0.0.1:1' is no URL");
    refuses("--coordinator-url=nonsense", NULL, "coordinator_url: 'nonsense' is no URL");
    refuses("--coordinator-url=tls+tcp://h:1", NULL, "tls_server_name");
    refuses("--probe-address=here", NULL, "probe_address: 'here' is not an address");
    expect_bad(load(NULL, "--coordinator-url=tcp://127.0.0.1:1", "--listen=tcp://0.0.0.0:0",
                    "--insecure", true),
               "advertise_url");
    refuses("--frame-bytes-max=1GiB", NULL, "buffer_bytes_max");
    char file[EP_TEST_PATH_BYTES + 128];
    snprintf(file, sizeof(file), "models:\n  - name: m\n    path: %s\n    experts: 3-1\n", dir);
    expect_bad(load(file, NULL, NULL, NULL, false),
               "c.yaml:4: models[0].experts: '3-1' is not a set of experts");
    snprintf(file, sizeof(file), "models:\n  - {name: m, path: %s, experts: assigned}\n", dir);
    expect_bad(load(file, NULL, NULL, NULL, false), "needs coordinator_url");
    EXPECT_OK(load(file, "--coordinator-url=tcp://127.0.0.1:1", NULL, NULL, false), e);
}

/* By flag, by file and by the environment the same rules hold, and the origin is named. */
Test(service_config, lanes_are_chosen_from_what_there_is)
{
    char text[64];
    refuses("--stream-lane=tcp", NULL, "stream_lane");
    refuses("--stream-lane=tcp", NULL, "uv, nng");
    expect_bad(load("busy_poll_us: 100001\n", NULL, NULL, NULL, true), "c.yaml:1: busy_poll_us");
    expect_bad(load("busy_poll_us: 100001\n", NULL, NULL, NULL, true), "0..100ms");
    refuses("--busy-poll-us=-1", NULL, "busy-poll-us");
    snprintf(text, sizeof(text), "EXPERTD_BUSY_POLL_US=101ms");
    variables[0] = text;
    refuses(NULL, NULL, "EXPERTD_BUSY_POLL_US");
    snprintf(text, sizeof(text), "EXPERTD_STREAM_LANE=zmq");
    refuses(NULL, NULL, "EXPERTD_STREAM_LANE");
    snprintf(text, sizeof(text), "EXPERTD_STREAM_LANE=nng");
    accepts("--busy-poll-us=100000", NULL);
    variables[0] = NULL;
}

Test(service_config, shared_memory_has_room_for_one_connection)
{
    refuses("--shm-total-bytes=1MiB", NULL, "shm_ring_bytes 2097152");
    refuses("--shm-total-bytes=1MiB", "--shm-ring-bytes=512KiB",
            "1048576 is less than the 1052672");
    accepts("--shm-total-bytes=1MiB", "--shm-ring-bytes=256KiB");
    accepts("--shm-total-bytes=1MiB", "--shm=off");
}

Test(service_config, expert_ranges)
{
    static const char *const bad[] = {"",      "-",  "1-", "-1", "3-1", "1,1",   "2,1",
                                      "0-3,3", "1,", ",1", "a",  "1 2", "65535", "99999999999"};
    ep_expert_range ranges[EP_EXPERT_RANGES_MAX];
    uint32_t count = 0;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        cr_expect_not(ep_expert_ranges_parse(bad[i], ranges, &count), "'%s'", bad[i]);
    }
    cr_assert(ep_expert_ranges_parse("0-3,5,8-9", ranges, &count));
    cr_expect_eq(count, 3);
    cr_expect_eq(ranges[0].last, 3);
    cr_expect_eq(ranges[1].first, 5);
    cr_expect_eq(ranges[2].last, 9);
}
