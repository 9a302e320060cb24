/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The terminal of a command that redraws it: the alternate screen, keys without echo, and signals
 * as events. The former content is restored however the program ends, except by SIGKILL.
 *
 * Threads  _prepare before any thread is started, the others on one thread. A process has one
 *          terminal.
 */
#ifndef EP_CLI_TERMINAL_H
#define EP_CLI_TERMINAL_H

#include <stdbool.h>

#include "base/error.h"

typedef enum ep_cli_event {
    EP_CLI_EVENT_TIME,   /* the time has come */
    EP_CLI_EVENT_QUIT,   /* q, end of input, SIGINT, SIGTERM, SIGHUP */
    EP_CLI_EVENT_REDRAW, /* the size has changed, or the program was continued */
    EP_CLI_EVENT_UP,
    EP_CLI_EVENT_DOWN,
    EP_CLI_EVENT_PAGE_UP,
    EP_CLI_EVENT_PAGE_DOWN
} ep_cli_event;

/* Makes signals events. Errors: IO. */
ep_err ep_cli_terminal_prepare(ep_error *out_error);
/* False, with nothing changed: input or output is not a terminal, or it cannot move its cursor. */
bool ep_cli_terminal_open(void);
/* Shows lines from the top and erases the rest. */
void ep_cli_terminal_draw(const char *lines);
/* Without an open terminal: no-op. */
void ep_cli_terminal_close(void);

/* Waits for the next event, at most until until_ns of ep_clock_now_ns(). Keys count only on an open
 * terminal. */
ep_cli_event ep_cli_terminal_wait(uint64_t until_ns);

#endif
