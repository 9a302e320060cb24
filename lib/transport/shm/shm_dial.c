/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dialing: connect, wait for the listener's memory, look at both, map it. And the lane's table of
 * operations.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/check.h"
#include "transport/shm/shm_lane.h"

typedef enum dial_state { DIAL_PENDING, DIAL_RUNNING, DIAL_DONE } dial_state;

typedef struct shm_dialer {
    ep_dial base;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    shm_loop *loop;
    shm_source source;
    shm_work work;   /* posted to begin, and, when it has begun, once more to end a cancelled one */
    shm_held socket; /* the loop's */
    shm_access access;
    ep_lane_limits limits;
    ep_dial_func on_dial;
    void *arg;
    const char *path; /* in url */
    char url[EP_ADDRESS_BYTES];
    /* guarded by lock */
    dial_state state;
    bool begun;    /* the posted work has run or runs */
    uint32_t refs; /* its owner and the lane */
} shm_dialer;

static void dial_unref(shm_dialer *d)
{
    pthread_mutex_lock(&d->lock);
    bool last = --d->refs == 0;
    pthread_mutex_unlock(&d->lock);
    if (last) {
        pthread_cond_destroy(&d->changed);
        pthread_mutex_destroy(&d->lock);
        free(d);
    }
}

/* Runs on_dial unless the dial was cancelled; false then: its release has posted the end. */
static bool report(shm_dialer *d, ep_conn *conn, const ep_error *error)
{
    pthread_mutex_lock(&d->lock);
    bool cancelled = d->state != DIAL_PENDING;
    if (!cancelled) {
        d->state = DIAL_RUNNING;
    }
    pthread_mutex_unlock(&d->lock);
    if (cancelled) {
        return false;
    }
    d->on_dial(d->arg, conn, error);
    pthread_mutex_lock(&d->lock);
    d->state = DIAL_DONE;
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->lock);
    return true;
}

/* Errors: as on_dial tells. */
static ep_err open_socket(shm_dialer *d, ep_error *out_error)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    snprintf(name.sun_path, sizeof(name.sun_path), "%s", d->path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        return ep_error_set(out_error, EP_ERR_IO, "cannot create a socket: %s", strerror(errno));
    }
    ep_shm_held_add(&d->socket, fd);
    if (connect(fd, (struct sockaddr *)&name, sizeof(name)) != 0) {
        ep_err err =
            errno == EACCES || errno == EPERM ? EP_ERR_PERMISSION_DENIED : EP_ERR_UNAVAILABLE;
        return ep_error_set(out_error, err, "cannot connect to %s: %s", d->url, strerror(errno));
    }
    ep_err err = ep_shm_access_check_listener(&d->access, fd, d->path, out_error);
    if (err == EP_OK && ep_shm_loop_watch(d->loop, fd, &d->source, EPOLLIN | EPOLLRDHUP) != EP_OK) {
        err = ep_error_set(out_error, EP_ERR_IO, "epoll takes no more: %s", strerror(errno));
    }
    return err == EP_OK ? EP_OK : ep_error_prefix(out_error, err, "%s", d->url);
}

/* What came on the socket, as a connection. EP_ERR_CANCELLED: nothing yet. */
static ep_err take_welcome(shm_dialer *d, ep_conn **out_conn, ep_error *out_error)
{
    uint64_t ring_bytes;
    int memory_fd;
    shm_memory memory = {0};
    ep_err err = ep_shm_welcome_receive(d->socket.fd, &ring_bytes, &memory_fd, out_error);
    if (err == EP_ERR_CANCELLED) {
        return err;
    }
    if (err == EP_OK) {
        err = ep_shm_memory_adopt(memory_fd, ring_bytes, &memory, out_error);
        close(memory_fd);
    }
    int socket = err == EP_OK ? fcntl(d->socket.fd, F_DUPFD_CLOEXEC, 0) : -1;
    ep_shm_loop_unwatch(d->loop, d->socket.fd);
    ep_shm_held_close(&d->socket);
    if (err == EP_OK && socket < 0) {
        ep_shm_memory_close(&memory);
        err = ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                           "no descriptor is free in this process");
    }
    if (err == EP_OK) {
        err = ep_shm_conn_create(socket, &memory, &d->limits, d->url, NULL, out_conn, out_error);
    }
    return err == EP_OK ? EP_OK : ep_error_prefix(out_error, err, "cannot connect to %s", d->url);
}

/* Drops the lane's reference; nothing of the loop knows the dial any more. */
static void dial_over(shm_dialer *d)
{
    dial_unref(d);
    ep_shm_lane_drop();
}

static void on_event(shm_source *source, uint32_t events)
{
    shm_dialer *d = (shm_dialer *)(void *)((char *)source - offsetof(shm_dialer, source));
    ep_conn *conn = NULL;
    ep_error error;
    (void)events;
    pthread_mutex_lock(&d->lock);
    bool pending = d->state == DIAL_PENDING;
    pthread_mutex_unlock(&d->lock);
    if (!pending) {
        return; /* its posted end comes */
    }
    ep_err err = take_welcome(d, &conn, &error);
    if (err == EP_ERR_CANCELLED) {
        return;
    }
    if (report(d, conn, err == EP_OK ? NULL : &error)) {
        dial_over(d);
    } else if (conn != NULL) {
        ep_conn_release(conn);
    }
}

static void on_posted(shm_work *work)
{
    shm_dialer *d = (shm_dialer *)(void *)((char *)work - offsetof(shm_dialer, work));
    ep_error error;
    pthread_mutex_lock(&d->lock);
    bool cancelled = d->state != DIAL_PENDING;
    d->begun = true;
    pthread_mutex_unlock(&d->lock);
    if (!cancelled) {
        if (open_socket(d, &error) == EP_OK) {
            return;
        }
        if (!report(d, NULL, &error)) {
            return; /* cancelled meanwhile: posted again */
        }
    }
    if (d->socket.fd >= 0) {
        ep_shm_loop_unwatch(d->loop, d->socket.fd);
        ep_shm_held_close(&d->socket);
    }
    dial_over(d);
}

static shm_dialer *dial_create(const char *url, size_t path_at, const ep_lane_limits *limits,
                               const shm_access *access)
{
    shm_dialer *d = calloc(1, sizeof(*d));
    if (d == NULL) {
        return NULL;
    }
    pthread_mutex_init(&d->lock, NULL);
    pthread_cond_init(&d->changed, NULL);
    d->base.ops = &ep_shm_lane;
    d->loop = ep_shm_loop_first();
    d->source.on_event = on_event;
    d->work.run = on_posted;
    d->socket.fd = -1;
    d->access = *access;
    d->limits = *limits;
    d->refs = 2;
    snprintf(d->url, sizeof(d->url), "%s", url);
    d->path = d->url + path_at;
    return d;
}

ep_err ep_shm_dial(const ep_lane_address *address, const ep_lane_limits *limits,
                   ep_dial_func on_dial, void *arg, ep_dial **out_dial, ep_error *out_error)
{
    const char *path;
    shm_access access;
    ep_err err = ep_shm_url_path(address->url, &path, out_error);
    if (err == EP_OK) {
        err = ep_shm_access_read(address->shm, &access, out_error);
    }
    if (err == EP_OK) {
        err = ep_lane_limits_check(limits, false, out_error);
    }
    if (err == EP_OK) {
        err = ep_shm_loops_start(out_error);
    }
    if (err != EP_OK) {
        return err;
    }
    shm_dialer *d = dial_create(address->url, (size_t)(path - address->url), limits, &access);
    if (d == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a dial");
    }
    d->on_dial = on_dial;
    d->arg = arg;
    *out_dial = &d->base; /* on_dial may need it */
    ep_shm_lane_hold();
    ep_shm_loop_post(d->loop, &d->work);
    return EP_OK;
}

void ep_shm_dial_release(ep_dial *base)
{
    shm_dialer *d = (shm_dialer *)base;
    pthread_mutex_lock(&d->lock);
    bool cancelled = d->state == DIAL_PENDING;
    if (cancelled) {
        d->state = DIAL_DONE;
        if (d->begun) {
            /* under the lock: the loop's reference is still there */
            ep_shm_loop_post(d->loop, &d->work);
        } /* otherwise the work that comes ends it, and a second one would end it again */
    }
    while (d->state == DIAL_RUNNING) {
        pthread_cond_wait(&d->changed, &d->lock);
    }
    pthread_mutex_unlock(&d->lock);
    if (cancelled) {
        ep_error error;
        ep_error_set(&error, EP_ERR_CANCELLED, "the dial to %s was cancelled", d->url);
        d->on_dial(d->arg, NULL, &error);
    }
    dial_unref(d);
}

static const char *const schemes[] = {"shm", NULL};

const ep_lane_ops ep_shm_lane = {
    .name = "shm",
    .schemes = schemes,
    .listen = ep_shm_listen,
    .listener_close = ep_shm_listener_close,
    .listener_url = ep_shm_listener_url,
    .dial = ep_shm_dial,
    .dial_release = ep_shm_dial_release,
    .conn_start = ep_shm_conn_start,
    .conn_send = ep_shm_conn_send,
    .conn_close = ep_shm_conn_close,
    .conn_release = ep_shm_conn_release,
    .conn_allow_large = ep_shm_conn_allow_large,
    .conn_receiving = ep_shm_conn_receiving,
    .conn_peer = ep_shm_conn_peer,
    .conn_is_trusted = ep_shm_conn_is_trusted,
};
