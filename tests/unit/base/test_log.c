/* SPDX-License-Identifier: Apache-2.0 */
/* The log as logfmt, with and without the journal's prefix, read back by a strict parser. */
#include "log_capture.h"

#include <limits.h>
#include <stdint.h>
#include <stdio.h>

#include "base/printable.h"

#define FIELDS_MAX 16

typedef struct parsed_field {
    char key[32];
    char value[CAPTURE_BYTES];
} parsed_field;

static parsed_field fields[FIELDS_MAX];
static size_t fields_count;

static const char *parse_quoted(const char *at, char *out)
{
    for (at++; *at != '"'; at++) {
        cr_assert_neq(*at, 0, "a quote stays open");
        if (*at == '\\') {
            at++;
            cr_assert(*at == '"' || *at == '\\', "\\%c", *at);
        }
        *out++ = *at;
    }
    *out = 0;
    return at + 1;
}

static const char *parse_bare(const char *at, char *out)
{
    for (; *at != ' ' && *at != 0; at++) {
        cr_assert(*at > ' ' && *at < 0x7f && strchr("\"'=\\", *at) == NULL, "'%c' outside quotes",
                  *at);
        *out++ = *at;
    }
    *out = 0;
    return at;
}

/* key=value, one blank between them; each key once. */
static void parse(const char *line)
{
    const char *at = line;
    fields_count = 0;
    for (;;) {
        const size_t length = strspn(at, "abcdefghijklmnopqrstuvwxyz0123456789_");
        cr_assert(fields_count < FIELDS_MAX && length > 0 && length < sizeof(fields[0].key) &&
                      at[length] == '=',
                  "no key at '%s' of %s", at, line);
        parsed_field *field = &fields[fields_count++];
        snprintf(field->key, sizeof(field->key), "%.*s", (int)length, at);
        for (size_t i = 0; i + 1 < fields_count; i++) {
            cr_assert_str_neq(fields[i].key, field->key, "twice in %s", line);
        }
        at += length + 1;
        cr_assert(*at != ' ' && *at != 0, "%s has no value in %s", field->key, line);
        at = *at == '"' ? parse_quoted(at, field->value) : parse_bare(at, field->value);
        if (*at == 0) {
            return;
        }
        cr_assert_eq(*at, ' ', "no blank at '%s' of %s", at, line);
        at++;
    }
}

/* Its value; NULL: not there. */
static const char *find(const char *key)
{
    for (size_t i = 0; i < fields_count; i++) {
        if (strcmp(fields[i].key, key) == 0) {
            return fields[i].value;
        }
    }
    return NULL;
}

static void expect(const char *key, const char *value)
{
    const char *got = find(key);
    cr_assert_not_null(got, "no %s", key);
    cr_expect_str_eq(got, value, "%s is '%s', not '%s'", key, got, value);
}

static void expect_last(const char *key)
{
    cr_assert_gt(fields_count, 0u);
    cr_expect_str_eq(fields[fields_count - 1].key, key);
}

Test(log, one_line_in_each_form)
{
    char line[CAPTURE_BYTES];
    CAPTURE(line, EP_LOG_TEXT, EP_LOG_WARN, "node-state", EP_KV(node, "a"),
            EP_KV(state, "two words"), EP_KV(silent_ms, 12));
    cr_expect_eq(strlen("time=2026-01-31T08:15:30.123Z"), strcspn(line, " "));
    cr_expect_str_eq(line + strcspn(line, " "),
                     " level=warn event=node-state node=a state=\"two words\" silent_ms=12");
    parse(line);
    cr_expect_eq(fields_count, 6u);
    CAPTURE(line, EP_LOG_JOURNAL, EP_LOG_WARN, "node-state", EP_KV(node, "a"),
            EP_KV(state, "two words"), EP_KV(silent_ms, 12));
    cr_expect_str_eq(line, "<4>event=node-state node=a state=\"two words\" silent_ms=12");
    CAPTURE(line, EP_LOG_JSON, EP_LOG_ERROR, "node-state", EP_KV(node, "a"),
            EP_KV(state, "two words"), EP_KV(silent_ms, 12));
    cr_expect_str_eq(line + strlen("{\"time\":\"2026-01-31T08:15:30.123Z"),
                     "\",\"level\":\"error\",\"event\":\"node-state\",\"node\":\"a\",\"state\":"
                     "\"two words\",\"silent_ms\":12}");
}

Test(log, the_level_decides_what_is_written)
{
    char line[CAPTURE_BYTES];
    CAPTURE(line, EP_LOG_JOURNAL, EP_LOG_DEBUG, "e", EP_KV(n, 1));
    cr_expect_str_eq(line, "");
    CAPTURE(line, EP_LOG_JOURNAL, EP_LOG_INFO, "e", EP_KV(n, 1));
    cr_expect_str_eq(line, "<6>event=e n=1");
    CAPTURE(line, EP_LOG_JOURNAL, EP_LOG_ERROR, "e", EP_KV(n, 1));
    cr_expect_str_eq(line, "<3>event=e n=1");
}

Test(log, numbers_and_booleans_are_bare_and_what_is_null_is_left_out)
{
    char line[CAPTURE_BYTES];
    const char *none = NULL;
    const bool yes = true;
    CAPTURE(line, EP_LOG_JOURNAL, EP_LOG_INFO, "e", EP_KV(a, INT_MIN), EP_KV(b, (int64_t)INT64_MIN),
            EP_KV(c, (uint64_t)UINT64_MAX), EP_KV(d, yes), EP_KV(e, none), EP_KV(f, (uint32_t)0),
            EP_KV(g, (size_t)7), EP_KV(h, ""));
    cr_expect_str_eq(line, "<6>event=e a=-2147483648 b=-9223372036854775808 c=18446744073709551615 "
                           "d=true f=0 g=7 h=\"\"");
}

/* What a peer says is one value, whatever it is made of. */
Test(log, no_text_forges_a_field_or_a_line)
{
    static const ep_log_format formats[] = {EP_LOG_TEXT, EP_LOG_JOURNAL};
    char line[CAPTURE_BYTES];
    for (size_t i = 0; i < EP_ARRAY_COUNT(hostile_texts) * 2; i++) {
        const hostile_text *text = &hostile_texts[i / 2];
        CAPTURE(line, formats[i % 2], EP_LOG_INFO, "audit-refused", EP_KV(peer, text->from),
                EP_KV(reason, "slow"), EP_KV(detail, text->from));
        cr_assert(formats[i % 2] == EP_LOG_TEXT || strncmp(line, "<6>", 3) == 0, "%s", line);
        parse(line + (formats[i % 2] == EP_LOG_TEXT ? 0 : 3));
        cr_expect_eq(fields_count, formats[i % 2] == EP_LOG_TEXT ? 6u : 4u, "%s", line);
        expect("event", "audit-refused");
        expect("peer", text->wanted);
        expect("reason", "slow");
        expect("detail", text->wanted);
        expect_last("detail");
    }
}

/* Each byte, and each two. */
Test(log, whatever_goes_in_comes_out)
{
    char line[CAPTURE_BYTES];
    for (unsigned a = 1; a < 256; a++) {
        for (unsigned b = 0; b < 256; b += a < 0x80 && a > ' ' && b > '\\' ? 16 : 1) {
            const char from[] = {(char)a, (char)b, 0};
            char wanted[EP_TEXT_ESCAPED_BYTES(2)];
            CAPTURE(line, EP_LOG_JOURNAL, EP_LOG_INFO, "e", EP_KV(k, from), EP_KV(n, 1));
            parse(line + 3);
            cr_expect_eq(fields_count, 3u, "%s", line);
            expect("k", ep_text_escape(from, wanted, sizeof(wanted)));
        }
    }
}

static void fill(char *text, size_t bytes, const char *with)
{
    const size_t length = strlen(with);
    for (size_t i = 0; i + 1 < bytes; i++) {
        text[i] = with[i % length];
    }
    text[bytes - 1] = 0;
}

/* A long value is cut, the fields behind it are there, and the line says so. */
Test(log, a_long_value_is_cut_and_said)
{
    static const char *const made_of[] = {"a",    "\"", "\\",   "\n",
                                          "a b=", "日", "\xff", "\xf0\x9f\x8e\x89"};
    static char text[100001];
    char line[CAPTURE_BYTES];
    for (size_t i = 0; i < EP_ARRAY_COUNT(made_of); i++) {
        fill(text, sizeof(text), made_of[i]);
        CAPTURE(line, EP_LOG_TEXT, EP_LOG_INFO, "e", EP_KV(node, text), EP_KV(reason, "slow"),
                EP_KV(count, 3));
        parse(line);
        cr_expect_eq(fields_count, 7u, "%s", line);
        expect("reason", "slow");
        expect("count", "3");
        expect("truncated", "true");
        expect_last("truncated");
        const char *value = find("node");
        cr_assert_not_null(value);
        const size_t length = strlen(value);
        cr_expect(length > 900 && length < 1024, "%zu bytes of %s", length, value);
        cr_expect_eq(ep_text_printable_bytes(value, true), length, "a character is cut: %s", value);
    }
}

Test(log, a_value_that_just_fits_is_whole)
{
    char text[1100], line[CAPTURE_BYTES];
    size_t whole = 0;
    for (size_t length = 1; length < sizeof(text); length++) {
        fill(text, length + 1, "a");
        CAPTURE(line, EP_LOG_TEXT, EP_LOG_INFO, "e", EP_KV(node, text));
        parse(line);
        const char *value = find("node");
        cr_assert_not_null(value);
        whole += strcmp(value, text) == 0;
        cr_assert_eq(find("truncated") == NULL, strcmp(value, text) == 0, "%s", line);
        cr_assert_eq(strlen(value), whole, "a longer text gives a shorter value");
    }
    cr_expect(whole > 900 && whole < 1024, "%zu", whole);
}

/* However much there is: each field that is there is well formed, and the line ends in time. */
Test(log, a_line_has_a_limit)
{
    static const ep_log_format formats[] = {EP_LOG_TEXT, EP_LOG_JOURNAL};
    static char text[5000];
    char line[CAPTURE_BYTES];
    for (size_t bytes = 2; bytes < sizeof(text); bytes += 7) {
        const ep_log_format format = formats[bytes % 2];
        fill(text, bytes, "\"");
        CAPTURE(line, format, EP_LOG_INFO, "e", EP_KV(a, text), EP_KV(b, text), EP_KV(c, text),
                EP_KV(d, text), EP_KV(e, text), EP_KV(f, text), EP_KV(g, text),
                EP_KV(n, UINT64_MAX));
        parse(line + (format == EP_LOG_TEXT ? 0 : 3));
        bool is_whole = find("n") != NULL;
        for (const char *key = "abcdefg"; *key != 0; key++) {
            const char *value = find((const char[]){*key, 0});
            is_whole = is_whole && value != NULL && strcmp(value, text) == 0;
        }
        cr_assert_eq(is_whole, find("truncated") == NULL, "%zu bytes: %s", bytes, line);
        cr_assert(is_whole || bytes > 170, "%zu bytes: %s", bytes, line);
        cr_assert_not_null(find("e"), "%zu bytes: %s", bytes, line);
    }
}
