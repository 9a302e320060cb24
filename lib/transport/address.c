/* SPDX-License-Identifier: Apache-2.0 */
/* Addresses by their text alone. */
#include "transport/address.h"

#include <stdio.h>
#include <string.h>

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
