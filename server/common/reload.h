/* SPDX-License-Identifier: Apache-2.0 */
/*
 * SIGHUP: the same command line, environment and file are read again. A configuration that is wrong
 * changes nothing. What can change while the program runs does; what needs a restart is named in
 * the log, each time until the restart.
 *
 * Threads: the loop's.
 */
#ifndef EP_SERVER_COMMON_RELOAD_H
#define EP_SERVER_COMMON_RELOAD_H

#include "options/options.h"

/* Set the first four; zero the rest. */
typedef struct ep_reload {
    const ep_options *started; /* what the program started with; borrowed */
    int argc;
    char **argv;
    ep_options_check_func check;
    ep_options *current; /* the last good reload; owned, NULL before the first */
} ep_reload;

#define EP_RELOAD_KEYS_MAX 128

/* What a reload did; names are the option table's. */
typedef struct ep_reload_report {
    const char *changed[EP_RELOAD_KEYS_MAX]; /* in force now */
    size_t changed_count;
    const char *need_restart[EP_RELOAD_KEYS_MAX]; /* other than what the program started with */
    size_t need_restart_count;
} ep_reload_report;

/*
 * Tells the service manager that a reload begins, reads, checks, sets log level and format, and
 * logs every change. Returns the new options, valid until the next reload, or NULL when they were
 * refused; *out_error then says why (BAD_CONFIG, NOT_FOUND, IO, NO_MEMORY). out_report may be NULL.
 * The caller takes over the reloadable values that are its own and then sends ep_sd_notify_ready,
 * also after a refusal.
 */
const ep_options *ep_reload_run(ep_reload *reload, ep_reload_report *out_report,
                                ep_error *out_error);
/* The options in force for a key: what it started with, unless the key is reloadable. */
const ep_options *ep_reload_in_force(const ep_reload *reload, const ep_option *option);
void ep_reload_fini(ep_reload *reload);

#endif
