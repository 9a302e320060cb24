/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a process of the same host can do to a shared-memory lane: scribble, stop, die, be the wrong
 * one, hand over junk.
 */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/random.h"
#include "lane_fixture.h"
#include "transport/lane_common.h"
#include "transport/shm/shm_lane.h"

#define NOBODY 65534u

static lane_world world;
static side server;

static void open_world(void)
{
    world_open(&world, "shm");
    side_init(&server);
}

static void close_world(void)
{
    world_close(&world);
}

TestSuite(shm, .init = open_world, .fini = close_world, .timeout = 120);

static const char *socket_path(void)
{
    return world.url + strlen("shm://");
}

/* ---- a peer made by hand ---- */

typedef struct raw {
    int fd;
    shm_memory memory;
    shm_producer out;
    shm_consumer in;
} raw;

/* Only calls that a forked child may make. */
static int raw_connect(const char *path)
{
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    snprintf(to.sun_path, sizeof(to.sun_path), "%.100s", path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    return fd >= 0 && connect(fd, (struct sockaddr *)&to, sizeof(to)) == 0 ? fd : -1;
}

/* The same: dials and takes the memory. Errors: as ep_shm_welcome_receive. */
static ep_err raw_dial(const char *path, raw *out)
{
    uint64_t ring_bytes;
    int memory_fd;
    ep_error error;
    char byte;
    out->fd = raw_connect(path);
    if (out->fd < 0) {
        return EP_ERR_UNAVAILABLE;
    }
    /* waits for the welcome */
    ep_err err = recv(out->fd, &byte, 1, MSG_PEEK) >= 0 ? EP_OK : EP_ERR_IO;
    if (err == EP_OK) {
        err = ep_shm_welcome_receive(out->fd, &ring_bytes, &memory_fd, &error);
    }
    if (err == EP_OK) {
        err = ep_shm_memory_adopt(memory_fd, ring_bytes, &out->memory, &error);
        close(memory_fd);
    }
    if (err == EP_OK) {
        ep_shm_memory_rings(&out->memory, false, &out->out, &out->in);
    }
    return err;
}

/* False: the other end is gone. */
static bool raw_ring(raw *r)
{
    return send(r->fd, "", 1, MSG_NOSIGNAL | MSG_DONTWAIT) == 1 || errno == EAGAIN ||
           errno == EINTR;
}

/* Puts bytes, which fit. */
static void raw_put(raw *r, const uint8_t *data, size_t bytes)
{
    while (bytes > 0) {
        size_t piece;
        uint8_t *at = ep_shm_producer_at(&r->out, 0, bytes, &piece);
        memcpy(at, data, piece);
        if (ep_shm_producer_publish(&r->out, piece)) {
            raw_ring(r);
        }
        data += piece;
        bytes -= piece;
    }
}

static void raw_close(raw *r)
{
    ep_shm_memory_close(&r->memory);
    close(r->fd);
}

static void open_raw(raw *r)
{
    world_listen(&world);
    cr_assert_eq(raw_dial(socket_path(), r), EP_OK);
    side_accept(&world, &server);
}

/* Its bytes are in the ring already: the lane's thread would be woken for nothing. */
Test(shm, ends_a_patient_frame_inside_its_send_where_that_is_allowed)
{
    side client;
    world_listen(&world);
    pair_start(&world, &client, &server);
    message *m = message_create(&client, 0, 1000);
    m->send.is_patient = true;
    m->send.done_inside = true;
    cr_assert_eq(message_send(m), EP_OK);
    pthread_mutex_lock(&client.lock);
    unsigned calls = m->done_calls;
    pthread_mutex_unlock(&client.lock);
    cr_assert_eq(calls, 1u, "done() was left to the lane's thread");
    side_wait_frames(&server, 1);
    message_free(m);
    pair_close(&client, &server);
}

Test(shm, puts_frames_together_from_single_bytes)
{
    raw r;
    uint8_t frames[3 * 100];
    open_raw(&r);
    for (uint64_t i = 0; i < 3; i++) {
        fixture_fill(frames + i * 100, i, 100);
    }
    for (size_t i = 0; i < sizeof(frames); i++) {
        raw_put(&r, frames + i, 1);
    }
    side_wait_frames(&server, 3);
    raw_close(&r);
    side_wait_closed(&server);
    cr_assert_eq(server.end.code, EP_ERR_CONNECTION_LOST, "%s", server.end.text);
}

Test(shm, reads_what_was_sent_before_the_end_and_names_half_a_frame)
{
    raw r;
    uint8_t frames[2 * 1000];
    world_listen(&world);
    cr_assert_eq(raw_dial(socket_path(), &r), EP_OK);
    fixture_fill(frames, 0, 1000);
    fixture_fill(frames + 1000, 1, 1000);
    raw_put(&r, frames, 1500);
    raw_close(&r);
    side_accept(&world, &server);
    side_wait_closed(&server);
    cr_assert_eq(server.frames, 1u);
    cr_assert_not_null(strstr(server.end.text, "middle of a frame"), "%s", server.end.text);
}

static void expect_protocol_end(void)
{
    side_wait_closed(&server);
    cr_assert_eq(server.end.code, EP_ERR_PROTOCOL, "%s", server.end.text);
}

Test(shm, closes_when_more_is_claimed_than_the_ring_holds)
{
    raw r;
    open_raw(&r);
    __atomic_store_n(&r.out.shared->head, r.out.bytes + 1, __ATOMIC_SEQ_CST);
    raw_ring(&r);
    expect_protocol_end();
    raw_close(&r);
}

Test(shm, closes_when_sent_bytes_are_taken_back)
{
    raw r;
    uint8_t frame[1000];
    open_raw(&r);
    fixture_fill(frame, 0, sizeof(frame));
    raw_put(&r, frame, sizeof(frame));
    side_wait_frames(&server, 1);
    __atomic_store_n(&r.out.shared->head, 10, __ATOMIC_SEQ_CST);
    raw_ring(&r);
    expect_protocol_end();
    raw_close(&r);
}

Test(shm, closes_when_unsent_bytes_are_claimed_as_read)
{
    raw r;
    open_raw(&r);
    __atomic_store_n(&r.in.shared->tail, 1, __ATOMIC_SEQ_CST);
    cr_assert_eq(send_and_forget(&server, 0, 100), EP_OK);
    expect_protocol_end();
    cr_assert_eq(server.done_ok + server.done_failed, 1u);
    raw_close(&r);
}

Test(shm, refuses_an_announced_length_before_allocating)
{
    const uint64_t lengths[] = {FRAME_BYTES_MAX + 1, 0,          63,
                                1ull << 40,          UINT64_MAX, UINT64_MAX - 63};
    world_listen(&world);
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        raw r;
        uint8_t frame[64];
        side_init(&server);
        cr_assert_eq(raw_dial(socket_path(), &r), EP_OK);
        side_accept(&world, &server);
        fixture_fill(frame, 0, 64);
        memcpy(frame + 8, &lengths[i], 8);
        raw_put(&r, frame, 64);
        side_wait_closed(&server);
        cr_assert(server.end.code == EP_ERR_RESOURCE_EXHAUSTED ||
                      server.end.code == EP_ERR_PROTOCOL,
                  "%s", server.end.text);
        raw_close(&r);
    }
    ep_buffer_pool_stats stats;
    ep_buffer_pool_read_stats(world.pool, &stats);
    cr_assert_eq(stats.acquires, 0u);
}

/* ---- peers in processes of their own ---- */

static pid_t start_child(void (*act)(raw *r, int ready), int *out_ready)
{
    int ready[2];
    cr_assert_eq(pipe(ready), 0);
    pid_t child = fork_child();
    if (child == 0) {
        raw r;
        if (raw_dial(socket_path(), &r) != EP_OK) {
            _exit(1);
        }
        act(&r, ready[1]);
        _exit(0);
    }
    close(ready[1]);
    *out_ready = ready[0];
    return child;
}

static void say_ready(int fd)
{
    ssize_t n = write(fd, "r", 1);
    (void)n;
}

static void wait_ready(int fd)
{
    char byte;
    cr_assert_eq(read(fd, &byte, 1), 1);
    close(fd);
}

static void end_child(pid_t child)
{
    kill(child, SIGKILL);
    cr_assert_eq(waitpid(child, NULL, 0), child);
}

/* Ends when every process that has the writing end of the pipe has. */
static bool wait_end(int fd)
{
    char byte;
    struct pollfd end = {.fd = fd, .events = POLLIN};
    return poll(&end, 1, 60 * 1000) == 1 && read(fd, &byte, 1) == 0;
}

/* As when the worker of a test that takes too long is killed. */
Test(shm, children_end_with_the_test_that_forked_them)
{
    int alive[2];
    char byte;
    cr_assert_eq(pipe(alive), 0);
    pid_t worker = fork_child();
    if (worker == 0) {
        if (fork_child() == 0) {
            say_ready(alive[1]);
        }
        for (;;) {
            pause();
        }
    }
    close(alive[1]);
    cr_assert_eq(read(alive[0], &byte, 1), 1);
    end_child(worker);
    cr_assert(wait_end(alive[0]), "the child of the killed one lives on");
    close(alive[0]);
}

static void send_half_and_wait(raw *r, int ready)
{
    uint8_t frame[1000];
    fixture_fill(frame, 0, sizeof(frame));
    raw_put(r, frame, 500);
    say_ready(ready);
    for (;;) {
        pause();
    }
}

Test(shm, sees_a_killed_process_also_while_a_send_is_blocked)
{
    int ready;
    world_listen(&world);
    pid_t child = start_child(send_half_and_wait, &ready);
    side_accept(&world, &server);
    wait_ready(ready);
    uint64_t sent = 0;
    while (send_and_forget(&server, sent, 1 << 20) == EP_OK) {
        sent++;
    }
    end_child(child);
    side_wait_closed(&server);
    cr_assert_eq(server.end.code, EP_ERR_CONNECTION_LOST, "%s", server.end.text);
    cr_assert_eq(server.done_ok + server.done_failed, sent);
    cr_assert_gt(server.done_failed, 0u);
}

Test(shm, a_stopped_process_holds_up_nobody_else)
{
    int ready;
    side near;
    side far;
    world_listen(&world);
    pid_t child = start_child(send_half_and_wait, &ready);
    side_accept(&world, &server);
    wait_ready(ready);
    kill(child, SIGSTOP);
    uint64_t sent = 0;
    while (send_and_forget(&server, sent, 1 << 20) == EP_OK) {
        sent++;
    }
    pair_start(&world, &near, &far);
    for (uint64_t i = 0; i < 100; i++) {
        cr_assert_eq(send_and_forget(&near, i, 20000), EP_OK);
    }
    side_wait_frames(&far, 100);
    pair_close(&near, &far);
    side_close(&server); /* it needs no answer of the stopped one */
    side_wait_closed(&server);
    cr_assert_eq(server.done_ok + server.done_failed, sent);
    end_child(child);
}

/* Writes numbers over all of the memory, positions and flags most of all, and rings, until nobody
 * is there. */
static void scribble(raw *r, int ready)
{
    uint64_t random = (uint64_t)getpid();
    say_ready(ready);
    for (;;) {
        shm_ring_shared *control = ep_splitmix64(&random) % 2 == 0 ? r->in.shared : r->out.shared;
        uint64_t value = ep_splitmix64(&random);
        uint64_t near = value % (3 * r->out.bytes);
        switch (value % 7) {
        case 0:
            __atomic_store_n(&control->head, near, __ATOMIC_RELAXED);
            break;
        case 1:
            __atomic_store_n(&control->tail, near, __ATOMIC_RELAXED);
            break;
        case 2:
            __atomic_store_n(&control->armed, (uint32_t)value, __ATOMIC_RELAXED);
            break;
        case 3:
            __atomic_store_n(&control->wants_space, (uint32_t)value, __ATOMIC_RELAXED);
            break;
        case 4:
            memset(r->memory.base, (int)value, r->memory.bytes);
            break;
        case 5: { /* a right prefix now and then, so that frames begin */
            uint8_t frame[64];
            fixture_fill(frame, 0, 64);
            memcpy(frame + 8, &near, 8);
            memcpy(r->out.data, frame, 64);
            break;
        }
        default:
            if (!raw_ring(r)) {
                return;
            }
        }
    }
}

/* The connection stays: the test sends while it ends. */
static void keep_closed(side *s)
{
    (void)s;
}

Test(shm, survives_processes_that_scribble)
{
    side near;
    side far;
    world_listen(&world);
    pair_start(&world, &near, &far);
    uint64_t right = 0;
    for (int i = 0; i < 12; i++) {
        int ready;
        side_init(&server);
        server.on_closed = keep_closed;
        pid_t child = start_child(scribble, &ready);
        side_accept(&world, &server);
        wait_ready(ready);
        /* until the lane has seen enough of it */
        while (send_and_forget(&server, 0, 30000) == EP_OK) {
            cr_assert_eq(send_and_forget(&near, right, 3000), EP_OK);
            side_wait_frames(&far, ++right);
            pthread_mutex_lock(&server.lock);
            bool over = server.closed != 0 || server.done_ok > 2000;
            pthread_mutex_unlock(&server.lock);
            if (over) {
                break;
            }
        }
        end_child(child);
        pthread_mutex_lock(&server.lock);
        while (server.closed == 0) {
            pthread_cond_wait(&server.changed, &server.lock);
        }
        pthread_mutex_unlock(&server.lock); /* its frames may be anything: no check of them */
        ep_conn_release(server.conn);
        cr_assert(server.end.code == EP_ERR_PROTOCOL || server.end.code == EP_ERR_CONNECTION_LOST ||
                      server.end.code == EP_ERR_RESOURCE_EXHAUSTED,
                  "%s", server.end.text);
    }
    pair_close(&near, &far);
}

Test(shm, a_forked_child_keeps_neither_sockets_nor_memory)
{
    side client;
    world_listen(&world);
    pair_start(&world, &client, &server);
    unsigned before = open_descriptors();
    pid_t child = fork_child();
    if (child == 0) {
        unsigned found = 0;
        for (int fd = 3; fd < 1024; fd++) {
            struct sockaddr_un name = {0};
            socklen_t bytes = sizeof(name);
            found += getsockname(fd, (struct sockaddr *)&name, &bytes) == 0 &&
                     strcmp(name.sun_path, socket_path()) == 0;
            bytes = sizeof(name);
            found += getpeername(fd, (struct sockaddr *)&name, &bytes) == 0 &&
                     strcmp(name.sun_path, socket_path()) == 0;
        }
        FILE *maps = fopen("/proc/self/maps", "r");
        char line[512];
        while (maps != NULL && fgets(line, sizeof(line), maps) != NULL) {
            found += strstr(line, "memfd:expertd-lane") != NULL;
        }
        message *m = message_create(&client, 0, 64);
        _exit(found == 0 && maps != NULL && ep_conn_send(client.conn, &m->send) == EP_ERR_CLOSED
                  ? 0
                  : 1);
    }
    expect_child_exits(child);
    cr_assert_eq(open_descriptors(), before);
    cr_assert_eq(send_and_forget(&client, 0, 5000), EP_OK);
    side_wait_frames(&server, 1);
    pair_close(&client, &server);
}

/* What the parent's objects hold is the parent's: neither its name nor a number that is another
 * file's by then. */
Test(shm, a_forked_child_that_closes_its_copies_takes_nothing_away)
{
    side client;
    world_listen(&world);
    pid_t child = fork_child();
    if (child == 0) {
        int own[64];
        for (size_t i = 0; i < 64; i++) {
            own[i] = dup(0); /* also the numbers of the sockets that are closed here */
        }
        ep_listener_close(world.listener);
        for (size_t i = 0; i < 64; i++) {
            if (fcntl(own[i], F_GETFD) < 0) {
                _exit(1);
            }
        }
        _exit(access(socket_path(), F_OK) == 0 ? 0 : 2);
    }
    expect_child_exits(child);
    pair_start(&world, &client, &server);
    pair_close(&client, &server);
}

/* Each thread of the lane has a connection that begins and ends: what was posted to it before has
 * run. */
static void visit_threads(void)
{
    for (int i = 0; i < EP_LANE_THREADS_MAX; i++) {
        side near;
        side far;
        pair_start(&world, &near, &far);
        pair_close(&near, &far);
    }
}

/* In a child: its own lane runs while it ends its parent's connection. Returns 0; 1 a number that
 * is another file's here was closed, 2 what it is was shut down. */
static int end_parents_connection(side *client)
{
    int own[32][2];
    for (size_t i = 0; i < 32; i++) { /* also the numbers of the sockets that are closed here */
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, own[i]) != 0) {
            return 3;
        }
    }
    strcat(world.url, "2");
    world_listen(&world);
    ep_conn_close(client->conn);
    ep_conn_close(server.conn);
    visit_threads();
    ep_listener_close(world.listener);
    for (size_t i = 0; i < 32; i++) {
        if (fcntl(own[i][0], F_GETFD) < 0 || fcntl(own[i][1], F_GETFD) < 0) {
            return 1;
        }
        if (send(own[i][0], "", 1, MSG_NOSIGNAL) != 1 ||
            send(own[i][1], "", 1, MSG_NOSIGNAL) != 1) {
            return 2;
        }
    }
    return 0;
}

Test(shm, a_forked_child_with_a_lane_of_its_own_leaves_its_parents_numbers_alone)
{
    side client;
    world_listen(&world);
    pair_start(&world, &client, &server);
    visit_threads(); /* a job under way at the fork would hide what the child does */
    pid_t child = fork_child();
    if (child == 0) {
        _exit(end_parents_connection(&client));
    }
    expect_child_exits(child);
    cr_assert_eq(send_and_forget(&client, 0, 5000), EP_OK);
    side_wait_frames(&server, 1);
    pair_close(&client, &server);
}

/* ---- who may ---- */

static void drop_accepted(void *arg, ep_conn *conn)
{
    (void)arg;
    ep_conn_release(conn);
}

static ep_err listen_with(const ep_lane_address *address, ep_error *out_error)
{
    return ep_lane_listen(world.ops, address, &world.limits, drop_accepted, NULL, &world.listener,
                          out_error);
}

/* What a process of this user is told. */
static ep_err dial_as(uint32_t uid, uint32_t gid)
{
    int status;
    pid_t child = fork_child();
    if (child == 0) {
        raw r;
        if (setgroups(0, NULL) != 0 || setgid(gid) != 0 || setuid(uid) != 0) {
            _exit(255);
        }
        _exit((int)raw_dial(socket_path(), &r));
    }
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert(WIFEXITED(status));
    return (ep_err)WEXITSTATUS(status);
}

static void listen_for(const uint32_t *uid, const uint32_t *gid)
{
    ep_error error;
    ep_shm_config config = {
        .uids = uid, .uids_count = uid != NULL, .gids = gid, .gids_count = gid != NULL};
    ep_lane_address address = {.url = world.url, .shm = &config};
    if (world.listener != NULL) {
        ep_listener_close(world.listener);
    }
    cr_assert_eq(listen_with(&address, &error), EP_OK, "%s", error.text);
}

Test(shm, lets_in_the_configured_users_and_groups_only)
{
    const uint32_t somebody = 54321;
    const uint32_t nobody = NOBODY;
    if (geteuid() != 0) {
        cr_skip_test("needs root to be somebody else");
    }
    cr_assert_eq(chmod(world.folder, 0755), 0);
    listen_for(NULL, NULL);
    cr_assert_eq(dial_as(nobody, nobody), EP_ERR_UNAVAILABLE); /* the file system says no already */
    cr_assert_eq(dial_as(0, 0), EP_OK);
    listen_for(&somebody, NULL);
    cr_assert_eq(dial_as(nobody, nobody), EP_ERR_PERMISSION_DENIED);
    cr_assert_eq(dial_as(nobody, somebody), EP_ERR_PERMISSION_DENIED); /* a number is not both */
    cr_assert_eq(dial_as(somebody, nobody), EP_OK);
    listen_for(NULL, &somebody);
    cr_assert_eq(dial_as(nobody, nobody), EP_ERR_PERMISSION_DENIED);
    cr_assert_eq(dial_as(nobody, somebody), EP_OK);
}

static void unref_frame(void *arg, ep_conn *conn, ep_buffer *frame)
{
    (void)arg;
    (void)conn;
    ep_buffer_unref(frame);
}

static void release_closed(void *arg, ep_conn *conn, const ep_error *error)
{
    (void)arg;
    (void)error;
    ep_conn_release(conn);
}

/* Each lives until its peer ends it. */
static void start_accepted(void *arg, ep_conn *conn)
{
    const ep_conn_handler handler = {.on_frame = unref_frame, .on_closed = release_closed};
    (void)arg;
    ep_conn_start(conn, &handler);
}

Test(shm, takes_no_more_memory_than_it_may)
{
    enum { ROOM = 2 };
    ep_error error;
    ep_shm_stats before, now;
    raw peers[ROOM + 1];
    ep_shm_config config = {.ring_bytes = EP_SHM_RING_BYTES_MIN,
                            .total_bytes = ep_shm_connection_bytes(EP_SHM_RING_BYTES_MIN) - 1};
    ep_lane_address address = {.url = world.url, .shm = &config};
    cr_assert_eq(listen_with(&address, &error), EP_ERR_INVALID_ARGUMENT);
    cr_assert_not_null(strstr(error.text, "total_bytes is"), "%s", error.text);
    config.total_bytes = (ROOM + 1) * ep_shm_connection_bytes(EP_SHM_RING_BYTES_MIN) - 1;
    cr_assert_eq(ep_lane_listen(world.ops, &address, &world.limits, start_accepted, NULL,
                                &world.listener, &error),
                 EP_OK, "%s", error.text);
    ep_shm_read_stats(&before);
    for (int i = 0; i < ROOM; i++) {
        cr_assert_eq(raw_dial(socket_path(), &peers[i]), EP_OK);
    }
    cr_assert_eq(raw_dial(socket_path(), &peers[ROOM]), EP_ERR_RESOURCE_EXHAUSTED);
    close(peers[ROOM].fd);
    ep_shm_read_stats(&now);
    cr_assert_eq(now.mapped_bytes - before.mapped_bytes,
                 ROOM * ep_shm_connection_bytes(EP_SHM_RING_BYTES_MIN));
    cr_assert_eq(now.refused_total - before.refused_total, 1u);
    for (int i = 0; i < ROOM; i++) {
        raw_close(&peers[i]);
    }
    ep_err err;
    do { /* until the lane's thread has seen the ends */
        err = raw_dial(socket_path(), &peers[0]);
        if (err != EP_OK) {
            close(peers[0].fd);
        }
    } while (err == EP_ERR_RESOURCE_EXHAUSTED);
    cr_assert_eq(err, EP_OK);
    raw_close(&peers[0]);
}

/* Pages of a ring that the system gave so far. */
static size_t used_pages(const raw *r)
{
    static unsigned char in_core[EP_SHM_RING_BYTES_DEFAULT / 4096];
    size_t used = 0;
    cr_assert_eq(mincore((void *)(uintptr_t)r->in.data, r->in.bytes, in_core), 0);
    for (size_t i = 0; i < r->in.bytes / 4096; i++) {
        used += in_core[i] & 1;
    }
    return used;
}

Test(shm, one_frame_at_a_time_takes_one_frame_of_memory)
{
    enum { FRAME_BYTES = 5000, FRAMES = 3 * EP_SHM_RING_BYTES_DEFAULT / FRAME_BYTES };
    raw r;
    static uint8_t frame[FRAME_BYTES], expected[FRAME_BYTES];
    open_raw(&r);
    for (uint64_t i = 0; i < FRAMES; i++) {
        size_t have = 0;
        cr_assert_eq(send_and_forget(&server, i, FRAME_BYTES), EP_OK);
        while (have < FRAME_BYTES) {
            size_t available;
            cr_assert(ep_shm_consumer_available(&r.in, &available));
            if (available > 0) {
                ep_shm_consumer_take(&r.in, frame + have, available);
                have += available;
            }
        }
        fixture_fill(expected, i, FRAME_BYTES);
        cr_assert_arr_eq(frame, expected, FRAME_BYTES, "frame %llu", (unsigned long long)i);
    }
    cr_assert_leq(used_pages(&r), FRAME_BYTES / 4096 + 1, "%zu pages", used_pages(&r));
    raw_close(&r);
    side_wait_closed(&server);
}

Test(shm, refuses_a_directory_that_everybody_may_write_to_and_wrong_settings)
{
    ep_error error;
    ep_shm_config config = {.ring_bytes = 100000};
    ep_lane_address address = {.url = world.url, .shm = &config};
    cr_assert_eq(listen_with(&address, &error), EP_ERR_INVALID_ARGUMENT);
    cr_assert_not_null(strstr(error.text, "ring_bytes is 100000"), "%s", error.text);
    config.ring_bytes = EP_SHM_RING_BYTES_MIN;
    cr_assert_eq(chmod(world.folder, 0777), 0);
    cr_assert_eq(listen_with(&address, &error), EP_ERR_INVALID_ARGUMENT);
    cr_assert_not_null(strstr(error.text, "everybody"), "%s", error.text);
    cr_assert_eq(chmod(world.folder, 0700), 0);
    address.url = "shm://relative/path";
    cr_assert_eq(listen_with(&address, &error), EP_ERR_INVALID_ARGUMENT);
    address.url = world.url;
    cr_assert_eq(listen_with(&address, &error), EP_OK, "%s", error.text);
}

Test(shm, replaces_the_socket_of_a_process_that_died)
{
    pid_t child = fork_child();
    if (child == 0) { /* ends without giving the name back */
        int socket;
        int lock;
        ep_error error;
        _exit(ep_shm_path_listen(socket_path(), false, &socket, &lock, &error) == EP_OK ? 0 : 1);
    }
    expect_child_exits(child);
    struct stat st;
    cr_assert_eq(stat(socket_path(), &st), 0);
    side client;
    world_listen(&world);
    pair_start(&world, &client, &server);
    pair_close(&client, &server);
}

/* ---- without descriptors, and a listener that is none ---- */

Test(shm, fails_or_waits_without_descriptors_and_works_again)
{
    struct rlimit limit;
    world_listen(&world);
    getrlimit(RLIMIT_NOFILE, &limit);
    bool failed = false;
    unsigned free_from = (unsigned)dup(0);
    close((int)free_from);
    /* one is enough for the dial's socket only: accepting then waits */
    for (unsigned more = 2; more < 8; more++) {
        struct rlimit few = {.rlim_cur = free_from + more, .rlim_max = limit.rlim_max};
        ep_error error;
        setrlimit(RLIMIT_NOFILE, &few);
        side client;
        side_init(&client);
        client.conn = world_dial(&world, &error);
        setrlimit(RLIMIT_NOFILE, &limit);
        failed = failed || client.conn == NULL;
        if (client.conn == NULL) {
            cr_assert(error.code == EP_ERR_RESOURCE_EXHAUSTED || error.code == EP_ERR_IO, "%s",
                      error.text);
        } else {
            ep_conn_release(client.conn);
        }
        pthread_mutex_lock(&world.lock);
        ep_conn *accepted = world.accepted;
        world.accepted = NULL;
        pthread_mutex_unlock(&world.lock);
        if (accepted != NULL) {
            ep_conn_release(accepted);
        }
    }
    cr_assert(failed);
    side client;
    pair_start(&world, &client, &server);
    pair_close(&client, &server);
}

/* The lane's threads do not start; what was opened for them is forgotten, so that forked children
 * end. */
Test(shm, forks_after_its_threads_could_not_start)
{
    struct rlimit limit;
    ep_error error;
    ep_lane_address address = {.url = world.url};
    side client;
    getrlimit(RLIMIT_NOFILE, &limit);
    unsigned free_from = (unsigned)dup(0);
    close((int)free_from);
    for (unsigned more = 0; more < 6; more++) {
        struct rlimit few = {.rlim_cur = free_from + more % 3, .rlim_max = limit.rlim_max};
        setrlimit(RLIMIT_NOFILE, &few);
        ep_err err = listen_with(&address, &error);
        setrlimit(RLIMIT_NOFILE, &limit);
        cr_assert_eq(err, EP_ERR_IO, "%s", error.text);
    }
    int alive[2];
    cr_assert_eq(pipe(alive), 0);
    pid_t child = fork_child();
    if (child == 0) {
        _exit(0);
    }
    close(alive[1]);
    bool ends = wait_end(alive[0]);
    close(alive[0]);
    end_child(child);
    cr_assert(ends, "a forked child does not come back from fork");
    world_listen(&world);
    pair_start(&world, &client, &server);
    pair_close(&client, &server);
}

typedef enum junk {
    JUNK_CLOSED,
    JUNK_BYTES,
    JUNK_NO_MEMORY,
    JUNK_UNSEALED,
    JUNK_SHORT,
    JUNK_RING,
    JUNK_KINDS
} junk;

/* Answers one dial with junk. */
static void answer(int fd, junk kind)
{
    uint64_t ring_bytes = EP_SHM_RING_BYTES_MIN;
    int memory = memfd_create("junk", MFD_ALLOW_SEALING);
    cr_assert_eq(ftruncate(memory, (off_t)(4096 + (kind == JUNK_SHORT ? 1 : 2) * ring_bytes)), 0);
    if (kind != JUNK_UNSEALED) {
        fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    }
    if (kind == JUNK_BYTES) {
        cr_assert_gt(send(fd, "junk", 4, MSG_NOSIGNAL), 0);
    } else if (kind != JUNK_CLOSED) {
        cr_assert(ep_shm_welcome_send(fd, kind == JUNK_RING ? 4097 : ring_bytes,
                                      kind == JUNK_NO_MEMORY ? -1 : memory, NULL));
    }
    close(memory);
}

Test(shm, a_dial_takes_no_junk_from_a_listener)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    snprintf(name.sun_path, sizeof(name.sun_path), "%.100s", socket_path());
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    cr_assert_eq(bind(listener, (struct sockaddr *)&name, sizeof(name)), 0);
    cr_assert_eq(listen(listener, 8), 0);
    snprintf(world.dial_url, sizeof(world.dial_url), "%s", world.url);
    for (int kind = 0; kind < JUNK_KINDS; kind++) {
        ep_error error;
        pid_t child = fork_child(); /* answers while we dial */
        if (child == 0) {
            int fd = accept(listener, NULL, NULL);
            answer(fd, (junk)kind);
            _exit(0);
        }
        cr_assert_null(world_dial(&world, &error));
        cr_assert_eq(error.code, kind == JUNK_CLOSED ? EP_ERR_UNAVAILABLE : EP_ERR_PROTOCOL,
                     "kind %d: %s", kind, error.text);
        cr_assert_eq(waitpid(child, NULL, 0), child);
    }
    close(listener);
    unlink(socket_path());
}
