/* SPDX-License-Identifier: Apache-2.0 */
/* The log as JSON, read back by jansson. */
#include "log_capture.h"

#include <jansson.h>
#include <limits.h>
#include <stdint.h>

static json_t *parse(const char *line)
{
    json_error_t error;
    json_t *object = json_loads(line, JSON_REJECT_DUPLICATES, &error);
    cr_assert_not_null(object, "%s at %d of %s", error.text, error.position, line);
    cr_assert(json_is_object(object));
    return object;
}

static void expect_text(const json_t *object, const char *key, const char *value)
{
    const char *got = json_string_value(json_object_get(object, key));
    cr_assert_not_null(got, "no text %s", key);
    cr_expect_str_eq(got, value, "%s is '%s', not '%s'", key, got, value);
}

Test(log_json, numbers_and_booleans_are_such)
{
    char line[CAPTURE_BYTES];
    const char *none = NULL;
    const bool yes = true, no = false;
    CAPTURE(line, EP_LOG_JSON, EP_LOG_INFO, "node-state", EP_KV(node, "12"), EP_KV(a, INT_MIN),
            EP_KV(b, (int64_t)INT64_MIN), EP_KV(c, (uint64_t)INT64_MAX), EP_KV(d, yes),
            EP_KV(e, no), EP_KV(f, none));
    json_t *o = parse(line);
    cr_expect_eq(json_object_size(o), 9u);
    expect_text(o, "level", "info");
    expect_text(o, "event", "node-state");
    expect_text(o, "node", "12");
    cr_expect_eq(json_string_length(json_object_get(o, "time")),
                 strlen("2026-01-31T08:15:30.123Z"));
    cr_expect(json_is_integer(json_object_get(o, "a")) &&
              json_integer_value(json_object_get(o, "a")) == INT_MIN);
    cr_expect(json_is_integer(json_object_get(o, "b")) &&
              json_integer_value(json_object_get(o, "b")) == INT64_MIN);
    cr_expect(json_is_integer(json_object_get(o, "c")) &&
              json_integer_value(json_object_get(o, "c")) == INT64_MAX);
    cr_expect(json_is_true(json_object_get(o, "d")) && json_is_false(json_object_get(o, "e")));
    json_decref(o);
}

Test(log_json, no_text_forges_a_field_or_a_line)
{
    char line[CAPTURE_BYTES];
    for (size_t i = 0; i < EP_ARRAY_COUNT(hostile_texts); i++) {
        const hostile_text *text = &hostile_texts[i];
        CAPTURE(line, EP_LOG_JSON, EP_LOG_INFO, "audit-refused", EP_KV(peer, text->from),
                EP_KV(reason, "slow"), EP_KV(detail, text->from));
        json_t *o = parse(line);
        cr_expect_eq(json_object_size(o), 6u, "%s", line);
        expect_text(o, "level", "info");
        expect_text(o, "event", "audit-refused");
        expect_text(o, "peer", text->wanted);
        expect_text(o, "reason", "slow");
        expect_text(o, "detail", text->wanted);
        json_decref(o);
    }
}

/* Long values of each kind, alone and together: JSON to the end, and it says that it was cut. */
Test(log_json, a_cut_line_is_whole_json)
{
    static const char *const made_of[] = {"a", "\"", "\\", "\n", "日", "\xff", "\"a"};
    static char text[5000];
    char line[CAPTURE_BYTES];
    for (size_t i = 0; i < EP_ARRAY_COUNT(made_of); i++) {
        for (size_t bytes = 1; bytes < sizeof(text); bytes += 11) {
            for (size_t b = 0; b < bytes; b++) {
                text[b] = made_of[i][b % strlen(made_of[i])];
            }
            text[bytes] = 0;
            CAPTURE(line, EP_LOG_JSON, EP_LOG_INFO, "e", EP_KV(a, text), EP_KV(b, text),
                    EP_KV(c, text), EP_KV(d, text), EP_KV(e, text), EP_KV(f, text),
                    EP_KV(n, INT64_MAX));
            json_t *o = parse(line);
            const bool is_cut = json_is_true(json_object_get(o, "truncated"));
            cr_assert(is_cut || json_object_size(o) == 10u, "%s", line);
            cr_assert(is_cut ? bytes > 50 : bytes < 1024, "%zu bytes: %s", bytes, line);
            json_decref(o);
        }
    }
}
