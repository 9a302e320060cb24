/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl model: which version callers get that name none, and which types of model there are
 * rules for. */
#include "admin_call.h"
#include "arguments.h"
#include "command_table.h"
#include "exit_code.h"
#include "model/model_types.h"
#include "moe/routing_table.h"
#include "output.h"

typedef struct model_options {
    ep_cli_connect connect;
    ep_cli_format format;
    const char *name;
    const char *version;
} model_options;

static error_t parse(int key, char *arg, struct argp_state *state)
{
    model_options *options = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &options->connect;
        state->child_inputs[1] = &options->format;
        return 0;
    case ARGP_KEY_ARG:
        if (state->arg_num == 0) {
            options->name = ep_cli_arg_text(state, "NAME", arg, EP_MODEL_NAME_BYTES - 1);
        } else if (state->arg_num == 1) {
            options->version = ep_cli_arg_text(state, "VERSION", arg, EP_VERSION_BYTES - 1);
        } else {
            argp_error(state, "unexpected argument '%s', allowed: a model's name and a version",
                       arg);
        }
        return 0;
    case ARGP_KEY_END:
        if (options->version == NULL) {
            argp_error(state, "%s is missing; expertctl status shows what is served",
                       options->name == NULL ? "NAME" : "VERSION");
        }
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_child children[] = {
    {&ep_cli_admin_argp, 0, NULL, 0}, {&ep_cli_output_argp, 0, NULL, 0}, {0}};
static const struct argp default_argp = {
    NULL,
    parse,
    "NAME VERSION",
    "Sets the version of a model that callers get who name none."
    "\vUntil somebody sets it, it is the first version whose experts all had a copy. It stays "
    "while any node offers it, and a "
    "coordinator with state_dir keeps it over a restart. Calls that have begun stay with the "
    "version they have. Only "
    "a version whose experts all have a copy can be set.\n\n"
    "Examples:\n"
    "  expertctl model default moe-30b 2026-11 --admin tcp://127.0.0.1:7412\n\n" EP_CLI_EXIT_HELP,
    children,
    NULL,
    NULL};

static int run_default(int argc, char **argv)
{
    static model_options options;
    Expertd__V1__DefaultVersionRequest request = EXPERTD__V1__DEFAULT_VERSION_REQUEST__INIT;
    ProtobufCMessage *message = NULL;
    ep_error error;
    ep_cli_connect_init(&options.connect);
    argp_parse(&default_argp, argc, argv, 0, NULL, &options);
    request.model = (char *)(uintptr_t)options.name;
    request.version = (char *)(uintptr_t)options.version;
    if (ep_cli_admin_call_once(&options.connect, "SetDefaultVersion", &request.base, &message,
                               &error) != EP_OK) {
        return ep_cli_fail(argv[0], &error);
    }
    const char *before = ((const Expertd__V1__DefaultVersionReply *)message)->before;
    bool good = true;
    if (options.format == EP_CLI_JSON) {
        good = ep_cli_json_print(
            json_pack("{s:o, s:o, s:o}", "model", ep_cli_json_text(options.name), "version",
                      ep_cli_json_text(options.version), "before", ep_cli_json_text(before)),
            stdout);
    } else {
        ep_cli_line(stdout, "model %s: the default version is %s, before: %s", options.name,
                    options.version, before[0] != 0 ? before : "none");
    }
    protobuf_c_message_free_unpacked(message, NULL);
    return good ? EP_CLI_EXIT_OK : EP_CLI_EXIT_FAILED;
}

/* ---- types ---- */

static error_t parse_types(int key, char *arg, struct argp_state *state)
{
    if (key == ARGP_KEY_INIT) {
        state->child_inputs[0] = state->input;
        return 0;
    }
    if (key == ARGP_KEY_ARG) {
        argp_error(state, "unexpected argument '%s', allowed: none", arg);
    }
    return ARGP_ERR_UNKNOWN;
}

static const struct argp_child types_children[] = {{&ep_cli_output_argp, 0, NULL, 0}, {0}};
static const struct argp types_argp = {
    NULL,
    parse_types,
    "",
    "Prints the model types that this build has rules for."
    "\vROUTER says whether `forward --logits` computes it, or why not: the experts then serve a "
    "caller that routes. SHARED says who computes "
    "shared experts, if the model has some. Other types are served when names and keys say all "
    "about their experts, without a router.\n\n"
    "Examples:\n"
    "  expertctl model types\n\n" EP_CLI_EXIT_HELP,
    types_children,
    NULL,
    NULL};

static const char *router_text(const ep_model_type *type)
{
    return type->refused != NULL          ? "-"
           : type->router.why_not != NULL ? type->router.why_not
                                          : "computed";
}

static const char *shared_text(const ep_model_type *type)
{
    return type->refused != NULL                   ? "-"
           : type->marks & EP_TYPE_SHARED_CALLERS  ? "the caller"
           : type->marks & EP_TYPE_SHARED_AVERAGED ? "the service, averaged"
                                                   : "the service";
}

static int run_types(int argc, char **argv)
{
    static ep_cli_format format;
    argp_parse(&types_argp, argc, argv, 0, NULL, &format);
    json_t *list = json_array();
    ep_cli_table *table = ep_cli_table_create("MODELS|TYPE|ROUTER|SHARED EXPERTS|REFUSED");
    const ep_model_type *type;
    for (size_t i = 0; table != NULL && (type = ep_model_type_at(i)) != NULL; i++) {
        (void)json_array_append_new(
            list, json_pack("{s:s, s:s*, s:s*, s:s, s:s, s:s*}", "type", type->name, "aliases",
                            type->aliases, "models", type->models, "router", router_text(type),
                            "shared", shared_text(type), "refused", type->refused));
        ep_cli_table_cell(table, "%s", type->models != NULL ? type->models : "-");
        ep_cli_table_cell(table, "%s%s%s", type->name, type->aliases != NULL ? " " : "",
                          type->aliases != NULL ? type->aliases : "");
        ep_cli_table_cell(table, "%s", router_text(type));
        ep_cli_table_cell(table, "%s", shared_text(type));
        ep_cli_table_cell(table, "%s", type->refused != NULL ? type->refused : "-");
    }
    bool good = table != NULL && list != NULL;
    if (good && format == EP_CLI_JSON) {
        good = ep_cli_json_print(json_incref(list), stdout);
    } else if (good) {
        good = ep_cli_table_print(table, stdout);
    }
    ep_cli_table_destroy(table);
    json_decref(list);
    return good ? EP_CLI_EXIT_OK : EP_CLI_EXIT_FAILED;
}

/* ---- the verbs ---- */

static const ep_cli_command default_command = {
    "default", "sets the version for callers that name none", &default_argp, run_default, NULL};

static const ep_cli_command types_command = {"types", "prints the model types there are rules for",
                                             &types_argp, run_types, NULL};

static const ep_cli_command *verb_at(size_t index)
{
    return index == 0 ? &default_command : index == 1 ? &types_command : NULL;
}

static error_t parse_verb(int key, char *arg, struct argp_state *state)
{
    return ep_cli_arg_verb(state, key, arg, "default, types");
}

static const struct argp argp = {
    NULL,
    parse_verb,
    "default|types [OPTION...]",
    "What an operator decides about models, and asks about them.\v"
    "  default  sets the version for callers that name none\n"
    "  types    prints the model types there are rules for\n\n"
    "Each has its own help: expertctl model default --help\n\n"
    "Examples:\n"
    "  expertctl model default moe-30b 2026-11 --admin tcp://127.0.0.1:7412\n\n" EP_CLI_EXIT_HELP,
    NULL,
    NULL,
    NULL};

static int run(int argc, char **argv)
{
    return ep_cli_run_verb(argc, argv, verb_at, &argp);
}

const ep_cli_command ep_cli_model = {
    "model", "versions for callers that name none, and known model types", &argp, run, verb_at};
