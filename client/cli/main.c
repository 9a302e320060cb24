/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl: finds the command, runs it, and checks that its output was written. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cpu_features.h"
#include "command_table.h"
#include "connect.h"
#include "expertd/client.h"
#include "settings.h"
#include "transport/transport.h"

#define PROGRAM "expertctl"
#define NAME_BYTES 64
#ifndef EP_BUILD_REVISION /* the build of the program sets it */
#define EP_BUILD_REVISION "unknown"
#endif

static void print_help(void)
{
    printf("Usage: %s COMMAND [OPTION...]\n"
           "The operator's and the tester's command line of expertd.\n\nCommands:\n",
           PROGRAM);
    for (size_t i = 0; ep_cli_commands[i] != NULL; i++) {
        printf("  %-10s %s\n", ep_cli_commands[i]->name, ep_cli_commands[i]->help);
    }
    printf("  %-10s %s\n\n", "help", "this text, or all about a command: expertctl help generate");
    fputs("The service is reached at --coordinator URL, at --node URL (once or more\n"
          "often), else at " EP_CLI_COORDINATOR_DEFAULT ".\n" EP_CLI_SETTINGS_HELP "\n\n",
          stdout);
    printf("Examples:\n"
           "  expertctl status\n"
           "  expertctl table --model demo --layer 0 -o json\n"
           "  expertctl forward --model demo --layer 0 --random 4\n"
           "  expertctl generate --checkpoint deploy/demo-model/checkpoint --model demo \\\n"
           "      --prompt \"The file \" --bytes 100\n\n" EP_CLI_EXIT_HELP "\n");
}

static int unknown_command(const char *name)
{
    fprintf(stderr, "%s: there is no command '%s', allowed:", PROGRAM, name);
    for (size_t i = 0; ep_cli_commands[i] != NULL; i++) {
        fprintf(stderr, " %s", ep_cli_commands[i]->name);
    }
    fprintf(stderr, " help\n");
    return EP_CLI_EXIT_USAGE;
}

static int help(int argc, char **argv)
{
    char name[NAME_BYTES];
    if (argc == 0) {
        print_help();
        return EP_CLI_EXIT_OK;
    }
    const ep_cli_command *command = ep_cli_command_find(ep_cli_commands, argv[0]);
    if (command == NULL) {
        return unknown_command(argv[0]);
    }
    snprintf(name, sizeof(name), "%s %s", PROGRAM, command->name);
    argp_help(ep_cli_command_argp(command), stdout,
              ARGP_HELP_STD_HELP & ~(unsigned)ARGP_HELP_EXIT_OK, name);
    return EP_CLI_EXIT_OK;
}

/* argv[0]: "expertctl status". */
static int run_command(const ep_cli_command *command, int argc, char **argv)
{
    ep_cli_call call = {.program = argv[0],
                        .argc = argc,
                        .argv = argv,
                        .argp = ep_cli_command_argp(command),
                        .commands = ep_cli_commands};
    const bool in_order = command->in_order || command->verbs != NULL;
    ep_error error;
    /* A command with verbs has no options of its own. */
    if (command->verbs == NULL && !command->sets_context &&
        !ep_cli_settings_apply(ep_cli_commands, call.argp, &argc, &argv)) {
        return EP_CLI_EXIT_USAGE;
    }
    argp_parse(call.argp, argc, argv, in_order ? ARGP_IN_ORDER : 0, NULL,
               (void *)(uintptr_t)command);
    ep_err err = command->run(&call, &error);
    if (argv != call.argv) {
        free(argv);
    }
    const int code = err != EP_OK  ? ep_cli_fail(call.program, &error)
                     : call.failed ? EP_CLI_EXIT_FAILED
                                   : EP_CLI_EXIT_OK;
    return call.exit_code != 0 ? call.exit_code : code;
}

/* Runs the verb in argv[2], or else the command itself, whose parser reports the error. */
static int run_named(const ep_cli_command *command, int argc, char **argv)
{
    static char name[NAME_BYTES];
    const ep_cli_command *verb =
        command->verbs != NULL && argc > 2 ? ep_cli_command_find(command->verbs, argv[2]) : NULL;
    const char *space = verb != NULL ? " " : "";
    snprintf(name, sizeof(name), "%s %s%s%s", PROGRAM, command->name, space,
             verb != NULL ? verb->name : "");
    const int used = verb != NULL ? 2 : 1;
    argv[used] = name;
    return run_command(verb != NULL ? verb : command, argc - used, argv + used);
}

static int run(int argc, char **argv)
{
    const char *word = argc > 1 ? argv[1] : NULL;
    if (word == NULL) {
        fprintf(stderr, "%s: no command given; see %s --help\n", PROGRAM, PROGRAM);
        return EP_CLI_EXIT_USAGE;
    }
    if (strcmp(word, "--version") == 0 || strcmp(word, "-V") == 0) {
        printf("%s %s (%s)\n", PROGRAM, ep_version(), EP_BUILD_REVISION);
        return EP_CLI_EXIT_OK;
    }
    if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0 || strcmp(word, "-?") == 0 ||
        strcmp(word, "help") == 0) {
        return help(argc - 2, argv + 2);
    }
    if (strcmp(word, "--help-man") == 0) { /* used by the build */
        return ep_cli_print_man(ep_cli_commands, stdout) ? EP_CLI_EXIT_OK : EP_CLI_EXIT_FAILED;
    }
    const ep_cli_command *command = ep_cli_command_find(ep_cli_commands, word);
    if (command == NULL) {
        return unknown_command(word);
    }
    ep_error error;
    if (ep_stream_lane_read_environment(&error) != EP_OK ||
        ep_cpu_features_check(&error) != EP_OK) {
        fprintf(stderr, "%s: %s\n", PROGRAM, error.text);
        return EP_CLI_EXIT_USAGE;
    }
    return run_named(command, argc, argv);
}

int main(int argc, char **argv)
{
    argp_err_exit_status = EP_CLI_EXIT_USAGE;
    signal(SIGPIPE, SIG_IGN); /* a closed stdout is reported as an error */
    int code = run(argc, argv);
    ep_transport_fini();
    if (fflush(stdout) != 0 || ferror(stdout)) {
        fprintf(stderr, "%s: cannot write to standard output: %s\n", PROGRAM, strerror(errno));
        return code != EP_CLI_EXIT_OK ? code : EP_CLI_EXIT_FAILED;
    }
    return code;
}
