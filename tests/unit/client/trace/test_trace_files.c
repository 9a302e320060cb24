/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl trace report and export on recordings with known times, on damaged ones, and on hostile
 * names. */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "trace/trace_load.h"
#include "perfetto.pb-c.h"
#include "support/process.h"
#include "support/trace_scene.h"

#define TIMEOUT_MS 120000
#define REQUESTS 12
#define TRACKS_MAX 256
#define DEPTH_MAX 16
#define AHEAD_NS 77000001

static char dir[EP_TEST_PATH_BYTES];

static void make_dir(void)
{
    cr_assert(ep_test_dir_create(dir));
    cr_assert_eq(chdir(dir), 0);
}

static void remove_dir(void)
{
    ep_test_dir_remove(dir);
}

TestSuite(trace_files, .init = make_dir, .fini = remove_dir, .timeout = 240);

static void write_scene(const ep_test_scene *scene, const char *name, uint32_t recording,
                        uint64_t discarded)
{
    size_t count;
    ep_cli_trace_event *events = ep_test_scene_events(scene, &count);
    cr_assert_not_null(events);
    cr_assert(ep_test_scene_write(name, events, count, recording, recording == 0 ? "one" : "two",
                                  (uint8_t)recording, discarded));
    free(events);
}

/* expertctl with a line of printf's. */
#define CTL(out_text, ...)                                                                         \
    ep_test_process_run_line(dir, EP_EXPERTCTL, NULL, TIMEOUT_MS, (out_text), __VA_ARGS__)

static json_t *report(const char *a, const char *b)
{
    char *text = NULL;
    int code = CTL(&text, "trace report -o json %s %s", a, b != NULL ? b : "");
    json_t *json = json_loads(text, 0, NULL);
    cr_assert_eq(code, 0, "%s", text);
    cr_assert_not_null(json, "%s", text);
    free(text);
    return json;
}

static json_int_t number(json_t *json, const char *key)
{
    cr_assert(json_is_integer(json_object_get(json, key)), "%s", key);
    return json_integer_value(json_object_get(json, key));
}

static json_t *named(json_t *list, const char *name)
{
    size_t i;
    json_t *one;
    json_array_foreach(list, i, one)
    {
        if (strcmp(json_string_value(json_object_get(one, "name")), name) == 0) {
            return one;
        }
    }
    cr_assert_fail("no %s", name);
    return NULL;
}

Test(trace_files, events_come_back_exactly)
{
    ep_error error;
    size_t count;
    write_scene(&(ep_test_scene){.requests = REQUESTS}, "rec", 0, 5);
    ep_cli_trace_event *events =
        ep_test_scene_events(&(ep_test_scene){.requests = REQUESTS}, &count);
    ep_cli_trace_model *expected = ep_cli_trace_model_create(count);
    const char *recording = "rec";
    ep_cli_trace_model *read = NULL;
    ep_cli_trace_model_recording(expected, "x", NULL);
    for (size_t i = 0; i < count; i++) {
        cr_assert_eq(ep_cli_trace_model_add(expected, &events[i], NULL), EP_OK);
    }
    cr_assert_eq(ep_cli_trace_load(&recording, 1, count, &read, &error), EP_OK, "%s", error.text);
    ep_cli_trace_model_finish(expected, (ep_trace_id){0}, NULL);
    ep_cli_trace_model_finish(read, (ep_trace_id){0}, NULL);
    cr_assert_eq(read->spans_count, REQUESTS * EP_TEST_SCENE_SPANS);
    cr_expect_eq(read->recordings[0].discarded_events, 5);
    cr_expect_str_eq(read->recordings[0].host, "one");
    cr_expect(read->recordings[0].has_clock);
    for (size_t i = 0; i < read->spans_count; i++) {
        const ep_cli_span *a = &read->spans[i];
        const ep_cli_span *b = &expected->spans[i];
        cr_expect(a->kind == b->kind && a->begin_ns == b->begin_ns && a->end_ns == b->end_ns &&
                      a->call == b->call && a->parent == b->parent &&
                      a->trace.high == b->trace.high && a->trace.low == b->trace.low &&
                      a->epoch == b->epoch && a->sub == b->sub && a->rows == b->rows &&
                      a->layer == b->layer && a->expert == b->expert && a->status == b->status &&
                      a->tid == b->tid && a->mate == b->mate &&
                      strcmp(read->names[a->peer], expected->names[b->peer]) == 0,
                  "span %zu", i);
    }
    ep_cli_trace_model_destroy(expected);
    ep_cli_trace_model_destroy(read);
    free(events);
}

Test(trace_files, the_report_says_the_known_times)
{
    write_scene(&(ep_test_scene){.requests = REQUESTS}, "rec", 0, 0);
    json_t *json = report("rec", NULL);
    json_t *exchange = named(json_object_get(json, "stages"), "exchange");
    json_t *network = named(json_object_get(json, "stages"), "network");
    json_t *slowest = json_array_get(json_object_get(json, "slowest"), 3);
    json_t *unmatched = json_object_get(json, "unmatched");
    cr_expect_eq(number(json, "spans"), REQUESTS * EP_TEST_SCENE_SPANS);
    cr_expect_eq(number(json, "requests_ns"), REQUESTS * 100000);
    cr_expect_eq(number(exchange, "count"), REQUESTS * 2);
    cr_expect_eq(number(exchange, "p50_ns"), 52000);
    cr_expect_eq(number(exchange, "max_ns"), 69000 + 100 * (REQUESTS - 1));
    cr_expect_eq(number(network, "p50_ns"), 20000);
    cr_expect_eq(number(slowest, "duration_ns"), 100000);
    cr_expect_str_eq(json_string_value(json_object_get(slowest, "trace_id")),
                     "0af7651916cd43dd0000000000000004");
    cr_expect_eq(number(json_object_get(slowest, "critical_path_ns"), "job"), 30000);
    cr_expect_eq(number(json_object_get(slowest, "critical_path_ns"), "network"), 20300);
    cr_expect_eq(number(unmatched, "begins") + number(unmatched, "ends"), 0);
    json_decref(json);
}

Test(trace_files, two_hosts_come_onto_one_clock)
{
    ep_test_scene scene = {.requests = REQUESTS, .two_hosts = true, .node1_ahead_ns = AHEAD_NS};
    write_scene(&scene, "one", 0, 0);
    write_scene(&scene, "two", 1, 0);
    json_t *json = report("one", "two");
    json_t *second = json_array_get(json_object_get(json, "recordings"), 1);
    json_t *slowest = json_array_get(json_object_get(json, "slowest"), 0);
    cr_expect_eq(number(second, "clock_offset_ns"), AHEAD_NS);
    cr_expect_eq(number(second, "clock_error_ns"), 10000);
    cr_expect_eq(number(json, "exchanges_without_serve"), 0);
    cr_expect_eq(number(json_object_get(slowest, "critical_path_ns"), "network"), 20000);
    json_decref(json);
}

/* Any byte may be wrong: the answer is a report or one line of error, never a crash or a hang. */
Test(trace_files, damage_is_an_error_or_survived)
{
    unsigned seed = 11;
    int refused = 0;
    write_scene(&(ep_test_scene){.requests = 4}, "rec", 0, 0);
    for (int round = 0; round < 40; round++) {
        ep_error error = {0};
        struct stat st;
        write_scene(&(ep_test_scene){.requests = 4}, "rec", 0, 0);
        const char *file = round % 2 == 0 ? "rec/stream_0" : "rec/metadata";
        cr_assert_eq(stat(file, &st), 0);
        int fd = open(file, O_RDWR | O_CLOEXEC);
        if (round % 4 < 2) {
            cr_assert_eq(ftruncate(fd, (off_t)((unsigned)rand_r(&seed) % (unsigned)st.st_size)), 0);
        } else {
            for (int i = 0; i < 4; i++) {
                unsigned char byte = (unsigned char)rand_r(&seed);
                cr_assert_eq(
                    pwrite(fd, &byte, 1, (off_t)((unsigned)rand_r(&seed) % (unsigned)st.st_size)),
                    1);
            }
        }
        close(fd);
        const char *recording = "rec";
        ep_cli_trace_model *model = NULL;
        ep_err err = ep_cli_trace_load(&recording, 1, 1000, &model, &error);
        cr_expect(err == EP_OK || (error.code == err && error.text[0] != '\0'), "round %d", round);
        cr_expect(err != EP_OK ||
                  ep_cli_trace_model_finish(model, (ep_trace_id){0}, NULL) == EP_OK);
        refused += err != EP_OK;
        ep_cli_trace_model_destroy(model);
    }
    cr_expect_geq(refused, 10);
}

/* node1's events are a stream of their own, as those of another CPU are with LTTng. */
static void write_two_streams(void)
{
    size_t count;
    ep_cli_trace_event *events =
        ep_test_scene_events(&(ep_test_scene){.requests = REQUESTS, .two_hosts = true}, &count);
    cr_assert_not_null(events);
    cr_assert(ep_test_scene_write("rec", events, count, 0, "one", 0, 0));
    cr_assert(ep_test_scene_write("other", events, count, 1, "one", 0, 0));
    cr_assert_eq(rename("other/stream_0", "rec/stream_1"), 0);
    free(events);
}

static void expect_skipped(const char *program_text)
{
    char *text = NULL;
    cr_assert_eq(CTL(&text, "trace report rec"), 0, "%s", text);
    cr_expect_not_null(strstr(text, "warning: "), "%s", text);
    cr_expect_not_null(strstr(text, program_text), "%s", text);
    free(text);
    const char *quiet[] = {"-c", "exec \"$0\" trace report -o json \"$1\" 2>/dev/null",
                           EP_EXPERTCTL, "rec", NULL};
    cr_assert_eq(ep_test_process_run(dir, "quiet", "/bin/sh", quiet, NULL, TIMEOUT_MS, &text), 0);
    json_t *json = json_loads(text, 0, NULL);
    cr_assert_not_null(json, "%s", text);
    json_t *recording = json_array_get(json_object_get(json, "recordings"), 0);
    json_t *skipped = json_array_get(json_object_get(recording, "skipped"), 0);
    cr_expect_eq(number(recording, "streams_skipped"), 1);
    cr_assert_not_null(strstr(json_string_value(json_object_get(skipped, "file")), "rec/stream_1"));
    cr_expect_eq(number(json, "requests"), REQUESTS);
    cr_expect_eq(number(named(json_object_get(json, "stages"), "exchange"), "count"), 2 * REQUESTS);
    cr_expect_eq(number(named(json_object_get(json, "stages"), "serve"), "count"), REQUESTS);
    cr_expect_eq(number(json, "exchanges_without_serve"), REQUESTS);
    json_decref(json);
    free(text);
}

Test(trace_files, a_broken_stream_is_skipped_and_said)
{
    char *text = NULL;
    setenv("TMPDIR", dir, 1);
    write_two_streams();
    int fd = open("rec/stream_1", O_RDWR | O_CLOEXEC);
    cr_assert_geq(fd, 0);
    off_t bytes = lseek(fd, 0, SEEK_END);
    cr_assert_eq(ftruncate(fd, bytes - 100), 0); /* a disk that was full */
    expect_skipped("rec/stream_1 is skipped: ");
    write_two_streams();
    close(fd);
    fd = open("rec/stream_1", O_RDWR | O_CLOEXEC);
    /* in an event: what was told before has to be taken back */
    cr_assert_eq(pwrite(fd, "\xff\xff\xff\x7f", 4, bytes / 2), 4);
    for (off_t at = bytes / 2; at < bytes; at += 16) {
        cr_assert_eq(pwrite(fd, "\xff\xff\xff\x7f", 4, at), 4);
    }
    close(fd);
    expect_skipped("rec/stream_1 is skipped: ");
    cr_assert_eq(truncate("rec/stream_0", 100), 0);
    cr_expect_eq(CTL(&text, "trace report rec"), 1, "%s", text);
    cr_expect_not_null(strstr(text, ": rec: "), "%s", text);
    free(text);
    const char *left[] = {"-c", "ls -d \"$0\"/expertctl-trace-*", dir, NULL};
    cr_expect_neq(ep_test_process_run(dir, "ls", "/bin/sh", left, NULL, TIMEOUT_MS, NULL), 0,
                  "a temporary folder was left behind");
}

Test(trace_files, wrong_words_and_files_are_named)
{
    mkdir("empty", 0700);
    static const struct {
        const char *line;
        int code;
        const char *text;
    } cases[] = {
        {"", 2, "no verb given, allowed: record, snapshot, report, export"},
        {"fly", 2, "there is no verb 'fly'"},
        {"report", 2, "no recording given"},
        {"report /nonexistent/r", 1, "expertctl trace report: /nonexistent/r"},
        {"report empty", 1, "no recording there"},
        {"report x --trace-id 12", 2, "--trace-id is '12', allowed: 32 hexadecimal digits"},
        {"export x -o y", 2, "--format"},
        {"export x -o y --format pdf", 2, "allowed: perfetto, html"},
        {"record -d 25h", 2, "--duration is '25h', allowed: 1ms..24h"},
        {"record --subbufs 3", 2, "--subbufs is '3', allowed: a power of 2"},
        {"snapshot", 2, "no verb given, allowed: start, take, stop"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char *text = NULL;
        int code = CTL(&text, "trace %s", cases[i].line);
        cr_expect_eq(code, cases[i].code, "case %zu: %d, expected %d: %s", i, code, cases[i].code,
                     text);
        cr_expect_not_null(strstr(text, cases[i].text), "case %zu: '%s' is not in: %s", i,
                           cases[i].text, text);
        free(text);
    }
}

static void export_as(const char *format, const char *recording, const char *file)
{
    char *text = NULL;
    int code = CTL(&text, "trace export %s --format %s -o %s", recording, format, file);
    cr_assert_eq(code, 0, "%s", text);
    free(text);
}

static uint8_t *read_bytes(const char *name, size_t *out_bytes)
{
    struct stat st;
    int fd = open(name, O_RDONLY | O_CLOEXEC);
    cr_assert_geq(fd, 0);
    cr_assert_eq(fstat(fd, &st), 0);
    uint8_t *bytes = malloc((size_t)st.st_size + 1);
    cr_assert_eq(read(fd, bytes, (size_t)st.st_size), st.st_size);
    bytes[st.st_size] = 0;
    close(fd);
    *out_bytes = (size_t)st.st_size;
    return bytes;
}

/* ---- Perfetto ---- */

typedef struct track {
    uint64_t uuid;
    uint64_t ends[DEPTH_MAX];
    size_t depth;
    uint64_t last;
    bool counter;
} track;

static track *find_track(track *tracks, size_t count, uint64_t uuid)
{
    for (size_t i = 0; i < count; i++) {
        if (tracks[i].uuid == uuid) {
            return &tracks[i];
        }
    }
    cr_assert_fail("no descriptor before an event of track %lu", (unsigned long)uuid);
    return NULL;
}

Test(trace_files, perfetto_nests_and_flows)
{
    static track tracks[TRACKS_MAX];
    size_t tracks_count = 0;
    size_t bytes;
    size_t slices = 0;
    size_t flows[REQUESTS * EP_TEST_SCENE_SPANS + 1] = {0};
    write_scene(&(ep_test_scene){.requests = REQUESTS}, "rec", 0, 0);
    export_as("perfetto", "rec", "out.pftrace");
    uint8_t *data = read_bytes("out.pftrace", &bytes);
    EpPerfetto__Trace *trace = ep_perfetto__trace__unpack(NULL, bytes, data);
    cr_assert_not_null(trace);
    for (size_t i = 0; i < trace->n_packet; i++) {
        const EpPerfetto__TracePacket *p = trace->packet[i];
        if (p->track_descriptor != NULL) {
            cr_assert_lt(tracks_count, TRACKS_MAX);
            tracks[tracks_count++] = (track){.uuid = p->track_descriptor->uuid,
                                             .counter = p->track_descriptor->counter != NULL};
            continue;
        }
        const EpPerfetto__TrackEvent *e = p->track_event;
        track *t = find_track(tracks, tracks_count, e->track_uuid);
        cr_expect_geq(p->timestamp, t->last);
        t->last = p->timestamp;
        cr_expect_eq(t->counter, e->type == EP_PERFETTO__TRACK_EVENT__TYPE__TYPE_COUNTER);
        if (e->type == EP_PERFETTO__TRACK_EVENT__TYPE__TYPE_SLICE_BEGIN) {
            cr_assert_lt(t->depth++, DEPTH_MAX);
            slices++;
            if (e->n_flow_ids > 0) {
                cr_assert_leq(e->flow_ids[0], REQUESTS * EP_TEST_SCENE_SPANS);
                flows[e->flow_ids[0]]++;
            }
        } else if (e->type == EP_PERFETTO__TRACK_EVENT__TYPE__TYPE_SLICE_END) {
            cr_assert_gt(t->depth--, 0);
        }
    }
    for (size_t i = 0; i < tracks_count; i++) {
        cr_expect_eq(tracks[i].depth, 0);
    }
    size_t chains = 0;
    for (size_t i = 0; i < sizeof(flows) / sizeof(flows[0]); i++) {
        chains += flows[i] == 3; /* exchange, serve, reply */
    }
    cr_expect_eq(slices, REQUESTS * EP_TEST_SCENE_SPANS);
    cr_expect_eq(chains, REQUESTS * 2);
    cr_expect_eq(ep_perfetto__trace__get_packed_size(trace), bytes);
    ep_perfetto__trace__free_unpacked(trace, NULL);
    free(data);
}

Test(trace_files, perfetto_is_read_by_protoc)
{
    char *text = NULL;
    write_scene(&(ep_test_scene){.requests = 2}, "rec", 0, 0);
    export_as("perfetto", "rec", "out.pftrace");
    const char *args[] = {"-c",
                          EP_PROTOC " --decode=perfetto.protos.Trace -I " EP_SOURCE_DIR
                                    "/tests/unit/client/trace perfetto_public.proto < out.pftrace",
                          NULL};
    cr_assert_eq(ep_test_process_run(dir, "protoc", "/bin/sh", args, NULL, TIMEOUT_MS, &text), 0,
                 "%s", text);
    cr_expect_not_null(strstr(text, "process_name: \"node1 (300)\""));
    cr_expect_not_null(strstr(text, "type: TYPE_SLICE_BEGIN"));
    cr_expect_not_null(strstr(text, "counter_value: 1"));
    for (const char *line = text; line != NULL; line = strchr(line, '\n')) {
        line += strspn(line, "\n ");
        cr_assert(*line < '0' || *line > '9', "an unknown field: %.20s", line);
    }
    free(text);
}

/* ---- HTML ---- */

/* page.py opens the page in Chromium and compares it with the report of the same recording. */
static void run_page(const ep_test_scene *scene, const char *what)
{
    char page[EP_TEST_PATH_BYTES * 2];
    char *text = NULL;
    if (EP_CHROMIUM[0] == '\0') {
        cr_skip_test("chromium is not installed");
    }
    write_scene(scene, "rec", 0, 0);
    export_as("html", "rec", "out.html");
    json_t *json = report("rec", NULL);
    cr_assert_eq(json_dump_file(json, "report.json", 0), 0);
    json_decref(json);
    snprintf(page, sizeof(page), "%s/out.html", dir); /* for a URL */
    const char *args[] = {EP_CHROMIUM, dir, page, "report.json", what, NULL};
    int code = ep_test_process_run(dir, "page", EP_SOURCE_DIR "/tests/unit/client/trace/page.py",
                                   args, NULL, TIMEOUT_MS, &text);
    fprintf(stderr, "%s", text);
    cr_assert_eq(code, 0);
    free(text);
}

Test(trace_files, the_page_says_what_the_report_says_and_follows_clicks)
{
    run_page(&(ep_test_scene){.requests = 200, .node1_slower_ns = 20000, .hedged = 3, .failed = 2},
             "story");
}

Test(trace_files, names_in_a_page_are_only_text)
{
    run_page(&(ep_test_scene){.requests = REQUESTS,
                              .node1 = "<script>document.title=1</script><img id=evil src=x "
                                       "onerror=document.title=1>&\"'"},
             "names");
    run_page(
        &(ep_test_scene){.requests = REQUESTS, .node1 = "</script><svg onload=document.title=1>"},
        "names");
}

Test(trace_files, a_page_without_callers_shows_what_nodes_did)
{
    run_page(&(ep_test_scene){.requests = REQUESTS, .nodes_only = true}, "nodes_only");
}

Test(trace_files, a_page_of_a_large_recording_is_bounded_and_says_what_it_leaves_out)
{
    run_page(&(ep_test_scene){.requests = 5500, .failed = 3}, "large");
}
