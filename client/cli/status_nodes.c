/* SPDX-License-Identifier: Apache-2.0 */
/* The status by the nodes' own reports. */
#include <inttypes.h>
#include <string.h>

#include "status.h"

void ep_cli_nodes_check(const ep_cli_node_list *nodes, ep_cli_problems *out_problems)
{
    for (size_t i = 0; i < nodes->count; i++) {
        const ep_cli_node *node = &nodes->nodes[i];
        if (node->status == NULL) {
            ep_cli_problem_add(out_problems, "%s", node->error.text);
        } else if (strcmp(node->status->state, "serving") != 0) {
            ep_cli_problem_add(out_problems, "node %s at %s is %s%s%s", node->status->node,
                               node->url, node->status->state,
                               node->status->last_error[0] != '\0' ? ": " : "",
                               node->status->last_error);
        }
        for (size_t d = 0; node->status != NULL && d < node->status->n_devices; d++) {
            const Expertd__V1__DeviceStatus *device = node->status->devices[d];
            if (device->lost_why[0] != '\0') {
                ep_cli_problem_add(out_problems, "node %s at %s has lost device %" PRIu32 ": %s",
                                   node->status->node, node->url, device->device, device->lost_why);
            }
        }
        if (node->status != NULL && node->status->tls_error[0] != '\0') {
            ep_cli_problem_add(out_problems,
                               "node %s at %s: a restart would fail, repair its TLS files: %s",
                               node->status->node, node->url, node->status->tls_error);
        }
    }
}

static json_t *layers_json(const Expertd__V1__NodeStatusReply *status)
{
    json_t *layers = json_array();
    for (size_t l = 0; l < status->n_layers; l++) {
        const Expertd__V1__LayerStatus *layer = status->layers[l];
        json_array_append_new(
            layers,
            json_pack("{s:o, s:o, s:I, s:I, s:I, s:o, s:o}", "model",
                      ep_cli_json_text(layer->model), "version", ep_cli_json_text(layer->version),
                      "layer", (json_int_t)layer->layer, "experts_resident",
                      (json_int_t)layer->experts_resident, "rows_served",
                      (json_int_t)layer->rows_served, "weight_quant_error",
                      ep_cli_json_ratio(layer->weight_quant_error), "weight_quant_output_error",
                      ep_cli_json_ratio(layer->weight_quant_output_error)));
    }
    return layers;
}

static json_t *devices_json(const Expertd__V1__NodeStatusReply *status)
{
    json_t *devices = json_array();
    for (size_t d = 0; d < status->n_devices; d++) {
        const Expertd__V1__DeviceStatus *device = status->devices[d];
        json_array_append_new(devices,
                              json_pack("{s:I, s:o, s:I, s:I, s:I, s:I}", "device",
                                        (json_int_t)device->device, "lost_why",
                                        ep_cli_json_text(device->lost_why), "memory_bytes",
                                        (json_int_t)device->memory_bytes, "free_bytes",
                                        (json_int_t)device->free_bytes, "weight_bytes",
                                        (json_int_t)device->weight_bytes, "weight_bytes_max",
                                        (json_int_t)device->weight_bytes_max));
    }
    return devices;
}

static json_t *node_json(const ep_cli_node *node)
{
    const Expertd__V1__NodeStatusReply *status = node->status;
    if (status == NULL) {
        return json_pack("{s:o, s:s, s:o}", "url", ep_cli_json_text(node->url), "state",
                         "unreachable", "error", ep_cli_json_text(node->error.text));
    }
    return json_pack(
        "{s:o, s:o, s:o, s:{s:I, s:I}, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:o, s:o}", "name",
        ep_cli_json_text(status->node), "url", ep_cli_json_text(node->url), "state",
        ep_cli_json_text(status->state), "epoch", "term",
        (json_int_t)(status->epoch != NULL ? status->epoch->term : 0), "number",
        (json_int_t)(status->epoch != NULL ? status->epoch->number : 0), "rows_served",
        (json_int_t)status->rows_served, "requests_served", (json_int_t)status->requests_served,
        "requests_failed", (json_int_t)status->requests_failed, "requests_hedged",
        (json_int_t)status->requests_hedged, "requests_in_flight",
        (json_int_t)status->requests_in_flight, "weight_bytes", (json_int_t)status->weight_bytes,
        "uptime_us", (json_int_t)status->uptime_us, "last_error",
        ep_cli_json_text(status->last_error), "devices", devices_json(status), "layers",
        layers_json(status));
}

static bool print_node_table(const ep_cli_node_list *nodes, FILE *out)
{
    ep_cli_table *table = ep_cli_table_create(
        "NODE|STATE|5>ROWS SERVED|4>REQUESTS|6>FAILED|3>IN FLIGHT|2>WEIGHTS|2>UPTIME|1URL");
    char uptime[EP_CLI_BRIEF_BYTES];
    for (size_t i = 0; i < nodes->count; i++) {
        const ep_cli_node *node = &nodes->nodes[i];
        const Expertd__V1__NodeStatusReply *status = node->status;
        ep_cli_table_cell(table, "%s", status != NULL ? status->node : "-");
        ep_cli_table_cell(table, "%s", status != NULL ? status->state : "unreachable");
        if (status == NULL) {
            for (size_t c = 0; c < 6; c++) {
                ep_cli_table_cell(table, "-");
            }
        } else {
            ep_cli_table_count(table, status->rows_served);
            ep_cli_table_count(table, status->requests_served);
            ep_cli_table_count(table, status->requests_failed);
            ep_cli_table_count(table, status->requests_in_flight);
            ep_cli_table_bytes(table, status->weight_bytes);
            ep_cli_table_cell(table, "%s",
                              ep_cli_duration_text((double)status->uptime_us / 1e6, uptime));
        }
        ep_cli_table_cell(table, "%s", node->url);
    }
    return ep_cli_table_print(table, out);
}

/* Prints nothing if no node has devices. */
static bool print_device_table(const ep_cli_node_list *nodes, FILE *out)
{
    bool has_devices = false;
    ep_cli_table *table = ep_cli_table_create("NODE|>DEVICE|STATE|>MEMORY|>FREE|>WEIGHTS|1>MAX");
    for (size_t i = 0; i < nodes->count; i++) {
        const Expertd__V1__NodeStatusReply *status = nodes->nodes[i].status;
        has_devices = has_devices || (status != NULL && status->n_devices > 0);
        for (size_t d = 0; status != NULL && d < status->n_devices; d++) {
            const Expertd__V1__DeviceStatus *device = status->devices[d];
            ep_cli_table_cell(table, "%s", status->node);
            ep_cli_table_cell(table, "%" PRIu32, device->device);
            ep_cli_table_cell(table, "%s", device->lost_why[0] != '\0' ? "lost" : "serving");
            ep_cli_table_bytes(table, device->memory_bytes);
            ep_cli_table_bytes(table, device->free_bytes);
            ep_cli_table_bytes(table, device->weight_bytes);
            ep_cli_table_bytes(table, device->weight_bytes_max);
        }
    }
    if (!has_devices) {
        ep_cli_table_destroy(table);
        return true;
    }
    const bool good = ep_cli_table_print(table, out);
    fputc('\n', out);
    return good;
}

/* Adds an error of weight_quant. */
static void add_error(ep_cli_table *table, double error)
{
    ep_cli_table_cell(table, error > 0 ? "%.4f" : "-", error);
}

static bool print_layer_table(const ep_cli_node_list *nodes, FILE *out)
{
    ep_cli_table *table = ep_cli_table_create(
        "NODE|MODEL|1VERSION|>LAYER|2>EXPERTS|>ROWS SERVED|3>ERROR|4>OF OUTPUTS");
    for (size_t i = 0; i < nodes->count; i++) {
        const Expertd__V1__NodeStatusReply *status = nodes->nodes[i].status;
        for (size_t l = 0; status != NULL && l < status->n_layers; l++) {
            ep_cli_table_cell(table, "%s", status->node);
            ep_cli_table_cell(table, "%s", status->layers[l]->model);
            ep_cli_table_cell(table, "%s", status->layers[l]->version);
            ep_cli_table_cell(table, "%" PRIu32, status->layers[l]->layer);
            ep_cli_table_cell(table, "%" PRIu32, status->layers[l]->experts_resident);
            ep_cli_table_count(table, status->layers[l]->rows_served);
            add_error(table, status->layers[l]->weight_quant_error);
            add_error(table, status->layers[l]->weight_quant_output_error);
        }
    }
    return ep_cli_table_print(table, out);
}

bool ep_cli_nodes_print(const ep_cli_node_list *nodes, const ep_cli_problems *problems,
                        ep_cli_format format, FILE *out)
{
    if (format == EP_CLI_JSON) {
        json_t *list = json_array();
        for (size_t i = 0; i < nodes->count; i++) {
            json_array_append_new(list, node_json(&nodes->nodes[i]));
        }
        return ep_cli_json_print(json_pack("{s:b, s:o, s:o}", "healthy", problems->count == 0,
                                           "problems", ep_cli_problems_json(problems), "nodes",
                                           list),
                                 out);
    }
    bool good = print_node_table(nodes, out);
    fputc('\n', out);
    good = print_device_table(nodes, out) && good;
    good = print_layer_table(nodes, out) && good;
    fputc('\n', out);
    ep_cli_problems_print(problems, out);
    return good && ferror(out) == 0;
}
