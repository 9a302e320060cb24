/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One token batch for one layer, as plain views, and the only place where its values are checked.
 * Nothing below checks again.
 *
 * Shapes     x [T,H]; x_scales [T] when x is i8; ids [T,K]; scales [T,K]; mask_tokens [T] or
 *            mask_slots [T,K]; partial_slots [T,K]; shared [T,H] of x's or the output's type. All
 *            with byte strides between rows; inside a row elements are contiguous.
 * Slots      a token has K routed slots and, when shared experts are served, S more: slot k >= K is
 *            shared expert k - K. slots_per_token = K + (shared_source == SERVICE ? S : 0). Slot
 *            number = t * slots_per_token + k.
 * Threads    pure values.
 */
#ifndef EP_MOE_BATCH_H
#define EP_MOE_BATCH_H

#include <string.h>

#include "moe/flow.h"

/* Rows of equal length at a fixed distance; data NULL when absent. */
typedef struct ep_rows {
    const void *data;
    int64_t stride_bytes;
    ep_dtype dtype;
} ep_rows;

static inline const void *ep_rows_at(const ep_rows *rows, uint32_t index)
{
    return (const char *)rows->data + (int64_t)index * rows->stride_bytes;
}

/* Special experts, which the client evaluates. Ids follow the routed ones, after first_gap unused
 * ids. */
typedef struct ep_special_experts {
    uint32_t first_gap;
    uint32_t zero_count;  /* Z */
    uint32_t copy_count;  /* C */
    uint32_t const_count; /* N */
    ep_rows const_alpha1; /* [N,H] of x's type */
    ep_rows const_alpha2; /* [N,H] */
    ep_rows const_v;      /* [N,H] */
    ep_const_rule const_rule;
} ep_special_experts;

/* The form in which x travels. Numbers as in the vendor's quant_mode where it has one. */
typedef enum ep_dispatch_quant {
    EP_DISPATCH_PLAIN = 0,
    EP_DISPATCH_INT8 = 2,
    EP_DISPATCH_FP8 = 3
} ep_dispatch_quant;
/* The form in which row(t,k) travels back. Numbers as in the vendor's comm_quant_mode. */
typedef enum ep_combine_quant { EP_COMBINE_PLAIN = 0, EP_COMBINE_INT8 = 2 } ep_combine_quant;

typedef struct ep_batch {
    uint32_t tokens; /* T */
    /* K of this batch, 1..EP_TOP_K_MAX (0 allowed when shared experts are served) */
    uint32_t top_k;
    uint32_t hidden;            /* H */
    ep_rows x;                  /* bf16, f16, f32, i8 */
    const float *x_scales;      /* [T], i8 only */
    ep_rows ids;                /* i32 or i64 */
    ep_rows scales;             /* f32 or bf16 */
    const uint8_t *mask_tokens; /* [T] 0 or 1; NULL: all active */
    ep_rows mask_slots;         /* [T,K] bool; data NULL: all active */
    ep_rows partial_slots;      /* [T,K] bool; with EP_RESULT_PARTIAL: slots that count */
    ep_rows shared;             /* with EP_SHARED_CALLER: [T,H] added last */
    ep_special_experts special;
    ep_weight_on weight_on;
    /* routed and shared rows are partial sums (moe/node_sum.h); only combined or partial, with the
     * weight on the output */
    bool node_sum;
    ep_result_form form;
    ep_shared_source shared_source;
    ep_nan_policy nan_policy;
    /* the same for experts' rows, applied in the combine (moe/combine.h) */
    ep_nan_policy rows_policy;
    /* > 0: a larger |x| is INVALID_ARGUMENT naming token, element, value; 0: off */
    float x_abs_max;
    bool allow_duplicates;            /* a token may name a routed id twice */
    ep_dtype wire_dtype;              /* rows are rounded once to it: bf16, f16, f32 */
    ep_dtype out_dtype;               /* bf16, f16, f32 */
    ep_dispatch_quant dispatch_quant; /* 8-bit form of x in bf16, f16, f32 (moe/quantize.h) */
    /* with EP_DISPATCH_INT8: channel scales of each expert, [smooth_first + E,H] f32 aligned to 4
     * bytes; data NULL: none */
    ep_rows smooth;
    /* number of rows of shared experts, which come first, so the index of routed expert 0 */
    uint32_t smooth_first;
    /* whether rows of wire_dtype travel as int8 with a scale of wire_dtype per 8 elements */
    ep_combine_quant combine_quant;
} ep_batch;

/* What a slot is, after all masks and id rules. */
typedef enum ep_slot_kind {
    EP_SLOT_INACTIVE, /* masked, -1, id == total, zero expert, not marked in partial */
    EP_SLOT_ROUTED,
    EP_SLOT_SHARED,
    EP_SLOT_COPY,
    EP_SLOT_CONST
} ep_slot_kind;

/* Checks counts; every id, also masked ones (INVALID_ARGUMENT naming token, slot, value, allowed
 * range); duplicates among slots that will be computed; values of masks; for active tokens the NaN
 * policy `reject` and the |x| limit. Types, shapes and options are valid already: code that takes
 * them from outside has checked them (client/common/args.h). Pure; cost O(T*(K+H)) only when a
 * policy needs x. */
ep_err ep_batch_check(const ep_batch *batch, const ep_layer_shape *shape, ep_error *out_error);

/* The last part of it: the NaN policy `reject` and the |x| limit, for x of active tokens. */
ep_err ep_batch_check_x(const ep_batch *batch, ep_error *out_error);

static inline uint32_t ep_batch_slots_per_token(const ep_batch *batch, const ep_layer_shape *shape)
{
    return batch->top_k + (batch->shared_source == EP_SHARED_SERVICE ? shape->shared_experts : 0);
}

/* ids[t,k] as given, at any alignment. */
static inline int64_t ep_batch_id(const ep_batch *batch, uint32_t token, uint32_t slot)
{
    const uint8_t *row = ep_rows_at(&batch->ids, token);
    if (batch->ids.dtype == EP_DTYPE_I64) {
        int64_t id;
        memcpy(&id, row + (size_t)slot * sizeof(id), sizeof(id));
        return id;
    }
    int32_t id;
    memcpy(&id, row + (size_t)slot * sizeof(id), sizeof(id));
    return id;
}

/* The number of ids, and so the second sentinel: ids below it are experts of some kind. */
static inline int64_t ep_batch_ids_total(const ep_batch *batch, const ep_layer_shape *shape)
{
    return (int64_t)shape->experts + batch->special.first_gap + batch->special.zero_count +
           batch->special.copy_count + batch->special.const_count;
}

/* Token is active: mask_tokens true, and not every entry of mask_slots false. */
bool ep_batch_token_active(const ep_batch *batch, uint32_t token);
/* Kind of a slot of a checked batch. *out_expert: table index for ROUTED and SHARED, index among
 * its kind for COPY and CONST, else EP_NO_EXPERT. Shared slots of an uncombined batch are inactive,
 * since the result has no place for them. */
ep_slot_kind ep_batch_slot(const ep_batch *batch, const ep_layer_shape *shape, uint32_t token,
                           uint32_t slot, uint32_t *out_expert);
/* Whether two slots of a token that will be computed name one routed expert; masked slots, often
 * padding, do not count. *out_slots: the earlier slot, then the later. */
bool ep_batch_duplicate(const ep_batch *batch, const ep_layer_shape *shape, uint32_t token,
                        uint32_t *out_expert, uint32_t out_slots[2]);
/* scales[t,k] widened to f32. */
float ep_batch_scale(const ep_batch *batch, uint32_t token, uint32_t slot);
/* x_scales[t] after the NaN policy: zero and mean turn a scale that is not finite into 0. i8
 * only. */
float ep_batch_row_scale(const ep_batch *batch, uint32_t token);
/* x[t] widened to f32 after the NaN policy; out [H]. For i8: q * row scale.
 * mean: the finite elements are summed in f64 in ascending order, divided by their count, rounded
 * to f32, then to x's type; 0 if there are none. */
void ep_batch_widen_row(const ep_batch *batch, uint32_t token, float *out);
/* The type x travels as. */
static inline ep_dtype ep_batch_sent_dtype(const ep_batch *batch)
{
    return batch->dispatch_quant == EP_DISPATCH_INT8  ? EP_DTYPE_I8
           : batch->dispatch_quant == EP_DISPATCH_FP8 ? EP_DTYPE_F8E4M3
                                                      : batch->x.dtype;
}
/* How many f32 scales travel with a row of this type: i8 1, f8e4m3 one per EP_QUANT_BLOCK_F8
 * elements, else 0. */
uint32_t ep_sent_row_scales(ep_dtype dtype, uint32_t hidden);
/* With smooth scales a row belongs to one (token, expert), so every slot has a row of its own. */
static inline bool ep_batch_row_per_slot(const ep_batch *batch)
{
    return batch->smooth.data != NULL;
}
/* x[t] as it travels, after the NaN policy: to all slots of a token or, with smooth scales, to slot
 * `slot` of expert `expert` (table index). out: [H] of ep_batch_sent_dtype; scales:
 * [ep_sent_row_scales]. */
void ep_batch_send_row(const ep_batch *batch, uint32_t token, uint32_t slot, uint32_t expert,
                       void *out, float *scales);
/* Replaces non-finite values in a row of values of dtype by 0 (zero) or the mean (mean), as
 * ep_batch_widen_row does. */
void ep_floats_repair(float *row, size_t n, ep_nan_policy policy, ep_dtype dtype);
/* Number of elements of row t that are NaN or Inf (for metrics); for i8: H when the row's scale is
 * not finite, else 0. */
uint32_t ep_batch_count_nonfinite(const ep_batch *batch, uint32_t token);

#endif
