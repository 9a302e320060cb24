/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/bench_report.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct bench_report {
    size_t count;
    bench_row *rows;
};

bench_report *bench_report_create(const char *title)
{
    bench_report *report = calloc(1, sizeof(*report));
    if (report == NULL) {
        abort();
    }
    printf("%s\n%-52s %12s %-10s %12s %12s %12s %12s  %s\n", title, "name", "value", "unit",
           "limit", "rival", "ratio", "bar", "pass");
    fflush(stdout);
    return report;
}

/* -1: no bar. */
static int passes(const bench_row *row)
{
    double judged = isnan(row->ratio) ? row->value : row->ratio;
    if (isnan(row->bar)) {
        return -1;
    }
    return row->better == BENCH_LOWER ? judged <= row->bar : judged >= row->bar;
}

static void print_number(double value)
{
    if (isnan(value)) {
        printf(" %12s", "-");
    } else {
        printf(" %12.*f", fabs(value) >= 1000 ? 0 : fabs(value) >= 10 ? 1 : 3, value);
    }
}

static void print_row(const bench_row *row)
{
    int pass = passes(row);
    printf("%-52s", row->name);
    print_number(row->value);
    printf(" %-10s", row->unit);
    print_number(row->limit);
    print_number(row->rival);
    print_number(row->ratio);
    print_number(row->bar);
    printf("  %s\n", pass < 0 ? "-" : pass ? "yes" : "NO");
    fflush(stdout); /* whoever waits sees what is measured */
}

bench_row bench_value(double value, const char *unit, bench_better better, double bar)
{
    return (bench_row){.value = value,
                       .unit = unit,
                       .limit = NAN,
                       .rival = NAN,
                       .ratio = NAN,
                       .better = better,
                       .bar = bar};
}

static void add(bench_report *report, const bench_row *row, const char *name, va_list args)
{
    report->rows = realloc(report->rows, (report->count + 1) * sizeof(*row));
    if (report->rows == NULL) {
        abort();
    }
    bench_row *added = &report->rows[report->count++];
    *added = *row;
    vsnprintf(added->name, sizeof(added->name), name, args);
    if (isnan(added->ratio)) {
        double other = !isnan(row->limit) ? row->limit : row->rival;
        added->ratio = !isnan(other) && other != 0 ? row->value / other : NAN;
    }
    print_row(added);
}

void bench_report_add(bench_report *report, const bench_row *row, const char *name, ...)
{
    va_list args;
    va_start(args, name);
    add(report, row, name, args);
    va_end(args);
}

void bench_report_rival(bench_report *report, double value, const char *unit, double rival,
                        double ratio, bench_better better, double bar, const char *name, ...)
{
    bench_row row = bench_value(value, unit, better, bar);
    va_list args;
    row.rival = rival;
    row.ratio = ratio;
    va_start(args, name);
    add(report, &row, name, args);
    va_end(args);
}

static json_t *number(double value)
{
    return isnan(value) || isinf(value) ? json_null() : json_real(value);
}

static json_t *row_json(const bench_row *row)
{
    int pass = passes(row);
    json_t *object = json_object();
    json_object_set_new(object, "name", json_string(row->name));
    json_object_set_new(object, "value", number(row->value));
    json_object_set_new(object, "unit", json_string(row->unit));
    json_object_set_new(object, "limit", number(row->limit));
    json_object_set_new(object, "rival", number(row->rival));
    json_object_set_new(object, "ratio", number(row->ratio));
    json_object_set_new(object, "better",
                        json_string(row->better == BENCH_LOWER ? "lower" : "higher"));
    json_object_set_new(object, "bar", number(row->bar));
    json_object_set_new(object, "pass", pass < 0 ? json_null() : json_boolean(pass));
    return object;
}

int bench_report_finish(bench_report *report, const char *json_path)
{
    int status = 0;
    json_t *rows = json_array();
    for (size_t i = 0; i < report->count; i++) {
        status |= passes(&report->rows[i]) == 0;
        json_array_append_new(rows, row_json(&report->rows[i]));
    }
    if (json_path != NULL && json_dump_file(rows, json_path, JSON_INDENT(1)) != 0) {
        fprintf(stderr, "cannot write %s\n", json_path);
        status = 1;
    }
    json_decref(rows);
    free(report->rows);
    free(report);
    return status;
}

void bench_fail(const char *what, const char *why)
{
    fprintf(stderr, "%s: %s: %s\n", program_invocation_short_name, what, why != NULL ? why : "");
    exit(1);
}

void *bench_room(size_t bytes)
{
    void *p = NULL;
    if (posix_memalign(&p, 64, bytes) != 0) {
        bench_fail("no memory", NULL);
    }
    memset(p, 0, bytes);
    return p;
}

double bench_now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double bench_quantile(double *values, size_t count, double p)
{
    if (count == 0) {
        return NAN;
    }
    qsort(values, count, sizeof(*values), compare);
    const double place = p * (double)(count - 1);
    const size_t below = (size_t)place;
    if (below + 1 >= count) {
        return values[count - 1];
    }
    return values[below] + (place - (double)below) * (values[below + 1] - values[below]);
}
