/* SPDX-License-Identifier: Apache-2.0 */
#include "plan_machine.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "model/json_reader.h"
#include "model/model_files.h"

#define BAD(...) ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, __VA_ARGS__)
#define FILE_BYTES_MAX ((size_t)1 << 20)
#define FEW_ROWS_MAX 1.25 /* rows per expert that is read */
#define MANY_ROWS_MIN 32
#define ROUNDS 16 /* even the second round changes little */

/* ---- computed from times ---- */

/* The second word of "bf16dp/mxfp4/rne/1234abcd". */
static ep_weight_format format_of(const char *numerics)
{
    const char *begin = strchr(numerics, '/'), *end = begin != NULL ? strchr(begin + 1, '/') : NULL;
    for (int f = EP_WEIGHTS_NONE + 1; end != NULL && f < EP_WEIGHTS_COUNT; f++) {
        const char *name = ep_weight_format_name((ep_weight_format)f);
        if (strlen(name) == (size_t)(end - begin - 1) &&
            strncmp(name, begin + 1, strlen(name)) == 0) {
            return (ep_weight_format)f;
        }
    }
    return EP_WEIGHTS_NONE;
}

static ep_err check_layer(const ep_routing_table *table, const ep_routing_layer *layer,
                          ep_weight_format *out_format, ep_error *out_error)
{
    const ep_layer_shape *shape = &layer->shape;
    const ep_routing_model *model = &table->models[layer->model_index];
    const uint32_t copies = layer->offsets[shape->experts];
    if (shape->shared_experts > 0) {
        return BAD("layer %" PRIu32
                   " has a shared expert, whose size no table tells: measure a layer without one",
                   shape->layer);
    }
    bool is_whole = copies == shape->experts; /* a node has at most one copy of an expert */
    for (uint32_t c = 1; is_whole && c < copies; c++) {
        is_whole = layer->copies[c] == layer->copies[0];
    }
    if (!is_whole) {
        return BAD("layer %" PRIu32
                   " is not whole on one node and nowhere else: measure such a service",
                   shape->layer);
    }
    *out_format = model->numerics_count == 1 ? format_of(model->numerics[0]) : EP_WEIGHTS_NONE;
    return *out_format != EP_WEIGHTS_NONE
               ? EP_OK
               : BAD("the numerics of %.100s are %.95s: no single weight format", model->name,
                     model->numerics_count > 0 ? model->numerics[0] : "not known");
}

ep_err ep_plan_machine_fit(const ep_routing_table *table, const ep_routing_layer *layer,
                           const ep_plan_measured *few, const ep_plan_measured *many,
                           ep_plan_machine *out_machine, ep_error *out_error)
{
    const ep_layer_shape *shape = &layer->shape;
    const double part = (double)shape->top_k / shape->experts;
    /* number of experts that few's tokens read */
    const double read = shape->experts * (1 - pow(1 - part, few->tokens));
    const uint32_t inner_rows = ep_activation_has_gate(shape->activation) ? 2 : 1;
    ep_weight_format format;
    ep_err err = check_layer(table, layer, &format, out_error);
    if (err != EP_OK) {
        return err;
    }
    if (few->tokens * shape->top_k > FEW_ROWS_MAX * read || many->tokens * part < MANY_ROWS_MIN) {
        return BAD("sizes %g to %g were measured: of layer %" PRIu32
                   " one token, and %.0f or more, are wanted (--tokens)",
                   few->tokens, many->tokens, shape->layer, ceil(MANY_ROWS_MIN / part));
    }
    const double few_rest_s = few->total_s - few->compute_s,
                 many_rest_s = many->total_s - many->compute_s;
    const double token_bytes =
        (double)shape->hidden * (double)ep_dtype_bytes(EP_DTYPE_BF16) * (1 + shape->top_k);
    const double token_s = (many_rest_s - few_rest_s) / (many->tokens - few->tokens);
    const double round_trip_s = few_rest_s - few->tokens * token_s;
    const double few_rows = few->tokens * shape->top_k / read, many_rows = many->tokens * part;
    const bool is_plain = ep_weight_format_is_float(format);
    double read_s = 0, row_s = 0; /* time to read an expert, and to compute a row */
    for (int i = 0; i < ROUNDS; i++) {
        row_s =
            ep_plan_expert_part_s(many->compute_s / shape->experts, read_s, is_plain) / many_rows;
        read_s = ep_plan_expert_part_s(few->compute_s / read, few_rows * row_s, is_plain);
    }
    if (!(row_s > 0) || !(read_s > 0) || !(token_s > 0) || !(round_trip_s > 0)) {
        return BAD("%g tokens took %.0f us, %.0f of them computing, and %g tokens %.0f and %.0f: "
                   "other load was in the way, measure again",
                   few->tokens, few->total_s * 1e6, few->compute_s * 1e6, many->tokens,
                   many->total_s * 1e6, many->compute_s * 1e6);
    }
    const double bytes =
        (double)inner_rows * (double)ep_weight_matrix_bytes(format, shape->inner, shape->hidden) +
        (double)ep_weight_matrix_bytes(format, shape->hidden, shape->inner);
    const double weights = (inner_rows + 1.0) * shape->inner * shape->hidden;
    out_machine->memory_bytes_per_s = bytes / read_s;
    out_machine->compute_per_s = 2 * weights / row_s;
    out_machine->link_bytes_per_s = token_bytes / token_s;
    out_machine->round_trip_s = round_trip_s;
    return EP_OK;
}

/* ---- as JSON ---- */

typedef struct figure {
    const char *key;
    size_t offset;
    double min, max;
} figure;

static const figure figures[] = {{"memory_bytes_per_s",
                                  offsetof(ep_plan_machine, memory_bytes_per_s),
                                  EP_PLAN_BANDWIDTH_MIN, EP_PLAN_BANDWIDTH_MAX},
                                 {"compute_per_s", offsetof(ep_plan_machine, compute_per_s),
                                  EP_PLAN_COMPUTE_RATE_MIN, EP_PLAN_COMPUTE_RATE_MAX},
                                 {"link_bytes_per_s", offsetof(ep_plan_machine, link_bytes_per_s),
                                  EP_PLAN_BANDWIDTH_MIN, EP_PLAN_BANDWIDTH_MAX},
                                 {"round_trip_seconds", offsetof(ep_plan_machine, round_trip_s),
                                  1e-6, EP_PLAN_ROUND_TRIP_US_MAX / 1e6}};

json_t *ep_plan_machine_json(const ep_plan_machine *machine)
{
    json_t *json = json_object();
    for (size_t i = 0; i < sizeof(figures) / sizeof(figures[0]); i++) {
        json_object_set_new(
            json, figures[i].key,
            json_real(*(const double *)(const void *)((const char *)machine + figures[i].offset)));
    }
    return json;
}

static ep_err read_figures(const char *path, const json_t *root, ep_plan_machine *machine,
                           ep_error *out_error)
{
    const json_t *object = json_object_get(root, "machine"),
                 *why = json_object_get(root, "machine_why");
    if (!json_is_object(object)) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE,
                            "%s has no \"machine\"%s%.300s: expertctl tune -o json writes it", path,
                            json_is_string(why) ? ": " : "",
                            json_is_string(why) ? json_string_value(why) : "");
    }
    for (size_t i = 0; i < sizeof(figures) / sizeof(figures[0]); i++) {
        const figure *f = &figures[i];
        const json_t *value = json_object_get(object, f->key);
        char text[EP_JSON_TEXT_BYTES];
        if (!json_is_number(value) || !(json_number_value(value) >= f->min) ||
            json_number_value(value) > f->max) {
            return ep_error_set(out_error, EP_ERR_BAD_FILE,
                                "%s: machine: %s is %s, allowed: %g to %g", path, f->key,
                                value != NULL ? ep_json_describe(value, text) : "not given", f->min,
                                f->max);
        }
        *(double *)(void *)((char *)machine + f->offset) = json_number_value(value);
    }
    return EP_OK;
}

ep_err ep_plan_machine_read(const char *path, ep_plan_machine *out_machine, ep_error *out_error)
{
    static const ep_json_limits limits = {.depth_max = 8, .values_max = 4096};
    ep_plan_machine machine = *out_machine;
    char *text = NULL;
    size_t count;
    json_t *root = NULL;
    ep_err err = ep_model_file_read_path(path, FILE_BYTES_MAX, &text, &count, out_error);
    err = err != EP_OK ? err : ep_json_parse(path, text, count, &limits, &root, out_error);
    err = err != EP_OK ? err : read_figures(path, root, &machine, out_error);
    free(text);
    json_decref(root);
    if (err == EP_OK) {
        *out_machine = machine;
    }
    return err;
}
