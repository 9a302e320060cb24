/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Refuses one allocation of jansson after the other:
 *     do {
 *         json_refusal_begin();
 *         ...
 *         json_refusal_end();
 *     } while (json_refusal_was_reached());
 */
#ifndef EP_TESTS_SUPPORT_JSON_REFUSAL_H
#define EP_TESTS_SUPPORT_JSON_REFUSAL_H

#include <jansson.h>
#include <stdbool.h>
#include <stdlib.h>

static size_t json_allocations, json_refused_at;

static void *json_refuse_one(size_t bytes)
{
    return ++json_allocations == json_refused_at ? NULL : malloc(bytes);
}

static inline void json_refusal_begin(void)
{
    json_allocations = 0;
    json_refused_at++;
    json_set_alloc_funcs(json_refuse_one, free);
}

static inline void json_refusal_end(void)
{
    json_set_alloc_funcs(malloc, free);
}

static inline bool json_refusal_was_reached(void)
{
    return json_allocations >= json_refused_at;
}

#endif
