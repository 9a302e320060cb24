/* SPDX-License-Identifier: Apache-2.0 */
/* One HTML file: the page of trace_page.html around the data as JSON, with nothing in it that could end a script. */
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "output.h"
#include "trace_export.h"
#include "trace_report.h"

#define TOP_REQUESTS 30
#define EXPERTS_MAX 65536
#define MARK "@DATA@"

extern const char ep_cli_trace_page[];

/* '<' only occurs in strings of JSON; as \u003c it cannot begin a tag. */
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

static json_t *texts(const char *const *list, size_t count)
{
    json_t *array = json_array();
    for (size_t i = 0; i < count; i++) {
        json_array_append_new(array, json_string(list[i]));
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

static json_t *lanes_json(const ep_cli_trace_lanes *lanes)
{
    json_t *array = json_array();
    for (size_t i = 0; i < lanes->lanes_count; i++) {
        const ep_cli_trace_lane *l = &lanes->lanes[i];
        json_array_append_new(array, json_pack("[i, i, i]", (int)l->process, (int)l->group, (int)l->number));
    }
    return array;
}

static json_t *experts_json(const ep_cli_trace_figures *f)
{
    json_t *array = json_array();
    for (size_t i = 0; i < f->experts_count && i < EXPERTS_MAX; i++) {
        const ep_cli_trace_expert *e = &f->experts[i];
        json_array_append_new(array, json_pack("[i, i, I, I]", (int)e->layer, (int)e->expert, (json_int_t)e->rows,
                                               (json_int_t)e->busy_ns));
    }
    return array;
}

/* ---- spans ---- */

static int compare_length(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a;
    int64_t y = *(const int64_t *)b;
    return x > y ? -1 : x < y;
}

/* Spans at least this long are the EP_CLI_TRACE_PAGE_SPANS longest (with all of equal length). -1: no memory. */
static int64_t shortest_kept(const ep_cli_trace_model *model)
{
    if (model->spans_count <= EP_CLI_TRACE_PAGE_SPANS) {
        return 0;
    }
    int64_t *lengths = malloc(model->spans_count * sizeof(*lengths));
    if (lengths == NULL) {
        return -1;
    }
    for (size_t i = 0; i < model->spans_count; i++) {
        lengths[i] = model->spans[i].end_ns - model->spans[i].begin_ns;
    }
    qsort(lengths, model->spans_count, sizeof(*lengths), compare_length);
    int64_t shortest = lengths[EP_CLI_TRACE_PAGE_SPANS - 1];
    free(lengths);
    return shortest;
}

static int compare_trace(const void *a, const void *b)
{
    const ep_trace_id *x = a;
    const ep_trace_id *y = b;
    return x->high != y->high ? (x->high < y->high ? -1 : 1) : (x->low > y->low) - (x->low < y->low);
}

/* The distinct trace ids of spans at least so long, sorted; a span names its own by index. */
static ep_trace_id *collect_traces(const ep_cli_trace_model *model, int64_t shortest, size_t *out_count)
{
    ep_trace_id *ids = malloc((model->spans_count + 1) * sizeof(*ids));
    size_t all = 0;
    size_t count = 0;
    for (size_t i = 0; ids != NULL && i < model->spans_count; i++) {
        if (model->spans[i].end_ns - model->spans[i].begin_ns >= shortest) {
            ids[all++] = model->spans[i].trace;
        }
    }
    if (ids != NULL) {
        qsort(ids, all, sizeof(*ids), compare_trace);
    }
    for (size_t i = 0; ids != NULL && i < all; i++) {
        if (count == 0 || compare_trace(&ids[count - 1], &ids[i]) != 0) {
            ids[count++] = ids[i];
        }
    }
    *out_count = count;
    return ids;
}

static void write_traces(const ep_trace_id *ids, size_t count, FILE *out)
{
    fprintf(out, "\"traces\":[");
    for (size_t i = 0; i < count; i++) {
        char text[EP_CLI_TRACE_ID_BYTES];
        ep_cli_trace_id_text(ids[i], text);
        fprintf(out, "%s\"%s\"", i > 0 ? "," : "", text);
    }
    fprintf(out, "],\n");
}

static bool write_spans(const ep_cli_trace_model *model, const ep_cli_trace_lanes *lanes, FILE *out)
{
    size_t ids_count;
    size_t written = 0;
    int64_t shortest = shortest_kept(model);
    ep_trace_id *ids = collect_traces(model, shortest, &ids_count);
    if (shortest < 0 || ids == NULL) {
        free(ids);
        return false;
    }
    write_traces(ids, ids_count, out);
    fprintf(out, "\"spans\":[");
    for (size_t i = 0; i < model->spans_count && written < EP_CLI_TRACE_PAGE_SPANS; i++) {
        const ep_cli_span *s = &model->spans[i];
        if (lanes->lane_of[i] == EP_CLI_TRACE_NONE || s->end_ns - s->begin_ns < shortest) {
            continue;
        }
        const ep_trace_id *id = bsearch(&s->trace, ids, ids_count, sizeof(*ids), compare_trace);
        fprintf(out,
                "%s[%" PRIu32 ",%d,%" PRId64 ",%" PRId64 ",%td,\"%016" PRIx64 "\",\"%016" PRIx64 "\",%" PRIu32
                ",%" PRIu32 ",%" PRId32 ",%" PRId32 ",%" PRId32 ",%" PRIu32 "]",
                written++ > 0 ? ",\n" : "", lanes->lane_of[i], (int)s->kind, s->begin_ns - model->spans[0].begin_ns,
                s->end_ns - s->begin_ns, id - ids, s->call, s->parent, s->sub, s->rows, s->layer, s->expert,
                s->status, s->peer);
    }
    fprintf(out, "]}");
    free(ids);
    return ferror(out) == 0;
}

static bool write_data(const ep_cli_trace_model *model, const ep_cli_trace_lanes *lanes,
                       const ep_cli_trace_figures *figures, FILE *out)
{
    fprintf(out, "{\"total\":%zu,\"left_out\":%zu,\"experts_total\":%zu,\"start_ns\":%" PRId64 ",\n", model->spans_count,
            lanes->left_out, figures->experts_count, model->spans_count > 0 ? model->spans[0].begin_ns : 0);
    return write_json("report", ep_cli_trace_report_json(model, figures, TOP_REQUESTS), out) &&
           write_json("names", texts((const char *const *)model->names, model->names_count), out) &&
           write_json("kinds", texts(ep_cli_span_names, EP_CLI_SPAN_KINDS), out) &&
           write_json("groups", texts(ep_cli_lane_names, EP_CLI_LANE_GROUPS), out) &&
           write_json("processes", processes(model), out) && write_json("lanes", lanes_json(lanes), out) &&
           write_json("experts", experts_json(figures), out) && write_spans(model, lanes, out);
}

bool ep_cli_trace_write_html(const ep_cli_trace_model *model, const ep_cli_trace_lanes *lanes,
                             const ep_cli_trace_figures *figures, FILE *out)
{
    const char *mark = strstr(ep_cli_trace_page, MARK);
    return mark != NULL &&
           fwrite(ep_cli_trace_page, 1, (size_t)(mark - ep_cli_trace_page), out) ==
               (size_t)(mark - ep_cli_trace_page) &&
           write_data(model, lanes, figures, out) && fputs(mark + strlen(MARK), out) != EOF && ferror(out) == 0;
}
