/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The state in a SQLite file, <directory>/coordinator.db, in WAL mode with every commit on disk.
 * The file <directory>/lock has the process id and is locked while the store is open.
 */
#ifndef EP_COORDINATOR_TABLE_STORE_SQLITE_H
#define EP_COORDINATOR_TABLE_STORE_SQLITE_H

#include "coordinator/table_store.h"

#define EP_TABLE_STORE_SQLITE_SCHEMA 1

/*
 * Opens the store in a directory, which must exist, or makes an empty one there; checks the whole
 * file. Errors: FAILED_PRECONDITION (another process holds it: directory and pid; another schema
 * version: found and allowed), DATA_LOSS (file, what is wrong, what to do), IO (path, cause),
 * NO_MEMORY.
 */
ep_err ep_table_store_sqlite_open(const char *directory, ep_table_store **out_store,
                                  ep_error *out_error);

#endif
