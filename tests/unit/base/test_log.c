/* SPDX-License-Identifier: Apache-2.0 */
#include "base/log.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Names in log lines may come from peers. */
Test(log, one_event_is_one_line_without_control_characters)
{
    static const ep_log_format formats[] = {EP_LOG_TEXT, EP_LOG_JSON, EP_LOG_JOURNAL};
    for (size_t i = 0; i < sizeof(formats) / sizeof(formats[0]); i++) {
        char line[512] = "";
        int ends[2];
        int before = dup(STDERR_FILENO);
        cr_assert(before >= 0 && pipe(ends) == 0 && dup2(ends[1], STDERR_FILENO) >= 0);
        ep_log_start(EP_LOG_INFO, formats[i]);
        ep_log(EP_LOG_INFO, "node-registered", "node %s url x", "a\nb\r\x1b[31mc\x7f\t\xc3\xa4");
        ep_log_start(EP_LOG_OFF, EP_LOG_TEXT);
        ssize_t count = read(ends[0], line, sizeof(line) - 1);
        cr_assert(dup2(before, STDERR_FILENO) >= 0);
        close(before);
        close(ends[0]);
        close(ends[1]);
        cr_assert(count > 0 && line[count - 1] == '\n', "%s", line);
        for (ssize_t c = 0; c < count - 1; c++) {
            cr_assert((unsigned char)line[c] >= 0x20 && line[c] != 0x7f, "format %zu, byte %zd of %s", i, c, line);
        }
        cr_expect_not_null(strstr(line, formats[i] == EP_LOG_JSON ? "node a\\\\x0ab\\\\x0d\\\\x1b[31mc\\\\x7f\\\\x09\xc3\xa4 url x" : "node a\\x0ab\\x0d\\x1b[31mc\\x7f\\x09\xc3\xa4 url x"), "%s", line);
    }
}
