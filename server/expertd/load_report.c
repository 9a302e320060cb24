/* SPDX-License-Identifier: Apache-2.0 */
#include "expertd/load_report.h"

#include <stdlib.h>

#include "base/clock.h"

/* One layer of one model, in the order of the models. */
typedef struct layer_entry {
    const ep_node_model *model;
    ep_node_layer *layer;
    uint64_t told; /* sum of its slots in the last report */
} layer_entry;

struct ep_load_report {
    uint32_t count;
    uint32_t next; /* where the next message begins, so that every layer gets its turn */
    uint64_t next_ns;
    layer_entry entries[];
};

ep_err ep_load_report_create(const ep_node_models *models, ep_load_report **out_report)
{
    uint32_t count = 0;
    for (uint32_t m = 0; m < models->count; m++) {
        count += models->models[m].layers_count;
    }
    ep_load_report *report = calloc(1, sizeof(*report) + count * sizeof(report->entries[0]));
    if (report == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    for (uint32_t m = 0; m < models->count; m++) {
        for (uint32_t l = 0; l < models->models[m].layers_count; l++) {
            report->entries[report->count++] =
                (layer_entry){&models->models[m], &models->models[m].layers[l], 0};
        }
    }
    *out_report = report;
    return EP_OK;
}

void ep_load_report_destroy(ep_load_report *report)
{
    free(report);
}

void ep_load_report_forget(ep_load_report *report)
{
    for (uint32_t i = 0; i < report->count; i++) {
        report->entries[i].told = 0;
    }
    report->next_ns = 0;
}

static uint64_t sum_slots(const ep_node_layer *layer)
{
    uint64_t sum = 0;
    for (uint32_t e = 0; e < layer->shape.experts; e++) {
        sum += atomic_load_explicit(&layer->slots[e], memory_order_relaxed);
    }
    return sum;
}

static void free_load(Expertd__V1__LayerLoad *load)
{
    if (load != NULL) {
        free(load->experts);
        free(load->slots);
        free(load->passes);
        free(load);
    }
}

/* *out_sum: sum of the counts read here; what is added meanwhile comes with the next report. */
static Expertd__V1__LayerLoad *make_load(const layer_entry *entry, uint64_t *out_sum)
{
    const ep_node_layer *layer = entry->layer;
    Expertd__V1__LayerLoad *load = malloc(sizeof(*load));
    if (load == NULL) {
        return NULL;
    }
    expertd__v1__layer_load__init(load);
    load->experts = malloc(layer->shape.experts * sizeof(*load->experts));
    load->slots = malloc(layer->shape.experts * sizeof(*load->slots));
    load->passes = malloc(layer->shape.experts * sizeof(*load->passes));
    if (load->experts == NULL || load->slots == NULL || load->passes == NULL) {
        free_load(load);
        return NULL;
    }
    load->model = (char *)(uintptr_t)entry->model->config->name;
    load->version = (char *)(uintptr_t)entry->model->info->version;
    load->layer = layer->shape.layer;
    *out_sum = 0;
    for (uint32_t e = 0; e < layer->shape.experts; e++) {
        uint64_t slots = atomic_load_explicit(&layer->slots[e], memory_order_relaxed);
        if (slots > 0) {
            load->experts[load->n_experts++] = e;
            load->slots[load->n_slots++] = slots;
            load->passes[load->n_passes++] =
                atomic_load_explicit(&layer->queues[e].passes, memory_order_relaxed);
            *out_sum += slots;
        }
    }
    return load;
}

void ep_load_report_make(ep_load_report *report, uint64_t now_ns, bool hurry,
                         Expertd__V1__LayerLoad ***out_loads, size_t *out_count)
{
    size_t room = EP_LOAD_REPORT_EXPERTS_MAX;
    *out_loads = NULL;
    *out_count = 0;
    if ((now_ns < report->next_ns && !hurry) || report->count == 0) {
        return;
    }
    Expertd__V1__LayerLoad **loads = calloc(report->count, sizeof(Expertd__V1__LayerLoad *));
    uint32_t first = report->next;
    for (uint32_t i = 0; loads != NULL && i < report->count; i++) {
        layer_entry *entry = &report->entries[(first + i) % report->count];
        uint64_t sum;
        if (sum_slots(entry->layer) == entry->told) {
            continue;
        }
        if (entry->layer->shape.experts > room && *out_count > 0) {
            report->next = (first + i) % report->count;
            break;
        }
        Expertd__V1__LayerLoad *load = make_load(entry, &sum);
        if (load == NULL) {
            break;
        }
        entry->told = sum;
        room -= load->n_experts < room ? load->n_experts : room;
        loads[(*out_count)++] = load;
    }
    if (*out_count == 0) {
        free(loads);
        return;
    }
    report->next_ns = now_ns + EP_LOAD_REPORT_MS * EP_NS_PER_MS;
    *out_loads = loads;
}

void ep_load_report_free(Expertd__V1__LayerLoad **loads, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        free_load(loads[i]);
    }
    free(loads);
}
