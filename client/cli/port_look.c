/* SPDX-License-Identifier: Apache-2.0 */
#include "port_look.h"

#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define HOST_BYTES 256
#define REPLY_BYTES 16

/* A TLS 1.2 ClientHello without extensions: a server answers it with a handshake record or an alert. */
static const unsigned char client_hello[] = {
    0x16, 0x03, 0x01, 0x00, 0x2f,                         /* record: handshake, 47 bytes */
    0x01, 0x00, 0x00, 0x2b, 0x03, 0x03,                   /* ClientHello, 43 bytes, TLS 1.2 */
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, /* random */
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16,
    0x00,                                                 /* no session */
    0x00, 0x04, 0xc0, 0x2f, 0x00, 0x2f,                   /* two cipher suites */
    0x01, 0x00};                                          /* no compression */
static const char http_request[] = "GET /livez HTTP/1.0\r\n\r\n";

static bool split(const char *url, char out_host[HOST_BYTES], char out_port[HOST_BYTES])
{
    const char *start = strstr(url, "://");
    start = start != NULL ? start + 3 : url;
    const char *colon = strrchr(start, ':');
    if (colon == NULL || (size_t)(colon - start) >= HOST_BYTES || strlen(colon + 1) >= HOST_BYTES) {
        return false;
    }
    bool bracketed = start[0] == '[' && colon > start + 1 && colon[-1] == ']';
    snprintf(out_host, HOST_BYTES, "%.*s", (int)(colon - start) - (bracketed ? 2 : 0), start + (bracketed ? 1 : 0));
    snprintf(out_port, HOST_BYTES, "%s", colon + 1);
    return true;
}

static bool wait_for(int fd, short events, int timeout_ms)
{
    struct pollfd wanted = {.fd = fd, .events = events};
    int n;
    do {
        n = poll(&wanted, 1, timeout_ms);
    } while (n < 0 && errno == EINTR);
    return n > 0;
}

static int dial(const struct addrinfo *address, int timeout_ms)
{
    int fd = socket(address->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    int failed = 0;
    socklen_t bytes = sizeof(failed);
    if (fd < 0) {
        return -1;
    }
    if (connect(fd, address->ai_addr, address->ai_addrlen) != 0 &&
        (errno != EINPROGRESS || !wait_for(fd, POLLOUT, timeout_ms) ||
         getsockopt(fd, SOL_SOCKET, SO_ERROR, &failed, &bytes) != 0 || failed != 0)) {
        close(fd);
        return -1;
    }
    return fd;
}

/* Says something and returns how many bytes came back, 0 none, -1 nobody is there. */
static ssize_t say(const struct addrinfo *address, const void *words, size_t bytes, int timeout_ms,
                   unsigned char out_reply[REPLY_BYTES])
{
    int fd = dial(address, timeout_ms);
    if (fd < 0) {
        return -1;
    }
    ssize_t got = 0;
    if (send(fd, words, bytes, MSG_NOSIGNAL) == (ssize_t)bytes && wait_for(fd, POLLIN, timeout_ms)) {
        got = recv(fd, out_reply, REPLY_BYTES, 0);
    }
    close(fd);
    return got > 0 ? got : 0;
}

ep_doctor_port ep_cli_port_look(const char *url, int timeout_ms)
{
    char host[HOST_BYTES];
    char port[HOST_BYTES];
    unsigned char reply[REPLY_BYTES];
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
    struct addrinfo *address = NULL;
    if (!split(url, host, port) || getaddrinfo(host, port, &hints, &address) != 0) {
        return EP_DOCTOR_PORT_CLOSED;
    }
    ep_doctor_port found = EP_DOCTOR_PORT_OTHER;
    ssize_t got = say(address, http_request, sizeof(http_request) - 1, timeout_ms / 2, reply);
    if (got < 0) {
        found = EP_DOCTOR_PORT_CLOSED;
    } else if (got >= 5 && memcmp(reply, "HTTP/", 5) == 0) {
        found = EP_DOCTOR_PORT_HTTP;
    } else {
        got = say(address, client_hello, sizeof(client_hello), timeout_ms / 2, reply);
        if (got >= 2 && (reply[0] == 0x15 || reply[0] == 0x16) && reply[1] == 0x03) {
            found = EP_DOCTOR_PORT_TLS;
        }
    }
    freeaddrinfo(address);
    return found;
}
