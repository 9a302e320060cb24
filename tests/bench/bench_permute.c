/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From router output to what is sent: the routing plan and the packed chunks of a prefill call,
 * against the same work done the usual way, as passes over the whole batch: sort the slots by
 * expert, slice the counts at the nodes' borders, divide slot numbers into tokens, gather the rows.
 * The passes are vectorised too and gather with whichever of plain and of packing's own streaming
 * stores is quicker, into memory that is used again as it is.
 *
 * Packing sends a row once per node and lets a chunk go when it is sent: IN_FLIGHT chunks are held
 * here. The passes give a row per (token, expert) in one buffer. One core, the same type; rounds
 * alternate; medians of ratios. The limit is the time that writing the packed rows takes alone,
 * each read from where it was just read: its own ratio is what no plan and no packing can do better
 * than.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buffer.h"
#include "base/check.h"
#include "bench/bench_service.h"
#include "expertd/permute.h"
#include "call/flow.h"
#include "moe/row_stream.h"
#include "wire/forward_codec.h"
#include "support/plan_whole.h"

#define TOKENS 4096
#define TOP_K 8
#define EXPERTS 256
#define SLOTS (TOKENS * TOP_K)
#define NODES_MAX 8
#define ROUNDS 7
#define IN_FLIGHT 64 /* of 1 MiB: the default credits of a connection */
#define CHUNK_BYTES_MAX ((size_t)1 << 20)

static int32_t ids[SLOTS];
static uint32_t slot_of[SLOTS], token_of[SLOTS], begins[EXPERTS + 1], node_begins[NODES_MAX + 1];
static float scales[SLOTS];
static uint16_t *x, *expanded;

typedef struct packed {
    uint64_t frames;
    uint64_t rows;
    uint64_t slots;
    uint64_t meta_bytes;
    uint64_t chunk_max; /* request or reply, with its fixed part and header at their most */
} packed;

/* ---- plan and pack, as the client does it ---- */

static void pack(uint32_t hidden, uint32_t nodes, ep_routing_plan *plan, ep_buffer_pool *pool,
                 packed *out)
{
    ep_layer_shape shape = {.hidden = hidden, .experts = EXPERTS, .top_k = TOP_K};
    ep_routing_layer layer = {.shape = shape};
    const bench_tokens of = {TOKENS, TOP_K, hidden, x, ids, scales};
    ep_batch batch = bench_batch(&of);
    batch.shared_source = EP_SHARED_NONE;
    ep_flow_limits limits = {.frame_bytes_max = 16u << 20,
                             .chunk_bytes_max = CHUNK_BYTES_MAX,
                             .window_bytes_max = SIZE_MAX};
    ep_flow flow;
    uint32_t chosen[EXPERTS];
    uint64_t room[NODES_MAX];
    ep_buffer *in_flight[IN_FLIGHT] = {NULL};
    uint32_t sent = 0;
    *out = (packed){0};
    ep_flow_pick(&limits, EP_MODE_PREFILL, &batch, &shape, &flow);
    ep_plan_cut cut = flow.cut;
    cut.room_bytes = room;
    for (uint32_t n = 0; n < nodes; n++) {
        room[n] = ep_flow_room_bytes(&flow, 0);
    }
    for (uint32_t e = 0; e < EXPERTS; e++) {
        chosen[e] = e / (EXPERTS / nodes);
    }
    for (uint32_t begin = 0; begin < TOKENS; begin += flow.window_tokens) {
        uint32_t end = begin + flow.window_tokens < TOKENS ? begin + flow.window_tokens : TOKENS;
        EP_ASSERT(plan_whole(plan, &batch, &layer, nodes, chosen, &cut, begin, end, NULL, 0,
                             NULL) == EP_OK);
        for (uint32_t c = 0; c < plan->chunks_count; c++, sent++) {
            Expertd__V1__ForwardRequest header = EXPERTD__V1__FORWARD_REQUEST__INIT;
            ep_buffer **place = &in_flight[sent % IN_FLIGHT];
            ep_buffer_unref(*place);
            EP_ASSERT(ep_forward_pack(&batch, plan, c, TOP_K, pool, &header, place) == EP_OK);
            uint64_t request = (*place)->bytes + EP_FLOW_FRAME_OVERHEAD_BYTES;
            uint64_t reply = (uint64_t)header.slots * hidden * 2 + EP_FLOW_FRAME_OVERHEAD_BYTES;
            out->frames++;
            out->rows += header.rows;
            out->slots += header.slots;
            out->meta_bytes += (*place)->bytes - (uint64_t)header.rows * hidden * 2;
            out->chunk_max = request > out->chunk_max ? request : out->chunk_max;
            out->chunk_max = reply > out->chunk_max ? reply : out->chunk_max;
        }
    }
    for (uint32_t i = 0; i < IN_FLIGHT; i++) {
        ep_buffer_unref(in_flight[i]);
    }
    EP_ASSERT(out->slots == SLOTS);
}

/* What plan and pack cannot be quicker than: as many rows written to as many buffers, read from
 * where the last one was. */
static double rows_alone_us(uint32_t hidden, const packed *p, ep_buffer_pool *pool)
{
    size_t row = (size_t)hidden * 2;
    ep_buffer *in_flight[IN_FLIGHT] = {NULL};
    uint64_t written = 0;
    double begin = bench_now_us();
    for (uint64_t f = 0; f < p->frames; f++) {
        uint64_t rows = p->rows * (f + 1) / p->frames - written;
        ep_buffer **place = &in_flight[f % IN_FLIGHT];
        ep_buffer_unref(*place);
        EP_ASSERT(ep_buffer_acquire(pool, rows * row, place) == EP_OK);
        for (uint64_t i = 0; i < rows; i++, written++) {
            ep_row_stream((*place)->data + i * row,
                          (const uint8_t *)x + written * TOKENS / p->rows * row, row, NULL);
        }
        ep_row_stream_end();
    }
    double us = bench_now_us() - begin;
    for (uint32_t i = 0; i < IN_FLIGHT; i++) {
        ep_buffer_unref(in_flight[i]);
    }
    return us;
}

/* ---- the passes ---- */

static void pass_sort(void)
{
    uint32_t cursor[EXPERTS + 1] = {0};
    for (uint32_t s = 0; s < SLOTS; s++) {
        cursor[ids[s] + 1]++;
    }
    for (uint32_t e = 0; e < EXPERTS; e++) {
        cursor[e + 1] += cursor[e];
    }
    memcpy(begins, cursor, sizeof(begins));
    for (uint32_t s = 0; s < SLOTS; s++) {
        slot_of[cursor[ids[s]]++] = s;
    }
}

static void pass_slice(uint32_t nodes)
{
    for (uint32_t n = 0; n <= nodes; n++) {
        node_begins[n] = begins[n * (EXPERTS / nodes)];
    }
}

static void pass_divide(void)
{
    for (uint32_t i = 0; i < SLOTS; i++) {
        token_of[i] = slot_of[i] / TOP_K;
    }
}

static void pass_gather(uint32_t hidden, bool stream)
{
    size_t row = (size_t)hidden * 2;
    for (uint32_t i = 0; i < SLOTS; i++) {
        if (stream) {
            const uint8_t *next = i + 1 < SLOTS ? (const uint8_t *)x + token_of[i + 1] * row : NULL;
            ep_row_stream((uint8_t *)expanded + i * row, (const uint8_t *)x + token_of[i] * row,
                          row, next);
        } else {
            memcpy((uint8_t *)expanded + i * row, (const uint8_t *)x + token_of[i] * row, row);
        }
    }
    if (stream) {
        ep_row_stream_end();
    }
}

static double passes_us(uint32_t hidden, uint32_t nodes)
{
    double gather[2];
    double begin = bench_now_us();
    pass_sort();
    pass_slice(nodes);
    pass_divide();
    double rest = bench_now_us() - begin;
    for (int stream = 0; stream < 2; stream++) {
        begin = bench_now_us();
        pass_gather(hidden, stream);
        gather[stream] = bench_now_us() - begin;
    }
    return rest + (gather[0] < gather[1] ? gather[0] : gather[1]);
}

/* ep_moe_permute does the four in one: no rows less, so it is measured for itself. */
static double permute_us(uint32_t hidden)
{
    static int32_t slot_rows[SLOTS];
    static int64_t counts[EXPERTS];
    static uint64_t workspace[EXPERTS];
    ep_permute_config config;
    ep_permute_config_init(&config);
    config.tokens = TOKENS;
    config.top_k = TOP_K;
    config.hidden = hidden;
    config.experts = EXPERTS;
    ep_permute_in in = {.struct_bytes = sizeof(in), .x = x, .ids = ids};
    ep_permute_out out = {
        .struct_bytes = sizeof(out), .rows = expanded, .slot_rows = slot_rows, .counts = counts};
    double begin = bench_now_us();
    EP_ASSERT(ep_moe_permute(&config, &in, workspace, sizeof(workspace), &out, NULL) == EP_OK);
    return bench_now_us() - begin;
}

static void add_counts(bench_report *report, const char *what, const packed *p)
{
    bench_report_rival(report, (double)p->frames, "frames", SLOTS, NAN, BENCH_LOWER, 0.22,
                       "%s, frames", what);
    bench_report_rival(report, (double)p->rows, "rows", SLOTS, NAN, BENCH_LOWER, NAN,
                       "%s, rows sent", what);
    bench_report_value(report, (double)p->meta_bytes / (double)p->slots, "bytes", BENCH_LOWER, 12,
                       "%s, metadata per slot", what);
    bench_row row = bench_value((double)p->chunk_max, "bytes", BENCH_LOWER, 1.0);
    row.limit = (double)CHUNK_BYTES_MAX;
    bench_report_add(report, &row, "%s, largest chunk against its limit", what);
}

static void bench_case(bench_report *report, uint32_t hidden, uint32_t nodes, ep_buffer_pool *pool)
{
    double ours[ROUNDS], rival[ROUNDS], times[ROUNDS], least[ROUNDS], reachable[ROUNDS];
    char what[48];
    packed p;
    ep_routing_plan plan;
    ep_routing_plan_init(&plan);
    pack(hidden, nodes, &plan, pool, &p);
    passes_us(hidden, nodes);
    for (int r = 0; r < ROUNDS; r++) {
        double begin = bench_now_us();
        pack(hidden, nodes, &plan, pool, &p);
        ours[r] = bench_now_us() - begin;
        least[r] = rows_alone_us(hidden, &p, pool);
        rival[r] = passes_us(hidden, nodes);
        times[r] = rival[r] / ours[r];
        reachable[r] = least[r] / rival[r];
    }
    snprintf(what, sizeof(what), "H = %u, %u nodes", hidden, nodes);
    bench_row row = bench_value(bench_quantile(ours, ROUNDS, 0.5), "us", BENCH_LOWER, 0.25);
    row.limit = bench_quantile(least, ROUNDS, 0.5);
    row.rival = bench_quantile(rival, ROUNDS, 0.5);
    row.ratio = 1.0 / bench_quantile(times, ROUNDS, 0.5);
    bench_report_add(report, &row, "%s, plan and pack", what);
    bench_report_rival(report, row.limit, "us", row.rival, bench_quantile(reachable, ROUNDS, 0.5),
                       BENCH_LOWER, NAN, "%s, writing the packed rows alone", what);
    add_counts(report, what, &p);
    ep_routing_plan_fini(&plan);
}

static void bench_permute(bench_report *report, uint32_t hidden)
{
    double ours[ROUNDS], rival[ROUNDS], times[ROUNDS];
    permute_us(hidden);
    for (int r = 0; r < ROUNDS; r++) {
        ours[r] = permute_us(hidden);
        rival[r] = passes_us(hidden, 1);
        times[r] = ours[r] / rival[r];
    }
    bench_report_rival(report, bench_quantile(ours, ROUNDS, 0.5), "us",
                       bench_quantile(rival, ROUNDS, 0.5), bench_quantile(times, ROUNDS, 0.5),
                       BENCH_LOWER, NAN, "H = %u, ep_moe_permute (every slot's row)", hidden);
}

int main(int argc, char **argv)
{
    static const uint32_t hiddens[] = {2048, 7168};
    static const uint32_t node_counts[] = {2, 4, 8};
    ep_buffer_pool *pool;
    uint64_t seed = 1;
    bench_report *report =
        bench_report_create("Permute and pack, 4096 tokens top-8 of 256, bf16: against sort, "
                            "slice, divide, gather as separate passes");
    bench_draw_routing(&seed, TOKENS, TOP_K, EXPERTS, ids, scales);
    EP_ASSERT(ep_buffer_pool_create(0, 256u << 20, &pool) == EP_OK);
    for (size_t h = 0; h < EP_ARRAY_COUNT(hiddens); h++) {
        size_t row = (size_t)hiddens[h] * 2;
        x = aligned_alloc(64, TOKENS * row);
        expanded = aligned_alloc(64, SLOTS * row);
        EP_ASSERT(x != NULL && expanded != NULL);
        memset(x, 0x3f, TOKENS * row);
        memset(expanded, 0, SLOTS * row);
        for (size_t n = 0; n < EP_ARRAY_COUNT(node_counts); n++) {
            bench_case(report, hiddens[h], node_counts[n], pool);
        }
        bench_permute(report, hiddens[h]);
        free(x);
        free(expanded);
    }
    ep_buffer_pool_destroy(pool);
    return bench_report_finish(report, argc > 1 ? argv[1] : NULL);
}
