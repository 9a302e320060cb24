/* SPDX-License-Identifier: Apache-2.0 */
/* Flags and --help, made from the table; argp parses and lays out. */
#include "options/options_internal.h"

#include <argp.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"

#define KEY_CONFIG 0x200
#define KEY_JSON 0x201
#define KEY_ACTION 0x210 /* plus an ep_options_action */
#define KEY_FIRST 0x300  /* plus the index in the table */

#define NAME_BYTES 64
#define HELP_BYTES 512

/* argp_option only has pointers; the strings made for it are stored here. */
typedef struct built_texts {
    char flag[NAME_BYTES];
    char argument[NAME_BYTES];
    char help[HELP_BYTES];
} built_texts;

typedef struct parse_state {
    const ep_options_spec *spec;
    ep_flags *flags;
    bool no_memory;
} parse_state;

static const struct argp_option general[] = {
    {"config", KEY_CONFIG, "FILE", 0, "Read FILE (YAML; the keys are the flags with underscores)",
     0},
    {"check-config", KEY_ACTION + EP_ACTION_CHECK, "FILE", OPTION_ARG_OPTIONAL,
     "Check the configuration, say what is wrong, and exit with 0 or 1", 0},
    {"check-keys", KEY_ACTION + EP_ACTION_CHECK_KEYS, NULL, 0,
     "The same, but only keys and values: no file that they name is opened", 0},
    {"print-config", KEY_ACTION + EP_ACTION_PRINT, NULL, 0,
     "Print every effective value with its origin, and exit", 0},
    {"print-config-sample", KEY_ACTION + EP_ACTION_SAMPLE, NULL, 0,
     "Print a file with every key explained, and exit", 0},
    {"completion", KEY_ACTION + EP_ACTION_COMPLETION, "bash|zsh|fish", 0,
     "Print shell completion, and exit", 0},
    {"help-man", KEY_ACTION + EP_ACTION_MAN, NULL, OPTION_HIDDEN, "Print the man page of section 8",
     0},
    {"help-man-file", KEY_ACTION + EP_ACTION_MAN_FILE, NULL, OPTION_HIDDEN,
     "Print the man page of section 5", 0},
    {"version", KEY_ACTION + EP_ACTION_VERSION, NULL, 0, "Print the version and exit", 0},
    {"json", KEY_JSON, NULL, 0, "With --version: as JSON", 0},
    {"help", KEY_ACTION + EP_ACTION_HELP, NULL, 0, "Print this help and exit", 0},
};

static void describe(const ep_options_spec *spec, const ep_option *option, built_texts *out)
{
    char allowed[160];
    char env[NAME_BYTES * 2];
    ep_option_describe_allowed(option, allowed, sizeof(allowed));
    ep_option_env_name(spec, option, env, sizeof(env));
    ep_option_flag_name(option, out->flag, sizeof(out->flag));
    const char *kind = option->type == EP_OPTION_INT
                           ? (option->unit != NULL ? option->unit : "NUMBER")
                       : option->type == EP_OPTION_SIZE                               ? "SIZE"
                       : option->type == EP_OPTION_MS || option->type == EP_OPTION_US ? "TIME"
                       : option->type == EP_OPTION_BOOL                               ? "true|false"
                       : option->type == EP_OPTION_ENUM ? option->allowed
                       : option->type == EP_OPTION_PATH ? "PATH"
                                                        : "TEXT";
    if (option->type == EP_OPTION_LIST && option->fields_count > 1) {
        snprintf(out->argument, sizeof(out->argument), "%s=%s", option->fields[0].name,
                 option->fields[1].name);
    } else {
        snprintf(out->argument, sizeof(out->argument), "%s", kind);
    }
    bool show_range = option->type >= EP_OPTION_INT && option->type <= EP_OPTION_US;
    snprintf(out->help, sizeof(out->help), "%s%s. %s%s%s%s%s", option->help,
             option->type == EP_OPTION_LIST ? " (repeat it for more)" : "",
             show_range ? "Allowed: " : "", show_range ? allowed : "", show_range ? ". " : "",
             option->default_text != NULL ? "Default: " : "Not set by default.",
             option->default_text == NULL      ? ""
             : option->default_text[0] == '\0' ? "none"
                                               : option->default_text);
}

/* General flags first. */
ep_err ep_flags_build(const ep_options_spec *spec, struct argp_option **out_options,
                      void **out_texts)
{
    size_t fixed = EP_ARRAY_COUNT(general);
    struct argp_option *options = calloc(fixed + spec->options_count + 1, sizeof(*options));
    built_texts *texts = calloc(spec->options_count, sizeof(*texts));
    if (options == NULL || texts == NULL) {
        free(options);
        free(texts);
        return EP_ERR_NO_MEMORY;
    }
    memcpy(options, general, sizeof(general));
    for (size_t i = 0; i < spec->options_count; i++) {
        const ep_option *option = &spec->options[i];
        describe(spec, option, &texts[i]);
        options[fixed + i] = (struct argp_option){
            .name = texts[i].flag,
            .key = KEY_FIRST + (int)i,
            .arg = texts[i].argument,
            .flags = option->type == EP_OPTION_BOOL ? OPTION_ARG_OPTIONAL : 0,
            .doc = texts[i].help,
            .group = 1,
        };
    }
    *out_options = options;
    *out_texts = texts;
    return EP_OK;
}

static error_t parse_argument(ep_flags *flags, char *argument, struct argp_state *state)
{
    /* For "--check-config FILE": argp accepts an optional argument only after '='. */
    if (flags->action == EP_ACTION_CHECK && flags->config_path == NULL) {
        flags->config_path = argument;
        return 0;
    }
    argp_error(state, "'%s' is not a flag", argument);
    return EINVAL;
}

static error_t parse_one(int key, char *argument, struct argp_state *state)
{
    parse_state *parse = state->input;
    ep_flags *flags = parse->flags;
    if (key == ARGP_KEY_ARG) {
        return parse_argument(flags, argument, state);
    }
    if (key == KEY_CONFIG) {
        flags->config_path = argument;
        return 0;
    }
    if (key == KEY_JSON) {
        flags->json = true;
        return 0;
    }
    if (key >= KEY_ACTION && key <= KEY_ACTION + EP_ACTION_COMPLETION) {
        flags->action = (ep_options_action)(key - KEY_ACTION);
        if (flags->action == EP_ACTION_COMPLETION) {
            flags->shell = argument;
        } else if (argument != NULL) { /* of --check-config */
            flags->config_path = argument;
        }
        return 0;
    }
    if (key < KEY_FIRST || (size_t)(key - KEY_FIRST) >= parse->spec->options_count) {
        return ARGP_ERR_UNKNOWN;
    }
    ep_flag *grown = realloc(flags->flags, (flags->count + 1) * sizeof(*grown));
    if (grown == NULL) {
        parse->no_memory = true;
        return ENOMEM;
    }
    flags->flags = grown;
    flags->flags[flags->count++] = (ep_flag){(size_t)(key - KEY_FIRST), argument};
    return 0;
}

ep_err ep_flags_parse(const ep_options_spec *spec, int argc, char **argv, ep_flags *out_flags,
                      ep_error *out_error)
{
    struct argp_option *options;
    void *texts;
    ep_flags flags = {.action = EP_ACTION_RUN};
    parse_state state = {.spec = spec, .flags = &flags};
    if (argc < 1) {
        *out_flags = flags;
        return EP_OK;
    }
    if (ep_flags_build(spec, &options, &texts) != EP_OK) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory to read the flags");
    }
    struct argp argp = {.options = options, .parser = parse_one, .doc = spec->summary};
    error_t result = argp_parse(&argp, argc, argv, ARGP_NO_HELP | ARGP_NO_EXIT, NULL, &state);
    free(options);
    free(texts);
    if (result != 0) {
        free(flags.flags);
        return state.no_memory
                   ? ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory to read the flags")
                   : ep_error_set(out_error, EP_ERR_BAD_CONFIG,
                                  "the command line is wrong (--help lists all flags)");
    }
    if (flags.json && flags.action == EP_ACTION_VERSION) {
        flags.action = EP_ACTION_VERSION_JSON;
    }
    *out_flags = flags;
    return EP_OK;
}

void ep_options_print_help(const ep_options_spec *spec, FILE *out)
{
    struct argp_option *options;
    void *texts;
    char name[NAME_BYTES];
    if (ep_flags_build(spec, &options, &texts) != EP_OK) {
        return;
    }
    struct argp argp = {.options = options, .doc = spec->summary};
    snprintf(name, sizeof(name), "%s", spec->program);
    argp_help(&argp, out, ARGP_HELP_USAGE | ARGP_HELP_LONG | ARGP_HELP_DOC, name);
    fprintf(out,
            "\nEvery flag is also a key of the file (--drain-ms: drain_ms) and an environment\n"
            "variable (%sDRAIN_MS).\n"
            "Precedence: flag, environment, file, default.\n" EP_OPTIONS_UNITS_HELP("\n") "\n",
            spec->env_prefix);
    free(options);
    free(texts);
}
