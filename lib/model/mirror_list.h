/* SPDX-License-Identifier: Apache-2.0 */
/* The list of a mirror's files; see mirror.h. */
#ifndef EP_MODEL_MIRROR_LIST_H
#define EP_MODEL_MIRROR_LIST_H

#include "model/mirror.h"

/* Locks the directory for as long as it is open, so that only one process makes it a mirror or has
 * it open as one. Errors: FAILED_PRECONDITION (another process has it), IO. */
ep_err ep_mirror_list_lock(int dir, const char *path, ep_error *out_error);
/* Reads the list; entries are sorted by name. Errors: as ep_mirror_open. */
ep_err ep_mirror_list_read(int dir, const char *path, char out_version[EP_MIRROR_VERSION_BYTES],
                           ep_mirror_entry **out_entries, size_t *out_count, ep_error *out_error);

/* Writes all bytes; false: errno. */
bool ep_mirror_pwrite(int fd, const void *from, size_t bytes, uint64_t offset);

#endif
