/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/live_log.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "bench/bench_report.h"
#include "support/cluster.h"

#define PRINTED_MAX 5

struct live_log {
    const char *name;
    const ep_test_batch *batches;
    const ep_test_batch *others;
    pthread_mutex_t lock;
    live_call *calls;
    size_t count;
    size_t room;
    uint32_t printed;
};

live_log *live_log_create(const char *name, const ep_test_batch *batches,
                          const ep_test_batch *others)
{
    live_log *log = calloc(1, sizeof(*log));
    EP_TEST_CHECK(log != NULL, "no memory");
    *log = (live_log){.name = name, .batches = batches, .others = others};
    pthread_mutex_init(&log->lock, NULL);
    return log;
}

void live_log_destroy(live_log *log)
{
    if (log != NULL) {
        pthread_mutex_destroy(&log->lock);
        free(log->calls);
        free(log);
    }
}

static bool is_result(const ep_test_batch *batch, const uint16_t *y)
{
    return memcmp(y, batch->expected, (size_t)batch->tokens * batch->hidden * sizeof(*y)) == 0;
}

void live_log_on_end(void *arg, const ep_test_batch *batch, const ep_moe_result *result,
                     const uint16_t *y, uint64_t began_ns, uint64_t ended_ns)
{
    live_log *log = arg;
    live_call call = {.began_ns = began_ns, .ended_ns = ended_ns, .outcome = LIVE_WRONG};
    if (y == NULL) {
        call.outcome = LIVE_FAILED;
    } else if (is_result(batch, y)) {
        call.outcome = LIVE_GOOD;
    } else if (log->others != NULL && is_result(&log->others[batch - log->batches], y)) {
        call.outcome = LIVE_OTHER;
    }
    pthread_mutex_lock(&log->lock);
    if (log->count == log->room) {
        log->room = log->room == 0 ? 4096 : 2 * log->room;
        log->calls = realloc(log->calls, log->room * sizeof(*log->calls));
        EP_TEST_CHECK(log->calls != NULL, "no memory");
    }
    log->calls[log->count++] = call;
    const bool is_printed = call.outcome >= LIVE_WRONG && log->printed++ < PRINTED_MAX;
    pthread_mutex_unlock(&log->lock);
    if (is_printed) {
        fprintf(stderr, "%s: %s after %.1f ms: %s\n", log->name,
                y == NULL ? ep_err_name(result->error.code) : "wrong bits",
                (double)(ended_ns - began_ns) / 1e6, result->error.text);
    }
}

ep_test_load *live_load_start(live_log *log, ep_test_load_config config)
{
    config.on_end = live_log_on_end;
    config.arg = log;
    return ep_test_load_start(&config);
}

uint64_t live_log_count(live_log *log, live_outcome outcome, uint64_t from_ns, uint64_t to_ns)
{
    uint64_t count = 0;
    pthread_mutex_lock(&log->lock);
    for (size_t i = 0; i < log->count; i++) {
        const live_call *c = &log->calls[i];
        count += c->outcome == outcome && c->began_ns >= from_ns && c->began_ns < to_ns;
    }
    pthread_mutex_unlock(&log->lock);
    return count;
}

double live_log_quantile_ms(live_log *log, uint64_t from_ns, uint64_t to_ns, double quantile)
{
    size_t count = 0;
    pthread_mutex_lock(&log->lock);
    double *took = calloc(log->count + 1, sizeof(*took));
    EP_TEST_CHECK(took != NULL, "no memory");
    for (size_t i = 0; i < log->count; i++) {
        const live_call *c = &log->calls[i];
        if (c->outcome < LIVE_WRONG && c->began_ns >= from_ns && c->began_ns < to_ns) {
            took[count++] = (double)(c->ended_ns - c->began_ns) / 1e6;
        }
    }
    pthread_mutex_unlock(&log->lock);
    const double value = bench_quantile(took, count, quantile);
    free(took);
    return value;
}

size_t live_log_extra_ms(live_log *log, uint64_t at_ns, double typical_ms, double *out_extra,
                         size_t extra_max)
{
    size_t count = 0;
    pthread_mutex_lock(&log->lock);
    for (size_t i = 0; i < log->count && count < extra_max; i++) {
        const live_call *c = &log->calls[i];
        if (c->began_ns < at_ns && c->ended_ns > at_ns) {
            out_extra[count++] = fmax(0, (double)(c->ended_ns - c->began_ns) / 1e6 - typical_ms);
        }
    }
    pthread_mutex_unlock(&log->lock);
    return count;
}

uint64_t live_log_last_ns(live_log *log, live_outcome outcome)
{
    uint64_t last_ns = 0;
    pthread_mutex_lock(&log->lock);
    for (size_t i = 0; i < log->count; i++) {
        const live_call *c = &log->calls[i];
        last_ns = c->outcome == outcome && c->began_ns > last_ns ? c->began_ns : last_ns;
    }
    pthread_mutex_unlock(&log->lock);
    return last_ns;
}

void live_sleep_until(uint64_t when_ns)
{
    const struct timespec when = {.tv_sec = (time_t)(when_ns / EP_NS_PER_S),
                                  .tv_nsec = (long)(when_ns % EP_NS_PER_S)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &when, NULL) != 0) {
    }
}
