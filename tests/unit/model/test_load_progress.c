/* SPDX-License-Identifier: Apache-2.0 */
/* Progress: the bar's exact text, when lines are due, and what the log gets. */
#include <criterion/criterion.h>

#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/log.h"
#include "model/load_progress.h"

#define GIB (1ull << 30)
#define SECOND 1000000000ull

Test(load_progress, formats_exactly)
{
    static const struct {
        ep_load_state state;
        const char *text;
    } cases[] = {
        {{"demo", 0, 64, 0, 3 * GIB, 0}, "loading demo [....................]   0 % 0/64 experts 0 B of 3.0 GiB"},
        {{"demo", 32, 64, 3 * GIB / 2, 3 * GIB, 3 * SECOND},
         "loading demo [##########..........]  50 % 32/64 experts 1.5 GiB of 3.0 GiB 512 MiB/s 3 s left"},
        {{"demo", 64, 64, 3 * GIB, 3 * GIB, 6 * SECOND},
         "loading demo [####################] 100 % 64/64 experts 3.0 GiB of 3.0 GiB 512 MiB/s in 6.0 s"},
        {{"demo", 63, 64, 3 * GIB, 3 * GIB, 6 * SECOND},
         "loading demo [###################.]  99 % 63/64 experts 3.0 GiB of 3.0 GiB 512 MiB/s"},
        {{NULL, 1, 4, 2048, 0, SECOND}, "loading experts [#####...............]  25 % 1/4 experts 2.0 KiB 2.0 KiB/s"},
        {{"none", 0, 0, 0, 0, 0}, "loading none [####################] 100 % 0/0 experts 0 B"},
    };
    for (size_t i = 0; i < EP_ARRAY_COUNT(cases); i++) {
        char line[EP_LOAD_PROGRESS_LINE_BYTES];
        size_t length = ep_load_format_bar(&cases[i].state, line);
        cr_expect_str_eq(line, cases[i].text, "%s", line);
        cr_expect_eq(length, strlen(line));
    }
}

Test(load_progress, extreme_values_fit_the_line)
{
    char line[EP_LOAD_PROGRESS_LINE_BYTES];
    char label[400];
    memset(label, 'm', sizeof(label) - 1);
    label[sizeof(label) - 1] = '\0';
    ep_load_state state = {label, UINT64_MAX - 1, UINT64_MAX, 1, UINT64_MAX, 1};
    cr_assert_lt(ep_load_format_bar(&state, line), sizeof(line));
    cr_assert_eq(ep_load_percent(&state), 0);
    state.bytes_done = UINT64_MAX;
    cr_assert_lt(ep_load_format_bar(&state, line), sizeof(line));
    cr_assert_eq(ep_load_percent(&state), 99, "not all experts are done");
}

Test(load_progress, lines_come_every_tenth_or_five_seconds_and_a_second_apart)
{
    ep_load_state state = {"m", 9, 100, 0, 0, SECOND};
    cr_assert_not(ep_load_due(&state, false, 0, 0));
    state.experts_done = 10;
    cr_assert(ep_load_due(&state, false, 0, 0));
    cr_assert_not(ep_load_due(&state, false, 10, 0));
    state.experts_done = 50;
    state.elapsed_ns = 2 * SECOND - 1;
    cr_assert_not(ep_load_due(&state, false, 10, SECOND), "a second has not passed");
    state.elapsed_ns = 2 * SECOND;
    cr_assert(ep_load_due(&state, false, 10, SECOND));
    state.experts_done = 10;
    state.elapsed_ns = 5 * SECOND;
    cr_assert(ep_load_due(&state, false, 10, 0));
    cr_assert_not(ep_load_due(&state, false, 10, 1));
    cr_assert(ep_load_due(&state, true, 10, 4 * SECOND));
    state.experts_done = 100;
    cr_assert(ep_load_due(&state, false, 90, 5 * SECOND));
    cr_assert_not(ep_load_due(&state, false, 100, 0), "the end is written once");
}

/* What a quick load of so many of 1000 experts logs: one line, of where it ended. */
static void expect_last_line(int experts, const char *wanted)
{
    int fds[2];
    char text[8192];
    ep_load_progress progress;
    const int before = dup(STDERR_FILENO);
    cr_assert(before >= 0 && pipe(fds) == 0 && dup2(fds[1], STDERR_FILENO) >= 0);
    ep_log_start(EP_LOG_INFO, EP_LOG_JOURNAL);
    ep_load_progress_init(&progress, STDERR_FILENO, "demo", 1000, 1000 * 4096);
    for (int i = 0; i < experts; i++) {
        ep_load_progress_add(&progress, 1, 4096);
    }
    ep_load_progress_fini(&progress);
    ep_log_start(EP_LOG_OFF, EP_LOG_TEXT);
    cr_assert(dup2(before, STDERR_FILENO) >= 0 && close(before) == 0 && close(fds[1]) == 0);
    ssize_t count = read(fds[0], text, sizeof(text) - 1);
    close(fds[0]);
    cr_assert_gt(count, 0);
    text[count] = '\0';
    cr_assert_eq(strncmp(text, wanted, strlen(wanted)), 0, "%s", text);
    cr_assert_eq(strcspn(text, "\n"), (size_t)count - 1, "%s", text);
}

Test(load_progress, without_a_terminal_the_log_tells)
{
    expect_last_line(1000, "<6>event=expert-loading model=demo percent=100 experts=1000 experts_total=1000 bytes=4096000 bytes_total=4096000 bytes_per_s=");
    /* the others were not wanted any more */
    expect_last_line(499, "<6>event=expert-loading model=demo percent=49 experts=499 experts_total=1000 bytes=2043904 bytes_total=4096000 bytes_per_s=");
}
