/* SPDX-License-Identifier: Apache-2.0 */
/* The readable streams of a damaged recording. Private to trace_read.c and trace_sift.c. */
#ifndef EP_CLI_TRACE_SIFT_H
#define EP_CLI_TRACE_SIFT_H

#include "trace/trace_model.h"

#define EP_CLI_TRACES_MAX 256 /* of one recording: a directory per user and word size */

typedef struct ep_cli_traces {
    char *dirs[EP_CLI_TRACES_MAX];
    size_t count;
} ep_cli_traces;

/* trace_read.c: folders below dir with a file 'metadata', by name. NOT_FOUND,
 * RESOURCE_EXHAUSTED. */
ep_err ep_cli_traces_find(const char *dir, ep_cli_traces *out_traces, ep_error *out_error);
void ep_cli_traces_free(ep_cli_traces *traces);
/* trace_read.c: adds the traces below dir as one recording called name. Errors: as
 * ep_cli_trace_load, also BAD_FILE for one bad stream; what was read before the error stays in the
 * model. */
ep_err ep_cli_trace_read_dir(ep_cli_trace_model *model, const char *name, const char *dir,
                             ep_error *out_error);

typedef struct ep_cli_trace_sieve {
    char dir[512]; /* temporary: the recording as links to its readable streams; "" none */
    ep_cli_skipped *skipped;
    size_t skipped_count;
} ep_cli_trace_sieve;

/* Reads each stream of dir alone, at most events_max events of it. False, and nothing is kept: no
 * stream is readable. */
bool ep_cli_trace_sieve_make(ep_cli_trace_sieve *out_sieve, const char *dir, uint64_t events_max);
void ep_cli_trace_sieve_remove(ep_cli_trace_sieve *sieve);

#endif
