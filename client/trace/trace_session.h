/* SPDX-License-Identifier: Apache-2.0 */
/*
 * LTTng sessions through the program `lttng`. Recording needs that package's daemons anyway, so the
 * program is always there when they are; a library would add code to expertctl and nothing to what
 * it can do. Every call is made with --no-sessiond: the only session daemon started is the one
 * started here. Whoever of us ends the last session ends it; a file beside the daemon's own says
 * which one is ours.
 *
 * Threads  one at a time, and no other thread in the process.
 */
#ifndef EP_CLI_TRACE_SESSION_H
#define EP_CLI_TRACE_SESSION_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/error.h"

#define EP_CLI_SESSION_NAME_BYTES 64

typedef struct ep_cli_session {
    char name[EP_CLI_SESSION_NAME_BYTES];
    pid_t daemon; /* a session daemon of ours; 0 none */
    bool created;
} ep_cli_session;

typedef struct ep_cli_session_options {
    const char *name;    /* NULL: a unique one */
    const char *dir;     /* where the recording goes */
    bool overwrite;      /* a ring that is written by ep_cli_session_snapshot only */
    uint32_t subbuf_kib; /* size of one sub-buffer, a power of 2 */
    uint32_t subbufs;    /* per CPU and user, a power of 2, at least 2 */
} ep_cli_session_options;

/* A recording that runs. UNAVAILABLE: lttng-tools is not installed, or no session daemon can be
 * had. On an error everything is cleaned up. */
ep_err ep_cli_session_start(ep_cli_session *session, const ep_cli_session_options *options,
                            ep_error *out_error);
/* Stops, destroys, ends the daemon when it is ours and nobody else records. What was recorded is on
 * disk afterwards. */
ep_err ep_cli_session_end(ep_cli_session *session, ep_error *out_error);

/* Writes what the ring of the session holds into dir. NOT_FOUND: there is no such session. */
ep_err ep_cli_session_snapshot(const char *name, const char *dir, ep_error *out_error);
/* Ends a session that another process started, and the daemon as _end does. */
ep_err ep_cli_session_drop(const char *name, ep_error *out_error);

/* Processes that offer events of expertd to the session daemon; -1: cannot tell. */
int ep_cli_session_providers(void);

/* Signals SIGINT, SIGTERM, SIGHUP wait until _wait from here on. */
void ep_cli_session_hold_signals(void);
/* Runs command (argv form) when not NULL, else waits seconds. Ends early at a held signal, which a
 * command gets too. *out_code: the command's exit code, or 0. */
ep_err ep_cli_session_wait(char *const *command, double seconds, int *out_code,
                           bool *out_interrupted, ep_error *out_error);

#endif
