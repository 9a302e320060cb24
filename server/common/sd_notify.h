/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The service manager's protocol: one datagram per message to the socket in $NOTIFY_SOCKET. Without
 * that variable every call does nothing. Needs no library. A send waits at most 2 seconds for a
 * manager that does not read. Threads: any, as long as the environment does not change.
 */
#ifndef EP_SERVER_COMMON_SD_NOTIFY_H
#define EP_SERVER_COMMON_SD_NOTIFY_H

#include <stdbool.h>
#include <stdint.h>

/* These return false when it was not sent, or there is no socket. */
bool ep_sd_notify_ready(const char *status);
bool ep_sd_notify_status(const char *format, ...) __attribute__((format(printf, 1, 2)));
bool ep_sd_notify_stopping(const char *status);
/* With MONOTONIC_USEC, without which some managers hang in reload. ep_sd_notify_ready must
 * follow. */
bool ep_sd_notify_reloading(void);
bool ep_sd_notify_watchdog(void);
/* Extends the time-out of start or stop to so much from now. */
bool ep_sd_notify_extend_timeout(uint64_t us);
/* Longest time between two ep_sd_notify_watchdog; 0: there is no watchdog. */
uint64_t ep_sd_watchdog_us(void);

#endif
