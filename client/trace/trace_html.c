/* SPDX-License-Identifier: Apache-2.0 */
/* Writes one HTML file: trace_page.html with its scripts and the data as JSON. The data cannot
 * contain the end of a script. */
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "cli/output.h"
#include "trace/trace_export.h"
#include "trace/trace_report.h"

#define EXPERTS_MAX 65536
#define NAMES_MAX 4096 /* peers; the last is "(too many names)" */
#define STATUS_MAX 64

extern const char ep_cli_trace_page_html[];
extern const char ep_cli_trace_page_data_js[];
extern const char ep_cli_trace_page_summary_js[];
extern const char ep_cli_trace_page_timeline_js[];

/* In JSON '<' occurs only in strings; written as \u003c it cannot begin a tag. */
static int write_safe(const char *bytes, size_t count, void *arg)
{
    FILE *out = arg;
    for (size_t i = 0; i < count; i++) {
        if (bytes[i] == '<' ? fputs("\\u003c", out) == EOF : fputc(bytes[i], out) == EOF) {
            return -1;
        }
    }
    return 0;
}

static bool write_json(const char *key, json_t *taken_json, FILE *out)
{
    fprintf(out, "\"%s\":", key);
    bool good = taken_json != NULL &&
                json_dump_callback(taken_json, write_safe, out,
                                   JSON_COMPACT | JSON_ENSURE_ASCII | JSON_ENCODE_ANY) == 0;
    json_decref(taken_json);
    return good && fputs(",\n", out) != EOF;
}

static json_t *kinds(void)
{
    json_t *array = json_array();
    for (size_t i = 0; i < EP_CLI_SPAN_KINDS; i++) {
        json_array_append_new(array, json_string(ep_cli_span_names[i]));
    }
    return array;
}

static json_t *processes(const ep_cli_trace_model *model)
{
    json_t *array = json_array();
    for (uint32_t i = 0; i < model->processes_count; i++) {
        char name[2 * EP_CLI_TRACE_NAME_BYTES];
        ep_cli_trace_process_name(model, i, true, name, sizeof(name));
        json_array_append_new(array, ep_cli_json_text(name));
    }
    return array;
}

static json_t *experts_json(const ep_cli_trace_figures *f)
{
    json_t *array = json_array();
    for (size_t i = 0; i < f->experts_count && i < EXPERTS_MAX; i++) {
        const ep_cli_trace_expert *e = &f->experts[i];
        json_array_append_new(array, json_pack("[i, i, I, I]", (int)e->layer, (int)e->expert,
                                               (json_int_t)e->rows, (json_int_t)e->busy_ns));
    }
    return array;
}

/* Names of error codes by number. */
static json_t *statuses(void)
{
    json_t *names = json_object();
    for (int number = 1; number < STATUS_MAX; number++) {
        ep_err status = ep_err_from_wire((uint32_t)number, EP_ERR_UNKNOWN);
        char key[16];
        snprintf(key, sizeof(key), "%d", number);
        json_object_set_new(names, key, json_string(ep_err_name(status)));
    }
    return names;
}

static json_t *bins_json(const ep_cli_trace_model *model, const ep_cli_trace_figures *f)
{
    json_t *array = json_array();
    for (size_t i = 0; i < f->bins_count; i++) {
        const ep_cli_trace_bin *bin = &f->bins[i];
        json_array_append_new(
            array, json_pack("[I, I, I, I, I, I, I, I]",
                             (json_int_t)(bin->begin_ns - model->spans[0].begin_ns),
                             (json_int_t)(bin->end_ns - model->spans[0].begin_ns),
                             (json_int_t)bin->calls.count, (json_int_t)bin->calls.p50_ns,
                             (json_int_t)bin->calls.p99_ns, (json_int_t)bin->calls.max_ns,
                             (json_int_t)bin->failed, (json_int_t)bin->hedged));
    }
    return array;
}

/* ---- calls and spans ---- */

typedef struct writer {
    const ep_cli_trace_model *model;
    const ep_cli_trace_figures *figures;
    const ep_cli_trace_pick *pick;
    uint32_t *name_of;  /* [names_count]: number in the page; EP_CLI_TRACE_NONE */
    uint32_t *call_of;  /* [requests_count]: number in the page */
    uint32_t *spans_of; /* [requests_count]: its spans, kept or not */
    json_t *names;
    FILE *out;
} writer;

static uint32_t name_of(writer *w, uint32_t name)
{
    if (w->name_of[name] == EP_CLI_TRACE_NONE) {
        size_t count = json_array_size(w->names);
        if (count >= NAMES_MAX) {
            return NAMES_MAX - 1;
        }
        const char *text = count == NAMES_MAX - 1 ? "(too many names)" : w->model->names[name];
        w->name_of[name] = (uint32_t)count;
        json_array_append_new(w->names, ep_cli_json_text(text));
    }
    return w->name_of[name];
}

static void write_call(writer *w, uint32_t request, size_t trace)
{
    const ep_cli_span *s = &w->model->spans[w->figures->requests[request]];
    const ep_cli_trace_path *path = &w->figures->paths[request];
    int64_t stages[EP_CLI_STAGES] = {0};
    for (int part = 0; part < EP_CLI_PATH_PARTS; part++) {
        stages[ep_cli_stage_of[part]] += path->parts_ns[part];
    }
    fprintf(w->out,
            "[\"%016" PRIx64 "\",%zu,%" PRId64 ",%" PRId64 ",%" PRIu32 ",%" PRId32 ",%" PRIu32
            ",%" PRId32 ",%d,%" PRIu32 ",%" PRId64 ",%" PRIu32 ",%" PRId64 ",%" PRIu32,
            s->call, trace, s->begin_ns - w->model->spans[0].begin_ns, s->end_ns - s->begin_ns,
            s->process, s->layer, s->rows, s->status, w->figures->hedged[request],
            name_of(w, path->peer), path->peer_ns, name_of(w, path->late_peer), path->late_ns,
            w->spans_of[request]);
    for (int stage = 0; stage < EP_CLI_STAGES; stage++) {
        fprintf(w->out, ",%" PRId64, stages[stage]);
    }
    fputc(']', w->out);
}

/* Calls are named by their index here. A trace id is written again after calls of another trace. */
static bool write_calls(writer *w)
{
    uint32_t calls = 0;
    const ep_trace_id *last = NULL;
    json_t *traces = json_array();
    fprintf(w->out, "\"calls\":[");
    for (size_t i = 0; i < w->figures->requests_count; i++) {
        uint32_t request = w->figures->in_time[i];
        const ep_trace_id *id = &w->model->spans[w->figures->requests[request]].trace;
        if (!w->pick->calls[request]) {
            continue;
        }
        if (last == NULL || last->high != id->high || last->low != id->low) {
            char text[EP_CLI_TRACE_ID_BYTES];
            ep_cli_trace_id_text(*id, text);
            json_array_append_new(traces, json_string(text));
            last = id;
        }
        fprintf(w->out, "%s", calls > 0 ? ",\n" : "");
        w->call_of[request] = calls++;
        write_call(w, request, json_array_size(traces) - 1);
    }
    fprintf(w->out, "],\n");
    return write_json("traces", traces, w->out);
}

/* Returns one number for a job, its kernels and its groups of rows; 0: none. */
static size_t job_of(const ep_cli_trace_model *model, const ep_cli_span *span)
{
    uint64_t job = span->kind == EP_CLI_SPAN_queue ? span->parent : span->call;
    size_t first;
    size_t count = span->kind == EP_CLI_SPAN_queue || span->kind == EP_CLI_SPAN_job ||
                           span->kind == EP_CLI_SPAN_kernel
                       ? ep_cli_trace_model_find(model, EP_CLI_SPAN_job, job, &first)
                       : 0;
    for (size_t i = 0; i < count; i++) {
        if (model->spans[model->by_call[first + i]].process == span->process) {
            return model->by_call[first + i] + 1;
        }
    }
    return 0;
}

/* Each begin time is the difference to the span before. */
static void write_spans(writer *w)
{
    const ep_cli_trace_model *model = w->model;
    int64_t last = model->spans_count > 0 ? model->spans[0].begin_ns : 0;
    bool any = false;
    fprintf(w->out, "\"spans\":[");
    for (size_t i = 0; i < model->spans_count; i++) {
        const ep_cli_span *s = &model->spans[i];
        if (!w->pick->spans[i]) {
            continue;
        }
        uint32_t owner = w->figures->owner_of[i];
        int call = owner != EP_CLI_TRACE_NONE && w->call_of[owner] != EP_CLI_TRACE_NONE
                       ? (int)w->call_of[owner]
                       : -1;
        fprintf(w->out,
                "%s[%" PRIu32 ",%d,%" PRId64 ",%" PRId64 ",%d,%zu,%" PRId32 ",%" PRIu32 ",%" PRId32
                ",%" PRId32 ",%" PRId32 ",%d,%" PRIu32 "]",
                any ? ",\n" : "", s->process, (int)s->kind, s->begin_ns - last,
                s->end_ns - s->begin_ns, call, job_of(model, s), s->tid, s->rows, s->layer,
                s->expert, s->status, s->unused, name_of(w, s->peer));
        last = s->begin_ns;
        any = true;
    }
    fprintf(w->out, "],\n");
}

static bool write_rows(writer *w)
{
    w->name_of = malloc(w->model->names_count * sizeof(*w->name_of));
    w->call_of = malloc((w->figures->requests_count + 1) * sizeof(*w->call_of));
    w->spans_of = calloc(w->figures->requests_count + 1, sizeof(*w->spans_of));
    w->names = json_array();
    bool good = w->name_of != NULL && w->call_of != NULL && w->spans_of != NULL && w->names != NULL;
    if (good) {
        for (size_t i = 0; i < w->model->spans_count; i++) {
            uint32_t owner = w->figures->owner_of[i];
            w->spans_of[owner != EP_CLI_TRACE_NONE ? owner : w->figures->requests_count]++;
        }
        memset(w->name_of, 0xff, w->model->names_count * sizeof(*w->name_of));
        memset(w->call_of, 0xff, (w->figures->requests_count + 1) * sizeof(*w->call_of));
        name_of(w, 0); /* "" is 0 here too */
        good = write_calls(w);
        write_spans(w);
        good = good && write_json("names", json_incref(w->names), w->out);
    }
    free(w->name_of);
    free(w->call_of);
    free(w->spans_of);
    json_decref(w->names);
    return good;
}

static bool write_data(writer *w)
{
    const ep_cli_trace_model *model = w->model;
    FILE *out = w->out;
    fprintf(out,
            "{\"spans_kept\":%zu,\"calls_kept\":%zu,\"experts_total\":%zu,\"start_ns\":%" PRId64
            ",\n",
            w->pick->spans_count, w->pick->calls_count, w->figures->experts_count,
            model->spans_count > 0 ? model->spans[0].begin_ns : 0);
    return write_json("report", ep_cli_trace_report_json(model, w->figures, 0), out) &&
           write_json("kinds", kinds(), out) && write_json("statuses", statuses(), out) &&
           write_json("processes", processes(model), out) &&
           write_json("bins", bins_json(model, w->figures), out) &&
           write_json("experts", experts_json(w->figures), out) && write_rows(w) &&
           fputs("\"end\":0}", out) != EOF;
}

/* Writes the page up to the mark. Returns the text behind it, or NULL on failure. */
static const char *write_until(const char *page, const char *mark, FILE *out)
{
    const char *end = strstr(page, mark);
    bool good = end != NULL && fwrite(page, 1, (size_t)(end - page), out) == (size_t)(end - page);
    return good ? end + strlen(mark) : NULL;
}

bool ep_cli_trace_write_html(const ep_cli_trace_model *model, const ep_cli_trace_figures *figures,
                             const ep_cli_trace_pick *pick, FILE *out)
{
    writer w = {.model = model, .figures = figures, .pick = pick, .out = out};
    const char *rest = write_until(ep_cli_trace_page_html, "@DATA@", out);
    rest = rest != NULL && write_data(&w) ? write_until(rest, "@SCRIPT@", out) : NULL;
    return rest != NULL &&
           fprintf(out, "%s%s%s%s", ep_cli_trace_page_data_js, ep_cli_trace_page_summary_js,
                   ep_cli_trace_page_timeline_js, rest) > 0 &&
           ferror(out) == 0;
}
