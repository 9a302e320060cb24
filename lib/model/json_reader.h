/* SPDX-License-Identifier: Apache-2.0 */
/*
 * JSON from untrusted files: jansson behind limits that it does not have. One pass first checks the
 * nesting and the number of values, so that a small file cannot become a large tree. Duplicate
 * keys, invalid UTF-8, lone surrogates, \u0000 and integers beyond 2^63-1 are refused.
 *
 * Threads  pure.
 */
#ifndef EP_MODEL_JSON_READER_H
#define EP_MODEL_JSON_READER_H

#include <jansson.h>

#include "base/error.h"

#define EP_JSON_TEXT_BYTES 80

typedef struct ep_json_limits {
    size_t depth_max;
    size_t values_max; /* approximate total of objects, arrays, members and elements */
} ep_json_limits;

/* Parses an object; release it with json_decref. what: name of the text in messages
 * ("config.json"). Errors: BAD_FILE, NO_MEMORY. */
ep_err ep_json_parse(const char *what, const char *bytes, size_t count,
                     const ep_json_limits *limits, json_t **out_root, ep_error *out_error);

/* Short printable form for messages: 3, "text", true, null, 1.0, an array of 4, an object. */
const char *ep_json_describe(const json_t *value, char out[EP_JSON_TEXT_BYTES]);

/* Copies text, cut to the size of out, with '?' for control and non-ASCII bytes. Returns out. */
const char *ep_json_printable(const char *text, char *out, size_t out_bytes);

#endif
