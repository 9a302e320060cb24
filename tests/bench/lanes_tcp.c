/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Raw TCP at its best: of several buffer sizes, and of sending back piece by piece or message by message, what is fastest for
 * this message size and depth, found by a short trial of each.
 */
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "bench/bench_report.h"
#include "bench/lanes_form.h"
#include "bench/tcp_echo.h"

#define LARGE_BYTES ((size_t)64 << 10) /* below, buffer sizes make no difference */

typedef struct tcp_state {
    tcp_echo echo;
    size_t bytes;
    int depth;
} tcp_state;

/* ring_bytes 0: as many messages as are outstanding. */
static const tcp_echo_way ways[] = {
    {.ring_bytes = (size_t)256 << 10},
    {.ring_bytes = (size_t)2 << 20},
    {.ring_bytes = 2 * LANES_BYTES_MAX},
    {.ring_bytes = (size_t)512 << 10, .socket_bytes = 1 << 20},
    {.ring_bytes = (size_t)2 << 20, .socket_bytes = 4 << 20},
    {.ring_bytes = 0, .whole = 1},
    {.ring_bytes = 0, .socket_bytes = 4 << 20, .whole = 1},
};
#define WAYS EP_ARRAY_COUNT(ways)

static void open_way(tcp_state *s, size_t bytes, int depth, size_t way)
{
    tcp_echo_way w = ways[way];
    if (w.ring_bytes == 0) {
        w.ring_bytes = bytes * (size_t)(depth + 1);
    }
    if (tcp_echo_open(&s->echo, bytes, &w) != 0) {
        lanes_fail("raw TCP echo", "cannot connect");
    }
}

/* What is to be small: the round trip, or the time for all. */
static double trial(tcp_state *s, size_t bytes, int depth, size_t way)
{
    double us[32];
    int count = bytes > ((size_t)2 << 20) ? depth + 4 : 24;
    open_way(s, bytes, depth, way);
    tcp_echo_run(&s->echo, depth, depth, NULL);
    double seconds = tcp_echo_run(&s->echo, count, depth, us);
    tcp_echo_close(&s->echo);
    return depth == 1 ? bench_quantile(us, (size_t)count, 0.5) : seconds;
}

static size_t best_way(tcp_state *s, size_t bytes, int depth)
{
    double best[WAYS];
    size_t at = 0;
    for (size_t i = 0; i < WAYS; i++) {
        best[i] = trial(s, bytes, depth, i);
    }
    for (int again = 0; again < 2; again++) { /* interleaved with the others, since the machine's speed drifts */
        for (size_t i = 0; i < WAYS; i++) {
            double now = trial(s, bytes, depth, i);
            best[i] = now < best[i] ? now : best[i];
        }
    }
    for (size_t i = 1; i < WAYS; i++) {
        at = best[i] < best[at] ? i : at;
    }
    return at;
}

static double tcp_run(lanes_form *form, size_t bytes, int count, int depth, double *out_us)
{
    tcp_state *s = form->state;
    if (s->bytes != bytes || s->depth != depth) {
        if (s->bytes != 0) {
            tcp_echo_close(&s->echo);
        }
        open_way(s, bytes, depth, bytes >= LARGE_BYTES ? best_way(s, bytes, depth) : 0);
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

void lanes_tcp_open(lanes_form *form)
{
    form->state = calloc(1, sizeof(tcp_state));
    if (form->state == NULL) {
        lanes_fail("raw TCP echo", "no memory");
    }
    form->run = tcp_run;
    form->close = tcp_close;
}
