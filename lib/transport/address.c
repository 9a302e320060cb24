/* SPDX-License-Identifier: Apache-2.0 */
/* Addresses by their text alone. */
#include "transport/address.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

bool ep_url_has_scheme(const char *url, const char *scheme)
{
    size_t n = strlen(scheme);
    return strncmp(url, scheme, n) == 0 && strncmp(url + n, "://", 3) == 0;
}

/* Digits only: a port like "1@b" in "127.0.0.1:1@b" would make another host be dialled than the one
 * before the colon. */
static bool is_number(const char *text)
{
    return text[0] != 0 && strspn(text, "0123456789") == strlen(text);
}

/* Where the host begins, without brackets; its length. *out_port: the text behind the colon, ""
 * without one. NULL: that text is no number. */
static const char *find_host(const char *url, size_t *out_bytes, const char **out_port)
{
    const char *scheme = strstr(url, "://");
    const char *host = scheme != NULL ? scheme + 3 : url;
    const char *colon = strrchr(host, ':');
    if (colon != NULL && !is_number(colon + 1)) {
        return NULL;
    }
    size_t bytes = colon != NULL ? (size_t)(colon - host) : strlen(host);
    bool has_brackets = bytes > 2 && host[0] == '[' && host[bytes - 1] == ']';
    *out_bytes = bytes - (has_brackets ? 2 : 0);
    *out_port = colon != NULL ? colon + 1 : "";
    return host + has_brackets;
}

bool ep_address_split(const char *url, ep_host_port *out)
{
    size_t bytes = 0;
    const char *port;
    const char *host = find_host(url, &bytes, &port);
    if (host == NULL || bytes >= sizeof(out->host) || port[0] == 0 ||
        strlen(port) >= sizeof(out->port)) {
        return false;
    }
    snprintf(out->host, sizeof(out->host), "%.*s", (int)bytes, host);
    snprintf(out->port, sizeof(out->port), "%s", port);
    return true;
}

ep_err ep_address_read_stream(const ep_lane_address *address, bool allows_tls, ep_host_port *out,
                              ep_error *out_error)
{
    bool has_tls = allows_tls && ep_url_has_scheme(address->url, "tls+tcp");
    size_t bytes = 0;
    const char *port;
    const char *host = find_host(address->url, &bytes, &port);
    if ((!has_tls && !ep_url_has_scheme(address->url, "tcp")) ||
        strlen(address->url) + sizeof(":65535") > EP_ADDRESS_BYTES || host == NULL ||
        port[0] == 0 || strlen(port) > 5 || atoi(port) > 65535) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "address '%.64s' must be tcp://host:port%s, port 0 to 65535",
                            address->url, allows_tls ? " or tls+tcp://host:port" : "");
    }
    if (host[-1] != '[' && memchr(host, ':', bytes) != NULL) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "address '%.64s': write an IPv6 address as [%.*s]", address->url,
                            (int)bytes, host);
    }
    if (has_tls != (address->tls != NULL)) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, "address %s %s", address->url,
                            has_tls ? "needs TLS settings: ca_file and others"
                                    : "has TLS settings but its scheme is not tls+tcp");
    }
    bool is_any = bytes == 1 && host[0] == '*';
    snprintf(out->host, sizeof(out->host), "%.*s", is_any ? 0 : (int)bytes, host);
    snprintf(out->port, sizeof(out->port), "%s", port);
    return EP_OK;
}

/* Number of bits of the address, 32 or 128; 0: text is no address. */
static unsigned read_ip(const char *text, uint8_t out[16])
{
    return inet_pton(AF_INET, text, out) == 1 ? 32 : inet_pton(AF_INET6, text, out) == 1 ? 128 : 0;
}

bool ep_address_is_loopback(const char *address)
{
    char text[EP_ADDRESS_BYTES];
    uint8_t ip[16];
    size_t bytes = 0;
    const char *port;
    const char *host = find_host(address, &bytes, &port);
    if (ep_url_has_scheme(address, "loopback") || ep_url_has_scheme(address, "shm")) {
        return true;
    }
    if (host == NULL || bytes >= sizeof(text)) {
        return false;
    }
    snprintf(text, sizeof(text), "%.*s", (int)bytes, host);
    switch (read_ip(text, ip)) {
    case 32:
        return ip[0] == 127;
    case 128:
        return memcmp(ip, &in6addr_loopback, sizeof(ip)) == 0;
    default:
        return strcmp(text, "localhost") == 0;
    }
}

/* ---- rules of hosts ---- */

#define NAME_CHARACTERS "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_."

/* Number of bits of the rule's address, the first *out_fixed of which count; 0: it is no prefix. */
static unsigned read_prefix(const char *rule, uint8_t out[16], unsigned *out_fixed)
{
    char text[EP_ADDRESS_BYTES];
    const char *slash = strchr(rule, '/');
    size_t bytes = slash != NULL ? (size_t)(slash - rule) : strlen(rule);
    if (bytes >= sizeof(text)) {
        return 0;
    }
    memcpy(text, rule, bytes);
    text[bytes] = 0;
    unsigned bits = read_ip(text, out);
    int used = 0;
    *out_fixed = bits;
    if (slash != NULL &&
        (!is_number(slash + 1) || sscanf(slash + 1, "%3u%n", out_fixed, &used) != 1 ||
         slash[1 + used] != 0 || *out_fixed > bits)) {
        return 0;
    }
    return bits;
}

static bool is_name(const char *text)
{
    const char *dot = strrchr(text, '.');
    const char *last = dot != NULL ? dot + 1 : text;
    /* A name must not end in a number: "10.300.0.0" is a wrong address. */
    return last[0] != 0 && strspn(text, NAME_CHARACTERS) == strlen(text) && !is_number(last);
}

bool ep_address_rule_is_good(const char *rule)
{
    uint8_t ip[16];
    unsigned fixed;
    return read_prefix(rule, ip, &fixed) > 0 || is_name(rule);
}

bool ep_address_fits_rule(const char *url, const char *rule)
{
    ep_host_port at;
    uint8_t ip[16], wanted[16];
    unsigned fixed = 0;
    if (!ep_address_split(url, &at) || at.host[0] == 0) {
        return false;
    }
    unsigned bits = read_ip(at.host, ip);
    if (bits == 0) {
        size_t bytes = strlen(at.host);
        size_t skip = rule[0] == '.' && bytes > strlen(rule) ? bytes - strlen(rule) : 0;
        return is_name(at.host) && is_name(rule) && strcasecmp(at.host + skip, rule) == 0;
    }
    if (read_prefix(rule, wanted, &fixed) != bits || memcmp(ip, wanted, fixed / 8) != 0) {
        return false;
    }
    return fixed % 8 == 0 || (ip[fixed / 8] ^ wanted[fixed / 8]) >> (8 - fixed % 8) == 0;
}

ep_err ep_address_for_dial(const char *url, const ep_tls_config *tls, bool guards_token,
                           ep_lane_address *out_address, ep_error *out_error)
{
    bool is_inside = ep_url_has_scheme(url, "loopback");
    bool has_tls = tls != NULL && tls->ca_file != NULL;
    *out_address = (ep_lane_address){.url = url, .tls = has_tls && !is_inside ? tls : NULL};
    if (is_inside || ep_url_has_scheme(url, "tls+tcp")) {
        return EP_OK; /* the lane names the missing TLS settings */
    }
    if (has_tls) {
        return ep_error_set(out_error, EP_ERR_PERMISSION_DENIED,
                            "'%.120s' is not dialed: TLS is configured here, and that is plain; "
                            "allowed: tls+tcp://host:port",
                            url);
    }
    if (guards_token && !ep_address_is_loopback(url)) {
        return ep_error_set(out_error, EP_ERR_PERMISSION_DENIED,
                            "'%.120s' is not dialed: it would show a token in plain text beyond "
                            "this host; allowed: tls+tcp://host:port, a "
                            "loopback address, or insecure",
                            url);
    }
    return EP_OK;
}

static bool copy_text(const char *text, const char **out)
{
    *out = text != NULL ? strdup(text) : NULL;
    return text == NULL || *out != NULL;
}

ep_err ep_tls_config_copy(const ep_tls_config *config, ep_tls_config *out_copy)
{
    ep_tls_config copy = {.require_client_cert = config->require_client_cert};
    if (!copy_text(config->ca_file, &copy.ca_file) ||
        !copy_text(config->cert_key_file, &copy.cert_key_file) ||
        !copy_text(config->server_name, &copy.server_name)) {
        ep_tls_config_free(&copy);
        return EP_ERR_NO_MEMORY;
    }
    *out_copy = copy;
    return EP_OK;
}

void ep_tls_config_free(ep_tls_config *copy)
{
    free((void *)(uintptr_t)copy->ca_file);
    free((void *)(uintptr_t)copy->cert_key_file);
    free((void *)(uintptr_t)copy->server_name);
}

ep_err ep_address_err(int number)
{
    switch (number) {
    case ENOMEM:
    case ENOBUFS:
        return EP_ERR_NO_MEMORY;
    case EMFILE:
    case ENFILE:
        return EP_ERR_RESOURCE_EXHAUSTED;
    case EACCES:
    case EPERM:
        return EP_ERR_PERMISSION_DENIED;
    default:
        return EP_ERR_UNAVAILABLE;
    }
}

const char *ep_address_advice(int number, bool listens)
{
    if (!listens) {
        return number == ECONNREFUSED
                   ? "; nobody listens there: start it, or give the port it listens on"
                   : "";
    }
    switch (number) {
    case EADDRINUSE:
        return "; another program has this port: stop it (ss -ltnp names it), or take another";
    case EADDRNOTAVAIL:
        return "; it is not an address of this host (ip address lists them)";
    case EACCES:
        return "; ports below 1024 are for root and for who has CAP_NET_BIND_SERVICE";
    default:
        return "";
    }
}
