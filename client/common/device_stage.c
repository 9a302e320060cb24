/* SPDX-License-Identifier: Apache-2.0 */
#include "common/device_stage.h"

#include <inttypes.h>
#include <pthread.h>

#include "base/check.h"
#include "base/error.h"

#define BAD(...) ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, __VA_ARGS__)
#define PART_ALIGN 512

/* The vendor's libraries cannot be closed and opened again, so they stay open. */
static struct {
    pthread_mutex_t lock;
    bool loaded;
    ep_acl_symbols acl;
} process = {.lock = PTHREAD_MUTEX_INITIALIZER};

static ep_err load(ep_stage *stage, const char *name, ep_error *out_error)
{
    ep_error error;
    pthread_mutex_lock(&process.lock);
    ep_err err = process.loaded
                     ? EP_OK
                     : ep_acl_symbols_load_runtime(ep_acl_opener_caller(), &process.acl, &error);
    process.loaded = err == EP_OK;
    pthread_mutex_unlock(&process.lock);
    if (err != EP_OK) {
        return ep_error_set(
            out_error, EP_ERR_FAILED_PRECONDITION,
            "%s is on an Ascend device, which needs CANN's runtime, found by LD_LIBRARY_PATH or "
            "ASCEND_HOME_PATH: %.300s",
            name, error.text);
    }
    stage->acl = &process.acl;
    return EP_OK;
}

ep_err ep_stage_check(const ep_stage *stage, ep_acl_code code, const char *call,
                      ep_error *out_error)
{
    return code == EP_ACL_SUCCESS
               ? EP_OK
               : ep_acl_error_set(out_error, stage->acl, stage->device, code, call);
}

/* The first tensor sets the stage's device: that of the calling thread. */
static ep_err enter_device(ep_stage *stage, const char *name, const ep_tensor *tensor,
                           ep_error *out_error)
{
    ep_error error;
    ep_acl_context context = NULL;
    int32_t device = tensor->device_id;
    ep_err err = load(stage, name, out_error);
    if (err != EP_OK) {
        return err;
    }
    err = EP_STAGE_CALL(stage, &error, aclrtGetCurrentContext, &context);
    if (err == EP_OK) {
        err = EP_STAGE_CALL(stage, &error, aclrtGetDevice, &device);
    }
    if (err != EP_OK) { /* memory of an earlier set keeps its context */
        return ep_error_set(out_error, err == EP_ERR_DEVICE_LOST ? err : EP_ERR_FAILED_PRECONDITION,
                            "%s is on device %" PRId32
                            ", and this thread works on none: aclrtSetDevice comes first (%.256s)",
                            name, tensor->device_id, error.text);
    }
    if (context != stage->context) {
        ep_stage_fini(stage);
    }
    stage->context = context;
    stage->device = device;
    stage->sync_handle = tensor->sync_handle;
    return EP_OK;
}

ep_err ep_stage_enter(const ep_stage *stage, ep_acl_context *out_before, ep_error *out_error)
{
    if (stage->acl->aclrtGetCurrentContext(out_before) != EP_ACL_SUCCESS) {
        *out_before = NULL;
    }
    return *out_before == stage->context
               ? EP_OK
               : EP_STAGE_CALL(stage, out_error, aclrtSetCurrentContext, stage->context);
}

void ep_stage_leave(const ep_stage *stage, ep_acl_context before)
{
    if (before != NULL && before != stage->context) {
        (void)stage->acl->aclrtSetCurrentContext(before);
    }
}

/* Bytes from the first element to the end of the last one, over the dimensions from first on. */
static bool span_bytes(const ep_tensor *tensor, uint32_t first, size_t *out_bytes)
{
    size_t bytes = ep_dtype_bytes(tensor->dtype);
    for (uint32_t i = first; i < tensor->rank; i++) {
        size_t part = 0;
        if (tensor->shape[i] == 0) {
            *out_bytes = 0;
            return true;
        }
        if (!ep_mul_size((size_t)tensor->shape[i] - 1, (size_t)tensor->stride_bytes[i], &part) ||
            !ep_add_size(bytes, part, &bytes)) {
            return false;
        }
    }
    *out_bytes = bytes;
    return bytes <= SIZE_MAX / EP_STAGE_PARTS_MAX / 2;
}

/* Checks what the copies rely on; the rest of the form is checked as for host tensors. */
static ep_err check_form(const char *name, const ep_tensor *tensor, uint32_t ways,
                         size_t *out_bytes, ep_error *out_error)
{
    size_t dense = ep_dtype_bytes(tensor->dtype);
    if (tensor->rank > EP_TENSOR_RANK_MAX || dense == 0) {
        return BAD("%s has rank %" PRIu32 " and type %s: allowed up to %d, and a type", name,
                   tensor->rank, ep_dtype_name(tensor->dtype), EP_TENSOR_RANK_MAX);
    }
    for (uint32_t i = tensor->rank; i-- > 0;) {
        if (tensor->shape[i] < 0 || tensor->shape[i] > UINT32_MAX || tensor->stride_bytes[i] < 0) {
            return BAD("%s has %" PRId64 " and stride %" PRId64 " in dimension %" PRIu32
                       ": allowed 0..%" PRIu32 ", and 0 or more",
                       name, tensor->shape[i], tensor->stride_bytes[i], i, UINT32_MAX);
        }
        if ((ways & EP_STAGE_OUT) != 0 && tensor->shape[i] > 1 &&
            (size_t)tensor->stride_bytes[i] != dense) {
            return BAD("%s has stride %" PRId64 " in dimension %" PRIu32
                       ": allowed %zu, since a result on a device has no gaps",
                       name, tensor->stride_bytes[i], i, dense);
        }
        if (tensor->shape[i] > 0 && !ep_mul_size(dense, (size_t)tensor->shape[i], &dense)) {
            return BAD("%s is larger than memory", name);
        }
    }
    if (!span_bytes(tensor, 0, out_bytes)) {
        return BAD("%s is larger than memory", name);
    }
    return tensor->data == NULL && *out_bytes > 0 ? BAD("%s has no data", name) : EP_OK;
}

ep_err ep_stage_add(ep_stage *stage, const char *name, ep_tensor *tensor, uint32_t ways,
                    ep_error *out_error)
{
    size_t bytes = 0;
    if (tensor->rank == 0 || tensor->memory != EP_MEMORY_ASCEND ||
        tensor->struct_bytes != sizeof(*tensor)) {
        return EP_OK;
    }
    ep_err err = check_form(name, tensor, ways, &bytes, out_error);
    if (err == EP_OK && stage->parts_count == 0) {
        err = enter_device(stage, name, tensor, out_error);
    }
    if (err != EP_OK) {
        return err;
    }
    if (tensor->device_id != stage->device) {
        return BAD("%s is on device %" PRId32 ": this thread's is %" PRId32, name,
                   tensor->device_id, stage->device);
    }
    if (tensor->sync_handle != stage->sync_handle) {
        return BAD("%s has sync_handle 0x%" PRIx64 ", a tensor before it 0x%" PRIx64
                   ": allowed one for all tensors of a call",
                   name, tensor->sync_handle, stage->sync_handle);
    }
    EP_ASSERT(stage->parts_count < EP_STAGE_PARTS_MAX);
    ep_stage_part *part = &stage->parts[stage->parts_count++];
    *part = (ep_stage_part){.tensor = tensor,
                            .device = tensor->data,
                            .ways = ways,
                            .rows = bytes == 0 ? 0 : (size_t)tensor->shape[0],
                            .row_stride_bytes = (size_t)tensor->stride_bytes[0]};
    (void)span_bytes(tensor, 1, &part->row_bytes); /* cannot fail: smaller than the span above */
    return EP_OK;
}

static size_t bytes_of(const ep_stage_part *part, size_t rows_max)
{
    size_t rows =
        (part->ways & EP_STAGE_ROWS) == 0 || part->rows < rows_max ? part->rows : rows_max;
    return rows == 0 ? 0 : (rows - 1) * part->row_stride_bytes + part->row_bytes;
}

ep_err ep_stage_place(ep_stage *stage, ep_error *out_error)
{
    size_t bytes = 0;
    for (uint32_t i = 0; i < stage->parts_count; i++) {
        stage->parts[i].offset = bytes;
        bytes += ep_align_up(bytes_of(&stage->parts[i], EP_STAGE_ALL_ROWS), PART_ALIGN);
    }
    if (bytes > stage->memory_bytes) {
        void *memory = NULL;
        const ep_err err = EP_STAGE_CALL(stage, out_error, aclrtMallocHost, &memory, bytes);
        if (err != EP_OK) {
            return err;
        }
        ep_stage_fini(stage);
        stage->memory = memory;
        stage->memory_bytes = bytes;
    }
    for (uint32_t i = 0; i < stage->parts_count; i++) {
        ep_tensor *tensor = stage->parts[i].tensor;
        tensor->data = stage->memory == NULL ? NULL : stage->memory + stage->parts[i].offset;
        tensor->memory = EP_MEMORY_HOST;
        tensor->device_id = 0;
        tensor->sync_handle = 0;
        stage->parts[i].tensor = NULL; /* the caller's, which may be gone later */
    }
    return EP_OK;
}

ep_err ep_stage_copy(const ep_stage *stage, uint32_t way, size_t rows_max, ep_acl_stream stream,
                     ep_error *out_error)
{
    ep_err err = EP_OK;
    for (uint32_t i = 0; i < stage->parts_count && err == EP_OK; i++) {
        const ep_stage_part *part = &stage->parts[i];
        const size_t bytes = bytes_of(part, rows_max);
        void *host = stage->memory + part->offset;
        if ((part->ways & way) == 0 || bytes == 0) {
            continue;
        }
        err = way == EP_STAGE_OUT
                  ? EP_STAGE_CALL(stage, out_error, aclrtMemcpyAsync, part->device, bytes, host,
                                  bytes, EP_ACL_HOST_TO_DEVICE, stream)
                  : EP_STAGE_CALL(stage, out_error, aclrtMemcpyAsync, host, bytes, part->device,
                                  bytes, EP_ACL_DEVICE_TO_HOST, stream);
    }
    return err;
}

void ep_stage_fini(ep_stage *stage)
{
    ep_acl_context before = NULL;
    if (stage->memory != NULL) {
        (void)ep_stage_enter(stage, &before, NULL);
        (void)stage->acl->aclrtFreeHost(stage->memory);
        ep_stage_leave(stage, before);
        stage->memory = NULL;
        stage->memory_bytes = 0;
    }
}
