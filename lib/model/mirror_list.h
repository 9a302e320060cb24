/* SPDX-License-Identifier: Apache-2.0 */
/* The list of a mirror's files, as mirror.h says. */
#ifndef EP_MODEL_MIRROR_LIST_H
#define EP_MODEL_MIRROR_LIST_H

#include "model/mirror.h"

/* Entries sorted by name; the open file holds the lock. Errors: as ep_mirror_open. */
ep_err ep_mirror_list_read(int dir, const char *path, char out_version[EP_MIRROR_VERSION_BYTES],
                           ep_mirror_entry **out_entries, size_t *out_count, int *out_fd, ep_error *out_error);

#endif
