/* SPDX-License-Identifier: Apache-2.0 */
/* What an address tells without looking it up. Threads: pure. */
#ifndef EP_TRANSPORT_ADDRESS_H
#define EP_TRANSPORT_ADDRESS_H

#include <stdbool.h>

#include "transport/transport.h"

/* Whether url has this scheme ("tcp" for "tcp://..."). */
bool ep_url_has_scheme(const char *url, const char *scheme);

typedef struct ep_host_port {
    char host[EP_ADDRESS_BYTES]; /* without brackets; "" for every address of this machine */
    char port[8];
} ep_host_port;
/* Splits "scheme://host:port" or "host:port". False: there is no port in digits, or it is too long.
 */
bool ep_address_split(const char *url, ep_host_port *out);
/*
 * Of tcp://host:port, or tls+tcp:// where that is allowed: splits it, and checks it against its TLS
 * settings. Errors: INVALID_ARGUMENT.
 */
ep_err ep_address_read_stream(const ep_lane_address *address, bool allows_tls, ep_host_port *out,
                              ep_error *out_error);

/*
 * Whether a "scheme://host:port" or "host:port" text names this host only. Unresolved names are not
 * loopback, except "localhost"; lanes that cannot leave the host are.
 */
bool ep_address_is_loopback(const char *address);

/*
 * Whether a rule of hosts is one: a prefix ("10.0.0.0/8", "fd00::/8"; an address alone is all of
 * its bits), the name of a host, or ".svc" for all names that end so.
 */
bool ep_address_rule_is_good(const char *rule);
/* Whether the host of "scheme://host:port" fits the rule. Names are compared, never resolved: no
 * name fits a prefix, no address a name. */
bool ep_address_fits_rule(const char *url, const char *rule);

/*
 * How to dial a URL that a table or a peer names: the one rule of clients, relays and groups.
 * Whoever has a ca_file gets TLS from every peer, since a tcp:// URL must not take it away; only
 * loopback://, which never leaves the process, does without. guards_token: without TLS nothing
 * beyond loopback is dialed either. tls NULL is no ca_file; url and tls are borrowed. *out_address
 * is filled in any case: with TLS settings for a tcp:// URL, which lanes refuse too. Errors:
 * PERMISSION_DENIED naming the URL and why.
 */
ep_err ep_address_for_dial(const char *url, const ep_tls_config *tls, bool guards_token,
                           ep_lane_address *out_address, ep_error *out_error);

/* A copy with its strings, for ep_tls_config_free. Errors: NO_MEMORY. */
ep_err ep_tls_config_copy(const ep_tls_config *config, ep_tls_config *out_copy);
void ep_tls_config_free(ep_tls_config *copy);

/* What to do when connecting, or listening, failed with this errno, as "; ..."; "" nothing that is
 * not plain. */
const char *ep_address_advice(int number, bool listens);

#endif
