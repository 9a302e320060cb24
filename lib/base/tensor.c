/* SPDX-License-Identifier: Apache-2.0 */
/* Element types and contiguous host views. */
#include "expertd/tensor.h"

#include <string.h>

#include "base/check.h"

typedef struct {
    ep_dtype dtype;
    size_t bytes;
    const char *name;
} dtype_row;

static const dtype_row rows[] = {
#define EP_DTYPE_ROW(name, wire, bytes, text) {EP_DTYPE_##name, (wire) == 0 ? 0 : (bytes), text},
    EP_DTYPE_MAP(EP_DTYPE_ROW)
#undef EP_DTYPE_ROW
};

static const dtype_row *find_row(ep_dtype dtype)
{
    for (size_t i = 0; i < EP_ARRAY_COUNT(rows); i++) {
        if (rows[i].dtype == dtype) {
            return &rows[i];
        }
    }
    return NULL;
}

size_t ep_dtype_bytes(ep_dtype dtype)
{
    const dtype_row *row = find_row(dtype);
    return row == NULL ? 0 : row->bytes;
}

const char *ep_dtype_name(ep_dtype dtype)
{
    const dtype_row *row = find_row(dtype);
    return row == NULL ? "unknown" : row->name;
}

ep_dtype ep_dtype_from_name(const char *name)
{
    for (size_t i = 1; i < EP_ARRAY_COUNT(rows); i++) {
        if (strcmp(rows[i].name, name) == 0) {
            return rows[i].dtype;
        }
    }
    return EP_DTYPE_NONE;
}

ep_tensor ep_tensor_none(void)
{
    ep_tensor t = {0};
    t.struct_bytes = sizeof(t);
    return t;
}

static ep_tensor contiguous(void *data, ep_dtype dtype, uint32_t rank, const int64_t *shape)
{
    ep_tensor t = ep_tensor_none();
    int64_t stride = (int64_t)ep_dtype_bytes(dtype);
    t.dtype = dtype;
    t.data = data;
    t.rank = rank;
    for (uint32_t i = rank; i-- > 0;) {
        t.shape[i] = shape[i];
        t.stride_bytes[i] = stride;
        /* next to a 0, other dimensions may be arbitrary */
        stride = (int64_t)((uint64_t)stride * (uint64_t)shape[i]);
    }
    return t;
}

ep_tensor ep_tensor_1d(void *data, ep_dtype dtype, int64_t d0)
{
    return contiguous(data, dtype, 1, (int64_t[]){d0});
}

ep_tensor ep_tensor_2d(void *data, ep_dtype dtype, int64_t d0, int64_t d1)
{
    return contiguous(data, dtype, 2, (int64_t[]){d0, d1});
}

ep_tensor ep_tensor_3d(void *data, ep_dtype dtype, int64_t d0, int64_t d1, int64_t d2)
{
    return contiguous(data, dtype, 3, (int64_t[]){d0, d1, d2});
}
