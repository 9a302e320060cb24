/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rows of a benchmark: printed as a table for people, each as soon as it is known, written as JSON
 * for programs: {name, value, unit, limit, rival, ratio, better, bar, pass}; numbers that do not
 * apply are null.
 *
 * limit    what the machine allows, measured in the same run, in the row's unit; NAN none
 * rival    the same work done the usual way, in the row's unit; NAN none
 * ratio    value against the limit if there is one, else against the rival: value / other
 * bar      bound on ratio (or on value, when there is neither); NAN none: then pass is null
 */
#ifndef EP_BENCH_REPORT_H
#define EP_BENCH_REPORT_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

typedef enum bench_better { BENCH_LOWER, BENCH_HIGHER } bench_better;

typedef struct bench_row {
    char name[96]; /* as bench_report_add was told */
    double value;
    const char *unit;
    double limit;
    double rival;
    double ratio; /* NAN: computed from value and limit or rival */
    bench_better better;
    double bar;
} bench_row;

typedef struct bench_report bench_report;

/* Prints the head of the table. */
bench_report *bench_report_create(const char *title);
/* A row without limit, rival and ratio: who has them sets them. */
bench_row bench_value(double value, const char *unit, bench_better better, double bar);
/* Prints the row; the name as printf takes it. */
__attribute__((format(printf, 3, 4))) void
bench_report_add(bench_report *report, const bench_row *row, const char *name, ...);
/* A row with a rival (ratio NAN: computed), and one without. */
__attribute__((format(printf, 8, 9))) void bench_report_rival(bench_report *report, double value,
                                                              const char *unit, double rival,
                                                              double ratio, bench_better better,
                                                              double bar, const char *name, ...);
#define bench_report_value(report, value, unit, better, bar, ...)                                  \
    bench_report_rival(report, value, unit, NAN, NAN, better, bar, __VA_ARGS__)
/* Writes json_path (NULL: does not), frees. Returns the exit status: 1 when a bar was missed or
 * writing failed. */
int bench_report_finish(bench_report *report, const char *json_path);

/* Ends the program with its name, `what` and `why` (NULL: no more is known). */
__attribute__((noreturn)) void bench_fail(const char *what, const char *why);
/* Zeroed memory of whole cache lines; free() it. */
void *bench_room(size_t bytes);

double bench_now_us(void);
/* Sorts values; p in 0..1. */
double bench_quantile(double *values, size_t count, double p);

#endif
