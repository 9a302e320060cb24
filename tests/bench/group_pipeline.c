/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/group_pipeline.h"

#include <semaphore.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "bench/bench_report.h"
#include "expertd/group.h"

#define TOP_K 2
#define RANKS_MAX 16
#define SLOTS (2 * GROUP_PIPELINE_LAYERS) /* micro-batches of layers */

/* A micro-batch: what is begun on it is finished before the next is begun. */
typedef struct micro {
    group_pipeline *pipeline;
    ep_moe_dispatch_args dispatch;
    ep_moe_combine_args combine;
    ep_group_plan *dispatch_plan;
    ep_group_plan *combine_plan;
    void *dispatch_workspace;
    void *combine_workspace;
    size_t dispatch_bytes;
    size_t combine_bytes;
    int32_t layers_left; /* to be dispatched */
    sem_t dispatched;    /* the next layer's dispatch is begun, or there is none */
} micro;

struct group_pipeline {
    ep_group *group;
    ep_group_params params;
    layer_local *local;
    uint32_t rank;
    micro micros[2];
    uint16_t *blocking_out[2];
    size_t out_bytes;
};

static void check(ep_err err, const ep_error *error)
{
    if (err != EP_OK) {
        bench_fail(ep_err_name(err), error->text);
    }
}

/* ---- steps of a micro-batch ---- */

static void begin_dispatch(micro *m)
{
    ep_error error;
    check(ep_moe_dispatch_begin(m->pipeline->group, m->dispatch_plan, &m->dispatch,
                                m->dispatch_workspace, m->dispatch_bytes, NULL, NULL, &error),
          &error);
}

static void begin_combine(micro *m, ep_group_done_func done)
{
    ep_error error;
    check(ep_moe_combine_begin(m->pipeline->group, m->combine_plan, &m->combine,
                               m->combine_workspace, m->combine_bytes, done, m, &error),
          &error);
}

static void finish(ep_group_plan *plan)
{
    ep_error error;
    check(ep_group_plan_finish(plan, &error), &error);
}

static void run_experts(micro *m)
{
    const double end_us = bench_now_us() + GROUP_PIPELINE_DEVICE_US;
    uint32_t counts[RANKS_MAX] = {0};
    counts[m->pipeline->rank] = (uint32_t)((const int64_t *)m->dispatch.expert_token_nums.data)[0];
    ep_err err = layer_local_rows(m->pipeline->local, counts, m->dispatch.expand_x.data,
                                  m->combine.expand_x.data);
    check(err, &(ep_error){.text = "experts"});
    for (double left; (left = end_us - bench_now_us()) > 0;) {
        usleep((useconds_t)left + 1);
    }
}

/* ---- the forms ---- */

static void run_in_turn(group_pipeline *p, bool exchange, bool experts)
{
    for (int slot = 0; slot < SLOTS; slot++) {
        micro *m = &p->micros[slot % 2];
        if (exchange) {
            begin_dispatch(m);
            finish(m->dispatch_plan);
        }
        if (experts) {
            run_experts(m);
        }
        if (exchange) {
            begin_combine(m, NULL);
            finish(m->combine_plan);
        }
    }
}

void group_pipeline_exchange(group_pipeline *p)
{
    run_in_turn(p, true, false);
}

void group_pipeline_compute(group_pipeline *p)
{
    run_in_turn(p, false, true);
}

void group_pipeline_blocking(group_pipeline *p)
{
    run_in_turn(p, true, true);
    for (int i = 0; i < 2; i++) {
        memcpy(p->blocking_out[i], p->micros[i].combine.x_out.data, p->out_bytes);
    }
}

/* A layer of a micro-batch is done: its next one goes out while the other's experts run. */
static void on_combined(void *arg, ep_group_plan *plan)
{
    micro *m = arg;
    finish(plan);
    if (--m->layers_left > 0) {
        begin_dispatch(m);
    }
    sem_post(&m->dispatched);
}

static void await_dispatched(micro *m)
{
    while (sem_wait(&m->dispatched) != 0) {
    }
}

void group_pipeline_overlapped(group_pipeline *p)
{
    for (int i = 0; i < 2; i++) {
        micro *m = &p->micros[i];
        memset(m->combine.x_out.data, 0, p->out_bytes);
        m->layers_left = GROUP_PIPELINE_LAYERS;
        begin_dispatch(m);
        sem_post(&m->dispatched);
    }
    for (int slot = 0; slot < SLOTS; slot++) {
        micro *m = &p->micros[slot % 2];
        if (slot < 2) {
            await_dispatched(m);
        }
        finish(m->dispatch_plan);
        run_experts(m);
        if (slot > 0) { /* all ranks begin in one order: the other's next dispatch comes before */
            await_dispatched(&p->micros[1 - slot % 2]);
        }
        begin_combine(m, on_combined);
    }
    await_dispatched(&p->micros[(SLOTS - 1) % 2]);
    for (int i = 0; i < 2; i++) {
        if (memcmp(p->blocking_out[i], p->micros[i].combine.x_out.data, p->out_bytes) != 0) {
            bench_fail("the sums of the two forms differ", NULL);
        }
    }
}

/* ---- opening ---- */

static void join(group_pipeline *p, uint32_t ranks, const char *const *addresses, uint16_t port)
{
    ep_group_config config;
    ep_error error;
    char urls[RANKS_MAX][64];
    const char *list[RANKS_MAX];
    for (uint32_t r = 0; r < ranks; r++) {
        snprintf(urls[r], sizeof(urls[r]), "tcp://%s:%u", addresses[r], port);
        list[r] = urls[r];
    }
    ep_group_config_init(&config);
    config.name = "pipeline";
    config.world_size = ranks;
    config.rank = p->rank;
    config.urls = list;
    config.urls_count = ranks;
    config.insecure = true;
    config.deadline_us = 600000000;
    check(ep_group_create(&config, &p->group, &error), &error);
}

static void open_micro(group_pipeline *p, micro *m, uint32_t ranks, uint32_t hidden, uint16_t *x,
                       int32_t *ids, float *scales)
{
    const int64_t tokens = GROUP_PIPELINE_TOKENS;
    const int64_t rows = ranks * tokens;
    ep_error error;
    m->pipeline = p;
    sem_init(&m->dispatched, 0, 0);
    ep_moe_dispatch_args *d = &m->dispatch;
    ep_moe_dispatch_args_init(d);
    d->params = &p->params;
    d->x = ep_tensor_2d(x, EP_DTYPE_BF16, tokens, hidden);
    d->expert_ids = ep_tensor_2d(ids, EP_DTYPE_I32, tokens, TOP_K);
    d->expand_x = ep_tensor_2d(bench_room((size_t)rows * hidden * 2), EP_DTYPE_BF16, rows, hidden);
    d->assist_info_for_combine =
        ep_tensor_1d(bench_room((size_t)rows * 128 * 4), EP_DTYPE_I32, rows * 128);
    d->expert_token_nums = ep_tensor_1d(bench_room(8), EP_DTYPE_I64, 1);
    d->ep_recv_counts = ep_tensor_1d(bench_room(4 * (size_t)ranks), EP_DTYPE_I32, ranks);
    ep_moe_combine_args *c = &m->combine;
    ep_moe_combine_args_init(c);
    c->params = &p->params;
    c->expand_x = ep_tensor_2d(bench_room((size_t)rows * hidden * 2), EP_DTYPE_BF16, rows, hidden);
    c->expert_ids = d->expert_ids;
    c->assist_info_for_combine = d->assist_info_for_combine;
    c->ep_send_counts = d->ep_recv_counts;
    c->expert_scales = ep_tensor_2d(scales, EP_DTYPE_F32, tokens, TOP_K);
    c->x_out = ep_tensor_2d(bench_room(p->out_bytes), EP_DTYPE_BF16, tokens, hidden);
    check(ep_moe_dispatch_prepare(p->group, d, &m->dispatch_bytes, &m->dispatch_plan, &error),
          &error);
    check(ep_moe_combine_prepare(p->group, c, NULL, &m->combine_bytes, &m->combine_plan, &error),
          &error);
    m->dispatch_workspace = bench_room(m->dispatch_bytes);
    m->combine_workspace = bench_room(m->combine_bytes);
}

group_pipeline *group_pipeline_open(uint32_t rank, uint32_t ranks, const char *const *addresses,
                                    uint16_t port, layer_local *local, uint32_t hidden,
                                    const uint16_t *x, const int32_t *ids, const float *scales)
{
    group_pipeline *p = bench_room(sizeof(*p));
    p->rank = rank;
    p->local = local;
    p->out_bytes = (size_t)GROUP_PIPELINE_TOKENS * hidden * 2;
    join(p, ranks, addresses, port);
    ep_group_params_init(&p->params);
    p->params.moe_expert_num = ranks;
    for (size_t i = 0; i < 2; i++) {
        const size_t first = i * GROUP_PIPELINE_TOKENS;
        p->blocking_out[i] = bench_room(p->out_bytes);
        open_micro(p, &p->micros[i], ranks, hidden, (uint16_t *)(uintptr_t)(x + first * hidden),
                   (int32_t *)(uintptr_t)(ids + first * TOP_K),
                   (float *)(uintptr_t)(scales + first * TOP_K));
    }
    group_pipeline_blocking(p);
    return p;
}

void group_pipeline_close(group_pipeline *p)
{
    for (int i = 0; i < 2; i++) { /* memory goes with the program */
        ep_group_plan_destroy(p->micros[i].dispatch_plan);
        ep_group_plan_destroy(p->micros[i].combine_plan);
    }
    ep_group_destroy(p->group);
}
