/* SPDX-License-Identifier: Apache-2.0 */
#include "group/group_strided.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"

#define PART_ALIGN 64

/* Absent, empty, or invalid in a way that ep_tensor_check reports. */
static bool is_nothing(const ep_tensor *tensor)
{
    bool is_wrong = tensor->rank == 0 || tensor->rank > EP_TENSOR_RANK_MAX ||
                    tensor->data == NULL || tensor->memory != EP_MEMORY_HOST ||
                    tensor->struct_bytes != sizeof(*tensor) || ep_dtype_bytes(tensor->dtype) == 0;
    for (uint32_t i = 0; !is_wrong && i < tensor->rank; i++) {
        is_wrong = tensor->shape[i] <= 0 || tensor->shape[i] > UINT32_MAX;
    }
    return is_wrong;
}

/* Whether ep_tensor_check accepts its strides. */
static bool is_dense(const ep_tensor *tensor)
{
    bool is_all = true;
    int64_t step = (int64_t)ep_dtype_bytes(tensor->dtype);
    for (uint32_t i = tensor->rank; i-- > 0;) {
        bool is_row = i == 0 && tensor->rank > 1; /* rows may have any stride */
        bool is_good = is_row && tensor->rank == 2 ? tensor->stride_bytes[i] >= 0
                                                   : tensor->stride_bytes[i] == step;
        is_all = is_all && (is_good || tensor->shape[i] == 1);
        step = (int64_t)((uint64_t)tensor->stride_bytes[i] * (uint64_t)tensor->shape[i]);
    }
    return is_all;
}

static uint64_t distance(int64_t stride)
{
    return stride < 0 ? 0 - (uint64_t)stride : (uint64_t)stride;
}

/* Whether elements of a result overlap: taking dimensions from the smallest stride to the largest,
 * some stride is smaller than the reach of those before it. */
static bool overlaps(const ep_tensor *tensor)
{
    uint64_t reach = ep_dtype_bytes(tensor->dtype);
    uint32_t done = 0;
    for (uint32_t n = 0; n < tensor->rank; n++) {
        uint32_t next = tensor->rank;
        for (uint32_t i = 0; i < tensor->rank; i++) {
            bool is_nearer = next == tensor->rank || distance(tensor->stride_bytes[i]) <
                                                         distance(tensor->stride_bytes[next]);
            next = (done >> i & 1u) == 0 && is_nearer ? i : next;
        }
        done |= 1u << next;
        if (tensor->shape[next] > 1) {
            uint64_t step = distance(tensor->stride_bytes[next]);
            if (step < reach) {
                return true;
            }
            reach += step * ((uint64_t)tensor->shape[next] - 1);
        }
    }
    return false;
}

ep_err ep_strided_add(ep_strided *strided, const char *name, ep_tensor *tensor, uint32_t ways,
                      ep_error *out_error)
{
    if (is_nothing(tensor)) {
        return EP_OK;
    }
    if ((ways & EP_STAGE_OUT) != 0 && overlaps(tensor)) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "%s has strides with which elements share a place: allowed only in "
                            "what is read",
                            name);
    }
    if (is_dense(tensor)) {
        return EP_OK;
    }
    EP_ASSERT(strided->parts_count < EP_STAGE_PARTS_MAX);
    strided->parts[strided->parts_count++] =
        (ep_strided_part){.tensor = tensor, .sparse = *tensor, .ways = ways};
    return EP_OK;
}

static bool dense_bytes(const ep_tensor *tensor, size_t *out_bytes)
{
    size_t bytes = ep_dtype_bytes(tensor->dtype);
    for (uint32_t i = 0; i < tensor->rank; i++) {
        if (!ep_mul_size(bytes, (size_t)tensor->shape[i], &bytes)) {
            return false;
        }
    }
    *out_bytes = bytes;
    return bytes <= SIZE_MAX / EP_STAGE_PARTS_MAX / 2;
}

static void set_dense(ep_tensor *tensor, void *data)
{
    int64_t stride = (int64_t)ep_dtype_bytes(tensor->dtype);
    tensor->data = data;
    for (uint32_t i = tensor->rank; i-- > 0;) {
        tensor->stride_bytes[i] = stride;
        stride *= tensor->shape[i];
    }
}

ep_err ep_strided_place(ep_strided *strided, ep_error *out_error)
{
    size_t bytes = 0;
    for (uint32_t i = 0; i < strided->parts_count; i++) {
        size_t part = 0;
        strided->parts[i].offset = bytes;
        if (!dense_bytes(&strided->parts[i].sparse, &part)) {
            return ep_error_set(out_error, EP_ERR_NO_MEMORY, "tensors are larger than memory");
        }
        bytes += ep_align_up(part, PART_ALIGN);
    }
    if (bytes > strided->memory_bytes) {
        uint8_t *memory = aligned_alloc(PART_ALIGN, bytes);
        if (memory == NULL) {
            return ep_error_set(out_error, EP_ERR_NO_MEMORY,
                                "no memory for %zu bytes of tensors with strides", bytes);
        }
        free(strided->memory);
        strided->memory = memory;
        strided->memory_bytes = bytes;
    }
    for (uint32_t i = 0; i < strided->parts_count; i++) {
        set_dense(strided->parts[i].tensor, strided->memory + strided->parts[i].offset);
        strided->parts[i].tensor = NULL; /* the caller's, which may be gone later */
    }
    return EP_OK;
}

static void copy_line(uint8_t *sparse, int64_t stride, uint8_t *dense, size_t element,
                      int64_t count, bool back)
{
    for (int64_t i = 0; i < count; i++) {
        uint8_t *from = back ? dense + i * (int64_t)element : sparse + i * stride;
        uint8_t *to = back ? sparse + i * stride : dense + i * (int64_t)element;
        memcpy(to, from, element);
    }
}

/* Copies all lines of the innermost dimension, with a counter that has a digit per dimension. */
static void copy_part(const ep_tensor *t, uint8_t *dense, int64_t rows, bool back)
{
    const uint32_t last = t->rank - 1;
    const size_t element = ep_dtype_bytes(t->dtype);
    int64_t index[EP_TENSOR_RANK_MAX] = {0};
    uint8_t *sparse = t->data;
    for (bool more = rows > 0; more;) {
        const int64_t count = last == 0 ? rows : t->shape[last];
        copy_line(sparse, t->stride_bytes[last], dense, element, count, back);
        dense += (size_t)count * element;
        more = false;
        for (uint32_t i = last; i-- > 0 && !more;) {
            sparse += t->stride_bytes[i];
            more = ++index[i] < (i == 0 ? rows : t->shape[i]);
            if (!more) {
                sparse -= index[i] * t->stride_bytes[i];
                index[i] = 0;
            }
        }
    }
}

void ep_strided_copy(const ep_strided *strided, uint32_t way, size_t rows_max)
{
    for (uint32_t i = 0; i < strided->parts_count; i++) {
        const ep_strided_part *part = &strided->parts[i];
        int64_t rows = part->sparse.shape[0];
        if ((part->ways & EP_STAGE_ROWS) != 0 && (uint64_t)rows > rows_max) {
            rows = (int64_t)rows_max;
        }
        /* the operator may write only a part of these, and the rest must stay */
        const bool is_kept =
            way == EP_STAGE_IN && part->sparse.rank == 1 && (part->ways & EP_STAGE_OUT) != 0;
        if ((part->ways & way) != 0 || is_kept) {
            copy_part(&part->sparse, strided->memory + part->offset, rows, way == EP_STAGE_OUT);
        }
    }
}

void ep_strided_fini(ep_strided *strided)
{
    free(strided->memory);
    strided->memory = NULL;
    strided->memory_bytes = 0;
}
