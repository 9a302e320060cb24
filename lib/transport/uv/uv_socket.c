/* SPDX-License-Identifier: Apache-2.0 */
/* The sockets: errors, options, and which there are. */
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "transport/uv/uv_lane.h"

#define WORD_BITS 64u

/* ---- which there are ---- */

/* By number, so that a socket is here from the moment it exists: fork waits for the lock. */
static struct {
    pthread_mutex_t lock;
    uint64_t *open; /* bits */
    size_t words;
} sockets = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* Takes fd, -1 too. Lock held. -1 with errno. */
static int note_open(int taken_fd)
{
    if (taken_fd < 0) {
        return -1;
    }
    const size_t word = (size_t)taken_fd / WORD_BITS;
    if (word >= sockets.words) {
        const size_t words = 2 * word + 16;
        uint64_t *open = realloc(sockets.open, words * sizeof(*open));
        if (open == NULL) {
            close(taken_fd);
            errno = ENOMEM;
            return -1;
        }
        memset(open + sockets.words, 0, (words - sockets.words) * sizeof(*open));
        sockets.open = open;
        sockets.words = words;
    }
    sockets.open[word] |= (uint64_t)1 << (size_t)taken_fd % WORD_BITS;
    return taken_fd;
}

int ep_uv_socket_open(int family)
{
    pthread_mutex_lock(&sockets.lock);
    const int fd = note_open(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    pthread_mutex_unlock(&sockets.lock);
    return fd;
}

int ep_uv_socket_accept(int listener, struct sockaddr_storage *out_address)
{
    socklen_t bytes = sizeof(*out_address);
    pthread_mutex_lock(&sockets.lock);
    const int fd = note_open(
        accept4(listener, (struct sockaddr *)out_address, &bytes, SOCK_CLOEXEC | SOCK_NONBLOCK));
    pthread_mutex_unlock(&sockets.lock);
    return fd;
}

void ep_uv_socket_close(int fd)
{
    pthread_mutex_lock(&sockets.lock);
    sockets.open[(size_t)fd / WORD_BITS] &= ~((uint64_t)1 << (size_t)fd % WORD_BITS);
    close(fd);
    pthread_mutex_unlock(&sockets.lock);
}

static void before_fork(void)
{
    pthread_mutex_lock(&sockets.lock);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&sockets.lock);
}

static void after_fork_in_child(void)
{
    for (size_t word = 0; word < sockets.words; word++) {
        for (; sockets.open[word] != 0; sockets.open[word] &= sockets.open[word] - 1) {
            close((int)(word * WORD_BITS) + __builtin_ctzll(sockets.open[word]));
        }
    }
    pthread_mutex_unlock(&sockets.lock);
}

void ep_uv_sockets_hook_fork(void)
{
    /* Refused for want of memory alone: then a child holds them, as it does over nng, and the peers
     * see the parent's end by its silence. */
    (void)pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

/* ---- errors and options ---- */

ep_err ep_uv_err(int number)
{
    switch (number) {
    case 0:
        return EP_OK;
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
 * noticed some day. */
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
        /* or it stays as it is */
        setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, sizeof(name) - 1);
    }
}
