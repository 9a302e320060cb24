/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a message costs on its way: lanes alone, the whole RPC layer, raw TCP and futexes on shared
 * memory as their limits, gRPC C++ as the rival. Every echo is between two processes. Short runs of
 * all forms take turns, and medians of ratios are reported, because the machine's speed drifts. A
 * run's messages are counted by the time the run before it took, so a cell of the table takes a
 * time that does not depend on the machine.
 *
 * A lane and its limit are placed alike, else one would be compared with the other's luck. One
 * message below 1 MiB at a time: both processes on one CPU, since on a virtual machine waking an
 * idle CPU costs more than all the rest. Otherwise each on its own CPU; left alone, the scheduler
 * puts both on one for some tenths of a second now and then, where either moves a third. nng, whose
 * processes have several busy threads, the RPC forms and gRPC run where they like.
 *
 * usage: bench_lanes [JSON [BYTES [DEPTH [FORM]]]]   one size, one depth (0: all), one form beside
 *                                                    the limits
 */
#include <dirent.h>
#include <math.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "bench/bench_report.h"
#include "bench/lanes_form.h"

#define ROUNDS 9
#define RUN_US 30000.0 /* one run of one form */
/* the same from LARGE_BYTES on, so that filling and draining the pipeline counts little */
#define LARGE_RUN_US 60000.0
#define LARGE_BYTES ((size_t)1 << 20)
#define COUNT_MAX 4096
#define BUSY_POLL_US 100

static const size_t sizes[] = {64, 1024, 14336, 131072, 1048576, 4194304, LANES_BYTES_MAX};
static const int depths[] = {1, LANES_DEPTH_MAX};
#define SIZES (sizeof(sizes) / sizeof(sizes[0]))
#define DEPTHS (sizeof(depths) / sizeof(depths[0]))

typedef enum form_id {
    FORM_TCP,
    FORM_FUTEX,
    FORM_TCP_WHOLE, /* from LARGE_BYTES on */
    FORM_LANE_UV,
    FORM_LANE_NNG,
    FORM_LANE_SHM,
    FORM_RPC,
    FORM_RPC_BUSY,
    FORM_RPC_SHM,
    FORM_GRPC,
    FORMS
} form_id;

/* Of one form, at one size and depth. */
typedef struct measured {
    double rtt_us[ROUNDS];
    double rate[ROUNDS];        /* MB/s each way */
    double cpu_ns_byte[ROUNDS]; /* both processes, bytes counted both ways */
} measured;

static lanes_form forms[FORMS] = {
    [FORM_TCP] = {.name = "raw TCP"},
    [FORM_FUTEX] = {.name = "futex"},
    [FORM_TCP_WHOLE] = {.name = "whole TCP"},
    [FORM_LANE_UV] = {.name = "uv-stream"},
    [FORM_LANE_NNG] = {.name = "nng-stream"},
    [FORM_LANE_SHM] = {.name = "shm"},
    [FORM_RPC] = {.name = "rpc"},
    [FORM_RPC_BUSY] = {.name = "rpc busy-poll", .busy_poll_us = BUSY_POLL_US},
    [FORM_RPC_SHM] = {.name = "rpc over shm"},
    [FORM_GRPC] = {.name = "gRPC C++"},
};

static int lost_replies;
static cpu_set_t all_cpus, one_cpu, other_cpu;

/* A form that lost a reply is judged no more; the bench then fails. */
static void give_up(lanes_form *form, size_t bytes, int depth)
{
    fprintf(stderr, "bench_lanes: %s, %zu B, depth %d: a reply never came\n", form->name, bytes,
            depth);
    kill(form->server, SIGKILL);
    form->run = NULL;
    lost_replies++;
}

static bool is_open(form_id id, size_t bytes)
{
    return forms[id].run != NULL && (id != FORM_TCP_WHOLE || bytes >= LARGE_BYTES);
}

/* folder: for the sockets of the shm lane. only: a name, NULL all. */
static void open_forms(const char *folder, const char *only)
{
    const char *tcp = "tcp://127.0.0.1:0";
    char shm[64], rpc_shm[64];
    snprintf(shm, sizeof(shm), "shm://%s/lane.sock", folder);
    snprintf(rpc_shm, sizeof(rpc_shm), "shm://%s/rpc.sock", folder);
    lanes_tcp_open(&forms[FORM_TCP], false);
    lanes_tcp_open(&forms[FORM_TCP_WHOLE], true);
    lanes_futex_open(&forms[FORM_FUTEX]);
    for (form_id id = FORM_LANE_UV; id < FORMS; id++) {
        if (only != NULL && strcmp(only, forms[id].name) != 0) {
            continue;
        }
        switch (id) {
        case FORM_LANE_UV:
            lanes_lane_open(&forms[id], &ep_uv_stream_lane, tcp);
            break;
        case FORM_LANE_NNG:
            lanes_lane_open(&forms[id], &ep_nng_stream_lane, tcp);
            break;
        case FORM_LANE_SHM:
            lanes_lane_open(&forms[id], &ep_shm_lane, shm);
            break;
        case FORM_RPC_SHM:
            lanes_rpc_open(&forms[id], "uv", rpc_shm);
            break;
        case FORM_GRPC:
            lanes_grpc_open(&forms[id]);
            break;
        default:
            lanes_rpc_open(&forms[id], "uv", tcp);
        }
    }
    for (form_id id = 0; id < FORMS; id++) {
        if (forms[id].connect != NULL) {
            forms[id].connect(&forms[id]);
        }
    }
}

static double cpu_us_of(pid_t pid)
{
    clockid_t clock = CLOCK_PROCESS_CPUTIME_ID;
    struct timespec t = {0, 0};
    if (pid != 0) {
        clock_getcpuclockid(pid, &clock);
    }
    clock_gettime(clock, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static double cpu_us(const lanes_form *form)
{
    return cpu_us_of(form->client) + cpu_us_of(form->server);
}

/* All threads of a process, 0 our own, to these CPUs. */
static void place(pid_t pid, const cpu_set_t *cpus)
{
    char path[32];
    const struct dirent *task;
    snprintf(path, sizeof(path), "/proc/%d/task", pid != 0 ? pid : getpid());
    DIR *tasks = opendir(path);
    while (tasks != NULL && (task = readdir(tasks)) != NULL) {
        if (task->d_name[0] != '.') {
            sched_setaffinity(atoi(task->d_name), sizeof(*cpus), cpus);
        }
    }
    if (tasks != NULL) {
        closedir(tasks);
    }
}

static void place_form(form_id id, size_t bytes, int depth)
{
    bool anywhere = id == FORM_LANE_NNG || id > FORM_LANE_SHM;
    bool together = id <= FORM_LANE_SHM && depth == 1 && bytes < LARGE_BYTES;
    place(0, together ? &one_cpu : anywhere ? &all_cpus : &other_cpu);
    forms[id].server_cpus = anywhere ? &all_cpus : &one_cpu;
    if (forms[id].server != 0) {
        place(forms[id].server, forms[id].server_cpus);
    }
}

/* How many messages take about a run, if so many took so long. */
static int count_for(size_t bytes, int depth, int count, double seconds)
{
    double each_us = seconds * 1e6 / count;
    double wanted = (bytes >= LARGE_BYTES ? LARGE_RUN_US : RUN_US) / each_us;
    int least = bytes >= LANES_BYTES_MAX ? depth : depth * 2;
    return wanted < least ? least : wanted > COUNT_MAX ? COUNT_MAX : (int)wanted;
}

/* A few messages, so that connections and pools are warm. Returns the first run's count. */
static int warm_up(lanes_form *form, size_t bytes, int depth)
{
    static double us[COUNT_MAX];
    int few = depth + 3;
    double seconds = form->run(form, bytes, few, depth, us);
    seconds = seconds < 0 ? seconds : form->run(form, bytes, few, depth, us);
    if (seconds < 0) {
        give_up(form, bytes, depth);
        return 0;
    }
    return count_for(bytes, depth, few, seconds);
}

/* One run. Returns the next one's count. */
static int measure(lanes_form *form, size_t bytes, int count, int depth, measured *out, int round)
{
    static double us[COUNT_MAX];
    double cpu = cpu_us(form);
    double seconds = form->run(form, bytes, count, depth, us);
    double total = (double)bytes * count;
    if (seconds < 0) {
        give_up(form, bytes, depth);
        return 0;
    }
    out->cpu_ns_byte[round] = (cpu_us(form) - cpu) * 1e3 / (2 * total);
    out->rate[round] = total / seconds / 1e6;
    out->rtt_us[round] = bench_quantile(us, (size_t)count, 0.5);
    return count_for(bytes, depth, count, seconds);
}

static double median(const double values[ROUNDS])
{
    double sorted[ROUNDS];
    memcpy(sorted, values, sizeof(sorted));
    return bench_quantile(sorted, ROUNDS, 0.5);
}

static double median_ratio(const double values[ROUNDS], const double others[ROUNDS])
{
    double ratios[ROUNDS];
    for (int i = 0; i < ROUNDS; i++) {
        ratios[i] = values[i] / others[i];
    }
    return bench_quantile(ratios, ROUNDS, 0.5);
}

/* What a form is compared with. */
static form_id other_of(form_id id)
{
    switch (id) {
    case FORM_LANE_SHM:
    case FORM_RPC_SHM:
        return FORM_FUTEX;
    case FORM_RPC:
    case FORM_RPC_BUSY:
        return is_open(FORM_GRPC, 0) ? FORM_GRPC : FORM_TCP;
    default:
        return FORM_TCP;
    }
}

typedef enum metric { ROUND_TRIP, GOODPUT } metric;

/* The bars; NAN: none. */
static double bar_of(form_id id, metric what, size_t bytes)
{
    bool against_grpc =
        is_open(FORM_GRPC, 0) && ((id == FORM_RPC && bytes >= 14336) || id == FORM_RPC_BUSY);
    if (id == FORM_LANE_SHM) {
        return what == ROUND_TRIP ? 2 : NAN;
    }
    if (id == FORM_LANE_UV) {
        return what == ROUND_TRIP ? (bytes == 14336 ? 3 : NAN) : (bytes >= 1048576 ? 0.9 : NAN);
    }
    return against_grpc ? 1 : NAN;
}

static void add_row(bench_report *report, form_id id, metric what, size_t bytes,
                    const measured m[FORMS])
{
    form_id other = other_of(id);
    const double *values = what == ROUND_TRIP ? m[id].rtt_us : m[id].rate;
    const double *others = what == ROUND_TRIP ? m[other].rtt_us : m[other].rate;
    bench_row row =
        bench_value(median(values), what == ROUND_TRIP ? "us" : "MB/s",
                    what == ROUND_TRIP ? BENCH_LOWER : BENCH_HIGHER, bar_of(id, what, bytes));
    if (other == FORM_GRPC) {
        row.rival = median(others);
    } else {
        row.limit = median(others);
    }
    row.ratio = median_ratio(values, others);
    bench_report_add(report, &row, "%s %s, %zu B", forms[id].name,
                     what == ROUND_TRIP ? "round trip p50, depth 1" : "goodput each way, depth 8",
                     bytes);
}

static void add_cpu_row(bench_report *report, form_id id, int depth, size_t bytes,
                        const measured m[FORMS])
{
    form_id other = other_of(id);
    bench_row row = bench_value(median(m[id].cpu_ns_byte), "ns/B", BENCH_LOWER, NAN);
    if (other == FORM_GRPC) {
        row.rival = median(m[other].cpu_ns_byte);
    } else {
        row.limit = median(m[other].cpu_ns_byte);
    }
    row.ratio = median_ratio(m[id].cpu_ns_byte, m[other].cpu_ns_byte);
    bench_report_add(report, &row, "%s CPU per byte, depth %d, %zu B", forms[id].name, depth,
                     bytes);
}

static void bench_point(bench_report *report, size_t bytes, int depth)
{
    static measured m[FORMS];
    int counts[FORMS] = {0};
    for (form_id id = 0; id < FORMS; id++) {
        if (is_open(id, bytes)) {
            place_form(id, bytes, depth);
            counts[id] = warm_up(&forms[id], bytes, depth);
        }
    }
    for (int round = 0; round < ROUNDS; round++) {
        for (form_id id = 0; id < FORMS; id++) {
            if (is_open(id, bytes)) {
                place_form(id, bytes, depth);
                counts[id] = measure(&forms[id], bytes, counts[id], depth, &m[id], round);
            }
        }
        place(0, &all_cpus);
    }
    for (form_id id = FORM_TCP_WHOLE; id < FORMS; id++) {
        if (is_open(id, bytes)) {
            add_row(report, id, depth == 1 ? ROUND_TRIP : GOODPUT, bytes, m);
            add_cpu_row(report, id, depth, bytes, m);
        }
    }
}

/* The servers were killed, so their sockets are still there. */
static void remove_folder(const char *folder)
{
    const char *names[] = {"lane.sock", "rpc.sock"};
    char path[64];
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        snprintf(path, sizeof(path), "%s/%s", folder, names[i]);
        unlink(path);
    }
    rmdir(folder);
}

/* The last two: the first ones serve interrupts. With a single CPU both are that. */
static void choose_cpus(void)
{
    int chosen = 0;
    sched_getaffinity(0, sizeof(all_cpus), &all_cpus);
    CPU_ZERO(&one_cpu);
    CPU_ZERO(&other_cpu);
    for (int cpu = CPU_SETSIZE - 1; chosen < 2 && cpu >= 0; cpu--) {
        if (CPU_ISSET(cpu, &all_cpus)) {
            CPU_SET(cpu, chosen++ == 0 ? &one_cpu : &other_cpu);
        }
    }
    if (chosen == 1) {
        other_cpu = one_cpu;
    }
}

int main(int argc, char **argv)
{
    size_t only_bytes = argc > 2 ? strtoul(argv[2], NULL, 10) : 0;
    int only_depth = argc > 3 ? atoi(argv[3]) : 0;
    char folder[] = "/tmp/bench-lanes-XXXXXX";
    if (mkdtemp(folder) == NULL) {
        lanes_fail("bench", "cannot make a folder under /tmp");
    }
    choose_cpus();
    open_forms(folder, argc > 4 ? argv[4] : NULL);
    bench_report *report = bench_report_create(
        "Echo between two processes: lanes and RPC beside raw TCP, futexes and gRPC, same run");
    for (size_t d = 0; d < DEPTHS; d++) {
        for (size_t s = 0; s < SIZES; s++) {
            if ((only_bytes == 0 || only_bytes == sizes[s]) &&
                (only_depth == 0 || only_depth == depths[d])) {
                bench_point(report, sizes[s], depths[d]);
            }
        }
    }
    for (form_id id = 0; id < FORMS; id++) {
        if (forms[id].run != NULL) {
            forms[id].close(&forms[id]);
        }
    }
    remove_folder(folder);
    return bench_report_finish(report, argc > 1 ? argv[1] : NULL) | (lost_replies > 0);
}
