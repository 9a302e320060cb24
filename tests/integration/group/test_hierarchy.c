/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_hierarchy SCHEME CASES [SEED]: comm_alg hierarchy against fullmesh, in one group, on drawn
 * hosts: every output bit for bit, both as the oracle's. What crosses to another host is counted at
 * its ranks' connections and compared with a count made from the oracle's rows: one frame per
 * (source, host) and each token's row in it once. EP_TEST_LONG=1: twenty times as many.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "case_draw.h"
#include "rank_call.h"
#include "rank_threads.h"

#define RANKS_MAX 16
#define DEADLINE_US 30000000

static const char *const host_names[] = {"a", "b", "c", "d"};

typedef struct traffic {
    uint64_t frames_in, bytes_in, rows_out, rows_passed_on;
} traffic;

typedef struct world {
    const oracle_case *c;
    int group_ranks;                    /* elastic: more than c->ranks */
    const char *hosts[RANKS_MAX];       /* by the group's rank */
    int members[RANKS_MAX];             /* the group's rank of each of the case's */
    int32_t elastic[4 + 2 * RANKS_MAX]; /* elastic[0] 0: not elastic */
    bool hierarchy_first;
    pthread_barrier_t step; /* of the members */
    pthread_barrier_t end;  /* of all: who leaves says so, and that would be counted */
    traffic before[RANKS_MAX][RANKS_MAX]; /* [rank of the case][the other] */
    traffic after[RANKS_MAX][RANKS_MAX];
} world;

/* ---- outputs ---- */

/* Times cannot be equal; but they are of the ranks that take part, and none is of this one. */
static bool good_times(const world *w, uint32_t rank, const int64_t *waited)
{
    for (int r = 0; r < w->group_ranks; r++) {
        bool other = false;
        for (int m = 0; m < w->c->ranks; m++) {
            other = other || (w->members[m] == r && m != (int)rank);
        }
        if (waited[r] < 0 || (!other && waited[r] != 0)) {
            fprintf(stderr, "rank %u: performance_info[%d] is %ld\n", rank, r, (long)waited[r]);
            return false;
        }
    }
    return true;
}

/* ---- traffic ---- */

static void read_traffic(const world *w, ep_group *group, traffic *out)
{
    for (int m = 0; m < w->c->ranks; m++) {
        ep_group_traffic t = {.struct_bytes = sizeof(t)};
        ep_group_read_traffic(group, (uint32_t)w->members[m], &t);
        out[m] = (traffic){t.frames_received, t.bytes_received, t.rows_sent, t.rows_passed_on};
    }
}

static const char *host_of(const world *w, int m)
{
    return w->hosts[w->members[m]];
}

static bool on(const world *w, int m, const char *host)
{
    return host[0] != 0 && strcmp(host_of(w, m), host) == 0;
}

/* What rank m must get of source: its slots, and for a host the different tokens among them. From
 * the oracle's rows alone. */
static void count_rows(const world *w, int source, const char *host, int only, int *out_slots,
                       int *out_tokens)
{
    const oracle_case *c = w->c;
    bool seen[256] = {false};
    *out_slots = 0;
    *out_tokens = 0;
    for (int m = 0; m < c->ranks; m++) {
        if (only >= 0 ? m != only : !on(w, m, host)) {
            continue;
        }
        oracle_row *rows;
        float *values;
        int n = oracle_dispatch(c, m, &rows, &values);
        for (int i = 0; i < n; i++) {
            if (rows[i].source == source) {
                (*out_slots)++;
                *out_tokens += !seen[rows[i].token];
                seen[rows[i].token] = true;
            }
        }
        free(rows);
        free(values);
    }
}

/* Sum over ranks m of a host of what came from source. */
static traffic crossed(const world *w, int source, const char *host, int only)
{
    traffic sum = {0};
    for (int m = 0; m < w->c->ranks; m++) {
        if (only >= 0 ? m == only : on(w, m, host)) {
            sum.frames_in += w->after[m][source].frames_in - w->before[m][source].frames_in;
            sum.bytes_in += w->after[m][source].bytes_in - w->before[m][source].bytes_in;
            sum.rows_out += w->after[source][m].rows_out - w->before[source][m].rows_out;
        }
    }
    return sum;
}

static bool check_crossing(const world *w, int source, int to)
{
    const oracle_case *c = w->c;
    const char *host = host_of(w, to);
    int only = host[0] == 0 ? to : -1;
    int slots;
    int tokens;
    count_rows(w, source, host, only, &slots, &tokens);
    traffic is = crossed(w, source, host, only);
    size_t row = (size_t)c->hidden * (c->quantise ? 1 : c->dtype == ORACLE_F32 ? 4 : 2);
    size_t rows = (size_t)tokens * row;
    /* Envelope and record; 12 bytes for a slot, 8 for a row; 4 for each expert and 12 for each
     * rank; ten parts, each to 64. */
    size_t around = 400 + 12 * (size_t)slots + 8 * (size_t)tokens + 4 * (size_t)(c->experts + 1) +
                    12 * (size_t)c->ranks + 640;
    if (is.frames_in != 1 || is.rows_out != (uint64_t)tokens || is.bytes_in < rows ||
        is.bytes_in > rows + around) {
        fprintf(stderr,
                "rank %d to host \"%s\" (%d slots, %d tokens, rows of %zu bytes): %lu frames, %lu "
                "rows, %lu bytes\n",
                source, host, slots, tokens, row, (unsigned long)is.frames_in,
                (unsigned long)is.rows_out, (unsigned long)is.bytes_in);
        return false;
    }
    return true;
}

/* Inside a host: one frame of the neighbour's own, and one for each source of other hosts that it
 * is the gateway of. */
static bool check_passing_on(const world *w, int m, uint64_t *out_passed_on)
{
    uint64_t frames = 0;
    uint64_t rows = 0;
    int neighbours = 0;
    int far = 0;
    for (int other = 0; other < w->c->ranks; other++) {
        if (other == m) {
            continue;
        }
        if (!on(w, other, host_of(w, m))) {
            int slots;
            int tokens;
            frames += w->after[m][other].frames_in - w->before[m][other].frames_in;
            count_rows(w, other, NULL, m, &slots, &tokens);
            rows +=
                w->after[m][other].frames_in == w->before[m][other].frames_in ? (uint64_t)slots : 0;
            far++;
        } else {
            frames += w->after[m][other].frames_in - w->before[m][other].frames_in;
            rows -= w->after[other][m].rows_passed_on - w->before[other][m].rows_passed_on;
            neighbours++;
        }
    }
    /* All in all every rank gets a frame of every other, whichever way. */
    if (frames != (uint64_t)(neighbours + far) || rows != 0) {
        fprintf(stderr,
                "rank %d: %lu frames of %d neighbours and %d others; %ld rows too few passed on\n",
                m, (unsigned long)frames, neighbours, far, (long)rows);
        return false;
    }
    for (int other = 0; other < w->c->ranks; other++) {
        *out_passed_on += other != m && on(w, other, host_of(w, m))
                              ? w->after[m][other].frames_in - w->before[m][other].frames_in - 1
                              : 0;
    }
    return true;
}

static uint64_t passed_on_total;
static uint64_t tokens_total;

static bool check_traffic(const world *w)
{
    for (int s = 0; s < w->c->ranks; s++) {
        for (int m = 0; m < w->c->ranks; m++) {
            bool first_of_host = m != s && !on(w, m, host_of(w, s));
            for (int before = 0; before < m; before++) {
                first_of_host = first_of_host && !on(w, before, host_of(w, m));
            }
            if (first_of_host && !check_crossing(w, s, m)) {
                return false;
            }
        }
        if (!check_passing_on(w, s, &passed_on_total)) {
            return false;
        }
        tokens_total += (uint64_t)w->c->batch[s].tokens;
    }
    return true;
}

/* ---- playing ---- */

static int local_of(const world *w, uint32_t rank)
{
    for (int m = 0; m < w->c->ranks; m++) {
        if (w->members[m] == (int)rank) {
            return m;
        }
    }
    return -1;
}

static bool play_one(world *w, rank_call *call, ep_group *group, bool counted)
{
    ep_error error = {.text = ""};
    if (counted) {
        /* nobody sends for another call between this and the next */
        pthread_barrier_wait(&w->step);
        read_traffic(w, group, w->before[call->rank]);
        pthread_barrier_wait(&w->step);
    }
    bool good = rank_call_dispatch(call, group, &error) == EP_OK && rank_call_check_dispatch(call);
    if (counted) {
        pthread_barrier_wait(&w->step);
        read_traffic(w, group, w->after[call->rank]);
        pthread_barrier_wait(&w->step);
    }
    if (good) {
        rank_call_experts(call);
        good = rank_call_combine(call, group, &error) == EP_OK &&
               rank_call_check_combine(call, case_is_approximate(w->c) ? 0.02 : 0);
    }
    if (!good) {
        fprintf(stderr, "rank %u, %s: %s\n", call->rank, call->params.comm_alg, error.text);
    }
    return good;
}

static void set_up(world *w, rank_call *call, int local, const char *comm_alg, int64_t *waited)
{
    rank_call_init(call, w->c, (uint32_t)local, 0);
    call->params.comm_alg = comm_alg;
    if (w->elastic[0] != 0) {
        call->params.elastic_info = ep_tensor_1d(w->elastic, EP_DTYPE_I32, 4 + 2 * w->group_ranks);
    }
    call->dispatch.performance_info = ep_tensor_1d(waited, EP_DTYPE_I64, w->group_ranks);
}

static bool run_rank(void *arg, uint32_t rank, ep_group *group)
{
    world *w = arg;
    int local = local_of(w, rank);
    rank_call mesh;
    rank_call tree;
    int64_t waited[2][RANKS_MAX] = {{0}};
    if (local < 0) { /* left out */
        pthread_barrier_wait(&w->end);
        return true;
    }
    set_up(w, &mesh, local, "fullmesh", waited[0]);
    set_up(w, &tree, local, "hierarchy", waited[1]);
    bool good = true;
    /* the second over what the first left in every buffer */
    for (int round = 0; round < 2 && good; round++) {
        good = (w->hierarchy_first || play_one(w, &mesh, group, false)) &&
               play_one(w, &tree, group, round == 0) &&
               (!w->hierarchy_first || play_one(w, &mesh, group, false));
        good = good && rank_call_same(&mesh, &tree, "fullmesh and hierarchy");
    }
    good = good && good_times(w, (uint32_t)local, waited[0]) &&
           good_times(w, (uint32_t)local, waited[1]);
    rank_call_free(&mesh);
    rank_call_free(&tree);
    pthread_barrier_wait(&w->end);
    return good;
}

/* ---- drawing ---- */

/* Hosts of the group's ranks: by turns, in blocks, or anyhow; sometimes one that is not known. */
static void draw_hosts(uint64_t *state, world *w)
{
    int hosts = case_random(state, 1, 4);
    int way = case_random(state, 0, 2);
    for (int r = 0; r < w->group_ranks; r++) {
        int h = way == 0   ? r % hosts
                : way == 1 ? r * hosts / w->group_ranks
                           : case_random(state, 0, hosts - 1);
        w->hosts[r] = way == 2 && case_random(state, 0, 9) == 0 ? "" : host_names[h];
    }
}

/* Leaves some of the group's ranks out, and numbers the others anyhow. */
static void draw_members(uint64_t *state, world *w)
{
    bool elastic = case_random(state, 0, 2) == 0;
    int members = 0;
    w->group_ranks = w->c->ranks;
    if (elastic) {
        w->group_ranks +=
            case_random(state, 0, RANKS_MAX - w->c->ranks < 3 ? RANKS_MAX - w->c->ranks : 3);
    }
    int out = w->group_ranks - w->c->ranks;
    int all[RANKS_MAX];
    for (int r = 0; r < w->group_ranks; r++) {
        all[r] = r;
    }
    for (int r = w->group_ranks - 1; elastic && r > 0; r--) {
        int other = case_random(state, 0, r);
        int kept = all[r];
        all[r] = all[other];
        all[other] = kept;
    }
    int32_t head[4] = {elastic, w->c->ranks, w->c->shared_ranks, w->c->experts};
    memcpy(w->elastic, head, sizeof(head));
    for (int r = 0; r < w->group_ranks; r++) {
        w->elastic[4 + r] = -1;
        w->elastic[4 + w->group_ranks + r] = -1;
    }
    for (int i = out; i < w->group_ranks; i++, members++) {
        w->members[members] = all[i];
        w->elastic[4 + all[i]] = members;
        w->elastic[4 + w->group_ranks + members] = all[i];
    }
}

static bool run(const char *scheme, uint64_t seed, oracle_case *c)
{
    static world w;
    uint64_t state = seed ^ 0x5eed;
    memset(&w, 0, sizeof(w));
    w.c = c;
    draw_members(&state, &w);
    draw_hosts(&state, &w);
    w.hierarchy_first = case_random(&state, 0, 1);
    pthread_barrier_init(&w.step, NULL, (unsigned)c->ranks);
    pthread_barrier_init(&w.end, NULL, (unsigned)w.group_ranks);
    bool good =
        rank_threads_play(scheme, w.hosts, (uint32_t)w.group_ranks, DEADLINE_US, run_rank, &w);
    pthread_barrier_destroy(&w.step);
    pthread_barrier_destroy(&w.end);
    good = good && check_traffic(&w);
    if (!good) {
        fprintf(stderr,
                "seed %lu: ranks %d of %d, shared %d/%d, experts %d, K %d, H %d, quant %d back %d, "
                "elastic %d, hosts",
                (unsigned long)seed, c->ranks, w.group_ranks, c->shared_experts, c->shared_ranks,
                c->experts, c->top_k, c->hidden, c->quantise, c->quantise_back, w.elastic[0]);
        for (int r = 0; r < w.group_ranks; r++) {
            fprintf(stderr, " %s", w.hosts[r][0] == 0 ? "-" : w.hosts[r]);
        }
        fprintf(stderr, "\n");
    }
    return good;
}

/* Rows so long that one too many could not hide behind counts and numbers. */
static bool run_long_rows(const char *scheme, uint64_t seed)
{
    oracle_case c = {.ranks = 6, .experts = 12, .top_k = 6, .hidden = 4000, .dtype = ORACLE_F32};
    uint64_t state = seed;
    for (int r = 0; r < c.ranks; r++) {
        case_draw_batch(&state, &c, r == 2 ? 0 : 3 + r, &c.batch[r]);
    }
    bool good = run(scheme, seed, &c);
    case_free(&c);
    return good;
}

int main(int argc, char **argv)
{
    const char *scheme = argc > 1 ? argv[1] : "loopback";
    int cases = argc > 2 ? atoi(argv[2]) : 100;
    uint64_t seed = argc > 3 ? strtoull(argv[3], NULL, 0) : 1;
    case_limits limits = {.ranks_max = RANKS_MAX, .tokens_max = 20, .hidden_max = 70};
    if (getenv("EP_TEST_LONG") != NULL) {
        cases *= 20;
    }
    for (int i = 0; i < cases; i++) {
        oracle_case c;
        case_draw(seed + (uint64_t)i, &limits, &c);
        free(c.smooth); /* refused with hierarchy */
        c.smooth = NULL;
        if (!run(scheme, seed + (uint64_t)i, &c) ||
            (i % 10 == 0 && !run_long_rows(scheme, seed + (uint64_t)i))) {
            return 1;
        }
        case_free(&c);
    }
    printf("seed %lu: %d cases over %s, %lu tokens, %lu frames passed on\n", (unsigned long)seed,
           cases, scheme, (unsigned long)tokens_total, (unsigned long)passed_on_total);
    return cases >= 20 && passed_on_total == 0;
}
