/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The terminal of a command that draws on it again and again: the alternate screen, keys without
 * echo, and the signals that end or change it as events. What stood on the terminal comes back
 * however the program ends, but for SIGKILL.
 *
 * Threads  _prepare before the first thread is started, all else from one. There is one terminal in
 *          a process.
 */
#ifndef EP_CLI_TERMINAL_H
#define EP_CLI_TERMINAL_H

#include <stdbool.h>

#include "base/error.h"

typedef enum ep_cli_event {
    EP_CLI_EVENT_TIME,   /* what was waited for */
    EP_CLI_EVENT_QUIT,   /* q, end of input, SIGINT, SIGTERM, SIGHUP */
    EP_CLI_EVENT_REDRAW, /* another size, or back from a stop */
    EP_CLI_EVENT_UP,
    EP_CLI_EVENT_DOWN,
    EP_CLI_EVENT_PAGE_UP,
    EP_CLI_EVENT_PAGE_DOWN
} ep_cli_event;

/* From here on signals are events. Errors: IO. */
ep_err ep_cli_terminal_prepare(ep_error *out_error);
/* False, and nothing is changed: input or output is no terminal, or one that cannot move its
 * cursor. */
bool ep_cli_terminal_open(void);
/* Shows lines from the top on; what was there before is erased. */
void ep_cli_terminal_draw(const char *lines);
/* Without an open terminal: no-op. */
void ep_cli_terminal_close(void);

/* The next event, until ep_clock_now_ns() is until_ns. Keys count only on an open terminal. */
ep_cli_event ep_cli_terminal_wait(uint64_t until_ns);

#endif
