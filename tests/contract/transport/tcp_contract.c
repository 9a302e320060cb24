/* SPDX-License-Identifier: Apache-2.0 */
/* What a raw socket can do to a tcp lane: arrive byte by byte, stop in the middle, send garbage,
 * reset, be killed. */
#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <errno.h>
#include <linux/sockios.h>
#include <netinet/tcp.h>
#include <semaphore.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "lane_fixture.h"
#include "transport/transport.h"

static lane_world world;
static side server;

static void open_world(void)
{
    world_open(&world, CONTRACT_SCHEME);
    world_listen(&world);
    side_init(&server);
}

static void close_world(void)
{
    world_close(&world);
}

TestSuite(tcp, .init = open_world, .fini = close_world, .timeout = 120);

static uint16_t port(void)
{
    return (uint16_t)atoi(strrchr(world.dial_url, ':') + 1);
}

/* Only calls that a forked child may make. */
static int raw_connect(uint16_t to_port)
{
    struct sockaddr_in to = {.sin_family = AF_INET,
                             .sin_port = htons(to_port),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int one = 1;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof(to)) != 0) {
        return -1;
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    return fd;
}

static void raw_write(int fd, const void *data, size_t bytes)
{
    const uint8_t *at = data;
    while (bytes > 0) {
        ssize_t n = send(fd, at, bytes, MSG_NOSIGNAL);
        cr_assert_gt(n, 0);
        at += n;
        bytes -= (size_t)n;
    }
}

/* What was sent and not read is lost. */
static void close_with_reset(int fd)
{
    struct linger now = {.l_onoff = 1, .l_linger = 0};
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
    close(fd);
}

static int open_raw(void)
{
    int fd = raw_connect(port());
    cr_assert_geq(fd, 0);
    side_accept(&world, &server);
    return fd;
}

Test(tcp, puts_frames_together_from_single_bytes)
{
    uint8_t frames[3 * 100];
    int fd = open_raw();
    for (uint64_t i = 0; i < 3; i++) {
        fixture_fill(frames + i * 100, i, 100);
    }
    for (size_t i = 0; i < sizeof(frames); i++) {
        raw_write(fd, frames + i, 1);
    }
    side_wait_frames(&server, 3);
    close(fd);
    side_wait_closed(&server);
    cr_assert_eq(server.end.code, EP_ERR_CONNECTION_LOST);
}

Test(tcp, takes_frames_apart_that_arrive_together)
{
    enum { FRAMES = 500, BYTES = 977 };
    uint8_t *frames = malloc(FRAMES * BYTES);
    int fd = open_raw();
    for (uint64_t i = 0; i < FRAMES; i++) {
        fixture_fill(frames + i * BYTES, i, BYTES);
    }
    raw_write(fd, frames, FRAMES * BYTES - 1);
    side_wait_frames(&server, FRAMES - 1);
    raw_write(fd, frames + FRAMES * BYTES - 1, 1);
    side_wait_frames(&server, FRAMES);
    close(fd);
    side_wait_closed(&server);
    free(frames);
}

/* Sends the first bytes of a frame, then ends the connection. */
static void stop_after(size_t bytes, size_t frame_bytes, bool reset)
{
    uint8_t *frame = malloc(frame_bytes);
    int fd = open_raw();
    fixture_fill(frame, 0, frame_bytes);
    raw_write(fd, frame, bytes);
    if (reset) {
        close_with_reset(fd);
    } else {
        close(fd);
    }
    side_wait_closed(&server);
    cr_assert_eq(server.end.code, EP_ERR_CONNECTION_LOST, "%s", server.end.text);
    cr_assert_eq(server.frames, 0u);
    free(frame);
}

Test(tcp, sees_a_peer_that_says_nothing_and_leaves)
{
    stop_after(0, 64, false);
}

Test(tcp, sees_a_peer_that_leaves_in_the_middle_of_a_prefix)
{
    stop_after(63, 64, false);
}

Test(tcp, sees_a_peer_that_leaves_in_the_middle_of_a_small_frame)
{
    stop_after(500, 1000, false);
}

Test(tcp, sees_a_peer_that_leaves_in_the_middle_of_a_large_frame)
{
    stop_after(700000, 1 << 20, false);
    cr_assert_not_null(strstr(server.end.text, "middle of a frame"), "%s", server.end.text);
}

Test(tcp, sees_a_reset)
{
    stop_after(1000, 1 << 20, true);
}

Test(tcp, closes_on_garbage)
{
    uint8_t garbage[200];
    memset(garbage, 'G', sizeof(garbage));
    int fd = open_raw();
    raw_write(fd, garbage, sizeof(garbage));
    side_wait_closed(&server);
    cr_assert_eq(server.end.code, EP_ERR_PROTOCOL, "%s", server.end.text);
    uint8_t byte;
    cr_assert_leq(recv(fd, &byte, 1, 0), 0);
    close(fd);
}

Test(tcp, refuses_an_announced_length_before_allocating)
{
    const uint64_t lengths[] = {FRAME_BYTES_MAX + 1, 0,          63,
                                1ull << 40,          UINT64_MAX, UINT64_MAX - 63};
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        uint8_t frame[64];
        side_init(&server);
        int fd = open_raw();
        fixture_fill(frame, 0, 64);
        memcpy(frame + 8, &lengths[i], 8);
        raw_write(fd, frame, 64);
        side_wait_closed(&server);
        cr_assert(server.end.code == EP_ERR_RESOURCE_EXHAUSTED ||
                      server.end.code == EP_ERR_PROTOCOL,
                  "%s", server.end.text);
        close(fd);
    }
    ep_buffer_pool_stats stats;
    ep_buffer_pool_read_stats(world.pool, &stats);
    cr_assert_eq(stats.acquires, 0u);
}

/* A child that connects, sends half a frame, says so, and waits to be killed. */
static pid_t start_child(const uint8_t *frame, size_t bytes)
{
    int ready[2];
    uint16_t to_port = port();
    cr_assert_eq(pipe(ready), 0);
    pid_t child = fork_child();
    if (child == 0) {
        int fd = raw_connect(to_port);
        if (fd < 0 || send(fd, frame, bytes, MSG_NOSIGNAL) < 0 || write(ready[1], "r", 1) != 1) {
            _exit(1);
        }
        for (;;) {
            pause();
        }
    }
    char byte;
    cr_assert_eq(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    close(ready[1]);
    return child;
}

Test(tcp, sees_a_killed_process)
{
    uint8_t frame[1000];
    fixture_fill(frame, 0, sizeof(frame));
    pid_t child = start_child(frame, 500);
    side_accept(&world, &server);
    kill(child, SIGKILL);
    cr_assert_eq(waitpid(child, NULL, 0), child);
    side_wait_closed(&server);
    cr_assert_eq(server.end.code, EP_ERR_CONNECTION_LOST, "%s", server.end.text);
}

Test(tcp, sees_a_killed_process_while_a_send_is_blocked)
{
    uint8_t frame[64];
    fixture_fill(frame, 0, sizeof(frame));
    pid_t child = start_child(frame, sizeof(frame));
    side_accept(&world, &server);
    side_wait_frames(&server, 1);
    uint64_t sent = 0;
    while (send_and_forget(&server, sent, 1 << 20) == EP_OK) {
        sent++;
    }
    kill(child, SIGKILL);
    cr_assert_eq(waitpid(child, NULL, 0), child);
    side_wait_closed(&server);
    cr_assert_eq(server.end.code, EP_ERR_CONNECTION_LOST, "%s", server.end.text);
    cr_assert_eq(server.done_ok + server.done_failed, sent);
    cr_assert_gt(server.done_failed, 0u);
}

/* ---- a peer that has ended ---- */

static void wait_for_order(side *s, ep_buffer *frame)
{
    cr_assert_null(fixture_verify(frame, s->frames));
    ep_buffer_unref(frame);
    pthread_mutex_lock(&s->lock);
    bool first = s->frames++ == 0;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    if (first) {
        cr_assert_eq(sem_wait(s->arg), 0);
    }
}

static int unacked_of(int fd)
{
    int bytes;
    cr_assert_eq(ioctl(fd, SIOCOUTQ, &bytes), 0);
    return bytes;
}

/* nng's stream gives up what it has not read. */
Test(tcp, reads_what_a_peer_sent_before_it_ended_when_a_send_finds_the_end_first)
{
    enum { BYTES = 60000 };
    uint8_t *frame = malloc(BYTES);
    sem_t order;
    if (world.ops == &ep_nng_stream_lane) {
        free(frame);
        cr_skip_test("nng");
    }
    sem_init(&order, 0, 0);
    server.on_frame = wait_for_order;
    server.arg = &order;
    int fd = open_raw();
    fixture_fill(frame, 0, BYTES);
    raw_write(fd, frame, BYTES);
    side_wait_frames(&server, 1);
    fixture_fill(frame, 1, BYTES);
    raw_write(fd, frame, BYTES);
    while (unacked_of(fd) > 0) {
    }
    close_with_reset(fd);
    send_and_forget(&server, 0, 1000);
    sem_post(&order);
    side_wait_frames(&server, 2);
    side_wait_closed(&server);
    cr_assert_eq(server.end.code, EP_ERR_CONNECTION_LOST, "%s", server.end.text);
    sem_destroy(&order);
    free(frame);
}

Test(tcp, knows_what_the_peer_has_not_got)
{
    enum { BYTES = 400000 };
    int small = 4096;
    char bytes[4096];
    if (world.ops == &ep_nng_stream_lane) {
        cr_skip_test("nng");
    }
    int fd = open_raw();
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof(small));
    message *m = message_create(&server, 0, BYTES);
    cr_assert_eq(message_send(m), EP_OK);
    message_wait(m);
    cr_assert_gt(ep_conn_unacked(server.conn), 0u);
    for (size_t got = 0; got < BYTES;) {
        ssize_t n = recv(fd, bytes, sizeof(bytes), 0);
        cr_assert_gt(n, 0);
        got += (size_t)n;
    }
    while (ep_conn_unacked(server.conn) > 0) { /* the suite's limit ends it */
    }
    message_free(m);
    close(fd);
    side_wait_closed(&server);
}

/* ---- no memory ---- */

static ep_buffer *only_frame;

static void keep_only_frame(side *s, ep_buffer *frame)
{
    (void)s;
    only_frame = frame;
}

static ep_buffer_pool *room_for_one;

static void open_small_world(void)
{
    world_open(&world, CONTRACT_SCHEME);
    cr_assert_eq(ep_buffer_pool_create(65536, 0, &room_for_one), EP_OK);
    world.limits.pool = room_for_one;
    world_listen(&world);
    side_init(&server);
    server.on_frame = keep_only_frame;
}

static void close_small_world(void)
{
    world_close(&world);
    ep_buffer_pool_destroy(room_for_one);
}

/* It does not read, and cannot write: the socket's error is all it hears. */
TestSuite(tcp_memory, .init = open_small_world, .fini = close_small_world, .timeout = 120);

Test(tcp_memory, sees_a_reset_while_a_send_is_blocked)
{
    enum { BYTES = 60000 };
    uint8_t *frames = malloc((size_t)2 * BYTES);
    ep_conn_receiving receiving;
    int fd = open_raw();
    fixture_fill(frames, 0, BYTES);
    fixture_fill(frames + BYTES, 1, BYTES);
    raw_write(fd, frames, (size_t)2 * BYTES);
    do {
        ep_conn_read_receiving(server.conn, &receiving);
    } while (!receiving.waits_for_memory);
    for (uint64_t sent = 0; send_and_forget(&server, sent, 1 << 20) == EP_OK; sent++) {
    }
    close_with_reset(fd);
    side_wait_closed(&server);
    cr_assert_eq(server.end.code, EP_ERR_CONNECTION_LOST, "%s", server.end.text);
    ep_buffer_unref(only_frame);
    free(frames);
}

Test(tcp, survives_20_peers_that_leave_before_they_are_accepted_into_work)
{
    for (int i = 0; i < 20; i++) {
        int fd = raw_connect(port());
        cr_assert_geq(fd, 0);
        close_with_reset(fd);
        ep_conn_release(world_take_accepted(&world));
    }
    int fd = open_raw();
    uint8_t frame[64];
    fixture_fill(frame, 0, sizeof(frame));
    raw_write(fd, frame, sizeof(frame));
    side_wait_frames(&server, 1);
    close(fd);
    side_wait_closed(&server);
}

/* Stand before the C library's accept calls, and note when the network library was out of
 * descriptors. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    unsigned failures;
    uint64_t first_ns;
    uint64_t last_ns;
} refused = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

__attribute__((visibility("default"))) int accept4(int fd, struct sockaddr *address,
                                                   socklen_t *bytes, int flags)
{
    long accepted = syscall(SYS_accept4, fd, address, bytes, flags);
    if (accepted < 0 && errno == EMFILE) {
        pthread_mutex_lock(&refused.lock);
        refused.last_ns = ep_clock_now_ns();
        if (refused.failures++ == 0) {
            refused.first_ns = refused.last_ns;
        }
        pthread_cond_broadcast(&refused.changed);
        pthread_mutex_unlock(&refused.lock);
        errno = EMFILE;
    }
    return (int)accepted;
}

__attribute__((visibility("default"))) int accept(int fd, struct sockaddr *address,
                                                  socklen_t *bytes)
{
    return accept4(fd, address, bytes, 0);
}

Test(tcp, backs_off_without_descriptors_and_accepts_again)
{
    struct rlimit limit;
    struct sockaddr_in to = {.sin_family = AF_INET,
                             .sin_port = htons(port()),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    uint8_t frame[64];
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    fixture_fill(frame, 0, sizeof(frame));
    getrlimit(RLIMIT_NOFILE, &limit);
    struct rlimit none = {.rlim_cur = 0, .rlim_max = limit.rlim_max}; /* no number is low enough */
    setrlimit(RLIMIT_NOFILE, &none);
    cr_assert_eq(connect(fd, (struct sockaddr *)&to, sizeof(to)), 0);
    raw_write(fd, frame, sizeof(frame));
    pthread_mutex_lock(&refused.lock);
    while (refused.failures < 6) {
        pthread_cond_wait(&refused.changed, &refused.lock);
    }
    uint64_t pauses_ns = refused.last_ns - refused.first_ns;
    unsigned pauses = refused.failures - 1;
    pthread_mutex_unlock(&refused.lock);
    /* 10 + 20 + 40 + 80 + 160 ms, if no failure slipped in since; a slow machine only makes it
     * longer */
    cr_assert_geq(pauses_ns, 300 * EP_NS_PER_MS, "%u pauses in %llu ns", pauses,
                  (unsigned long long)pauses_ns);
    cr_assert_eq(world.accepts, 0u);
    setrlimit(RLIMIT_NOFILE, &limit);
    side_accept(&world, &server);
    side_wait_frames(&server, 1);
    close(fd);
    side_wait_closed(&server);
}

static unsigned nodelays;
static unsigned keepalives;

/* As accept4 above: which options the lane sets. */
__attribute__((visibility("default"))) int setsockopt(int fd, int level, int name,
                                                      const void *value, socklen_t bytes)
{
    int on = 0;
    memcpy(&on, value, bytes < sizeof(on) ? bytes : sizeof(on));
    if (level == IPPROTO_TCP && name == TCP_NODELAY && on == 1) {
        __atomic_add_fetch(&nodelays, 1, __ATOMIC_ACQ_REL);
    }
    if (level == SOL_SOCKET && name == SO_KEEPALIVE && on == 1) {
        __atomic_add_fetch(&keepalives, 1, __ATOMIC_ACQ_REL);
    }
    return (int)syscall(SYS_setsockopt, fd, level, name, value, bytes);
}

Test(tcp, sets_nodelay_and_keepalive_on_both_ends)
{
    side client;
    pair_open(&world, &client, &server);
    cr_assert_eq(__atomic_load_n(&nodelays, __ATOMIC_ACQUIRE), 2u);
    cr_assert_eq(__atomic_load_n(&keepalives, __ATOMIC_ACQUIRE), 2u);
    side_start(&client);
    side_start(&server);
    pair_close(&client, &server);
}
