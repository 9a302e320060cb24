/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A look at TLS files before anything listens or dials: the network library would say no more than
 * "cryptographic error", and only when somebody connects.
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
 * valid certificate and its key, private (base/private_file.h). Less than EP_TLS_WARN_DAYS left: a
 * warning is logged. Keys that are not set are passed over. Errors: BAD_CONFIG with key, file and
 * rule, with dates where a time is the reason.
 */
ep_err ep_service_tls_check(const ep_options *options, ep_error *out_error);

/*
 * Renews the TLS of a server's listeners when a file changed: looked at once a minute, and at once
 * by _reload. (Whoever dials reads the files for each dial.) Files that are not good change
 * nothing, but a restart would fail with them: they are looked at again, and until they are good
 * _refusal says why. The log:
 *   I tls-renewed tls_cert_key_file valid_until 2027-01-01T00:00:00Z ...
 *   E tls-refused what is in force stays: ...
 *
 * Threads    _start and _reload on the loop's thread; all others any.
 */
enum { EP_TLS_FILES = 3 };
/* Tells one state of a file from the next: written in place, another file under the name, other
 * rights. */
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
 * Takes the files as they are now for those in force: before the server listens, which reads them.
 * options: what the process started with. server outlives the loop's timers. Errors: as
 * ep_service_loop_timer_create.
 */
ep_err ep_tls_watch_start(ep_tls_watch *watch, const ep_options *options, ep_service_loop *loop,
                          ep_rpc_server *server);
void ep_tls_watch_reload(ep_tls_watch *watch);
/* expertd_tls_expiry_seconds by key: when the certificates in force end; expertd_tls_refused. */
void ep_tls_watch_collect(ep_tls_watch *watch, ep_metrics *metrics);
/* Unix time in seconds when the first of them ends; 0: no TLS. */
uint64_t ep_tls_watch_expiry(const ep_tls_watch *watch);
/* Why the files in place are refused, with key, file and rule; "" they are not. */
void ep_tls_watch_refusal(ep_tls_watch *watch, char out_text[EP_ERROR_TEXT_BYTES]);
/* The same for /readyz?verbose. Never a reason not to be ready: what is in force serves. */
ep_probe_check ep_tls_watch_check(ep_tls_watch *watch);

#endif
