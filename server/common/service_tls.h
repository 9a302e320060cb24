/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A look at TLS files before anything listens or dials: the network library would say no more than
 * "cryptographic error", and only when somebody connects.
 */
#ifndef EP_SERVER_COMMON_SERVICE_TLS_H
#define EP_SERVER_COMMON_SERVICE_TLS_H

#include "common/options.h"

#define EP_TLS_WARN_DAYS 14

/*
 * tls_ca_file, admin_tls_ca_file: PEM certificates, at least one valid today. tls_cert_key_file: a valid
 * certificate and its key, private (base/private_file.h). Less than EP_TLS_WARN_DAYS left: a warning is
 * logged. Keys that are not set are passed over. Errors: BAD_CONFIG with key, file and rule, with dates where
 * a time is the reason.
 */
ep_err ep_service_tls_check(const ep_options *options, ep_error *out_error);

#endif
