/* SPDX-License-Identifier: Apache-2.0 */
/* The part of trace_read.c that uses libbabeltrace2; it runs in the child. */
#ifndef EP_CLI_TRACE_SOURCE_H
#define EP_CLI_TRACE_SOURCE_H

#include "trace/trace_model.h"

typedef enum ep_cli_trace_note_kind {
    EP_CLI_TRACE_NOTE_EVENT,
    EP_CLI_TRACE_NOTE_DISCARDED,
    EP_CLI_TRACE_NOTE_HOST,
    EP_CLI_TRACE_NOTE_ERROR,
    EP_CLI_TRACE_NOTE_DONE
} ep_cli_trace_note_kind;

/* What the child tells its parent. */
typedef struct ep_cli_trace_note {
    ep_cli_trace_note_kind kind;
    union {
        ep_cli_trace_event event;
        struct {
            uint64_t events;
            uint64_t packets;
        } discarded;
        struct {
            char name[EP_CLI_TRACE_NAME_BYTES];
            uint8_t clock[16];
            bool has_clock;
        } host;
        ep_error error;
    } u;
} ep_cli_trace_note;

/* False: stop. */
typedef bool ep_cli_trace_tell(const ep_cli_trace_note *note, void *arg);

/* Reads the one trace whose metadata file is in dir. */
ep_err ep_cli_trace_source_run(const char *dir, ep_cli_trace_tell *tell, void *arg,
                               ep_error *out_error);

#endif
