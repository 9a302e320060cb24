/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl trace report and expertctl trace export. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "arguments.h"
#include "cmd_trace.h"
#include "exit_code.h"
#include "output.h"
#include "settings.h"
#include "trace/trace_export.h"
#include "trace/trace_read.h"
#include "trace/trace_report.h"

#define EVENTS_MAX_MAX 100000000ULL
#define TOP_DEFAULT 10
#define TOP_MAX 10000
#define PATH_BYTES 4096

typedef enum export_format { EXPORT_PERFETTO, EXPORT_HTML, EXPORT_CHROME } export_format;
static const char *const export_words[] = {"perfetto", "html", "chrome-json", NULL};

typedef struct read_options {
    const char *dirs[EP_CLI_TRACE_RECORDINGS_MAX];
    size_t dirs_count;
    ep_trace_id trace;
    uint64_t events_max;
    ep_cli_format format; /* report */
    size_t top;           /* report */
    export_format kind;   /* export */
    bool kind_given;
    const char *file; /* export */
} read_options;

static ep_trace_id parse_trace(struct argp_state *state, const char *arg)
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
                   ep_cli_setting_name("--trace-id", arg), arg);
    }
    return id;
}

static error_t parse_common(int key, char *arg, struct argp_state *state)
{
    read_options *options = state->input;
    switch (key) {
    case 't':
        options->trace = parse_trace(state, arg);
        return 0;
    case 'e':
        options->events_max = ep_cli_arg_whole(state, "--events-max", arg, 1, EVENTS_MAX_MAX);
        return 0;
    case ARGP_KEY_ARG:
        if (options->dirs_count == EP_CLI_TRACE_RECORDINGS_MAX) {
            argp_error(state, "more than %d recordings", EP_CLI_TRACE_RECORDINGS_MAX);
        }
        options->dirs[options->dirs_count++] = arg;
        return 0;
    case ARGP_KEY_END:
        if (options->dirs_count == 0) {
            argp_error(state, "no recording given");
        }
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

#define EVENTS_MAX_HELP                                                                            \
    "Read at most so many events, 1..100000000 (default 2000000). An event costs up to 120 bytes " \
    "of memory"

static ep_err load(const read_options *options, ep_cli_trace_model **out_model, ep_error *out_error)
{
    ep_cli_trace_model *model = NULL;
    ep_err err = ep_cli_trace_load(options->dirs, options->dirs_count, options->events_max, &model,
                                   out_error);
    err = err != EP_OK ? err : ep_cli_trace_model_finish(model, options->trace, out_error);
    if (err == EP_OK && model->spans_count == 0 &&
        (options->trace.high != 0 || options->trace.low != 0)) {
        err = ep_error_set(out_error, EP_ERR_NOT_FOUND,
                           "no span has that --trace-id; `expertctl trace report` lists "
                           "those of the slowest requests");
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

static error_t parse_report(int key, char *arg, struct argp_state *state)
{
    read_options *options = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &options->format;
        return 0;
    case 'n':
        options->top = (size_t)ep_cli_arg_whole(state, "--top", arg, 1, TOP_MAX);
        return 0;
    default:
        return parse_common(key, arg, state);
    }
}

static const struct argp_option report_list[] = {
    {"trace-id", 't', "ID", 0,
     "Only spans of this trace (32 hexadecimal digits) and the jobs that worked for it", 1},
    {"top", 'n', "N", 0, "So many slowest requests and experts, 1..10000 (default 10)", 1},
    {"events-max", 'e', "N", 0, EVENTS_MAX_HELP, 2},
    {0},
};
static const struct argp_child report_children[] = {{&ep_cli_output_argp, 0, NULL, 0}, {0}};
static const struct argp report_argp = {
    report_list,
    parse_report,
    "DIR...",
    "Says where the time of recorded token batches went.\v"
    "Several recordings, of several hosts, are put on one clock by the remote calls between them. "
    "Percentiles are by "
    "nearest rank. The critical path of a request is what it waited for, walked back from its "
    "end.\n\n"
    "Examples:\n"
    "  expertctl trace report /tmp/rec\n"
    "  expertctl trace report host-a/rec host-b/rec -o json\n"
    "  expertctl trace report /tmp/rec --trace-id "
    "0af7651916cd43dd8448eb211c80319c\n\n" EP_CLI_EXIT_HELP,
    report_children,
    NULL,
    NULL};

static int run_report(int argc, char **argv)
{
    static read_options options = {.events_max = EP_CLI_TRACE_EVENTS_MAX_DEFAULT,
                                   .top = TOP_DEFAULT};
    ep_cli_trace_model *model = NULL;
    ep_cli_trace_figures figures = {0};
    ep_error error;
    argp_parse(&report_argp, argc, argv, 0, NULL, &options);
    ep_err err = load(&options, &model, &error);
    err = err != EP_OK ? err : ep_cli_trace_figures_make(model, &figures, &error);
    int code = EP_CLI_EXIT_OK;
    if (err != EP_OK) {
        code = ep_cli_fail(argv[0], &error);
    } else {
        warn(argv[0], model);
        bool good =
            options.format == EP_CLI_JSON
                ? ep_cli_json_print(ep_cli_trace_report_json(model, &figures, options.top), stdout)
                : ep_cli_trace_report_print(model, &figures, options.top, stdout);
        code = good ? EP_CLI_EXIT_OK : EP_CLI_EXIT_FAILED;
    }
    ep_cli_trace_figures_free(&figures);
    ep_cli_trace_model_destroy(model);
    return code;
}

const ep_cli_command ep_cli_trace_report_command = {
    "report", "stages, peers, slowest requests and experts of recordings", &report_argp, run_report,
    NULL};

/* ---- export ---- */

static error_t parse_export(int key, char *arg, struct argp_state *state)
{
    read_options *options = state->input;
    switch (key) {
    case 'f':
        options->kind = (export_format)ep_cli_arg_word(state, "--format", arg, export_words);
        options->kind_given = true;
        return 0;
    case 'o':
        options->file = ep_cli_arg_text(state, "--output", arg, PATH_BYTES - 16);
        return 0;
    case ARGP_KEY_END:
        ep_cli_arg_required(state, "--format", options->kind_given ? options : NULL);
        ep_cli_arg_required(state, "--output", options->file);
        return parse_common(key, arg, state);
    default:
        return parse_common(key, arg, state);
    }
}

static const struct argp_option export_list[] = {
    {"format", 'f', "FORMAT", 0, "perfetto, html or chrome-json", 1},
    {"output", 'o', "FILE", 0, "The file to write; it appears whole or not at all", 1},
    {"trace-id", 't', "ID", 0,
     "Only spans of this trace (32 hexadecimal digits) and the jobs that worked for it", 1},
    {"events-max", 'e', "N", 0, EVENTS_MAX_HELP, 2},
    {0},
};
static const struct argp export_argp = {
    export_list,
    parse_export,
    "DIR...",
    "Writes recordings for a viewer.\v"
    "perfetto     for ui.perfetto.dev: tracks per process and lane, flows from client to node and "
    "back, counters\n"
    "html         one page: what takes time, which node is slow, what failed\n"
    "chrome-json  for chrome://tracing and older tools\n\n"
    "Examples:\n"
    "  expertctl trace export /tmp/rec --format perfetto -o /tmp/rec.pftrace\n"
    "  expertctl trace export /tmp/rec --format html -o /tmp/rec.html\n\n" EP_CLI_EXIT_HELP,
    NULL,
    NULL,
    NULL};

/* For viewers all spans are put on lanes; the page lays out the spans it holds itself. */
typedef struct export_data {
    ep_cli_trace_model *model;
    ep_cli_trace_figures figures;
    ep_cli_trace_lanes lanes;
    ep_cli_trace_pick pick;
} export_data;

static ep_err make_data(const read_options *options, export_data *out_data, ep_error *out_error)
{
    ep_err err = load(options, &out_data->model, out_error);
    if (err != EP_OK || options->kind != EXPORT_HTML) {
        return err != EP_OK ? err
                            : ep_cli_trace_lanes_make(out_data->model, &out_data->lanes, out_error);
    }
    err = ep_cli_trace_figures_make(out_data->model, &out_data->figures, out_error);
    return err != EP_OK
               ? err
               : ep_cli_trace_pick_make(out_data->model, &out_data->figures,
                                        EP_CLI_TRACE_PAGE_SPANS, &out_data->pick, out_error);
}

static bool write_as(export_format kind, const export_data *data, FILE *out)
{
    switch (kind) {
    case EXPORT_PERFETTO:
        return ep_cli_trace_write_perfetto(data->model, &data->lanes, out);
    case EXPORT_HTML:
        return ep_cli_trace_write_html(data->model, &data->figures, &data->pick, out);
    default:
        return ep_cli_trace_write_chrome(data->model, &data->lanes, out);
    }
}

static ep_err write_file(const read_options *options, const export_data *data, ep_error *out_error)
{
    char part[PATH_BYTES];
    snprintf(part, sizeof(part), "%s.part", options->file);
    FILE *out = fopen(part, "w");
    if (out == NULL) {
        return ep_error_set(out_error, EP_ERR_IO, "%s: %s", part, strerror(errno));
    }
    bool good = write_as(options->kind, data, out);
    good = fclose(out) == 0 && good;
    if (!good || rename(part, options->file) != 0) {
        int number = errno;
        unlink(part);
        return ep_error_set(out_error, EP_ERR_IO, "cannot write %s: %s", options->file,
                            strerror(number));
    }
    return EP_OK;
}

static void say_written(const read_options *options, const export_data *data)
{
    if (options->kind == EXPORT_HTML) {
        printf("%s: %zu of %zu spans, %zu of %zu calls; its figures count all\n", options->file,
               data->pick.spans_count, data->model->spans_count, data->pick.calls_count,
               data->figures.requests_count);
        return;
    }
    printf("%s: %zu spans in %zu lanes\n", options->file,
           data->model->spans_count - data->lanes.left_out, data->lanes.lanes_count);
    if (data->lanes.left_out > 0) {
        printf("left out: %zu spans that overlap more than %d others of their kind\n",
               data->lanes.left_out, EP_CLI_TRACE_LANES_MAX);
    }
}

static int run_export(int argc, char **argv)
{
    static read_options options = {.events_max = EP_CLI_TRACE_EVENTS_MAX_DEFAULT};
    export_data data = {0};
    ep_error error;
    argp_parse(&export_argp, argc, argv, 0, NULL, &options);
    ep_err err = make_data(&options, &data, &error);
    err = err != EP_OK ? err : write_file(&options, &data, &error);
    int code = EP_CLI_EXIT_OK;
    if (err != EP_OK) {
        code = ep_cli_fail(argv[0], &error);
    } else {
        warn(argv[0], data.model);
        say_written(&options, &data);
    }
    ep_cli_trace_lanes_free(&data.lanes);
    ep_cli_trace_pick_free(&data.pick);
    ep_cli_trace_figures_free(&data.figures);
    ep_cli_trace_model_destroy(data.model);
    return code;
}

const ep_cli_command ep_cli_trace_export_command = {
    "export", "recordings for Perfetto, as an HTML page, or as Chrome's JSON", &export_argp,
    run_export, NULL};
