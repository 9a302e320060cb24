/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Aligns the clocks of several hosts as NTP does it: a request leaves at t1, is served from t2 to
 * t3, and its answer arrives at t4. The serving clock is ahead by ((t2 - t1) + (t3 - t4)) / 2; the
 * error is at most half of the time on the way, (t4 - t1) - (t3 - t2). Of all pairs between two
 * recordings the one with the least time on the way is used. Recordings are joined from the first
 * one outwards over the best pairs.
 */
#include <stdlib.h>
#include <string.h>

#include "trace/trace_model.h"

typedef struct best_pair {
    int64_t ahead_ns; /* of the second recording's clock */
    int64_t way_ns;   /* < 0: no pair */
} best_pair;

static bool same_clock(const ep_cli_recording *a, const ep_cli_recording *b)
{
    return a->has_clock && b->has_clock && memcmp(a->clock, b->clock, sizeof(a->clock)) == 0;
}

static void take(best_pair *pair, int64_t ahead_ns, int64_t way_ns)
{
    way_ns = way_ns < 0 ? 0 : way_ns;
    if (pair->way_ns < 0 || way_ns < pair->way_ns) {
        *pair = (best_pair){ahead_ns, way_ns};
    }
}

static void collect(const ep_cli_trace_model *model, best_pair *pairs)
{
    size_t n = model->recordings_count;
    for (size_t i = 0; i < n * n; i++) {
        bool same = same_clock(&model->recordings[i / n], &model->recordings[i % n]);
        pairs[i] = (best_pair){0, same || i / n == i % n ? 0 : -1};
    }
    for (size_t i = 0; i < model->spans_count; i++) {
        const ep_cli_span *exchange = &model->spans[i];
        if (exchange->kind != EP_CLI_SPAN_exchange || exchange->mate == EP_CLI_TRACE_NONE) {
            continue;
        }
        const ep_cli_span *serve = &model->spans[exchange->mate];
        uint32_t a = model->processes[exchange->process].recording;
        uint32_t b = model->processes[serve->process].recording;
        int64_t out = serve->begin_ns - exchange->begin_ns;
        int64_t back = exchange->end_ns - serve->end_ns;
        take(&pairs[a * n + b], (out - back) / 2, out + back);
        take(&pairs[b * n + a], (back - out) / 2, out + back);
    }
}

void ep_cli_trace_clock_fit(ep_cli_trace_model *model)
{
    static best_pair pairs[EP_CLI_TRACE_RECORDINGS_MAX * EP_CLI_TRACE_RECORDINGS_MAX];
    bool known[EP_CLI_TRACE_RECORDINGS_MAX] = {true};
    size_t n = model->recordings_count;
    collect(model, pairs);
    for (size_t i = 1; i < n; i++) {
        model->recordings[i].offset_error_ns = -1;
    }
    for (size_t round = 1; round < n; round++) {
        size_t from = n;
        size_t to = n;
        for (size_t i = 0; i < n * n; i++) {
            bool next = known[i / n] && !known[i % n] && pairs[i].way_ns >= 0;
            if (next && (from == n || pairs[i].way_ns < pairs[from * n + to].way_ns)) {
                from = i / n;
                to = i % n;
            }
        }
        if (from == n) {
            return;
        }
        known[to] = true;
        model->recordings[to].offset_ns =
            model->recordings[from].offset_ns + pairs[from * n + to].ahead_ns;
        model->recordings[to].offset_error_ns =
            model->recordings[from].offset_error_ns + pairs[from * n + to].way_ns / 2;
    }
}
