/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A view of a tensor that the caller owns: address, shape, byte strides, element type, memory kind.
 * Convertible to and from DLPack. Only functions that say so accept memory of an Ascend device
 * (ep_moe_begin_on_stream, the group API); the others return EP_ERR_UNIMPLEMENTED.
 *
 * Ownership  a view borrows its data, which must stay valid until the call it is given to
 *            completes.
 * Threads    a plain value.
 */
#ifndef EXPERTD_TENSOR_H
#define EXPERTD_TENSOR_H

#include "expertd/error.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EP_TENSOR_RANK_MAX 8

/* name, wire number (never reused), bytes per element */
#define EP_DTYPE_MAP(X)                                                                            \
    X(NONE, 0, 0, "none")                                                                          \
    X(BF16, 1, 2, "bf16")                                                                          \
    X(F16, 2, 2, "f16")                                                                            \
    X(F32, 3, 4, "f32")                                                                            \
    X(I8, 4, 1, "i8")                                                                              \
    X(U8, 5, 1, "u8")                                                                              \
    X(I32, 6, 4, "i32")                                                                            \
    X(I64, 7, 8, "i64")                                                                            \
    X(BOOL, 8, 1, "bool")                                                                          \
    X(F8E4M3, 9, 1, "f8e4m3")

typedef enum ep_dtype {
#define EP_DTYPE_ROW(name, wire, bytes, text) EP_DTYPE_##name = wire,
    EP_DTYPE_MAP(EP_DTYPE_ROW)
#undef EP_DTYPE_ROW
} ep_dtype;

typedef enum ep_memory_kind { EP_MEMORY_HOST = 0, EP_MEMORY_ASCEND = 1 } ep_memory_kind;

typedef struct ep_tensor {
    uint32_t struct_bytes; /* sizeof(ep_tensor) */
    ep_dtype dtype;
    void *data;    /* may be NULL when a dimension is 0 */
    uint32_t rank; /* 0: no tensor */
    ep_memory_kind memory;
    int64_t shape[EP_TENSOR_RANK_MAX];
    /* the innermost must equal the element size, except in the group API */
    int64_t stride_bytes[EP_TENSOR_RANK_MAX];
    int32_t device_id;
    /* stream of the device, where a function asks for it; 0 for host memory */
    uint64_t sync_handle;
} ep_tensor;

/* Bytes of an element; 0 for NONE and unknown numbers. */
EP_API size_t ep_dtype_bytes(ep_dtype dtype);
/* "bf16"; "unknown" for unknown numbers. */
EP_API const char *ep_dtype_name(ep_dtype dtype);
/* "bf16" -> EP_DTYPE_BF16; EP_DTYPE_NONE when unknown. */
EP_API ep_dtype ep_dtype_from_name(const char *name);

/* Contiguous host views. */
EP_API ep_tensor ep_tensor_1d(void *data, ep_dtype dtype, int64_t d0);
EP_API ep_tensor ep_tensor_2d(void *data, ep_dtype dtype, int64_t d0, int64_t d1);
EP_API ep_tensor ep_tensor_3d(void *data, ep_dtype dtype, int64_t d0, int64_t d1, int64_t d2);
/* The absent tensor (rank 0). */
EP_API ep_tensor ep_tensor_none(void);

#ifdef __cplusplus
}
#endif
#endif
