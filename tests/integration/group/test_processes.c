/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_processes WORLD ROUNDS TOKENS_MAX EXPERTS H [VICTIM [BETWEEN [HOSTS]]]: ranks as processes
 * over tcp, uneven batches from 0 to TOKENS_MAX tokens, each rank's sums checked in every round;
 * memory must not grow with the rounds. VICTIM: that rank kills itself in the middle, and every
 * other must learn it by name, long before the deadline; -1: none. BETWEEN 1: it does so between
 * its dispatch and its combine; 2: while it calls; 3 to 11: with two micro-batches under way, at
 * that step. HOSTS: the ranks are dealt out to so many hosts by name, and call for hierarchy. The
 * program starts itself once per rank.
 * Arguments after the word "long" replace those before it when EP_TEST_LONG=1.
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "case_draw.h"
#include "rank_call.h"
#include "support/process.h"
#include "support/alloc_count.h"

#define BATCHES 2
#define DEADLINE_US 120000000ull
#define OVERLAPPED 3

typedef struct setting {
    int world, rounds, tokens_max, experts, hidden, victim, between, hosts;
} setting;

/* ---- a rank ---- */

static long resident_kib(void)
{
    FILE *file = fopen("/proc/self/statm", "r");
    long pages = 0;
    if (file != NULL) {
        if (fscanf(file, "%*d %ld", &pages) != 1) {
            pages = 0;
        }
        fclose(file);
    }
    return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

static void write_url(void *path, const char *url)
{
    char temporary[300];
    snprintf(temporary, sizeof(temporary), "%s.new", (const char *)path);
    ep_test_write_file(temporary, url, 0600);
    rename(temporary, path); /* whole, or not there */
}

static ep_group *join(const setting *s, uint32_t rank, const char *url)
{
    ep_group_config config;
    ep_group *group = NULL;
    ep_error error;
    char host[16];
    const char *urls[1] = {rank == 0 ? "tcp://127.0.0.1:0" : url};
    ep_group_config_init(&config);
    config.name = "processes";
    config.world_size = (uint32_t)s->world;
    config.rank = rank;
    config.urls = urls;
    config.urls_count = 1;
    config.listen_url = "tcp://127.0.0.1:0";
    config.deadline_us = DEADLINE_US;
    if (s->hosts > 0) {
        snprintf(host, sizeof(host), "host-%u", rank % (uint32_t)s->hosts);
        config.host = host;
    }
    if (rank == 0) {
        config.on_listening = write_url;
        config.on_listening_arg = (void *)(uintptr_t)url;
    }
    if (ep_group_create(&config, &group, &error) != EP_OK) {
        fprintf(stderr, "rank %u: %s: %s\n", rank, ep_err_name(error.code), error.text);
    }
    return group;
}

static void draw(const setting *s, uint32_t rank, int batch, oracle_case *c)
{
    uint64_t state = 77 + (uint64_t)batch * 1000 + rank;
    memset(c, 0, sizeof(*c));
    c->ranks = s->world;
    c->experts = s->experts;
    c->top_k = s->experts < 8 ? s->experts : 8;
    c->hidden = s->hidden;
    c->dtype = ORACLE_BF16;
    c->quantise_back = batch == 1;
    int tokens = case_random(&state, 0, 5) == 0 ? 0 : case_random(&state, 0, s->tokens_max);
    case_draw_batch(&state, c, tokens, &c->batch[rank]);
}

/* "rank 1, 4 is gone (...)", or "rank 1 is gone (it left the group as rank 4 is gone ...)": who
 * learned it first may have left already. */
static bool names_victim(const char *text, int victim)
{
    for (const char *list = strstr(text, "rank "); list != NULL; list = strstr(list + 1, "rank ")) {
        const char *end = strstr(list, " is gone");
        for (const char *at = strchr(list, ' '); end != NULL && at != NULL && at < end;
             at = strchr(at + 1, ' ')) {
            if (strtol(at + 1, NULL, 10) == victim) {
                return true;
            }
        }
    }
    return false;
}

static bool play_round(rank_call *call, ep_group *group, bool dies_between, ep_error *error)
{
    if (rank_call_dispatch(call, group, error) != EP_OK) {
        return false;
    }
    if (dies_between) {
        kill(getpid(), SIGKILL);
    }
    rank_call_experts(call);
    return rank_call_combine(call, group, error) == EP_OK;
}

/* Both micro-batches under way, one computed beside the other's exchange. dies_at: before that
 * step; 0: not. */
static bool play_overlapped(rank_call calls[BATCHES], ep_group *group, int dies_at, ep_error *error)
{
    static const struct {
        int batch;
        enum { DISPATCH, ROWS, COMBINE, SUMS } what;
    } steps[] = {{0, DISPATCH}, {1, DISPATCH}, {0, ROWS}, {0, COMBINE},
                 {1, ROWS},     {1, COMBINE},  {0, SUMS}, {1, SUMS}};
    for (int i = 0; i < (int)(sizeof(steps) / sizeof(steps[0])); i++) {
        rank_call *call = &calls[steps[i].batch];
        ep_err err = EP_OK;
        if (dies_at == i + 1) {
            kill(getpid(), SIGKILL);
        }
        switch (steps[i].what) {
        case DISPATCH:
            err = rank_call_begin_dispatch(call, group, i == 0 ? RANK_POLL : RANK_CALLBACK, error);
            break;
        case ROWS:
            err = rank_call_finish(call, error);
            if (err == EP_OK) {
                rank_call_experts(call);
            }
            break;
        case COMBINE:
            err = rank_call_begin_combine(call, group, RANK_CALLBACK, error);
            break;
        case SUMS:
            err = rank_call_finish(call, error);
            break;
        }
        if (err != EP_OK) {
            return false;
        }
    }
    if (dies_at == (int)(sizeof(steps) / sizeof(steps[0])) + 1) {
        kill(getpid(), SIGKILL);
    }
    return true;
}

static void *die(void *arg)
{
    (void)arg;
    kill(getpid(), SIGKILL);
    return NULL;
}

static void start_dying(void)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, die, NULL) != 0) {
        abort();
    }
}

static int play(const setting *s, uint32_t rank, ep_group *group, rank_call calls[BATCHES])
{
    ep_error error = {.text = ""};
    long early_kib = 0;
    ep_group_stats early = {.struct_bytes = sizeof(early)};
    ep_group_stats late = {.struct_bytes = sizeof(late)};
    for (int round = 0; round < s->rounds; round++) {
        bool dies = s->victim == (int)rank && round == s->rounds / 2;
        if (dies && s->between == 0) {
            kill(getpid(), SIGKILL);
        }
        if (dies && s->between == 2) {
            start_dying();
        }
        rank_call *call = &calls[round % BATCHES];
        bool played =
            s->between >= OVERLAPPED
                ? play_overlapped(calls, group, dies ? s->between - OVERLAPPED + 1 : 0, &error)
                : play_round(call, group, dies && s->between == 1, &error);
        if (!played) {
            if (s->victim == (int)rank) {
                pause(); /* it has not died yet */
            }
            bool expected = s->victim >= 0 && error.code == EP_ERR_UNAVAILABLE &&
                            names_victim(error.text, s->victim);
            fprintf(stderr, "rank %u, round %d: %s: %s\n", rank, round, ep_err_name(error.code),
                    error.text);
            return expected ? 0 : 1;
        }
        if (round < 2 * BATCHES || round % 50 < BATCHES) {
            if (!rank_call_check_combine(call, 0)) {
                return 1;
            }
        }
        if (round == s->rounds / 4) {
            early_kib = resident_kib();
            ep_group_read_stats(group, &early);
        }
    }
    if (s->victim >= 0) {
        return 1; /* nobody told us */
    }
    ep_group_read_stats(group, &late);
    long grown = resident_kib() - early_kib;
    printf("rank %u: %d rounds, rss %ld KiB, grown %ld KiB since a quarter, frames %llu, buffers "
           "%llu KiB, peak %llu KiB, allocations %llu\n",
           rank, s->rounds, early_kib, grown, (unsigned long long)late.frames_received,
           (unsigned long long)late.buffer_bytes / 1024,
           (unsigned long long)late.buffer_bytes_peak / 1024,
           (unsigned long long)late.system_allocations);
    if (s->hosts > 0 && s->hosts < s->world && late.frames_passed_on == 0) {
        fprintf(stderr, "rank %u: nothing was passed on\n", rank);
        return 1;
    }
    if (s->rounds >= 20 && /* a sanitizer keeps what was freed */
        ((EP_TEST_ALLOC_COUNTED && grown > 4096 + early_kib / 8) ||
         late.buffer_bytes > 2 * early.buffer_bytes + (4u << 20))) {
        fprintf(stderr, "rank %u: memory grows with the rounds\n", rank);
        return 1;
    }
    return 0;
}

static int run_rank(const setting *s, uint32_t rank, const char *url)
{
    static oracle_case cases[BATCHES];
    static rank_call calls[BATCHES];
    /* far above what these seeds bring to one rank */
    int64_t rows = 4 * (int64_t)s->tokens_max * 8 + 64;
    for (int b = 0; b < BATCHES; b++) {
        draw(s, rank, b, &cases[b]);
        rank_call_init_rows(&calls[b], &cases[b], rank, rows);
        calls[b].params.comm_alg = s->hosts > 0 ? "hierarchy" : "";
    }
    ep_group *group = join(s, rank, url);
    int result = group == NULL ? 1 : play(s, rank, group, calls);
    for (int b = 0; b < BATCHES; b++) { /* what is under way belongs to the group */
        rank_call_free(&calls[b]);
        case_free(&cases[b]);
    }
    ep_group_destroy(group);
    return result;
}

/* ---- the parent ---- */

static bool wait_for_url(const char *path, char *out, size_t bytes)
{
    for (int i = 0; i < 6000; i++) { /* a minute; the file appears whole */
        char *text = ep_test_read_file(path);
        snprintf(out, bytes, "%s", text == NULL ? "" : text);
        free(text);
        if (out[0] != 0) {
            return true;
        }
        usleep(10000);
    }
    return false;
}

static bool start_rank(const setting *s, ep_test_process *process, const char *dir, int rank,
                       const char *url)
{
    char numbers[9][16];
    char name[16];
    const int values[9] = {s->world,  s->rounds,  s->tokens_max, s->experts, s->hidden,
                           s->victim, s->between, s->hosts,      rank};
    const char *args[12] = {"rank"};
    for (int i = 0; i < 9; i++) {
        snprintf(numbers[i], sizeof(numbers[i]), "%d", values[i]);
        args[i + 1] = numbers[i];
    }
    args[10] = url;
    snprintf(name, sizeof(name), "rank%d", rank);
    return ep_test_process_start(process, dir, name, "/proc/self/exe", args, NULL, false);
}

static int run_all(const setting *s)
{
    static ep_test_process ranks[ORACLE_RANKS_MAX];
    char dir[EP_TEST_PATH_BYTES];
    char path[EP_TEST_PATH_BYTES + 16];
    char url[128];
    if (!ep_test_dir_create(dir)) {
        return 1;
    }
    snprintf(path, sizeof(path), "%s/url", dir);
    bool good = start_rank(s, &ranks[0], dir, 0, path) &&
                (s->world == 1 || wait_for_url(path, url, sizeof(url)));
    for (int r = 1; r < s->world && good; r++) {
        good = start_rank(s, &ranks[r], dir, r, url);
    }
    for (int r = 0; r < s->world && good; r++) {
        int code = ep_test_process_wait(&ranks[r], 3600 * 1000);
        bool expected = r == s->victim ? code == 128 + SIGKILL : code == 0;
        if (!expected || r == 0) {
            char *output = ep_test_process_output(&ranks[r]);
            fprintf(stderr, "rank %d ended with %d\n%s", r, code, output);
            free(output);
        }
        good = expected;
    }
    for (int r = 0; r < s->world; r++) {
        ep_test_process_destroy(&ranks[r]);
    }
    ep_test_dir_remove(dir);
    return good ? 0 : 1;
}

static setting read_setting(char **argv, int argc)
{
    setting s = {.victim = -1};
    int *fields[] = {&s.world,  &s.rounds, &s.tokens_max, &s.experts,
                     &s.hidden, &s.victim, &s.between,    &s.hosts};
    for (int i = 0; i < argc && i < 8; i++) {
        *fields[i] = atoi(argv[i]);
    }
    return s;
}

int main(int argc, char **argv)
{
    if (argc == 12 && strcmp(argv[1], "rank") == 0) {
        setting s = read_setting(argv + 2, 8);
        return run_rank(&s, (uint32_t)atoi(argv[10]), argv[11]);
    }
    int first = 1;
    for (int i = 1; i < argc; i++) { /* numbers after "long" count when asked for */
        if (strcmp(argv[i], "long") == 0) {
            if (getenv("EP_TEST_LONG") != NULL) {
                first = i + 1;
            } else {
                argc = i;
            }
        }
    }
    setting s = read_setting(argv + first, argc - first);
    return run_all(&s);
}
