/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ep_moe_combine and ep_moe_combine_add_rms_norm: each row goes back to the rank and slot that it
 * came from. The canonical sum reads rows in the received frames, and this rank's own in expand_x.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/float_env.h"
#include "group/group_assist.h"
#include "group/group_norm.h"
#include "group/group_run.h"
#include "moe/combine.h"
#include "moe/convert.h"
#include "moe/quantize.h"

typedef struct combine_work {
    ep_moe_combine_args host; /* with host tensors; the next too */
    ep_moe_add_rms_norm host_norm;
    const ep_moe_combine_args *args;
    const ep_moe_add_rms_norm *norm; /* NULL: plain */
    const group_view *view;
    group_op *op;
    ep_group_stage *stage;
    uint32_t slots_per_token;
    size_t element;
    size_t wire_row_bytes; /* in a frame, quantised or not */
    bool quantise;
    uint32_t expert_rows;  /* rows received by the dispatch, by ep_send_counts */
    const uint8_t *expand; /* rows to send back; their stride is below */
    int64_t expand_stride;
    ep_buffer *summed; /* with TP: memory of expand */
    ep_buffer *own;    /* with quantise: this rank's own rows */
    /* workspace */
    const void **rows; /* [T * slots] */
    float *scratch;    /* of ep_combine */
    float *wide;       /* [H], with quantise */
    uint8_t *restored; /* [slots][H] of the rows' type, with quantise */
    float *sum;        /* with norm: [H]; the next two also */
    float *residual;
    float *gamma;
    uint32_t *offsets; /* with expand_idx: [buckets+1], result of ep_group_sort; the next too */
    uint32_t *order;   /* [T * slots] */
} combine_work;

/* ---- workspace ---- */

/* The next part of the workspace. base NULL: only counts its bytes. */
static void *part(uint8_t *base, size_t *inout_at, size_t bytes)
{
    void *begin = base != NULL ? base + *inout_at : NULL;
    *inout_at += ep_align_up(bytes, 64);
    return begin;
}

/* Gives w its parts of the workspace and returns the size of all. base NULL: only that. */
static size_t lay_out(const group_view *view, uint8_t *base, combine_work *w)
{
    const size_t slots = ep_batch_slots_per_token(&view->batch, &view->shape);
    const size_t hidden = view->batch.hidden;
    const size_t numbers = view->batch.tokens * slots;
    const size_t quantised = view->call.comm_quant_mode == 2 ? hidden : 0;
    const size_t normed = view->call.operator== EP_GROUP_COMBINE_NORM ? hidden : 0;
    const bool by_index = view->call.by_index != 0;
    size_t at = 0;
    w->rows = part(base, &at, sizeof(*w->rows) * numbers);
    w->scratch = part(base, &at, sizeof(float) * ep_combine_scratch_floats(view->batch.hidden));
    w->wide = part(base, &at, sizeof(float) * quantised);
    w->restored = part(base, &at, slots * quantised * ep_dtype_bytes(view->batch.wire_dtype));
    w->sum = part(base, &at, sizeof(float) * normed);
    w->residual = part(base, &at, sizeof(float) * normed);
    w->gamma = part(base, &at, sizeof(float) * normed);
    w->offsets = part(base, &at, by_index ? 4 * ((size_t)ep_group_buckets(&view->layout) + 1) : 0);
    w->order = part(base, &at, by_index ? 4 * numbers : 0);
    return at;
}

/* The formula of the workspace's size for this call, for an error. */
static void write_formula(const group_view *view, char *out, size_t bytes)
{
    const int quantise = view->call.comm_quant_mode == 2;
    const int norm = view->call.operator== EP_GROUP_COMBINE_NORM;
    const int written = snprintf(
        out, bytes,
        "8 * BS * (K + S) + scratch of H (%d rows f32%s)%s, BS %" PRIu32 ", K %" PRIu32
        ", S %" PRIu32 ", H %" PRIu32 ", each to 64",
        5 + quantise + 3 * norm, quantise ? ", K + S of expand_x's type" : "",
        view->call.by_index != 0
            ? " + 4 * (shared_expert_rank_num + moe_expert_num + 1) + 4 * BS * (K + S)"
            : "",
        view->batch.tokens, view->batch.top_k, view->shape.shared_experts, view->batch.hidden);
    EP_ASSERT(written > 0 && (size_t)written < bytes);
}

/* ---- tensors on a device, or with strides ---- */

/* Makes copies of the arguments with dense host tensors. */
static ep_err to_host(ep_group_stage *stage, const ep_moe_combine_args **args,
                      const ep_moe_add_rms_norm **norm, ep_moe_combine_args *out_host,
                      ep_moe_add_rms_norm *out_host_norm, ep_error *out_error)
{
    ep_err err = ep_group_combine_take(*args, *norm, out_host, out_host_norm, out_error);
    *args = out_host;
    *norm = *norm != NULL ? out_host_norm : NULL;
    return err != EP_OK ? err
                        : ep_group_stage_combine(stage, out_host,
                                                 *norm != NULL ? out_host_norm : NULL, out_error);
}

/* ---- phase one ---- */

ep_err ep_moe_combine_prepare(ep_group *group, const ep_moe_combine_args *args,
                              const ep_moe_add_rms_norm *norm, size_t *out_workspace_bytes,
                              ep_group_plan **out_plan, ep_error *out_error)
{
    group_view view;
    char formula[EP_GROUP_FORMULA_BYTES];
    ep_moe_combine_args host;
    ep_moe_add_rms_norm host_norm;
    ep_group_stage stage = {.device = {.memory = NULL}};
    ep_err err = to_host(&stage, &args, &norm, &host, &host_norm, out_error);
    if (err == EP_OK) {
        err = ep_group_combine_view(group, args, norm, &view, out_error);
    }
    if (err != EP_OK) {
        ep_group_stage_fini(&stage);
        return err;
    }
    combine_work none;
    write_formula(&view, formula, sizeof(formula));
    return ep_group_plan_create(group, &view, lay_out(&view, NULL, &none), formula,
                                sizeof(combine_work), &stage, out_workspace_bytes, out_plan,
                                out_error);
}

/* ---- what the dispatch left ---- */

static ep_err read_counts(combine_work *w, const group_view *view, ep_error *out_error)
{
    const int32_t *prefix = w->args->ep_send_counts.data;
    size_t counts = (size_t)view->layout.ranks * view->local_experts;
    int32_t last = 0;
    for (size_t i = 0; i < counts; i++) {
        if (prefix[i] < last) {
            return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                                "ep_send_counts[%zu] is %" PRId32 ": allowed %" PRId32
                                " or more, they are prefix sums",
                                i, prefix[i], last);
        }
        last = prefix[i];
    }
    int64_t needs = last;
    if (view->group_tp != NULL) {
        const int32_t *tp = w->args->tp_send_counts.data;
        if (tp[view->call.tp_rank] != last || tp[1 - view->call.tp_rank] < 0) {
            return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                                "tp_send_counts is {%" PRId32 ", %" PRId32
                                "}: allowed the dispatch's tp_recv_counts, with %" PRId32
                                " rows of this rank",
                                tp[0], tp[1], last);
        }
        needs += tp[1 - view->call.tp_rank];
    }
    w->expert_rows = (uint32_t)last;
    if (needs > view->expand_rows) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "expand_x has %" PRId64 " rows (%" PRId64 " bytes): needs %" PRId64
                            ", %" PRId64 " bytes = rows received * H * element",
                            view->expand_rows,
                            view->expand_rows * (int64_t)(w->view->batch.hidden * w->element),
                            needs, needs * (int64_t)(w->view->batch.hidden * w->element));
    }
    return ep_group_stage_copy(w->stage, EP_STAGE_LATER, (size_t)needs, w->op->deadline_us,
                               out_error);
}

/* The rows [begin, end) of expand_x that a local expert made for a member. */
typedef struct row_run {
    uint32_t begin;
    uint32_t end;
} row_run;

static row_run run_of(const combine_work *w, uint32_t expert, uint32_t member)
{
    const int32_t *prefix = w->args->ep_send_counts.data;
    size_t i = (size_t)expert * w->view->layout.ranks + member;
    return (row_run){i == 0 ? 0 : (uint32_t)prefix[i - 1], (uint32_t)prefix[i]};
}

static ep_err open_assist(combine_work *w, group_view *view, ep_error *out_error)
{
    size_t counts = (size_t)view->layout.ranks * view->local_experts;
    ep_group_assist assist;
    ep_group_assist expected = {
        .membership = w->op->group->membership,
        .ids_digest = ep_group_ids_digest(&view->batch),
        .counts_digest = ep_group_counts_digest(w->args->ep_send_counts.data,
                                                counts * (size_t)view->call.tp_world_size)};
    ep_err err = ep_group_assist_open(w->args->assist_info_for_combine.data,
                                      (size_t)w->args->assist_info_for_combine.shape[0], &expected,
                                      &assist, out_error);
    if (err == EP_OK) {
        view->call.dispatch_number = (int64_t)assist.number;
        err = read_counts(w, view, out_error);
    }
    return err != EP_OK || w->expert_rows == assist.rows
               ? err
               : ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                              "ep_send_counts has %" PRIu32 " rows: allowed %" PRIu32
                              ", as assist_info_for_combine says",
                              w->expert_rows, assist.rows);
}

/* Checks that expand_idx follows from expert_ids; otherwise it belongs to another batch. */
static ep_err open_index(combine_work *w, group_view *view, ep_error *out_error)
{
    view->call.dispatch_number = EP_GROUP_BY_INDEX;
    ep_err err = ep_group_check_index(&view->batch, &view->shape, &view->layout,
                                      w->args->expand_idx.data, w->offsets, out_error);
    if (err == EP_OK) {
        ep_group_sort(&view->batch, &view->shape, &view->layout, w->op->own, w->offsets, w->order);
        err = read_counts(w, view, out_error);
    }
    uint32_t first = ep_group_first_bucket(&view->layout, w->op->own);
    for (uint32_t e = 0; e < view->local_experts && err == EP_OK; e++) {
        uint32_t sent = w->offsets[first + e + 1] - w->offsets[first + e];
        const row_run run = run_of(w, e, w->op->own);
        if (run.end - run.begin != sent) {
            err = ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                               "ep_send_counts has %" PRIu32
                               " rows of this rank for its local expert %" PRIu32
                               ", expert_ids have %" PRIu32 ": allowed those of one dispatch",
                               run.end - run.begin, e, sent);
        }
    }
    return err;
}

static uint32_t rows_for(const combine_work *w, uint32_t member)
{
    uint32_t rows = 0;
    for (uint32_t e = 0; e < w->view->local_experts; e++) {
        const row_run run = run_of(w, e, member);
        rows += run.end - run.begin;
    }
    return rows;
}

static const uint8_t *row_back(const combine_work *w, uint32_t row)
{
    return w->expand + (int64_t)row * w->expand_stride;
}

/* ---- tensor-parallel pair: row_a + row_b ---- */

/* Body: u64 rows | rows at 64. */
static ep_err tp_send(const combine_work *w, group_op *tp, ep_error *out_error)
{
    const int32_t *counts = w->args->tp_send_counts.data;
    uint64_t theirs = (uint64_t)counts[1 - tp->own];
    size_t row_bytes = w->view->batch.hidden * w->element;
    uint8_t *body;
    ep_err err = ep_group_op_body(tp, 1 - tp->own, 64 + theirs * row_bytes, (uint32_t)theirs, &body,
                                  out_error);
    if (err != EP_OK) {
        return err;
    }
    memset(body, 0, 64);
    memcpy(body, &theirs, sizeof(theirs));
    for (uint32_t i = 0; i < theirs; i++) {
        memcpy(body + 64 + i * row_bytes, row_back(w, w->expert_rows + i), row_bytes);
    }
    return ep_group_op_send(tp, out_error);
}

/* summed = own row + partner's row, rounded once. */
static EP_FLOAT_WORK void add_rows(const combine_work *w, const uint8_t *partner, size_t row_bytes)
{
    float *a = w->scratch;
    float *b = w->scratch + w->view->batch.hidden;
    for (uint32_t i = 0; i < w->expert_rows; i++) {
        ep_row_widen(row_back(w, i), w->view->batch.wire_dtype, w->view->batch.hidden, a);
        ep_row_widen(partner + i * row_bytes, w->view->batch.wire_dtype, w->view->batch.hidden, b);
        for (uint32_t h = 0; h < w->view->batch.hidden; h++) {
            a[h] = a[h] + b[h];
        }
        ep_row_narrow(a, w->view->batch.hidden, w->view->batch.wire_dtype,
                      w->summed->data + i * row_bytes);
    }
}

static ep_err tp_add(combine_work *w, group_op *tp, ep_error *out_error)
{
    size_t row_bytes = w->view->batch.hidden * w->element;
    size_t bytes;
    const uint8_t *body = ep_group_op_received(tp, 1 - tp->own, &bytes);
    if (bytes != 64 + w->expert_rows * row_bytes) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "the TP partner sent %zu bytes of rows, %zu were dispatched here: "
                            "expand_x or tp_send_counts of the two ranks do "
                            "not belong to one dispatch",
                            bytes < 64 ? 0 : bytes - 64, w->expert_rows * row_bytes);
    }
    ep_err err = ep_buffer_acquire(w->op->group->pool, w->expert_rows * row_bytes + 1, &w->summed);
    if (err != EP_OK) {
        return ep_error_set(out_error, err, "no memory for the sums of %" PRIu32 " rows",
                            w->expert_rows);
    }
    const ep_float_env env = ep_float_env_begin();
    add_rows(w, body + 64, row_bytes);
    ep_float_env_end(env);
    w->expand = w->summed->data;
    w->expand_stride = (int64_t)row_bytes;
    return EP_OK;
}

/* ---- sending back ---- */

static void put_row(const combine_work *w, uint32_t row, uint8_t *out)
{
    uint32_t hidden = w->view->batch.hidden;
    if (!w->quantise) {
        memcpy(out, row_back(w, row), w->wire_row_bytes);
        return;
    }
    size_t scales = ep_group_quant_scales_offset(hidden);
    memset(out + hidden, 0, w->wire_row_bytes - hidden);
    const ep_float_env env = ep_float_env_begin();
    ep_row_quantize_i8_blocks(row_back(w, row), w->view->batch.wire_dtype, hidden, (int8_t *)out,
                              out + scales);
    ep_float_env_end(env);
}

/* The token and slot that are sent with a row. With expand_idx only the receiver knows them, so the
 * row's number in its run and the local expert are sent instead. */
static void name_row(const combine_work *w, uint32_t row, uint32_t number, uint32_t expert,
                     uint32_t *out_token, uint32_t *out_slot)
{
    const int32_t *triples = w->args->assist_info_for_combine.data;
    bool by_index = w->view->call.by_index != 0;
    *out_token = by_index ? number : (uint32_t)triples[3 * (size_t)row + 1];
    *out_slot = by_index ? expert : (uint32_t)triples[3 * (size_t)row + 2];
}

static ep_err fill_frame(const combine_work *w, uint32_t member, ep_error *out_error)
{
    uint32_t rows = rows_for(w, member);
    ep_group_combine_parts parts = ep_group_combine_parts_of(rows, w->wire_row_bytes);
    uint8_t *body;
    ep_err err = ep_group_op_body(w->op, member, parts.bytes, rows, &body, out_error);
    if (err != EP_OK) {
        return err;
    }
    memset(body, 0, parts.rows);
    uint64_t count = rows;
    memcpy(body, &count, sizeof(count));
    uint32_t *tokens = (uint32_t *)(void *)(body + parts.tokens);
    uint32_t *slots = (uint32_t *)(void *)(body + parts.slots);
    uint32_t done = 0;
    for (uint32_t e = 0; e < w->view->local_experts; e++) {
        const row_run run = run_of(w, e, member);
        for (uint32_t row = run.begin; row < run.end; row++, done++) {
            name_row(w, row, row - run.begin, e, &tokens[done], &slots[done]);
            put_row(w, row, body + parts.rows + (size_t)done * w->wire_row_bytes);
        }
    }
    return EP_OK;
}

static ep_err send_rows(const combine_work *w, ep_error *out_error)
{
    for (uint32_t m = 0; m < w->view->layout.ranks; m++) {
        if (m != w->op->own) {
            ep_err err = fill_frame(w, m, out_error);
            if (err != EP_OK) {
                return err;
            }
        }
    }
    return ep_group_op_send(w->op, out_error);
}

/* ---- receiving ---- */

/* Finds token and slot by a row's number and local expert; false: the batch has no such row. */
static bool find_slot(const combine_work *w, uint32_t member, uint32_t *inout_token,
                      uint32_t *inout_slot)
{
    const ep_group_layout *layout = &w->view->layout;
    if (*inout_slot >= ep_group_local_experts(layout, member)) {
        return false;
    }
    const uint32_t *run = w->offsets + ep_group_first_bucket(layout, member) + *inout_slot;
    if (*inout_token >= run[1] - run[0]) {
        return false;
    }
    uint32_t number = w->order[run[0] + *inout_token];
    *inout_token = number / w->slots_per_token;
    *inout_slot = number % w->slots_per_token;
    return true;
}

static ep_err place(const combine_work *w, uint32_t member, uint32_t token, uint32_t slot,
                    const void *row, ep_error *out_error)
{
    const group_view *view = w->view;
    if (view->call.by_index != 0 && !find_slot(w, member, &token, &slot)) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "rank %" PRIu32 " sent row %" PRIu32 " of its local expert %" PRIu32
                            ", more than expert_ids sent there: its ep_send_counts and these "
                            "expert_ids are not of one dispatch",
                            view->members[member], token, slot);
    }
    bool good = token < view->batch.tokens && slot < w->slots_per_token &&
                w->rows[(size_t)token * w->slots_per_token + slot] == NULL &&
                ep_group_slot_is_from(&view->batch, &view->shape, &view->layout, w->op->own, token,
                                      slot, member);
    if (!good) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL,
                            "rank %" PRIu32 " sent a row for token %" PRIu32 ", slot %" PRIu32
                            ", which is not its to send",
                            view->members[member], token, slot);
    }
    w->rows[(size_t)token * w->slots_per_token + slot] = row;
    return EP_OK;
}

static ep_err place_own(combine_work *w, ep_error *out_error)
{
    uint32_t rows = rows_for(w, w->op->own);
    uint32_t done = 0;
    if (w->quantise) {
        ep_err err = ep_buffer_acquire(w->op->group->pool, rows * w->wire_row_bytes + 1, &w->own);
        if (err != EP_OK) {
            return ep_error_set(out_error, err, "no memory for %" PRIu32 " rows", rows);
        }
    }
    for (uint32_t e = 0; e < w->view->local_experts; e++) {
        const row_run run = run_of(w, e, w->op->own);
        for (uint32_t row = run.begin; row < run.end; row++, done++) {
            const uint8_t *at = row_back(w, row);
            if (w->quantise) { /* quantised like sent rows, for the same bits on every rank */
                put_row(w, row, w->own->data + (size_t)done * w->wire_row_bytes);
                at = w->own->data + (size_t)done * w->wire_row_bytes;
            }
            uint32_t token;
            uint32_t slot;
            name_row(w, row, row - run.begin, e, &token, &slot);
            ep_err err = place(w, w->op->own, token, slot, at, out_error);
            if (err != EP_OK) {
                return err;
            }
        }
    }
    return EP_OK;
}

static ep_err place_received(const combine_work *w, uint32_t member, ep_error *out_error)
{
    size_t bytes;
    const uint8_t *body = ep_group_op_received(w->op, member, &bytes);
    uint64_t rows = UINT64_MAX;
    if (bytes >= sizeof(rows)) {
        memcpy(&rows, body, sizeof(rows));
    }
    ep_group_combine_parts parts = {0};
    bool good = rows <= (uint64_t)w->view->batch.tokens * w->slots_per_token;
    if (good) {
        parts = ep_group_combine_parts_of((uint32_t)rows, w->wire_row_bytes);
        good = parts.bytes == bytes;
    }
    if (!good) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL,
                            "rank %" PRIu32
                            " sent a combine frame whose count does not fit its length",
                            w->view->members[member]);
    }
    const uint32_t *tokens = (const uint32_t *)(const void *)(body + parts.tokens);
    const uint32_t *slots = (const uint32_t *)(const void *)(body + parts.slots);
    for (uint32_t i = 0; i < rows; i++) {
        ep_err err = place(w, member, tokens[i], slots[i],
                           body + parts.rows + (size_t)i * w->wire_row_bytes, out_error);
        if (err != EP_OK) {
            return err;
        }
    }
    return EP_OK;
}

/* Checks that every routed slot has its row. */
static ep_err check_complete(const combine_work *w, ep_error *out_error)
{
    const group_view *view = w->view;
    for (uint32_t t = 0; t < view->batch.tokens; t++) {
        for (uint32_t k = 0; k < w->slots_per_token; k++) {
            uint32_t expert;
            ep_slot_kind kind = ep_batch_slot(&view->batch, &view->shape, t, k, &expert);
            if ((kind == EP_SLOT_ROUTED || kind == EP_SLOT_SHARED) &&
                w->rows[(size_t)t * w->slots_per_token + k] == NULL) {
                bool by_index = view->call.by_index != 0;
                return ep_error_set(out_error, by_index ? EP_ERR_INVALID_ARGUMENT : EP_ERR_PROTOCOL,
                                    "no rank sent the row of token %" PRIu32 ", slot %" PRIu32 "%s",
                                    t, k,
                                    by_index ? ": its ep_send_counts and these expert_ids are not "
                                               "of one dispatch"
                                             : "");
            }
        }
    }
    return EP_OK;
}

static ep_err receive_rows(combine_work *w, ep_error *out_error)
{
    memset(w->rows, 0, sizeof(void *) * w->view->batch.tokens * w->slots_per_token);
    ep_err err = place_own(w, out_error);
    for (uint32_t m = 0; m < w->view->layout.ranks && err == EP_OK; m++) {
        err = m == w->op->own ? EP_OK : place_received(w, m, out_error);
    }
    return err == EP_OK ? check_complete(w, out_error) : err;
}

/* ---- summing ---- */

static void restore_token(const combine_work *w, uint32_t token)
{
    uint32_t hidden = w->view->batch.hidden;
    size_t scales = ep_group_quant_scales_offset(hidden);
    for (uint32_t k = 0; k < w->slots_per_token; k++) {
        const void **row = &w->rows[(size_t)token * w->slots_per_token + k];
        uint8_t *restored = w->restored + (size_t)k * hidden * w->element;
        if (*row != NULL) {
            ep_row_dequantize_i8_blocks(*row, (const uint8_t *)*row + scales,
                                        w->view->batch.wire_dtype, hidden, w->wide);
            /* exact, as these are values of the type */
            ep_row_narrow(w->wide, hidden, w->view->batch.wire_dtype, restored);
            *row = restored;
        }
    }
}

static void norm_token(const combine_work *w, uint32_t token)
{
    const group_view *view = w->view;
    uint32_t hidden = view->batch.hidden;
    ep_row_widen(ep_rows_at(&view->residual, token), view->residual.dtype, hidden, w->residual);
    void *y = (void *)(uintptr_t)ep_rows_at(&view->y, token);
    void *x = view->x_sum.data == NULL ? NULL : (void *)(uintptr_t)ep_rows_at(&view->x_sum, token);
    float rstd = ep_group_add_rms_norm(w->sum, w->residual, w->gamma, w->norm->eps, hidden,
                                       view->batch.wire_dtype, y, x);
    if (w->norm->rstd.rank != 0) {
        memcpy((char *)w->norm->rstd.data + (int64_t)token * w->norm->rstd.stride_bytes[0], &rstd,
               sizeof(rstd));
    }
}

/* Applies nan_policy 1. */
static ep_err check_finite(const combine_work *w, uint32_t begin, uint32_t end, ep_error *out_error)
{
    ep_nonfinite found;
    if (w->view->batch.rows_policy != EP_NAN_REJECT ||
        !ep_combine_find_nonfinite(&w->view->batch, &w->view->shape, w->rows, NULL, begin, end,
                                   w->scratch, &found)) {
        return EP_OK;
    }
    return ep_error_set(out_error, EP_ERR_OUT_OF_RANGE,
                        "the expert's row of token %" PRIu32 ", slot %" PRIu32
                        " is %g at element %" PRIu32 ": only finite values are allowed "
                        "(nan_policy 1)",
                        found.token, found.slot, (double)found.value, found.element);
}

static EP_FLOAT_WORK ep_err sum_rows(const combine_work *w, ep_error *out_error)
{
    ep_batch batch = w->view->batch;
    ep_combine_out out = {.data = w->args->x_out.data};
    if (w->norm != NULL) {
        batch.out_dtype = EP_DTYPE_F32;
        out.data = w->sum; /* reused for each token */
        ep_row_widen(w->norm->gamma.data, w->norm->gamma.dtype, batch.hidden, w->gamma);
    } else {
        out.token_stride_bytes = w->args->x_out.rank == 3 ? w->args->x_out.stride_bytes[1]
                                                          : w->args->x_out.stride_bytes[0];
    }
    ep_err err = EP_OK;
    if (w->norm == NULL && !w->quantise) {
        err = check_finite(w, 0, batch.tokens, out_error);
        if (err == EP_OK) {
            ep_combine(&batch, &w->view->shape, w->rows, NULL, 0, batch.tokens, w->scratch, &out);
        }
        return err;
    }
    for (uint32_t t = 0; t < batch.tokens; t++) {
        if (w->quantise) {
            restore_token(w, t);
        }
        err = check_finite(w, t, t + 1, out_error);
        if (err != EP_OK) {
            return err;
        }
        ep_combine(&batch, &w->view->shape, w->rows, NULL, t, t + 1, w->scratch, &out);
        if (w->norm != NULL) {
            norm_token(w, t);
        }
    }
    return EP_OK;
}

/* ---- phase two ---- */

static ep_err start(ep_group_plan *plan, ep_error *out_error)
{
    combine_work *w = plan->work;
    group_view *view = &plan->view;
    bool has_inactive;
    ep_err err =
        ep_group_batch_check(&view->call, &view->batch, &view->shape, &has_inactive, out_error);
    view->call.has_inactive = has_inactive;
    if (err == EP_OK && view->batch.x.data != NULL) {
        err = ep_batch_check_x(&view->batch, out_error);
    }
    if (err == EP_OK) {
        err = view->call.by_index != 0 ? open_index(w, view, out_error)
                                       : open_assist(w, view, out_error);
    }
    if (err != EP_OK) {
        return err;
    }
    return view->group_tp != NULL ? tp_send(w, &plan->pair, out_error) : send_rows(w, out_error);
}

/* With a pair: sends back the sums of both ranks' rows. */
static ep_err turn(ep_group_plan *plan, ep_error *out_error)
{
    combine_work *w = plan->work;
    ep_err err = tp_add(w, &plan->pair, out_error);
    return err == EP_OK ? send_rows(w, out_error) : err;
}

static ep_err place_sums(ep_group_plan *plan, ep_error *out_error)
{
    combine_work *w = plan->work;
    ep_group_add_performance(w->op, w->view, &w->args->performance_info);
    ep_err err = receive_rows(w, out_error);
    if (err == EP_OK) {
        const ep_float_env env = ep_float_env_begin();
        err = sum_rows(w, out_error);
        ep_float_env_end(env);
    }
    return err;
}

static ep_err copy_out(ep_group_plan *plan, ep_error *out_error)
{
    return ep_group_stage_copy(&plan->stage, EP_STAGE_OUT, EP_STAGE_ALL_ROWS, plan->op.deadline_us,
                               out_error);
}

static void drop(ep_group_plan *plan)
{
    combine_work *w = plan->work;
    ep_buffer_unref(w->summed);
    ep_buffer_unref(w->own);
    w->summed = NULL;
    w->own = NULL;
}

static const group_operator combine_operator = {.start = start,
                                                .pair_first = true,
                                                .turn = turn,
                                                .place = place_sums,
                                                .out = copy_out,
                                                .drop = drop};

/* Sets up the work of a claimed and checked plan. */
static void set_work(ep_group_plan *plan, const ep_moe_combine_args *args,
                     const ep_moe_add_rms_norm *norm, void *workspace)
{
    combine_work *w = plan->work;
    const group_view *view = &plan->view;
    bool quantise = view->call.comm_quant_mode == 2;
    size_t element = ep_dtype_bytes(view->batch.wire_dtype);
    *w = (combine_work){.host = *args,
                        .args = &w->host,
                        .norm = norm != NULL ? &w->host_norm : NULL,
                        .view = view,
                        .op = &plan->op,
                        .stage = &plan->stage,
                        .slots_per_token = ep_batch_slots_per_token(&view->batch, &view->shape),
                        .element = element,
                        .quantise = quantise,
                        .wire_row_bytes = quantise ? ep_group_quant_row_bytes(
                                                         view->batch.hidden, view->batch.wire_dtype)
                                                   : view->batch.hidden * element,
                        .expand = args->expand_x.data,
                        .expand_stride = args->expand_x.stride_bytes[0]};
    lay_out(view, workspace, w);
    if (norm != NULL) {
        w->host_norm = *norm;
    }
}

/* norm NULL: plain combine. */
static ep_err begin(ep_group *group, ep_group_plan *plan, const ep_moe_combine_args *args,
                    const ep_moe_add_rms_norm *norm, void *workspace, size_t workspace_bytes,
                    ep_group_done_func done, void *arg, ep_error *out_error)
{
    ep_moe_combine_args host;
    ep_moe_add_rms_norm host_norm;
    ep_err err =
        ep_group_run_claim(plan, norm == NULL ? "ep_moe_combine" : "ep_moe_combine_add_rms_norm",
                           "ep_moe_combine_prepare", out_error);
    if (err != EP_OK) {
        return err;
    }
    err = to_host(&plan->stage, &args, &norm, &host, &host_norm, out_error);
    if (err == EP_OK && group != NULL) { /* a missing group is refused below */
        err = ep_group_stage_copy(&plan->stage, EP_STAGE_IN, EP_STAGE_ALL_ROWS,
                                  ep_group_deadline_us(group, args->deadline_us), out_error);
    }
    if (err == EP_OK) {
        err = ep_group_combine_view(group, args, norm, &plan->view, out_error);
    }
    if (err == EP_OK) {
        err = ep_group_plan_check(plan, group, &plan->view, workspace, workspace_bytes, out_error);
    }
    if (err == EP_OK) {
        set_work(plan, args, norm, workspace);
        err = ep_group_run_begin(plan, &combine_operator, group, args->deadline_us, done, arg,
                                 out_error);
    }
    if (err != EP_OK) {
        ep_group_run_unclaim(plan);
    }
    return err;
}

ep_err ep_moe_combine_begin(ep_group *group, ep_group_plan *plan, const ep_moe_combine_args *args,
                            void *workspace, size_t workspace_bytes, ep_group_done_func done,
                            void *arg, ep_error *out_error)
{
    return begin(group, plan, args, NULL, workspace, workspace_bytes, done, arg, out_error);
}

ep_err ep_moe_combine_add_rms_norm_begin(ep_group *group, ep_group_plan *plan,
                                         const ep_moe_combine_args *args,
                                         const ep_moe_add_rms_norm *norm, void *workspace,
                                         size_t workspace_bytes, ep_group_done_func done, void *arg,
                                         ep_error *out_error)
{
    return norm == NULL
               ? ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, "norm is missing")
               : begin(group, plan, args, norm, workspace, workspace_bytes, done, arg, out_error);
}

ep_err ep_moe_combine(ep_group *group, ep_group_plan *plan, const ep_moe_combine_args *args,
                      void *workspace, size_t workspace_bytes, ep_error *out_error)
{
    ep_err err =
        ep_moe_combine_begin(group, plan, args, workspace, workspace_bytes, NULL, NULL, out_error);
    return err == EP_OK ? ep_group_plan_finish(plan, out_error) : err;
}

ep_err ep_moe_combine_add_rms_norm(ep_group *group, ep_group_plan *plan,
                                   const ep_moe_combine_args *args, const ep_moe_add_rms_norm *norm,
                                   void *workspace, size_t workspace_bytes, ep_error *out_error)
{
    ep_err err = ep_moe_combine_add_rms_norm_begin(group, plan, args, norm, workspace,
                                                   workspace_bytes, NULL, NULL, out_error);
    return err == EP_OK ? ep_group_plan_finish(plan, out_error) : err;
}
