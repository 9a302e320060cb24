/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl model: default versions, a model's layers, and the known model types. */
#include "command_table.h"
#include "control.h"
#include "model/model_types.h"
#include "moe/routing_table.h"

static struct {
    const char *name;
    const char *version;
} wanted;

static void take_name(struct argp_state *state, char *text)
{
    if (state->arg_num == 0) {
        wanted.name = ep_cli_arg_text(state, "NAME", text, EP_MODEL_NAME_BYTES - 1);
    } else if (state->arg_num == 1) {
        wanted.version = ep_cli_arg_text(state, "VERSION", text, EP_VERSION_BYTES - 1);
    } else {
        argp_error(state, "unexpected argument '%s', allowed: a model's name and a version", text);
    }
}

static void check(struct argp_state *state)
{
    if (wanted.version == NULL) {
        argp_error(state, "%s is missing; expertctl status shows what is served",
                   wanted.name == NULL ? "NAME" : "VERSION");
    }
}

static ep_err run_default(ep_cli_call *call, ep_error *out_error)
{
    Expertd__V1__DefaultVersionRequest request = EXPERTD__V1__DEFAULT_VERSION_REQUEST__INIT;
    ProtobufCMessage *message = NULL;
    request.model = (char *)(uintptr_t)wanted.name;
    request.version = (char *)(uintptr_t)wanted.version;
    ep_err err = ep_cli_admin_call_once(&ep_cli_peer, "SetDefaultVersion", &request.base, &message,
                                        out_error);
    if (err != EP_OK) {
        return err;
    }
    const char *before = ((const Expertd__V1__DefaultVersionReply *)message)->before;
    if (ep_cli_output_format == EP_CLI_JSON) {
        call->failed = !ep_cli_json_print(
            json_pack("{s:o, s:o, s:o}", "model", ep_cli_json_text(wanted.name), "version",
                      ep_cli_json_text(wanted.version), "before", ep_cli_json_text(before)),
            stdout);
    } else {
        ep_cli_line(stdout, "model %s: the default version is %s, before: %s", wanted.name,
                    wanted.version, before[0] != 0 ? before : "none");
    }
    protobuf_c_message_free_unpacked(message, NULL);
    return EP_OK;
}

static const ep_cli_command default_command = {
    .name = "default",
    .help = "sets the version for callers that name none",
    .args = "NAME VERSION",
    .doc = "Sets the version of a model that callers get who name none."
           "\vUntil somebody sets it, it is the first version whose experts all had a copy. It "
           "stays while any node offers it, and a coordinator with state_dir keeps it over a "
           "restart. Calls that have begun stay with the version they have. Only a version whose "
           "experts all have a copy can be set.\n\n"
           "Examples:\n"
           "  expertctl model default moe-30b 2026-11 --admin "
           "tcp://127.0.0.1:7412\n\n" EP_CLI_EXIT_HELP,
    .options = {.check = check},
    .uses = {&ep_cli_admin_options, &ep_cli_output_options},
    .take_argument = take_name,
    .run = run_default,
};

/* ---- types ---- */

static void take_none(struct argp_state *state, char *text)
{
    argp_error(state, "unexpected argument '%s', allowed: none", text);
}

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

static ep_err run_types(ep_cli_call *call, ep_error *out_error)
{
    (void)out_error;
    json_t *list = json_array();
    ep_cli_table *table = ep_cli_table_create("MODELS|TYPE|ROUTER|SHARED EXPERTS|REFUSED");
    const ep_model_type *type;
    for (size_t i = 0; (type = ep_model_type_at(i)) != NULL; i++) {
        json_array_append_new(list, json_pack("{s:s, s:s*, s:s*, s:s, s:s, s:s*}", "type",
                                              type->name, "aliases", type->aliases, "models",
                                              type->models, "router", router_text(type), "shared",
                                              shared_text(type), "refused", type->refused));
        ep_cli_table_cell(table, "%s", type->models != NULL ? type->models : "-");
        ep_cli_table_cell(table, "%s%s%s", type->name, type->aliases != NULL ? " " : "",
                          type->aliases != NULL ? type->aliases : "");
        ep_cli_table_cell(table, "%s", router_text(type));
        ep_cli_table_cell(table, "%s", shared_text(type));
        ep_cli_table_cell(table, "%s", type->refused != NULL ? type->refused : "-");
    }
    call->failed = !ep_cli_output_print(table, list);
    return EP_OK;
}

static const ep_cli_command types_command = {
    .name = "types",
    .help = "prints the model types there are rules for",
    .args = "",
    .doc = "Prints the model types that this build has rules for."
           "\vROUTER says whether `forward --logits` computes it, or why not: the experts then "
           "serve a caller that routes. SHARED says who computes shared experts, if the model has "
           "some. Other types are served when names and keys say all about their experts, without "
           "a router.\n\n"
           "Examples:\n"
           "  expertctl model types\n\n" EP_CLI_EXIT_HELP,
    .uses = {&ep_cli_output_options},
    .take_argument = take_none,
    .run = run_types,
};

static const ep_cli_command *const verbs[] = {&default_command, &ep_cli_model_show_command,
                                              &types_command, NULL};
const ep_cli_command ep_cli_model = {
    .name = "model",
    .help = "versions for callers that name none, layers, and known model types",
    .args = "default|show|types [OPTION...]",
    .doc = "What an operator decides about models, and asks about them.\v  default  sets the "
           "version for callers that name none\n"
           "  show     prints what the layers of served models are, or of a checkpoint\n"
           "  types    prints the model types there are rules for\n\n"
           "Each has its own help: expertctl model default --help\n\n"
           "Examples:\n"
           "  expertctl model default moe-30b 2026-11 --admin "
           "tcp://127.0.0.1:7412\n\n" EP_CLI_EXIT_HELP,
    .verbs = verbs,
};
