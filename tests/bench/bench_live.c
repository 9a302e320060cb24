/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a service under decode and prefill load pays for what happens to it: experts that move, a
 * node that joins, nodes that are killed, a new version. Each result is compared with the oracle's,
 * bit by bit.
 *
 *     bench_live [JSON] [long] [moves] [join] [kills] [loss] [upgrade]
 *
 * long, or EP_TEST_LONG=1: five minutes of moves and of kills in the place of 15 and 20 seconds.
 */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "admin.pb-c.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/random.h"
#include "bench/bench_report.h"
#include "bench/live_log.h"
#include "bench/live_table.h"
#include "support/cluster.h"

enum {
    HIDDEN = 64,
    EXPERTS = 8,
    NODES = 4,
    BATCHES = 32,
    DECODE_TOKENS = 4,
    PREFILL_TOKENS = 256,
    EXTRA_MAX = 100000
};
#define DECODE_PER_S 200.0
#define PREFILL_PER_S 10.0
#define DECODE_IN_FLIGHT 24 /* of a closed loop, as the next */
#define PREFILL_IN_FLIGHT 4
#define MODEL "demo"

typedef struct load {
    ep_test_batch batches[BATCHES];
    ep_test_batch others[BATCHES]; /* the same inputs, of the new version */
    live_log *log;
    ep_test_load *load;
} load;

static bool is_long;
static bench_report *report;
static ep_test_cluster cluster;
static ep_client *client;
static char paths[2][EP_TEST_PATH_BYTES]; /* checkpoints of the old and the new version */
static load decode, prefill;

/* ---- the model and its calls ---- */

/* Calls that become due whatever the service does. */
static ep_test_load_config open_loop(ep_moe_mode mode)
{
    return (ep_test_load_config){
        .calls_in_flight = mode == EP_MOE_DECODE ? 2000 : 200, /* ten and twenty seconds of them */
        .calls_per_s = mode == EP_MOE_DECODE ? DECODE_PER_S : PREFILL_PER_S,
        .mode = mode};
}

/* So many in flight at any time. */
static ep_test_load_config closed_loop(ep_moe_mode mode)
{
    return (ep_test_load_config){.calls_in_flight =
                                     mode == EP_MOE_DECODE ? DECODE_IN_FLIGHT : PREFILL_IN_FLIGHT,
                                 .mode = mode};
}

static void begin_load(load *l, const char *name, const ep_test_batch *batches,
                       const ep_test_batch *others, ep_test_load_config config)
{
    l->log = live_log_create(name, batches, others);
    config.client = client;
    config.batches = batches;
    config.batches_count = BATCHES;
    l->load = live_load_start(l->log, config);
}

static void end_load(load *l)
{
    ep_test_load_counts counts;
    if (l->load != NULL) {
        ep_test_load_stop(l->load, &counts);
        l->load = NULL;
    }
}

static void begin_loads(ep_test_load_config (*form)(ep_moe_mode mode))
{
    begin_load(&decode, "decode", decode.batches, NULL, form(EP_MOE_DECODE));
    begin_load(&prefill, "prefill", prefill.batches, NULL, form(EP_MOE_PREFILL));
}

static void many_calls(ep_client_config *config)
{
    config->calls_max = 8192;
}

static void begin_service(const ep_test_cluster_options *options)
{
    ep_test_cluster_start(&cluster, options);
    client = ep_test_cluster_client(&cluster, many_calls);
}

static void end_service(void)
{
    ep_client_destroy(client);
    ep_test_cluster_stop(&cluster);
}

/* ---- the table that calls go by ---- */

static uint32_t node_copies(const ep_routing_table *table, const char *name)
{
    uint32_t copies = 0;
    for (uint32_t l = 0; l < table->layers_count; l++) {
        const ep_routing_layer *layer = &table->layers[l];
        for (uint32_t c = 0; c < layer->offsets[layer->shape.experts]; c++) {
            copies += strcmp(table->nodes[layer->copies[c]].name, name) == 0;
        }
    }
    return copies;
}

typedef struct wanted_node {
    char name[32];
    uint32_t copies;
} wanted_node;

static bool has_copies(const ep_routing_table *table, void *arg)
{
    const wanted_node *wanted = arg;
    return node_copies(table, wanted->name) == wanted->copies;
}

/* ---- rows ---- */

static void add_damage(const char *scene, load *const *loads, size_t count)
{
    uint64_t calls = 0, failed = 0, wrong = 0;
    for (size_t i = 0; i < count; i++) {
        failed += live_log_count(loads[i]->log, LIVE_FAILED, 0, UINT64_MAX);
        wrong += live_log_count(loads[i]->log, LIVE_WRONG, 0, UINT64_MAX);
        calls += live_log_count(loads[i]->log, LIVE_GOOD, 0, UINT64_MAX) +
                 live_log_count(loads[i]->log, LIVE_OTHER, 0, UINT64_MAX);
    }
    bench_report_value(report, (double)failed, "calls", BENCH_LOWER, 0, "%s: calls failed, of %llu",
                       scene, (unsigned long long)(calls + failed + wrong));
    bench_report_value(report, (double)wrong, "calls", BENCH_LOWER, 0, "%s: calls with wrong bits",
                       scene);
}

static void end_loads(const char *scene)
{
    load *const both[] = {&decode, &prefill};
    for (int i = 0; i < 2; i++) {
        end_load(both[i]);
    }
    add_damage(scene, both, 2);
    for (int i = 0; i < 2; i++) {
        live_log_destroy(both[i]->log);
    }
}

/* ---- moves ---- */

enum { PHASE_S = 2, ORDER_S = 1, PAIRS_MAX = 160 };

static void drain(const char *node, bool undo)
{
    Expertd__V1__DrainRequest request = EXPERTD__V1__DRAIN_REQUEST__INIT;
    request.node = (char *)(uintptr_t)node;
    request.undo = undo;
    protobuf_c_message_free_unpacked(ep_test_cluster_call(&cluster, cluster.coordinator.admin_url,
                                                          "expertd.v1.Admin", "Drain",
                                                          &request.base),
                                     NULL);
}

/* A node's experts leave it, and as many come back, ORDER_S apart; how many in all. */
static uint32_t move_experts(uint32_t node, uint64_t from_ns)
{
    wanted_node wanted = {.copies = 0};
    snprintf(wanted.name, sizeof(wanted.name), "node%u", node);
    drain(wanted.name, false);
    live_table_wait(client, "the drained node has no copies", has_copies, &wanted);
    live_sleep_until(from_ns + ORDER_S * EP_NS_PER_S);
    drain(wanted.name, true);
    wanted.copies = EXPERTS / NODES;
    live_table_wait(client, "the node has its part again", has_copies, &wanted);
    return 2 * wanted.copies;
}

/* One move a second on the average, in phases with a quiet one before each. A load's p99 in both is
 * compared. */
static void bench_moves(void)
{
    /* what comes back must be loaded again */
    static const char *const node_args[] = {"--drop-grace-ms=200", NULL};
    const uint32_t pairs = is_long ? 300 / PHASE_S : 15 / PHASE_S + 1;
    double ratios[2][PAIRS_MAX];
    load *const loads[2] = {&decode, &prefill};
    const ep_test_model model = {MODEL, paths[0]};
    begin_service(&(ep_test_cluster_options){
        .nodes_count = NODES, .models = &model, .models_count = 1, .node_args = node_args});
    begin_loads(open_loop);
    live_sleep_until(ep_clock_now_ns() + EP_NS_PER_S);
    uint32_t moves = 0;
    for (uint32_t p = 0; p < pairs; p++) {
        const uint64_t quiet_ns = ep_clock_now_ns(), moving_ns = quiet_ns + PHASE_S * EP_NS_PER_S;
        live_sleep_until(moving_ns);
        moves += move_experts(p % NODES, moving_ns);
        const uint64_t end_ns = moving_ns + PHASE_S * EP_NS_PER_S;
        live_sleep_until(end_ns);
        for (int i = 0; i < 2; i++) {
            ratios[i][p] = live_log_quantile_ms(loads[i]->log, moving_ns, end_ns, 0.99) /
                           live_log_quantile_ms(loads[i]->log, quiet_ns, moving_ns, 0.99);
        }
    }
    end_loads("moves");
    bench_report_value(report, moves / (double)(pairs * PHASE_S), "experts", BENCH_HIGHER, 1,
                       "moves: experts moved in a second of the moving phases");
    bench_report_value(report, bench_quantile(ratios[0], pairs, 0.5), "times", BENCH_LOWER, 1.2,
                       "moves: decode p99 against the quiet phase before");
    bench_report_value(report, bench_quantile(ratios[1], pairs, 0.5), "times", BENCH_LOWER, 1.2,
                       "moves: prefill p99 against the quiet phase before");
    end_service();
}

/* ---- join ---- */

#define SKEW 1.2

static void bench_join(void)
{
    static const char *const balanced[] = {"--placement=balanced", "--spare-copies=4", NULL};
    static int32_t hot[BATCHES * LIVE_TOP_K];
    static load skewed;
    const ep_test_model model = {MODEL, paths[0]};
    live_balance c = {.nodes = NODES - 1, .good = 1.1};
    live_draw_zipf(SKEW, EXPERTS, BATCHES, hot, c.heat);
    live_batches_init(skewed.batches, BATCHES, paths[0], MODEL, 64, hot);
    begin_service(&(ep_test_cluster_options){.nodes_count = NODES - 1,
                                             .models = &model,
                                             .models_count = 1,
                                             .coordinator_args = balanced});
    begin_load(&skewed, "join", skewed.batches, NULL, open_loop(EP_MOE_DECODE));
    live_table_wait(client, "three nodes are balanced", live_table_is_balanced, &c);
    const uint64_t joined_ns = ep_clock_now_ns();
    c.nodes = NODES;
    ep_test_cluster_add_node(&cluster);
    const uint64_t balanced_ns =
        live_table_wait(client, "four nodes are balanced", live_table_is_balanced, &c);
    live_sleep_until(ep_clock_now_ns() + EP_NS_PER_S);
    end_load(&skewed);
    load *const loads[] = {&skewed};
    bench_report_value(report, (double)(balanced_ns - joined_ns) / 1e9, "s", BENCH_LOWER, 10,
                       "join: from the start of a fourth node to within 1.1 of the bound");
    add_damage("join", loads, 1);
    live_log_destroy(skewed.log);
    live_batches_fini(skewed.batches, BATCHES);
    end_service();
}

/* ---- kills ---- */

#define KILL_PAUSE_NS (2 * EP_NS_PER_S)

static uint64_t kill_node(uint32_t node, ep_epoch *out_before)
{
    *out_before = live_table_epoch(client);
    const uint64_t now_ns = ep_clock_now_ns();
    EP_TEST_CHECK(ep_test_process_signal(&cluster.nodes[node], SIGKILL), "not killed");
    return now_ns;
}

static void bench_kills(void)
{
    static double extra[EXTRA_MAX], quiet[EXTRA_MAX];
    uint64_t kills_ns[200];
    uint32_t kills = 0;
    size_t hit = 0, quiet_hit = 0;
    uint64_t random = 11;
    const ep_test_model model = {MODEL, paths[0]};
    begin_service(&(ep_test_cluster_options){
        .nodes_count = NODES, .copies = 2, .models = &model, .models_count = 1});
    begin_loads(closed_loop);
    const uint64_t end_ns = ep_clock_now_ns() + (is_long ? 300 : 20) * EP_NS_PER_S;
    for (uint64_t next_ns = ep_clock_now_ns() + KILL_PAUSE_NS;
         next_ns < end_ns && kills < EP_ARRAY_COUNT(kills_ns);
         next_ns = kills_ns[kills - 1] + KILL_PAUSE_NS) {
        live_sleep_until(next_ns);
        const uint32_t victim = (uint32_t)(ep_splitmix64(&random) >> 33) % NODES;
        live_copies wanted = {.copies_min = 2, .nodes = NODES};
        kills_ns[kills++] = kill_node(victim, &wanted.after);
        ep_test_cluster_return_node(&cluster, victim);
        live_table_wait(client, "all copies are there again", live_table_has_copies, &wanted);
    }
    load *const loads[2] = {&decode, &prefill};
    for (int i = 0; i < 2; i++) {
        end_load(loads[i]);
        for (uint32_t k = 0; k < kills; k++) {
            const double typical_ms =
                live_log_quantile_ms(loads[i]->log, kills_ns[k] - EP_NS_PER_S, kills_ns[k], 0.5);
            hit += live_log_extra_ms(loads[i]->log, kills_ns[k], typical_ms, extra + hit,
                                     EXTRA_MAX - hit);
            quiet_hit += live_log_extra_ms(loads[i]->log, kills_ns[k] - EP_NS_PER_S / 2, typical_ms,
                                           quiet + quiet_hit, EXTRA_MAX - quiet_hit);
        }
    }
    char scene[64];
    snprintf(scene, sizeof(scene), "%u kills", kills);
    end_loads(scene);
    bench_report_value(report, bench_quantile(extra, hit, 0.99), "ms", BENCH_LOWER, 50,
                       "kills: extra time p99 of %zu calls in flight", hit);
    bench_report_value(report, bench_quantile(quiet, quiet_hit, 0.99), "ms", BENCH_LOWER, NAN,
                       "kills: the same half a second before each");
    end_service();
}

/* A node goes for good; heartbeats as they are by default. */
static void bench_loss(const char *restore, double bar_s)
{
    const char *const coordinator_args[] = {restore, NULL};
    const ep_test_model model = {MODEL, paths[0]};
    live_copies wanted = {.copies_min = 2, .nodes = NODES - 1};
    begin_service(
        &(ep_test_cluster_options){.nodes_count = NODES,
                                   .copies = 2,
                                   .heartbeat_ms = 500,
                                   .heartbeat_dead_count = 3,
                                   .models = &model,
                                   .models_count = 1,
                                   .coordinator_args = restore != NULL ? coordinator_args : NULL});
    begin_loads(open_loop);
    live_sleep_until(ep_clock_now_ns() + EP_NS_PER_S);
    const uint64_t killed_ns = kill_node(1, &wanted.after);
    const uint64_t back_ns =
        live_table_wait(client, "two copies on those left", live_table_has_copies, &wanted);
    end_loads(restore != NULL ? "loss" : "loss with defaults");
    bench_report_value(report, (double)(back_ns - killed_ns) / 1e9, "s", BENCH_LOWER, bar_s,
                       "loss: until each expert has two copies again, %s",
                       restore != NULL ? restore + 2 : "default restore_ms");
    ep_test_process_destroy(&cluster.nodes[1]);
    end_service();
}

/* ---- upgrade ---- */

typedef struct versions {
    char names[2][32];
    bool both; /* listed, with all their experts */
} versions;

static bool read_version(const ep_routing_table *table, void *arg)
{
    EP_TEST_CHECK(table->models_count == 1, "%u models", table->models_count);
    snprintf(arg, 32, "%s", table->models[0].version);
    return true;
}

/* The version that is not the first one, once all of its experts have copies on every node. */
static bool has_second(const ep_routing_table *table, void *arg)
{
    versions *v = arg;
    uint32_t whole = 0;
    for (uint32_t l = 0; l < table->layers_count; l++) {
        const ep_routing_layer *layer = &table->layers[l];
        bool good = true;
        for (uint32_t e = 0; e < EXPERTS; e++) {
            good = good && layer->offsets[e + 1] - layer->offsets[e] >= 2;
        }
        whole += good;
        if (strcmp(table->models[layer->model_index].version, v->names[0]) != 0) {
            snprintf(v->names[1], sizeof(v->names[1]), "%s",
                     table->models[layer->model_index].version);
        }
    }
    return whole == 2;
}

/* When the coordinator had said yes. */
static uint64_t set_default(const char *version)
{
    Expertd__V1__DefaultVersionRequest request = EXPERTD__V1__DEFAULT_VERSION_REQUEST__INIT;
    request.model = (char *)(uintptr_t)MODEL;
    request.version = (char *)(uintptr_t)version;
    protobuf_c_message_free_unpacked(ep_test_cluster_call(&cluster, cluster.coordinator.admin_url,
                                                          "expertd.v1.Admin", "SetDefaultVersion",
                                                          &request.base),
                                     NULL);
    return ep_clock_now_ns();
}

/* One node after the other is stopped in order and started with these models; each has its experts
 * before the next one goes. */
static void roll(const ep_test_model *models, size_t count)
{
    cluster.options.models = models;
    cluster.options.models_count = count;
    for (uint32_t n = 0; n < NODES; n++) {
        live_copies wanted = {.copies_min = 2, .nodes = NODES};
        wanted.after = live_table_epoch(client);
        const int code = ep_test_process_stop(&cluster.nodes[n], SIGTERM, EP_TEST_PATIENCE_MS);
        EP_TEST_CHECK(code == 0, "node%u ended with %d", n, code);
        ep_test_cluster_restart_node(&cluster, n);
        if (n + 1 < NODES) {
            wanted.copies_min = 1; /* a version that is coming, or going, is on few nodes */
        }
        live_table_wait(client, "a node is back", live_table_has_copies, &wanted);
        live_sleep_until(ep_clock_now_ns() + EP_NS_PER_S / 2);
    }
}

static double ms_after(uint64_t ns, uint64_t from_ns)
{
    return ns > from_ns ? (double)(ns - from_ns) / 1e6 : 0;
}

static void bench_upgrade(void)
{
    static load named[2];
    const ep_test_model models[2] = {{MODEL, paths[0]}, {MODEL, paths[1]}};
    static versions v;
    load *const loads[] = {&decode, &named[0], &named[1]};
    begin_service(&(ep_test_cluster_options){
        .nodes_count = NODES, .copies = 2, .models = models, .models_count = 1});
    live_table_is(client, read_version, v.names[0]);
    ep_test_load_config config = open_loop(EP_MOE_DECODE);
    begin_load(&decode, "no version named", decode.batches, decode.others, config);
    config.version = v.names[0];
    begin_load(&named[0], "the old version", decode.batches, NULL, config);
    roll(models, 2);
    live_table_wait(client, "both versions have all copies", has_second, &v);
    config.version = v.names[1];
    begin_load(&named[1], "the new version", decode.others, NULL, config);
    live_sleep_until(ep_clock_now_ns() + 2 * EP_NS_PER_S);
    const uint64_t early = live_log_count(decode.log, LIVE_OTHER, 0, UINT64_MAX);
    const uint64_t switched_ns = set_default(v.names[1]);
    live_sleep_until(ep_clock_now_ns() + 2 * EP_NS_PER_S);
    const double switch_ms = ms_after(live_log_last_ns(decode.log, LIVE_GOOD), switched_ns);
    const uint64_t back_ns = set_default(v.names[0]);
    live_sleep_until(ep_clock_now_ns() + 2 * EP_NS_PER_S);
    const double back_ms = ms_after(live_log_last_ns(decode.log, LIVE_OTHER), back_ns);
    set_default(v.names[1]);
    live_sleep_until(ep_clock_now_ns() + EP_NS_PER_S);
    end_load(&named[0]); /* nobody asks for the old one any more */
    const uint64_t last_ns = ep_clock_now_ns();
    roll(models + 1, 1);
    live_sleep_until(ep_clock_now_ns() + EP_NS_PER_S);
    for (int i = 0; i < 3; i++) {
        end_load(loads[i]);
    }
    add_damage("upgrade", loads, 3);
    double longest_ms = 0;
    for (int i = 0; i < 3; i++) {
        longest_ms = fmax(longest_ms, live_log_quantile_ms(loads[i]->log, 0, UINT64_MAX, 1));
    }
    bench_report_value(report, longest_ms, "ms", BENCH_LOWER, NAN, "upgrade: the longest call");
    bench_report_value(report, (double)early, "calls", BENCH_LOWER, 0,
                       "upgrade: new bits before the switch, no version named");
    bench_report_value(report, (double)live_log_count(decode.log, LIVE_GOOD, last_ns, UINT64_MAX),
                       "calls", BENCH_LOWER, 0, "upgrade: old bits after the old one is gone");
    bench_report_value(report, switch_ms, "ms", BENCH_LOWER, 1000,
                       "upgrade: switched at the caller, after the order");
    bench_report_value(report, back_ms, "ms", BENCH_LOWER, 1000,
                       "upgrade: rolled back at the caller, after the order");
    for (int i = 0; i < 3; i++) {
        live_log_destroy(loads[i]->log);
    }
    end_service();
}

static void bench_losses(void)
{
    bench_loss("--restore-ms=2000", 5);
    bench_loss(NULL, NAN);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } scenes[] = {{"moves", bench_moves},
                  {"join", bench_join},
                  {"kills", bench_kills},
                  {"loss", bench_losses},
                  {"upgrade", bench_upgrade}};
    const char *long_text = getenv("EP_TEST_LONG");
    bool chosen[EP_ARRAY_COUNT(scenes)] = {false}, any = false;
    is_long = long_text != NULL && strcmp(long_text, "0") != 0;
    for (int i = 2; i < argc; i++) {
        bool known = strcmp(argv[i], "long") == 0;
        is_long |= known;
        for (size_t s = 0; s < EP_ARRAY_COUNT(scenes); s++) {
            const bool is = strcmp(argv[i], scenes[s].name) == 0;
            chosen[s] |= is;
            known |= is;
            any |= is;
        }
        if (!known) {
            fprintf(
                stderr,
                "bench_live: '%s' is no option; there are: long moves join kills loss upgrade\n",
                argv[i]);
            return 2;
        }
    }
    ep_fixture_config fixture = ep_fixture_layer(HIDDEN, HIDDEN, EXPERTS, 2);
    for (int i = 0; i < 2; i++) {
        fixture.seed += (uint64_t)i;
        ep_test_checkpoint_new(&fixture, paths[i]);
    }
    live_batches_init(decode.batches, BATCHES, paths[0], MODEL, DECODE_TOKENS, NULL);
    live_batches_init(decode.others, BATCHES, paths[1], MODEL, DECODE_TOKENS, NULL);
    live_batches_init(prefill.batches, BATCHES, paths[0], MODEL, PREFILL_TOKENS, NULL);
    report = bench_report_create(
        "Placement changes, joins, kills and a new version under decode and prefill load");
    for (size_t s = 0; s < EP_ARRAY_COUNT(scenes); s++) {
        if (!any || chosen[s]) {
            scenes[s].run();
        }
    }
    live_batches_fini(decode.batches, BATCHES);
    live_batches_fini(decode.others, BATCHES);
    live_batches_fini(prefill.batches, BATCHES);
    ep_test_dir_remove(paths[0]);
    ep_test_dir_remove(paths[1]);
    return bench_report_finish(report, argc > 1 ? argv[1] : NULL);
}
