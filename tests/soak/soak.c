/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random faults on a service of four nodes with two copies of each expert, while three processes
 * call it 40 times a second each: over shared memory where a node offers it, over TCP, and with one
 * frame per host and sums at the nodes.
 *
 * - strict: one fault at a time, the next when all nodes serve and both copies of every expert are
 *   back: no call may fail.
 * - wild: anything at any time: calls may fail, and all is healthy again after the last fault.
 *
 * In both no bit is ever wrong. What is drawn depends on the seed; what it meets, on the machine.
 */
#include <argp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/host.h"
#include "base/random.h"
#include "caller.h"
#include "coordinator.pb-c.h"
#include "fault_fixture.h"
#include "support/chaos_proxy.h"

enum { NODES = 4, COORDINATOR = NODES, TARGETS, CALLERS = 3, FAULTS_MAX = 10000, FLAPS = 3 };
#define TICK_NS (20 * EP_NS_PER_MS)
#define UNDO_AGAIN_NS (200 * EP_NS_PER_MS)
#define HOUR_MS 3600000u
#define LONGEST_MS 1000               /* strict: of a call */
#define HEALTHY_NS (10 * EP_NS_PER_S) /* after the last fault */

#define KINDS(X)                                                                                   \
    X(kill) X(stop) X(terminate) X(drain) X(cut_requests) X(cut_replies) X(cut_both) X(flap)
typedef enum kind {
#define X(name) KIND_##name,
    KINDS(X)
#undef X
        KINDS_COUNT
} kind;
static const char *const kind_names[] = {
#define X(name) #name,
    KINDS(X)
#undef X
};

typedef struct fault {
    kind kind;
    uint32_t target;
    uint32_t flaps;
    uint64_t began_ns;
    uint64_t ends_ns;
} fault;

typedef struct soak {
    bool wild;
    bool bounds; /* times are judged too */
    uint64_t seconds;
    uint64_t seed;
    uint64_t random;
    uint64_t zero_ns;
    fault_fixture faults; /* the cluster and its model */
    ep_chaos_proxy *proxies[NODES];
    ep_test_process callers[CALLERS];
    bool is_faulty[TARGETS];
    fault running[TARGETS];
    fault past[FAULTS_MAX];
    uint32_t past_count;
    uint64_t healed_ns; /* the newest */
} soak;

static double at(const soak *s, uint64_t ns)
{
    return (double)(ns - s->zero_ns) / 1e9;
}

static uint64_t draw(soak *s, uint64_t min, uint64_t max)
{
    return min + (ep_splitmix64(&s->random) >> 20) % (max - min + 1);
}

static const char *target_name(uint32_t target)
{
    static const char *const names[] = {"node0", "node1", "node2", "node3", "coordinator"};
    return names[target];
}

static ep_test_process *process_of(soak *s, uint32_t target)
{
    return target == COORDINATOR ? &s->faults.cluster.coordinator
                                 : &s->faults.cluster.nodes[target];
}

static void tick(void)
{
    nanosleep(&(struct timespec){.tv_nsec = TICK_NS}, NULL);
}

/* ---- health ---- */

static bool all_serve(soak *s)
{
    Expertd__V1__Empty empty = EXPERTD__V1__EMPTY__INIT;
    Expertd__V1__ClusterStatusReply *status =
        (Expertd__V1__ClusterStatusReply *)ep_test_cluster_call(
            &s->faults.cluster, s->faults.cluster.coordinator.rpc_url, "expertd.v1.Coordinator",
            "ClusterStatus", &empty.base);
    uint32_t serving = 0;
    for (size_t i = 0; i < status->n_nodes; i++) {
        serving += strcmp(status->nodes[i]->state, "serving") == 0;
    }
    bool all = status->n_nodes == NODES && serving == NODES;
    protobuf_c_message_free_unpacked(&status->base, NULL);
    return all;
}

/* expertctl's status counts the copies. */
static bool is_healthy(soak *s)
{
    return all_serve(s) && ep_test_cluster_ctl(&s->faults.cluster, NULL, "status") == 0;
}

static void expect_callers(soak *s)
{
    for (int i = 0; i < CALLERS; i++) {
        if (ep_test_process_wait(&s->callers[i], 0) != -1) {
            char *text = ep_test_process_output(&s->callers[i]);
            ep_test_fail("caller %d ended: %s", i, text);
        }
    }
}

static void wait_healthy(soak *s, uint64_t patience_ns)
{
    uint64_t end_ns = ep_clock_now_ns() + patience_ns;
    while (!is_healthy(s)) {
        expect_callers(s);
        if (ep_clock_now_ns() > end_ns) {
            char *text = NULL;
            ep_test_cluster_ctl(&s->faults.cluster, &text, "status");
            ep_test_fail("not healthy %.1f s after the last fault:\n%s", (double)patience_ns / 1e9,
                         text);
        }
        tick();
    }
}

/* ---- faults ---- */

static void start_again(soak *s, uint32_t target)
{
    if (target == COORDINATOR) {
        ep_test_cluster_restart_coordinator(&s->faults.cluster);
        return;
    }
    ep_test_cluster_restart_node(&s->faults.cluster, target);
    ep_chaos_proxy_set_upstream(s->proxies[target], s->faults.cluster.nodes[target].rpc_url);
}

/* Nothing passes until the rule ends; then what was held goes on, as TCP's repetition would have
 * it. */
static void cut(soak *s, uint32_t target, uint32_t directions)
{
    const ep_chaos_rule rule = {.fault = EP_CHAOS_STALL,
                                .directions = directions,
                                .rate = 10000,
                                .amount_min = HOUR_MS,
                                .amount_max = HOUR_MS};
    ep_chaos_proxy_set_rules(s->proxies[target], &rule, 1);
}

/* False: in wild mode the coordinator may not be there to hear of it. */
static bool drain(soak *s, uint32_t target, const char *undo)
{
    char *text = NULL;
    int code = ep_test_process_run_line(
        s->faults.cluster.dir, ep_test_expertctl, NULL, EP_TEST_PATIENCE_MS, &text,
        "drain %s --admin %s --timeout %s %s", target_name(target),
        s->faults.cluster.coordinator.admin_url, s->wild ? "2s" : "30s", undo);
    EP_TEST_CHECK(s->wild || code == 0, "drain of %s: %d: %s", target_name(target), code, text);
    free(text);
    return code == 0;
}

static void begin_fault(soak *s, const fault *f)
{
    ep_test_process *process = process_of(s, f->target);
    printf("%8.3f %s %s for %.1f s\n", at(s, f->began_ns), kind_names[f->kind],
           target_name(f->target), (double)(f->ends_ns - f->began_ns) / 1e9);
    s->is_faulty[f->target] = true;
    s->running[f->target] = *f;
    switch (f->kind) {
    case KIND_kill:
    case KIND_flap:
        EP_TEST_CHECK(ep_test_process_stop(process, SIGKILL, EP_TEST_PATIENCE_MS) == 128 + SIGKILL,
                      "not killed");
        break;
    case KIND_stop:
        EP_TEST_CHECK(ep_test_process_signal(process, SIGSTOP), "not stopped");
        break;
    case KIND_terminate:
        EP_TEST_CHECK(ep_test_process_signal(process, SIGTERM), "not terminated");
        break;
    case KIND_drain:
        drain(s, f->target, "");
        break;
    case KIND_cut_requests:
        cut(s, f->target, EP_CHAOS_TO_SERVER);
        break;
    case KIND_cut_replies:
        cut(s, f->target, EP_CHAOS_TO_CLIENT);
        break;
    case KIND_cut_both:
        cut(s, f->target, EP_CHAOS_TO_SERVER | EP_CHAOS_TO_CLIENT);
        break;
    case KINDS_COUNT:
        break;
    }
}

static void end_fault(soak *s, uint32_t target)
{
    fault *f = &s->running[target];
    ep_test_process *process = process_of(s, target);
    int code;
    switch (f->kind) {
    case KIND_kill:
    case KIND_flap:
        start_again(s, target);
        break;
    case KIND_stop:
        EP_TEST_CHECK(ep_test_process_signal(process, SIGCONT), "not resumed");
        break;
    case KIND_terminate:
        code = ep_test_process_wait(process, EP_TEST_PATIENCE_MS);
        EP_TEST_CHECK(code == 0, "%s ended with %d after SIGTERM", target_name(target), code);
        start_again(s, target);
        break;
    case KIND_drain:
        if (!drain(s, target, "--undo")) { /* a drain is for ever, over restarts too */
            f->ends_ns = ep_clock_now_ns() + UNDO_AGAIN_NS;
            return;
        }
        break;
    case KIND_cut_requests:
    case KIND_cut_replies:
    case KIND_cut_both:
        ep_chaos_proxy_set_rules(s->proxies[target], NULL, 0);
        break;
    case KINDS_COUNT:
        break;
    }
    s->healed_ns = ep_clock_now_ns();
    if (f->kind == KIND_flap && ++f->flaps < FLAPS) {
        f->ends_ns = s->healed_ns + draw(s, 50, 500) * EP_NS_PER_MS;
        begin_fault(s, f);
        return;
    }
    printf("%8.3f %s is back\n", at(s, s->healed_ns), target_name(target));
    f->ends_ns = s->healed_ns;
    EP_TEST_CHECK(s->past_count < FAULTS_MAX, "%d faults", FAULTS_MAX);
    s->past[s->past_count++] = *f;
    s->is_faulty[target] = false;
}

static void draw_fault(soak *s)
{
    fault f = {.target = (uint32_t)draw(s, 0, TARGETS - 1), .began_ns = ep_clock_now_ns()};
    f.kind = f.target == COORDINATOR ? (kind)draw(s, KIND_kill, KIND_terminate)
                                     : (kind)draw(s, 0, KINDS_COUNT - 1);
    bool short_one = f.kind == KIND_flap || draw(s, 0, 3) == 0;
    f.ends_ns = f.began_ns + (short_one ? draw(s, 50, 500) : draw(s, 500, 6000)) * EP_NS_PER_MS;
    if (!s->is_faulty[f.target]) {
        begin_fault(s, &f);
    }
}

/* True when none is left. */
static bool end_due(soak *s, uint64_t now_ns)
{
    bool none = true;
    for (uint32_t t = 0; t < TARGETS; t++) {
        if (s->is_faulty[t] && s->running[t].ends_ns <= now_ns) {
            end_fault(s, t);
        }
        none = none && !s->is_faulty[t];
    }
    return none;
}

static void run_faults(soak *s)
{
    uint64_t end_ns = s->zero_ns + s->seconds * EP_NS_PER_S;
    uint64_t next_ns = ep_clock_now_ns();
    for (uint64_t now_ns; (now_ns = ep_clock_now_ns()) < end_ns;) {
        expect_callers(s);
        bool none = end_due(s, now_ns);
        if (now_ns >= next_ns && (s->wild || none)) {
            if (!s->wild) {
                wait_healthy(s, EP_TEST_PATIENCE_MS * EP_NS_PER_MS);
            }
            draw_fault(s);
            next_ns = ep_clock_now_ns() + draw(s, 200, s->wild ? 3000 : 1500) * EP_NS_PER_MS;
        }
        tick();
    }
    while (!end_due(s, UINT64_MAX)) {
        tick();
    }
    wait_healthy(s, s->bounds ? HEALTHY_NS : EP_TEST_PATIENCE_MS * EP_NS_PER_MS);
    printf("%8.3f healthy, %.1f s after the last fault\n", at(s, ep_clock_now_ns()),
           (double)(ep_clock_now_ns() - s->healed_ns) / 1e9);
}

/* ---- callers ---- */

static void start_callers(soak *s)
{
    static const char *const hows[CALLERS] = {"any", "stream", "sums"};
    char zero[32];
    char seed[32];
    char name[32];
    snprintf(zero, sizeof(zero), "%llu", (unsigned long long)s->zero_ns);
    for (int i = 0; i < CALLERS; i++) {
        snprintf(seed, sizeof(seed), "%llu", (unsigned long long)(s->seed + (uint64_t)i));
        snprintf(name, sizeof(name), "caller%d", i);
        const char *const args[] = {"caller",
                                    s->faults.cluster.coordinator.rpc_url,
                                    s->faults.model_path,
                                    hows[i],
                                    zero,
                                    seed,
                                    NULL};
        EP_TEST_CHECK(ep_test_process_start(&s->callers[i], s->faults.cluster.dir, name,
                                            "/proc/self/exe", args, NULL, false),
                      "no caller");
    }
    for (int i = 0; i < CALLERS; i++) {
        for (bool begun = false; !begun; tick()) {
            char *text = ep_test_process_output(&s->callers[i]);
            begun = strstr(text, "begun") != NULL;
            free(text);
            expect_callers(s);
        }
    }
}

/* Calls that were slow, or failed, at one time: of the longest, when and how. */
typedef struct incident {
    unsigned calls;
    double began_s;
    double ms;
    double ended_s; /* of the last */
    char line[256];
} incident;

static void print_incident(const soak *s, int caller, const incident *i)
{
    if (i->calls == 0) {
        return;
    }
    printf("caller%d: %u calls, the longest %s;", caller, i->calls, i->line);
    for (uint32_t p = 0; p < s->past_count; p++) {
        const fault *f = &s->past[p];
        if (at(s, f->began_ns) < i->ended_s && at(s, f->ends_ns) + 1 > i->began_s) {
            printf(" %s %s %.1f-%.1f", kind_names[f->kind], target_name(f->target),
                   at(s, f->began_ns), at(s, f->ends_ns));
        }
    }
    printf("\n");
}

static void print_incidents(const soak *s, int caller, const char *text)
{
    incident now = {0};
    char *copy = strdup(text);
    EP_TEST_CHECK(copy != NULL, "no memory");
    for (char *line = strtok(copy, "\n"); line != NULL; line = strtok(NULL, "\n")) {
        double began_s, ms;
        if (sscanf(line, "slow %lf %lf", &began_s, &ms) != 2 &&
            sscanf(line, "failed %lf %lf", &began_s, &ms) != 2) {
            continue;
        }
        if (began_s > now.ended_s) {
            print_incident(s, caller, &now);
            now = (incident){0};
        }
        now.calls++;
        double ended_s = began_s + ms / 1e3;
        now.ended_s = ended_s > now.ended_s ? ended_s : now.ended_s;
        if (ms > now.ms) {
            now.ms = ms;
            now.began_s = began_s;
            snprintf(now.line, sizeof(now.line), "%s", line);
        }
    }
    print_incident(s, caller, &now);
    free(copy);
}

/* Its slow and failed calls with the faults of that time, and its total; false when one failed or
 * took too long in strict mode. */
static bool report_caller(soak *s, int number, const char *text)
{
    unsigned long long calls = 0, failed = 0, longest_us = 0, overslept_us = 0;
    unsigned p50_us = 0, p99_us = 0;
    double began_s = 0;
    long rss_kib = 0, rss_begin_kib = 0;
    print_incidents(s, number, text);
    const char *total = strstr(text, "total ");
    EP_TEST_CHECK(total != NULL && sscanf(total, "total %llu %llu %u %u %llu %lf %llu %ld %ld",
                                          &calls, &failed, &p50_us, &p99_us, &longest_us, &began_s,
                                          &overslept_us, &rss_kib, &rss_begin_kib) == 9,
                  "caller %d: %s", number, text);
    printf("caller%d: %llu calls, %llu failed, 0 wrong; p50 %.1f ms, p99 %.1f ms, longest %.1f ms "
           "at %.3f; a "
           "sleep was late by up to %.1f ms; "
           "%ld KiB resident, %ld at the start\n",
           number, calls, failed, p50_us / 1e3, p99_us / 1e3, (double)longest_us / 1e3, began_s,
           (double)overslept_us / 1e3, rss_kib, rss_begin_kib);
    return s->wild || (failed == 0 && (!s->bounds || longest_us <= LONGEST_MS * 1000));
}

static void end_callers(soak *s)
{
    bool good = true;
    for (int i = 0; i < CALLERS; i++) {
        ep_test_process_signal(&s->callers[i], SIGTERM);
    }
    for (int i = 0; i < CALLERS; i++) {
        int code = ep_test_process_wait(&s->callers[i], EP_TEST_PATIENCE_MS);
        char *text = ep_test_process_output(&s->callers[i]);
        EP_TEST_CHECK(code == 0, "caller %d ended with %d: %s", i, code, text);
        good = report_caller(s, i, text) && good;
        free(text);
        ep_test_process_destroy(&s->callers[i]);
    }
    printf("faults %u:", s->past_count);
    for (kind k = 0; k < KINDS_COUNT; k++) {
        uint32_t count = 0;
        for (uint32_t i = 0; i < s->past_count; i++) {
            count += s->past[i].kind == k;
        }
        printf(" %s %u", kind_names[k], count);
    }
    printf("\n");
    EP_TEST_CHECK(good, "strict: a call failed, or took more than %d ms", LONGEST_MS);
}

/* ---- the run ---- */

static void start(soak *s)
{
    static char here[EP_HOST_BYTES]; /* so that nodes 0 and 1 offer shared memory */
    static const char *const hosts[NODES] = {here, here, "there", "there"};
    const char *urls[NODES];
    char state_dir[EP_TEST_PATH_BYTES];
    char shm_dir[EP_TEST_PATH_BYTES];
    char state_option[EP_TEST_PATH_BYTES + 16];
    char shm_option[EP_TEST_PATH_BYTES + 16];
    ep_test_dir_new(state_dir);
    ep_test_dir_new(shm_dir);
    ep_host_boot_id(here);
    snprintf(state_option, sizeof(state_option), "--state-dir=%s", state_dir);
    snprintf(shm_option, sizeof(shm_option), "--shm-dir=%s", shm_dir); /* of our own: other tests
                                                                          have a node0 too */
    const char *const coordinator_args[] = {state_option, NULL};
    const char *const node_args[] = {"--shm=on", shm_option, NULL};
    for (uint32_t i = 0; i < NODES; i++) {
        s->proxies[i] = ep_chaos_proxy_create(s->seed + i);
        EP_TEST_CHECK(s->proxies[i] != NULL, "no proxy");
        urls[i] = ep_chaos_proxy_url(s->proxies[i]);
    }
    static ep_test_cluster_options options;
    options = (ep_test_cluster_options){.nodes_count = NODES,
                                        .copies = 2,
                                        .heartbeat_ms = 100,
                                        .coordinator_args = coordinator_args,
                                        .node_args = node_args,
                                        .hosts = hosts,
                                        .advertise_urls = urls};
    fault_fixture_init_cluster(&s->faults, &options);
    for (uint32_t i = 0; i < NODES; i++) {
        ep_chaos_proxy_set_upstream(s->proxies[i], s->faults.cluster.nodes[i].rpc_url);
    }
    s->random = s->seed;
    s->zero_ns = ep_clock_now_ns();
    start_callers(s);
    wait_healthy(s, EP_TEST_PATIENCE_MS * EP_NS_PER_MS);
    run_faults(s);
    end_callers(s);
    fault_fixture_fini(&s->faults);
    for (uint32_t i = 0; i < NODES; i++) {
        ep_chaos_proxy_destroy(s->proxies[i]);
    }
    ep_test_dir_remove(state_dir);
    ep_test_dir_remove(shm_dir);
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    soak *s = state->input;
    switch (key) {
    case 'w':
        s->wild = true;
        return 0;
    case 'b':
        s->bounds = true;
        return 0;
    case 't':
        s->seconds = strtoull(arg, NULL, 10);
        return s->seconds > 0 ? 0 : EINVAL;
    case 's':
        s->seed = strtoull(arg, NULL, 10);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

int main(int argc, char **argv)
{
    static soak s = {.seconds = 300};
    static const struct argp_option options[] = {
        {"wild", 'w', NULL, 0, "faults at any time; else one after the other (strict)", 0},
        {"bounds", 'b', NULL, 0,
         "fail also when a call takes over 1 s (strict) or health over 10 s", 0},
        {"seconds", 't', "N", 0, "how long faults are made (300)", 0},
        {"seed", 's', "N", 0, "what is drawn (random; printed)", 0},
        {0}};
    if (argc > 1 && strcmp(argv[1], "caller") == 0) {
        return soak_caller(argc - 2, argv + 2);
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    s.seed = ep_random_id() % 1000000;
    if (argp_parse(&(struct argp){.options = options, .parser = parse}, argc, argv, 0, NULL, &s) !=
        0) {
        return 2;
    }
    printf("soak %s, seed %llu, %llu s\n", s.wild ? "wild" : "strict", (unsigned long long)s.seed,
           (unsigned long long)s.seconds);
    start(&s);
    return 0;
}
