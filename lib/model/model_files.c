/* SPDX-License-Identifier: Apache-2.0 */
/* Opens and reads files of a model directory; the header says what is refused. */
#include "model/model_files.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "model/mirror.h"

/* O_NONBLOCK, because opening a pipe without a writer must not hang. No effect on regular files. */
#define OPEN_FLAGS (O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK)
/* The most for one pread; Linux reads at most 2 GiB at once. */
#define READ_PIECE_BYTES ((size_t)1 << 30)

static ep_err errno_to_err(int number)
{
    switch (number) {
    case ENOENT:
    case ENOTDIR:
        return EP_ERR_NOT_FOUND;
    case ENOMEM:
        return EP_ERR_NO_MEMORY;
    case ENAMETOOLONG:
    case ELOOP:
        return EP_ERR_BAD_FILE;
    default:
        return EP_ERR_IO;
    }
}

static ep_err system_error(ep_error *out_error, const char *verb, const char *name)
{
    int number = errno;
    char text[EP_ERRNO_TEXT_BYTES];
    return ep_error_set(out_error, errno_to_err(number), "%s: cannot %s: %s", name, verb,
                        ep_errno_text(number, text));
}

/* If path is <root>/snapshots/<revision> and <root>/blobs exists, links may end below <root>. */
static char *find_root(const char *path)
{
    const char *revision = strrchr(path, '/');
    static const char parent[] = "/snapshots";
    size_t parent_length = sizeof(parent) - 1;
    size_t length = revision == NULL ? 0 : (size_t)(revision - path);
    if (length > parent_length &&
        memcmp(path + length - parent_length, parent, parent_length) == 0) {
        char blobs[PATH_MAX];
        struct stat st;
        int root_length = (int)(length - parent_length);
        int n = snprintf(blobs, sizeof(blobs), "%.*s/blobs", root_length, path);
        if (n > 0 && (size_t)n < sizeof(blobs) && stat(blobs, &st) == 0 && S_ISDIR(st.st_mode)) {
            return strndup(path, (size_t)root_length);
        }
    }
    return strdup(path);
}

ep_err ep_model_dir_open(const char *path, ep_model_dir *out_dir, ep_error *out_error)
{
    ep_model_dir dir = {.fd = -1};
    ep_err err;

    dir.path = realpath(path, NULL);
    if (dir.path == NULL) {
        return system_error(out_error, "open the model directory", path);
    }
    dir.fd = open(dir.path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir.fd < 0) {
        err = errno != ENOTDIR
                  ? system_error(out_error, "open the model directory", path)
                  : ep_error_set(
                        out_error, EP_ERR_BAD_FILE,
                        "%s: is not a directory; give the directory that holds config.json", path);
        goto fail;
    }
    dir.root = find_root(dir.path);
    if (dir.root == NULL) {
        err = ep_error_set(out_error, EP_ERR_NO_MEMORY, "%s: allocation failed", path);
        goto fail;
    }
    *out_dir = dir;
    return EP_OK;

fail:
    ep_model_dir_close(&dir);
    return err;
}

void ep_model_dir_close(ep_model_dir *dir)
{
    if (dir->fd >= 0) {
        close(dir->fd);
    }
    free(dir->path);
    free(dir->root);
    *dir = (ep_model_dir){.fd = -1};
}

bool ep_model_file_name_ok(const char *name)
{
    size_t length = strlen(name);
    if (length == 0 || length >= EP_MODEL_FILE_NAME_BYTES || strcmp(name, ".") == 0 ||
        strcmp(name, "..") == 0) {
        return false;
    }
    for (size_t i = 0; i < length; i++) {
        if (name[i] == '/' || name[i] < 0x20 || name[i] > 0x7e) {
            return false;
        }
    }
    return true;
}

static const char *kind_name(mode_t mode)
{
    switch (mode & S_IFMT) {
    case S_IFDIR:
        return "a directory";
    case S_IFIFO:
        return "a pipe";
    case S_IFSOCK:
        return "a socket";
    case S_IFCHR:
    case S_IFBLK:
        return "a device";
    case S_IFLNK:
        return "a symbolic link";
    default:
        return "not a file";
    }
}

static ep_err not_regular(const char *name, mode_t mode, ep_error *out_error)
{
    return ep_error_set(out_error, EP_ERR_BAD_FILE, "%s: is %s, allowed: a regular file", name,
                        kind_name(mode));
}

/* Takes fd: stores it, or closes it on failure. */
static ep_err take_file(int fd, const char *name, ep_model_file *out_file, ep_error *out_error)
{
    struct stat st;
    if (fstat(fd, &st) != 0) {
        ep_err err = system_error(out_error, "stat", name);
        close(fd);
        return err;
    }
    if (!S_ISREG(st.st_mode)) {
        close(fd);
        return not_regular(name, st.st_mode, out_error);
    }
    ep_model_file file = {
        .fd = fd, .bytes = (uint64_t)st.st_size, .modified = st.st_mtim, .changed = st.st_ctim};
    snprintf(file.name, sizeof(file.name), "%s", name);
    *out_file = file;
    return EP_OK;
}

/* mode: as found before, since opening a device or pipe can have effects of its own. */
static ep_err open_regular(int dir, const char *path, int more_flags, mode_t mode, const char *name,
                           ep_model_file *out_file, ep_error *out_error)
{
    if (!S_ISREG(mode)) {
        return not_regular(name, mode, out_error);
    }
    const int fd = openat(dir, path, OPEN_FLAGS | more_flags);
    return fd < 0 ? system_error(out_error, "open", name)
                  : take_file(fd, name, out_file, out_error);
}

static bool is_below(const char *path, const char *root)
{
    size_t length = strlen(root);
    if (length > 0 && root[length - 1] == '/') { /* root is "/" */
        return strncmp(path, root, length) == 0;
    }
    return strncmp(path, root, length) == 0 && path[length] == '/';
}

static ep_err open_link(const ep_model_dir *dir, const char *name, ep_model_file *out_file,
                        ep_error *out_error)
{
    char link_path[PATH_MAX];
    char target[PATH_MAX];
    struct stat st;
    int n = snprintf(link_path, sizeof(link_path), "%s/%s", dir->path, name);
    if (n < 0 || (size_t)n >= sizeof(link_path)) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE, "%s: its path is longer than %d bytes",
                            name, PATH_MAX - 1);
    }
    if (realpath(link_path, target) == NULL) {
        return system_error(out_error, "follow the symbolic link", name);
    }
    if (!is_below(target, dir->root)) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE,
                            "%s: is a symbolic link to %.180s, allowed: a target below %.180s",
                            name, target, dir->root);
    }
    if (lstat(target, &st) != 0) {
        return system_error(out_error, "stat", name);
    }
    return open_regular(AT_FDCWD, target, O_NOFOLLOW, st.st_mode, name, out_file, out_error);
}

ep_err ep_model_file_open(const ep_model_dir *dir, const char *name, ep_model_file *out_file,
                          ep_error *out_error)
{
    struct stat st;
    EP_ASSERT(ep_model_file_name_ok(name));
    if (dir->mirror != NULL) {
        return ep_mirror_open_file(dir->mirror, name, out_file, out_error);
    }
    if (fstatat(dir->fd, name, &st, AT_SYMLINK_NOFOLLOW) != 0) {
        if (errno == ENOENT) {
            return ep_error_set(out_error, EP_ERR_NOT_FOUND, "%s: there is no such file in %.300s",
                                name, dir->path);
        }
        return system_error(out_error, "stat", name);
    }
    if (S_ISLNK(st.st_mode)) {
        return open_link(dir, name, out_file, out_error);
    }
    return open_regular(dir->fd, name, O_NOFOLLOW, st.st_mode, name, out_file, out_error);
}

ep_err ep_model_file_open_path(const char *path, ep_model_file *out_file, ep_error *out_error)
{
    struct stat st;
    if (stat(path, &st) != 0) {
        return system_error(out_error, "open", path);
    }
    const ep_err err = open_regular(AT_FDCWD, path, 0, st.st_mode, path, out_file, out_error);
    const char *slash = strrchr(path, '/');
    if (err == EP_OK && strlen(path) >= EP_MODEL_FILE_NAME_BYTES && slash != NULL) {
        snprintf(out_file->name, sizeof(out_file->name), "%s", slash + 1);
    }
    return err;
}

void ep_model_file_close(ep_model_file *file)
{
    if (file->fd >= 0) {
        close(file->fd);
        file->fd = -1;
    }
}

ep_err ep_model_file_check_unchanged(const ep_model_file *file, ep_error *out_error)
{
    struct stat st;
    if (file->mirrored != NULL) {
        return ep_mirror_file_check_unchanged(file->mirrored, file, out_error);
    }
    if (fstat(file->fd, &st) != 0) {
        return system_error(out_error, "stat", file->name);
    }
    if ((uint64_t)st.st_size != file->bytes) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE,
                            "%s: has %" PRIu64 " bytes, had %" PRIu64 " when it was opened",
                            file->name, (uint64_t)st.st_size, file->bytes);
    }
    if (!ep_same_time(&st.st_mtim, &file->modified)) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE,
                            "%s: was modified after it was opened; open the model again",
                            file->name);
    }
    return EP_OK;
}

ep_err ep_model_file_read(const ep_model_file *file, uint64_t offset, void *out, size_t bytes,
                          ep_error *out_error)
{
    uint8_t *at = out;
    size_t left = bytes;
    const ep_err err = ep_model_file_need(file, offset, bytes, out_error);
    if (err != EP_OK) {
        return err;
    }
    while (left > 0) {
        size_t piece = left < READ_PIECE_BYTES ? left : READ_PIECE_BYTES;
        ssize_t got = pread(file->fd, at, piece, (off_t)offset);
        if (got < 0) {
            if (errno == EINTR) {
                continue;
            }
            return system_error(out_error, "read", file->name);
        }
        if (got == 0) {
            return ep_error_set(out_error, EP_ERR_BAD_FILE,
                                "%s: ends at byte %" PRIu64
                                ", %zu bytes more are needed; it had %" PRIu64
                                " bytes when it was opened",
                                file->name, offset, left, file->bytes);
        }
        at += got;
        left -= (size_t)got;
        offset += (uint64_t)got;
    }
    return EP_OK;
}

ep_err ep_model_file_need(const ep_model_file *file, uint64_t offset, uint64_t bytes,
                          ep_error *out_error)
{
    return file->mirrored == NULL ? EP_OK
                                  : ep_mirror_file_need(file->mirrored, offset, bytes, out_error);
}

bool ep_model_file_has(const ep_model_file *file, uint64_t offset, uint64_t bytes)
{
    return file->mirrored == NULL || ep_mirror_file_has(file->mirrored, offset, bytes);
}

ep_err ep_model_file_read_all(const ep_model_file *file, size_t bytes_max, char **out_bytes,
                              size_t *out_count, ep_error *out_error)
{
    if (file->bytes > bytes_max) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE, "%s: has %" PRIu64 " bytes, allowed 0..%zu",
                            file->name, file->bytes, bytes_max);
    }
    size_t count = (size_t)file->bytes;
    char *bytes = malloc(count + 1);
    if (bytes == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "%s: no memory for %zu bytes", file->name,
                            count);
    }
    ep_err err = ep_model_file_read(file, 0, bytes, count, out_error);
    if (err != EP_OK) {
        free(bytes);
        return err;
    }
    bytes[count] = '\0';
    *out_bytes = bytes;
    *out_count = count;
    return EP_OK;
}

ep_err ep_model_file_read_path(const char *path, size_t bytes_max, char **out_bytes,
                               size_t *out_count, ep_error *out_error)
{
    ep_model_file file;
    ep_err err = ep_model_file_open_path(path, &file, out_error);
    if (err == EP_OK) {
        err = ep_model_file_read_all(&file, bytes_max, out_bytes, out_count, out_error);
        ep_model_file_close(&file);
    }
    return err;
}
