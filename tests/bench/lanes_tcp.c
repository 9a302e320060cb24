/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Raw TCP at its best: of several buffer sizes, and of sending back piece by piece or message by
 * message, what is fastest for this message size and depth, found by short trials that take turns.
 * From 1 MiB on the ways differ by half: what goes back piece by piece never leaves the nearest
 * caches. So the choice is by medians: the best of a few would be the luckiest.
 *
 * A lane hands over whole frames, so it cannot echo piece by piece. The same with whole messages
 * only tells the largest share of raw TCP that such a lane can have.
 */
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "bench/bench_report.h"
#include "bench/lanes_form.h"
#include "bench/tcp_echo.h"

#define LARGE_BYTES ((size_t)64 << 10) /* below, buffer sizes make no difference */
#define TRIALS 7
#define TRIAL_COUNT 24 /* messages, of those up to 2 MiB */

typedef struct tcp_state {
    tcp_echo echo;
    const tcp_echo_way *ways;
    size_t ways_count;
    size_t bytes;
    int depth;
} tcp_state;

/* ring_bytes 0: as many messages as are outstanding; WHOLE_TWO: two messages. */
#define WHOLE_TWO ((size_t)1)
#define WHOLE_WAYS 3 /* the last */
static const tcp_echo_way ways[] = {
    {.ring_bytes = (size_t)256 << 10},
    {.ring_bytes = (size_t)2 << 20},
    {.ring_bytes = (size_t)512 << 10, .socket_bytes = 1 << 20},
    {.ring_bytes = (size_t)2 << 20, .socket_bytes = 4 << 20},
    {.ring_bytes = WHOLE_TWO, .whole = 1},
    {.ring_bytes = WHOLE_TWO, .socket_bytes = 4 << 20, .whole = 1},
    {.ring_bytes = 0, .whole = 1},
};
#define WAYS EP_ARRAY_COUNT(ways)

static void open_way(const lanes_form *form, tcp_echo *echo, size_t bytes, int depth, size_t way)
{
    const tcp_state *s = form->state;
    tcp_echo_way w = s->ways[way];
    if (w.whole) {
        w.ring_bytes = w.ring_bytes == WHOLE_TWO ? 2 * bytes : bytes * (size_t)(depth + 1);
    }
    if (tcp_echo_open(echo, bytes, &w) != 0) {
        lanes_fail("raw TCP echo", "cannot connect");
    }
    sched_setaffinity(echo->server, sizeof(*form->server_cpus), form->server_cpus);
}

/* What is to be small: the round trip, or the time for all. */
static double trial(tcp_echo *echo, size_t bytes, int depth)
{
    double us[TRIAL_COUNT];
    int count = bytes > ((size_t)2 << 20) ? depth + 4 : TRIAL_COUNT;
    double seconds = tcp_echo_run(echo, count, depth, us);
    return depth == 1 ? bench_quantile(us, (size_t)count, 0.5) : seconds;
}

/* Leaves the best way's echo open. */
static tcp_echo open_best(const lanes_form *form, size_t bytes, int depth)
{
    tcp_echo echoes[WAYS];
    double times[WAYS][TRIALS], medians[WAYS];
    size_t best = 0, count = ((const tcp_state *)form->state)->ways_count;
    for (size_t i = 0; i < count; i++) {
        open_way(form, &echoes[i], bytes, depth, i);
        tcp_echo_run(&echoes[i], depth, depth, NULL);
    }
    for (int t = 0; t < TRIALS; t++) {
        for (size_t i = 0; i < count; i++) {
            times[i][t] = trial(&echoes[i], bytes, depth);
        }
    }
    for (size_t i = 0; i < count; i++) {
        medians[i] = bench_quantile(times[i], TRIALS, 0.5);
        best = medians[i] < medians[best] ? i : best;
    }
    for (size_t i = 0; i < count; i++) {
        if (i != best) {
            tcp_echo_close(&echoes[i]);
        }
    }
    return echoes[best];
}

static double tcp_run(lanes_form *form, size_t bytes, int count, int depth, double *out_us)
{
    tcp_state *s = form->state;
    if (s->bytes != bytes || s->depth != depth) {
        if (s->bytes != 0) {
            tcp_echo_close(&s->echo);
        }
        if (bytes >= LARGE_BYTES) {
            s->echo = open_best(form, bytes, depth);
        } else {
            open_way(form, &s->echo, bytes, depth, 0);
        }
        s->bytes = bytes;
        s->depth = depth;
        form->server = s->echo.server;
    }
    double seconds = tcp_echo_run(&s->echo, count, depth, out_us);
    if (seconds < 0) {
        lanes_fail("raw TCP echo", "connection lost");
    }
    return seconds;
}

static void tcp_close(lanes_form *form)
{
    tcp_state *s = form->state;
    if (s->bytes != 0) {
        tcp_echo_close(&s->echo);
    }
    free(s);
}

void lanes_tcp_open(lanes_form *form, bool whole)
{
    tcp_state *s = calloc(1, sizeof(*s));
    if (s == NULL) {
        lanes_fail("raw TCP echo", "no memory");
    }
    s->ways = whole ? ways + WAYS - WHOLE_WAYS : ways;
    s->ways_count = whole ? WHOLE_WAYS : WAYS;
    form->state = s;
    form->run = tcp_run;
    form->close = tcp_close;
}
