/* SPDX-License-Identifier: Apache-2.0 */
/* The limit of a shared-memory lane: slots in memory both processes map, one copy each way, a futex to sleep on. */
#include <linux/futex.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench/bench_report.h"
#include "bench/lanes_form.h"

/* One direction. Messages are numbered from 0; number n is in slot n % LANES_DEPTH_MAX. */
typedef struct direction {
    _Alignas(64) uint32_t written; /* atomic */
    _Alignas(64) uint32_t sleeps;  /* atomic: the reader is in, or about to enter, the futex */
    uint64_t bytes[LANES_DEPTH_MAX];
    _Alignas(64) uint8_t slots[LANES_DEPTH_MAX][LANES_BYTES_MAX];
} direction;

typedef struct futex_state {
    direction *there;
    direction *back;
    uint32_t number; /* of the next message; never reset */
    uint8_t *payload;
} futex_state;

static void put(direction *d, uint32_t number, const uint8_t *data, size_t bytes)
{
    memcpy(d->slots[number % LANES_DEPTH_MAX], data, bytes);
    d->bytes[number % LANES_DEPTH_MAX] = bytes;
    __atomic_store_n(&d->written, number + 1, __ATOMIC_SEQ_CST);
    if (__atomic_exchange_n(&d->sleeps, 0, __ATOMIC_SEQ_CST) != 0) {
        syscall(SYS_futex, &d->written, FUTEX_WAKE, 1, NULL, NULL, 0);
    }
}

/* Waits until message `number` is there. */
static void await(direction *d, uint32_t number)
{
    for (;;) {
        uint32_t written = __atomic_load_n(&d->written, __ATOMIC_SEQ_CST);
        if (written != number) {
            return;
        }
        __atomic_store_n(&d->sleeps, 1, __ATOMIC_SEQ_CST);
        syscall(SYS_futex, &d->written, FUTEX_WAIT, written, NULL, NULL, 0); /* returns at once when it changed */
    }
}

static void serve(direction *in, direction *out)
{
    for (uint32_t number = 0;; number++) {
        await(in, number);
        put(out, number, in->slots[number % LANES_DEPTH_MAX], in->bytes[number % LANES_DEPTH_MAX]);
    }
}

static double futex_run(lanes_form *form, size_t bytes, int count, int depth, double *out_us)
{
    futex_state *s = form->state;
    double begin_us[LANES_DEPTH_MAX], begin = bench_now_us();
    int sent = 0;
    for (int received = 0; received < count; received++) {
        for (; sent < count && sent - received < depth; sent++) {
            begin_us[sent % LANES_DEPTH_MAX] = bench_now_us();
            put(s->there, s->number + (uint32_t)sent, s->payload, bytes);
        }
        await(s->back, s->number + (uint32_t)received);
        out_us[received] = bench_now_us() - begin_us[received % LANES_DEPTH_MAX];
    }
    s->number += (uint32_t)count;
    return (bench_now_us() - begin) / 1e6;
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
    direction *both = mmap(NULL, 2 * sizeof(direction), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
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
