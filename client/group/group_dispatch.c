/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ep_moe_dispatch: rows are copied from x into the frame of their rank, and from the received frame
 * to their place in expand_x. The frame's counts give the place, so there is one frame per pair of
 * ranks. With hierarchy one frame goes to each other host, with each token's row once; the gateway
 * there makes each rank's usual frame of it, so the receiving half is the same.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "group/group_assist.h"
#include "group/group_host_rows.h"
#include "group/group_run.h"

typedef struct dispatch_work {
    ep_moe_dispatch_args host; /* with host tensors */
    const ep_moe_dispatch_args *args;
    const group_view *view;
    group_op *op;
    uint32_t *offsets;      /* [buckets+1] */
    uint32_t *order;        /* [T * slots] */
    uint32_t *row_of_token; /* [T], by host */
    size_t row_bytes;
    ep_group_packer packer;
    int32_t rows; /* n */
} dispatch_work;

/* ---- phase one ---- */

static size_t workspace_bytes(const group_view *view, char *out_formula, size_t formula_bytes)
{
    size_t slots = ep_batch_slots_per_token(&view->batch, &view->shape);
    size_t buckets = ep_group_buckets(&view->layout);
    size_t by_host = view->call.by_host != 0 ? 1 : 0;
    snprintf(out_formula, formula_bytes,
             "align64(4 * (shared_expert_rank_num + moe_expert_num + 1)) + align64(4 * BS * (K + "
             "shared_expert_num%s)) = align64(4 * %zu) + "
             "align64(4 * %" PRIu32 " * %zu)",
             by_host == 1 ? " + 1" : "", buckets + 1, view->batch.tokens, slots + by_host);
    return ep_align_up(4 * (buckets + 1), 64) +
           ep_align_up(4 * view->batch.tokens * (slots + by_host), 64);
}

ep_err ep_moe_dispatch_prepare(ep_group *group, const ep_moe_dispatch_args *args,
                               size_t *out_workspace_bytes, ep_group_plan **out_plan,
                               ep_error *out_error)
{
    group_view view;
    char formula[EP_GROUP_FORMULA_BYTES];
    ep_moe_dispatch_args host;
    ep_group_stage stage = {.device = {.memory = NULL}};
    ep_err err = ep_group_dispatch_take(args, &host, out_error);
    if (err == EP_OK) {
        err = ep_group_stage_dispatch(&stage, &host, out_error);
    }
    if (err == EP_OK) {
        err = ep_group_dispatch_view(group, &host, &view, out_error);
    }
    if (err != EP_OK) {
        ep_group_stage_fini(&stage);
        return err;
    }
    size_t bytes = workspace_bytes(&view, formula, sizeof(formula));
    return ep_group_plan_create(group, &view, bytes, formula, sizeof(dispatch_work), &stage,
                                out_workspace_bytes, out_plan, out_error);
}

/* ---- sending ---- */

static ep_err fill_frame(dispatch_work *w, uint32_t member, ep_error *out_error)
{
    const ep_group_layout *layout = &w->view->layout;
    uint32_t first = ep_group_first_bucket(layout, member);
    uint32_t local = ep_group_local_experts(layout, member);
    uint32_t rows = w->offsets[first + local] - w->offsets[first];
    bool weights = w->view->call.has_expert_scales != 0;
    ep_group_dispatch_parts parts =
        ep_group_dispatch_parts_of(local, rows, w->row_bytes, w->packer.quantise, weights);
    uint8_t *body;
    ep_err err = ep_group_op_body(w->op, member, parts.bytes, rows, &body, out_error);
    if (err != EP_OK) {
        return err;
    }
    memset(body, 0, parts.rows); /* zeroes gaps between the parts too */
    uint32_t done = 0;
    for (uint32_t e = 0; e < local; e++) {
        uint32_t begin = w->offsets[first + e];
        uint32_t count = w->offsets[first + e + 1] - begin;
        memcpy(body + 4 * (size_t)e, &count, sizeof(count));
        ep_group_row_out out = {.rows = body + parts.rows + (size_t)done * w->row_bytes,
                                .stride_bytes = (int64_t)w->row_bytes,
                                .scales = (float *)(void *)(body + parts.scales) + done,
                                .weights =
                                    weights ? (float *)(void *)(body + parts.weights) + done : NULL,
                                .tokens = (uint32_t *)(void *)(body + parts.tokens) + done,
                                .slots = (uint32_t *)(void *)(body + parts.slots) + done};
        ep_group_pack(&w->packer, first + e, w->order + begin, count, &out);
        done += count;
    }
    return EP_OK;
}

/* Fills the frame for all ranks of another host. */
static ep_err fill_host_frame(dispatch_work *w, uint32_t host, ep_error *out_error)
{
    const ep_group *group = w->op->group;
    const ep_group_hosts *hosts = &group->hosts;
    ep_group_host_sender sender = {.packer = &w->packer,
                                   .layout = &w->view->layout,
                                   .offsets = w->offsets,
                                   .order = w->order,
                                   .members = hosts->list + hosts->first[host],
                                   .ranks = w->view->members,
                                   .count = ep_group_host_ranks(hosts, host),
                                   .weights = w->view->call.has_expert_scales != 0,
                                   .row_of_token = w->row_of_token};
    ep_group_host_shape shape = ep_group_host_plan(&sender);
    size_t largest = EP_GROUP_BODY_OFFSET + ep_group_host_largest(&sender, &shape);
    if (largest > group->frame_bytes_max) { /* the gateway could not pass it on */
        return ep_group_frame_too_large(group, largest, out_error);
    }
    uint8_t *body;
    ep_err err =
        ep_group_op_body(w->op, ep_group_gateway(hosts, w->op->own, host),
                         ep_group_host_parts_of(&shape).bytes, shape.rows, &body, out_error);
    if (err == EP_OK) {
        ep_group_host_fill(&sender, &shape, body);
    }
    return err;
}

static ep_err send_rows(dispatch_work *w, ep_error *out_error)
{
    const ep_group_hosts *hosts = &w->op->group->hosts;
    bool by_host = w->view->call.by_host != 0;
    ep_err err = EP_OK;
    for (uint32_t m = 0; m < w->view->layout.ranks && err == EP_OK; m++) {
        if (m != w->op->own && (!by_host || ep_group_hosts_share(hosts, w->op->own, m))) {
            err = fill_frame(w, m, out_error);
        }
    }
    for (uint32_t h = 0; by_host && h < hosts->count && err == EP_OK; h++) {
        if (h != hosts->host_of[w->op->own]) {
            err = fill_host_frame(w, h, out_error);
        }
    }
    return err == EP_OK ? ep_group_op_send(w->op, out_error) : err;
}

/* ---- receiving ---- */

/* Sums the counts of one source; false: above most. */
static bool sum_counts(const uint8_t *body, size_t bytes, uint32_t local, uint64_t most,
                       uint32_t *out_rows)
{
    uint64_t rows = 0;
    if (bytes < 4 * (size_t)local) {
        return false;
    }
    for (uint32_t e = 0; e < local; e++) {
        uint32_t count;
        memcpy(&count, body + 4 * (size_t)e, sizeof(count));
        rows += count;
    }
    *out_rows = (uint32_t)rows;
    return rows <= most;
}

/* Checks a frame received from a peer. */
static ep_err check_received(const dispatch_work *w, uint32_t member, uint32_t *out_rows,
                             ep_error *out_error)
{
    size_t bytes;
    const uint8_t *body = ep_group_op_received(w->op, member, &bytes);
    const ep_group_call *told = &w->op->told[member];
    uint32_t slots = w->packer.slots_per_token;
    uint64_t most =
        told->tokens >= 0 && told->tokens <= INT32_MAX / slots ? (uint64_t)told->tokens * slots : 0;
    ep_group_dispatch_parts parts = {0};
    bool good = sum_counts(body, bytes, w->view->local_experts, most, out_rows);
    if (good) {
        parts =
            ep_group_dispatch_parts_of(w->view->local_experts, *out_rows, w->row_bytes,
                                       w->packer.quantise, w->view->call.has_expert_scales != 0);
        good = parts.bytes == bytes;
    }
    for (uint32_t i = 0; good && i < *out_rows; i++) {
        uint32_t token = ((const uint32_t *)(const void *)(body + parts.tokens))[i];
        uint32_t slot = ((const uint32_t *)(const void *)(body + parts.slots))[i];
        good = token < (uint64_t)told->tokens && slot < slots;
    }
    return good ? EP_OK
                : ep_error_set(out_error, EP_ERR_PROTOCOL,
                               "rank %" PRIu32
                               " sent a dispatch frame whose counts do not fit its length",
                               w->view->members[member]);
}

static uint32_t own_count(const dispatch_work *w, uint32_t expert)
{
    uint32_t bucket = ep_group_first_bucket(&w->view->layout, w->op->own) + expert;
    return w->offsets[bucket + 1] - w->offsets[bucket];
}

/* Writes ep_recv_counts: inclusive prefix sums in order [local expert][source rank]. */
static ep_err write_counts(dispatch_work *w, ep_error *out_error)
{
    int32_t *prefix = w->args->ep_recv_counts.data;
    uint32_t ranks = w->view->layout.ranks;
    int64_t sum = 0;
    for (uint32_t e = 0; e < w->view->local_experts; e++) {
        for (uint32_t m = 0; m < ranks; m++) {
            size_t bytes;
            uint32_t count = own_count(w, e);
            if (m != w->op->own) {
                memcpy(&count, ep_group_op_received(w->op, m, &bytes) + 4 * (size_t)e,
                       sizeof(count));
            }
            sum += count;
            if (sum > INT32_MAX) {
                return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                                    "more than %d rows come to rank %" PRIu32, INT32_MAX,
                                    w->view->members[w->op->own]);
            }
            prefix[(size_t)e * ranks + m] = (int32_t)sum;
        }
    }
    w->rows = (int32_t)sum;
    return EP_OK;
}

static ep_err check_room_for(const char *name, int64_t has, int64_t needs, size_t each_bytes,
                             const char *what, const char *formula, ep_error *out_error)
{
    if (has >= needs) {
        return EP_OK;
    }
    return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                        "%s has %" PRId64 " entries (%" PRId64 " bytes): this call needs %" PRId64
                        ", %" PRId64 " bytes = %s; what always suffices: %s",
                        name, has, has * (int64_t)each_bytes, needs, needs * (int64_t)each_bytes,
                        what, formula);
}

static ep_err check_rooms(const dispatch_work *w, int64_t rows_with_tp, ep_error *out_error)
{
    const ep_moe_dispatch_args *args = w->args;
    const char *formula = w->view->formula;
    ep_err err = check_room_for("expand_x", w->view->expand_rows, rows_with_tp, w->row_bytes,
                                "rows received * H * element", formula, out_error);
    if (err == EP_OK && w->packer.quantise) {
        err = check_room_for("dynamic_scales", args->dynamic_scales.shape[0], rows_with_tp, 4,
                             "4 * rows received", formula, out_error);
    }
    if (err == EP_OK && args->expand_scales.rank != 0) {
        err = check_room_for("expand_scales", args->expand_scales.shape[0], w->rows, 4,
                             "4 * rows received", formula, out_error);
    }
    if (err == EP_OK && w->view->call.by_index == 0) {
        err = check_room_for("assist_info_for_combine", args->assist_info_for_combine.shape[0],
                             3 * (int64_t)w->rows + EP_GROUP_ASSIST_TAIL_INTS, 4,
                             "4 * (3 * rows received + 16)", formula, out_error);
    }
    return err;
}

static uint8_t *expand_row(const dispatch_work *w, size_t row)
{
    return (uint8_t *)w->args->expand_x.data + (int64_t)row * w->args->expand_x.stride_bytes[0];
}

static void write_triple(const dispatch_work *w, size_t row, uint32_t member, uint32_t token,
                         uint32_t slot)
{
    if (w->view->call.by_index != 0) {
        return;
    }
    int32_t *triple = (int32_t *)w->args->assist_info_for_combine.data + 3 * row;
    triple[0] = (int32_t)member;
    triple[1] = (int32_t)token;
    triple[2] = (int32_t)slot;
}

/* First row in expand_x of (local expert, source). */
static size_t first_row(const dispatch_work *w, uint32_t expert, uint32_t member, uint32_t count)
{
    const int32_t *prefix = w->args->ep_recv_counts.data;
    return (size_t)prefix[(size_t)expert * w->view->layout.ranks + member] - count;
}

static void place_own(const dispatch_work *w)
{
    uint32_t first = ep_group_first_bucket(&w->view->layout, w->op->own);
    float *scales = w->args->dynamic_scales.data;
    float *weights = w->args->expand_scales.rank != 0 ? w->args->expand_scales.data : NULL;
    for (uint32_t e = 0; e < w->view->local_experts; e++) {
        const uint32_t *order = w->order + w->offsets[first + e];
        uint32_t count = own_count(w, e);
        size_t row = first_row(w, e, w->op->own, count);
        ep_group_row_out out = {.rows = count > 0 ? expand_row(w, row) : NULL,
                                .stride_bytes = w->args->expand_x.stride_bytes[0],
                                .scales = w->packer.quantise ? scales + row : NULL,
                                .weights = weights != NULL ? weights + row : NULL};
        ep_group_pack(&w->packer, first + e, order, count, &out);
        for (uint32_t i = 0; i < count; i++) {
            write_triple(w, row + i, w->op->own, order[i] / w->packer.slots_per_token,
                         order[i] % w->packer.slots_per_token);
        }
    }
}

static void copy_rows(const dispatch_work *w, size_t row, const uint8_t *from, uint32_t count)
{
    int64_t stride = w->args->expand_x.stride_bytes[0];
    if (stride == (int64_t)w->row_bytes && count > 0) {
        memcpy(expand_row(w, row), from, (size_t)count * w->row_bytes);
        return;
    }
    for (uint32_t i = 0; i < count; i++) {
        memcpy(expand_row(w, row + i), from + (size_t)i * w->row_bytes, w->row_bytes);
    }
}

static void place_received(const dispatch_work *w, uint32_t member, uint32_t rows)
{
    size_t bytes;
    const uint8_t *body = ep_group_op_received(w->op, member, &bytes);
    bool weights = w->view->call.has_expert_scales != 0;
    ep_group_dispatch_parts parts = ep_group_dispatch_parts_of(
        w->view->local_experts, rows, w->row_bytes, w->packer.quantise, weights);
    const uint32_t *tokens = (const uint32_t *)(const void *)(body + parts.tokens);
    const uint32_t *slots = (const uint32_t *)(const void *)(body + parts.slots);
    uint32_t done = 0;
    for (uint32_t e = 0; e < w->view->local_experts; e++) {
        uint32_t count;
        memcpy(&count, body + 4 * (size_t)e, sizeof(count));
        size_t row = first_row(w, e, member, count);
        copy_rows(w, row, body + parts.rows + (size_t)done * w->row_bytes, count);
        for (uint32_t i = 0; i < count; i++) {
            write_triple(w, row + i, member, tokens[done + i], slots[done + i]);
        }
        if (w->packer.quantise && count > 0) {
            memcpy((float *)w->args->dynamic_scales.data + row,
                   body + parts.scales + 4 * (size_t)done, 4 * (size_t)count);
        }
        if (w->args->expand_scales.rank != 0 && count > 0) {
            memcpy((float *)w->args->expand_scales.data + row,
                   body + parts.weights + 4 * (size_t)done, 4 * (size_t)count);
        }
        done += count;
    }
}

static ep_err receive_rows(dispatch_work *w, ep_error *out_error)
{
    uint32_t rows = 0;
    ep_err err = EP_OK;
    ep_group_add_performance(w->op, w->view, &w->args->performance_info);
    for (uint32_t m = 0; m < w->view->layout.ranks && err == EP_OK; m++) {
        err = m == w->op->own ? EP_OK : check_received(w, m, &rows, out_error);
    }
    if (err == EP_OK) {
        err = write_counts(w, out_error);
    }
    if (err == EP_OK) {
        err = check_rooms(w, w->rows, out_error);
    }
    if (err != EP_OK) {
        return err;
    }
    place_own(w);
    for (uint32_t m = 0; m < w->view->layout.ranks; m++) {
        if (m != w->op->own) {
            size_t bytes;
            const uint8_t *body = ep_group_op_received(w->op, m, &bytes);
            sum_counts(body, bytes, w->view->local_experts, UINT64_MAX, &rows);
            place_received(w, m, rows);
        }
    }
    return EP_OK;
}

/* ---- tensor-parallel pair: all-gather of what both received ---- */

/* Body: u32 rows, u32 local experts | counts i32 [ranks*L] | scales f32 [rows] if quantised | rows;
 * parts at multiples of 64. */
static size_t tp_scales_at(size_t counts)
{
    return ep_align_up(64 + 4 * counts, 64);
}

static size_t tp_rows_at(size_t counts, uint32_t rows, bool quantised)
{
    return ep_align_up(tp_scales_at(counts) + (quantised ? 4 * (size_t)rows : 0), 64);
}

static ep_err tp_fill(const dispatch_work *w, group_op *tp, ep_error *out_error)
{
    size_t counts = (size_t)w->view->layout.ranks * w->view->local_experts;
    uint32_t head[2] = {(uint32_t)w->rows, w->view->local_experts};
    size_t rows_at = tp_rows_at(counts, head[0], w->packer.quantise);
    uint8_t *body;
    ep_err err = ep_group_op_body(tp, 1 - tp->own, rows_at + head[0] * w->row_bytes, head[0], &body,
                                  out_error);
    if (err != EP_OK) {
        return err;
    }
    memset(body, 0, rows_at);
    memcpy(body, head, sizeof(head));
    memcpy(body + 64, w->args->ep_recv_counts.data, 4 * counts);
    if (w->packer.quantise) {
        memcpy(body + tp_scales_at(counts), w->args->dynamic_scales.data, 4 * (size_t)head[0]);
    }
    for (uint32_t i = 0; i < head[0]; i++) {
        memcpy(body + rows_at + (size_t)i * w->row_bytes, expand_row(w, i), w->row_bytes);
    }
    return EP_OK;
}

/* Checks that the partner's counts are prefix sums that end with its number of rows, since experts
 * run on that many. */
static bool tp_counts_fit(const uint8_t *counts_at, size_t counts, uint32_t rows)
{
    int32_t last = 0;
    for (size_t i = 0; i < counts; i++) {
        int32_t count;
        memcpy(&count, counts_at + 4 * i, sizeof(count));
        if (count < last) {
            return false;
        }
        last = count;
    }
    return (uint32_t)last == rows;
}

static ep_err tp_place(const dispatch_work *w, group_op *tp, ep_error *out_error)
{
    size_t counts = (size_t)w->view->layout.ranks * w->view->local_experts;
    size_t bytes;
    const uint8_t *body = ep_group_op_received(tp, 1 - tp->own, &bytes);
    uint32_t head[2] = {0, UINT32_MAX};
    if (bytes >= 64) {
        memcpy(head, body, sizeof(head));
    }
    if (head[1] != w->view->local_experts || head[0] > INT32_MAX ||
        bytes != tp_rows_at(counts, head[0], w->packer.quantise) + head[0] * w->row_bytes ||
        !tp_counts_fit(body + 64, counts, head[0])) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL,
                            "the TP partner (rank %" PRIu32
                            " of group_tp) sent rows or counts of another layout: both must have "
                            "the same ep_rank_id",
                            1 - tp->own);
    }
    ep_err err = check_rooms(w, (int64_t)w->rows + head[0], out_error);
    if (err != EP_OK) {
        return err;
    }
    int32_t *tp_counts = w->args->tp_recv_counts.data;
    tp_counts[tp->own] = w->rows;
    tp_counts[1 - tp->own] = (int32_t)head[0];
    memcpy((int32_t *)w->args->ep_recv_counts.data + counts, body + 64, 4 * counts);
    if (w->packer.quantise) {
        memcpy((float *)w->args->dynamic_scales.data + w->rows, body + tp_scales_at(counts),
               4 * (size_t)head[0]);
    }
    copy_rows(w, (size_t)w->rows, body + tp_rows_at(counts, head[0], w->packer.quantise), head[0]);
    return EP_OK;
}

/* ---- phase two ---- */

static void write_token_nums(const dispatch_work *w)
{
    const int32_t *prefix = w->args->ep_recv_counts.data;
    int64_t *nums = w->args->expert_token_nums.data;
    uint32_t ranks = w->view->layout.ranks;
    int64_t before = 0;
    for (uint32_t e = 0; e < w->view->local_experts; e++) {
        int64_t end = prefix[(size_t)e * ranks + ranks - 1];
        if (w->view->group_tp != NULL) { /* one local expert: it gets both ranks' rows */
            end += prefix[(size_t)ranks * w->view->local_experts + ranks - 1];
        }
        nums[e] = w->view->call.token_nums_type == 1 ? end - before : end;
        before = end;
    }
}

static void seal(const dispatch_work *w)
{
    const ep_group *group = w->op->group;
    const group_view *view = w->view;
    size_t counts = (size_t)view->call.tp_world_size * view->layout.ranks * view->local_experts;
    ep_group_assist assist = {.membership = group->membership,
                              .number = ((uint64_t)group->generation << 40) + w->op->number,
                              .rows = (uint32_t)w->rows,
                              .ids_digest = ep_group_ids_digest(&view->batch),
                              .counts_digest =
                                  ep_group_counts_digest(w->args->ep_recv_counts.data, counts)};
    ep_group_assist_seal(&assist, w->args->assist_info_for_combine.data,
                         (size_t)w->args->assist_info_for_combine.shape[0]);
}

static ep_err start(ep_group_plan *plan, ep_error *out_error)
{
    dispatch_work *w = plan->work;
    group_view *view = &plan->view;
    bool has_inactive;
    ep_err err =
        ep_group_batch_check(&view->call, &view->batch, &view->shape, &has_inactive, out_error);
    view->call.has_inactive = has_inactive;
    if (err == EP_OK) {
        err = ep_batch_check_x(&view->batch, out_error);
    }
    if (err == EP_OK) {
        ep_group_sort(&view->batch, &view->shape, &view->layout, w->op->own, w->offsets, w->order);
        err = send_rows(w, out_error);
    }
    return err;
}

/* With a pair: sends the received rows to the partner. */
static ep_err turn(ep_group_plan *plan, ep_error *out_error)
{
    dispatch_work *w = plan->work;
    ep_err err = receive_rows(w, out_error);
    if (err == EP_OK) {
        err = tp_fill(w, &plan->pair, out_error);
    }
    return err == EP_OK ? ep_group_op_send(&plan->pair, out_error) : err;
}

static ep_err place(ep_group_plan *plan, ep_error *out_error)
{
    dispatch_work *w = plan->work;
    ep_err err = w->view->group_tp != NULL ? tp_place(w, &plan->pair, out_error)
                                           : receive_rows(w, out_error);
    if (err == EP_OK) {
        write_token_nums(w);
        if (w->view->call.by_index != 0) {
            ep_group_write_index(&w->view->batch, &w->view->layout, w->packer.slots_per_token,
                                 w->offsets, w->order, w->args->expand_idx.data);
        } else {
            seal(w);
        }
    }
    return err;
}

static ep_err copy_out(ep_group_plan *plan, ep_error *out_error)
{
    const dispatch_work *w = plan->work;
    const int32_t *prefix = w->args->ep_recv_counts.data;
    size_t counts = (size_t)w->view->layout.ranks * w->view->local_experts;
    size_t rows = counts == 0 ? 0 : (size_t)prefix[counts - 1]; /* with TP those of both ranks */
    rows += w->view->group_tp == NULL || counts == 0 ? 0 : (size_t)prefix[2 * counts - 1];
    return ep_group_stage_copy(&plan->stage, EP_STAGE_OUT, rows, w->op->deadline_us, out_error);
}

static const group_operator dispatch_operator = {
    .start = start, .turn = turn, .place = place, .out = copy_out};

/* Sets up the work of a claimed and checked plan. */
static void set_work(ep_group_plan *plan, const ep_moe_dispatch_args *args, void *workspace)
{
    dispatch_work *w = plan->work;
    const group_view *view = &plan->view;
    bool quantise = view->call.quant_mode == 2;
    size_t row_bytes =
        (size_t)view->batch.hidden * (quantise ? 1 : ep_dtype_bytes(view->batch.x.dtype));
    *w = (dispatch_work){
        .host = *args,
        .args = &w->host,
        .view = view,
        .op = &plan->op,
        .offsets = workspace,
        .order = (uint32_t *)workspace +
                 ep_align_up(4 * ((size_t)ep_group_buckets(&view->layout) + 1), 64) / 4,
        .row_bytes = row_bytes,
        .packer = {.batch = &view->batch,
                   .slots_per_token = ep_batch_slots_per_token(&view->batch, &view->shape),
                   .shared_ranks = view->layout.shared_ranks,
                   .row_bytes = row_bytes,
                   .quantise = quantise}};
    w->row_of_token = w->order + (size_t)view->batch.tokens * w->packer.slots_per_token;
}

ep_err ep_moe_dispatch_begin(ep_group *group, ep_group_plan *plan, const ep_moe_dispatch_args *args,
                             void *workspace, size_t workspace_size, ep_group_done_func done,
                             void *arg, ep_error *out_error)
{
    ep_moe_dispatch_args host;
    ep_err err = ep_group_run_claim(plan, "ep_moe_dispatch", "ep_moe_dispatch_prepare", out_error);
    if (err != EP_OK) {
        return err;
    }
    err = ep_group_dispatch_take(args, &host, out_error);
    if (err == EP_OK && group != NULL) { /* a missing group is refused below */
        err = ep_group_stage_dispatch(&plan->stage, &host, out_error);
        if (err == EP_OK) {
            err = ep_group_stage_copy(&plan->stage, EP_STAGE_IN, EP_STAGE_ALL_ROWS,
                                      ep_group_deadline_us(group, host.deadline_us), out_error);
        }
    }
    if (err == EP_OK) {
        err = ep_group_dispatch_view(group, &host, &plan->view, out_error);
    }
    if (err == EP_OK) {
        err = ep_group_plan_check(plan, group, &plan->view, workspace, workspace_size, out_error);
    }
    if (err == EP_OK) {
        set_work(plan, &host, workspace);
        err = ep_group_run_begin(plan, &dispatch_operator, group, host.deadline_us, done, arg,
                                 out_error);
    }
    if (err != EP_OK) {
        ep_group_run_unclaim(plan);
    }
    return err;
}

ep_err ep_moe_dispatch(ep_group *group, ep_group_plan *plan, const ep_moe_dispatch_args *args,
                       void *workspace, size_t workspace_size, ep_error *out_error)
{
    ep_err err =
        ep_moe_dispatch_begin(group, plan, args, workspace, workspace_size, NULL, NULL, out_error);
    return err == EP_OK ? ep_group_plan_finish(plan, out_error) : err;
}
