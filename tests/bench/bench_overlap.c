/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Is communication hidden behind compute? Hosts are network namespaces with links of a set rate;
 * compute threads are pinned to CPU 1, everything else to CPU 0.
 *
 * One caller, one node: the rate is set so that the wire, idle otherwise, takes as long as compute.
 * Then the whole (gate, dispatch, experts, combine) against gate + max(pack + wire, compute) +
 * combine, each of which is measured alone, and against the same work done step after step. pack +
 * wire is a call to a model of the same shape whose experts are 1/64 as large, less the combine.
 *
 * Eight ranks, each with one expert and tokens of its own, top-2 of 8: against all-gather +
 * reduce-scatter over the same lane, kernels and links.
 *
 * The same ranks as a rank program of the group API, with two micro-batches: one thing after the
 * other against the exchange of one beside the experts of the other, where both take equally long.
 * Each rank has a device of its own there (bench/group_pipeline.h): on cores that ranks share, one
 * rank's experts would run beside another's exchange in the form without overlap too.
 *
 * The program forks itself into ranks (bench/rank_board.h), each of which does its part of the step
 * it is told.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/numeric.h"
#include "base/random.h"
#include "bench/bench_service.h"
#include "bench/group_pipeline.h"
#include "bench/layer_local.h"
#include "bench/rank_board.h"
#include "bench/rank_mesh.h"
#include "bench/shaped_net.h"
#include "moe/combine.h"
#include "support/checkpoint_fixture.h"

#define RANKS 8
#define HIDDEN 1024
#define INNER 512
#define INNER_SMALL (INNER / 64)
#define EXPERTS 8
#define TOP_K 2
#define TOKENS 4096     /* of the one caller */
#define RANK_TOKENS 512 /* of each of the eight */
#define ROUNDS 9
#define CHUNK_BYTES (256u << 10)
#define ROW_BYTES (HIDDEN * 2)
#define MESH_PORT 7400
#define GROUP_PORT 7500
/* The smallest capacity factor that is published for fixed buffers (1 million tokens); others are
 * larger. */
#define CAPACITY_FACTOR 1.32

typedef enum step_kind {
    STEP_GATE,
    STEP_CALL,    /* the whole, through the service; model: which */
    STEP_COMPUTE, /* the layer in one process */
    STEP_COMBINE,
    STEP_SERIAL,    /* one thing after the other */
    STEP_RANK_CALL, /* eight ranks: through the service */
    STEP_RANK_COMPUTE,
    STEP_RANK_GATHER,    /* eight ranks: all-gather, compute, reduce-scatter */
    STEP_GROUP_EXCHANGE, /* eight ranks with two micro-batches, as a rank program */
    STEP_GROUP_COMPUTE,
    STEP_GROUP_BLOCKING,
    STEP_GROUP_OVERLAPPED
} step_kind;

/* What the parent tells the ranks. */
typedef struct shared_notes {
    const char *model; /* a literal: of all processes */
    char single_url[64];
    char rank_urls[RANKS][64];
} shared_notes;

/* What a rank holds. */
typedef struct rank_state {
    uint32_t rank;
    rank_mesh *mesh;
    layer_local *local;
    layer_local *device; /* what the rank program computes */
    ep_client *single;
    ep_client *group;
    group_pipeline *pipeline;
    uint16_t *x;       /* [TOKENS,H] */
    float *logits;     /* [TOKENS,E] */
    int32_t *ids;      /* [TOKENS,K] */
    int32_t *own_ids;  /* [RANKS * RANK_TOKENS,K]: -1 where another rank has the expert */
    float *scales;     /* [TOKENS,K] */
    uint16_t *y;       /* [TOKENS,H] */
    uint16_t *y_local; /* the same */
    uint16_t *all;     /* [RANKS * RANK_TOKENS,H] */
    uint16_t *padded;  /* rows of the fixed buffers */
    const void **rows; /* [TOKENS * K] */
    float *scratch;
} rank_state;

static rank_board *board;
static shared_notes *notes;

/* ---- a rank ---- */

static ep_gate_config gate_config(void)
{
    return (ep_gate_config){.struct_bytes = sizeof(ep_gate_config),
                            .select = EP_GATE_LOGIT,
                            .weight = EP_GATE_SOFTMAX_SELECTED,
                            .experts = EXPERTS,
                            .top_k = TOP_K,
                            .scaling_factor = 1,
                            .groups = 1,
                            .groups_kept = 1};
}

static void run_gate(rank_state *r)
{
    ep_gate_config config = gate_config();
    ep_error error;
    if (ep_gate(&config, TOKENS, r->logits, r->ids, r->scales, &error) != EP_OK) {
        bench_fail("gate", error.text);
    }
}

/* Rank 0 draws for all: the tokens of rank i begin at i * RANK_TOKENS, in every rank's arrays. */
static void fill_inputs(rank_state *r)
{
    uint64_t seed = 11;
    r->x = bench_room((size_t)TOKENS * ROW_BYTES);
    r->logits = bench_room((size_t)TOKENS * EXPERTS * sizeof(float));
    r->ids = bench_room((size_t)TOKENS * TOP_K * sizeof(int32_t));
    r->own_ids = bench_room((size_t)TOKENS * TOP_K * sizeof(int32_t));
    r->scales = bench_room((size_t)TOKENS * TOP_K * sizeof(float));
    r->y = bench_room((size_t)TOKENS * ROW_BYTES);
    r->y_local = bench_room((size_t)TOKENS * ROW_BYTES);
    r->all = bench_room((size_t)TOKENS * ROW_BYTES);
    r->padded = bench_room((size_t)(TOKENS * TOP_K * CAPACITY_FACTOR + 1) * ROW_BYTES);
    r->rows = bench_room((size_t)TOKENS * TOP_K * sizeof(*r->rows));
    r->scratch = bench_room(ep_combine_scratch_floats(HIDDEN) * sizeof(float));
    bench_draw_rows(&seed, (size_t)TOKENS * HIDDEN, r->x);
    for (size_t i = 0; i < (size_t)TOKENS * EXPERTS; i++) {
        r->logits[i] = (float)(int32_t)ep_splitmix64(&seed) * 0x1p-30f;
    }
    run_gate(r);
    for (size_t i = 0; i < (size_t)TOKENS * TOP_K; i++) {
        r->own_ids[i] = r->ids[i] == (int32_t)r->rank ? r->ids[i] : -1;
        r->rows[i] = r->padded + i * HIDDEN;
    }
}

_Static_assert(RANKS *RANK_TOKENS == TOKENS, "one set of inputs serves all parts");
_Static_assert(2 * GROUP_PIPELINE_TOKENS <= RANK_TOKENS, "each rank's tokens serve the last part");

static ep_batch batch_of(const rank_state *r, const uint16_t *x, const int32_t *ids)
{
    const bench_tokens of = {TOKENS, TOP_K, HIDDEN, x, ids, r->scales};
    return bench_batch(&of);
}

static void run_local(rank_state *r, const uint16_t *x, const int32_t *ids)
{
    ep_batch batch = batch_of(r, x, ids);
    if (layer_local_run(r->local, &batch, r->y_local) != EP_OK) {
        bench_fail("local layer", NULL);
    }
}

static void run_combine(rank_state *r)
{
    ep_batch batch = batch_of(r, r->x, r->ids);
    ep_combine_out out = {.data = r->y_local, .token_stride_bytes = ROW_BYTES};
    ep_combine(&batch, layer_local_shape(r->local), r->rows, NULL, 0, TOKENS, r->scratch, &out);
}

static void in_chunks(ep_client_config *config)
{
    config->chunk_bytes_max = CHUNK_BYTES;
}

/* Gate, dispatch, experts and combine in one call. */
static void run_call(rank_state *r)
{
    const bench_tokens of = {.tokens = TOKENS, .hidden = HIDDEN, .x = r->x};
    ep_moe_args args = bench_args(&of);
    ep_moe_result result = {.struct_bytes = sizeof(result)};
    ep_gate_config gate = gate_config();
    args.model = notes->model;
    args.mode = EP_MOE_PREFILL;
    ep_tensor logits = ep_tensor_2d(r->logits, EP_DTYPE_F32, TOKENS, EXPERTS);
    ep_tensor out = ep_tensor_2d(r->y, EP_DTYPE_BF16, TOKENS, HIDDEN);
    if (ep_moe_forward_logits(r->single, &args, &gate, &logits, &out, &result) != EP_OK) {
        bench_fail("forward", result.error.text);
    }
}

static void run_rank_call(rank_state *r)
{
    size_t first = (size_t)r->rank * RANK_TOKENS;
    const bench_tokens of = {RANK_TOKENS,
                             TOP_K,
                             HIDDEN,
                             r->x + first * HIDDEN,
                             r->ids + first * TOP_K,
                             r->scales + first * TOP_K};
    ep_moe_args args = bench_args(&of);
    args.mode = EP_MOE_PREFILL;
    bench_call_us(r->group, &args, r->y + first * HIDDEN);
}

/* Every rank gets all tokens, computes its expert's share of each, and sends every rank the sums of
 * its tokens. */
static void run_rank_gather(rank_state *r)
{
    size_t bytes = (size_t)RANK_TOKENS * ROW_BYTES;
    size_t elements = (size_t)RANK_TOKENS * HIDDEN;
    for (uint32_t to = 0; to < RANKS; to++) {
        if (to != r->rank) {
            rank_mesh_post(r->mesh, to, r->x + r->rank * elements, bytes);
        }
    }
    for (uint32_t from = 0; from < RANKS; from++) {
        memcpy(r->all + from * elements,
               from == r->rank ? r->x + from * elements : rank_mesh_wait(r->mesh, from, bytes),
               bytes);
    }
    rank_mesh_flush(r->mesh);
    run_local(r, r->all, r->own_ids);
    for (uint32_t to = 0; to < RANKS; to++) {
        if (to != r->rank) {
            rank_mesh_post(r->mesh, to, r->y_local + to * elements, bytes);
        }
    }
    uint16_t *y = r->y + r->rank * elements;
    const uint16_t *parts[RANKS];
    for (uint32_t from = 0; from < RANKS; from++) {
        parts[from] =
            from == r->rank ? r->y_local + from * elements : rank_mesh_wait(r->mesh, from, bytes);
    }
    for (size_t i = 0; i < elements; i++) {
        float sum = 0;
        for (uint32_t from = 0; from < RANKS; from++) {
            sum += ep_bf16_to_f32(parts[from][i]);
        }
        y[i] = ep_f32_to_bf16(sum);
    }
    rank_mesh_flush(r->mesh);
}

/* Gate, send everything, wait, compute, send everything, wait, combine; buffers of fixed capacity
 * travel whole. */
static void run_serial(rank_state *r)
{
    size_t bytes = (size_t)(TOKENS * TOP_K * CAPACITY_FACTOR) * ROW_BYTES;
    if (r->rank == 0) {
        run_gate(r);
        for (size_t i = 0; i < (size_t)TOKENS * TOP_K; i++) {
            memcpy(r->padded + i * HIDDEN, r->x + i / TOP_K * HIDDEN, ROW_BYTES);
        }
        rank_mesh_post(r->mesh, 1, r->padded, bytes);
        rank_mesh_flush(r->mesh);
        rank_mesh_wait(r->mesh, 1, bytes);
        run_combine(r);
        rank_mesh_flush(r->mesh); /* what came has been used */
    } else {
        rank_mesh_wait(r->mesh, 0, bytes);
        run_local(r, r->x, r->ids);
        rank_mesh_post(r->mesh, 0, r->padded, bytes);
        rank_mesh_flush(r->mesh);
    }
}

static void do_step(rank_state *r, step_kind step)
{
    switch (step) {
    case STEP_GATE:
        if (r->rank == 0) {
            run_gate(r);
        }
        break;
    case STEP_CALL:
        if (r->rank == 0) {
            run_call(r);
        }
        break;
    case STEP_COMPUTE:
        if (r->rank == 1) {
            run_local(r, r->x, r->ids);
        }
        break;
    case STEP_COMBINE:
        if (r->rank == 0) {
            run_combine(r);
        }
        break;
    case STEP_SERIAL:
        if (r->rank <= 1) {
            run_serial(r);
        }
        break;
    case STEP_RANK_CALL:
        run_rank_call(r);
        break;
    case STEP_RANK_COMPUTE:
        run_local(r, r->x, r->own_ids);
        break;
    case STEP_RANK_GATHER:
        run_rank_gather(r);
        break;
    case STEP_GROUP_EXCHANGE:
        group_pipeline_exchange(r->pipeline);
        break;
    case STEP_GROUP_COMPUTE:
        group_pipeline_compute(r->pipeline);
        break;
    case STEP_GROUP_BLOCKING:
        group_pipeline_blocking(r->pipeline);
        break;
    case STEP_GROUP_OVERLAPPED:
        group_pipeline_overlapped(r->pipeline);
        break;
    }
}

static void rank_main(uint32_t rank, void *checkpoints)
{
    const char *const *models = checkpoints;
    static rank_state r;
    const char *addresses[RANKS];
    const char *urls[RANKS];
    const char *single = notes->single_url;
    ep_error error;
    r.rank = rank;
    if (!shaped_net_enter(rank)) {
        bench_fail("cannot enter the namespace", NULL);
    }
    for (uint32_t i = 0; i < RANKS; i++) {
        addresses[i] = shaped_net_address(i);
        urls[i] = notes->rank_urls[i];
    }
    fill_inputs(&r);
    if (layer_local_open(models[0], 0, 1, &r.local, &error) != EP_OK ||
        layer_local_open(models[1], 0, 1, &r.device, &error) != EP_OK) {
        bench_fail("local layer", error.text);
    }
    r.mesh = rank_mesh_open(rank, RANKS, addresses, MESH_PORT,
                            (size_t)(TOKENS * TOP_K * CAPACITY_FACTOR + 1) * ROW_BYTES);
    r.group = bench_client_open(urls, RANKS, in_chunks);
    if (rank == 0) {
        r.single = bench_client_open(&single, 1, in_chunks);
    }
    size_t first = (size_t)rank * RANK_TOKENS;
    r.pipeline =
        group_pipeline_open(rank, RANKS, addresses, GROUP_PORT, r.device, HIDDEN,
                            r.x + first * HIDDEN, r.ids + first * TOP_K, r.scales + first * TOP_K);
    shaped_net_pin(getpid());
    for (int step; (step = rank_board_next(board)) != RANK_BOARD_END; rank_board_done(board)) {
        do_step(&r, (step_kind)step);
    }
    rank_board_done(board);
    rank_mesh_close(r.mesh);
    group_pipeline_close(r.pipeline);
    ep_client_destroy(r.group);
    ep_client_destroy(r.single);
    layer_local_close(r.local);
    layer_local_close(r.device);
}

/* ---- the parent ---- */

static double timed(step_kind step, const char *model)
{
    notes->model = model;
    return rank_board_time(board, step);
}

static double median_of(step_kind step, const char *model, int rounds)
{
    double us[ROUNDS];
    timed(step, model);
    for (int i = 0; i < rounds; i++) {
        us[i] = timed(step, model);
    }
    return bench_quantile(us, (size_t)rounds, 0.5);
}

/* With both models. */
static void start_node(ep_test_process *process, const char *dir, uint32_t host,
                       const char *experts, const char *const checkpoints[2], char out_url[64])
{
    char name[32], both[EP_FIXTURE_PATH_BYTES + 64];
    snprintf(name, sizeof(name), "node%u-%s", host, experts);
    snprintf(both, sizeof(both), "%s\n  - name: wire\n    path: %s\n    experts: %s", experts,
             checkpoints[1], experts);
    bench_node_start(&(bench_node){.name = name,
                                   .checkpoint = checkpoints[0],
                                   .experts = both,
                                   .keys = "insecure: true\nthreads: 1\ntracing: off\nshm: off\n"
                                           "inflight_tokens: 65536\n",
                                   .address = shaped_net_address(host),
                                   .netns = shaped_net_name(host)},
                     dir, process);
    snprintf(out_url, 64, "%.63s", process->rpc_url);
}

static void write_checkpoint(uint32_t inner, char out_path[EP_FIXTURE_PATH_BYTES])
{
    const ep_fixture_config fixture = ep_fixture_layer(HIDDEN, inner, EXPERTS, TOP_K);
    ep_fixture_new(&fixture, out_path);
}

/* Against what the terms allow. */
static void add_limited(bench_report *report, double value, double limit, double ratio,
                        const char *name)
{
    bench_row row = bench_value(value, "us", BENCH_LOWER, 1.10);
    row.limit = limit;
    row.ratio = ratio;
    bench_report_add(report, &row, "%s", name);
}

/* Sets the rate, at first bytes in compute's time, so that what the idle wire takes (step, less
 * less_us) is as long as compute, within 5 %; returns it. */
static double balance_wire(double bytes, double compute_us, step_kind step, double less_us)
{
    double rate = bytes / compute_us * 1e6;
    double slow = 0,
           fast = 0; /* rates on either side; what a burst lets through makes steps too long */
    double wire_us = 0;
    for (int i = 0; i < 10; i++) {
        if (!shaped_net_set_rate(rate)) {
            bench_fail("no traffic shaping", NULL);
        }
        wire_us = median_of(step, "wire", 3) - less_us;
        if (fabs(wire_us / compute_us - 1) <= 0.05) {
            break;
        }
        *(wire_us > compute_us ? &slow : &fast) = rate;
        rate = slow > 0 && fast > 0 ? sqrt(slow * fast) : rate * wire_us / compute_us;
    }
    return wire_us;
}

static void part_one_caller(bench_report *report)
{
    double ratio[ROUNDS], serial_ratio[ROUNDS], reached[ROUNDS], totals[ROUNDS], serials[ROUNDS],
        expected[ROUNDS];
    shaped_net_set_rate(0);
    double gate_us = median_of(STEP_GATE, "", 5);
    double combine_us = median_of(STEP_COMBINE, "", 5);
    double compute_us = median_of(STEP_COMPUTE, "", 5) - combine_us;
    double wire_us =
        balance_wire((double)TOKENS * TOP_K * ROW_BYTES, compute_us, STEP_CALL, combine_us);
    for (int i = 0; i < ROUNDS; i++) {
        double compute = timed(STEP_COMPUTE, "") - combine_us;
        double wire = timed(STEP_CALL, "wire") - combine_us;
        totals[i] = timed(STEP_CALL, "bench");
        serials[i] = timed(STEP_SERIAL, "");
        expected[i] = gate_us + (wire > compute ? wire : compute) + combine_us;
        ratio[i] = totals[i] / expected[i];
        double wire_padded = serials[i] - gate_us - compute - combine_us;
        double allowed = (gate_us + wire_padded + compute + combine_us) / expected[i];
        serial_ratio[i] = serials[i] / totals[i];
        reached[i] = serial_ratio[i] / allowed;
    }
    bench_report_value(report, gate_us, "us", BENCH_LOWER, NAN, "gate alone");
    bench_report_value(report, wire_us, "us", BENCH_LOWER, NAN, "pack and wire alone, idle");
    bench_report_value(report, compute_us, "us", BENCH_LOWER, NAN, "compute alone, one core");
    bench_report_value(report, combine_us, "us", BENCH_LOWER, NAN, "combine alone");
    add_limited(report, bench_quantile(totals, ROUNDS, 0.5), bench_quantile(expected, ROUNDS, 0.5),
                bench_quantile(ratio, ROUNDS, 0.5),
                "whole call against gate + max(pack + wire, compute) + combine");
    bench_report_rival(report, bench_quantile(serials, ROUNDS, 0.5), "us",
                       bench_quantile(totals, ROUNDS, 0.5),
                       bench_quantile(serial_ratio, ROUNDS, 0.5), BENCH_HIGHER, NAN,
                       "step after step, fixed buffers: times slower");
    bench_report_value(report, bench_quantile(reached, ROUNDS, 0.5), "", BENCH_HIGHER, 0.90,
                       "share reached of the largest gain the terms allow");
}

static void part_ranks(bench_report *report)
{
    double ratio[ROUNDS], ours[ROUNDS], theirs[ROUNDS];
    shaped_net_set_rate(0);
    double compute_us = median_of(STEP_RANK_COMPUTE, "", 3);
    /* Out of a rank: each of its rows to 2 of 8 ranks, itself not counted, and as many rows of
     * others back. */
    double bytes = 2.0 * RANK_TOKENS * TOP_K * (RANKS - 1) / RANKS * ROW_BYTES;
    shaped_net_set_rate(bytes / compute_us * 1e6);
    timed(STEP_RANK_CALL, "");
    timed(STEP_RANK_GATHER, "");
    for (int i = 0; i < ROUNDS; i++) {
        ours[i] = timed(STEP_RANK_CALL, "");
        theirs[i] = timed(STEP_RANK_GATHER, "");
        ratio[i] = theirs[i] / ours[i];
    }
    bench_report_value(report, compute_us, "us", BENCH_LOWER, NAN,
                       "eight ranks: compute alone, one core for all");
    bench_report_rival(report, bench_quantile(ours, ROUNDS, 0.5), "us",
                       bench_quantile(theirs, ROUNDS, 0.5), bench_quantile(ratio, ROUNDS, 0.5),
                       BENCH_HIGHER, 1.71,
                       "eight ranks, top-2 of 8: all-gather + reduce-scatter, times slower");
}

static void part_group(bench_report *report)
{
    double gain[ROUNDS], ratio[ROUNDS], totals[ROUNDS], larger[ROUNDS], blocking[ROUNDS];
    shaped_net_set_rate(0);
    double compute_us = median_of(STEP_GROUP_COMPUTE, "", 3);
    /* rows out of a rank, and as many of others back */
    double bytes = 2.0 * 2 * GROUP_PIPELINE_LAYERS * GROUP_PIPELINE_TOKENS * TOP_K * (RANKS - 1) /
                   RANKS * ROW_BYTES;
    double exchange_us = balance_wire(bytes, compute_us, STEP_GROUP_EXCHANGE, 0);
    for (int i = 0; i < ROUNDS; i++) {
        double compute = timed(STEP_GROUP_COMPUTE, "");
        double exchange = timed(STEP_GROUP_EXCHANGE, "");
        blocking[i] = timed(STEP_GROUP_BLOCKING, "");
        totals[i] = timed(STEP_GROUP_OVERLAPPED, "");
        larger[i] = exchange > compute ? exchange : compute;
        gain[i] = blocking[i] / totals[i];
        ratio[i] = totals[i] / larger[i];
    }
    bench_report_value(report, compute_us, "us", BENCH_LOWER, NAN,
                       "group, two micro-batches: compute alone, a device for each rank");
    bench_report_value(report, exchange_us, "us", BENCH_LOWER, NAN,
                       "group, two micro-batches: exchange alone");
    bench_report_rival(report, bench_quantile(totals, ROUNDS, 0.5), "us",
                       bench_quantile(blocking, ROUNDS, 0.5), bench_quantile(gain, ROUNDS, 0.5),
                       BENCH_HIGHER, 1.71,
                       "group, two micro-batches: blocking, times slower than begun and finished");
    add_limited(report, bench_quantile(totals, ROUNDS, 0.5), bench_quantile(larger, ROUNDS, 0.5),
                bench_quantile(ratio, ROUNDS, 0.5),
                "group, two micro-batches: against max(exchange, compute)");
}

int main(int argc, char **argv)
{
    char dir[EP_TEST_PATH_BYTES], large[EP_FIXTURE_PATH_BYTES], small[EP_FIXTURE_PATH_BYTES];
    ep_test_process nodes[RANKS + 1] = {0};
    const char *const checkpoints[2] = {large, small};
    if (sysconf(_SC_NPROCESSORS_ONLN) < 2 || !shaped_net_create(RANKS)) {
        bench_fail("needs two CPUs and network namespaces", NULL);
    }
    if (!ep_test_dir_create(dir)) {
        bench_fail("directory", NULL);
    }
    write_checkpoint(INNER, large);
    write_checkpoint(INNER_SMALL, small);
    notes = rank_board_memory(sizeof(*notes));
    board = rank_board_create(RANKS);
    for (uint32_t n = 0; n < RANKS; n++) {
        char experts[16];
        snprintf(experts, sizeof(experts), "%u-%u", n, n);
        start_node(&nodes[n], dir, n, experts, checkpoints, notes->rank_urls[n]);
    }
    start_node(&nodes[RANKS], dir, 1, "0-7", checkpoints, notes->single_url);
    rank_board_fork(board, rank_main, (void *)(uintptr_t)checkpoints);
    for (uint32_t n = 0; n <= RANKS; n++) {
        shaped_net_pin(nodes[n].pid);
    }
    bench_report *report = bench_report_create(
        "Overlap: H = 1024, I = 512, top-2 of 8, bf16; compute on one core, all else on the other");
    /* of "caller ranks group"; for those who work on one */
    const char *parts = getenv("EP_BENCH_OVERLAP");
    if (parts == NULL || strstr(parts, "caller") != NULL) {
        part_one_caller(report);
    }
    if (parts == NULL || strstr(parts, "ranks") != NULL) {
        part_ranks(report);
    }
    if (parts == NULL || strstr(parts, "group") != NULL) {
        part_group(report);
    }
    rank_board_end(board);
    for (uint32_t n = 0; n <= RANKS; n++) {
        ep_test_process_destroy(&nodes[n]);
    }
    ep_fixture_remove(large);
    ep_fixture_remove(small);
    ep_test_dir_remove(dir);
    return bench_report_finish(report, argc > 1 ? argv[1] : NULL);
}
