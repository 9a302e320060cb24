/* SPDX-License-Identifier: Apache-2.0 */
#include "backends/ascend/ascend_slot.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "kernels/ffn_activation.h"
#include "kernels/ffn_widen.h"

#define PART_ALIGN 512                                     /* of everything inside a block */
#define COUNTS_BYTES (EP_ACL_GROUPS_MAX * sizeof(int64_t)) /* a multiple of PART_ALIGN: rows follow */
_Static_assert(COUNTS_BYTES % PART_ALIGN == 0 && PART_ALIGN % EP_ACL_ALIGN == 0, "every tensor's address is aligned");

/* Where what lies, for the slot's jobs. */
typedef struct layout {
    uint32_t hidden;
    uint32_t inner;
    bool is_quant;
    ep_acl_data_type x_type;
    ep_acl_data_type type; /* of what is computed */
    ep_dtype dtype;        /* the same, as ours */
    size_t in_bytes;       /* counts, rows and their scales: from 0 on in the stage and on the device */
    size_t x_scales;
    size_t out_bytes;
    size_t out_stage; /* in the stage; the rest on the device */
    size_t gate_up;
    size_t activated;
    size_t quant;
    size_t quant_scales;
    size_t out_device;
    size_t memory_bytes;
} layout;

static size_t part(size_t rows, size_t columns, size_t element)
{
    return ep_align_up(rows * columns * element, PART_ALIGN);
}

static layout lay_out(const ep_ascend_slot *slot)
{
    const ep_backend_weights *weights = slot->jobs[0]->weights;
    const size_t rows = slot->rows_count;
    const bool is_f16 = weights->format == EP_WEIGHTS_F16;
    const bool is_quant = weights->format == EP_WEIGHTS_W8A8;
    layout l = {.hidden = weights->hidden,
                .inner = weights->inner,
                .is_quant = is_quant,
                .type = is_f16 ? EP_ACL_FLOAT16 : EP_ACL_BF16,
                .dtype = is_f16 ? EP_DTYPE_F16 : EP_DTYPE_BF16};
    l.x_type = is_quant ? EP_ACL_INT8 : l.type;
    l.x_scales = COUNTS_BYTES + part(rows, l.hidden, is_quant ? sizeof(int8_t) : sizeof(uint16_t));
    l.in_bytes = l.x_scales + (is_quant ? part(rows, 1, sizeof(float)) : 0);
    l.out_bytes = rows * l.hidden * sizeof(uint16_t);
    l.out_stage = l.in_bytes;
    l.gate_up = l.in_bytes;
    l.activated = l.gate_up + part(rows, 2 * l.inner, sizeof(uint16_t));
    l.quant = l.activated + part(rows, l.inner, sizeof(uint16_t));
    l.quant_scales = l.quant + (is_quant ? part(rows, l.inner, sizeof(int8_t)) : 0);
    l.out_device = l.quant_scales + (is_quant ? part(rows, 1, sizeof(float)) : 0);
    l.memory_bytes = l.out_device + l.out_bytes;
    return l;
}

void ep_ascend_stream_destroy(ep_ascend_device *device, ep_acl_stream stream)
{
    if (stream == NULL) {
        return;
    }
    if (atomic_load(&device->lost) && device->acl.aclrtDestroyStreamForce != NULL) {
        (void)device->acl.aclrtDestroyStreamForce(stream);
    } else {
        (void)device->acl.aclrtDestroyStream(stream);
    }
}

/* ---- memory ---- */

/* Streams wait for them, and so does the finisher: each is a use that is asked for. */
ep_err ep_ascend_slot_init(ep_ascend_slot *slot, ep_ascend_device *device, ep_error *out_error)
{
    ep_acl_event *const events[] = {&slot->ready, &slot->computed, &slot->done};
    const uint32_t flags = EP_ACL_EVENT_SYNC | EP_ACL_EVENT_PROGRESS;
    ep_err err = EP_OK;
    for (size_t i = 0; i < EP_ARRAY_COUNT(events) && err == EP_OK; i++) {
        err = EP_ASCEND_CALL(device, out_error, aclrtCreateEventExWithFlag, events[i], flags);
    }
    return err;
}

static ep_err grow_device(ep_ascend_device *device, void **memory, size_t *bytes, size_t need)
{
    if (need <= *bytes) {
        return EP_OK;
    }
    if (*memory != NULL) {
        (void)device->acl.aclrtFree(*memory);
        *memory = NULL;
        *bytes = 0;
    }
    const ep_err err = EP_ASCEND_CALL(device, NULL, aclrtMalloc, memory, need, EP_ACL_MALLOC_HUGE_FIRST);
    *bytes = err == EP_OK ? need : 0;
    return err;
}

static ep_err grow_stage(ep_ascend_slot *slot, ep_ascend_device *device, size_t need)
{
    void *stage = NULL;
    if (need <= slot->stage_bytes) {
        return EP_OK;
    }
    if (slot->stage != NULL) {
        (void)device->acl.aclrtFreeHost(slot->stage);
        slot->stage = NULL;
        slot->stage_bytes = 0;
    }
    const ep_err err = EP_ASCEND_CALL(device, NULL, aclrtMallocHost, &stage, need);
    slot->stage = stage;
    slot->stage_bytes = err == EP_OK ? need : 0;
    return err;
}

static bool grow_floats(float **floats, size_t *count, size_t need)
{
    if (need > *count) {
        float *grown = realloc(*floats, need * sizeof(*grown));
        if (grown == NULL) {
            return false;
        }
        *floats = grown;
        *count = need;
    }
    return true;
}

static ep_err reserve(ep_ascend_slot *slot, ep_ascend_device *device, const layout *l)
{
    void *memory = slot->memory;
    if (!grow_floats(&slot->factors, &slot->factors_count, slot->rows_count) ||
        !grow_floats(&slot->wide, &slot->wide_count, l->hidden)) {
        return EP_ERR_NO_MEMORY;
    }
    ep_err err = grow_stage(slot, device, l->out_stage + l->out_bytes);
    if (err == EP_OK) {
        err = grow_device(device, &memory, &slot->memory_bytes, l->memory_bytes);
        slot->memory = memory;
    }
    return err;
}

/* Tensors, lists and what executors no launch took: the streams have passed them, or never will. */
static void drop_objects(ep_ascend_slot *slot, ep_ascend_device *device)
{
    for (size_t i = 0; i < EP_ASCEND_PHASES; i++) {
        if (slot->executors[i] != NULL && device->acl.aclDestroyAclOpExecutor != NULL) {
            (void)device->acl.aclDestroyAclOpExecutor(slot->executors[i]);
        }
        slot->executors[i] = NULL;
    }
    for (size_t i = 0; i < EP_ASCEND_LISTS; i++) { /* with their tensors */
        if (slot->lists[i] != NULL) {
            (void)device->acl.aclDestroyTensorList(slot->lists[i]);
        }
        slot->lists[i] = NULL;
    }
    for (size_t i = 0; i < EP_ASCEND_TENSORS; i++) {
        if (slot->tensors[i] != NULL) {
            (void)device->acl.aclDestroyTensor(slot->tensors[i]);
        }
        slot->tensors[i] = NULL;
    }
}

void ep_ascend_slot_fini(ep_ascend_slot *slot, ep_ascend_device *device)
{
    ep_acl_event const events[] = {slot->ready, slot->computed, slot->done};
    drop_objects(slot, device);
    for (size_t i = 0; i < EP_ARRAY_COUNT(events); i++) {
        if (events[i] != NULL) {
            (void)device->acl.aclrtDestroyEvent(events[i]);
        }
    }
    if (slot->stage != NULL) {
        (void)device->acl.aclrtFreeHost(slot->stage);
    }
    if (slot->memory != NULL) {
        (void)device->acl.aclrtFree(slot->memory);
    }
    if (slot->workspace != NULL) {
        (void)device->acl.aclrtFree(slot->workspace);
    }
    free(slot->factors);
    free(slot->wide);
}

/* ---- rows ---- */

/*
 * A row as int8, by the rule of the format (kernels/expert_ffn.h). A row of zeros would leave the operators to divide
 * 0 by 0 in the row that follows from it: it goes as another row, and its result, which is 0, is written here.
 */
static void quantise_row(ep_ascend_slot *slot, const layout *l, uint32_t place)
{
    int8_t *to = (int8_t *)(slot->stage + COUNTS_BYTES) + (size_t)place * l->hidden;
    float *scales = (float *)(slot->stage + l->x_scales);
    uint32_t magnitude = 0;
    for (uint32_t h = 0; h < l->hidden; h++) {
        const uint32_t bits = ep_f32_bits(slot->wide[h]) & 0x7fffffffu;
        magnitude = bits > magnitude ? bits : magnitude;
    }
    scales[place] = ep_ffn_int8_scale(magnitude);
    for (uint32_t h = 0; h < l->hidden; h++) {
        to[h] = ep_ffn_int8_round(slot->wide[h], scales[place]);
    }
    if (scales[place] == 0.0f) {
        memset(to, 1, l->hidden);
        scales[place] = 1.0f;
        slot->factors[place] = 0.0f;
    }
}

/* One row, as the operators take it: rounded once to the type of the weights. */
static void gather_row(ep_ascend_slot *slot, const layout *l, const ep_job *job, const ep_job_row *row, uint32_t place)
{
    const ep_ascend_weights *weights = (const ep_ascend_weights *)job->weights;
    uint16_t *to = (uint16_t *)(slot->stage + COUNTS_BYTES) + (size_t)place * l->hidden;
    const bool as_it_is = job->x_dtype == l->dtype && !job->weight_on_input && !l->is_quant;
    slot->factors[place] = 1.0f;
    if (as_it_is && weights->shared_gate == NULL) {
        memcpy(to, row->x, l->hidden * sizeof(*to));
        return;
    }
    const ep_ffn_batch batch = {.rows = row,
                                .rows_count = 1,
                                .x_dtype = job->x_dtype,
                                .out_dtype = job->out_dtype,
                                .weight_on_input = job->weight_on_input};
    ep_ffn_widen(&batch, row, 0, l->hidden, slot->wide);
    float sum = 0.0f;
    for (uint32_t h = 0; weights->shared_gate != NULL && h < l->hidden; h++) {
        sum += weights->shared_gate[h] * slot->wide[h];
    }
    if (weights->shared_gate != NULL) {
        slot->factors[place] = ep_act_sigmoid(sum);
    }
    if (l->is_quant) {
        quantise_row(slot, l, place);
        return;
    }
    for (uint32_t h = 0; h < l->hidden; h++) {
        ep_ffn_write(to, l->dtype, h, slot->wide[h]);
    }
}

static void gather(ep_ascend_slot *slot, const layout *l)
{
    uint32_t place = 0;
    for (uint32_t j = 0; j < slot->jobs_count; j++) {
        const ep_job *job = slot->jobs[j];
        const int64_t rows = job->rows_count;
        memcpy(slot->stage + j * sizeof(rows), &rows, sizeof(rows));
        for (uint32_t r = 0; r < job->rows_count; r++) {
            gather_row(slot, l, job, &job->rows[r], place++);
        }
    }
}

static void scatter_row(const ep_ascend_slot *slot, const layout *l, const ep_job *job, const ep_job_row *row,
                        uint32_t place)
{
    const uint8_t *from = slot->stage + l->out_stage;
    const float factor = slot->factors[place];
    if (job->out_dtype == l->dtype && factor == 1.0f) {
        memcpy(row->out, from + (size_t)place * l->hidden * sizeof(uint16_t), l->hidden * sizeof(uint16_t));
        return;
    }
    for (uint32_t h = 0; h < l->hidden; h++) {
        const float y = ep_ffn_read_float(from, l->dtype, (size_t)place * l->hidden + h);
        ep_ffn_write(row->out, job->out_dtype, h, factor == 0.0f ? 0.0f : y * factor);
    }
}

static void scatter(const ep_ascend_slot *slot, const layout *l)
{
    uint32_t place = 0;
    for (uint32_t j = 0; j < slot->jobs_count; j++) {
        const ep_job *job = slot->jobs[j];
        for (uint32_t r = 0; r < job->rows_count; r++) {
            scatter_row(slot, l, job, &job->rows[r], place++);
        }
    }
}

/* ---- operators ---- */

/* A contiguous tensor of two axes, or three when first is not 0. Strides are in elements. NULL: no memory. */
static ep_acl_tensor *make_tensor(ep_ascend_device *device, ep_acl_data_type type, int64_t first, int64_t rows,
                                  int64_t columns, void *memory)
{
    const int64_t shape[3] = {first, rows, columns};
    const int64_t strides[3] = {rows * columns, columns, 1};
    const uint64_t skipped = first == 0 ? 1 : 0;
    return device->acl.aclCreateTensor(shape + skipped, 3 - skipped, type, strides + skipped, 0, EP_ACL_ND,
                                       shape + skipped, 3 - skipped, memory);
}

/* Takes the tensors, also when it fails. */
static ep_acl_tensor_list *make_list(ep_ascend_device *device, ep_acl_tensor **tensors, uint32_t count)
{
    bool whole = true;
    for (uint32_t i = 0; i < count; i++) {
        whole = whole && tensors[i] != NULL;
    }
    ep_acl_tensor_list *list =
        whole ? device->acl.aclCreateTensorList((const ep_acl_tensor *const *)tensors, count) : NULL;
    for (uint32_t i = 0; list == NULL && i < count; i++) {
        if (tensors[i] != NULL) {
            (void)device->acl.aclDestroyTensor(tensors[i]);
        }
    }
    return list;
}

static ep_acl_tensor *make_vector(ep_ascend_device *device, ep_acl_data_type type, int64_t count, void *memory)
{
    const int64_t one = 1;
    return device->acl.aclCreateTensor(&count, 1, type, &one, 0, EP_ACL_ND, &count, 1, memory);
}

static ep_acl_tensor_list *list_of_one(ep_ascend_device *device, ep_acl_tensor *tensor)
{
    return make_list(device, &tensor, 1);
}

/* A matrix for each job, or for a single one a tensor of three axes, as the operator wants it. */
static ep_acl_tensor_list *list_of_weights(ep_ascend_slot *slot, ep_ascend_device *device, const layout *l,
                                           bool is_down)
{
    ep_acl_tensor *tensors[EP_ACL_GROUPS_MAX];
    const int64_t first = slot->jobs_count == 1 ? 1 : 0;
    for (uint32_t j = 0; j < slot->jobs_count; j++) {
        const ep_ascend_weights *weights = (const ep_ascend_weights *)slot->jobs[j]->weights;
        tensors[j] =
            is_down
                ? make_tensor(device, l->x_type, first, l->inner, l->hidden, weights->memory + weights->down_offset)
                : make_tensor(device, l->x_type, first, l->hidden, 2 * (int64_t)l->inner, weights->memory);
    }
    return make_list(device, tensors, slot->jobs_count);
}

enum {
    LIST_X,
    LIST_GATE_UP_WEIGHTS,
    LIST_GATE_UP,
    LIST_ACTIVATED, /* as the second product takes it */
    LIST_DOWN_WEIGHTS,
    LIST_OUT,
    LISTS_OF_FLOAT, /* from here on: w8a8 */
    LIST_GATE_UP_SCALES = LISTS_OF_FLOAT,
    LIST_X_SCALES,
    LIST_DOWN_SCALES,
    LIST_ACTIVATED_SCALES,
};
enum {
    TENSOR_COUNTS,
    TENSOR_GATE_UP,
    TENSOR_ACTIVATED,
    TENSORS_OF_FLOAT, /* from here on: w8a8 */
    TENSOR_QUANT = TENSORS_OF_FLOAT,
    TENSOR_QUANT_SCALES,
};
enum { PHASE_GATE_UP, PHASE_SWIGLU, PHASE_QUANT, PHASE_DOWN };
_Static_assert((int)LIST_ACTIVATED_SCALES < (int)EP_ASCEND_LISTS &&
                   (int)TENSOR_QUANT_SCALES < (int)EP_ASCEND_TENSORS && (int)PHASE_DOWN < (int)EP_ASCEND_PHASES,
               "the slot has room");

static void make_quant_objects(ep_ascend_slot *slot, ep_ascend_device *device, const layout *l)
{
    const ep_ascend_weights *weights = (const ep_ascend_weights *)slot->jobs[0]->weights;
    const int64_t rows = slot->rows_count;
    uint8_t *gate_up_scales = weights->memory + weights->gate_up_scales_offset;
    uint8_t *down_scales = weights->memory + weights->down_scales_offset;
    uint8_t *quant_scales = slot->memory + l->quant_scales;
    slot->lists[LIST_GATE_UP_SCALES] =
        list_of_one(device, make_tensor(device, EP_ACL_FLOAT, 0, 1, 2 * (int64_t)l->inner, gate_up_scales));
    slot->lists[LIST_X_SCALES] =
        list_of_one(device, make_vector(device, EP_ACL_FLOAT, rows, slot->memory + l->x_scales));
    slot->lists[LIST_DOWN_SCALES] =
        list_of_one(device, make_tensor(device, EP_ACL_FLOAT, 0, 1, l->hidden, down_scales));
    slot->lists[LIST_ACTIVATED_SCALES] = list_of_one(device, make_vector(device, EP_ACL_FLOAT, rows, quant_scales));
    slot->tensors[TENSOR_QUANT] = make_tensor(device, EP_ACL_INT8, 0, rows, l->inner, slot->memory + l->quant);
    slot->tensors[TENSOR_QUANT_SCALES] = make_vector(device, EP_ACL_FLOAT, rows, quant_scales);
}

static ep_err make_objects(ep_ascend_slot *slot, ep_ascend_device *device, const layout *l)
{
    const int64_t rows = slot->rows_count;
    const int64_t wide = 2 * (int64_t)l->inner;
    uint8_t *memory = slot->memory;
    uint8_t *second = memory + (l->is_quant ? l->quant : l->activated);
    slot->lists[LIST_X] =
        list_of_one(device, make_tensor(device, l->x_type, 0, rows, l->hidden, memory + COUNTS_BYTES));
    slot->lists[LIST_GATE_UP_WEIGHTS] = list_of_weights(slot, device, l, false);
    slot->lists[LIST_GATE_UP] = list_of_one(device, make_tensor(device, l->type, 0, rows, wide, memory + l->gate_up));
    slot->lists[LIST_ACTIVATED] = list_of_one(device, make_tensor(device, l->x_type, 0, rows, l->inner, second));
    slot->lists[LIST_DOWN_WEIGHTS] = list_of_weights(slot, device, l, true);
    slot->lists[LIST_OUT] =
        list_of_one(device, make_tensor(device, l->type, 0, rows, l->hidden, memory + l->out_device));
    slot->tensors[TENSOR_COUNTS] = make_vector(device, EP_ACL_INT64, slot->jobs_count, memory);
    slot->tensors[TENSOR_GATE_UP] = make_tensor(device, l->type, 0, rows, wide, memory + l->gate_up);
    slot->tensors[TENSOR_ACTIVATED] = make_tensor(device, l->type, 0, rows, l->inner, memory + l->activated);
    if (l->is_quant) {
        make_quant_objects(slot, device, l);
    }
    bool whole = true;
    for (int i = 0; i < (l->is_quant ? LIST_ACTIVATED_SCALES + 1 : LISTS_OF_FLOAT); i++) {
        whole = whole && slot->lists[i] != NULL;
    }
    for (int i = 0; i < (l->is_quant ? TENSOR_QUANT_SCALES + 1 : TENSORS_OF_FLOAT); i++) {
        whole = whole && slot->tensors[i] != NULL;
    }
    return whole ? EP_OK : EP_ERR_NO_MEMORY;
}

/* One of the two products, by the places of its lists. */
typedef struct product {
    int phase;
    int x;
    int weight;
    int scale;
    int row_scale;
    int out;
} product;

static ep_err plan_matmul(ep_ascend_slot *slot, ep_ascend_device *device, product p)
{
    const ep_acl_symbols *acl = &device->acl;
    uint64_t *bytes = &slot->phase_bytes[p.phase];
    ep_acl_executor **executor = &slot->executors[p.phase];
    const ep_acl_tensor *counts = slot->tensors[TENSOR_COUNTS];
    ep_acl_tensor_list *const *lists = slot->lists; /* scales: NULL of float types */
    const ep_acl_code code =
        acl->aclnnGroupedMatmulV5 != NULL
            ? acl->aclnnGroupedMatmulV5GetWorkspaceSize(
                  lists[p.x], lists[p.weight], NULL, lists[p.scale], NULL, NULL, NULL, lists[p.row_scale], counts,
                  NULL, NULL, NULL, EP_ACL_SPLIT_SINGLE, EP_ACL_GROUP_ROWS, EP_ACL_GROUP_LIST_COUNTS,
                  EP_ACL_NO_ACTIVATION, NULL, lists[p.out], NULL, NULL, bytes, executor)
            : acl->aclnnGroupedMatmulV4GetWorkspaceSize(
                  lists[p.x], lists[p.weight], NULL, lists[p.scale], NULL, NULL, NULL, lists[p.row_scale], counts,
                  NULL, NULL, NULL, EP_ACL_SPLIT_SINGLE, EP_ACL_GROUP_ROWS, EP_ACL_GROUP_LIST_COUNTS,
                  EP_ACL_NO_ACTIVATION, lists[p.out], NULL, NULL, bytes, executor);
    return ep_ascend_check(device, code, "aclnnGroupedMatmulGetWorkspaceSize", NULL);
}

/* All first phases come before the first launch: the workspace may grow only while nothing of the slot runs. */
static ep_err plan(ep_ascend_slot *slot, ep_ascend_device *device, const layout *l)
{
    static const product gate_up = {PHASE_GATE_UP,       LIST_X,        LIST_GATE_UP_WEIGHTS,
                                    LIST_GATE_UP_SCALES, LIST_X_SCALES, LIST_GATE_UP};
    static const product down = {PHASE_DOWN,       LIST_ACTIVATED,        LIST_DOWN_WEIGHTS,
                                 LIST_DOWN_SCALES, LIST_ACTIVATED_SCALES, LIST_OUT};
    ep_acl_tensor *const *tensors = slot->tensors;
    ep_err err = plan_matmul(slot, device, gate_up);
    err = err == EP_OK ? EP_ASCEND_CALL(device, NULL, aclnnSwiGluGetWorkspaceSize, tensors[TENSOR_GATE_UP], -1,
                                        tensors[TENSOR_ACTIVATED], &slot->phase_bytes[PHASE_SWIGLU],
                                        &slot->executors[PHASE_SWIGLU])
                       : err;
    if (err == EP_OK && l->is_quant) {
        err = EP_ASCEND_CALL(device, NULL, aclnnDynamicQuantGetWorkspaceSize, tensors[TENSOR_ACTIVATED], NULL,
                             tensors[TENSOR_QUANT], tensors[TENSOR_QUANT_SCALES], &slot->phase_bytes[PHASE_QUANT],
                             &slot->executors[PHASE_QUANT]);
    }
    err = err == EP_OK ? plan_matmul(slot, device, down) : err;
    uint64_t most = 0;
    for (size_t i = 0; i < EP_ASCEND_PHASES; i++) {
        most = slot->executors[i] != NULL && slot->phase_bytes[i] > most ? slot->phase_bytes[i] : most;
    }
    return err == EP_OK ? grow_device(device, &slot->workspace, &slot->workspace_bytes, most) : err;
}

/* An executor is for one launch: whatever that returns, it is used up. */
static ep_err launch_phase(ep_ascend_slot *slot, ep_ascend_device *device, int phase, ep_acl_stream stream)
{
    const uint64_t bytes = slot->phase_bytes[phase];
    ep_acl_executor *executor = slot->executors[phase];
    slot->executors[phase] = NULL;
    if (executor == NULL) { /* no part of this type's way */
        return EP_OK;
    }
    if (phase == PHASE_SWIGLU) {
        return EP_ASCEND_CALL(device, NULL, aclnnSwiGlu, slot->workspace, bytes, executor, stream);
    }
    if (phase == PHASE_QUANT) {
        return EP_ASCEND_CALL(device, NULL, aclnnDynamicQuant, slot->workspace, bytes, executor, stream);
    }
    return device->acl.aclnnGroupedMatmulV5 != NULL
               ? EP_ASCEND_CALL(device, NULL, aclnnGroupedMatmulV5, slot->workspace, bytes, executor, stream)
               : EP_ASCEND_CALL(device, NULL, aclnnGroupedMatmulV4, slot->workspace, bytes, executor, stream);
}

static ep_err enqueue(ep_ascend_slot *slot, ep_ascend_device *device, const ep_ascend_streams *s, const layout *l)
{
    ep_err err = EP_ASCEND_CALL(device, NULL, aclrtMemcpyAsync, slot->memory, l->in_bytes, slot->stage, l->in_bytes,
                                EP_ACL_HOST_TO_DEVICE, s->in);
    err = err == EP_OK ? EP_ASCEND_CALL(device, NULL, aclrtRecordEvent, slot->ready, s->in) : err;
    err = err == EP_OK ? EP_ASCEND_CALL(device, NULL, aclrtStreamWaitEvent, s->compute, slot->ready) : err;
    for (int phase = 0; phase < EP_ASCEND_PHASES && err == EP_OK; phase++) {
        err = launch_phase(slot, device, phase, s->compute);
    }
    err = err == EP_OK ? EP_ASCEND_CALL(device, NULL, aclrtRecordEvent, slot->computed, s->compute) : err;
    err = err == EP_OK ? EP_ASCEND_CALL(device, NULL, aclrtStreamWaitEvent, s->out, slot->computed) : err;
    err = err == EP_OK ? EP_ASCEND_CALL(device, NULL, aclrtMemcpyAsync, slot->stage + l->out_stage, l->out_bytes,
                                        slot->memory + l->out_device, l->out_bytes, EP_ACL_DEVICE_TO_HOST, s->out)
                       : err;
    return err == EP_OK ? EP_ASCEND_CALL(device, NULL, aclrtRecordEvent, slot->done, s->out) : err;
}

void ep_ascend_slot_launch(ep_ascend_slot *slot, ep_ascend_device *device, const ep_ascend_streams *streams)
{
    const layout l = lay_out(slot);
    slot->launched = false;
    slot->result = reserve(slot, device, &l);
    if (slot->result == EP_OK) {
        gather(slot, &l);
        slot->result = make_objects(slot, device, &l);
    }
    if (slot->result == EP_OK) {
        slot->result = plan(slot, device, &l);
    }
    if (slot->result == EP_OK) {
        slot->launched = true;
        slot->result = enqueue(slot, device, streams, &l);
        if (slot->result != EP_OK) {
            ep_ascend_device_lose(device, "a step could not be queued behind others");
            slot->result = EP_ERR_DEVICE_LOST;
        }
    }
}

ep_err ep_ascend_slot_finish(ep_ascend_slot *slot, ep_ascend_device *device)
{
    ep_err err = slot->result;
    /* Each stream tells of its own failures only. */
    ep_acl_event const events[] = {slot->ready, slot->computed, slot->done};
    static const char *const waits[] = {
        "aclrtSynchronizeEventWithTimeout of the in stream (copies of rows)",
        "aclrtSynchronizeEventWithTimeout of the compute stream (GroupedMatmul, SwiGlu)",
        "aclrtSynchronizeEventWithTimeout of the out stream (copies of results)"};
    for (size_t i = 0; i < EP_ARRAY_COUNT(events) && err == EP_OK; i++) {
        err = ep_ascend_check(device, device->acl.aclrtSynchronizeEventWithTimeout(events[i], EP_ASCEND_TIMEOUT_MS),
                              waits[i], NULL);
    }
    if (err != EP_OK && slot->launched) {
        ep_ascend_device_lose(device, "a step failed");
        err = EP_ERR_DEVICE_LOST;
    }
    if (err == EP_OK) {
        const layout l = lay_out(slot);
        scatter(slot, &l);
        atomic_store(&device->told, false);
    }
    /* What runs on after a loss may still write, also of an earlier pass: objects stay until the streams are gone. */
    if (!atomic_load(&device->lost)) {
        drop_objects(slot, device);
    }
    return err;
}
