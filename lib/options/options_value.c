/* SPDX-License-Identifier: Apache-2.0 */
/* From text to a checked value: the one strict parser behind flags, environment and file. */
#include "options/options_internal.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/quantity.h"
#include "base/words.h"

static ep_unit unit_of(const ep_option *option)
{
    return option->type == EP_OPTION_SIZE ? EP_UNIT_BYTES
           : option->type == EP_OPTION_MS ? EP_UNIT_MS
           : option->type == EP_OPTION_US ? EP_UNIT_US
                                          : EP_UNIT_NONE;
}

static uint64_t text_max(const ep_option *option)
{
    return option->max == 0 ? EP_OPTION_TEXT_MAX : option->max;
}

void ep_option_describe_allowed(const ep_option *option, char *out, size_t bytes)
{
    char least[EP_QUANTITY_BYTES], most[EP_QUANTITY_BYTES];
    switch (option->type) {
    case EP_OPTION_BOOL:
        snprintf(out, bytes, "true, false");
        break;
    case EP_OPTION_INT:
    case EP_OPTION_SIZE:
    case EP_OPTION_MS:
    case EP_OPTION_US:
        snprintf(out, bytes, "%s..%s%s%s", ep_quantity_format(option->min, unit_of(option), least),
                 ep_quantity_format(option->max, unit_of(option), most),
                 option->unit != NULL ? " " : "", option->unit != NULL ? option->unit : "");
        break;
    case EP_OPTION_ENUM:
        ep_words_list(option->allowed, out, bytes);
        break;
    case EP_OPTION_STRING:
    case EP_OPTION_PATH:
        snprintf(out, bytes, "%" PRIu64 "..%" PRIu64 " characters", option->min, text_max(option));
        break;
    case EP_OPTION_LIST:
        snprintf(out, bytes, "%" PRIu64 "..%" PRIu64 " items", option->min,
                 option->max == 0 ? EP_OPTIONS_LIST_MAX : option->max);
        break;
    }
}

static ep_err bad_value(const ep_option *option, const char *label, const char *text,
                        ep_value_source source, const char *what, ep_error *out_error)
{
    char allowed[160];
    ep_option_describe_allowed(option, allowed, sizeof(allowed));
    return ep_error_set(out_error, EP_ERR_BAD_CONFIG, "%s: %s: '%.80s' %s; allowed: %s%s",
                        source.origin != NULL ? source.origin : "default", label, text, what,
                        allowed, ep_quantity_hint(unit_of(option)));
}

static const char *parse_quantity(const ep_option *option, const char *text, uint64_t *out_number)
{
    const char *what = ep_quantity_parse(text, unit_of(option), unit_of(option), out_number);
    return what != NULL                                             ? what
           : *out_number < option->min || *out_number > option->max ? "is out of range"
                                                                    : NULL;
}

static const char *parse_enum(const ep_option *option, const char *text, uint64_t *out_number)
{
    uint32_t place;
    if (!ep_words_find(option->allowed, text, &place)) {
        return "is not an allowed word";
    }
    *out_number = place;
    return NULL;
}

/* Reads one UTF-8 character; false when there is none at *text. */
static bool read_character(const unsigned char **text, uint32_t *out_code)
{
    const unsigned char *p = *text;
    int more = *p < 0x80                 ? 0
               : *p >= 0xc2 && *p < 0xe0 ? 1
               : *p >= 0xe0 && *p < 0xf0 ? 2
               : *p >= 0xf0 && *p < 0xf5 ? 3
                                         : -1;
    if (more < 0) {
        return false;
    }
    uint32_t code = more == 0 ? *p : *p & (0x3fu >> more);
    for (int i = 1; i <= more; i++) {
        if ((p[i] & 0xc0) != 0x80) {
            return false;
        }
        code = code << 6 | (p[i] & 0x3f);
    }
    *text = p + more + 1;
    *out_code = code;
    /* rejects encodings that are longer than necessary */
    static const uint32_t least[] = {0, 0x80, 0x800, 0x10000};
    return code >= least[more] && code <= 0x10ffff;
}

/* Accepts what a YAML file can contain unescaped, so that a printed value can be read again. */
static const char *parse_text(const ep_option *option, const char *text)
{
    const unsigned char *p = (const unsigned char *)text;
    while (*p != 0) {
        uint32_t code;
        if (!read_character(&p, &code) || (code >= 0xd800 && code < 0xe000)) {
            return "is not UTF-8";
        }
        if (code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0xfeff || code == 0xfffe ||
            code == 0xffff) {
            return "has a control character";
        }
    }
    size_t bytes = (size_t)(p - (const unsigned char *)text);
    return bytes < option->min || bytes > text_max(option) ? "has a wrong length" : NULL;
}

static const char *parse(const ep_option *option, const char *text, uint64_t *out_number)
{
    switch (option->type) {
    case EP_OPTION_BOOL:
        *out_number = strcmp(text, "true") == 0;
        return *out_number == 0 && strcmp(text, "false") != 0 ? "is not a truth value" : NULL;
    case EP_OPTION_INT:
    case EP_OPTION_SIZE:
    case EP_OPTION_MS:
    case EP_OPTION_US:
        return parse_quantity(option, text, out_number);
    case EP_OPTION_ENUM:
        return parse_enum(option, text, out_number);
    case EP_OPTION_STRING:
    case EP_OPTION_PATH:
        return parse_text(option, text);
    case EP_OPTION_LIST:
        break;
    }
    return "is not a single value";
}

ep_err ep_option_set_scalar(const ep_option *option, const char *label, const char *text,
                            ep_value_source source, ep_option_value *out_value, ep_error *out_error)
{
    uint64_t number = 0;
    const char *what = parse(option, text, &number);
    if (what != NULL) {
        return bad_value(option, label, text, source, what, out_error);
    }
    char quantity[EP_QUANTITY_BYTES];
    char *copy = strdup(unit_of(option) != EP_UNIT_NONE
                            ? ep_quantity_format(number, unit_of(option), quantity)
                            : text);
    char *origin = source.origin != NULL ? strdup(source.origin) : NULL;
    if (copy == NULL || (source.origin != NULL && origin == NULL)) {
        free(copy);
        free(origin);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for option %s", label);
    }
    ep_option_value_clear(option, out_value);
    *out_value = (ep_option_value){
        .is_set = true, .kind = source.kind, .number = number, .text = copy, .origin = origin};
    return EP_OK;
}

ep_err ep_option_list_grow(const ep_option *option, ep_option_value *list, ep_value_source source,
                           ep_option_value **out_item, ep_error *out_error)
{
    if (list->items_count >= (option->max == 0 ? EP_OPTIONS_LIST_MAX : option->max)) {
        return bad_value(option, option->name, "", source, "has too many items", out_error);
    }
    size_t fields = option->fields_count;
    ep_option_value *items =
        realloc(list->items, (list->items_count + 1) * fields * sizeof(*items));
    if (items == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for option %s", option->name);
    }
    memset(items + list->items_count * fields, 0, fields * sizeof(*items));
    list->items = items;
    *out_item = items + list->items_count * fields;
    list->items_count++;
    list->is_set = true;
    list->kind = source.kind;
    if (list->origin == NULL && source.origin != NULL) {
        list->origin = strdup(source.origin);
    }
    return EP_OK;
}

ep_err ep_option_list_complete(const ep_option *option, size_t index, ep_option_value *item,
                               ep_value_source source, ep_error *out_error)
{
    for (size_t f = 0; f < option->fields_count; f++) {
        const ep_option *field = &option->fields[f];
        if (item[f].is_set) {
            continue;
        }
        if (field->default_text == NULL) {
            return ep_error_set(out_error, EP_ERR_BAD_CONFIG, "%s: %s[%zu] has no %s (%s)",
                                source.origin != NULL ? source.origin : "default", option->name,
                                index, field->name, field->help);
        }
        ep_value_source from_default = {EP_ORIGIN_DEFAULT, source.origin};
        ep_err err = ep_option_set_scalar(field, field->name, field->default_text, from_default,
                                          &item[f], out_error);
        if (err != EP_OK) {
            return err;
        }
    }
    return EP_OK;
}

ep_err ep_option_list_add_text(const ep_option *option, ep_option_value *list, const char *text,
                               ep_value_source source, ep_error *out_error)
{
    ep_option_value *item;
    ep_err err = ep_option_list_grow(option, list, source, &item, out_error);
    if (err != EP_OK) {
        return err;
    }
    size_t index = list->items_count - 1;
    if (option->fields_count == 1) {
        return ep_option_set_scalar(&option->fields[0], option->name, text, source, &item[0],
                                    out_error);
    }
    const char *equals = strchr(text, '=');
    if (equals == NULL) {
        return ep_error_set(out_error, EP_ERR_BAD_CONFIG,
                            "%s: %s: '%.80s' has no '='; allowed: %s=%s", source.origin,
                            option->name, text, option->fields[0].name, option->fields[1].name);
    }
    char *first = strndup(text, (size_t)(equals - text));
    if (first == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for option %s", option->name);
    }
    err = ep_option_set_scalar(&option->fields[0], option->fields[0].name, first, source, &item[0],
                               out_error);
    free(first);
    if (err == EP_OK) {
        err = ep_option_set_scalar(&option->fields[1], option->fields[1].name, equals + 1, source,
                                   &item[1], out_error);
    }
    return err != EP_OK ? err : ep_option_list_complete(option, index, item, source, out_error);
}

ep_err ep_option_list_check_count(const ep_option *option, const ep_option_value *list,
                                  ep_error *out_error)
{
    if (list->items_count < option->min) {
        char text[32];
        ep_value_source source = {list->kind, list->origin};
        snprintf(text, sizeof(text), "%zu items", list->items_count);
        return bad_value(option, option->name, text, source, "are too few", out_error);
    }
    return EP_OK;
}

void ep_option_value_clear(const ep_option *option, ep_option_value *value)
{
    for (size_t i = 0; value->items != NULL && i < value->items_count * option->fields_count; i++) {
        ep_option_value_clear(&option->fields[i % option->fields_count], &value->items[i]);
    }
    free(value->items);
    free(value->text);
    free(value->origin);
    *value = (ep_option_value){0};
}
