/* SPDX-License-Identifier: Apache-2.0 */
/* The metrics registry: families and their series in order of registration. Values are atomic. */
#include "common/metrics.h"

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/printable.h"

#define COLLECTS_MAX 8
#define NAME_BYTES 96
#define LABELS_BYTES 384

typedef enum metric_kind { KIND_COUNTER, KIND_GAUGE, KIND_HISTOGRAM } metric_kind;
static const char *const kind_names[] = {"counter", "gauge", "histogram"};

struct ep_metric_series {
    ep_metric_series *next;
    char labels[LABELS_BYTES]; /* `a="b",c="d"` */
    _Atomic uint64_t value;    /* of a counter */
    _Atomic double level;      /* of a gauge; a histogram's sum */
    size_t bounds_count;
    double bounds[EP_METRIC_BUCKETS_MAX];
    _Atomic uint64_t buckets[EP_METRIC_BUCKETS_MAX + 1]; /* not cumulative; the last is +Inf */
};

typedef struct family {
    struct family *next;
    metric_kind kind;
    char name[NAME_BYTES];
    char help[256];
    ep_metric_series *series;
    ep_metric_series **series_end;
} family;

struct ep_metrics {
    pthread_mutex_t lock;       /* the lists below; never held while a collect function runs */
    pthread_mutex_t write_lock; /* one writer at a time */
    family *families;
    family **families_end;
    size_t collects_count;
    struct {
        void (*func)(void *arg);
        void *arg;
    } collects[COLLECTS_MAX];
};

ep_err ep_metrics_create(ep_metrics **out_metrics)
{
    ep_metrics *metrics = calloc(1, sizeof(*metrics));
    if (metrics == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    pthread_mutex_init(&metrics->lock, NULL);
    pthread_mutex_init(&metrics->write_lock, NULL);
    metrics->families_end = &metrics->families;
    *out_metrics = metrics;
    return EP_OK;
}

void ep_metrics_destroy(ep_metrics *metrics)
{
    if (metrics == NULL) {
        return;
    }
    for (family *f = metrics->families, *next; f != NULL; f = next) {
        next = f->next;
        for (ep_metric_series *s = f->series, *after; s != NULL; s = after) {
            after = s->next;
            free(s);
        }
        free(f);
    }
    pthread_mutex_destroy(&metrics->lock);
    pthread_mutex_destroy(&metrics->write_lock);
    free(metrics);
}

static void put_escaped(char *out, size_t bytes, const char *said)
{
    char plain[LABELS_BYTES];
    const char *text = ep_text_escape(said, plain, sizeof(plain));
    size_t n = 0;
    for (; *text != 0 && n + 3 < bytes; text++) {
        if (*text == '\\' || *text == '"') {
            out[n++] = '\\';
        }
        out[n++] = *text;
    }
    out[n] = 0;
    out[ep_text_printable_bytes(out, true)] = 0; /* does not end in half a character */
}

/* A label that does not fit is left out as a whole; a truncated one would break the format. */
static void put_labels(char *out, size_t bytes, const ep_metric_label *labels, size_t count)
{
    size_t n = 0;
    out[0] = 0;
    for (size_t i = 0; i < count; i++) {
        char value[LABELS_BYTES];
        put_escaped(value, sizeof(value), labels[i].value);
        if (n + strlen(labels[i].name) + strlen(value) + 5 < bytes) {
            n += (size_t)snprintf(out + n, bytes - n, "%s%s=\"%s\"", n == 0 ? "" : ",",
                                  labels[i].name, value);
        }
    }
}

static family *find_family(ep_metrics *metrics, metric_kind kind, const char *name,
                           const char *help)
{
    for (family *f = metrics->families; f != NULL; f = f->next) {
        if (strcmp(f->name, name) == 0) {
            EP_ASSERT(f->kind == kind);
            return f;
        }
    }
    family *f = calloc(1, sizeof(*f));
    if (f == NULL) {
        return NULL;
    }
    f->kind = kind;
    f->series_end = &f->series;
    snprintf(f->name, sizeof(f->name), "%s", name);
    put_escaped(f->help, sizeof(f->help), help);
    *metrics->families_end = f;
    metrics->families_end = &f->next;
    return f;
}

static ep_metric_series *find_series(ep_metrics *metrics, metric_kind kind, const char *name,
                                     const char *help, const ep_metric_label *labels, size_t count,
                                     const double *bounds, size_t bounds_count)
{
    char text[LABELS_BYTES];
    EP_ASSERT(strlen(name) < NAME_BYTES);
    EP_ASSERT(count <= EP_METRIC_LABELS_MAX);
    EP_ASSERT(bounds_count <= EP_METRIC_BUCKETS_MAX);
    put_labels(text, sizeof(text), labels, count);
    family *f = find_family(metrics, kind, name, help);
    if (f == NULL) {
        return NULL;
    }
    for (ep_metric_series *s = f->series; s != NULL; s = s->next) {
        if (strcmp(s->labels, text) == 0) {
            return s;
        }
    }
    ep_metric_series *s = calloc(1, sizeof(*s));
    if (s == NULL) {
        return NULL;
    }
    memcpy(s->labels, text, sizeof(text));
    s->bounds_count = bounds_count;
    for (size_t i = 0; i < bounds_count; i++) {
        s->bounds[i] = bounds[i];
    }
    *f->series_end = s;
    f->series_end = &s->next;
    return s;
}

static ep_metric_series *add_series(ep_metrics *metrics, metric_kind kind, const char *name,
                                    const char *help, const ep_metric_label *labels, size_t count,
                                    const double *bounds, size_t bounds_count)
{
    pthread_mutex_lock(&metrics->lock);
    ep_metric_series *s =
        find_series(metrics, kind, name, help, labels, count, bounds, bounds_count);
    pthread_mutex_unlock(&metrics->lock);
    return s;
}

ep_metric_series *ep_metrics_counter(ep_metrics *metrics, const char *name, const char *help,
                                     const ep_metric_label *labels, size_t count)
{
    return add_series(metrics, KIND_COUNTER, name, help, labels, count, NULL, 0);
}

ep_metric_series *ep_metrics_histogram(ep_metrics *metrics, const char *name, const char *help,
                                       const ep_metric_label *labels, size_t count,
                                       const double *bounds, size_t bounds_count)
{
    return add_series(metrics, KIND_HISTOGRAM, name, help, labels, count, bounds, bounds_count);
}

void ep_counter_add(ep_metric_series *series, uint64_t n)
{
    if (series != NULL) {
        atomic_fetch_add_explicit(&series->value, n, memory_order_relaxed);
    }
}

void ep_counter_set(ep_metrics *metrics, const char *name, const char *help,
                    const ep_metric_label *labels, size_t count, uint64_t total)
{
    ep_metric_series *series = ep_metrics_counter(metrics, name, help, labels, count);
    if (series != NULL) {
        atomic_store_explicit(&series->value, total, memory_order_relaxed);
    }
}

void ep_gauge_set(ep_metrics *metrics, const char *name, const char *help,
                  const ep_metric_label *labels, size_t count, double value)
{
    ep_metric_series *series = add_series(metrics, KIND_GAUGE, name, help, labels, count, NULL, 0);
    if (series != NULL) {
        atomic_store_explicit(&series->level, value, memory_order_relaxed);
    }
}

void ep_histogram_observe(ep_metric_series *series, double value)
{
    if (series == NULL) {
        return;
    }
    size_t i = 0;
    while (i < series->bounds_count && value > series->bounds[i]) {
        i++;
    }
    atomic_fetch_add_explicit(&series->buckets[i], 1, memory_order_relaxed);
    double before = atomic_load_explicit(&series->level, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(&series->level, &before, before + value,
                                                  memory_order_relaxed, memory_order_relaxed)) {
    }
}

ep_err ep_metrics_on_collect(ep_metrics *metrics, void (*func)(void *arg), void *arg)
{
    ep_err err = EP_ERR_RESOURCE_EXHAUSTED;
    pthread_mutex_lock(&metrics->lock);
    if (metrics->collects_count < COLLECTS_MAX) {
        metrics->collects[metrics->collects_count].func = func;
        metrics->collects[metrics->collects_count].arg = arg;
        metrics->collects_count++;
        err = EP_OK;
    }
    pthread_mutex_unlock(&metrics->lock);
    return err;
}

static void write_number(FILE *out, double value)
{
    if (isnan(value)) {
        fputs("NaN", out);
    } else if (isinf(value)) {
        fputs(value > 0 ? "+Inf" : "-Inf", out);
    } else {
        fprintf(out, "%.17g", value);
    }
}

static void write_histogram(const family *f, const ep_metric_series *s, FILE *out)
{
    uint64_t total = 0;
    const char *comma = s->labels[0] != 0 ? "," : "";
    for (size_t i = 0; i <= s->bounds_count; i++) {
        total += atomic_load_explicit(&s->buckets[i], memory_order_relaxed);
        fprintf(out, "%s_bucket{%s%sle=\"", f->name, s->labels, comma);
        if (i == s->bounds_count) {
            fputs("+Inf", out);
        } else {
            fprintf(out, "%g", s->bounds[i]);
        }
        fprintf(out, "\"} %" PRIu64 "\n", total);
    }
    const char *open = s->labels[0] != 0 ? "{" : "";
    const char *close = s->labels[0] != 0 ? "}" : "";
    fprintf(out, "%s_sum%s%s%s ", f->name, open, s->labels, close);
    write_number(out, atomic_load_explicit(&s->level, memory_order_relaxed));
    fprintf(out, "\n%s_count%s%s%s %" PRIu64 "\n", f->name, open, s->labels, close, total);
}

static void write_series(const family *f, const ep_metric_series *s, FILE *out)
{
    if (f->kind == KIND_HISTOGRAM) {
        write_histogram(f, s, out);
        return;
    }
    fputs(f->name, out);
    if (s->labels[0] != 0) {
        fprintf(out, "{%s}", s->labels);
    }
    fputc(' ', out);
    if (f->kind == KIND_COUNTER) {
        fprintf(out, "%" PRIu64, atomic_load_explicit(&s->value, memory_order_relaxed));
    } else {
        write_number(out, atomic_load_explicit(&s->level, memory_order_relaxed));
    }
    fputc('\n', out);
}

static ep_err write_all(ep_metrics *metrics, char **out_text, size_t *out_bytes)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    if (out == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    pthread_mutex_lock(&metrics->lock);
    for (const family *f = metrics->families; f != NULL; f = f->next) {
        fprintf(out, "# HELP %s %s\n# TYPE %s %s\n", f->name, f->help, f->name,
                kind_names[f->kind]);
        for (const ep_metric_series *s = f->series; s != NULL; s = s->next) {
            write_series(f, s, out);
        }
    }
    pthread_mutex_unlock(&metrics->lock);
    bool failed = ferror(out) != 0;
    if (fclose(out) != 0 || failed) {
        free(text);
        return EP_ERR_NO_MEMORY;
    }
    *out_text = text;
    *out_bytes = bytes;
    return EP_OK;
}

ep_err ep_metrics_write(ep_metrics *metrics, char **out_text, size_t *out_bytes)
{
    pthread_mutex_lock(&metrics->write_lock);
    for (size_t i = 0; i < metrics->collects_count; i++) {
        metrics->collects[i].func(metrics->collects[i].arg);
    }
    ep_err err = write_all(metrics, out_text, out_bytes);
    pthread_mutex_unlock(&metrics->write_lock);
    return err;
}
