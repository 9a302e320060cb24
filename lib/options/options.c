/* SPDX-License-Identifier: Apache-2.0 */
/* The option table: load from all sources by precedence, look up, print, compare. */
#include "options/options.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "options/options_internal.h"

#define NAME_BYTES 128
#define WARNINGS_MAX 64

static void add_warning(ep_options *options, const char *text)
{
    if (options->warnings_count < WARNINGS_MAX) {
        char **grown = realloc(options->warnings, (options->warnings_count + 1) * sizeof(*grown));
        char *copy = strdup(text);
        if (grown != NULL) {
            options->warnings = grown;
        }
        if (grown == NULL || copy == NULL) {
            free(copy);
            return;
        }
        options->warnings[options->warnings_count++] = copy;
    }
}

/* Replaces a list by the items of a comma-separated text. */
static ep_err set_list(const ep_option *option, ep_option_value *list, const char *text,
                       ep_value_source source, ep_error *out_error)
{
    char *copy = strdup(text);
    char *rest = copy;
    ep_err err = copy == NULL ? ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for option %s",
                                             option->name)
                              : EP_OK;
    ep_option_value_clear(option, list);
    for (char *item; err == EP_OK && (item = strsep(&rest, ",")) != NULL;) {
        if (item[0] != 0) {
            err = ep_option_list_add_text(option, list, item, source, out_error);
        }
    }
    free(copy);
    list->is_set = true;
    list->kind = source.kind;
    return err != EP_OK ? err : ep_option_list_check_count(option, list, out_error);
}

static ep_err set_text(const ep_option *option, ep_option_value *value, const char *text,
                       ep_value_source source, ep_error *out_error)
{
    if (option->type == EP_OPTION_LIST) {
        return set_list(option, value, text, source, out_error);
    }
    return ep_option_set_scalar(option, option->name, text, source, value, out_error);
}

static ep_err apply_defaults(ep_options *options, ep_error *out_error)
{
    const ep_options_spec *spec = options->spec;
    ep_value_source source = {EP_ORIGIN_DEFAULT, NULL};
    for (size_t i = 0; i < spec->options_count; i++) {
        const ep_option *option = &spec->options[i];
        ep_err err =
            option->default_text == NULL
                ? EP_OK
                : set_text(option, &options->values[i], option->default_text, source, out_error);
        if (err != EP_OK) {
            return err;
        }
    }
    return EP_OK;
}

/* Sets the option that an environment string names; unknown ones with our prefix become
 * warnings. */
static ep_err apply_variable(ep_options *options, const char *variable, ep_error *out_error)
{
    const ep_options_spec *spec = options->spec;
    size_t prefix_bytes = strlen(spec->env_prefix);
    const char *equals = strchr(variable, '=');
    if (equals == NULL || strncmp(variable, spec->env_prefix, prefix_bytes) != 0) {
        return EP_OK;
    }
    char origin[NAME_BYTES + 32];
    char name[NAME_BYTES];
    int name_bytes = (int)(equals - variable);
    snprintf(origin, sizeof(origin), "environment %.*s",
             name_bytes > NAME_BYTES ? NAME_BYTES : name_bytes, variable);
    for (size_t i = 0; i < spec->options_count; i++) {
        ep_option_env_name(spec, &spec->options[i], name, sizeof(name));
        if (strlen(name) == (size_t)name_bytes &&
            strncmp(name, variable, (size_t)name_bytes) == 0) {
            ep_value_source source = {EP_ORIGIN_ENVIRONMENT, origin};
            return set_text(&spec->options[i], &options->values[i], equals + 1, source, out_error);
        }
    }
    bool foreign = false;
    for (const char *const *other = spec->env_foreign; other != NULL && *other != NULL; other++) {
        foreign |= strncmp(variable, *other, strlen(*other)) == 0;
    }
    bool config = strncmp(variable + prefix_bytes, "CONFIG=", strlen("CONFIG=")) == 0;
    if (!foreign && !config) {
        char text[NAME_BYTES * 4];
        char key[NAME_BYTES] = "";
        for (int i = 0; i < name_bytes - (int)prefix_bytes && i < NAME_BYTES - 1; i++) {
            key[i] = (char)tolower((unsigned char)variable[(int)prefix_bytes + i]);
            key[i + 1] = 0;
        }
        const char *nearest = ep_options_nearest(spec->options, spec->options_count, key);
        for (size_t i = 0; nearest != NULL && i < spec->options_count; i++) {
            if (spec->options[i].name == nearest) {
                ep_option_env_name(spec, &spec->options[i], name, sizeof(name));
            }
        }
        snprintf(text, sizeof(text), "%s names no option and is ignored%s%s%s", origin,
                 nearest != NULL ? "; did you mean " : "", nearest != NULL ? name : "",
                 nearest != NULL ? "?" : "");
        add_warning(options, text);
    }
    return EP_OK;
}

static ep_err apply_environment(ep_options *options, char *const *environment, ep_error *out_error)
{
    for (size_t i = 0; environment != NULL && environment[i] != NULL; i++) {
        ep_err err = apply_variable(options, environment[i], out_error);
        if (err != EP_OK) {
            return err;
        }
    }
    return EP_OK;
}

static const char *find_config_variable(const ep_options_spec *spec, char *const *environment)
{
    char name[NAME_BYTES];
    int n = snprintf(name, sizeof(name), "%sCONFIG=", spec->env_prefix);
    for (size_t i = 0; spec->config_file != NULL && environment != NULL && environment[i] != NULL;
         i++) {
        if (strncmp(environment[i], name, (size_t)n) == 0 && environment[i][n] != 0) {
            return environment[i] + n;
        }
    }
    return NULL;
}

static ep_err apply_flags(ep_options *options, const ep_flags *flags, ep_error *out_error)
{
    for (size_t i = 0; i < flags->count; i++) {
        const ep_option *option = &options->spec->options[flags->flags[i].index];
        ep_option_value *value = &options->values[flags->flags[i].index];
        const char *text = flags->flags[i].text != NULL ? flags->flags[i].text : "true";
        char name[NAME_BYTES];
        char origin[NAME_BYTES + 16];
        ep_option_flag_name(option, name, sizeof(name));
        snprintf(origin, sizeof(origin), "flag --%s", name);
        ep_value_source source = {EP_ORIGIN_FLAG, origin};
        ep_err err;
        if (option->type == EP_OPTION_LIST) {
            if (value->kind != EP_ORIGIN_FLAG) {
                /* the first flag replaces the file's list, further flags add to it */
                ep_option_value_clear(option, value);
            }
            err = ep_option_list_add_text(option, value, text, source, out_error);
        } else {
            err = ep_option_set_scalar(option, option->name, text, source, value, out_error);
        }
        if (err != EP_OK) {
            return err;
        }
    }
    return EP_OK;
}

static ep_err load(ep_options *options, const ep_flags *flags, char *const *environment,
                   ep_error *out_error)
{
    const char *path = flags->config_path != NULL
                           ? flags->config_path
                           : find_config_variable(options->spec, environment);
    ep_err err = apply_defaults(options, out_error);
    /* NO_MEMORY; a refused default is a mistake in the table */
    EP_ASSERT(err == EP_OK || err == EP_ERR_NO_MEMORY);
    if (err == EP_OK && path != NULL) {
        options->config_path = strdup(path);
        err = options->config_path == NULL
                  ? ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for options")
                  : ep_options_read_file(options, path, out_error);
    }
    if (err == EP_OK) {
        err = apply_environment(options, environment, out_error);
    }
    return err != EP_OK ? err : apply_flags(options, flags, out_error);
}

ep_err ep_options_load(const ep_options_spec *spec, int argc, char **argv, char *const *environment,
                       ep_options **out_options, ep_error *out_error)
{
    ep_flags flags;
    ep_err err = ep_flags_parse(spec, argc, argv, &flags, out_error);
    if (err != EP_OK) {
        return err;
    }
    ep_options *options = calloc(1, sizeof(*options));
    ep_option_value *values = calloc(spec->options_count, sizeof(*values));
    if (options == NULL || values == NULL) {
        free(options);
        free(values);
        free(flags.flags);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for options");
    }
    *options =
        (ep_options){.spec = spec, .values = values, .action = flags.action, .shell = flags.shell};
    bool needs_values = flags.action == EP_ACTION_RUN || flags.action == EP_ACTION_CHECK ||
                        flags.action == EP_ACTION_CHECK_KEYS || flags.action == EP_ACTION_PRINT;
    err = needs_values ? load(options, &flags, environment, out_error) : EP_OK;
    free(flags.flags);
    if (err != EP_OK) {
        ep_options_free(options);
        return err;
    }
    *out_options = options;
    return EP_OK;
}

void ep_options_free(ep_options *options)
{
    if (options == NULL) {
        return;
    }
    for (size_t i = 0; i < options->spec->options_count; i++) {
        ep_option_value_clear(&options->spec->options[i], &options->values[i]);
    }
    for (size_t i = 0; i < options->warnings_count; i++) {
        free(options->warnings[i]);
    }
    free(options->warnings);
    free(options->values);
    free(options->config_path);
    free(options);
}

static const ep_option_value *get(const ep_options *options, const char *key)
{
    size_t index = ep_options_find(options->spec->options, options->spec->options_count, key);
    EP_ASSERT(index != SIZE_MAX);
    return &options->values[index];
}

bool ep_options_is_set(const ep_options *options, const char *key)
{
    return get(options, key)->is_set;
}

bool ep_options_bool(const ep_options *options, const char *key)
{
    return get(options, key)->number != 0;
}

uint64_t ep_options_number(const ep_options *options, const char *key)
{
    return get(options, key)->number;
}

const char *ep_options_text(const ep_options *options, const char *key)
{
    const char *text = get(options, key)->text;
    return text != NULL ? text : "";
}

size_t ep_options_list_count(const ep_options *options, const char *key)
{
    return get(options, key)->items_count;
}

static const ep_option_value *get_item(const ep_options *options, const char *key, size_t index,
                                       const char *field)
{
    size_t i = ep_options_find(options->spec->options, options->spec->options_count, key);
    EP_ASSERT(i != SIZE_MAX && options->spec->options[i].type == EP_OPTION_LIST);
    const ep_option *option = &options->spec->options[i];
    size_t f = ep_options_find(option->fields, option->fields_count, field);
    EP_ASSERT(f != SIZE_MAX);
    EP_ASSERT(index < options->values[i].items_count);
    return &options->values[i].items[index * option->fields_count + f];
}

const char *ep_options_list_text(const ep_options *options, const char *key, size_t index,
                                 const char *field)
{
    return get_item(options, key, index, field)->text;
}

static const char *origin_of(const ep_option_value *value)
{
    return value->origin != NULL ? value->origin : "default";
}

const char *ep_options_origin(const ep_options *options, const char *key)
{
    return origin_of(get(options, key));
}

const char *ep_options_list_origin(const ep_options *options, const char *key, size_t index,
                                   const char *field)
{
    return origin_of(get_item(options, key, index, field));
}

ep_err ep_options_fail(const ep_options *options, const char *key, ep_error *out_error,
                       const char *format, ...)
{
    char text[EP_ERROR_TEXT_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    return ep_error_set(out_error, EP_ERR_BAD_CONFIG, "%s: %s: %s", ep_options_origin(options, key),
                        key, text);
}

ep_err ep_options_fail_item(const ep_options *options, const char *key, size_t index,
                            const char *field, ep_error *out_error, const char *format, ...)
{
    char text[EP_ERROR_TEXT_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    return ep_error_set(out_error, EP_ERR_BAD_CONFIG, "%s: %s[%zu].%s: %s",
                        ep_options_list_origin(options, key, index, field), key, index, field,
                        text);
}

ep_options_action ep_options_get_action(const ep_options *options)
{
    return options->action;
}

const char *ep_options_warning(const ep_options *options, size_t index)
{
    return index < options->warnings_count ? options->warnings[index] : NULL;
}

void ep_options_print_text(const char *text, FILE *out)
{
    fputc('"', out);
    for (const char *p = text; *p != 0; p++) {
        if (*p == '"' || *p == '\\') {
            fputc('\\', out);
        }
        fputc(*p, out);
    }
    fputc('"', out);
}

/* Prints a scalar as YAML: text in double quotes, numbers and words plain. */
static void print_scalar(const ep_option *option, const ep_option_value *value, FILE *out)
{
    if (option->type == EP_OPTION_STRING || option->type == EP_OPTION_PATH) {
        ep_options_print_text(value->text, out);
    } else {
        fputs(value->text, out);
    }
}

static void print_list(const ep_option *option, const ep_option_value *list, FILE *out)
{
    const char *origin = origin_of(list);
    if (list->items_count == 0) {
        fprintf(out, "%s: []  # %s\n", option->name, origin);
        return;
    }
    fprintf(out, "%s:  # %s\n", option->name, origin);
    for (size_t i = 0; i < list->items_count; i++) {
        for (size_t f = 0; f < option->fields_count; f++) {
            fprintf(out, "%s%s: ", f == 0 ? "  - " : "    ", option->fields[f].name);
            print_scalar(&option->fields[f], &list->items[i * option->fields_count + f], out);
            fputc('\n', out);
        }
    }
}

void ep_options_print(const ep_options *options, FILE *out)
{
    for (size_t i = 0; i < options->spec->options_count; i++) {
        const ep_option *option = &options->spec->options[i];
        const ep_option_value *value = &options->values[i];
        if (!value->is_set) {
            fprintf(out, "# %s:  # not set\n", option->name);
        } else if (option->type == EP_OPTION_LIST) {
            print_list(option, value, out);
        } else {
            fprintf(out, "%s: ", option->name);
            print_scalar(option, value, out);
            fprintf(out, "  # %s\n", origin_of(value));
        }
    }
}

/* Prints "value" or "first=second", and further set fields as " name=value". */
static void print_item(const ep_option *option, const ep_option_value *fields, FILE *out)
{
    for (size_t f = 0; f < option->fields_count; f++) {
        if (!fields[f].is_set) {
            continue;
        }
        if (f > 1) {
            fprintf(out, " %s", option->fields[f].name);
        }
        fprintf(out, "%s%s", f > 0 ? "=" : "", fields[f].text);
    }
}

static void print_value(const ep_option *option, const ep_option_value *value, FILE *out)
{
    if (option->type != EP_OPTION_LIST) {
        fputs(value->text, out);
        return;
    }
    for (size_t i = 0; i < value->items_count; i++) {
        fputs(i > 0 ? "," : "", out);
        print_item(option, &value->items[i * option->fields_count], out);
    }
}

size_t ep_options_count(const ep_options *options)
{
    return options->spec->options_count;
}

ep_err ep_options_entry_read(const ep_options *options, size_t index, ep_options_entry *out_entry)
{
    const ep_option *option = &options->spec->options[index];
    const ep_option_value *value = &options->values[index];
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    if (out == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    if (value->is_set) {
        print_value(option, value, out);
    }
    bool good = ferror(out) == 0;
    good = fclose(out) == 0 && good;
    if (!good) {
        free(text);
        return EP_ERR_NO_MEMORY;
    }
    *out_entry = (ep_options_entry){
        .option = option,
        .value = text,
        .origin = value->is_set ? origin_of(value) : "not set",
    };
    return EP_OK;
}

static bool equal(const ep_option *option, const ep_option_value *a, const ep_option_value *b)
{
    if (a->is_set != b->is_set || a->number != b->number || a->items_count != b->items_count ||
        (a->text == NULL) != (b->text == NULL) ||
        (a->text != NULL && strcmp(a->text, b->text) != 0)) {
        return false;
    }
    for (size_t i = 0; i < a->items_count * option->fields_count; i++) {
        if (!equal(&option->fields[i % option->fields_count], &a->items[i], &b->items[i])) {
            return false;
        }
    }
    return true;
}

void ep_options_diff(const ep_options *before, const ep_options *after,
                     void (*func)(void *arg, const ep_option *option), void *arg)
{
    EP_ASSERT(before->spec == after->spec);
    for (size_t i = 0; i < before->spec->options_count; i++) {
        if (!equal(&before->spec->options[i], &before->values[i], &after->values[i])) {
            func(arg, &before->spec->options[i]);
        }
    }
}
