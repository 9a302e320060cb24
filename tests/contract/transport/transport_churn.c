/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Threads that open, send, abandon and close connections under traffic, in every order a seed can
 * choose; then everything must be back: each connection closed exactly once, each send done exactly
 * once, no buffer lent, no descriptor open.
 *
 * usage: contract_transport_churn [cycles per thread [seed [lane...]]]
 */
#include <string.h>
#include <time.h>

#include "base/check.h"
#include "base/random.h"
#include "lane_fixture.h"

#define THREADS 6
#define FRAMES_MAX 8
#define SIZE_MAX_BYTES 70000

typedef struct totals {
    uint64_t dials;
    uint64_t dial_results; /* calls of on_dial */
    uint64_t opened;       /* connections handed out, both ends */
    uint64_t started;
    uint64_t closed;    /* calls of on_closed */
    uint64_t unstarted; /* released without start */
    uint64_t sends;     /* accepted by ep_conn_send */
    uint64_t dones;
    uint64_t frames;
    uint64_t faults;
} totals;

#ifdef __SANITIZE_THREAD__
/* The network library counts references to its dialers with atomics that the sanitizer, seeing no
 * instrumented code, misses. */
const char *__tsan_default_suppressions(void);
__attribute__((visibility("default"))) const char *__tsan_default_suppressions(void)
{
    return "race:pthread_mutex_destroy\n";
}
#endif

static lane_world world;
static totals t;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static uint64_t get(uint64_t *counter)
{
    return __atomic_load_n(counter, __ATOMIC_ACQUIRE);
}

static void bump(uint64_t *counter)
{
    __atomic_add_fetch(counter, 1, __ATOMIC_ACQ_REL);
    pthread_mutex_lock(&lock);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* One end of a connection; freed when both its owner and its callbacks have let go. */
typedef struct end {
    ep_conn *conn;
    bool is_server;
    uint32_t refs;
    uint32_t frames;
    uint32_t closed;
    uint64_t random;
    ep_conn_handler handler;
} end;

static void end_unref(end *e)
{
    if (__atomic_sub_fetch(&e->refs, 1, __ATOMIC_ACQ_REL) == 0) {
        free(e);
    }
}

typedef struct parcel {
    ep_send send;
    uint8_t bytes[];
} parcel;

static void parcel_done(ep_send *send, ep_err result)
{
    (void)result;
    bump(&t.dones);
    free(send->arg);
}

static bool parcel_send(end *e, uint64_t sequence, size_t bytes)
{
    parcel *p = calloc(1, sizeof(*p) + bytes);
    CHECK(p != NULL);
    fixture_fill(p->bytes, sequence, bytes);
    p->send.done = parcel_done;
    p->send.arg = p;
    size_t first = bytes / 3;
    p->send.parts[0] = (ep_send_part){.data = p->bytes, .bytes = first};
    p->send.parts[2] = (ep_send_part){.data = p->bytes + first, .bytes = bytes - first};
    p->send.parts_count = 3;
    bump(&t.sends);
    ep_err err = ep_conn_send(e->conn, &p->send);
    if (err == EP_OK) {
        return true;
    }
    __atomic_sub_fetch(&t.sends, 1, __ATOMIC_ACQ_REL);
    if (err != EP_ERR_CLOSED && err != EP_ERR_RESOURCE_EXHAUSTED) {
        bump(&t.faults);
    }
    free(p);
    return false;
}

static void on_frame(void *arg, ep_conn *conn, ep_buffer *frame)
{
    end *e = arg;
    uint64_t sequence = fixture_sequence(frame);
    if (fixture_verify(frame, sequence) != NULL ||
        __atomic_load_n(&e->closed, __ATOMIC_ACQUIRE) != 0) {
        bump(&t.faults);
    }
    size_t bytes = frame->bytes;
    ep_buffer_unref(frame);
    __atomic_add_fetch(&e->frames, 1, __ATOMIC_ACQ_REL);
    bump(&t.frames);
    if (e->is_server) {
        parcel_send(e, sequence, bytes);
        if (ep_splitmix64(&e->random) % 64 == 0) {
            ep_conn_close(conn);
        }
    }
}

static void on_closed(void *arg, ep_conn *conn, const ep_error *error)
{
    end *e = arg;
    if (__atomic_add_fetch(&e->closed, 1, __ATOMIC_ACQ_REL) != 1 || error->code == EP_OK) {
        bump(&t.faults);
    }
    if (e->is_server) {
        ep_conn_release(conn);
    }
    end_unref(e);
    bump(&t.closed);
}

static end *end_create(ep_conn *conn, bool is_server, uint64_t seed)
{
    end *e = calloc(1, sizeof(*e));
    CHECK(e != NULL);
    e->conn = conn;
    e->is_server = is_server;
    e->refs = is_server ? 1 : 2;
    e->random = seed;
    e->handler = (ep_conn_handler){.on_frame = on_frame, .on_closed = on_closed, .arg = e};
    return e;
}

static void on_accept(void *arg, ep_conn *conn)
{
    (void)arg;
    static uint64_t accepts; /* accepts come one at a time */
    uint64_t number = ++accepts;
    bump(&t.opened);
    if (number % 16 == 0) {
        ep_conn_release(conn);
        bump(&t.unstarted);
        return;
    }
    end *e = end_create(conn, true, number);
    bump(&t.started);
    ep_conn_start(conn, &e->handler);
}

typedef struct dial_result {
    ep_conn *conn;
    uint32_t calls;
} dial_result;

static void on_dial(void *arg, ep_conn *conn, const ep_error *error)
{
    dial_result *r = arg;
    if ((conn == NULL) == (error == NULL)) {
        bump(&t.faults);
    }
    r->conn = conn;
    if (conn != NULL) {
        bump(&t.opened);
    }
    __atomic_add_fetch(&r->calls, 1, __ATOMIC_ACQ_REL);
    bump(&t.dial_results);
}

static void wait_until_at_least(uint32_t *counter, uint32_t value, uint32_t *or_nonzero)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += WAIT_S;
    pthread_mutex_lock(&lock);
    while (__atomic_load_n(counter, __ATOMIC_ACQUIRE) < value &&
           (or_nonzero == NULL || __atomic_load_n(or_nonzero, __ATOMIC_ACQUIRE) == 0)) {
        CHECK(pthread_cond_clockwait(&changed, &lock, CLOCK_MONOTONIC, &until) == 0, "waited %d s",
              WAIT_S);
    }
    pthread_mutex_unlock(&lock);
}

/* A connection, or NULL when the dial was abandoned. */
static ep_conn *open_connection(uint64_t *random)
{
    dial_result result = {0};
    ep_lane_address address;
    ep_dial *dial;
    ep_error error;
    world_address(&world, false, &address);
    bump(&t.dials);
    CHECK(ep_lane_dial_begin(world.ops, &address, &world.limits, on_dial, &result, &dial, &error) ==
              EP_OK,
          "%s", error.text);
    if (ep_splitmix64(random) % 8 != 0) {
        wait_until_at_least(&result.calls, 1, NULL);
    }
    ep_dial_release(dial);
    CHECK(result.calls == 1, "on_dial came %u times", result.calls);
    return result.conn;
}

static void use_connection(ep_conn *conn, uint64_t *random)
{
    end *e = end_create(conn, false, 0);
    uint32_t frames = ep_splitmix64(random) % FRAMES_MAX;
    uint32_t accepted = 0;
    bump(&t.started);
    ep_conn_start(conn, &e->handler);
    for (uint32_t i = 0; i < frames; i++) {
        size_t bytes = 64 + (ep_splitmix64(random) % 4 == 0 ? ep_splitmix64(random) % SIZE_MAX_BYTES
                                                            : ep_splitmix64(random) % 500);
        accepted += parcel_send(e, i, bytes);
    }
    switch (ep_splitmix64(random) % 4) {
    case 0: /* wait for every reply, then close */
        wait_until_at_least(&e->frames, accepted, &e->closed);
        ep_conn_close(conn);
        break;
    case 1: /* abandon the replies */
        ep_conn_close(conn);
        break;
    case 2: /* close and see it closed */
        ep_conn_close(conn);
        wait_until_at_least(&e->closed, 1, NULL);
        break;
    default: /* just let go */
        break;
    }
    ep_conn_release(conn);
    end_unref(e);
}

typedef struct worker {
    pthread_t thread;
    uint64_t seed;
    unsigned cycles;
} worker;

static void *work(void *arg)
{
    worker *w = arg;
    uint64_t random = w->seed;
    for (unsigned i = 0; i < w->cycles; i++) {
        ep_conn *conn = open_connection(&random);
        if (conn == NULL) {
            continue;
        }
        if (ep_splitmix64(&random) % 16 == 0) {
            ep_conn_release(conn);
            bump(&t.unstarted);
        } else {
            use_connection(conn, &random);
        }
    }
    return NULL;
}

static bool all_is_back(void)
{
    return get(&t.closed) == get(&t.started) && get(&t.dones) == get(&t.sends) &&
           get(&t.started) + get(&t.unstarted) == get(&t.opened);
}

static void wait_until_all_is_back(void)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += WAIT_S;
    pthread_mutex_lock(&lock);
    while (!all_is_back()) {
        int failed = pthread_cond_clockwait(&changed, &lock, CLOCK_MONOTONIC, &until);
        CHECK(failed == 0, "opened %lu started %lu closed %lu unstarted %lu sends %lu dones %lu",
              t.opened, t.started, t.closed, t.unstarted, t.sends, t.dones);
    }
    pthread_mutex_unlock(&lock);
}

static void churn(const char *scheme, unsigned cycles, uint64_t seed)
{
    worker workers[THREADS];
    ep_lane_address address;
    ep_error error;
    t = (totals){0};
    world_open(&world, scheme);
    world_listen(&world);
    world_close(&world); /* what a library opens once and for all is open now */
    unsigned descriptors = open_descriptors();
    world_open(&world, scheme);
    world_address(&world, true, &address);
    CHECK(ep_lane_listen(world.ops, &address, &world.limits, on_accept, NULL, &world.listener,
                         &error) == EP_OK,
          "%s", error.text);
    ep_listener_url(world.listener, world.dial_url, sizeof(world.dial_url));
    for (unsigned i = 0; i < THREADS; i++) {
        workers[i] = (worker){.seed = seed * THREADS + i, .cycles = cycles};
        CHECK(pthread_create(&workers[i].thread, NULL, work, &workers[i]) == 0);
    }
    for (unsigned i = 0; i < THREADS; i++) {
        pthread_join(workers[i].thread, NULL);
    }
    ep_listener_close(world.listener); /* no accept comes after this */
    world.listener = NULL;
    wait_until_all_is_back();
    world_close(&world);
    bool tls = strcmp(scheme, "tls+tcp") == 0; /* then the network library itself stays */
    unsigned left = open_descriptors();
    CHECK(get(&t.faults) == 0, "%lu faults", t.faults);
    CHECK(get(&t.dials) == get(&t.dial_results));
    CHECK(tls || left == descriptors, "%u descriptors open, %u at start", left, descriptors);
    printf("%-8s dials %lu connections %lu frames %lu sends %lu: all back\n", scheme, t.dials,
           t.opened, t.frames, t.sends);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    unsigned cycles = argc > 1                         ? (unsigned)atoi(argv[1])
                      : getenv("EP_TEST_LONG") != NULL ? 1000
                                                       : 150;
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    printf("seed %lu cycles %u threads %d\n", seed, cycles, THREADS);
    fflush(stdout);
    for (int i = 3; i < argc; i++) {
        churn(argv[i], cycles, seed);
    }
    for (const lane_kind *kind = lane_kinds; argc <= 3 && kind->name != NULL; kind++) {
        if (strcmp(kind->name, "sim") != 0) { /* it has one thread */
            churn(kind->name, cycles, seed);
        }
    }
    return 0;
}
