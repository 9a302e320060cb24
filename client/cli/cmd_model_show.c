/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl model show: a model's layers, from the service or from a checkpoint. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "command_table.h"
#include "model/model.h"
#include "placement.h"

static struct {
    const char *model;   /* NULL all */
    const char *version; /* NULL all */
    const char *checkpoint;
} wanted;

static void take_checkpoint(struct argp_state *state, const char *option, char *path)
{
    wanted.checkpoint = ep_cli_arg_text(state, option, path, 4095);
    ep_cli_peer.asks_nobody = "checkpoint";
}

static const ep_cli_option rows[] = {
    {"model", 'm', "NAME", "Only this model (all its versions)", 1, .text = &wanted.model,
     .max = EP_MODEL_NAME_BYTES - 1},
    {"version", 0, "V", "Only this version", 1, .text = &wanted.version,
     .max = EP_VERSION_BYTES - 1},
    {"checkpoint", 0, "PATH", "A checkpoint on this host instead of the service", 1,
     .take = take_checkpoint},
};

static void check(struct argp_state *state)
{
    if (wanted.checkpoint != NULL && (wanted.model != NULL || wanted.version != NULL)) {
        argp_error(state,
                   "%s and --checkpoint are both given, allowed: one of them; a checkpoint "
                   "has one model",
                   wanted.model != NULL ? "--model" : "--version");
    }
    if (wanted.checkpoint != NULL) {
        ep_cli_reach_refuse(state, "checkpoint", "a checkpoint is read without the service");
    }
}

/* The output, either table or JSON. */
typedef struct listing {
    ep_cli_table *table;
    json_t *models;
} listing;

/* Writes the fewest digits that identify the float. */
static void number_cell(ep_cli_table *table, const ep_layer_shape *shape, float number)
{
    char text[32];
    for (int digits = 6; digits <= 9; digits++) {
        snprintf(text, sizeof(text), "%.*g", digits, (double)number);
        if (strtof(text, NULL) == number) {
            break;
        }
    }
    ep_cli_table_cell(table, "%s", shape->form_told ? text : "-");
}

static json_t *told(const ep_layer_shape *shape, json_t *taken_value)
{
    if (shape->form_told) {
        return taken_value;
    }
    json_decref(taken_value);
    return json_null();
}

static void add_layer(listing *list, json_t *layers, const char *model, const char *version,
                      const ep_layer_shape *shape)
{
    const char *activation = ep_activation_name(shape->activation);
    const float numbers[] = {shape->numbers.alpha, shape->numbers.beta, shape->numbers.limit};
    json_array_append_new(
        layers,
        json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:s, s:o, s:o, s:o}", "layer",
                  (json_int_t)shape->layer, "hidden", (json_int_t)shape->hidden, "inner",
                  (json_int_t)shape->inner, "experts", (json_int_t)shape->experts, "top_k",
                  (json_int_t)shape->top_k, "shared_experts", (json_int_t)shape->shared_experts,
                  "shared_inner", told(shape, json_integer(shape->shared_inner)), "activation",
                  activation, "alpha", told(shape, json_real((double)numbers[0])), "beta",
                  told(shape, json_real((double)numbers[1])), "limit",
                  told(shape, json_real((double)numbers[2]))));
    ep_cli_table_cell(list->table, "%s", model);
    ep_cli_table_cell(list->table, "%s", version);
    const uint32_t sizes[] = {shape->layer,   shape->hidden, shape->inner,
                              shape->experts, shape->top_k,  shape->shared_experts};
    for (size_t i = 0; i < EP_ARRAY_COUNT(sizes); i++) {
        ep_cli_table_cell(list->table, "%" PRIu32, sizes[i]);
    }
    if (shape->form_told) {
        ep_cli_table_cell(list->table, "%" PRIu32, shape->shared_inner);
    } else {
        ep_cli_table_cell(list->table, "-");
    }
    ep_cli_table_cell(list->table, "%s", activation);
    for (size_t i = 0; i < EP_ARRAY_COUNT(numbers); i++) {
        number_cell(list->table, shape, numbers[i]);
    }
}

static json_t *add_model(listing *list, const char *model, const char *version)
{
    json_t *layers = json_array();
    json_array_append_new(list->models,
                          json_pack("{s:o, s:o, s:O}", "model",
                                    model != NULL ? ep_cli_json_text(model) : json_null(),
                                    "version", ep_cli_json_text(version), "layers", layers));
    json_decref(layers); /* kept by the list */
    return layers;
}

static ep_err list_checkpoint(listing *list, ep_error *out_error)
{
    ep_checkpoint *checkpoint = NULL;
    ep_err err = ep_checkpoint_open(wanted.checkpoint, &checkpoint, out_error);
    if (err != EP_OK) {
        return err;
    }
    const ep_model_info *info = ep_checkpoint_info(checkpoint);
    json_t *layers = add_model(list, NULL, info->version);
    for (uint32_t i = 0; i < info->moe_layers_count; i++) {
        ep_layer_shape shape = info->moe_layers[i];
        shape.form_told = true;
        shape.shared_inner = info->shared_inner[i];
        shape.numbers = info->numbers[i].routed;
        add_layer(list, layers, "-", info->version, &shape);
    }
    ep_checkpoint_close(checkpoint);
    return EP_OK;
}

static bool is_chosen(const ep_routing_model *model)
{
    return (wanted.model == NULL || strcmp(wanted.model, model->name) == 0) &&
           (wanted.version == NULL || strcmp(wanted.version, model->version) == 0);
}

static ep_err list_table(listing *list, const ep_routing_table *table, ep_error *out_error)
{
    bool found = false;
    for (uint32_t m = 0; m < table->models_count; m++) {
        const ep_routing_model *model = &table->models[m];
        if (!is_chosen(model)) {
            continue;
        }
        found = true;
        json_t *layers = add_model(list, model->name, model->version);
        for (uint32_t l = 0; l < table->layers_count; l++) {
            if (table->layers[l].model_index == m) {
                add_layer(list, layers, model->name, model->version, &table->layers[l].shape);
            }
        }
    }
    return found || (wanted.model == NULL && wanted.version == NULL)
               ? EP_OK
               : ep_cli_placement_missing(table, wanted.model, wanted.version, -1, out_error);
}

static ep_err list_service(listing *list, ep_error *out_error)
{
    ep_routing_table *table = NULL;
    ep_err err = ep_cli_placement_read(NULL, &ep_cli_peer, &table, out_error);
    err = err != EP_OK ? err : list_table(list, table, out_error);
    ep_routing_table_unref(table);
    return err;
}

static ep_err run(ep_cli_call *call, ep_error *out_error)
{
    listing list = {
        .table = ep_cli_table_create("3MODEL|VERSION|>LAYER|1>HIDDEN|1>INNER|1>EXPERTS|1>TOP-K|"
                                     "2>SHARED|>SHARED INNER|ACTIVATION|>ALPHA|>BETA|>LIMIT"),
        .models = json_array()};
    ep_err err = wanted.checkpoint != NULL ? list_checkpoint(&list, out_error)
                                           : list_service(&list, out_error);
    if (err == EP_OK) {
        call->failed = !ep_cli_output_print(list.table, list.models);
    } else {
        ep_cli_table_destroy(list.table);
        json_decref(list.models);
    }
    return err;
}

const ep_cli_command ep_cli_model_show_command = {
    .name = "show",
    .help = "prints what the layers of served models are, or of a checkpoint",
    .doc = "Prints version, sizes, activation and its numbers of each layer."
           "\vA version is a hash over config.json and each weight file's size, header and samples "
           "of its data, with the word of the format behind it where nodes hold the experts in "
           "another (weight_quant). So a caller with a checkpoint compares it with the service's: "
           "where they are equal the model is the same, but for weights changed in place between "
           "the samples. "
           "A LIMIT of 0 is none; '-' is not told, by nodes of an older version.\n\n"
           "Examples:\n"
           "  expertctl model show --model moe-30b\n"
           "  expertctl model show --checkpoint /models/moe-30b\n\n" EP_CLI_EXIT_HELP,
    .options = {.rows = rows, .count = EP_ARRAY_COUNT(rows), .check = check},
    .uses = {&ep_cli_connect_options, &ep_cli_output_options},
    .run = run,
};
