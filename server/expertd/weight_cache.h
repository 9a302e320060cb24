/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A directory on local disk with packed experts: a start neither hashes nor packs an expert it
 * finds there.
 *
 * There is one file per expert. Its name is made of all that decides its bytes: packed layout,
 * numerics id, identity of the checkpoint's files, layer, expert. A file is written under a
 * temporary name, synced and renamed, so a final name always stands for a whole file. It is read
 * into the backend's own memory, and the sums over head and body are checked meanwhile. A damaged
 * file is logged once, removed and written anew; if it cannot be removed, it is not read again. A
 * disk that is full or read-only costs only a warning and the cache. Several processes may share a
 * directory. What a process was writing when it died is removed by the next start.
 *
 * Whoever can write to the directory decides what the experts compute, so it belongs to the
 * service's user alone (mode 0700).
 *
 * Threads  all calls from any thread, except open and close; one writer of an expert at a time.
 */
#ifndef EP_EXPERTD_WEIGHT_CACHE_H
#define EP_EXPERTD_WEIGHT_CACHE_H

#include "backends/backend.h"
#include "model/model.h"

typedef struct ep_weight_cache ep_weight_cache;

typedef struct ep_weight_cache_key {
    uint8_t identity[EP_SHA256_BYTES]; /* of the checkpoint's files */
    const char *numerics;
    uint32_t layer;
    uint32_t expert;
} ep_weight_cache_key;

/* An open file and its head. */
typedef struct ep_weight_cache_file {
    int fd;
    size_t head_bytes;
    size_t body_bytes;
    uint32_t body_crc;
    uint8_t head[EP_PACKED_HEAD_BYTES];
    uint8_t sha256[EP_SHA256_BYTES];
    char name[128];
    /* Set by the reader; called repeatedly during the read with the bytes of the body read so far.
     * False ends the read with RESOURCE_EXHAUSTED. NULL: it is read to the end. */
    bool (*goes_on)(void *arg, size_t bytes_done);
    void *arg;
} ep_weight_cache_file;

typedef struct ep_weight_cache_stats {
    uint64_t bytes; /* size of all files, as last counted */
    uint64_t read_total;
    uint64_t written_total;
    uint64_t dropped_total; /* removed as damaged, or as old to make room */
} ep_weight_cache_stats;

/*
 * Makes dir if it does not exist. bytes_max 0: no limit. If the directory cannot be used, which is
 * a warning, or the backend has no packed form for files, *out_cache is NULL. Errors: NO_MEMORY;
 * FAILED_PRECONDITION: other users than this one and root may write trusted files.
 */
ep_err ep_weight_cache_open(const char *dir, uint64_t bytes_max, ep_backend *backend,
                            ep_weight_cache **out_cache, ep_error *out_error);
/* Logs a warning with path and reason if the directory could not be made or written to. Makes
 * nothing. */
void ep_weight_cache_check_dir(const char *dir);
void ep_weight_cache_close(ep_weight_cache *cache); /* NULL allowed */

/* Opens the expert's file and checks its head. False: there is no usable file; nothing is open. */
bool ep_weight_cache_find(ep_weight_cache *cache, const ep_weight_cache_key *key,
                          ep_weight_cache_file *out_file);
/* Reads the file and makes weights of it. It stays open: after NO_MEMORY it may be read again.
 * Errors: BAD_FILE (the file has been removed), and those of weights_import. */
ep_err ep_weight_cache_read(ep_weight_cache *cache, ep_weight_cache_file *file,
                            ep_backend_weights **out_weights, ep_error *out_error);
void ep_weight_cache_forget(ep_weight_cache_file *file); /* closes the file */

/* Writes an expert, unless what has its name is damaged and cannot be removed. False: disk or limit
 * do not allow it, now or later; a warning has said so. */
bool ep_weight_cache_write(ep_weight_cache *cache, const ep_weight_cache_key *key,
                           const ep_backend_weights *weights,
                           const uint8_t sha256[EP_SHA256_BYTES]);
void ep_weight_cache_read_stats(ep_weight_cache *cache, ep_weight_cache_stats *out_stats);

#endif
