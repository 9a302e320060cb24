/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A file that a program writes when it listens, from which scripts and tests read the real ports
 * after asking for port 0:
 *     {"program":"expertd","pid":4711,"rpc_url":"tcp://127.0.0.1:40123","probe_url":"http://...",
 *     ...}
 * It appears complete (written under another name, then renamed) and is removed at the end.
 */
#ifndef EP_SERVER_COMMON_PORTS_FILE_H
#define EP_SERVER_COMMON_PORTS_FILE_H

#include "base/error.h"

typedef struct ep_ports_entry {
    const char *key;   /* "rpc_url" */
    const char *value; /* "" entries are left out */
} ep_ports_entry;

/* Errors: IO with path and reason, NO_MEMORY. */
ep_err ep_ports_file_write(const char *path, const char *program, const ep_ports_entry *entries,
                           size_t count, ep_error *out_error);
void ep_ports_file_remove(const char *path);

#endif
