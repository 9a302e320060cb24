/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl context: named sets of connection settings, so that a call needs no flags and says
 * which cluster it means. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "arguments.h"
#include "command_table.h"
#include "connect.h"
#include "context_file.h"
#include "exit_code.h"
#include "output.h"
#include "usage/usage.h"

#define CONTEXT_VARIABLE "EXPERTCTL_CONTEXT"

enum { KEY_USE = 0x200, KEY_NAMES };

typedef struct context_options {
    ep_cli_connect connect; /* of add */
    ep_cli_format format;
    const char *name;
    bool use;
    bool names;
} context_options;

/* The context that a call would use; "" none. */
static const char *in_use(const ep_cli_contexts *contexts)
{
    const char *wanted = getenv(CONTEXT_VARIABLE);
    wanted = wanted != NULL && wanted[0] != '\0' ? wanted : ep_cli_contexts_current(contexts);
    return strcmp(wanted, EP_CLI_CONTEXT_NONE) == 0 ? "" : wanted;
}

/* What a call without --context does from now on. */
static void say_current(const char *program, const char *current)
{
    const char *wanted = getenv(CONTEXT_VARIABLE);
    if (current[0] != '\0') {
        ep_cli_line(stdout, "context %s is in use", current);
    } else {
        ep_cli_line(stdout, "no context is in use: commands go to " EP_CLI_COORDINATOR_DEFAULT
                            " unless told otherwise");
    }
    if (wanted != NULL && wanted[0] != '\0' && strcmp(wanted, current) != 0) {
        ep_cli_line(stderr, "%s: warning: here " CONTEXT_VARIABLE " is set and picks %s", program,
                    wanted);
    }
}

/* ---- add ---- */

static error_t parse_name(int key, char *arg, struct argp_state *state)
{
    context_options *options = state->input;
    switch (key) {
    case ARGP_KEY_ARG:
        if (state->arg_num > 0) {
            argp_error(state, "unexpected argument '%s', allowed: one name", arg);
        }
        if (!ep_cli_context_name_is_good(arg)) {
            argp_error(state, "the name is '%s', allowed: " EP_CLI_CONTEXT_NAMES, arg);
        }
        options->name = arg;
        return 0;
    case ARGP_KEY_NO_ARGS:
        argp_error(state, "the name is missing; expertctl context list shows all");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static error_t parse_add(int key, char *arg, struct argp_state *state)
{
    context_options *options = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &options->connect;
        return 0;
    case KEY_USE:
        options->use = true;
        return 0;
    default:
        return parse_name(key, arg, state);
    }
}

static const struct argp_option add_list[] = {
    {"use", KEY_USE, NULL, 0, "It is in use from now on", 1},
    {0},
};
static const struct argp_child add_children[] = {{&ep_cli_context_argp, 0, NULL, 0}, {0}};
static const struct argp add_argp = {
    add_list,
    parse_add,
    "NAME",
    "Keeps how a cluster is reached under a name: the options given here, and nothing from "
    "variables or other "
    "contexts."
    "\vAddresses are checked, files must be there, and paths are kept in full. Tokens are not "
    "copied: the context "
    "names their files, and shows them to its own addresses and to peers of its CA alone. A "
    "context that exists is "
    "not changed; remove it first.\n\n"
    "Examples:\n"
    "  expertctl context add local --use --coordinator tcp://127.0.0.1:7410 \\\n"
    "      --admin tcp://127.0.0.1:7412\n"
    "  expertctl context add production --coordinator tls+tcp://10.0.0.10:7410 \\\n"
    "      --token-file client.token --tls-ca ca.pem \\\n"
    "      --tls-server-name expertd.example\n\n" EP_CLI_EXIT_HELP,
    add_children,
    NULL,
    NULL};

/* A context is used from other folders too. */
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

static ep_err add_context(const context_options *options, ep_cli_given *given, ep_error *out_error)
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
    if (err == EP_OK && ep_cli_contexts_find(contexts, options->name, &there, NULL) == EP_OK) {
        err = ep_error_set(out_error, EP_ERR_BAD_CONFIG,
                           "context %s exists; expertctl context remove %s first", options->name,
                           options->name);
    }
    if (err == EP_OK) {
        const char *current = options->use ? options->name : ep_cli_contexts_current(contexts);
        err = ep_cli_contexts_write(contexts, current, SIZE_MAX, options->name, given, out_error);
    }
    ep_cli_contexts_close(contexts);
    return err;
}

static int run_add(int argc, char **argv)
{
    static context_options options;
    static ep_cli_given given;
    ep_error error;
    /* the texts; the parser below checks them */
    if (!ep_cli_given_read(&add_argp, argc, argv, &given)) {
        ep_error_set(&error, EP_ERR_NO_MEMORY, "no memory for options");
        return ep_cli_fail(argv[0], &error);
    }
    ep_cli_connect_init(&options.connect);
    argp_parse(&add_argp, argc, argv, 0, NULL, &options);
    if (ep_cli_given_text(&given, "coordinator") == NULL &&
        ep_cli_given_text(&given, "node") == NULL) {
        ep_cli_line(stderr,
                    "%s: --coordinator is missing: a context says whose it is (or --node, where "
                    "there is none)",
                    argv[0]);
        ep_cli_given_fini(&given);
        return EP_CLI_EXIT_USAGE;
    }
    ep_err err = add_context(&options, &given, &error);
    ep_cli_given_fini(&given);
    if (err != EP_OK) {
        return ep_cli_fail(argv[0], &error);
    }
    if (options.use) {
        say_current(argv[0], options.name);
    } else {
        ep_cli_line(stdout, "context %s is kept; expertctl context use %s takes it into use",
                    options.name, options.name);
    }
    return EP_CLI_EXIT_OK;
}

/* ---- use, remove ---- */

#define NAME_DOC(what, more, example)                                                              \
    what "\v" more "\n\nExamples:\n  expertctl context " example "\n\n" EP_CLI_EXIT_HELP
static const struct argp use_argp = {
    NULL,
    parse_name,
    "CONTEXT",
    NAME_DOC("Takes a context into use for commands that name none.",
             "That holds for all shells of this user; --context or " CONTEXT_VARIABLE
             " picks one for a call or a shell.",
             "use staging"),
    NULL,
    NULL,
    NULL};
static const struct argp remove_argp = {
    NULL,
    parse_name,
    "CONTEXT",
    NAME_DOC("Forgets a context; the files it names stay.",
             "Without the one in use, commands go where their options say.", "remove staging"),
    NULL,
    NULL,
    NULL};

/* removes: forgets the context, else takes it into use. */
static int change(int argc, char **argv, const struct argp *argp, bool removes)
{
    context_options options = {.name = NULL};
    ep_cli_contexts *contexts = NULL;
    ep_error error;
    size_t index = 0;
    argp_parse(argp, argc, argv, 0, NULL, &options);
    ep_err err = ep_cli_contexts_open(true, &contexts, &error);
    err = err != EP_OK ? err : ep_cli_contexts_find(contexts, options.name, &index, &error);
    if (err != EP_OK) {
        ep_cli_contexts_close(contexts);
        return ep_cli_fail(argv[0], &error);
    }
    const char *before = ep_cli_contexts_current(contexts);
    const bool was_current = strcmp(before, options.name) == 0;
    const char *current = !removes ? options.name : was_current ? "" : before;
    err = ep_cli_contexts_write(contexts, current, removes ? index : SIZE_MAX, NULL, NULL, &error);
    if (err == EP_OK && removes) {
        ep_cli_line(stdout, "context %s is forgotten", options.name);
    }
    if (err == EP_OK && (!removes || was_current)) {
        say_current(argv[0], current);
    }
    ep_cli_contexts_close(contexts);
    return err == EP_OK ? EP_CLI_EXIT_OK : ep_cli_fail(argv[0], &error);
}

static int run_use(int argc, char **argv)
{
    return change(argc, argv, &use_argp, false);
}

static int run_remove(int argc, char **argv)
{
    return change(argc, argv, &remove_argp, true);
}

/* ---- list, show ---- */

static error_t parse_list(int key, char *arg, struct argp_state *state)
{
    context_options *options = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &options->format;
        return 0;
    case KEY_NAMES:
        options->names = true;
        return 0;
    case ARGP_KEY_ARG:
        return ep_cli_arg_unexpected(state, arg);
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static error_t parse_show(int key, char *arg, struct argp_state *state)
{
    return key == ARGP_KEY_NO_ARGS ? 0
           : key == ARGP_KEY_ARG   ? parse_name(key, arg, state)
                                   : parse_list(key, arg, state);
}

static const struct argp_option list_list[] = {
    {"names", KEY_NAMES, NULL, 0, "Only the names, a line each", 1},
    {0},
};
static const struct argp_child list_children[] = {{&ep_cli_output_argp, 0, NULL, 0}, {0}};
static const struct argp list_argp = {
    list_list,
    parse_list,
    NULL,
    NAME_DOC("Lists the contexts; * marks the one that a call uses.",
             "That is the one of " CONTEXT_VARIABLE " if it is set.", "list"),
    list_children,
    NULL,
    NULL};
static const struct argp show_argp = {
    NULL,
    parse_show,
    "[CONTEXT]",
    NAME_DOC("Prints what a context says; without a name the one in use.",
             "Of files only the paths are shown.", "show production"),
    list_children,
    NULL,
    NULL};

/* A file may say what no call takes: that is told here, not only when the context is used. */
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

static bool print_list(const context_options *options, const ep_cli_contexts *contexts)
{
    const char *current = in_use(contexts);
    ep_cli_table *table = ep_cli_table_create("USED|NAME|SERVICE|ADMIN");
    json_t *list = json_array();
    for (size_t i = 0; table != NULL && i < ep_cli_contexts_count(contexts); i++) {
        const char *name = ep_cli_contexts_name(contexts, i);
        const char *url = ep_cli_contexts_value(contexts, i, "coordinator", NULL);
        url = url[0] != '\0' ? url : ep_cli_contexts_value(contexts, i, "node", NULL);
        const char *admin_url = ep_cli_contexts_value(contexts, i, "admin", NULL);
        const bool is_used = strcmp(name, current) == 0;
        if (options->names) {
            ep_cli_line(stdout, "%s", name);
        }
        ep_cli_table_cell(table, "%s", is_used ? "*" : "");
        ep_cli_table_cell(table, "%s", name);
        ep_cli_table_cell(table, "%s", url);
        ep_cli_table_cell(table, "%s", admin_url[0] != '\0' ? admin_url : "-");
        json_array_append_new(list, json_pack("{s:s, s:b, s:o, s:o}", "name", name, "used", is_used,
                                              "service", ep_cli_json_text(url), "admin",
                                              ep_cli_json_text(admin_url)));
    }
    bool good = options->names                   ? table != NULL
                : options->format == EP_CLI_JSON ? ep_cli_json_print(json_incref(list), stdout)
                                                 : ep_cli_table_print(table, stdout);
    json_decref(list);
    ep_cli_table_destroy(table);
    return good;
}

static int run_list(int argc, char **argv)
{
    context_options options = {.name = NULL};
    ep_cli_contexts *contexts = NULL;
    ep_error error;
    argp_parse(&list_argp, argc, argv, 0, NULL, &options);
    if (ep_cli_contexts_open(false, &contexts, &error) != EP_OK) {
        return ep_cli_fail(argv[0], &error);
    }
    bool good = print_list(&options, contexts);
    for (size_t i = 0; !options.names && i < ep_cli_contexts_count(contexts); i++) {
        warn_of_urls(argv[0], contexts, i);
    }
    ep_cli_contexts_close(contexts);
    return good ? EP_CLI_EXIT_OK : EP_CLI_EXIT_FAILED;
}

static bool print_context(ep_cli_format format, const ep_cli_contexts *contexts, size_t index)
{
    const ep_cli_given *rows = ep_cli_context_rows();
    ep_cli_table *table = ep_cli_table_create("OPTION|VALUE");
    json_t *object = json_object();
    if (table == NULL) {
        json_decref(object);
        return false;
    }
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
    bool good = format == EP_CLI_JSON ? ep_cli_json_print(json_incref(object), stdout)
                                      : ep_cli_table_print(table, stdout);
    json_decref(object);
    ep_cli_table_destroy(table);
    return good;
}

static int run_show(int argc, char **argv)
{
    context_options options = {.name = NULL};
    ep_cli_contexts *contexts = NULL;
    ep_error error;
    size_t index = 0;
    argp_parse(&show_argp, argc, argv, 0, NULL, &options);
    ep_err err = ep_cli_contexts_open(false, &contexts, &error);
    const char *name = err != EP_OK ? "" : options.name != NULL ? options.name : in_use(contexts);
    if (err == EP_OK && name[0] == '\0') {
        err = ep_error_set(&error, EP_ERR_NOT_FOUND,
                           "no context is in use; expertctl context list shows all");
    }
    err = err != EP_OK ? err : ep_cli_contexts_find(contexts, name, &index, &error);
    int code = err != EP_OK                                     ? ep_cli_fail(argv[0], &error)
               : print_context(options.format, contexts, index) ? EP_CLI_EXIT_OK
                                                                : EP_CLI_EXIT_FAILED;
    if (err == EP_OK) {
        warn_of_urls(argv[0], contexts, index);
    }
    ep_cli_contexts_close(contexts);
    return code;
}

/* ---- the verb ---- */

static const ep_cli_command *verb_at(size_t index)
{
    static const ep_cli_command verbs[] = {
        {"add", "keeps how a cluster is reached under a name", &add_argp, run_add, NULL},
        {"use", "takes a context into use", &use_argp, run_use, NULL},
        {"list", "lists the contexts and marks the one in use", &list_argp, run_list, NULL},
        {"show", "prints what a context says", &show_argp, run_show, NULL},
        {"remove", "forgets a context", &remove_argp, run_remove, NULL},
    };
    return index < sizeof(verbs) / sizeof(verbs[0]) ? &verbs[index] : NULL;
}

static error_t parse_verb(int key, char *arg, struct argp_state *state)
{
    return ep_cli_arg_verb(state, key, arg, "add, use, list, show, remove");
}

static const struct argp argp = {
    NULL,
    parse_verb,
    "add|use|list|show|remove [OPTION...]",
    "Named sets of connection settings, in ${XDG_CONFIG_HOME:-~/.config}/expertctl/contexts.yaml.\v"
    "  add     keeps how a cluster is reached under a name\n"
    "  use     takes a context into use\n"
    "  list    lists the contexts and marks the one in use\n"
    "  show    prints what a context says\n"
    "  remove  forgets a context\n\n"
    "Each has its own help: expertctl context add --help\n\n"
    "Commands with a context say on standard error which one it is and whom they speak to, where "
    "they judge or "
    "change a cluster.\n\n"
    "Examples:\n"
    "  expertctl context add staging --coordinator tcp://10.1.0.10:7410\n"
    "  expertctl status --context staging\n\n" EP_CLI_EXIT_HELP,
    NULL,
    NULL,
    NULL};

static int run(int argc, char **argv)
{
    return ep_cli_run_verb(argc, argv, verb_at, &argp);
}

const ep_cli_command ep_cli_context = {"context", "how clusters are reached, by name", &argp, run,
                                       verb_at};
