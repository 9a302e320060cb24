/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pinned host memory in place of a call's tensors on an Ascend device, and the copies between the
 * two. The first such tensor loads the vendor's runtime; the program that owns the tensors
 * initialises and ends it.
 *
 * Use      zero a stage first, and parts_count before each set of tensors; add each, then place.
 *          Memory is kept for the next set.
 * Threads  one at a time. add, place and copy work in the calling thread's context.
 */
#ifndef EP_CLIENT_DEVICE_STAGE_H
#define EP_CLIENT_DEVICE_STAGE_H

#include "backends/ascend/acl_symbols.h"
#include "expertd/tensor.h"

#define EP_STAGE_PARTS_MAX 24
#define EP_STAGE_ALL_ROWS SIZE_MAX

enum {
    EP_STAGE_IN = 1,   /* read by the call */
    EP_STAGE_OUT = 2,  /* written by the call */
    EP_STAGE_ROWS = 4, /* its first dimension counts rows, and a copy may take fewer */
    EP_STAGE_LATER = 8 /* read by the call, after other inputs have told the number of rows */
};

typedef struct ep_stage_part {
    ep_tensor *tensor; /* valid until it is placed */
    void *device;
    uint32_t ways;
    size_t rows; /* of the first dimension */
    size_t row_stride_bytes;
    size_t row_bytes; /* from its first element to the end of its last one */
    size_t offset;    /* in stage.memory */
} ep_stage_part;

typedef struct ep_stage {
    const ep_acl_symbols *acl; /* set by the first tensor on a device */
    ep_acl_context context;
    int32_t device;
    uint64_t sync_handle; /* the same for all of them */
    uint8_t *memory;
    size_t memory_bytes;
    ep_stage_part parts[EP_STAGE_PARTS_MAX];
    uint32_t parts_count; /* 0: none of the tensors is on a device */
} ep_stage;

/*
 * Adds a tensor of the call; does nothing if it is in host memory or absent. Errors:
 * FAILED_PRECONDITION (no runtime: the library is named; no device in this thread),
 * INVALID_ARGUMENT (form, device, sync_handle), named.
 */
ep_err ep_stage_add(ep_stage *stage, const char *name, ep_tensor *tensor, uint32_t ways,
                    ep_error *out_error);
/* Makes host tensors of the added ones. Errors: NO_MEMORY, DEVICE_LOST. */
ep_err ep_stage_place(ep_stage *stage, ep_error *out_error);
/*
 * Enqueues the copies of inputs (EP_STAGE_IN, or EP_STAGE_LATER: to the host) or outputs
 * (EP_STAGE_OUT: to the device), of parts with EP_STAGE_ROWS the first rows_max rows. Errors: the
 * runtime's.
 */
ep_err ep_stage_copy(const ep_stage *stage, uint32_t way, size_t rows_max, ep_acl_stream stream,
                     ep_error *out_error);
/* Call it when no copy is under way any more. */
void ep_stage_fini(ep_stage *stage);

/*
 * Streams, events and pinned memory belong to a context, which is set per thread. enter sets the
 * stage's context, leave the thread's former one; a thread without one keeps the stage's.
 */
ep_err ep_stage_enter(const ep_stage *stage, ep_acl_context *out_before, ep_error *out_error);
void ep_stage_leave(const ep_stage *stage, ep_acl_context before);

/* Turns a code of the runtime into an ep_err. */
ep_err ep_stage_check(const ep_stage *stage, ep_acl_code code, const char *call,
                      ep_error *out_error);
#define EP_STAGE_CALL(stage, out_error, name, ...)                                                 \
    ep_stage_check(stage, (stage)->acl->name(__VA_ARGS__), #name, out_error)

#endif
