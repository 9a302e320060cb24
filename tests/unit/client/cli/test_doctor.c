/* SPDX-License-Identifier: Apache-2.0 */
/* Each finding of expertctl doctor: made by the facts that call for it, and by nothing else. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "cli/doctor.h"
#include "cli/doctor_config.h"

#define NODES 2

typedef struct fixture {
    ep_doctor_facts facts;
    Expertd__V1__ClusterStatusReply cluster;
    Expertd__V1__Epoch epoch;
    Expertd__V1__Epoch node_epoch[NODES];
    Expertd__V1__NodeEntry entries[NODES];
    Expertd__V1__NodeEntry *entry_list[NODES];
    Expertd__V1__NodeStatusReply status[NODES];
    ep_cli_node nodes[NODES];
    ep_cli_node_list list;
    ep_rpc_look looks[NODES];
} fixture;

static fixture f;
static ep_doctor_findings findings;

static char *text_of(const char *text)
{
    return (char *)(uintptr_t)text;
}

/* A service without a fault. */
static void setup(void)
{
    static char *const names[NODES] = {"a", "b"};
    static char *const urls[NODES] = {"tcp://127.0.0.1:1", "tcp://127.0.0.1:2"};
    memset(&f, 0, sizeof(f));
    memset(&findings, 0, sizeof(findings));
    expertd__v1__cluster_status_reply__init(&f.cluster);
    expertd__v1__epoch__init(&f.epoch);
    f.epoch.term = 7;
    f.epoch.number = 2;
    f.cluster.epoch = &f.epoch;
    f.cluster.judged = true;
    f.cluster.software = text_of("expertd 1");
    for (int i = 0; i < NODES; i++) {
        expertd__v1__node_entry__init(&f.entries[i]);
        f.entries[i].name = names[i];
        f.entries[i].url = urls[i];
        f.entries[i].state = text_of("serving");
        f.entries[i].host = text_of("left");
        f.entry_list[i] = &f.entries[i];
        expertd__v1__node_status_reply__init(&f.status[i]);
        expertd__v1__epoch__init(&f.node_epoch[i]);
        f.node_epoch[i].term = 7;
        f.status[i].epoch = &f.node_epoch[i];
        f.status[i].node = names[i];
        f.status[i].state = text_of("serving");
        f.status[i].software = text_of("expertd 1");
        f.status[i].clock_us = 1000000000;
        f.status[i].inflight_tokens = 1000;
        f.status[i].connections_max = 100;
        strcpy(f.nodes[i].name, names[i]);
        strcpy(f.nodes[i].url, urls[i]);
        f.nodes[i].status = &f.status[i];
        f.nodes[i].answered_us = 1000000000;
        ep_error_clear(&f.nodes[i].error);
    }
    f.cluster.nodes = f.entry_list;
    f.cluster.n_nodes = NODES;
    f.list = (ep_cli_node_list){.nodes = f.nodes, .count = NODES};
    f.facts = (ep_doctor_facts){.coordinator_url = "tcp://127.0.0.1:7410",
                                .cluster = &f.cluster,
                                .nodes = &f.list,
                                .node_looks = f.looks,
                                .has_trace_library = true,
                                .has_lttng = true};
    ep_error_clear(&f.facts.coordinator_error);
}

static void examine(void)
{
    memset(&findings, 0, sizeof(findings));
    ep_doctor_examine(&f.facts, &findings);
}

static void expect_none(void)
{
    examine();
    cr_assert_eq(findings.count, 0u, "%s", findings.list[0].text);
}

/* The one finding there is. */
static void expect(ep_doctor_severity severity, const char *code, const char *text)
{
    examine();
    cr_assert_eq(findings.count, 1u, "%zu findings, wanted %s; first: %s", findings.count, code,
                 findings.list[0].text);
    cr_assert_str_eq(findings.list[0].code, code);
    cr_assert_eq(findings.list[0].severity, severity, "%s", code);
    cr_assert_not_null(strstr(findings.list[0].text, text), "%s: %s", code, findings.list[0].text);
    cr_assert(severity == EP_DOCTOR_INFO || findings.list[0].advice[0] != '\0', "%s: what to do?",
              code);
    cr_assert_eq(ep_doctor_is_ill(&findings), severity > EP_DOCTOR_INFO);
}

TestSuite(doctor, .init = setup);

Test(doctor, a_healthy_service_has_no_findings)
{
    expect_none();
    cr_assert_not(ep_doctor_is_ill(&findings));
}

/* ---- who does not answer ---- */

typedef struct silence {
    const char *url;
    ep_err err;
    const char *look;
    bool has_token;
    const char *code;
    const char *text;
} silence;

static const silence silences[] = {
    {"tcp://h:1", EP_ERR_UNIMPLEMENTED, NULL, false, "wrong-endpoint",
     "tcp://h:1 is a node, not a coordinator"},
    {"tcp://h:1", EP_ERR_UNAUTHENTICATED, NULL, false, "token-missing", "because"},
    {"tcp://h:1", EP_ERR_UNAUTHENTICATED, NULL, true, "token-wrong", "because"},
    {"tcp://h:1", EP_ERR_PERMISSION_DENIED, NULL, false, "admin-listener", "because"},
    {"tcp://h:1", EP_ERR_UNAVAILABLE, "probe-port", false, "probe-port", "tcp://h:1: as seen"},
    {"tls+tcp://h:1", EP_ERR_UNAVAILABLE, "tls-refused", false, "tls-refused",
     "tls+tcp://h:1: as seen"},
    {"tcp://h:1", EP_ERR_DEADLINE_EXCEEDED, NULL, false, "no-answer",
     "does not answer as a coordinator"},
};

Test(doctor, a_coordinator_that_does_not_answer_is_explained)
{
    f.facts.cluster = NULL;
    f.list.count = 0;
    for (size_t i = 0; i < sizeof(silences) / sizeof(silences[0]); i++) {
        const silence *s = &silences[i];
        f.facts.coordinator_url = s->url;
        f.facts.has_token = s->has_token;
        f.facts.coordinator_look =
            (ep_rpc_look){.code = s->look, .text = "as seen", .advice = "do that"};
        ep_error_set(&f.facts.coordinator_error, s->err, "because");
        expect(EP_DOCTOR_ERROR, s->code, s->text);
    }
}

Test(doctor, a_coordinator_among_the_nodes_is_recognised)
{
    f.nodes[1].status = NULL;
    ep_error_set(&f.nodes[1].error, EP_ERR_UNIMPLEMENTED, "not served");
    expect(EP_DOCTOR_ERROR, "wrong-endpoint", "tcp://127.0.0.1:2 is a coordinator, not a node");
}

Test(doctor, an_open_door_beyond_loopback_is_found)
{
    f.facts.coordinator_url = "tcp://10.0.0.1:7410";
    expect(EP_DOCTOR_WARN, "insecure", "tcp://10.0.0.1:7410 lets anybody in");
    f.facts.coordinator_url =
        "tcp://127.0.0.1.example.com:7410"; /* a name, whatever it begins with */
    expect(EP_DOCTOR_WARN, "insecure", "tcp://127.0.0.1.example.com:7410 lets anybody in");
    f.facts.has_token = true;
    expect_none();
    f.facts.has_token = false;
    f.facts.coordinator_url = "tls+tcp://10.0.0.1:7410";
    expect_none();
}

/* ---- the coordinator's word ---- */

Test(doctor, what_the_coordinator_finds_is_told_as_it_says)
{
    Expertd__V1__Problem problem = EXPERTD__V1__PROBLEM__INIT;
    Expertd__V1__Problem *list[] = {&problem};
    problem.code = text_of("no-copy");
    problem.text = text_of("3 experts have none");
    problem.advice = text_of("start a node");
    f.cluster.problems = list;
    f.cluster.n_problems = 1;
    expect(EP_DOCTOR_WARN, "no-copy", "3 experts have none");
    problem.is_error = true;
    expect(EP_DOCTOR_ERROR, "no-copy", "3 experts have none");
    cr_assert_str_eq(findings.list[0].advice, "start a node");
    f.cluster.n_problems = 0;
    f.cluster.problems_dropped = 2;
    examine();
    cr_assert(ep_doctor_is_ill(&findings), "problems that are not listed are problems");
    f.cluster.problems_dropped = 0;
    f.cluster.judged = false;
    expect(EP_DOCTOR_ERROR, "coordinator-old", "the coordinator runs 'expertd 1'");
}

Test(doctor, what_differs_between_nodes_is_told)
{
    f.status[1].software = text_of("expertd 2");
    expect(EP_DOCTOR_WARN, "software", "node b runs 'expertd 2', the coordinator runs 'expertd 1'");
    f.status[1].software = text_of("expertd 1");
    f.status[1].clock_us += 6000000;
    expect(EP_DOCTOR_WARN, "clock", "node b differs from ours by 6.0 s");
    f.status[1].clock_us = 0; /* an older node does not say */
    f.node_epoch[1].term = 6;
    expect(EP_DOCTOR_WARN, "epoch", "term 6, the coordinator's table has term 7");
}

/* ---- the nodes' word ---- */

Test(doctor, failed_and_loading_experts_are_told)
{
    f.status[0].experts_failed = 3;
    f.status[0].last_error = text_of("expert 5: bad file");
    expect(EP_DOCTOR_ERROR, "expert-failed", "node a could not load 3 experts: expert 5: bad file");
    f.status[0].experts_failed = 0;
    f.status[0].experts_pending = 4;
    f.status[0].uptime_us = 1000000;
    expect(EP_DOCTOR_INFO, "loading", "still loads 4 experts, 1 s after");
    f.status[0].uptime_us = 300000000;
    expect(EP_DOCTOR_WARN, "loading", "300 s after");
}

Test(doctor, budgets_that_are_nearly_used_up_name_their_key)
{
    f.status[0].tokens_in_flight = 899;
    expect_none();
    f.status[0].tokens_in_flight = 900;
    expect(EP_DOCTOR_WARN, "budget", "900 of inflight_tokens 1000");
    f.status[0].tokens_in_flight = 0;
    f.status[0].spill_bytes = 100;
    f.status[0].spill_used_bytes = 100;
    expect(EP_DOCTOR_WARN, "budget", "100 of spill_bytes 100");
    f.status[0].spill_bytes = 0; /* no spill at all is no budget used up */
    f.status[0].connections = 95;
    expect(EP_DOCTOR_WARN, "budget", "95 of connections_max 100");
    f.status[0].connections = 0;
    f.status[0].requests_refused = 9;
    expect(EP_DOCTOR_INFO, "refused", "refused 9 requests");
}

Test(doctor, a_node_without_its_coordinator_is_told)
{
    f.status[1].coordinator_lost = true;
    expect(EP_DOCTOR_ERROR, "coordinator-lost", "node b has no connection");
}

Test(doctor, tracing_that_is_not_possible_is_information)
{
    f.facts.has_lttng = false;
    expect(EP_DOCTOR_INFO, "tracing", "no lttng-sessiond");
    f.facts.has_lttng = true;
    f.facts.has_trace_library = false;
    expect(EP_DOCTOR_INFO, "tracing", "libexpertd-trace.so");
}

Test(doctor, more_findings_than_kept_are_counted)
{
    for (int i = 0; i < EP_DOCTOR_FINDINGS_MAX + 3; i++) {
        ep_doctor_add(&findings, EP_DOCTOR_INFO, "x", "", "%d", i);
    }
    cr_assert_eq(findings.count, (size_t)EP_DOCTOR_FINDINGS_MAX);
    cr_assert_eq(findings.dropped, 3u);
    cr_assert(ep_doctor_is_ill(&findings));
}

Test(doctor, paths_of_models_are_read_from_printed_options)
{
    const char *at = "node_name: \"a\"  # default\nmodels:  # file x:3\n  - name: \"m\"\n    path: "
                     "\"/a \\\"b\\\"\"\n"
                     "  - name: \"n\"\n    path: \"/c\"\n    experts: \"\"\n    weights_from: "
                     "\"nodes,storage\"\n"
                     "  - name: \"o\"\n    path: \"/d\"\n    weights_from: files\nlisten:  # "
                     "default\n  - path: \"/no\"\n";
    char path[64];
    bool is_mirrored = true;
    cr_assert(ep_doctor_next_model_path(&at, path, sizeof(path), &is_mirrored));
    cr_assert_str_eq(path, "/a \"b\"");
    cr_assert_not(is_mirrored);
    cr_assert(ep_doctor_next_model_path(&at, path, sizeof(path), &is_mirrored));
    cr_assert_str_eq(path, "/c");
    cr_assert(is_mirrored);
    cr_assert(ep_doctor_next_model_path(&at, path, sizeof(path), &is_mirrored));
    cr_assert_str_eq(path, "/d");
    cr_assert_not(is_mirrored);
    cr_assert_not(ep_doctor_next_model_path(&at, path, sizeof(path), &is_mirrored));
    at = "listen: []  # default\n";
    cr_assert_not(ep_doctor_next_model_path(&at, path, sizeof(path), &is_mirrored));
}

Test(doctor, warnings_are_read_from_the_log)
{
    static ep_doctor_findings found;
    static const struct {
        const char *line, *text, *advice; /* text NULL: no finding */
    } rows[] = {
        {"time=2026-01-31T08:15:30.123Z level=warn event=weight-cache key=weight_cache_dir "
         "path=\"/a \\\"b\\\"\" reason=\"cannot be made: No such file or directory\" "
         "effect=\"experts are packed anew\"",
         "weight_cache_dir /a \"b\": cannot be made: No such file or directory; experts are packed "
         "anew",
         "man expertd.yaml explains each key"},
        {"time=2026-01-31T08:15:30.123Z level=warn event=tls-expires key=tls_cert_key_file path=/x "
         "days_left=5 hint=\"a newer one\"",
         "tls_cert_key_file /x days_left 5", "a newer one"},
        {"time=2026-01-31T08:15:30.123Z level=warn event=config reason=\"environment A=\\\"b "
         "level=error\\\" names no option\"",
         "environment A=\"b level=error\" names no option", "man expertd.yaml explains each key"},
        {"time=2026-01-31T08:15:30.123Z level=info event=config reason=\"x level=warn\"", NULL,
         NULL},
        {"file /x: the configuration is right", NULL, NULL},
        {"level=warn event=config reason=\"it is cut", "it is cut",
         "man expertd.yaml explains each key"},
        {"= = \"\\", NULL, NULL},
        {"", NULL, NULL},
    };
    for (size_t i = 0; i < EP_ARRAY_COUNT(rows); i++) {
        found.count = 0;
        ep_doctor_take_warning(rows[i].line, &found);
        cr_assert_eq(found.count, rows[i].text != NULL, "%s", rows[i].line);
        if (rows[i].text != NULL) {
            cr_expect_str_eq(found.list[0].text, rows[i].text, "'%s'", found.list[0].text);
            cr_expect_str_eq(found.list[0].advice, rows[i].advice);
            cr_expect_eq(found.list[0].severity, EP_DOCTOR_WARN);
        }
    }
}
