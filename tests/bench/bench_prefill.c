/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Prefill of eight ranks at once, 4096 tokens each: how much memory the exchange needs at its peak,
 * and tokens per second, in three forms over the same lane and kernels.
 *
 *   service     a rank is a caller and a node with an eighth of the experts; the service's own
 *               windows and chunks
 *   all-gather  every rank gets all tokens, computes its experts' share of each, and sends every
 *               rank the sums of its tokens
 *   fixed       all-to-all with buffers of fixed capacity: rows padded to factor * T * K / ranks
 *               per destination, sent whole, and results back the same way; the factor by the total
 *               sequence length from the published table
 *
 * One counter for all: the most that buffer pools (base/buffer.h) had lent at once. Of the service
 * it is the sum of the caller's peak and the node's, although they need not come at the same
 * moment. The other forms take every exchange buffer from such a pool, receive in place, reuse the
 * send buffer for results, and are not charged for frames on their way through the lane.
 *
 * Then one rank alone calls with 2048 tokens and on_tokens: when it is told of the first ones, as a
 * share of the whole call, and what on_tokens adds to a call without it.
 *
 * The program forks itself into ranks (bench/rank_board.h), each of which does the form it is told.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/random.h"
#include "base/buffer.h"
#include "base/numeric.h"
#include "bench/bench_service.h"
#include "bench/layer_local.h"
#include "bench/rank_board.h"
#include "bench/rank_mesh.h"
#include "moe/combine.h"
#include "support/checkpoint_fixture.h"

#define RANKS 8
#define HIDDEN 1024
#define INNER 128
#define EXPERTS 64
#define RANK_EXPERTS (EXPERTS / RANKS)
#define TOP_K 8
#define TOKENS 4096 /* of each rank */
#define SLOTS (TOKENS * TOP_K)
#define ROUNDS 3
#define STREAM_TOKENS 2048
#define STREAM_ROUNDS 21
#define STREAM_BAR 0.25
#define ROW_BYTES ((size_t)HIDDEN * 2)
#define TOKEN_BYTES (TOKENS * ROW_BYTES)
#define KEEP_BYTES ((size_t)1 << 30)
#define MESH_PORT 7420
#define BAR 0.5

typedef enum form { FORM_SERVICE, FORM_GATHER, FORM_FIXED, FORM_COUNT } form;

#define STEP_STREAM FORM_COUNT /* behind the forms */

static const char *const form_names[FORM_COUNT] = {"service", "all-gather + reduce-scatter",
                                                   "fixed-capacity all-to-all"};

/* alltoall_ep_buffer_scale_factors: the first entry whose length is not above the total. */
static const struct {
    uint32_t tokens;
    double factor;
} capacity_factors[] = {{1048576, 1.32}, {524288, 1.4}, {262144, 1.53}, {131072, 1.8},
                        {32768, 3.0},    {8192, 5.2},   {0, 8.0}};

/* What ranks and parent tell each other. */
typedef struct shared_notes {
    char urls[RANKS][64];
    uint64_t peak_bytes[FORM_COUNT][RANKS]; /* of the service: the caller's */
    /* largest, against the layer in one process; 0: the same bits */
    double error[FORM_COUNT][RANKS];
    double first_us[STREAM_ROUNDS]; /* of the rank that streams: until its first tokens */
    double streamed_us[STREAM_ROUNDS];
    double plain_us[STREAM_ROUNDS]; /* the same call without on_tokens */
    uint32_t stream_ranges;         /* of the last call */
    bool stream_is_exact;           /* all of them: the same bits as the layer in one process */
} shared_notes;

typedef struct rank_state {
    uint32_t rank;
    rank_mesh *mesh;
    layer_local *local;
    ep_client *client;
    ep_buffer_pool *pools[FORM_COUNT]; /* not the service's: the client has its own */
    uint16_t *x;                       /* [TOKENS,H] */
    int32_t *ids;                      /* [TOKENS,K] */
    float *scales;                     /* [TOKENS,K] */
    int32_t *all_ids;   /* [RANKS * TOKENS,K]: -1 where another rank has the expert */
    float *all_scales;  /* [RANKS * TOKENS,K] */
    uint16_t *expected; /* [TOKENS,H] */
    uint16_t *y;        /* [TOKENS,H] */
    const void **rows;  /* [SLOTS] */
    float *ones;        /* [capacity] */
    float *scratch;
} rank_state;

static rank_board *board;
static shared_notes *notes;

/* Rows of a fixed buffer for one destination. */
static uint32_t capacity(void)
{
    size_t i = 0;
    while (capacity_factors[i].tokens > RANKS * TOKENS) {
        i++;
    }
    return (uint32_t)ceil(capacity_factors[i].factor * TOKENS * TOP_K / RANKS);
}

/* ---- a rank ---- */

static ep_batch batch_of(uint32_t tokens, uint32_t top_k, const uint16_t *x, const int32_t *ids,
                         const float *scales)
{
    const bench_tokens of = {tokens, top_k, HIDDEN, x, ids, scales};
    return bench_batch(&of);
}

static void run_local(rank_state *r, const ep_batch *batch, uint16_t *out)
{
    if (layer_local_run(r->local, batch, out) != EP_OK) {
        bench_fail("local layer", NULL);
    }
}

static void fill_inputs(rank_state *r)
{
    uint64_t seed = 11 + r->rank;
    r->x = bench_room(TOKEN_BYTES);
    r->y = bench_room(TOKEN_BYTES);
    r->expected = bench_room(TOKEN_BYTES);
    r->all_ids = bench_room((size_t)RANKS * SLOTS * sizeof(*r->all_ids));
    r->all_scales = bench_room((size_t)RANKS * SLOTS * sizeof(*r->all_scales));
    r->ids = bench_room((size_t)SLOTS * sizeof(*r->ids));
    r->scales = r->all_scales + (size_t)r->rank * SLOTS;
    r->rows = bench_room((size_t)SLOTS * sizeof(*r->rows));
    r->ones = bench_room(capacity() * sizeof(float));
    r->scratch = bench_room(ep_combine_scratch_floats(HIDDEN) * sizeof(float));
    bench_draw_rows(&seed, (size_t)TOKENS * HIDDEN, r->x);
    for (uint32_t i = 0; i < capacity(); i++) {
        r->ones[i] = 1;
    }
    for (uint32_t from = 0; from < RANKS; from++) {
        seed = 100 + from;
        bench_draw_routing(&seed, TOKENS, TOP_K, EXPERTS, r->all_ids + (size_t)from * SLOTS,
                           r->all_scales + (size_t)from * SLOTS);
    }
    for (size_t i = 0; i < (size_t)RANKS * SLOTS; i++) { /* unlike, or swapped ones would not show
                                                          */
        r->all_scales[i] = (float)(ep_splitmix64(&seed) % 1000 + 1) / 1000;
    }
    memcpy(r->ids, r->all_ids + (size_t)r->rank * SLOTS, (size_t)SLOTS * sizeof(*r->ids));
    for (size_t i = 0; i < (size_t)RANKS * SLOTS; i++) {
        r->all_ids[i] = r->all_ids[i] / RANK_EXPERTS == (int32_t)r->rank ? r->all_ids[i] : -1;
    }
    ep_batch batch = batch_of(TOKENS, TOP_K, r->x, r->ids, r->scales);
    run_local(r, &batch, r->expected);
}

static ep_buffer *acquire(rank_state *r, form f, size_t bytes)
{
    ep_buffer *buffer = NULL;
    if (ep_buffer_acquire(r->pools[f], bytes, &buffer) != EP_OK) {
        bench_fail("no buffer", NULL);
    }
    return buffer;
}

/* Every rank receives at `areas`, one area of `each` bytes per rank, what the others hold for it at
 * `data`: there is one area per destination, or data is for all. The own part is copied. */
static void exchange(rank_state *r, uint8_t *areas, const uint8_t *data, size_t each,
                     bool same_for_all)
{
    rank_mesh_receive_at(r->mesh, areas, each);
    rank_board_meet(board);
    for (uint32_t i = 1; i < RANKS; i++) {
        uint32_t to = (r->rank + i) % RANKS;
        rank_mesh_post(r->mesh, to, data + (same_for_all ? 0 : to * each), each);
    }
    memcpy(areas + r->rank * each, data + (same_for_all ? 0 : r->rank * each), each);
    for (uint32_t from = 0; from < RANKS; from++) {
        if (from != r->rank) {
            rank_mesh_wait(r->mesh, from, each);
        }
    }
    rank_mesh_flush(r->mesh);
}

/* The first tokens of the rank's; the time it took. */
static double run_service(rank_state *r, uint32_t tokens, ep_moe_tokens_func on_tokens, void *arg)
{
    const bench_tokens of = {tokens, TOP_K, HIDDEN, r->x, r->ids, r->scales};
    ep_moe_args args = bench_args(&of);
    args.mode = EP_MOE_PREFILL;
    args.on_tokens = on_tokens;
    args.on_tokens_arg = arg;
    return bench_call_us(r->client, &args, r->y);
}

static void on_tokens(void *arg, ep_call *call, uint32_t first, uint32_t count)
{
    double *first_us = arg;
    (void)call;
    (void)count;
    notes->stream_ranges = first == 0 ? 1 : notes->stream_ranges + 1;
    *first_us = first == 0 ? bench_now_us() : *first_us;
}

static void run_stream(rank_state *r)
{
    notes->stream_is_exact = true;
    for (int i = -1; i < STREAM_ROUNDS; i++) { /* the first is not counted */
        int at = i < 0 ? 0 : i;
        double first_us = 0;
        notes->plain_us[at] = run_service(r, STREAM_TOKENS, NULL, NULL);
        memset(r->y, 0xff, TOKEN_BYTES);
        const double begin_us = bench_now_us();
        notes->streamed_us[at] = run_service(r, STREAM_TOKENS, on_tokens, &first_us);
        notes->first_us[at] = first_us - begin_us;
        notes->stream_is_exact =
            notes->stream_is_exact && memcmp(r->y, r->expected, STREAM_TOKENS * ROW_BYTES) == 0;
    }
}

static void run_gather(rank_state *r)
{
    ep_buffer *all = acquire(r, FORM_GATHER, RANKS * TOKEN_BYTES);
    ep_buffer *partial = acquire(r, FORM_GATHER, RANKS * TOKEN_BYTES);
    exchange(r, all->data, (const uint8_t *)r->x, TOKEN_BYTES, true);
    for (uint32_t from = 0; from < RANKS; from++) {
        const uint16_t *x = (const uint16_t *)(const void *)(all->data + from * TOKEN_BYTES);
        ep_batch batch = batch_of(TOKENS, TOP_K, x, r->all_ids + (size_t)from * SLOTS,
                                  r->all_scales + (size_t)from * SLOTS);
        run_local(r, &batch, (uint16_t *)(void *)(partial->data + from * TOKEN_BYTES));
    }
    exchange(r, all->data, partial->data, TOKEN_BYTES, false);
    const uint16_t *parts = (const uint16_t *)(const void *)all->data;
    for (size_t i = 0; i < (size_t)TOKENS * HIDDEN; i++) {
        float sum = 0;
        for (uint32_t from = 0; from < RANKS; from++) {
            sum += ep_bf16_to_f32(parts[from * (size_t)TOKENS * HIDDEN + i]);
        }
        r->y[i] = ep_f32_to_bf16(sum);
    }
    ep_buffer_unref(all);
    ep_buffer_unref(partial);
}

/* A part of every destination's buffer, `rows` long: powers of two, so that no size class of the
 * pool adds to what is asked for. */
typedef struct fixed_piece {
    size_t rows;
    ep_buffer *send;     /* [RANKS,rows,H]: rows, then results */
    ep_buffer *recv;     /* the same */
    ep_buffer *send_ids; /* [RANKS,rows]: -1 padding */
    ep_buffer *recv_ids;
} fixed_piece;

static uint32_t acquire_fixed(rank_state *r, fixed_piece pieces[32])
{
    uint32_t count = 0;
    for (size_t rows = (size_t)1 << 31; rows > 0; rows >>= 1) {
        if ((capacity() & rows) != 0) {
            fixed_piece *p = &pieces[count++];
            p->rows = rows;
            p->send = acquire(r, FORM_FIXED, RANKS * rows * ROW_BYTES);
            p->recv = acquire(r, FORM_FIXED, RANKS * rows * ROW_BYTES);
            p->send_ids = acquire(r, FORM_FIXED, RANKS * rows * sizeof(int32_t));
            p->recv_ids = acquire(r, FORM_FIXED, RANKS * rows * sizeof(int32_t));
            memset(p->send_ids->data, 0xff, RANKS * rows * sizeof(int32_t));
        }
    }
    return count;
}

/* Rows and their experts into the destinations' buffers; where each slot's result comes back into
 * rows. */
static void fill_fixed(rank_state *r, const fixed_piece *pieces, uint32_t pieces_count)
{
    size_t used[RANKS] = {0};
    for (uint32_t s = 0; s < SLOTS; s++) {
        uint32_t to = (uint32_t)r->ids[s] / RANK_EXPERTS, p = 0;
        size_t at = used[to]++;
        for (; p < pieces_count && at >= pieces[p].rows; p++) {
            at -= pieces[p].rows;
        }
        if (p == pieces_count) {
            bench_fail("more rows than the capacity", NULL);
        }
        at += to * pieces[p].rows;
        memcpy(pieces[p].send->data + at * ROW_BYTES, r->x + (size_t)(s / TOP_K) * HIDDEN,
               ROW_BYTES);
        memcpy(pieces[p].send_ids->data + at * sizeof(int32_t), &r->ids[s], sizeof(int32_t));
        r->rows[s] = pieces[p].recv->data + at * ROW_BYTES;
    }
}

static void compute_fixed(rank_state *r, const fixed_piece *p)
{
    for (size_t first = 0; first < RANKS * p->rows; first += p->rows) {
        const uint16_t *x = (const uint16_t *)(const void *)(p->recv->data + first * ROW_BYTES);
        const int32_t *ids = (const int32_t *)(const void *)p->recv_ids->data + first;
        ep_batch batch = batch_of((uint32_t)p->rows, 1, x, ids, r->ones);
        run_local(r, &batch, (uint16_t *)(void *)(p->send->data + first * ROW_BYTES));
    }
}

static void run_fixed(rank_state *r)
{
    fixed_piece pieces[32];
    uint32_t count = acquire_fixed(r, pieces);
    fill_fixed(r, pieces, count);
    for (uint32_t i = 0; i < count; i++) {
        exchange(r, pieces[i].recv_ids->data, pieces[i].send_ids->data,
                 pieces[i].rows * sizeof(int32_t), false);
        exchange(r, pieces[i].recv->data, pieces[i].send->data, pieces[i].rows * ROW_BYTES, false);
    }
    for (uint32_t i = 0; i < count; i++) {
        compute_fixed(r, &pieces[i]);
    }
    for (uint32_t i = 0; i < count; i++) {
        exchange(r, pieces[i].recv->data, pieces[i].send->data, pieces[i].rows * ROW_BYTES, false);
    }
    ep_batch batch = batch_of(TOKENS, TOP_K, r->x, r->ids, r->scales);
    ep_combine_out out = {.data = r->y, .token_stride_bytes = ROW_BYTES};
    ep_combine(&batch, layer_local_shape(r->local), r->rows, NULL, 0, TOKENS, r->scratch, &out);
    for (uint32_t i = 0; i < count; i++) {
        ep_buffer_unref(pieces[i].send);
        ep_buffer_unref(pieces[i].recv);
        ep_buffer_unref(pieces[i].send_ids);
        ep_buffer_unref(pieces[i].recv_ids);
    }
}

/* Largest distance, as a share of the largest value expected. */
static double error_of(const rank_state *r)
{
    double largest = 0, scale = 0;
    if (memcmp(r->y, r->expected, TOKEN_BYTES) == 0) {
        return 0;
    }
    for (size_t i = 0; i < (size_t)TOKENS * HIDDEN; i++) {
        double expected = ep_bf16_to_f32(r->expected[i]),
               distance = fabs(ep_bf16_to_f32(r->y[i]) - expected);
        scale = fabs(expected) > scale ? fabs(expected) : scale;
        largest = distance <= largest ? largest : distance; /* NAN stays */
    }
    return largest / scale;
}

static void run_form(rank_state *r, form f)
{
    switch (f) {
    case FORM_SERVICE:
        run_service(r, TOKENS, NULL, NULL);
        break;
    case FORM_GATHER:
        run_gather(r);
        break;
    case FORM_FIXED:
        run_fixed(r);
        break;
    case FORM_COUNT:
        break;
    }
}

static void note_form(rank_state *r, form f)
{
    ep_client_stats client = {.struct_bytes = sizeof(client)};
    ep_buffer_pool_stats pool;
    if (f == FORM_SERVICE) {
        ep_client_read_stats(r->client, &client);
        notes->peak_bytes[f][r->rank] = client.buffer_bytes_peak;
    } else {
        ep_buffer_pool_read_stats(r->pools[f], &pool);
        notes->peak_bytes[f][r->rank] = pool.lent_bytes_peak;
    }
    double error = error_of(r);
    notes->error[f][r->rank] = error <= notes->error[f][r->rank] ? notes->error[f][r->rank] : error;
    memset(r->y, 0xff, TOKEN_BYTES);
}

static void over_stream(ep_client_config *config)
{
    config->lanes = "stream";
}

static void rank_main(uint32_t rank, void *arg)
{
    static rank_state r;
    char addresses[RANKS][32];
    const char *address_list[RANKS], *urls[RANKS];
    ep_error error;
    r.rank = rank;
    for (uint32_t i = 0; i < RANKS; i++) {
        snprintf(addresses[i], sizeof(addresses[i]), "127.0.1.%u", i + 1);
        address_list[i] = addresses[i];
        urls[i] = notes->urls[i];
    }
    if (layer_local_open(arg, 0, 1, &r.local, &error) != EP_OK) {
        bench_fail("local layer", error.text);
    }
    fill_inputs(&r);
    for (int f = FORM_GATHER; f < FORM_COUNT; f++) {
        if (ep_buffer_pool_create(0, KEEP_BYTES, &r.pools[f]) != EP_OK) {
            bench_fail("no memory", NULL);
        }
    }
    r.mesh = rank_mesh_open(rank, RANKS, address_list, MESH_PORT, 0);
    r.client = bench_client_open(urls, RANKS, over_stream);
    for (int f; (f = rank_board_next(board)) != RANK_BOARD_END; rank_board_done(board)) {
        if (f == STEP_STREAM) {
            if (rank == 0) {
                run_stream(&r);
            }
            continue;
        }
        run_form(&r, (form)f);
        note_form(&r, (form)f);
    }
    rank_board_done(board);
    rank_mesh_close(r.mesh);
    ep_client_destroy(r.client);
    layer_local_close(r.local);
}

/* ---- the parent ---- */

static void start_node(ep_test_process *process, const char *dir, uint32_t node,
                       const char *checkpoint)
{
    char name[16], experts[32];
    snprintf(name, sizeof(name), "node%u", node);
    snprintf(experts, sizeof(experts), "%u-%u", node * RANK_EXPERTS, (node + 1) * RANK_EXPERTS - 1);
    bench_node_start(&(bench_node){.name = name,
                                   .checkpoint = checkpoint,
                                   .experts = experts,
                                   .keys = "insecure: true\nthreads: 1\ntracing: off\nshm: off\n"},
                     dir, process);
    snprintf(notes->urls[node], sizeof(notes->urls[node]), "%.63s", process->rpc_url);
}

static double largest_of(const double values[RANKS])
{
    double largest = 0;
    for (uint32_t i = 0; i < RANKS; i++) {
        largest = values[i] <= largest ? largest : values[i];
    }
    return largest;
}

/* Of the ranks; one of the service is a caller and a node. */
static double peak_of(form f, const uint64_t node_bytes[RANKS])
{
    double peak = 0;
    for (uint32_t i = 0; i < RANKS; i++) {
        peak =
            fmax(peak, (double)(notes->peak_bytes[f][i] + (f == FORM_SERVICE ? node_bytes[i] : 0)));
    }
    return peak;
}

static void add_memory(bench_report *report, const ep_test_process nodes[RANKS])
{
    uint64_t node_bytes[RANKS], node_most = 0;
    for (uint32_t i = 0; i < RANKS; i++) {
        node_bytes[i] = (uint64_t)bench_metric(&nodes[i], "expertd_buffer_bytes_peak");
        node_most = node_bytes[i] > node_most ? node_bytes[i] : node_most;
    }
    double ours = peak_of(FORM_SERVICE, node_bytes);
    bench_report_value(report, (double)node_most / 0x1p20, "MiB", BENCH_LOWER, NAN,
                       "peak of exchange buffers, the node's part");
    for (form other = FORM_GATHER; other < FORM_COUNT; other++) {
        double theirs = peak_of(other, node_bytes);
        bench_report_rival(report, ours / 0x1p20, "MiB", theirs / 0x1p20, ours / theirs,
                           BENCH_LOWER, BAR, "peak of exchange buffers: %s", form_names[other]);
    }
}

static void add_speed(bench_report *report, double us[FORM_COUNT][ROUNDS])
{
    const double tokens = 1e6 * RANKS * TOKENS;
    double ratio[FORM_COUNT], median[FORM_COUNT], ratios[ROUNDS];
    for (int f = FORM_GATHER; f < FORM_COUNT; f++) {
        for (int i = 0; i < ROUNDS; i++) {
            ratios[i] = us[f][i] / us[FORM_SERVICE][i];
        }
        ratio[f] = bench_quantile(ratios, ROUNDS, 0.5);
    }
    for (int f = 0; f < FORM_COUNT; f++) {
        median[f] = bench_quantile(us[f], ROUNDS, 0.5); /* sorts */
    }
    for (int f = FORM_GATHER; f < FORM_COUNT; f++) {
        bench_report_rival(report, tokens / median[FORM_SERVICE], "/s", tokens / median[f],
                           ratio[f], BENCH_HIGHER, NAN, "tokens: %s", form_names[f]);
    }
}

static void add_stream(bench_report *report)
{
    double share[STREAM_ROUNDS], cost[STREAM_ROUNDS];
    for (int i = 0; i < STREAM_ROUNDS; i++) {
        share[i] = notes->first_us[i] / notes->streamed_us[i];
        cost[i] = notes->streamed_us[i] / notes->plain_us[i];
    }
    double first = bench_quantile(notes->first_us, STREAM_ROUNDS, 0.5);
    double whole = bench_quantile(notes->streamed_us, STREAM_ROUNDS, 0.5);
    double plain = bench_quantile(notes->plain_us, STREAM_ROUNDS, 0.5);
    bench_report_rival(report, first, "us", whole, bench_quantile(share, STREAM_ROUNDS, 0.5),
                       BENCH_LOWER, STREAM_BAR,
                       "on_tokens, 2048 tokens: first tokens, of the whole call");
    bench_report_rival(report, whole, "us", plain, bench_quantile(cost, STREAM_ROUNDS, 0.5),
                       BENCH_LOWER, NAN, "on_tokens, 2048 tokens: the call, without it");
    bench_report_value(report, notes->stream_ranges, "", BENCH_HIGHER, NAN,
                       "on_tokens, 2048 tokens: ranges");
    bench_report_value(report, !notes->stream_is_exact, "", BENCH_LOWER, 0,
                       "on_tokens, 2048 tokens: calls with other bits");
}

/* Against the layer in one process. Sums of eight partial sums, each rounded to bf16, are not the
 * canonical ones: they differ by a few units of its last place. */
static void add_errors(bench_report *report)
{
    for (int f = 0; f < FORM_COUNT; f++) {
        bench_report_value(report, largest_of(notes->error[f]), "", BENCH_LOWER,
                           f == FORM_GATHER ? 0.02 : 0, "%s, error", form_names[f]);
    }
}

int main(int argc, char **argv)
{
    char dir[EP_TEST_PATH_BYTES], checkpoint[EP_FIXTURE_PATH_BYTES];
    ep_test_process nodes[RANKS] = {0};
    double us[FORM_COUNT][ROUNDS];
    if (!ep_test_dir_create(dir)) {
        bench_fail("directory", NULL);
    }
    const ep_fixture_config fixture = ep_fixture_layer(HIDDEN, INNER, EXPERTS, TOP_K);
    ep_fixture_new(&fixture, checkpoint);
    notes = rank_board_memory(sizeof(*notes));
    board = rank_board_create(RANKS);
    for (uint32_t n = 0; n < RANKS; n++) {
        start_node(&nodes[n], dir, n, checkpoint);
    }
    rank_board_fork(board, rank_main, checkpoint);
    for (int i = -1; i < ROUNDS; i++) { /* the first is not counted: pages and connections */
        for (int f = 0; f < FORM_COUNT; f++) {
            us[f][i < 0 ? 0 : i] = rank_board_time(board, f);
        }
    }
    (void)rank_board_time(board, STEP_STREAM);
    rank_board_end(board);
    bench_report *report = bench_report_create(
        "Prefill: 8 ranks of 4096 tokens, H = 1024, I = 128, top-8 of 64, bf16, stream lane");
    add_memory(report, nodes);
    add_speed(report, us);
    add_errors(report);
    add_stream(report);
    for (uint32_t n = 0; n < RANKS; n++) {
        ep_test_process_destroy(&nodes[n]);
    }
    ep_fixture_remove(checkpoint);
    ep_test_dir_remove(dir);
    return bench_report_finish(report, argc > 1 ? argv[1] : NULL);
}
