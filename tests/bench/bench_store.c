/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The weight store. What a start costs (store_loads.h), and with the packed experts on disk,
 * against reading these files alone; the first call after a start; what loading costs calls for
 * experts that are in memory; and how often an expert is in memory when it is used
 * (store_policies.h), with the time of loads as measured here.
 *
 * bench_store [JSON [starts|loads|calls|policies]]
 */
#include <dirent.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "backends/host_common.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/large_memory.h"
#include "bench/bench_guard.h"
#include "bench/bench_report.h"
#include "bench/store_loads.h"
#include "bench/store_policies.h"
#include "expertd/weight_cache.h"
#include "support/checkpoint_fixture.h"
#include "support/store_watch.h"

#define HIDDEN 2048
#define INNER 768
#define EXPERTS 24
#define RESIDENT 12
#define STARTS 7  /* first ones */
#define SECONDS 2 /* second ones after each, each in a pair with reading the files alone */
#define PIECE_BYTES (1 << 20) /* of a load, until it can give way */
#define FORGET_TRIES 100
#define WINDOWS 6 /* pairs of quiet and loading */
#define WINDOW_CALLS 700
#define PACE_NS 800000 /* a call begins so long after the one before, or when that has ended */

/* ---- a store on real files ---- */

static char checkpoint_dir[EP_FIXTURE_PATH_BYTES], cache_dir[EP_FIXTURE_PATH_BYTES];

typedef struct rig {
    ep_checkpoint *checkpoint;
    ep_backend *backend;
    ep_weight_cache *cache;
    ep_weight_store *store;
    ep_dtype dtype;
} rig;

static void settle(rig *r)
{
    EP_ASSERT(store_settle(r->store).failed_count == 0);
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
    const ep_weight_store_config config = {.backends = &r->backend,
                                           .backends_count = 1,
                                           .weight_bytes_max = experts_max * expert_bytes,
                                           .cache = r->cache,
                                           .warms_up = true,
                                           .on_change = store_on_change};
    ep_weight_layer layer = {.model = "bench",
                             .checkpoint = r->checkpoint,
                             .format = info->format,
                             .shape = info->moe_layers[0]};
    EP_ASSERT(r->backend->ops->numerics_id(r->backend, info->format, false, 0, layer.numerics) ==
              EP_OK);
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

static uint64_t calls, wrong_calls;

/* What an expert gave the first time, packed from the checkpoint, it gives every time. */
static void check_bits(uint32_t expert, const uint16_t *out)
{
    static uint16_t first[EXPERTS][HIDDEN];
    static bool is_known[EXPERTS];
    if (!is_known[expert]) {
        is_known[expert] = true;
        memcpy(first[expert], out, sizeof(first[expert]));
    }
    calls++;
    wrong_calls += memcmp(first[expert], out, sizeof(first[expert])) != 0;
}

/* One row through a resident expert; microseconds. 0: it was not in memory. */
static double call_us(rig *r, uint32_t expert)
{
    static uint16_t x[HIDDEN], out[HIDDEN];
    for (uint32_t i = 0; i < HIDDEN; i++) {
        /* bf16 of 0.5 to 2, either sign */
        x[i] = (uint16_t)(0x3f00u + i * 37u % 256u + (i % 2 == 0 ? 0x8000u : 0));
    }
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
    ep_job job = {.weights = resident->weights,
                  .rows = &row,
                  .rows_count = 1,
                  .x_dtype = EP_DTYPE_BF16,
                  .out_dtype = EP_DTYPE_BF16,
                  .done = on_job,
                  .arg = &one};
    EP_ASSERT(ep_backend_run(r->backend, &job) == EP_OK);
    pthread_mutex_lock(&one.lock);
    while (!one.is_done) {
        pthread_cond_wait(&one.ended, &one.lock);
    }
    pthread_mutex_unlock(&one.lock);
    const double us = bench_now_us() - begin;
    ep_resident_release(resident);
    check_bits(expert, out);
    return us;
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
        a->wait = (ep_weight_wait){.expert = 4 + expert++ % (EXPERTS - 4),
                                   .deadline_ns = EP_TIME_NEVER,
                                   .ready = on_ready,
                                   .arg = a};
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
    printf("%.2f GB/s loaded meanwhile\n",
           (double)(a.loads - before) * 3 * HIDDEN * INNER * 2 / spent * 1e-3);
    a.ends = true;
    pthread_cond_broadcast(&a.changed);
    pthread_mutex_unlock(&a.lock);
    pthread_join(thread, NULL);
    rig_stop(&r);
    bench_row row = bench_value(bench_quantile(loading, WINDOWS, 0.5), "us", BENCH_LOWER, 1.2);
    row.limit = bench_quantile(quiet, WINDOWS, 0.5);
    row.ratio = bench_quantile(ratios, WINDOWS, 0.5);
    bench_report_add(report, &row,
                     "p99 of resident experts, M = 1, while others load; limit: quiet");
}

/* ---- starts ---- */

/* Whether any of it is still in the page cache. */
static bool is_cached(int fd, size_t bytes)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t pages = (bytes + page - 1) / page;
    uint8_t *in_core = malloc(pages + 1);
    void *map = bytes > 0 ? mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;
    bool found = false;
    EP_ASSERT(in_core != NULL);
    if (map != MAP_FAILED && mincore(map, bytes, in_core) == 0) {
        for (size_t i = 0; i < pages && !found; i++) {
            found = (in_core[i] & 1) != 0;
        }
    }
    if (map != MAP_FAILED) {
        munmap(map, bytes);
    }
    free(in_core);
    return found;
}

/*
 * Out of the page cache, as after a boot, and nothing of what was written or removed before left
 * for the disk to do meanwhile. Returns the bytes of all files. Pages still on their way to the
 * disk stay, so it is tried until none is there.
 */
static uint64_t forget_files(const char *dir)
{
    uint64_t bytes = 0;
    DIR *d = opendir(dir);
    EP_ASSERT(d != NULL);
    (void)syncfs(dirfd(d));
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        struct stat st;
        const int fd = openat(dirfd(d), e->d_name, O_RDONLY);
        if (fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode)) {
            int tries = 0;
            do {
                (void)fdatasync(fd);
                (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
            } while (is_cached(fd, (size_t)st.st_size) && ++tries < FORGET_TRIES &&
                     usleep(1000) == 0);
            if (tries == FORGET_TRIES) {
                printf("%s stays in the page cache: what follows is no disk's figure\n", e->d_name);
            }
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
    size_t bytes[EXPERTS + 1];
    uint32_t count = 0;
    const double begin = bench_now_us();
    DIR *d = opendir(dir);
    for (struct dirent *e; d != NULL && (e = readdir(d)) != NULL && count <= EXPERTS;) {
        struct stat st;
        const int fd = openat(dirfd(d), e->d_name, O_RDONLY);
        if (fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode)) {
            bytes[count] = (size_t)st.st_size;
            memory[count] = ep_large_alloc(bytes[count], EP_HOST_ALIGN);
            EP_ASSERT(memory[count] != NULL);
            for (off_t at = 0; at < st.st_size;) {
                /* in pieces as a loader, which is quicker than all at once */
                const size_t left = (size_t)(st.st_size - at);
                const ssize_t n = pread(fd, (char *)memory[count] + at,
                                        left < PIECE_BYTES ? left : PIECE_BYTES, at);
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
        count--;
        ep_large_free(memory[count], bytes[count]);
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

/* A start with an empty cache, until all is written. */
static double first_start_us(void)
{
    rig r;
    ep_fixture_remove(cache_dir);
    EP_ASSERT(mkdir(cache_dir, 0700) == 0);
    forget_files(cache_dir); /* what removing left to do */
    forget_files(checkpoint_dir);
    const double begin = bench_now_us();
    rig_start(&r, 0, true);
    const double us = bench_now_us() - begin;
    wait_written(&r);
    for (uint32_t i = 0; i < EXPERTS; i++) {
        (void)call_us(&r, i);
    }
    rig_stop(&r);
    return us;
}

/* A start from the files; *out_early: the first call, of the median of all. */
static double second_start_us(double *out_early, store_clock *out_clock)
{
    double us[200];
    rig r;
    ep_weight_stats stats;
    forget_files(cache_dir);
    const double begin = bench_now_us();
    rig_start(&r, 0, true);
    const double second = bench_now_us() - begin;
    const double one = call_us(&r, EXPERTS - 1);
    for (size_t i = 0; i < EP_ARRAY_COUNT(us); i++) {
        us[i] = call_us(&r, (uint32_t)i % EXPERTS);
    }
    ep_weight_store_read_stats(r.store, &stats);
    const double median = bench_quantile(us, EP_ARRAY_COUNT(us), 0.5);
    *out_early = one / median;
    out_clock->load_us = (double)stats.load_ns_total / (double)stats.loads_total / 1e3;
    out_clock->compute_us = median;
    out_clock->piece_us = out_clock->load_us * PIECE_BYTES / (3.0 * HIDDEN * INNER * 2);
    rig_stop(&r);
    return second;
}

static void bench_starts(bench_report *report)
{
    enum { PAIRS = STARTS * SECONDS };
    double gain[PAIRS], share[PAIRS], reads[PAIRS], early[PAIRS], seconds[PAIRS];
    store_clock unused;
    for (uint32_t p = 0; p < PAIRS; p++) {
        static double first;
        first = p % SECONDS == 0 ? first_start_us() : first;
        const bool reads_first = p % 2 == 0; /* neither has what the other left behind more often */
        uint64_t bytes = forget_files(cache_dir);
        reads[p] = reads_first ? read_files_us(cache_dir) : 0;
        seconds[p] = second_start_us(&early[p], &unused);
        if (!reads_first) {
            bytes = forget_files(cache_dir);
            reads[p] = read_files_us(cache_dir);
        }
        gain[p] = first / seconds[p];
        share[p] = reads[p] / seconds[p];
        printf("start: %.0f ms, from packed files %.0f ms, reading these alone %.0f ms (%.2f "
               "GB/s); first call %.2f of the median\n",
               first / 1e3, seconds[p] / 1e3, reads[p] / 1e3, (double)bytes / reads[p] * 1e-3,
               early[p]);
        fflush(stdout);
    }
    bench_report_value(report, bench_quantile(gain, PAIRS, 0.5), "x", BENCH_HIGHER, 3,
                       "second start: times as fast as the first");
    bench_row row = bench_value(bench_quantile(seconds, PAIRS, 0.5) / 1e3, "ms", BENCH_HIGHER, 0.8);
    row.limit = bench_quantile(reads, PAIRS, 0.5) / 1e3;
    row.ratio = bench_quantile(share, PAIRS, 0.5);
    bench_report_add(report, &row, "second start: part of reading the files alone");
    bench_report_value(report, bench_quantile(early, PAIRS, 0.5), "x", BENCH_LOWER, 1.5,
                       "first call after ready, of the steady median");
}

int main(int argc, char **argv)
{
    ep_error e;
    const char *only = argc > 2 ? argv[2] : "";
    ep_fixture_config fixture = ep_fixture_layer(HIDDEN, INNER, EXPERTS, 2);
    fixture.distinct_experts = 2;
    ep_fixture_temp_dir(checkpoint_dir);
    ep_fixture_temp_dir(cache_dir);
    bench_guard((const char *[]){checkpoint_dir, cache_dir}, 2);
    bench_report *report = bench_report_create("weight store");
    if (ep_fixture_write(&fixture, checkpoint_dir, &e) != EP_OK) {
        fprintf(stderr, "%s\n", e.text);
        return 1;
    }
    if (*only == 0 || strcmp(only, "starts") == 0) {
        bench_starts(report);
    }
    if (*only == 0 || strcmp(only, "loads") == 0) {
        store_bench_loads(report, cache_dir);
    }
    if (*only == 0 || strcmp(only, "calls") == 0) {
        bench_calls(report);
    }
    if (*only == 0 || strcmp(only, "policies") == 0) {
        store_clock clock = {0};
        double early;
        (void)first_start_us();
        (void)second_start_us(&early, &clock);
        store_bench_policies(report, &clock);
    }
    printf("%llu calls compared, through experts packed from the checkpoint, from packed files, "
           "and evicted and loaded again\n",
           (unsigned long long)calls);
    bench_report_value(report, (double)wrong_calls, "", BENCH_LOWER, 0, "calls with wrong bits");
    return bench_report_finish(report, argc > 1 ? argv[1] : NULL);
}
