/* SPDX-License-Identifier: Apache-2.0 */
/* What the text of an address tells, without resolving it. Threads: pure. */
#ifndef EP_TRANSPORT_ADDRESS_H
#define EP_TRANSPORT_ADDRESS_H

#include <stdbool.h>

#include "transport/transport.h"

/* Whether url has this scheme ("tcp" for "tcp://..."). */
bool ep_url_has_scheme(const char *url, const char *scheme);

typedef struct ep_host_port {
    char host[EP_ADDRESS_BYTES]; /* without brackets; "" for all addresses of this machine */
    char port[8];
} ep_host_port;
/* Splits "scheme://host:port" or "host:port". False: it has no numeric port, or is too long. */
bool ep_address_split(const char *url, ep_host_port *out);
/*
 * Splits tcp://host:port, or tls+tcp:// where that is allowed, and checks it against its TLS
 * settings. Errors: INVALID_ARGUMENT.
 */
ep_err ep_address_read_stream(const ep_lane_address *address, bool allows_tls, ep_host_port *out,
                              ep_error *out_error);

/*
 * Whether "scheme://host:port" or "host:port" names this host only. Names are not resolved: only
 * "localhost" counts as loopback, and addresses of lanes that cannot leave the host.
 */
bool ep_address_is_loopback(const char *address);

/*
 * Whether a rule of hosts is valid: a prefix ("10.0.0.0/8", "fd00::/8"; a plain address means all
 * of its bits), the name of a host, or ".svc" for all names with this ending.
 */
bool ep_address_rule_is_good(const char *rule);
/* Whether the host of "scheme://host:port" matches the rule. Names are compared, never resolved: no
 * name matches a prefix, no address a name. */
bool ep_address_fits_rule(const char *url, const char *rule);

/*
 * How to dial a URL that a routing table or a peer names; clients, relays and groups all use this
 * rule. With a ca_file every peer is dialled with TLS, so that a tcp:// URL cannot take it away;
 * the exception is loopback://, which never leaves the process. guards_token: without TLS, nothing
 * but loopback is dialled. tls NULL: no ca_file; url and tls are borrowed. *out_address is always
 * filled, also with TLS settings for a tcp:// URL, which lanes refuse too. Errors:
 * PERMISSION_DENIED naming the URL and why.
 */
ep_err ep_address_for_dial(const char *url, const ep_tls_config *tls, bool guards_token,
                           ep_lane_address *out_address, ep_error *out_error);

/* Copies a configuration with its strings; ep_tls_config_free releases it. Errors: NO_MEMORY. */
ep_err ep_tls_config_copy(const ep_tls_config *config, ep_tls_config *out_copy);
void ep_tls_config_free(ep_tls_config *copy);

/* The error for this errno of connecting or listening. */
ep_err ep_address_err(int number);
/* Advice for this errno of connecting or listening, as "; ..."; "" when there is none. */
const char *ep_address_advice(int number, bool listens);

#endif
