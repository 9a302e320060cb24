/* SPDX-License-Identifier: Apache-2.0 */
/* What expertctl top shows: two samples in, tables or JSON of rates out. Pure but for the
 * printing. */
#ifndef EP_CLI_TOP_H
#define EP_CLI_TOP_H

#include <jansson.h>
#include <stdio.h>

#include "base/screen.h"
#include "node_list.h"

#define EP_TOP_HOTTEST_MAX 64

typedef struct ep_top_sample {
    uint64_t at_ns;
    int64_t clock_us;                         /* of day */
    ep_cli_node_list nodes;                   /* owned */
    Expertd__V1__StatisticsReply *statistics; /* owned; NULL: the coordinator gave none */
    ep_error coordinator_error;               /* code EP_OK: it answered, or none is asked */
} ep_top_sample;

void ep_top_sample_fini(ep_top_sample *sample);

typedef struct ep_top_hot {
    const char *model; /* borrowed from the sample */
    const char *version;
    uint32_t layer;
    int64_t expert; /* -1: the whole layer */
    double per_s;
} ep_top_hot;

/* Growth of a counter per second; 0 for one that began anew. */
double ep_top_rate(uint64_t before, uint64_t now, uint64_t ns);
/* The layers with most rows per second of all nodes together, hottest first; how many of
 * out_hot[max] are filled. */
size_t ep_top_hot_layers(const ep_top_sample *before, const ep_top_sample *now, ep_top_hot *out_hot,
                         size_t max);
/* The experts with most slots per second, as the coordinator adds them up. */
size_t ep_top_hot_experts(const ep_top_sample *before, const ep_top_sample *now,
                          ep_top_hot *out_hot, size_t max);

typedef struct ep_top_view {
    size_t hottest;    /* layers, and experts; 1..EP_TOP_HOTTEST_MAX */
    ep_screen screen;  /* columns and rows that the view may take; 0: any number */
    size_t first_node; /* of those shown; what is beyond the last ones is corrected */
    const char *hint;  /* at the end of the first line */
} ep_top_view;

/*
 * A line of sums, then tables of nodes and of the hottest layers and experts. Where rows are
 * bounded all headings stay, with as many rows under each as there is room for, nodes first. before
 * may be now: there are no rates then. *out_nodes_shown may be NULL. False: out of memory, or the
 * file takes no more.
 */
bool ep_top_print(const ep_top_sample *before, const ep_top_sample *now, ep_top_view *io_view,
                  size_t *out_nodes_shown, FILE *out);
/* The same figures, of all nodes; its shape is in `expertctl top --help`. NULL: out of memory. */
json_t *ep_top_json(const ep_top_sample *before, const ep_top_sample *now, size_t hottest);

#endif
