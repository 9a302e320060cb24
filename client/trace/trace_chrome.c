/* SPDX-License-Identifier: Apache-2.0 */
/* Chrome's JSON trace format: an array of B and E events; pid is the process, tid its lane. */
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>

#include "trace/trace_export.h"
#include "trace/trace_report.h"

typedef struct writer {
    const ep_cli_trace_model *model;
    FILE *out;
    char **names; /* of the model, as JSON strings */
    const ep_cli_trace_lane *lane;
} writer;

static void write_us(FILE *out, int64_t ns)
{
    fprintf(out, "%" PRId64 ".%03d", ns / 1000, (int)(ns % 1000 < 0 ? -(ns % 1000) : ns % 1000));
}

static bool write_step(uint32_t index, bool is_end, void *arg)
{
    writer *w = arg;
    const ep_cli_span *span = &w->model->spans[index];
    char trace[EP_CLI_TRACE_ID_BYTES];
    fprintf(w->out,
            ",\n{\"ph\":\"%s\",\"pid\":%" PRIu32 ",\"tid\":%" PRIu32 ",\"ts\":", is_end ? "E" : "B",
            w->lane->process + 1,
            (uint32_t)w->lane->group * EP_CLI_TRACE_LANES_MAX + w->lane->number + 1);
    write_us(w->out, is_end ? span->end_ns : span->begin_ns);
    if (!is_end) {
        ep_cli_trace_id_text(span->trace, trace);
        fprintf(w->out,
                ",\"cat\":\"expertd\",\"name\":\"%s\",\"args\":{\"trace_id\":\"%s\",\"call\":\"%"
                "016" PRIx64 "\",\"parent\":\"%016" PRIx64 "\",\"sub\":%" PRIu32
                ",\"rows\":%" PRIu32 ",\"layer\":%" PRId32 ",\"expert\":%" PRId32
                ",\"status\":%" PRId32 ",\"peer\":%s}",
                ep_cli_span_names[span->kind], trace, span->call, span->parent, span->sub,
                span->rows, span->layer, span->expert, span->status, w->names[span->peer]);
    }
    return fputc('}', w->out) != EOF;
}

static void write_name(writer *w, const char *what, uint32_t pid, uint32_t tid, const char *name)
{
    json_t *args = json_pack("{s:s}", "name", name);
    char *text = args != NULL ? json_dumps(args, JSON_COMPACT | JSON_ENSURE_ASCII) : NULL;
    fprintf(w->out,
            "%s{\"ph\":\"M\",\"name\":\"%s\",\"pid\":%" PRIu32 ",\"tid\":%" PRIu32 ",\"args\":%s}",
            pid == 1 && tid == 0 ? "\n" : ",\n", what, pid, tid, text != NULL ? text : "{}");
    free(text);
    json_decref(args);
}

static bool make_names(writer *w)
{
    w->names = calloc(w->model->names_count, sizeof(*w->names));
    for (size_t i = 0; w->names != NULL && i < w->model->names_count; i++) {
        json_t *name = json_string(w->model->names[i]);
        w->names[i] = name != NULL ? json_dumps(name, JSON_ENCODE_ANY | JSON_ENSURE_ASCII) : NULL;
        json_decref(name);
        if (w->names[i] == NULL) {
            return false;
        }
    }
    return w->names != NULL;
}

bool ep_cli_trace_write_chrome(const ep_cli_trace_model *model, const ep_cli_trace_lanes *lanes,
                               FILE *out)
{
    writer w = {.model = model, .out = out};
    char name[2 * EP_CLI_TRACE_NAME_BYTES];
    bool good = make_names(&w);
    fprintf(out, "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[");
    for (uint32_t i = 0; i < model->processes_count && good; i++) {
        ep_cli_trace_process_name(model, i, true, name, sizeof(name));
        write_name(&w, "process_name", i + 1, 0, name);
    }
    for (uint32_t i = 0; i < lanes->lanes_count && good; i++) {
        w.lane = &lanes->lanes[i];
        snprintf(name, sizeof(name), "%s %" PRIu32, ep_cli_lane_names[w.lane->group],
                 w.lane->number);
        write_name(&w, "thread_name", w.lane->process + 1,
                   (uint32_t)w.lane->group * EP_CLI_TRACE_LANES_MAX + w.lane->number + 1, name);
        good = ep_cli_trace_lane_walk(model, lanes, i, write_step, &w);
    }
    fprintf(out, "\n]}\n");
    for (size_t i = 0; w.names != NULL && i < model->names_count; i++) {
        free(w.names[i]);
    }
    free(w.names);
    return good && ferror(out) == 0;
}
