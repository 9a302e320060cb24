/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Three nodes with a model of two layers and 8 experts, batches with the oracle's answers, and the
 * rule that makes a fault test worth something: at the fault many calls are in flight, the victim
 * holds some of them, and many calls finish afterwards.
 */
#ifndef FAULT_FIXTURE_H
#define FAULT_FIXTURE_H

#include "support/cluster.h"
#include "support/load.h"

enum {
    FAULT_NODES = 3,
    FAULT_VICTIM = 1,
    FAULT_LAYERS = 2,
    FAULT_EXPERTS = 8,
    FAULT_HIDDEN = 64,
    FAULT_INNER = 64,
    FAULT_BATCHES = 4 /* of each kind and layer */
};

/* A fault test is void below these. Under a sanitizer each call takes several times as long, and
 * races and bad accesses need no thousand of them. */
#define FAULT_IN_FLIGHT_MIN 32
#define FAULT_FINISHED_AFTER_MIN (ep_test_sanitized ? 200u : 1000u)

/* Experts 3, 4 and 5 live on the victim alone when fault_map is used. */
extern const char fault_map[];
#define FAULT_VICTIM_EXPERT_FIRST 3
#define FAULT_VICTIM_EXPERT_LAST 5

typedef struct fault_fixture {
    ep_test_cluster cluster;
    ep_client *client;
    ep_test_model model;
    char model_path[EP_TEST_PATH_BYTES];
    ep_test_batch all[FAULT_LAYERS * FAULT_BATCHES]; /* any experts: every node gets rows */
    /* only the victim's experts of fault_map */
    ep_test_batch victims[FAULT_LAYERS * FAULT_BATCHES];
    ep_test_batch others[FAULT_LAYERS * FAULT_BATCHES]; /* none of them */
} fault_fixture;

/* map: fault_map, or NULL for uniform placement. */
void fault_fixture_init(fault_fixture *f, const char *map, uint32_t copies);
/* As options say; its models are the fixture's. _cluster leaves the client to the caller. */
void fault_fixture_init_cluster(fault_fixture *f, const ep_test_cluster_options *options);
void fault_fixture_init_options(fault_fixture *f, const ep_test_cluster_options *options);
/* Ends what still runs; survivors must drain and exit with 0. */
void fault_fixture_fini(fault_fixture *f);
/* Batches of the checkpoint at f->model_path, for a process that only calls. */
void fault_fixture_load_batches(fault_fixture *f);
void fault_fixture_free_batches(fault_fixture *f);
/* A load over FAULT_LAYERS * FAULT_BATCHES batches. */
ep_test_load *fault_load(fault_fixture *f, const ep_test_batch *batches, uint32_t calls_in_flight,
                         uint64_t deadline_us, ep_test_failure_func on_failure, void *arg);
/* Prints the three numbers and fails when the test would be void. */
void fault_report(const char *fault, uint32_t in_flight, uint64_t victim_in_flight,
                  uint64_t finished_after);

#endif
