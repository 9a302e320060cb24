/* SPDX-License-Identifier: Apache-2.0 */
/* The report as JSON. */
#include "trace/trace_report.h"

#include <inttypes.h>

#include "cli/output.h"

#define CALL_BYTES 17

void ep_cli_trace_id_text(ep_trace_id trace, char out_text[EP_CLI_TRACE_ID_BYTES])
{
    snprintf(out_text, EP_CLI_TRACE_ID_BYTES, "%016" PRIx64 "%016" PRIx64, trace.high, trace.low);
}

static json_t *hex(uint64_t number)
{
    char text[CALL_BYTES];
    snprintf(text, sizeof(text), "%016" PRIx64, number);
    return json_string(text);
}

static json_t *process_json(const ep_cli_trace_model *model, uint32_t process)
{
    char name[2 * EP_CLI_TRACE_NAME_BYTES];
    ep_cli_trace_process_name(model, process, true, name, sizeof(name));
    return ep_cli_json_text(name);
}

static json_t *stat_json(const ep_cli_trace_stat *stat)
{
    return json_pack("{s:I, s:I, s:I, s:I, s:I}", "count", (json_int_t)stat->count, "p50_ns",
                     (json_int_t)stat->p50_ns, "p99_ns", (json_int_t)stat->p99_ns, "max_ns",
                     (json_int_t)stat->max_ns, "total_ns", (json_int_t)stat->total_ns);
}

static double share(int64_t part, int64_t whole)
{
    return whole > 0 ? (double)part / (double)whole : 0.0;
}

static json_t *stages_json(const ep_cli_trace_figures *f)
{
    json_t *stages = json_array();
    for (int kind = 0; kind <= EP_CLI_SPAN_KINDS; kind++) {
        bool derived = kind == EP_CLI_SPAN_KINDS;
        const ep_cli_trace_stat *stat = derived ? &f->network : &f->stages[kind];
        if (stat->count == 0) {
            continue;
        }
        json_t *stage = stat_json(stat);
        json_object_set_new(stage, "name",
                            json_string(derived ? "network" : ep_cli_span_names[kind]));
        json_object_set_new(stage, "share",
                            f->requests_ns > 0
                                ? json_real((double)stat->total_ns / (double)f->requests_ns)
                                : json_null());
        json_array_append_new(stages, stage);
    }
    return stages;
}

static json_t *critical_path_json(const ep_cli_trace_figures *f)
{
    int64_t slow_ns = 0;
    json_t *stages = json_array();
    for (int stage = 0; stage < EP_CLI_STAGES; stage++) {
        slow_ns += f->slow_stages_ns[stage];
    }
    for (int stage = 0; stage < EP_CLI_STAGES; stage++) {
        json_t *parts = json_array();
        for (int part = 0; part < EP_CLI_PATH_PARTS; part++) {
            if (ep_cli_stage_of[part] == (ep_cli_stage)stage) {
                json_array_append_new(parts, json_string(ep_cli_path_names[part]));
            }
        }
        json_array_append_new(
            stages, json_pack("{s:s, s:o, s:I, s:f, s:I, s:f}", "name", ep_cli_stage_names[stage],
                              "parts", parts, "total_ns", (json_int_t)f->stages_ns[stage], "share",
                              share(f->stages_ns[stage], f->requests_ns), "slow_total_ns",
                              (json_int_t)f->slow_stages_ns[stage], "slow_share",
                              share(f->slow_stages_ns[stage], slow_ns)));
    }
    return stages;
}

static json_t *failures_json(const ep_cli_trace_model *model, const ep_cli_trace_figures *f)
{
    json_t *failures = json_array();
    for (size_t i = 0; i < f->failures_count; i++) {
        const ep_cli_trace_failure *one = &f->failures[i];
        json_t *first = json_array();
        for (size_t k = 0; k < one->first_count; k++) {
            json_array_append_new(first, hex(model->spans[f->requests[one->first[k]]].call));
        }
        json_array_append_new(failures, json_pack("{s:s, s:s, s:I, s:I, s:o}", "status",
                                                  ep_err_name(one->status), "of",
                                                  one->frames ? "frames" : "calls", "count",
                                                  (json_int_t)one->count, "saved",
                                                  (json_int_t)one->saved, "first_calls", first));
    }
    return failures;
}

/* Null: no node stands out, or fewer than two nodes can be compared. */
static json_t *slowest_node_json(const ep_cli_trace_model *model, const ep_cli_trace_figures *f)
{
    if (f->slow.peer == EP_CLI_TRACE_NONE) {
        return json_null();
    }
    return json_pack("{s:o, s:s, s:f, s:o}", "name",
                     ep_cli_json_text(model->names[f->peers[f->slow.peer].name]), "by",
                     f->slow.p99 ? "p99_ns" : "p50_ns", "times", f->slow.times, "against",
                     ep_cli_json_text(model->names[f->peers[f->slow.against].name]));
}

static json_t *requests_json(const ep_cli_trace_model *model, const ep_cli_trace_figures *f,
                             size_t top)
{
    json_t *requests = json_array();
    for (size_t i = 0; i < f->requests_count && i < top; i++) {
        const ep_cli_span *span = &model->spans[f->requests[i]];
        char trace[EP_CLI_TRACE_ID_BYTES];
        ep_cli_trace_id_text(span->trace, trace);
        json_t *path = json_object();
        for (int part = 0; part < EP_CLI_PATH_PARTS; part++) {
            json_object_set_new(path, ep_cli_path_names[part],
                                json_integer(f->paths[i].parts_ns[part]));
        }
        json_array_append_new(
            requests,
            json_pack("{s:s, s:o, s:o, s:I, s:I, s:I, s:I, s:i, s:o, s:I, s:o}", "trace_id", trace,
                      "call", hex(span->call), "process", process_json(model, span->process),
                      "layer", (json_int_t)span->layer, "tokens", (json_int_t)span->rows,
                      "begin_ns", (json_int_t)span->begin_ns, "duration_ns",
                      (json_int_t)(span->end_ns - span->begin_ns), "status", (int)span->status,
                      "slowest_peer", ep_cli_json_text(model->names[f->paths[i].peer]),
                      "slowest_peer_ns", (json_int_t)f->paths[i].peer_ns, "critical_path_ns",
                      path));
    }
    return requests;
}

static json_t *peers_json(const ep_cli_trace_model *model, const ep_cli_trace_figures *f)
{
    json_t *peers = json_array();
    for (size_t i = 0; i < f->peers_count; i++) {
        const ep_cli_trace_peer *peer = &f->peers[i];
        json_array_append_new(
            peers,
            json_pack("{s:o, s:b, s:o, s:o, s:o, s:I, s:I, s:I, s:I, s:f, s:I, s:f}", "name",
                      ep_cli_json_text(model->names[peer->name]), "gateway", (int)peer->gateway,
                      "exchange", stat_json(&peer->exchange), "network", stat_json(&peer->network),
                      "serve", stat_json(&peer->serve), "failed", (json_int_t)peer->failed,
                      "unused", (json_int_t)peer->unused, "slowest_of_requests",
                      (json_int_t)peer->slowest_of, "waited_ns", (json_int_t)peer->waited_ns,
                      "waited_share", share(peer->waited_ns, f->requests_ns), "late_ns",
                      (json_int_t)peer->late_ns, "late_share",
                      share(peer->late_ns, f->requests_ns)));
    }
    return peers;
}

static json_t *experts_json(const ep_cli_trace_figures *f, size_t top)
{
    json_t *experts = json_array();
    for (size_t i = 0; i < f->experts_count && i < top; i++) {
        const ep_cli_trace_expert *e = &f->experts[i];
        json_array_append_new(experts, json_pack("{s:i, s:i, s:I, s:I, s:I}", "layer",
                                                 (int)e->layer, "expert", (int)e->expert, "jobs",
                                                 (json_int_t)e->jobs, "rows", (json_int_t)e->rows,
                                                 "busy_ns", (json_int_t)e->busy_ns));
    }
    return experts;
}

static json_t *unmatched_json(const ep_cli_trace_model *model)
{
    json_t *list = json_array();
    for (size_t i = 0; i < model->unmatched_count; i++) {
        const ep_cli_unmatched *u = &model->unmatched[i];
        json_array_append_new(
            list, json_pack("{s:s, s:s, s:o, s:o, s:I, s:I}", "event", u->is_end ? "end" : "begin",
                            "name", ep_cli_span_names[u->kind], "process",
                            process_json(model, u->process), "call", hex(u->call), "sub",
                            (json_int_t)u->sub, "time_ns", (json_int_t)u->time_ns));
    }
    return json_pack("{s:I, s:I, s:I, s:I, s:o}", "begins", (json_int_t)model->unmatched_begins,
                     "ends", (json_int_t)model->unmatched_ends, "cut_begins",
                     (json_int_t)model->cut_begins, "cut_ends", (json_int_t)model->cut_ends,
                     "listed", list);
}

static json_t *skipped_json(const ep_cli_recording *recording)
{
    json_t *list = json_array();
    for (size_t i = 0; i < recording->skipped_count && i < EP_CLI_TRACE_SKIPPED_MAX; i++) {
        const ep_cli_skipped *one = &recording->skipped[i];
        json_array_append_new(
            list, json_pack("{s:o, s:o, s:I}", "file", ep_cli_json_text(one->file), "why",
                            ep_cli_json_text(one->why), "bytes", (json_int_t)one->bytes));
    }
    return list;
}

static json_t *recordings_json(const ep_cli_trace_model *model)
{
    json_t *list = json_array();
    for (size_t i = 0; i < model->recordings_count; i++) {
        const ep_cli_recording *r = &model->recordings[i];
        json_array_append_new(
            list,
            json_pack("{s:o, s:o, s:I, s:I, s:I, s:I, s:o, s:I, s:o}", "path",
                      ep_cli_json_text(r->path), "host", ep_cli_json_text(r->host), "events",
                      (json_int_t)r->events_count, "discarded_events",
                      (json_int_t)r->discarded_events, "discarded_packets",
                      (json_int_t)r->discarded_packets, "clock_offset_ns", (json_int_t)r->offset_ns,
                      "clock_error_ns",
                      r->offset_error_ns >= 0 ? json_integer(r->offset_error_ns) : json_null(),
                      "streams_skipped", (json_int_t)r->skipped_count, "skipped", skipped_json(r)));
    }
    return list;
}

static json_t *processes_json(const ep_cli_trace_model *model)
{
    json_t *list = json_array();
    for (size_t i = 0; i < model->processes_count; i++) {
        const ep_cli_trace_process *p = &model->processes[i];
        json_array_append_new(list, json_pack("{s:o, s:o, s:i, s:I, s:I}", "node",
                                              ep_cli_json_text(model->names[p->node]), "thread",
                                              ep_cli_json_text(model->names[p->thread]), "pid",
                                              (int)p->pid, "recording", (json_int_t)p->recording,
                                              "spans", (json_int_t)p->spans_count));
    }
    return list;
}

json_t *ep_cli_trace_report_json(const ep_cli_trace_model *model,
                                 const ep_cli_trace_figures *figures, size_t top)
{
    char summary[EP_CLI_TRACE_SUMMARY_BYTES];
    json_t *calls = stat_json(&figures->calls);
    if (calls != NULL) {
        json_object_set_new(calls, "failed", json_integer((json_int_t)figures->failed));
        json_object_set_new(calls, "unused", json_integer((json_int_t)figures->unused));
    }
    ep_cli_trace_summary(model, figures, summary);
    return json_pack("{s:s, s:o, s:o, s:o, s:o, s:o, s:o, s:I, s:I, s:b, s:I, s:I, s:I, s:I, s:I, "
                     "s:o, s:o, s:o, s:o, s:o}",
                     "summary", summary, "calls", calls, "critical_path",
                     critical_path_json(figures), "slowest_node", slowest_node_json(model, figures),
                     "failures", failures_json(model, figures), "recordings",
                     recordings_json(model), "processes", processes_json(model), "events",
                     (json_int_t)model->events_count, "spans", (json_int_t)model->spans_count,
                     "cut", (int)model->cut, "traces", (json_int_t)figures->traces_count,
                     "requests", (json_int_t)figures->requests_count, "requests_ns",
                     (json_int_t)figures->requests_ns, "exchanges_without_serve",
                     (json_int_t)figures->unserved, "serves_without_exchange",
                     (json_int_t)figures->unasked, "stages", stages_json(figures), "peers",
                     peers_json(model, figures), "slowest", requests_json(model, figures, top),
                     "experts", experts_json(figures, top), "unmatched", unmatched_json(model));
}
