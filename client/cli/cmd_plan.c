/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl plan: what the placement solver would do. */
#include "arguments.h"
#include "command_table.h"
#include "exit_code.h"
#include "plan_live.h"

enum { KEY_APPLY = 0x200, KEY_WRITE_MAP };

#define PATH_BYTES_MAX 4000

typedef struct plan_options {
    ep_cli_connect connect;
    ep_cli_format format;
    ep_cli_plan_live live;
} plan_options;

static error_t parse(int key, char *arg, struct argp_state *state)
{
    plan_options *options = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &options->connect;
        state->child_inputs[1] = &options->format;
        return 0;
    case KEY_APPLY:
        options->live.apply = true;
        return 0;
    case KEY_WRITE_MAP:
        options->live.map_file = ep_cli_arg_text(state, "--write-map", arg, PATH_BYTES_MAX);
        return 0;
    case ARGP_KEY_ARG:
        return ep_cli_arg_unexpected(state, arg);
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option option_list[] = {
    {"apply", KEY_APPLY, NULL, 0, "Do it: nodes load their new copies, then the table changes; no call fails", 1},
    {"write-map", KEY_WRITE_MAP, "FILE", 0, "Also write what is planned as an expert map, for placement: static", 1},
    {0},
};
static const struct argp_child children[] = {{&ep_cli_admin_argp, 0, NULL, 0}, {&ep_cli_output_argp, 0, NULL, 0}, {0}};
static const struct argp argp = {
    option_list,
    parse,
    NULL,
    "Prints what the coordinator's placement would do now if all copies that help moved at once, and changes nothing "
    "without --apply."
    "\vOf each layer: the load of the busiest node over the mean of all nodes, and over the least that any placement "
    "of as many copies can have (the bound; without what nodes' memory holds), before and after; copies and bytes to "
    "load. With placement: balanced the coordinator does the same by itself, 64 copies at a time.\n\n"
    "Examples:\n"
    "  expertctl plan --admin tcp://127.0.0.1:7412\n"
    "  expertctl plan --apply --admin tcp://127.0.0.1:7412\n"
    "  expertctl plan --write-map map.json --admin tcp://127.0.0.1:7412\n\n" EP_CLI_EXIT_HELP,
    children,
    NULL,
    NULL};

static int run(int argc, char **argv)
{
    static plan_options options;
    ep_cli_connect_init(&options.connect);
    argp_parse(&argp, argc, argv, 0, NULL, &options);
    return ep_cli_plan_live_run(argv[0], &options.connect, options.format, &options.live);
}

const ep_cli_command ep_cli_plan = {"plan", "what placement would do, and does with --apply", &argp, run, NULL};
