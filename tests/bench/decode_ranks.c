/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/decode_ranks.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench/layer_local.h"
#include "bench/rank_mesh.h"
#include "moe/combine.h"

#define SLOTS_MAX (DECODE_TOKENS_MAX * DECODE_TOP_K)

static const ep_layer_shape shape = {.hidden = DECODE_HIDDEN,
                                     .inner = DECODE_INNER,
                                     .experts = DECODE_EXPERTS,
                                     .top_k = DECODE_TOP_K};

/* What a rank tells each other before a layer: rows for each of that one's experts. */
typedef struct counts_message {
    uint32_t what; /* a rank_order */
    uint32_t counts[DECODE_EXPERTS];
} counts_message;

typedef enum rank_order {
    ORDER_LAYER,
    ORDER_COMPUTE, /* so many rows of its own, and then one answer */
    ORDER_END,     /* no more layers */
} rank_order;

#define ANSWER_BYTES 4

struct decode_ranks {
    uint32_t count;
    ep_test_process processes[DECODE_NODES_MAX];
    rank_mesh *mesh;
    counts_message to[DECODE_NODES_MAX];
    uint16_t *sorted;  /* [SLOTS_MAX,H] */
    uint32_t *slot_at; /* [SLOTS_MAX]: slot of each sorted row */
    const void **rows; /* [SLOTS_MAX] */
    float *scratch;
    pthread_t watcher;
    bool stopping;
};

static size_t counts_bytes(uint32_t ranks)
{
    return (1 + DECODE_EXPERTS / ranks) * sizeof(uint32_t);
}

/* Ranks have loopback addresses of their own and one port. Any rank may get all rows. */
static rank_mesh *open_mesh(uint32_t rank, uint32_t ranks, uint16_t port)
{
    static char text[DECODE_NODES_MAX + 1][32];
    const char *addresses[DECODE_NODES_MAX + 1];
    for (uint32_t i = 0; i <= ranks; i++) {
        snprintf(text[i], sizeof(text[i]), "127.0.1.%u", i + 1);
        addresses[i] = text[i];
    }
    size_t bytes = (size_t)SLOTS_MAX * DECODE_ROW_BYTES / (ranks > 2 ? ranks / 2 : 1) +
                   2 * sizeof(counts_message);
    return rank_mesh_open(rank, ranks + 1, addresses, port, bytes);
}

/* ---- a rank with experts: 1 .. count ---- */

static size_t slots_of(const counts_message *wanted, uint32_t ranks)
{
    size_t slots = 0;
    for (uint32_t i = 0; i < DECODE_EXPERTS / ranks; i++) {
        slots += wanted->counts[i];
    }
    return slots;
}

static void compute(layer_local *local, const uint32_t *counts, const void *x, uint16_t *out)
{
    if (layer_local_rows(local, counts, x, out) != EP_OK) {
        bench_fail("rows", NULL);
    }
}

static void rank_layers(rank_mesh *mesh, layer_local *local, uint32_t rank, uint32_t ranks,
                        const uint16_t *own_x, uint16_t *out)
{
    static const counts_message none; /* ranks have no tokens of their own */
    size_t bytes = counts_bytes(ranks);
    for (;;) {
        counts_message wanted;
        memcpy(&wanted, rank_mesh_wait(mesh, 0, bytes), bytes);
        if (wanted.what == ORDER_END) {
            return;
        }
        size_t slots = slots_of(&wanted, ranks);
        if (wanted.what == ORDER_COMPUTE) {
            if (slots > 0) {
                compute(local, wanted.counts, own_x, out);
            }
            rank_mesh_post(mesh, 0, &none, ANSWER_BYTES);
            rank_mesh_flush(mesh);
            continue;
        }
        for (uint32_t to = 0; to <= ranks; to++) {
            if (to != rank) {
                rank_mesh_post(mesh, to, &none, bytes);
            }
        }
        for (uint32_t from = 1; from <= ranks; from++) {
            if (from != rank) {
                rank_mesh_wait(mesh, from, bytes);
            }
        }
        if (slots > 0) {
            const void *x = rank_mesh_wait(mesh, 0, slots * DECODE_ROW_BYTES);
            compute(local, wanted.counts, x, out);
            rank_mesh_post(mesh, 0, out, slots * DECODE_ROW_BYTES);
        }
        rank_mesh_flush(mesh);
    }
}

bool decode_rank_main(int argc, char **argv)
{
    ep_error error;
    layer_local *local;
    if (argc != 6 || strcmp(argv[1], "--rank") != 0) {
        return false;
    }
    uint32_t rank = (uint32_t)strtoul(argv[2], NULL, 10);
    uint32_t ranks = (uint32_t)strtoul(argv[3], NULL, 10);
    uint32_t share = DECODE_EXPERTS / ranks;
    if (layer_local_open_share(argv[5], 0, (rank - 1) * share, share, 0, &local, &error) != EP_OK) {
        bench_fail("experts of a rank", error.text);
    }
    rank_mesh *mesh = open_mesh(rank, ranks, (uint16_t)strtoul(argv[4], NULL, 10));
    uint16_t *own_x = bench_room((size_t)SLOTS_MAX * DECODE_ROW_BYTES);
    uint16_t *out = bench_room((size_t)SLOTS_MAX * DECODE_ROW_BYTES);
    rank_layers(mesh, local, rank, ranks, own_x, out);
    rank_mesh_close(mesh);
    layer_local_close(local);
    free(own_x);
    free(out);
    return true;
}

/* ---- the caller: rank 0 ---- */

/* A rank that ends early would be waited for for ever. */
static void *watch(void *arg)
{
    decode_ranks *ranks = arg;
    struct pollfd ends[DECODE_NODES_MAX];
    for (uint32_t i = 0; i < ranks->count; i++) {
        ends[i] = (struct pollfd){.fd = ranks->processes[i].pid_fd, .events = POLLIN};
    }
    poll(ends, ranks->count, -1);
    if (!__atomic_load_n(&ranks->stopping, __ATOMIC_ACQUIRE)) {
        bench_fail("a rank has ended", NULL);
    }
    return NULL;
}

decode_ranks *decode_ranks_start(uint32_t count, const char *dir, const char *checkpoint)
{
    decode_ranks *ranks = bench_room(sizeof(*ranks));
    char count_text[16], port_text[16];
    uint16_t port = (uint16_t)(20000 + getpid() % 10000);
    ranks->count = count;
    snprintf(count_text, sizeof(count_text), "%u", count);
    snprintf(port_text, sizeof(port_text), "%u", port);
    for (uint32_t i = 0; i < count; i++) {
        char name[32], rank_text[16];
        snprintf(name, sizeof(name), "rank-%u-of-%u", i + 1, count);
        snprintf(rank_text, sizeof(rank_text), "%u", i + 1);
        const char *args[] = {"--rank", rank_text, count_text, port_text, checkpoint, NULL};
        if (!ep_test_process_start(&ranks->processes[i], dir, name, "/proc/self/exe", args, NULL,
                                   false)) {
            bench_fail("a rank did not start", NULL);
        }
    }
    ranks->sorted = bench_room((size_t)SLOTS_MAX * DECODE_ROW_BYTES);
    ranks->slot_at = bench_room(SLOTS_MAX * sizeof(*ranks->slot_at));
    ranks->rows = bench_room(SLOTS_MAX * sizeof(*ranks->rows));
    ranks->scratch = bench_room(ep_combine_scratch_floats(DECODE_HIDDEN) * sizeof(float));
    if (pthread_create(&ranks->watcher, NULL, watch, ranks) != 0) {
        bench_fail("no thread", NULL);
    }
    ranks->mesh = open_mesh(0, count, port);
    return ranks;
}

void decode_ranks_stop(decode_ranks *ranks)
{
    static const counts_message end = {.what = ORDER_END};
    __atomic_store_n(&ranks->stopping, true, __ATOMIC_RELEASE);
    for (uint32_t i = 0; i < ranks->count; i++) {
        rank_mesh_post(ranks->mesh, i + 1, &end, counts_bytes(ranks->count));
    }
    rank_mesh_flush(ranks->mesh);
    for (uint32_t i = 0; i < ranks->count; i++) {
        ep_test_process_wait(&ranks->processes[i], 60000);
        ep_test_process_destroy(&ranks->processes[i]);
    }
    pthread_join(ranks->watcher, NULL);
    rank_mesh_close(ranks->mesh);
    free(ranks->sorted);
    free(ranks->slot_at);
    free(ranks->rows);
    free(ranks->scratch);
    free(ranks);
}

/* Counting sort of the slots by expert. out_begin [EXPERTS + 1]. */
static void sort_slots(decode_ranks *ranks, const ep_batch *batch, uint32_t *out_begin)
{
    const int32_t *ids = batch->ids.data;
    uint32_t slots = batch->tokens * DECODE_TOP_K;
    uint32_t next[DECODE_EXPERTS];
    memset(out_begin, 0, (DECODE_EXPERTS + 1) * sizeof(*out_begin));
    for (uint32_t s = 0; s < slots; s++) {
        out_begin[ids[s] + 1]++;
    }
    for (uint32_t e = 0; e < DECODE_EXPERTS; e++) {
        out_begin[e + 1] += out_begin[e];
        next[e] = out_begin[e];
    }
    for (uint32_t s = 0; s < slots; s++) {
        ranks->slot_at[next[ids[s]]++] = s;
    }
}

/* What each rank gets in front of a layer. */
static void post_orders(decode_ranks *ranks, const uint32_t *begin, rank_order what)
{
    uint32_t share = DECODE_EXPERTS / ranks->count;
    for (uint32_t i = 0; i < ranks->count; i++) {
        ranks->to[i].what = what;
        for (uint32_t e = 0; e < share; e++) {
            ranks->to[i].counts[e] = begin[i * share + e + 1] - begin[i * share + e];
        }
        rank_mesh_post(ranks->mesh, i + 1, &ranks->to[i], counts_bytes(ranks->count));
    }
}

void decode_ranks_compute(decode_ranks *ranks, const ep_batch *batch)
{
    uint32_t begin[DECODE_EXPERTS + 1];
    sort_slots(ranks, batch, begin);
    post_orders(ranks, begin, ORDER_COMPUTE);
    for (uint32_t i = 0; i < ranks->count; i++) {
        rank_mesh_wait(ranks->mesh, i + 1, ANSWER_BYTES);
    }
    rank_mesh_flush(ranks->mesh);
}

void decode_ranks_call(decode_ranks *ranks, const ep_batch *batch, uint16_t *out)
{
    uint32_t share = DECODE_EXPERTS / ranks->count;
    uint32_t begin[DECODE_EXPERTS + 1];
    size_t bytes = counts_bytes(ranks->count);
    sort_slots(ranks, batch, begin);
    for (uint32_t at = 0; at < batch->tokens * DECODE_TOP_K; at++) {
        memcpy(ranks->sorted + (size_t)at * DECODE_HIDDEN,
               ep_rows_at(&batch->x, ranks->slot_at[at] / DECODE_TOP_K), DECODE_ROW_BYTES);
    }
    post_orders(ranks, begin, ORDER_LAYER);
    for (uint32_t i = 0; i < ranks->count; i++) {
        rank_mesh_wait(ranks->mesh, i + 1, bytes);
    }
    for (uint32_t i = 0; i < ranks->count; i++) {
        size_t rows = begin[(i + 1) * share] - begin[i * share];
        rank_mesh_post(ranks->mesh, i + 1, ranks->sorted + (size_t)begin[i * share] * DECODE_HIDDEN,
                       rows * DECODE_ROW_BYTES);
    }
    for (uint32_t i = 0; i < ranks->count; i++) {
        uint32_t first = begin[i * share], end = begin[(i + 1) * share];
        const char *rows = first == end ? NULL
                                        : rank_mesh_wait(ranks->mesh, i + 1,
                                                         (size_t)(end - first) * DECODE_ROW_BYTES);
        for (uint32_t at = first; at < end; at++) {
            ranks->rows[ranks->slot_at[at]] = rows + (size_t)(at - first) * DECODE_ROW_BYTES;
        }
    }
    ep_combine(batch, &shape, ranks->rows, NULL, 0, batch->tokens, ranks->scratch,
               &(ep_combine_out){.data = out, .token_stride_bytes = DECODE_ROW_BYTES});
    rank_mesh_flush(ranks->mesh);
}
