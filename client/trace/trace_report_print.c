/* SPDX-License-Identifier: Apache-2.0 */
/* The report as tables. */
#include <inttypes.h>
#include <stdlib.h>

#include "cli/output.h"
#include "trace/trace_report.h"

#define UNMATCHED_SHOWN 10
#define NS_PER_US 1e3
#define NS_PER_MS 1e6

static void us_cell(ep_cli_table *out, int64_t ns)
{
    ep_cli_table_cell(out, "%.1f", (double)ns / NS_PER_US);
}

static bool print_stages(const ep_cli_trace_figures *f, FILE *out)
{
    ep_cli_table *table =
        ep_cli_table_create("STAGE|1>COUNT|>P50 US|>P99 US|2>MAX US|3>TOTAL MS|>SHARE %");
    for (int kind = 0; kind <= EP_CLI_SPAN_KINDS; kind++) {
        bool derived = kind == EP_CLI_SPAN_KINDS;
        const ep_cli_trace_stat *stat = derived ? &f->network : &f->stages[kind];
        if (stat->count == 0) {
            continue;
        }
        ep_cli_table_cell(table, "%s", derived ? "network" : ep_cli_span_names[kind]);
        ep_cli_table_cell(table, "%" PRIu64, stat->count);
        us_cell(table, stat->p50_ns);
        us_cell(table, stat->p99_ns);
        us_cell(table, stat->max_ns);
        ep_cli_table_cell(table, "%.3f", (double)stat->total_ns / NS_PER_MS);
        if (f->requests_ns > 0) {
            ep_cli_table_cell(table, "%.1f",
                              100.0 * (double)stat->total_ns / (double)f->requests_ns);
        } else {
            ep_cli_table_cell(table, "-");
        }
    }
    fputc('\n', out);
    ep_cli_line(out, "Stages (network is exchange minus serve; share of all requests' time, above "
                     "100 when in parallel)");
    return ep_cli_table_print(table, out);
}

static bool print_peers(const ep_cli_trace_model *model, const ep_cli_trace_figures *f, FILE *out)
{
    ep_cli_table *table =
        ep_cli_table_create("PEER|4>EXCHANGES|>P50 US|>P99 US|2>MAX US|3>SERVE P50|3>NETWORK "
                            "P50|6>FAILED|1>UNUSED|5>SLOWEST OF|7>WAITED MS");
    for (size_t i = 0; i < f->peers_count; i++) {
        const ep_cli_trace_peer *peer = &f->peers[i];
        ep_cli_table_cell(table, "%s", peer->name != 0 ? model->names[peer->name] : "-");
        ep_cli_table_cell(table, "%" PRIu64, peer->exchange.count);
        us_cell(table, peer->exchange.p50_ns);
        us_cell(table, peer->exchange.p99_ns);
        us_cell(table, peer->exchange.max_ns);
        us_cell(table, peer->serve.p50_ns);
        us_cell(table, peer->network.p50_ns);
        ep_cli_table_cell(table, "%" PRIu64, peer->failed);
        ep_cli_table_cell(table, "%" PRIu64, peer->unused);
        ep_cli_table_cell(table, "%" PRIu64, peer->slowest_of);
        ep_cli_table_cell(table, "%.3f", (double)peer->waited_ns / NS_PER_MS);
    }
    fputc('\n', out);
    ep_cli_line(out, "Peers (unused: another copy had answered; slowest of: requests that waited "
                     "longest for it)");
    return ep_cli_table_print(table, out);
}

/* The greatest part, and its share. */
static void mostly_cell(ep_cli_table *out, const ep_cli_trace_path *path, int64_t whole_ns)
{
    int most = 0;
    for (int part = 1; part < EP_CLI_PATH_PARTS; part++) {
        most = path->parts_ns[part] > path->parts_ns[most] ? part : most;
    }
    ep_cli_table_cell(out, "%s %.0f%%", ep_cli_path_names[most],
                      whole_ns > 0 ? 100.0 * (double)path->parts_ns[most] / (double)whole_ns : 0.0);
}

static bool print_requests(const ep_cli_trace_model *model, const ep_cli_trace_figures *f,
                           size_t top, FILE *out)
{
    ep_cli_table *table = ep_cli_table_create(
        ">TRACE "
        "ID|7>LAYER|6>TOKENS|>US|9MOSTLY|3>PLAN|3>PACK|5>NETWORK|3>DECODE|5>QUEUE|5>JOB|3>REPLY|3>"
        "NODE|3>GATEWAY|4>UNSERVED|4>LATE|4>COMBINE|3>CLIENT|8PEER");
    for (size_t i = 0; i < f->requests_count && i < top; i++) {
        const ep_cli_span *span = &model->spans[f->requests[i]];
        char trace[EP_CLI_TRACE_ID_BYTES];
        ep_cli_trace_id_text(span->trace, trace);
        ep_cli_table_cell(table, "%s", trace);
        ep_cli_table_cell(table, "%" PRId32, span->layer);
        ep_cli_table_cell(table, "%" PRIu32, span->rows);
        us_cell(table, span->end_ns - span->begin_ns);
        mostly_cell(table, &f->paths[i], span->end_ns - span->begin_ns);
        for (int part = 0; part < EP_CLI_PATH_PARTS; part++) {
            us_cell(table, f->paths[i].parts_ns[part]);
        }
        ep_cli_table_cell(table, "%s", model->names[f->paths[i].peer]);
    }
    fputc('\n', out);
    ep_cli_line(out, "Slowest requests: where their time went along the critical path (us), and "
                     "the slowest peer");
    return ep_cli_table_print(table, out);
}

static bool print_experts(const ep_cli_trace_figures *f, size_t top, FILE *out)
{
    ep_cli_table *table = ep_cli_table_create(">LAYER|>EXPERT|>JOBS|>ROWS|>BUSY MS");
    for (size_t i = 0; i < f->experts_count && i < top; i++) {
        const ep_cli_trace_expert *e = &f->experts[i];
        ep_cli_table_cell(table, "%" PRId32, e->layer);
        ep_cli_table_cell(table, "%" PRId32, e->expert);
        ep_cli_table_cell(table, "%" PRIu64, e->jobs);
        ep_cli_table_cell(table, "%" PRIu64, e->rows);
        ep_cli_table_cell(table, "%.3f", (double)e->busy_ns / NS_PER_MS);
    }
    fputc('\n', out);
    ep_cli_line(out, "Experts with the most rows (of %zu that worked)", f->experts_count);
    return ep_cli_table_print(table, out);
}

static void print_summary(const ep_cli_trace_model *model, const ep_cli_trace_figures *f, FILE *out)
{
    char said[EP_CLI_TRACE_SUMMARY_BYTES];
    ep_cli_trace_summary(model, f, said);
    ep_cli_line(out, "%s", said);
    fputc('\n', out);
    ep_cli_line(out,
                "%zu spans of %" PRIu64 " events in %zu processes; %zu requests, %" PRIu64
                " trace ids%s",
                model->spans_count, model->events_count, model->processes_count, f->requests_count,
                f->traces_count, model->cut ? "; cut at --events-max" : "");
    for (size_t i = 0; i < model->recordings_count; i++) {
        const ep_cli_recording *r = &model->recordings[i];
        char clock[96] = "";
        if (r->offset_error_ns < 0) {
            snprintf(clock, sizeof(clock), ", clock not fitted (no exchange with the others)");
        } else if (i > 0) {
            snprintf(clock, sizeof(clock), ", clock ahead by %.1f us (+- %.1f)",
                     (double)r->offset_ns / NS_PER_US, (double)r->offset_error_ns / NS_PER_US);
        }
        ep_cli_line(out,
                    "%s: host %s, %" PRIu64 " events, discarded: %" PRIu64 " events, %" PRIu64
                    " packets%s",
                    r->path, r->host[0] != '\0' ? r->host : "unknown", r->events_count,
                    r->discarded_events, r->discarded_packets, clock);
    }
}

static void print_unmatched(const ep_cli_trace_model *model, const ep_cli_trace_figures *f,
                            FILE *out)
{
    fputc('\n', out);
    ep_cli_line(out,
                "unmatched: %" PRIu64 " begins, %" PRIu64 " ends; exchanges without serve: %" PRIu64
                "; serves without exchange: %" PRIu64,
                model->unmatched_begins, model->unmatched_ends, f->unserved, f->unasked);
    ep_cli_line(out,
                "cut by the edges of the recording: %" PRIu64 " spans at its end, %" PRIu64
                " at its begin",
                model->cut_begins, model->cut_ends);
    for (size_t i = 0; i < model->unmatched_count && i < UNMATCHED_SHOWN; i++) {
        const ep_cli_unmatched *u = &model->unmatched[i];
        char name[2 * EP_CLI_TRACE_NAME_BYTES];
        ep_cli_trace_process_name(model, u->process, true, name, sizeof(name));
        ep_cli_line(out, "  %s_%s  %s  call %016" PRIx64 " sub %" PRIu32,
                    ep_cli_span_names[u->kind], u->is_end ? "end" : "begin", name, u->call, u->sub);
    }
    if (model->unmatched_count > UNMATCHED_SHOWN) {
        ep_cli_line(out, "  ... (-o json lists up to %d)", EP_CLI_TRACE_LISTED_MAX);
    }
}

bool ep_cli_trace_report_print(const ep_cli_trace_model *model, const ep_cli_trace_figures *figures,
                               size_t top, FILE *out)
{
    print_summary(model, figures, out);
    bool good = print_stages(figures, out);
    good = (figures->peers_count == 0 || print_peers(model, figures, out)) && good;
    good = (figures->requests_count == 0 || print_requests(model, figures, top, out)) && good;
    good = (figures->experts_count == 0 || print_experts(figures, top, out)) && good;
    print_unmatched(model, figures, out);
    return good && ferror(out) == 0;
}
