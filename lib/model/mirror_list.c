/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Text: "expertd-mirror 1", "version V", a line "BYTES NAME" per file, and finally "sha256 HEX" of
 * everything before. It is written under another name and then renamed, so a directory is either a
 * mirror or not.
 */
#include "model/mirror_list.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <openssl/evp.h>

#include "base/check.h"

#define NEW_NAME EP_MIRROR_LIST_NAME ".new"
#define FIRST_LINE "expertd-mirror 1\n"
#define LAST_LINE "sha256 "
#define HEX_BYTES 64
#define NAME_BYTES_MAX 240 /* so that an ending fits */
#define LINE_BYTES (NAME_BYTES_MAX + 32)
#define TEXT_BYTES_MAX ((size_t)LINE_BYTES * (EP_MIRROR_FILES_MAX + 4))

static ep_err system_error(const char *verb, const char *path, ep_error *out_error)
{
    char text[EP_ERRNO_TEXT_BYTES];
    const int number = errno;
    return ep_error_set(out_error, number == ENOENT ? EP_ERR_NOT_FOUND : EP_ERR_IO,
                        "%s: cannot %s: %s", path, verb, ep_errno_text(number, text));
}

static bool hash_text(const char *text, size_t bytes, char out[HEX_BYTES + 1])
{
    uint8_t digest[EVP_MAX_MD_SIZE];
    const bool is_good = EVP_Digest(text, bytes, digest, NULL, EVP_sha256(), NULL) == 1;
    for (size_t i = 0; is_good && i < HEX_BYTES / 2; i++) {
        snprintf(out + 2 * i, 3, "%02x", digest[i]);
    }
    return is_good;
}

static bool ends_with(const char *name, const char *end)
{
    return strlen(name) >= strlen(end) && strcmp(name + strlen(name) - strlen(end), end) == 0;
}

static int compare_entries(const void *a, const void *b)
{
    return strcmp(((const ep_mirror_entry *)a)->name, ((const ep_mirror_entry *)b)->name);
}

static bool is_hex(const char *text)
{
    return strlen(text) == EP_MIRROR_VERSION_BYTES - 1 &&
           strspn(text, "0123456789abcdef") == EP_MIRROR_VERSION_BYTES - 1;
}

/* Checks what a peer or the list says; sorts entries. */
static ep_err check(const char *path, const char *version, ep_mirror_entry *entries, size_t count,
                    ep_error *out_error)
{
    if (!is_hex(version)) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE,
                            "%s: version '%.40s', allowed: 16 hexadecimal digits", path, version);
    }
    if (count < 1 || count > EP_MIRROR_FILES_MAX) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE, "%s: a model of %zu files, allowed 1..%d",
                            path, count, EP_MIRROR_FILES_MAX);
    }
    for (size_t i = 0; i < count; i++) {
        const char *name = entries[i].name;
        const size_t length = strnlen(name, sizeof(entries[i].name));
        if (length > NAME_BYTES_MAX || !ep_model_file_name_ok(name) || ends_with(name, ".part") ||
            ends_with(name, ".pieces") || strcmp(name, EP_MIRROR_LIST_NAME) == 0 ||
            strcmp(name, NEW_NAME) == 0) {
            return ep_error_set(out_error, EP_ERR_BAD_FILE,
                                "%s: a file called '%.*s', allowed: names without '/' of up to %d "
                                "bytes, none of a mirror's own",
                                path, 200, name, NAME_BYTES_MAX);
        }
        if (entries[i].bytes > EP_MIRROR_FILE_BYTES_MAX) {
            return ep_error_set(out_error, EP_ERR_BAD_FILE,
                                "%s: file %s of %" PRIu64 " bytes, allowed 0..%" PRIu64, path, name,
                                entries[i].bytes, EP_MIRROR_FILE_BYTES_MAX);
        }
    }
    qsort(entries, count, sizeof(*entries), compare_entries);
    for (size_t i = 1; i < count; i++) {
        if (strcmp(entries[i - 1].name, entries[i].name) == 0) {
            return ep_error_set(out_error, EP_ERR_BAD_FILE, "%s: file %s is listed twice", path,
                                entries[i].name);
        }
    }
    return EP_OK;
}

/* ---- writing ---- */

bool ep_mirror_pwrite(int fd, const void *from, size_t bytes, uint64_t offset)
{
    const uint8_t *at = from;
    while (bytes > 0) {
        const ssize_t n = pwrite(fd, at, bytes, (off_t)offset);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            errno = n == 0 ? ENOSPC : errno;
            return false;
        }
        at += n;
        bytes -= (size_t)n;
        offset += (uint64_t)n;
    }
    return true;
}

ep_err ep_mirror_list_lock(int dir, const char *path, ep_error *out_error)
{
    if (flock(dir, LOCK_EX | LOCK_NB) == 0) {
        return EP_OK;
    }
    return errno != EWOULDBLOCK ? system_error("lock the directory", path, out_error)
                                : ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                                               "%s: another process, or another model of this "
                                               "node, has this mirror open; each needs a "
                                               "directory of its own",
                                               path);
}

/* A file that somebody else put there would be taken for a fetched one. */
static ep_err check_empty(int dir, const char *path, ep_error *out_error)
{
    const int fd = dup(dir);
    DIR *list = fd < 0 ? NULL : fdopendir(fd);
    ep_err err = EP_OK;
    const struct dirent *entry;
    if (list == NULL) {
        if (fd >= 0) {
            close(fd);
        }
        return system_error("list", path, out_error);
    }
    rewinddir(list);
    while (err == EP_OK && (entry = readdir(list)) != NULL) {
        const char *name = entry->d_name;
        if (strcmp(name, ".") != 0 && strcmp(name, "..") != 0 && strcmp(name, NEW_NAME) != 0 &&
            strcmp(name, "lost+found") != 0) { /* exists at the root of a file system */
            err = ep_error_set(out_error, EP_ERR_BAD_FILE,
                               "%s: has %.200s in it; allowed: an empty directory, or one that "
                               "weights_from has filled",
                               path, name);
        }
    }
    closedir(list);
    return err;
}

static ep_err write_text(int dir, const char *path, const char *text, size_t bytes,
                         ep_error *out_error)
{
    const int fd =
        openat(dir, NEW_NAME, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0) {
        return system_error("write " NEW_NAME, path, out_error);
    }
    const bool is_good = ep_mirror_pwrite(fd, text, bytes, 0) && fsync(fd) == 0;
    const ep_err err = is_good ? EP_OK : system_error("write " NEW_NAME, path, out_error);
    close(fd);
    if (err == EP_OK &&
        (renameat(dir, NEW_NAME, dir, EP_MIRROR_LIST_NAME) != 0 || fsync(dir) != 0)) {
        return system_error("name " EP_MIRROR_LIST_NAME, path, out_error);
    }
    return err;
}

static ep_err write_list(int dir, const char *path, const char *version,
                         const ep_mirror_entry *entries, size_t count, ep_error *out_error)
{
    const size_t room = LINE_BYTES * (count + 4);
    char hex[HEX_BYTES + 1];
    char *text = malloc(room);
    if (text == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "%s: no memory for the list of %zu files",
                            path, count);
    }
    size_t at = (size_t)snprintf(text, room, FIRST_LINE "version %s\n", version);
    for (size_t i = 0; i < count; i++) {
        at += (size_t)snprintf(text + at, room - at, "%" PRIu64 " %s\n", entries[i].bytes,
                               entries[i].name);
    }
    ep_err err = EP_OK;
    if (!hash_text(text, at, hex)) {
        err = ep_error_set(out_error, EP_ERR_INTERNAL,
                           "%s: SHA-256 is not available from libcrypto", path);
    } else {
        at += (size_t)snprintf(text + at, room - at, LAST_LINE "%s\n", hex);
        err = write_text(dir, path, text, at, out_error);
    }
    free(text);
    return err;
}

ep_err ep_mirror_create(const char *path, const char *version, const ep_mirror_entry *entries,
                        size_t count, ep_error *out_error)
{
    ep_mirror_entry *sorted =
        count <= EP_MIRROR_FILES_MAX ? calloc(count + 1, sizeof(*sorted)) : NULL;
    if (sorted == NULL) {
        return count > EP_MIRROR_FILES_MAX
                   ? check(path, version, NULL, count, out_error)
                   : ep_error_set(out_error, EP_ERR_NO_MEMORY, "%s: no memory for %zu files", path,
                                  count);
    }
    memcpy(sorted, entries, count * sizeof(*sorted));
    ep_err err = check(path, version, sorted, count, out_error);
    const int dir = err == EP_OK ? open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    if (err == EP_OK && dir < 0) {
        err = system_error("open the directory", path, out_error);
    }
    err = err == EP_OK ? ep_mirror_list_lock(dir, path, out_error) : err;
    err = err == EP_OK ? check_empty(dir, path, out_error) : err;
    err = err == EP_OK ? write_list(dir, path, version, sorted, count, out_error) : err;
    if (dir >= 0) {
        close(dir);
    }
    free(sorted);
    return err;
}

/* ---- reading ---- */

static ep_err damaged(const char *path, ep_error *out_error)
{
    return ep_error_set(out_error, EP_ERR_BAD_FILE,
                        "%s: %s is damaged; empty the directory, and all is fetched again", path,
                        EP_MIRROR_LIST_NAME);
}

/* text: terminated with zero; parsing writes to it. */
static ep_err parse(const char *path, char *text, size_t bytes,
                    char out_version[EP_MIRROR_VERSION_BYTES], ep_mirror_entry **out_entries,
                    size_t *out_count, ep_error *out_error)
{
    const size_t tail = strlen(LAST_LINE) + HEX_BYTES + 1;
    char hex[HEX_BYTES + 1], version[EP_MIRROR_VERSION_BYTES];
    size_t count = 0;
    if (bytes < strlen(FIRST_LINE) + tail || memcmp(text, FIRST_LINE, strlen(FIRST_LINE)) != 0 ||
        strlen(text) != bytes || text[bytes - 1] != '\n' ||
        memcmp(text + bytes - tail, LAST_LINE, strlen(LAST_LINE)) != 0 ||
        !hash_text(text, bytes - tail, hex) ||
        memcmp(text + bytes - 1 - HEX_BYTES, hex, HEX_BYTES) != 0) {
        return damaged(path, out_error);
    }
    text[bytes - tail] = '\0';
    char *rest = text + strlen(FIRST_LINE);
    char *line = strsep(&rest, "\n");
    if (rest == NULL || sscanf(line, "version %16s", version) != 1) {
        return damaged(path, out_error);
    }
    ep_mirror_entry *entries = calloc(EP_MIRROR_FILES_MAX, sizeof(*entries));
    if (entries == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "%s: no memory for the list of files",
                            path);
    }
    ep_err err = EP_OK;
    while (err == EP_OK && rest != NULL && *rest != '\0') {
        line = strsep(&rest, "\n");
        char *name = strchr(line, ' ');
        if (name == NULL || count == EP_MIRROR_FILES_MAX || strlen(name + 1) > NAME_BYTES_MAX) {
            err = damaged(path, out_error);
        } else {
            entries[count].bytes = strtoull(line, NULL, 10);
            strcpy(entries[count++].name, name + 1);
        }
    }
    err = err == EP_OK ? check(path, version, entries, count, out_error) : err;
    if (err != EP_OK) {
        free(entries);
        return err;
    }
    memcpy(out_version, version, sizeof(version));
    *out_entries = entries;
    *out_count = count;
    return EP_OK;
}

ep_err ep_mirror_list_read(int dir, const char *path, char out_version[EP_MIRROR_VERSION_BYTES],
                           ep_mirror_entry **out_entries, size_t *out_count, ep_error *out_error)
{
    char *text = NULL;
    size_t bytes = 0;
    struct stat st;
    const int fd = openat(dir, EP_MIRROR_LIST_NAME, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) != 0) {
        const ep_err err = system_error("open " EP_MIRROR_LIST_NAME, path, out_error);
        if (fd >= 0) {
            close(fd);
        }
        return err;
    }
    ep_model_file file = {.fd = fd, .name = EP_MIRROR_LIST_NAME, .bytes = (uint64_t)st.st_size};
    ep_err err = ep_model_file_read_all(&file, TEXT_BYTES_MAX, &text, &bytes, out_error);
    err = err == EP_OK ? parse(path, text, bytes, out_version, out_entries, out_count, out_error)
                       : err;
    free(text);
    close(fd);
    return err;
}
