/* SPDX-License-Identifier: Apache-2.0 */
/* Load progress as a bar or as lines of the log. */
#include "model/load_progress.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/screen.h"

#define AMOUNT_BYTES 32
#define PART_BYTES 80
#define LABEL_COLUMNS_MAX 64
#define LABEL_COLUMNS_LEAST 12
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

/* 1536 -> "1.5 KiB". Returns where the unit is. */
static size_t format_amount(double bytes, char out[AMOUNT_BYTES])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    size_t unit = 0;
    while (bytes >= 1024.0 && unit + 1 < sizeof(units) / sizeof(units[0])) {
        bytes /= 1024.0;
        unit++;
    }
    return (size_t)snprintf(out, AMOUNT_BYTES, bytes < 10.0 && unit > 0 ? "%.1f %s" : "%.0f %s",
                            bytes, units[unit]) -
           strlen(units[unit]);
}

/* " 1.5 of 3.0 GiB" */
static void format_bytes(const ep_load_state *state, char out[PART_BYTES])
{
    char done[AMOUNT_BYTES];
    char total[AMOUNT_BYTES];
    size_t done_unit = format_amount((double)state->bytes_done, done);
    size_t total_unit = format_amount((double)state->bytes_total, total);
    if (state->bytes_total == 0) {
        snprintf(out, PART_BYTES, " %s", done);
        return;
    }
    if (strcmp(done + done_unit, total + total_unit) == 0) {
        done[done_unit - 1] = '\0';
    }
    snprintf(out, PART_BYTES, " %s of %s", done, total);
}

static double bytes_per_s(const ep_load_state *state)
{
    return state->elapsed_ns > 0
               ? (double)state->bytes_done * (double)EP_NS_PER_S / (double)state->elapsed_ns
               : 0.0;
}

static void format_rest(const ep_load_state *state, char out[PART_BYTES])
{
    double rate = bytes_per_s(state);
    double rest = rate > 0.0 && state->bytes_total > state->bytes_done
                      ? (double)(state->bytes_total - state->bytes_done) / rate
                      : -1.0;
    out[0] = '\0';
    if (rate > 0.0 && ep_load_percent(state) == 100) {
        snprintf(out, PART_BYTES, " in %.1f s", (double)state->elapsed_ns / (double)EP_NS_PER_S);
    } else if (rest >= 0.0 && rest <= REST_SECONDS_MAX) {
        snprintf(out, PART_BYTES, " %.0f s left", rest);
    }
}

enum { PART_BAR, PART_EXPERTS, PART_BYTES_OF, PART_RATE, PART_REST, PARTS };

static void format_parts(const ep_load_state *state, char parts[PARTS][PART_BYTES])
{
    char amount[AMOUNT_BYTES];
    int full = (int)(ep_load_percent(state) * EP_LOAD_PROGRESS_BAR_CELLS / 100);
    snprintf(parts[PART_BAR], PART_BYTES, " [%.*s%.*s]", full, "##########",
             EP_LOAD_PROGRESS_BAR_CELLS - full, "..........");
    snprintf(parts[PART_EXPERTS], PART_BYTES, " %" PRIu64 "/%" PRIu64 " experts",
             state->experts_done, state->experts_total);
    format_bytes(state, parts[PART_BYTES_OF]);
    if (bytes_per_s(state) > 0.0) {
        format_amount(bytes_per_s(state), amount);
        snprintf(parts[PART_RATE], PART_BYTES, " %s/s", amount);
    }
    format_rest(state, parts[PART_REST]);
}

void ep_load_format(const ep_load_state *state, size_t columns,
                    char out[EP_LOAD_PROGRESS_LINE_BYTES])
{
    static const struct {
        int part;
        size_t columns; /* its usual width, so that fields do not come and go with a digit */
    } by_worth[PARTS] = {
        {PART_REST, 11}, {PART_BYTES_OF, 20}, {PART_BAR, 0}, {PART_RATE, 11}, {PART_EXPERTS, 16}};
    char parts[PARTS][PART_BYTES] = {{0}};
    char percent[16];
    char label[4 * LABEL_COLUMNS_MAX + 1];
    const char *model = state->model != NULL ? state->model : "experts";
    format_parts(state, parts);
    snprintf(percent, sizeof(percent), " %3" PRIu32 " %%", ep_load_percent(state));
    const size_t whole = ep_text_columns(model);
    const size_t least = whole < LABEL_COLUMNS_LEAST ? whole : LABEL_COLUMNS_LEAST;
    size_t used = strlen("loading ") + strlen(percent) + least;
    for (int i = 0; i < PARTS; i++) {
        char *part = parts[by_worth[i].part];
        size_t bytes = strlen(part) > by_worth[i].columns ? strlen(part) : by_worth[i].columns;
        if (used + bytes <= columns) {
            used += bytes;
        } else {
            part[0] = '\0';
        }
    }
    size_t most = columns > used ? columns - used + least : least;
    ep_text_cut(model, most < LABEL_COLUMNS_MAX ? most : LABEL_COLUMNS_MAX, label, sizeof(label));
    snprintf(out, EP_LOAD_PROGRESS_LINE_BYTES, "loading %s%s%s%s%s%s%s", label, parts[PART_BAR],
             percent, parts[PART_EXPERTS], parts[PART_BYTES_OF], parts[PART_RATE],
             parts[PART_REST]);
    out[ep_text_fit(out, columns)] = '\0';
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
           (percent / EP_LOAD_PROGRESS_STEP_PERCENT >
                last_percent / EP_LOAD_PROGRESS_STEP_PERCENT ||
            since_ns >= EP_LOAD_PROGRESS_STEP_NS);
}

void ep_load_progress_init(ep_load_progress *progress, int fd, const char *model,
                           uint64_t experts_total, uint64_t bytes_total)
{
    *progress =
        (ep_load_progress){.fd = fd, .terminal = isatty(fd) == 1, .started_ns = ep_clock_now_ns()};
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

/*
 * The cursor returns to the begin of the line, so that a log line which follows overwrites the bar,
 * at least if it is longer. One column stays free: some terminals wrap a full line.
 */
static void write_bar(ep_load_progress *progress)
{
    char line[EP_LOAD_PROGRESS_LINE_BYTES];
    char text[EP_LOAD_PROGRESS_LINE_BYTES + 8];
    /* the terminal may have been resized */
    const size_t columns = ep_screen_of(progress->fd).columns;
    bool done = ep_load_percent(&progress->state) == 100;
    ep_load_format(&progress->state, columns > 1 ? columns - 1 : columns, line);
    int n = snprintf(text, sizeof(text), "%s\033[K%s", line, done ? "\n" : "\r");
    progress->is_drawn = !done;
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
        ep_log(EP_LOG_INFO, "expert-loading", EP_KV(model, state->model),
               EP_KV(percent, ep_load_percent(state)), EP_KV(experts, state->experts_done),
               EP_KV(experts_total, state->experts_total), EP_KV(bytes, state->bytes_done),
               EP_KV(bytes_total, state->bytes_total),
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
    if (progress->is_drawn) {
        write_all(progress->fd, "\n", 1);
    }
    pthread_mutex_destroy(&progress->lock);
}
