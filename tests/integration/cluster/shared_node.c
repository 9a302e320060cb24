/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What callers share at a node, over real daemons: 4,096 tokens offered to a budget of 512 (right
 * bits, what is beyond waits in spill_bytes, memory stays), a step group whose ranks ride one job,
 * and tenants in the metrics.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "support/cluster.h"
#include "support/load.h"

enum { TOKENS = 256, CALLS_IN_FLIGHT = 16, TOP_K = 2, BATCHES = 4, RSS_GROWTH_KIB = 8192 };

#define ROUND (ep_test_sanitized ? 20 : 200)

static ep_test_cluster cluster;
static ep_test_batch batches[BATCHES]; /* of TOKENS tokens; the last one of 1 */

static double metric(const char *series)
{
    return ep_test_metric(&cluster.nodes[0], series);
}

/* 16 calls of 256 tokens in flight all the time; the load compares every bit. */
static void overload(ep_client *client)
{
    ep_test_load_counts counts;
    ep_test_load *load =
        ep_test_load_start(&(ep_test_load_config){.client = client,
                                                  .batches = batches,
                                                  .batches_count = BATCHES - 1,
                                                  .calls_in_flight = CALLS_IN_FLIGHT,
                                                  .deadline_us = 600000000,
                                                  .mode = EP_MOE_PREFILL});
    ep_test_load_wait_succeeded(load, ROUND);
    long before_kib = ep_test_process_usage(cluster.nodes[0].pid).rss_kib;
    ep_test_load_wait_succeeded(load, 2 * ROUND);
    long after_kib = ep_test_process_usage(cluster.nodes[0].pid).rss_kib;
    ep_test_load_stop(load, &counts);
    double spilled = metric("expertd_admission_spilled_total");
    EP_TEST_CHECK(spilled > 0, "nothing was spilled: %g", spilled);
    EP_TEST_CHECK(metric("expertd_admission_refused_total") == 0, "calls were refused");
    EP_TEST_CHECK(metric("expertd_tokens_in_flight") == 0 && metric("expertd_spill_bytes") == 0,
                  "budgets were not given back");
    EP_TEST_CHECK(ep_test_sanitized || after_kib - before_kib < RSS_GROWTH_KIB,
                  "memory grew from %ld to %ld KiB", before_kib, after_kib);
    printf("spilled %g of %llu calls, memory %ld then %ld KiB\n", spilled,
           (unsigned long long)counts.succeeded, before_kib, after_kib);
}

typedef struct rank {
    pthread_t thread;
    ep_client *client;
    uint64_t step;
    const char *tenant;
} rank;

static void *run_rank(void *arg)
{
    const rank *r = arg;
    const ep_test_batch *batch = &batches[BATCHES - 1];
    ep_moe_args args;
    ep_moe_result result = {.struct_bytes = sizeof(result)};
    uint16_t *y = calloc(batch->hidden, sizeof(*y));
    ep_tensor out = ep_tensor_2d(y, EP_DTYPE_BF16, batch->tokens, batch->hidden);
    ep_test_batch_args(batch, &args);
    args.mode = EP_MOE_DECODE;
    args.deadline_us = 600000000;
    args.step_group = r->step;
    args.step_group_size = r->step != 0 ? 2 : 0;
    args.tenant = r->tenant;
    ep_err err = ep_moe_forward(r->client, &args, &out, &result);
    EP_TEST_CHECK(err == EP_OK, "%s", result.error.text);
    EP_TEST_CHECK(memcmp(y, batch->expected, batch->hidden * sizeof(*y)) == 0, "wrong bits");
    free(y);
    return NULL;
}

/* The first rank's rows wait for the second one's: one job for each expert. A rank that is later
 * than the window does not count, so a slow machine gets several tries. */
static void step_group(ep_client *client)
{
    double works = 0, jobs = 1;
    for (uint64_t step = 1; step <= 20 && works != 2 * jobs; step++) {
        rank ranks[2];
        works = metric("expertd_job_works_total{class=\"decode\"}");
        jobs = metric("expertd_jobs_total{class=\"decode\"}");
        for (int i = 0; i < 2; i++) {
            ranks[i] = (rank){.client = client, .step = step};
            EP_TEST_CHECK(pthread_create(&ranks[i].thread, NULL, run_rank, &ranks[i]) == 0,
                          "no thread");
        }
        for (int i = 0; i < 2; i++) {
            pthread_join(ranks[i].thread, NULL);
        }
        works = metric("expertd_job_works_total{class=\"decode\"}") - works;
        jobs = metric("expertd_jobs_total{class=\"decode\"}") - jobs;
        EP_TEST_CHECK(works == 2 * TOP_K, "%g works of two ranks", works);
    }
    EP_TEST_CHECK(jobs == TOP_K, "the ranks of a step never rode together: %g jobs", jobs);
    rank lone = {.client = client, .step = 1000};
    run_rank(&lone); /* the other one never comes */
}

static void tenants(ep_client *client)
{
    const char *const names[] = {"good", "somebody", "somebody else"};
    for (size_t i = 0; i < 3; i++) {
        rank caller = {.client = client, .tenant = names[i]};
        run_rank(&caller);
    }
    EP_TEST_CHECK(metric("expertd_tenant_tokens_total{tenant=\"good\"}") == 1,
                  "good is not counted");
    EP_TEST_CHECK(metric("expertd_tenant_tokens_total{tenant=\"other\"}") == 2,
                  "others are not counted together");
    EP_TEST_CHECK(metric("expertd_tenant_tokens_total{tenant=\"none\"}") > 3 * ROUND,
                  "nobody is not counted");
    EP_TEST_CHECK(metric("expertd_tenant_tokens_in_flight{tenant=\"good\"}") == 0,
                  "good's tokens stay");
}

int main(void)
{
    char path[EP_TEST_PATH_BYTES];
    ep_fixture_config config = ep_fixture_default();
    const char *const node_args[] = {"--inflight-tokens=512", "--spill-bytes=64MiB",
                                     "--step-group-us=1000000", "--tenant=good=4", NULL};
    config.layers = 1;
    config.hidden = 256;
    config.inner = 512; /* so much work that tokens wait */
    ep_test_checkpoint_new(&config, path);
    ep_test_batches_init(batches, BATCHES - 1, path, "demo", TOKENS, 0, TOP_K, 7);
    ep_test_batches_init(&batches[BATCHES - 1], 1, path, "demo", 1, 0, TOP_K, 6 + BATCHES);
    const ep_test_model model = {.name = "demo", .path = path};
    ep_test_cluster_start(&cluster, &(ep_test_cluster_options){.nodes_count = 1,
                                                               .models = &model,
                                                               .models_count = 1,
                                                               .node_args = node_args});
    ep_client *client = ep_test_cluster_client(&cluster, NULL);
    overload(client);
    step_group(client);
    tenants(client);
    ep_client_destroy(client);
    for (uint32_t b = 0; b < BATCHES; b++) {
        ep_test_batch_fini(&batches[b]);
    }
    ep_test_cluster_stop(&cluster);
    return 0;
}
