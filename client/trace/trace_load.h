/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Recordings on disk into a span model. CTF is read by libbabeltrace2 in child processes: a damaged
 * or hostile recording that brings the library down costs this one reading, with an error, and
 * nothing else.
 */
#ifndef EP_CLI_TRACE_LOAD_H
#define EP_CLI_TRACE_LOAD_H

#include "trace/trace_model.h"

#define EP_CLI_TRACE_EVENTS_MAX_DEFAULT 2000000ULL

/*
 * A new model with every trace below each of dirs[1..EP_CLI_TRACE_RECORDINGS_MAX] as one recording;
 * to be finished. A stream of a recording that cannot be read to its end is left out as a whole,
 * and said in the recording. Errors: NOT_FOUND, no trace there; BAD_FILE, no stream of it is
 * readable; NO_MEMORY; RESOURCE_EXHAUSTED.
 */
ep_err ep_cli_trace_load(const char *const *dirs, size_t dirs_count, uint64_t events_max,
                         ep_cli_trace_model **out_model, ep_error *out_error);
/* A line to stderr for each stream that was left out. */
void ep_cli_trace_warn_skipped(const char *program, const ep_cli_trace_model *model);

#endif
