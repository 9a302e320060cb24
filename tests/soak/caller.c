/* SPDX-License-Identifier: Apache-2.0 */
#include "caller.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/random.h"
#include "fault_fixture.h"

#define PERIOD_NS (25 * EP_NS_PER_MS)
#define SLOW_NS (250 * EP_NS_PER_MS)
#define DEADLINE_US 10000000u
enum { SLOTS = 512, BATCHES = FAULT_LAYERS * FAULT_BATCHES, TIMES_MAX = 1 << 20 };

typedef struct caller caller;

typedef struct slot {
    caller *caller;
    const ep_test_batch *batch;
    uint16_t *y;
    uint64_t began_ns;
    atomic_bool busy;
} slot;

struct caller {
    fault_fixture fixture; /* its batches */
    ep_client *client;
    slot slots[SLOTS];
    uint64_t zero_ns;
    bool sums;            /* one frame per host, summed at the nodes */
    pthread_mutex_t lock; /* guards the rest */
    uint32_t *times_us;
    uint64_t calls;
    uint64_t failed;
    uint64_t longest_ns;
    uint64_t longest_began_ns;
};

static double seconds(const caller *c, uint64_t ns)
{
    return (double)(ns - c->zero_ns) / 1e9;
}

static void on_done(void *arg, const ep_moe_result *result)
{
    slot *s = arg;
    caller *c = s->caller;
    uint64_t ns = ep_clock_now_ns() - s->began_ns;
    bool good = result->error.code == EP_OK;
    if (good && c->sums) {
        ep_test_batch_expect_sums(s->batch, s->y);
    } else if (good) {
        ep_test_batch_expect(s->batch, s->y);
    }
    pthread_mutex_lock(&c->lock);
    if (!good) {
        printf("failed %.3f %.1f %s: %s\n", seconds(c, s->began_ns), (double)ns / 1e6,
               ep_err_name(result->error.code), result->error.text);
    } else if (ns >= SLOW_NS) {
        printf("slow %.3f %.1f %u %u %u\n", seconds(c, s->began_ns), (double)ns / 1e6,
               result->rerouted_frames, result->hedged_frames, result->frames);
    }
    if (c->calls == 0) {
        printf("begun\n");
    }
    c->times_us[c->calls % TIMES_MAX] = (uint32_t)(ns / EP_NS_PER_US);
    c->calls++;
    c->failed += !good;
    if (ns > c->longest_ns) {
        c->longest_ns = ns;
        c->longest_began_ns = s->began_ns;
    }
    pthread_mutex_unlock(&c->lock);
    atomic_store(&s->busy, false);
}

static void begin(caller *c, slot *s, uint64_t drawn)
{
    ep_moe_args args;
    ep_error error;
    EP_TEST_CHECK(!atomic_load(&s->busy), "%d calls are in flight: none ends", SLOTS);
    s->batch = &c->fixture.all[drawn % BATCHES];
    ep_tensor out = ep_tensor_2d(s->y, EP_DTYPE_BF16, s->batch->tokens, s->batch->hidden);
    ep_test_batch_args(s->batch, &args);
    args.deadline_us = DEADLINE_US;
    if (c->sums) {
        args.comm_alg = EP_MOE_COMM_HIERARCHY;
        args.combine_at = EP_MOE_COMBINE_NODE_SUM;
    }
    memset(s->y, 0xee, (size_t)s->batch->tokens * s->batch->hidden * sizeof(*s->y));
    atomic_store(&s->busy, true);
    s->began_ns = ep_clock_now_ns();
    ep_err err = ep_moe_forward_async(c->client, &args, &out, on_done, s, NULL, &error);
    EP_TEST_CHECK(err == EP_OK, "a call was not begun: %s", error.text);
}

static long resident_kib(void)
{
    long pages = 0;
    long resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    EP_TEST_CHECK(file != NULL && fscanf(file, "%ld %ld", &pages, &resident) == 2,
                  "/proc/self/statm");
    fclose(file);
    return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

static int ascending(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a;
    uint32_t y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static void print_total(caller *c, uint64_t overslept_ns, long begin_kib)
{
    uint64_t count = c->calls < TIMES_MAX ? c->calls : TIMES_MAX;
    EP_TEST_CHECK(count > 0, "no call came back");
    qsort(c->times_us, count, sizeof(*c->times_us), ascending);
    printf("total %llu %llu %u %u %llu %.3f %llu %ld %ld\n", (unsigned long long)c->calls,
           (unsigned long long)c->failed, c->times_us[count / 2],
           c->times_us[count - 1 - count / 100], (unsigned long long)(c->longest_ns / EP_NS_PER_US),
           seconds(c, c->longest_began_ns), (unsigned long long)(overslept_ns / EP_NS_PER_US),
           resident_kib(), begin_kib);
}

/* Until SIGTERM; the longest time that a sleep was late. */
static uint64_t call_on(caller *c, uint64_t random, long *out_begin_kib)
{
    uint64_t overslept_ns = 0;
    uint64_t due_ns = ep_clock_now_ns();
    sigset_t term;
    sigemptyset(&term);
    sigaddset(&term, SIGTERM);
    for (uint64_t number = 0;; number++) {
        uint64_t now_ns = ep_clock_now_ns();
        uint64_t left_ns = due_ns > now_ns ? due_ns - now_ns : 0;
        if (sigtimedwait(&term, NULL, &(struct timespec){.tv_nsec = (long)left_ns}) == SIGTERM) {
            return overslept_ns;
        }
        now_ns = ep_clock_now_ns();
        uint64_t late_ns = now_ns > due_ns ? now_ns - due_ns : 0;
        overslept_ns = late_ns > overslept_ns ? late_ns : overslept_ns;
        begin(c, &c->slots[number % SLOTS], ep_splitmix64(&random));
        due_ns = late_ns > PERIOD_NS ? now_ns : due_ns + PERIOD_NS;
        *out_begin_kib = number < 400 ? resident_kib() : *out_begin_kib;
    }
}

int soak_caller(int argc, char **argv)
{
    static caller c;
    ep_client_config config;
    ep_error error;
    sigset_t term;
    EP_TEST_CHECK(argc == 5, "a caller's arguments");
    sigemptyset(&term);
    sigaddset(&term, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &term, NULL);
    setvbuf(stdout, NULL, _IOLBF, 0);
    snprintf(c.fixture.model_path, sizeof(c.fixture.model_path), "%s", argv[1]);
    fault_fixture_load_batches(&c.fixture);
    c.zero_ns = strtoull(argv[3], NULL, 10);
    pthread_mutex_init(&c.lock, NULL);
    c.times_us = calloc(TIMES_MAX, sizeof(*c.times_us));
    EP_TEST_CHECK(c.times_us != NULL, "no memory");
    size_t elements = 0;
    for (int i = 0; i < BATCHES; i++) {
        size_t wants = (size_t)c.fixture.all[i].tokens * c.fixture.all[i].hidden;
        elements = wants > elements ? wants : elements;
    }
    for (int i = 0; i < SLOTS; i++) {
        c.slots[i].caller = &c;
        c.slots[i].y = malloc(elements * sizeof(uint16_t));
        EP_TEST_CHECK(c.slots[i].y != NULL, "no memory");
    }
    ep_client_config_init(&config);
    config.coordinator_url = argv[0];
    config.lanes = strcmp(argv[2], "any") == 0 ? NULL : "stream";
    c.sums = strcmp(argv[2], "sums") == 0;
    EP_TEST_CHECK(ep_client_create(&config, &c.client, &error) == EP_OK, "client: %s", error.text);
    EP_TEST_CHECK(ep_client_wait_ready(c.client, (uint64_t)EP_TEST_PATIENCE_MS * 1000, &error) ==
                      EP_OK,
                  "client: %s", error.text);
    long begin_kib = 0;
    uint64_t overslept_ns = call_on(&c, strtoull(argv[4], NULL, 10), &begin_kib);
    for (int i = 0; i < SLOTS; i++) {
        while (atomic_load(&c.slots[i].busy)) {
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL); /* ends by its deadline */
        }
    }
    ep_client_destroy(c.client);
    print_total(&c, overslept_ns, begin_kib);
    for (int i = 0; i < SLOTS; i++) {
        free(c.slots[i].y);
    }
    free(c.times_us);
    fault_fixture_free_batches(&c.fixture);
    return 0;
}
