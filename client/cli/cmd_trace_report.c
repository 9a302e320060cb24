/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl trace report and expertctl trace export. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "command_table.h"
#include "origin.h"
#include "trace/trace_export.h"
#include "trace/trace_load.h"
#include "trace/trace_report.h"

#define EVENTS_MAX_MAX 100000000ULL
#define TOP_DEFAULT 10
#define TOP_MAX 10000
#define PATH_BYTES 4096

typedef enum export_format { EXPORT_PERFETTO, EXPORT_HTML } export_format;

static struct {
    const char *dirs[EP_CLI_TRACE_RECORDINGS_MAX];
    size_t dirs_count;
    ep_trace_id trace;
    uint64_t events_max;
    uint64_t top;       /* report */
    export_format kind; /* export */
    const char *file;   /* export */
} wanted = {.events_max = EP_CLI_TRACE_EVENTS_MAX_DEFAULT, .top = TOP_DEFAULT};
static bool kind_given;

static void take_trace(struct argp_state *state, const char *option, char *arg)
{
    ep_trace_id id = {0};
    char half[17] = "";
    bool good = strlen(arg) == 32 && strspn(arg, "0123456789abcdefABCDEF") == 32;
    if (good) {
        memcpy(half, arg, 16);
        id.high = strtoull(half, NULL, 16);
        id.low = strtoull(arg + 16, NULL, 16);
    }
    if (!good || (id.high == 0 && id.low == 0)) {
        argp_error(state, "%s is '%s', allowed: 32 hexadecimal digits, not all 0",
                   ep_cli_setting_name(option, arg), arg);
    }
    wanted.trace = id;
}

static void take_dir(struct argp_state *state, char *text)
{
    if (wanted.dirs_count == EP_CLI_TRACE_RECORDINGS_MAX) {
        argp_error(state, "more than %d recordings", EP_CLI_TRACE_RECORDINGS_MAX);
    }
    wanted.dirs[wanted.dirs_count++] = text;
}

static void check_dirs(struct argp_state *state)
{
    if (wanted.dirs_count == 0) {
        argp_error(state, "no recording given");
    }
}

#define EVENTS_MAX_HELP                                                                            \
    "Read at most so many events, 1..100000000 (default 2000000). An event costs up to 120 bytes " \
    "of memory"

static ep_err load(ep_cli_trace_model **out_model, ep_error *out_error)
{
    ep_cli_trace_model *model = NULL;
    ep_err err =
        ep_cli_trace_load(wanted.dirs, wanted.dirs_count, wanted.events_max, &model, out_error);
    err = err != EP_OK ? err : ep_cli_trace_model_finish(model, wanted.trace, out_error);
    if (err == EP_OK && model->spans_count == 0 &&
        (wanted.trace.high != 0 || wanted.trace.low != 0)) {
        err = ep_error_set(out_error, EP_ERR_NOT_FOUND,
                           "no span has that --trace-id; `expertctl trace report` lists those of "
                           "the slowest requests");
    }
    if (err != EP_OK) {
        ep_cli_trace_model_destroy(model);
        return err;
    }
    *out_model = model;
    return EP_OK;
}

static void warn(const char *program, const ep_cli_trace_model *model)
{
    ep_cli_trace_warn_skipped(program, model);
    if (model->cut) {
        fprintf(stderr,
                "%s: only the first %" PRIu64 " events were read; --events-max allows more\n",
                program, model->events_count);
    }
}

/* ---- report ---- */

static const ep_cli_option report_rows[] = {
    {"trace-id", 't', "ID",
     "Only spans of this trace (32 hexadecimal digits) and the jobs that worked for it", 1,
     .take = take_trace},
    {"top", 'n', "N", "So many slowest requests and experts, 1..10000 (default 10)", 1,
     .u64 = &wanted.top, .min = 1, .max = TOP_MAX},
    {"events-max", 'e', "N", EVENTS_MAX_HELP, 2, .u64 = &wanted.events_max, .min = 1,
     .max = EVENTS_MAX_MAX},
};

static ep_err run_report(ep_cli_call *call, ep_error *out_error)
{
    ep_cli_trace_model *model = NULL;
    ep_cli_trace_figures figures = {0};
    ep_err err = load(&model, out_error);
    err = err != EP_OK ? err : ep_cli_trace_figures_make(model, &figures, out_error);
    if (err == EP_OK) {
        warn(call->program, model);
        call->failed =
            !(ep_cli_output_format == EP_CLI_JSON
                  ? ep_cli_json_print(ep_cli_trace_report_json(model, &figures, wanted.top), stdout)
                  : ep_cli_trace_report_print(model, &figures, wanted.top, stdout));
    }
    ep_cli_trace_figures_free(&figures);
    ep_cli_trace_model_destroy(model);
    return err;
}

const ep_cli_command ep_cli_trace_report_command = {
    .name = "report",
    .help = "stages, peers, slowest requests and experts of recordings",
    .args = "DIR...",
    .doc =
        "Says where the time of recorded token batches went.\vSeveral recordings, of several "
        "hosts, are put on one clock by the remote calls between them. Percentiles are by nearest "
        "rank. The critical path of a request is what it waited for, walked back from its end.\n\n"
        "Examples:\n"
        "  expertctl trace report /tmp/rec\n"
        "  expertctl trace report host-a/rec host-b/rec -o json\n"
        "  expertctl trace report /tmp/rec --trace-id "
        "0af7651916cd43dd8448eb211c80319c\n\n" EP_CLI_EXIT_HELP,
    .options = {.rows = report_rows, .count = EP_ARRAY_COUNT(report_rows), .check = check_dirs},
    .uses = {&ep_cli_output_options},
    .take_argument = take_dir,
    .run = run_report,
};

/* ---- export ---- */

static const ep_cli_option export_rows[] = {
    {"format", 'f', "FORMAT", "perfetto or html", 1, .word = &wanted.kind, .words = "perfetto|html",
     .given = &kind_given, .required = true},
    {"output", 'o', "FILE", "The file to write; it appears whole or not at all", 1,
     .text = &wanted.file, .max = PATH_BYTES - 16, .required = true},
    {"trace-id", 't', "ID",
     "Only spans of this trace (32 hexadecimal digits) and the jobs that worked for it", 1,
     .take = take_trace},
    {"events-max", 'e', "N", EVENTS_MAX_HELP, 2, .u64 = &wanted.events_max, .min = 1,
     .max = EVENTS_MAX_MAX},
};

/* Data of an export. Viewers get all spans on lanes; the HTML page arranges its spans itself. */
typedef struct export_data {
    ep_cli_trace_model *model;
    ep_cli_trace_figures figures;
    ep_cli_trace_lanes lanes;
    ep_cli_trace_pick pick;
} export_data;

static ep_err make_data(export_data *out_data, ep_error *out_error)
{
    ep_err err = load(&out_data->model, out_error);
    if (err != EP_OK || wanted.kind != EXPORT_HTML) {
        return err != EP_OK ? err
                            : ep_cli_trace_lanes_make(out_data->model, &out_data->lanes, out_error);
    }
    err = ep_cli_trace_figures_make(out_data->model, &out_data->figures, out_error);
    return err != EP_OK
               ? err
               : ep_cli_trace_pick_make(out_data->model, &out_data->figures,
                                        EP_CLI_TRACE_PAGE_SPANS, &out_data->pick, out_error);
}

static ep_err write_file(const export_data *data, ep_error *out_error)
{
    char part[PATH_BYTES];
    snprintf(part, sizeof(part), "%s.part", wanted.file);
    FILE *out = fopen(part, "w");
    if (out == NULL) {
        return ep_error_set(out_error, EP_ERR_IO, "%s: %s", part, strerror(errno));
    }
    bool good = wanted.kind == EXPORT_HTML
                    ? ep_cli_trace_write_html(data->model, &data->figures, &data->pick, out)
                    : ep_cli_trace_write_perfetto(data->model, &data->lanes, out);
    good = fclose(out) == 0 && good;
    if (!good || rename(part, wanted.file) != 0) {
        int number = errno;
        unlink(part);
        return ep_error_set(out_error, EP_ERR_IO, "cannot write %s: %s", wanted.file,
                            strerror(number));
    }
    return EP_OK;
}

static void say_written(const export_data *data)
{
    if (wanted.kind == EXPORT_HTML) {
        printf("%s: %zu of %zu spans, %zu of %zu calls; its figures count all\n", wanted.file,
               data->pick.spans_count, data->model->spans_count, data->pick.calls_count,
               data->figures.requests_count);
        return;
    }
    printf("%s: %zu spans in %zu lanes\n", wanted.file,
           data->model->spans_count - data->lanes.left_out, data->lanes.lanes_count);
    if (data->lanes.left_out > 0) {
        printf("left out: %zu spans that overlap more than %d others of their kind\n",
               data->lanes.left_out, EP_CLI_TRACE_LANES_MAX);
    }
}

static ep_err run_export(ep_cli_call *call, ep_error *out_error)
{
    export_data data = {0};
    ep_err err = make_data(&data, out_error);
    err = err != EP_OK ? err : write_file(&data, out_error);
    if (err == EP_OK) {
        warn(call->program, data.model);
        say_written(&data);
    }
    ep_cli_trace_lanes_free(&data.lanes);
    ep_cli_trace_pick_free(&data.pick);
    ep_cli_trace_figures_free(&data.figures);
    ep_cli_trace_model_destroy(data.model);
    return err;
}

const ep_cli_command ep_cli_trace_export_command = {
    .name = "export",
    .help = "recordings for Perfetto, or as an HTML page",
    .args = "DIR...",
    .doc = "Writes recordings for a viewer.\v"
           "perfetto     for ui.perfetto.dev: tracks per process "
           "and lane, flows from client to node and back, counters\n"
           "html         one page: what takes time, which node is slow, what failed\n\n"
           "Examples:\n"
           "  expertctl trace export /tmp/rec --format perfetto -o /tmp/rec.pftrace\n"
           "  expertctl trace export /tmp/rec --format html -o /tmp/rec.html\n\n" EP_CLI_EXIT_HELP,
    .options = {.rows = export_rows, .count = EP_ARRAY_COUNT(export_rows), .check = check_dirs},
    .take_argument = take_dir,
    .run = run_export,
};
