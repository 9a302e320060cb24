/* SPDX-License-Identifier: Apache-2.0 */
/* The sockets: errors and options. */
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>

#include "transport/uv/uv_lane.h"

ep_err ep_uv_err(int number)
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

/* Small frames must not wait for acknowledgements, and a peer whose machine vanished must be
 * noticed at some time. */
void ep_uv_socket_set_options(int fd)
{
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
}

static bool same_machine(const struct sockaddr_storage *peer, const struct sockaddr_storage *own)
{
    if (peer->ss_family != own->ss_family) {
        return false;
    }
    if (peer->ss_family == AF_INET) {
        uint32_t a = ntohl(((const struct sockaddr_in *)peer)->sin_addr.s_addr);
        uint32_t b = ntohl(((const struct sockaddr_in *)own)->sin_addr.s_addr);
        return a == b || (a >> 24 == IN_LOOPBACKNET && b >> 24 == IN_LOOPBACKNET);
    }
    const struct in6_addr *a = &((const struct sockaddr_in6 *)peer)->sin6_addr;
    const struct in6_addr *b = &((const struct sockaddr_in6 *)own)->sin6_addr;
    return peer->ss_family == AF_INET6 && memcmp(a, b, sizeof(*a)) == 0;
}

void ep_uv_socket_set_congestion(int fd, const struct sockaddr_storage *peer)
{
    static const char name[] = "reno";
    struct sockaddr_storage own;
    socklen_t bytes = sizeof(own);
    memset(&own, 0, sizeof(own));
    if (getsockname(fd, (struct sockaddr *)&own, &bytes) == 0 && same_machine(peer, &own)) {
        /* if this fails, the setting stays */
        setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, sizeof(name) - 1);
    }
}
