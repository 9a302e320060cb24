/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl drain: moves a node's experts away while it keeps serving. */
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "command_table.h"
#include "control.h"
#include "moe/routing_table.h"

#define CALL_NS_MAX (10 * EP_NS_PER_S)
#define POLL_NS (500 * EP_NS_PER_MS)

static struct {
    const char *node; /* "": the program itself */
    bool undo;
    bool wait;
} wanted = {.node = ""};

static void take_node(struct argp_state *state, char *text)
{
    if (state->arg_num > 0) {
        argp_error(state, "unexpected argument '%s', allowed: one node", text);
    }
    wanted.node = ep_cli_arg_text(state, "NODE", text, EP_NODE_NAME_BYTES - 1);
}

static void check(struct argp_state *state)
{
    if (wanted.wait && wanted.undo) {
        argp_error(state, "--wait and --undo are both given, allowed: one of them");
    }
}

static const ep_cli_option rows[] = {
    {"undo", 0, NULL, "The node takes part again", 1, .flag = &wanted.undo},
    {"wait", 0, NULL,
     "Until no copy is left on the node, --timeout at most (exit code 4); exit code 1 when experts "
     "then have too few copies",
     1, .flag = &wanted.wait},
};

static void pause_ns(uint64_t ns)
{
    struct timespec time = {.tv_sec = (time_t)(ns / EP_NS_PER_S),
                            .tv_nsec = (long)(ns % EP_NS_PER_S)};
    nanosleep(&time, NULL);
}

/* Not done while the node has state "leaving": it still waits for its coordinator's answer. */
static bool is_done(const Expertd__V1__DrainReply *reply)
{
    return reply->copies_to_move == 0 && strcmp(reply->state, "leaving") != 0;
}

static ep_err ask(ep_cli_control *control, uint64_t end_ns, Expertd__V1__DrainReply **out_reply,
                  ep_error *out_error)
{
    Expertd__V1__DrainRequest request = EXPERTD__V1__DRAIN_REQUEST__INIT;
    ProtobufCMessage *message = NULL;
    uint64_t now_ns = ep_clock_now_ns();
    uint64_t left_ns = end_ns > now_ns ? end_ns - now_ns : 0;
    uint64_t call_ns = left_ns < CALL_NS_MAX || !wanted.wait ? left_ns : CALL_NS_MAX;
    request.node = (char *)(uintptr_t)wanted.node;
    request.undo = wanted.undo;
    ep_err err = ep_cli_admin_call(control, "Drain", &request.base, call_ns / EP_NS_PER_US + 1,
                                   &message, out_error);
    *out_reply = (Expertd__V1__DrainReply *)message;
    return err;
}

/* Reports changes to stderr; print reports the end. */
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

/* Asks again until the node is drained; *out_reply: the last answer. */
static ep_err wait_drained(const char *program, ep_cli_control *control,
                           Expertd__V1__DrainReply **out_reply, ep_error *out_error)
{
    uint64_t end_ns = ep_clock_now_ns() + ep_cli_peer.timeout_us * EP_NS_PER_US;
    *out_reply = NULL;
    for (;;) {
        Expertd__V1__DrainReply *reply = NULL;
        ep_err err = ask(control, end_ns, &reply, out_error);
        bool is_away = err == EP_ERR_UNAVAILABLE || err == EP_ERR_CONNECTION_LOST ||
                       err == EP_ERR_DEADLINE_EXCEEDED;
        if (err != EP_OK && (*out_reply == NULL || !is_away)) {
            /* only for the first answer: later the program may restart and is asked again */
            return err;
        }
        if (reply != NULL) {
            if (!is_done(reply)) {
                report(program, *out_reply, reply);
            }
            expertd__v1__drain_reply__free_unpacked(*out_reply, NULL);
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
                                (double)ep_cli_peer.timeout_us / 1e6,
                                last->note[0] != '\0' ? ": " : "", last->note);
        }
        pause_ns(end_ns - now_ns < POLL_NS ? end_ns - now_ns : POLL_NS);
    }
}

static bool print(const Expertd__V1__DrainReply *reply)
{
    if (ep_cli_output_format == EP_CLI_JSON) {
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

static ep_err run(ep_cli_call *call, ep_error *out_error)
{
    ep_cli_control *control = NULL;
    Expertd__V1__DrainReply *reply = NULL;
    ep_err err = ep_cli_control_open_operator(&ep_cli_peer, &control, out_error);
    if (err == EP_OK && wanted.wait) {
        err = wait_drained(call->program, control, &reply, out_error);
    } else if (err == EP_OK) {
        err = ask(control, ep_clock_now_ns() + ep_cli_peer.timeout_us * EP_NS_PER_US, &reply,
                  out_error);
    }
    ep_cli_control_close(control);
    if (err == EP_OK) {
        /* failed with --wait: drained, but experts lack copies */
        call->failed = !print(reply) || (wanted.wait && reply->note[0] != '\0');
    }
    expertd__v1__drain_reply__free_unpacked(reply, NULL);
    return err;
}

const ep_cli_command ep_cli_drain = {
    .name = "drain",
    .help = "a node gets rid of its experts while it serves on",
    .args = "[NODE]",
    .doc = "Takes a node out of placement: its experts are loaded elsewhere, and it serves them "
           "until then, so no call fails."
           "\vAt the coordinator's admin listener NODE is required, and the order stays until "
           "--undo, also while the node is away. At a node's own one NODE is left out, and the "
           "order ends with the process. A node without a coordinator cannot be drained (exit code "
           "1): nobody could move its experts. With --wait, --timeout is for the whole wait.\n\n"
           "Examples:\n"
           "  expertctl drain node-3 --wait --timeout 5m --admin tcp://127.0.0.1:7412\n"
           "  expertctl drain node-3 --undo --admin tcp://127.0.0.1:7412\n"
           "  expertctl drain --wait --timeout 100s --admin tcp://127.0.0.1:7422 \\\n"
           "      --admin-token-file /etc/expertd/admin.token\n\n" EP_CLI_EXIT_HELP,
    .options = {.rows = rows, .count = EP_ARRAY_COUNT(rows), .check = check},
    .uses = {&ep_cli_admin_options, &ep_cli_output_options},
    .take_argument = take_node,
    .run = run,
};
