/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Are copies to and from an NPU hidden behind its compute, or the other way round? Backend ascend
 * on the emulated device, whose copies and products last as long as on hardware, all slowed down
 * alike so that this host's own work and waits do not count: that shows the pipeline, not a speed.
 * A run of many passes against the longest of its three stages alone.
 *
 * Figures that are published, for one die of an Ascend 910C (Atlas A3); those of a 910B (Atlas A2)
 * are near:
 *   compute   376 TFLOPS bf16 and 1.6 TB/s of device memory: "Serving Large Language Models on
 *             Huawei CloudMatrix384", arXiv 2506.12708, section 3.2 (752 TFLOPS and 3.2 TB/s for a
 *             chip of two dies)
 *   PCIe      4.0 with 16 lanes, 31.5 GB/s in each direction, of which at most 80 % are reached:
 *             hiascend.com, mindsdk 7.3.0, mxrec_performance_tuning_0014
 *   UB        196 GB/s in each direction for a die: the same paper, section 3.3
 * A pass takes the longer of its arithmetic and of reading each expert's weights once.
 *
 * Two rows without a bar are real time: what one thread of this host gathers into pinned memory and
 * takes out of it.
 */
#include <dirent.h>
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backends/backend.h"
#include "base/check.h"
#include "bench/bench_report.h"

#define COMPUTE_FLOPS 376e12
#define MEMORY_BYTES_PER_S 1.6e12
#define PCIE_BYTES_PER_S (0.8 * 31.5e9)
#define UB_BYTES_PER_S 196e9

#define ROWS 1024 /* of a pass: as many as it takes of several experts */
#define PASSES 48
#define STAGE_S 20e-3 /* of the longest stage of a pass, slowed down */
#define HIDDEN 32     /* of what the emulation computes; its times are those of the case */
#define INNER 16
#define COUNTS_BYTES (128 * 8.0) /* that a pass copies in front of its rows */
#define HOST_HIDDEN 7168
#define HOST_PASSES 4

typedef struct bench_case {
    const char *name;
    double hidden;
    double inner;
    uint32_t experts; /* of a pass */
    double link;
} bench_case;

static const bench_case cases[] = {
    {"DeepSeek-V3 7168x2048, 1 expert, PCIe", 7168, 2048, 1, PCIE_BYTES_PER_S},
    {"DeepSeek-V3 7168x2048, 1 expert, UB", 7168, 2048, 1, UB_BYTES_PER_S},
    {"DeepSeek-V3 7168x2048, 8 experts, PCIe", 7168, 2048, 8, PCIE_BYTES_PER_S},
    {"DeepSeek-V3 7168x2048, 128 experts, PCIe", 7168, 2048, 128, PCIE_BYTES_PER_S},
    {"Mixtral 4096x14336, 1 expert, PCIe", 4096, 14336, 1, PCIE_BYTES_PER_S},
    {"Qwen3-30B-A3B 2048x768, 1 expert, PCIe", 2048, 768, 1, PCIE_BYTES_PER_S},
    {"all three stages as long: 4096x4974, 1 expert, PCIe", 4096,
     COMPUTE_FLOPS / (3 * PCIE_BYTES_PER_S), 1, PCIE_BYTES_PER_S},
};

/* ---- jobs ---- */

typedef struct run {
    ep_backend *backend;
    ep_backend_weights *weights;
    uint32_t hidden;
    uint16_t *x; /* [ROWS,H]: of every job */
    uint16_t *y;
    ep_job_row *rows; /* [ROWS] */
    ep_job *jobs;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint32_t done_count;
} run;

static void on_done(ep_job *job, ep_err result)
{
    run *r = job->arg;
    if (result != EP_OK) {
        bench_fail("a job", ep_err_name(result));
    }
    pthread_mutex_lock(&r->lock);
    r->done_count++;
    pthread_cond_signal(&r->changed);
    pthread_mutex_unlock(&r->lock);
}

static void run_open(run *r, uint32_t hidden)
{
    const ep_backend_config config = {.numerics = EP_NUMERICS_AUTO};
    ep_error error;
    void *matrix = bench_room((size_t)hidden * INNER * sizeof(uint16_t));
    const ep_expert_source source = {.hidden = hidden,
                                     .inner = INNER,
                                     .format = EP_WEIGHTS_BF16,
                                     .activation = EP_ACT_SILU,
                                     .gate = matrix,
                                     .up = matrix,
                                     .down = matrix};
    memset(r, 0, sizeof(*r));
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->changed, NULL);
    r->hidden = hidden;
    if (ep_backend_by_name("ascend")->open(&config, &r->backend, &error) != EP_OK ||
        r->backend->ops->weights_load(r->backend, &source, &r->weights, &error) != EP_OK) {
        bench_fail("backend ascend", error.text);
    }
    free(matrix);
    r->x = bench_room((size_t)ROWS * hidden * sizeof(*r->x));
    r->y = bench_room((size_t)ROWS * hidden * sizeof(*r->y));
    r->rows = bench_room(ROWS * sizeof(*r->rows));
    for (size_t i = 0; i < ROWS; i++) {
        r->rows[i] = (ep_job_row){.x = r->x + i * hidden, .out = r->y + i * hidden};
    }
}

static void run_close(run *r)
{
    r->backend->ops->weights_unload(r->backend, r->weights);
    r->backend->ops->close(r->backend);
    free(r->x);
    free(r->y);
    free(r->rows);
    pthread_mutex_destroy(&r->lock);
    pthread_cond_destroy(&r->changed);
}

/* Passes of ROWS rows, each of so many jobs; seconds from the first job to the last result. Results
 * of all passes are written to the same place: nobody reads them. */
static double run_passes(run *r, uint32_t passes, uint32_t experts)
{
    const uint32_t count = passes * experts;
    const double began_us = bench_now_us();
    r->jobs = bench_room(count * sizeof(*r->jobs));
    r->done_count = 0;
    for (uint32_t j = 0; j < count; j++) {
        r->jobs[j] = (ep_job){.weights = r->weights,
                              .rows = r->rows + (size_t)(j % experts) * (ROWS / experts),
                              .rows_count = ROWS / experts,
                              .x_dtype = EP_DTYPE_BF16,
                              .out_dtype = EP_DTYPE_BF16,
                              .done = on_done,
                              .arg = r};
        const ep_err err = ep_backend_run(r->backend, &r->jobs[j]);
        if (err != EP_OK) {
            bench_fail("submit", ep_err_name(err));
        }
    }
    pthread_mutex_lock(&r->lock);
    while (r->done_count < count) {
        pthread_cond_wait(&r->changed, &r->lock);
    }
    pthread_mutex_unlock(&r->lock);
    free(r->jobs);
    return (bench_now_us() - began_us) / 1e6;
}

/* ---- the pipeline ---- */

static void set_rate(const char *name, double rate)
{
    char text[32];
    snprintf(text, sizeof(text), "%" PRIu64, (uint64_t)rate);
    setenv(name, text, 1);
}

static void add_case(bench_report *report, const bench_case *c)
{
    const double copy_s = ROWS * 2 * c->hidden / c->link; /* in as out */
    /* of a row, and bytes of an expert's weights */
    const double product = 6 * c->hidden * c->inner;
    const double compute_s =
        fmax(ROWS * product / COMPUTE_FLOPS, c->experts * product / MEMORY_BYTES_PER_S);
    const double slower = STAGE_S / fmax(copy_s, compute_s);
    run r;
    set_rate("EP_CANN_IN_RATE", (ROWS * 2 * HIDDEN + COUNTS_BYTES) / (slower * copy_s));
    set_rate("EP_CANN_OUT_RATE", ROWS * 2 * HIDDEN / (slower * copy_s));
    set_rate("EP_CANN_FLOPS", 6.0 * ROWS * HIDDEN * INNER / (slower * compute_s));
    run_open(&r, HIDDEN);
    (void)run_passes(&r, 2, c->experts);
    const double seconds = run_passes(&r, PASSES, c->experts);
    run_close(&r);
    bench_row row = bench_value(seconds * 1e3, "ms", BENCH_LOWER, 1.10);
    row.limit = PASSES * STAGE_S * 1e3;
    row.rival = PASSES * slower * (2 * copy_s + compute_s) * 1e3;
    bench_report_add(report, &row, "%s", c->name);
}

/* ---- this host ---- */

/* CPU time of a thread of this process, by its name. */
static double thread_seconds(const char *name)
{
    uint64_t found_ns = 0;
    DIR *tasks = opendir("/proc/self/task");
    for (struct dirent *task; tasks != NULL && (task = readdir(tasks)) != NULL;) {
        char path[320];
        char comm[32] = "";
        snprintf(path, sizeof(path), "/proc/self/task/%s/comm", task->d_name);
        FILE *file = fopen(path, "r");
        const bool is_it =
            file != NULL && fscanf(file, "%31s", comm) == 1 && strcmp(comm, name) == 0;
        if (file != NULL) {
            fclose(file);
        }
        snprintf(path, sizeof(path), "/proc/self/task/%s/schedstat", task->d_name);
        file = is_it ? fopen(path, "r") : NULL;
        if (file != NULL) {
            (void)!fscanf(file, "%" SCNu64, &found_ns);
            fclose(file);
        }
    }
    if (tasks != NULL) {
        closedir(tasks);
    }
    if (found_ns == 0) {
        bench_fail("no CPU time in /proc of thread", name);
    }
    return (double)found_ns * 1e-9;
}

static void add_host(bench_report *report)
{
    static const struct {
        const char *thread;
        const char *name;
    } parts[] = {{"ep-ascend-in", "this host: rows into pinned memory, one thread"},
                 {"ep-ascend-out", "this host: results out of it, one thread"}};
    double began[EP_ARRAY_COUNT(parts)];
    run r;
    unsetenv("EP_CANN_IN_RATE");
    unsetenv("EP_CANN_OUT_RATE");
    unsetenv("EP_CANN_FLOPS");
    run_open(&r, HOST_HIDDEN);
    (void)run_passes(&r, HOST_PASSES, 1); /* each slot has its memory then */
    for (size_t i = 0; i < EP_ARRAY_COUNT(parts); i++) {
        began[i] = thread_seconds(parts[i].thread);
    }
    (void)run_passes(&r, HOST_PASSES, 1);
    for (size_t i = 0; i < EP_ARRAY_COUNT(parts); i++) {
        const double seconds = thread_seconds(parts[i].thread) - began[i];
        bench_report_rival(report, HOST_PASSES * 2.0 * ROWS * HOST_HIDDEN / seconds * 1e-9, "GB/s",
                           PCIE_BYTES_PER_S * 1e-9, NAN, BENCH_HIGHER, NAN, "%s", parts[i].name);
    }
    run_close(&r);
}

int main(int argc, char **argv)
{
    setenv("ASCEND_HOME_PATH", EP_BENCH_CANN, 1);
    setenv("EP_CANN_DELAY_US", "0", 1);
    bench_report *report = bench_report_create("Backend ascend on the emulated device: passes of "
                                               "1024 rows of bf16; limit: the longest stage alone; "
                                               "rival: one stage after the other");
    for (size_t i = 0; i < EP_ARRAY_COUNT(cases); i++) {
        add_case(report, &cases[i]);
    }
    add_host(report);
    return bench_report_finish(report, argc > 1 ? argv[1] : NULL);
}
