/* SPDX-License-Identifier: Apache-2.0 */
/* Addresses by their text alone. */
#include "transport/address.h"

#include <stdio.h>
#include <string.h>

#include "transport/lane_common.h"

bool ep_address_is_loopback(const char *address)
{
    const char *scheme = strstr(address, "://");
    const char *host = scheme != NULL ? scheme + 3 : address;
    const char *colon = strrchr(host, ':');
    size_t bytes = colon != NULL ? (size_t)(colon - host) : strlen(host);
    unsigned a, b, c, d;
    int used = 0;
    if (strncmp(address, "loopback://", strlen("loopback://")) == 0 || strncmp(address, "shm://", strlen("shm://")) == 0) {
        return true;
    }
    if ((bytes == 5 && strncmp(host, "[::1]", 5) == 0) ||
        (bytes == 9 && strncmp(host, "localhost", 9) == 0)) {
        return true;
    }
    return bytes >= 9 && sscanf(host, "%3u.%3u.%3u.%3u%n", &a, &b, &c, &d, &used) == 4 &&
           (size_t)used == bytes && a == 127;
}

ep_err ep_address_for_dial(const char *url, const ep_tls_config *tls, bool guards_token, ep_lane_address *out_address, ep_error *out_error)
{
    bool is_inside = ep_url_has_scheme(url, "loopback");
    bool has_tls = tls != NULL && tls->ca_file != NULL;
    *out_address = (ep_lane_address){.url = url, .tls = has_tls && !is_inside ? tls : NULL};
    if (is_inside || ep_url_has_scheme(url, "tls+tcp")) {
        return EP_OK; /* without TLS settings the lane says which are missing */
    }
    if (has_tls) {
        return ep_error_set(out_error, EP_ERR_PERMISSION_DENIED,
                            "'%.120s' is not dialed: TLS is configured here, and that is plain; allowed: tls+tcp://host:port", url);
    }
    if (guards_token && !ep_address_is_loopback(url)) {
        return ep_error_set(out_error, EP_ERR_PERMISSION_DENIED,
                            "'%.120s' is not dialed: it would show a token in plain text beyond this host; allowed: tls+tcp://host:port, a "
                            "loopback address, or insecure", url);
    }
    return EP_OK;
}
