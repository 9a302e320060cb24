/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One line per event: time, level, event id, then fields. The text form is logfmt:
 *
 *     time=2026-01-31T08:15:30.123Z level=warn event=rpc-oversize peer=10.0.0.7:5555
 *         frame_bytes=9437184
 *
 * JSON has the same keys, with numbers and booleans as such. The journal's form begins with the
 * priority of syslog and has no time and level, which the journal keeps.
 *
 * error  cannot do what was asked      warn  unexpected, but going on, and says so
 * info   one line per lifecycle change debug per object. Nothing per batch.
 *
 * Keys    snake_case, units last; one name for one thing in all lines: node model layer expert peer
 *         url path key state term epoch. Prose is in reason (why), effect (what follows) and hint
 *         (what to do); a warning or error has a reason or a hint.
 * Values  as escaped by ep_text_escape. In text a value is quoted, with \" and \\ inside, unless it
 *         is ASCII without blanks, quotes, = and \.
 * Limits  EP_LOG_LINE_BYTES. Beyond it values are cut and fields are left out, and the line ends
 *         with truncated=true.
 *
 * Only our programs call ep_log_start; libexpertd itself stays silent.
 * Threads: any; a line is written by one write(2).
 */
#ifndef EP_BASE_LOG_H
#define EP_BASE_LOG_H

#include <stdbool.h>

/* PIPE_BUF, so that lines of programs that share a pipe do not mix */
#define EP_LOG_LINE_BYTES 4096

typedef enum ep_log_level {
    EP_LOG_ERROR,
    EP_LOG_WARN,
    EP_LOG_INFO,
    EP_LOG_DEBUG,
    EP_LOG_OFF = -1
} ep_log_level;
typedef enum ep_log_format { EP_LOG_TEXT, EP_LOG_JSON, EP_LOG_JOURNAL } ep_log_format;

/* Made by EP_KV. */
typedef struct ep_log_field {
    const char *key;
    enum { EP_LOG_FIELD_TEXT, EP_LOG_FIELD_INT, EP_LOG_FIELD_UINT, EP_LOG_FIELD_BOOL } type;
    union {
        const char *text;
        long long i;
        unsigned long long u;
        bool b;
    } value;
} ep_log_field;

/* Writes to stderr from now on; before, nothing is written. JOURNAL prefixes "<N>" for systemd. */
void ep_log_start(ep_log_level level, ep_log_format format);
bool ep_log_enabled(ep_log_level level);

/*
 * Usage: ep_log(EP_LOG_INFO, "node-state", EP_KV(node, name), EP_KV(silent_ms, ms)), with at least
 * one field. The value's type (integer, bool or text) decides how it is written. A NULL text leaves
 * its field out.
 */
#define ep_log(level, event_id, ...)                                                               \
    ep_log_fields(level, event_id, (const ep_log_field[]){__VA_ARGS__, {.key = NULL}})
#define EP_KV(name, of)                                                                            \
    _Generic((of),                        \
        char *: ep_log_field_text,        \
        const char *: ep_log_field_text,  \
        bool: ep_log_field_bool,          \
        int: ep_log_field_int,            \
        long: ep_log_field_int,           \
        long long: ep_log_field_int,      \
        unsigned: ep_log_field_uint,      \
        unsigned long: ep_log_field_uint, \
        unsigned long long: ep_log_field_uint)(#name, of)

void ep_log_fields(ep_log_level level, const char *event_id, const ep_log_field *fields);

static inline ep_log_field ep_log_field_text(const char *key, const char *text)
{
    return (ep_log_field){.key = key, .type = EP_LOG_FIELD_TEXT, .value.text = text};
}

static inline ep_log_field ep_log_field_int(const char *key, long long value)
{
    return (ep_log_field){.key = key, .type = EP_LOG_FIELD_INT, .value.i = value};
}

static inline ep_log_field ep_log_field_uint(const char *key, unsigned long long value)
{
    return (ep_log_field){.key = key, .type = EP_LOG_FIELD_UINT, .value.u = value};
}

static inline ep_log_field ep_log_field_bool(const char *key, bool value)
{
    return (ep_log_field){.key = key, .type = EP_LOG_FIELD_BOOL, .value.b = value};
}

#endif
