/* SPDX-License-Identifier: Apache-2.0 */
/* The views of expertctl top: two samples in, tables or JSON of rates out. Pure, except that it
 * prints. */
#ifndef EP_CLI_TOP_H
#define EP_CLI_TOP_H

#include <jansson.h>
#include <stdio.h>

#include "base/screen.h"
#include "node_list.h"

#define EP_TOP_HOTTEST_MAX 64

typedef struct ep_top_sample {
    uint64_t at_ns;
    int64_t clock_us;                         /* time of day */
    ep_cli_node_list nodes;                   /* owned */
    Expertd__V1__StatisticsReply *statistics; /* owned; NULL: none from the coordinator */
    ep_error coordinator_error;               /* code EP_OK: it answered, or there is none */
} ep_top_sample;

void ep_top_sample_fini(ep_top_sample *sample);

typedef struct ep_top_hot {
    const char *model; /* borrowed from the sample */
    const char *version;
    uint32_t layer;
    int64_t expert; /* -1: the whole layer */
    double per_s;
} ep_top_hot;

/* Increase of a counter per second; 0 if it has started again. */
double ep_top_rate(uint64_t before, uint64_t now, uint64_t ns);
/* The layers with the most rows per second over all nodes, hottest first. Returns how many of
 * out_hot[max] are filled. */
size_t ep_top_hot_layers(const ep_top_sample *before, const ep_top_sample *now, ep_top_hot *out_hot,
                         size_t max);
/* The same for experts, by the coordinator's sums of slots. */
size_t ep_top_hot_experts(const ep_top_sample *before, const ep_top_sample *now,
                          ep_top_hot *out_hot, size_t max);

typedef struct ep_top_view {
    size_t hottest;    /* number of layers, and of experts; 1..EP_TOP_HOTTEST_MAX */
    ep_screen screen;  /* the view's columns and rows; 0: any number */
    size_t first_node; /* first node shown; corrected if it is too large */
    const char *hint;  /* at the end of the first line */
} ep_top_view;

/*
 * Prints a line of sums, then tables of nodes and of the hottest layers and experts. If rows are
 * limited, all headings stay, with as many rows under each as there is room for, nodes first.
 * before may be now; then there are no rates. out_nodes_shown may be NULL. False: no memory, or
 * writing failed.
 */
bool ep_top_print(const ep_top_sample *before, const ep_top_sample *now, ep_top_view *io_view,
                  size_t *out_nodes_shown, FILE *out);
/* The same figures for all nodes; `expertctl top --help` describes the form. NULL: no memory. */
json_t *ep_top_json(const ep_top_sample *before, const ep_top_sample *now, size_t hottest);

#endif
