/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checks TLS files before anything listens or dials. The network library would only report
 * "cryptographic error", and only at a connection.
 */
#ifndef EP_SERVER_COMMON_SERVICE_TLS_H
#define EP_SERVER_COMMON_SERVICE_TLS_H

#include <pthread.h>

#include "common/metrics.h"
#include "common/probes.h"
#include "options/options.h"
#include "common/service_loop.h"
#include "rpc/rpc.h"

#define EP_TLS_WARN_DAYS 14

/*
 * tls_ca_file, admin_tls_ca_file: PEM certificates, at least one valid today. tls_cert_key_file: a
 * valid certificate and its key, private (base/private_file.h). With less than EP_TLS_WARN_DAYS
 * left a warning is logged. Keys that are not set are skipped. Errors: BAD_CONFIG with key, file
 * and rule, and dates if time is the reason.
 */
ep_err ep_service_tls_check(const ep_options *options, ep_error *out_error);

/*
 * Renews the TLS of a server's listeners when a file has changed, checked once a minute and by
 * _reload. (Dialling reads the files each time.) Bad files change nothing, but a restart would fail
 * with them. They are checked again, and until they are good _refusal has the reason. The log has
 * tls-renewed with the days left, or tls-refused with the reason.
 *
 * Threads    _start and _reload on the loop's thread; all others any.
 */
enum { EP_TLS_FILES = 3 };
/* Detects a changed file: written in place, replaced, or with other permissions. */
typedef struct ep_tls_stamp {
    int64_t changed_ns;
    uint64_t inode;
    uint64_t bytes;
} ep_tls_stamp;
typedef struct ep_tls_watch {
    /* private */
    const ep_options *options;
    ep_rpc_server *server;
    ep_loop_timer *timer;
    ep_tls_stamp in_force[EP_TLS_FILES];
    uint64_t expiry_s[EP_TLS_FILES]; /* atomic; Unix time; 0: no such file */
    pthread_mutex_t lock;
    char refusal[EP_ERROR_TEXT_BYTES];
} ep_tls_watch;

/*
 * Takes the present files as those in force; call it before the server listens and reads them.
 * options: those at the start. server outlives the loop's timers. Errors: as
 * ep_service_loop_timer_create.
 */
ep_err ep_tls_watch_start(ep_tls_watch *watch, const ep_options *options, ep_service_loop *loop,
                          ep_rpc_server *server);
void ep_tls_watch_reload(ep_tls_watch *watch);
/* Sets expertd_tls_refused, and expertd_tls_expiry_seconds by key: end of those in force. */
void ep_tls_watch_collect(ep_tls_watch *watch, ep_metrics *metrics);
/* Unix time in seconds at which the first of them ends; 0: no TLS. */
uint64_t ep_tls_watch_expiry(const ep_tls_watch *watch);
/* Why the present files are refused, with key, file and rule; "": they are not. */
void ep_tls_watch_refusal(ep_tls_watch *watch, char out_text[EP_ERROR_TEXT_BYTES]);
/* The same for /readyz?verbose. Always ok, since the files in force still serve. */
ep_probe_check ep_tls_watch_check(ep_tls_watch *watch);

#endif
