/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Strict reading of keys of a JSON object. The reader keeps the first error; later reads then do
 * nothing and return the fallback. So read everything, then check err once. Every error names file,
 * key, value and allowed values. A key may have several spellings; the first one present is used,
 * and null counts as absent.
 */
#ifndef EP_MODEL_CONFIG_READER_H
#define EP_MODEL_CONFIG_READER_H

#include <jansson.h>

#include "base/error.h"

#define EP_CONFIG_KEYS(...) ((const char *const[]){__VA_ARGS__, NULL})
#define EP_CONFIG_REQUIRED UINT32_MAX /* as a fallback: the key is required */

typedef struct ep_config_reader {
    const char *file;
    const char *prefix; /* "" or "text_config.", for messages */
    json_t *object;
    ep_error *error;
    ep_err err;
} ep_config_reader;

/* The value of the first spelling present; NULL when all are absent or null. */
json_t *ep_config_find(const ep_config_reader *reader, const char *const *keys,
                       const char **out_key);
/* Refuses keys that are spellings of one meaning but have different numbers. */
void ep_config_refuse_unlike(ep_config_reader *reader, const char *const *keys);
bool ep_config_has(const ep_config_reader *reader, const char *const *keys);

uint32_t ep_config_u32(ep_config_reader *reader, const char *const *keys, uint32_t min,
                       uint32_t max, uint32_t fallback);
/* One integer for all layers, or an array with one per layer. */
void ep_config_u32_per_layer(ep_config_reader *reader, const char *const *keys, uint32_t min,
                             uint32_t max, uint32_t fallback, uint32_t *out, uint32_t layers_count);
bool ep_config_bool(ep_config_reader *reader, const char *const *keys, bool fallback);
/* A finite number with min < value <= max. */
float ep_config_f32(ep_config_reader *reader, const char *const *keys, double min, double max,
                    float fallback);
/* The same for a limit, where 0 means none. */
float ep_config_limit(ep_config_reader *reader, const char *const *keys, float fallback);
/* NULL when absent. The string lives as long as the JSON object. */
const char *ep_config_string(ep_config_reader *reader, const char *const *keys);

/* Sets the error "<file>: <prefix><text>", unless there already is one. */
void ep_config_fail(ep_config_reader *reader, ep_err err, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
