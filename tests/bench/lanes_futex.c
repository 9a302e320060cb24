/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The limit of a shared-memory lane: slots in memory both processes map, one copy each way, a futex
 * to sleep on. A large message goes whole, or in pieces that the other side copies on while the
 * next is being written and for which it looks a moment before it sleeps: whichever is faster for
 * this size and depth, found by a short trial of each.
 */
#include <linux/futex.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/cpu_features.h"
#include "bench/bench_report.h"
#include "bench/lanes_form.h"

#define PIECE_BYTES ((size_t)64 << 10)
#define TRIAL_COUNT 16
#define LOOKS 400 /* pauses of some 50 ns before sleep, in the middle of a message */

/* One direction. Messages are numbered from 0; number n is described at place n %
 * LANES_DEPTH_MAX. */
typedef struct direction {
    _Alignas(64) uint32_t written; /* atomic: pieces */
    _Alignas(64) uint32_t sleeps;  /* atomic: the reader is in, or about to enter, the futex */
    /* where it is; no more of them in turn than are outstanding, so they stay in the caches */
    uint32_t slot[LANES_DEPTH_MAX];
    uint64_t bytes[LANES_DEPTH_MAX];
    uint64_t piece_bytes[LANES_DEPTH_MAX];
    _Alignas(64) uint8_t slots[LANES_DEPTH_MAX][LANES_BYTES_MAX];
} direction;

typedef struct futex_state {
    direction *there;
    direction *back;
    uint32_t number; /* of the next message; never reset */
    uint32_t piece;  /* the same */
    size_t bytes;    /* of the newest run, with depth and how it went */
    int depth;
    size_t piece_bytes;
    uint8_t *payload;
} futex_state;

static uint32_t pieces_of(size_t bytes, size_t piece_bytes)
{
    return bytes == 0 ? 1 : (uint32_t)((bytes + piece_bytes - 1) / piece_bytes);
}

static void publish(direction *d, uint32_t piece)
{
    __atomic_store_n(&d->written, piece + 1, __ATOMIC_SEQ_CST);
    if (__atomic_exchange_n(&d->sleeps, 0, __ATOMIC_SEQ_CST) != 0) {
        syscall(SYS_futex, &d->sleeps, FUTEX_WAKE, 1, NULL, NULL, 0);
    }
}

static bool is_written(direction *d, uint32_t piece)
{
    return (int32_t)(__atomic_load_n(&d->written, __ATOMIC_SEQ_CST) - piece) > 0;
}

/* Waits until this piece is there. */
static void await(direction *d, uint32_t piece, bool looks)
{
    for (int i = 0; looks && i < LOOKS && !is_written(d, piece); i++) {
        ep_cpu_relax();
    }
    while (!is_written(d, piece)) {
        __atomic_store_n(&d->sleeps, 1, __ATOMIC_SEQ_CST);
        if (is_written(d, piece)) {
            __atomic_store_n(&d->sleeps, 0, __ATOMIC_SEQ_CST);
            return;
        }
        /* On sleeps, not on written: the publisher of an earlier piece may take it back before we
         * are asleep. */
        syscall(SYS_futex, &d->sleeps, FUTEX_WAIT, 1, NULL, NULL, 0);
    }
}

/* Puts a message in; in_pieces NULL: all of it is there, else as its pieces come. Returns the piece
 * after it. */
static uint32_t put(direction *d, uint32_t number, uint32_t slot, uint32_t piece,
                    const uint8_t *data, size_t bytes, size_t piece_bytes, direction *in_pieces)
{
    uint32_t place = number % LANES_DEPTH_MAX;
    uint32_t pieces = pieces_of(bytes, piece_bytes);
    d->slot[place] = slot;
    d->bytes[place] = bytes;
    d->piece_bytes[place] = piece_bytes;
    for (uint32_t i = 0; i < pieces; i++) {
        size_t at = i * piece_bytes;
        if (in_pieces != NULL) {
            await(in_pieces, piece + i, i > 0);
        }
        memcpy(d->slots[slot] + at, data + at, bytes - at < piece_bytes ? bytes - at : piece_bytes);
        publish(d, piece + i);
    }
    return piece + pieces;
}

static void serve(direction *in, direction *out)
{
    uint32_t piece = 0;
    for (uint32_t number = 0;; number++) {
        uint32_t place = number % LANES_DEPTH_MAX;
        await(in, piece, false);
        uint32_t slot = in->slot[place];
        piece = put(out, number, slot, piece, in->slots[slot], in->bytes[place],
                    in->piece_bytes[place], in);
    }
}

static double run_in(futex_state *s, size_t bytes, int count, int depth, size_t piece_bytes,
                     double *out_us)
{
    double begin_us[LANES_DEPTH_MAX], begin = bench_now_us();
    uint32_t pieces = pieces_of(bytes, piece_bytes), put_piece = s->piece;
    int sent = 0;
    for (int received = 0; received < count; received++) {
        for (; sent < count && sent - received < depth; sent++) {
            begin_us[sent % LANES_DEPTH_MAX] = bench_now_us();
            put_piece = put(s->there, s->number + (uint32_t)sent, (uint32_t)(sent % depth),
                            put_piece, s->payload, bytes, piece_bytes, NULL);
        }
        s->piece += pieces;
        await(s->back, s->piece - 1, piece_bytes < bytes);
        out_us[received] = bench_now_us() - begin_us[received % LANES_DEPTH_MAX];
    }
    s->number += (uint32_t)count;
    return (bench_now_us() - begin) / 1e6;
}

/* Whole or in pieces. */
static size_t best_piece_bytes(futex_state *s, size_t bytes, int depth)
{
    double us[TRIAL_COUNT];
    double best[2] = {INFINITY, INFINITY};
    const size_t piece_bytes[2] = {bytes, PIECE_BYTES};
    for (int trial = 0; trial < 6; trial++) {
        double seconds = run_in(s, bytes, TRIAL_COUNT, depth, piece_bytes[trial % 2], us);
        double now = depth == 1 ? bench_quantile(us, TRIAL_COUNT, 0.5) : seconds;
        best[trial % 2] = now < best[trial % 2] ? now : best[trial % 2];
    }
    return best[0] <= best[1] ? piece_bytes[0] : piece_bytes[1];
}

static double futex_run(lanes_form *form, size_t bytes, int count, int depth, double *out_us)
{
    futex_state *s = form->state;
    if (s->bytes != bytes || s->depth != depth) {
        s->bytes = bytes;
        s->depth = depth;
        s->piece_bytes = bytes > PIECE_BYTES ? best_piece_bytes(s, bytes, depth) : bytes;
    }
    return run_in(s, bytes, count, depth, s->piece_bytes, out_us);
}

static void futex_close(lanes_form *form)
{
    futex_state *s = form->state;
    kill(form->server, SIGKILL);
    waitpid(form->server, NULL, 0);
    munmap(s->there, 2 * sizeof(direction));
    free(s->payload);
    free(s);
}

void lanes_futex_open(lanes_form *form)
{
    futex_state *s = calloc(1, sizeof(*s));
    direction *both = mmap(NULL, 2 * sizeof(direction), PROT_READ | PROT_WRITE,
                           MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (s == NULL || both == MAP_FAILED) {
        lanes_fail("futex echo", "no memory");
    }
    s->there = &both[0];
    s->back = &both[1];
    s->payload = malloc(LANES_BYTES_MAX);
    if (s->payload == NULL) {
        lanes_fail("futex echo", "no memory");
    }
    memset(s->payload, 1, LANES_BYTES_MAX);
    form->server = fork();
    if (form->server == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        serve(s->there, s->back);
    }
    form->state = s;
    form->run = futex_run;
    form->close = futex_close;
}
