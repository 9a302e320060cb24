/* SPDX-License-Identifier: Apache-2.0 */
/* Progress: the bar's exact text, when lines are due, and what the log gets. */
#include <criterion/criterion.h>

#include <pty.h>
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
        size_t columns;
        const char *text;
    } cases[] = {
        {{"demo", 0, 64, 0, 3 * GIB, 0},
         120,
         "loading demo [..........]   0 % 0/64 experts 0 B of 3.0 GiB"},
        {{"demo", 32, 64, 3 * GIB / 8, 3 * GIB, 3 * SECOND},
         120,
         "loading demo [#.........]  12 % 32/64 experts 384 MiB of 3.0 GiB 128 MiB/s 21 s left"},
        {{"demo", 63, 64, 3 * GIB, 3 * GIB, 6 * SECOND},
         120,
         "loading demo [#########.]  99 % 63/64 experts 3.0 of 3.0 GiB 512 MiB/s"},
        {{NULL, 1, 4, 2048, 0, SECOND},
         120,
         "loading experts [##........]  25 % 1/4 experts 2.0 KiB 2.0 KiB/s"},
        {{"demo", 32, 64, 3 * GIB / 2, 3 * GIB, 3 * SECOND},
         120,
         "loading demo [#####.....]  50 % 32/64 experts 1.5 of 3.0 GiB 512 MiB/s 3 s left"},
        {{"demo", 64, 64, 3 * GIB, 3 * GIB, 6 * SECOND},
         79,
         "loading demo [##########] 100 % 3.0 of 3.0 GiB 512 MiB/s in 6.0 s"},
        {{"qwen3-235b-a22b-instruct", 32, 64, 3 * GIB / 2, 3 * GIB, 3 * SECOND},
         79,
         "loading qwen3-235b..-instruct [#####.....]  50 % 1.5 of 3.0 GiB 3 s left"},
        {{"demo", 32, 64, 3 * GIB / 2, 3 * GIB, 3 * SECOND}, 39, "loading demo  50 % 3 s left"},
        {{"qwen3-235b", 32, 64, 3 * GIB / 2, 3 * GIB, 3 * SECOND}, 19, "loading qwen3-235b "},
        {{"none", 0, 0, 0, 0, 0}, 79, "loading none [##########] 100 % 0 B"},
    };
    for (size_t i = 0; i < EP_ARRAY_COUNT(cases); i++) {
        char line[EP_LOAD_PROGRESS_LINE_BYTES];
        ep_load_format(&cases[i].state, cases[i].columns, line);
        cr_expect_str_eq(line, cases[i].text, "case %zu: '%s' instead of '%s'", i, line,
                         cases[i].text);
    }
}

Test(load_progress, extreme_values_fit_the_line)
{
    char line[EP_LOAD_PROGRESS_LINE_BYTES];
    char label[400];
    memset(label, 'm', sizeof(label) - 1);
    label[sizeof(label) - 1] = '\0';
    ep_load_state state = {label, UINT64_MAX - 1, UINT64_MAX, 1, UINT64_MAX, 1};
    for (size_t columns = 1; columns < 300; columns++) {
        ep_load_format(&state, columns, line);
        cr_expect_eq(line[0], 'l');
        cr_expect_leq(strlen(line), columns);
    }
    cr_assert_eq(ep_load_percent(&state), 0);
    state.bytes_done = UINT64_MAX;
    cr_assert_eq(ep_load_percent(&state), 99, "not all experts are done");
}

Test(load_progress, lines_come_every_tenth_or_half_a_minute_and_a_second_apart)
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
    state.elapsed_ns = 30 * SECOND;
    cr_assert(ep_load_due(&state, false, 10, 0));
    cr_assert_not(ep_load_due(&state, false, 10, 1));
    cr_assert(ep_load_due(&state, true, 10, 29 * SECOND));
    state.experts_done = 100;
    cr_assert(ep_load_due(&state, false, 90, 30 * SECOND));
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
    expect_last_line(1000, "<6>event=expert-loading model=demo percent=100 experts=1000 "
                           "experts_total=1000 bytes=4096000 bytes_total=4096000 bytes_per_s=");
    /* the others were not wanted any more */
    expect_last_line(499, "<6>event=expert-loading model=demo percent=49 experts=499 "
                          "experts_total=1000 bytes=2043904 bytes_total=4096000 bytes_per_s=");
}

/* On a terminal of 40 columns: what one line shows at the end, and nothing that scrolls. */
static void expect_drawn(uint64_t experts, const char *wanted)
{
    struct winsize size = {.ws_col = 40, .ws_row = 24};
    char text[8192];
    int master;
    int slave;
    ep_load_progress progress;
    cr_assert_eq(openpty(&master, &slave, NULL, NULL, &size), 0);
    ep_load_progress_init(&progress, slave, "a-model-of-a-long-name", 50, 50 * 4096);
    for (uint64_t i = 0; i < experts; i++) {
        progress.started_ns -= EP_LOAD_PROGRESS_REDRAW_NS; /* each is drawn */
        ep_load_progress_add(&progress, 1, 4096);
    }
    ep_load_progress_fini(&progress);
    size_t count = 0;
    do { /* a line end is the last that comes */
        ssize_t n = read(master, text + count, sizeof(text) - 1 - count);
        cr_assert_gt(n, 0);
        count += (size_t)n;
        text[count] = '\0';
    } while (strchr(text, '\n') == NULL);
    close(master);
    close(slave);
    cr_assert_gt(count, experts * 30);
    cr_assert_not_null(strstr(text, wanted), "%s", text);
    cr_assert_eq(strchr(text, '\n'), text + count - 1, "only the last line ends: %s", text);
    for (char *rest = text, *drawn; (drawn = strsep(&rest, "\r\n")) != NULL;) {
        char *erase = strstr(drawn, "\033[K");
        cr_expect(drawn[0] == '\0' || (erase != NULL && erase - drawn < 40), "%s", drawn);
    }
}

Test(load_progress, a_terminal_gets_one_line)
{
    expect_drawn(50, "loading a-mode..g-name 100 % in 5.0 s\033[K\r\n");
    expect_drawn(49, "loading a-mode..g-name  98 % 0 s left\033[K\r\r\n");
}
