/* SPDX-License-Identifier: Apache-2.0 */
/* Load progress as a bar or as lines of the log. */
#include "model/load_progress.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"

#define AMOUNT_BYTES 32
#define REST_SECONDS_MAX 359999 /* 99 h 59 min 59 s */

uint32_t ep_load_percent(const ep_load_state *state)
{
    if (state->experts_done >= state->experts_total) {
        return 100;
    }
    double done = (double)state->experts_done / (double)state->experts_total;
    if (state->bytes_total > 0) {
        done = (double)state->bytes_done / (double)state->bytes_total;
    }
    return done >= 0.99 ? 99 : (uint32_t)(done * 100.0);
}

/* 1536 -> "1.5 KiB". */
static void format_amount(double bytes, char out[AMOUNT_BYTES])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    size_t unit = 0;
    while (bytes >= 1024.0 && unit + 1 < sizeof(units) / sizeof(units[0])) {
        bytes /= 1024.0;
        unit++;
    }
    snprintf(out, AMOUNT_BYTES, bytes < 10.0 && unit > 0 ? "%.1f %s" : "%.0f %s", bytes, units[unit]);
}

static double bytes_per_s(const ep_load_state *state)
{
    return state->elapsed_ns > 0 ? (double)state->bytes_done * (double)EP_NS_PER_S / (double)state->elapsed_ns : 0.0;
}

static void format_rest(const ep_load_state *state, char *out, size_t out_bytes)
{
    char rate_text[AMOUNT_BYTES];
    double seconds = (double)state->elapsed_ns / (double)EP_NS_PER_S;
    double rate = bytes_per_s(state);
    out[0] = '\0';
    if (rate <= 0.0) {
        return;
    }
    format_amount(rate, rate_text);
    int n = snprintf(out, out_bytes, " %s/s", rate_text);
    if (n <= 0 || (size_t)n >= out_bytes) {
        return;
    }
    if (ep_load_percent(state) == 100) {
        snprintf(out + n, out_bytes - (size_t)n, " in %.1f s", seconds);
    } else if (state->bytes_total > state->bytes_done) {
        double rest = (double)(state->bytes_total - state->bytes_done) / rate;
        if (rest <= REST_SECONDS_MAX) {
            snprintf(out + n, out_bytes - (size_t)n, " %.0f s left", rest);
        }
    }
}

size_t ep_load_format_bar(const ep_load_state *state, char out[EP_LOAD_PROGRESS_LINE_BYTES])
{
    char bytes_text[2 * AMOUNT_BYTES];
    char rest[3 * AMOUNT_BYTES];
    char cells[EP_LOAD_PROGRESS_BAR_CELLS + 1] = "";
    uint32_t percent = ep_load_percent(state);
    uint32_t full = percent * EP_LOAD_PROGRESS_BAR_CELLS / 100;

    format_amount((double)state->bytes_done, bytes_text);
    if (state->bytes_total > 0) {
        char total[AMOUNT_BYTES];
        size_t used = strlen(bytes_text);
        format_amount((double)state->bytes_total, total);
        snprintf(bytes_text + used, sizeof(bytes_text) - used, " of %s", total);
    }
    memset(cells, '#', full);
    memset(cells + full, '.', EP_LOAD_PROGRESS_BAR_CELLS - full);
    format_rest(state, rest, sizeof(rest));
    int n = snprintf(out, EP_LOAD_PROGRESS_LINE_BYTES,
                     "loading %.64s [%s] %3" PRIu32 " %% %" PRIu64 "/%" PRIu64 " experts %s%s",
                     state->model != NULL ? state->model : "experts", cells, percent, state->experts_done,
                     state->experts_total, bytes_text, rest);
    return n < 0 ? 0 : strlen(out);
}

bool ep_load_due(const ep_load_state *state, bool terminal, uint32_t last_percent, uint64_t last_ns)
{
    uint32_t percent = ep_load_percent(state);
    uint64_t since_ns = state->elapsed_ns > last_ns ? state->elapsed_ns - last_ns : 0;
    if (percent == 100) {
        return last_percent != 100;
    }
    if (terminal) {
        return since_ns >= EP_LOAD_PROGRESS_REDRAW_NS;
    }
    return since_ns >= EP_LOAD_PROGRESS_LINE_NS &&
           (percent / EP_LOAD_PROGRESS_STEP_PERCENT > last_percent / EP_LOAD_PROGRESS_STEP_PERCENT || since_ns >= EP_LOAD_PROGRESS_STEP_NS);
}

void ep_load_progress_init(ep_load_progress *progress, int fd, const char *model, uint64_t experts_total,
                           uint64_t bytes_total)
{
    *progress = (ep_load_progress){.fd = fd, .terminal = isatty(fd) == 1, .started_ns = ep_clock_now_ns()};
    pthread_mutex_init(&progress->lock, NULL);
    progress->state =
        (ep_load_state){.model = model, .experts_total = experts_total, .bytes_total = bytes_total};
}

static void write_all(int fd, const char *text, size_t bytes)
{
    while (bytes > 0) {
        ssize_t n = write(fd, text, bytes);
        if (n <= 0) {
            return;
        }
        text += n;
        bytes -= (size_t)n;
    }
}

/* Over the last bar, then blanks over what remains of it. */
static void write_bar(ep_load_progress *progress)
{
    char line[EP_LOAD_PROGRESS_LINE_BYTES];
    char text[2 * EP_LOAD_PROGRESS_LINE_BYTES + 4];
    size_t length = ep_load_format_bar(&progress->state, line);
    size_t spaces = progress->last_length > length ? progress->last_length - length : 0;
    bool done = ep_load_percent(&progress->state) == 100;
    int n = snprintf(text, sizeof(text), "\r%s%*s%s", line, (int)spaces, "", done ? "\n" : "");
    progress->last_length = done ? 0 : length;
    if (n > 0) {
        write_all(progress->fd, text, (size_t)n);
    }
}

static void write_state(ep_load_progress *progress)
{
    const ep_load_state *state = &progress->state;
    if (progress->terminal) {
        write_bar(progress);
    } else {
        ep_log(EP_LOG_INFO, "expert-loading", EP_KV(model, state->model), EP_KV(percent, ep_load_percent(state)),
               EP_KV(experts, state->experts_done), EP_KV(experts_total, state->experts_total),
               EP_KV(bytes, state->bytes_done), EP_KV(bytes_total, state->bytes_total),
               EP_KV(bytes_per_s, (uint64_t)bytes_per_s(state)));
    }
    progress->last_percent = ep_load_percent(&progress->state);
    progress->last_done = progress->state.experts_done;
    progress->last_ns = progress->state.elapsed_ns;
}

void ep_load_progress_add(ep_load_progress *progress, uint64_t experts, uint64_t bytes)
{
    pthread_mutex_lock(&progress->lock);
    ep_load_state *state = &progress->state;
    state->experts_done += experts;
    state->bytes_done += bytes;
    state->elapsed_ns = ep_clock_now_ns() - progress->started_ns;
    if (ep_load_due(state, progress->terminal, progress->last_percent, progress->last_ns)) {
        write_state(progress);
    }
    pthread_mutex_unlock(&progress->lock);
}

void ep_load_progress_fini(ep_load_progress *progress)
{
    if (progress->state.experts_done > progress->last_done) {
        write_state(progress);
    }
    if (progress->last_length > 0) {
        write_all(progress->fd, "\n", 1);
    }
    pthread_mutex_destroy(&progress->lock);
}
