/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Begin and end of the spans listed in trace_spans.def, as LTTng-UST events of provider `expertd`.
 * When tracing is off they cost one predicted branch.
 *
 *     if (EP_TRACE_SPAN_ON(plan)) {           // only where the fields cost something to compute
 *         ep_trace_fields fields = {...};
 *         EP_TRACE(plan_begin, &fields);
 *     }
 *
 * The probes are in a library of their own, libexpertd-trace.so. A process that does not load it
 * has no tracing and no thread of LTTng (daemons and expertctl load it; users of libexpertd preload
 * it). Loading never waits for a session daemon.
 *
 * Trace ids   16 bytes of W3C traceparent as two numbers, first bytes first. A layer call without a
 *             traceparent gets a new id when tracing is on. On the wire traceparent names the
 *             sender's span: C in frames that a client sends.
 * Threads     any.
 */
#ifndef EP_OBSERVE_TRACE_H
#define EP_OBSERVE_TRACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EP_TRACEPARENT_CHARS 55 /* 00-<32 hex>-<16 hex>-<2 hex> */

typedef struct ep_trace_id {
    uint64_t high; /* 0,0: none */
    uint64_t low;
} ep_trace_id;

typedef struct ep_trace_fields {
    ep_trace_id trace;
    uint64_t call;   /* C, R or J of trace_spans.def */
    uint64_t parent; /* 0 none */
    uint64_t epoch;  /* number of the routing table used; 0 unknown */
    /* name of this process, not NULL: the node's, "coordinator", "gateway"; "" for a client,
     * recorded as "-" */
    const char *node;
    const char *peer; /* name of the other side, not NULL; "" none, recorded as "-" */
    uint32_t sub;
    int32_t layer;  /* -1 none */
    int32_t expert; /* -1 none */
    uint32_t rows;
    int32_t status; /* of ends: ep_err (0 OK); of begins: 0 */
} ep_trace_fields;

typedef enum ep_trace_event {
#define EP_TRACE_SPAN(name, step, on, what)                                                        \
    EP_TRACE_EVENT_##name##_begin, EP_TRACE_EVENT_##name##_end,
#include "observe/trace_spans.def"
#undef EP_TRACE_SPAN
    EP_TRACE_EVENTS
} ep_trace_event;

/* True while a session records this event. */
#define EP_TRACE_ON(event)                                                                         \
    __builtin_expect(__atomic_load_n(__atomic_load_n(&ep_trace_states[EP_TRACE_EVENT_##event],     \
                                                     __ATOMIC_ACQUIRE),                            \
                                     __ATOMIC_RELAXED) != 0,                                       \
                     0)
#define EP_TRACE(event, fields)                                                                    \
    do {                                                                                           \
        if (EP_TRACE_ON(event)) {                                                                  \
            ep_trace_emit(EP_TRACE_EVENT_##event, fields);                                         \
        }                                                                                          \
    } while (0)

/* True while both ends are recorded: ask before a span's begin, and emit its end only if true. */
#define EP_TRACE_SPAN_ON(span) (EP_TRACE_ON(span##_begin) && EP_TRACE_ON(span##_end))

/* private: what the macros use */
extern const int *ep_trace_states[EP_TRACE_EVENTS];
void ep_trace_emit(ep_trace_event event, const ep_trace_fields *fields);

/*
 * Loads libexpertd-trace.so and with it LTTng-UST: from beside the installed programs, else where
 * the loader finds it. Sets LTTNG_UST_REGISTER_TIMEOUT=0 unless the environment sets it, so that
 * the start never waits for a session daemon. For our programs, early in main, before there are
 * threads. Returns whether the probes are loaded. *out_why (may be NULL) is in both cases a text
 * for a log line, valid until the next call.
 */
bool ep_trace_load(const char **out_why);

/*
 * The same on a thread of its own, for programs that keep running: returns at once, and done (any
 * thread, once) gets the result. LTTng uses the timeout of the start also for its sockets, at least
 * 10 ms. With 0, a session daemon that answers later, as on a busy machine, loses the process for
 * good. So LTTNG_UST_REGISTER_TIMEOUT is 2000 here unless the environment sets it.
 */
typedef void (*ep_trace_loaded_func)(bool loaded, const char *why);
void ep_trace_load_aside(ep_trace_loaded_func done);
/* Whether the probes are loaded: by ep_trace_load, or preloaded. */
bool ep_trace_loaded(void);

/* The name of this process in the library's own spans; "" until set. Call early in main, before
 * there are threads; up to 63 bytes are kept. */
void ep_trace_set_process(const char *name);
const char *ep_trace_process(void);

/* A number unique among processes with high probability, never 0; no system call after the
 * first. */
uint64_t ep_trace_new_id(void);
/* A new trace id, never none. */
ep_trace_id ep_trace_new_trace(void);

/*
 * Reads a W3C traceparent (version 00, or a later one that begins the same way). False, with
 * outputs untouched, for anything else: NULL, upper case, an id of zeros, version ff.
 */
bool ep_traceparent_parse(const char *text, ep_trace_id *out_trace, uint64_t *out_span);
/* Writes "00-<trace>-<span>-01", terminated. */
void ep_traceparent_format(ep_trace_id trace, uint64_t span,
                           char out_text[EP_TRACEPARENT_CHARS + 1]);

#endif
