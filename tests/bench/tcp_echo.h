/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The limit for anything over TCP: plain non-blocking sockets, pipelined to a depth, with the
 * client measuring round trips. The server runs in a child process, as the service under test does.
 */
#ifndef EP_BENCH_TCP_ECHO_H
#define EP_BENCH_TCP_ECHO_H

#include <stddef.h>
#include <sys/types.h>

/* What makes one raw echo faster than another. */
typedef struct tcp_echo_way {
    /* what the child keeps between reading and writing, at least 2 messages when whole */
    size_t ring_bytes;
    int socket_bytes; /* send and receive buffers of the sockets, 0: as the system likes */
    int whole;        /* the child sends a message back once it has all of it, not piece by piece */
} tcp_echo_way;

typedef struct tcp_echo {
    pid_t server;
    int fd;
    size_t message_bytes;
    char *send_data;
    char *receive_data;
} tcp_echo;

/* Starts the child and connects. 0 on success. */
int tcp_echo_open(tcp_echo *echo, size_t message_bytes, const tcp_echo_way *way);
void tcp_echo_close(tcp_echo *echo);
/* Sends count messages keeping depth outstanding; round trip of each in out_us (may be NULL).
 * Returns seconds, < 0 on error. */
double tcp_echo_run(tcp_echo *echo, int count, int depth, double *out_us);

#endif
