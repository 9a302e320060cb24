/* SPDX-License-Identifier: Apache-2.0 */
/* JSON by descriptors: one switch over field types in each direction. */
#include "message_json.h"

#include <errno.h>
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "output.h"

#define PATH_BYTES 200
#define VALUE_BYTES 80
#define KNOWN_BYTES 400

/* A value's place in the document, for messages. */
typedef struct place {
    char path[PATH_BYTES];
    ep_error *error;
} place;

static ep_err from_object(const ProtobufCMessageDescriptor *type, const json_t *json, place *at,
                          ProtobufCMessage **out_message);

/* The path with one more step; truncated when too long. */
static place step(const place *at, const char *name, size_t index, bool is_item)
{
    place next = {.error = at->error};
    if (is_item) {
        snprintf(next.path, sizeof(next.path), "%.180s[%zu]", at->path, index);
    } else {
        snprintf(next.path, sizeof(next.path), "%.120s%s%.70s", at->path,
                 at->path[0] != '\0' ? "." : "", name);
    }
    return next;
}

static ep_err refuse(const place *at, const json_t *value, const char *allowed)
{
    char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
    ep_err err = ep_error_set(at->error, EP_ERR_INVALID_ARGUMENT, "key %s is %.*s, allowed: %s",
                              at->path, VALUE_BYTES, text != NULL ? text : "?", allowed);
    free(text);
    return err;
}

static ep_err no_memory(const place *at)
{
    return ep_error_set(at->error, EP_ERR_NO_MEMORY, "no memory for the message");
}

/* ---- numbers ---- */

/* A whole number from a JSON number or decimal text. */
static bool read_signed(const json_t *value, int64_t min, int64_t max, int64_t *out)
{
    long long number = json_integer_value(value);
    if (json_is_string(value)) {
        const char *text = json_string_value(value);
        char *end;
        errno = 0;
        number = strtoll(text, &end, 10);
        const char *digits = text[0] == '-' ? text + 1 : text;
        if (errno != 0 || *end != '\0' || digits[0] < '0' || digits[0] > '9') {
            return false;
        }
    } else if (!json_is_integer(value)) {
        return false;
    }
    *out = number;
    return number >= min && number <= max;
}

static bool read_unsigned(const json_t *value, uint64_t max, uint64_t *out)
{
    if (json_is_string(value)) {
        const char *text = json_string_value(value);
        char *end;
        errno = 0;
        *out = strtoull(text, &end, 10);
        return errno == 0 && *end == '\0' && text[0] >= '0' && text[0] <= '9' && *out <= max;
    }
    *out = (uint64_t)json_integer_value(value);
    return json_is_integer(value) && json_integer_value(value) >= 0 && *out <= max;
}

static ep_err put_signed(const place *at, const json_t *value, bool wide, void *member)
{
    int64_t number;
    if (!read_signed(value, wide ? INT64_MIN : INT32_MIN, wide ? INT64_MAX : INT32_MAX, &number)) {
        return refuse(at, value,
                      wide
                          ? "a whole number -9223372036854775808..9223372036854775807, also as text"
                          : "a whole number -2147483648..2147483647");
    }
    if (wide) {
        *(int64_t *)member = number;
    } else {
        *(int32_t *)member = (int32_t)number;
    }
    return EP_OK;
}

static ep_err put_unsigned(const place *at, const json_t *value, bool wide, void *member)
{
    uint64_t number;
    if (!read_unsigned(value, wide ? UINT64_MAX : UINT32_MAX, &number)) {
        return refuse(
            at, value,
            wide ? "a whole number 0..18446744073709551615; above 9223372036854775807 as text"
                 : "a whole number 0..4294967295");
    }
    if (wide) {
        *(uint64_t *)member = number;
    } else {
        *(uint32_t *)member = (uint32_t)number;
    }
    return EP_OK;
}

static bool read_real(const json_t *value, double *out)
{
    const char *word = json_string_value(value);
    if (word != NULL) {
        *out = strcmp(word, "NaN") == 0 ? (double)NAN : word[0] == '-' ? -INFINITY : INFINITY;
        return strcmp(word, "NaN") == 0 || strcmp(word, "Infinity") == 0 ||
               strcmp(word, "-Infinity") == 0;
    }
    *out = json_number_value(value);
    return json_is_number(value);
}

static ep_err put_real(const place *at, const json_t *value, bool wide, void *member)
{
    double number;
    if (!read_real(value, &number) ||
        (!wide && isfinite(number) && fabs(number) > (double)FLT_MAX)) {
        return refuse(
            at, value,
            wide ? "a number, \"NaN\", \"Infinity\", \"-Infinity\""
                 : "a number up to 3.4e38 either side of 0, \"NaN\", \"Infinity\", \"-Infinity\"");
    }
    if (wide) {
        *(double *)member = number;
    } else {
        *(float *)member = (float)number;
    }
    return EP_OK;
}

/* ---- from JSON ---- */

static ep_err put_text(const place *at, const json_t *value, void *member)
{
    if (!json_is_string(value)) {
        return refuse(at, value, "text");
    }
    char *copy = strdup(json_string_value(value));
    if (copy == NULL) {
        return no_memory(at);
    }
    *(char **)member = copy;
    return EP_OK;
}

/* What a type of a field is, and the bytes of a value. */
typedef struct form {
    enum { NO_FORM, SIGNED, UNSIGNED, REAL, FLAG, TEXT, OBJECT } kind;
    size_t bytes;
} form;

static const form forms[] = {
    [PROTOBUF_C_TYPE_INT32] = {SIGNED, 4},
    [PROTOBUF_C_TYPE_SINT32] = {SIGNED, 4},
    [PROTOBUF_C_TYPE_SFIXED32] = {SIGNED, 4},
    [PROTOBUF_C_TYPE_INT64] = {SIGNED, 8},
    [PROTOBUF_C_TYPE_SINT64] = {SIGNED, 8},
    [PROTOBUF_C_TYPE_SFIXED64] = {SIGNED, 8},
    [PROTOBUF_C_TYPE_UINT32] = {UNSIGNED, 4},
    [PROTOBUF_C_TYPE_FIXED32] = {UNSIGNED, 4},
    [PROTOBUF_C_TYPE_UINT64] = {UNSIGNED, 8},
    [PROTOBUF_C_TYPE_FIXED64] = {UNSIGNED, 8},
    [PROTOBUF_C_TYPE_FLOAT] = {REAL, 4},
    [PROTOBUF_C_TYPE_DOUBLE] = {REAL, 8},
    [PROTOBUF_C_TYPE_BOOL] = {FLAG, sizeof(protobuf_c_boolean)},
    [PROTOBUF_C_TYPE_ENUM] = {NO_FORM, 4},
    [PROTOBUF_C_TYPE_STRING] = {TEXT, sizeof(char *)},
    [PROTOBUF_C_TYPE_BYTES] = {NO_FORM, sizeof(ProtobufCBinaryData)},
    [PROTOBUF_C_TYPE_MESSAGE] = {OBJECT, sizeof(ProtobufCMessage *)},
};

static ep_err put_value(const ProtobufCFieldDescriptor *field, const json_t *value, place *at,
                        void *member)
{
    const bool wide = forms[field->type].bytes == 8;
    switch (forms[field->type].kind) {
    case SIGNED:
        return put_signed(at, value, wide, member);
    case UNSIGNED:
        return put_unsigned(at, value, wide, member);
    case REAL:
        return put_real(at, value, wide, member);
    case FLAG:
        if (!json_is_boolean(value)) {
            return refuse(at, value, "true or false");
        }
        *(protobuf_c_boolean *)member = json_is_true(value);
        return EP_OK;
    case TEXT:
        return put_text(at, value, member);
    case OBJECT:
        return from_object(field->descriptor, value, at, member);
    case NO_FORM:
    default:
        return ep_error_set(at->error, EP_ERR_UNIMPLEMENTED,
                            "key %s is of a type that has no JSON form here", at->path);
    }
}

static ep_err put_items(const ProtobufCFieldDescriptor *field, const json_t *value, place *at,
                        uint8_t *message)
{
    size_t *count = (size_t *)(void *)(message + field->quantifier_offset);
    size_t bytes = forms[field->type].bytes;
    if (!json_is_array(value)) {
        return refuse(at, value, "a list");
    }
    if (json_array_size(value) == 0) {
        return EP_OK;
    }
    uint8_t *items = calloc(json_array_size(value), bytes);
    if (items == NULL) {
        return no_memory(at);
    }
    *(void **)(void *)(message + field->offset) = items;
    for (size_t i = 0; i < json_array_size(value); i++) {
        place next = step(at, NULL, i, true);
        ep_err err = put_value(field, json_array_get(value, i), &next, items + i * bytes);
        if (err != EP_OK) {
            return err;
        }
        *count = i + 1; /* so that freeing the message frees the items so far */
    }
    return EP_OK;
}

static ep_err unknown_key(const ProtobufCMessageDescriptor *type, const place *at)
{
    char known[KNOWN_BYTES] = "none";
    size_t used = 0;
    for (unsigned i = 0; i < type->n_fields && used < sizeof(known); i++) {
        used += (size_t)snprintf(known + used, sizeof(known) - used, "%s%s", i > 0 ? ", " : "",
                                 type->fields[i].name);
    }
    return ep_error_set(at->error, EP_ERR_INVALID_ARGUMENT, "there is no key %s in %s, known: %s",
                        at->path, type->name, known);
}

static ep_err fill(ProtobufCMessage *message, const json_t *json, place *at)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)json, key, value)
    {
        place next = step(at, key, 0, false);
        const ProtobufCFieldDescriptor *field =
            protobuf_c_message_descriptor_get_field_by_name(message->descriptor, key);
        uint8_t *base = (uint8_t *)message;
        ep_err err;
        if (field == NULL) {
            return unknown_key(message->descriptor, &next);
        }
        if ((field->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) != 0) {
            return ep_error_set(at->error, EP_ERR_UNIMPLEMENTED,
                                "key %s is part of a oneof, which has no JSON form here",
                                next.path);
        }
        if (field->label == PROTOBUF_C_LABEL_REPEATED) {
            err = put_items(field, value, &next, base);
        } else {
            err = put_value(field, value, &next, base + field->offset);
        }
        if (err != EP_OK) {
            return err;
        }
        if (field->label == PROTOBUF_C_LABEL_OPTIONAL && field->type != PROTOBUF_C_TYPE_MESSAGE &&
            field->type != PROTOBUF_C_TYPE_STRING) {
            *(protobuf_c_boolean *)(void *)(base + field->quantifier_offset) = 1;
        }
    }
    return EP_OK;
}

static ep_err from_object(const ProtobufCMessageDescriptor *type, const json_t *json, place *at,
                          ProtobufCMessage **out_message)
{
    if (!json_is_object(json)) {
        return at->path[0] != '\0' ? refuse(at, json, "an object {...}")
                                   : ep_error_set(at->error, EP_ERR_INVALID_ARGUMENT,
                                                  "the JSON is no object {...}");
    }
    ProtobufCMessage *message = malloc(type->sizeof_message);
    if (message == NULL) {
        return no_memory(at);
    }
    protobuf_c_message_init(type, message);
    ep_err err = fill(message, json, at);
    if (err != EP_OK) {
        protobuf_c_message_free_unpacked(message, NULL);
        return err;
    }
    *out_message = message;
    return EP_OK;
}

ep_err ep_cli_message_from_json(const ProtobufCMessageDescriptor *type, const json_t *json,
                                ProtobufCMessage **out_message, ep_error *out_error)
{
    place at = {.error = out_error};
    return from_object(type, json, &at, out_message);
}

/* ---- to JSON ---- */

static json_t *real_to_json(double number)
{
    if (isfinite(number)) {
        return json_real(number);
    }
    return json_string(isnan(number) ? "NaN" : number > 0 ? "Infinity" : "-Infinity");
}

static json_t *unsigned_to_json(uint64_t number)
{
    return number <= INT64_MAX ? json_integer((json_int_t)number)
                               : json_sprintf("%" PRIu64, number);
}

static json_t *value_to_json(ProtobufCType type, const void *member)
{
    const bool wide = forms[type].bytes == 8;
    switch (forms[type].kind) {
    case SIGNED:
        return json_integer(wide ? *(const int64_t *)member : *(const int32_t *)member);
    case UNSIGNED:
        return unsigned_to_json(wide ? *(const uint64_t *)member : *(const uint32_t *)member);
    case REAL:
        return real_to_json(wide ? *(const double *)member : (double)*(const float *)member);
    case FLAG:
        return json_boolean(*(const protobuf_c_boolean *)member);
    case TEXT:
        return ep_cli_json_text(*(char *const *)member);
    case OBJECT:
        return ep_cli_message_to_json(*(ProtobufCMessage *const *)member);
    case NO_FORM:
    default:
        return json_string("(no JSON form)");
    }
}

static json_t *items_to_json(const ProtobufCFieldDescriptor *field, const uint8_t *base)
{
    size_t count = *(const size_t *)(const void *)(base + field->quantifier_offset);
    const uint8_t *items = *(uint8_t *const *)(const void *)(base + field->offset);
    json_t *list = json_array();
    for (size_t i = 0; list != NULL && i < count; i++) {
        if (json_array_append_new(
                list, value_to_json(field->type, items + i * forms[field->type].bytes)) != 0) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

/* Whether a field that is not repeated is there. */
static bool is_present(const ProtobufCFieldDescriptor *field, const uint8_t *base)
{
    if (field->type == PROTOBUF_C_TYPE_MESSAGE || field->type == PROTOBUF_C_TYPE_STRING) {
        return *(void *const *)(const void *)(base + field->offset) != NULL;
    }
    return field->label != PROTOBUF_C_LABEL_OPTIONAL ||
           *(const protobuf_c_boolean *)(const void *)(base + field->quantifier_offset);
}

json_t *ep_cli_message_to_json(const ProtobufCMessage *message)
{
    const ProtobufCMessageDescriptor *type = message->descriptor;
    const uint8_t *base = (const uint8_t *)message;
    json_t *json = json_object();
    for (unsigned i = 0; json != NULL && i < type->n_fields; i++) {
        const ProtobufCFieldDescriptor *field = &type->fields[i];
        json_t *value;
        if ((field->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) != 0) {
            value = json_string("(no JSON form)");
        } else if (field->label == PROTOBUF_C_LABEL_REPEATED) {
            value = items_to_json(field, base);
        } else if (is_present(field, base)) {
            value = value_to_json(field->type, base + field->offset);
        } else {
            continue;
        }
        if (json_object_set_new(json, field->name, value) != 0) {
            json_decref(json);
            return NULL;
        }
    }
    return json;
}
