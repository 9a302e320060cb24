/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every tensor of dispatch and combine with elements apart, in column order, and backwards: the
 * same bits as dense ones, and nothing is written between the elements of a result. Results whose
 * elements share a place are refused by name.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "case_draw.h"
#include "rank_call.h"
#include "rank_threads.h"

#define RANKS 3
#define TENSORS_MAX 32
#define GAP 0x5c
#define SPARE_ROWS 3

typedef enum { APART, COLUMNS, BACKWARDS, LAYOUTS } layout;
static const char *const layout_names[LAYOUTS] = {"apart", "in columns", "backwards"};

typedef struct twin {
    const char *name;
    ep_tensor *used; /* what the call is given */
    ep_tensor dense;
    uint8_t *memory;
    size_t bytes;
    bool is_result;
} twin;

typedef struct twins {
    twin list[TENSORS_MAX];
    int count;
} twins;

static int64_t elements_of(const ep_tensor *t)
{
    int64_t n = 1;
    for (uint32_t i = 0; i < t->rank; i++) {
        n *= t->shape[i];
    }
    return n;
}

/* Element n in row order. */
static uint8_t *element_at(const ep_tensor *t, int64_t n)
{
    int64_t offset = 0;
    for (uint32_t i = t->rank; i-- > 0;) {
        offset += n % t->shape[i] * t->stride_bytes[i];
        n /= t->shape[i];
    }
    return (uint8_t *)t->data + offset;
}

static void lay_out(twin *t, layout l)
{
    ep_tensor *used = t->used;
    const int64_t element = (int64_t)ep_dtype_bytes(used->dtype);
    int64_t step = l == APART ? 2 * element : element;
    for (uint32_t n = 0; n < used->rank; n++) {
        uint32_t i = l == COLUMNS ? n : used->rank - 1 - n;
        used->stride_bytes[i] = l == BACKWARDS ? -step : step;
        step *= used->shape[i];
    }
    t->bytes = (size_t)step;
    t->memory = malloc(t->bytes);
    memset(t->memory, GAP, t->bytes);
    used->data = l == BACKWARDS ? t->memory + step - element : t->memory;
}

static void add(twins *all, const char *name, ep_tensor *tensor, bool is_result, layout l)
{
    if (tensor->rank == 0 || elements_of(tensor) == 0) {
        return;
    }
    twin *t = &all->list[all->count++];
    *t = (twin){.name = name, .used = tensor, .dense = *tensor, .is_result = is_result};
    lay_out(t, l);
    for (int64_t n = 0; n < elements_of(tensor); n++) {
        memcpy(element_at(tensor, n), element_at(&t->dense, n), ep_dtype_bytes(tensor->dtype));
    }
}

/* Results go to their dense twins; false: something between elements has changed. */
static bool take_back(twins *all)
{
    bool good = true;
    for (int i = 0; i < all->count; i++) {
        twin *t = &all->list[i];
        const size_t element = ep_dtype_bytes(t->dense.dtype);
        for (int64_t n = 0; n < elements_of(&t->dense); n++) {
            uint8_t *at = element_at(t->used, n);
            if (t->is_result) {
                memcpy(element_at(&t->dense, n), at, element);
            }
            memset(at, GAP, element);
        }
        for (size_t b = 0; b < t->bytes && good; b++) {
            good = t->memory[b] == GAP;
        }
        if (!good) {
            fprintf(stderr, "%s: written between its elements\n", t->name);
        }
        *t->used = t->dense;
        free(t->memory);
    }
    all->count = 0;
    return good;
}

static void lay_out_dispatch(twins *all, ep_moe_dispatch_args *d, layout l)
{
    add(all, "x", &d->x, false, l);
    add(all, "expert_ids", &d->expert_ids, false, l);
    add(all, "scales", &d->scales, false, l);
    add(all, "x_active_mask", &d->x_active_mask, false, l);
    add(all, "expert_scales", &d->expert_scales, false, l);
    add(all, "performance_info", &d->performance_info, true, l);
    add(all, "expand_x", &d->expand_x, true, l);
    add(all, "dynamic_scales", &d->dynamic_scales, true, l);
    add(all, "assist_info_for_combine", &d->assist_info_for_combine, true, l);
    add(all, "expand_idx", &d->expand_idx, true, l);
    add(all, "expert_token_nums", &d->expert_token_nums, true, l);
    add(all, "ep_recv_counts", &d->ep_recv_counts, true, l);
    add(all, "expand_scales", &d->expand_scales, true, l);
}

static void lay_out_combine(twins *all, rank_call *call, layout l)
{
    ep_moe_combine_args *m = &call->combine;
    add(all, "expand_x", &m->expand_x, false, l);
    add(all, "expert_ids", &m->expert_ids, false, l);
    add(all, "assist_info_for_combine", &m->assist_info_for_combine, false, l);
    add(all, "expand_idx", &m->expand_idx, false, l);
    add(all, "ep_send_counts", &m->ep_send_counts, false, l);
    add(all, "expert_scales", &m->expert_scales, false, l);
    add(all, "x_active_mask", &m->x_active_mask, false, l);
    add(all, "shared_expert_x", &m->shared_expert_x, false, l);
    add(all, "ori_x", &m->ori_x, false, l);
    add(all, "const_expert_alpha_1", &m->const_expert_alpha_1, false, l);
    add(all, "const_expert_alpha_2", &m->const_expert_alpha_2, false, l);
    add(all, "const_expert_v", &m->const_expert_v, false, l);
    if (call->c->gamma == NULL) {
        add(all, "x_out", &m->x_out, true, l);
        return;
    }
    add(all, "residual_x", &call->norm.residual_x, false, l);
    add(all, "gamma", &call->norm.gamma, false, l);
    add(all, "y", &call->norm.y, true, l);
    add(all, "x", &call->norm.x, true, l);
    add(all, "rstd", &call->norm.rstd, true, l);
}

typedef struct world {
    const oracle_case *c;
    uint64_t seed;
} world;

/* What nothing came for is as it was: rank_call fills its memory so. */
static bool spare_is_untouched(const ep_moe_dispatch_args *d)
{
    const ep_tensor *x = &d->expand_x;
    const size_t row = (size_t)x->shape[1] * ep_dtype_bytes(x->dtype);
    const uint8_t *rows_end = (const uint8_t *)x->data + (size_t)x->shape[0] * row;
    const bool is_sealed = d->assist_info_for_combine.rank != 0;
    const int32_t *info = d->assist_info_for_combine.data;
    const int32_t *seal = is_sealed ? info + d->assist_info_for_combine.shape[0] - 16 : NULL;
    const struct {
        const char *name;
        const void *begin;
        const void *end;
    } spares[] = {{"expand_x", rows_end - SPARE_ROWS * row, rows_end},
                  /* a triple per row */
                  {"assist_info_for_combine", is_sealed ? info + 3 * seal[1] : NULL, seal}};
    for (size_t i = 0; i < 2; i++) {
        for (const uint8_t *at = spares[i].begin; at < (const uint8_t *)spares[i].end; at++) {
            if (*at != 0xa5) {
                fprintf(stderr, "%s: more was written than came\n", spares[i].name);
                return false;
            }
        }
    }
    return true;
}

static bool play(const world *w, uint32_t rank, ep_group *group, layout l, ep_error *error)
{
    const oracle_case *c = w->c;
    rank_call call;
    twins all = {.count = 0};
    rank_call_init(&call, c, rank, SPARE_ROWS);
    if (w->seed % 3 == 0) {
        rank_call_use_index(&call);
    }
    lay_out_dispatch(&all, &call.dispatch, l);
    bool good = rank_call_dispatch(&call, group, error) == EP_OK;
    good = take_back(&all) && good && rank_call_check_dispatch(&call) &&
           spare_is_untouched(&call.dispatch);
    if (good) {
        rank_call_experts(&call);
        lay_out_combine(&all, &call, l);
        good = rank_call_combine(&call, group, error) == EP_OK;
        good = take_back(&all) && good &&
               rank_call_check_combine(&call, case_is_approximate(c) ? 1e-2 : 0);
    }
    rank_call_free(&call);
    return good;
}

/* Before anything is sent, so that the others need not know. */
static bool refuses_stride(const oracle_case *c, uint32_t rank, ep_group *group, uint32_t dimension,
                           int64_t stride, ep_error *error)
{
    rank_call call;
    size_t bytes;
    ep_group_plan *plan = NULL;
    rank_call_init(&call, c, rank, 2);
    call.dispatch.expand_x.stride_bytes[dimension] = stride;
    ep_err err = ep_moe_dispatch_prepare(group, &call.dispatch, &bytes, &plan, error);
    ep_group_plan_destroy(plan);
    rank_call_free(&call);
    bool good = err == EP_ERR_INVALID_ARGUMENT &&
                strstr(error->text, "expand_x has strides with which") != NULL;
    if (!good) {
        fprintf(stderr, "expand_x, stride %lld in dimension %u: taken\n", (long long)stride,
                dimension);
    }
    return good;
}

static bool refuses_overlap(const oracle_case *c, uint32_t rank, ep_group *group, ep_error *error)
{
    return (c->hidden == 1 || refuses_stride(c, rank, group, 1, 0, error)) &&
           refuses_stride(c, rank, group, 0, 0, error) && /* all rows at one place */
           (c->hidden == 1 || refuses_stride(c, rank, group, 0, (int64_t)c->hidden - 1, error));
}

static bool play_all(void *arg, uint32_t rank, ep_group *group)
{
    const world *w = arg;
    ep_error error = {.text = ""};
    bool good = refuses_overlap(w->c, rank, group, &error);
    for (layout l = APART; l < LAYOUTS && good; l++) {
        good = play(w, rank, group, l, &error);
        if (!good) {
            fprintf(stderr, "seed %llu, rank %u, %s: %s\n", (unsigned long long)w->seed, rank,
                    layout_names[l], error.text);
        }
    }
    return good;
}

int main(void)
{
    bool good = true;
    for (uint64_t seed = 1; seed <= 40; seed++) {
        oracle_case c;
        const case_limits limits = {
            .ranks_max = RANKS, .ranks = RANKS, .tokens_max = 9, .hidden_max = 40};
        case_draw(seed, &limits, &c);
        world w = {.c = &c, .seed = seed};
        good = rank_threads_play("loopback", NULL, RANKS, 20000000, play_all, &w) && good;
        case_free(&c);
    }
    return good ? 0 : 1;
}
