/* SPDX-License-Identifier: Apache-2.0 */
#include "rpc/rpc_look.h"

#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "base/clock.h"
#include "base/printable.h"
#include "rpc/rpc_look_tls.h"
#include "transport/address.h"
#include "transport/lane_fork.h"
#include "wire/frame.h"

#define REPLY_BYTES 2048
#define STEP_MS 1500   /* time to connect, and time for an answer to begin */
#define ANSWER_MS 3000 /* time for a whole answer, even if it comes byte by byte */
#define SLICE_MS 50    /* between checks of stop */
#define WORDS_BYTES 48 /* how much of a foreign answer is shown */

#define WHICH_PORT "give the port of listen, by default 7410 (coordinator) or 7420 (node)"

/* As long as a frame's fixed part, so that expertd sees at once that it is no frame. */
static const char http_request[] =
    "GET / HTTP/1.0\r\nUser-Agent: expertd, which looks at what listens here\r\n\r\n";
_Static_assert(sizeof(http_request) > EP_FRAME_FIXED_BYTES, "the request is too short");
static const char our_page[] = "expertd: "; /* must match probes.c */

typedef struct port {
    struct sockaddr_storage address;
    socklen_t address_bytes;
    const bool *stop;
} port;

void ep_rpc_look_found(ep_rpc_look *look, const char *code, const char *advice, const char *format,
                       ...)
{
    va_list args;
    look->code = code;
    va_start(args, format);
    vsnprintf(look->text, sizeof(look->text), format, args);
    va_end(args);
    snprintf(look->advice, sizeof(look->advice), "%s", advice);
}

static bool resolve(const char *where, int flags, port *out_port)
{
    ep_host_port at;
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = flags};
    struct addrinfo *list = NULL;
    if (!ep_address_split(where, &at) || getaddrinfo(at.host, at.port, &hints, &list) != 0) {
        return false;
    }
    memcpy(&out_port->address, list->ai_addr, list->ai_addrlen);
    out_port->address_bytes = list->ai_addrlen;
    freeaddrinfo(list);
    return true;
}

bool ep_rpc_look_wait(int fd, short events, const bool *stop)
{
    struct pollfd wanted = {.fd = fd, .events = events};
    uint64_t end_ns = ep_clock_now_ns() + STEP_MS * EP_NS_PER_MS;
    int n = 0;
    while (n <= 0 && ep_clock_now_ns() < end_ns &&
           (stop == NULL || !__atomic_load_n(stop, __ATOMIC_RELAXED))) {
        n = poll(&wanted, 1, SLICE_MS);
    }
    return n > 0;
}

/* Returns -1 with errno on failure. */
static int dial(const port *there)
{
    ep_lane_fork_watch();
    int fd =
        EP_LANE_FD(socket(there->address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    int failed = 0;
    socklen_t bytes = sizeof(failed);
    if (fd < 0) {
        return -1;
    }
    if (connect(fd, (const struct sockaddr *)&there->address, there->address_bytes) != 0) {
        failed = errno;
    }
    if (failed == EINPROGRESS) {
        bool is_over = ep_rpc_look_wait(fd, POLLOUT, there->stop) &&
                       getsockopt(fd, SOL_SOCKET, SO_ERROR, &failed, &bytes) == 0;
        failed = is_over ? failed : ETIMEDOUT;
    }
    if (failed != 0) {
        ep_lane_fd_close(fd);
        errno = failed;
        return -1;
    }
    return fd;
}

/* What the port answers. */
typedef struct answer {
    char text[REPLY_BYTES + 1];
    size_t bytes;
    int failed; /* errno, if there was no connection */
    bool ended; /* the peer ended the connection */
} answer;

static void say(const port *there, const void *words, size_t bytes, answer *out)
{
    int fd = dial(there);
    *out = (answer){.failed = fd < 0 ? errno : 0};
    if (fd < 0) {
        return;
    }
    const uint64_t end_ns = ep_clock_now_ns() + ANSWER_MS * EP_NS_PER_MS;
    ssize_t got = send(fd, words, bytes, MSG_NOSIGNAL);
    while (got > 0 && out->bytes < REPLY_BYTES && ep_clock_now_ns() < end_ns &&
           ep_rpc_look_wait(fd, POLLIN, there->stop)) {
        got = recv(fd, out->text + out->bytes, REPLY_BYTES - out->bytes, 0);
        out->bytes += got > 0 ? (size_t)got : 0;
        if (out->bytes >= 5 && memcmp(out->text, "HTTP/", 5) != 0) {
            break; /* enough to recognise it; only a page is read to its end */
        }
    }
    out->ended = got <= 0;
    ep_lane_fd_close(fd);
}

bool ep_rpc_look_is_door(const char *greeting, size_t bytes, ep_rpc_look *out_look)
{
    static const char sp_hello[] = {0, 'S', 'P', 0};
    if (bytes < sizeof(sp_hello) || memcmp(greeting, sp_hello, sizeof(sp_hello)) != 0) {
        return false;
    }
    ep_rpc_look_found(out_look, "door-port", WHICH_PORT,
                      "this is a door (door_listen), for nng's REQ sockets");
    return true;
}

/* Whether an empty Hello is answered by a frame (which refuses it). */
static bool speaks_frames(const port *there)
{
    answer reply;
    uint8_t hello[2 * EP_FRAME_FIXED_BYTES] = {0};
    const ep_frame frame = {.kind = EP_FRAME_REQUEST,
                            .call_id = 1,
                            .deadline_us = EP_FRAME_DEADLINE_NONE,
                            .header_bytes = 4, /* a call header of 0 bytes */
                            .tensor_offset = sizeof(hello)};
    ep_frame_encode(&frame, hello);
    say(there, hello, sizeof(hello), &reply);
    return reply.bytes >= 4 && memcmp(reply.text, hello, 4) == 0; /* the magic */
}

/* A door that has read anything but its greeting may close before it greets. */
static bool is_hasty_door(const port *there, ep_rpc_look *out_look)
{
    static const char sp_request[] = {0, 'S', 'P', 0, 0, 0x30, 0, 0};
    answer reply;
    say(there, sp_request, sizeof(sp_request), &reply);
    return ep_rpc_look_is_door(reply.text, reply.bytes, out_look);
}

static void found_page(const char *page, ep_rpc_look *out_look)
{
    char line[sizeof(out_look->text)];
    char escaped[sizeof(out_look->text)];
    const char *body = strstr(page, "\r\n\r\n");
    if (body == NULL || strncmp(body + 4, our_page, strlen(our_page)) != 0) {
        ep_rpc_look_found(out_look, "probe-port", WHICH_PORT,
                          "HTTP is spoken there, as on a probe_address (by default 7411, 7421)");
        return;
    }
    body += 4 + strlen(our_page);
    snprintf(line, sizeof(line), "%.*s", (int)strcspn(body, "\r\n"), body);
    ep_rpc_look_found(out_look, "probe-port", "give one of these addresses",
                      "this is the probe port of %.350s",
                      ep_text_escape(line, escaped, sizeof(escaped)));
}

static void found_other(const char *words, ep_rpc_look *out_look)
{
    char first[WORDS_BYTES];
    char escaped[EP_TEXT_ESCAPED_BYTES(WORDS_BYTES)];
    snprintf(first, sizeof(first), "%.*s", (int)strcspn(words, "\r\n"), words);
    ep_rpc_look_found(out_look, "no-answer", WHICH_PORT,
                      "something else listens there, which says '%s'",
                      ep_text_escape(first, escaped, sizeof(escaped)));
}

static void look_plain(const port *there, bool wants_tls, ep_rpc_look *out_look)
{
    answer reply;
    say(there, http_request, sizeof(http_request) - 1, &reply);
    if (reply.failed != 0) {
        ep_rpc_look_found(
            out_look, "nobody-there",
            "start it, or look into its ports_file and the network policy for the right address",
            "nobody listens there: %s", strerror(reply.failed));
    } else if (ep_rpc_look_is_door(reply.text, reply.bytes, out_look)) {
        return;
    } else if (reply.bytes >= 5 && memcmp(reply.text, "HTTP/", 5) == 0) {
        found_page(reply.text, out_look);
    } else if (!wants_tls && ep_rpc_look_tls(dial(there), NULL, there->stop, out_look)) {
        ep_rpc_look_found(
            out_look, "tls-needed",
            "use tls+tcp:// with tls_ca_file (--tls-ca) and tls_server_name (--tls-server-name)",
            "TLS is spoken there, and we spoke without");
    } else if (wants_tls && speaks_frames(there)) {
        ep_rpc_look_found(out_look, "tls-not-there",
                          "use tcp://, or set tls_cert_key_file and a tls+tcp:// listen there",
                          "expertd listens there without TLS");
    } else if (reply.bytes > 0) {
        found_other(reply.text, out_look);
    } else if (reply.ended && is_hasty_door(there, out_look)) {
        return;
    } else if (wants_tls) {
        ep_rpc_look_found(out_look, "tls-not-there", WHICH_PORT,
                          "nobody speaks TLS there: our words are answered by %s",
                          reply.ended ? "the connection's end" : "silence");
    } else if (!reply.ended) {
        ep_rpc_look_found(out_look, "no-answer",
                          "look at the log of the program there; " WHICH_PORT,
                          "somebody takes connections there and says nothing");
    }
}

void ep_rpc_look_at(const ep_lane_address *address, const char *peer, const bool *stop,
                    ep_rpc_look *out_look)
{
    port there = {.stop = stop};
    bool is_tls = ep_url_has_scheme(address->url, "tls+tcp");
    *out_look = (ep_rpc_look){0};
    if (!(peer != NULL ? resolve(peer, AI_NUMERICHOST | AI_NUMERICSERV, &there)
                       : resolve(address->url, 0, &there))) {
        ep_rpc_look_found(out_look, "nobody-there",
                          "check the name, or give the address in numbers",
                          "the host's name cannot be resolved");
    } else if (!is_tls || !ep_rpc_look_tls(dial(&there), address->tls, stop, out_look)) {
        look_plain(&there, is_tls, out_look);
    }
}
