/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Packed experts in a directory on local disk: a start that finds them there neither hashes nor
 * packs.
 *
 * One file per expert, named by what its bytes follow from: packed layout, numerics id, identity of
 * the checkpoint's files, layer, expert. It is written under another name, synced and renamed, so a
 * name always stands for a whole file; the sums over head and body are checked while it is read, by
 * reads into the backend's own memory. A file that is not what it should be is named in the log
 * once, removed and written anew; one that cannot be removed is not read again. A disk that is full
 * or read-only costs a warning and the cache, nothing else. Several processes may share a
 * directory; what one that died was writing goes with the next start.
 *
 * Whoever can write the directory decides what the experts compute: it belongs to the service's
 * user alone (mode 0700).
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

/* What a file says of its expert. */
typedef struct ep_weight_cache_file {
    int fd;
    size_t head_bytes;
    size_t body_bytes;
    uint32_t body_crc;
    uint8_t head[EP_PACKED_HEAD_BYTES];
    uint8_t sha256[EP_SHA256_BYTES];
    char name[128];
    /* For the reader to set: asked again and again while it is read, with the bytes of the body
     * read so far. False: it is left (RESOURCE_EXHAUSTED). NULL: never. */
    bool (*goes_on)(void *arg, size_t bytes_done);
    void *arg;
} ep_weight_cache_file;

typedef struct ep_weight_cache_stats {
    uint64_t bytes; /* of files, as last counted */
    uint64_t read_total;
    uint64_t written_total;
    uint64_t dropped_total; /* damaged, or old ones that made room */
} ep_weight_cache_stats;

/*
 * dir is made when it is not there; bytes_max 0: no limit. A directory that cannot be used is a
 * warning: *out_cache is NULL then, and when the backend has no packed form for files. Errors:
 * NO_MEMORY; FAILED_PRECONDITION: others than we and root may write it, and a packed file is
 * believed.
 */
ep_err ep_weight_cache_open(const char *dir, uint64_t bytes_max, ep_backend *backend,
                            ep_weight_cache **out_cache, ep_error *out_error);
/* Warns in the log when the directory could not be made or written, with path and reason. Makes
 * nothing. */
void ep_weight_cache_check_dir(const char *dir);
void ep_weight_cache_close(ep_weight_cache *cache); /* NULL allowed */

/* Opens the expert's file and checks its head. False: there is none of use; nothing is open. */
bool ep_weight_cache_find(ep_weight_cache *cache, const ep_weight_cache_key *key,
                          ep_weight_cache_file *out_file);
/* Reads it and makes weights of it; closes the file in any case. Errors: BAD_FILE (it is gone
 * then), and what weights_import brings. */
ep_err ep_weight_cache_read(ep_weight_cache *cache, ep_weight_cache_file *file,
                            ep_backend_weights **out_weights, ep_error *out_error);
void ep_weight_cache_forget(ep_weight_cache_file *file); /* closes it unread */

/* Writes an expert, unless what has its name is damaged and cannot be removed. False: neither this
 * one nor another will be: the disk or the limit does not allow it, a warning said so. */
bool ep_weight_cache_write(ep_weight_cache *cache, const ep_weight_cache_key *key,
                           const ep_backend_weights *weights,
                           const uint8_t sha256[EP_SHA256_BYTES]);
void ep_weight_cache_read_stats(ep_weight_cache *cache, ep_weight_cache_stats *out_stats);

#endif
