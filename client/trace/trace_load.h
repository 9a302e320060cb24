/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads recordings on disk into a span model. libbabeltrace2 reads CTF in child processes: if a
 * damaged or hostile recording crashes the library, only this load fails, with an error.
 */
#ifndef EP_CLI_TRACE_LOAD_H
#define EP_CLI_TRACE_LOAD_H

#include "trace/trace_model.h"

#define EP_CLI_TRACE_EVENTS_MAX_DEFAULT 2000000ULL

/*
 * Makes a model, not yet finished, in which all traces below one of
 * dirs[1..EP_CLI_TRACE_RECORDINGS_MAX] are one recording. A stream that cannot be read to its end
 * is left out as a whole and listed in the recording. Errors: NOT_FOUND, no trace there; BAD_FILE,
 * no readable stream; NO_MEMORY; RESOURCE_EXHAUSTED.
 */
ep_err ep_cli_trace_load(const char *const *dirs, size_t dirs_count, uint64_t events_max,
                         ep_cli_trace_model **out_model, ep_error *out_error);
/* Prints a line to stderr for each stream that was left out. */
void ep_cli_trace_warn_skipped(const char *program, const ep_cli_trace_model *model);

#endif
