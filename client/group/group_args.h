/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A call's arguments, checked and taken apart: what both phases of an operator begin with. Looks at
 * no tensor's data but elastic_info's. Pointers are the caller's.
 */
#ifndef EP_CLIENT_GROUP_ARGS_H
#define EP_CLIENT_GROUP_ARGS_H

#include "group/group_core.h"
#include "group/group_rows.h"
#include "group/group_stage.h"

#define EP_GROUP_FORMULA_BYTES 256 /* of what a size is made of, for errors */

typedef struct group_view {
    ep_group_call call;
    uint32_t members[EP_GROUP_WORLD_MAX];
    ep_batch batch;
    ep_layer_shape shape;
    ep_group_layout layout;
    ep_group *group_tp;
    uint32_t local_experts; /* L */
    int64_t expand_rows; /* rows expand_x has room for; the experts' results have, in a combine */
    int64_t capacity;    /* A * tp */
    char formula[EP_GROUP_FORMULA_BYTES]; /* of A */
    /* combine with norm */
    ep_rows residual;
    ep_rows y;
    ep_rows x_sum;
} group_view;

/* Fills call from the numbers of params; tensors and the batch's sizes are the caller's to fill.
 * world: ranks of the group. Errors: INVALID_ARGUMENT. */
ep_err ep_group_call_fill(const ep_group_params *params, uint32_t world, ep_group_call *call,
                          ep_error *out_error);
/* Shared experts, once elastic_info has said how many ranks they have. */
void ep_group_call_fill_shared(const ep_group_params *params, ep_group_call *call);
/* The caller's structs as ones of this version; given_norm may be NULL. Errors: INVALID_ARGUMENT,
 * UNIMPLEMENTED. */
ep_err ep_group_dispatch_take(const ep_moe_dispatch_args *given, ep_moe_dispatch_args *out_args,
                              ep_error *out_error);
ep_err ep_group_combine_take(const ep_moe_combine_args *given,
                             const ep_moe_add_rms_norm *given_norm, ep_moe_combine_args *out_args,
                             ep_moe_add_rms_norm *out_norm, ep_error *out_error);
/* What a checked call is made of; borrows args. Errors: INVALID_ARGUMENT naming parameter, value,
 * allowed range; UNIMPLEMENTED (memory, newer struct). */
ep_err ep_group_dispatch_view(ep_group *group, const ep_moe_dispatch_args *args,
                              group_view *out_view, ep_error *out_error);
/* The same; norm NULL: plain combine. */
ep_err ep_group_combine_view(ep_group *group, const ep_moe_combine_args *args,
                             const ep_moe_add_rms_norm *norm, group_view *out_view,
                             ep_error *out_error);

/* A plan: what a call must still be like when it runs, and the operation begun on it. */
struct ep_group_plan {
    const ep_group *group;
    uint64_t membership;
    ep_group_call call;
    ep_group *group_tp;
    size_t workspace_bytes;
    char workspace_formula[EP_GROUP_FORMULA_BYTES];
    int64_t expand_rows;
    ep_group_stage stage;
    void *work; /* the operator's own */

    /* the operation; touched by who drives it */
    group_view view;
    group_op op;
    group_op pair; /* with view.group_tp: the exchange in that group */
    ep_group_call pair_call;
    const struct group_operator *kind;
    group_op *last; /* of the two exchanges */
    ep_error error; /* code not OK: it has failed */

    pthread_mutex_t lock; /* no other is taken under it; the rest is under it */
    pthread_cond_t changed;
    bool claimed;     /* an operation is under way, or begins */
    bool driven;      /* somebody does its next part, */
    bool by_watcher;  /* the thread that calls back */
    group_op *awaits; /* the exchange that it waits for; NULL: none, it only has to be finished */
    bool cancelled;
    uint32_t cancels; /* inside of ep_group_plan_cancel: the operation stays until they are out */
    ep_group_done_func done;
    void *done_arg;
    bool done_due; /* has to be called yet */
    bool in_done;  /* is being called, by watcher */
    pthread_t watcher;
    bool *finished_inside; /* to be set when finished in there */
};

/* work_bytes: of the operator's own, zeroed. Takes the stage's memory on success. */
ep_err ep_group_plan_create(const ep_group *group, const group_view *view, size_t workspace_bytes,
                            const char *workspace_formula, size_t work_bytes,
                            const ep_group_stage *taken_stage, ep_group_plan **out_plan,
                            ep_error *out_error);
/* Errors: FAILED_PRECONDITION (none, stale: what differs), RESOURCE_EXHAUSTED (workspace),
 * INVALID_ARGUMENT (its alignment). */
ep_err ep_group_plan_check(const ep_group_plan *plan, const ep_group *group, const group_view *view,
                           const void *workspace, size_t workspace_bytes, ep_error *out_error);

#endif
