/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl generate: generates text with a byte-level model whose experts are in the service. Only
 * the text goes to stdout. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "command_table.h"
#include "generate.h"
#include "model/weight_quant.h"
#include "node_list.h"
#include "trace_option.h"

#define BYTES_DEFAULT 128
#define SEED_DEFAULT 1
#define TEMPERATURE_DEFAULT 0.7f
/* short, since it is only for the report */
#define NODE_STATUS_TIMEOUT_US 1000000u

#define REPORT_NONE 2 /* begins as ep_cli_format */

static struct {
    ep_cli_generate_request request;
    const char *checkpoint;
    unsigned quant; /* of EP_WEIGHT_QUANT_WORDS; 0 none */
    bool gateway;
    const char *out; /* NULL stdout */
    bool stream;
    unsigned report;
    const char *report_file; /* NULL stderr */
} wanted = {
    .request = {.bytes = BYTES_DEFAULT, .seed = SEED_DEFAULT, .temperature = TEMPERATURE_DEFAULT}};

/* One of the two is set and makes the layer calls. */
typedef struct service {
    ep_client *client;
    ep_cli_gateway *gateway;
} service;

/* Called when all options have been read. */
static void check(struct argp_state *state)
{
    ep_cli_gateway_check(state, wanted.gateway);
}

static const ep_cli_option rows[] = {
    {"checkpoint", 0, "DIR", "Directory of the checkpoint; its dense part is run here (required)",
     1, .text = &wanted.checkpoint, .required = true},
    {"model", 0, "NAME", "Name of the model at the service (required)", 1,
     .text = &wanted.request.model, .max = EP_MODEL_NAME_BYTES - 1, .required = true},
    {"prompt", 0, "TEXT", "What the text begins with (required)", 1, .text = &wanted.request.prompt,
     .max = EP_DENSE_POSITIONS_MAX, .required = true},
    {"bytes", 0, "N", "Bytes to generate (default: 128)", 1, .u32 = &wanted.request.bytes,
     .max = EP_DENSE_POSITIONS_MAX},
    {"seed", 0, "S", "The same seed gives the same text (default: 1)", 1,
     .u64 = &wanted.request.seed, .max = UINT64_MAX},
    {"temperature", 0, "F", "0 always takes the likeliest byte (default: 0.7)", 1,
     .f32 = &wanted.request.temperature, .most = 1000},
    {"weight-quant", 0, EP_WEIGHT_QUANT_WORDS,
     "What the nodes have as weight_quant of the model (default: none)", 1, .word = &wanted.quant},
    {"gateway", 0, NULL, "The coordinator routes the layer calls: no connection to nodes", 1,
     .flag = &wanted.gateway},
    {"out", 0, "FILE", "Write the text there instead of to standard output", 2,
     .text = &wanted.out},
    {"stream", 0, NULL,
     "Write each byte as it comes; else the whole text at the end, and only on success", 2,
     .flag = &wanted.stream},
    {"report", 0, "table|json|none", "Form of the report (default: table)", 2,
     .word = &wanted.report},
    {"report-file", 0, "FILE", "Write the report there instead of to standard error", 2,
     .text = &wanted.report_file},
};

static ep_err file_error(const char *path, const char *verb, ep_error *out_error)
{
    return ep_error_set(out_error, EP_ERR_IO, "%s: cannot %s: %s", path, verb, strerror(errno));
}

static ep_err open_out(FILE **out_file, ep_error *out_error)
{
    *out_file = wanted.out != NULL ? fopen(wanted.out, "wb") : stdout;
    return *out_file == NULL ? file_error(wanted.out, "create", out_error) : EP_OK;
}

/* Flushes out, and closes it if open_out opened it. */
static ep_err close_out(FILE *out, ep_error *out_error)
{
    bool good = wanted.out != NULL ? fclose(out) == 0 : fflush(out) == 0;
    return good ? EP_OK
                : file_error(wanted.out != NULL ? wanted.out : "standard output", "write",
                             out_error);
}

/* Streams the text, or writes it to a file when it is complete, so that a failure leaves no
 * file. */
static ep_err generate_text(const service *to, ep_dense_model *model,
                            ep_cli_generate_result *result, ep_error *out_error)
{
    ep_cli_generate_request request = wanted.request;
    ep_error close_error;
    FILE *out = NULL;
    ep_err err = wanted.stream ? open_out(&out, out_error) : EP_OK;
    if (err != EP_OK) {
        return err;
    }
    request.stream = out;
    err = ep_cli_generate_run(to->client, to->gateway, model, &request, result, out_error);
    if (err == EP_OK && !wanted.stream) {
        err = open_out(&out, out_error);
        if (err == EP_OK) {
            /* close_out reports a failure */
            fwrite(result->text, 1, result->text_bytes, out);
        }
    }
    ep_err close_err = out != NULL ? close_out(out, &close_error) : EP_OK;
    if (err == EP_OK && close_err != EP_OK) {
        *out_error = close_error;
        err = close_err;
    }
    return err;
}

/* ---- the report ---- */

typedef struct generate_report {
    const ep_cli_generate_request *request;
    ep_cli_generate_result *result; /* percentiles sort its samples */
    const ep_cli_node_list *nodes;
} generate_report;

static const char *node_name(const ep_cli_node *node)
{
    return node->name[0] != '\0'                                   ? node->name
           : node->status != NULL && node->status->node[0] != '\0' ? node->status->node
                                                                   : node->url;
}

static uint64_t rows_of(const ep_cli_node *node)
{
    return node->status != NULL ? node->status->rows_served : node->rows_served;
}

static const char *state_of(const ep_cli_node *node)
{
    return node->status != NULL ? node->status->state : "unreachable";
}

static bool print_layers(ep_cli_generate_result *result, FILE *out)
{
    ep_cli_table *table =
        ep_cli_table_create(">LAYER|>CALLS|>P50 US|>P99 US|>MEAN US|>FRAMES|>RE-ROUTED");
    for (uint32_t i = 0; i < result->layers_count; i++) {
        ep_cli_layer_record *layer = &result->layers[i];
        ep_cli_table_cell(table, "%" PRIu32, layer->layer);
        ep_cli_table_cell(table, "%" PRIu64, layer->latency.count);
        ep_cli_table_cell(table, "%" PRIu64, ep_latency_percentile(&layer->latency, 50));
        ep_cli_table_cell(table, "%" PRIu64, ep_latency_percentile(&layer->latency, 99));
        ep_cli_table_cell(table, "%.0f", ep_latency_mean(&layer->latency));
        ep_cli_table_cell(table, "%" PRIu64, layer->frames);
        ep_cli_table_cell(table, "%" PRIu64, layer->rerouted_frames);
    }
    return ep_cli_table_print(table, out);
}

static bool print_nodes(const ep_cli_node_list *nodes, FILE *out)
{
    ep_cli_table *table = ep_cli_table_create("NODE|STATE|>ROWS SERVED|URL");
    for (size_t i = 0; i < nodes->count; i++) {
        const ep_cli_node *node = &nodes->nodes[i];
        ep_cli_table_cell(table, "%s", node_name(node));
        ep_cli_table_cell(table, "%s", state_of(node));
        ep_cli_table_cell(table, "%" PRIu64 "%s", rows_of(node),
                          node->status != NULL ? "" : " (last known)");
        ep_cli_table_cell(table, "%s", node->url);
    }
    return ep_cli_table_print(table, out);
}

static json_t *layers_json(ep_cli_generate_result *result)
{
    json_t *layers = json_array();
    for (uint32_t i = 0; i < result->layers_count; i++) {
        ep_cli_layer_record *layer = &result->layers[i];
        json_array_append_new(
            layers,
            json_pack("{s:I, s:I, s:I, s:I, s:f, s:I, s:I}", "layer", (json_int_t)layer->layer,
                      "calls", (json_int_t)layer->latency.count, "p50_us",
                      (json_int_t)ep_latency_percentile(&layer->latency, 50), "p99_us",
                      (json_int_t)ep_latency_percentile(&layer->latency, 99), "mean_us",
                      ep_latency_mean(&layer->latency), "frames", (json_int_t)layer->frames,
                      "rerouted_frames", (json_int_t)layer->rerouted_frames));
    }
    return layers;
}

static json_t *nodes_json(const ep_cli_node_list *nodes)
{
    json_t *list = json_array();
    for (size_t i = 0; i < nodes->count; i++) {
        const ep_cli_node *node = &nodes->nodes[i];
        json_array_append_new(
            list,
            json_pack("{s:o, s:o, s:o, s:I, s:b}", "name", ep_cli_json_text(node_name(node)), "url",
                      ep_cli_json_text(node->url), "state", ep_cli_json_text(state_of(node)),
                      "rows_served", (json_int_t)rows_of(node), "answered", node->status != NULL));
    }
    return list;
}

static bool print_report(const generate_report *report, ep_cli_format format, FILE *out)
{
    ep_cli_generate_result *result = report->result;
    double seconds = (double)result->total_us / 1e6;
    uint64_t rerouted = 0;
    for (uint32_t i = 0; i < result->layers_count; i++) {
        rerouted += result->layers[i].rerouted_frames;
    }
    if (format == EP_CLI_JSON) {
        return ep_cli_json_print(json_pack("{s:o, s:o, s:I, s:f, s:o, s:{s:I, s:I}, s:I, s:o, s:o}",
                                           "model", ep_cli_json_text(report->request->model),
                                           "version", ep_cli_json_text(report->request->version),
                                           "bytes", (json_int_t)report->request->bytes, "seconds",
                                           seconds, "numerics", ep_cli_json_text(result->numerics),
                                           "epoch", "term", (json_int_t)result->epoch_term,
                                           "number", (json_int_t)result->epoch_number,
                                           "rerouted_frames", (json_int_t)rerouted, "layers",
                                           layers_json(result), "nodes", nodes_json(report->nodes)),
                                 out);
    }
    ep_cli_line(out,
                "%" PRIu32 " bytes from model %s version %s in %.2f s, %.0f bytes/s, epoch %" PRIu64
                "/%" PRIu64 ", %" PRIu64 " re-routed frames",
                report->request->bytes, report->request->model, report->request->version, seconds,
                seconds > 0.0 ? report->request->bytes / seconds : 0.0, result->epoch_term,
                result->epoch_number, rerouted);
    fputc('\n', out);
    bool good = print_layers(result, out);
    fputc('\n', out);
    return print_nodes(report->nodes, out) && good;
}

static ep_err write_report(const generate_report *report, ep_error *out_error)
{
    if (wanted.report == REPORT_NONE) {
        return EP_OK;
    }
    FILE *out = wanted.report_file != NULL ? fopen(wanted.report_file, "w") : stderr;
    if (out == NULL) {
        return file_error(wanted.report_file, "create", out_error);
    }
    bool good = print_report(report, (ep_cli_format)wanted.report, out);
    if (wanted.report_file != NULL) {
        good = fclose(out) == 0 && good;
    }
    return good ? EP_OK
                : file_error(wanted.report_file != NULL ? wanted.report_file : "standard error",
                             "write", out_error);
}

/* Replaces the list from the start by a newer one, or keeps it if the coordinator is gone, and asks
 * its nodes. */
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

static ep_err run_connected(const service *to, ep_cli_control *control, ep_dense_model *model,
                            ep_error *out_error)
{
    ep_cli_generate_result result = {0};
    ep_cli_node_list nodes = {0};
    /* The gateway itself checks name, version (which implies all shapes) and layer of each call. */
    ep_err err = to->client != NULL
                     ? ep_cli_generate_match(to->client, &wanted.request, model, out_error)
                     : EP_OK;
    if (err != EP_OK) {
        return err;
    }
    /* only for the report: on an error the list is empty */
    ep_cli_node_list_read(control, &ep_cli_peer, &nodes, NULL);
    err = generate_text(to, model, &result, out_error);
    if (err == EP_OK && wanted.report != REPORT_NONE) {
        generate_report report = {&wanted.request, &result, &nodes};
        ask_nodes(control, &ep_cli_peer, &nodes);
        err = write_report(&report, out_error);
    }
    ep_cli_node_list_free(&nodes);
    ep_cli_generate_free(&result);
    return err;
}

static ep_err run_model(ep_dense_model *model, ep_error *out_error)
{
    service to = {.client = NULL};
    ep_cli_control *control = NULL;
    ep_err err = ep_cli_control_open(&ep_cli_peer, &control, out_error);
    if (err == EP_OK) {
        err = wanted.gateway ? ep_cli_gateway_open(&ep_cli_peer, &to.gateway, out_error)
                             : ep_cli_connect_client(&ep_cli_peer, &to.client, out_error);
    }
    if (err == EP_OK) {
        err = run_connected(&to, control, model, out_error);
    }
    ep_client_destroy(to.client);
    ep_cli_gateway_close(to.gateway);
    ep_cli_control_close(control);
    return err;
}

static ep_err run(ep_cli_call *call, ep_error *out_error)
{
    char wrong[EP_ERROR_TEXT_BYTES], version[EP_MODEL_VERSION_BYTES];
    ep_dense_model *model = NULL;
    wanted.request.traceparent = ep_cli_trace_parent();
    wanted.request.deadline_us = ep_cli_peer.timeout_us;
    ep_err err = ep_dense_model_open(wanted.checkpoint, &model, out_error);
    if (err != EP_OK) {
        return err;
    }
    ep_weight_quant_version(ep_dense_model_shape(model)->version, ep_weight_quant_at(wanted.quant),
                            version);
    wanted.request.version = version;
    ep_cli_generate_check(&wanted.request, ep_dense_model_shape(model), wrong, sizeof(wrong));
    if (wrong[0] != '\0') {
        fprintf(stderr, "%s: %s\n", call->program, wrong);
        call->exit_code = EP_CLI_EXIT_USAGE;
    } else {
        err = run_model(model, out_error);
        ep_cli_trace_report();
    }
    ep_dense_model_close(model);
    return err;
}

const ep_cli_command ep_cli_generate = {
    .name = "generate",
    .help = "text from a model whose experts are the service's",
    .args = "--checkpoint DIR --model NAME --prompt TEXT",
    .doc = "Generates text: embedding, attention and router run here, every expert at the service."
           "\vThe text (prompt and generated bytes) goes to standard output, the report to "
           "standard error: latency per layer, re-routed frames, rows served per node. The model "
           "is a byte-level one in the Mixtral layout, and the service must have loaded the same "
           "checkpoint.\n\n"
           "Examples:\n"
           "  expertctl generate --checkpoint deploy/demo-model/checkpoint \\\n"
           "      --model demo --prompt \"The file descriptor \" --bytes 200\n"
           "  expertctl generate --checkpoint deploy/demo-model/checkpoint \\\n"
           "      --model demo --prompt \"The \" --stream --report json \\\n"
           "      --report-file report.json\n\n" EP_CLI_EXIT_HELP,
    .options = {.rows = rows, .count = EP_ARRAY_COUNT(rows), .success = check},
    .uses = {&ep_cli_connect_options, &ep_cli_trace_options, &ep_cli_numerics_options},
    .run = run,
};
