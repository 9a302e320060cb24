/* SPDX-License-Identifier: Apache-2.0 */
/* The error that weight_quant makes: kept for each layer, logged once for each model. */
#include <stdio.h>

#include "base/log.h"
#include "expertd/weight_judge.h"
#include "expertd/weight_store_private.h"

static double greater(double a, double b)
{
    return a > b ? a : b;
}

void ep_weight_errors_take(ep_weight_store *store, layer_entry *layer, uint32_t expert,
                           double error, double output_error)
{
    layer->quant_worst = error > layer->quant.error ? expert : layer->quant_worst;
    layer->quant.error = greater(layer->quant.error, error);
    layer->quant.output_error = greater(layer->quant.output_error, output_error);
    store->stats.quant.error = greater(store->stats.quant.error, error);
    store->stats.quant.output_error = greater(store->stats.quant.output_error, output_error);
}

void ep_weight_errors_judge(ep_weight_store *store, const ep_resident *resident)
{
    layer_entry *layer = &store->layers[resident->layer_slot];
    ep_weight_judgement judgement;
    if (ep_checkpoint_info(layer->layer.checkpoint)->quant == NULL || layer->is_judged) {
        return;
    }
    if (ep_weight_judge(layer->layer.checkpoint, layer->layer.shape.layer, resident->expert,
                        &judgement, NULL) == EP_OK) {
        layer->is_judged = true;
        pthread_mutex_lock(&store->lock);
        ep_weight_errors_take(store, layer, resident->expert, judgement.weights, judgement.outputs);
        pthread_mutex_unlock(&store->lock);
    }
}

/* Logs one line for a model, whose layers begin at *io_slot; leaves *io_slot behind the last of
 * them. Needs no lock, as only the loader's thread writes what this reads. */
static void say_model(ep_weight_store *store, uint32_t *io_slot)
{
    const layer_entry *layers = store->layers;
    const uint32_t first = *io_slot;
    const ep_model_info *info = ep_checkpoint_info(layers[first].layer.checkpoint);
    uint32_t weights = first, outputs = first, slot = first;
    for (; slot < store->layers_count &&
           layers[slot].layer.checkpoint == layers[first].layer.checkpoint;
         slot++) {
        weights = layers[slot].quant.error > layers[weights].quant.error ? slot : weights;
        outputs =
            layers[slot].quant.output_error > layers[outputs].quant.output_error ? slot : outputs;
    }
    *io_slot = slot;
    if (layers[weights].quant.error > 0) {
        char error[32], error_max[32], output_error[32];
        snprintf(error, sizeof(error), "%.4f", layers[weights].quant.error);
        snprintf(error_max, sizeof(error_max), "%g", info->quant->error_max);
        snprintf(output_error, sizeof(output_error), "%.4f", layers[outputs].quant.output_error);
        ep_log(EP_LOG_INFO, "weight-quant", EP_KV(model, layers[first].layer.model),
               EP_KV(version, info->version), EP_KV(weight_quant, info->quant->name),
               EP_KV(error, (const char *)error), EP_KV(layer, layers[weights].layer.shape.layer),
               EP_KV(expert, layers[weights].quant_worst),
               EP_KV(error_max, (const char *)error_max),
               EP_KV(output_error, (const char *)output_error),
               EP_KV(output_layer, layers[outputs].layer.shape.layer));
    }
}

void ep_weight_errors_say(ep_weight_store *store)
{
    double sum = 0;
    for (uint32_t l = 0; l < store->layers_count; l++) {
        sum += store->layers[l].quant.error + store->layers[l].quant.output_error;
    }
    for (uint32_t l = 0; sum != store->said_errors && l < store->layers_count;) {
        if (ep_checkpoint_info(store->layers[l].layer.checkpoint)->quant == NULL) {
            l++;
        } else {
            say_model(store, &l);
        }
    }
    store->said_errors = sum;
}
