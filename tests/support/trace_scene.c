/* SPDX-License-Identifier: Apache-2.0 */
/* Makes the scene, and writes CTF 1.8 by hand: a metadata text and one packet of byte-aligned
 * little-endian events. */
#include "support/trace_scene.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define MS 1000000LL
#define CLIENT 100 /* pid */
#define PROCNAME_BYTES 17
#define HEAD_BYTES (4 + 16 + 4 + 5 * 8)
#define CTF_MAGIC 0xc1fc1fc1U

/* ---- the scene ---- */

typedef struct maker {
    const ep_test_scene *scene;
    ep_cli_trace_event *events;
    size_t count;
    int64_t base;
    ep_cli_trace_event about; /* common fields of the next spans */
    size_t frame_end;         /* the event that ended the last exchange */
} maker;

static void span(maker *m, ep_cli_span_kind kind, int64_t begin, int64_t end)
{
    ep_cli_trace_event event = m->about;
    event.kind = kind;
    event.time_ns = m->base + begin;
    m->events[m->count++] = event;
    event.is_end = true;
    event.time_ns = m->base + end;
    m->events[m->count++] = event;
}

static void serve(maker *m, uint64_t call, const char *node, uint32_t number, uint64_t job,
                  const int64_t *t)
{
    m->about.call = call;
    m->about.pid = 200 + 100 * (int32_t)number;
    m->about.tid = m->about.pid;
    m->about.recording = m->scene->two_hosts ? number : 0;
    m->base += number == 1 ? m->scene->node1_ahead_ns : 0;
    snprintf(m->about.node, sizeof(m->about.node), "%s", node);
    snprintf(m->about.thread, sizeof(m->about.thread), "expertd");
    m->about.peer[0] = '\0';
    m->about.sub = 0;
    m->about.rows = 4 + number;
    span(m, EP_CLI_SPAN_serve, t[0], t[5]);
    span(m, EP_CLI_SPAN_decode, t[0], t[1]);
    m->about.expert = (int32_t)number + 1;
    span(m, EP_CLI_SPAN_queue, t[1], t[2]);
    m->events[m->count - 1].parent = job;
    m->about.parent = call;
    m->about.call = job;
    span(m, EP_CLI_SPAN_job, t[2], t[3]);
    span(m, EP_CLI_SPAN_kernel, t[2] + 1000, t[3] - 1000);
    m->about.call = call;
    m->about.expert = -1;
    span(m, EP_CLI_SPAN_reply, t[3], t[4]);
    m->base -= number == 1 ? m->scene->node1_ahead_ns : 0;
}

/* Adds an exchange and its node's spans. t: times of the exchange, then those for serve. */
static void frame(maker *m, uint64_t call, uint32_t sub, uint64_t remote, uint32_t node,
                  uint64_t job, const int64_t *t)
{
    const char *name = node == 0 ? "node0" : m->scene->node1 != NULL ? m->scene->node1 : "node1";
    const ep_cli_trace_event client = m->about;
    m->about.parent = call;
    m->about.call = remote;
    m->about.sub = sub;
    snprintf(m->about.peer, sizeof(m->about.peer), "%s", name);
    span(m, EP_CLI_SPAN_exchange, t[0], t[1]);
    size_t end = m->count - 1;
    serve(m, remote, name, node, job, t + 2);
    m->about = client;
    m->frame_end = end;
}

static void request(maker *m, uint32_t i)
{
    bool hedged = i < m->scene->hedged;
    bool failed = i + m->scene->failed >= m->scene->requests;
    int64_t slower = failed ? 100000 : m->scene->node1_slower_ns;
    const int64_t node0[] = {8000, 60000, 18000, 20000, 25000, 45000, 49000, 50000};
    const int64_t node1[] = {11000,          80000 + slower + 100 * (int64_t)(i % 50),
                             21000,          24000,
                             34000,          64000 + slower,
                             68000 + slower, 70000 + slower};
    const int64_t again[] = {41000, 76000 + slower, 51000,          52000,
                             53000, 60000 + slower, 65000 + slower, 66000 + slower};
    uint64_t call = EP_TEST_SCENE_CALL + i;
    m->base = EP_TEST_SCENE_START + i * MS;
    m->about = (ep_cli_trace_event){.pid = CLIENT,
                                    .tid = CLIENT + 1,
                                    .trace = {EP_TEST_SCENE_TRACE_HIGH, i + 1},
                                    .call = call,
                                    .epoch = 3,
                                    .rows = 8,
                                    .layer = 2,
                                    .expert = -1};
    snprintf(m->about.thread, sizeof(m->about.thread), "caller");
    span(m, EP_CLI_SPAN_forward, 0, 100000 + slower);
    m->events[m->count - 1].status = failed ? EP_ERR_DEADLINE_EXCEEDED : 0;
    span(m, EP_CLI_SPAN_plan, 1000, 5000);
    if (!failed) {
        span(m, EP_CLI_SPAN_combine, 85000 + slower, 99000 + slower);
    }
    span(m, EP_CLI_SPAN_pack, 5000, 8000);
    m->about.sub = 1;
    span(m, EP_CLI_SPAN_pack, 8000, 11000);
    m->about.sub = 0;
    frame(m, call, 1, 5001 + 2 * (uint64_t)i, 1, 9001 + 2 * (uint64_t)i, node1);
    m->events[m->frame_end].status = failed ? EP_ERR_DEADLINE_EXCEEDED : 0;
    m->events[m->frame_end].rows = hedged || failed ? 0 : 8;
    frame(m, call, 0, 5000 + 2 * (uint64_t)i, 0, 9000 + 2 * (uint64_t)i, node0);
    if (hedged) {
        m->about.sub = 2;
        span(m, EP_CLI_SPAN_pack, 40000, 41000);
        frame(m, call, 2, 700000 + i, 0, 800000 + i, again);
    }
}

/* Sorts by time and keeps the order of equal times, so that a begin stays before its end. */
static int compare_time(const void *a, const void *b)
{
    const ep_cli_trace_event *x = a;
    const ep_cli_trace_event *y = b;
    return x->time_ns != y->time_ns ? (x->time_ns < y->time_ns ? -1 : 1) : x < y ? -1 : x > y;
}

ep_cli_trace_event *ep_test_scene_events(const ep_test_scene *scene, size_t *out_count)
{
    maker m = {.scene = scene};
    m.events =
        calloc((size_t)scene->requests * (EP_TEST_SCENE_SPANS + EP_TEST_SCENE_HEDGE_SPANS) * 2 + 40,
               sizeof(*m.events));
    for (uint32_t i = 0; m.events != NULL && i < scene->requests; i++) {
        request(&m, i);
    }
    for (size_t i = 0, all = m.count; scene->nodes_only && i < all; i++) {
        m.count = i == 0 ? 0 : m.count;
        if (m.events[i].pid != CLIENT) {
            m.events[m.count++] = m.events[i];
        }
    }
    if (m.events != NULL) {
        qsort(m.events, m.count, sizeof(*m.events), compare_time);
    }
    *out_count = m.count;
    return m.events;
}

/* ---- CTF ---- */

static void put(FILE *out, uint64_t value, size_t bytes)
{
    fwrite(&value, 1, bytes, out); /* little endian, as the tests' machines are */
}

static void write_metadata(FILE *out, const char *host, uint8_t clock)
{
    fprintf(
        out,
        "/* CTF 1.8 */\n"
        "typealias integer { size = 8; align = 8; signed = false; } := uint8_t;\n"
        "typealias integer { size = 32; align = 8; signed = false; } := uint32_t;\n"
        "typealias integer { size = 32; align = 8; signed = true; } := int32_t;\n"
        "typealias integer { size = 64; align = 8; signed = false; } := uint64_t;\n"
        "trace { major = 1; minor = 8; uuid = \"%02x000000-0000-4000-8000-000000000001\"; "
        "byte_order = le;\n"
        "  packet.header := struct { uint32_t magic; uint8_t uuid[16]; uint32_t stream_id; }; };\n"
        "env { hostname = \"%s\"; domain = \"ust\"; tracer_name = \"lttng-ust\"; tracer_major = 2;"
        " tracer_minor = 13; };\n"
        "clock { name = \"monotonic\"; uuid = \"%02x000000-0000-4000-8000-000000000002\"; freq = "
        "1000000000; offset_s = 0; offset = 0; };\n"
        "typealias integer { size = 64; align = 8; signed = false; map = clock.monotonic.value; } "
        ":= time_t;\n"
        "stream { id = 0;\n"
        "  packet.context := struct { time_t timestamp_begin; time_t timestamp_end; uint64_t "
        "content_size; uint64_t packet_size; uint64_t events_discarded; };\n"
        "  event.header := struct { uint32_t id; time_t timestamp; };\n"
        "  event.context := struct { int32_t _vpid; int32_t _vtid; integer { size = 8; align = 8; "
        "signed = true; encoding = UTF8; } _procname[%d]; }; };\n",
        clock, host, clock, PROCNAME_BYTES);
    for (int id = 0; id < EP_CLI_SPAN_KINDS * 2; id++) {
        fprintf(
            out,
            "event { name = \"expertd:%s_%s\"; id = %d; stream_id = 0; fields := struct { uint64_t "
            "_trace_hi; uint64_t _trace_lo; uint64_t _call; uint64_t _parent; uint64_t _epoch; "
            "uint32_t _sub; uint32_t _rows; int32_t _layer; int32_t _expert; int32_t _status; "
            "string { encoding = UTF8; } _node; string { encoding = UTF8; } _peer; }; };\n",
            ep_cli_span_names[id / 2], id % 2 != 0 ? "end" : "begin", id);
    }
}

static void write_event(FILE *out, const ep_cli_trace_event *e)
{
    char name[PROCNAME_BYTES] = "";
    snprintf(name, sizeof(name), "%.16s", e->thread);
    put(out, (uint64_t)e->kind * 2 + e->is_end, 4);
    put(out, (uint64_t)e->time_ns, 8);
    put(out, (uint32_t)e->pid, 4);
    put(out, (uint32_t)e->tid, 4);
    fwrite(name, 1, sizeof(name), out);
    put(out, e->trace.high, 8);
    put(out, e->trace.low, 8);
    put(out, e->call, 8);
    put(out, e->parent, 8);
    put(out, e->epoch, 8);
    put(out, e->sub, 4);
    put(out, e->rows, 4);
    put(out, (uint32_t)e->layer, 4);
    put(out, (uint32_t)e->expert, 4);
    put(out, (uint32_t)e->status, 4);
    fprintf(out, "%s%c", e->node[0] != '\0' ? e->node : "-", 0);
    fprintf(out, "%s%c", e->peer[0] != '\0' ? e->peer : "-", 0);
}

static void write_head(FILE *out, uint8_t clock, int64_t begin, int64_t end, uint64_t bytes,
                       uint64_t discarded)
{
    uint8_t uuid[16] = {clock, [6] = 0x40, [8] = 0x80, [15] = 1};
    put(out, CTF_MAGIC, 4);
    fwrite(uuid, 1, sizeof(uuid), out);
    put(out, 0, 4);
    put(out, (uint64_t)begin, 8);
    put(out, (uint64_t)end, 8);
    put(out, bytes * 8, 8);
    put(out, bytes * 8, 8);
    put(out, discarded, 8);
}

bool ep_test_scene_write(const char *dir, const ep_cli_trace_event *events, size_t count,
                         uint32_t recording, const char *host, uint8_t clock, uint64_t discarded)
{
    char path[512];
    char *body = NULL;
    size_t body_bytes = 0;
    int64_t begin = 0;
    int64_t end = 0;
    mkdir(dir, 0700);
    snprintf(path, sizeof(path), "%s/metadata", dir);
    FILE *metadata = fopen(path, "w");
    snprintf(path, sizeof(path), "%s/stream_0", dir);
    FILE *stream = fopen(path, "w");
    FILE *memory = open_memstream(&body, &body_bytes);
    bool good = metadata != NULL && stream != NULL && memory != NULL;
    for (size_t i = 0; good && i < count; i++) {
        if (events[i].recording == recording) {
            begin = begin == 0 ? events[i].time_ns : begin;
            end = events[i].time_ns;
            write_event(memory, &events[i]);
        }
    }
    if (good) {
        fflush(memory);
        write_metadata(metadata, host, clock);
        /* An empty first packet: the count of discarded events starts there. */
        write_head(stream, clock, begin, begin, HEAD_BYTES, 0);
        write_head(stream, clock, begin, end, HEAD_BYTES + body_bytes, discarded);
        good = fwrite(body, 1, body_bytes, stream) == body_bytes;
    }
    good = (metadata == NULL || fclose(metadata) == 0) && (stream == NULL || fclose(stream) == 0) &&
           good;
    if (memory != NULL) {
        fclose(memory);
    }
    free(body);
    return good;
}
