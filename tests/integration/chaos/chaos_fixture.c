/* SPDX-License-Identifier: Apache-2.0 */
/* The cluster behind its proxies, and the calls that go on in it. */
#include "chaos_fixture.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/random.h"

#define WELL_CALLS 200
#define SETTLE_LOOKS_MAX 2000

/* ---- calls ---- */

typedef struct chaos_caller {
    struct chaos_run *run;
    pthread_t thread;
    uint64_t random;
} chaos_caller;

struct chaos_run {
    chaos_fixture *fixture;
    uint64_t deadline_us;
    chaos_allowed allowed;
    ep_test_load *load;
    chaos_caller callers[CHAOS_CALLERS];
    bool stopping; /* atomic */
    pthread_mutex_t lock;
    chaos_counts counts; /* without the load's successes */
};

static uint64_t run_deadline_us(const chaos_run *run)
{
    return run->deadline_us != 0 ? run->deadline_us : (uint64_t)EP_TEST_PATIENCE_MS * 1000;
}

static void judge(chaos_run *run, const ep_moe_result *result, uint64_t took_us)
{
    ep_err code = result->error.code;
    bool in_time = took_us >= run_deadline_us(run);
    EP_TEST_CHECK(result->error.text[0] != 0, "a call ended with %s and no words",
                  ep_err_name(code));
    pthread_mutex_lock(&run->lock);
    if (code == EP_ERR_DEADLINE_EXCEEDED && run->allowed.unanswered) {
        EP_TEST_CHECK(in_time, "DEADLINE_EXCEEDED after %llu us: %s", (unsigned long long)took_us,
                      result->error.text);
        run->counts.unanswered++;
    } else if (code == EP_ERR_RESOURCE_EXHAUSTED && run->allowed.unanswered) {
        run->counts.unanswered++; /* a node that has little of the machine says so beforehand */
    } else if (code == EP_ERR_UNAVAILABLE && run->allowed.unavailable && in_time) {
        run->counts.unavailable++;
    } else if ((code == EP_ERR_INVALID_ARGUMENT || code == EP_ERR_UNAVAILABLE) &&
               run->allowed.refused) {
        run->counts.refused++;
        snprintf(run->counts.refusal, sizeof(run->counts.refusal), "%.255s", result->error.text);
    } else {
        ep_test_fail("a call ended after %llu us with %s: %s", (unsigned long long)took_us,
                     ep_err_name(code), result->error.text);
    }
    pthread_mutex_unlock(&run->lock);
}

static void load_failed(void *arg, const ep_test_batch *batch, const ep_moe_result *result,
                        uint64_t began_ns, uint64_t ended_ns)
{
    (void)batch;
    judge(arg, result, (ended_ns - began_ns) / EP_NS_PER_US);
}

static void *call_on(void *arg)
{
    chaos_caller *caller = arg;
    chaos_run *run = caller->run;
    while (!__atomic_load_n(&run->stopping, __ATOMIC_ACQUIRE)) {
        uint64_t drawn = ep_splitmix64(&caller->random) >> 20;
        const ep_test_batch *batch =
            &run->fixture->faults.all[drawn % (FAULT_LAYERS * FAULT_BATCHES)];
        ep_moe_result result;
        uint64_t began_ns = ep_clock_now_ns();
        bool good =
            ep_test_batch_call(batch, run->fixture->faults.client, run->deadline_us, &result);
        uint64_t took_us = (ep_clock_now_ns() - began_ns) / EP_NS_PER_US;
        if (!good) {
            judge(run, &result, took_us);
        }
        pthread_mutex_lock(&run->lock);
        run->counts.succeeded += good;
        run->counts.rerouted_frames += result.rerouted_frames;
        run->counts.hedged_frames += result.hedged_frames;
        pthread_mutex_unlock(&run->lock);
    }
    return NULL;
}

chaos_run *chaos_run_start(chaos_fixture *f, uint64_t deadline_us, const chaos_allowed *allowed)
{
    chaos_run *run = calloc(1, sizeof(*run));
    EP_TEST_CHECK(run != NULL, "no memory");
    *run = (chaos_run){.fixture = f, .deadline_us = deadline_us, .allowed = *allowed};
    pthread_mutex_init(&run->lock, NULL);
    run->load = fault_load(&f->faults, f->faults.all, CHAOS_LOAD, deadline_us, load_failed, run);
    for (uint32_t i = 0; i < CHAOS_CALLERS; i++) {
        run->callers[i] = (chaos_caller){.run = run, .random = f->seed + i};
        EP_TEST_CHECK(pthread_create(&run->callers[i].thread, NULL, call_on, &run->callers[i]) == 0,
                      "no thread");
    }
    return run;
}

static void add_load(const chaos_run *run, const ep_test_load_counts *load, chaos_counts *counts)
{
    (void)run;
    counts->succeeded += load->succeeded;
    counts->rerouted_frames += load->rerouted_frames;
    counts->hedged_frames += load->hedged_frames;
}

void chaos_run_read(chaos_run *run, chaos_counts *out_counts)
{
    ep_test_load_counts load;
    ep_test_load_read(run->load, &load);
    pthread_mutex_lock(&run->lock);
    *out_counts = run->counts;
    pthread_mutex_unlock(&run->lock);
    add_load(run, &load, out_counts);
}

void chaos_run_wait_succeeded(chaos_run *run, uint64_t more)
{
    ep_test_load_wait_succeeded(run->load, more);
}

uint32_t chaos_run_in_flight(chaos_run *run)
{
    ep_test_load_counts load;
    ep_test_load_read(run->load, &load);
    return load.in_flight;
}

void chaos_run_stop(chaos_run *run, chaos_counts *out_counts)
{
    ep_test_load_counts load;
    __atomic_store_n(&run->stopping, true, __ATOMIC_RELEASE);
    for (uint32_t i = 0; i < CHAOS_CALLERS; i++) {
        pthread_join(run->callers[i].thread, NULL);
    }
    ep_test_load_stop(run->load, &load);
    *out_counts = run->counts;
    add_load(run, &load, out_counts);
    pthread_mutex_destroy(&run->lock);
    free(run);
}

/* ---- processes ---- */

static const ep_test_process *process_of(const chaos_fixture *f, uint32_t index)
{
    return index < FAULT_NODES ? &f->faults.cluster.nodes[index] : &f->faults.cluster.coordinator;
}

void chaos_expect_well(chaos_fixture *f)
{
    const chaos_allowed nothing = {false, false, false};
    chaos_counts counts;
    ep_test_cluster_expect_alive(&f->faults.cluster);
    chaos_run *run = chaos_run_start(f, 0, &nothing);
    chaos_run_wait_succeeded(run, WELL_CALLS);
    chaos_run_stop(run, &counts);
    ep_test_cluster_expect_alive(&f->faults.cluster);
}

double chaos_held_by(const chaos_fixture *f, uint32_t index)
{
    const ep_test_process *node = process_of(f, index);
    static const char *const gauges[] = {"expertd_requests_in_flight", "expertd_jobs_in_flight",
                                         "expertd_tokens_in_flight", "expertd_spill_bytes"};
    double sum = 0;
    for (size_t i = 0; i < EP_ARRAY_COUNT(gauges); i++) {
        double held = ep_test_metric(node, gauges[i]);
        EP_TEST_CHECK(held >= 0, "no metric %s", gauges[i]);
        sum += held;
    }
    return sum;
}

static bool is_settled(const chaos_fixture *f, uint32_t index, ep_test_usage *out_usage)
{
    *out_usage = ep_test_process_usage(process_of(f, index)->pid);
    return out_usage->descriptors <= f->start[index].descriptors &&
           out_usage->threads <= f->start[index].threads &&
           (index == CHAOS_COORDINATOR || chaos_held_by(f, index) == 0);
}

void chaos_settle(chaos_fixture *f, ep_test_usage out_usage[CHAOS_PROXIES])
{
    for (uint32_t i = 0; i < CHAOS_PROXIES; i++) {
        for (int look = 0; !is_settled(f, i, &out_usage[i]); look++) {
            const ep_test_process *process = process_of(f, i);
            EP_TEST_CHECK(
                look < SETTLE_LOOKS_MAX,
                "%s: %ld descriptors and %ld threads became %ld and %ld, or calls are left",
                process->output_path, f->start[i].descriptors, f->start[i].threads,
                out_usage[i].descriptors, out_usage[i].threads);
            chaos_expect_well(f); /* the clock: closing takes a moment */
        }
    }
}

/* ---- life ---- */

bool chaos_is_long(void)
{
    const char *text = getenv("EP_TEST_LONG");
    return text != NULL && text[0] == '1';
}

static const char *coordinator_url;

static void go_through_proxy(ep_client_config *config)
{
    config->coordinator_url = coordinator_url;
    config->lanes = "stream"; /* shared memory would pass the proxies by */
}

void chaos_fixture_init(chaos_fixture *f)
{
    const char *seed = getenv("EP_TEST_SEED");
    const char *urls[FAULT_NODES];
    memset(f, 0, sizeof(*f));
    f->seed = seed != NULL ? strtoull(seed, NULL, 10) : chaos_is_long() ? ep_random_id() : 20260301;
    printf("EP_TEST_SEED=%llu\n", (unsigned long long)f->seed);
    for (uint32_t i = 0; i < CHAOS_PROXIES; i++) {
        f->proxies[i] = ep_chaos_proxy_create(f->seed + i);
        EP_TEST_CHECK(f->proxies[i] != NULL, "no proxy");
    }
    for (uint32_t i = 0; i < FAULT_NODES; i++) {
        urls[i] = ep_chaos_proxy_url(f->proxies[i]);
    }
    coordinator_url = ep_chaos_proxy_url(f->proxies[CHAOS_COORDINATOR]);
    fault_fixture_init_cluster(
        &f->faults, &(ep_test_cluster_options){.nodes_count = FAULT_NODES,
                                               .copies = 2,
                                               .advertise_urls = urls,
                                               .nodes_coordinator_url = coordinator_url});
    for (uint32_t i = 0; i < CHAOS_PROXIES; i++) {
        ep_chaos_proxy_set_upstream(f->proxies[i], process_of(f, i)->rpc_url);
    }
    f->faults.client = ep_test_cluster_client(&f->faults.cluster, go_through_proxy);
    f->faults.cluster.options.advertise_urls = NULL; /* ours goes; nodes are not started again */
    chaos_expect_well(f);
    for (uint32_t i = 0; i < CHAOS_PROXIES; i++) {
        f->start[i] = ep_test_process_usage(process_of(f, i)->pid);
    }
}

void chaos_fixture_fini(chaos_fixture *f)
{
    fault_fixture_fini(&f->faults);
    for (uint32_t i = 0; i < CHAOS_PROXIES; i++) {
        ep_chaos_proxy_destroy(f->proxies[i]);
    }
}
