/* SPDX-License-Identifier: Apache-2.0 */
/* Which processes may be at the other end, and the socket's name in the file system. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "transport/address.h"
#include "transport/shm/shm_lane.h"

#define BACKLOG 4096
#define GROUPS_MAX 256
#define PATH_BYTES sizeof(((struct sockaddr_un *)NULL)->sun_path)
#define LOCK_SUFFIX ".lock"
#define LOCK_TRIES 100

static ep_err access_read(const ep_shm_config *config, shm_access *out_access, ep_error *out_error)
{
    shm_access access = {.ring_bytes = EP_SHM_RING_BYTES_DEFAULT};
    if (config != NULL) {
        if (config->uids_count > EP_SHM_IDS_MAX || config->gids_count > EP_SHM_IDS_MAX) {
            return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                                "%zu users and %zu groups, allowed up to %d of each",
                                config->uids_count, config->gids_count, EP_SHM_IDS_MAX);
        }
        size_t bytes = config->ring_bytes != 0 ? config->ring_bytes : EP_SHM_RING_BYTES_DEFAULT;
        if (bytes < EP_SHM_RING_BYTES_MIN || bytes > EP_SHM_RING_BYTES_MAX ||
            (bytes & (bytes - 1)) != 0) {
            return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                                "ring_bytes is %zu, allowed powers of two from %zu to %zu", bytes,
                                EP_SHM_RING_BYTES_MIN, EP_SHM_RING_BYTES_MAX);
        }
        if (config->total_bytes != 0 && config->total_bytes < ep_shm_connection_bytes(bytes)) {
            return ep_error_set(
                out_error, EP_ERR_INVALID_ARGUMENT,
                "total_bytes is %zu, must be at least %zu, what one connection takes",
                config->total_bytes, ep_shm_connection_bytes(bytes));
        }
        access.ring_bytes = bytes;
        access.total_bytes = config->total_bytes;
        access.uids_count = config->uids_count;
        access.gids_count = config->gids_count;
        if (config->uids_count > 0) {
            memcpy(access.uids, config->uids, config->uids_count * sizeof(access.uids[0]));
        }
        if (config->gids_count > 0) {
            memcpy(access.gids, config->gids, config->gids_count * sizeof(access.gids[0]));
        }
    }
    *out_access = access;
    return EP_OK;
}

static ep_err url_path(const char *url, const char **out_path, ep_error *out_error)
{
    const char *path = ep_url_has_scheme(url, "shm") ? strstr(url, "://") + 3 : "";
    if (path[0] != '/' || strlen(path) + sizeof(LOCK_SUFFIX) > PATH_BYTES) {
        return ep_error_set(
            out_error, EP_ERR_INVALID_ARGUMENT,
            "address '%.140s' must be shm:// and an absolute path of up to %zu bytes", url,
            PATH_BYTES - sizeof(LOCK_SUFFIX));
    }
    *out_path = path;
    return EP_OK;
}

ep_err ep_shm_open(const ep_lane_address *address, const char *url, const char **out_path,
                   shm_access *out_access, ep_error *out_error)
{
    ep_err err = url_path(url, out_path, out_error);
    if (err == EP_OK) {
        err = access_read(address->shm, out_access, out_error);
    }
    return err == EP_OK ? ep_shm_loops_start(out_error) : err;
}

static bool has(const uint32_t *ids, size_t count, uint32_t id)
{
    for (size_t i = 0; i < count; i++) {
        if (ids[i] == id) {
            return true;
        }
    }
    return false;
}

/* Whether one of the peer's supplementary groups is allowed. */
static bool in_other_group(const shm_access *access, int socket)
{
    gid_t groups[GROUPS_MAX];
    socklen_t bytes = sizeof(groups);
    if (access->gids_count == 0 ||
        getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, groups, &bytes) != 0) {
        return false;
    }
    for (size_t i = 0; i < bytes / sizeof(groups[0]); i++) {
        if (has(access->gids, access->gids_count, groups[i])) {
            return true;
        }
    }
    return false;
}

static ep_err read_peer(int socket, struct ucred *out_peer, ep_error *out_error)
{
    socklen_t bytes = sizeof(*out_peer);
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, out_peer, &bytes) != 0) {
        return ep_error_set(out_error, EP_ERR_PERMISSION_DENIED, "who connects is not known: %s",
                            strerror(errno));
    }
    return EP_OK;
}

static bool is_allowed(const shm_access *access, int socket, const struct ucred *peer)
{
    return peer->uid == geteuid() || peer->uid == 0 ||
           has(access->uids, access->uids_count, peer->uid) ||
           has(access->gids, access->gids_count, peer->gid) || in_other_group(access, socket);
}

ep_err ep_shm_access_check(const shm_access *access, int socket, char *out_peer, size_t peer_bytes,
                           ep_error *out_error)
{
    struct ucred peer = {0};
    ep_err err = read_peer(socket, &peer, out_error);
    if (err != EP_OK) {
        return err;
    }
    snprintf(out_peer, peer_bytes, "process %d of user %u", (int)peer.pid, peer.uid);
    if (!is_allowed(access, socket, &peer)) {
        return ep_error_set(out_error, EP_ERR_PERMISSION_DENIED,
                            "user %u group %u may not use shared memory here, allowed are user %u, "
                            "root and the configured ones",
                            peer.uid, peer.gid, geteuid());
    }
    return EP_OK;
}

/* Status of the directory that path is in. */
static bool stat_directory(const char *path, struct stat *out_stat)
{
    char directory[PATH_BYTES];
    snprintf(directory, sizeof(directory), "%s", path);
    char *slash = strrchr(directory, '/');
    slash[slash == directory ? 1 : 0] = 0;
    return stat(directory, out_stat) == 0 && S_ISDIR(out_stat->st_mode);
}

ep_err ep_shm_access_check_listener(const shm_access *access, int socket, const char *path,
                                    ep_error *out_error)
{
    struct stat directory;
    struct ucred peer = {0};
    ep_err err = read_peer(socket, &peer, out_error);
    if (err != EP_OK || is_allowed(access, socket, &peer)) {
        return err;
    }
    if (stat_directory(path, &directory) && directory.st_uid == peer.uid &&
        (directory.st_mode & S_IWOTH) == 0) {
        return EP_OK;
    }
    return ep_error_set(
        out_error, EP_ERR_PERMISSION_DENIED,
        "user %u listens there, allowed are user %u, root, and the owner of a directory "
        "others cannot write to",
        peer.uid, geteuid());
}

/* A child that is being forked keeps the file, but not the lock on the name. */
static void close_lock(int lock)
{
    flock(lock, LOCK_UN);
    ep_lane_fd_forget(lock);
    close(lock); /* outside the lock of forks: a network file system may be slow */
}

/* Locks the name: while the lock is held, a socket of that name is ours or a dead process's. */
static ep_err take_name(const char *path, int *out_lock, ep_error *out_error)
{
    char name[PATH_BYTES];
    snprintf(name, sizeof(name), "%s" LOCK_SUFFIX, path);
    for (int i = 0; i < LOCK_TRIES; i++) {
        struct stat held;
        struct stat named;
        /* outside EP_LANE_FD, since a network file system may be slow */
        int fd = open(name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        fd = EP_LANE_FD(fd);
        if (fd < 0) {
            return ep_error_set(out_error,
                                errno == ENOENT || errno == ENOTDIR ? EP_ERR_INVALID_ARGUMENT
                                                                    : EP_ERR_IO,
                                "cannot create %s: %s", name, strerror(errno));
        }
        if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
            close_lock(fd);
            return ep_error_set(out_error, EP_ERR_UNAVAILABLE, "address shm://%s is in use", path);
        }
        if (fstat(fd, &held) == 0 && stat(name, &named) == 0 && held.st_dev == named.st_dev &&
            held.st_ino == named.st_ino) {
            *out_lock = fd;
            return EP_OK;
        }
        close_lock(fd); /* its last owner removed the file in between */
    }
    return ep_error_set(out_error, EP_ERR_UNAVAILABLE, "address shm://%s is in use", path);
}

static ep_err bind_and_listen(const char *path, bool others, int *out_socket, ep_error *out_error)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    struct stat there;
    snprintf(name.sun_path, sizeof(name.sun_path), "%s", path);
    int fd = EP_LANE_FD(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (fd < 0) {
        return ep_error_set(out_error, EP_ERR_IO, "cannot create a socket: %s", strerror(errno));
    }
    if (lstat(path, &there) == 0 && S_ISSOCK(there.st_mode)) {
        unlink(path); /* left by a process that died */
    }
    /* Access is decided by the check of the peer; the mode only spares others the attempt. */
    if (bind(fd, (struct sockaddr *)&name, sizeof(name)) != 0 ||
        chmod(path, others ? 0666 : 0600) != 0 || listen(fd, BACKLOG) != 0) {
        ep_err err = ep_error_set(out_error, errno == EADDRINUSE ? EP_ERR_UNAVAILABLE : EP_ERR_IO,
                                  "cannot listen on shm://%s: %s", path, strerror(errno));
        ep_lane_fd_close(fd);
        return err;
    }
    *out_socket = fd;
    return EP_OK;
}

ep_err ep_shm_path_listen(const char *path, bool others, int *out_socket, int *out_lock,
                          ep_error *out_error)
{
    struct stat directory;
    if (!stat_directory(path, &directory)) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, "the directory of %s is missing",
                            path);
    }
    if ((directory.st_mode & S_IWOTH) != 0) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "everybody may write to the directory of %s", path);
    }
    int lock;
    ep_err err = take_name(path, &lock, out_error);
    if (err != EP_OK) {
        return err;
    }
    err = bind_and_listen(path, others, out_socket, out_error);
    if (err != EP_OK) {
        close_lock(lock);
        return err;
    }
    *out_lock = lock;
    return EP_OK;
}

void ep_shm_path_close(const char *path, int lock)
{
    char name[PATH_BYTES];
    snprintf(name, sizeof(name), "%s" LOCK_SUFFIX, path);
    unlink(path);
    unlink(name);
    close_lock(lock);
}
