/* SPDX-License-Identifier: Apache-2.0 */
/* Span models written as files for viewers. A viewer's track must hold strictly nested spans, so
 * spans are first put on lanes. */
#ifndef EP_CLI_TRACE_EXPORT_H
#define EP_CLI_TRACE_EXPORT_H

#include <stdio.h>

#include "trace/trace_figures.h"

#define EP_CLI_TRACE_LANES_MAX 512     /* of one group in one process */
#define EP_CLI_TRACE_PAGE_SPANS 100000 /* of the HTML page */

typedef enum ep_cli_lane_group {
    EP_CLI_LANE_REQUESTS,
    EP_CLI_LANE_EXCHANGES,
    EP_CLI_LANE_WIRE,
    EP_CLI_LANE_SERVES,
    EP_CLI_LANE_QUEUES,
    EP_CLI_LANE_JOBS,
    EP_CLI_LANE_KERNELS,
    EP_CLI_LANE_GROUPS
} ep_cli_lane_group;

extern const char *const ep_cli_lane_names[EP_CLI_LANE_GROUPS];

typedef struct ep_cli_trace_lane {
    uint32_t process;
    uint32_t number; /* within its group and process, from 0 */
    uint32_t first;  /* span */
    uint8_t group;
} ep_cli_trace_lane;

typedef struct ep_cli_trace_lanes {
    uint32_t *lane_of;        /* [spans_count]; EP_CLI_TRACE_NONE: left out */
    uint32_t *next_of;        /* [spans_count]: the next span of the same lane; EP_CLI_TRACE_NONE */
    ep_cli_trace_lane *lanes; /* by process, group, number */
    size_t lanes_count;
    size_t left_out;
} ep_cli_trace_lanes;

/* Spans of one lane either nest or do not overlap; they nest only within their own call.
 * NO_MEMORY. */
ep_err ep_cli_trace_lanes_make(const ep_cli_trace_model *model, ep_cli_trace_lanes *out_lanes,
                               ep_error *out_error);
void ep_cli_trace_lanes_free(ep_cli_trace_lanes *lanes);

/*
 * Calls step with the begins and ends of one lane in nested order: for each span its begin, the
 * spans inside, its end. Stops and returns false as soon as step does.
 */
typedef bool ep_cli_trace_step(uint32_t span, bool is_end, void *arg);
bool ep_cli_trace_lane_walk(const ep_cli_trace_model *model, const ep_cli_trace_lanes *lanes,
                            uint32_t lane, ep_cli_trace_step *step, void *arg);

/* trace_pick.c: the part of a recording that the HTML page shows if the whole is too large. */
typedef struct ep_cli_trace_pick {
    bool *spans; /* [spans_count] */
    bool *calls; /* [requests_count]: shown with their spans */
    size_t spans_count;
    size_t calls_count;
} ep_cli_trace_pick;

/*
 * Picks at most spans_max spans, of whole calls where they fit: up to half of spans_max from calls
 * that failed, were slowest, hedged, or waited longest for a stage or a peer; then up to a tenth
 * from the longest spans of no call; then calls evenly over time. NO_MEMORY.
 */
ep_err ep_cli_trace_pick_make(const ep_cli_trace_model *model, const ep_cli_trace_figures *figures,
                              size_t spans_max, ep_cli_trace_pick *out_pick, ep_error *out_error);
void ep_cli_trace_pick_free(ep_cli_trace_pick *pick);

/* Each returns false when there is no memory or writing failed. */
bool ep_cli_trace_write_perfetto(const ep_cli_trace_model *model, const ep_cli_trace_lanes *lanes,
                                 FILE *out);
bool ep_cli_trace_write_html(const ep_cli_trace_model *model, const ep_cli_trace_figures *figures,
                             const ep_cli_trace_pick *pick, FILE *out);

#endif
