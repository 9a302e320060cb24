/* SPDX-License-Identifier: Apache-2.0 */
/* Strict typed reads of JSON keys, with the error texts in one place. */
#include "model/config_reader.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "model/json_reader.h"

void ep_config_fail(ep_config_reader *reader, ep_err err, const char *format, ...)
{
    char text[EP_ERROR_TEXT_BYTES];
    va_list args;
    if (reader->err != EP_OK) {
        return;
    }
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    reader->err = ep_error_set(reader->error, err, "%s: %s%s", reader->file, reader->prefix, text);
}

json_t *ep_config_find(const ep_config_reader *reader, const char *const *keys,
                       const char **out_key)
{
    for (size_t i = 0; keys[i] != NULL; i++) {
        json_t *value = json_object_get(reader->object, keys[i]);
        if (value != NULL && !json_is_null(value)) {
            *out_key = keys[i];
            return value;
        }
    }
    return NULL;
}

void ep_config_refuse_unlike(ep_config_reader *reader, const char *const *keys)
{
    char text[EP_JSON_TEXT_BYTES];
    char other[EP_JSON_TEXT_BYTES];
    const char *first = NULL;
    const json_t *value = ep_config_find(reader, keys, &first);
    for (size_t i = 0; value != NULL && keys[i] != NULL; i++) {
        const json_t *also = json_object_get(reader->object, keys[i]);
        const bool are_numbers = json_is_number(value) && json_is_number(also);
        const bool are_comparable = are_numbers ||
                                    (json_is_boolean(value) && json_is_boolean(also)) ||
                                    (json_is_array(value) && json_is_array(also));
        const bool are_alike = are_numbers ? json_number_value(value) == json_number_value(also)
                                           : json_equal(value, also) != 0;
        if (are_comparable && !are_alike) {
            ep_config_fail(reader, EP_ERR_BAD_FILE, "%s is %s and %s is %s, allowed the same",
                           first, ep_json_describe(value, text), keys[i],
                           ep_json_describe(also, other));
        }
    }
}

bool ep_config_has(const ep_config_reader *reader, const char *const *keys)
{
    const char *key;
    return ep_config_find(reader, keys, &key) != NULL;
}

static void fail_missing(ep_config_reader *reader, const char *const *keys, uint32_t min,
                         uint32_t max)
{
    char others[160] = "";
    size_t used = 0;
    for (size_t i = 1; keys[i] != NULL && used < sizeof(others); i++) {
        used += (size_t)snprintf(others + used, sizeof(others) - used, "%s%s",
                                 i == 1 ? " (or " : ", ", keys[i]);
    }
    ep_config_fail(reader, EP_ERR_BAD_FILE, "%s%s%s is missing, allowed %u..%u", keys[0], others,
                   keys[1] != NULL ? ")" : "", min, max);
}

/* Returns min after an error. */
static uint32_t take_u32(ep_config_reader *reader, const char *name, const json_t *value,
                         uint32_t min, uint32_t max)
{
    char text[EP_JSON_TEXT_BYTES];
    const json_int_t number = json_integer_value(value);
    if (json_is_integer(value) && number >= (json_int_t)min && number <= (json_int_t)max) {
        return (uint32_t)number;
    }
    ep_config_fail(reader, EP_ERR_BAD_FILE, "%s is %s, allowed %s%u..%u", name,
                   ep_json_describe(value, text), json_is_integer(value) ? "" : "an integer ", min,
                   max);
    return min;
}

uint32_t ep_config_u32(ep_config_reader *reader, const char *const *keys, uint32_t min,
                       uint32_t max, uint32_t fallback)
{
    const char *key = NULL;
    const json_t *value = ep_config_find(reader, keys, &key);
    if (value != NULL) {
        return take_u32(reader, key, value, min, max);
    }
    if (fallback == EP_CONFIG_REQUIRED) {
        fail_missing(reader, keys, min, max);
        return min;
    }
    return fallback;
}

void ep_config_u32_per_layer(ep_config_reader *reader, const char *const *keys, uint32_t min,
                             uint32_t max, uint32_t fallback, uint32_t *out, uint32_t layers_count)
{
    char name[64];
    const char *key = NULL;
    json_t *value = ep_config_find(reader, keys, &key);
    if (!json_is_array(value)) {
        uint32_t all = ep_config_u32(reader, keys, min, max, fallback);
        for (uint32_t i = 0; i < layers_count; i++) {
            out[i] = all;
        }
        return;
    }
    if (json_array_size(value) != layers_count) {
        ep_config_fail(reader, EP_ERR_BAD_FILE, "%s has %zu values, allowed %u: one for each layer",
                       key, json_array_size(value), layers_count);
    }
    for (uint32_t i = 0; i < layers_count; i++) {
        const json_t *item = json_array_get(value, i);
        snprintf(name, sizeof(name), "%s[%u]", key, i);
        out[i] = item == NULL ? min : take_u32(reader, name, item, min, max);
    }
}

/* The key exists, but has another type. */
static void fail_type(ep_config_reader *reader, const char *key, const json_t *value,
                      const char *allowed)
{
    char text[EP_JSON_TEXT_BYTES];
    ep_config_fail(reader, EP_ERR_BAD_FILE, "%s is %s, allowed %s", key,
                   ep_json_describe(value, text), allowed);
}

bool ep_config_bool(ep_config_reader *reader, const char *const *keys, bool fallback)
{
    const char *key = NULL;
    json_t *value = ep_config_find(reader, keys, &key);
    if (value != NULL && !json_is_boolean(value)) {
        fail_type(reader, key, value, "true or false");
    }
    return json_is_boolean(value) ? json_is_true(value) : fallback;
}

float ep_config_f32(ep_config_reader *reader, const char *const *keys, double min, double max,
                    float fallback)
{
    char text[EP_JSON_TEXT_BYTES];
    const char *key = NULL;
    json_t *value = ep_config_find(reader, keys, &key);
    if (value == NULL) {
        return fallback;
    }
    double number = json_is_number(value) ? json_number_value(value) : NAN;
    if (!(number > min && number <= max)) {
        ep_config_fail(reader, EP_ERR_BAD_FILE, "%s is %s, allowed a number above %g and up to %g",
                       key, ep_json_describe(value, text), min, max);
        return fallback;
    }
    return (float)number;
}

float ep_config_limit(ep_config_reader *reader, const char *const *keys, float fallback)
{
    const char *key = NULL;
    const json_t *value = ep_config_find(reader, keys, &key);
    bool is_zero = value != NULL && json_is_number(value) && json_number_value(value) == 0.0;
    return is_zero ? 0.0f : ep_config_f32(reader, keys, 0.0, 1e30, fallback);
}

const char *ep_config_string(ep_config_reader *reader, const char *const *keys)
{
    const char *key = NULL;
    json_t *value = ep_config_find(reader, keys, &key);
    if (value != NULL && !json_is_string(value)) {
        fail_type(reader, key, value, "a string");
    }
    return json_string_value(value); /* NULL if it is no string */
}
