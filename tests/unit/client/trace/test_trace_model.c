/* SPDX-License-Identifier: Apache-2.0 */
/* Events to spans, joins, clocks, figures, critical paths and lanes, on a scene with known
 * times. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "trace/trace_export.h"
#include "trace/trace_report.h"
#include "support/trace_scene.h"

#define EVENTS_MAX 1000000

static ep_cli_trace_model *model;
static ep_cli_trace_figures figures;

static void start(uint64_t events_max, uint32_t recordings)
{
    model = ep_cli_trace_model_create(events_max);
    cr_assert_not_null(model);
    for (uint32_t i = 0; i < recordings; i++) {
        cr_assert_eq(ep_cli_trace_model_recording(model, "scene", NULL), EP_OK);
    }
}

static void add(const ep_cli_trace_event *event)
{
    cr_assert_eq(ep_cli_trace_model_add(model, event, NULL), EP_OK);
}

static void finish(ep_trace_id trace)
{
    cr_assert_eq(ep_cli_trace_model_finish(model, trace, NULL), EP_OK);
    cr_assert_eq(ep_cli_trace_figures_make(model, &figures, NULL), EP_OK);
}

static void add_scene(const ep_test_scene *scene)
{
    size_t count;
    ep_cli_trace_event *events = ep_test_scene_events(scene, &count);
    cr_assert_not_null(events);
    for (size_t i = 0; i < count; i++) {
        add(&events[i]);
    }
    free(events);
}

/* A recording of one scene. */
static void tell(const ep_test_scene *scene)
{
    start(EVENTS_MAX, 1);
    add_scene(scene);
    finish((ep_trace_id){0});
}

static void end(void)
{
    ep_cli_trace_figures_free(&figures);
    ep_cli_trace_model_destroy(model);
}

static void expect_path_of_node1(const ep_cli_trace_path *path, int64_t longer)
{
    static const int64_t expected[EP_CLI_PATH_PARTS] = {
        [EP_CLI_PATH_PLAN] = 4000,     [EP_CLI_PATH_PACK] = 6000,   [EP_CLI_PATH_NETWORK] = 20000,
        [EP_CLI_PATH_DECODE] = 3000,   [EP_CLI_PATH_QUEUE] = 10000, [EP_CLI_PATH_JOB] = 30000,
        [EP_CLI_PATH_REPLY] = 4000,    [EP_CLI_PATH_NODE] = 2000,   [EP_CLI_PATH_UNSERVED] = 0,
        [EP_CLI_PATH_COMBINE] = 14000, [EP_CLI_PATH_CLIENT] = 7000};
    for (int part = 0; part < EP_CLI_PATH_PARTS; part++) {
        int64_t more = part == EP_CLI_PATH_NETWORK  ? longer
                       : part == EP_CLI_PATH_CLIENT ? -longer
                                                    : 0;
        cr_expect_eq(path->parts_ns[part], expected[part] + more, "%s: %ld, expected %ld",
                     ep_cli_path_names[part], (long)path->parts_ns[part],
                     (long)(expected[part] + more));
    }
    cr_expect_str_eq(model->names[path->peer], "node1");
    cr_expect_eq(path->peer_ns, 69000 + longer);
}

Test(trace_model, a_scene_is_matched_and_joined, .fini = end)
{
    tell(&(ep_test_scene){.requests = 10});
    cr_expect_eq(model->spans_count, 10 * 19);
    cr_expect_eq(model->unmatched_begins + model->unmatched_ends, 0);
    cr_expect_eq(model->processes_count, 3);
    cr_expect_eq(figures.unserved + figures.unasked, 0);
    cr_expect_eq(figures.requests_count, 10);
    cr_expect_eq(figures.traces_count, 10);
    cr_expect_eq(figures.requests_ns, 10 * 100000);
    const ep_cli_trace_stat *exchange = &figures.stages[EP_CLI_SPAN_exchange];
    cr_expect_eq(exchange->count, 20);
    cr_expect_eq(exchange->p50_ns, 52000);
    cr_expect_eq(exchange->p99_ns, 69900);
    cr_expect_eq(exchange->max_ns, 69900);
    cr_expect_eq(exchange->total_ns, 10 * (52000 + 69000) + 4500);
    cr_expect_eq(figures.network.total_ns, 10 * (20000 + 20000) + 4500);
    for (size_t i = 0; i < figures.requests_count; i++) {
        /* equal durations: in order of time */
        expect_path_of_node1(&figures.paths[i], 100 * (int64_t)i);
    }
}

Test(trace_model, peers_and_experts_are_ranked, .fini = end)
{
    tell(&(ep_test_scene){.requests = 4});
    cr_assert_eq(figures.peers_count, 2);
    cr_expect_str_eq(model->names[figures.peers[0].name], "node1");
    cr_expect_eq(figures.peers[0].slowest_of, 4);
    cr_expect_eq(figures.peers[0].waited_ns, 4 * 69000 + 600);
    cr_expect_eq(figures.peers[0].serve.p50_ns, 49000);
    cr_expect_eq(figures.peers[1].slowest_of, 0);
    cr_assert_eq(figures.experts_count, 2);
    cr_expect_eq(figures.experts[0].expert, 2);
    cr_expect_eq(figures.experts[0].layer, 2);
    cr_expect_eq(figures.experts[0].rows, 4 * 5);
    cr_expect_eq(figures.experts[0].busy_ns, 4 * 30000);
    cr_expect_eq(figures.experts[1].jobs, 4);
}

Test(trace_model, what_has_no_partner_is_counted_and_listed, .fini = end)
{
    start(EVENTS_MAX, 1);
    ep_cli_trace_event e = {
        .kind = EP_CLI_SPAN_forward, .pid = 1, .call = 7, .layer = -1, .expert = -1};
    add(&e);
    e.time_ns = 5;
    add(&e); /* the same name again: the first one never ends */
    e.is_end = true;
    e.time_ns = 9;
    add(&e);
    e.sub = 3;
    e.time_ns = EP_CLI_TRACE_EDGE_NS + 1;
    add(&e); /* never began */
    finish((ep_trace_id){0});
    cr_expect_eq(model->unmatched_begins, 1);
    cr_expect_eq(model->unmatched_ends, 1);
    cr_assert_eq(model->unmatched_count, 2);
    cr_expect(model->unmatched[0].is_end);
    cr_expect_eq(model->unmatched[0].sub, 3);
    cr_expect_eq(model->unmatched[1].time_ns, 0);
    cr_assert_eq(model->spans_count, 1);
    cr_expect_eq(model->spans[0].begin_ns, 5);
    cr_expect_eq(model->spans[0].end_ns, 9);
}

static void add_half(ep_cli_span_kind kind, bool is_end, uint64_t call, int64_t time_ns)
{
    ep_cli_trace_event e = {.kind = kind,
                            .is_end = is_end,
                            .pid = 1,
                            .call = call,
                            .time_ns = time_ns,
                            .trace = {7, call},
                            .layer = -1,
                            .expert = -1};
    add(&e);
}

/* Recorded from 0 to 10 s; the longest exchange took 2 s, the longest receive next to nothing. */
static void add_edges(void)
{
    static const int64_t second = 1000000000;
    start(EVENTS_MAX, 1);
    add_half(EP_CLI_SPAN_receive, false, 1, 0);
    add_half(EP_CLI_SPAN_receive, true, 1, 1);
    add_half(EP_CLI_SPAN_receive, true, 2, EP_CLI_TRACE_EDGE_NS);     /* cut */
    add_half(EP_CLI_SPAN_receive, true, 3, EP_CLI_TRACE_EDGE_NS + 1); /* unmatched */
    add_half(EP_CLI_SPAN_exchange, true, 4, 2 * second);              /* cut */
    add_half(EP_CLI_SPAN_exchange, true, 5, 2 * second + 1);          /* unmatched */
    add_half(EP_CLI_SPAN_exchange, false, 6, 3 * second);
    add_half(EP_CLI_SPAN_exchange, true, 6, 5 * second);
    add_half(EP_CLI_SPAN_exchange, false, 7, 8 * second - 1);                        /* unmatched */
    add_half(EP_CLI_SPAN_exchange, false, 8, 8 * second);                            /* cut */
    add_half(EP_CLI_SPAN_receive, false, 9, 10 * second - EP_CLI_TRACE_EDGE_NS - 1); /* unmatched */
    add_half(EP_CLI_SPAN_receive, false, 10, 10 * second - EP_CLI_TRACE_EDGE_NS);    /* cut */
    add_half(EP_CLI_SPAN_receive, false, 11, 10 * second - 3); /* begun again: unmatched */
    add_half(EP_CLI_SPAN_receive, false, 11, 10 * second - 2);
    add_half(EP_CLI_SPAN_receive, true, 11, 10 * second);
}

Test(trace_model, spans_at_the_edges_of_a_recording_are_cut_and_not_unmatched, .fini = end)
{
    add_edges();
    finish((ep_trace_id){0});
    cr_expect_eq(model->cut_ends, 2);
    cr_expect_eq(model->cut_begins, 2);
    cr_expect_eq(model->unmatched_ends, 2);
    cr_expect_eq(model->unmatched_begins, 3);
    static const uint64_t listed[] = {3, 5, 7, 9, 11};
    cr_assert_eq(model->unmatched_count, 5);
    for (size_t i = 0; i < 5; i++) {
        cr_expect_eq(model->unmatched[i].call, listed[i]);
    }
    cr_expect_eq(model->spans_count, 3);
}

/* A recording reaches the processes of a host one after another. */
Test(trace_model, an_end_soon_after_the_first_event_of_its_process_is_cut, .fini = end)
{
    add_edges();
    ep_cli_trace_event e = {.kind = EP_CLI_SPAN_receive,
                            .is_end = true,
                            .pid = 2,
                            .call = 12,
                            .time_ns = 10 * 1000000000LL,
                            .layer = -1,
                            .expert = -1};
    add(&e);
    finish((ep_trace_id){0});
    cr_expect_eq(model->cut_ends, 3);
    cr_expect_eq(model->unmatched_ends, 2);
}

Test(trace_model, one_trace_counts_its_own_halves_only, .fini = end)
{
    add_edges();
    finish((ep_trace_id){7, 9});
    cr_expect_eq(model->unmatched_begins, 1);
    cr_expect_eq(model->unmatched_ends + model->cut_begins + model->cut_ends, 0);
    cr_assert_eq(model->unmatched_count, 1);
    cr_expect_eq(model->unmatched[0].call, 9);
}

/* ---- what is said of all calls ---- */

#define STORY_REQUESTS 200

/* node1 is 1.4 times as slow; the first 3 requests are hedged, the last 2 fail. */
static void tell_story(void)
{
    tell(&(ep_test_scene){
        .requests = STORY_REQUESTS, .node1_slower_ns = 20000, .hedged = 3, .failed = 2});
}

Test(trace_calls, stages_come_to_all_the_time_of_calls, .fini = end)
{
    int64_t sum = 0;
    int64_t slow_sum = 0;
    tell_story();
    cr_expect_eq(figures.calls.count, STORY_REQUESTS);
    cr_expect_eq(figures.calls.p50_ns, 120000);
    cr_expect_eq(figures.calls.max_ns, 200000);
    cr_expect_eq(figures.calls.total_ns, figures.requests_ns);
    cr_expect_eq(figures.slow_count, 2);
    for (int stage = 0; stage < EP_CLI_STAGES; stage++) {
        sum += figures.stages_ns[stage];
        slow_sum += figures.slow_stages_ns[stage];
    }
    cr_expect_eq(sum, figures.requests_ns);
    cr_expect_eq(slow_sum, 2 * 200000);
    /* plan and two frames; the three that were hedged gathered one more */
    cr_expect_eq(figures.stages_ns[EP_CLI_STAGE_PACK], STORY_REQUESTS * 10000 + 3 * 1000);
    cr_expect_eq(figures.stages_ns[EP_CLI_STAGE_COMBINE], (STORY_REQUESTS - 2) * 14000);
    cr_expect_eq(figures.stages_ns[EP_CLI_STAGE_LATE], 3 * 29000);
    cr_expect_eq(figures.slow_stages_ns[EP_CLI_STAGE_COMPUTE], 2 * 130000);
}

Test(trace_calls, the_slow_node_is_named_and_what_was_late_is_its, .fini = end)
{
    tell_story();
    cr_expect(figures.slow.compared);
    cr_assert_neq(figures.slow.peer, EP_CLI_TRACE_NONE);
    cr_expect_str_eq(model->names[figures.peers[figures.slow.peer].name], "node1");
    cr_expect_str_eq(model->names[figures.peers[figures.slow.against].name], "node0");
    const ep_cli_trace_peer *node1 = &figures.peers[figures.slow.peer];
    const ep_cli_trace_peer *node0 = &figures.peers[figures.slow.against];
    int64_t slow = figures.slow.p99 ? node1->exchange.p99_ns : node1->exchange.p50_ns;
    int64_t base = figures.slow.p99 ? node0->exchange.p99_ns : node0->exchange.p50_ns;
    cr_expect_eq(figures.slow.times, (double)slow / (double)base);
    cr_expect_gt(figures.slow.times, 1.7);
    cr_expect_eq(node1->late_ns, 3 * 29000);
    cr_expect_eq(node0->late_ns, 0);
    cr_expect_eq(node1->unused, 3);
    cr_expect_eq(figures.unused, 3);
}

Test(trace_calls, few_frames_are_not_compared, .fini = end)
{
    tell(&(ep_test_scene){.requests = 9, .node1_slower_ns = 500000});
    cr_expect_not(figures.slow.compared);
    cr_expect_eq(figures.slow.peer, EP_CLI_TRACE_NONE);
}

Test(trace_calls, failures_are_counted_by_status_with_the_first_calls, .fini = end)
{
    tell_story();
    cr_expect_eq(figures.failed, 2);
    cr_assert_eq(figures.failures_count, 2);
    for (size_t i = 0; i < 2; i++) {
        const ep_cli_trace_failure *f = &figures.failures[i];
        cr_expect_eq(f->status, EP_ERR_DEADLINE_EXCEEDED);
        cr_expect_eq(f->frames, i == 1);
        cr_expect_eq(f->count, 2);
        cr_expect_eq(f->saved, 0);
        cr_assert_eq(f->first_count, 2);
        cr_expect_eq(model->spans[figures.requests[f->first[0]]].call,
                     EP_TEST_SCENE_CALL + STORY_REQUESTS - 2);
    }
}

/* One more than are named, all of a status that no version of ours has; and their call did not
 * fail. */
Test(trace_calls, a_failed_frame_of_a_call_that_succeeded_is_saved, .fini = end)
{
    start(EVENTS_MAX, 1);
    for (uint64_t i = 0; i < 2 * (EP_CLI_TRACE_FIRST_MAX + 1); i++) {
        ep_cli_trace_event e = {.kind = i % 2 == 0 ? EP_CLI_SPAN_forward : EP_CLI_SPAN_exchange,
                                .pid = 1,
                                .call = 10 + i,
                                .parent = 9 + i,
                                .time_ns = (int64_t)i,
                                .layer = -1,
                                .expert = -1};
        add(&e);
        e.is_end = true;
        e.status = i % 2 == 0 ? 0 : 1000;
        e.time_ns += 100;
        add(&e);
    }
    finish((ep_trace_id){0});
    cr_expect_eq(figures.failed, 0);
    cr_assert_eq(figures.failures_count, 1);
    cr_expect_eq(figures.failures[0].status, EP_ERR_UNKNOWN);
    cr_expect_eq(figures.failures[0].count, EP_CLI_TRACE_FIRST_MAX + 1);
    cr_expect_eq(figures.failures[0].saved, EP_CLI_TRACE_FIRST_MAX + 1);
    cr_expect_eq(figures.failures[0].first_count, EP_CLI_TRACE_FIRST_MAX);
}

Test(trace_calls, bins_hold_every_call_once, .fini = end)
{
    uint64_t calls = 0;
    uint64_t failed = 0;
    uint64_t hedged = 0;
    tell_story();
    cr_assert_eq(figures.bins_count, EP_CLI_TRACE_BINS);
    for (size_t i = 0; i < figures.bins_count; i++) {
        const ep_cli_trace_bin *bin = &figures.bins[i];
        cr_expect(i == 0 || bin->begin_ns == figures.bins[i - 1].end_ns);
        calls += bin->calls.count;
        failed += bin->failed;
        hedged += bin->hedged;
    }
    cr_expect_eq(calls, STORY_REQUESTS);
    cr_expect_eq(failed, 2);
    cr_expect_eq(hedged, 3);
    cr_expect_eq(figures.bins[EP_CLI_TRACE_BINS - 1].failed, 2);
}

/* The scene names everything of request i by numbers of its own. */
Test(trace_calls, every_span_is_of_its_call, .fini = end)
{
    tell_story();
    for (size_t i = 0; i < model->spans_count; i++) {
        cr_assert_neq(figures.owner_of[i], EP_CLI_TRACE_NONE, "span %zu", i);
        const ep_cli_span *owner = &model->spans[figures.requests[figures.owner_of[i]]];
        cr_expect_eq(owner->trace.low, model->spans[i].trace.low);
        /* of the three exchanges with node1 that were hedged, and of what both sides did */
        uint64_t call = model->spans[i].call;
        cr_expect_eq(model->spans[i].unused, call == 5001 || call == 5003 || call == 5005,
                     "span %zu", i);
    }
}

static void expect_summary(const char *expected)
{
    char text[EP_CLI_TRACE_SUMMARY_BYTES];
    ep_cli_trace_summary(model, &figures, text);
    cr_expect_str_eq(text, expected);
}

Test(trace_calls, one_sentence_says_it, .fini = end)
{
    tell_story();
    expect_summary("200 calls, p50 120 µs, p99 120 µs; 42 % of a call is compute; node1 is the "
                   "slowest (1.8x node0); 2 calls failed (2 DEADLINE_EXCEEDED), 3 hedges.");
}

Test(trace_calls, one_sentence_says_that_nothing_is_wrong, .fini = end)
{
    tell(&(ep_test_scene){.requests = 1});
    expect_summary("1 call, p50 100 µs, p99 100 µs; 30 % of a call is compute; nothing failed.");
}

Test(trace_calls, nodes_without_their_callers_are_said_to_be, .fini = end)
{
    tell(&(ep_test_scene){.requests = 2000, .nodes_only = true});
    expect_summary("No caller was recorded; nodes served 4,000 frames, p50 32.0 µs, p99 49.0 µs.");
}

/* ---- what the page holds ---- */

Test(trace_pick, a_small_page_holds_whole_calls_the_notable_ones_and_a_sample, .fini = end)
{
    enum { MAX = 1000 };
    ep_cli_trace_pick pick;
    size_t of_call[STORY_REQUESTS] = {0};
    size_t total[STORY_REQUESTS] = {0};
    size_t quarter[4] = {0};
    tell_story();
    cr_assert_eq(ep_cli_trace_pick_make(model, &figures, MAX, &pick, NULL), EP_OK);
    cr_expect(pick.spans_count <= MAX && pick.spans_count > MAX - 30, "%zu", pick.spans_count);
    for (size_t i = 0; i < model->spans_count; i++) {
        total[figures.owner_of[i]]++;
        of_call[figures.owner_of[i]] += pick.spans[i];
    }
    size_t calls = 0;
    for (uint32_t i = 0; i < STORY_REQUESTS; i++) {
        const ep_cli_span *request = &model->spans[figures.requests[i]];
        cr_expect(pick.calls[i] == (of_call[i] > 0), "call %u", i);
        cr_expect(!pick.calls[i] || of_call[i] == total[i], "call %u: %zu of %zu", i, of_call[i],
                  total[i]);
        cr_expect(request->status == 0 || pick.calls[i], "failed call %u", i);
        calls += pick.calls[i];
        quarter[(request->trace.low - 1) * 4 / STORY_REQUESTS] += pick.calls[i];
    }
    cr_expect_eq(calls, pick.calls_count);
    for (size_t q = 0; q < 4; q++) {
        cr_expect_geq(quarter[q], 4, "quarter %zu has %zu", q, quarter[q]);
    }
    ep_cli_trace_pick_free(&pick);
}

Test(trace_pick, of_a_call_too_large_for_the_page_there_is_what_fits, .fini = end)
{
    ep_cli_trace_pick pick;
    tell_story();
    cr_assert_eq(ep_cli_trace_pick_make(model, &figures, 10, &pick, NULL), EP_OK);
    cr_expect_eq(pick.spans_count, 10);
    cr_expect_eq(pick.calls_count, 1);
    ep_cli_trace_pick_free(&pick);
}

Test(trace_pick, what_fits_is_all_there, .fini = end)
{
    ep_cli_trace_pick pick;
    tell_story();
    cr_assert_eq(ep_cli_trace_pick_make(model, &figures, model->spans_count, &pick, NULL), EP_OK);
    cr_expect_eq(pick.spans_count, model->spans_count);
    cr_expect_eq(pick.calls_count, STORY_REQUESTS);
    ep_cli_trace_pick_free(&pick);
}

typedef struct piece {
    ep_cli_span_kind kind;
    int32_t pid;
    const char *node;
    const char *peer;
    uint64_t call;
    uint64_t parent;
    int64_t begin_ns;
    int64_t end_ns;
    bool unused;
} piece;

/* A client without routing asks a gateway, which asks node0. */
static const piece through_gateway[] = {
    {EP_CLI_SPAN_forward, 1, "", "", 100, 0, 0, 100, false},
    {EP_CLI_SPAN_exchange, 1, "", "gateway", 200, 100, 10, 90, false},
    {EP_CLI_SPAN_gateway, 2, "gateway", "", 200, 100, 20, 80, false},
    {EP_CLI_SPAN_forward, 2, "gateway", "", 300, 200, 25, 75, false},
    {EP_CLI_SPAN_exchange, 2, "gateway", "node0", 400, 300, 30, 70, false},
    {EP_CLI_SPAN_serve, 3, "node0", "", 400, 300, 40, 60, false},
};

static void add_pieces(const piece *pieces, size_t count)
{
    for (size_t i = 0; i < 2 * count; i++) {
        const piece *p = &pieces[i % count];
        ep_cli_trace_event e = {.kind = p->kind,
                                .is_end = i >= count,
                                .pid = p->pid,
                                .call = p->call,
                                .parent = p->parent,
                                .rows = i >= count && p->unused ? 0 : 1,
                                .time_ns = i >= count ? p->end_ns : p->begin_ns,
                                .trace = {7, 7},
                                .layer = -1,
                                .expert = -1};
        snprintf(e.node, sizeof(e.node), "%s", p->node);
        snprintf(e.peer, sizeof(e.peer), "%s", p->peer);
        add(&e);
    }
}

Test(trace_model, each_of_many_peers_has_its_figures, .fini = end)
{
    enum { PEERS = 1500 };
    start(EVENTS_MAX, 1);
    for (int64_t i = 0; i < PEERS; i++) {
        char peer[16];
        snprintf(peer, sizeof(peer), "node%d", (int)i);
        const piece exchange = {.kind = EP_CLI_SPAN_exchange,
                                .pid = 1,
                                .node = "",
                                .peer = peer,
                                .call = (uint64_t)i + 1,
                                .begin_ns = 10 * i,
                                .end_ns = 10 * i + 5};
        add_pieces(&exchange, 1);
    }
    finish((ep_trace_id){0});
    cr_assert_eq(figures.peers_count, PEERS);
    cr_expect_eq(figures.peers[PEERS - 1].exchange.count, 1);
}

static void expect_gateway_path(int64_t client, int64_t network)
{
    cr_assert_eq(figures.requests_count, 1);
    const ep_cli_trace_path *path = &figures.paths[0];
    cr_expect_eq(path->parts_ns[EP_CLI_PATH_CLIENT], client);
    cr_expect_eq(path->parts_ns[EP_CLI_PATH_NETWORK], network);
    cr_expect_eq(path->parts_ns[EP_CLI_PATH_GATEWAY], 10);
    cr_expect_eq(path->parts_ns[EP_CLI_PATH_NODE], 20);
    cr_expect_str_eq(model->names[path->peer], "node0");
    cr_expect_eq(path->peer_ns, 40);
    cr_expect_eq(figures.unserved + figures.unasked, 0);
}

Test(trace_model, a_request_is_walked_through_its_gateway, .fini = end)
{
    start(EVENTS_MAX, 1);
    add_pieces(through_gateway, 6);
    finish((ep_trace_id){0});
    expect_gateway_path(20 + 10, 20 + 20);
    cr_expect_eq(model->spans[figures.requests[0]].call, 100);
}

/* The frame to `slow` was late, and its rows were asked of `quick` too. */
static void expect_hedged(const piece *pieces, const char *peer, int64_t peer_ns, int64_t late,
                          int64_t client)
{
    start(EVENTS_MAX, 1);
    add_pieces(pieces, 6);
    finish((ep_trace_id){0});
    cr_assert_eq(figures.requests_count, 1);
    const ep_cli_trace_path *path = &figures.paths[0];
    cr_expect_str_eq(model->names[path->peer], peer);
    cr_expect_eq(path->peer_ns, peer_ns);
    cr_expect_eq(path->parts_ns[EP_CLI_PATH_LATE], late);
    cr_expect_eq(path->parts_ns[EP_CLI_PATH_CLIENT], client);
    for (size_t i = 0; i < figures.peers_count; i++) {
        bool used = strcmp(model->names[figures.peers[i].name], peer) == 0;
        cr_expect_eq(figures.peers[i].slowest_of, used ? 1 : 0);
        cr_expect_eq(figures.peers[i].unused, used ? 0 : 1);
        cr_expect_eq(figures.peers[i].failed, 0);
    }
    for (size_t i = 0; i < model->spans_count; i++) {
        const ep_cli_span *span = &model->spans[i];
        cr_expect_eq(span->unused,
                     span->mate != EP_CLI_TRACE_NONE &&
                         strcmp(peer, span->process == 0
                                          ? model->names[span->peer]
                                          : model->names[model->processes[span->process].node]) !=
                             0);
    }
}

Test(trace_model, a_late_answer_that_was_not_used_is_not_the_slowest_peers, .fini = end)
{
    static const piece hedge_won[] = {
        {EP_CLI_SPAN_forward, 1, "", "", 100, 0, 0, 100, false},
        {EP_CLI_SPAN_exchange, 1, "", "slow", 200, 100, 10, 95, true},
        {EP_CLI_SPAN_exchange, 1, "", "quick", 201, 100, 40, 80, false},
        {EP_CLI_SPAN_serve, 2, "slow", "", 200, 100, 15, 90, false},
        {EP_CLI_SPAN_serve, 3, "quick", "", 201, 100, 45, 75, false},
        {EP_CLI_SPAN_combine, 1, "", "", 100, 0, 81, 99, false},
    };
    expect_hedged(hedge_won, "quick", 40, 30, 10 + 1 + 1);
}

Test(trace_model, a_hedge_that_lost_is_not_the_slowest_peers, .fini = end)
{
    static const piece hedge_lost[] = {
        {EP_CLI_SPAN_forward, 1, "", "", 100, 0, 0, 100, false},
        {EP_CLI_SPAN_exchange, 1, "", "slow", 200, 100, 10, 60, false},
        {EP_CLI_SPAN_exchange, 1, "", "quick", 201, 100, 40, 95, true},
        {EP_CLI_SPAN_serve, 2, "slow", "", 200, 100, 15, 55, false},
        {EP_CLI_SPAN_serve, 3, "quick", "", 201, 100, 45, 90, false},
        {EP_CLI_SPAN_combine, 1, "", "", 100, 0, 61, 99, false},
    };
    expect_hedged(hedge_lost, "slow", 50, 0, 10 + 1 + 1);
}

/* Its client is of another language and was not recorded. */
Test(trace_model, a_gateway_without_its_client_is_a_request, .fini = end)
{
    start(EVENTS_MAX, 1);
    add_pieces(through_gateway + 2, 4);
    finish((ep_trace_id){0});
    expect_gateway_path(10, 20);
    cr_expect_eq(figures.requests_ns, 60);
}

/* Which thread of a client spoke first is chance: it is called as its program. */
Test(trace_model, a_client_is_called_as_its_first_thread, .fini = end)
{
    char name[EP_CLI_TRACE_NAME_BYTES];
    start(EVENTS_MAX, 1);
    for (int i = 0; i < 3; i++) {
        ep_cli_trace_event e = {.kind = EP_CLI_SPAN_forward,
                                .pid = 9,
                                .tid = i == 1 ? 9 : 10 + i,
                                .call = (uint64_t)i,
                                .layer = -1,
                                .expert = -1};
        snprintf(e.thread, sizeof(e.thread), "%s", i == 1 ? "expertctl" : "nng:task");
        add(&e);
    }
    finish((ep_trace_id){0});
    cr_assert_eq(model->processes_count, 1);
    ep_cli_trace_process_name(model, 0, false, name, sizeof(name));
    cr_expect_str_eq(name, "client expertctl");
}

Test(trace_model, processes_are_limited, .fini = end)
{
    ep_error error;
    start(EVENTS_MAX, 1);
    ep_cli_trace_event e = {.kind = EP_CLI_SPAN_send, .layer = -1, .expert = -1};
    for (e.pid = 1; e.pid <= EP_CLI_TRACE_PROCESSES_MAX; e.pid++) {
        add(&e);
    }
    cr_expect_eq(ep_cli_trace_model_add(model, &e, &error), EP_ERR_RESOURCE_EXHAUSTED);
    e.pid = 5;
    add(&e);
    finish((ep_trace_id){0});
}

Test(trace_model, one_trace_keeps_its_jobs, .fini = end)
{
    start(EVENTS_MAX, 1);
    size_t count;
    ep_cli_trace_event *events = ep_test_scene_events(&(ep_test_scene){.requests = 3}, &count);
    for (size_t i = 0; i < count; i++) {
        /* Jobs carry the trace of their first group: here of another request. */
        if (events[i].kind == EP_CLI_SPAN_job) {
            events[i].trace.low = 99;
        }
        add(&events[i]);
    }
    free(events);
    /* A frame is received before its trace is read; one of request 1, one of another call. */
    for (uint64_t call = 5002; call <= 5004; call += 2) {
        ep_cli_trace_event e = {.kind = EP_CLI_SPAN_receive,
                                .pid = 100,
                                .call = call,
                                .sub = 1,
                                .layer = -1,
                                .expert = -1,
                                .time_ns = INT64_MAX / 8};
        add(&e);
        e.is_end = true;
        add(&e);
    }
    finish((ep_trace_id){EP_TEST_SCENE_TRACE_HIGH, 2});
    cr_expect_eq(model->spans_count, EP_TEST_SCENE_SPANS + 1);
    cr_expect_eq(figures.requests_count, 1);
    expect_path_of_node1(&figures.paths[0], 100);
}

/* A connection may be called otherwise than its process: it is the same process, and spans of it
 * match. */
Test(trace_model, frames_do_not_name_a_client, .fini = end)
{
    static const char *const names[] = {"node0", "", "node1"};
    start(EVENTS_MAX, 1);
    for (int i = 0; i < 6; i++) {
        ep_cli_trace_event e = {.kind = i % 3 == 1 ? EP_CLI_SPAN_forward : EP_CLI_SPAN_send,
                                .is_end = i >= 3,
                                .pid = 1,
                                .call = 1,
                                .sub = (uint32_t)(i % 3),
                                .time_ns = i,
                                .layer = -1,
                                .expert = -1};
        snprintf(e.node, sizeof(e.node), "%s", names[i % 3]);
        add(&e);
    }
    finish((ep_trace_id){0});
    cr_assert_eq(model->processes_count, 1);
    cr_expect_eq(model->processes[0].node, 0);
    cr_expect_eq(model->spans_count, 3);
}

Test(trace_model, clocks_of_hosts_are_fitted, .fini = end)
{
    const int64_t ahead = 123456789;
    start(EVENTS_MAX, 2);
    memset(model->recordings[1].clock, 1, 16);
    model->recordings[0].has_clock = model->recordings[1].has_clock = true;
    add_scene(&(ep_test_scene){.requests = 10, .two_hosts = true, .node1_ahead_ns = ahead});
    finish((ep_trace_id){0});
    cr_expect_eq(model->recordings[0].offset_ns, 0);
    cr_expect_eq(model->recordings[1].offset_ns, ahead);
    cr_expect_eq(model->recordings[1].offset_error_ns, 10000);
    cr_expect_eq(figures.unserved, 0);
    for (size_t i = 0; i < figures.requests_count; i++) {
        expect_path_of_node1(&figures.paths[i], 100 * (int64_t)i);
    }
}

Test(trace_model, one_clock_is_left_alone_and_a_lone_host_is_said, .fini = end)
{
    start(EVENTS_MAX, 3);
    memset(model->recordings[2].clock, 1, 16);
    for (int i = 0; i < 3; i++) {
        model->recordings[i].has_clock = true;
    }
    add_scene(&(ep_test_scene){.requests = 2, .two_hosts = true});
    finish((ep_trace_id){0});
    cr_expect_eq(model->recordings[1].offset_ns, 0);
    cr_expect_eq(model->recordings[1].offset_error_ns, 0);
    cr_expect_eq(model->recordings[2].offset_error_ns, -1);
}

Test(trace_model, events_past_the_limit_are_not_kept, .fini = end)
{
    start(30, 1);
    add_scene(&(ep_test_scene){.requests = 2});
    finish((ep_trace_id){0});
    cr_expect(model->cut);
    cr_expect_eq(model->events_count, 30);
    cr_expect_leq(model->spans_count, 30);
}

/* Random begins and ends: nothing is lost or counted twice, and lanes nest. */
typedef struct nesting {
    uint32_t stack[64];
    size_t depth;
    size_t begun;
    int64_t last_ns;
} nesting;

static bool check_nesting(uint32_t span, bool is_end, void *arg)
{
    nesting *n = arg;
    const ep_cli_span *s = &model->spans[span];
    int64_t now = is_end ? s->end_ns : s->begin_ns;
    cr_expect_geq(now, n->last_ns);
    n->last_ns = now;
    if (is_end) {
        cr_assert_gt(n->depth, 0);
        cr_expect_eq(n->stack[--n->depth], span);
    } else {
        cr_assert_lt(n->depth, 64);
        n->stack[n->depth++] = span;
        n->begun++;
    }
    return true;
}

Test(trace_model, lanes_nest_strictly_and_hold_every_span, .fini = end)
{
    ep_cli_trace_lanes lanes;
    size_t begun = 0;
    unsigned seed = 5;
    start(EVENTS_MAX, 1);
    uint64_t sent[2] = {0};
    for (int i = 0; i < 20000; i++) {
        ep_cli_trace_event e = {.time_ns = i / 3,
                                .kind = rand_r(&seed) % EP_CLI_SPAN_KINDS,
                                .is_end = rand_r(&seed) % 2 != 0,
                                .pid = 1 + rand_r(&seed) % 2,
                                .call = rand_r(&seed) % 6,
                                .sub = rand_r(&seed) % 2,
                                .layer = -1,
                                .expert = -1};
        add(&e);
        sent[e.is_end]++;
    }
    finish((ep_trace_id){0});
    cr_expect_eq(model->spans_count + model->unmatched_begins + model->cut_begins, sent[0]);
    cr_expect_eq(model->spans_count + model->unmatched_ends + model->cut_ends, sent[1]);
    cr_expect_gt(model->spans_count, 1000);
    cr_assert_eq(ep_cli_trace_lanes_make(model, &lanes, NULL), EP_OK);
    for (uint32_t i = 0; i < lanes.lanes_count; i++) {
        nesting n = {.last_ns = INT64_MIN};
        cr_expect(ep_cli_trace_lane_walk(model, &lanes, i, check_nesting, &n));
        cr_expect_eq(n.depth, 0);
        begun += n.begun;
    }
    cr_expect_eq(begun + lanes.left_out, model->spans_count);
    for (size_t i = 0; i < figures.requests_count; i++) {
        int64_t sum = 0;
        for (int part = 0; part < EP_CLI_PATH_PARTS; part++) {
            cr_expect_geq(figures.paths[i].parts_ns[part], 0);
            sum += figures.paths[i].parts_ns[part];
        }
        const ep_cli_span *s = &model->spans[figures.requests[i]];
        cr_expect_eq(sum, s->end_ns - s->begin_ns);
    }
    ep_cli_trace_lanes_free(&lanes);
}
