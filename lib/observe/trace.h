/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Begin and end of the spans listed in trace_spans.def, as LTTng-UST events of provider `expertd`. Off they cost one predicted branch.
 *
 *     if (EP_TRACE_ON(plan_begin)) {          // only where the fields cost something to make
 *         ep_trace_fields fields = {...};
 *         EP_TRACE(plan_begin, &fields);
 *     }
 *
 * The probes live in a library of their own, libexpertd-trace.so: a process that does not load it (daemons and expertctl do; users of
 * libexpertd preload it) has no tracing and no thread of LTTng. Loading never waits for a session daemon.
 *
 * Trace ids   16 bytes of W3C traceparent as two numbers, first bytes first. A layer call without a traceparent gets a new id when
 *             tracing is on. On the wire traceparent names the sender's span: C for frames a client sends.
 * Threads     any.
 */
#ifndef EP_OBSERVE_TRACE_H
#define EP_OBSERVE_TRACE_H

#include <stdbool.h>
#include <stdint.h>

typedef struct ep_trace_id {
    uint64_t high; /* 0,0: none */
    uint64_t low;
} ep_trace_id;

typedef struct ep_trace_fields {
    ep_trace_id trace;
    uint64_t call;     /* C, R or J of trace_spans.def */
    uint64_t parent;   /* 0 none */
    uint64_t epoch;    /* number of the routing table used; 0 unknown */
    const char *node;  /* name of this process: the node's, "coordinator", "gateway", "" a client */
    const char *peer;  /* name of the other side; "" none */
    uint32_t sub;
    int32_t layer;     /* -1 none */
    int32_t expert;    /* -1 none */
    uint32_t rows;
    int32_t status;    /* ends: ep_err (0 OK); begins: 0 */
} ep_trace_fields;

#endif
