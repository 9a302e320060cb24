/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Makes spans of the begin and end events of recordings (lib/observe/trace_spans.def): which
 * process ran them, which belong together, what is missing. Pure: no files, no clock, no threads.
 *
 *     create -> recording, add, discarded (any number) -> finish -> read the public fields
 *
 * Memory   one ep_cli_span per begin event, at most events_max of them; names are kept once, at
 *          most EP_CLI_TRACE_NAMES_MAX.
 * Threads  one at a time.
 */
#ifndef EP_CLI_TRACE_MODEL_H
#define EP_CLI_TRACE_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "observe/trace.h"

#define EP_CLI_TRACE_NAME_BYTES 128  /* longer names are cut */
#define EP_CLI_TRACE_NAMES_MAX 65536 /* past that a name is "(too many names)" */
#define EP_CLI_TRACE_LISTED_MAX 1000 /* unmatched events kept for the list; all are counted */
#define EP_CLI_TRACE_PROCESSES_MAX 4096
/* a session does not start and stop in all processes at the same moment */
#define EP_CLI_TRACE_EDGE_NS 100000000LL
#define EP_CLI_TRACE_RECORDINGS_MAX 64
#define EP_CLI_TRACE_SKIPPED_MAX 64 /* streams listed per recording; all are counted */
#define EP_CLI_TRACE_NONE UINT32_MAX

typedef enum ep_cli_span_kind {
#define EP_TRACE_SPAN(name, step, on, what) EP_CLI_SPAN_##name,
#include "observe/trace_spans.def"
#undef EP_TRACE_SPAN
    EP_CLI_SPAN_KINDS
} ep_cli_span_kind;

extern const char *const ep_cli_span_names[EP_CLI_SPAN_KINDS];

typedef struct ep_cli_trace_event {
    int64_t time_ns; /* on the recording's clock */
    uint32_t recording;
    int32_t pid;
    int32_t tid;
    ep_cli_span_kind kind;
    bool is_end;
    ep_trace_id trace;
    uint64_t call;
    uint64_t parent;
    uint64_t epoch;
    uint32_t sub;
    uint32_t rows;
    int32_t layer;
    int32_t expert;
    int32_t status;
    char thread[EP_CLI_TRACE_NAME_BYTES];
    char node[EP_CLI_TRACE_NAME_BYTES];
    char peer[EP_CLI_TRACE_NAME_BYTES];
} ep_cli_trace_event;

typedef struct ep_cli_span {
    int64_t begin_ns; /* after finish: on the clock of the first recording */
    int64_t end_ns;
    ep_trace_id trace;
    uint64_t call;
    uint64_t parent; /* of the end event if that has one */
    uint64_t epoch;
    uint32_t process; /* index of processes */
    uint32_t peer;    /* index of names */
    uint32_t sub;
    uint32_t rows;
    int32_t layer;
    int32_t expert;
    int32_t status;
    int32_t tid;    /* of the begin event */
    uint32_t mate;  /* exchange <-> serve or gateway of the same remote call; EP_CLI_TRACE_NONE */
    uint32_t chain; /* private to the model */
    uint8_t kind;
    bool open;
    bool again; /* begun again before it ended */
    /* an exchange whose answer was not used, since another copy had answered (hedging); also all
     * spans done for it except jobs */
    bool unused;
} ep_cli_span;

typedef struct ep_cli_trace_process {
    uint32_t recording;
    int32_t pid;
    uint32_t node;   /* index of names: the node's name; "": a client */
    uint32_t thread; /* index of names: the name of its first thread, else of the first one seen */
    uint32_t frames; /* index of names: its name in its send and receive spans */
    bool calls;      /* it has forward spans: a client, whatever the name in frames */
    uint64_t spans_count;
    int64_t first_ns; /* its first event: a recording starts at another moment in each process */
} ep_cli_trace_process;

/* A begin without an end, or an end without a begin. */
typedef struct ep_cli_unmatched {
    int64_t time_ns;
    ep_trace_id trace;
    uint64_t call;
    uint32_t sub;
    uint32_t process;
    uint8_t kind;
    bool is_end;
    bool again; /* begun again before it ended */
} ep_cli_unmatched;

/* A stream file that could not be read to its end. */
typedef struct ep_cli_skipped {
    char file[512];
    char why[256];
    uint64_t bytes;
} ep_cli_skipped;

typedef struct ep_cli_recording {
    char path[512];
    char host[EP_CLI_TRACE_NAME_BYTES];
    uint8_t clock[16]; /* recordings with the same clock need no fit */
    bool has_clock;
    int64_t offset_ns; /* subtracted from its times by finish */
    /* half the round trip of the pair used for the fit; -1: no pair joins it to the first */
    int64_t offset_error_ns;
    uint64_t events_count;
    int64_t last_ns; /* last event, on its own clock */
    uint64_t discarded_events;
    uint64_t discarded_packets;
    ep_cli_skipped *skipped; /* the first EP_CLI_TRACE_SKIPPED_MAX */
    size_t skipped_count;    /* all */
} ep_cli_recording;

typedef struct ep_cli_trace_model {
    ep_cli_span *spans; /* after finish: without cut_begins */
    size_t spans_count;
    ep_cli_trace_process *processes;
    size_t processes_count;
    char **names; /* valid UTF-8 without control characters; [0] is "" */
    size_t names_count;
    ep_cli_recording recordings[EP_CLI_TRACE_RECORDINGS_MAX];
    size_t recordings_count;
    ep_cli_unmatched *unmatched; /* after finish: the first EP_CLI_TRACE_LISTED_MAX */
    size_t unmatched_count;
    uint64_t unmatched_begins; /* without those cut off */
    uint64_t unmatched_ends;
    uint64_t cut_begins; /* their end may be after the recording */
    uint64_t cut_ends;   /* their begin may be before it */
    uint64_t events_count;
    bool cut;            /* there were more than events_max events */
    uint32_t *by_call;   /* after finish: indexes of spans, by (kind, call, begin) */
    uint32_t *by_parent; /* after finish: indexes of exchanges and forwards, by (parent, begin) */
    size_t by_parent_count;
    struct ep_cli_trace_tables *tables;
} ep_cli_trace_model;

/*
 * Begins and ends without a partner. Frames are on their way whenever a recording starts or stops,
 * so one event of their spans is outside of it. An event counts as cut instead of unmatched when
 * its partner can lie outside: a begin near the recording's last event, an end near its process's
 * first one. Near means within the longest matched span of its kind in all recordings, or
 * EP_CLI_TRACE_EDGE_NS. Every other event without a partner is unmatched, also a span that was
 * begun again before it ended, however late.
 */

/* events_max 1..1e9. NULL: no memory. */
ep_cli_trace_model *ep_cli_trace_model_create(uint64_t events_max);
void ep_cli_trace_model_destroy(ep_cli_trace_model *model);

/* Starts a recording; its index is recordings_count - 1. RESOURCE_EXHAUSTED past
 * EP_CLI_TRACE_RECORDINGS_MAX. */
ep_err ep_cli_trace_model_recording(ep_cli_trace_model *model, const char *path,
                                    ep_error *out_error);

/* Events of one recording must come ordered by time. After events_max events it only sets cut.
 * NO_MEMORY, INVALID_ARGUMENT (kind or recording), RESOURCE_EXHAUSTED (more than
 * EP_CLI_TRACE_PROCESSES_MAX processes). */
ep_err ep_cli_trace_model_add(ep_cli_trace_model *model, const ep_cli_trace_event *event,
                              ep_error *out_error);

/*
 * Call it once, after the last event. It takes out unmatched events, brings recordings of other
 * hosts onto the first one's clock and joins remote calls. If trace is not 0,0, only its spans, and
 * the jobs that worked for it, are kept and counted.
 */
ep_err ep_cli_trace_model_finish(ep_cli_trace_model *model, ep_trace_id trace, ep_error *out_error);

/* Finds the spans of kind and call: by_call[*out_first .. + the returned count). */
size_t ep_cli_trace_model_find(const ep_cli_trace_model *model, ep_cli_span_kind kind,
                               uint64_t call, size_t *out_first);
/* Finds exchanges and forwards whose parent is `call`: by_parent[*out_first .. + the returned
 * count). */
size_t ep_cli_trace_model_children(const ep_cli_trace_model *model, uint64_t call,
                                   size_t *out_first);
/* Returns the gateway span in which a forward span runs; NULL: none. */
const ep_cli_span *ep_cli_trace_model_gateway(const ep_cli_trace_model *model, uint32_t forward);
/* Writes "node0" or the client's thread name, and " (PID)" behind it if with_pid. */
void ep_cli_trace_process_name(const ep_cli_trace_model *model, uint32_t process, bool with_pid,
                               char *out_name, size_t bytes);

/* trace_clock.c: fits the offsets of all recordings to pairs of exchange and serve. For finish. */
void ep_cli_trace_clock_fit(ep_cli_trace_model *model);

#endif
