/* SPDX-License-Identifier: Apache-2.0 */
#include "coordinator/statistics.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "moe/load_statistics.h"

static bool is_asked(const Expertd__V1__StatisticsRequest *request, const ep_load_layer *layer)
{
    return (request->model[0] == 0 || strcmp(request->model, layer->model) == 0) &&
           (request->version[0] == 0 || strcmp(request->version, layer->version) == 0) &&
           (!request->has_layer || request->layer == layer->layer);
}

/* Borrows from layer; means is scratch [experts] for the mean probabilities. */
static ep_err describe(const ep_load_layer *layer, bool per_expert,
                       Expertd__V1__LayerStatistics *out, double **out_means)
{
    ep_load_statistics statistics;
    ep_err err = ep_load_statistics_compute(layer->counts, layer->experts, layer->probability_sums,
                                            layer->tokens, &statistics);
    if (err != EP_OK) {
        return err;
    }
    expertd__v1__layer_statistics__init(out);
    out->model = (char *)(uintptr_t)layer->model;
    out->version = (char *)(uintptr_t)layer->version;
    out->layer = layer->layer;
    out->experts = layer->experts;
    out->slots = statistics.slots;
    out->max_over_mean = statistics.max_over_mean;
    out->max_expert = statistics.max_expert;
    out->gini = statistics.gini;
    out->logit_tokens = layer->tokens;
    out->auxiliary_loss = statistics.auxiliary_loss;
    if (!per_expert) {
        return EP_OK;
    }
    out->counts = layer->counts;
    out->n_counts = layer->experts;
    if (layer->tokens > 0) {
        double *means = malloc(layer->experts * sizeof(*means));
        if (means == NULL) {
            return EP_ERR_NO_MEMORY;
        }
        for (uint32_t e = 0; e < layer->experts; e++) {
            means[e] = layer->probability_sums[e] / (double)layer->tokens;
        }
        out->mean_probability = means;
        out->n_mean_probability = layer->experts;
        *out_means = means;
    }
    return EP_OK;
}

/* Packs and sends the reply for the requested layers. NOT_FOUND: a named one is not there. */
static ep_err reply(const ep_load_layer *layers, size_t count,
                    ep_statistics_balance_func balance_of, void *arg,
                    const Expertd__V1__StatisticsRequest *request,
                    Expertd__V1__StatisticsReply_Closure closure, ep_rpc_call *call)
{
    Expertd__V1__StatisticsReply message = EXPERTD__V1__STATISTICS_REPLY__INIT;
    Expertd__V1__LayerStatistics *entries = calloc(count + 1, sizeof(*entries));
    Expertd__V1__LayerStatistics **list = calloc(count + 1, sizeof(Expertd__V1__LayerStatistics *));
    double **means = calloc(count + 1, sizeof(double *));
    ep_coordinator_balance balance;
    ep_err err = entries != NULL && list != NULL && means != NULL ? EP_OK : EP_ERR_NO_MEMORY;
    for (size_t i = 0; err == EP_OK && i < count; i++) {
        if (is_asked(request, &layers[i])) {
            list[message.n_layers] = &entries[i];
            message.n_layers++;
            err = describe(&layers[i], request->per_expert, &entries[i], &means[i]);
            if (err == EP_OK &&
                balance_of(arg, layers[i].model, layers[i].version, layers[i].layer, &balance)) {
                entries[i].busiest_over_mean = balance.busiest_over_mean;
                entries[i].busiest_over_bound = balance.busiest_over_bound;
            }
        }
    }
    bool names_some = request->model[0] != 0 || request->version[0] != 0 || request->has_layer;
    if (err == EP_OK && (message.n_layers > 0 || !names_some)) {
        message.layers = list;
        closure(&message, call);
    }
    for (size_t i = 0; means != NULL && i < count; i++) {
        free(means[i]);
    }
    free(means);
    free(list);
    free(entries);
    return err == EP_OK && message.n_layers == 0 && names_some ? EP_ERR_NOT_FOUND : err;
}

/* The error: names the request (an empty model or version means all) and lists what there is. */
static void not_found(const Expertd__V1__StatisticsRequest *request, const ep_load_layer *layers,
                      size_t count, ep_error *out_error)
{
    char layer[24] = "any layer", model[128] = "any model", version[64] = "", known[192] = "none";
    size_t used = 0;
    for (size_t l = 0; l < count && used < sizeof(known); l++) {
        used += (size_t)snprintf(known + used, sizeof(known) - used, "%s%s:%s layer %" PRIu32,
                                 l > 0 ? ", " : "", layers[l].model, layers[l].version,
                                 layers[l].layer);
    }
    if (request->has_layer) {
        snprintf(layer, sizeof(layer), "layer %" PRIu32, request->layer);
    }
    if (request->model[0] != 0) {
        snprintf(model, sizeof(model), "model '%.100s'", request->model);
    }
    if (request->version[0] != 0) {
        snprintf(version, sizeof(version), " version '%.31s'", request->version);
    }
    ep_error_set(out_error, EP_ERR_NOT_FOUND,
                 "nothing was computed yet in %s of %s%s; there are loads of: %s", layer, model,
                 version, known);
}

void ep_statistics_answer(ep_load_sums *loads, ep_statistics_balance_func balance_of, void *arg,
                          const Expertd__V1__StatisticsRequest *request,
                          Expertd__V1__StatisticsReply_Closure closure, ep_rpc_call *call)
{
    ep_load_layer *layers = NULL;
    size_t count = 0;
    ep_error error;
    ep_err err = ep_load_sums_read(loads, &layers, &count);
    err = err != EP_OK ? err : reply(layers, count, balance_of, arg, request, closure, call);
    if (err == EP_ERR_NOT_FOUND) {
        not_found(request, layers, count, &error);
    } else if (err != EP_OK) {
        ep_error_set(&error, err, "no memory for statistics");
    }
    ep_load_layers_free(layers, count);
    ep_rpc_call_finish(call, err, err == EP_OK ? NULL : &error);
}

/* ---- metrics ---- */

static void collect_experts(const ep_load_layer *layer, const ep_metric_label *labels,
                            ep_metrics *metrics)
{
    ep_metric_label all[4] = {labels[0], labels[1], labels[2]};
    for (uint32_t e = 0; e < layer->experts; e++) {
        char text[16];
        snprintf(text, sizeof(text), "%" PRIu32, e);
        all[3] = (ep_metric_label){"expert", text};
        ep_counter_set(metrics, "expertd_expert_slots_total", "Slots computed, by routed expert",
                       all, 4, layer->counts[e]);
    }
}

static void collect_layer(const ep_load_layer *layer, ep_metrics *metrics, bool per_expert)
{
    char number[16];
    ep_load_statistics statistics;
    snprintf(number, sizeof(number), "%" PRIu32, layer->layer);
    const ep_metric_label labels[] = {
        {"model", layer->model}, {"version", layer->version}, {"layer", number}};
    size_t count = EP_ARRAY_COUNT(labels);
    if (ep_load_statistics_compute(layer->counts, layer->experts, layer->probability_sums,
                                   layer->tokens, &statistics) != EP_OK) {
        return;
    }
    ep_counter_set(metrics, "expertd_layer_slots_total", "Slots computed by routed experts", labels,
                   count, statistics.slots);
    ep_gauge_set(metrics, "expertd_layer_load_max_over_mean",
                 "Load of the fullest routed expert over the mean", labels, count,
                 statistics.max_over_mean);
    ep_gauge_set(metrics, "expertd_layer_load_gini",
                 "Gini coefficient of routed experts' loads, 0 even", labels, count,
                 statistics.gini);
    if (layer->tokens > 0) {
        ep_gauge_set(metrics, "expertd_layer_auxiliary_loss",
                     "Load-balancing loss, 1 even; where logits were seen", labels, count,
                     statistics.auxiliary_loss);
    }
    if (per_expert) {
        collect_experts(layer, labels, metrics);
    }
}

/* One series per model, for its worst layer, since one per layer would be too many. A model's
 * layers are adjacent. */
static void collect_placement(const ep_load_layer *layers, size_t count,
                              ep_statistics_balance_func balance_of, void *arg, ep_metrics *metrics)
{
    for (size_t begin = 0, end = 0; begin < count; begin = end) {
        const ep_load_layer *first = &layers[begin];
        const ep_metric_label labels[] = {{"model", first->model}, {"version", first->version}};
        ep_coordinator_balance worst = {0}, balance;
        for (; end < count && strcmp(layers[end].model, first->model) == 0 &&
               strcmp(layers[end].version, first->version) == 0;
             end++) {
            if (balance_of(arg, first->model, first->version, layers[end].layer, &balance)) {
                worst.busiest_over_mean = fmax(worst.busiest_over_mean, balance.busiest_over_mean);
                worst.busiest_over_bound =
                    fmax(worst.busiest_over_bound, balance.busiest_over_bound);
            }
        }
        ep_gauge_set(
            metrics, "expertd_placement_busiest_over_mean",
            "Load of the busiest node over the mean of all, in the layer where it is worst; "
            "0 not known",
            labels, EP_ARRAY_COUNT(labels), worst.busiest_over_mean);
        ep_gauge_set(metrics, "expertd_placement_busiest_over_bound",
                     "Load of the busiest node over the least that any placement can have, in "
                     "the layer where it is worst; 0 not known",
                     labels, EP_ARRAY_COUNT(labels), worst.busiest_over_bound);
    }
}

void ep_statistics_collect(ep_load_sums *loads, ep_statistics_balance_func balance_of, void *arg,
                           ep_metrics *metrics, bool per_expert)
{
    ep_load_layer *layers = NULL;
    size_t count = 0;
    if (ep_load_sums_read(loads, &layers, &count) != EP_OK) {
        return;
    }
    for (size_t i = 0; i < count; i++) {
        collect_layer(&layers[i], metrics, per_expert);
    }
    collect_placement(layers, count, balance_of, arg, metrics);
    ep_load_layers_free(layers, count);
}
