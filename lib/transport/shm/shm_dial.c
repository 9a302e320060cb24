/* SPDX-License-Identifier: Apache-2.0 */
/* Dialling: connect, wait for the listener's memory, check both, map it. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "transport/shm/shm_lane.h"

/* Errors: those of on_dial. */
static ep_err open_socket(shm_dial *d, ep_error *out_error)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    snprintf(name.sun_path, sizeof(name.sun_path), "%s", d->path);
    const int fd = EP_LANE_FD(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    d->socket = fd;
    if (fd < 0) {
        return ep_error_set(out_error, EP_ERR_IO, "cannot create a socket: %s", strerror(errno));
    }
    if (connect(fd, (struct sockaddr *)&name, sizeof(name)) != 0) {
        ep_err err =
            errno == EACCES || errno == EPERM ? EP_ERR_PERMISSION_DENIED : EP_ERR_UNAVAILABLE;
        return ep_error_set(out_error, err, "cannot connect to %s: %s", d->lane.url,
                            strerror(errno));
    }
    ep_err err = ep_shm_access_check_listener(&d->access, fd, d->path, out_error);
    if (err == EP_OK && ep_shm_loop_watch(d->loop, fd, &d->source, EPOLLIN | EPOLLRDHUP) != EP_OK) {
        err = ep_error_set(out_error, EP_ERR_IO, "epoll takes no more: %s", strerror(errno));
    }
    return err == EP_OK ? EP_OK : ep_error_prefix(out_error, err, "%s", d->lane.url);
}

/* Makes a connection of what arrived on the socket. EP_ERR_CANCELLED: nothing has arrived yet. */
static ep_err take_welcome(shm_dial *d, ep_conn **out_conn, ep_error *out_error)
{
    uint64_t ring_bytes;
    int memory_fd;
    shm_memory memory = {0};
    ep_err err = ep_shm_welcome_receive(d->socket, &ring_bytes, &memory_fd, out_error);
    if (err == EP_ERR_CANCELLED) {
        return err;
    }
    if (err == EP_OK) {
        err = ep_shm_memory_adopt(memory_fd, ring_bytes, &memory, out_error);
        /* lane_fork.h does not know this descriptor: a child forked meanwhile keeps the memory, but
         * it hides no end from the peer */
        close(memory_fd);
    }
    if (err == EP_OK) { /* this takes the socket in every case */
        int socket = d->socket;
        ep_shm_loop_unwatch(d->loop, socket);
        d->socket = -1;
        err = ep_shm_conn_create(d->lane.base.ops, socket, &memory, &d->lane.limits, d->lane.url,
                                 NULL, out_conn, out_error);
    }
    return err == EP_OK ? EP_OK
                        : ep_error_prefix(out_error, err, "cannot connect to %s", d->lane.url);
}

static void over(shm_dial *d, ep_conn *conn, const ep_error *error)
{
    if (d->socket >= 0) {
        ep_shm_loop_unwatch(d->loop, d->socket);
        ep_lane_fd_close(d->socket);
    }
    d->over = true;
    ep_lane_dial_report(&d->lane, conn, error);
    ep_lane_dial_over(&d->lane);
}

static void on_event(shm_source *source, uint32_t events)
{
    shm_dial *d = (shm_dial *)(void *)((char *)source - offsetof(shm_dial, source));
    ep_conn *conn = NULL;
    ep_error error;
    (void)events;
    if (take_welcome(d, &conn, &error) != EP_ERR_CANCELLED) {
        over(d, conn, &error);
    }
}

static void on_posted(ep_lane_job *job)
{
    shm_dial *d = (shm_dial *)(void *)((char *)job - offsetof(shm_dial, job));
    bool cancelled = ep_lane_dial_is_cancelled(&d->lane);
    ep_error error = {.code = EP_ERR_CANCELLED};
    if (!d->over && (cancelled || (!d->begun && open_socket(d, &error) != EP_OK))) {
        over(d, NULL, &error);
    }
    d->begun = true;
    ep_lane_dial_unref(&d->lane);
}

static void post(ep_lane_dial *dial)
{
    shm_dial *d = (shm_dial *)dial;
    ep_lane_dial_ref(dial);
    if (!ep_shm_loop_post(d->loop, &d->job)) {
        ep_lane_dial_unref(dial);
    }
}

ep_err ep_shm_dial(ep_dial *base, const ep_lane_address *address, ep_error *out_error)
{
    shm_dial *d = (shm_dial *)base;
    ep_err err = ep_shm_open(address, d->lane.url, &d->path, &d->access, out_error);
    if (err == EP_OK) {
        d->lane.cancel = post;
        d->loop = ep_shm_loop_first();
        d->source.on_event = on_event;
        d->job.run = on_posted;
        d->socket = -1;
        post(&d->lane);
    }
    return err;
}
