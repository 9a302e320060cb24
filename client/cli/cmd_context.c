/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl context: named sets of connection settings, so that calls need no flags. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "command_table.h"
#include "connect.h"
#include "context_file.h"
#include "usage/usage.h"

#define CONTEXT_VARIABLE "EXPERTCTL_CONTEXT"

static struct {
    const char *name;
    bool use;
    bool names;
} wanted;

#define NAME_MISSING "the name is missing; expertctl context list shows all"
#define NAME_DOC(what, more, example)                                                              \
    what "\v" more "\n\nExamples:\n  expertctl context " example "\n\n" EP_CLI_EXIT_HELP

/* The context that a call would use; "" none. */
static const char *in_use(const ep_cli_contexts *contexts)
{
    const char *name = getenv(CONTEXT_VARIABLE);
    name = name != NULL && name[0] != '\0' ? name : ep_cli_contexts_current(contexts);
    return strcmp(name, EP_CLI_CONTEXT_NONE) == 0 ? "" : name;
}

/* Says which context a call without --context uses from now on. */
static void say_current(const char *program, const char *current)
{
    const char *name = getenv(CONTEXT_VARIABLE);
    if (current[0] != '\0') {
        ep_cli_line(stdout, "context %s is in use", current);
    } else {
        ep_cli_line(stdout, "no context is in use: commands go to " EP_CLI_COORDINATOR_DEFAULT
                            " unless told otherwise");
    }
    if (name != NULL && name[0] != '\0' && strcmp(name, current) != 0) {
        ep_cli_line(stderr, "%s: warning: here " CONTEXT_VARIABLE " is set and picks %s", program,
                    name);
    }
}

/* ---- add ---- */

static void take_name(struct argp_state *state, char *text)
{
    if (state->arg_num > 0) {
        argp_error(state, "unexpected argument '%s', allowed: one name", text);
    }
    if (!ep_cli_context_name_is_good(text)) {
        argp_error(state, "the name is '%s', allowed: " EP_CLI_CONTEXT_NAMES, text);
    }
    wanted.name = text;
}

static const ep_cli_option add_rows[] = {
    {"use", 0, NULL, "It is in use from now on", 1, .flag = &wanted.use},
};

/* Makes a path absolute, since a context is used from other folders too. */
static bool complete_path(ep_cli_given *given, size_t index, ep_error *out_error)
{
    char *path = realpath(given->texts[index], NULL);
    if (path == NULL) {
        ep_error_set(out_error, EP_ERR_IO, "--%s %.300s: %s", given->rows[index]->name,
                     given->texts[index], strerror(errno));
        return false;
    }
    free(given->texts[index]);
    given->texts[index] = path;
    return true;
}

static ep_err add_context(ep_cli_given *given, ep_error *out_error)
{
    ep_cli_contexts *contexts = NULL;
    size_t there;
    for (size_t i = 0; i < given->count; i++) {
        bool is_path =
            given->texts[i] != NULL && ep_usage_value_of(given->rows[i]) == EP_USAGE_FILE;
        if (is_path && !complete_path(given, i, out_error)) {
            return EP_ERR_IO;
        }
    }
    ep_err err = ep_cli_contexts_open(true, &contexts, out_error);
    if (err == EP_OK && ep_cli_contexts_find(contexts, wanted.name, &there, NULL) == EP_OK) {
        err = ep_error_set(out_error, EP_ERR_BAD_CONFIG,
                           "context %s exists; expertctl context remove %s first", wanted.name,
                           wanted.name);
    }
    if (err == EP_OK) {
        const char *current = wanted.use ? wanted.name : ep_cli_contexts_current(contexts);
        err = ep_cli_contexts_write(contexts, current, SIZE_MAX, wanted.name, given, out_error);
    }
    ep_cli_contexts_close(contexts);
    return err;
}

static ep_err run_add(ep_cli_call *call, ep_error *out_error)
{
    static ep_cli_given given; /* texts of the flags, which the command's parser has checked */
    if (!ep_cli_given_read(call->argp, call->argc, call->argv, &given)) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for options");
    }
    if (ep_cli_given_text(&given, "coordinator") == NULL &&
        ep_cli_given_text(&given, "node") == NULL) {
        ep_cli_line(stderr,
                    "%s: --coordinator is missing: a context names a service by it (or by --node, "
                    "without a coordinator)",
                    call->program);
        ep_cli_given_fini(&given);
        call->exit_code = EP_CLI_EXIT_USAGE;
        return EP_OK;
    }
    ep_err err = add_context(&given, out_error);
    ep_cli_given_fini(&given);
    if (err == EP_OK && wanted.use) {
        say_current(call->program, wanted.name);
    } else if (err == EP_OK) {
        ep_cli_line(stdout, "context %s is kept; expertctl context use %s takes it into use",
                    wanted.name, wanted.name);
    }
    return err;
}

static const ep_cli_command add_command = {
    .name = "add",
    .help = "keeps how a cluster is reached under a name",
    .args = "NAME",
    .doc = "Keeps how a cluster is reached under a name: the options given here, and nothing from "
           "variables or other contexts."
           "\vAddresses are checked, files must be there, and paths are kept in full. Tokens are "
           "not copied: the context names their files, and shows them to its own addresses and to "
           "peers of its CA alone. A context that exists is not changed; remove it first.\n\n"
           "Examples:\n"
           "  expertctl context add local --use --coordinator tcp://127.0.0.1:7410 \\\n"
           "      --admin tcp://127.0.0.1:7412\n"
           "  expertctl context add production --coordinator tls+tcp://10.0.0.10:7410 \\\n"
           "      --token-file client.token --tls-ca ca.pem \\\n"
           "      --tls-server-name expertd.example\n\n" EP_CLI_EXIT_HELP,
    .options = {.rows = add_rows, .count = EP_ARRAY_COUNT(add_rows)},
    .uses = {&ep_cli_context_admin_options, &ep_cli_reach_options},
    .sets_context = true,
    .take_argument = take_name,
    .missing = NAME_MISSING,
    .run = run_add,
};

/* ---- use, remove ---- */

/* removes: removes the context, else makes it the current one. */
static ep_err change(ep_cli_call *call, bool removes, ep_error *out_error)
{
    ep_cli_contexts *contexts = NULL;
    size_t index = 0;
    ep_err err = ep_cli_contexts_open(true, &contexts, out_error);
    err = err != EP_OK ? err : ep_cli_contexts_find(contexts, wanted.name, &index, out_error);
    if (err != EP_OK) {
        ep_cli_contexts_close(contexts);
        return err;
    }
    const char *before = ep_cli_contexts_current(contexts);
    const bool was_current = strcmp(before, wanted.name) == 0;
    const char *current = !removes ? wanted.name : was_current ? "" : before;
    err =
        ep_cli_contexts_write(contexts, current, removes ? index : SIZE_MAX, NULL, NULL, out_error);
    if (err == EP_OK && removes) {
        ep_cli_line(stdout, "context %s is forgotten", wanted.name);
    }
    if (err == EP_OK && (!removes || was_current)) {
        say_current(call->program, current);
    }
    ep_cli_contexts_close(contexts);
    return err;
}

static ep_err run_use(ep_cli_call *call, ep_error *out_error)
{
    return change(call, false, out_error);
}

static ep_err run_remove(ep_cli_call *call, ep_error *out_error)
{
    return change(call, true, out_error);
}

static const ep_cli_command use_command = {
    .name = "use",
    .help = "takes a context into use",
    .args = "CONTEXT",
    .doc = NAME_DOC("Takes a context into use for commands that name none.",
                    "That holds for all shells of this user; --context or " CONTEXT_VARIABLE
                    " picks one for a call or a shell.",
                    "use staging"),
    .take_argument = take_name,
    .missing = NAME_MISSING,
    .run = run_use,
};

static const ep_cli_command remove_command = {
    .name = "remove",
    .help = "forgets a context",
    .args = "CONTEXT",
    .doc =
        NAME_DOC("Forgets a context; the files it names stay.",
                 "Without the one in use, commands go where their options say.", "remove staging"),
    .take_argument = take_name,
    .missing = NAME_MISSING,
    .run = run_remove,
};

/* ---- list, show ---- */

/* Warns of invalid URLs in the file here, not only when the context is used. */
static void warn_of_urls(const char *program, const ep_cli_contexts *contexts, size_t index)
{
    static const char *const flags[] = {"coordinator", "node", "admin"};
    for (size_t i = 0; i < sizeof(flags) / sizeof(flags[0]); i++) {
        const char *origin;
        const char *text = ep_cli_contexts_value(contexts, index, flags[i], &origin);
        for (size_t bytes; bytes = strcspn(text, ","), bytes > 0;
             text += bytes + (text[bytes] == ',')) {
            char *url = strndup(text, bytes);
            if (url != NULL && !ep_cli_url_is_good(url)) {
                ep_cli_line(
                    stderr,
                    "%s: warning: %s of context %s (%s) is '%s', allowed: " EP_CLI_URL_ALLOWED,
                    program, flags[i], ep_cli_contexts_name(contexts, index), origin, url,
                    EP_ADDRESS_BYTES - 1);
            }
            free(url);
        }
    }
}

static bool print_list(const ep_cli_contexts *contexts)
{
    const char *current = in_use(contexts);
    ep_cli_table *table = ep_cli_table_create("USED|NAME|SERVICE|ADMIN");
    json_t *list = json_array();
    for (size_t i = 0; i < ep_cli_contexts_count(contexts); i++) {
        const char *name = ep_cli_contexts_name(contexts, i);
        const char *url = ep_cli_contexts_value(contexts, i, "coordinator", NULL);
        url = url[0] != '\0' ? url : ep_cli_contexts_value(contexts, i, "node", NULL);
        const char *admin_url = ep_cli_contexts_value(contexts, i, "admin", NULL);
        const bool is_used = strcmp(name, current) == 0;
        ep_cli_table_cell(table, "%s", is_used ? "*" : "");
        ep_cli_table_cell(table, "%s", name);
        ep_cli_table_cell(table, "%s", url);
        ep_cli_table_cell(table, "%s", admin_url[0] != '\0' ? admin_url : "-");
        json_array_append_new(list, json_pack("{s:s, s:b, s:o, s:o}", "name", name, "used", is_used,
                                              "service", ep_cli_json_text(url), "admin",
                                              ep_cli_json_text(admin_url)));
    }
    return ep_cli_output_print(table, list);
}

static ep_err run_list(ep_cli_call *call, ep_error *out_error)
{
    ep_cli_contexts *contexts = NULL;
    ep_err err = ep_cli_contexts_open(false, &contexts, out_error);
    if (err != EP_OK) {
        return err;
    }
    call->failed = !wanted.names && !print_list(contexts);
    for (size_t i = 0; i < ep_cli_contexts_count(contexts); i++) {
        if (wanted.names) {
            ep_cli_line(stdout, "%s", ep_cli_contexts_name(contexts, i));
        } else {
            warn_of_urls(call->program, contexts, i);
        }
    }
    ep_cli_contexts_close(contexts);
    return EP_OK;
}

static const ep_cli_option list_rows[] = {
    {"names", 0, NULL, "Only the names, a line each", 1, .flag = &wanted.names},
};

static const ep_cli_command list_command = {
    .name = "list",
    .help = "lists the contexts and marks the one in use",
    .doc = NAME_DOC("Lists the contexts; * marks the one that a call uses.",
                    "That is the one of " CONTEXT_VARIABLE " if it is set.", "list"),
    .options = {.rows = list_rows, .count = EP_ARRAY_COUNT(list_rows)},
    .uses = {&ep_cli_output_options},
    .run = run_list,
};

static bool print_context(const ep_cli_contexts *contexts, size_t index)
{
    const ep_cli_given *rows = ep_cli_context_rows();
    ep_cli_table *table = ep_cli_table_create("OPTION|VALUE");
    json_t *object = json_object();
    ep_cli_table_cell(table, "name");
    ep_cli_table_cell(table, "%s", ep_cli_contexts_name(contexts, index));
    json_object_set_new(object, "name", ep_cli_json_text(ep_cli_contexts_name(contexts, index)));
    for (size_t r = 0; r < rows->count; r++) {
        const char *text = ep_cli_contexts_value(contexts, index, rows->rows[r]->name, NULL);
        if (text[0] != '\0') {
            ep_cli_table_cell(table, "%s", rows->rows[r]->name);
            ep_cli_table_cell(table, "%s", text);
            json_object_set_new(object, rows->rows[r]->name, ep_cli_json_text(text));
        }
    }
    return ep_cli_output_print(table, object);
}

static ep_err run_show(ep_cli_call *call, ep_error *out_error)
{
    ep_cli_contexts *contexts = NULL;
    size_t index = 0;
    ep_err err = ep_cli_contexts_open(false, &contexts, out_error);
    const char *name = err != EP_OK ? "" : wanted.name != NULL ? wanted.name : in_use(contexts);
    if (err == EP_OK && name[0] == '\0') {
        err = ep_error_set(out_error, EP_ERR_NOT_FOUND,
                           "no context is in use; expertctl context list shows all");
    }
    err = err != EP_OK ? err : ep_cli_contexts_find(contexts, name, &index, out_error);
    if (err == EP_OK) {
        call->failed = !print_context(contexts, index);
        warn_of_urls(call->program, contexts, index);
    }
    ep_cli_contexts_close(contexts);
    return err;
}

static const ep_cli_command show_command = {
    .name = "show",
    .help = "prints what a context says",
    .args = "[CONTEXT]",
    .doc = NAME_DOC("Prints what a context says; without a name the one in use.",
                    "Of files only the paths are shown.", "show production"),
    .uses = {&ep_cli_output_options},
    .take_argument = take_name,
    .run = run_show,
};

/* ---- the verbs ---- */

static const ep_cli_command *const verbs[] = {&add_command,  &use_command,    &list_command,
                                              &show_command, &remove_command, NULL};

const ep_cli_command ep_cli_context = {
    .name = "context",
    .help = "how clusters are reached, by name",
    .args = "add|use|list|show|remove [OPTION...]",
    .doc = "Named sets of connection settings, in "
           "${XDG_CONFIG_HOME:-~/.config}/expertctl/contexts.yaml.\v  add     keeps how a cluster "
           "is reached under a name\n"
           "  use     takes a context into use\n"
           "  list    lists the contexts and marks the one in use\n"
           "  show    prints what a context says\n"
           "  remove  forgets a context\n\n"
           "Each has its own help: expertctl context add --help\n\n"
           "Commands with a context say on standard error which one it is and whom they speak to, "
           "where they judge or change a cluster.\n\n"
           "Examples:\n"
           "  expertctl context add staging --coordinator tcp://10.1.0.10:7410\n"
           "  expertctl status --context staging\n\n" EP_CLI_EXIT_HELP,
    .verbs = verbs,
};
