/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checks a call's arguments and converts them, for both phases of an operator. Reads no tensor's
 * data but elastic_info's. Pointers are the caller's.
 */
#ifndef EP_CLIENT_GROUP_ARGS_H
#define EP_CLIENT_GROUP_ARGS_H

#include "group/group_core.h"
#include "group/group_rows.h"
#include "group/group_stage.h"

#define EP_GROUP_FORMULA_BYTES 256 /* text of how a size is computed, for errors */

typedef struct group_view {
    ep_group_call call;
    uint32_t members[EP_GROUP_WORLD_MAX];
    ep_batch batch;
    ep_layer_shape shape;
    ep_group_layout layout;
    ep_group *group_tp;
    uint32_t local_experts; /* L */
    /* rows that fit into expand_x; in a combine, rows of the experts' results */
    int64_t expand_rows;
    int64_t capacity;                     /* A * tp */
    char formula[EP_GROUP_FORMULA_BYTES]; /* of A */
    /* combine with norm */
    ep_rows residual;
    ep_rows y;
    ep_rows x_sum;
} group_view;

/* Fills in the numbers of params; the caller fills in tensors and sizes of the batch. world: ranks
 * of the group. Errors: INVALID_ARGUMENT. */
ep_err ep_group_call_fill(const ep_group_params *params, uint32_t world, ep_group_call *call,
                          ep_error *out_error);
/* Fills in the shared experts, once elastic_info has given their number of ranks. */
void ep_group_call_fill_shared(const ep_group_params *params, ep_group_call *call);
/* Copies the caller's structs into ones of this version; given_norm may be NULL. Errors:
 * INVALID_ARGUMENT, UNIMPLEMENTED. */
ep_err ep_group_dispatch_take(const ep_moe_dispatch_args *given, ep_moe_dispatch_args *out_args,
                              ep_error *out_error);
ep_err ep_group_combine_take(const ep_moe_combine_args *given,
                             const ep_moe_add_rms_norm *given_norm, ep_moe_combine_args *out_args,
                             ep_moe_add_rms_norm *out_norm, ep_error *out_error);
/* Checks a call and makes its view, which borrows args. Errors: INVALID_ARGUMENT naming parameter,
 * value, allowed range; UNIMPLEMENTED (memory, newer struct). */
ep_err ep_group_dispatch_view(ep_group *group, const ep_moe_dispatch_args *args,
                              group_view *out_view, ep_error *out_error);
/* The same; norm NULL: plain combine. */
ep_err ep_group_combine_view(ep_group *group, const ep_moe_combine_args *args,
                             const ep_moe_add_rms_norm *norm, group_view *out_view,
                             ep_error *out_error);

/* A plan: the checked call, which later ones must match, and the operation begun on it. */
struct ep_group_plan {
    const ep_group *group;
    uint64_t membership;
    ep_group_call call;
    ep_group *group_tp;
    size_t workspace_bytes;
    char workspace_formula[EP_GROUP_FORMULA_BYTES];
    int64_t expand_rows;
    ep_group_stage stage;
    void *work; /* the operator's data */

    /* the operation; only for the thread that drives it */
    group_view view;
    group_op op;
    group_op pair; /* with view.group_tp: the exchange in the pair's group */
    ep_group_call pair_call;
    const struct group_operator *kind;
    group_op *last; /* the last of the exchanges */
    ep_error error; /* code not OK: it has failed */

    pthread_mutex_t lock; /* protects the rest; no other lock is taken under it */
    pthread_cond_t changed;
    bool claimed;     /* an operation is under way or begins */
    bool driven;      /* a thread does its next part; */
    bool by_watcher;  /* it is the thread that calls back */
    group_op *awaits; /* the exchange that it waits for; NULL: only finish is left */
    bool cancelled;
    uint32_t cancels; /* threads inside ep_group_plan_cancel, until which the operation stays */
    ep_group_done_func done;
    void *done_arg;
    bool done_due; /* done is still to be called */
    bool in_done;  /* done is being called, on watcher */
    pthread_t watcher;
    bool *finished_inside; /* set to true by a finish inside done */
};

/* work_bytes: size of work, which is zeroed. Takes the stage's memory in any case. */
ep_err ep_group_plan_create(const ep_group *group, const group_view *view, size_t workspace_bytes,
                            const char *workspace_formula, size_t work_bytes,
                            ep_group_stage *taken_stage, size_t *out_workspace_bytes,
                            ep_group_plan **out_plan, ep_error *out_error);
/* Errors: FAILED_PRECONDITION (no plan, or stale: names what differs), RESOURCE_EXHAUSTED
 * (workspace), INVALID_ARGUMENT (its alignment). */
ep_err ep_group_plan_check(const ep_group_plan *plan, const ep_group *group, const group_view *view,
                           const void *workspace, size_t workspace_bytes, ep_error *out_error);

#endif
