/* SPDX-License-Identifier: Apache-2.0 */
#include "model/mirror.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <openssl/evp.h>

#include "base/check.h"
#include "base/log.h"
#include "model/mirror_list.h"

#define PART ".part"
#define JOURNAL ".pieces"
#define DIGEST_BYTES 16
#define BATCH_PIECES 16u /* pieces that are synced to the disk together */

#define OPEN_FLAGS (O_CLOEXEC | O_NOCTTY | O_NONBLOCK | O_NOFOLLOW)

/* The journal, little endian: head {magic 8, bytes of the file 8, bytes of a piece 8}, records
 * {piece 4, digest 16}. Records need no checksum: with a damaged one, its piece differs from its
 * digest. */
#define MAGIC "EPMIRR1\n"
#define HEAD_BYTES 24
#define RECORD_BYTES 20

typedef enum piece_state {
    PIECE_ABSENT,
    PIECE_NOTED, /* recorded by an earlier process, not yet compared with its digest */
    PIECE_HERE
} piece_state;

struct ep_mirror_file {
    ep_mirror *mirror;
    const ep_mirror_entry *entry;
    bool is_open;
    bool is_whole;
    int fd;      /* -1: the file was complete at open */
    int journal; /* -1: the file is complete */
    uint64_t journal_bytes;
    uint32_t pieces;
    /* the fields below are under the mirror's lock */
    uint32_t absent;
    uint8_t *states;                  /* [pieces] */
    uint8_t (*digests)[DIGEST_BYTES]; /* [pieces], for PIECE_NOTED */
    struct timespec modified;         /* after our last write */
};

struct ep_mirror {
    ep_mirror_fetch fetch;
    void *arg;
    char *path;
    int dir; /* locked */
    char version[EP_MIRROR_VERSION_BYTES];
    ep_mirror_entry *entries; /* sorted by name */
    ep_mirror_file *files;
    size_t count;
    /* held by the thread that opens files, fetches and writes; taken before lock */
    pthread_mutex_t fetching;
    pthread_mutex_t lock; /* guards the states of pieces; never held during a fetch */
    size_t piece_bytes;
    uint8_t *buffer; /* room for a piece; under fetching */
};

static ep_err system_error(const char *verb, const char *name, ep_error *out_error)
{
    char text[EP_ERRNO_TEXT_BYTES];
    const int number = errno;
    return ep_error_set(out_error, EP_ERR_IO, "%s: cannot %s: %s", name, verb,
                        ep_errno_text(number, text));
}

static bool digest_of(const void *bytes, size_t count, uint8_t out[DIGEST_BYTES])
{
    uint8_t digest[EVP_MAX_MD_SIZE];
    const bool is_good = EVP_Digest(bytes, count, digest, NULL, EVP_sha256(), NULL) == 1;
    memcpy(out, digest, DIGEST_BYTES);
    return is_good;
}

/* Returns fewer than bytes at the end of the file; -1: errno. */
static ssize_t pread_all(int fd, void *out, size_t bytes, uint64_t offset)
{
    size_t done = 0;
    while (done < bytes) {
        const ssize_t n = pread(fd, (uint8_t *)out + done, bytes - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            return -1;
        }
        if (n == 0) {
            break;
        }
        done += (size_t)n;
    }
    return (ssize_t)done;
}

static void put64(uint8_t *at, uint64_t value)
{
    for (int i = 0; i < 8; i++) {
        at[i] = (uint8_t)(value >> (8 * i));
    }
}

static uint64_t place_of(const ep_mirror_file *file, uint32_t piece)
{
    return (uint64_t)piece * file->mirror->piece_bytes;
}

static size_t piece_bytes(const ep_mirror_file *file, uint32_t piece)
{
    const uint64_t left = file->entry->bytes - place_of(file, piece);
    return left < file->mirror->piece_bytes ? (size_t)left : file->mirror->piece_bytes;
}

static void name_of(const ep_mirror_file *file, const char *end, char out[EP_MODEL_FILE_NAME_BYTES])
{
    snprintf(out, EP_MODEL_FILE_NAME_BYTES, "%.240s%s", file->entry->name, end);
}

/* ---- journal ---- */

static void make_head(const ep_mirror_file *file, uint8_t out[HEAD_BYTES])
{
    memcpy(out, MAGIC, 8);
    put64(out + 8, file->entry->bytes);
    put64(out + 16, file->mirror->piece_bytes);
}

/* Takes records up to the first invalid one. */
static void take_records(ep_mirror_file *file, const uint8_t *bytes, size_t count)
{
    for (size_t at = HEAD_BYTES; at + RECORD_BYTES <= count; at += RECORD_BYTES) {
        const uint8_t *record = bytes + at;
        const uint32_t piece = (uint32_t)record[0] | (uint32_t)record[1] << 8 |
                               (uint32_t)record[2] << 16 | (uint32_t)record[3] << 24;
        if (piece >= file->pieces) {
            return;
        }
        file->absent -= file->states[piece] == PIECE_ABSENT;
        file->states[piece] = PIECE_NOTED;
        memcpy(file->digests[piece], record + 4, DIGEST_BYTES);
        file->journal_bytes = at + RECORD_BYTES;
    }
}

/* A journal of another file, or none, is begun anew with no pieces. Bytes after the last whole
 * record are cut off. */
static ep_err load_journal(ep_mirror_file *file, const char *name, ep_error *out_error)
{
    struct stat st;
    uint8_t head[HEAD_BYTES];
    /* the same pieces may be recorded again */
    const size_t most = HEAD_BYTES + RECORD_BYTES * ((size_t)file->pieces * 4 + 16);
    if (fstat(file->journal, &st) != 0) {
        return system_error("look at", name, out_error);
    }
    const size_t count = (uint64_t)st.st_size < most ? (size_t)st.st_size : most;
    uint8_t *bytes = malloc(count > 0 ? count : 1);
    if (bytes == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "%s: no memory for %zu bytes", name,
                            count);
    }
    file->journal_bytes = 0;
    make_head(file, head);
    if (pread_all(file->journal, bytes, count, 0) == (ssize_t)count && count >= HEAD_BYTES &&
        memcmp(bytes, head, HEAD_BYTES) == 0) {
        file->journal_bytes = HEAD_BYTES;
        take_records(file, bytes, count);
    }
    free(bytes);
    if (ftruncate(file->journal, (off_t)file->journal_bytes) != 0 ||
        (file->journal_bytes == 0 && !ep_mirror_pwrite(file->journal, head, HEAD_BYTES, 0))) {
        return system_error("write", name, out_error);
    }
    file->journal_bytes = file->journal_bytes == 0 ? HEAD_BYTES : file->journal_bytes;
    return EP_OK;
}

/* ---- pieces ---- */

/* Without a lock. If a recorded piece is wrong, logs it once, and the piece is fetched again. */
static ep_err verify(ep_mirror_file *file, uint32_t piece, uint8_t *buffer, ep_error *out_error)
{
    const size_t bytes = piece_bytes(file, piece);
    uint8_t digest[DIGEST_BYTES] = {0};
    const ssize_t got = pread_all(file->fd, buffer, bytes, place_of(file, piece));
    /* writing it again may put it on another place of the disk */
    const bool is_unreadable = got < 0 && errno == EIO;
    if (got < 0 && !is_unreadable) {
        return system_error("read", file->entry->name, out_error);
    }
    const bool is_whole = got == (ssize_t)bytes && digest_of(buffer, bytes, digest);
    pthread_mutex_lock(&file->mirror->lock);
    const bool is_good = is_whole && memcmp(digest, file->digests[piece], DIGEST_BYTES) == 0;
    const bool was_noted = file->states[piece] == PIECE_NOTED;
    if (was_noted) {
        file->states[piece] = is_good ? PIECE_HERE : PIECE_ABSENT;
        file->absent += !is_good;
    }
    pthread_mutex_unlock(&file->mirror->lock);
    if (was_noted && !is_good) {
        ep_log(EP_LOG_WARN, "mirror-piece", EP_KV(file, file->entry->name),
               EP_KV(offset, place_of(file, piece)), EP_KV(bytes, bytes),
               EP_KV(reason, is_unreadable ? "it cannot be read from the disk"
                                           : "it is not what was fetched before"),
               EP_KV(effect, "it is fetched again"));
    }
    return EP_OK;
}

static piece_state state_of(ep_mirror_file *file, uint32_t piece)
{
    pthread_mutex_lock(&file->mirror->lock);
    const piece_state state = (piece_state)file->states[piece];
    pthread_mutex_unlock(&file->mirror->lock);
    return state;
}

static bool lacks_none(ep_mirror_file *file)
{
    pthread_mutex_lock(&file->mirror->lock);
    const bool lacks_none = file->absent == 0;
    pthread_mutex_unlock(&file->mirror->lock);
    return lacks_none;
}

/* Lock held. */
static ep_err check_unchanged(const ep_mirror_file *file, int fd, ep_error *out_error)
{
    struct stat st;
    if (fstat(fd, &st) != 0) {
        return system_error("look at", file->entry->name, out_error);
    }
    if ((uint64_t)st.st_size != file->entry->bytes || !ep_same_time(&st.st_mtim, &file->modified)) {
        return ep_error_set(
            out_error, EP_ERR_BAD_FILE,
            "%s: was written to by somebody else: start the node again, which compares all of it",
            file->entry->name);
    }
    return EP_OK;
}

static ep_err write_piece(ep_mirror_file *file, uint32_t piece, ep_error *out_error)
{
    struct stat st;
    pthread_mutex_lock(&file->mirror->lock);
    ep_err err = check_unchanged(file, file->fd, out_error);
    if (err == EP_OK) {
        const bool is_good = ep_mirror_pwrite(file->fd, file->mirror->buffer,
                                              piece_bytes(file, piece), place_of(file, piece));
        err = is_good ? EP_OK : system_error("write", file->entry->name, out_error);
        if (fstat(file->fd, &st) == 0) { /* also after writing part of a piece */
            file->modified = st.st_mtim;
        }
    }
    pthread_mutex_unlock(&file->mirror->lock);
    return err;
}

/* Pieces that are written but not yet recorded. */
typedef struct written_pieces {
    uint8_t records[BATCH_PIECES * RECORD_BYTES];
    uint32_t pieces[BATCH_PIECES];
    uint32_t count;
} written_pieces;

static ep_err fetch_piece(ep_mirror_file *file, uint32_t piece, written_pieces *written,
                          ep_error *out_error)
{
    ep_mirror *mirror = file->mirror;
    const size_t bytes = piece_bytes(file, piece);
    uint8_t *record = written->records + (size_t)written->count * RECORD_BYTES;
    ep_err err = mirror->fetch(mirror->arg, file->entry->name, place_of(file, piece),
                               mirror->buffer, bytes, out_error);
    if (err == EP_OK && !digest_of(mirror->buffer, bytes, record + 4)) {
        err = ep_error_set(out_error, EP_ERR_INTERNAL,
                           "%s: SHA-256 is not available from libcrypto", file->entry->name);
    }
    err = err == EP_OK ? write_piece(file, piece, out_error) : err;
    if (err == EP_OK) {
        for (int i = 0; i < 4; i++) {
            record[i] = (uint8_t)(piece >> (8 * i));
        }
        written->pieces[written->count++] = piece;
    }
    return err;
}

/* The data is on the disk before the record is written. A lost record only costs a fetch. */
static ep_err note(ep_mirror_file *file, const written_pieces *written, ep_error *out_error)
{
    const size_t bytes = (size_t)written->count * RECORD_BYTES;
    if (written->count == 0) {
        return EP_OK;
    }
    if (fdatasync(file->fd) != 0 ||
        !ep_mirror_pwrite(file->journal, written->records, bytes, file->journal_bytes)) {
        return system_error("write", file->entry->name, out_error);
    }
    file->journal_bytes += bytes;
    pthread_mutex_lock(&file->mirror->lock);
    for (uint32_t i = 0; i < written->count; i++) {
        file->states[written->pieces[i]] = PIECE_HERE;
    }
    file->absent -= written->count;
    pthread_mutex_unlock(&file->mirror->lock);
    return EP_OK;
}

/* fetching held. Fetches up to BATCH_PIECES; what arrived before an error is kept. */
static ep_err bring(ep_mirror_file *file, uint32_t first, uint32_t end, ep_error *out_error)
{
    written_pieces written = {.count = 0};
    ep_err err = EP_OK;
    for (uint32_t p = first; err == EP_OK && p < end; p++) {
        if (state_of(file, p) == PIECE_NOTED) {
            err = verify(file, p, file->mirror->buffer, out_error);
        }
        if (err == EP_OK && state_of(file, p) == PIECE_ABSENT) {
            err = fetch_piece(file, p, &written, out_error);
        }
    }
    ep_error ignored;
    const ep_err note_err = note(file, &written, err == EP_OK ? out_error : &ignored);
    return err == EP_OK ? note_err : err;
}

/* ---- files ---- */

/* fetching held. Gives a complete and compared file its name, and removes its journal. */
static ep_err finish(ep_mirror_file *file, ep_error *out_error)
{
    char part[EP_MODEL_FILE_NAME_BYTES], journal[EP_MODEL_FILE_NAME_BYTES];
    const ep_mirror *mirror = file->mirror;
    for (uint32_t p = 0; !file->is_whole && lacks_none(file) && p < file->pieces; p++) {
        const ep_err err =
            state_of(file, p) == PIECE_NOTED ? verify(file, p, mirror->buffer, out_error) : EP_OK;
        if (err != EP_OK) {
            return err;
        }
    }
    if (file->is_whole || !lacks_none(file)) {
        return EP_OK;
    }
    name_of(file, PART, part);
    name_of(file, JOURNAL, journal);
    if (fsync(file->fd) != 0 || renameat(mirror->dir, part, mirror->dir, file->entry->name) != 0 ||
        fsync(mirror->dir) != 0) {
        return system_error("name", part, out_error);
    }
    (void)unlinkat(mirror->dir, journal, 0); /* if this fails, the next start removes it */
    close(file->journal);
    file->journal = -1;
    file->is_whole = true;
    ep_log(EP_LOG_INFO, "mirror-file", EP_KV(file, file->entry->name),
           EP_KV(bytes, file->entry->bytes), EP_KV(state, "whole"));
    return EP_OK;
}

/* Opens a regular file that this user may write. */
static ep_err open_part(const ep_mirror_file *file, const char *end, int *out_fd,
                        ep_error *out_error)
{
    char name[EP_MODEL_FILE_NAME_BYTES];
    struct stat st;
    name_of(file, end, name);
    const int fd = openat(file->mirror->dir, name, O_RDWR | O_CREAT | OPEN_FLAGS, 0600);
    if (fd < 0) {
        return system_error("open", name, out_error);
    }
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        close(fd);
        return ep_error_set(out_error, EP_ERR_BAD_FILE, "%s: allowed: a regular file", name);
    }
    *out_fd = fd;
    return EP_OK;
}

static ep_err open_parts(ep_mirror_file *file, ep_error *out_error)
{
    char name[EP_MODEL_FILE_NAME_BYTES];
    struct stat st;
    file->pieces = (uint32_t)((file->entry->bytes + file->mirror->piece_bytes - 1) /
                              file->mirror->piece_bytes);
    file->absent = file->pieces;
    free(file->states);
    free(file->digests);
    file->states = calloc(file->pieces > 0 ? file->pieces : 1, sizeof(*file->states));
    file->digests = calloc(file->pieces > 0 ? file->pieces : 1, sizeof(*file->digests));
    if (file->states == NULL || file->digests == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "%s: no memory for %u pieces",
                            file->entry->name, file->pieces);
    }
    ep_err err = file->fd < 0 ? open_part(file, PART, &file->fd, out_error) : EP_OK;
    err = err == EP_OK && file->journal < 0 ? open_part(file, JOURNAL, &file->journal, out_error)
                                            : err;
    if (err != EP_OK) {
        return err;
    }
    name_of(file, JOURNAL, name);
    if ((err = load_journal(file, name, out_error)) != EP_OK) {
        return err;
    }
    /* A truncated file gets its full size again: the lost pieces then differ from their digests. */
    if (fstat(file->fd, &st) != 0 ||
        ((uint64_t)st.st_size != file->entry->bytes &&
         ftruncate(file->fd, (off_t)file->entry->bytes) != 0) ||
        fstat(file->fd, &st) != 0) {
        return system_error("make long enough", file->entry->name, out_error);
    }
    file->modified = st.st_mtim;
    return finish(file, out_error);
}

/* fetching held. */
static ep_err open_once(ep_mirror_file *file, ep_error *out_error)
{
    struct stat st;
    const ep_mirror *mirror = file->mirror;
    if (file->is_open) {
        return EP_OK;
    }
    if (fstatat(mirror->dir, file->entry->name, &st, AT_SYMLINK_NOFOLLOW) == 0) {
        char name[EP_MODEL_FILE_NAME_BYTES];
        if (!S_ISREG(st.st_mode) || (uint64_t)st.st_size != file->entry->bytes) {
            return ep_error_set(out_error, EP_ERR_BAD_FILE,
                                "%s: has %" PRIu64 " bytes, the mirrored one %" PRIu64
                                "; remove it, and it is fetched again",
                                file->entry->name, (uint64_t)st.st_size, file->entry->bytes);
        }
        name_of(file, PART, name);
        (void)unlinkat(mirror->dir, name, 0);
        name_of(file, JOURNAL, name);
        (void)unlinkat(mirror->dir, name, 0);
        file->is_whole = true;
    } else if (errno != ENOENT) {
        return system_error("look at", file->entry->name, out_error);
    } else {
        const ep_err err = open_parts(file, out_error);
        if (err != EP_OK) {
            return err;
        }
    }
    file->is_open = true;
    return EP_OK;
}

static int compare_name(const void *name, const void *entry)
{
    return strcmp(name, ((const ep_mirror_entry *)entry)->name);
}

ep_err ep_mirror_open_file(ep_mirror *mirror, const char *name, ep_model_file *out_file,
                           ep_error *out_error)
{
    struct stat st;
    char on_disk[EP_MODEL_FILE_NAME_BYTES];
    const ep_mirror_entry *entry =
        bsearch(name, mirror->entries, mirror->count, sizeof(*mirror->entries), compare_name);
    if (entry == NULL) {
        return ep_error_set(out_error, EP_ERR_NOT_FOUND,
                            "%s: is not among the %zu files that %.200s mirrors", name,
                            mirror->count, mirror->path);
    }
    ep_mirror_file *file = &mirror->files[entry - mirror->entries];
    pthread_mutex_lock(&mirror->fetching);
    ep_err err = open_once(file, out_error);
    if (err == EP_OK) {
        name_of(file, file->is_whole ? "" : PART, on_disk);
        const int fd = openat(mirror->dir, on_disk, O_RDONLY | OPEN_FLAGS);
        if (fd < 0 || fstat(fd, &st) != 0) {
            err = system_error("open", on_disk, out_error);
            if (fd >= 0) {
                close(fd);
            }
        } else {
            *out_file = (ep_model_file){.fd = fd,
                                        .bytes = (uint64_t)st.st_size,
                                        .modified = st.st_mtim,
                                        .changed = st.st_ctim,
                                        .mirrored = file->fd >= 0 ? file : NULL};
            snprintf(out_file->name, sizeof(out_file->name), "%s", name);
        }
    }
    pthread_mutex_unlock(&mirror->fetching);
    return err;
}

/* The pieces of a range; false: the range is empty. */
static bool range_of(const ep_mirror_file *file, uint64_t offset, uint64_t bytes,
                     uint32_t *out_first, uint32_t *out_end)
{
    const uint64_t all = file->entry->bytes;
    if (offset >= all || bytes == 0) {
        return false;
    }
    const uint64_t last = (bytes > all - offset ? all : offset + bytes) - 1;
    *out_first = (uint32_t)(offset / file->mirror->piece_bytes);
    *out_end = (uint32_t)(last / file->mirror->piece_bytes) + 1;
    return true;
}

/* The worst state of a piece in the range. */
static piece_state worst_of(ep_mirror_file *file, uint32_t first, uint32_t end)
{
    piece_state worst = PIECE_HERE;
    pthread_mutex_lock(&file->mirror->lock);
    for (uint32_t p = first; p < end; p++) {
        worst = file->states[p] < worst ? (piece_state)file->states[p] : worst;
    }
    pthread_mutex_unlock(&file->mirror->lock);
    return worst;
}

ep_err ep_mirror_file_need(ep_mirror_file *file, uint64_t offset, uint64_t bytes,
                           ep_error *out_error)
{
    uint32_t first, end;
    ep_err err = EP_OK;
    if (!range_of(file, offset, bytes, &first, &end) || worst_of(file, first, end) == PIECE_HERE) {
        return EP_OK;
    }
    pthread_mutex_lock(&file->mirror->fetching);
    for (uint32_t p = first; err == EP_OK && p < end; p += BATCH_PIECES) {
        err = bring(file, p, end - p < BATCH_PIECES ? end : p + BATCH_PIECES, out_error);
    }
    err = err == EP_OK ? finish(file, out_error) : err;
    pthread_mutex_unlock(&file->mirror->fetching);
    return err;
}

bool ep_mirror_file_has(ep_mirror_file *file, uint64_t offset, uint64_t bytes)
{
    uint32_t first, end;
    if (!range_of(file, offset, bytes, &first, &end)) {
        return true;
    }
    uint8_t *buffer = NULL;
    piece_state worst = worst_of(file, first, end);
    if (worst == PIECE_NOTED && (buffer = malloc(file->mirror->piece_bytes)) != NULL) {
        ep_error ignored;
        for (uint32_t p = first; p < end; p++) {
            if (state_of(file, p) == PIECE_NOTED) {
                (void)verify(file, p, buffer, &ignored);
            }
        }
        worst = worst_of(file, first, end);
    }
    free(buffer);
    return worst == PIECE_HERE;
}

ep_err ep_mirror_file_check_unchanged(ep_mirror_file *file, const ep_model_file *opened,
                                      ep_error *out_error)
{
    pthread_mutex_lock(&file->mirror->lock);
    const ep_err err = check_unchanged(file, opened->fd, out_error);
    pthread_mutex_unlock(&file->mirror->lock);
    return err;
}

/* ---- life ---- */

ep_err ep_mirror_open(const char *path, size_t piece_bytes_max, ep_mirror_fetch fetch, void *arg,
                      ep_mirror **out_mirror, ep_error *out_error)
{
    ep_mirror *mirror = calloc(1, sizeof(*mirror));
    if (mirror == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "%s: no memory", path);
    }
    mirror->fetch = fetch;
    mirror->arg = arg;
    pthread_mutex_init(&mirror->fetching, NULL);
    pthread_mutex_init(&mirror->lock, NULL);
    mirror->path = strdup(path);
    mirror->piece_bytes = piece_bytes_max;
    mirror->buffer = malloc(piece_bytes_max);
    mirror->dir = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    ep_err err = mirror->path == NULL || mirror->buffer == NULL
                     ? ep_error_set(out_error, EP_ERR_NO_MEMORY, "%s: no memory", path)
                 : mirror->dir < 0 ? system_error("open the mirror", path, out_error)
                                   : EP_OK;
    err = err == EP_OK ? ep_mirror_list_lock(mirror->dir, path, out_error) : err;
    err = err == EP_OK ? ep_mirror_list_read(mirror->dir, path, mirror->version, &mirror->entries,
                                             &mirror->count, out_error)
                       : err;
    mirror->files = err == EP_OK ? calloc(mirror->count, sizeof(*mirror->files)) : NULL;
    if (err == EP_OK && mirror->files == NULL) {
        err = ep_error_set(out_error, EP_ERR_NO_MEMORY, "%s: no memory for %zu files", path,
                           mirror->count);
    }
    if (err != EP_OK) {
        ep_mirror_close(mirror);
        return err;
    }
    for (size_t i = 0; i < mirror->count; i++) {
        mirror->files[i] = (ep_mirror_file){
            .mirror = mirror, .entry = &mirror->entries[i], .fd = -1, .journal = -1};
    }
    *out_mirror = mirror;
    return EP_OK;
}

static void close_fd(int fd)
{
    if (fd >= 0) {
        close(fd);
    }
}

void ep_mirror_close(ep_mirror *mirror)
{
    if (mirror == NULL) {
        return;
    }
    for (size_t i = 0; mirror->files != NULL && i < mirror->count; i++) {
        close_fd(mirror->files[i].fd);
        close_fd(mirror->files[i].journal);
        free(mirror->files[i].states);
        free(mirror->files[i].digests);
    }
    close_fd(mirror->dir);
    pthread_mutex_destroy(&mirror->fetching);
    pthread_mutex_destroy(&mirror->lock);
    free(mirror->buffer);
    free(mirror->files);
    free(mirror->entries);
    free(mirror->path);
    free(mirror);
}

const char *ep_mirror_path(const ep_mirror *mirror)
{
    return mirror->path;
}

const char *ep_mirror_version(const ep_mirror *mirror)
{
    return mirror->version;
}

const ep_mirror_entry *ep_mirror_entry_at(const ep_mirror *mirror, size_t index)
{
    return index < mirror->count ? &mirror->entries[index] : NULL;
}
