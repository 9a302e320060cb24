/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reload at SIGHUP: reads the same command line, environment and file again. A wrong configuration
 * changes nothing. Reloadable keys take effect; keys that need a restart are named in the log, at
 * each reload until the restart.
 *
 * Threads: the loop's.
 */
#ifndef EP_SERVER_COMMON_RELOAD_H
#define EP_SERVER_COMMON_RELOAD_H

#include "options/options.h"

/* Set the first four; zero the rest. */
typedef struct ep_reload {
    const ep_options *started; /* options at the start; borrowed */
    int argc;
    char **argv;
    ep_options_check_func check;
    ep_options *current; /* the last good reload; owned, NULL before the first */
} ep_reload;

#define EP_RELOAD_KEYS_MAX 128

/* The result of a reload; names are the option table's. */
typedef struct ep_reload_report {
    const char *changed[EP_RELOAD_KEYS_MAX]; /* keys that changed */
    size_t changed_count;
    const char *need_restart[EP_RELOAD_KEYS_MAX]; /* keys that differ from those at the start */
    size_t need_restart_count;
} ep_reload_report;

/*
 * Tells the service manager that a reload begins, reads and checks the options, sets log level and
 * format, and logs every change. Returns the new options, valid until the next reload, or NULL with
 * the reason in *out_error (BAD_CONFIG, NOT_FOUND, IO, NO_MEMORY). out_report may be NULL. The
 * caller applies its own reloadable values and then calls ep_sd_notify_ready, also after NULL.
 */
const ep_options *ep_reload_run(ep_reload *reload, ep_reload_report *out_report,
                                ep_error *out_error);
/* The options in force for a key: those at the start, unless the key is reloadable. */
const ep_options *ep_reload_in_force(const ep_reload *reload, const ep_option *option);
void ep_reload_fini(ep_reload *reload);

#endif
