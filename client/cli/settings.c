/* SPDX-License-Identifier: Apache-2.0 */
/* Variables and contexts as flags. */
#include "settings.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "context_file.h"
#include "options/options.h"
#include "origin.h"
#include "output.h"
#include "transport/address.h"

#define PREFIX "EXPERTCTL_"
#define SET_MAX (sizeof(origins->flags) / sizeof(origins->flags[0]))
#define NAME_BYTES 64
#define VARIABLE_BYTES (NAME_BYTES + sizeof(PREFIX))
#define SAID_BYTES 512

static ep_cli_origins *const origins = &ep_cli_origins_noted;

/* ---- adding flags ---- */

static bool add_flag(const struct argp_option *row, const char *value, size_t bytes,
                     const char *name, ep_error *out_error)
{
    if (origins->count == SET_MAX) {
        ep_error_set(out_error, EP_ERR_BAD_CONFIG, "%s has too many values, allowed: %zu together",
                     name, SET_MAX);
        return false;
    }
    char **flag = &origins->flags[origins->count].flag;
    int made = value != NULL ? asprintf(flag, "--%s=%.*s", row->name, (int)bytes, value)
                             : asprintf(flag, "--%s", row->name);
    origins->flags[origins->count].name = made >= 0 ? strdup(name) : NULL;
    if (origins->flags[origins->count].name == NULL) {
        ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for options");
        return false;
    }
    origins->count++;
    return true;
}

/* Adds flags for a text: "true" or "false" for a flag without a value; one flag per part if it may
 * be repeated. */
static bool set_row(const struct argp_option *row, const char *text, const char *name,
                    ep_error *out_error)
{
    const bool is_list = ep_cli_may_be_repeated(row);
    if (row->arg == NULL) {
        const bool is_true = strcmp(text, "true") == 0;
        if (!is_true && strcmp(text, "false") != 0) {
            ep_error_set(out_error, EP_ERR_BAD_CONFIG, "%s is '%.80s', allowed: true, false", name,
                         text);
            return false;
        }
        return !is_true || add_flag(row, NULL, 0, name, out_error);
    }
    for (;;) {
        const size_t bytes = is_list ? strcspn(text, ",") : strlen(text);
        if (!add_flag(row, text, bytes, name, out_error)) {
            return false;
        }
        if (text[bytes] == '\0') {
            return true;
        }
        text += bytes + 1;
    }
}

/* ---- the levels below the command line ---- */

typedef struct levels {
    ep_cli_given all; /* all flags of all commands */
    ep_options *variables;
    ep_cli_contexts *contexts; /* NULL: no context is in use */
    size_t context;
} levels;

/* Makes a table of options of all long flags, so that variables are read as the daemons' are. */
static ep_err read_variables(const char *program, const ep_cli_command *const *commands, levels *l,
                             ep_error *out_error)
{
    static ep_option table[EP_CLI_ROWS_MAX];
    static char keys[EP_CLI_ROWS_MAX][NAME_BYTES];
    static ep_options_spec spec = {.program = "expertctl", .env_prefix = PREFIX, .options = table};
    for (; *commands != NULL; commands++) {
        const ep_cli_command *const *verb = (*commands)->verbs;
        ep_cli_given_add(&l->all, ep_cli_command_argp(*commands));
        for (; verb != NULL && *verb != NULL; verb++) {
            ep_cli_given_add(&l->all, ep_cli_command_argp(*verb));
        }
    }
    for (size_t i = 0; i < l->all.count; i++) {
        ep_cli_key_of(l->all.rows[i]->name, keys[i], NAME_BYTES);
        table[i] =
            (ep_option){.name = keys[i], .type = EP_OPTION_STRING, .max = EP_CLI_VALUE_BYTES_MAX};
    }
    spec.options_count = l->all.count;
    ep_err err = ep_options_load(&spec, 0, NULL, environ, &l->variables, out_error);
    for (size_t i = 0; err == EP_OK && ep_options_warning(l->variables, i) != NULL; i++) {
        ep_cli_line(stderr, "%s: warning: %s", program, ep_options_warning(l->variables, i));
    }
    return err;
}

/* The row's variable and its text; "": not set, or its flag has another kind of values. */
static const char *variable_of(const levels *l, const struct argp_option *row,
                               char out_name[VARIABLE_BYTES])
{
    const char *kind = ep_cli_given_row(&l->all, row->name)->arg;
    char key[NAME_BYTES];
    ep_cli_key_of(row->name, key, sizeof(key));
    snprintf(out_name, VARIABLE_BYTES, PREFIX "%s", key);
    for (char *p = out_name; *p != '\0'; p++) {
        *p = (char)toupper((unsigned char)*p);
    }
    bool is_same_kind =
        kind == row->arg || (kind != NULL && row->arg != NULL && strcmp(kind, row->arg) == 0);
    return is_same_kind ? ep_options_text(l->variables, key) : "";
}

/* Finds the context: by --context, its variable, or the file; only for commands with that flag. */
static ep_err read_context(levels *l, const ep_cli_given *given, ep_error *out_error)
{
    char variable[VARIABLE_BYTES];
    const size_t row = ep_cli_given_find(given, "context");
    if (row == given->count) {
        return EP_OK;
    }
    const char *where = "--context";
    const char *name = given->texts[row];
    if (name == NULL) {
        where = variable;
        name = variable_of(l, given->rows[row], variable);
    }
    if (strcmp(name, EP_CLI_CONTEXT_NONE) == 0) {
        return EP_OK;
    }
    ep_err err = ep_cli_contexts_open(false, &l->contexts, out_error);
    if (err == EP_OK && name[0] == '\0' && given->texts[row] == NULL) {
        where = "current";
        name = ep_cli_contexts_current(l->contexts);
    }
    if (err == EP_OK && (name[0] != '\0' || given->texts[row] != NULL)) {
        err = ep_cli_contexts_find(l->contexts, name, &l->context, out_error);
        if (err == EP_OK) {
            snprintf(origins->context, sizeof(origins->context), "%s", name);
        } else {
            ep_error_prefix(out_error, err, "%s", where);
        }
        return err;
    }
    ep_cli_contexts_close(l->contexts);
    l->contexts = NULL;
    return err;
}

static bool is_of_contexts(const struct argp_option *row)
{
    return ep_cli_given_row(ep_cli_context_rows(), row->name) != NULL;
}

static void note_other(const struct argp_option *row, const char *dashes, const char *name)
{
    size_t used = strlen(origins->others);
    if (is_of_contexts(row) && strcmp(row->name, "timeout") != 0) {
        snprintf(origins->others + used, sizeof(origins->others) - used, "%s%s%s",
                 used > 0 ? ", " : "", dashes, name);
    }
}

static const char *const address_flags[] = {"coordinator", "node", "admin"};

/* The text of a flag or its variable; "": none. */
static const char *said_above(const levels *l, const ep_cli_given *given, const char *flag)
{
    char name[VARIABLE_BYTES];
    const struct argp_option *row = ep_cli_given_row(given, flag);
    const char *text = ep_cli_given_text(given, flag);
    return text != NULL ? text : row != NULL ? variable_of(l, row, name) : "";
}

/* Whether TLS peers are checked with the context's CA. */
static bool context_judges(const levels *l, const ep_cli_given *given)
{
    return said_above(l, given, "tls-ca")[0] == '\0' &&
           ep_cli_contexts_value(l->contexts, l->context, "tls-ca", NULL)[0] != '\0';
}

/* Whether each of these addresses, separated by commas, is the context's or is checked with its
 * CA. */
static bool is_of_context(const levels *l, const char *urls, bool judges)
{
    for (size_t bytes; bytes = strcspn(urls, ","), bytes > 0;
         urls += bytes + (urls[bytes] == ',')) {
        bool is_named = judges && ep_url_has_scheme(urls, "tls+tcp");
        for (size_t f = 0; f < sizeof(address_flags) / sizeof(address_flags[0]); f++) {
            const char *own =
                ep_cli_contexts_value(l->contexts, l->context, address_flags[f], NULL);
            for (size_t length; length = strcspn(own, ","), length > 0;
                 own += length + (own[length] == ',')) {
                is_named = is_named || (length == bytes && strncmp(own, urls, bytes) == 0);
            }
        }
        if (!is_named) {
            return false;
        }
    }
    return true;
}

/* An address of a flag or variable that is not the context's; NULL: there is none. */
static const char *stranger_of(const levels *l, const ep_cli_given *given)
{
    for (size_t f = 0; f < sizeof(address_flags) / sizeof(address_flags[0]); f++) {
        const char *text = said_above(l, given, address_flags[f]);
        if (!is_of_context(l, text, context_judges(l, given))) {
            return text;
        }
    }
    return NULL;
}

/* Whether a context's token is not to be used, since it may be sent only to the context's
 * addresses. */
static bool keeps_token(const levels *l, const ep_cli_given *given, const struct argp_option *row)
{
    static bool is_said;
    const bool is_token =
        strcmp(row->name, "token-file") == 0 || strcmp(row->name, "admin-token-file") == 0;
    const char *stranger = is_token ? stranger_of(l, given) : NULL;
    if (stranger != NULL && !is_said) {
        is_said = true;
        ep_cli_line(stderr,
                    "expertctl: warning: context %s does not name %.80s: its token is not shown "
                    "there; --%s FILE shows one",
                    origins->context, stranger, row->name);
    }
    return stranger != NULL;
}

static bool set_from_context(const levels *l, const ep_cli_given *given,
                             const struct argp_option *row, ep_error *out_error)
{
    const char *origin;
    char name[SAID_BYTES];
    if (l->contexts == NULL || !is_of_contexts(row)) {
        return true;
    }
    const char *text = ep_cli_contexts_value(l->contexts, l->context, row->name, &origin);
    snprintf(name, sizeof(name), "%s of context %s (%s)", row->name, origins->context, origin);
    return text[0] == '\0' || keeps_token(l, given, row) || set_row(row, text, name, out_error);
}

/* coordinator and node exclude each other: if one is set, the other is not taken from a lower
 * level. */
static const struct argp_option *rival_of(const ep_cli_given *given, const struct argp_option *row)
{
    const char *rival = strcmp(row->name, "node") == 0          ? "coordinator"
                        : strcmp(row->name, "coordinator") == 0 ? "node"
                                                                : row->name;
    const struct argp_option *found = ep_cli_given_row(given, rival);
    return found != NULL ? found : row;
}

static bool set_flags_of(levels *l, const ep_cli_given *given, ep_error *out_error)
{
    bool good = true;
    for (size_t i = 0; good && i < given->count; i++) {
        const struct argp_option *row = given->rows[i];
        const struct argp_option *rival = rival_of(given, row);
        char name[VARIABLE_BYTES];
        if (given->texts[i] != NULL) {
            origins->given[origins->given_count++] = row->name;
            note_other(row, "--", row->name);
        } else if (ep_cli_given_text(given, rival->name) != NULL) {
            continue;
        } else if (variable_of(l, row, name)[0] != '\0') {
            note_other(row, "", name);
            good = set_row(row, variable_of(l, row, name), name, out_error);
        } else if (variable_of(l, rival, name)[0] == '\0') {
            good = set_from_context(l, given, row, out_error);
        }
    }
    return good;
}

/* Help is shown whatever else is set. What follows "--" is another program's. */
static bool asks_for_help(int argc, char **argv)
{
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "--usage") == 0 ||
            strcmp(argv[i], "-?") == 0) {
            return true;
        }
    }
    return false;
}

bool ep_cli_settings_apply(const ep_cli_command *const *commands, const struct argp *argp,
                           int *argc, char ***argv)
{
    static levels l;
    ep_cli_given given;
    ep_error error;
    if (asks_for_help(*argc, *argv)) {
        return true;
    }
    bool good = ep_cli_given_read(argp, *argc, *argv, &given);
    char **grown = NULL;
    if (!good) {
        ep_error_set(&error, EP_ERR_NO_MEMORY, "no memory for options");
    }
    good = good && read_variables((*argv)[0], commands, &l, &error) == EP_OK &&
           read_context(&l, &given, &error) == EP_OK && set_flags_of(&l, &given, &error);
    if (good) {
        grown = calloc((size_t)*argc + origins->count + 1, sizeof(*grown));
        good = grown != NULL;
        if (!good) {
            ep_error_set(&error, EP_ERR_NO_MEMORY, "no memory for options");
        }
    }
    if (good) {
        grown[0] = (*argv)[0];
        for (size_t i = 0; i < origins->count; i++) {
            grown[1 + i] = origins->flags[i].flag;
        }
        memcpy(grown + 1 + origins->count, *argv + 1, ((size_t)*argc - 1) * sizeof(*grown));
        *argc += (int)origins->count;
        *argv = grown;
    } else {
        ep_cli_line(stderr, "%s: %s", (*argv)[0], error.text);
    }
    ep_cli_given_fini(&given);
    ep_options_free(l.variables);
    ep_cli_contexts_close(l.contexts);
    return good;
}
