/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A connection's memory: one page with the positions of both rings, then the rings. It can neither
 * shrink nor grow, so no access to it can fault. The listener creates it: a server never maps what
 * a stranger sends.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "transport/shm/shm_lane.h"

#define CONTROL_BYTES 4096
#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
#define WELCOME_MAGIC 0x314d485344504545ull
#define WELCOME_VERSION 2
#define WELCOME_TEXT_BYTES 200

static ep_shm_stats stats; /* atomic */

size_t ep_shm_connection_bytes(size_t ring_bytes)
{
    return CONTROL_BYTES + 2 * (ring_bytes != 0 ? ring_bytes : EP_SHM_RING_BYTES_DEFAULT);
}

void ep_shm_read_stats(ep_shm_stats *out_stats)
{
    out_stats->mapped_bytes = __atomic_load_n(&stats.mapped_bytes, __ATOMIC_RELAXED);
    out_stats->refused_total = __atomic_load_n(&stats.refused_total, __ATOMIC_RELAXED);
}

void ep_shm_memory_count_refusal(void)
{
    __atomic_fetch_add(&stats.refused_total, 1, __ATOMIC_RELAXED);
}

typedef struct welcome {
    uint64_t magic;
    uint32_t version;
    uint32_t code; /* ep_err; EP_OK: the descriptor is attached */
    uint64_t ring_bytes;
    char text[WELCOME_TEXT_BYTES];
} welcome;

static ep_err map(int fd, size_t ring_bytes, shm_memory *out_memory, ep_error *out_error)
{
    size_t bytes = ep_shm_connection_bytes(ring_bytes);
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY,
                            "cannot map %zu bytes of shared memory: %s", bytes, strerror(errno));
    }
    madvise(base, bytes, MADV_DONTFORK);
    *out_memory = (shm_memory){.base = base, .bytes = bytes, .ring_bytes = ring_bytes};
    return EP_OK;
}

ep_err ep_shm_memory_create(size_t ring_bytes, shm_memory *out_memory, int *out_fd,
                            ep_error *out_error)
{
    int fd = EP_LANE_FD(memfd_create("expertd-lane", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (fd < 0) {
        return ep_error_set(out_error, EP_ERR_IO, "memfd_create: %s", strerror(errno));
    }
    ep_err err = EP_OK;
    if (ftruncate(fd, (off_t)(ep_shm_connection_bytes(ring_bytes))) != 0 ||
        fcntl(fd, F_ADD_SEALS, SEALS) != 0) {
        err = ep_error_set(out_error, EP_ERR_IO,
                           "cannot size and seal %zu bytes of shared memory: %s",
                           ep_shm_connection_bytes(ring_bytes), strerror(errno));
    } else {
        err = map(fd, ring_bytes, out_memory, out_error);
    }
    if (err != EP_OK) {
        ep_lane_fd_close(fd);
        return err;
    }
    out_memory->counted = true;
    __atomic_fetch_add(&stats.mapped_bytes, out_memory->bytes, __ATOMIC_RELAXED);
    *out_fd = fd;
    return EP_OK;
}

ep_err ep_shm_memory_adopt(int fd, uint64_t ring_bytes, shm_memory *out_memory, ep_error *out_error)
{
    struct stat st;
    if (ring_bytes < EP_SHM_RING_BYTES_MIN || ring_bytes > EP_SHM_RING_BYTES_MAX ||
        (ring_bytes & (ring_bytes - 1)) != 0) {
        return ep_error_set(
            out_error, EP_ERR_PROTOCOL,
            "the listener offers rings of %llu bytes, allowed powers of two from %zu to %zu",
            (unsigned long long)ring_bytes, EP_SHM_RING_BYTES_MIN, EP_SHM_RING_BYTES_MAX);
    }
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & SEALS) != SEALS) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL,
                            "the listener's memory is not sealed against change of size");
    }
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) ||
        (uint64_t)st.st_size != ep_shm_connection_bytes(ring_bytes)) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL,
                            "the listener's memory has another size than it says");
    }
    return map(fd, (size_t)ring_bytes, out_memory, out_error);
}

void ep_shm_memory_close(shm_memory *memory)
{
    if (memory->base != NULL) {
        munmap(memory->base, memory->bytes);
        if (memory->counted) {
            __atomic_fetch_sub(&stats.mapped_bytes, memory->bytes, __ATOMIC_RELAXED);
        }
        memory->base = NULL;
    }
}

void ep_shm_memory_rings(const shm_memory *memory, bool listener, shm_producer *out_producer,
                         shm_consumer *out_consumer)
{
    shm_ring_shared *controls = (shm_ring_shared *)(void *)memory->base;
    uint8_t *data = memory->base + CONTROL_BYTES;
    size_t out = listener ? 1 : 0;
    *out_producer = (shm_producer){.shared = &controls[out],
                                   .data = data + out * memory->ring_bytes,
                                   .bytes = memory->ring_bytes,
                                   .cpu = UINT32_MAX};
    *out_consumer = (shm_consumer){.shared = &controls[1 - out],
                                   .data = data + (1 - out) * memory->ring_bytes,
                                   .bytes = memory->ring_bytes,
                                   .cpu = UINT32_MAX};
}

bool ep_shm_welcome_send(int socket, size_t ring_bytes, int fd, const ep_error *refusal)
{
    welcome hello = {.magic = WELCOME_MAGIC, .version = WELCOME_VERSION, .ring_bytes = ring_bytes};
    if (refusal != NULL) {
        hello.code = (uint32_t)refusal->code;
        snprintf(hello.text, sizeof(hello.text), "%.*s", WELCOME_TEXT_BYTES - 1, refusal->text);
    }
    struct iovec iov = {.iov_base = &hello, .iov_len = sizeof(hello)};
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {{0}};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1};
    if (fd >= 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof(control.bytes);
        struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(rights), &fd, sizeof(int));
    }
    return sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)sizeof(hello);
}

/* Takes one descriptor and closes any others. -1 none. */
static int take_descriptor(struct msghdr *message)
{
    int taken = -1;
    for (struct cmsghdr *at = CMSG_FIRSTHDR(message); at != NULL; at = CMSG_NXTHDR(message, at)) {
        if (at->cmsg_level != SOL_SOCKET || at->cmsg_type != SCM_RIGHTS) {
            continue;
        }
        size_t count = (at->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(at) + i * sizeof(int), sizeof(fd));
            if (taken < 0) {
                taken = fd;
            } else {
                close(fd);
            }
        }
    }
    return taken;
}

ep_err ep_shm_welcome_receive(int socket, uint64_t *out_ring_bytes, int *out_fd,
                              ep_error *out_error)
{
    welcome hello;
    struct iovec iov = {.iov_base = &hello, .iov_len = sizeof(hello)};
    union {
        char bytes[CMSG_SPACE(4 * sizeof(int))];
        struct cmsghdr align;
    } control;
    struct msghdr message = {.msg_iov = &iov,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof(control.bytes)};
    ssize_t got = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
        return EP_ERR_CANCELLED;
    }
    if (got <= 0) {
        return ep_error_set(out_error, EP_ERR_UNAVAILABLE, "the listener closed the connection");
    }
    int fd = take_descriptor(&message);
    ep_err err = EP_OK;
    if ((size_t)got != sizeof(hello) || hello.magic != WELCOME_MAGIC ||
        hello.version != WELCOME_VERSION) {
        err = ep_error_set(out_error, EP_ERR_PROTOCOL, "the listener speaks another protocol");
    } else if (hello.code != EP_OK) {
        hello.text[WELCOME_TEXT_BYTES - 1] = 0;
        err = ep_err_from_wire(hello.code, 2);
        err = ep_error_set(out_error, err != EP_OK ? err : EP_ERR_UNKNOWN,
                           "the listener refused: %s", hello.text);
    } else if (fd < 0) {
        bool cut = (message.msg_flags & MSG_CTRUNC) != 0;
        err = ep_error_set(out_error, cut ? EP_ERR_RESOURCE_EXHAUSTED : EP_ERR_PROTOCOL,
                           "the listener's memory did not arrive%s",
                           cut ? ": no descriptor is free in this process" : "");
    }
    if (err != EP_OK) {
        if (fd >= 0) {
            close(fd);
        }
        return err;
    }
    *out_ring_bytes = hello.ring_bytes;
    *out_fd = fd;
    return EP_OK;
}
