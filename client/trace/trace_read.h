/* SPDX-License-Identifier: Apache-2.0 */
/* Reads one recording on disk into a span model. Private to trace_load.c. */
#ifndef EP_CLI_TRACE_READ_H
#define EP_CLI_TRACE_READ_H

#include "trace/trace_model.h"

#define EP_CLI_TRACES_MAX 256 /* per recording: there is a directory per user and word size */

typedef struct ep_cli_traces {
    char *dirs[EP_CLI_TRACES_MAX];
    size_t count;
} ep_cli_traces;

/* Finds the folders below dir with a file 'metadata', sorted by name. NOT_FOUND,
 * RESOURCE_EXHAUSTED. */
ep_err ep_cli_traces_find(const char *dir, ep_cli_traces *out_traces, ep_error *out_error);
void ep_cli_traces_free(ep_cli_traces *traces);
/* Adds the traces below dir as one recording called name. Errors: as ep_cli_trace_load, also
 * BAD_FILE for one bad stream. Events read before the error stay in the model. */
ep_err ep_cli_trace_read_dir(ep_cli_trace_model *model, const char *name, const char *dir,
                             ep_error *out_error);

#endif
