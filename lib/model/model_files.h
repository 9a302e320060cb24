/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Opens and reads files of a model directory without trusting them.
 *
 * A name is a basename. A regular file is opened without following links. A symbolic link (the
 * Hugging Face cache keeps snapshots/<revision>/<name> -> ../../blobs/<hash>) is resolved once and
 * must end inside the model directory, or inside the cache root: the directory that holds both
 * snapshots/ and blobs/. Directories, pipes and devices are refused. Data is read by pread into
 * memory we own: a file that is truncated later gives an error, never SIGBUS. What a mirror
 * (mirror.h) lacks is fetched before it is read.
 *
 * Threads  an open file is immutable; reads are safe from any thread.
 */
#ifndef EP_MODEL_MODEL_FILES_H
#define EP_MODEL_MODEL_FILES_H

#include <time.h>

#include "base/error.h"

#define EP_MODEL_FILE_NAME_BYTES 256

struct ep_mirror;
struct ep_mirror_file;

typedef struct ep_model_dir {
    int fd;
    struct ep_mirror *mirror; /* NULL: all files are complete */
    char *path;               /* with links resolved */
    /* links must end below it; equal to path except in a Hugging Face cache */
    char *root;
} ep_model_dir;

typedef struct ep_model_file {
    int fd;
    /* for messages: the basename, or the path it was opened by */
    char name[EP_MODEL_FILE_NAME_BYTES];
    uint64_t bytes;                  /* at open */
    struct timespec modified;        /* at open */
    struct timespec changed;         /* at open; also changes with names and permissions */
    struct ep_mirror_file *mirrored; /* NULL: the file is complete */
} ep_model_file;

static inline bool ep_same_time(const struct timespec *a, const struct timespec *b)
{
    return a->tv_sec == b->tv_sec && a->tv_nsec == b->tv_nsec;
}

/* Errors: NOT_FOUND, BAD_FILE (not a directory), IO, NO_MEMORY. */
ep_err ep_model_dir_open(const char *path, ep_model_dir *out_dir, ep_error *out_error);
void ep_model_dir_close(ep_model_dir *dir);

/* True when name is a plain file name: 1..255 printable ASCII bytes, no '/', neither "." nor
 * "..". */
bool ep_model_file_name_ok(const char *name);

/* Errors: NOT_FOUND, BAD_FILE (not a regular file, or a link that leaves the root), IO. */
ep_err ep_model_file_open(const ep_model_dir *dir, const char *name, ep_model_file *out_file,
                          ep_error *out_error);
/* The same for a path that an operator named; links are followed. */
ep_err ep_model_file_open_path(const char *path, ep_model_file *out_file, ep_error *out_error);
void ep_model_file_close(ep_model_file *file);

/* BAD_FILE when size or modification time differ from those at open. */
ep_err ep_model_file_check_unchanged(const ep_model_file *file, ep_error *out_error);
/* Reads exactly bytes from offset. Errors: BAD_FILE (the file ends before), IO. */
ep_err ep_model_file_read(const ep_model_file *file, uint64_t offset, void *out, size_t bytes,
                          ep_error *out_error);
/* Fetches everything missing of a range, before the first read. Errors: as ep_mirror_file_need. */
ep_err ep_model_file_need(const ep_model_file *file, uint64_t offset, uint64_t bytes,
                          ep_error *out_error);
/* Whether a read of a range would fetch nothing. */
bool ep_model_file_has(const ep_model_file *file, uint64_t offset, uint64_t bytes);
/* Reads the whole file and appends a zero byte, which is not counted; free() it. Errors: BAD_FILE
 * (larger than bytes_max), IO, NO_MEMORY. */
ep_err ep_model_file_read_all(const ep_model_file *file, size_t bytes_max, char **out_bytes,
                              size_t *out_count, ep_error *out_error);
/* The same for a path that an operator named. */
ep_err ep_model_file_read_path(const char *path, size_t bytes_max, char **out_bytes,
                               size_t *out_count, ep_error *out_error);

#endif
