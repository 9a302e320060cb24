/* SPDX-License-Identifier: Apache-2.0 */
/* Reads argp's tables. */
#include "usage/usage.h"

#include <ctype.h>
#include <string.h>

static bool is_end(const struct argp_option *option)
{
    return option->name == NULL && option->key == 0 && option->doc == NULL && option->group == 0;
}

static void walk_tables(const struct argp *argp,
                        void (*func)(void *arg, const struct argp_option *option), void *arg)
{
    for (const struct argp_option *o = argp->options; o != NULL && !is_end(o); o++) {
        if ((o->flags & OPTION_HIDDEN) == 0) {
            func(arg, o);
        }
    }
    for (const struct argp_child *c = argp->children; c != NULL && c->argp != NULL; c++) {
        walk_tables(c->argp, func, arg);
    }
}

static void look_for_help(void *arg, const struct argp_option *option)
{
    bool *found = arg;
    *found = *found || (option->name != NULL && strcmp(option->name, "help") == 0);
}

void ep_usage_walk(const struct argp *argp,
                   void (*func)(void *arg, const struct argp_option *option), void *arg)
{
    static const struct argp_option help = {"help", '?', NULL, 0, "Print this help and exit", -1};
    bool found = false;
    walk_tables(argp, look_for_help, &found);
    walk_tables(argp, func, arg);
    if (!found) {
        func(arg, &help); /* argp's own */
    }
}

/* Whether text is words separated by '|', which a reader can type unchanged. */
static bool is_choice(const char *text, size_t bytes)
{
    bool has_bar = false;
    for (size_t i = 0; i < bytes; i++) {
        unsigned char c = (unsigned char)text[i];
        has_bar = has_bar || c == '|';
        if (!islower(c) && !isdigit(c) && strchr("|-_.", c) == NULL) {
            return false;
        }
    }
    return has_bar && text[0] != '|' && text[bytes - 1] != '|';
}

static bool ends_with(const char *text, const char *end)
{
    size_t bytes = strlen(text), end_bytes = strlen(end);
    return bytes >= end_bytes && strcmp(text + bytes - end_bytes, end) == 0;
}

ep_usage_value ep_usage_value_of(const struct argp_option *option)
{
    if (option->arg == NULL) {
        return EP_USAGE_NO_VALUE;
    }
    if (is_choice(option->arg, strlen(option->arg))) {
        return EP_USAGE_WORDS;
    }
    if (strcmp(option->arg, "CONTEXT") == 0) {
        return EP_USAGE_LISTED;
    }
    bool is_file = ends_with(option->arg, "FILE") || ends_with(option->arg, "PATH") ||
                   ends_with(option->arg, "DIR") || ends_with(option->arg, "DIRECTORY");
    return is_file ? EP_USAGE_FILE : EP_USAGE_TEXT;
}

char ep_usage_letter(const struct argp_option *option)
{
    return option->key > ' ' && option->key < 0x7f ? (char)option->key : 0;
}

bool ep_usage_first_is_listed(const struct argp *argp)
{
    return argp->args_doc != NULL &&
           (strcmp(argp->args_doc, "CONTEXT") == 0 || strcmp(argp->args_doc, "[CONTEXT]") == 0);
}

void ep_usage_first_words(const struct argp *argp, char *out, size_t bytes)
{
    size_t used = 0;
    out[0] = 0;
    for (const char *line = argp->args_doc; line != NULL && *line != 0;) {
        size_t word = strcspn(line, " \n");
        bool is_word =
            word > 0 && (islower((unsigned char)line[0]) || isdigit((unsigned char)line[0]));
        for (size_t i = 0; i < word && is_word; i++) {
            is_word = islower((unsigned char)line[i]) || isdigit((unsigned char)line[i]) ||
                      strchr("|-_", line[i]) != NULL;
        }
        for (size_t i = 0; is_word && i <= word && used + 2 < bytes; i++) {
            out[used++] = i == word || line[i] == '|' ? ' ' : line[i];
        }
        line += strcspn(line, "\n");
        line += *line == '\n';
    }
    out[used > 0 ? used - 1 : 0] = 0;
}
