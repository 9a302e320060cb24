/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl generate: text from a byte-level model whose experts are the service's. stdout carries
 * the text and nothing else. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "arguments.h"
#include "command_table.h"
#include "exit_code.h"
#include "generate_report.h"
#include "trace_option.h"

#define BYTES_DEFAULT 128
#define SEED_DEFAULT 1
#define TEMPERATURE_DEFAULT 0.7f
/* for the report only: a dead node is not waited for long */
#define NODE_STATUS_TIMEOUT_US 1000000u

enum {
    KEY_CHECKPOINT = 0x200,
    KEY_MODEL,
    KEY_PROMPT,
    KEY_BYTES,
    KEY_SEED,
    KEY_TEMPERATURE,
    KEY_GATEWAY,
    KEY_OUT,
    KEY_STREAM,
    KEY_REPORT,
    KEY_REPORT_FILE
};

/* begins as ep_cli_format */
static const char *const report_words[] = {"table", "json", "none", NULL};
#define REPORT_NONE 2

typedef struct generate_options {
    ep_cli_connect connect;
    ep_cli_trace trace;
    ep_cli_generate_request request;
    const char *checkpoint;
    bool gateway;
    const char *out; /* NULL stdout */
    bool stream;
    size_t report;
    const char *report_file; /* NULL stderr */
} generate_options;

/* One of the two makes the layer calls. */
typedef struct service {
    ep_client *client;
    ep_cli_gateway *gateway;
} service;

static error_t parse(int key, char *arg, struct argp_state *state)
{
    generate_options *options = state->input;
    ep_cli_generate_request *request = &options->request;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &options->connect;
        state->child_inputs[1] = &options->trace;
        state->child_inputs[2] = &options->connect;
        return 0;
    case KEY_CHECKPOINT:
        options->checkpoint = arg;
        return 0;
    case KEY_MODEL:
        request->model = ep_cli_arg_text(state, "--model", arg, EP_MODEL_NAME_BYTES - 1);
        return 0;
    case KEY_PROMPT:
        request->prompt = ep_cli_arg_text(state, "--prompt", arg, EP_DENSE_POSITIONS_MAX);
        return 0;
    case KEY_BYTES:
        request->bytes =
            (uint32_t)ep_cli_arg_whole(state, "--bytes", arg, 0, EP_DENSE_POSITIONS_MAX);
        return 0;
    case KEY_SEED:
        request->seed = ep_cli_arg_whole(state, "--seed", arg, 0, UINT64_MAX);
        return 0;
    case KEY_TEMPERATURE:
        request->temperature = ep_cli_arg_float(state, "--temperature", arg, 0.0f, 1000.0f);
        return 0;
    case KEY_GATEWAY:
        options->gateway = true;
        return 0;
    case KEY_OUT:
        options->out = arg;
        return 0;
    case KEY_STREAM:
        options->stream = true;
        return 0;
    case KEY_REPORT:
        options->report = ep_cli_arg_word(state, "--report", arg, report_words);
        return 0;
    case KEY_REPORT_FILE:
        options->report_file = arg;
        return 0;
    case ARGP_KEY_ARG:
        return ep_cli_arg_unexpected(state, arg);
    case ARGP_KEY_END:
        ep_cli_arg_required(state, "--checkpoint", options->checkpoint);
        ep_cli_arg_required(state, "--model", request->model);
        ep_cli_arg_required(state, "--prompt", request->prompt);
        return 0;
    case ARGP_KEY_SUCCESS: /* the children have seen everything */
        if (options->gateway && options->connect.coordinator_url == NULL) {
            argp_error(state,
                       "--gateway and --node are both given: the gateway is the coordinator's");
        }
        if (options->gateway && options->connect.numerics != NULL) {
            argp_error(state,
                       "--gateway and --numerics are both given: the gateway chooses the id");
        }
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option option_list[] = {
    {"checkpoint", KEY_CHECKPOINT, "DIR", 0,
     "Directory of the checkpoint; its dense part is run here (required)", 1},
    {"model", KEY_MODEL, "NAME", 0, "Name of the model at the service (required)", 1},
    {"prompt", KEY_PROMPT, "TEXT", 0, "What the text begins with (required)", 1},
    {"bytes", KEY_BYTES, "N", 0, "Bytes to generate (default: 128)", 1},
    {"seed", KEY_SEED, "S", 0, "The same seed gives the same text (default: 1)", 1},
    {"temperature", KEY_TEMPERATURE, "F", 0, "0 always takes the likeliest byte (default: 0.7)", 1},
    {"gateway", KEY_GATEWAY, NULL, 0,
     "The coordinator routes the layer calls: no connection to nodes", 1},
    {"out", KEY_OUT, "FILE", 0, "Write the text there instead of to standard output", 2},
    {"stream", KEY_STREAM, NULL, 0,
     "Write each byte as it comes; else the whole text at the end, and only on success", 2},
    {"report", KEY_REPORT, "table|json|none", 0, "Form of the report (default: table)", 2},
    {"report-file", KEY_REPORT_FILE, "FILE", 0,
     "Write the report there instead of to standard error", 2},
    {0},
};
static const struct argp_child children[] = {{&ep_cli_connect_argp, 0, NULL, 0},
                                             {&ep_cli_trace_argp, 0, NULL, 0},
                                             {&ep_cli_numerics_argp, 0, NULL, 0},
                                             {0}};
static const struct argp argp = {
    option_list,
    parse,
    "--checkpoint DIR --model NAME --prompt TEXT",
    "Generates text: embedding, attention and router run here, every expert at the service."
    "\vThe text (prompt and generated bytes) goes to standard output, the report to standard "
    "error: latency "
    "per layer, re-routed "
    "frames, rows served per node. The model is a byte-level one in the Mixtral layout, and the "
    "service must "
    "have loaded the same "
    "checkpoint.\n\n"
    "Examples:\n"
    "  expertctl generate --checkpoint deploy/demo-model/checkpoint \\\n"
    "      --model demo --prompt \"The file descriptor \" --bytes 200\n"
    "  expertctl generate --checkpoint deploy/demo-model/checkpoint \\\n"
    "      --model demo --prompt \"The \" --stream --report json \\\n"
    "      --report-file report.json\n\n" EP_CLI_EXIT_HELP,
    children,
    NULL,
    NULL};

static ep_err file_error(const char *path, const char *verb, ep_error *out_error)
{
    return ep_error_set(out_error, EP_ERR_IO, "%s: cannot %s: %s", path, verb, strerror(errno));
}

static ep_err open_out(const generate_options *options, FILE **out_file, ep_error *out_error)
{
    *out_file = options->out != NULL ? fopen(options->out, "wb") : stdout;
    return *out_file == NULL ? file_error(options->out, "create", out_error) : EP_OK;
}

/* Flushes, and closes what open_out opened. */
static ep_err close_out(const generate_options *options, FILE *out, ep_error *out_error)
{
    bool good = options->out != NULL ? fclose(out) == 0 : fflush(out) == 0;
    return good ? EP_OK
                : file_error(options->out != NULL ? options->out : "standard output", "write",
                             out_error);
}

/* Streamed, or written as a whole once it is there: a failure then leaves no file. */
static ep_err generate_text(const generate_options *options, const service *to,
                            ep_dense_model *model, ep_cli_generate_result *result,
                            ep_error *out_error)
{
    ep_cli_generate_request request = options->request;
    ep_error close_error;
    FILE *out = NULL;
    ep_err err = options->stream ? open_out(options, &out, out_error) : EP_OK;
    if (err != EP_OK) {
        return err;
    }
    request.stream = out;
    err = ep_cli_generate_run(to->client, to->gateway, model, &request, result, out_error);
    if (err == EP_OK && !options->stream) {
        err = open_out(options, &out, out_error);
        if (err == EP_OK) {
            /* a failure shows when it is closed */
            fwrite(result->text, 1, result->text_bytes, out);
        }
    }
    ep_err close_err = out != NULL ? close_out(options, out, &close_error) : EP_OK;
    if (err == EP_OK && close_err != EP_OK) {
        *out_error = close_error;
        err = close_err;
    }
    return err;
}

static ep_err write_report(const generate_options *options, const ep_cli_generate_report *report,
                           ep_error *out_error)
{
    if (options->report == REPORT_NONE) {
        return EP_OK;
    }
    FILE *out = options->report_file != NULL ? fopen(options->report_file, "w") : stderr;
    if (out == NULL) {
        return file_error(options->report_file, "create", out_error);
    }
    bool good = ep_cli_generate_report_print(report, (ep_cli_format)options->report, out);
    if (options->report_file != NULL) {
        good = fclose(out) == 0 && good;
    }
    return good ? EP_OK
                : file_error(options->report_file != NULL ? options->report_file : "standard error",
                             "write", out_error);
}

/* A newer list replaces the one from the start; when the coordinator is gone, the old one still
 * says whom to ask. */
static void ask_nodes(ep_cli_control *control, const ep_cli_connect *connect,
                      ep_cli_node_list *list)
{
    ep_cli_node_list newer;
    if (ep_cli_node_list_read(control, connect, &newer, NULL) == EP_OK) {
        ep_cli_node_list_free(list);
        *list = newer;
    }
    ep_cli_node_list_ask(control, list, NODE_STATUS_TIMEOUT_US);
}

static ep_err run_connected(const generate_options *options, const service *to,
                            ep_cli_control *control, ep_dense_model *model, ep_error *out_error)
{
    ep_cli_generate_result result = {0};
    ep_cli_node_list nodes = {0};
    /* The gateway checks name, version (which stands for all shapes) and layer of each call
     * itself. */
    ep_err err = to->client != NULL
                     ? ep_cli_generate_match(to->client, options->request.model, model, out_error)
                     : EP_OK;
    if (err != EP_OK) {
        return err;
    }
    ep_cli_node_list_read(control, &options->connect, &nodes, NULL); /* for the report: without it
                                                                        the list is empty */
    err = generate_text(options, to, model, &result, out_error);
    if (err == EP_OK && options->report != REPORT_NONE) {
        ep_cli_generate_report report = {&options->request, &result, ep_dense_model_shape(model),
                                         &nodes};
        ask_nodes(control, &options->connect, &nodes);
        err = write_report(options, &report, out_error);
    }
    ep_cli_node_list_free(&nodes);
    ep_cli_generate_free(&result);
    return err;
}

static ep_err run_model(const generate_options *options, ep_dense_model *model, ep_error *out_error)
{
    service to = {.client = NULL};
    ep_cli_control *control = NULL;
    ep_err err = ep_cli_control_open(&options->connect, &control, out_error);
    if (err == EP_OK) {
        err = options->gateway ? ep_cli_gateway_open(&options->connect, &to.gateway, out_error)
                               : ep_cli_connect_client(&options->connect, &to.client, out_error);
    }
    if (err == EP_OK) {
        err = run_connected(options, &to, control, model, out_error);
    }
    ep_client_destroy(to.client);
    ep_cli_gateway_close(to.gateway);
    ep_cli_control_close(control);
    return err;
}

static int run(int argc, char **argv)
{
    static generate_options options = {.request = {.bytes = BYTES_DEFAULT,
                                                   .seed = SEED_DEFAULT,
                                                   .temperature = TEMPERATURE_DEFAULT}};
    char wrong[EP_ERROR_TEXT_BYTES];
    ep_dense_model *model = NULL;
    ep_error error;
    ep_cli_connect_init(&options.connect);
    argp_parse(&argp, argc, argv, 0, NULL, &options);
    options.request.traceparent = ep_cli_trace_parent(&options.trace);
    options.request.deadline_us = options.connect.timeout_us;
    ep_err err = ep_dense_model_open(options.checkpoint, &model, &error);
    if (err != EP_OK) {
        return ep_cli_fail(argv[0], &error);
    }
    ep_cli_generate_check(&options.request, ep_dense_model_shape(model), wrong, sizeof(wrong));
    if (wrong[0] != '\0') {
        ep_dense_model_close(model);
        fprintf(stderr, "%s: %s\n", argv[0], wrong);
        return EP_CLI_EXIT_USAGE;
    }
    err = run_model(&options, model, &error);
    ep_cli_trace_report(&options.trace);
    ep_dense_model_close(model);
    return err != EP_OK ? ep_cli_fail(argv[0], &error) : EP_CLI_EXIT_OK;
}

const ep_cli_command ep_cli_generate = {
    "generate", "text from a model whose experts are the service's", &argp, run, NULL};
