/* SPDX-License-Identifier: Apache-2.0 */
/* The node's services: ExpertService and NodeInfo, and the models in Hello. */
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "base/clock.h"
#include "common/version.h"
#include "expertd/node_private.h"

static void finish_no_memory(ep_rpc_call *call)
{
    ep_error error;
    ep_error_set(&error, EP_ERR_NO_MEMORY, "no memory for the reply");
    ep_rpc_call_finish(call, EP_ERR_NO_MEMORY, &error);
}

static void service_forward(Expertd__V1__ExpertService_Service *service,
                            const Expertd__V1__ForwardRequest *input,
                            Expertd__V1__ForwardReply_Closure closure, void *closure_data)
{
    ep_node *node = ((ep_node_expert_service *)(void *)service)->node;
    ep_forward_handler_call(node->handler, input, closure, closure_data);
}

static void service_describe(Expertd__V1__ExpertService_Service *service,
                             const Expertd__V1__Empty *input,
                             Expertd__V1__DescribeReply_Closure closure, void *closure_data)
{
    const ep_node *node = ((ep_node_expert_service *)(void *)service)->node;
    Expertd__V1__DescribeReply reply = EXPERTD__V1__DESCRIBE_REPLY__INIT;
    (void)input;
    if (ep_node_models_describe(&node->models, false, &reply.models, &reply.n_models) != EP_OK) {
        finish_no_memory(closure_data);
        return;
    }
    reply.node = (char *)(uintptr_t)node->config->name;
    reply.incarnation = node->incarnation;
    closure(&reply, closure_data);
    ep_node_models_infos_free(reply.models, reply.n_models);
    ep_rpc_call_finish(closure_data, EP_OK, NULL);
}

/* One entry per layer; the array of pointers and the entries are one allocation each. */
static bool fill_layers(const ep_node *node, Expertd__V1__NodeStatusReply *reply,
                        Expertd__V1__LayerStatus **out_layers)
{
    size_t count = 0;
    for (uint32_t m = 0; m < node->models.count; m++) {
        count += node->models.models[m].layers_count;
    }
    Expertd__V1__LayerStatus *layers = calloc(count + 1, sizeof(*layers));
    reply->layers = calloc(count + 1, sizeof(*reply->layers));
    *out_layers = layers;
    if (layers == NULL || reply->layers == NULL) {
        return false;
    }
    for (uint32_t m = 0; m < node->models.count; m++) {
        const ep_node_model *model = &node->models.models[m];
        for (uint32_t l = 0; l < model->layers_count; l++) {
            Expertd__V1__LayerStatus *status = &layers[reply->n_layers];
            expertd__v1__layer_status__init(status);
            status->model = (char *)(uintptr_t)model->config->name;
            status->version = (char *)(uintptr_t)model->info->version;
            status->layer = model->layers[l].shape.layer;
            status->experts_resident =
                ep_weight_store_resident_count(node->store, model->layers[l].store_slot);
            const ep_weight_quant_stats quant =
                ep_weight_store_quant(node->store, model->layers[l].store_slot);
            status->weight_quant_error = quant.error;
            status->weight_quant_output_error = quant.output_error;
            status->rows_served =
                atomic_load_explicit(&model->layers[l].rows_served, memory_order_relaxed);
            reply->layers[reply->n_layers++] = status;
        }
    }
    return true;
}

/* As fill_layers. */
static bool fill_devices(const ep_node *node, Expertd__V1__NodeStatusReply *reply,
                         Expertd__V1__DeviceStatus **out_devices)
{
    Expertd__V1__DeviceStatus *all = calloc(node->devices.count + 1, sizeof(*all));
    reply->devices = calloc(node->devices.count + 1, sizeof(*reply->devices));
    *out_devices = all;
    if (all == NULL || reply->devices == NULL) {
        return false;
    }
    for (uint32_t d = 0; d < node->devices.count; d++) {
        const ep_node_device *device = &node->devices.devices[d];
        Expertd__V1__DeviceStatus *status = &all[reply->n_devices];
        expertd__v1__device_status__init(status);
        status->device = d;
        if (atomic_load(&device->is_lost)) {
            status->lost_why = (char *)(uintptr_t)device->lost_why;
        }
        if (device->backend != NULL) {
            ep_backend_device figures;
            device->backend->ops->device_read(device->backend, &figures);
            status->memory_bytes = figures.memory_bytes;
            status->free_bytes = figures.free_bytes;
            status->weight_bytes_max = figures.weight_bytes_max;
            status->weight_bytes = ep_weight_store_device_bytes(node->store, device->store_index);
        }
        reply->devices[reply->n_devices++] = status;
    }
    return true;
}

/* Fills in how near the node is to its limits. */
static void fill_load(ep_node *node, Expertd__V1__NodeStatusReply *reply)
{
    ep_admission_stats admission;
    ep_batcher_stats jobs;
    ep_rpc_server_stats rpc;
    struct timespec now;
    ep_admission_read_stats(node->admission, &admission);
    ep_batcher_read_stats(node->batcher, &jobs);
    ep_rpc_server_read_stats(node->server, &rpc);
    clock_gettime(CLOCK_REALTIME, &now);
    reply->tokens_in_flight = admission.tokens_used;
    reply->inflight_tokens = node->inflight_tokens;
    reply->spill_used_bytes = admission.spill_used_bytes;
    reply->spill_bytes = node->config->spill_bytes;
    reply->requests_refused = admission.refused_total;
    for (int c = 0; c < EP_WORK_CLASSES; c++) {
        reply->jobs_waiting += jobs.waiting[c];
    }
    reply->software = (char *)(uintptr_t)ep_version_software();
    reply->clock_us = (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
    reply->connections = rpc.connections;
    reply->connections_max = node->config->service.limits.connections_max;
}

static void service_node_status(Expertd__V1__NodeInfo_Service *service,
                                const Expertd__V1__Empty *input,
                                Expertd__V1__NodeStatusReply_Closure closure, void *closure_data)
{
    ep_node *node = ((ep_node_info_service *)(void *)service)->node;
    Expertd__V1__NodeStatusReply reply = EXPERTD__V1__NODE_STATUS_REPLY__INIT;
    Expertd__V1__Epoch epoch = EXPERTD__V1__EPOCH__INIT;
    Expertd__V1__LayerStatus *layers = NULL;
    Expertd__V1__DeviceStatus *devices = NULL;
    ep_forward_stats requests;
    ep_weight_stats weights;
    char tls_error[EP_ERROR_TEXT_BYTES];
    ep_membership_view view = {.is_connected = true};
    (void)input;
    if (node->membership != NULL) {
        ep_membership_read(node->membership, &view);
    }
    ep_forward_handler_read_stats(node->handler, &requests);
    ep_weight_store_read_stats(node->store, &weights);
    ep_epoch loaded = ep_node_epoch_loaded(&node->epoch);
    epoch.term = loaded.term;
    epoch.number = loaded.number;
    reply.node = (char *)(uintptr_t)node->config->name;
    reply.state = (char *)(uintptr_t)ep_node_state_text(node);
    reply.incarnation = node->incarnation;
    reply.epoch = &epoch;
    reply.rows_served = requests.rows_served;
    reply.requests_served = requests.served;
    reply.requests_failed = requests.failed;
    reply.requests_hedged = requests.hedged;
    reply.requests_in_flight = requests.in_flight;
    reply.weight_bytes = weights.resident_bytes;
    reply.uptime_us = (ep_clock_now_ns() - node->started_ns) / EP_NS_PER_US;
    reply.last_error = weights.last_error;
    reply.experts_failed = weights.failed_count;
    reply.experts_pending = weights.pending_count;
    reply.coordinator_lost = !view.is_connected;
    reply.coordinator_error = view.lost_why;
    ep_tls_watch_refusal(&node->tls_watch, tls_error);
    reply.tls_error = tls_error;
    fill_load(node, &reply);
    if (fill_layers(node, &reply, &layers) && fill_devices(node, &reply, &devices)) {
        closure(&reply, closure_data);
        ep_rpc_call_finish(closure_data, EP_OK, NULL);
    } else {
        finish_no_memory(closure_data);
    }
    free(layers);
    free(reply.layers);
    free(devices);
    free(reply.devices);
}

void ep_node_services_init(ep_node *node)
{
    node->expert_service =
        (ep_node_expert_service){.base = EXPERTD__V1__EXPERT_SERVICE__INIT(service_), .node = node};
    node->info_service =
        (ep_node_info_service){.base = EXPERTD__V1__NODE_INFO__INIT(service_), .node = node};
}

void ep_node_hello_fill(void *arg, Expertd__V1__Hello *hello)
{
    const ep_node *node = arg;
    if (ep_node_models_describe(&node->models, false, &hello->models, &hello->n_models) != EP_OK) {
        /* without memory the Hello has no models; the peer may ask Describe later */
        hello->models = NULL;
        hello->n_models = 0;
    }
}

void ep_node_hello_free(void *arg, Expertd__V1__Hello *hello)
{
    (void)arg;
    ep_node_models_infos_free(hello->models, hello->n_models);
    hello->models = NULL;
    hello->n_models = 0;
}
