/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The weight store. How often an expert is in memory when it is used, a quarter of the model's experts being there, against the usual
 * policies and the one that knows the future, on five loads like real models'; what loading costs calls for experts that are in memory;
 * what a start costs with the packed experts on disk, against reading these files alone; the first call after a start.
 *
 * Policy rows: the ratio is against the best rival, the limit is Belady's. Prefetch: one load per visit of a layer at most.
 */
#include <dirent.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "backends/host_common.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/random.h"
#include "bench/bench_guard.h"
#include "bench/bench_report.h"
#include "bench/store_rivals.h"
#include "bench/store_trace.h"
#include "expertd/weight_cache.h"
#include "expertd/weight_store.h"
#include "moe/expert_heat.h"
#include "support/checkpoint_fixture.h"

#define PREFETCH_LAYERS 4
#define HIDDEN 2048
#define INNER 768
#define EXPERTS 24
#define RESIDENT 12
#define STARTS 3
#define WINDOWS 6      /* pairs of quiet and loading */
#define WINDOW_CALLS 700
#define PACE_NS 800000 /* a call begins so long after the one before, or when that has ended */

/* ---- policies ---- */

static const trace_setting settings[] = {
    {"one user, 128 experts, 8 of them", 12, 128, 8, 1, 5, 1.1f, 0.35f, 0.0f, 64, 32, 6, 2500},
    {"many users, 128 experts, 8 of them", 12, 128, 8, 4, 5, 1.2f, 0.35f, 0.05f, 64, 1, 0, 2000},
    {"agents, 256 experts, 8 of them", 12, 256, 8, 2, 6, 1.28f, 0.3f, 0.05f, 100, 1, 3, 2500},
    {"small, 32 experts, 4 of them", 24, 32, 4, 1, 4, 0.87f, 0.45f, 0.0f, 200, 64, 2, 2500},
    {"drift, 64 experts, 6 of them", 16, 64, 6, 1, 5, 1.4f, 0.25f, 0.2f, 50, 16, 8, 2500},
};

typedef struct own_pool {
    uint32_t experts;
    uint32_t used;
    uint32_t capacity;
    uint32_t visit;       /* 1-based */
    uint8_t *place;       /* 0 absent, 1 there, 2 there ahead of time and not used yet */
    uint32_t *last_visit; /* [layers][experts] the present visit holds those it found */
    ep_expert_heat *heat;
    uint64_t prefetches;
    uint64_t useful;
} own_pool;

static bool is_free(void *arg, uint32_t layer, uint32_t expert)
{
    const own_pool *p = arg;
    return p->last_visit[layer * p->experts + expert] != p->visit;
}

static void own_load(own_pool *p, uint32_t layer, uint32_t expert, uint8_t place)
{
    ep_heat_choice victim;
    if (p->used < p->capacity) {
        p->used++;
    } else {
        if (!ep_expert_heat_victim(p->heat, is_free, p, &victim)) {
            EP_ASSERT(ep_expert_heat_victim(p->heat, NULL, NULL, &victim));
        }
        ep_expert_heat_set_place(p->heat, victim.layer, victim.expert, EP_HEAT_ABSENT);
        p->place[victim.layer * p->experts + victim.expert] = 0;
    }
    ep_expert_heat_set_place(p->heat, layer, expert, EP_HEAT_RESIDENT);
    p->place[layer * p->experts + expert] = place;
}

static double own_hit_rate(const store_trace *trace, uint32_t capacity, uint32_t from, bool prefetches, double *out_useful)
{
    const uint32_t experts = trace->setting.experts;
    const uint32_t items = trace->setting.layers * experts;
    own_pool p = {.experts = experts, .capacity = capacity};
    uint64_t hits = 0, uses = 0;
    ep_heat_choice choice;
    p.place = calloc(items, 1);
    p.last_visit = calloc(items, sizeof(*p.last_visit));
    EP_ASSERT(p.place != NULL && p.last_visit != NULL && ep_expert_heat_create(&p.heat) == EP_OK);
    for (uint32_t l = 0; l < trace->setting.layers; l++) {
        EP_ASSERT(ep_expert_heat_add_layer(p.heat, experts, 1) == EP_OK);
        for (uint32_t e = 0; e < experts; e++) {
            ep_expert_heat_set_place(p.heat, l, e, EP_HEAT_ABSENT);
        }
    }
    for (uint32_t v = 0; v < trace->visits_count; v++) {
        const trace_visit *visit = &trace->visits[v];
        const uint32_t *of = trace->experts + visit->first;
        p.visit = v + 1;
        ep_expert_heat_visit(p.heat, visit->layer, of, trace->rows + visit->first, visit->count);
        for (uint32_t i = 0; i < visit->count; i++) {
            const uint32_t id = visit->layer * experts + of[i];
            p.useful += p.place[id] == 2;
            hits += v >= from && p.place[id] != 0;
            uses += v >= from;
            p.last_visit[id] = p.place[id] != 0 ? p.visit : p.last_visit[id];
            p.place[id] = p.place[id] != 0;
        }
        for (uint32_t i = 0; i < visit->count; i++) {
            if (p.place[visit->layer * experts + of[i]] == 0) {
                own_load(&p, visit->layer, of[i], 1);
            }
        }
        if (prefetches && p.used == capacity && ep_expert_heat_prefetch(p.heat, PREFETCH_LAYERS, false, is_free, &p, &choice)) {
            own_load(&p, choice.layer, choice.expert, 2);
            p.prefetches++;
        }
    }
    ep_expert_heat_destroy(p.heat);
    free(p.place);
    free(p.last_visit);
    *out_useful = p.prefetches > 0 ? (double)p.useful / (double)p.prefetches : 0;
    return (double)hits / (double)uses;
}

static void bench_policies(bench_report *report)
{
    for (size_t s = 0; s < EP_ARRAY_COUNT(settings); s++) {
        store_trace *trace = store_trace_make(&settings[s], 7 + s);
        const uint32_t capacity = settings[s].layers * settings[s].experts / 4;
        const uint32_t from = trace->visits_count / 5;
        double rates[RIVALS_COUNT], top, reuse, useful, best = 0;
        uint32_t best_rival = 0;
        store_trace_describe(trace, &top, &reuse);
        printf("%s: top tenth %.0f %% of uses, %.0f %% used in the visit before, %.1f experts per visit\n   ", settings[s].name,
               top * 100, reuse * 100, (double)trace->uses_count / trace->visits_count);
        for (uint32_t r = 0; r < RIVALS_COUNT; r++) {
            rates[r] = rival_hit_rate((rival)r, trace, capacity, from);
            printf(" %s %.1f", rival_names[r], rates[r] * 100);
            if (r != RIVAL_BELADY && rates[r] > best) {
                best = rates[r];
                best_rival = r;
            }
        }
        printf("\n");
        for (int prefetches = 0; prefetches < 2; prefetches++) {
            const double own = own_hit_rate(trace, capacity, from, prefetches, &useful);
            bench_row row = {.value = own * 100,
                             .unit = "% hits",
                             .limit = rates[RIVAL_BELADY] * 100,
                             .rival = best * 100,
                             .ratio = own / best,
                             .better = BENCH_HIGHER,
                             .bar = (best + (prefetches ? 0.02 : -0.01)) / best};
            snprintf(row.name, sizeof(row.name), "%s%s; best rival %s", settings[s].name, prefetches ? ", prefetch" : "",
                     rival_names[best_rival]);
            bench_report_add(report, &row);
            if (prefetches) {
                printf("    %.0f %% of prefetches were used\n", useful * 100);
            }
            fflush(stdout);
        }
        store_trace_free(trace);
    }
}

/* ---- a store on real files ---- */

static char checkpoint_dir[EP_FIXTURE_PATH_BYTES], cache_dir[EP_FIXTURE_PATH_BYTES];

typedef struct rig {
    ep_checkpoint *checkpoint;
    ep_backend *backend;
    ep_weight_cache *cache;
    ep_weight_store *store;
    ep_dtype dtype;
} rig;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static uint64_t changes;

static void on_change(void *arg)
{
    (void)arg;
    pthread_mutex_lock(&lock);
    changes++;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static void settle(rig *r)
{
    for (;;) {
        ep_weight_stats stats;
        pthread_mutex_lock(&lock);
        const uint64_t seen = changes;
        pthread_mutex_unlock(&lock);
        ep_weight_store_read_stats(r->store, &stats);
        EP_ASSERT(stats.failed_count == 0);
        if (stats.pending_count == 0) {
            return;
        }
        pthread_mutex_lock(&lock);
        while (changes == seen) {
            pthread_cond_wait(&changed, &lock);
        }
        pthread_mutex_unlock(&lock);
    }
}

/* Until the experts are there and the kernels are warm. */
static void rig_start(rig *r, uint32_t experts_max, bool has_cache)
{
    ep_error e;
    uint32_t slot;
    uint8_t wanted[EXPERTS];
    const ep_backend_config backend = {.threads = 0};
    *r = (rig){0};
    EP_ASSERT(ep_checkpoint_open(checkpoint_dir, &r->checkpoint, &e) == EP_OK);
    EP_ASSERT(ep_backend_by_name("cpu")->open(&backend, &r->backend, &e) == EP_OK);
    EP_ASSERT(!has_cache || ep_weight_cache_open(cache_dir, 0, r->backend, &r->cache, &e) == EP_OK);
    const ep_model_info *info = ep_checkpoint_info(r->checkpoint);
    const uint64_t expert_bytes = 3ull * HIDDEN * INNER * 2;
    const ep_weight_store_config config = {.backend = r->backend,
                                           .weight_bytes_max = experts_max * expert_bytes,
                                           .cache = r->cache,
                                           .warms_up = true,
                                           .on_change = on_change};
    ep_weight_layer layer = {
        .model = "bench", .checkpoint = r->checkpoint, .format = info->format, .shape = info->moe_layers[0]};
    EP_ASSERT(r->backend->ops->numerics_id(r->backend, info->format, layer.numerics) == EP_OK);
    EP_ASSERT(ep_checkpoint_identity(r->checkpoint, layer.identity, &e) == EP_OK);
    EP_ASSERT(ep_weight_store_create(&config, &r->store, &e) == EP_OK);
    EP_ASSERT(ep_weight_store_add_layer(r->store, &layer, &slot, &e) == EP_OK);
    EP_ASSERT(ep_weight_store_start(r->store, &e) == EP_OK);
    memset(wanted, 1, sizeof(wanted));
    ep_weight_store_want(r->store, 0, wanted);
    settle(r);
}

static void rig_stop(rig *r)
{
    ep_weight_store_destroy(r->store);
    ep_weight_cache_close(r->cache);
    r->backend->ops->close(r->backend);
    ep_checkpoint_close(r->checkpoint);
}

typedef struct one_job {
    pthread_mutex_t lock;
    pthread_cond_t ended;
    bool is_done;
} one_job;

static void on_job(ep_job *job, ep_err result)
{
    one_job *one = job->arg;
    EP_ASSERT(result == EP_OK);
    pthread_mutex_lock(&one->lock);
    one->is_done = true;
    pthread_cond_signal(&one->ended);
    pthread_mutex_unlock(&one->lock);
}

/* One row through a resident expert; microseconds. 0: it was not in memory. */
static double call_us(rig *r, uint32_t expert)
{
    static uint16_t x[HIDDEN], out[HIDDEN];
    const ep_job_row row = {.x = x, .x_scale = 1, .input_weight = 1, .out = out};
    one_job one = {.lock = PTHREAD_MUTEX_INITIALIZER, .ended = PTHREAD_COND_INITIALIZER};
    ep_resident *resident;
    uint32_t missing;
    ep_expert_state state;
    const double begin = bench_now_us();
    EP_ASSERT(ep_weight_store_acquire(r->store, 0, &expert, NULL, 1, &resident, &missing, &state));
    if (resident == NULL) {
        return 0;
    }
    ep_job job = {.weights = resident->weights, .rows = &row, .rows_count = 1, .x_dtype = EP_DTYPE_BF16, .out_dtype = EP_DTYPE_BF16,
                  .done = on_job, .arg = &one};
    EP_ASSERT(ep_backend_run(r->backend, &job) == EP_OK);
    pthread_mutex_lock(&one.lock);
    while (!one.is_done) {
        pthread_cond_wait(&one.ended, &one.lock);
    }
    pthread_mutex_unlock(&one.lock);
    ep_resident_release(resident);
    return bench_now_us() - begin;
}

/* ---- calls while others load ---- */

typedef struct asker {
    rig *r;
    ep_weight_wait wait;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool is_wanted; /* loads go on */
    bool ends;
    bool is_ready;
    uint64_t loads;
} asker;

static void on_ready(ep_weight_wait *wait, ep_resident *resident, const ep_error *error)
{
    asker *a = wait->arg;
    (void)error;
    ep_resident_release(resident);
    pthread_mutex_lock(&a->lock);
    a->is_ready = true;
    pthread_cond_broadcast(&a->changed);
    pthread_mutex_unlock(&a->lock);
}

/* Asks for one cold expert after the other. */
static void *ask(void *arg)
{
    asker *a = arg;
    uint32_t expert = 0;
    pthread_mutex_lock(&a->lock);
    while (!a->ends) {
        if (!a->is_wanted) {
            pthread_cond_wait(&a->changed, &a->lock);
            continue;
        }
        a->is_ready = false;
        a->wait = (ep_weight_wait){
            .expert = 4 + expert++ % (EXPERTS - 4), .deadline_ns = EP_TIME_NEVER, .ready = on_ready, .arg = a};
        pthread_mutex_unlock(&a->lock);
        ep_weight_store_wait(a->r->store, 0, &a->wait, 1);
        pthread_mutex_lock(&a->lock);
        while (!a->is_ready) {
            pthread_cond_wait(&a->changed, &a->lock);
        }
        a->loads++;
    }
    pthread_mutex_unlock(&a->lock);
    return NULL;
}

static double window_p99(rig *r, asker *a, bool loads)
{
    static double us[WINDOW_CALLS];
    size_t count = 0;
    pthread_mutex_lock(&a->lock);
    a->is_wanted = loads;
    pthread_cond_broadcast(&a->changed);
    pthread_mutex_unlock(&a->lock);
    uint64_t next_ns = ep_clock_now_ns();
    for (uint32_t i = 0; i < WINDOW_CALLS; i++) {
        const uint64_t now_ns = ep_clock_now_ns();
        if (now_ns < next_ns) {
            const struct timespec pause = {.tv_nsec = (long)(next_ns - now_ns)};
            nanosleep(&pause, NULL);
        }
        next_ns = (now_ns > next_ns ? now_ns : next_ns) + PACE_NS;
        us[count] = call_us(r, i % 4);
        count += us[count] > 0;
    }
    EP_ASSERT(count > WINDOW_CALLS / 2);
    return bench_quantile(us, count, 0.99);
}

static void bench_calls(bench_report *report)
{
    rig r;
    pthread_t thread;
    double ratios[WINDOWS], quiet[WINDOWS], loading[WINDOWS];
    rig_start(&r, RESIDENT, false);
    asker a = {.r = &r, .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    pthread_create(&thread, NULL, ask, &a);
    (void)window_p99(&r, &a, true);
    const uint64_t before = a.loads;
    double spent = 0;
    for (uint32_t w = 0; w < WINDOWS; w++) {
        quiet[w] = window_p99(&r, &a, false);
        const double from = bench_now_us();
        loading[w] = window_p99(&r, &a, true);
        spent += bench_now_us() - from;
        ratios[w] = loading[w] / quiet[w];
        printf("resident experts: p99 %.0f us, %.0f us while others load\n", quiet[w], loading[w]);
        fflush(stdout);
    }
    pthread_mutex_lock(&a.lock);
    printf("%.2f GB/s loaded meanwhile\n", (double)(a.loads - before) * 3 * HIDDEN * INNER * 2 / spent * 1e-3);
    a.ends = true;
    pthread_cond_broadcast(&a.changed);
    pthread_mutex_unlock(&a.lock);
    pthread_join(thread, NULL);
    rig_stop(&r);
    bench_row row = {.name = "p99 of resident experts, M = 1, while others load; limit: quiet",
                     .value = bench_quantile(loading, WINDOWS, 0.5),
                     .unit = "us",
                     .limit = bench_quantile(quiet, WINDOWS, 0.5),
                     .rival = NAN,
                     .ratio = bench_quantile(ratios, WINDOWS, 0.5),
                     .better = BENCH_LOWER,
                     .bar = 1.2};
    bench_report_add(report, &row);
}

/* ---- starts ---- */

/* Out of the page cache, as after a boot. Returns the bytes of all files. */
static uint64_t forget_files(const char *dir)
{
    uint64_t bytes = 0;
    DIR *d = opendir(dir);
    EP_ASSERT(d != NULL);
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        struct stat st;
        const int fd = openat(dirfd(d), e->d_name, O_RDONLY);
        if (fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode)) {
            (void)fdatasync(fd); /* dirty pages stay */
            (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
            bytes += (uint64_t)st.st_size;
        }
        if (fd >= 0) {
            close(fd);
        }
    }
    closedir(d);
    return bytes;
}

/* The same files read and nothing else, into memory of their own as a loader has to. */
static double read_files_us(const char *dir)
{
    void *memory[EXPERTS + 1];
    uint32_t count = 0;
    const double begin = bench_now_us();
    DIR *d = opendir(dir);
    for (struct dirent *e; d != NULL && (e = readdir(d)) != NULL && count <= EXPERTS;) {
        struct stat st;
        const int fd = openat(dirfd(d), e->d_name, O_RDONLY);
        if (fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode)) {
            memory[count] = ep_host_alloc((size_t)st.st_size);
            EP_ASSERT(memory[count] != NULL);
            for (off_t at = 0; at < st.st_size;) {
                const ssize_t n = pread(fd, (char *)memory[count] + at, (size_t)(st.st_size - at), at);
                EP_ASSERT(n > 0);
                at += n;
            }
            count++;
        }
        if (fd >= 0) {
            close(fd);
        }
    }
    closedir(d);
    const double us = bench_now_us() - begin;
    while (count > 0) {
        free(memory[--count]);
    }
    return us;
}

static void wait_written(rig *r)
{
    ep_weight_cache_stats stats;
    do {
        usleep(10000);
        ep_weight_cache_read_stats(r->cache, &stats);
    } while (stats.written_total < EXPERTS);
}

static void bench_starts(bench_report *report)
{
    double first[STARTS], second[STARTS], gain[STARTS], share[STARTS], reads[STARTS], early[STARTS];
    double us[200];
    for (uint32_t s = 0; s < STARTS; s++) {
        rig r;
        ep_fixture_remove(cache_dir);
        EP_ASSERT(mkdir(cache_dir, 0700) == 0);
        forget_files(checkpoint_dir);
        double begin = bench_now_us();
        rig_start(&r, 0, true);
        first[s] = bench_now_us() - begin;
        wait_written(&r);
        rig_stop(&r);
        const uint64_t bytes = forget_files(cache_dir);
        reads[s] = read_files_us(cache_dir);
        forget_files(cache_dir);
        begin = bench_now_us();
        rig_start(&r, 0, true);
        second[s] = bench_now_us() - begin;
        const double one = call_us(&r, EXPERTS - 1);
        for (size_t i = 0; i < EP_ARRAY_COUNT(us); i++) {
            us[i] = call_us(&r, (uint32_t)i % EXPERTS);
        }
        early[s] = one / bench_quantile(us, EP_ARRAY_COUNT(us), 0.5);
        rig_stop(&r);
        gain[s] = first[s] / second[s];
        share[s] = reads[s] / second[s];
        printf("start: %.0f ms, from packed files %.0f ms, reading these alone %.0f ms (%.2f GB/s); first call %.2f of the median\n",
               first[s] / 1e3, second[s] / 1e3, reads[s] / 1e3, (double)bytes / reads[s] * 1e-3, early[s]);
        fflush(stdout);
    }
    const bench_row rows[] = {
        {"second start: times as fast as the first", bench_quantile(gain, STARTS, 0.5), "x", NAN, NAN, NAN, BENCH_HIGHER, 3},
        {"second start: part of reading the files alone", bench_quantile(second, STARTS, 0.5) / 1e3, "ms",
         bench_quantile(reads, STARTS, 0.5) / 1e3, NAN, bench_quantile(share, STARTS, 0.5), BENCH_HIGHER, 0.8},
        {"first call after ready, of the steady median", bench_quantile(early, STARTS, 0.5), "x", NAN, NAN, NAN, BENCH_LOWER, 1.5},
    };
    for (size_t i = 0; i < EP_ARRAY_COUNT(rows); i++) {
        bench_report_add(report, &rows[i]);
    }
}

int main(int argc, char **argv)
{
    ep_error e;
    ep_fixture_config fixture = ep_fixture_default();
    fixture.layers = 1;
    fixture.experts = EXPERTS;
    fixture.distinct_experts = 2;
    fixture.hidden = HIDDEN;
    fixture.inner = INNER;
    ep_fixture_temp_dir(checkpoint_dir);
    ep_fixture_temp_dir(cache_dir);
    bench_guard((const char *[]){checkpoint_dir, cache_dir}, 2);
    bench_report *report = bench_report_create("weight store");
    bench_policies(report);
    if (ep_fixture_write(&fixture, checkpoint_dir, &e) != EP_OK) {
        fprintf(stderr, "%s\n", e.text);
        return 1;
    }
    bench_calls(report);
    bench_starts(report);
    return bench_report_finish(report, argc > 1 ? argv[1] : NULL);
}
