/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl policy: shows and sets the policy of the service. */
#include <inttypes.h>
#include <pwd.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "command_table.h"
#include "control.h"

#define CHANGES_MAX 16
#define TEXT_BYTES 128
#define POLL_NS_MIN (20 * EP_NS_PER_MS)
/* not shorter, since each question is a line in the coordinator's log */
#define POLL_NS_MAX (500 * EP_NS_PER_MS)

static struct {
    bool has_expect_revision;
    uint64_t expect_revision;
    size_t count;
    Expertd__V1__PolicyChange changes[CHANGES_MAX];
    char keys[CHANGES_MAX][TEXT_BYTES];
} wanted;

/* ---- options ---- */

static void add_change(struct argp_state *state, bool is_unset, const char *arg)
{
    const char *equals = strchr(arg, '=');
    if (wanted.count == CHANGES_MAX) {
        argp_error(state, "more than %d keys, allowed: 1..%d", CHANGES_MAX, CHANGES_MAX);
    }
    if (is_unset ? equals != NULL : equals == NULL || equals == arg) {
        argp_error(state, "'%s' is not a %s, allowed: %s", arg,
                   is_unset ? "key" : "key with a value",
                   is_unset ? "copies" : "copies=2, decode_tokens_max=128");
    }
    ep_cli_arg_text(state, is_unset ? "KEY" : "KEY=VALUE", arg, TEXT_BYTES - 1);
    Expertd__V1__PolicyChange *change = &wanted.changes[wanted.count];
    char *key = wanted.keys[wanted.count++];
    expertd__v1__policy_change__init(change);
    snprintf(key, TEXT_BYTES, "%.*s", equals != NULL ? (int)(equals - arg) : (int)strlen(arg), arg);
    change->key = key;
    change->unset = is_unset;
    if (equals != NULL) {
        change->value = (char *)(uintptr_t)(equals + 1);
    }
}

static void take_set(struct argp_state *state, char *text)
{
    add_change(state, false, text);
}

static void take_unset(struct argp_state *state, char *text)
{
    add_change(state, true, text);
}

static const ep_cli_option rows[] = {
    {"expect-revision", 0, "N",
     "Only if the policy is at this revision: nobody else has changed it", 1,
     .u64 = &wanted.expect_revision, .max = UINT64_MAX, .given = &wanted.has_expect_revision},
};

/* ---- printing ---- */

static void time_text(uint64_t unix_s, char *out, size_t bytes)
{
    struct tm parts;
    time_t clock = (time_t)unix_s;
    if (unix_s == 0 || gmtime_r(&clock, &parts) == NULL ||
        strftime(out, bytes, "%Y-%m-%dT%H:%M:%SZ", &parts) == 0) {
        snprintf(out, bytes, "-");
    }
}

static bool print_all(const Expertd__V1__PolicyReply *reply)
{
    ep_cli_table *table = ep_cli_table_create("KEY|VALUE|ORIGIN|3SET|2BY|1ALLOWED");
    json_t *entries = json_array();
    for (size_t i = 0; i < reply->n_entries; i++) {
        const Expertd__V1__PolicyEntry *entry = reply->entries[i];
        char when[32];
        time_text(entry->set_at, when, sizeof(when));
        ep_cli_table_cell(table, "%s", entry->key);
        ep_cli_table_cell(table, "%s", entry->value[0] != '\0' ? entry->value : "-");
        ep_cli_table_cell(table, "%s", entry->origin);
        ep_cli_table_cell(table, "%s", when);
        ep_cli_table_cell(table, "%s", entry->who[0] != '\0' ? entry->who : "-");
        ep_cli_table_cell(table, "%s", entry->allowed);
        json_array_append_new(
            entries,
            json_pack("{s:o, s:o, s:o, s:I, s:I, s:o, s:o, s:o, s:o}", "key",
                      ep_cli_json_text(entry->key), "value", ep_cli_json_text(entry->value),
                      "origin", ep_cli_json_text(entry->origin), "revision",
                      (json_int_t)entry->revision, "set_at", (json_int_t)entry->set_at, "who",
                      ep_cli_json_text(entry->who), "allowed", ep_cli_json_text(entry->allowed),
                      "unused", ep_cli_json_text(entry->unused), "help",
                      ep_cli_json_text(entry->help)));
    }
    const bool is_table = ep_cli_output_format == EP_CLI_TABLE;
    if (is_table) {
        ep_cli_line(stdout, "policy revision %" PRIu64 ", %s%s", reply->revision,
                    reply->kept ? "kept in " : "not written yet to ", reply->store);
        putchar('\n');
    }
    bool good = ep_cli_output_print(
        table,
        json_pack("{s:I, s:b, s:o, s:o}", "revision", (json_int_t)reply->revision, "kept",
                  (int)reply->kept, "store", ep_cli_json_text(reply->store), "entries", entries));
    for (size_t i = 0; is_table && i < reply->n_entries; i++) {
        if (reply->entries[i]->unused[0] != '\0') {
            ep_cli_line(stdout, "%s is set at revision %" PRIu64 " and not in force: it %s",
                        reply->entries[i]->key, reply->entries[i]->revision,
                        reply->entries[i]->unused);
        }
    }
    return good;
}

/* Prints the changed keys with their present values. */
static void print_changes(const char *program, const Expertd__V1__PolicyReply *reply)
{
    for (size_t c = 0; c < wanted.count; c++) {
        for (size_t i = 0; i < reply->n_entries; i++) {
            const Expertd__V1__PolicyEntry *entry = reply->entries[i];
            if (strcmp(entry->key, wanted.changes[c].key) == 0) {
                ep_cli_line(stdout, "%s is %s, %s", entry->key,
                            entry->value[0] != '\0' ? entry->value : "not set", entry->origin);
            }
        }
    }
    if (strcmp(reply->store, "memory") == 0) {
        ep_cli_line(stderr,
                    "%s: the coordinator keeps its state in memory: a restart ends the policy; "
                    "state_dir keeps it",
                    program);
    }
}

/* ---- asking ---- */

/* The text of "who" in the policy; the coordinator does not verify it. */
static void say_who(char *out, size_t bytes)
{
    char host[64] = "";
    const struct passwd *user = getpwuid(geteuid());
    if (gethostname(host, sizeof(host) - 1) != 0) {
        host[0] = '\0';
    }
    snprintf(out, bytes, "%.30s@%.30s", user != NULL ? user->pw_name : "uid", host);
}

static ep_err ask(ep_cli_control *control, const Expertd__V1__PolicyRequest *request,
                  uint64_t end_ns, Expertd__V1__PolicyReply **out_reply, ep_error *out_error)
{
    ProtobufCMessage *message = NULL;
    const uint64_t now_ns = ep_clock_now_ns();
    ep_err err = ep_cli_admin_call(control, "Policy", &request->base,
                                   (end_ns > now_ns ? end_ns - now_ns : 0) / EP_NS_PER_US + 1,
                                   &message, out_error);
    if (err == EP_OK) {
        expertd__v1__policy_reply__free_unpacked(*out_reply, NULL);
        *out_reply = (Expertd__V1__PolicyReply *)message;
    }
    return err;
}

/* Asks again until the change is written. */
static ep_err change(ep_cli_control *control, Expertd__V1__PolicyReply **out_reply,
                     ep_error *out_error)
{
    struct timespec pause = {.tv_nsec = (long)POLL_NS_MIN};
    const uint64_t end_ns = ep_clock_now_ns() + ep_cli_peer.timeout_us * EP_NS_PER_US;
    const Expertd__V1__PolicyChange *list[CHANGES_MAX];
    Expertd__V1__PolicyRequest request = EXPERTD__V1__POLICY_REQUEST__INIT;
    Expertd__V1__PolicyRequest question = EXPERTD__V1__POLICY_REQUEST__INIT;
    char who[TEXT_BYTES];
    for (size_t i = 0; i < wanted.count; i++) {
        list[i] = &wanted.changes[i];
    }
    say_who(who, sizeof(who));
    request.changes = (Expertd__V1__PolicyChange **)(uintptr_t)list;
    request.n_changes = wanted.count;
    request.has_expect_revision = wanted.has_expect_revision;
    request.expect_revision = wanted.expect_revision;
    request.who = who;
    ep_err err = ask(control, &request, end_ns, out_reply, out_error);
    const uint64_t revision = err == EP_OK ? (*out_reply)->revision : 0;
    while (err == EP_OK && !(*out_reply)->kept) {
        if (ep_clock_now_ns() >= end_ns) {
            return ep_error_set(out_error, EP_ERR_DEADLINE_EXCEEDED,
                                "policy revision %" PRIu64
                                " is taken, but not written after %g s: %s",
                                revision, (double)ep_cli_peer.timeout_us / 1e6,
                                (*out_reply)->store_error[0] != '\0' ? (*out_reply)->store_error
                                                                     : "the store is slow");
        }
        nanosleep(&pause, NULL);
        pause.tv_nsec =
            2 * pause.tv_nsec < (long)POLL_NS_MAX ? 2 * pause.tv_nsec : (long)POLL_NS_MAX;
        err = ask(control, &question, end_ns, out_reply, out_error);
        if (err != EP_OK && wanted.count > 0) {
            ep_error_prefix(out_error, err,
                            "policy revision %" PRIu64 " is taken, but perhaps not written",
                            revision);
        }
    }
    return err;
}

static ep_err run(ep_cli_call *call, ep_error *out_error)
{
    ep_cli_control *control = NULL;
    Expertd__V1__PolicyReply *reply = NULL;
    ep_err err = ep_cli_control_open_operator(&ep_cli_peer, &control, out_error);
    err = err == EP_OK ? change(control, &reply, out_error) : err;
    ep_cli_control_close(control);
    if (err == EP_OK && (ep_cli_output_format == EP_CLI_JSON || wanted.count == 0)) {
        call->failed = !print_all(reply);
    } else if (err == EP_OK) {
        ep_cli_line(stdout, "policy revision %" PRIu64, reply->revision);
        print_changes(call->program, reply);
    }
    expertd__v1__policy_reply__free_unpacked(reply, NULL);
    return err;
}

/* ---- the verbs ---- */

static const ep_cli_command show_command = {
    .name = "show",
    .help = "the values in force, and where they come from",
    .doc = "Prints each key of the policy: the value in force, where it comes from, and when and "
           "by whom it was set."
           "\vWhere the policy says nothing, the configuration does: the coordinator's, or that of "
           "each node or caller.\n\n"
           "Examples:\n"
           "  expertctl policy show --admin tcp://127.0.0.1:7412\n"
           "  expertctl policy show -o json --admin tcp://127.0.0.1:7412\n\n" EP_CLI_EXIT_HELP,
    .uses = {&ep_cli_admin_options, &ep_cli_output_options},
    .run = run,
};

static const ep_cli_command set_command = {
    .name = "set",
    .help = "sets values for the whole service",
    .args = "KEY=VALUE...",
    .doc = "Sets keys of the policy, all of them or none, without a restart and without failing a "
           "call."
           "\vA key that is set stands in for what configuration files say, until it is unset; a "
           "coordinator with a store keeps it over a restart. What a caller sets itself, in its "
           "client's configuration or for a call, stays in force for that caller. Each change is a "
           "revision. The command ends when the change is written; callers have it with the next "
           "routing table, nodes with the next heartbeat.\n\n"
           "Examples:\n"
           "  expertctl policy set decode_tokens_max=128 --admin tcp://127.0.0.1:7412\n"
           "  expertctl policy set copies=2 hedge_permille=50 --expect-revision 7 \\\n"
           "      --admin tcp://127.0.0.1:7412 --admin-token-file "
           "/etc/expertd/admin.token\n\n" EP_CLI_EXIT_HELP,
    .options = {.rows = rows, .count = EP_ARRAY_COUNT(rows)},
    .uses = {&ep_cli_admin_options, &ep_cli_output_options},
    .take_argument = take_set,
    .missing = "KEY=VALUE is missing; expertctl policy show lists the keys",
    .run = run,
};

static const ep_cli_command unset_command = {
    .name = "unset",
    .help = "back to what the configuration says",
    .args = "KEY...",
    .doc = "Takes keys out of the policy: what the configuration says is in force again."
           "\vA key that is not set stays so. That is a revision too when it changes something.\n\n"
           "Examples:\n"
           "  expertctl policy unset decode_tokens_max --admin "
           "tcp://127.0.0.1:7412\n\n" EP_CLI_EXIT_HELP,
    .options = {.rows = rows, .count = EP_ARRAY_COUNT(rows)},
    .uses = {&ep_cli_admin_options, &ep_cli_output_options},
    .take_argument = take_unset,
    .missing = "KEY is missing; expertctl policy show lists the keys",
    .run = run,
};

static const ep_cli_command *const verbs[] = {&show_command, &set_command, &unset_command, NULL};

const ep_cli_command ep_cli_policy = {
    .name = "policy",
    .help = "what is set for the whole service while it runs",
    .args = "show|set|unset [OPTION...]",
    .doc = "What operators set for the whole service while it runs: coordinator, nodes and "
           "callers.\v  show   the values in force, and where they come from\n"
           "  set    sets values for the whole service\n"
           "  unset  back to what the configuration says\n\n"
           "Each has its own help: expertctl policy set --help\n\n"
           "Examples:\n"
           "  expertctl policy show --admin tcp://127.0.0.1:7412\n"
           "  expertctl policy set decode_tokens_max=128 --admin "
           "tcp://127.0.0.1:7412\n\n" EP_CLI_EXIT_HELP,
    .verbs = verbs,
};
