/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Turns the public arguments of a call into an ep_batch, the place of the result, and copies of the
 * strings. Checks every tensor's form; ep_batch_check checks the values of ids and masks.
 */
#ifndef EP_CLIENT_ARGS_H
#define EP_CLIENT_ARGS_H

#include "expertd/client.h"
#include "moe/combine.h"
#include "moe/routing_table.h"

#define EP_TRACEPARENT_BYTES 64
#define EP_TENANT_BYTES 128

typedef struct ep_call_spec {
    char model[EP_MODEL_NAME_BYTES];
    char version[EP_VERSION_BYTES]; /* as given; the caller of ep_call_spec_fill resolves it */
    char traceparent[EP_TRACEPARENT_BYTES];
    char tenant[EP_TENANT_BYTES];
    uint32_t layer;
    ep_mode mode;
    ep_moe_comm comm_alg;
    bool allow_missing;
    uint64_t step_group; /* 0: none */
    uint32_t step_group_size;
    bool want_timing;
    uint32_t *missing_slots; /* [missing_slots_max], the caller's; NULL allowed */
    size_t missing_slots_max;
    ep_moe_tokens_func on_tokens; /* NULL: out is written at the end */
    void *on_tokens_arg;
    uint64_t deadline_us; /* 0: the client's default */
    ep_batch batch;       /* tokens: T of the buffers */
    ep_combine_out out;
} ep_call_spec;

/* Copies the arguments, whose struct may be of an older version, and checks strings and
 * enumerations. Errors: INVALID_ARGUMENT naming the field, UNIMPLEMENTED (newer struct). */
ep_err ep_args_take(const ep_moe_args *given, const ep_tensor *out, ep_moe_args *out_args,
                    ep_error *out_error);
/*
 * Fills a spec from checked args for a layer. Errors: INVALID_ARGUMENT naming the tensor, its value
 * and the allowed range; UNIMPLEMENTED (memory that is not the host's).
 */
ep_err ep_call_spec_fill(const ep_moe_args *args, const ep_tensor *out, const char *model,
                         const ep_layer_shape *shape, ep_call_spec *out_spec, ep_error *out_error);

/* Checks active_mask (absent, [tokens] or [tokens, top_k]) as ep_call_spec_fill does. */
ep_err ep_args_check_mask(const ep_tensor *mask, uint64_t tokens, uint64_t top_k,
                          ep_error *out_error);

/* Checks a tensor: host memory, rank, type among types (ended by EP_DTYPE_NONE), contiguous
 * rows. */
ep_err ep_tensor_check(const char *name, const ep_tensor *tensor, uint32_t rank,
                       const ep_dtype *types, ep_error *out_error);

#endif
