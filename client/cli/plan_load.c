/* SPDX-License-Identifier: Apache-2.0 */
#include "plan_load.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "model/json_reader.h"
#include "model/model_files.h"
#include "plan_cost.h"

#define BAD(...) ep_error_set(out_error, EP_ERR_BAD_FILE, __VA_ARGS__)
#define FILE_BYTES_MAX ((size_t)512 << 20)

static ep_err init(const ep_layer_shape *layers, uint32_t layers_count, ep_plan_load *load,
                   ep_error *out_error)
{
    *load = (ep_plan_load){.shares = calloc(layers_count + 1u, sizeof(double *))};
    bool good = load->shares != NULL;
    for (; good && load->layers_count < layers_count; load->layers_count += good) {
        load->shares[load->layers_count] =
            calloc(layers[load->layers_count].experts + 1u, sizeof(double));
        good = load->shares[load->layers_count] != NULL;
    }
    return good ? EP_OK
                : ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the load of %u layers",
                               layers_count);
}

void ep_plan_load_fini(ep_plan_load *load)
{
    for (uint32_t l = 0; l < load->layers_count; l++) {
        free(load->shares[l]);
    }
    free(load->shares);
    *load = (ep_plan_load){0};
}

static void draw_layer(double exponent, uint64_t *random, const ep_layer_shape *layer,
                       double *out_shares)
{
    for (uint32_t e = 0; e < layer->experts; e++) {
        out_shares[e] = pow(e + 1.0, -exponent);
    }
    for (uint32_t e = layer->experts - 1; e > 0; e--) {
        const uint32_t at = (uint32_t)(ep_splitmix64(random) % (e + 1));
        const double moved = out_shares[e];
        out_shares[e] = out_shares[at];
        out_shares[at] = moved;
    }
    ep_plan_cap_shares(out_shares, layer->experts, layer->top_k);
}

ep_err ep_plan_load_draw(double exponent, uint64_t seed, const ep_layer_shape *layers,
                         uint32_t layers_count, ep_plan_load *out_load, ep_error *out_error)
{
    uint64_t random = seed;
    ep_plan_load load;
    ep_err err = init(layers, layers_count, &load, out_error);
    if (err != EP_OK) {
        ep_plan_load_fini(&load);
        return err;
    }
    for (uint32_t l = 0; l < layers_count; l++) {
        draw_layer(exponent, &random, &layers[l], load.shares[l]);
    }
    *out_load = load;
    return EP_OK;
}

/* ---- a file ---- */

typedef struct {
    const char *path;
    const ep_layer_shape *layers;
    uint32_t layers_count;
    const char *model, *version; /* of the first entry */
    bool *is_read;               /* [layers_count] */
    ep_plan_load *load;
    ep_error *error;
} reader;

static const char *describe(const json_t *value, char out[EP_JSON_TEXT_BYTES])
{
    return value != NULL ? ep_json_describe(value, out) : "not given";
}

static ep_err read_counts(const reader *r, const json_t *list, const ep_layer_shape *layer,
                          double *out_shares)
{
    ep_error *out_error = r->error;
    char text[EP_JSON_TEXT_BYTES];
    uint32_t loaded = 0;
    for (uint32_t e = 0; e < layer->experts; e++) {
        const json_t *entry = json_array_get(list, e);
        const json_t *number = json_object_get(entry, "expert"),
                     *slots = json_object_get(entry, "slots");
        if (!json_is_integer(number) || json_integer_value(number) != (json_int_t)e) {
            return BAD("%s: layer %" PRIu32 ": entry %" PRIu32
                       " of load is of expert %s, allowed: experts in order",
                       r->path, layer->layer, e, describe(number, text));
        }
        if (!json_is_integer(slots) || json_integer_value(slots) < 0) {
            return BAD("%s: layer %" PRIu32 ", expert %" PRIu32
                       ": slots is %s, allowed: a whole number 0..",
                       r->path, layer->layer, e, describe(slots, text));
        }
        out_shares[e] = (double)json_integer_value(slots);
        loaded += out_shares[e] > 0;
    }
    if (loaded < layer->top_k) {
        return BAD("%s: layer %" PRIu32 ": %" PRIu32
                   " experts have slots, and each token takes %" PRIu32
                   ": let the service run for longer",
                   r->path, layer->layer, loaded, layer->top_k);
    }
    ep_plan_cap_shares(out_shares, layer->experts, layer->top_k);
    return EP_OK;
}

static uint32_t find_layer(const reader *r, const json_t *number)
{
    for (uint32_t l = 0; json_is_integer(number) && l < r->layers_count; l++) {
        if (json_integer_value(number) == (json_int_t)r->layers[l].layer) {
            return l;
        }
    }
    return r->layers_count;
}

/* Checks that all entries are of one model: a file may have all models of a service. */
static ep_err check_model(reader *r, const json_t *entry, size_t index)
{
    ep_error *out_error = r->error;
    const char *model = json_string_value(json_object_get(entry, "model"));
    const char *version = json_string_value(json_object_get(entry, "version"));
    char a[EP_JSON_TEXT_BYTES], b[EP_JSON_TEXT_BYTES];
    if (model == NULL || version == NULL) {
        return BAD("%s: layers entry %zu has no model or no version: expertctl stats --experts -o "
                   "json writes both",
                   r->path, index);
    }
    if (r->model != NULL && (strcmp(model, r->model) != 0 || strcmp(version, r->version) != 0)) {
        const bool is_one_model = strcmp(model, r->model) == 0; /* the versions differ then */
        return BAD("%s: holds %s%s and %s, allowed: one model; see expertctl stats --model and "
                   "--version",
                   r->path, is_one_model ? "versions " : "",
                   ep_json_printable(is_one_model ? r->version : r->model, a, sizeof(a)),
                   ep_json_printable(is_one_model ? version : model, b, sizeof(b)));
    }
    r->model = model;
    r->version = version;
    return EP_OK;
}

static ep_err read_entry(reader *r, const json_t *entry, size_t index)
{
    ep_error *out_error = r->error;
    char text[EP_JSON_TEXT_BYTES];
    ep_err err = check_model(r, entry, index);
    if (err != EP_OK) {
        return err;
    }
    const uint32_t l = find_layer(r, json_object_get(entry, "layer"));
    if (l == r->layers_count) {
        return BAD("%s: layers entry %zu: layer is %s, the model's MoE layers are %" PRIu32
                   "..%" PRIu32 ": it is of another model",
                   r->path, index, describe(json_object_get(entry, "layer"), text),
                   r->layers[0].layer, r->layers[r->layers_count - 1].layer);
    }
    const ep_layer_shape *layer = &r->layers[l];
    const json_t *list = json_object_get(entry, "load"),
                 *experts = json_object_get(entry, "experts");
    if (r->is_read[l]) {
        return BAD("%s: layer %" PRIu32 " is there twice", r->path, layer->layer);
    }
    if (!json_is_integer(experts) || json_integer_value(experts) != (json_int_t)layer->experts) {
        return BAD("%s: layer %" PRIu32 " has experts %s, the model %" PRIu32
                   ": it is of another model",
                   r->path, layer->layer, describe(experts, text), layer->experts);
    }
    if (list == NULL || json_array_size(list) != layer->experts) {
        return BAD("%s: layer %" PRIu32 ": load has %zu experts of %" PRIu32
                   ": expertctl stats --experts -o json writes all",
                   r->path, layer->layer, json_array_size(list), layer->experts);
    }
    r->is_read[l] = true;
    return read_counts(r, list, layer, r->load->shares[l]);
}

static ep_err read_root(reader *r, const json_t *root)
{
    ep_error *out_error = r->error;
    const json_t *entries = json_object_get(root, "layers");
    ep_err err = EP_OK;
    if (!json_is_array(entries)) {
        return BAD(
            "%s: has no list \"layers\": allowed is what expertctl stats --experts -o json writes",
            r->path);
    }
    for (size_t i = 0; err == EP_OK && i < json_array_size(entries); i++) {
        err = read_entry(r, json_array_get(entries, i), i);
    }
    for (uint32_t l = 0; err == EP_OK && l < r->layers_count; l++) {
        if (!r->is_read[l]) {
            err = BAD(
                "%s: layer %" PRIu32
                " of the model is not there: nothing was computed in it, or it is of another model",
                r->path, r->layers[l].layer);
        }
    }
    return err;
}

static ep_err read_json(const char *path, json_t **out_root, ep_error *out_error)
{
    static const ep_json_limits limits = {.depth_max = 8, .values_max = (size_t)1 << 25};
    char *text = NULL;
    size_t count;
    ep_err err = ep_model_file_read_path(path, FILE_BYTES_MAX, &text, &count, out_error);
    err = err != EP_OK ? err : ep_json_parse(path, text, count, &limits, out_root, out_error);
    free(text);
    return err;
}

ep_err ep_plan_load_read(const char *path, const ep_layer_shape *layers, uint32_t layers_count,
                         ep_plan_load *out_load, ep_error *out_error)
{
    json_t *root = NULL;
    ep_plan_load load = {0};
    reader r = {.path = path,
                .layers = layers,
                .layers_count = layers_count,
                .load = &load,
                .error = out_error};
    ep_err err = read_json(path, &root, out_error);
    err = err != EP_OK ? err : init(layers, layers_count, &load, out_error);
    if (err == EP_OK) {
        r.is_read = calloc(layers_count + 1u, sizeof(*r.is_read));
        err = r.is_read != NULL
                  ? read_root(&r, root)
                  : ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory to read %s", path);
    }
    free(r.is_read);
    json_decref(root);
    if (err == EP_OK) {
        *out_load = load;
    } else {
        ep_plan_load_fini(&load);
    }
    return err;
}
