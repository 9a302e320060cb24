/* SPDX-License-Identifier: Apache-2.0 */
/*
 * expertctl trace record around a real generate run, with a coordinator and two nodes, and a
 * session daemon of the test's own: one trace id on client and both nodes, every pair matched. Then
 * the flight recorder, and a recording of an idle cluster.
 *
 * root's session daemon is one for the whole machine. As root the test therefore goes into a user
 * namespace, in which it is somebody else.
 */
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "support/cluster.h"
#include "support/lttng.h"

#define TRACE_ID "4bf92f3577b34da6a3ce929d0e0e4736"
#define ARGS_COUNT 32

static char *ctl(const char *dir, int expected, const char *const *args)
{
    char *text = NULL;
    int code =
        ep_test_process_run(dir, "ctl", ep_test_expertctl, args, NULL, EP_TEST_PATIENCE_MS, &text);
    EP_TEST_CHECK(code == expected, "expertctl trace %s: exit code %d: %s", args[1], code, text);
    return text;
}

static json_int_t number(json_t *json, const char *key)
{
    EP_TEST_CHECK(json_is_integer(json_object_get(json, key)), "no %s", key);
    return json_integer_value(json_object_get(json, key));
}

static json_t *report(const char *dir, const char *recording, const char *trace)
{
    const char *args[] = {"trace", "report", recording,
                          "-o",    "json",   trace != NULL ? "--trace-id" : NULL,
                          trace,   NULL};
    char *text = ctl(dir, 0, args);
    json_t *json = json_loads(text, 0, NULL);
    EP_TEST_CHECK(json != NULL, "not JSON: %s", text);
    free(text);
    return json;
}

static json_int_t stage_count(json_t *json, const char *name)
{
    size_t i;
    json_t *stage;
    json_array_foreach(json_object_get(json, "stages"), i, stage)
    {
        if (strcmp(json_string_value(json_object_get(stage, "name")), name) == 0) {
            return number(stage, "count");
        }
    }
    return 0;
}

static json_int_t spans_of_node(json_t *json, const char *node)
{
    size_t i;
    json_t *process;
    json_array_foreach(json_object_get(json, "processes"), i, process)
    {
        if (strcmp(json_string_value(json_object_get(process, "node")), node) == 0) {
            return number(process, "spans");
        }
    }
    return 0;
}

static void check_generate(json_t *json)
{
    static const char *const stages[] = {"forward", "plan",  "pack",   "exchange", "serve",
                                         "decode",  "queue", "job",    "kernel",   "reply",
                                         "combine", "send",  "receive"};
    for (size_t s = 0; s < sizeof(stages) / sizeof(stages[0]); s++) {
        EP_TEST_CHECK(stage_count(json, stages[s]) > 0, "no span %s", stages[s]);
    }
    /* A heartbeat's frame may be on its way when the recording begins or ends: that is cut, and not
     * unmatched. */
    json_t *unmatched = json_object_get(json, "unmatched");
    EP_TEST_CHECK(number(unmatched, "begins") + number(unmatched, "ends") == 0,
                  "unmatched: %lld begins, %lld ends", (long long)number(unmatched, "begins"),
                  (long long)number(unmatched, "ends"));
    EP_TEST_CHECK(stage_count(json, "exchange") == stage_count(json, "serve"),
                  "exchanges and serves differ");
    EP_TEST_CHECK(
        number(json, "exchanges_without_serve") + number(json, "serves_without_exchange") == 0,
        "remote calls are not joined");
    EP_TEST_CHECK(spans_of_node(json, "") > 0 && spans_of_node(json, "node0") > 0 &&
                      spans_of_node(json, "node1") > 0,
                  "a process has no span");
}

static void record_generate(ep_test_cluster *cluster)
{
    char out[EP_TEST_PATH_BYTES * 2];
    snprintf(out, sizeof(out), "%s/rec", cluster->dir);
    const char *args[ARGS_COUNT] = {"trace",
                                    "record",
                                    "-o",
                                    out,
                                    "--",
                                    ep_test_expertctl,
                                    "generate",
                                    "--model",
                                    "demo",
                                    "--checkpoint",
                                    EP_SOURCE_DIR "/deploy/demo-model/checkpoint",
                                    "--prompt",
                                    "The ",
                                    "--bytes",
                                    "8",
                                    "--traceparent",
                                    "00-" TRACE_ID "-00f067aa0ba902b7-01",
                                    "--coordinator",
                                    cluster->coordinator.rpc_url,
                                    NULL};
    char *text = ctl(cluster->dir, 0, args);
    fprintf(stderr, "%s", text);
    free(text);
    json_t *all = report(cluster->dir, out, NULL);
    check_generate(all);
    json_t *one = report(cluster->dir, out, TRACE_ID);
    check_generate(one);
    EP_TEST_CHECK(number(one, "traces") == 1 && number(all, "requests") > 0 &&
                      number(one, "requests") == number(all, "requests"),
                  "the calls of one run have %lld trace ids", (long long)number(one, "traces"));
    json_decref(one);
    json_decref(all);
    /* The session and its daemon are gone. */
    int code = ep_test_process_run_line(cluster->dir, "lttng", NULL, EP_TEST_PATIENCE_MS, NULL,
                                        "--no-sessiond list");
    EP_TEST_CHECK(code != 0, "a session daemon was left behind");
}

/* The daemons find the second session daemon too; their heartbeats are on record. */
static void record_idle(ep_test_cluster *cluster)
{
    char out[EP_TEST_PATH_BYTES * 2];
    uint64_t end_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    bool all = false;
    for (int i = 0; !all; i++) { /* on a busy machine a daemon may come too late for one */
        char *text = NULL;
        snprintf(out, sizeof(out), "%s/idle-%d", cluster->dir, i);
        int code =
            ep_test_process_run_line(cluster->dir, ep_test_expertctl, NULL, EP_TEST_PATIENCE_MS,
                                     &text, "trace record -d 500ms -o %s", out);
        all = code == 0 && strstr(text, " events of 3 processes") != NULL;
        EP_TEST_CHECK(all || ep_clock_now_ns() < end_ns, "exit code %d: %s", code, text);
        free(text);
    }
}

static void take_snapshot(ep_test_cluster *cluster)
{
    char out[EP_TEST_PATH_BYTES * 2];
    snprintf(out, sizeof(out), "%s/snapshot", cluster->dir);
    const char *start[] = {"trace", "snapshot", "start", "--subbuf-kib", "64", NULL};
    const char *take[] = {"trace", "snapshot", "take", "-o", out, NULL};
    const char *stop[] = {"trace", "snapshot", "stop", NULL};
    free(ctl(cluster->dir, 0, start));
    EP_TEST_CHECK(ep_test_cluster_ctl(cluster, NULL,
                                      "generate --model demo --checkpoint " EP_SOURCE_DIR
                                      "/deploy/demo-model/checkpoint --prompt 'The ' --bytes 4") ==
                      0,
                  "generate failed");
    free(ctl(cluster->dir, 0, take));
    free(ctl(cluster->dir, 0, stop));
    json_t *json = report(cluster->dir, out, NULL);
    EP_TEST_CHECK(stage_count(json, "serve") > 0 && spans_of_node(json, "node0") > 0,
                  "the snapshot has no serve");
    json_decref(json);
    free(ctl(cluster->dir, 1, stop)); /* there is none any more */
}

/* The first recording starts the session daemon and ends while the second one runs: the daemon has
 * to stay, until that ends too. */
static void record_two_at_once(ep_test_cluster *cluster)
{
    char outer[EP_TEST_PATH_BYTES * 2];
    char inner[EP_TEST_PATH_BYTES * 2];
    char script[EP_TEST_PATH_BYTES * 8];
    char file[EP_TEST_PATH_BYTES * 3];
    snprintf(outer, sizeof(outer), "%s/outer", cluster->dir);
    snprintf(inner, sizeof(inner), "%s/inner", cluster->dir);
    snprintf(script, sizeof(script),
             "'%s' trace record -d 600s -o '%s' >'%s.text' 2>&1 & echo $! >'%s.pid'; "
             "until lttng --no-sessiond list | grep -c 'expertctl-' | grep -q 2; do sleep 0.05; "
             "done; sleep 1",
             ep_test_expertctl, inner, inner, inner);
    const char *args[] = {"trace", "record", "-o", outer, "--", "sh", "-c", script, NULL};
    free(ctl(cluster->dir, 0, args));
    int pid = 0;
    snprintf(file, sizeof(file), "%s.pid", inner);
    FILE *in = fopen(file, "re");
    EP_TEST_CHECK(in != NULL && fscanf(in, "%d", &pid) == 1 && pid > 1, "no %s", file);
    fclose(in);
    EP_TEST_CHECK(kill(pid, SIGINT) == 0, "the second recording ended with the first");
    for (int i = 0; i < EP_TEST_PATIENCE_MS / 20 && kill(pid, 0) == 0; i++) {
        usleep(20000);
    }
    char text[512] = "";
    snprintf(file, sizeof(file), "%s.text", inner);
    in = fopen(file, "re");
    EP_TEST_CHECK(in != NULL && fgets(text, sizeof(text), in) != NULL &&
                      strstr(text, " events of ") != NULL,
                  "second: %s", text);
    fclose(in);
    json_decref(report(cluster->dir, inner, NULL));
    EP_TEST_CHECK(ep_test_process_run_line(cluster->dir, "lttng", NULL, EP_TEST_PATIENCE_MS, NULL,
                                           "--no-sessiond list") != 0,
                  "a session daemon was left behind");
}

int main(void)
{
    static const ep_test_model model = {"demo", EP_SOURCE_DIR "/deploy/demo-model/checkpoint"};
    char home[EP_TEST_PATH_BYTES];
    ep_test_cluster cluster;
    if (!ep_test_lttng_prepare()) {
        fprintf(stderr, "LTTng cannot be used: lttng-tools is not installed (deploy/install-deps "
                        "--test installs it), or root has no user namespaces\n");
        return 1;
    }
    ep_test_dir_new(home);
    setenv("LTTNG_HOME", home, 1);
    setenv("HOME", home, 1);
    setenv("LD_LIBRARY_PATH", EP_TRACE_LIBRARY_DIR, 1);
    ep_test_cluster_start(&cluster, &(ep_test_cluster_options){
                                        .nodes_count = 2, .models = &model, .models_count = 1});
    record_generate(&cluster);
    record_idle(&cluster);
    record_two_at_once(&cluster);
    take_snapshot(&cluster);
    ep_test_cluster_stop(&cluster);
    ep_test_dir_remove(home);
    return 0;
}
