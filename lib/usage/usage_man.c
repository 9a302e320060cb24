/* SPDX-License-Identifier: Apache-2.0 */
/* Man pages: man(7) macros, groff without warnings. */
#include <ctype.h>
#include <stdarg.h>
#include <string.h>

#include "usage/usage.h"

static void put(char c, FILE *out)
{
    if (c == '\\') {
        fputs("\\e", out);
    } else if (c == '-') {
        fputs("\\-", out);
    } else if (c == '\'') {
        fputs("\\(aq", out);
    } else if (c == '^') {
        fputs("\\(ha", out);
    } else if (c == '~') {
        fputs("\\(ti", out);
    } else {
        fputc(c, out);
    }
}

static void put_text(const char *text, size_t bytes, FILE *out)
{
    if (bytes > 0 && text[0] == '.') {
        fputs("\\&", out); /* otherwise groff takes it for a request */
    }
    for (size_t i = 0; i < bytes; i++) {
        put(text[i], out);
    }
}

void ep_man_put(FILE *out, const char *macros, ...)
{
    bool is_text = false;
    va_list args;
    va_start(args, macros);
    for (const char *part = macros; part != NULL; part = va_arg(args, const char *)) {
        if (is_text) {
            put_text(part, strlen(part), out);
        } else {
            fputs(part, out);
        }
        is_text = !is_text;
    }
    va_end(args);
}

void ep_man_title(const char *name, int section, const char *version, FILE *out)
{
    fputs(".\\\" SPDX-License-Identifier: Apache-2.0\n.\\\" Generated from the program's option "
          "tables.\n.TH ",
          out);
    for (const char *p = name; *p != 0; p++) {
        put((char)toupper((unsigned char)*p), out);
    }
    fprintf(out, " %d \"\" \"expertd %s\" \"expertd\"\n.nh\n.ad l\n", section, version);
}

void ep_man_section(const char *title, FILE *out)
{
    fprintf(out, ".SH %s\n", title);
}

void ep_man_paragraphs(const char *text, size_t bytes, FILE *out)
{
    const char *end = text + bytes;
    bool is_literal = false, is_first = true, wants_break = false;
    while (text < end) {
        size_t line = 0;
        while (text + line < end && text[line] != '\n') {
            line++;
        }
        bool begins_with_space = line > 0 && text[0] == ' ';
        if (line == 0) {
            wants_break = !is_first;
        } else {
            if (is_literal && !begins_with_space) {
                fputs(".fi\n.RE\n", out);
            }
            if (wants_break) {
                fputs(".PP\n", out);
            }
            if (begins_with_space && !is_literal) {
                fputs(".RS 4\n.nf\n", out);
            }
            is_literal = begins_with_space;
            is_first = wants_break = false;
            size_t skip = is_literal ? strspn(text, " ") : 0;
            for (size_t i = 2; i < skip; i++) {
                fputs("\\ ", out);
            }
            put_text(text + skip, line - skip, out);
            fputc('\n', out);
        }
        text += line + (text + line < end);
    }
    if (is_literal) {
        fputs(".fi\n.RE\n", out);
    }
}

static void put_option(void *arg, const struct argp_option *option)
{
    FILE *out = arg;
    char letter = ep_usage_letter(option);
    if (option->name == NULL && letter == 0) {
        if (option->doc != NULL) {
            ep_man_put(out, ".PP\n", option->doc, "\n", NULL);
        }
        return;
    }
    bool is_optional = (option->flags & OPTION_ARG_OPTIONAL) != 0;
    fputs(".TP\n", out);
    if (letter != 0) {
        fputs("\\fB\\-", out);
        put(letter, out);
        fputs(option->name != NULL ? "\\fR, " : "\\fR", out);
    }
    if (option->name != NULL) {
        ep_man_put(out, "\\fB\\-\\-", option->name, "\\fR", NULL);
    }
    if (option->arg != NULL) {
        ep_man_put(out,
                   is_optional            ? "[=\\fI"
                   : option->name != NULL ? "=\\fI"
                                          : " \\fI",
                   option->arg, is_optional ? "\\fR]" : "\\fR", NULL);
    }
    ep_man_put(out, "\n", option->doc != NULL ? option->doc : "", "\n", NULL);
}

/* argp's doc before the options, or after them. */
static void put_doc(const struct argp *argp, bool after, FILE *out)
{
    const char *split = argp->doc != NULL ? strchr(argp->doc, '\v') : NULL;
    if (after && split != NULL) {
        fputs(".PP\n", out);
        ep_man_paragraphs(split + 1, strlen(split + 1), out);
    } else if (!after && argp->doc != NULL) {
        ep_man_paragraphs(argp->doc,
                          split != NULL ? (size_t)(split - argp->doc) : strlen(argp->doc), out);
    }
}

/* "trace record". */
static void put_command(const ep_usage_command *command, FILE *out)
{
    if (command->parent != NULL) {
        ep_man_put(out, "", command->parent, " ", NULL);
    }
    ep_man_put(out, "", command->name, NULL);
}

/* command: NULL for the program itself. */
static void put_synopsis(const ep_usage *usage, const ep_usage_command *command,
                         const struct argp *argp, FILE *out)
{
    const char *line = argp->args_doc != NULL ? argp->args_doc : "";
    do {
        size_t bytes = strcspn(line, "\n");
        ep_man_put(out, ".br\n.B ", usage->program, NULL);
        if (command != NULL) {
            fputc(' ', out);
            put_command(command, out);
        }
        fputs("\n[\\fIOPTION\\fR...]\n", out);
        if (bytes > 0) {
            put_text(line, bytes, out);
            fputc('\n', out);
        }
        line += bytes + (line[bytes] == '\n');
    } while (*line != 0);
}

static void put_commands(const ep_usage *usage, FILE *out)
{
    ep_man_section("COMMANDS", out);
    for (size_t i = 0; i < usage->commands_count; i++) {
        const ep_usage_command *command = &usage->commands[i];
        fputs(".SS ", out);
        put_command(command, out);
        fputc('\n', out);
        if (command->argp == NULL) {
            ep_man_put(out, "", command->help, "\n", NULL);
            continue;
        }
        put_doc(command->argp, false, out);
        ep_usage_walk(command->argp, put_option, out);
        put_doc(command->argp, true, out);
    }
}

void ep_usage_print_man(const ep_usage *usage, FILE *out)
{
    ep_man_title(usage->program, usage->man_section, usage->version, out);
    ep_man_section("NAME", out);
    ep_man_put(out, "", usage->program, " \\- ", usage->summary, "\n", NULL);
    ep_man_section("SYNOPSIS", out);
    if (usage->argp != NULL) {
        put_synopsis(usage, NULL, usage->argp, out);
        ep_man_section("DESCRIPTION", out);
        put_doc(usage->argp, false, out);
        ep_man_section("OPTIONS", out);
        ep_usage_walk(usage->argp, put_option, out);
        put_doc(usage->argp, true, out);
    }
    for (size_t i = 0; i < usage->commands_count; i++) {
        if (usage->commands[i].argp != NULL) {
            put_synopsis(usage, &usage->commands[i], usage->commands[i].argp, out);
        }
    }
    if (usage->commands_count > 0) {
        put_commands(usage, out);
    }
    for (size_t i = 0; i < usage->sections_count; i++) {
        ep_man_section(usage->sections[i].title, out);
        ep_man_paragraphs(usage->sections[i].text, strlen(usage->sections[i].text), out);
    }
}
