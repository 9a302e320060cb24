/* SPDX-License-Identifier: Apache-2.0 */
#include "backends/ascend/ascend_slot.h"

#include <float.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "kernels/ffn_activation.h"
#include "kernels/ffn_widen.h"

#define PART_ALIGN 512              /* of each part of a block */
#define COUNTS_BYTES ((size_t)1024) /* a multiple of PART_ALIGN, since rows follow */
/* a job's first row is a multiple of this, so that its f32 row scales are aligned */
#define W8A8_ROWS_ALIGN 8
_Static_assert(COUNTS_BYTES % PART_ALIGN == 0 && PART_ALIGN % EP_ACL_ALIGN == 0 &&
                   W8A8_ROWS_ALIGN * sizeof(float) % EP_ACL_ALIGN == 0,
               "every tensor's address is aligned");
_Static_assert(COUNTS_BYTES >= EP_ACL_GROUPS_MAX * sizeof(int64_t) &&
                   COUNTS_BYTES >= EP_ASCEND_W8A8_JOBS_MAX * EP_ACL_ALIGN,
               "all counts have room");

/* Where each part is, for the slot's jobs. */
typedef struct layout {
    uint32_t hidden;
    uint32_t inner;
    const ep_ascend_weights *weights; /* of the first job; the others are alike */
    bool is_quant;
    ep_acl_data_type x_type;
    ep_acl_data_type type; /* of the computation */
    ep_dtype dtype;        /* the same as our type */
    size_t x_bytes;        /* bytes of an element */
    size_t count_bytes;    /* distance from one job's count to the next */
    /* counts, rows and their scales; they start at 0 both in the stage and on the device */
    size_t in_bytes;
    size_t x_scales;
    size_t out_bytes; /* scales of inner rows, and results */
    size_t out_stage; /* offset in the stage; the others are offsets on the device */
    size_t gate_up;
    size_t activated;
    size_t gelu; /* the second output of GeGluV3 */
    size_t quant;
    size_t quant_scales;
    size_t out_device;
    size_t memory_bytes;
} layout;

static size_t part(size_t rows, size_t columns, size_t element)
{
    return ep_align_up(rows * columns * element, PART_ALIGN);
}

static bool is_gelu(ep_activation activation)
{
    return activation == EP_ACT_GELU || activation == EP_ACT_GELU_TANH;
}

static layout lay_out(const ep_ascend_slot *slot)
{
    const ep_ascend_weights *weights = (const ep_ascend_weights *)slot->jobs[0]->weights;
    const size_t rows = slot->rows_count;
    const bool is_f16 = weights->base.format == EP_WEIGHTS_F16;
    const bool is_quant = weights->base.format == EP_WEIGHTS_W8A8;
    layout l = {.hidden = weights->base.hidden,
                .inner = weights->base.inner,
                .weights = weights,
                .is_quant = is_quant,
                .type = is_f16 ? EP_ACL_FLOAT16 : EP_ACL_BF16,
                .dtype = is_f16 ? EP_DTYPE_F16 : EP_DTYPE_BF16};
    l.x_type = is_quant ? EP_ACL_INT8 : l.type;
    l.x_bytes = is_quant ? sizeof(int8_t) : sizeof(uint16_t);
    l.count_bytes = is_quant ? EP_ACL_ALIGN : sizeof(int64_t);
    l.x_scales = COUNTS_BYTES + part(rows, l.hidden, l.x_bytes);
    l.in_bytes = l.x_scales + (is_quant ? part(rows, 1, sizeof(float)) : 0);
    l.out_stage = l.in_bytes;
    l.gate_up = l.in_bytes;
    l.activated = l.gate_up + part(rows, 2 * l.inner, sizeof(uint16_t));
    l.gelu = l.activated + part(rows, l.inner, sizeof(uint16_t));
    l.quant = l.gelu + (is_gelu(weights->activation) ? part(rows, l.inner, sizeof(uint16_t)) : 0);
    l.quant_scales = l.quant + (is_quant ? part(rows, l.inner, sizeof(int8_t)) : 0);
    l.out_device = l.quant_scales + (is_quant ? part(rows, 1, sizeof(float)) : 0);
    l.memory_bytes = l.out_device + rows * l.hidden * sizeof(uint16_t);
    l.out_bytes = l.memory_bytes - l.quant_scales;
    return l;
}

uint32_t ep_ascend_slot_jobs_max(const ep_backend_weights *weights)
{
    const bool aligned = W8A8_ROWS_ALIGN * weights->hidden % EP_ACL_ALIGN == 0 &&
                         W8A8_ROWS_ALIGN * weights->inner % EP_ACL_ALIGN == 0;
    return weights->format != EP_WEIGHTS_W8A8 ? EP_ACL_GROUPS_MAX
           : aligned                          ? EP_ASCEND_W8A8_JOBS_MAX
                                              : 1;
}

static void place_jobs(ep_ascend_slot *slot)
{
    const size_t align = slot->jobs[0]->weights->format == EP_WEIGHTS_W8A8 ? W8A8_ROWS_ALIGN : 1;
    slot->rows_count = 0;
    for (uint32_t j = 0; j < slot->jobs_count; j++) {
        slot->places[j] = (uint32_t)ep_align_up(slot->rows_count, align);
        slot->rows_count = slot->places[j] + slot->jobs[j]->rows_count;
    }
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

/* Streams wait for these events, and so does the finisher; each use needs a flag. */
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
    const ep_err err =
        EP_ASCEND_CALL(device, NULL, aclrtMalloc, memory, need, EP_ACL_MALLOC_HUGE_FIRST);
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

/* Destroys tensors, lists and executors that were not launched. Streams have passed them, or never
 * will. */
static void drop_objects(ep_ascend_slot *slot, ep_ascend_device *device)
{
    for (uint32_t i = 0; i < slot->steps_count; i++) {
        if (slot->steps[i].executor != NULL && device->acl.aclDestroyAclOpExecutor != NULL) {
            (void)device->acl.aclDestroyAclOpExecutor(slot->steps[i].executor);
        }
    }
    for (uint32_t i = 0; i < slot->lists_count; i++) { /* together with their tensors */
        (void)device->acl.aclDestroyTensorList(slot->lists[i]);
    }
    for (uint32_t i = 0; i < slot->tensors_count; i++) {
        (void)device->acl.aclDestroyTensor(slot->tensors[i]);
    }
    slot->steps_count = slot->lists_count = slot->tensors_count = 0;
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

/* Writes a row as int8, by the rule of the format (kernels/expert_ffn.h). */
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
}

/* Writes one row as the operators take it: rounded once to the type of the weights. */
static void gather_row(ep_ascend_slot *slot, const layout *l, const ep_job *job,
                       const ep_job_row *row, uint32_t place)
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
        slot->factors[place] = ep_sigmoidf(sum);
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
    for (uint32_t j = 0; j < slot->jobs_count; j++) {
        const ep_job *job = slot->jobs[j];
        const int64_t rows = job->rows_count;
        memcpy(slot->stage + j * l->count_bytes, &rows, sizeof(rows));
        for (uint32_t r = 0; r < job->rows_count; r++) {
            gather_row(slot, l, job, &job->rows[r], slot->places[j] + r);
        }
    }
}

/*
 * The operators divide 0 by 0 where an inner row is all zeros: then its scale is not above 0, and
 * the result is down's bias. A row that had NaN or infinity has the scale NaN from the start, and
 * its result stays NaN.
 */
static bool is_inner_zero(const ep_ascend_slot *slot, const layout *l, uint32_t place)
{
    const float *x_scales = (const float *)(slot->stage + l->x_scales);
    const float *inner_scales = (const float *)(slot->stage + l->out_stage);
    return l->is_quant && !(inner_scales[place] > 0.0f) && x_scales[place] == x_scales[place];
}

static void scatter_row(const ep_ascend_slot *slot, const layout *l, const ep_job *job,
                        const ep_job_row *row, uint32_t place)
{
    const uint8_t *from = slot->stage + l->out_stage + (l->out_device - l->quant_scales);
    const float *bias = ((const ep_ascend_weights *)job->weights)->down_bias;
    const float factor = slot->factors[place];
    const bool is_zero = is_inner_zero(slot, l, place);
    if (!is_zero && job->out_dtype == l->dtype && factor == 1.0f) {
        memcpy(row->out, from + (size_t)place * l->hidden * sizeof(uint16_t),
               l->hidden * sizeof(uint16_t));
        return;
    }
    for (uint32_t h = 0; h < l->hidden; h++) {
        const float y = !is_zero ? ep_ffn_read_float(from, l->dtype, (size_t)place * l->hidden + h)
                        : bias != NULL ? bias[h]
                                       : 0.0f;
        ep_ffn_write(row->out, job->out_dtype, h, y * factor);
    }
}

static void scatter(const ep_ascend_slot *slot, const layout *l)
{
    for (uint32_t j = 0; j < slot->jobs_count; j++) {
        const ep_job *job = slot->jobs[j];
        for (uint32_t r = 0; r < job->rows_count; r++) {
            scatter_row(slot, l, job, &job->rows[r], slot->places[j] + r);
        }
    }
}

/* ---- operators ---- */

/* A contiguous tensor. Strides are in elements. NULL: no memory. */
static ep_acl_tensor *make_tensor(ep_ascend_device *device, ep_acl_data_type type,
                                  ep_acl_format format, const int64_t *shape, uint64_t rank,
                                  void *memory)
{
    int64_t strides[5];
    int64_t stride = 1;
    EP_ASSERT(rank <= EP_ARRAY_COUNT(strides));
    for (uint64_t i = rank; i-- > 0;) {
        strides[i] = stride;
        stride *= shape[i];
    }
    return device->acl.aclCreateTensor(shape, rank, type, strides, 0, format, shape, rank, memory);
}

static ep_acl_tensor *make_vector(ep_ascend_device *device, ep_acl_data_type type, int64_t count,
                                  void *memory)
{
    return make_tensor(device, type, EP_ACL_ND, &count, 1, memory);
}

static ep_acl_tensor *make_matrix(ep_ascend_device *device, ep_acl_data_type type, int64_t rows,
                                  int64_t columns, void *memory)
{
    const int64_t shape[] = {rows, columns};
    return make_tensor(device, type, EP_ACL_ND, shape, EP_ARRAY_COUNT(shape), memory);
}

/* Takes the tensors, also when it fails. */
static ep_acl_tensor_list *make_list(ep_ascend_device *device, ep_acl_tensor **tensors,
                                     uint32_t count)
{
    bool whole = true;
    for (uint32_t i = 0; i < count; i++) {
        whole = whole && tensors[i] != NULL;
    }
    ep_acl_tensor_list *list =
        whole ? device->acl.aclCreateTensorList((const ep_acl_tensor *const *)tensors, count)
              : NULL;
    for (uint32_t i = 0; list == NULL && i < count; i++) {
        if (tensors[i] != NULL) {
            (void)device->acl.aclDestroyTensor(tensors[i]);
        }
    }
    return list;
}

/* Records an object in the slot, which keeps it until streams have passed it. NULL fails the
 * launch. */
static ep_acl_tensor *keep_tensor(ep_ascend_slot *slot, ep_acl_tensor *tensor)
{
    if (tensor == NULL) {
        slot->result = slot->result == EP_OK ? EP_ERR_NO_MEMORY : slot->result;
        return NULL;
    }
    EP_ASSERT(slot->tensors_count < EP_ASCEND_TENSORS_MAX);
    slot->tensors[slot->tensors_count++] = tensor;
    return tensor;
}

static ep_acl_tensor_list *keep_list(ep_ascend_slot *slot, ep_acl_tensor_list *list)
{
    if (list == NULL) {
        slot->result = slot->result == EP_OK ? EP_ERR_NO_MEMORY : slot->result;
        return NULL;
    }
    EP_ASSERT(slot->lists_count < EP_ASCEND_LISTS_MAX);
    slot->lists[slot->lists_count++] = list;
    return list;
}

static ep_acl_tensor_list *list_of_one(ep_ascend_slot *slot, ep_ascend_device *device,
                                       ep_acl_tensor *tensor)
{
    return keep_list(slot, make_list(device, &tensor, 1));
}

/*
 * A list of tensors for the part at an offset in jobs' weights, [rows,columns]: one tensor for each
 * job, or for a single job one with an axis in front, as GroupedMatmul wants it. rows 0: without
 * that axis.
 */
static ep_acl_tensor_list *list_of_parts(ep_ascend_slot *slot, ep_ascend_device *device,
                                         ep_acl_data_type type, uint32_t first, uint32_t count,
                                         size_t offset, int64_t rows, int64_t columns)
{
    ep_acl_tensor *tensors[EP_ACL_GROUPS_MAX] = {NULL};
    const int64_t with_rows[] = {1, rows, columns};
    const int64_t without[] = {1, columns};
    const int64_t *shape = rows != 0 ? with_rows : without;
    const uint64_t rank = rows != 0 ? EP_ARRAY_COUNT(with_rows) : EP_ARRAY_COUNT(without);
    const uint64_t skipped = count == 1 ? 0 : 1;
    for (uint32_t j = 0; j < count; j++) {
        const ep_ascend_weights *weights =
            (const ep_ascend_weights *)slot->jobs[first + j]->weights;
        tensors[j] = make_tensor(device, type, EP_ACL_ND, shape + skipped, rank - skipped,
                                 weights->memory + offset);
    }
    return keep_list(slot, make_list(device, tensors, count));
}

/* Adds an operator whose first phase is done; code is what that phase returned. */
static void add_step(ep_ascend_slot *slot, ep_ascend_device *device, const ep_ascend_step *step,
                     ep_acl_code code)
{
    slot->result = ep_ascend_check(device, code, step->name, NULL);
    if (slot->result == EP_OK) {
        EP_ASSERT(slot->steps_count < EP_ASCEND_STEPS_MAX);
        slot->steps[slot->steps_count++] = *step;
    }
}

#define STEP_OF(device, operator)                                                                  \
    {                                                                                              \
        .launch = (device)->acl.operator, .name = #operator                                        \
    }

/* A range of jobs, and of their rows. */
typedef struct job_range {
    uint32_t first;
    uint32_t count;
    size_t row;
    int64_t rows;
} job_range;

static job_range range_of(const ep_ascend_slot *slot, uint32_t first, uint32_t count)
{
    const uint32_t last = first + count - 1;
    return (job_range){.first = first,
                       .count = count,
                       .row = slot->places[first],
                       .rows = (int64_t)slot->places[last] + slot->jobs[last]->rows_count -
                               slot->places[first]};
}

static ep_acl_tensor *keep_counts(ep_ascend_slot *slot, ep_ascend_device *device, const layout *l,
                                  const job_range *r)
{
    return keep_tensor(slot, make_vector(device, EP_ACL_INT64, r->count,
                                         slot->memory + r->first * l->count_bytes));
}

/* One of the two products: the matrix, and where rows, their scales and results begin. */
typedef struct product {
    const ep_ascend_matrix *matrix;
    int64_t inner;
    int64_t columns;
    size_t x;
    size_t row_scales;
    size_t out;
} product;

static void add_matmul(ep_ascend_slot *slot, ep_ascend_device *device, const layout *l,
                       const product *p, job_range r)
{
    const ep_acl_symbols *acl = &device->acl;
    const ep_acl_data_type bias_type = l->is_quant              ? EP_ACL_BF16
                                       : l->type == EP_ACL_BF16 ? EP_ACL_FLOAT
                                                                : l->type;
    uint8_t *x = slot->memory + p->x + r.row * (size_t)p->inner * l->x_bytes;
    uint8_t *out = slot->memory + p->out + r.row * (size_t)p->columns * sizeof(uint16_t);
    const ep_acl_tensor_list *xs =
        list_of_one(slot, device, make_matrix(device, l->x_type, r.rows, p->inner, x));
    ep_acl_tensor_list *outs =
        list_of_one(slot, device, make_matrix(device, l->type, r.rows, p->columns, out));
    const ep_acl_tensor_list *weights = list_of_parts(slot, device, l->x_type, r.first, r.count,
                                                      p->matrix->values, p->inner, p->columns);
    const ep_acl_tensor_list *biases = NULL;
    const ep_acl_tensor_list *scales = NULL;
    const ep_acl_tensor_list *row_scales = NULL;
    if (l->weights->has_biases) {
        biases = list_of_parts(slot, device, bias_type, r.first, r.count, p->matrix->biases, 0,
                               p->columns);
    }
    if (l->is_quant) {
        uint8_t *of_rows = slot->memory + p->row_scales + r.row * sizeof(float);
        scales = list_of_parts(slot, device, EP_ACL_FLOAT, r.first, r.count, p->matrix->scales, 0,
                               p->columns);
        row_scales = list_of_one(slot, device, make_vector(device, EP_ACL_FLOAT, r.rows, of_rows));
    }
    const ep_acl_tensor *counts = keep_counts(slot, device, l, &r);
    if (slot->result == EP_OK && acl->aclnnGroupedMatmulV5 != NULL) {
        ep_ascend_step step = STEP_OF(device, aclnnGroupedMatmulV5);
        add_step(slot, device, &step,
                 acl->aclnnGroupedMatmulV5GetWorkspaceSize(
                     xs, weights, biases, scales, NULL, NULL, NULL, row_scales, counts, NULL, NULL,
                     NULL, EP_ACL_SPLIT_SINGLE, EP_ACL_GROUP_ROWS, EP_ACL_GROUP_LIST_COUNTS,
                     EP_ACL_NO_ACTIVATION, NULL, outs, NULL, NULL, &step.workspace_bytes,
                     &step.executor));
    } else if (slot->result == EP_OK) {
        ep_ascend_step step = STEP_OF(device, aclnnGroupedMatmulV4);
        add_step(slot, device, &step,
                 acl->aclnnGroupedMatmulV4GetWorkspaceSize(
                     xs, weights, biases, scales, NULL, NULL, NULL, row_scales, counts, NULL, NULL,
                     NULL, EP_ACL_SPLIT_SINGLE, EP_ACL_GROUP_ROWS, EP_ACL_GROUP_LIST_COUNTS,
                     EP_ACL_NO_ACTIVATION, outs, NULL, NULL, &step.workspace_bytes,
                     &step.executor));
    }
}

/* The operator requires a limit; without one, the greatest finite number is used. */
static ep_acl_code plan_clipped(ep_ascend_device *device, const ep_ascend_weights *weights,
                                const ep_acl_tensor *in, const ep_acl_tensor *out,
                                ep_ascend_step *step)
{
    const bool is_oai = weights->activation == EP_ACT_SWIGLU_OAI;
    const float limit = weights->numbers.limit > 0.0f ? weights->numbers.limit : FLT_MAX;
    const float alpha = is_oai ? weights->numbers.alpha : 1.0f;
    const float beta = is_oai ? weights->numbers.beta : 0.0f;
    return device->acl.aclnnClippedSwigluGetWorkspaceSize(in, NULL, -1, (double)alpha,
                                                          (double)limit, (double)beta, false, out,
                                                          &step->workspace_bytes, &step->executor);
}

static void add_activation(ep_ascend_slot *slot, ep_ascend_device *device, const layout *l)
{
    const ep_ascend_weights *weights = l->weights;
    const int64_t rows = slot->rows_count;
    uint8_t *memory = slot->memory;
    const ep_acl_tensor *in = keep_tensor(
        slot, make_matrix(device, l->type, rows, 2 * (int64_t)l->inner, memory + l->gate_up));
    ep_acl_tensor *out =
        keep_tensor(slot, make_matrix(device, l->type, rows, l->inner, memory + l->activated));
    if (weights->activation == EP_ACT_SILU && slot->result == EP_OK) {
        ep_ascend_step step = STEP_OF(device, aclnnSwiGlu);
        add_step(slot, device, &step,
                 device->acl.aclnnSwiGluGetWorkspaceSize(in, -1, out, &step.workspace_bytes,
                                                         &step.executor));
    } else if (is_gelu(weights->activation)) {
        const int64_t form =
            weights->activation == EP_ACT_GELU_TANH ? EP_ACL_GELU_TANH : EP_ACL_GELU_ERF;
        ep_acl_tensor *beside =
            keep_tensor(slot, make_matrix(device, l->type, rows, l->inner, memory + l->gelu));
        ep_ascend_step step = STEP_OF(device, aclnnGeGluV3);
        if (slot->result == EP_OK) {
            add_step(slot, device, &step,
                     device->acl.aclnnGeGluV3GetWorkspaceSize(
                         in, -1, form, true, out, beside, &step.workspace_bytes, &step.executor));
        }
    } else if (slot->result == EP_OK) {
        ep_ascend_step step = STEP_OF(device, aclnnClippedSwiglu);
        add_step(slot, device, &step, plan_clipped(device, weights, in, out, &step));
    }
}

/* Activated rows become int8 with scales max / 127. */
static void add_quant(ep_ascend_slot *slot, ep_ascend_device *device, const layout *l)
{
    const int64_t rows = slot->rows_count;
    uint8_t *memory = slot->memory;
    const ep_acl_tensor *in =
        keep_tensor(slot, make_matrix(device, l->type, rows, l->inner, memory + l->activated));
    const ep_acl_tensor *out =
        keep_tensor(slot, make_matrix(device, EP_ACL_INT8, rows, l->inner, memory + l->quant));
    const ep_acl_tensor *scales =
        keep_tensor(slot, make_vector(device, EP_ACL_FLOAT, rows, memory + l->quant_scales));
    ep_ascend_step step = STEP_OF(device, aclnnDynamicQuant);
    if (slot->result == EP_OK) {
        add_step(slot, device, &step,
                 device->acl.aclnnDynamicQuantGetWorkspaceSize(
                     in, NULL, out, scales, &step.workspace_bytes, &step.executor));
    }
}

/* Everything up to the int8 rows that down takes, for one job. The group list holds running sums;
 * for a single group these equal the counts. */
static void add_fused(ep_ascend_slot *slot, ep_ascend_device *device, const layout *l, job_range r)
{
    const ep_ascend_weights *w = (const ep_ascend_weights *)slot->jobs[r.first]->weights;
    const int64_t wide = 2 * (int64_t)l->inner;
    const int64_t fractals[] = {1, wide / EP_ACL_NZ_COLUMNS, l->hidden / EP_ACL_NZ_ROWS,
                                EP_ACL_NZ_ROWS, EP_ACL_NZ_COLUMNS};
    uint8_t *x = slot->memory + COUNTS_BYTES + r.row * l->hidden;
    uint8_t *quant = slot->memory + l->quant + r.row * l->inner;
    const size_t scale_at = r.row * sizeof(float);
    const ep_acl_tensor *xs =
        keep_tensor(slot, make_matrix(device, EP_ACL_INT8, r.rows, l->hidden, x));
    const ep_acl_tensor *weight =
        keep_tensor(slot, make_tensor(device, EP_ACL_INT8, EP_ACL_FRACTAL_NZ, fractals,
                                      EP_ARRAY_COUNT(fractals), w->memory + w->gate_up.values));
    const ep_acl_tensor *scales = keep_tensor(
        slot, make_matrix(device, EP_ACL_FLOAT, 1, wide, w->memory + w->gate_up.scales));
    const ep_acl_tensor *x_scales = keep_tensor(
        slot, make_vector(device, EP_ACL_FLOAT, r.rows, slot->memory + l->x_scales + scale_at));
    const ep_acl_tensor *counts = keep_counts(slot, device, l, &r);
    ep_acl_tensor *out =
        keep_tensor(slot, make_matrix(device, EP_ACL_INT8, r.rows, l->inner, quant));
    ep_acl_tensor *out_scales = keep_tensor(
        slot, make_vector(device, EP_ACL_FLOAT, r.rows, slot->memory + l->quant_scales + scale_at));
    ep_ascend_step step = STEP_OF(device, aclnnGroupedMatmulSwigluQuant);
    if (slot->result == EP_OK) {
        add_step(slot, device, &step,
                 device->acl.aclnnGroupedMatmulSwigluQuantGetWorkspaceSize(
                     xs, weight, NULL, NULL, scales, x_scales, counts, out, out_scales, NULL,
                     &step.workspace_bytes, &step.executor));
    }
}

/* All first phases come before the first launch, because the workspace may grow only while nothing
 * of the slot runs. */
static void plan(ep_ascend_slot *slot, ep_ascend_device *device, const layout *l)
{
    const product gate_up = {.matrix = &l->weights->gate_up,
                             .inner = l->hidden,
                             .columns = 2 * (int64_t)l->inner,
                             .x = COUNTS_BYTES,
                             .row_scales = l->x_scales,
                             .out = l->gate_up};
    const product down = {.matrix = &l->weights->down,
                          .inner = l->inner,
                          .columns = l->hidden,
                          .x = l->is_quant ? l->quant : l->activated,
                          .row_scales = l->quant_scales,
                          .out = l->out_device};
    const uint32_t count = l->is_quant ? 1 : slot->jobs_count; /* jobs per product */
    for (uint32_t j = 0; j < slot->jobs_count; j += count) {
        if (l->weights->is_fused) {
            add_fused(slot, device, l, range_of(slot, j, count));
        } else {
            add_matmul(slot, device, l, &gate_up, range_of(slot, j, count));
        }
    }
    if (!l->weights->is_fused) {
        add_activation(slot, device, l);
    }
    if (l->is_quant && !l->weights->is_fused) {
        add_quant(slot, device, l);
    }
    for (uint32_t j = 0; j < slot->jobs_count; j += count) {
        add_matmul(slot, device, l, &down, range_of(slot, j, count));
    }
    uint64_t most = 0;
    for (uint32_t i = 0; i < slot->steps_count; i++) {
        most = slot->steps[i].workspace_bytes > most ? slot->steps[i].workspace_bytes : most;
    }
    if (slot->result == EP_OK) {
        slot->result = grow_device(device, &slot->workspace, &slot->workspace_bytes, most);
    }
}

/* An executor serves one launch and is used up by it, also if the launch fails. */
static ep_err launch_step(ep_ascend_slot *slot, ep_ascend_device *device, ep_ascend_step *step,
                          ep_acl_stream stream)
{
    ep_acl_executor *executor = step->executor;
    step->executor = NULL;
    return ep_ascend_check(device,
                           step->launch(slot->workspace, step->workspace_bytes, executor, stream),
                           step->name, NULL);
}

static ep_err enqueue(ep_ascend_slot *slot, ep_ascend_device *device, const ep_ascend_streams *s,
                      const layout *l)
{
    ep_err err = EP_ASCEND_CALL(device, NULL, aclrtMemcpyAsync, slot->memory, l->in_bytes,
                                slot->stage, l->in_bytes, EP_ACL_HOST_TO_DEVICE, s->in);
    err = err == EP_OK ? EP_ASCEND_CALL(device, NULL, aclrtRecordEvent, slot->ready, s->in) : err;
    err = err == EP_OK ? EP_ASCEND_CALL(device, NULL, aclrtStreamWaitEvent, s->compute, slot->ready)
                       : err;
    for (uint32_t i = 0; i < slot->steps_count && err == EP_OK; i++) {
        err = launch_step(slot, device, &slot->steps[i], s->compute);
    }
    err = err == EP_OK ? EP_ASCEND_CALL(device, NULL, aclrtRecordEvent, slot->computed, s->compute)
                       : err;
    err = err == EP_OK ? EP_ASCEND_CALL(device, NULL, aclrtStreamWaitEvent, s->out, slot->computed)
                       : err;
    err = err == EP_OK ? EP_ASCEND_CALL(device, NULL, aclrtMemcpyAsync, slot->stage + l->out_stage,
                                        l->out_bytes, slot->memory + l->quant_scales, l->out_bytes,
                                        EP_ACL_DEVICE_TO_HOST, s->out)
                       : err;
    return err == EP_OK ? EP_ASCEND_CALL(device, NULL, aclrtRecordEvent, slot->done, s->out) : err;
}

void ep_ascend_slot_launch(ep_ascend_slot *slot, ep_ascend_device *device,
                           const ep_ascend_streams *streams)
{
    place_jobs(slot);
    const layout l = lay_out(slot);
    slot->launched = false;
    slot->result = reserve(slot, device, &l);
    if (slot->result == EP_OK) {
        gather(slot, &l);
        plan(slot, device, &l);
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
    /* Waits for every stream, since each reports only its own failures. */
    ep_acl_event const events[] = {slot->ready, slot->computed, slot->done};
    static const char *const waits[] = {
        "aclrtSynchronizeEventWithTimeout of the in stream (copies of rows)",
        "aclrtSynchronizeEventWithTimeout of the compute stream (operators)",
        "aclrtSynchronizeEventWithTimeout of the out stream (copies of results)"};
    for (size_t i = 0; i < EP_ARRAY_COUNT(events) && err == EP_OK; i++) {
        /* otherwise each wait could take the whole timeout again */
        if (atomic_load(&device->lost)) {
            err = EP_ERR_DEVICE_LOST;
            break;
        }
        err = ep_ascend_check(
            device, device->acl.aclrtSynchronizeEventWithTimeout(events[i], EP_ASCEND_TIMEOUT_MS),
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
    /* After a loss, running work may still write, also that of an earlier pass: objects stay until
     * the streams are gone. */
    if (!atomic_load(&device->lost)) {
        drop_objects(slot, device);
    }
    return err;
}
