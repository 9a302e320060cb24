/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Token permutation inside one process: copies the rows of T tokens once per chosen expert, sorted
 * by expert, and computes the weighted way back. These are the local operators of collective expert
 * parallelism, with the rules of aclnnMoeInitRoutingV2/V3, MoeTokenPermute, MoeTokenPermuteWithEp,
 * MoeFinalizeRoutingV2 and MoeTokenUnpermute.
 *
 * A slot is (token t, choice k), numbered t * K + k. Its id is an expert in [0,E); -1 and E are
 * inactive, and so is a slot that the mask leaves out. Slots of experts in [expert_begin,
 * expert_end) are sorted by expert, then by slot number. The slot at sorted position p becomes row
 * p - row_begin, if p is in [row_begin, row_end).
 *
 *   dropless    rows follow each other without gaps
 *   drop, pad   each expert of the range has `capacity` rows, filled from the front; further slots
 *               are dropped, rows without a slot are zero. row_begin and row_end do not apply
 *
 * Memory     nothing is allocated: the caller provides workspace, whose size a function tells. Rows
 *            are contiguous.
 * Threads    pure; any thread, in any float environment.
 */
#ifndef EXPERTD_PERMUTE_H
#define EXPERTD_PERMUTE_H

#include "expertd/error.h"
#include "expertd/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum ep_permute_drop { EP_PERMUTE_DROPLESS = 0, EP_PERMUTE_DROP_PAD = 1 } ep_permute_drop;
/* Number of rows of each expert, or of all experts up to it. */
typedef enum ep_permute_counts {
    EP_PERMUTE_COUNTS = 0,
    EP_PERMUTE_CUMULATIVE = 1
} ep_permute_counts;

typedef struct ep_permute_config {
    uint32_t struct_bytes;
    uint32_t tokens;  /* T, 0..65536 */
    uint32_t top_k;   /* K, 1..64 */
    uint32_t hidden;  /* H, 1..65536 */
    uint32_t experts; /* E, 1..65535 */
    uint32_t expert_begin;
    uint32_t expert_end; /* 0: E */
    uint32_t row_begin;
    uint32_t row_end; /* 0: all; also the vendor's activeNum and numOutTokens */
    ep_permute_drop drop;
    uint32_t capacity; /* rows per expert with EP_PERMUTE_DROP_PAD, 1..65536 */
    ep_permute_counts counts;
    ep_dtype dtype; /* of rows: f32, bf16, f16, i8 */
} ep_permute_config;
EP_API void ep_permute_config_init_sized(ep_permute_config *out_config, size_t struct_bytes);
#define ep_permute_config_init(config) ep_permute_config_init_sized((config), sizeof(*(config)))

typedef struct ep_permute_in {
    uint32_t struct_bytes;
    const void *x;         /* [T,H] */
    const float *x_scales; /* [T] scales of i8 rows; NULL none */
    const int32_t *ids;    /* [T,K] */
    const float *probs;    /* [T,K]; NULL none */
    const uint8_t *mask;   /* [T,K] 0 or 1; NULL: all active */
} ep_permute_in;

/* Outputs; NULL: not wanted. ep_permute_rows_max tells the number of rows. */
typedef struct ep_permute_out {
    uint32_t struct_bytes;
    void *rows;        /* [rows,H] */
    float *row_scales; /* [rows] x_scales of its token; 0 for a padding row */
    float *row_probs;  /* [rows] probs of its slot; 0 for a padding row */
    /* [T,K] row of a slot, -1 none: the index for a gather (the vendor's rowIdxType 0) */
    int32_t *slot_rows;
    /* [rows] slot of a row, -1 padding: the index for a scatter (rowIdxType 1) */
    int32_t *row_slots;
    /* [expert_end - expert_begin] rows written, in the form that config.counts names */
    int64_t *counts;
    int64_t *counts_before; /* the same without the limits of capacity and row range */
    uint64_t rows_count;    /* written */
} ep_permute_out;

/* 0 when the configuration is invalid. */
EP_API uint64_t ep_permute_rows_max(const ep_permute_config *config);
EP_API size_t ep_permute_workspace_bytes(const ep_permute_config *config);

/*
 * workspace: ep_permute_workspace_bytes, aligned as malloc does. Outputs are written only on
 * success. Errors: INVALID_ARGUMENT naming the field, or token, choice and id, with the value and
 * what is allowed. For a workspace that is too small it names the bytes needed.
 */
EP_API ep_err ep_moe_permute(const ep_permute_config *config, const ep_permute_in *in,
                             void *workspace, size_t workspace_bytes, ep_permute_out *out,
                             ep_error *out_error);

/* How slot_rows is numbered: t * K + k, or t + k * T as in the vendor's drop-pad modes 0 and 1 of
 * MoeFinalizeRoutingV2. */
typedef enum ep_permute_order {
    EP_PERMUTE_BY_TOKEN = 0,
    EP_PERMUTE_BY_CHOICE = 1
} ep_permute_order;

/*
 * y[t] = x1[t] + x2[t] + sum over k in order of weight[t,k] * (row(t,k) + bias[id(t,k)])
 *
 * in f32, each step rounded, then rounded once to out's type. row(t,k) is rows[slot_rows[t,k]]; i8
 * rows are multiplied by their scale. Where slot_rows is negative, the row is 0 and the bias is
 * still added. With bias, a slot with an id outside [0,E) adds nothing.
 */
typedef struct ep_unpermute_args {
    uint32_t struct_bytes;
    uint32_t tokens;
    uint32_t top_k;
    uint32_t hidden;
    uint32_t experts;       /* only with bias */
    uint64_t rows_count;    /* every entry of slot_rows is below it */
    ep_permute_order order; /* of slot_rows */
    ep_dtype dtype;     /* of rows, x1, x2, bias; with i8 only the rows are, the others are f32 */
    ep_dtype out_dtype; /* f32, bf16, f16 */
    const void *rows;   /* [rows_count,H] */
    const float *row_scales;  /* [rows_count] with i8 */
    const int32_t *slot_rows; /* [T,K], numbered by order */
    const float *weights;     /* [T,K] by token; NULL: all 1 */
    const void *x1;           /* [T,H]; NULL none */
    const void *x2;
    const void *bias;   /* [E,H]; NULL none */
    const int32_t *ids; /* [T,K] by token; only with bias */
    void *out;          /* [T,H] */
} ep_unpermute_args;
EP_API void ep_unpermute_args_init_sized(ep_unpermute_args *out_args, size_t struct_bytes);
#define ep_unpermute_args_init(args) ep_unpermute_args_init_sized((args), sizeof(*(args)))
EP_API size_t ep_unpermute_workspace_bytes(const ep_unpermute_args *args);
/* Errors as for ep_moe_permute. Entries of slot_rows at or above rows_count are refused before
 * anything is written. */
EP_API ep_err ep_moe_unpermute(const ep_unpermute_args *args, void *workspace,
                               size_t workspace_bytes, ep_error *out_error);

#ifdef __cplusplus
}
#endif
#endif
