/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Token permutation inside one process: rows of T tokens copied once per chosen expert, sorted by
 * expert, and the weighted way back. The local operators of collective expert parallelism, with the
 * rules of aclnnMoeInitRoutingV2/V3, MoeTokenPermute, MoeTokenPermuteWithEp, MoeFinalizeRoutingV2
 * and MoeTokenUnpermute.
 *
 * A slot is (token t, choice k), numbered t * K + k. Its id is an expert in [0,E); -1 and E are
 * inactive, as is a slot that the mask leaves out. Slots of experts in [expert_begin, expert_end)
 * are sorted by expert, equal ones by slot number; a sorted position p in [row_begin, row_end)
 * becomes row p - row_begin.
 *
 *   dropless    rows follow each other without gaps
 *   drop, pad   each expert of the range has `capacity` rows, filled from the front; slots beyond
 *               are dropped, rows without a slot are zero. row_begin and row_end do not apply
 *
 * Memory     nothing is allocated: the caller gives workspace of the size that a function tells.
 *            Rows are contiguous.
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
/* Number of rows of each expert, or of it and all before it. */
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
    const float *x_scales; /* [T] what goes with i8 rows; NULL none */
    const int32_t *ids;    /* [T,K] */
    const float *probs;    /* [T,K]; NULL none */
    const uint8_t *mask;   /* [T,K] 0 or 1; NULL: all active */
} ep_permute_in;

/* What is NULL is not wanted. Rows by ep_permute_rows_max. */
typedef struct ep_permute_out {
    uint32_t struct_bytes;
    void *rows;        /* [rows,H] */
    float *row_scales; /* [rows] x_scales of its token; 0 for a padding row */
    float *row_probs;  /* [rows] probs of its slot; 0 for a padding row */
    /* [T,K] row of a slot, -1 none: the index to gather by (the vendor's rowIdxType 0) */
    int32_t *slot_rows;
    /* [rows] slot of a row, -1 padding: the index to scatter by (rowIdxType 1) */
    int32_t *row_slots;
    int64_t *counts; /* [expert_end - expert_begin] rows that were made, as config's counts say */
    int64_t *counts_before; /* the same before capacity and row range */
    uint64_t rows_count;    /* written */
} ep_permute_out;

/* 0 when the configuration is wrong. */
EP_API uint64_t ep_permute_rows_max(const ep_permute_config *config);
EP_API size_t ep_permute_workspace_bytes(const ep_permute_config *config);

/*
 * workspace: ep_permute_workspace_bytes, aligned as malloc does. Outputs are written only on
 * success.
 * Errors: INVALID_ARGUMENT naming field, or token, choice and id, the value and what is allowed; a
 * workspace that is too small: the bytes needed.
 */
EP_API ep_err ep_moe_permute(const ep_permute_config *config, const ep_permute_in *in,
                             void *workspace, size_t workspace_bytes, ep_permute_out *out,
                             ep_error *out_error);

/* Numbers of slot_rows: t * K + k, or t + k * T as in the vendor's drop-pad modes 0 and 1 of
 * MoeFinalizeRoutingV2. */
typedef enum ep_permute_order {
    EP_PERMUTE_BY_TOKEN = 0,
    EP_PERMUTE_BY_CHOICE = 1
} ep_permute_order;

/*
 * y[t] = x1[t] + x2[t] + sum over k in order of weight[t,k] * (row(t,k) + bias[id(t,k)])
 *
 * in f32, each step rounded, then rounded once to out's type. row(t,k) = rows[slot_rows[t,k]], i8
 * rows times their scale; where slot_rows is negative it is 0 and the bias is still added. With
 * bias, a slot with an id outside [0,E) adds nothing.
 */
typedef struct ep_unpermute_args {
    uint32_t struct_bytes;
    uint32_t tokens;
    uint32_t top_k;
    uint32_t hidden;
    uint32_t experts;         /* with bias */
    uint64_t rows_count;      /* slot_rows are below it */
    ep_permute_order order;   /* of slot_rows */
    ep_dtype dtype;           /* of rows, x1, x2, bias; i8: of rows, the others are f32 */
    ep_dtype out_dtype;       /* f32, bf16, f16 */
    const void *rows;         /* [rows_count,H] */
    const float *row_scales;  /* [rows_count] with i8 */
    const int32_t *slot_rows; /* [T,K] in order */
    const float *weights;     /* [T,K] by token; NULL: 1 */
    const void *x1;           /* [T,H]; NULL none */
    const void *x2;
    const void *bias;   /* [E,H]; NULL none */
    const int32_t *ids; /* [T,K] by token, with bias */
    void *out;          /* [T,H] */
} ep_unpermute_args;
EP_API void ep_unpermute_args_init_sized(ep_unpermute_args *out_args, size_t struct_bytes);
#define ep_unpermute_args_init(args) ep_unpermute_args_init_sized((args), sizeof(*(args)))
EP_API size_t ep_unpermute_workspace_bytes(const ep_unpermute_args *args);
/* Errors as ep_moe_permute; slot_rows at or above rows_count are refused before anything is
 * written. */
EP_API ep_err ep_moe_unpermute(const ep_unpermute_args *args, void *workspace,
                               size_t workspace_bytes, ep_error *out_error);

#ifdef __cplusplus
}
#endif
#endif
