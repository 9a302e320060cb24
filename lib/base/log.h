/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One line per event: level, stable event id, then "word value" pairs:
 *     W rpc-oversize peer 10.0.0.7:5555 frame_bytes 9437184 frame_bytes_max 8388608
 *
 * error  cannot do what was asked      warn  odd, carrying on, and says so
 * info   one line per lifecycle change debug per object. Nothing per batch.
 *
 * Only our programs call ep_log_start; libexpertd itself stays silent.
 * Threads: any; a line is written by one write(2).
 */
#ifndef EP_BASE_LOG_H
#define EP_BASE_LOG_H

#include <stdbool.h>

typedef enum ep_log_level { EP_LOG_ERROR, EP_LOG_WARN, EP_LOG_INFO, EP_LOG_DEBUG, EP_LOG_OFF = -1 } ep_log_level;
typedef enum ep_log_format { EP_LOG_TEXT, EP_LOG_JSON, EP_LOG_JOURNAL } ep_log_format;

/* Until called nothing is written. Writes to stderr. JOURNAL prefixes "<N>" for systemd. */
void ep_log_start(ep_log_level level, ep_log_format format);
bool ep_log_enabled(ep_log_level level);
void ep_log(ep_log_level level, const char *event_id, const char *format, ...) __attribute__((format(printf, 3, 4)));

#endif
