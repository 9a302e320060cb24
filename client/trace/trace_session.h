/* SPDX-License-Identifier: Apache-2.0 */
/*
 * LTTng sessions through the program `lttng`. Recording needs that package's daemons anyway, so a
 * library would only add a dependency. Every call has --no-sessiond: only the code here starts a
 * session daemon. The expertctl that ends the last session also ends a daemon which an expertctl
 * started; a file beside the daemon's own names its pid.
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
    pid_t daemon; /* the session daemon started for this session; 0: none */
    bool created;
} ep_cli_session;

typedef struct ep_cli_session_options {
    const char *name; /* NULL: a unique one */
    const char *dir;  /* folder of the recording */
    /* keep events in a ring, which only ep_cli_session_snapshot writes to disk */
    bool overwrite;
    uint32_t subbuf_kib; /* size of one sub-buffer, a power of 2 */
    uint32_t subbufs;    /* per CPU and user, a power of 2, at least 2 */
} ep_cli_session_options;

/* Starts a recording. UNAVAILABLE: lttng-tools is not installed, or no session daemon can be
 * started. On an error everything is cleaned up. */
ep_err ep_cli_session_start(ep_cli_session *session, const ep_cli_session_options *options,
                            ep_error *out_error);
/* Stops and destroys the session, and ends the daemon if an expertctl started it and nobody else
 * records. Afterwards the recording is on disk. */
ep_err ep_cli_session_end(ep_cli_session *session, ep_error *out_error);

/* Writes the contents of the session's ring into dir. IO: also when there is no such session. */
ep_err ep_cli_session_snapshot(const char *name, const char *dir, ep_error *out_error);
/* Ends a session that another process started, and the daemon as ep_cli_session_end does. */
ep_err ep_cli_session_drop(const char *name, ep_error *out_error);

/* Counts processes that offer events of expertd to the session daemon; -1: unknown. */
int ep_cli_session_providers(void);

/* Blocks SIGINT, SIGTERM and SIGHUP until ep_cli_session_wait takes them. */
void ep_cli_session_hold_signals(void);
/* Runs command (argv form) if not NULL, else waits so many seconds. A blocked signal ends the wait
 * early; a command gets the signal too. *out_code: the command's exit code, or 0. */
ep_err ep_cli_session_wait(char *const *command, double seconds, int *out_code,
                           ep_error *out_error);

#endif
