/* SPDX-License-Identifier: Apache-2.0 */
#include "backends/ascend/ascend_slot.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "kernels/ffn_activation.h"
#include "kernels/ffn_widen.h"

#define PART_ALIGN 512                                             /* of everything inside a block */
#define COUNTS_BYTES (EP_ACL_GROUPS_MAX * sizeof(int64_t))         /* a multiple of PART_ALIGN: rows follow */
_Static_assert(COUNTS_BYTES % PART_ALIGN == 0 && PART_ALIGN % EP_ACL_ALIGN == 0, "every tensor's address is aligned");

/* Where what lies, for the slot's jobs. */
typedef struct layout {
    uint32_t hidden;
    uint32_t inner;
    ep_acl_data_type type;
    size_t in_bytes; /* counts and rows: from 0 on in the stage and on the device */
    size_t out_bytes;
    size_t out_stage;  /* in the stage */
    size_t gate_up;    /* on the device */
    size_t activated;
    size_t out_device;
    size_t memory_bytes;
} layout;

static layout lay_out(const ep_ascend_slot *slot)
{
    const ep_backend_weights *weights = slot->jobs[0]->weights;
    const size_t rows = slot->rows_count;
    layout l = {.hidden = weights->hidden, .inner = weights->inner, .type = weights->format == EP_WEIGHTS_BF16 ? EP_ACL_BF16 : EP_ACL_FLOAT16};
    l.out_bytes = rows * l.hidden * sizeof(uint16_t);
    l.in_bytes = COUNTS_BYTES + l.out_bytes;
    l.out_stage = ep_align_up(l.in_bytes, PART_ALIGN);
    l.gate_up = l.out_stage;
    l.activated = l.gate_up + ep_align_up(rows * 2 * l.inner * sizeof(uint16_t), PART_ALIGN);
    l.out_device = l.activated + ep_align_up(rows * l.inner * sizeof(uint16_t), PART_ALIGN);
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

ep_err ep_ascend_slot_init(ep_ascend_slot *slot, ep_ascend_device *device, ep_error *out_error)
{
    ep_acl_event *const events[] = {&slot->ready, &slot->computed, &slot->done};
    ep_err err = EP_OK;
    for (size_t i = 0; i < EP_ARRAY_COUNT(events) && err == EP_OK; i++) {
        err = EP_ASCEND_CALL(device, out_error, aclrtCreateEventExWithFlag, events[i], EP_ACL_EVENT_SYNC);
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
    if (!grow_floats(&slot->factors, &slot->factors_count, slot->rows_count) || !grow_floats(&slot->wide, &slot->wide_count, l->hidden)) {
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

/* One row, as the operators take it: rounded once to the type of the weights. */
static void gather_row(ep_ascend_slot *slot, const layout *l, const ep_job *job, const ep_job_row *row, uint32_t place)
{
    const ep_ascend_weights *weights = (const ep_ascend_weights *)job->weights;
    uint16_t *to = (uint16_t *)(slot->stage + COUNTS_BYTES) + (size_t)place * l->hidden;
    const bool as_it_is = job->x_dtype == ep_weight_format_dtype(weights->base.format) && !job->weight_on_input;
    slot->factors[place] = 1.0f;
    if (as_it_is && weights->shared_gate == NULL) {
        memcpy(to, row->x, l->hidden * sizeof(*to));
        return;
    }
    const ep_ffn_batch batch = {.rows = row, .rows_count = 1, .x_dtype = job->x_dtype, .out_dtype = job->out_dtype, .weight_on_input = job->weight_on_input};
    ep_ffn_widen(&batch, row, 0, l->hidden, slot->wide);
    const ep_dtype type = ep_weight_format_dtype(weights->base.format);
    float sum = 0.0f;
    for (uint32_t h = 0; h < l->hidden; h++) {
        ep_ffn_write(to, type, h, slot->wide[h]);
        sum += weights->shared_gate != NULL ? weights->shared_gate[h] * slot->wide[h] : 0.0f;
    }
    if (weights->shared_gate != NULL) {
        slot->factors[place] = ep_act_sigmoid(sum);
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

static void scatter(const ep_ascend_slot *slot, const layout *l)
{
    const ep_dtype type = ep_weight_format_dtype(slot->jobs[0]->weights->format);
    const uint8_t *from = slot->stage + l->out_stage;
    uint32_t place = 0;
    for (uint32_t j = 0; j < slot->jobs_count; j++) {
        const ep_job *job = slot->jobs[j];
        const bool has_factor = ((const ep_ascend_weights *)job->weights)->shared_gate != NULL;
        for (uint32_t r = 0; r < job->rows_count; r++, place++) {
            for (uint32_t h = 0; h < l->hidden; h++) {
                const float y = ep_ffn_read_float(from, type, (size_t)place * l->hidden + h);
                ep_ffn_write(job->rows[r].out, job->out_dtype, h, has_factor ? y * slot->factors[place] : y);
            }
        }
    }
}

/* ---- operators ---- */

/* A contiguous tensor of two axes, or three when first is not 0. Strides are in elements. NULL: no memory. */
static ep_acl_tensor *make_tensor(ep_ascend_device *device, ep_acl_data_type type, int64_t first, int64_t rows, int64_t columns, void *memory)
{
    const int64_t shape[3] = {first, rows, columns};
    const int64_t strides[3] = {rows * columns, columns, 1};
    const uint64_t skipped = first == 0 ? 1 : 0;
    return device->acl.aclCreateTensor(shape + skipped, 3 - skipped, type, strides + skipped, 0, EP_ACL_ND, shape + skipped, 3 - skipped, memory);
}

/* Takes the tensors, also when it fails. */
static ep_acl_tensor_list *make_list(ep_ascend_device *device, ep_acl_tensor **tensors, uint32_t count)
{
    bool whole = true;
    for (uint32_t i = 0; i < count; i++) {
        whole = whole && tensors[i] != NULL;
    }
    ep_acl_tensor_list *list = whole ? device->acl.aclCreateTensorList((const ep_acl_tensor *const *)tensors, count) : NULL;
    for (uint32_t i = 0; list == NULL && i < count; i++) {
        if (tensors[i] != NULL) {
            (void)device->acl.aclDestroyTensor(tensors[i]);
        }
    }
    return list;
}

static ep_acl_tensor_list *list_of_rows(ep_ascend_slot *slot, ep_ascend_device *device, const layout *l, uint32_t columns, size_t offset)
{
    ep_acl_tensor *tensor = make_tensor(device, l->type, 0, slot->rows_count, columns, slot->memory + offset);
    return make_list(device, &tensor, 1);
}

/* A matrix for each job, or for a single one a tensor of three axes, as the operator wants it. */
static ep_acl_tensor_list *list_of_weights(ep_ascend_slot *slot, ep_ascend_device *device, const layout *l, bool is_down)
{
    ep_acl_tensor *tensors[EP_ACL_GROUPS_MAX];
    const int64_t first = slot->jobs_count == 1 ? 1 : 0;
    for (uint32_t j = 0; j < slot->jobs_count; j++) {
        const ep_ascend_weights *weights = (const ep_ascend_weights *)slot->jobs[j]->weights;
        tensors[j] = is_down ? make_tensor(device, l->type, first, l->inner, l->hidden, weights->memory + weights->down_offset)
                             : make_tensor(device, l->type, first, l->hidden, 2 * (int64_t)l->inner, weights->memory);
    }
    return make_list(device, tensors, slot->jobs_count);
}

enum { LIST_X, LIST_GATE_UP_WEIGHTS, LIST_GATE_UP, LIST_ACTIVATED, LIST_DOWN_WEIGHTS, LIST_OUT };
enum { TENSOR_COUNTS, TENSOR_GATE_UP, TENSOR_ACTIVATED };
enum { PHASE_GATE_UP, PHASE_SWIGLU, PHASE_DOWN };

static ep_err make_objects(ep_ascend_slot *slot, ep_ascend_device *device, const layout *l)
{
    const int64_t counts = slot->jobs_count;
    const int64_t one = 1;
    slot->lists[LIST_X] = list_of_rows(slot, device, l, l->hidden, COUNTS_BYTES);
    slot->lists[LIST_GATE_UP_WEIGHTS] = list_of_weights(slot, device, l, false);
    slot->lists[LIST_GATE_UP] = list_of_rows(slot, device, l, 2 * l->inner, l->gate_up);
    slot->lists[LIST_ACTIVATED] = list_of_rows(slot, device, l, l->inner, l->activated);
    slot->lists[LIST_DOWN_WEIGHTS] = list_of_weights(slot, device, l, true);
    slot->lists[LIST_OUT] = list_of_rows(slot, device, l, l->hidden, l->out_device);
    slot->tensors[TENSOR_COUNTS] = device->acl.aclCreateTensor(&counts, 1, EP_ACL_INT64, &one, 0, EP_ACL_ND, &counts, 1, slot->memory);
    slot->tensors[TENSOR_GATE_UP] = make_tensor(device, l->type, 0, slot->rows_count, 2 * (int64_t)l->inner, slot->memory + l->gate_up);
    slot->tensors[TENSOR_ACTIVATED] = make_tensor(device, l->type, 0, slot->rows_count, l->inner, slot->memory + l->activated);
    for (size_t i = 0; i < EP_ASCEND_LISTS; i++) {
        if (slot->lists[i] == NULL) {
            return EP_ERR_NO_MEMORY;
        }
    }
    for (size_t i = 0; i < EP_ASCEND_TENSORS; i++) {
        if (slot->tensors[i] == NULL) {
            return EP_ERR_NO_MEMORY;
        }
    }
    return EP_OK;
}

static ep_err plan_matmul(ep_ascend_slot *slot, ep_ascend_device *device, int phase, int x, int weight, int out)
{
    const ep_acl_symbols *acl = &device->acl;
    uint64_t *bytes = &slot->phase_bytes[phase];
    ep_acl_executor **executor = &slot->executors[phase];
    const ep_acl_tensor *counts = slot->tensors[TENSOR_COUNTS];
    const ep_acl_code code =
        acl->aclnnGroupedMatmulV5 != NULL
            ? acl->aclnnGroupedMatmulV5GetWorkspaceSize(slot->lists[x], slot->lists[weight], NULL, NULL, NULL, NULL, NULL, NULL, counts, NULL, NULL, NULL,
                                                        EP_ACL_SPLIT_SINGLE, EP_ACL_GROUP_ROWS, EP_ACL_GROUP_LIST_COUNTS, EP_ACL_NO_ACTIVATION, NULL,
                                                        slot->lists[out], NULL, NULL, bytes, executor)
            : acl->aclnnGroupedMatmulV4GetWorkspaceSize(slot->lists[x], slot->lists[weight], NULL, NULL, NULL, NULL, NULL, NULL, counts, NULL, NULL, NULL,
                                                        EP_ACL_SPLIT_SINGLE, EP_ACL_GROUP_ROWS, EP_ACL_GROUP_LIST_COUNTS, EP_ACL_NO_ACTIVATION,
                                                        slot->lists[out], NULL, NULL, bytes, executor);
    return ep_ascend_check(device, code, "aclnnGroupedMatmulGetWorkspaceSize", NULL);
}

/* All first phases come before the first launch: the workspace may grow only while nothing of the slot runs. */
static ep_err plan(ep_ascend_slot *slot, ep_ascend_device *device)
{
    ep_err err = plan_matmul(slot, device, PHASE_GATE_UP, LIST_X, LIST_GATE_UP_WEIGHTS, LIST_GATE_UP);
    err = err == EP_OK ? EP_ASCEND_CALL(device, NULL, aclnnSwiGluGetWorkspaceSize, slot->tensors[TENSOR_GATE_UP], -1, slot->tensors[TENSOR_ACTIVATED],
                                        &slot->phase_bytes[PHASE_SWIGLU], &slot->executors[PHASE_SWIGLU])
                       : err;
    err = err == EP_OK ? plan_matmul(slot, device, PHASE_DOWN, LIST_ACTIVATED, LIST_DOWN_WEIGHTS, LIST_OUT) : err;
    uint64_t most = 0;
    for (size_t i = 0; i < EP_ASCEND_PHASES; i++) {
        most = slot->phase_bytes[i] > most ? slot->phase_bytes[i] : most;
    }
    return err == EP_OK ? grow_device(device, &slot->workspace, &slot->workspace_bytes, most) : err;
}

/* An executor is for one launch: whatever that returns, it is used up. */
static ep_err launch_phase(ep_ascend_slot *slot, ep_ascend_device *device, int phase, ep_acl_stream stream)
{
    const ep_acl_symbols *acl = &device->acl;
    ep_acl_executor *executor = slot->executors[phase];
    slot->executors[phase] = NULL;
    if (phase == PHASE_SWIGLU) {
        return EP_ASCEND_CALL(device, NULL, aclnnSwiGlu, slot->workspace, slot->phase_bytes[phase], executor, stream);
    }
    return acl->aclnnGroupedMatmulV5 != NULL
               ? EP_ASCEND_CALL(device, NULL, aclnnGroupedMatmulV5, slot->workspace, slot->phase_bytes[phase], executor, stream)
               : EP_ASCEND_CALL(device, NULL, aclnnGroupedMatmulV4, slot->workspace, slot->phase_bytes[phase], executor, stream);
}

static ep_err enqueue(ep_ascend_slot *slot, ep_ascend_device *device, const ep_ascend_streams *s, const layout *l)
{
    ep_err err = EP_ASCEND_CALL(device, NULL, aclrtMemcpyAsync, slot->memory, l->in_bytes, slot->stage, l->in_bytes, EP_ACL_HOST_TO_DEVICE, s->in);
    err = err == EP_OK ? EP_ASCEND_CALL(device, NULL, aclrtRecordEvent, slot->ready, s->in) : err;
    err = err == EP_OK ? EP_ASCEND_CALL(device, NULL, aclrtStreamWaitEvent, s->compute, slot->ready) : err;
    for (int phase = 0; phase < EP_ASCEND_PHASES && err == EP_OK; phase++) {
        err = launch_phase(slot, device, phase, s->compute);
    }
    err = err == EP_OK ? EP_ASCEND_CALL(device, NULL, aclrtRecordEvent, slot->computed, s->compute) : err;
    err = err == EP_OK ? EP_ASCEND_CALL(device, NULL, aclrtStreamWaitEvent, s->out, slot->computed) : err;
    err = err == EP_OK ? EP_ASCEND_CALL(device, NULL, aclrtMemcpyAsync, slot->stage + l->out_stage, l->out_bytes, slot->memory + l->out_device,
                                        l->out_bytes, EP_ACL_DEVICE_TO_HOST, s->out)
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
        slot->result = plan(slot, device);
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
    static const char *const waits[] = {"aclrtSynchronizeEventWithTimeout of the in stream (copies of rows)",
                                        "aclrtSynchronizeEventWithTimeout of the compute stream (GroupedMatmul, SwiGlu)",
                                        "aclrtSynchronizeEventWithTimeout of the out stream (copies of results)"};
    for (size_t i = 0; i < EP_ARRAY_COUNT(events) && err == EP_OK; i++) {
        err = ep_ascend_check(device, device->acl.aclrtSynchronizeEventWithTimeout(events[i], EP_ASCEND_TIMEOUT_MS), waits[i], NULL);
    }
    if (err != EP_OK && slot->launched) { /* what runs on may still write: nothing of the slot is touched until the streams are gone */
        ep_ascend_device_lose(device, "a step failed");
        return EP_ERR_DEVICE_LOST;
    }
    if (err == EP_OK) {
        const layout l = lay_out(slot);
        scatter(slot, &l);
        atomic_store(&device->told, false);
    }
    drop_objects(slot, device);
    return err;
}
