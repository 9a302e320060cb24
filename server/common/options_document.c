/* SPDX-License-Identifier: Apache-2.0 */
/* Documents for users from the option table: sample file, man pages, completion. */
#include <argp.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "common/program_options.h"
#include "common/version.h"
#include "options/options_internal.h"
#include "usage/usage.h"

#define TEXT_BYTES 256
#define LINE_WIDTH 100

static const char *type_name(ep_option_type type)
{
    static const char *const names[] = {"bool", "number", "size", "time", "time",
                                        "word", "text",   "path", "list"};
    return names[type];
}

static bool is_text(const ep_option *option)
{
    return option->type == EP_OPTION_STRING || option->type == EP_OPTION_PATH;
}

/* "number, 0..3600000 ms". */
static void describe_type(const ep_option *option, char *out, size_t bytes)
{
    char allowed[TEXT_BYTES / 2];
    ep_option_describe_allowed(option, allowed, sizeof(allowed));
    snprintf(out, bytes, "%s, %s", type_name(option->type), allowed);
}

/* Writes the default as YAML; an empty value if there is none. */
static void put_default(const ep_option *option, FILE *out)
{
    if (option->default_text == NULL) {
        return;
    }
    fprintf(out, is_text(option) ? " \"%s\"" : " %s", option->default_text);
}

/* ---- sample file ---- */

/* Writes text as comment lines. */
static void put_comment(const char *text, FILE *out)
{
    size_t column = 0;
    while (*text != 0) {
        size_t word = strcspn(text, " ");
        if (column != 0 && column + 1 + word > LINE_WIDTH) {
            fputc('\n', out);
            column = 0;
        }
        fputs(column == 0 ? "# " : " ", out);
        fwrite(text, 1, word, out);
        column += word + 1;
        text += word;
        text += strspn(text, " ");
    }
    fputc('\n', out);
}

static void put_list(const ep_option *option, FILE *out)
{
    char type[TEXT_BYTES];
    fprintf(out, "#%s:\n", option->name);
    for (size_t f = 0; f < option->fields_count; f++) {
        const ep_option *field = &option->fields[f];
        const char *text = option->fields_count == 1 ? option->default_text : field->default_text;
        describe_type(field, type, sizeof(type));
        fprintf(out, "#  %s %s: \"%s\"  # %s; %s%s\n", f == 0 ? "-" : " ", field->name,
                text != NULL ? text : "", field->help, type,
                field->default_text != NULL ? "; may be left out" : "");
    }
}

void ep_options_print_sample(const ep_options_spec *spec, FILE *out)
{
    fprintf(out,
            "# Configuration of %s. Every key, commented out, with its default.\n"
            "# A flag (--drain-ms) wins over the environment (%sDRAIN_MS), that over this file, "
            "that over the default.\n"
            "#   check it                   %s --config %s --check-config\n"
            "#   see what is in force       %s --config %s --print-config\n"
            "# " EP_OPTIONS_UNITS_HELP("\n# ") "\n"
                                               "# A reload (SIGHUP, systemctl reload) takes over "
                                               "what is marked so; the rest needs a restart.\n",
            spec->program, spec->env_prefix, spec->program, spec->config_file, spec->program,
            spec->config_file);
    for (size_t i = 0; i < spec->options_count; i++) {
        const ep_option *option = &spec->options[i];
        char type[TEXT_BYTES];
        fputc('\n', out);
        put_comment(option->help, out);
        describe_type(option, type, sizeof(type));
        fprintf(out, "# (%s%s%s)\n", type,
                option->default_text == NULL ? "; not set by default" : "",
                option->reloadable ? "; a reload is enough" : "");
        if (option->type == EP_OPTION_LIST) {
            put_list(option, out);
        } else {
            fprintf(out, "#%s:", option->name);
            put_default(option, out);
            fputc('\n', out);
        }
    }
}

/* ---- man pages ---- */

static const ep_usage_section program_sections[] = {
    {"SIGNALS",
     "SIGTERM and SIGINT drain: what has been taken on is finished, for drain_ms at most. A second "
     "one ends the "
     "process at once.\n\n"
     "SIGHUP reads the configuration again. One that is wrong changes nothing; the log says why."},
    {"EXIT STATUS", "0 after a drain, 1 when the program could not start, 128 + the signal's "
                    "number after a second signal."},
    {"ENVIRONMENT",
     "Every key of the file in upper case behind the program's prefix, as listed with the file's "
     "keys. "
     "NOTIFY_SOCKET and WATCHDOG_USEC of the service manager are understood (see sd_notify(3))."},
    {"NOTES", "A flag wins over the environment, that over the file, that over the default. "
              "--print-config shows every value in "
              "force and where it came from."},
};

static bool with_usage(const ep_options_spec *spec, const char *shell, FILE *out)
{
    struct argp_option *options;
    void *texts;
    if (ep_flags_build(spec, &options, &texts) != EP_OK) {
        return false;
    }
    char files[TEXT_BYTES], see[TEXT_BYTES];
    snprintf(files, sizeof(files), "%s, see %s.yaml(5)", spec->config_file, spec->program);
    snprintf(see, sizeof(see),
             "%s.yaml(5), %s(8), expertctl(1), and the manual in /usr/share/doc/expertd/manual",
             spec->program,
             strcmp(spec->program, "expertd") == 0 ? "expertd-coordinator" : "expertd");
    ep_usage_section sections[EP_ARRAY_COUNT(program_sections) + 2];
    memcpy(sections, program_sections, sizeof(program_sections));
    sections[EP_ARRAY_COUNT(program_sections)] = (ep_usage_section){"FILES", files};
    sections[EP_ARRAY_COUNT(program_sections) + 1] = (ep_usage_section){"SEE ALSO", see};
    struct argp argp = {.options = options, .doc = spec->summary};
    ep_usage usage = {
        .program = spec->program,
        .version = ep_version_text(),
        .man_section = 8,
        .summary = spec->summary,
        .argp = &argp,
        .sections = sections,
        .sections_count = EP_ARRAY_COUNT(sections),
    };
    bool good = true;
    if (shell != NULL) {
        good = ep_usage_print_completion(&usage, shell, out);
    } else {
        ep_usage_print_man(&usage, out);
    }
    free(options);
    free(texts);
    return good;
}

void ep_options_print_man(const ep_options_spec *spec, FILE *out)
{
    with_usage(spec, NULL, out);
}

bool ep_options_print_completion(const ep_options_spec *spec, const char *shell, FILE *out)
{
    bool good = with_usage(spec, shell, out);
    if (!good) {
        fprintf(stderr, "%s: --completion is '%s', allowed: " EP_USAGE_SHELLS "\n", spec->program,
                shell);
    }
    return good;
}

static void put_man_field(const ep_option *field, FILE *out)
{
    char type[TEXT_BYTES];
    describe_type(field, type, sizeof(type));
    ep_man_put(out, ".TP\n.B ", field->name, "\n", field->help, " (", type, NULL);
    if (field->default_text != NULL) {
        ep_man_put(out, "; default ", field->default_text, NULL);
    }
    fputs(")\n", out);
}

static void put_man_key(const ep_options_spec *spec, const ep_option *option, FILE *out)
{
    char flag[TEXT_BYTES / 2], env[TEXT_BYTES / 2], type[TEXT_BYTES];
    describe_type(option, type, sizeof(type));
    ep_option_flag_name(option, flag, sizeof(flag));
    ep_option_env_name(spec, option, env, sizeof(env));
    const char *value = option->default_text == NULL   ? "Not set by default"
                        : option->default_text[0] == 0 ? "empty"
                                                       : option->default_text;
    ep_man_put(out, ".TP\n.B ", option->name, "\n", option->help, ".\n.br\n", type,
               option->default_text == NULL ? ". " : ". Default: ", value, ".\nFlag \\-\\-", flag,
               ", environment ", env, NULL);
    fputs(option->reloadable ? ".\nA reload is enough.\n" : ".\n", out);
    if (option->type == EP_OPTION_LIST) {
        fputs(".RS\n", out);
        for (size_t f = 0; f < option->fields_count; f++) {
            put_man_field(&option->fields[f], out);
        }
        fputs(".RE\n", out);
    }
}

void ep_options_print_man_file(const ep_options_spec *spec, FILE *out)
{
    char text[TEXT_BYTES * 4];
    snprintf(text, sizeof(text), "%s.yaml", spec->program);
    ep_man_title(text, 5, ep_version_text(), out);
    ep_man_section("NAME", out);
    ep_man_put(out, "", text, " \\- configuration of ", spec->program, "\n", NULL);
    ep_man_section("DESCRIPTION", out);
    snprintf(text, sizeof(text),
             "YAML: one mapping of the keys below. The packages keep it in %s. An unknown key, a "
             "value out of range and a value of "
             "the wrong type are errors that name file and line. " EP_OPTIONS_UNITS_HELP(
                 " ") "\n\n"
                      "  %s --config %s --check-config\n\n"
                      "says what is wrong. Keys that are not given have their defaults.",
             spec->config_file, spec->program, spec->config_file);
    ep_man_paragraphs(text, strlen(text), out);
    ep_man_section("KEYS", out);
    for (size_t i = 0; i < spec->options_count; i++) {
        put_man_key(spec, &spec->options[i], out);
    }
    ep_man_section("SEE ALSO", out);
    snprintf(text, sizeof(text), "%s(8)", spec->program);
    ep_man_paragraphs(text, strlen(text), out);
}
