/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl drain: a node gets rid of its experts while it serves on. */
#include <string.h>
#include <time.h>

#include "admin_call.h"
#include "arguments.h"
#include "base/clock.h"
#include "command_table.h"
#include "exit_code.h"
#include "moe/routing_table.h"
#include "output.h"

#define CALL_NS_MAX (10 * EP_NS_PER_S)
#define POLL_NS (500 * EP_NS_PER_MS)

enum { KEY_UNDO = 0x200, KEY_WAIT };

typedef struct drain_options {
    ep_cli_connect connect;
    ep_cli_format format;
    const char *node; /* "" the program itself */
    bool undo;
    bool wait;
} drain_options;

static error_t parse(int key, char *arg, struct argp_state *state)
{
    drain_options *options = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &options->connect;
        state->child_inputs[1] = &options->format;
        return 0;
    case KEY_UNDO:
        options->undo = true;
        return 0;
    case KEY_WAIT:
        options->wait = true;
        return 0;
    case ARGP_KEY_ARG:
        if (state->arg_num > 0) {
            argp_error(state, "unexpected argument '%s', allowed: one node", arg);
        }
        options->node = ep_cli_arg_text(state, "NODE", arg, EP_NODE_NAME_BYTES - 1);
        return 0;
    case ARGP_KEY_END:
        if (options->wait && options->undo) {
            argp_error(state, "--wait and --undo are both given, allowed: one of them");
        }
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option option_list[] = {
    {"undo", KEY_UNDO, NULL, 0, "The node takes part again", 1},
    {"wait", KEY_WAIT, NULL, 0,
     "Until no copy is left on the node, --timeout at most (exit code 4); exit code 1 when experts "
     "then have too few "
     "copies",
     1},
    {0},
};
static const struct argp_child children[] = {
    {&ep_cli_admin_argp, 0, NULL, 0}, {&ep_cli_output_argp, 0, NULL, 0}, {0}};
static const struct argp argp = {
    option_list,
    parse,
    "[NODE]",
    "Takes a node out of placement: its experts are loaded elsewhere, and it serves them until "
    "then, so no call fails."
    "\vAt the coordinator's admin listener NODE is required, and the order stays until --undo, "
    "also while the node is away. At a "
    "node's own one NODE is left out, and the order ends with the process. A node without a "
    "coordinator cannot be drained (exit "
    "code 1): nobody could move its experts. With --wait, --timeout is for the whole wait.\n\n"
    "Examples:\n"
    "  expertctl drain node-3 --wait --timeout 5m --admin tcp://127.0.0.1:7412\n"
    "  expertctl drain node-3 --undo --admin tcp://127.0.0.1:7412\n"
    "  expertctl drain --wait --timeout 100s --admin tcp://127.0.0.1:7422 \\\n"
    "      --admin-token-file /etc/expertd/admin.token\n\n" EP_CLI_EXIT_HELP,
    children,
    NULL,
    NULL};

static void pause_ns(uint64_t ns)
{
    struct timespec time = {.tv_sec = (time_t)(ns / EP_NS_PER_S),
                            .tv_nsec = (long)(ns % EP_NS_PER_S)};
    nanosleep(&time, NULL);
}

/* A node that waits for its coordinator's word says "leaving" with what it holds itself. */
static bool is_done(const Expertd__V1__DrainReply *reply)
{
    return reply->copies_to_move == 0 && strcmp(reply->state, "leaving") != 0;
}

static ep_err ask(ep_cli_control *control, const drain_options *options, uint64_t end_ns,
                  Expertd__V1__DrainReply **out_reply, ep_error *out_error)
{
    Expertd__V1__DrainRequest request = EXPERTD__V1__DRAIN_REQUEST__INIT;
    ProtobufCMessage *message = NULL;
    uint64_t now_ns = ep_clock_now_ns();
    uint64_t left_ns = end_ns > now_ns ? end_ns - now_ns : 0;
    uint64_t call_ns = left_ns < CALL_NS_MAX || !options->wait ? left_ns : CALL_NS_MAX;
    request.node = (char *)(uintptr_t)options->node;
    request.undo = options->undo;
    ep_err err = ep_cli_admin_call(control, &options->connect, "Drain", &request.base,
                                   call_ns / EP_NS_PER_US + 1, &message, out_error);
    *out_reply = (Expertd__V1__DrainReply *)message;
    return err;
}

static void free_reply(Expertd__V1__DrainReply *reply)
{
    if (reply != NULL) {
        protobuf_c_message_free_unpacked(&reply->base, NULL);
    }
}

/* To stderr, when something changed; the end is told by print. */
static void report(const char *program, const Expertd__V1__DrainReply *before,
                   const Expertd__V1__DrainReply *now)
{
    if (before == NULL || before->copies_to_move != now->copies_to_move ||
        strcmp(before->state, now->state) != 0) {
        ep_cli_line(stderr, "%s: node %s is %s, %u copies to move", program, now->node, now->state,
                    now->copies_to_move);
    }
    if (now->note[0] != '\0' && (before == NULL || strcmp(before->note, now->note) != 0)) {
        ep_cli_line(stderr, "%s: %s", program, now->note);
    }
}

/* Asks again until nothing is left. What was answered last goes to *out_reply. */
static ep_err wait_drained(const char *program, ep_cli_control *control,
                           const drain_options *options, Expertd__V1__DrainReply **out_reply,
                           ep_error *out_error)
{
    uint64_t end_ns = ep_clock_now_ns() + options->connect.timeout_us * EP_NS_PER_US;
    *out_reply = NULL;
    for (;;) {
        Expertd__V1__DrainReply *reply = NULL;
        ep_err err = ask(control, options, end_ns, &reply, out_error);
        bool is_away = err == EP_ERR_UNAVAILABLE || err == EP_ERR_CONNECTION_LOST ||
                       err == EP_ERR_DEADLINE_EXCEEDED;
        if (err != EP_OK && (*out_reply == NULL || !is_away)) {
            return err; /* a program that has taken the order may restart and be asked again */
        }
        if (reply != NULL) {
            if (!is_done(reply)) {
                report(program, *out_reply, reply);
            }
            free_reply(*out_reply);
            *out_reply = reply;
            if (is_done(reply)) {
                return EP_OK;
            }
        }
        uint64_t now_ns = ep_clock_now_ns();
        if (now_ns >= end_ns) {
            const Expertd__V1__DrainReply *last = *out_reply;
            return ep_error_set(out_error, EP_ERR_DEADLINE_EXCEEDED,
                                "node %s is %s: %u copies still to move after %g s%s%s", last->node,
                                last->state, last->copies_to_move,
                                (double)options->connect.timeout_us / 1e6,
                                last->note[0] != '\0' ? ": " : "", last->note);
        }
        pause_ns(end_ns - now_ns < POLL_NS ? end_ns - now_ns : POLL_NS);
    }
}

static bool print(const drain_options *options, const Expertd__V1__DrainReply *reply)
{
    if (options->format == EP_CLI_JSON) {
        return ep_cli_json_print(
            json_pack("{s:o, s:o, s:I, s:o}", "node", ep_cli_json_text(reply->node), "state",
                      ep_cli_json_text(reply->state), "copies_to_move",
                      (json_int_t)reply->copies_to_move, "note", ep_cli_json_text(reply->note)),
            stdout);
    }
    ep_cli_line(stdout, "node %s is %s, %u copies to move%s%s", reply->node, reply->state,
                reply->copies_to_move, reply->note[0] != '\0' ? "; " : "", reply->note);
    return true;
}

static int run(int argc, char **argv)
{
    static drain_options options = {.node = ""};
    ep_cli_control *control = NULL;
    Expertd__V1__DrainReply *reply = NULL;
    ep_error error;
    ep_cli_connect_init(&options.connect);
    argp_parse(&argp, argc, argv, 0, NULL, &options);
    ep_err err = ep_cli_control_open_operator(&options.connect, &control, &error);
    if (err == EP_OK && options.wait) {
        err = wait_drained(argv[0], control, &options, &reply, &error);
    } else if (err == EP_OK) {
        err = ask(control, &options, ep_clock_now_ns() + options.connect.timeout_us * EP_NS_PER_US,
                  &reply, &error);
    }
    ep_cli_control_close(control);
    /* drained, and experts lack copies */
    bool is_short = err == EP_OK && options.wait && reply->note[0] != '\0';
    int code = err != EP_OK                          ? ep_cli_fail(argv[0], &error)
               : print(&options, reply) && !is_short ? EP_CLI_EXIT_OK
                                                     : EP_CLI_EXIT_FAILED;
    free_reply(reply);
    return code;
}

const ep_cli_command ep_cli_drain = {"drain", "a node gets rid of its experts while it serves on",
                                     &argp, run, NULL};
