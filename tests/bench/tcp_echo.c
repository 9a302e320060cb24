/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/tcp_echo.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench/bench_report.h"

#define HUGE_BYTES ((size_t)2 << 20)

static void set_buffers(int fd, int socket_bytes)
{
    if (socket_bytes > 0) {
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &socket_bytes, sizeof(socket_bytes));
        setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &socket_bytes, sizeof(socket_bytes));
    }
}

static void prepare(int fd)
{
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4); /* paced by BBR it would be no limit */
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
}

static void wait_for(int fd, short events)
{
    struct pollfd p = {.fd = fd, .events = events};
    poll(&p, 1, -1);
}

/* Large buffers in large pages: a system call then walks far fewer of them. */
static char *buffer_of(size_t bytes)
{
    size_t rounded = (bytes + HUGE_BYTES - 1) / HUGE_BYTES * HUGE_BYTES;
    char *buffer = bytes < HUGE_BYTES ? aligned_alloc(64, (bytes + 63) / 64 * 64)
                                      : aligned_alloc(HUGE_BYTES, rounded);
    if (buffer != NULL) {
        if (bytes >= HUGE_BYTES) {
            madvise(buffer, rounded, MADV_HUGEPAGE);
        }
        memset(buffer, 1, bytes);
    }
    return buffer;
}

/* How many bytes may be sent back. */
static size_t ready_bytes(size_t head, size_t tail, size_t whole_bytes)
{
    size_t end = whole_bytes > 0 ? tail / whole_bytes * whole_bytes : tail;
    return end > head ? end - head : 0;
}

/*
 * Echoes what comes, keeping a ring of bytes between read and write, so that both directions flow
 * at once; whole_bytes > 0: only whole messages of this size.
 */
static void serve(int fd, size_t ring_bytes, size_t whole_bytes)
{
    char *ring = buffer_of(ring_bytes);
    size_t head = 0, tail = 0; /* read into tail, written from head; counters that only grow */
    while (ring != NULL) {
        int moved = 0;
        size_t room = ring_bytes - (tail - head), at = tail % ring_bytes;
        size_t piece = room < ring_bytes - at ? room : ring_bytes - at;
        ssize_t n = piece > 0 ? read(fd, ring + at, piece) : -2;
        if (n == 0 || (n == -1 && errno != EAGAIN && errno != EINTR)) {
            break;
        }
        if (n > 0) {
            tail += (size_t)n;
            moved = 1;
        }
        size_t ready = ready_bytes(head, tail, whole_bytes);
        at = head % ring_bytes;
        piece = ready < ring_bytes - at ? ready : ring_bytes - at;
        if (piece > 0) {
            n = send(fd, ring + at, piece, MSG_NOSIGNAL);
            if (n < 0 && errno != EAGAIN && errno != EINTR) {
                break;
            }
            if (n > 0) {
                head += (size_t)n;
                moved = 1;
            }
        }
        if (!moved) {
            wait_for(fd,
                     (short)((tail - head < ring_bytes ? POLLIN : 0) | (ready > 0 ? POLLOUT : 0)));
        }
    }
    free(ring);
}

int tcp_echo_open(tcp_echo *echo, size_t message_bytes, const tcp_echo_way *way)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof(address);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    memset(echo, 0, sizeof(*echo));
    echo->message_bytes = message_bytes;
    echo->send_data = buffer_of(message_bytes);
    echo->receive_data = buffer_of(message_bytes);
    set_buffers(listener, way->socket_bytes); /* what it accepts inherits them */
    if (listener < 0 || echo->send_data == NULL || echo->receive_data == NULL ||
        bind(listener, (struct sockaddr *)&address, sizeof(address)) != 0 ||
        listen(listener, 1) != 0 ||
        getsockname(listener, (struct sockaddr *)&address, &length) != 0) {
        return -1;
    }
    echo->server = fork();
    if (echo->server == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        int fd = accept(listener, NULL, NULL);
        prepare(fd);
        serve(fd, way->ring_bytes, way->whole ? message_bytes : 0);
        _exit(0);
    }
    echo->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    set_buffers(echo->fd, way->socket_bytes);
    int result = connect(echo->fd, (struct sockaddr *)&address, sizeof(address));
    close(listener);
    prepare(echo->fd);
    return result;
}

void tcp_echo_close(tcp_echo *echo)
{
    shutdown(echo->fd, SHUT_RDWR); /* children of later echoes have the descriptor too */
    close(echo->fd);
    if (echo->server > 0) {
        waitpid(echo->server, NULL, 0);
    }
    free(echo->send_data);
    free(echo->receive_data);
}

double tcp_echo_run(tcp_echo *echo, int count, int depth, double *out_us)
{
    size_t bytes = echo->message_bytes, sent_bytes = 0, received_bytes = 0;
    int sent = 0, received = 0;
    double started[64], begin = bench_now_us();
    if (depth > 64) {
        return -1;
    }
    while (received < count) {
        int moved = 0;
        if (sent < count && sent - received < depth) {
            if (sent_bytes == 0) {
                started[sent % 64] = bench_now_us();
            }
            ssize_t n =
                send(echo->fd, echo->send_data + sent_bytes, bytes - sent_bytes, MSG_NOSIGNAL);
            if (n < 0 && errno != EAGAIN) {
                return -1;
            }
            if (n > 0) {
                moved = 1;
                sent_bytes += (size_t)n;
                if (sent_bytes == bytes) {
                    sent++;
                    sent_bytes = 0;
                }
            }
        }
        ssize_t n = read(echo->fd, echo->receive_data + received_bytes, bytes - received_bytes);
        if (n == 0 || (n < 0 && errno != EAGAIN)) {
            return -1;
        }
        if (n > 0) {
            moved = 1;
            received_bytes += (size_t)n;
            if (received_bytes == bytes) {
                if (out_us != NULL) {
                    out_us[received] = bench_now_us() - started[received % 64];
                }
                received++;
                received_bytes = 0;
            }
        }
        if (!moved) {
            int may_send = sent < count && sent - received < depth;
            wait_for(echo->fd, (short)(POLLIN | (may_send ? POLLOUT : 0)));
        }
    }
    return (bench_now_us() - begin) / 1e6;
}
