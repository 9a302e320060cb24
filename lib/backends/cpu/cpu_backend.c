/* SPDX-License-Identifier: Apache-2.0 */
/* The vtable of backend "cpu": packed weights within a budget, jobs to the schedule. */
#include "backends/cpu/cpu_backend.h"

#include <stdlib.h>
#include <string.h>

#include "backends/cpu/cpu_memory.h"
#include "backends/cpu/cpu_schedule.h"
#include "backends/host_common.h"
#include "backends/known_answer.h"
#include "base/check.h"
#include "base/cpu_features.h"

typedef struct cpu_backend {
    ep_backend base;
    ep_backend_budget budget;
    ep_known_answer answers[2]; /* indexed by wide_inputs */
    ep_numerics numerics;
    ep_cpu_topology *topology;
    ep_cpu_memory *memory; /* for weights */
    ep_cpu_schedule *schedule;
    _Atomic uint64_t node_bytes[EP_BACKEND_THREADS_MAX]; /* weights on each memory node */
    bool node_has_workers[EP_BACKEND_THREADS_MAX];
} cpu_backend;

static void cpu_close(ep_backend *base)
{
    cpu_backend *backend = (cpu_backend *)base;
    if (backend == NULL) {
        return;
    }
    ep_cpu_schedule_stop(backend->schedule);
    ep_cpu_memory_free(backend->memory);
    ep_cpu_topology_free(backend->topology);
    EP_ASSERT(atomic_load(&backend->budget.used_bytes) == 0);
    free(backend);
}

ep_err ep_cpu_backend_open_with(const ep_ffn_kernel *kernel, const ep_backend_config *config,
                                ep_backend **out_backend, ep_error *out_error)
{
    if (config->threads > EP_BACKEND_THREADS_MAX) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "compute threads is %u, allowed 0 to %u", config->threads,
                            EP_BACKEND_THREADS_MAX);
    }
    cpu_backend *backend = calloc(1, sizeof(*backend));
    if (backend == NULL || ep_cpu_topology_load(&backend->topology) != EP_OK ||
        (backend->memory = ep_cpu_memory_create(backend->topology)) == NULL) {
        cpu_close((ep_backend *)backend);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for backend cpu");
    }
    backend->base.ops = &ep_backend_cpu_ops;
    backend->numerics = config->numerics;
    const ep_ffn_kernel *kernels[EP_FFN_FAMILIES];
    for (unsigned family = 0; family < EP_FFN_FAMILIES; family++) {
        bool fits = kernel != NULL && (unsigned)kernel->family == family;
        kernels[family] = fits ? kernel : ep_ffn_kernel_of((ep_ffn_family)family);
    }
    const ep_cpu_schedule_config schedule = {
        .kernels = kernels,
        .topology = backend->topology,
        .threads = config->threads == 0 ? ep_cpu_topology_cpus(backend->topology) : config->threads,
        .pins = !config->unpinned,
    };
    for (uint32_t i = 0; i < schedule.threads; i++) {
        backend->node_has_workers[ep_cpu_topology_node(backend->topology, i, schedule.threads)] =
            true;
    }
    ep_err err = ep_cpu_schedule_start(&schedule, &backend->schedule);
    if (err != EP_OK) {
        cpu_close(&backend->base);
        return ep_error_set(out_error, err, "backend cpu cannot start %u threads",
                            schedule.threads);
    }
    err = ep_known_answer_run(&backend->base, config->numerics, backend->answers, out_error);
    if (err != EP_OK) {
        cpu_close(&backend->base);
        return err;
    }
    backend->budget.limit_bytes = config->memory_bytes;
    *out_backend = &backend->base;
    return EP_OK;
}

static ep_err cpu_open(const ep_backend_config *config, ep_backend **out_backend,
                       ep_error *out_error)
{
    ep_err err = ep_cpu_features_check(out_error);
    return err != EP_OK ? err : ep_cpu_backend_open_with(NULL, config, out_backend, out_error);
}

static ep_err cpu_numerics_id(ep_backend *base, ep_weight_format format, bool wide_inputs,
                              uint32_t others, char out_id[EP_NUMERICS_ID_BYTES])
{
    cpu_backend *backend = (cpu_backend *)base;
    const ep_numerics numerics = ep_numerics_of(backend->numerics, wide_inputs);
    return ep_known_answer_id(&backend->answers[wide_inputs],
                              ep_ffn_family_name(ep_numerics_family(numerics, format)), format,
                              others, out_id);
}

static ep_ffn_family family_of(const ep_backend *base, const ep_expert_source *source)
{
    const ep_numerics numerics =
        ep_numerics_of(((const cpu_backend *)base)->numerics, source->wide_inputs);
    return ep_numerics_expert_family(numerics, source->format, source->down_format);
}

static size_t cpu_weights_bytes(ep_backend *base, const ep_expert_source *source)
{
    return ep_expert_source_supported(source) ? ep_ffn_packed_bytes(source, family_of(base, source))
                                              : 0;
}

/* The memory node with the least weights, and adds these bytes to it. Only nodes with workers
 * count: elsewhere all reads would be remote. */
static uint32_t take_node(cpu_backend *backend, size_t bytes)
{
    const uint32_t nodes = ep_cpu_topology_nodes(backend->topology);
    uint32_t best = nodes;
    for (uint32_t i = 0; i < nodes; i++) {
        if (backend->node_has_workers[i] &&
            (best == nodes ||
             atomic_load(&backend->node_bytes[i]) < atomic_load(&backend->node_bytes[best]))) {
            best = i;
        }
    }
    EP_ASSERT(best < nodes); /* there is at least one worker */
    atomic_fetch_add(&backend->node_bytes[best], bytes);
    return best;
}

/* Allocates weights of this shape within the budget, not filled yet. source is checked. */
static ep_err make_weights(cpu_backend *backend, const ep_expert_source *source,
                           ep_cpu_weights **out_weights, ep_error *out_error)
{
    const size_t bytes = ep_ffn_packed_bytes(source, family_of(&backend->base, source));
    ep_err err = ep_backend_budget_take(&backend->budget, bytes, out_error);
    if (err != EP_OK) {
        return err;
    }
    ep_cpu_weights *weights = calloc(1, sizeof(*weights));
    const uint32_t node = take_node(backend, bytes);
    void *memory = weights == NULL ? NULL : ep_cpu_memory_take(backend->memory, bytes, node);
    if (memory == NULL) {
        free(weights);
        atomic_fetch_sub(&backend->node_bytes[node], bytes);
        ep_backend_budget_give(&backend->budget, bytes);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for an expert of %zu bytes",
                            bytes);
    }
    weights->base = (ep_backend_weights){.hidden = source->hidden,
                                         .inner = source->inner,
                                         .format = source->format,
                                         .down_format = ep_expert_down_format(source)};
    weights->outline = ep_expert_source_outline(source);
    weights->memory = memory;
    weights->bytes = bytes;
    weights->node = node;
    *out_weights = weights;
    return EP_OK;
}

static ep_err cpu_weights_load(ep_backend *base, const ep_expert_source *source,
                               ep_backend_weights **out_weights, ep_error *out_error)
{
    ep_cpu_weights *weights;
    ep_err err = ep_expert_source_check(source, out_error);
    if (err != EP_OK) {
        return err;
    }
    err = make_weights((cpu_backend *)base, source, &weights, out_error);
    if (err != EP_OK) {
        return err;
    }
    ep_ffn_pack(source, family_of(base, source), weights->memory, &weights->packed);
    *out_weights = &weights->base;
    return EP_OK;
}

static void cpu_weights_unload(ep_backend *base, ep_backend_weights *base_weights)
{
    ep_cpu_weights *weights = (ep_cpu_weights *)base_weights;
    cpu_backend *backend = (cpu_backend *)base;
    if (weights != NULL) {
        ep_backend_budget_give(&backend->budget, weights->bytes);
        atomic_fetch_sub(&backend->node_bytes[weights->node], weights->bytes);
        ep_cpu_memory_give(backend->memory, weights->memory, weights->bytes);
        free(weights);
    }
}

static const char *cpu_packed_layout(ep_backend *base)
{
    static const char *const layouts[2][EP_FFN_FAMILIES] = {
        {EP_FFN_PACKED_LAYOUT, EP_FFN_PACKED_LAYOUT "-bf16dp", EP_FFN_PACKED_LAYOUT "-bf16odd"},
        {EP_FFN_PACKED_LAYOUT "-w4a8", EP_FFN_PACKED_LAYOUT "-bf16dp-w4a8"}};
    const ep_numerics numerics = ((cpu_backend *)base)->numerics;
    /* The family of bf16 tells those of the other formats. Only whether 4-bit formats use w4a8 is
     * told by the family of mxfp4. */
    const bool is_narrow = ep_numerics_family(numerics, EP_WEIGHTS_MXFP4) == EP_FFN_FAMILY_W4A8;
    return layouts[is_narrow][ep_numerics_family(numerics, EP_WEIGHTS_BF16)];
}

static void cpu_weights_export(ep_backend *base, const ep_backend_weights *base_weights,
                               ep_packed_view *out_view)
{
    const ep_cpu_weights *weights = (const ep_cpu_weights *)base_weights;
    (void)base;
    *out_view = (ep_packed_view){.head = &weights->outline,
                                 .head_bytes = sizeof(weights->outline),
                                 .body = weights->memory,
                                 .body_bytes = weights->bytes};
}

static ep_err
cpu_weights_import(ep_backend *base, const void *head, size_t head_bytes, size_t body_bytes,
                   ep_err (*fill)(void *arg, void *body, size_t body_bytes, ep_error *out_error),
                   void *arg, ep_backend_weights **out_weights, ep_error *out_error)
{
    ep_expert_source outline;
    ep_cpu_weights *weights;
    if (head_bytes != sizeof(outline)) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE,
                            "the packed expert's head has %zu bytes, allowed %zu", head_bytes,
                            sizeof(outline));
    }
    memcpy(&outline, head, sizeof(outline));
    ep_err err = ep_expert_source_check(&outline, out_error);
    if (err != EP_OK) {
        return err;
    }
    const size_t bytes = cpu_weights_bytes(base, &outline);
    if (bytes != body_bytes) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE,
                            "the packed expert has %zu bytes, allowed %zu by its shape", body_bytes,
                            bytes);
    }
    err = make_weights((cpu_backend *)base, &outline, &weights, out_error);
    if (err != EP_OK) {
        return err;
    }
    err = fill(arg, weights->memory, bytes, out_error);
    if (err != EP_OK) {
        cpu_weights_unload(base, &weights->base);
        return err;
    }
    ep_ffn_packed_place(&outline, family_of(base, &outline), weights->memory, &weights->packed);
    *out_weights = &weights->base;
    return EP_OK;
}

static ep_err cpu_submit(ep_backend *base, ep_job *job)
{
    ep_err err = ep_job_check(job);
    return err != EP_OK ? err : ep_cpu_schedule_submit(((cpu_backend *)base)->schedule, job);
}

ep_cpu_counts ep_cpu_backend_counts(const ep_backend *base)
{
    return ep_cpu_schedule_counts(((const cpu_backend *)base)->schedule);
}

const ep_backend_ops ep_backend_cpu_ops = {
    .api_version = EP_BACKEND_API_VERSION,
    .name = "cpu",
    .memory = EP_MEMORY_HOST,
    .open = cpu_open,
    .close = cpu_close,
    .numerics_id = cpu_numerics_id,
    .weights_bytes = cpu_weights_bytes,
    .weights_load = cpu_weights_load,
    .weights_unload = cpu_weights_unload,
    .packed_layout = cpu_packed_layout,
    .weights_export = cpu_weights_export,
    .weights_import = cpu_weights_import,
    .submit = cpu_submit,
};
