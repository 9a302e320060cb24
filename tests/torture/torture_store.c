/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Opening, reading and writing the coordinator's store with each allocation failing once. It says
 * NO_MEMORY and names the place, never that the file is damaged, which would make somebody throw it
 * away; what was written before is still there, and the next write works.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "alloc_fail.h"
#include "coordinator/table_store_sqlite.h"
#include "support/process.h"

#define NODES 3
#define EXPERTS 4

static char dir[EP_TEST_PATH_BYTES];
static uint64_t numbers; /* one for each table that is made */
static uint64_t written; /* of the newest that was written */
static ep_coordinator_kept want;

static void must(bool good, const char *what)
{
    if (!good) {
        torture_broken("%s", what);
    }
}

static void must_be_memory(ep_err err, const ep_error *error, const char *what)
{
    if (err != EP_OK && (err != EP_ERR_NO_MEMORY || strstr(error->text, dir) == NULL)) {
        torture_broken("without memory, %s said %s: %s", what, ep_err_name(err), error->text);
    }
}

/* With all memory there is. */
static void make_kept(void)
{
    const ep_layer_shape shape = {
        .layer = 1, .hidden = 8, .inner = 8, .experts = EXPERTS, .top_k = 2};
    ep_routing_table *table;
    ep_coordinator_kept_fini(&want);
    want = (ep_coordinator_kept){
        .number = ++numbers, .next_node_id = NODES, .nodes_count = NODES, .drained_count = 1};
    want.policy.revision = numbers;
    want.policy.values[EP_POLICY_COPIES] =
        (ep_policy_value){.revision = numbers, .number = 2, .who = "somebody"};
    want.nodes = calloc(NODES, sizeof(*want.nodes));
    want.drained = calloc(1, sizeof(*want.drained));
    must(want.nodes != NULL && want.drained != NULL &&
             ep_routing_table_create(NODES, 1, 1, &table) == EP_OK &&
             ep_routing_table_model_init(table, 0, "demo", "v1", 1) == EP_OK &&
             ep_routing_table_layer_init(table, 0, 0, &shape, EXPERTS) == EP_OK,
         "no memory where there is some");
    snprintf(want.drained[0], sizeof(want.drained[0]), "node-1");
    snprintf(table->models[0].numerics[0], EP_NUMERICS_BYTES, "n");
    for (uint32_t n = 0; n < NODES; n++) {
        ep_coordinator_kept_node *node = &want.nodes[n];
        node->node_id = n;
        snprintf(node->name, sizeof(node->name), "node-%u", n);
        snprintf(node->url, sizeof(node->url), "tcp://127.0.0.1:%u", 9000 + n);
        snprintf(node->state, sizeof(node->state), "serving");
        table->nodes[n].node_id = n;
        snprintf(table->nodes[n].name, sizeof(table->nodes[n].name), "%s", node->name);
        snprintf(table->nodes[n].url, sizeof(table->nodes[n].url), "%s", node->url);
        table->models[0].numerics_of_node[n] = 0;
    }
    for (uint32_t e = 0; e <= EXPERTS; e++) {
        table->layers[0].offsets[e] = e;
        if (e < EXPERTS) {
            table->layers[0].copies[e] = e % NODES;
        }
    }
    table->epoch = (ep_epoch){.term = 1, .number = numbers};
    want.published = table;
    want.assigned = ep_routing_table_ref(table);
}

/* One life of a coordinator: what was written comes back, then a table more. False without
 * memory. */
static bool live(void)
{
    ep_table_store *store = NULL;
    ep_coordinator_kept kept = {0};
    uint64_t term;
    ep_error error;
    ep_err err = ep_table_store_sqlite_open(dir, &store, &error);
    must_be_memory(err, &error, "opening");
    if (err != EP_OK) {
        return false;
    }
    err = ep_table_store_begin_term(store, 1, &kept, &term, &error);
    must_be_memory(err, &error, "begin_term");
    if (err == EP_OK) {
        must(kept.number == written, "what was written last is not there");
        must(written == 0 ||
                 (kept.nodes_count == NODES && kept.drained_count == 1 && kept.published != NULL &&
                  kept.assigned != NULL && kept.published->epoch.number == written &&
                  kept.policy.revision == written),
             "a half state came back");
        ep_coordinator_kept_fini(&kept);
        err = ep_table_store_write(store, &want, &error);
        must_be_memory(err, &error, "write");
        written = err == EP_OK ? want.number : written;
    }
    ep_table_store_close(store);
    return err == EP_OK;
}

static void attempt(void *arg)
{
    (void)arg;
    (void)live();
}

static void recover(void *arg)
{
    (void)arg;
    make_kept();
    must(live(), "the store does not work with memory");
    make_kept();
}

int main(void)
{
    must(ep_test_dir_create(dir), "no directory");
    make_kept();
    must(live(), "the store does not work with memory");
    make_kept();
    uint64_t failed = alloc_fail_sweep("store", attempt, recover, NULL);
    ep_coordinator_kept_fini(&want);
    ep_test_dir_remove(dir);
    return failed > 20 ? 0 : 1;
}
