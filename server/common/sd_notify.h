/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The service manager's protocol: one datagram per message to the socket $NOTIFY_SOCKET names.
 * Without that variable every call does nothing. Needs no library. A send waits at most 2 seconds
 * for a manager that does not read. Threads: any, as long as nobody changes the environment.
 */
#ifndef EP_SERVER_COMMON_SD_NOTIFY_H
#define EP_SERVER_COMMON_SD_NOTIFY_H

#include <stdbool.h>
#include <stdint.h>

/* Sends text as it is, "READY=1\nSTATUS=...". False when it could not be sent (also when there is
 * no socket).
 */
bool ep_sd_notify(const char *text);
bool ep_sd_notify_ready(const char *status);
bool ep_sd_notify_status(const char *format, ...) __attribute__((format(printf, 1, 2)));
bool ep_sd_notify_stopping(const char *status);
/* With MONOTONIC_USEC: managers that wait for it otherwise hang in reload. Follow with
 * ep_sd_notify_ready. */
bool ep_sd_notify_reloading(void);
bool ep_sd_notify_watchdog(void);
/* Gives start or stop this much more time from now. */
bool ep_sd_notify_extend_timeout(uint64_t us);
/* How often ep_sd_notify_watchdog is due at the latest; 0: the manager does not ask for it. */
uint64_t ep_sd_watchdog_us(void);

#endif
