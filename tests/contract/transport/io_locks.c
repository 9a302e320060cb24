/* SPDX-License-Identifier: Apache-2.0 */
/*
 * No lock is held while a lane is inside the kernel with a frame, and who computes is not there
 * with a patient one. The linker puts counters around the calls (-Wl,--wrap): how many mutexes this
 * thread holds in a call that moves bytes, and whose.
 *
 * Left out: what nng does inside, and the wake-up of a shared-memory peer in the middle of a frame
 * of several pieces, a send of one byte that never waits.
 */
#include <string.h>
#include <sys/socket.h>

#include "lane_fixture.h"

#define FRAMES 2000
#define FRAME_BYTES 20000
/* each way: they fit into a ring, since one that is full takes the rest of its queue in pieces */
#define IN_FLIGHT 32

static __thread int held;
static uint64_t calls;                /* atomic: that moved bytes */
static uint64_t calls_held;           /* atomic: of them, with a mutex held */
static const uint8_t *watched;        /* a frame's bytes */
static pthread_t watched_by;          /* who must not write them */
static uint64_t watched_writes;       /* atomic: of that thread, with these bytes */
static uint64_t watched_writes_other; /* atomic: of others */

int __real_pthread_mutex_lock(pthread_mutex_t *mutex);
int __real_pthread_mutex_unlock(pthread_mutex_t *mutex);
ssize_t __real_sendmsg(int fd, const struct msghdr *header, int flags);
ssize_t __real_recvmsg(int fd, struct msghdr *header, int flags);
ssize_t __real_send(int fd, const void *data, size_t bytes, int flags);
ssize_t __real_recv(int fd, void *data, size_t bytes, int flags);
int __wrap_pthread_mutex_lock(pthread_mutex_t *mutex);
int __wrap_pthread_mutex_unlock(pthread_mutex_t *mutex);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *header, int flags);
ssize_t __wrap_recvmsg(int fd, struct msghdr *header, int flags);
ssize_t __wrap_send(int fd, const void *data, size_t bytes, int flags);
ssize_t __wrap_recv(int fd, void *data, size_t bytes, int flags);

int __wrap_pthread_mutex_lock(pthread_mutex_t *mutex)
{
    held++;
    return __real_pthread_mutex_lock(mutex);
}

int __wrap_pthread_mutex_unlock(pthread_mutex_t *mutex)
{
    held--;
    return __real_pthread_mutex_unlock(mutex);
}

static void note(void)
{
    __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&calls_held, held > 0, __ATOMIC_RELAXED);
}

static void note_watched(const struct msghdr *header)
{
    for (size_t i = 0; watched != NULL && i < header->msg_iovlen; i++) {
        if (header->msg_iov[i].iov_base == watched) {
            bool is_own = pthread_equal(pthread_self(), watched_by) != 0;
            __atomic_fetch_add(is_own ? &watched_writes : &watched_writes_other, 1,
                               __ATOMIC_RELAXED);
        }
    }
}

ssize_t __wrap_sendmsg(int fd, const struct msghdr *header, int flags)
{
    note();
    note_watched(header);
    return __real_sendmsg(fd, header, flags);
}

ssize_t __wrap_recvmsg(int fd, struct msghdr *header, int flags)
{
    note();
    return __real_recvmsg(fd, header, flags);
}

ssize_t __wrap_send(int fd, const void *data, size_t bytes, int flags)
{
    note();
    return __real_send(fd, data, bytes, flags);
}

ssize_t __wrap_recv(int fd, void *data, size_t bytes, int flags)
{
    note();
    return __real_recv(fd, data, bytes, flags);
}

static void open_pair(lane_world *world, const char *name, side *client, side *server)
{
    world_open(world, name);
    world_listen(world);
    pair_start(world, client, server);
}

/* Both directions at once: callers and the lane's threads send and receive. */
static void test_lane(const char *name)
{
    lane_world world;
    side client, server;
    open_pair(&world, name, &client, &server);
    __atomic_store_n(&calls, 0, __ATOMIC_RELAXED);
    for (uint64_t i = 0; i < FRAMES; i++) {
        if (i >= IN_FLIGHT) {
            side_wait_frames(&server, i - IN_FLIGHT);
            side_wait_frames(&client, i - IN_FLIGHT);
        }
        CHECK(send_and_forget(&client, i, FRAME_BYTES) == EP_OK);
        CHECK(send_and_forget(&server, i, FRAME_BYTES) == EP_OK);
    }
    side_wait_frames(&client, FRAMES);
    side_wait_frames(&server, FRAMES);
    uint64_t made = __atomic_load_n(&calls, __ATOMIC_RELAXED);
    pair_close(&client, &server);
    world_close(&world);
    uint64_t with_lock = __atomic_load_n(&calls_held, __ATOMIC_RELAXED);
    printf("%s: %llu calls into the kernel, %llu with a lock held\n", name,
           (unsigned long long)made, (unsigned long long)with_lock);
    CHECK(made > 0, "%s: the counters see nothing", name);
    CHECK(with_lock == 0, "%s: a lock is held inside the kernel", name);
}

static message *patient;

/* Inside the socket still: what is queued here is the writer's to go on with. */
static void queue_patient(message *m)
{
    (void)m;
    CHECK(message_send(patient) == EP_OK);
}

/* The caller is inside the socket with a frame of its own when another one queues a patient frame
 * behind it. */
static void test_patient(void)
{
    lane_world world;
    side client, server;
    open_pair(&world, "tcp/uv", &client, &server);
    message *first = message_create(&client, 0, 1000);
    patient = message_create(&client, 1, 1000);
    patient->send.is_patient = true;
    first->send.done_inside = true;
    first->on_done = queue_patient;
    watched_by = pthread_self();
    watched = patient->bytes;
    CHECK(message_send(first) == EP_OK);
    message_wait(patient);
    message_wait(first);
    side_wait_frames(&server, 2);
    watched = NULL;
    message_free(first);
    message_free(patient);
    pair_close(&client, &server);
    world_close(&world);
    CHECK(__atomic_load_n(&watched_writes, __ATOMIC_RELAXED) == 0,
          "the caller wrote a patient frame");
    CHECK(__atomic_load_n(&watched_writes_other, __ATOMIC_RELAXED) > 0, "the counters see nothing");
}

int main(void)
{
    test_patient();
    test_lane("tcp/uv");
    test_lane("shm");
    return 0;
}
