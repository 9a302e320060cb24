/* SPDX-License-Identifier: Apache-2.0 */
/* What expertctl top shows: two samples in, tables of rates out. Pure but for the printing. */
#ifndef EP_CLI_TOP_H
#define EP_CLI_TOP_H

#include <stdio.h>

#include "node_list.h"

typedef struct ep_top_sample {
    uint64_t at_ns;
    ep_cli_node_list nodes;                           /* owned */
    Expertd__V1__StatisticsReply *statistics;         /* owned; NULL: the coordinator gave none */
    ep_error coordinator_error;                       /* code EP_OK: it answered, or none is asked */
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
/* The layers with most rows per second of all nodes together, hottest first; how many of out_hot[max] are filled. */
size_t ep_top_hot_layers(const ep_top_sample *before, const ep_top_sample *now, ep_top_hot *out_hot, size_t max);
/* The experts with most slots per second, as the coordinator adds them up. */
size_t ep_top_hot_experts(const ep_top_sample *before, const ep_top_sample *now, ep_top_hot *out_hot, size_t max);

/* Tables of nodes and of the hottest layers and experts. False: out of memory, or the file takes no more. */
bool ep_top_print(const ep_top_sample *before, const ep_top_sample *now, size_t hottest, FILE *out);

#endif
