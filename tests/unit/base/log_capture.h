/* SPDX-License-Identifier: Apache-2.0 */
/* For tests of the log: what a call of ep_log writes, and texts that must not break its line. */
#ifndef EP_TESTS_UNIT_BASE_LOG_CAPTURE_H
#define EP_TESTS_UNIT_BASE_LOG_CAPTURE_H

#include "base/log.h"

#include <criterion/criterion.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"

typedef struct hostile_text {
    const char *from, *wanted; /* what a reader of the line gets */
} hostile_text;

static const hostile_text hostile_texts[] = {
    {"plain-1.5:7420", "plain-1.5:7420"},
    {"", ""},
    {"two words", "two words"},
    {" ", " "},
    {"a=b", "a=b"},
    {"x level=error event=audit-admin", "x level=error event=audit-admin"},
    {"x\" level=error y=\"", "x\" level=error y=\""},
    {"x\",\"level\":\"error\",\"y\":\"", "x\",\"level\":\"error\",\"y\":\""},
    {"\"", "\""},
    {"'", "'"},
    {"\\", "\\"},
    {"ends in \\", "ends in \\"},
    {"\\\" level=error", "\\\" level=error"},
    {"a\ntime=2026-01-31T08:15:30.123Z level=error event=forged",
     "a\\x0atime=2026-01-31T08:15:30.123Z level=error event=forged"},
    {"a\nb\r\x1b[31mc\x7f\t\v", "a\\x0ab\\x0d\\x1b[31mc\\x7f\\x09\\x0b"},
    {"größe 日本 🎉", "größe 日本 🎉"},
    {"\xff\xfe\xc0\xaf", "\\xff\\xfe\\xc0\\xaf"},
    {"\xed\xa0\x80", "\\xed\\xa0\\x80"},
    {"cut \xe6\x97", "cut \\xe6\\x97"},
    {"\xe2\x80\xa8\xe2\x80\xae\xc2\x85", "\\xe2\\x80\\xa8\\xe2\\x80\\xae\\xc2\\x85"},
    {"true", "true"},
    {"12", "12"},
    {"null", "null"},
    {"}", "}"},
    {"%s%n", "%s%n"},
};

#define CAPTURE_BYTES (2 * EP_LOG_LINE_BYTES)

/* One line, with its end taken off; "" when nothing was written. It is printable, and the only
 * one. */
#define CAPTURE(line, format, ...)                                                                 \
    do {                                                                                           \
        int ends_[2];                                                                              \
        const int before_ = dup(STDERR_FILENO);                                                    \
        cr_assert(before_ >= 0 && pipe(ends_) == 0 && dup2(ends_[1], STDERR_FILENO) >= 0);         \
        ep_log_start(EP_LOG_INFO, format);                                                         \
        ep_log(__VA_ARGS__);                                                                       \
        ep_log_start(EP_LOG_OFF, EP_LOG_TEXT);                                                     \
        cr_assert(dup2(before_, STDERR_FILENO) >= 0 && close(before_) == 0 &&                      \
                  close(ends_[1]) == 0);                                                           \
        capture_read(ends_[0], line);                                                              \
    } while (0)

static inline void capture_read(int fd, char line[CAPTURE_BYTES])
{
    const ssize_t count = read(fd, line, CAPTURE_BYTES - 1);
    close(fd);
    cr_assert(count >= 0 && count <= EP_LOG_LINE_BYTES);
    line[count] = 0;
    if (count > 0) {
        cr_assert_eq(line[count - 1], '\n', "%s", line);
        line[count - 1] = 0;
    }
    for (const char *c = line; *c != 0; c++) {
        cr_assert((unsigned char)*c >= 0x20 && *c != 0x7f, "byte %td of %s", c - line, line);
    }
    cr_assert_eq(strlen(line), count > 0 ? (size_t)count - 1 : 0u, "a 0 in %s", line);
}

#endif
