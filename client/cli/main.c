/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl: finds the verb, runs it, and makes sure that what it printed has arrived. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "base/cpu_features.h"
#include "command_table.h"
#include "connect.h"
#include "documents.h"
#include "exit_code.h"
#include "expertd/client.h"
#include "settings.h"
#include "transport/transport.h"

#define PROGRAM "expertctl"
#define NAME_BYTES 64
#ifndef EP_BUILD_REVISION /* the build of the program sets it */
#define EP_BUILD_REVISION "unknown"
#endif

static void print_help(FILE *out)
{
    fprintf(out,
            "Usage: %s COMMAND [OPTION...]\n"
            "The operator's and the tester's command line of expertd.\n\nCommands:\n",
            PROGRAM);
    for (size_t i = 0; ep_cli_command_at(i) != NULL; i++) {
        fprintf(out, "  %-10s %s\n", ep_cli_command_at(i)->name, ep_cli_command_at(i)->help);
    }
    fprintf(out, "  %-10s %s\n\n", "help",
            "this text, or all about a command: expertctl help generate");
    fputs("The service is reached at --coordinator URL, at --node URL (once or more\n"
          "often), else at " EP_CLI_COORDINATOR_DEFAULT ".\n" EP_CLI_SETTINGS_HELP "\n\n",
          out);
    fprintf(out, "Examples:\n"
                 "  expertctl status\n"
                 "  expertctl table --model demo --layer 0 -o json\n"
                 "  expertctl forward --model demo --layer 0 --random 4\n"
                 "  expertctl generate --checkpoint deploy/demo-model/checkpoint --model demo \\\n"
                 "      --prompt \"The file \" --bytes 100\n\n" EP_CLI_EXIT_HELP "\n");
}

static int unknown_command(const char *name)
{
    fprintf(stderr, "%s: there is no command '%s', allowed:", PROGRAM, name);
    for (size_t i = 0; ep_cli_command_at(i) != NULL; i++) {
        fprintf(stderr, " %s", ep_cli_command_at(i)->name);
    }
    fprintf(stderr, " help\n");
    return EP_CLI_EXIT_USAGE;
}

static int help(int argc, char **argv)
{
    char name[NAME_BYTES];
    if (argc == 0) {
        print_help(stdout);
        return EP_CLI_EXIT_OK;
    }
    const ep_cli_command *command = ep_cli_command_find(argv[0]);
    if (command == NULL) {
        return unknown_command(argv[0]);
    }
    snprintf(name, sizeof(name), "%s %s", PROGRAM, command->name);
    argp_help(command->argp, stdout, ARGP_HELP_STD_HELP & ~(unsigned)ARGP_HELP_EXIT_OK, name);
    return EP_CLI_EXIT_OK;
}

static int run(int argc, char **argv)
{
    static char name[NAME_BYTES];
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
    if (strcmp(word, "--help-man") == 0) { /* for the build */
        return ep_cli_print_man(stdout) ? EP_CLI_EXIT_OK : EP_CLI_EXIT_FAILED;
    }
    const ep_cli_command *command = ep_cli_command_find(word);
    if (command == NULL) {
        return unknown_command(word);
    }
    ep_error error;
    if (ep_stream_lane_read_environment(&error) != EP_OK ||
        ep_cpu_features_check(&error) != EP_OK) {
        fprintf(stderr, "%s: %s\n", PROGRAM, error.text);
        return EP_CLI_EXIT_USAGE;
    }
    snprintf(name, sizeof(name), "%s %s", PROGRAM, command->name);
    argv[1] = name;
    return ep_cli_command_run(command, argc - 1, argv + 1);
}

int main(int argc, char **argv)
{
    argp_err_exit_status = EP_CLI_EXIT_USAGE;
    signal(SIGPIPE, SIG_IGN); /* a closed stdout is an error we report */
    int code = run(argc, argv);
    ep_transport_fini();
    if (fflush(stdout) != 0 || ferror(stdout)) {
        fprintf(stderr, "%s: cannot write to standard output: %s\n", PROGRAM, strerror(errno));
        return code != EP_CLI_EXIT_OK ? code : EP_CLI_EXIT_FAILED;
    }
    return code;
}
