/* SPDX-License-Identifier: Apache-2.0 */
/* Completion scripts for bash, zsh and fish. They contain everything except names that users give
 * (contexts), for which they call the program. */
#include <string.h>

#include "usage/usage.h"

#define WORDS_BYTES 256

typedef struct writer {
    FILE *out;
    const ep_usage *usage;
    const ep_usage_command *command; /* NULL: the program itself */
} writer;

/* "a|b" as "a b". */
static void put_words(const char *choice, FILE *out)
{
    for (; *choice != 0; choice++) {
        fputc(*choice == '|' ? ' ' : *choice, out);
    }
}

/* A function's name: letters, digits, underscores. */
static void put_name(const char *text, FILE *out)
{
    for (; *text != 0; text++) {
        fputc(*text == '-' ? '_' : *text, out);
    }
}

static void put_function(const ep_usage *usage, FILE *out)
{
    fputc('_', out);
    put_name(usage->program, out);
}

/* For '...' of a shell: no quote, no backslash, one line. zsh interprets ':' and brackets, too. */
static void put_quoted(const char *text, bool for_zsh, FILE *out)
{
    for (; *text != 0; text++) {
        if (*text == '\'') {
            fputs("\xe2\x80\x99", out); /* a typographic apostrophe */
        } else if (*text == '\n') {
            fputc(' ', out);
        } else if (*text == '\\') {
            fputc('/', out);
        } else if (for_zsh && strchr("[]:", *text) != NULL) {
            fprintf(out, "\\%c", *text);
        } else {
            fputc(*text, out);
        }
    }
}

/* 'trace record' as a quoted pattern of `case`. */
static void put_case(const ep_usage_command *command, FILE *out)
{
    fprintf(out, "'%s%s%s'", command->parent != NULL ? command->parent : "",
            command->parent != NULL ? " " : "", command->name);
}

/* `case` over the verb and the word after it; `then` runs where they are a verb of two words. */
static void put_two_words(const ep_usage *usage, const char *next, const char *then, FILE *out)
{
    bool is_first = true;
    for (size_t i = 0; i < usage->commands_count; i++) {
        if (usage->commands[i].parent == NULL) {
            continue;
        }
        if (is_first) {
            fprintf(out, "    case \"$verb %s\" in\n    ", next);
        } else {
            fputc('|', out);
        }
        put_case(&usage->commands[i], out);
        is_first = false;
    }
    if (!is_first) {
        fprintf(out, ") %s ;;\n    esac\n", then);
    }
}

static bool has_flag(const struct argp_option *option)
{
    return option->name != NULL || ep_usage_letter(option) != 0;
}

/* ---- bash ---- */

static void bash_flag(void *arg, const struct argp_option *option)
{
    writer *w = arg;
    if (option->name != NULL) {
        fprintf(w->out, "--%s ", option->name);
    }
    if (ep_usage_letter(option) != 0) {
        fprintf(w->out, "-%c ", ep_usage_letter(option));
    }
}

static void bash_pattern(const struct argp_option *option, FILE *out)
{
    char letter = ep_usage_letter(option);
    fprintf(out, "        ");
    if (option->name != NULL) {
        fprintf(out, "--%s", option->name);
    }
    if (letter != 0) {
        fprintf(out, "%s-%c", option->name != NULL ? "|" : "", letter);
    }
    fputs(") ", out);
}

static void bash_value(void *arg, const struct argp_option *option)
{
    writer *w = arg;
    ep_usage_value kind = ep_usage_value_of(option);
    if (kind == EP_USAGE_NO_VALUE || !has_flag(option)) {
        return;
    }
    /* An optional value is accepted only after '='. */
    bool is_optional = (option->flags & OPTION_ARG_OPTIONAL) != 0;
    bash_pattern(option, w->out);
    if (is_optional) {
        fputs("[ \"$assigned\" = no ] || ", w->out);
    }
    if (kind == EP_USAGE_WORDS) {
        fputs("{ values='", w->out);
        put_words(option->arg, w->out);
        fputs("'; takes=words; } ;;\n", w->out);
    } else if (kind == EP_USAGE_LISTED) {
        fprintf(w->out, "{ values=$(%s); takes=words; } ;;\n", w->usage->list_command);
    } else {
        fprintf(w->out, "takes=%s ;;\n", kind == EP_USAGE_FILE ? "file" : "text");
    }
}

static void bash_table(writer *w, const struct argp *argp)
{
    char words[WORDS_BYTES] = "";
    if (argp == NULL) {
        return;
    }
    ep_usage_first_words(argp, words, sizeof(words));
    if (ep_usage_first_is_listed(argp)) {
        fprintf(w->out, "        words=$(%s)\n        flags='", w->usage->list_command);
    } else {
        fprintf(w->out, "        words='%s'\n        flags='", words);
    }
    ep_usage_walk(argp, bash_flag, w);
    fputs("'\n        case $prev in\n", w->out);
    ep_usage_walk(argp, bash_value, w);
    fputs("        esac\n", w->out);
}

static void bash(const ep_usage *usage, FILE *out)
{
    writer w = {.out = out, .usage = usage};
    put_function(usage, out);
    fputs("() {\n"
          "    local cur=${COMP_WORDS[COMP_CWORD]} prev= verb= words= flags= values= takes= "
          "assigned=no\n"
          "    [ \"$COMP_CWORD\" -lt 1 ] || prev=${COMP_WORDS[COMP_CWORD-1]}\n"
          "    # Bash splits --flag=value at the '='.\n"
          "    if [ \"$cur\" = = ]; then\n"
          "        cur= assigned=yes\n"
          "    elif [ \"$prev\" = = ]; then\n"
          "        prev=${COMP_WORDS[COMP_CWORD-2]} assigned=yes\n"
          "    fi\n"
          "    COMPREPLY=()\n",
          out);
    if (usage->commands_count > 0) {
        fputs("    if [ \"$COMP_CWORD\" -le 1 ]; then\n        COMPREPLY=($(compgen -W '", out);
        for (size_t i = 0; i < usage->commands_count; i++) {
            if (usage->commands[i].parent == NULL) {
                fprintf(out, "%s ", usage->commands[i].name);
            }
        }
        fputs(
            "--help --version' -- \"$cur\"))\n        return\n    fi\n    verb=${COMP_WORDS[1]}\n",
            out);
        put_two_words(usage, "${COMP_WORDS[2]}",
                      "[ \"$COMP_CWORD\" -le 2 ] || verb=\"$verb ${COMP_WORDS[2]}\"", out);
    }
    fputs("    case $verb in\n", out);
    if (usage->commands_count == 0) {
        fputs("    '')\n", out);
        bash_table(&w, usage->argp);
        fputs("        ;;\n", out);
    }
    for (size_t i = 0; i < usage->commands_count; i++) {
        fputs("    ", out);
        put_case(&usage->commands[i], out);
        fputs(")\n", out);
        bash_table(&w, usage->commands[i].argp);
        fputs("        ;;\n", out);
    }
    fputs("    esac\n"
          "    case $takes in\n"
          "    words) COMPREPLY=($(compgen -W \"$values\" -- \"$cur\")) ;;\n"
          "    file) compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -f -- \"$cur\")) ;;\n"
          "    text) ;;\n"
          "    *)\n"
          "        if [ \"${cur#-}\" != \"$cur\" ] || [ -z \"$words\" ]; then\n"
          "            COMPREPLY=($(compgen -W \"$flags\" -- \"$cur\"))\n"
          "        else\n"
          "            COMPREPLY=($(compgen -W \"$words\" -- \"$cur\"))\n"
          "        fi\n"
          "        ;;\n"
          "    esac\n"
          "}\n"
          "complete -F ",
          out);
    put_function(usage, out);
    fprintf(out, " %s\n", usage->program);
}

/* ---- zsh ---- */

static void zsh_spec(writer *w, const struct argp_option *option, const char *dashes,
                     const char *name, bool is_long)
{
    FILE *out = w->out;
    ep_usage_value kind = ep_usage_value_of(option);
    bool is_optional = (option->flags & OPTION_ARG_OPTIONAL) != 0;
    fprintf(out, " \\\n        '*%s%s%s[", dashes, name,
            kind == EP_USAGE_NO_VALUE ? ""
            : is_long                 ? (is_optional ? "=-" : "=")
                                      : "+");
    put_quoted(option->doc != NULL ? option->doc : "", true, out);
    fputc(']', out);
    if (kind != EP_USAGE_NO_VALUE) {
        fputs(is_optional ? "::" : ":", out);
        put_quoted(kind == EP_USAGE_WORDS ? "value" : option->arg, true, out);
        fputc(':', out);
        if (kind == EP_USAGE_WORDS) {
            fputc('(', out);
            put_words(option->arg, out);
            fputc(')', out);
        } else if (kind == EP_USAGE_FILE) {
            fputs("_files", out);
        } else if (kind == EP_USAGE_LISTED) {
            fprintf(out, "{compadd -- ${(f)\"$(%s)\"}}", w->usage->list_command);
        }
    }
    fputc('\'', out);
}

static void zsh_option(void *arg, const struct argp_option *option)
{
    writer *w = arg;
    char letter[2] = {ep_usage_letter(option), 0};
    if (option->name != NULL) {
        zsh_spec(w, option, "--", option->name, true);
    }
    if (letter[0] != 0 && letter[0] != '?') {
        zsh_spec(w, option, "-", letter, false);
    }
}

static void zsh_table(writer *w, const struct argp *argp)
{
    char words[WORDS_BYTES] = "";
    if (argp == NULL) {
        return;
    }
    ep_usage_first_words(argp, words, sizeof(words));
    fputs("        _arguments", w->out);
    ep_usage_walk(argp, zsh_option, w);
    if (words[0] != 0) {
        fprintf(w->out, " \\\n        '1:word:(%s)'", words);
    } else if (ep_usage_first_is_listed(argp)) {
        fprintf(w->out, " \\\n        '1:word:{compadd -- ${(f)\"$(%s)\"}}'",
                w->usage->list_command);
    }
    fputc('\n', w->out);
}

static void zsh(const ep_usage *usage, FILE *out)
{
    writer w = {.out = out, .usage = usage};
    fprintf(out, "#compdef %s\n", usage->program);
    put_function(usage, out);
    fputs("() {\n", out);
    if (usage->commands_count == 0) {
        zsh_table(&w, usage->argp);
    } else {
        fputs("    local -a commands\n    commands=(\n", out);
        for (size_t i = 0; i < usage->commands_count; i++) {
            if (usage->commands[i].parent != NULL) {
                continue;
            }
            fprintf(out, "        '%s:", usage->commands[i].name);
            put_quoted(usage->commands[i].help, false, out);
            fputs("'\n", out);
        }
        fputs("    )\n    if (( CURRENT == 2 )); then\n        _describe -t commands command "
              "commands\n        return\n    fi\n"
              "    local verb=$words[2]\n    shift words\n    (( CURRENT-- ))\n",
              out);
        put_two_words(
            usage, "$words[2]",
            "(( CURRENT > 2 )) && { verb=\"$verb $words[2]\"; shift words; (( CURRENT-- )) }", out);
        fputs("    case $verb in\n", out);
        for (size_t i = 0; i < usage->commands_count; i++) {
            fputs("    ", out);
            put_case(&usage->commands[i], out);
            fputs(")\n", out);
            zsh_table(&w, usage->commands[i].argp);
            fputs("        ;;\n", out);
        }
        fputs("    esac\n", out);
    }
    fputs("}\n", out);
    put_function(usage, out);
    fputs(" \"$@\"\n", out);
}

/* ---- fish ---- */

static void fish_begin(writer *w)
{
    fprintf(w->out, "complete -c %s", w->usage->program);
    if (w->command != NULL && w->command->parent != NULL) {
        fprintf(w->out, " -n '__fish_seen_subcommand_from %s; and __fish_seen_subcommand_from %s'",
                w->command->parent, w->command->name);
    } else if (w->command != NULL) {
        fprintf(w->out, " -n '__fish_seen_subcommand_from %s'", w->command->name);
    }
}

static void fish_option(void *arg, const struct argp_option *option)
{
    writer *w = arg;
    char letter = ep_usage_letter(option);
    ep_usage_value kind = ep_usage_value_of(option);
    if (!has_flag(option)) {
        return;
    }
    fish_begin(w);
    if (option->name != NULL) {
        fprintf(w->out, " -l %s", option->name);
    }
    if (letter != 0 && letter != '?') {
        fprintf(w->out, " -s %c", letter);
    }
    bool is_optional = (option->flags & OPTION_ARG_OPTIONAL) != 0;
    if (kind == EP_USAGE_FILE) {
        fputs(is_optional ? " -F" : " -r -F", w->out);
    } else if (kind != EP_USAGE_NO_VALUE && !is_optional) {
        fputs(" -x", w->out);
    }
    if (kind == EP_USAGE_WORDS) {
        fputs(" -a '", w->out);
        put_words(option->arg, w->out);
        fputc('\'', w->out);
    } else if (kind == EP_USAGE_LISTED) {
        fprintf(w->out, " -a '(%s)'", w->usage->list_command);
    }
    fputs(" -d '", w->out);
    put_quoted(option->doc != NULL ? option->doc : "", false, w->out);
    fputs("'\n", w->out);
}

static void fish_table(writer *w, const struct argp *argp)
{
    char words[WORDS_BYTES] = "";
    if (argp == NULL) {
        return;
    }
    ep_usage_first_words(argp, words, sizeof(words));
    if (words[0] != 0) {
        fish_begin(w);
        fprintf(w->out, " -a '%s'\n", words);
    } else if (ep_usage_first_is_listed(argp)) {
        fish_begin(w);
        fprintf(w->out, " -a '(%s)'\n", w->usage->list_command);
    }
    ep_usage_walk(argp, fish_option, w);
}

static void fish(const ep_usage *usage, FILE *out)
{
    writer w = {.out = out, .usage = usage};
    fprintf(out, "complete -c %s -f\n", usage->program);
    if (usage->commands_count == 0) {
        fish_table(&w, usage->argp);
    }
    for (size_t i = 0; i < usage->commands_count; i++) {
        if (usage->commands[i].parent != NULL) {
            continue;
        }
        fprintf(out, "complete -c %s -n __fish_use_subcommand -a %s -d '", usage->program,
                usage->commands[i].name);
        put_quoted(usage->commands[i].help, false, out);
        fputs("'\n", out);
    }
    for (size_t i = 0; i < usage->commands_count; i++) {
        w.command = &usage->commands[i];
        fish_table(&w, w.command->argp);
    }
}

bool ep_usage_print_completion(const ep_usage *usage, const char *shell, FILE *out)
{
    static const struct {
        const char *name;
        void (*print)(const ep_usage *usage, FILE *out);
    } shells[] = {{"bash", bash}, {"zsh", zsh}, {"fish", fish}};
    for (size_t i = 0; i < sizeof(shells) / sizeof(shells[0]); i++) {
        if (strcmp(shell, shells[i].name) == 0) {
            /* zsh requires its own first line at the top. */
            if (shells[i].print != zsh) {
                fputs("# SPDX-License-Identifier: Apache-2.0\n# Generated from the program's "
                      "option tables.\n",
                      out);
            }
            shells[i].print(usage, out);
            return true;
        }
    }
    return false;
}
