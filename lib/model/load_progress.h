/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Progress of loading weights: one line that redraws itself on a terminal and never is wider, else
 * a line of the log every 10 % or 30 seconds.
 *
 *     loading demo [#####.....]  50 % 32/64 experts 1.5 of 3.0 GiB 512 MiB/s 3 s left
 *     event=expert-loading model=demo percent=50 experts=32 experts_total=64 bytes=1610612736 ...
 *
 * Threads  ep_load_progress_add from any thread; the rest from one. The format functions are pure.
 */
#ifndef EP_MODEL_LOAD_PROGRESS_H
#define EP_MODEL_LOAD_PROGRESS_H

#include <pthread.h>

#include "base/error.h"

#define EP_LOAD_PROGRESS_LINE_BYTES 768
#define EP_LOAD_PROGRESS_STEP_PERCENT 10
#define EP_LOAD_PROGRESS_STEP_NS 30000000000ull
/* lines are at least this far apart, except the last */
#define EP_LOAD_PROGRESS_LINE_NS 1000000000ull
#define EP_LOAD_PROGRESS_REDRAW_NS 100000000ull
#define EP_LOAD_PROGRESS_BAR_CELLS 10

typedef struct ep_load_state {
    const char *model; /* NULL: experts of several */
    uint64_t experts_done;
    uint64_t experts_total;
    uint64_t bytes_done;
    uint64_t bytes_total; /* 0: unknown */
    uint64_t elapsed_ns;
} ep_load_state;

/* 0..100; 100 only when every expert is done. */
uint32_t ep_load_percent(const ep_load_state *state);
/* The bar's line without line end: the most important parts that fit the columns. */
void ep_load_format(const ep_load_state *state, size_t columns,
                    char out[EP_LOAD_PROGRESS_LINE_BYTES]);
/* Whether to write now, given what was last written. The end is always written, once. */
bool ep_load_due(const ep_load_state *state, bool terminal, uint32_t last_percent,
                 uint64_t last_ns);

typedef struct ep_load_progress {
    int fd;
    bool terminal;
    pthread_mutex_t lock; /* guards all fields below, and the order of lines */
    ep_load_state state;
    uint64_t started_ns;
    uint32_t last_percent;
    uint64_t last_done; /* experts */
    uint64_t last_ns;   /* since start */
    bool is_drawn;      /* an unfinished line is on the terminal */
} ep_load_progress;

/* Draws a bar on fd (usually 2; borrowed) if that is a terminal; fd -1: never. model is borrowed
 * until _fini. Writes nothing yet. */
void ep_load_progress_init(ep_load_progress *progress, int fd, const char *model,
                           uint64_t experts_total, uint64_t bytes_total);
/* Adds what was loaded, and writes when it is time. Ignores failed writes: loading matters more. */
void ep_load_progress_add(ep_load_progress *progress, uint64_t experts, uint64_t bytes);
/* Writes the final state if loading is incomplete and this was not yet written, and ends an
 * unfinished line. */
void ep_load_progress_fini(ep_load_progress *progress);

#endif
