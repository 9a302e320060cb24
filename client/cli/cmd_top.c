/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl top: shows the nodes' work repeatedly. */
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "command_table.h"
#include "terminal.h"
#include "top.h"

#define INTERVAL_US_DEFAULT 1000000u
#define HOTTEST_DEFAULT 8
/* a node that takes longer than this and the interval counts as silent in the view */
#define ANSWER_US_MIN 2000000u

static struct {
    uint64_t interval_us;
    bool once;
    uint64_t hottest;
} wanted = {.interval_us = INTERVAL_US_DEFAULT, .hottest = HOTTEST_DEFAULT};

static const ep_cli_option rows[] = {
    {"interval", 0, "TIME", "Between two samples: 500ms, 5s (default: 1s)", 1,
     .u64 = &wanted.interval_us, .unit = EP_UNIT_US, .plain = EP_UNIT_S, .min = 100000,
     .max = 3600000000u},
    {"once", 0, NULL, "Two samples, one view, and end", 1, .flag = &wanted.once},
    {"hottest", 'n', "N", "How many layers and experts to show, 1..64 (default: 8)", 1,
     .u64 = &wanted.hottest, .min = 1, .max = EP_TOP_HOTTEST_MAX},
};

/* When the coordinator is gone: the nodes of the last sample, by their addresses. */
static ep_err nodes_of(const ep_top_sample *last, ep_cli_node_list *out_nodes, ep_error *out_error)
{
    const char **urls = calloc(last->nodes.count + 1, sizeof(*urls));
    if (urls == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for %zu nodes",
                            last->nodes.count);
    }
    for (size_t i = 0; i < last->nodes.count; i++) {
        urls[i] = last->nodes.nodes[i].url;
    }
    ep_err err = ep_cli_node_list_from_urls(urls, last->nodes.count, out_nodes, out_error);
    free(urls);
    if (err == EP_OK) {
        out_nodes->lost_count = last->nodes.lost_count;
    }
    return err;
}

static void ask_statistics(ep_cli_control *control, const ep_cli_connect *connect,
                           ep_top_sample *sample)
{
    Expertd__V1__StatisticsRequest request = EXPERTD__V1__STATISTICS_REQUEST__INIT;
    ProtobufCMessage *message = NULL;
    request.per_expert = true;
    ep_cli_control_ask_one(control, connect->coordinator_url, "expertd.v1.Coordinator",
                           "Statistics", &request.base, &message, NULL);
    sample->statistics = (Expertd__V1__StatisticsReply *)message;
}

/* Takes a sample. last NULL: it is the first one, for which a missing coordinator is an error. */
static ep_err take(ep_cli_control *control, const ep_cli_connect *connect,
                   const ep_top_sample *last, ep_top_sample *out_sample, ep_error *out_error)
{
    *out_sample = (ep_top_sample){.at_ns = 0};
    ep_error_clear(&out_sample->coordinator_error);
    ep_err err = ep_cli_node_list_read(control, connect, &out_sample->nodes, out_error);
    if (err != EP_OK && last != NULL && connect->coordinator_url != NULL) {
        out_sample->coordinator_error = *out_error;
        err = nodes_of(last, &out_sample->nodes, out_error);
    }
    if (err != EP_OK) {
        return err;
    }
    ep_cli_node_list_ask(control, &out_sample->nodes, connect->timeout_us);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    out_sample->at_ns = ep_clock_now_ns();
    out_sample->clock_us = (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
    if (connect->coordinator_url != NULL && out_sample->coordinator_error.code == EP_OK) {
        ask_statistics(control, connect, out_sample);
    }
    return EP_OK;
}

/* ---- the views ---- */

typedef struct watch_state {
    bool draws; /* draws on an open terminal; else prints one view after the other */
    bool ended;
    bool good; /* printing has not failed */
    ep_top_sample before;
    ep_top_sample now; /* shown */
    ep_top_view view;
    size_t nodes_shown;
} watch_state;

static void draw(watch_state *state)
{
    char *lines = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&lines, &bytes);
    state->view.screen = ep_screen_of(STDOUT_FILENO);
    state->view.hint =
        state->now.at_ns == state->before.at_ns ? "  rates follow; q quits" : "  q quits";
    if (out != NULL) {
        ep_top_print(&state->before, &state->now, &state->view, &state->nodes_shown, out);
        fclose(out);
        ep_cli_terminal_draw(lines);
    }
    free(lines);
}

static void show(watch_state *state)
{
    if (state->draws) {
        draw(state);
        return;
    }
    if (ep_cli_output_format == EP_CLI_JSON) {
        state->good = ep_cli_json_print_line(
            ep_top_json(&state->before, &state->now, wanted.hottest), stdout);
    } else {
        state->view.screen = (ep_screen){.columns = ep_screen_of(STDOUT_FILENO).columns};
        state->good = ep_top_print(&state->before, &state->now, &state->view, NULL, stdout);
        fputs(wanted.once ? "" : "\n", stdout);
    }
    state->good = fflush(stdout) == 0 && state->good;
}

static void scroll(watch_state *state, ep_cli_event event)
{
    size_t step = event == EP_CLI_EVENT_UP || event == EP_CLI_EVENT_DOWN ? 1 : state->nodes_shown;
    if (event == EP_CLI_EVENT_DOWN || event == EP_CLI_EVENT_PAGE_DOWN) {
        state->view.first_node += step;
    } else {
        state->view.first_node -= step < state->view.first_node ? step : state->view.first_node;
    }
}

/* Handles events until until_ns or the end. */
static void wait_until(watch_state *state, uint64_t until_ns)
{
    for (ep_cli_event event;
         !state->ended && (event = ep_cli_terminal_wait(until_ns)) != EP_CLI_EVENT_TIME;) {
        state->ended = event == EP_CLI_EVENT_QUIT;
        if (!state->ended && state->draws) {
            if (event != EP_CLI_EVENT_REDRAW) {
                scroll(state, event);
            }
            draw(state);
        }
    }
}

/* Called while answers are awaited. */
static bool is_over(void *arg)
{
    watch_state *state = arg;
    wait_until(state, 0);
    return state->ended;
}

static ep_err watch(watch_state *state, ep_cli_control *control, ep_cli_connect *connect,
                    ep_error *out_error)
{
    ep_top_sample next;
    ep_err err = take(control, connect, NULL, &state->before, out_error);
    state->now = state->before; /* the same sample until there are two */
    if (err == EP_OK && !state->ended && !wanted.once && ep_cli_output_format == EP_CLI_TABLE &&
        ep_cli_terminal_open()) {
        state->draws = true;
        draw(state);
    }
    ep_cli_control_on_wait(control, is_over, state, true);
    const uint64_t answer_us =
        wanted.interval_us > ANSWER_US_MIN ? wanted.interval_us : ANSWER_US_MIN;
    connect->timeout_us = connect->timeout_us < answer_us ? connect->timeout_us : answer_us;
    for (bool is_first = true; err == EP_OK && state->good && !state->ended; is_first = false) {
        wait_until(state, state->now.at_ns + wanted.interval_us * EP_NS_PER_US);
        if (state->ended) {
            break;
        }
        err = take(control, connect, &state->now, &next, out_error);
        if (err != EP_OK || state->ended) {
            ep_top_sample_fini(&next);
            break;
        }
        if (!is_first) {
            ep_top_sample_fini(&state->before);
        }
        state->before = state->now;
        state->now = next;
        show(state);
        state->ended = state->ended || wanted.once;
    }
    ep_cli_terminal_close();
    if (state->now.at_ns != state->before.at_ns) {
        ep_top_sample_fini(&state->now);
    }
    ep_top_sample_fini(&state->before);
    return err != EP_OK || state->good
               ? err
               : ep_error_set(out_error, EP_ERR_IO, "cannot write to standard output");
}

static ep_err run(ep_cli_call *call, ep_error *out_error)
{
    watch_state state = {.good = true, .view = {.hottest = wanted.hottest}};
    ep_cli_control *control = NULL;
    (void)call;
    ep_err err = ep_cli_terminal_prepare(out_error);
    err = err != EP_OK ? err : ep_cli_control_open(&ep_cli_peer, &control, out_error);
    if (err == EP_OK) {
        ep_cli_control_on_wait(control, is_over, &state, false);
        err = watch(&state, control, &ep_cli_peer, out_error);
    }
    ep_cli_control_close(control);
    return state.ended ? EP_OK : err;
}

const ep_cli_command ep_cli_top = {
    .name = "top",
    .help = "what each node does, live: rows, calls, queues, hottest experts",
    .doc = "Shows what each node does (rows and calls per second, requests in flight, jobs that "
           "wait, tokens in flight, failures, refusals and hedges per second) and the hottest "
           "layers and experts, until q, ^C or the end of input."
           "\vThe view fits the terminal and follows its size; the arrow and page keys (or j, k, "
           "space, b) move among nodes that do not fit. Where input or output is no terminal the "
           "views follow one another, whole. When the coordinator is lost, the nodes are asked on. "
           "What the coordinator counts per expert is a second old.\n\n"
           "-o json prints one object a view, each in a line of its own:\n"
           "  time_us            time of day of the view\n"
           "  seconds            from the sample before to this one\n"
           "  coordinator_error  why the coordinator did not answer; null: it did\n"
           "  nodes_lost         how many the coordinator knows as lost\n"
           "  nodes[]            name, url, state, rows_per_s, calls_per_s,\n"
           "                     requests_in_flight, jobs_waiting, tokens_in_flight,\n"
           "                     failed_per_s, refused_per_s, hedged_per_s; of a silent\n"
           "                     node name, url, state and error; a rate is null where\n"
           "                     the sample before has none of the same process\n"
           "  layers[]           the hottest: model, version, layer, rows_per_s\n"
           "  experts[]          the hottest: model, version, layer, expert,\n"
           "                     slots_per_s; null: the coordinator gave none\n\n"
           "Examples:\n"
           "  expertctl top\n"
           "  expertctl top --once --interval 5s -n 20 -o json\n"
           "  expertctl top --node tcp://127.0.0.1:7420 --node "
           "tcp://127.0.0.1:7421\n\n" EP_CLI_EXIT_HELP,
    .options = {.rows = rows, .count = EP_ARRAY_COUNT(rows)},
    .uses = {&ep_cli_connect_options, &ep_cli_output_options},
    .run = run,
};
