/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl top: what the nodes do, again and again. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "arguments.h"
#include "base/clock.h"
#include "command_table.h"
#include "exit_code.h"
#include "top.h"

#define INTERVAL_US_DEFAULT 1000000u
#define HOTTEST_DEFAULT 8
#define CLEAR "\033[H\033[2J"

enum { KEY_INTERVAL = 0x200, KEY_ONCE };

typedef struct top_options {
    ep_cli_connect connect;
    uint64_t interval_us;
    bool once;
    size_t hottest;
} top_options;

static volatile sig_atomic_t ended;

static void on_signal(int signal_number)
{
    (void)signal_number;
    ended = 1;
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    top_options *options = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &options->connect;
        return 0;
    case KEY_INTERVAL:
        options->interval_us = ep_cli_arg_duration_us(state, "--interval", arg, 0.1, 3600);
        return 0;
    case KEY_ONCE:
        options->once = true;
        return 0;
    case 'n':
        options->hottest = ep_cli_arg_whole(state, "--hottest", arg, 1, 64);
        return 0;
    case ARGP_KEY_ARG:
        return ep_cli_arg_unexpected(state, arg);
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option option_list[] = {
    {"interval", KEY_INTERVAL, "TIME", 0, "Between two samples: 500ms, 5s (default: 1s)", 1},
    {"once", KEY_ONCE, NULL, 0, "Two samples, one view, and end", 1},
    {"hottest", 'n', "N", 0, "How many layers and experts to show, 1..64 (default: 8)", 1},
    {0},
};
static const struct argp_child children[] = {{&ep_cli_connect_argp, 0, NULL, 0}, {0}};
static const struct argp argp = {
    option_list,
    parse,
    NULL,
    "Shows what each node does (rows and calls per second, requests in flight, jobs that wait, tokens in flight, refusals) and the hottest "
    "layers and experts, until ^C."
    "\vWithout a terminal the views follow one another. When the coordinator is lost, the nodes are asked on. What the coordinator "
    "counts per expert is a second old.\n\n"
    "Examples:\n"
    "  expertctl top\n"
    "  expertctl top --once --interval 5s -n 20\n"
    "  expertctl top --node tcp://127.0.0.1:7420 --node tcp://127.0.0.1:7421\n\n" EP_CLI_EXIT_HELP,
    children,
    NULL,
    NULL};

/* The coordinator is gone: the nodes of the last sample, by the addresses they had. */
static ep_err nodes_of(const ep_top_sample *last, ep_cli_node_list *out_nodes, ep_error *out_error)
{
    const char **urls = calloc(last->nodes.count + 1, sizeof(*urls));
    if (urls == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for %zu nodes", last->nodes.count);
    }
    for (size_t i = 0; i < last->nodes.count; i++) {
        urls[i] = last->nodes.nodes[i].url;
    }
    ep_err err = ep_cli_node_list_from_urls(urls, last->nodes.count, out_nodes, out_error);
    free(urls);
    return err;
}

static void ask_statistics(ep_cli_control *control, const ep_cli_connect *connect, ep_top_sample *sample)
{
    Expertd__V1__StatisticsRequest request = EXPERTD__V1__STATISTICS_REQUEST__INIT;
    ep_cli_answer answer;
    request.per_expert = true;
    ep_cli_control_ask(control, &connect->coordinator_url, 1, "expertd.v1.Coordinator", "Statistics", &request.base,
                       connect->timeout_us, &answer);
    sample->statistics = (Expertd__V1__StatisticsReply *)answer.message;
}

/* last NULL: the first sample, for which a coordinator that is not there is an error. */
static ep_err take(ep_cli_control *control, const ep_cli_connect *connect, const ep_top_sample *last, ep_top_sample *out_sample,
                   ep_error *out_error)
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
    out_sample->at_ns = ep_clock_now_ns();
    if (connect->coordinator_url != NULL && out_sample->coordinator_error.code == EP_OK) {
        ask_statistics(control, connect, out_sample);
    }
    return EP_OK;
}

static void wait_interval(uint64_t us)
{
    struct timespec time = {.tv_sec = (time_t)(us / 1000000u), .tv_nsec = (long)(us % 1000000u) * 1000};
    while (!ended && nanosleep(&time, &time) != 0) {
    }
}

static ep_err watch(const top_options *options, ep_cli_control *control, ep_error *out_error)
{
    bool redraws = !options->once && isatty(STDOUT_FILENO) == 1;
    ep_top_sample before;
    ep_top_sample now;
    ep_err err = take(control, &options->connect, NULL, &before, out_error);
    bool good = true;
    while (err == EP_OK && good && !ended) {
        wait_interval(options->interval_us);
        if (ended) {
            break;
        }
        err = take(control, &options->connect, &before, &now, out_error);
        if (err != EP_OK) {
            ep_top_sample_fini(&now);
            break;
        }
        fputs(redraws ? CLEAR : "", stdout);
        good = ep_top_print(&before, &now, options->hottest, stdout);
        fputs(redraws || options->once ? "" : "\n", stdout);
        good = fflush(stdout) == 0 && good;
        ep_top_sample_fini(&before);
        before = now;
        if (options->once) {
            break;
        }
    }
    ep_top_sample_fini(&before);
    return err != EP_OK || good ? err : ep_error_set(out_error, EP_ERR_IO, "cannot write to standard output");
}

static int run(int argc, char **argv)
{
    static top_options options = {.interval_us = INTERVAL_US_DEFAULT, .hottest = HOTTEST_DEFAULT};
    const struct sigaction action = {.sa_handler = on_signal}; /* without SA_RESTART: a wait ends */
    ep_cli_control *control = NULL;
    ep_error error;
    ep_cli_connect_init(&options.connect);
    argp_parse(&argp, argc, argv, 0, NULL, &options);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    ep_err err = ep_cli_control_open(&options.connect, &control, &error);
    err = err != EP_OK ? err : watch(&options, control, &error);
    ep_cli_control_close(control);
    return err != EP_OK ? ep_cli_fail(argv[0], &error) : EP_CLI_EXIT_OK;
}

const ep_cli_command ep_cli_top = {"top", "what each node does, live: rows, calls, queues, hottest experts", &argp, run, NULL};
