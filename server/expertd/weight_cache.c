/* SPDX-License-Identifier: Apache-2.0 */
#include "expertd/weight_cache.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <libgen.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "base/log.h"
#include "base/random.h"
#include "wire/frame.h"

#define CACHE_MAGIC 0x31304b4341505045ull /* "EPPACK01", little endian */
/* small enough to be in the processor's cache when its sum is taken */
#define PIECE_BYTES ((size_t)1 << 20)
/* prefix of names of files being written */
#define TEMPORARY ".tmp-"
#define NAME_HEX 16
#define PACKED_ANEW "experts are packed anew at each start"
#define OTHERS_PACKED_ANEW "experts without a file are packed anew at each start"

/* First bytes of a file; the body follows at BODY_AT. */
typedef struct cache_head {
    uint64_t magic;
    uint8_t identity[EP_SHA256_BYTES];
    char layout[64];
    char numerics[EP_NUMERICS_ID_BYTES];
    uint32_t layer;
    uint32_t expert;
    uint8_t sha256[EP_SHA256_BYTES];
    uint64_t body_bytes;
    uint32_t body_crc;
    uint32_t head_bytes;
    uint8_t head[EP_PACKED_HEAD_BYTES];
    uint32_t crc; /* of all fields before */
    uint32_t zero;
} cache_head;

#define BODY_AT 4096
_Static_assert(sizeof(cache_head) <= BODY_AT, "the head has its own page");

struct ep_weight_cache {
    int dir_fd;
    char *path;
    uint64_t bytes_max;
    ep_backend *backend;
    const char *layout;
    /* one thread at a time looks for files to remove; never taken while lock is held */
    pthread_mutex_t tidy;
    /* protects everything below. Not held during disk I/O, because reads take it too */
    pthread_mutex_t lock;
    bool is_full; /* nothing more is written in this run */
    /* files that are damaged and cannot be removed, by the hash of their name: neither read nor
     * written again in this run */
    uint64_t *barred;
    size_t barred_count;
    ep_weight_cache_stats stats;
};

/* ---- names ---- */

#define HASH_BEGIN 0xcbf29ce484222325ull

static uint64_t hash_bytes(uint64_t hash, const void *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        hash = (hash ^ ((const uint8_t *)data)[i]) * 0x100000001b3ull;
    }
    return hash;
}

/* Hash of a key without layer and expert, the same for all files of a model. */
static uint64_t hash_key(const ep_weight_cache *cache, const ep_weight_cache_key *key)
{
    uint64_t hash = hash_bytes(HASH_BEGIN, cache->layout, strlen(cache->layout) + 1);
    hash = hash_bytes(hash, key->numerics, strlen(key->numerics) + 1);
    return hash_bytes(hash, key->identity, sizeof(key->identity));
}

static void make_name(const ep_weight_cache *cache, const ep_weight_cache_key *key, char *out,
                      size_t out_bytes)
{
    snprintf(out, out_bytes, "%016" PRIx64 "-l%u-e%u.pack", hash_key(cache, key), key->layer,
             key->expert);
}

static bool is_ours(const char *name)
{
    const size_t length = strlen(name);
    return length > NAME_HEX + 5 && name[NAME_HEX] == '-' &&
           strcmp(name + length - 5, ".pack") == 0;
}

/* ---- the directory ---- */

/*
 * Removes a temporary file that no process is writing any more. The writer holds a lock on it,
 * which the system drops when the process dies. Network file systems lock only files open for
 * writing.
 */
static void remove_if_left(const ep_weight_cache *cache, const char *name)
{
    const int fd = openat(cache->dir_fd, name, O_WRONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);
    if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0) {
        (void)unlinkat(cache->dir_fd, name, 0);
    }
    if (fd >= 0) {
        close(fd);
    }
}

/* Counts the cache's files and removes unfinished ones of dead processes. */
static uint64_t count_files(ep_weight_cache *cache)
{
    uint64_t bytes = 0;
    const int fd = openat(cache->dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    if (dir == NULL) {
        if (fd >= 0) {
            close(fd);
        }
        return 0;
    }
    for (struct dirent *e; (e = readdir(dir)) != NULL;) {
        struct stat st;
        if (fstatat(cache->dir_fd, e->d_name, &st, AT_SYMLINK_NOFOLLOW) != 0 ||
            !S_ISREG(st.st_mode)) {
            continue;
        }
        if (is_ours(e->d_name)) {
            bytes += (uint64_t)st.st_size;
        } else if (strncmp(e->d_name, TEMPORARY, strlen(TEMPORARY)) == 0) {
            remove_if_left(cache, e->d_name);
        }
    }
    closedir(dir);
    return bytes;
}

/* The file with the oldest write that is not of the present model; false: there is none. */
static bool find_oldest(const ep_weight_cache *cache, uint64_t present_key,
                        char out_name[NAME_MAX + 1], uint64_t *out_bytes)
{
    char present[NAME_HEX + 1];
    time_t oldest = 0;
    const int fd = openat(cache->dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    out_name[0] = 0;
    if (dir == NULL) {
        if (fd >= 0) {
            close(fd);
        }
        return false;
    }
    snprintf(present, sizeof(present), "%016" PRIx64, present_key);
    for (struct dirent *e; (e = readdir(dir)) != NULL;) {
        struct stat st;
        if (!is_ours(e->d_name) || strncmp(e->d_name, present, NAME_HEX) == 0 ||
            fstatat(cache->dir_fd, e->d_name, &st, AT_SYMLINK_NOFOLLOW) != 0 ||
            !S_ISREG(st.st_mode)) {
            continue;
        }
        if (out_name[0] == 0 || st.st_mtime < oldest) {
            snprintf(out_name, NAME_MAX + 1, "%s", e->d_name);
            oldest = st.st_mtime;
            *out_bytes = (uint64_t)st.st_size;
        }
    }
    closedir(dir);
    return out_name[0] != 0;
}

static uint64_t bytes_now(ep_weight_cache *cache)
{
    pthread_mutex_lock(&cache->lock);
    const uint64_t bytes = cache->stats.bytes;
    pthread_mutex_unlock(&cache->lock);
    return bytes;
}

static void count_dropped(ep_weight_cache *cache, uint64_t bytes)
{
    pthread_mutex_lock(&cache->lock);
    cache->stats.bytes -= bytes < cache->stats.bytes ? bytes : cache->stats.bytes;
    cache->stats.dropped_total++;
    pthread_mutex_unlock(&cache->lock);
}

/* Stops writing for this run; the reason is logged once. */
static void give_up(ep_weight_cache *cache, const char *what)
{
    pthread_mutex_lock(&cache->lock);
    const bool is_first = !cache->is_full;
    cache->is_full = true;
    pthread_mutex_unlock(&cache->lock);
    if (is_first) {
        ep_log(EP_LOG_WARN, "weight-cache", EP_KV(path, cache->path), EP_KV(reason, what),
               EP_KV(effect, OTHERS_PACKED_ANEW));
    }
}

/* No lock held. Removes files of other models, the oldest first. */
static bool make_room(ep_weight_cache *cache, uint64_t present, uint64_t bytes)
{
    char name[NAME_MAX + 1], what[128];
    uint64_t freed = 0, now;
    bool has_room = true;
    pthread_mutex_lock(&cache->tidy);
    while (has_room && cache->bytes_max != 0 &&
           (now = bytes_now(cache)) + bytes > cache->bytes_max) {
        has_room = find_oldest(cache, present, name, &freed) &&
                   (unlinkat(cache->dir_fd, name, 0) == 0 || errno == ENOENT); /* somebody else
                                                                                  removed it */
        if (has_room) {
            count_dropped(cache, freed);
        } else {
            snprintf(what, sizeof(what), "holds %" PRIu64 " of weight_cache_bytes %" PRIu64, now,
                     cache->bytes_max);
            give_up(cache, what);
        }
    }
    pthread_mutex_unlock(&cache->tidy);
    return has_room;
}

/* Packed experts are trusted, so whoever may write them decides what they compute. */
static bool others_may_write(const struct stat *status)
{
    return (status->st_uid != geteuid() && status->st_uid != 0) ||
           (status->st_mode & (S_IWGRP | S_IWOTH)) != 0;
}

static ep_err refuse_foreign(const char *dir, const struct stat *status, ep_error *out_error)
{
    return ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                        "weight_cache_dir %.200s belongs to user %u with mode %04o: who else may "
                        "write it decides about results. Allowed: user "
                        "%u or root, writable by nobody else; name a directory in it, which is "
                        "made so, or chown and chmod go-w it",
                        dir, status->st_uid, status->st_mode & 07777u, geteuid());
}

static void warn_unusable(const char *dir, const char *what, const char *effect)
{
    char reason[128 + EP_ERRNO_TEXT_BYTES], why[EP_ERRNO_TEXT_BYTES];
    snprintf(reason, sizeof(reason), "%.127s: %s", what, ep_errno_text(errno, why));
    ep_log(EP_LOG_WARN, "weight-cache", EP_KV(key, "weight_cache_dir"), EP_KV(path, dir),
           EP_KV(reason, reason), EP_KV(effect, effect));
}

void ep_weight_cache_check_dir(const char *dir)
{
    struct stat status;
    char parent[PATH_MAX];
    snprintf(parent, sizeof(parent), "%s", dir);
    if (stat(dir, &status) != 0) {
        if (errno != ENOENT) {
            warn_unusable(dir, "cannot be used", PACKED_ANEW);
        } else if (access(dirname(parent), W_OK | X_OK) != 0) {
            /* only dir itself is made, no directory above it */
            warn_unusable(dir, "cannot be made", PACKED_ANEW);
        }
    } else if (!S_ISDIR(status.st_mode)) {
        errno = ENOTDIR;
        warn_unusable(dir, "is not a directory", PACKED_ANEW);
    } else if (others_may_write(&status)) {
        ep_error error;
        refuse_foreign(dir, &status, &error);
        ep_log(EP_LOG_WARN, "weight-cache", EP_KV(key, "weight_cache_dir"), EP_KV(path, dir),
               EP_KV(reason, error.text), EP_KV(effect, "the daemon will not start"));
    } else if (access(dir, R_OK | X_OK) != 0) {
        warn_unusable(dir, "cannot be used", PACKED_ANEW);
    } else if (access(dir, W_OK) != 0) {
        warn_unusable(dir, "cannot be written", OTHERS_PACKED_ANEW);
    }
}

ep_err ep_weight_cache_open(const char *dir, uint64_t bytes_max, ep_backend *backend,
                            ep_weight_cache **out_cache, ep_error *out_error)
{
    *out_cache = NULL;
    if (backend->ops->weights_import == NULL) {
        ep_log(EP_LOG_WARN, "weight-cache", EP_KV(path, dir), EP_KV(backend, backend->ops->name),
               EP_KV(reason, "the backend has no packed form for files"),
               EP_KV(effect, "the directory is not used"));
        return EP_OK;
    }
    (void)mkdir(dir, 0700);
    const int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct stat status;
    if (fd < 0 || fstat(fd, &status) != 0) {
        warn_unusable(dir, "cannot be used", PACKED_ANEW);
        if (fd >= 0) {
            close(fd);
        }
        return EP_OK;
    }
    if (others_may_write(&status)) {
        close(fd);
        return refuse_foreign(dir, &status, out_error);
    }
    ep_weight_cache *cache = calloc(1, sizeof(*cache));
    char *path = strdup(dir);
    if (cache == NULL || path == NULL) {
        free(cache);
        free(path);
        close(fd);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the weight cache");
    }
    *cache =
        (ep_weight_cache){.dir_fd = fd, .path = path, .bytes_max = bytes_max, .backend = backend};
    cache->layout = backend->ops->packed_layout(backend);
    pthread_mutex_init(&cache->tidy, NULL);
    pthread_mutex_init(&cache->lock, NULL);
    cache->stats.bytes = count_files(cache);
    *out_cache = cache;
    return EP_OK;
}

void ep_weight_cache_close(ep_weight_cache *cache)
{
    if (cache != NULL) {
        close(cache->dir_fd);
        pthread_mutex_destroy(&cache->tidy);
        pthread_mutex_destroy(&cache->lock);
        free(cache->barred);
        free(cache->path);
        free(cache);
    }
}

void ep_weight_cache_read_stats(ep_weight_cache *cache, ep_weight_cache_stats *out_stats)
{
    pthread_mutex_lock(&cache->lock);
    *out_stats = cache->stats;
    pthread_mutex_unlock(&cache->lock);
}

/* ---- reading ---- */

static bool read_all(int fd, void *out, size_t bytes, off_t at)
{
    for (size_t done = 0; done < bytes;) {
        const ssize_t n = pread(fd, (uint8_t *)out + done, bytes - done, at + (off_t)done);
        if (n <= 0 && !(n < 0 && errno == EINTR)) {
            return false;
        }
        done += n > 0 ? (size_t)n : 0;
    }
    return true;
}

static uint64_t hash_name(const char *name)
{
    return hash_bytes(HASH_BEGIN, name, strlen(name));
}

/* Bars a file from being read or written again in this run. Otherwise each need of the expert would
 * cost that and a line in the log. */
static void bar_file(ep_weight_cache *cache, const char *name)
{
    pthread_mutex_lock(&cache->lock);
    uint64_t *grown = realloc(cache->barred, (cache->barred_count + 1) * sizeof(*grown));
    if (grown != NULL) {
        cache->barred = grown;
        grown[cache->barred_count++] = hash_name(name);
    }
    pthread_mutex_unlock(&cache->lock);
}

static bool is_barred(ep_weight_cache *cache, const char *name)
{
    bool found = false;
    pthread_mutex_lock(&cache->lock);
    const uint64_t hash = cache->barred_count > 0 ? hash_name(name) : 0;
    for (size_t i = 0; i < cache->barred_count && !found; i++) {
        found = cache->barred[i] == hash;
    }
    pthread_mutex_unlock(&cache->lock);
    return found;
}

static void drop_file(ep_weight_cache *cache, const char *name, uint64_t bytes, const char *why)
{
    /* somebody else removed it */
    const bool is_removed = unlinkat(cache->dir_fd, name, 0) == 0 || errno == ENOENT;
    ep_log(EP_LOG_WARN, "weight-cache", EP_KV(path, cache->path), EP_KV(file, name),
           EP_KV(reason, why), EP_KV(removed, is_removed),
           EP_KV(effect, "the expert is packed anew"));
    if (is_removed) {
        count_dropped(cache, bytes);
    } else {
        bar_file(cache, name);
    }
}

static void fill_head(const ep_weight_cache *cache, const ep_weight_cache_key *key,
                      cache_head *head)
{
    memset(head, 0, sizeof(*head));
    head->magic = CACHE_MAGIC;
    memcpy(head->identity, key->identity, sizeof(head->identity));
    snprintf(head->layout, sizeof(head->layout), "%s", cache->layout);
    snprintf(head->numerics, sizeof(head->numerics), "%s", key->numerics);
    head->layer = key->layer;
    head->expert = key->expert;
}

static const char *check_head(const cache_head *head, const cache_head *wanted, uint64_t file_bytes)
{
    if (head->crc != ep_crc32c(0, head, offsetof(cache_head, crc))) {
        return "has a damaged head";
    }
    if (memcmp(head, wanted, offsetof(cache_head, sha256)) != 0) {
        return "is of another expert";
    }
    if (head->head_bytes > sizeof(head->head) || head->body_bytes > INT64_MAX - BODY_AT ||
        head->body_bytes + BODY_AT != file_bytes) {
        return "has another size than its head says";
    }
    return NULL;
}

bool ep_weight_cache_find(ep_weight_cache *cache, const ep_weight_cache_key *key,
                          ep_weight_cache_file *out_file)
{
    struct stat st = {0};
    cache_head head, wanted;
    make_name(cache, key, out_file->name, sizeof(out_file->name));
    /* without O_NONBLOCK opening a pipe would block for ever */
    const int fd =
        is_barred(cache, out_file->name)
            ? -1
            : openat(cache->dir_fd, out_file->name, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) {
        return false;
    }
    fill_head(cache, key, &wanted);
    const char *why = "cannot be read";
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode)) {
        why = others_may_write(&st) ? "may be written by others" : "is cut short";
        if (!others_may_write(&st) && read_all(fd, &head, sizeof(head), 0)) {
            why = check_head(&head, &wanted, (uint64_t)st.st_size);
        }
    }
    if (why != NULL) {
        close(fd);
        drop_file(cache, out_file->name, (uint64_t)st.st_size, why);
        return false;
    }
    out_file->fd = fd;
    out_file->goes_on = NULL;
    out_file->head_bytes = head.head_bytes;
    out_file->body_bytes = (size_t)head.body_bytes;
    out_file->body_crc = head.body_crc;
    memcpy(out_file->head, head.head, sizeof(head.head));
    memcpy(out_file->sha256, head.sha256, sizeof(head.sha256));
    return true;
}

static ep_err fill_body(void *arg, void *body, size_t body_bytes, ep_error *out_error)
{
    const ep_weight_cache_file *file = arg;
    uint32_t crc = 0;
    for (size_t at = 0; at < body_bytes; at += PIECE_BYTES) {
        const size_t piece = body_bytes - at < PIECE_BYTES ? body_bytes - at : PIECE_BYTES;
        if (file->goes_on != NULL && !file->goes_on(file->arg, at)) {
            return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                                "gives way to what requests wait for");
        }
        if (!read_all(file->fd, (uint8_t *)body + at, piece, (off_t)(BODY_AT + at))) {
            return ep_error_set(out_error, EP_ERR_BAD_FILE, "cannot be read whole");
        }
        crc = ep_crc32c(crc, (const uint8_t *)body + at, piece);
    }
    return crc == file->body_crc ? EP_OK
                                 : ep_error_set(out_error, EP_ERR_BAD_FILE, "has a damaged body");
}

ep_err ep_weight_cache_read(ep_weight_cache *cache, ep_weight_cache_file *file,
                            ep_backend_weights **out_weights, ep_error *out_error)
{
    ep_backend *backend = cache->backend;
    const ep_err err =
        backend->ops->weights_import(backend, file->head, file->head_bytes, file->body_bytes,
                                     fill_body, file, out_weights, out_error);
    if (err == EP_ERR_BAD_FILE || err == EP_ERR_INVALID_ARGUMENT || err == EP_ERR_UNIMPLEMENTED) {
        drop_file(cache, file->name, file->body_bytes + BODY_AT, out_error->text);
        out_error->code = EP_ERR_BAD_FILE;
        return EP_ERR_BAD_FILE;
    }
    pthread_mutex_lock(&cache->lock);
    cache->stats.read_total += err == EP_OK;
    pthread_mutex_unlock(&cache->lock);
    return err;
}

void ep_weight_cache_forget(ep_weight_cache_file *file)
{
    close(file->fd);
    file->fd = -1;
}

/* ---- writing ---- */

static bool write_all(int fd, const void *data, size_t bytes, off_t at)
{
    for (size_t done = 0; done < bytes;) {
        const ssize_t n = pwrite(fd, (const uint8_t *)data + done, bytes - done, at + (off_t)done);
        if (n < 0 && errno != EINTR) {
            return false;
        }
        done += n > 0 ? (size_t)n : 0;
    }
    return true;
}

/*
 * Creates and locks a temporary file; -1: see errno. Its name is random, because process ids do not
 * tell writers apart: in containers they may be equal.
 */
static int create_temporary(const ep_weight_cache *cache, char *out_name, size_t name_bytes)
{
    for (;;) {
        struct stat st;
        snprintf(out_name, name_bytes, TEMPORARY "%016" PRIx64, ep_random_id());
        const int fd = openat(cache->dir_fd, out_name,
                              O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (fd < 0) {
            return -1;
        }
        /* may fail where there are no locks; there no process removes it either */
        (void)flock(fd, LOCK_EX);
        if (fstat(fd, &st) != 0 || st.st_nlink != 0) {
            return fd;
        }
        close(fd); /* another process removed it as left over before it was locked */
    }
}

/* Syncs before the rename, so that after a power loss no final name stands for a hole. */
static bool write_file(ep_weight_cache *cache, const char *name, const cache_head *head,
                       const ep_packed_view *view)
{
    char temporary[64];
    const int fd = create_temporary(cache, temporary, sizeof(temporary));
    if (fd < 0) {
        return false;
    }
    const bool is_written = write_all(fd, view->body, view->body_bytes, BODY_AT) &&
                            write_all(fd, head, sizeof(*head), 0) && fdatasync(fd) == 0;
    int why = errno;
    const bool is_named =
        is_written && renameat(cache->dir_fd, temporary, cache->dir_fd, name) == 0;
    why = is_written ? errno : why;
    if (!is_named) {
        (void)unlinkat(cache->dir_fd, temporary, 0);
    }
    close(fd); /* closed only now, since the lock protects the temporary name */
    errno = why;
    return is_named;
}

bool ep_weight_cache_write(ep_weight_cache *cache, const ep_weight_cache_key *key,
                           const ep_backend_weights *weights, const uint8_t sha256[EP_SHA256_BYTES])
{
    char name[128];
    cache_head head;
    ep_packed_view view;
    make_name(cache, key, name, sizeof(name));
    if (is_barred(cache, name)) {
        return true;
    }
    cache->backend->ops->weights_export(cache->backend, weights, &view);
    const uint64_t bytes = view.body_bytes + BODY_AT;
    pthread_mutex_lock(&cache->lock);
    const bool is_full = cache->is_full;
    pthread_mutex_unlock(&cache->lock);
    if (is_full || !make_room(cache, hash_key(cache, key), bytes) ||
        view.head_bytes > sizeof(head.head)) {
        return false;
    }
    fill_head(cache, key, &head);
    memcpy(head.sha256, sha256, sizeof(head.sha256));
    head.body_bytes = view.body_bytes;
    head.body_crc = ep_crc32c(0, view.body, view.body_bytes);
    head.head_bytes = (uint32_t)view.head_bytes;
    memcpy(head.head, view.head, view.head_bytes);
    head.crc = ep_crc32c(0, &head, offsetof(cache_head, crc));
    const bool is_written = write_file(cache, name, &head, &view);
    if (!is_written && errno == EISDIR) {
        drop_file(cache, name, 0, "is a directory");
        return true;
    }
    if (!is_written) {
        char what[32 + EP_ERRNO_TEXT_BYTES], text[EP_ERRNO_TEXT_BYTES];
        snprintf(what, sizeof(what), "cannot be written: %s", ep_errno_text(errno, text));
        give_up(cache, what);
        return false;
    }
    pthread_mutex_lock(&cache->lock);
    cache->stats.written_total++;
    cache->stats.bytes += bytes;
    pthread_mutex_unlock(&cache->lock);
    return true;
}
