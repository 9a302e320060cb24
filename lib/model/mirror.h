/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A directory with those parts of a model's files that were needed so far. A read of anything else
 * fetches it first, in pieces.
 *
 *     expertd-mirror    version, and names and sizes of all files
 *     NAME.part         an incomplete file, at its full size, with holes
 *     NAME.pieces       its journal: a record, with a digest, for each piece that it has
 *     NAME              a complete file, as in any other checkpoint
 *
 * The directory is locked while it is made a mirror, and while it is open.
 *
 * A hole reads as zeros, so only this module opens a .part file; ep_checkpoint_open does not find
 * it. A piece is recorded once it is on the disk. A piece recorded by an earlier process is
 * compared with its digest before its first use, and fetched again if it differs. An incomplete
 * record ends the journal.
 *
 * Threads    any, except create, open, close.
 */
#ifndef EP_MODEL_MIRROR_H
#define EP_MODEL_MIRROR_H

#include "model/model_files.h"

#define EP_MIRROR_LIST_NAME "expertd-mirror"
#define EP_MIRROR_FILES_MAX 10000
#define EP_MIRROR_FILE_BYTES_MAX ((uint64_t)1 << 42)
#define EP_MIRROR_VERSION_BYTES 17 /* as in ep_model_info */

typedef struct ep_mirror ep_mirror;
typedef struct ep_mirror_file ep_mirror_file;

typedef struct ep_mirror_entry {
    char name[EP_MODEL_FILE_NAME_BYTES];
    uint64_t bytes;
} ep_mirror_entry;

/* Reads exactly bytes of a file from offset, or an error that names the source. One call at a
 * time. */
typedef ep_err (*ep_mirror_fetch)(void *arg, const char *name, uint64_t offset, void *out,
                                  size_t bytes, ep_error *out_error);

/* Makes an empty directory the mirror of a version. Errors: BAD_FILE (it is not empty; a name, a
 * size or their number is not allowed), NOT_FOUND, FAILED_PRECONDITION (another process has it),
 * IO, NO_MEMORY. */
ep_err ep_mirror_create(const char *path, const char *version, const ep_mirror_entry *entries,
                        size_t count, ep_error *out_error);
/* piece_bytes: the most to fetch at a time; pieces of another size count as missing. Errors:
 * NOT_FOUND (it is no mirror yet), BAD_FILE, FAILED_PRECONDITION (another process has it open), IO,
 * NO_MEMORY. */
ep_err ep_mirror_open(const char *path, size_t piece_bytes, ep_mirror_fetch fetch, void *arg,
                      ep_mirror **out_mirror, ep_error *out_error);
/* All its files must be closed. NULL allowed. */
void ep_mirror_close(ep_mirror *mirror);
const char *ep_mirror_path(const ep_mirror *mirror);
const char *ep_mirror_version(const ep_mirror *mirror);
/* Ordered by name; NULL after the last. */
const ep_mirror_entry *ep_mirror_entry_at(const ep_mirror *mirror, size_t index);

/* ---- for model_files.c ---- */

/* Errors: NOT_FOUND (no such name in the list), BAD_FILE, IO, NO_MEMORY. */
ep_err ep_mirror_open_file(ep_mirror *mirror, const char *name, ep_model_file *out_file,
                           ep_error *out_error);
/* Fetches what is missing of a range; ignores what is beyond the end of the file. Errors: those of
 * fetch, BAD_FILE (somebody else wrote to it), IO, NO_MEMORY, INTERNAL. */
ep_err ep_mirror_file_need(ep_mirror_file *file, uint64_t offset, uint64_t bytes,
                           ep_error *out_error);
/* Whether the whole range is here. Fetches nothing. */
bool ep_mirror_file_has(ep_mirror_file *file, uint64_t offset, uint64_t bytes);
/* BAD_FILE when size or time differ from those after this module's last write. */
ep_err ep_mirror_file_check_unchanged(ep_mirror_file *file, const ep_model_file *opened,
                                      ep_error *out_error);

#endif
