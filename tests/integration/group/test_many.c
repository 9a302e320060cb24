/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Many ranks, up to the most a group may have, as threads: one expert and one token each, rows of
 * 16 elements. Each sum is right, and memory stays within a bound per pair of ranks.
 *
 * usage: test_many RANKS
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rank_threads.h"
#include "support/alloc_count.h"

#define H 16
#define K 4
/* Of a pair, both sides together: peer, link, connection, a frame each way. What one rank has for
 * itself is in it from a few dozen ranks on. */
#define PAIR_KIB_MAX 40

typedef struct world {
    uint32_t ranks;
} world;

static long resident_kib(void)
{
    long kib = 0;
    char line[200];
    FILE *file = fopen("/proc/self/status", "r");
    while (file != NULL && fgets(line, sizeof(line), file) != NULL) {
        if (sscanf(line, "VmHWM: %ld kB", &kib) == 1) {
            break;
        }
    }
    if (file != NULL) {
        fclose(file);
    }
    return kib;
}

typedef struct rank_data {
    float x[H], out[H], weights[K];
    float (*expand)[H];
    int32_t ids[K], *counts, *assist;
    int64_t nums[1];
} rank_data;

static float x_of(uint32_t rank, int h)
{
    return (float)((rank * 31 + (uint32_t)h * 7) % 97) - 48.0f;
}

/* Of a token of rank: the k-th of its experts. */
static uint32_t expert_of(const world *w, uint32_t rank, uint32_t k)
{
    return (rank + k * (w->ranks / K)) % w->ranks;
}

static void fill(const world *w, uint32_t rank, rank_data *d)
{
    for (int h = 0; h < H; h++) {
        d->x[h] = x_of(rank, h);
    }
    for (uint32_t k = 0; k < K; k++) {
        d->ids[k] = (int32_t)expert_of(w, rank, k);
        d->weights[k] = (float)(k + 1);
    }
}

static bool check(const world *w, uint32_t rank, const rank_data *d)
{
    for (int h = 0; h < H; h++) {
        float sum = 0;
        for (uint32_t k = 0; k < K; k++) { /* expert e adds e to its rows */
            sum += (float)(k + 1) * (x_of(rank, h) + (float)expert_of(w, rank, k));
        }
        if (d->out[h] != sum) {
            fprintf(stderr, "rank %" PRIu32 ", element %d: %g, should be %g\n", rank, h,
                    (double)d->out[h], (double)sum);
            return false;
        }
    }
    return true;
}

static ep_err dispatch(const world *w, ep_group *group, const ep_group_params *params, rank_data *d,
                       ep_error *error)
{
    size_t bytes = 0;
    ep_group_plan *plan = NULL;
    ep_moe_dispatch_args args;
    ep_moe_dispatch_args_init(&args);
    args.params = params;
    args.x = ep_tensor_2d(d->x, EP_DTYPE_F32, 1, H);
    args.expert_ids = ep_tensor_2d(d->ids, EP_DTYPE_I32, 1, K);
    args.expand_x = ep_tensor_2d(d->expand, EP_DTYPE_F32, K, H);
    args.assist_info_for_combine = ep_tensor_1d(d->assist, EP_DTYPE_I32, 128 * K);
    args.expert_token_nums = ep_tensor_1d(d->nums, EP_DTYPE_I64, 1);
    args.ep_recv_counts = ep_tensor_1d(d->counts, EP_DTYPE_I32, w->ranks);
    ep_err err = ep_moe_dispatch_prepare(group, &args, &bytes, &plan, error);
    void *workspace = aligned_alloc(64, bytes + 64 - bytes % 64);
    if (err == EP_OK) {
        err = ep_moe_dispatch(group, plan, &args, workspace, bytes, error);
    }
    ep_group_plan_destroy(plan);
    free(workspace);
    return err;
}

static ep_err combine(const world *w, ep_group *group, const ep_group_params *params, rank_data *d,
                      ep_error *error)
{
    size_t bytes = 0;
    ep_group_plan *plan = NULL;
    ep_moe_combine_args args;
    ep_moe_combine_args_init(&args);
    args.params = params;
    args.expand_x = ep_tensor_2d(d->expand, EP_DTYPE_F32, K, H);
    args.expert_ids = ep_tensor_2d(d->ids, EP_DTYPE_I32, 1, K);
    args.expert_scales = ep_tensor_2d(d->weights, EP_DTYPE_F32, 1, K);
    args.assist_info_for_combine = ep_tensor_1d(d->assist, EP_DTYPE_I32, 128 * K);
    args.ep_send_counts = ep_tensor_1d(d->counts, EP_DTYPE_I32, w->ranks);
    args.x_out = ep_tensor_2d(d->out, EP_DTYPE_F32, 1, H);
    ep_err err = ep_moe_combine_prepare(group, &args, NULL, &bytes, &plan, error);
    void *workspace = aligned_alloc(64, bytes + 64 - bytes % 64);
    if (err == EP_OK) {
        err = ep_moe_combine(group, plan, &args, workspace, bytes, error);
    }
    ep_group_plan_destroy(plan);
    free(workspace);
    return err;
}

static bool run_rank(void *arg, uint32_t rank, ep_group *group)
{
    world *w = arg;
    ep_error error = {.text = ""};
    ep_group_params params;
    rank_data d = {.expand = calloc(K, sizeof(*d.expand)),
                   .counts = calloc(w->ranks, sizeof(int32_t)),
                   .assist = calloc(128 * K, sizeof(int32_t))};
    ep_group_params_init(&params);
    params.moe_expert_num = w->ranks;
    fill(w, rank, &d);
    bool good = true;
    for (int round = 0; round < 2 && good; round++) {
        good = dispatch(w, group, &params, &d, &error) == EP_OK && d.nums[0] == K;
        for (int64_t r = 0; r < K && good; r++) {
            for (int h = 0; h < H; h++) {
                d.expand[r][h] += (float)rank;
            }
        }
        good = good && combine(w, group, &params, &d, &error) == EP_OK && check(w, rank, &d);
    }
    if (!good) {
        fprintf(stderr, "rank %" PRIu32 ": %s\n", rank, error.text);
    }
    free(d.expand);
    free(d.counts);
    free(d.assist);
    return good;
}

int main(int argc, char **argv)
{
    world w = {.ranks = argc > 1 ? (uint32_t)atoi(argv[1]) : 64};
    const bool good = rank_threads_play("loopback", NULL, w.ranks, 400000000, run_rank, &w);
    const long pairs = (long)w.ranks * (w.ranks - 1) / 2;
    const long kib = resident_kib();
    printf("%" PRIu32 " ranks: %ld MiB at most, %.1f KiB per pair\n", w.ranks, kib / 1024,
           (double)kib / (double)pairs);
    /* a sanitizer keeps memory of its own */
    return !good || (EP_TEST_ALLOC_COUNTED && kib / pairs > PAIR_KIB_MAX) ? 1 : 0;
}
