/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes Perfetto's TrackEvent protobuf, packet by packet. A file is a Trace message whose field 1
 * repeats the packets, so they can be written one after the other. Packets of one track are written
 * in nested order; Perfetto keeps that order among equal times.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "perfetto.pb-c.h"
#include "trace/trace_export.h"
#include "trace/trace_report.h"

#define PACKET_BYTES 2048
#define NOTES_MAX 10
#define SEQUENCE 1
#define CATEGORY "expertd"
#define COUNTERS 2 /* per process: in flight, rows */

typedef struct writer {
    const ep_cli_trace_model *model;
    const ep_cli_trace_lanes *lanes;
    FILE *out;
    uint64_t lane_uuid;
} writer;

/* Track ids: processes with their counters, then lanes. 0 is reserved by Perfetto. */
static uint64_t process_uuid(uint32_t process)
{
    return 1 + (uint64_t)process * (1 + COUNTERS);
}

static uint64_t lane_uuid(const writer *w, uint32_t lane)
{
    return process_uuid((uint32_t)w->model->processes_count) + lane;
}

static bool write_packet(writer *w, EpPerfetto__TracePacket *packet)
{
    EpPerfetto__Trace part = EP_PERFETTO__TRACE__INIT;
    uint8_t small[PACKET_BYTES];
    part.n_packet = 1;
    part.packet = &packet;
    packet->has_trusted_packet_sequence_id = 1;
    packet->trusted_packet_sequence_id = SEQUENCE;
    size_t bytes = ep_perfetto__trace__get_packed_size(&part);
    uint8_t *body = bytes <= sizeof(small) ? small : malloc(bytes);
    if (body == NULL) {
        return false;
    }
    ep_perfetto__trace__pack(&part, body);
    bool good = fwrite(body, 1, bytes, w->out) == bytes;
    if (body != small) {
        free(body);
    }
    return good;
}

static bool write_track(writer *w, EpPerfetto__TrackDescriptor *track)
{
    EpPerfetto__TracePacket packet = EP_PERFETTO__TRACE_PACKET__INIT;
    packet.track_descriptor = track;
    track->has_uuid = 1;
    track->has_parent_uuid = track->parent_uuid != 0;
    return write_packet(w, &packet);
}

static bool write_process(writer *w, uint32_t process)
{
    char name[2 * EP_CLI_TRACE_NAME_BYTES];
    static const char *const counters[COUNTERS] = {"in flight", "rows in flight"};
    EpPerfetto__TrackDescriptor track = EP_PERFETTO__TRACK_DESCRIPTOR__INIT;
    EpPerfetto__ProcessDescriptor descriptor = EP_PERFETTO__PROCESS_DESCRIPTOR__INIT;
    ep_cli_trace_process_name(w->model, process, true, name, sizeof(name));
    /* Not the real pid: pids of several hosts or containers may be equal, and Perfetto would join
     * those processes. */
    descriptor.has_pid = 1;
    descriptor.pid = (int32_t)process + 1;
    descriptor.process_name = name;
    track.uuid = process_uuid(process);
    track.process = &descriptor;
    bool good = write_track(w, &track);
    for (uint32_t i = 0; i < COUNTERS && good; i++) {
        EpPerfetto__TrackDescriptor counter = EP_PERFETTO__TRACK_DESCRIPTOR__INIT;
        EpPerfetto__CounterDescriptor unit = EP_PERFETTO__COUNTER_DESCRIPTOR__INIT;
        unit.has_unit = 1;
        unit.unit = EP_PERFETTO__COUNTER_DESCRIPTOR__UNIT__UNIT_COUNT;
        counter.uuid = process_uuid(process) + 1 + i;
        counter.parent_uuid = process_uuid(process);
        counter.name = (char *)counters[i];
        counter.counter = &unit;
        good = write_track(w, &counter);
    }
    return good;
}

static bool write_lane(writer *w, uint32_t lane)
{
    char name[64];
    const ep_cli_trace_lane *l = &w->lanes->lanes[lane];
    EpPerfetto__TrackDescriptor track = EP_PERFETTO__TRACK_DESCRIPTOR__INIT;
    snprintf(name, sizeof(name), "%s %" PRIu32, ep_cli_lane_names[l->group], l->number);
    track.uuid = lane_uuid(w, lane);
    track.parent_uuid = process_uuid(l->process);
    track.name = name;
    return write_track(w, &track);
}

/* ---- slices ---- */

typedef struct notes {
    EpPerfetto__DebugAnnotation items[NOTES_MAX];
    EpPerfetto__DebugAnnotation *list[NOTES_MAX];
    size_t count;
} notes;

static EpPerfetto__DebugAnnotation *note(notes *n, const char *name)
{
    EpPerfetto__DebugAnnotation *one = &n->items[n->count];
    ep_perfetto__debug_annotation__init(one);
    one->name = (char *)name;
    n->list[n->count++] = one;
    return one;
}

static void note_number(notes *n, const char *name, int64_t value)
{
    EpPerfetto__DebugAnnotation *one = note(n, name);
    one->has_int_value = 1;
    one->int_value = value;
}

/* One flow per remote call: exchange, the node's serve and reply, the client's receive. */
static uint64_t flow_of(const writer *w, const ep_cli_span *span)
{
    const ep_cli_span *spans = w->model->spans;
    const ep_cli_span *serve = NULL;
    size_t first;
    if (span->kind == EP_CLI_SPAN_exchange && span->mate != EP_CLI_TRACE_NONE) {
        return (uint64_t)(span - spans) + 1;
    }
    if (span->kind == EP_CLI_SPAN_serve || span->kind == EP_CLI_SPAN_gateway) {
        serve = span;
    } else if (span->kind == EP_CLI_SPAN_reply) {
        size_t count = ep_cli_trace_model_find(w->model, EP_CLI_SPAN_serve, span->call, &first);
        for (size_t i = 0; i < count && serve == NULL; i++) {
            const ep_cli_span *other = &spans[w->model->by_call[first + i]];
            serve = other->process == span->process ? other : NULL;
        }
    } else if (span->kind == EP_CLI_SPAN_receive && span->sub == 1) {
        size_t count = ep_cli_trace_model_find(w->model, EP_CLI_SPAN_exchange, span->call, &first);
        for (size_t i = 0; i < count; i++) {
            const ep_cli_span *other = &spans[w->model->by_call[first + i]];
            if (other->process == span->process && other->mate != EP_CLI_TRACE_NONE) {
                return (uint64_t)w->model->by_call[first + i] + 1;
            }
        }
    }
    return serve != NULL && serve->mate != EP_CLI_TRACE_NONE ? (uint64_t)serve->mate + 1 : 0;
}

static bool write_step(uint32_t index, bool is_end, void *arg)
{
    writer *w = arg;
    const ep_cli_span *span = &w->model->spans[index];
    char trace[EP_CLI_TRACE_ID_BYTES];
    char call[17];
    char parent[17];
    char *category = CATEGORY;
    notes n = {.count = 0};
    uint64_t flow = is_end ? 0 : flow_of(w, span);
    EpPerfetto__TracePacket packet = EP_PERFETTO__TRACE_PACKET__INIT;
    EpPerfetto__TrackEvent event = EP_PERFETTO__TRACK_EVENT__INIT;
    packet.has_timestamp = 1;
    packet.timestamp = (uint64_t)(is_end ? span->end_ns : span->begin_ns);
    packet.track_event = &event;
    event.has_type = 1;
    event.type = is_end ? EP_PERFETTO__TRACK_EVENT__TYPE__TYPE_SLICE_END
                        : EP_PERFETTO__TRACK_EVENT__TYPE__TYPE_SLICE_BEGIN;
    event.has_track_uuid = 1;
    event.track_uuid = w->lane_uuid;
    if (!is_end) {
        ep_cli_trace_id_text(span->trace, trace);
        snprintf(call, sizeof(call), "%016" PRIx64, span->call);
        snprintf(parent, sizeof(parent), "%016" PRIx64, span->parent);
        event.name = (char *)ep_cli_span_names[span->kind];
        event.n_categories = 1;
        event.categories = &category;
        event.n_flow_ids = flow != 0;
        event.flow_ids = &flow;
        note(&n, "trace_id")->string_value = trace;
        note(&n, "call")->string_value = call;
        note(&n, "parent")->string_value = parent;
        note(&n, "peer")->string_value = w->model->names[span->peer];
        note_number(&n, "sub", span->sub);
        note_number(&n, "rows", span->rows);
        note_number(&n, "layer", span->layer);
        note_number(&n, "expert", span->expert);
        note_number(&n, "status", span->status);
        note_number(&n, "epoch", (int64_t)span->epoch);
        event.n_debug_annotations = n.count;
        event.debug_annotations = n.list;
    }
    return write_packet(w, &packet);
}

/* ---- counters ---- */

typedef struct change {
    int64_t time_ns;
    int64_t by;
    uint64_t track;
} change;

static int compare_change(const void *a, const void *b)
{
    const change *x = a;
    const change *y = b;
    if (x->track != y->track) {
        return x->track < y->track ? -1 : 1;
    }
    return x->time_ns != y->time_ns ? (x->time_ns < y->time_ns ? -1 : 1)
                                    : (x->by > y->by) - (x->by < y->by);
}

static bool write_count(writer *w, const change *at, int64_t value)
{
    EpPerfetto__TracePacket packet = EP_PERFETTO__TRACE_PACKET__INIT;
    EpPerfetto__TrackEvent event = EP_PERFETTO__TRACK_EVENT__INIT;
    packet.has_timestamp = 1;
    packet.timestamp = (uint64_t)at->time_ns;
    packet.track_event = &event;
    event.has_type = 1;
    event.type = EP_PERFETTO__TRACK_EVENT__TYPE__TYPE_COUNTER;
    event.has_track_uuid = 1;
    event.track_uuid = at->track;
    event.has_counter_value = 1;
    event.counter_value = value;
    return write_packet(w, &packet);
}

/* In flight: forwards of a client, serves of a node. Rows: of the requests in flight. */
static bool write_counters(writer *w)
{
    const ep_cli_trace_model *model = w->model;
    size_t counted = 0;
    for (size_t i = 0; i < model->spans_count; i++) {
        counted += model->spans[i].kind == EP_CLI_SPAN_forward ||
                   model->spans[i].kind == EP_CLI_SPAN_serve;
    }
    change *changes = malloc((counted * 4 + 1) * sizeof(*changes));
    size_t count = 0;
    if (changes == NULL) {
        return false;
    }
    for (size_t i = 0; i < model->spans_count; i++) {
        const ep_cli_span *span = &model->spans[i];
        if (span->kind == EP_CLI_SPAN_forward || span->kind == EP_CLI_SPAN_serve) {
            uint64_t track = process_uuid(span->process) + 1;
            changes[count++] = (change){span->begin_ns, 1, track};
            changes[count++] = (change){span->end_ns, -1, track};
            changes[count++] = (change){span->begin_ns, span->rows, track + 1};
            changes[count++] = (change){span->end_ns, -(int64_t)span->rows, track + 1};
        }
    }
    qsort(changes, count, sizeof(*changes), compare_change);
    bool good = true;
    int64_t value = 0;
    for (size_t i = 0; i < count && good; i++) {
        value = (i > 0 && changes[i - 1].track == changes[i].track ? value : 0) + changes[i].by;
        bool last = i + 1 == count || changes[i + 1].track != changes[i].track ||
                    changes[i + 1].time_ns != changes[i].time_ns;
        good = !last || write_count(w, &changes[i], value);
    }
    free(changes);
    return good;
}

bool ep_cli_trace_write_perfetto(const ep_cli_trace_model *model, const ep_cli_trace_lanes *lanes,
                                 FILE *out)
{
    writer w = {.model = model, .lanes = lanes, .out = out};
    bool good = true;
    for (uint32_t i = 0; i < model->processes_count && good; i++) {
        good = write_process(&w, i);
    }
    for (uint32_t i = 0; i < lanes->lanes_count && good; i++) {
        w.lane_uuid = lane_uuid(&w, i);
        good = write_lane(&w, i) && ep_cli_trace_lane_walk(model, lanes, i, write_step, &w);
    }
    return good && write_counters(&w) && ferror(out) == 0;
}
