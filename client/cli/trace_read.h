/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Recordings on disk into a span model. CTF is read by libbabeltrace2 in a child process: a damaged or hostile
 * recording that brings the library down costs this one reading, with an error, and nothing else.
 */
#ifndef EP_CLI_TRACE_READ_H
#define EP_CLI_TRACE_READ_H

#include "trace_model.h"

#define EP_CLI_TRACE_EVENTS_MAX_DEFAULT 2000000ULL

/* Adds every trace below dir as one recording. NOT_FOUND: no trace there; BAD_FILE: not readable to its end.
 * What was read before the error stays in the model. */
ep_err ep_cli_trace_read(ep_cli_trace_model *model, const char *dir, ep_error *out_error);

#endif
