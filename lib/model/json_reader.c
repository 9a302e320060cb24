/* SPDX-License-Identifier: Apache-2.0 */
/* The pass over the limits before jansson runs, and its error texts made safe to print. */
#include "model/json_reader.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* If a string that jansson collects cannot grow, jansson goes on with what it has: a key or a
 * number silently loses its last byte. So its memory comes from here, and a parse during which
 * memory was refused has failed, whatever it returns. */
static _Thread_local bool memory_refused;

static void *take_memory(size_t bytes)
{
    void *memory = malloc(bytes);
    memory_refused = memory_refused || memory == NULL;
    return memory;
}

static void watch_memory(void)
{
    json_set_alloc_funcs(take_memory, free);
}

const char *ep_json_printable(const char *text, char *out, size_t out_bytes)
{
    size_t i = 0;
    for (; text[i] != '\0' && i + 1 < out_bytes; i++) {
        out[i] = text[i] >= 0x20 && text[i] <= 0x7e ? text[i] : '?';
    }
    out[i] = '\0';
    return out;
}

const char *ep_json_describe(const json_t *value, char out[EP_JSON_TEXT_BYTES])
{
    char text[48];
    switch (json_typeof(value)) {
    case JSON_INTEGER:
        snprintf(out, EP_JSON_TEXT_BYTES, "%" JSON_INTEGER_FORMAT, json_integer_value(value));
        break;
    case JSON_REAL:
        snprintf(text, sizeof(text), "%.9g", json_real_value(value));
        snprintf(out, EP_JSON_TEXT_BYTES, "%s%s", text, strpbrk(text, ".e") == NULL ? ".0" : "");
        break;
    case JSON_STRING:
        snprintf(out, EP_JSON_TEXT_BYTES, "\"%s\"",
                 ep_json_printable(json_string_value(value), text, sizeof(text)));
        break;
    case JSON_ARRAY:
        snprintf(out, EP_JSON_TEXT_BYTES, "an array of %zu", json_array_size(value));
        break;
    case JSON_OBJECT:
        snprintf(out, EP_JSON_TEXT_BYTES, "an object");
        break;
    case JSON_TRUE:
        snprintf(out, EP_JSON_TEXT_BYTES, "true");
        break;
    case JSON_FALSE:
        snprintf(out, EP_JSON_TEXT_BYTES, "false");
        break;
    case JSON_NULL:
        snprintf(out, EP_JSON_TEXT_BYTES, "null");
        break;
    }
    return out;
}

/* jansson reads "-0" as an integer that cannot be told from 0. */
static bool is_minus_zero(const char *bytes, size_t count, size_t i)
{
    if (i + 1 >= count || bytes[i] != '-' || bytes[i + 1] != '0') {
        return false;
    }
    if (i > 0 && (bytes[i - 1] == 'e' || bytes[i - 1] == 'E')) { /* 1e-05 */
        return false;
    }
    return i + 2 >= count || (bytes[i + 2] != '.' && bytes[i + 2] != 'e' && bytes[i + 2] != 'E');
}

static ep_err check_limits(const char *what, const char *bytes, size_t count,
                           const ep_json_limits *limits, ep_error *out_error)
{
    size_t depth = 0;
    size_t values = 0;
    bool in_string = false;
    for (size_t i = 0; i < count; i++) {
        char c = bytes[i];
        if (in_string) {
            if (c == '\\') {
                i++;
            } else if (c == '"') {
                in_string = false;
            }
            continue;
        }
        if (c == '"') {
            in_string = true;
        } else if (c == '{' || c == '[') {
            depth++;
            values++;
        } else if ((c == '}' || c == ']') && depth > 0) {
            depth--;
        } else if (c == ',' || c == ':') {
            values++;
        } else if (is_minus_zero(bytes, count, i)) {
            return ep_error_set(out_error, EP_ERR_BAD_FILE,
                                "%s: byte %zu: -0 is not a plain integer", what, i);
        }
        if (depth > limits->depth_max) {
            return ep_error_set(out_error, EP_ERR_BAD_FILE,
                                "%s: byte %zu: nesting depth %zu, allowed 1..%zu", what, i, depth,
                                limits->depth_max);
        }
        if (values > limits->values_max) {
            return ep_error_set(out_error, EP_ERR_BAD_FILE,
                                "%s: byte %zu: more than %zu values, allowed 0..%zu", what, i,
                                limits->values_max, limits->values_max);
        }
    }
    return EP_OK;
}

ep_err ep_json_parse(const char *what, const char *bytes, size_t count,
                     const ep_json_limits *limits, json_t **out_root, ep_error *out_error)
{
    ep_err err = check_limits(what, bytes, count, limits, out_error);
    if (err != EP_OK) {
        return err;
    }
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    json_error_t json_error;
    pthread_once(&once, watch_memory);
    memory_refused = false;
    json_t *root = json_loadb(bytes, count, JSON_REJECT_DUPLICATES, &json_error);
    if (memory_refused) {
        json_decref(root);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "%s: no memory to parse it", what);
    }
    if (root == NULL) {
        char text[JSON_ERROR_TEXT_LENGTH];
        return ep_error_set(out_error, EP_ERR_BAD_FILE, "%s: line %d column %d: %s", what,
                            json_error.line, json_error.column,
                            ep_json_printable(json_error.text, text, sizeof(text)));
    }
    if (!json_is_object(root)) {
        json_decref(root);
        return ep_error_set(out_error, EP_ERR_BAD_FILE, "%s: is a JSON array, allowed: an object",
                            what);
    }
    *out_root = root;
    return EP_OK;
}
