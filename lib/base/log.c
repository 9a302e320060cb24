/* SPDX-License-Identifier: Apache-2.0 */
/* The log line, as logfmt, JSON or with the journal's priority prefix. */
#include "base/log.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/check.h"
#include "base/printable.h"

/* the least bytes of a field: punctuation and a number or the start of a text */
#define FIELD_BYTES_MIN 32
#define END_BYTES sizeof(",\"truncated\":true}\n") /* including its 0 */

static _Atomic int log_level = EP_LOG_OFF;
static _Atomic int log_format = EP_LOG_TEXT;

static const char *const names[] = {"error", "warn", "info", "debug"};
static const char priorities[] = "3467"; /* syslog: err, warning, info, debug */

void ep_log_start(ep_log_level level, ep_log_format format)
{
    atomic_store(&log_format, (int)format);
    atomic_store(&log_level, (int)level);
}

bool ep_log_enabled(ep_log_level level)
{
    return (int)level <= atomic_load_explicit(&log_level, memory_order_relaxed);
}

static void put_time(char *out, size_t bytes)
{
    struct timespec now;
    struct tm parts;
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &parts);
    size_t n = strftime(out, bytes, "%Y-%m-%dT%H:%M:%S", &parts);
    snprintf(out + n, bytes - n, ".%03ldZ", now.tv_nsec / 1000000);
}

typedef struct log_line {
    ep_log_format format;
    bool is_cut;
    size_t used;
    char text[EP_LOG_LINE_BYTES];
} log_line;

static size_t room_in(const log_line *line)
{
    return sizeof(line->text) - END_BYTES - line->used;
}

/* For text that is known to fit. */
static void put(log_line *line, const char *text)
{
    const size_t bytes = strlen(text);
    EP_ASSERT(bytes < sizeof(line->text) - line->used);
    memcpy(line->text + line->used, text, bytes + 1);
    line->used += bytes;
}

static bool may_be_bare(const char *text)
{
    const char *c = text;
    while (*c > ' ' && *c < 0x7f && strchr("\"'=\\", *c) == NULL) {
        c++;
    }
    return c != text && *c == 0;
}

/* Uses at most half of the room (bytes may need backslashes), so that later fields get some. */
static void put_text(log_line *line, const char *text)
{
    char plain[EP_LOG_LINE_BYTES / 4];
    const size_t taken = ep_text_escape_part(text, plain, room_in(line) / 4);
    line->is_cut = line->is_cut || text[taken] != 0;
    if (line->format != EP_LOG_JSON && may_be_bare(plain)) {
        put(line, plain);
        return;
    }
    put(line, "\"");
    for (const char *c = plain; *c != 0; c++) {
        put(line, *c == '"' ? "\\\"" : *c == '\\' ? "\\\\" : (const char[]){*c, 0});
    }
    put(line, "\"");
}

static void put_field(log_line *line, const ep_log_field *field)
{
    const bool is_json = line->format == EP_LOG_JSON;
    char number[24];
    if (field->type == EP_LOG_FIELD_TEXT && field->value.text == NULL) {
        return;
    }
    if (strlen(field->key) + FIELD_BYTES_MIN > room_in(line)) {
        line->is_cut = true;
        return;
    }
    put(line, is_json ? ",\"" : " ");
    put(line, field->key);
    put(line, is_json ? "\":" : "=");
    switch (field->type) {
    case EP_LOG_FIELD_TEXT:
        put_text(line, field->value.text);
        return;
    case EP_LOG_FIELD_BOOL:
        put(line, field->value.b ? "true" : "false");
        return;
    case EP_LOG_FIELD_INT:
        snprintf(number, sizeof(number), "%lld", field->value.i);
        break;
    case EP_LOG_FIELD_UINT:
        snprintf(number, sizeof(number), "%llu", field->value.u);
        break;
    }
    put(line, number);
}

/* Event ids are ours, short, and need no quotes. */
static void put_head(log_line *line, ep_log_level level, const char *event_id)
{
    char stamp[40];
    int n = 0;
    put_time(stamp, sizeof(stamp));
    switch (line->format) {
    case EP_LOG_JSON:
        n = snprintf(line->text, sizeof(line->text),
                     "{\"time\":\"%s\",\"level\":\"%s\",\"event\":\"%s\"", stamp, names[level],
                     event_id);
        break;
    case EP_LOG_JOURNAL:
        n = snprintf(line->text, sizeof(line->text), "<%c>event=%s", priorities[level], event_id);
        break;
    case EP_LOG_TEXT:
        n = snprintf(line->text, sizeof(line->text), "time=%s level=%s event=%s", stamp,
                     names[level], event_id);
        break;
    }
    line->used = (size_t)n;
}

static void write_line(const char *line, size_t bytes)
{
    while (bytes > 0) {
        ssize_t n = write(STDERR_FILENO, line, bytes);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return; /* nobody reads our log: go on */
        }
        line += n;
        bytes -= (size_t)n;
    }
}

void ep_log_fields(ep_log_level level, const char *event_id, const ep_log_field *fields)
{
    if (!ep_log_enabled(level)) {
        return;
    }
    log_line line = {.format = (ep_log_format)atomic_load(&log_format)};
    put_head(&line, level, event_id);
    for (const ep_log_field *field = fields; field->key != NULL; field++) {
        put_field(&line, field);
    }
    if (line.is_cut) {
        put(&line, line.format == EP_LOG_JSON ? ",\"truncated\":true" : " truncated=true");
    }
    put(&line, line.format == EP_LOG_JSON ? "}\n" : "\n");
    write_line(line.text, line.used);
}
