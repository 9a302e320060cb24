/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Raw TCP at its best: of several buffer sizes the one that is fastest for this message size and depth, found by a short
 * trial of each.
 */
#include <stdlib.h>
#include <string.h>

#include "bench/bench_report.h"
#include "bench/lanes_form.h"
#include "bench/tcp_echo.h"

#define LARGE_BYTES ((size_t)64 << 10) /* below, buffer sizes make no difference */

typedef struct tcp_state {
    tcp_echo echo;
    size_t bytes;
    int depth;
} tcp_state;

static const struct {
    size_t ring_bytes;
    int socket_bytes;
} variants[] = {{(size_t)256 << 10, 0}, {(size_t)2 << 20, 0}, {2 * LANES_BYTES_MAX, 0}, {(size_t)512 << 10, 1 << 20}, {(size_t)2 << 20, 4 << 20}};
#define VARIANTS (sizeof(variants) / sizeof(variants[0]))

static void open_variant(tcp_state *s, size_t bytes, size_t variant)
{
    if (tcp_echo_open(&s->echo, bytes, variants[variant].ring_bytes, variants[variant].socket_bytes) != 0) {
        lanes_fail("raw TCP echo", "cannot connect");
    }
}

/* What is to be small: the round trip, or the time for all. */
static double trial(tcp_state *s, size_t bytes, int depth, size_t variant)
{
    double us[32];
    int count = bytes > ((size_t)2 << 20) ? depth + 4 : 24;
    open_variant(s, bytes, variant);
    tcp_echo_run(&s->echo, depth, depth, NULL);
    double seconds = tcp_echo_run(&s->echo, count, depth, us);
    tcp_echo_close(&s->echo);
    return depth == 1 ? bench_quantile(us, (size_t)count, 0.5) : seconds;
}

static size_t best_variant(tcp_state *s, size_t bytes, int depth)
{
    double best[VARIANTS];
    size_t at = 0;
    for (size_t i = 0; i < VARIANTS; i++) {
        best[i] = trial(s, bytes, depth, i);
    }
    for (int again = 0; again < 2; again++) { /* interleaved with the others, since the machine's speed drifts */
        for (size_t i = 0; i < VARIANTS; i++) {
            double now = trial(s, bytes, depth, i);
            best[i] = now < best[i] ? now : best[i];
        }
    }
    for (size_t i = 1; i < VARIANTS; i++) {
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
        open_variant(s, bytes, bytes >= LARGE_BYTES ? best_variant(s, bytes, depth) : 0);
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
