/* SPDX-License-Identifier: Apache-2.0 */
/*
 * group_ranks WORLD: that many ranks as processes of this machine, each with 2 experts and two
 * micro-batches of 8 tokens. Rows go to their experts and come back; the rows of one micro-batch
 * travel while the experts work on the other. Expert e multiplies by e + 1, so that each rank can
 * tell whether its sums are right.
 *
 *     cc group_ranks.c $(pkg-config --cflags --libs expertd) -o group_ranks && ./group_ranks 4
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <expertd/group.h>

enum { T = 8, K = 2, H = 64, L = 2, RANKS_MAX = 64, LAYERS = 3 };

/* What a micro-batch needs of its own: plans, workspaces and tensors. */
typedef struct micro_batch {
    ep_moe_dispatch_args dispatch;
    ep_moe_combine_args combine;
    ep_group_plan *plans[2];
    void *workspace[2];
    size_t bytes[2];
    float x[T * H], y[T * H], weights[T * K], rows[RANKS_MAX * T * K * H];
    int32_t ids[T * K], counts[RANKS_MAX * L], assist[RANKS_MAX * T * K * 128];
    int64_t nums[L];
} micro_batch;

static void check(ep_err err, const ep_error *error)
{
    if (err != EP_OK) {
        fprintf(stderr, "%s: %s\n", ep_err_name(err), error->text);
        exit(1);
    }
}

/* Rank 0 listens on any free port and tells the others through a pipe; a launcher would use its own
 * means. */
static void tell_url(void *arg, const char *url)
{
    int world = ((int *)arg)[0];
    char text[128] = "";
    strncat(text, url, sizeof(text) - 1);
    for (int r = 1; r < world; r++) {
        if (write(((int *)arg)[1], text, sizeof(text)) != (ssize_t)sizeof(text)) {
            exit(1);
        }
    }
}

static ep_group *join(int rank, int world, const int pipe_ends[2])
{
    ep_group_config config;
    ep_group *group;
    ep_error error;
    char url[128] = "tcp://127.0.0.1:0";
    int told[2] = {world, pipe_ends[1]};
    if (rank > 0 && read(pipe_ends[0], url, sizeof(url)) != (ssize_t)sizeof(url)) {
        exit(1);
    }
    const char *urls[] = {url};
    ep_group_config_init(&config);
    config.name = "example";
    config.world_size = (uint32_t)world;
    config.rank = (uint32_t)rank;
    config.urls = urls; /* rank 0's alone: the ranks meet there */
    config.urls_count = 1;
    config.listen_url = "tcp://127.0.0.1:0";
    config.on_listening = rank == 0 ? tell_url : NULL;
    config.on_listening_arg = told;
    check(ep_group_create(&config, &group, &error), &error);
    return group;
}

static void fill(micro_batch *m, int rank, int world, int number)
{
    for (int i = 0; i < T * H; i++) {
        m->x[i] = (float)(i % 13 + rank + number);
    }
    for (int t = 0; t < T; t++) {
        for (int k = 0; k < K; k++) {
            m->ids[t * K + k] = (rank + number + t + k) % (world * L);
            m->weights[t * K + k] = 0.5f;
        }
    }
}

/* Once: tensors, checks and plans. */
static void prepare(micro_batch *m, ep_group *group, const ep_group_params *params)
{
    int64_t world = ep_group_world_size(group);
    int64_t rows_max = world * T * K; /* A = T * W * min(L, K) */
    ep_error error;
    ep_moe_dispatch_args *dispatch = &m->dispatch;
    ep_moe_dispatch_args_init(dispatch);
    dispatch->params = params;
    dispatch->x = ep_tensor_2d(m->x, EP_DTYPE_F32, T, H);
    dispatch->expert_ids = ep_tensor_2d(m->ids, EP_DTYPE_I32, T, K);
    dispatch->expand_x = ep_tensor_2d(m->rows, EP_DTYPE_F32, rows_max, H);
    dispatch->assist_info_for_combine = ep_tensor_1d(m->assist, EP_DTYPE_I32, rows_max * 128);
    dispatch->expert_token_nums = ep_tensor_1d(m->nums, EP_DTYPE_I64, L);
    dispatch->ep_recv_counts = ep_tensor_1d(m->counts, EP_DTYPE_I32, world * L);

    ep_moe_combine_args *combine = &m->combine;
    ep_moe_combine_args_init(combine);
    combine->params = params;
    combine->expand_x = dispatch->expand_x; /* the experts work in place */
    combine->expert_ids = dispatch->expert_ids;
    combine->assist_info_for_combine = dispatch->assist_info_for_combine;
    combine->ep_send_counts = dispatch->ep_recv_counts;
    combine->expert_scales = ep_tensor_2d(m->weights, EP_DTYPE_F32, T, K);
    combine->x_out = ep_tensor_2d(m->y, EP_DTYPE_F32, T, H);

    check(ep_moe_dispatch_prepare(group, dispatch, &m->bytes[0], &m->plans[0], &error), &error);
    check(ep_moe_combine_prepare(group, combine, NULL, &m->bytes[1], &m->plans[1], &error), &error);
    for (int i = 0; i < 2; i++) {
        m->workspace[i] = aligned_alloc(64, (m->bytes[i] + 63) / 64 * 64);
    }
}

/* ---- as often as wanted ---- */

static void begin_dispatch(micro_batch *m, ep_group *group)
{
    ep_error error;
    check(ep_moe_dispatch_begin(group, m->plans[0], &m->dispatch, m->workspace[0], m->bytes[0],
                                NULL, NULL, &error),
          &error);
}

static void begin_combine(micro_batch *m, ep_group *group)
{
    ep_error error;
    check(ep_moe_combine_begin(group, m->plans[1], &m->combine, m->workspace[1], m->bytes[1], NULL,
                               NULL, &error),
          &error);
}

static void finish(ep_group_plan *plan)
{
    ep_error error;
    check(ep_group_plan_finish(plan, &error), &error);
}

static void run_experts(micro_batch *m, int rank)
{
    for (int64_t e = 0, row = 0; e < L; e++) { /* rows lie by local expert */
        for (int64_t end = row + m->nums[e]; row < end; row++) {
            for (int h = 0; h < H; h++) {
                m->rows[row * H + h] *= (float)(rank * L + e + 1);
            }
        }
    }
}

/* Every rank begins the operations in this order. */
static void run_layers(micro_batch m[2], ep_group *group, int rank)
{
    begin_dispatch(&m[0], group);
    for (int layer = 0; layer < LAYERS; layer++) {
        begin_dispatch(&m[1], group);
        finish(m[0].plans[0]);
        run_experts(&m[0], rank); /* meanwhile the rows of m[1] travel */
        begin_combine(&m[0], group);
        finish(m[1].plans[0]);
        run_experts(&m[1], rank); /* and the results of m[0] */
        begin_combine(&m[1], group);
        finish(m[0].plans[1]); /* m[0].y: here a model goes on with its attention */
        if (layer + 1 < LAYERS) {
            begin_dispatch(&m[0], group);
        }
        finish(m[1].plans[1]);
    }
}

static int count_wrong(const micro_batch *m)
{
    int wrong = 0;
    for (int i = 0; i < T * H; i++) {
        const int32_t *id = m->ids + i / H * K;
        wrong += m->y[i] !=
                 0.5f * (m->x[i] * (float)(id[0] + 1)) + 0.5f * (m->x[i] * (float)(id[1] + 1));
    }
    return wrong;
}

static int run_rank(int rank, int world, const int pipe_ends[2])
{
    static micro_batch m[2];
    ep_group_params params; /* what both operators and all ranks have in common */
    int wrong = 0;
    ep_group *group = join(rank, world, pipe_ends);
    ep_group_params_init(&params);
    params.moe_expert_num = world * L;
    for (int b = 0; b < 2; b++) {
        fill(&m[b], rank, world, b);
        prepare(&m[b], group, &params);
    }
    run_layers(m, group, rank);
    for (int b = 0; b < 2; b++) {
        wrong += count_wrong(&m[b]);
        for (int i = 0; i < 2; i++) {
            ep_group_plan_destroy(m[b].plans[i]);
            free(m[b].workspace[i]);
        }
    }
    printf("rank %d of %d: %d of %d elements wrong\n", rank, world, wrong, 2 * T * H);
    ep_group_destroy(group);
    return wrong != 0;
}

int main(int argc, char **argv)
{
    int world = argc > 1 ? atoi(argv[1]) : 4;
    int pipe_ends[2];
    int failed = 0;
    if (world < 1 || world > RANKS_MAX || pipe(pipe_ends) != 0) {
        fprintf(stderr, "WORLD: 1..%d\n", RANKS_MAX);
        return 2;
    }
    /* each child makes its own group: groups do not survive a fork */
    for (int rank = 0; rank < world; rank++) {
        if (fork() == 0) {
            return run_rank(rank, world, pipe_ends);
        }
    }
    for (int rank = 0; rank < world; rank++) {
        int status;
        wait(&status);
        failed |= status != 0;
    }
    return failed;
}
