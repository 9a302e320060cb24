/* SPDX-License-Identifier: Apache-2.0 */
/* Puts spans on lanes: by begin, each goes to the first lane of its group where it nests. */
#include <stdlib.h>
#include <string.h>

#include "trace/trace_export.h"

#define DEPTH_MAX 8 /* kinds of one group nest no deeper */

const char *const ep_cli_lane_names[EP_CLI_LANE_GROUPS] = {
    "requests", "exchanges", "wire", "serves", "queues", "jobs", "kernels"};

typedef struct lane_state {
    uint32_t stack[DEPTH_MAX]; /* open spans, outermost first */
    uint32_t depth;
} lane_state;

typedef struct group_state {
    lane_state *lanes;
    uint32_t lanes_count;
    uint32_t lanes_capacity;
    uint32_t first; /* index of the group's lane 0 in the result */
} group_state;

static ep_cli_lane_group group_of(uint8_t kind)
{
    switch ((ep_cli_span_kind)kind) {
    case EP_CLI_SPAN_exchange:
        return EP_CLI_LANE_EXCHANGES;
    case EP_CLI_SPAN_send:
    case EP_CLI_SPAN_receive:
        return EP_CLI_LANE_WIRE;
    case EP_CLI_SPAN_serve:
    case EP_CLI_SPAN_decode:
    case EP_CLI_SPAN_reply:
        return EP_CLI_LANE_SERVES;
    case EP_CLI_SPAN_queue:
        return EP_CLI_LANE_QUEUES;
    case EP_CLI_SPAN_job:
        return EP_CLI_LANE_JOBS;
    case EP_CLI_SPAN_kernel:
        return EP_CLI_LANE_KERNELS;
    default:
        return EP_CLI_LANE_REQUESTS;
    }
}

/* Spans must come by begin, of equal begins the longer first. */
static bool fits(const ep_cli_trace_model *model, lane_state *lane, const ep_cli_span *span)
{
    while (lane->depth > 0 && model->spans[lane->stack[lane->depth - 1]].end_ns <= span->begin_ns) {
        lane->depth--;
    }
    if (lane->depth == 0) {
        return true;
    }
    const ep_cli_span *outer = &model->spans[lane->stack[lane->depth - 1]];
    return lane->depth < DEPTH_MAX && outer->call == span->call && outer->end_ns >= span->end_ns;
}

/* EP_CLI_TRACE_NONE: no lane is left. False: no memory. */
static bool place(const ep_cli_trace_model *model, group_state *group, uint32_t index,
                  uint32_t *out_lane)
{
    const ep_cli_span *span = &model->spans[index];
    uint32_t chosen = 0;
    while (chosen < group->lanes_count && !fits(model, &group->lanes[chosen], span)) {
        chosen++;
    }
    *out_lane = EP_CLI_TRACE_NONE;
    if (chosen == EP_CLI_TRACE_LANES_MAX) {
        return true;
    }
    if (chosen == group->lanes_capacity) {
        uint32_t capacity = group->lanes_capacity == 0 ? 8 : group->lanes_capacity * 2;
        lane_state *grown = realloc(group->lanes, capacity * sizeof(*grown));
        if (grown == NULL) {
            return false;
        }
        group->lanes = grown;
        group->lanes_capacity = capacity;
    }
    if (chosen == group->lanes_count) {
        group->lanes[group->lanes_count++] = (lane_state){0};
    }
    lane_state *lane = &group->lanes[chosen];
    lane->stack[lane->depth++] = index;
    *out_lane = chosen;
    return true;
}

/* Turns lane numbers within groups into indexes of all lanes. */
static bool number_lanes(const ep_cli_trace_model *model, group_state *groups,
                         ep_cli_trace_lanes *out)
{
    size_t groups_count = model->processes_count * EP_CLI_LANE_GROUPS;
    for (size_t g = 0; g < groups_count; g++) {
        groups[g].first = (uint32_t)out->lanes_count;
        out->lanes_count += groups[g].lanes_count;
    }
    out->lanes = calloc(out->lanes_count + 1, sizeof(*out->lanes));
    if (out->lanes == NULL) {
        return false;
    }
    for (size_t g = 0; g < groups_count; g++) {
        for (uint32_t i = 0; i < groups[g].lanes_count; i++) {
            out->lanes[groups[g].first + i] =
                (ep_cli_trace_lane){.process = (uint32_t)(g / EP_CLI_LANE_GROUPS),
                                    .number = i,
                                    .first = EP_CLI_TRACE_NONE,
                                    .group = (uint8_t)(g % EP_CLI_LANE_GROUPS)};
        }
    }
    for (size_t i = model->spans_count; i-- > 0;) {
        const ep_cli_span *span = &model->spans[i];
        if (out->lane_of[i] != EP_CLI_TRACE_NONE) {
            out->lane_of[i] +=
                groups[span->process * EP_CLI_LANE_GROUPS + group_of(span->kind)].first;
            out->next_of[i] = out->lanes[out->lane_of[i]].first;
            out->lanes[out->lane_of[i]].first = (uint32_t)i;
        }
    }
    return true;
}

ep_err ep_cli_trace_lanes_make(const ep_cli_trace_model *model, ep_cli_trace_lanes *out_lanes,
                               ep_error *out_error)
{
    size_t groups_count = model->processes_count * EP_CLI_LANE_GROUPS;
    group_state *groups = calloc(groups_count + 1, sizeof(*groups));
    *out_lanes =
        (ep_cli_trace_lanes){.lane_of = malloc((model->spans_count + 1) * sizeof(uint32_t)),
                             .next_of = malloc((model->spans_count + 1) * sizeof(uint32_t))};
    bool good = groups != NULL && out_lanes->lane_of != NULL && out_lanes->next_of != NULL;
    for (size_t i = 0; i < model->spans_count && good; i++) {
        const ep_cli_span *span = &model->spans[i];
        group_state *group = &groups[span->process * EP_CLI_LANE_GROUPS + group_of(span->kind)];
        good = place(model, group, (uint32_t)i, &out_lanes->lane_of[i]);
        out_lanes->left_out += good && out_lanes->lane_of[i] == EP_CLI_TRACE_NONE;
    }
    good = good && number_lanes(model, groups, out_lanes);
    for (size_t g = 0; groups != NULL && g < groups_count; g++) {
        free(groups[g].lanes);
    }
    free(groups);
    if (!good) {
        ep_cli_trace_lanes_free(out_lanes);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the lanes of %zu spans",
                            model->spans_count);
    }
    return EP_OK;
}

void ep_cli_trace_lanes_free(ep_cli_trace_lanes *lanes)
{
    free(lanes->lane_of);
    free(lanes->next_of);
    free(lanes->lanes);
    *lanes = (ep_cli_trace_lanes){0};
}

bool ep_cli_trace_lane_walk(const ep_cli_trace_model *model, const ep_cli_trace_lanes *lanes,
                            uint32_t lane, ep_cli_trace_step *step, void *arg)
{
    lane_state open = {0};
    for (uint32_t i = lanes->lanes[lane].first; i != EP_CLI_TRACE_NONE; i = lanes->next_of[i]) {
        while (open.depth > 0 &&
               model->spans[open.stack[open.depth - 1]].end_ns <= model->spans[i].begin_ns) {
            if (!step(open.stack[--open.depth], true, arg)) {
                return false;
            }
        }
        if (!step(i, false, arg)) {
            return false;
        }
        open.stack[open.depth++] = i;
    }
    while (open.depth > 0) {
        if (!step(open.stack[--open.depth], true, arg)) {
            return false;
        }
    }
    return true;
}
