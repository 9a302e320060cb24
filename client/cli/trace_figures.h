/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a span model says: figures per stage, per peer and per expert, and where the time of a request went.
 * Pure. Times are nanoseconds; percentiles are by nearest rank.
 */
#ifndef EP_CLI_TRACE_FIGURES_H
#define EP_CLI_TRACE_FIGURES_H

#include "trace_model.h"

typedef struct ep_cli_trace_stat {
    uint64_t count;
    int64_t p50_ns;
    int64_t p99_ns;
    int64_t max_ns;
    int64_t total_ns;
} ep_cli_trace_stat;

/* Parts of a request's critical path. */
typedef enum ep_cli_path_part {
    EP_CLI_PATH_PLAN,
    EP_CLI_PATH_PACK,
    EP_CLI_PATH_NETWORK, /* exchange outside of its serve */
    EP_CLI_PATH_DECODE,
    EP_CLI_PATH_QUEUE,
    EP_CLI_PATH_JOB,
    EP_CLI_PATH_REPLY,
    EP_CLI_PATH_NODE,     /* serve outside of decode, queue, job and reply */
    EP_CLI_PATH_GATEWAY,  /* a gateway span outside of the layer calls in it */
    EP_CLI_PATH_UNSERVED, /* an exchange whose serve was not recorded */
    EP_CLI_PATH_LATE,     /* waiting for an answer that was not used, until another copy was asked */
    EP_CLI_PATH_COMBINE,
    EP_CLI_PATH_CLIENT, /* none of the above */
    EP_CLI_PATH_PARTS
} ep_cli_path_part;

extern const char *const ep_cli_path_names[EP_CLI_PATH_PARTS];

typedef struct ep_cli_trace_path {
    int64_t parts_ns[EP_CLI_PATH_PARTS]; /* together exactly the duration of the request */
    uint32_t peer;                       /* name of the peer with the longest used exchange on the path, of nodes behind a gateway; 0 none */
    int64_t peer_ns;
} ep_cli_trace_path;

typedef struct ep_cli_trace_peer {
    uint32_t name;
    ep_cli_trace_stat exchange;
    ep_cli_trace_stat network;
    ep_cli_trace_stat serve;
    uint64_t failed;     /* exchanges that ended with an error */
    uint64_t unused;     /* exchanges whose answer was not used (hedging) */
    uint64_t slowest_of; /* requests whose critical path waited longest for this peer */
    int64_t waited_ns;   /* on critical paths */
} ep_cli_trace_peer;

typedef struct ep_cli_trace_expert {
    int32_t layer;
    int32_t expert;
    uint64_t jobs;
    uint64_t rows;
    int64_t busy_ns; /* jobs' time, summed over nodes */
} ep_cli_trace_expert;

typedef struct ep_cli_trace_figures {
    ep_cli_trace_stat stages[EP_CLI_SPAN_KINDS];
    ep_cli_trace_stat network;
    int64_t requests_ns;     /* total of requests */
    uint32_t *requests;      /* spans forward outside of gateways, gateway without the exchange that asked for it; slowest first */
    ep_cli_trace_path *paths; /* [requests_count], in the same order */
    size_t requests_count;
    ep_cli_trace_peer *peers; /* longest wait first */
    size_t peers_count;
    ep_cli_trace_expert *experts; /* most rows first */
    size_t experts_count;
    uint64_t unserved; /* exchanges without their serve */
    uint64_t unasked;  /* serves without their exchange */
    uint64_t traces_count;
} ep_cli_trace_figures;

/* NO_MEMORY. The model is finished. */
ep_err ep_cli_trace_figures_make(const ep_cli_trace_model *model, ep_cli_trace_figures *out_figures,
                                 ep_error *out_error);
void ep_cli_trace_figures_free(ep_cli_trace_figures *figures);

/* trace_path.c: the critical path of one request span. */
void ep_cli_trace_path_find(const ep_cli_trace_model *model, uint32_t request, ep_cli_trace_path *out_path);

#endif
