/* SPDX-License-Identifier: Apache-2.0 */
/* The log line, as text, JSON or with the journal's priority prefix. */
#include "base/log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/printable.h"

#define LINE_BYTES 2048

static _Atomic int log_level = EP_LOG_OFF;
static _Atomic int log_format = EP_LOG_TEXT;

static const char letters[] = "EWID";
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

static size_t put_time(char *out, size_t bytes)
{
    struct timespec now;
    struct tm parts;
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &parts);
    size_t n = strftime(out, bytes, "%Y-%m-%dT%H:%M:%S", &parts);
    return n + (size_t)snprintf(out + n, bytes - n, ".%03ldZ", now.tv_nsec / 1000000);
}

/* Of printable text; out has twice its bytes. */
static void json_escape(char *out, const char *text)
{
    for (; *text != 0; text++) {
        if (*text == '"' || *text == '\\') {
            *out++ = '\\';
        }
        *out++ = *text;
    }
    *out = 0;
}

static void write_line(const char *line, size_t bytes)
{
    while (bytes > 0) {
        ssize_t n = write(STDERR_FILENO, line, bytes);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return; /* nobody reads our log: carry on */
        }
        line += n;
        bytes -= (size_t)n;
    }
}

void ep_log(ep_log_level level, const char *event_id, const char *format, ...)
{
    if (!ep_log_enabled(level)) {
        return;
    }
    char said[LINE_BYTES / 2];
    char text[LINE_BYTES / 2];
    char stamp[40];
    char line[LINE_BYTES + 512];
    va_list args;
    va_start(args, format);
    vsnprintf(said, sizeof(said), format, args);
    va_end(args);
    ep_text_escape(said, text, sizeof(text)); /* one event, one line; and what peers say must not steer a terminal */

    int n;
    put_time(stamp, sizeof(stamp));
    switch ((ep_log_format)atomic_load(&log_format)) {
    case EP_LOG_JSON: {
        char escaped[2 * sizeof(text)];
        json_escape(escaped, text);
        n = snprintf(line, sizeof(line), "{\"time\":\"%s\",\"level\":\"%s\",\"event\":\"%s\",\"message\":\"%s\"}\n",
                     stamp, names[level], event_id, escaped);
        break;
    }
    case EP_LOG_JOURNAL:
        n = snprintf(line, sizeof(line), "<%c>%s %s\n", priorities[level], event_id, text);
        break;
    case EP_LOG_TEXT:
    default:
        n = snprintf(line, sizeof(line), "%s %c %s %s\n", stamp, letters[level], event_id, text);
        break;
    }
    if (n > 0) {
        write_line(line, (size_t)n < sizeof(line) ? (size_t)n : sizeof(line) - 1);
    }
}
