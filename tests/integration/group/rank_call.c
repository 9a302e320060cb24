/* SPDX-License-Identifier: Apache-2.0 */
#include "rank_call.h"

#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "case_draw.h"

static const ep_dtype dtypes[] = {
    [ORACLE_BF16] = EP_DTYPE_BF16, [ORACLE_F16] = EP_DTYPE_F16, [ORACLE_F32] = EP_DTYPE_F32};

enum { SPARE_COUNTS = 3, UNWRITTEN = 0xa5 };

static void *memory(rank_call *call, size_t bytes)
{
    size_t whole = (bytes + 127) / 64 * 64;
    void *data = aligned_alloc(64, whole);
    memset(data, UNWRITTEN, whole);
    call->memory[call->memory_count++] = data;
    return data;
}

static size_t element(const rank_call *call)
{
    return ep_dtype_bytes(dtypes[call->c->dtype]);
}

static void put(const rank_call *call, void *data, size_t index, float value)
{
    uint32_t bits = oracle_bits(call->c->dtype, value);
    memcpy((char *)data + index * element(call), &bits, element(call));
}

static float get(const rank_call *call, const void *data, size_t index)
{
    uint32_t bits = 0;
    memcpy(&bits, (const char *)data + index * element(call), element(call));
    return oracle_value(call->c->dtype, bits);
}

static ep_tensor typed(rank_call *call, const float *values, int64_t rows, int64_t columns)
{
    void *data = memory(call, (size_t)(rows * columns) * element(call));
    for (int64_t i = 0; i < rows * columns; i++) {
        put(call, data, (size_t)i, values[i]);
    }
    return ep_tensor_2d(data, dtypes[call->c->dtype], rows, columns);
}

static int64_t count_rows(const oracle_case *c, int rank)
{
    oracle_row *rows;
    float *values;
    int n = oracle_dispatch(c, rank, &rows, &values);
    free(rows);
    free(values);
    return n;
}

static void init_dispatch(rank_call *call)
{
    const oracle_case *c = call->c;
    const oracle_batch *b = &c->batch[call->rank];
    int first;
    int64_t local = oracle_local(c, (int)call->rank, &first);
    int64_t rows = call->rows_max;
    ep_moe_dispatch_args *d = &call->dispatch;
    ep_moe_dispatch_args_init(d);
    d->params = &call->params;
    d->quant_mode = c->quantise ? 2 : 0;
    d->x = typed(call, b->x, b->tokens, c->hidden);
    /* this call's own: tests spoil them */
    void *ids = memory(call, 4 * (size_t)(b->tokens * c->top_k));
    memcpy(ids, b->ids, 4 * (size_t)(b->tokens * c->top_k));
    d->expert_ids = ep_tensor_2d(ids, EP_DTYPE_I32, b->tokens, c->top_k);
    d->expert_scales = ep_tensor_2d(b->weights, EP_DTYPE_F32, b->tokens, c->top_k);
    if (b->mask_tokens != NULL) {
        d->x_active_mask = ep_tensor_1d(b->mask_tokens, EP_DTYPE_BOOL, b->tokens);
    } else if (b->mask_slots != NULL) {
        d->x_active_mask = ep_tensor_2d(b->mask_slots, EP_DTYPE_BOOL, b->tokens, c->top_k);
    }
    if (c->smooth != NULL) {
        d->scales =
            ep_tensor_2d(c->smooth, EP_DTYPE_F32,
                         (c->shared_ranks > 0 ? c->shared_experts : 0) + c->experts, c->hidden);
    }
    d->expand_x = ep_tensor_2d(memory(call, (size_t)(rows * c->hidden) * element(call)),
                               c->quantise ? EP_DTYPE_I8 : dtypes[c->dtype], rows, c->hidden);
    d->dynamic_scales = ep_tensor_1d(memory(call, 4 * (size_t)rows), EP_DTYPE_F32, rows);
    int64_t ints = 128 * (rows > 0 ? rows : 1);
    d->assist_info_for_combine = ep_tensor_1d(memory(call, 4 * (size_t)ints), EP_DTYPE_I32, ints);
    d->expert_token_nums = ep_tensor_1d(memory(call, 8 * (size_t)local), EP_DTYPE_I64, local);
    int64_t counts = local * c->ranks + SPARE_COUNTS;
    int32_t *counts_memory = memory(call, 4 * (size_t)counts);
    d->ep_recv_counts = ep_tensor_1d(counts_memory, EP_DTYPE_I32, counts);
    call->spare_counts = (const uint8_t *)(counts_memory + counts - SPARE_COUNTS);
    d->expand_scales = ep_tensor_1d(memory(call, 4 * (size_t)rows), EP_DTYPE_F32, rows);
    d->performance_info = ep_tensor_1d(memory(call, 8 * (size_t)c->ranks), EP_DTYPE_I64, c->ranks);
    memset(d->performance_info.data, 0, 8 * (size_t)c->ranks);
}

static void init_combine(rank_call *call)
{
    const oracle_case *c = call->c;
    const oracle_batch *b = &c->batch[call->rank];
    ep_moe_combine_args *m = &call->combine;
    ep_moe_combine_args_init(m);
    m->params = &call->params;
    m->comm_quant_mode = c->quantise_back ? 2 : 0;
    m->expand_x = ep_tensor_2d(memory(call, (size_t)(call->rows_max * c->hidden) * element(call)),
                               dtypes[c->dtype], call->rows_max, c->hidden);
    m->expert_ids = call->dispatch.expert_ids;
    m->expert_scales = call->dispatch.expert_scales;
    m->x_active_mask = call->dispatch.x_active_mask;
    m->assist_info_for_combine = call->dispatch.assist_info_for_combine;
    m->ep_send_counts = call->dispatch.ep_recv_counts;
    m->ori_x = call->dispatch.x;
    if (b->shared_x != NULL) {
        m->shared_expert_x = typed(call, b->shared_x, b->tokens, c->hidden);
    }
    if (c->constant > 0) {
        m->const_expert_alpha_1 = typed(call, c->alpha1, c->constant, c->hidden);
        m->const_expert_alpha_2 = typed(call, c->alpha2, c->constant, c->hidden);
        m->const_expert_v = typed(call, c->v, c->constant, c->hidden);
    }
    size_t out_bytes = (size_t)b->tokens * (size_t)c->hidden * element(call);
    ep_tensor out = ep_tensor_2d(memory(call, out_bytes), dtypes[c->dtype], b->tokens, c->hidden);
    if (c->gamma == NULL) {
        m->x_out = out;
        return;
    }
    ep_moe_add_rms_norm_init(&call->norm);
    call->norm.eps = c->eps;
    call->norm.residual_x = typed(call, b->residual, b->tokens, c->hidden);
    ep_tensor gamma = typed(call, c->gamma, 1, c->hidden);
    call->norm.gamma = ep_tensor_1d(gamma.data, gamma.dtype, c->hidden);
    call->norm.y = out;
    call->norm.x = ep_tensor_2d(memory(call, out_bytes), dtypes[c->dtype], b->tokens, c->hidden);
    call->norm.rstd = ep_tensor_1d(memory(call, 4 * (size_t)b->tokens), EP_DTYPE_F32, b->tokens);
}

void rank_call_init(rank_call *call, const oracle_case *c, uint32_t rank, int spare_rows)
{
    rank_call_init_rows(call, c, rank, count_rows(c, (int)rank) + spare_rows);
}

void rank_call_init_rows(rank_call *call, const oracle_case *c, uint32_t rank, int64_t rows_max)
{
    memset(call, 0, sizeof(*call));
    call->c = c;
    call->rank = rank;
    call->rows_max = rows_max;
    ep_group_params_init(&call->params);
    call->params.moe_expert_num = c->experts;
    call->params.shared_expert_num = c->shared_experts;
    call->params.shared_expert_rank_num = c->shared_ranks;
    call->params.zero_expert_num = c->zero;
    call->params.copy_expert_num = c->copy;
    call->params.const_expert_num = c->constant;
    call->params.const_rule = c->linear ? EP_GROUP_CONST_LINEAR : EP_GROUP_CONST_KERNEL;
    init_dispatch(call);
    init_combine(call);
}

void rank_call_use_index(rank_call *call)
{
    int64_t ints = (int64_t)call->c->batch[call->rank].tokens * call->c->top_k + SPARE_COUNTS;
    void *data = memory(call, 4 * (size_t)ints);
    call->dispatch.expand_idx = ep_tensor_1d(data, EP_DTYPE_I32, ints);
    call->dispatch.assist_info_for_combine = ep_tensor_none();
    call->combine.expand_idx = call->dispatch.expand_idx;
    call->combine.assist_info_for_combine = ep_tensor_none();
}

void rank_call_free(rank_call *call)
{
    ep_group_plan_destroy(call->dispatch_plan);
    ep_group_plan_destroy(call->combine_plan);
    for (int i = 0; i < call->memory_count; i++) {
        free(call->memory[i]);
    }
    memset(call, 0, sizeof(*call));
}

/* ---- running ---- */

static ep_err prepare_dispatch(rank_call *call, ep_group *group, ep_error *out_error)
{
    size_t had = call->dispatch_workspace == NULL ? 0 : call->dispatch_workspace_bytes;
    ep_group_plan_destroy(call->dispatch_plan);
    call->dispatch_plan = NULL;
    ep_err err = ep_moe_dispatch_prepare(group, &call->dispatch, &call->dispatch_workspace_bytes,
                                         &call->dispatch_plan, out_error);
    if (err == EP_OK && call->dispatch_workspace_bytes > had) {
        call->dispatch_workspace = memory(call, call->dispatch_workspace_bytes);
    }
    return err;
}

static const ep_moe_add_rms_norm *norm_of(const rank_call *call)
{
    return call->c->gamma == NULL ? NULL : &call->norm;
}

static ep_err prepare_combine(rank_call *call, ep_group *group, ep_error *out_error)
{
    size_t had = call->combine_workspace == NULL ? 0 : call->combine_workspace_bytes;
    ep_group_plan_destroy(call->combine_plan);
    call->combine_plan = NULL;
    ep_err err =
        ep_moe_combine_prepare(group, &call->combine, norm_of(call), &call->combine_workspace_bytes,
                               &call->combine_plan, out_error);
    if (err == EP_OK && call->combine_workspace_bytes > had) {
        call->combine_workspace = memory(call, call->combine_workspace_bytes);
    }
    return err;
}

ep_err rank_call_dispatch(rank_call *call, ep_group *group, ep_error *out_error)
{
    ep_err err = prepare_dispatch(call, group, out_error);
    return err != EP_OK ? err
                        : ep_moe_dispatch(group, call->dispatch_plan, &call->dispatch,
                                          call->dispatch_workspace, call->dispatch_workspace_bytes,
                                          out_error);
}

ep_err rank_call_combine(rank_call *call, ep_group *group, ep_error *out_error)
{
    ep_err err = prepare_combine(call, group, out_error);
    if (err != EP_OK) {
        return err;
    }
    if (norm_of(call) == NULL) {
        return ep_moe_combine(group, call->combine_plan, &call->combine, call->combine_workspace,
                              call->combine_workspace_bytes, out_error);
    }
    return ep_moe_combine_add_rms_norm(group, call->combine_plan, &call->combine, &call->norm,
                                       call->combine_workspace, call->combine_workspace_bytes,
                                       out_error);
}

static void on_done(void *arg, ep_group_plan *plan)
{
    rank_call *call = arg;
    if (call->form == RANK_INSIDE) {
        call->finished = ep_group_plan_finish(plan, &call->error);
    }
    sem_post(&call->done);
}

/* What begin is given, and what finish looks for. */
static ep_group_done_func set_form(rank_call *call, rank_form form, ep_group_plan *plan)
{
    call->form = form;
    call->under_way = plan;
    sem_init(&call->done, 0, 0);
    return form == RANK_CALLBACK || form == RANK_INSIDE ? on_done : NULL;
}

ep_err rank_call_begin_dispatch(rank_call *call, ep_group *group, rank_form form,
                                ep_error *out_error)
{
    ep_err err = prepare_dispatch(call, group, out_error);
    if (err != EP_OK) {
        return err;
    }
    ep_moe_dispatch_args args = call->dispatch; /* need not live */
    ep_group_done_func done = set_form(call, form, call->dispatch_plan);
    err = ep_moe_dispatch_begin(group, call->dispatch_plan, &args, call->dispatch_workspace,
                                call->dispatch_workspace_bytes, done, call, out_error);
    memset(&args, 0xa5, sizeof(args));
    return err;
}

ep_err rank_call_begin_combine(rank_call *call, ep_group *group, rank_form form,
                               ep_error *out_error)
{
    ep_err err = prepare_combine(call, group, out_error);
    if (err != EP_OK) {
        return err;
    }
    ep_moe_combine_args args = call->combine;
    ep_group_done_func done = set_form(call, form, call->combine_plan);
    if (norm_of(call) == NULL) {
        err = ep_moe_combine_begin(group, call->combine_plan, &args, call->combine_workspace,
                                   call->combine_workspace_bytes, done, call, out_error);
    } else {
        ep_moe_add_rms_norm norm = call->norm;
        err = ep_moe_combine_add_rms_norm_begin(
            group, call->combine_plan, &args, &norm, call->combine_workspace,
            call->combine_workspace_bytes, done, call, out_error);
        memset(&norm, 0xa5, sizeof(norm));
    }
    memset(&args, 0xa5, sizeof(args));
    return err;
}

ep_err rank_call_finish(rank_call *call, ep_error *out_error)
{
    while (call->form == RANK_POLL && !ep_group_plan_poll(call->under_way)) {
        sched_yield();
    }
    if (call->form == RANK_CALLBACK || call->form == RANK_INSIDE) {
        while (sem_wait(&call->done) != 0) {
        }
    }
    if (call->form == RANK_INSIDE) {
        *out_error = call->error;
        return call->finished;
    }
    if (call->form == RANK_CALLBACK && !ep_group_plan_poll(call->under_way)) {
        return ep_error_set(out_error, EP_ERR_INTERNAL, "called back before it is over");
    }
    return ep_group_plan_finish(call->under_way, out_error);
}

#define DIFFERS(what, index, is, should)                                                           \
    (fprintf(stderr, "rank %u: %s[%ld] is %.9g, should be %.9g\n", call->rank, what,               \
             (long)(index), (double)(is), (double)(should)),                                       \
     false)

static bool check_rows(const rank_call *call, int n, const oracle_row *rows, const float *values)
{
    const oracle_case *c = call->c;
    const ep_moe_dispatch_args *d = &call->dispatch;
    for (int64_t i = 0; i < (int64_t)n * c->hidden; i++) {
        float is = c->quantise ? (float)((const int8_t *)d->expand_x.data)[i]
                               : get(call, d->expand_x.data, (size_t)i);
        if (memcmp(&is, &values[i], sizeof(is)) != 0 && !(c->quantise && is == values[i]) &&
            !(isnan(is) && isnan(values[i]))) {
            return DIFFERS("expand_x", i, is, values[i]);
        }
    }
    for (int i = 0; i < n; i++) {
        const int32_t *triple = (const int32_t *)d->assist_info_for_combine.data + 3 * i;
        if (d->assist_info_for_combine.rank != 0 &&
            (triple[0] != rows[i].source || triple[1] != rows[i].token ||
             triple[2] != rows[i].slot)) {
            return DIFFERS("assist_info source", i, triple[0], rows[i].source);
        }
        float scale = ((const float *)d->dynamic_scales.data)[i];
        if (c->quantise && scale != rows[i].scale && !(isnan(scale) && isnan(rows[i].scale))) {
            return DIFFERS("dynamic_scales", i, scale, rows[i].scale);
        }
        if (d->expand_scales.rank != 0 &&
            ((const float *)d->expand_scales.data)[i] != rows[i].weight) {
            return DIFFERS("expand_scales", i, ((const float *)d->expand_scales.data)[i],
                           rows[i].weight);
        }
    }
    return true;
}

static bool check_counts(const rank_call *call, int n, const oracle_row *rows)
{
    const oracle_case *c = call->c;
    int first;
    int local = oracle_local(c, (int)call->rank, &first);
    int32_t sum = 0;
    int64_t before = 0;
    for (int e = 0; e < local; e++) {
        for (int s = 0; s < c->ranks; s++) {
            for (int i = 0; i < n; i++) {
                sum += rows[i].local == e && rows[i].source == s;
            }
            int32_t is = ((const int32_t *)call->dispatch.ep_recv_counts.data)[e * c->ranks + s];
            if (is != sum) {
                return DIFFERS("ep_recv_counts", e * c->ranks + s, is, sum);
            }
        }
        int64_t should = call->dispatch.expert_token_nums_type == 0 ? sum : sum - before;
        before = sum;
        int64_t is = ((const int64_t *)call->dispatch.expert_token_nums.data)[e];
        if (is != should) {
            return DIFFERS("expert_token_nums", e, is, should);
        }
    }
    return true;
}

/* expand_idx, counted slot by slot. */
static bool check_index(const rank_call *call)
{
    const oracle_case *c = call->c;
    const oracle_batch *b = &c->batch[call->rank];
    const int32_t *index = call->dispatch.expand_idx.data;
    for (int i = 0; i < b->tokens * c->top_k; i++) {
        int32_t before = 0;
        bool travels = b->ids[i] >= 0 && b->ids[i] < c->experts &&
                       oracle_slot_active(c, b, i / c->top_k, i % c->top_k);
        for (int j = 0; j < i && travels; j++) {
            before +=
                b->ids[j] == b->ids[i] && oracle_slot_active(c, b, j / c->top_k, j % c->top_k);
        }
        if (index[i] != before) {
            return DIFFERS("expand_idx", i, index[i], before);
        }
    }
    const uint8_t *spare = (const uint8_t *)(index + b->tokens * c->top_k);
    for (int i = 0; i < 4 * SPARE_COUNTS; i++) {
        if (spare[i] != UNWRITTEN) {
            return DIFFERS("byte after those of expand_idx", i, spare[i], UNWRITTEN);
        }
    }
    return true;
}

/* Of tensors that are longer than what a dispatch writes, or that it does not use. */
static bool check_unwritten(const rank_call *call)
{
    const ep_moe_dispatch_args *d = &call->dispatch;
    for (int i = 0; i < 4 * SPARE_COUNTS; i++) {
        if (call->spare_counts[i] != UNWRITTEN) {
            return DIFFERS("byte after those of ep_recv_counts", i, call->spare_counts[i],
                           UNWRITTEN);
        }
    }
    const uint8_t *scales = d->dynamic_scales.data;
    for (int i = 0; !call->c->quantise && i < 4 * (int)d->dynamic_scales.shape[0]; i++) {
        if (scales[i] != UNWRITTEN) {
            return DIFFERS("byte of dynamic_scales", i, scales[i], UNWRITTEN);
        }
    }
    return true;
}

bool rank_call_check_dispatch(const rank_call *call)
{
    oracle_row *rows;
    float *values;
    int n = oracle_dispatch(call->c, (int)call->rank, &rows, &values);
    bool good = check_counts(call, n, rows) && check_rows(call, n, rows, values) &&
                check_unwritten(call) && (call->dispatch.expand_idx.rank == 0 || check_index(call));
    free(rows);
    free(values);
    return good;
}

int32_t rank_call_rows_received(const rank_call *call)
{
    const int64_t entries = call->dispatch.ep_recv_counts.shape[0] - SPARE_COUNTS;
    return entries > 0 ? ((const int32_t *)call->dispatch.ep_recv_counts.data)[entries - 1] : 0;
}

void rank_call_experts(rank_call *call)
{
    const oracle_case *c = call->c;
    int first;
    int local = oracle_local(c, (int)call->rank, &first);
    const int32_t *counts = call->dispatch.ep_recv_counts.data;
    float *row = malloc(sizeof(float) * (size_t)c->hidden);
    float *out = malloc(sizeof(float) * (size_t)c->hidden);
    int32_t r = 0;
    for (int e = 0; e < local; e++) {
        for (; r < counts[(e + 1) * c->ranks - 1]; r++) {
            for (int h = 0; h < c->hidden; h++) {
                size_t i = (size_t)r * (size_t)c->hidden + (size_t)h;
                row[h] = c->quantise ? (float)((const int8_t *)call->dispatch.expand_x.data)[i] *
                                           (c->undescaled
                                                ? 1.0f
                                                : ((float *)call->dispatch.dynamic_scales.data)[r])
                                     : get(call, call->dispatch.expand_x.data, i);
            }
            oracle_expert(c, first < 0 ? first : first + e, row, out);
            for (int h = 0; h < c->hidden; h++) {
                put(call, call->combine.expand_x.data, (size_t)r * (size_t)c->hidden + (size_t)h,
                    out[h]);
            }
        }
    }
    free(row);
    free(out);
}

static bool near_enough(float is, float should, double tolerance)
{
    if ((isnan(is) && isnan(should)) || (isinf(is) && is == should)) {
        return true;
    }
    if (tolerance == 0) {
        return memcmp(&is, &should, sizeof(is)) == 0;
    }
    double size = fabs((double)should) > 1 ? fabs((double)should) : 1;
    return fabs((double)is - (double)should) <= tolerance * size;
}

bool rank_call_check_combine(const rank_call *call, double tolerance)
{
    const oracle_case *c = call->c;
    int tokens = c->batch[call->rank].tokens;
    size_t n = (size_t)tokens * (size_t)c->hidden;
    float *out = malloc(sizeof(float) * (n + 1));
    float *sum = malloc(sizeof(float) * (n + 1));
    float *rstd = malloc(sizeof(float) * ((size_t)tokens + 1));
    oracle_combine(c, (int)call->rank, out, sum, rstd);
    const void *is = c->gamma == NULL ? call->combine.x_out.data : call->norm.y.data;
    bool good = true;
    for (size_t i = 0; i < n && good; i++) {
        if (!near_enough(get(call, is, i), out[i], tolerance)) {
            good = DIFFERS("output", i, get(call, is, i), out[i]);
        } else if (c->gamma != NULL &&
                   !near_enough(get(call, call->norm.x.data, i), sum[i], tolerance)) {
            good = DIFFERS("sum", i, get(call, call->norm.x.data, i), sum[i]);
        }
    }
    for (int t = 0; t < tokens && c->gamma != NULL && good; t++) {
        float value = ((const float *)call->norm.rstd.data)[t];
        good = near_enough(value, rstd[t], tolerance) || DIFFERS("rstd", t, value, rstd[t]);
    }
    free(out);
    free(sum);
    free(rstd);
    return good;
}

bool rank_error_says(const ep_error *error, const char *const *words)
{
    while (*words != NULL && strstr(error->text, *words) != NULL) {
        words++;
    }
    return *words == NULL;
}

/* ---- two calls of one case ---- */

static bool same(const char *what, uint32_t rank, const void *a, const void *b, size_t bytes)
{
    if (memcmp(a, b, bytes) != 0) {
        fprintf(stderr, "rank %u: %s differs between the forms\n", rank, what);
        return false;
    }
    return true;
}

static bool same_dispatch(const rank_call *a, const rank_call *b)
{
    const oracle_case *c = a->c;
    const ep_moe_dispatch_args *x = &a->dispatch;
    const ep_moe_dispatch_args *y = &b->dispatch;
    size_t rows = (size_t)a->rows_max;
    size_t row = (size_t)c->hidden * (c->quantise ? 1 : ep_dtype_bytes(x->x.dtype));
    return same("expand_x", a->rank, x->expand_x.data, y->expand_x.data, rows * row) &&
           (!c->quantise || same("dynamic_scales", a->rank, x->dynamic_scales.data,
                                 y->dynamic_scales.data, 4 * rows)) &&
           (x->assist_info_for_combine.rank == 0 || y->assist_info_for_combine.rank == 0 ||
            same("assist_info_for_combine", a->rank, x->assist_info_for_combine.data,
                 y->assist_info_for_combine.data, 12 * rows)) &&
           same("expand_scales", a->rank, x->expand_scales.data, y->expand_scales.data, 4 * rows) &&
           same("expert_token_nums", a->rank, x->expert_token_nums.data, y->expert_token_nums.data,
                8 * (size_t)x->expert_token_nums.shape[0]) &&
           same("ep_recv_counts", a->rank, x->ep_recv_counts.data, y->ep_recv_counts.data,
                4 * (size_t)x->ep_recv_counts.shape[0]);
}

static bool same_combine(const rank_call *a, const rank_call *b)
{
    const oracle_case *c = a->c;
    size_t tokens = (size_t)c->batch[a->rank].tokens;
    size_t bytes = tokens * (size_t)c->hidden * ep_dtype_bytes(a->dispatch.x.dtype);
    if (c->gamma == NULL) {
        return same("x_out", a->rank, a->combine.x_out.data, b->combine.x_out.data, bytes);
    }
    return same("y", a->rank, a->norm.y.data, b->norm.y.data, bytes) &&
           same("x", a->rank, a->norm.x.data, b->norm.x.data, bytes) &&
           same("rstd", a->rank, a->norm.rstd.data, b->norm.rstd.data, 4 * tokens);
}

bool rank_call_same(const rank_call *a, const rank_call *b, const char *forms)
{
    bool good = same_dispatch(a, b) && same_combine(a, b);
    if (!good) {
        fprintf(stderr, "the forms: %s\n", forms);
    }
    return good;
}

/* ---- a whole round ---- */

static bool went_well(const rank_call *call, const char *what, ep_err err, const ep_error *error)
{
    if (err != EP_OK) {
        fprintf(stderr, "rank %u, %s: %s: %s\n", call->rank, what, ep_err_name(err), error->text);
    }
    return err == EP_OK;
}

bool rank_call_round(rank_call *call, ep_group *group, ep_error *out_error)
{
    if (!went_well(call, "dispatch", rank_call_dispatch(call, group, out_error), out_error) ||
        !rank_call_check_dispatch(call)) {
        return false;
    }
    rank_call_experts(call);
    return went_well(call, "combine", rank_call_combine(call, group, out_error), out_error) &&
           rank_call_check_combine(call, case_is_approximate(call->c) ? 0.02 : 0);
}
