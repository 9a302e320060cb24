/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An Ascend device as backend ascend finds it: copies between pinned host memory and the device,
 * and the experts of one layer, against backend cpu. For a machine with a device
 * (deploy/examples/ascend-first-run); on the emulated one the figures mean nothing.
 *
 *     bench_ascend [JSON] [copy=BYTES] [shape=HxI] [experts=N] [rows=N]      rows: of each expert
 */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backends/ascend/acl_symbols.h"
#include "backends/backend.h"
#include "base/log.h"
#include "base/numeric.h"
#include "base/random.h"
#include "bench/bench_report.h"

#define EXPERTS_MAX 128
#define TIMEOUT_MS 60000
#define ROUNDS 9

/* Each of the steps inside an expert rounds to bf16 (2^-9 on average less): five of them, as the
 * CPU's f32 does not. */
#define ERROR_MAX 0x1p-6

typedef struct options {
    const char *json;
    size_t copy_bytes;
    uint32_t hidden;
    uint32_t inner;
    uint32_t experts;
    uint32_t rows;
} options;

static void add_row(bench_report *report, const char *name, double value, const char *unit,
                    double rival, double bar)
{
    bench_report_rival(report, value, unit, rival, NAN,
                       strcmp(unit, "GB/s") == 0 ? BENCH_HIGHER : BENCH_LOWER, bar, "%s", name);
}

/* ---- copies ---- */

static void must(const ep_acl_symbols *acl, ep_acl_code code, const char *call)
{
    if (code != EP_ACL_SUCCESS) {
        const char *said = acl->aclGetRecentErrMsg != NULL ? acl->aclGetRecentErrMsg() : NULL;
        char text[512];
        snprintf(text, sizeof(text), "%s, code %d: %.300s", ep_acl_code_name(code), code,
                 said != NULL ? said : "");
        bench_fail(call, text);
    }
}
#define MUST(call) must(acl, acl->call, #call)

typedef struct copies {
    ep_acl_stream streams[2];
    void *host[2];
    void *device[2];
} copies;

/* Bytes per second: to the device, from it, or both at once. */
static double time_copies(const ep_acl_symbols *acl, const copies *c, size_t bytes, bool in,
                          bool out)
{
    double us[ROUNDS];
    for (int i = -1; i < ROUNDS; i++) {
        const double began = bench_now_us();
        if (in) {
            MUST(aclrtMemcpyAsync(c->device[0], bytes, c->host[0], bytes, EP_ACL_HOST_TO_DEVICE,
                                  c->streams[0]));
        }
        if (out) {
            MUST(aclrtMemcpyAsync(c->host[1], bytes, c->device[1], bytes, EP_ACL_DEVICE_TO_HOST,
                                  c->streams[1]));
        }
        MUST(aclrtSynchronizeStreamWithTimeout(c->streams[0], TIMEOUT_MS));
        MUST(aclrtSynchronizeStreamWithTimeout(c->streams[1], TIMEOUT_MS));
        us[i < 0 ? 0 : i] = bench_now_us() - began; /* the first is for warmth */
    }
    return (double)bytes * (in + out) / bench_quantile(us, ROUNDS, 0.5) * 1e6;
}

/* The backend is open: its aclInit serves us too. */
static void measure_copies(bench_report *report, size_t bytes)
{
    ep_acl_symbols symbols;
    const ep_acl_symbols *acl = &symbols;
    ep_error error;
    copies c;
    if (ep_acl_symbols_load(ep_acl_opener_system(), &symbols, &error) != EP_OK) {
        bench_fail("CANN", error.text);
    }
    MUST(aclrtSetDevice(0));
    for (int i = 0; i < 2; i++) {
        MUST(aclrtCreateStream(&c.streams[i]));
        MUST(aclrtMallocHost(&c.host[i], bytes));
        MUST(aclrtMalloc(&c.device[i], bytes, EP_ACL_MALLOC_HUGE_FIRST));
    }
    const size_t small = 4096;
    char name[96];
    const char *const unit = "GB/s";
    snprintf(name, sizeof(name), "copy to the device, %zu bytes", bytes);
    add_row(report, name, time_copies(acl, &c, bytes, true, false) * 1e-9, unit, NAN, NAN);
    snprintf(name, sizeof(name), "copy from the device, %zu bytes", bytes);
    add_row(report, name, time_copies(acl, &c, bytes, false, true) * 1e-9, unit, NAN, NAN);
    snprintf(name, sizeof(name), "both at once, together");
    add_row(report, name, time_copies(acl, &c, bytes, true, true) * 1e-9, unit, NAN, NAN);
    add_row(report, "copy of 4096 bytes and wait",
            (double)small / time_copies(acl, &c, small, true, false) * 1e6, "us", NAN, NAN);
    for (int i = 0; i < 2; i++) {
        MUST(aclrtDestroyStream(c.streams[i]));
        MUST(aclrtFreeHost(c.host[i]));
        MUST(aclrtFree(c.device[i]));
    }
}

/* ---- a layer ---- */

typedef struct layer {
    ep_backend *backend;
    ep_backend_weights *weights[EXPERTS_MAX];
    ep_job jobs[EXPERTS_MAX];
    ep_job_row *rows;
    uint16_t *y;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint32_t done_count;
} layer;

static void on_done(ep_job *job, ep_err result)
{
    layer *l = job->arg;
    if (result != EP_OK) {
        bench_fail("a job", ep_err_name(result));
    }
    pthread_mutex_lock(&l->lock);
    l->done_count++;
    pthread_cond_signal(&l->changed);
    pthread_mutex_unlock(&l->lock);
}

static void open_backend(layer *l, const char *name)
{
    const ep_backend_config config = {.numerics = strcmp(name, "cpu") == 0 ? EP_NUMERICS_PORTABLE
                                                                           : EP_NUMERICS_AUTO};
    ep_error error;
    memset(l, 0, sizeof(*l));
    pthread_mutex_init(&l->lock, NULL);
    pthread_cond_init(&l->changed, NULL);
    if (ep_backend_by_name(name)->open(&config, &l->backend, &error) != EP_OK) {
        bench_fail(name, error.text);
    }
}

/* The same experts for both backends. */
static void load_layer(layer *l, const options *o, const uint16_t *x)
{
    const size_t matrix = (size_t)o->hidden * o->inner;
    uint16_t *weights = bench_room(3 * matrix * sizeof(*weights));
    uint64_t seed = 7;
    ep_error error;
    for (uint32_t e = 0; e < o->experts; e++) {
        for (size_t i = 0; i < 3 * matrix; i++) { /* rows of products keep about the size of x */
            const float value = (float)(int32_t)ep_splitmix64(&seed) * 0x1p-31f;
            weights[i] = ep_f32_to_bf16(
                value / sqrtf((float)(i < 2 * matrix ? o->hidden : o->inner)) * 1.7f);
        }
        const ep_expert_source source = {.hidden = o->hidden,
                                         .inner = o->inner,
                                         .format = EP_WEIGHTS_BF16,
                                         .activation = EP_ACT_SILU,
                                         .gate = weights,
                                         .up = weights + matrix,
                                         .down = weights + 2 * matrix};
        if (l->backend->ops->weights_load(l->backend, &source, &l->weights[e], &error) != EP_OK) {
            bench_fail("an expert", error.text);
        }
    }
    free(weights);
    const size_t count = (size_t)o->experts * o->rows;
    l->rows = bench_room(count * sizeof(*l->rows));
    l->y = bench_room(count * o->hidden * sizeof(*l->y));
    for (size_t i = 0; i < count; i++) {
        l->rows[i] = (ep_job_row){.x = x + i * o->hidden, .out = l->y + i * o->hidden};
    }
}

static double run_layer(layer *l, const options *o)
{
    double us[ROUNDS];
    for (int round = -1; round < ROUNDS; round++) {
        const double began = bench_now_us();
        l->done_count = 0;
        for (uint32_t e = 0; e < o->experts; e++) {
            l->jobs[e] = (ep_job){.weights = l->weights[e],
                                  .rows = l->rows + (size_t)e * o->rows,
                                  .rows_count = o->rows,
                                  .x_dtype = EP_DTYPE_BF16,
                                  .out_dtype = EP_DTYPE_BF16,
                                  .done = on_done,
                                  .arg = l};
            const ep_err err = ep_backend_run(l->backend, &l->jobs[e]);
            if (err != EP_OK) {
                bench_fail("submit", ep_err_name(err));
            }
        }
        pthread_mutex_lock(&l->lock);
        while (l->done_count < o->experts) {
            pthread_cond_wait(&l->changed, &l->lock);
        }
        pthread_mutex_unlock(&l->lock);
        us[round < 0 ? 0 : round] = bench_now_us() - began;
    }
    return bench_quantile(us, ROUNDS, 0.5);
}

static void close_layer(layer *l, const options *o)
{
    for (uint32_t e = 0; e < o->experts; e++) {
        l->backend->ops->weights_unload(l->backend, l->weights[e]);
    }
    l->backend->ops->close(l->backend);
    free(l->rows);
    free(l->y);
    pthread_mutex_destroy(&l->lock);
    pthread_cond_destroy(&l->changed);
}

static double relative_error(const uint16_t *y, const uint16_t *wanted, size_t count)
{
    double error = 0.0;
    double size = 0.0;
    for (size_t i = 0; i < count; i++) {
        const double want = (double)ep_bf16_to_f32(wanted[i]);
        const double difference = (double)ep_bf16_to_f32(y[i]) - want;
        error += difference * difference;
        size += want * want;
    }
    return sqrt(error / size);
}

static void measure_layer(bench_report *report, const options *o, layer *device)
{
    const size_t values = (size_t)o->experts * o->rows * o->hidden;
    uint16_t *x = bench_room(values * sizeof(*x));
    uint64_t seed = 3;
    layer cpu;
    char name[96];
    for (size_t i = 0; i < values; i++) {
        x[i] = ep_f32_to_bf16((float)(int32_t)ep_splitmix64(&seed) * 0x1p-31f);
    }
    open_backend(&cpu, "cpu");
    load_layer(&cpu, o, x);
    load_layer(device, o, x);
    const double cpu_us = run_layer(&cpu, o);
    const double device_us = run_layer(device, o);
    snprintf(name, sizeof(name), "layer of %u experts %ux%u, %u rows each; cpu beside it",
             o->experts, o->hidden, o->inner, o->rows);
    add_row(report, name, device_us, "us", cpu_us, NAN);
    add_row(report, "error against the cpu, root mean square, relative",
            relative_error(device->y, cpu.y, values), "", NAN, ERROR_MAX);
    close_layer(&cpu, o);
    free(x);
}

static options read_options(int argc, char **argv)
{
    options o = {
        .copy_bytes = (size_t)64 << 20, .hidden = 2048, .inner = 768, .experts = 8, .rows = 32};
    for (int i = 1; i < argc; i++) {
        const bool known = sscanf(argv[i], "copy=%zu", &o.copy_bytes) == 1 ||
                           sscanf(argv[i], "shape=%ux%u", &o.hidden, &o.inner) == 2 ||
                           sscanf(argv[i], "experts=%u", &o.experts) == 1 ||
                           sscanf(argv[i], "rows=%u", &o.rows) == 1;
        if (!known && (i > 1 || strchr(argv[i], '=') != NULL)) {
            bench_fail(argv[i], "allowed: copy=BYTES shape=HxI experts=N rows=N");
        }
        o.json = known ? o.json : argv[i];
    }
    if (o.copy_bytes < 4096 || o.hidden == 0 || o.inner == 0 || o.experts == 0 ||
        o.experts > EXPERTS_MAX || o.rows == 0 || o.rows > EP_JOB_ROWS_MAX) {
        bench_fail("options", "allowed: copy from 4096 on, experts 1..128, rows 1..4096");
    }
    return o;
}

int main(int argc, char **argv)
{
    const options o = read_options(argc, argv);
    layer device;
    ep_log_start(EP_LOG_INFO, EP_LOG_TEXT);
    open_backend(&device, "ascend");
    bench_report *report = bench_report_create("Backend ascend on this machine's first device");
    measure_copies(report, o.copy_bytes);
    measure_layer(report, &o, &device);
    close_layer(&device, &o);
    return bench_report_finish(report, o.json);
}
