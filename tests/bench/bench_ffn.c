/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Experts through the cpu backend: jobs of many experts at once, weights far beyond the caches, all workers. Every repetition is paired with
 * a plain read of the same weights and with the peak of the weight type's instruction on the same number of threads (ffn_limit.h); the share
 * of the limit is the median over the repetitions of the greater of the two against the time taken.
 *
 *     bench_ffn [JSON] [shape=2048x768] [m=16] [dtype=bf16] [seconds=1] [threads=N] [rivals=no]
 *
 * names one cell, or one row or column of cells, for tuning.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "backends/host_common.h"
#include "bench/bench_report.h"
#include "bench/ffn_experts.h"

enum { SHAPES = 3, SIZES = 6, REPETITIONS_MIN = 3, REPETITIONS_MAX = 1000, ROWS_MAX = EP_JOB_ROWS_MAX };

static const uint32_t shapes[SHAPES][2] = {{2048, 768}, {7168, 2048}, {4096, 14336}};
static const uint32_t sizes[SIZES] = {1, 4, 16, 64, 256, 1024};

/* Share of the limit that oneDNN (3.14, its own best layouts) was measured to reach; on another machine, whose limits were other ones. */
static const double recorded_bf16[SHAPES][SIZES] = {
    {.95, .97, .69, .79, .92, .93}, {1.00, .98, .73, .84, .96, .96}, {.98, .95, .74, .84, .95, .94}};

typedef struct {
    const char *name;
    ep_dtype dtype;
    bool by_default;
    double bar;
    double bar_ridge; /* M = 16: memory and arithmetic are both needed all the time */
    const double (*recorded)[SIZES];
} weight_type;

static const weight_type types[] = {
    {.name = "bf16", .dtype = EP_DTYPE_BF16, .by_default = true, .bar = .95, .bar_ridge = .88, .recorded = recorded_bf16},
    {.name = "f16", .dtype = EP_DTYPE_F16, .bar = NAN, .bar_ridge = NAN},
    {.name = "f32", .dtype = EP_DTYPE_F32, .bar = NAN, .bar_ridge = NAN},
};
enum { TYPES = sizeof(types) / sizeof(types[0]) };

typedef struct {
    const char *name;
    const char *program;
} rival_program;

static const rival_program rivals[] = {
#ifdef EP_FFN_RIVALS
    {"oneDNN", EP_FFN_RIVALS "/ffn_rival_onednn"},
    {"OpenBLAS", EP_FFN_RIVALS "/ffn_rival_openblas"},
#endif
    {NULL, NULL}};

typedef struct {
    const char *json;
    uint32_t hidden; /* 0: all shapes */
    uint32_t inner;
    uint32_t rows; /* 0: all sizes */
    const char *dtype;
    double seconds;
    uint32_t threads;
    bool portable; /* the family every CPU has, not the fastest here */
    bool rivals;
} options;

/* ---- a cell ---- */

typedef struct {
    double us; /* per expert, as all below */
    double limit_us;
    double share;
    double read_gbs;
    double peak_gops;
    double error;
} figures;

static figures measure(const ffn_experts *all, const ffn_case *c, ffn_team *team, double seconds)
{
    static double times[REPETITIONS_MAX], shares[REPETITIONS_MAX], limits[REPETITIONS_MAX], reads[REPETITIONS_MAX], peaks[REPETITIONS_MAX];
    const double bytes = (double)all->segments[0].bytes * c->experts;
    uint32_t *rows = calloc(c->experts, sizeof(*rows));
    ffn_pass p;
    size_t n = 0;
    for (uint32_t e = 0; e < c->experts; e++) {
        rows[e] = c->rows;
    }
    ffn_pass_open(&p, all, c->hidden, rows, c->experts);
    free(rows);
    ffn_pass_run(&p, NULL);
    const double end_us = bench_now_us() + 1e6 * seconds;
    for (; n < REPETITIONS_MAX && (n < REPETITIONS_MIN || bench_now_us() < end_us); n++) {
        double read_us = ffn_limit_read_us(team, all->segments, c->experts);
        double peak = ffn_limit_peak(team, ffn_case_peak(c->dtype));
        times[n] = ffn_pass_run(&p, NULL) / c->experts;
        limits[n] = ffn_limit_us(read_us, ffn_case_operations(c), peak) / c->experts;
        shares[n] = limits[n] / times[n];
        reads[n] = bytes / read_us * 1e-3;
        peaks[n] = peak * 1e-3;
    }
    const figures f = {.us = bench_quantile(times, n, 0.5),
                       .limit_us = bench_quantile(limits, n, 0.5),
                       .share = bench_quantile(shares, n, 0.5),
                       .read_gbs = bench_quantile(reads, n, 0.5),
                       .peak_gops = bench_quantile(peaks, n, 0.5),
                       .error = ffn_case_error(&all->probe, p.y + (size_t)(c->experts - 1) * c->rows * c->hidden, EP_DTYPE_BF16)};
    ffn_pass_close(&p);
    return f;
}

/* False when it is missing or fails; what it says goes to the terminal. */
static bool run_rival(const rival_program *rival, const ffn_case *c, const char *type, double seconds, figures *out)
{
    char command[512];
    snprintf(command, sizeof(command), "OMP_PROC_BIND=true exec %s %u %u %u %s %g", rival->program, c->hidden, c->inner, c->rows, type, seconds);
    FILE *pipe = popen(command, "r");
    if (pipe == NULL) {
        return false;
    }
    int got = fscanf(pipe, "%lf %lf %lf", &out->us, &out->share, &out->error);
    int status = pclose(pipe);
    return got == 3 && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static void add_row(bench_report *report, const char *name, const char *what, bench_row row)
{
    snprintf(row.name, sizeof(row.name), "%s%s", name, what);
    row.better = BENCH_HIGHER;
    bench_report_add(report, &row);
}

static void report_cell(bench_report *report, const weight_type *type, const ffn_case *c, const figures *f, double recorded)
{
    char name[48];
    const double bar = c->rows == 16 ? type->bar_ridge : type->bar;
    snprintf(name, sizeof(name), "%s %ux%u M=%u", type->name, c->hidden, c->inner, c->rows);
    add_row(report, name, "",
            (bench_row){.value = f->us, .unit = "us/expert", .limit = f->limit_us, .rival = NAN, .ratio = f->share, .bar = bar});
    printf("%-26s %10.1f us/expert  read %5.1f GB/s  peak %6.0f GOP/s  limit share %.3f", name, f->us, f->read_gbs, f->peak_gops, f->share);
    if (!isnan(bar)) {
        printf("  bar %.2f", bar);
    }
    if (!isnan(recorded)) {
        printf("  limit share recorded %.2f", recorded);
        add_row(report, name, ", limit share recorded",
                (bench_row){.value = f->share, .unit = "of limit", .limit = NAN, .rival = recorded, .ratio = NAN, .bar = 1.0});
    }
    printf("  error %.1e\n", f->error);
    fflush(stdout);
}

static void report_rival(bench_report *report, const weight_type *type, const ffn_case *c, const figures *f, const rival_program *rival,
                         double seconds)
{
    char name[48], what[40];
    figures other = {0};
    snprintf(name, sizeof(name), "%s %ux%u M=%u", type->name, c->hidden, c->inner, c->rows);
    snprintf(what, sizeof(what), ", %s", rival->name);
    if (run_rival(rival, c, type->name, seconds, &other)) {
        printf("%-26s %10.1f us/expert  %s  limit share %.3f  error %.1e\n", "", other.us, rival->name, other.share, other.error);
        add_row(report, name, what,
                (bench_row){.value = f->share, .unit = "of limit", .limit = NAN, .rival = other.share, .ratio = NAN, .bar = 1.0});
    } else {
        printf("%-26s %s is missing or failed\n", "", rival->name);
        add_row(report, name, what, (bench_row){.value = NAN, .unit = "of limit", .limit = NAN, .rival = NAN, .ratio = NAN, .bar = 1.0});
    }
    fflush(stdout);
}

/* The shape's row in the tables, SHAPES when it is another one; likewise of M. */
static uint32_t shape_index(uint32_t hidden, uint32_t inner)
{
    uint32_t s = 0;
    while (s < SHAPES && (shapes[s][0] != hidden || shapes[s][1] != inner)) {
        s++;
    }
    return s;
}

static uint32_t size_index(uint32_t rows)
{
    uint32_t m = 0;
    while (m < SIZES && sizes[m] != rows) {
        m++;
    }
    return m;
}

static void run_shape(bench_report *report, const options *o, const weight_type *type, uint32_t hidden, uint32_t inner, ep_backend *backend,
                      ffn_team *team)
{
    const ffn_case widest = ffn_case_make(hidden, inner, o->rows > 0 ? o->rows : 1, type->dtype);
    const uint32_t s = shape_index(hidden, inner);
    ffn_experts all;
    ffn_experts_load(&all, backend, &widest);
    for (uint32_t i = 0; i < (o->rows > 0 ? 1 : SIZES); i++) {
        const uint32_t rows = o->rows > 0 ? o->rows : sizes[i];
        const uint32_t m = size_index(rows);
        const ffn_case c = ffn_case_make(hidden, inner, rows, type->dtype);
        const figures f = measure(&all, &c, team, o->seconds);
        report_cell(report, type, &c, &f, type->recorded != NULL && s < SHAPES && m < SIZES ? type->recorded[s][m] : NAN);
        for (uint32_t r = 0; o->rivals && rivals[r].name != NULL; r++) {
            report_rival(report, type, &c, &f, &rivals[r], o->seconds);
        }
    }
    ffn_experts_unload(&all);
}

static bool read_options(int argc, char **argv, options *o)
{
    *o = (options){.seconds = 1.0, .rivals = true};
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i];
        if (strncmp(a, "shape=", 6) == 0) {
            if (sscanf(a + 6, "%ux%u", &o->hidden, &o->inner) != 2 || o->hidden < 1 || o->inner < 1) {
                return false;
            }
        } else if (strncmp(a, "m=", 2) == 0) {
            o->rows = (uint32_t)atoi(a + 2);
            if (o->rows < 1 || o->rows > ROWS_MAX) {
                return false;
            }
        } else if (strncmp(a, "dtype=", 6) == 0) {
            o->dtype = a + 6;
        } else if (strncmp(a, "seconds=", 8) == 0) {
            o->seconds = atof(a + 8);
        } else if (strncmp(a, "threads=", 8) == 0) {
            o->threads = (uint32_t)atoi(a + 8);
        } else if (strcmp(a, "numerics=portable") == 0) {
            o->portable = true;
        } else if (strcmp(a, "rivals=no") == 0) {
            o->rivals = false;
        } else if (strchr(a, '=') == NULL && o->json == NULL) {
            o->json = a;
        } else {
            return false;
        }
    }
    return true;
}

int main(int argc, char **argv)
{
    options o;
    ep_error error;
    ep_backend *backend;
    ffn_team team;
    if (!read_options(argc, argv, &o)) {
        fprintf(stderr, "usage: bench_ffn [JSON] [shape=HxI] [m=1..%d] [dtype=bf16|f16|f32] [seconds=S] [threads=N] [numerics=portable] [rivals=no]\n", ROWS_MAX);
        return 2;
    }
    const uint32_t threads = o.threads > 0 ? o.threads : ep_host_cpus_count();
    const ep_backend_config config = {.numerics = o.portable ? EP_NUMERICS_PORTABLE : EP_NUMERICS_AUTO, .threads = threads};
    if (ep_backend_by_name("cpu")->open(&config, &backend, &error) != EP_OK) {
        fprintf(stderr, "bench_ffn: %s\n", error.text);
        return 1;
    }
    ffn_team_start(&team, threads);
    bench_report *report = bench_report_create("experts through the cpu backend, against the paired limit");
    uint32_t done = 0;
    for (uint32_t t = 0; t < TYPES; t++) {
        if (o.dtype != NULL ? strcmp(o.dtype, types[t].name) != 0 : !types[t].by_default) {
            continue;
        }
        char id[EP_NUMERICS_ID_BYTES];
        (void)backend->ops->numerics_id(backend, ep_weight_format_of(types[t].dtype), id);
        printf("%s, %u threads\n", id, threads);
        for (uint32_t s = 0; s < (o.hidden > 0 ? 1 : SHAPES); s++, done++) {
            run_shape(report, &o, &types[t], o.hidden > 0 ? o.hidden : shapes[s][0], o.hidden > 0 ? o.inner : shapes[s][1], backend, &team);
        }
    }
    if (done == 0) {
        fprintf(stderr, "bench_ffn: no weight type '%s'\n", o.dtype);
    }
    ffn_team_stop(&team);
    backend->ops->close(backend);
    return bench_report_finish(report, o.json) != 0 || done == 0;
}
