/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Figures of a span model: per stage, per peer and per expert, where the time of a request went,
 * and what failed. `trace report` and the page of `trace export` show them. Pure. Times are
 * nanoseconds; percentiles are by nearest rank.
 */
#ifndef EP_CLI_TRACE_FIGURES_H
#define EP_CLI_TRACE_FIGURES_H

#include "trace/trace_model.h"

#define EP_CLI_TRACE_FIRST_MAX 5
#define EP_CLI_TRACE_BINS 100

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
    EP_CLI_PATH_NETWORK, /* the part of an exchange outside of its serve */
    EP_CLI_PATH_DECODE,
    EP_CLI_PATH_QUEUE,
    EP_CLI_PATH_JOB,
    EP_CLI_PATH_REPLY,
    EP_CLI_PATH_NODE,     /* a serve outside of decode, queue, job and reply */
    EP_CLI_PATH_GATEWAY,  /* a gateway span outside of the layer calls in it */
    EP_CLI_PATH_UNSERVED, /* an exchange whose serve was not recorded */
    EP_CLI_PATH_LATE, /* the wait for an answer that was not used, until another copy was asked */
    EP_CLI_PATH_COMBINE,
    EP_CLI_PATH_CLIENT, /* none of the above */
    EP_CLI_PATH_PARTS
} ep_cli_path_part;

extern const char *const ep_cli_path_names[EP_CLI_PATH_PARTS];

typedef struct ep_cli_trace_path {
    int64_t parts_ns[EP_CLI_PATH_PARTS]; /* together exactly the duration of the request */
    /* name of the peer with the longest used exchange on the path (behind a gateway: of the nodes);
     * 0: none */
    uint32_t peer;
    int64_t peer_ns;
    uint32_t late_peer; /* name of the peer with the longest part of EP_CLI_PATH_LATE; 0 none */
    int64_t late_ns;
} ep_cli_trace_path;

/* Stages of a call: the parts of its critical path under the names of `expertctl bench`. */
typedef enum ep_cli_stage {
    EP_CLI_STAGE_PACK, /* plan, pack */
    EP_CLI_STAGE_WIRE, /* network */
    EP_CLI_STAGE_QUEUE,
    EP_CLI_STAGE_COMPUTE, /* job */
    EP_CLI_STAGE_NODE,    /* decode, reply, node */
    EP_CLI_STAGE_COMBINE,
    EP_CLI_STAGE_CLIENT,
    EP_CLI_STAGE_GATEWAY,
    EP_CLI_STAGE_LATE,
    EP_CLI_STAGE_UNSERVED,
    EP_CLI_STAGES
} ep_cli_stage;

extern const char *const ep_cli_stage_names[EP_CLI_STAGES];
extern const ep_cli_stage ep_cli_stage_of[EP_CLI_PATH_PARTS];

typedef struct ep_cli_trace_peer {
    uint32_t name;
    bool gateway; /* the peer is a gateway; it is not compared with nodes */
    ep_cli_trace_stat exchange;
    ep_cli_trace_stat network;
    ep_cli_trace_stat serve;
    uint64_t failed;     /* exchanges that ended with an error */
    uint64_t unused;     /* exchanges whose answer was not used (hedging) */
    uint64_t slowest_of; /* requests whose critical path waited longest for this peer */
    int64_t waited_ns;   /* on critical paths */
    /* on critical paths: EP_CLI_PATH_LATE */
    int64_t late_ns;
} ep_cli_trace_peer;

typedef struct ep_cli_trace_expert {
    int32_t layer;
    int32_t expert;
    uint64_t jobs;
    uint64_t rows;
    int64_t busy_ns; /* jobs' time, summed over nodes */
} ep_cli_trace_expert;

/* Calls or frames that ended with one status. */
typedef struct ep_cli_trace_failure {
    ep_err status;
    bool frames; /* else calls */
    uint64_t count;
    uint64_t saved; /* frames whose call did not fail: other copies answered */
    uint32_t first[EP_CLI_TRACE_FIRST_MAX]; /* the first calls, as indexes of requests */
    size_t first_count;
} ep_cli_trace_failure;

/* The node that stands out: the median or p99 of its exchanges is compared with that of the median
 * one of the other nodes. */
typedef struct ep_cli_trace_slow {
    uint32_t peer; /* index of peers; EP_CLI_TRACE_NONE: none stands out */
    uint32_t against;
    double times;
    bool p99;
    bool compared; /* there were two nodes with enough frames */
} ep_cli_trace_slow;

/* Calls that began in one piece of the recording's time. */
typedef struct ep_cli_trace_bin {
    int64_t begin_ns;
    int64_t end_ns;
    ep_cli_trace_stat calls;
    uint64_t failed;
    uint64_t hedged; /* calls with an answer that was not used */
} ep_cli_trace_bin;

typedef struct ep_cli_trace_figures {
    ep_cli_trace_stat stages[EP_CLI_SPAN_KINDS];
    ep_cli_trace_stat network;
    ep_cli_trace_stat calls;               /* requests */
    int64_t stages_ns[EP_CLI_STAGES];      /* of all calls; together requests_ns */
    int64_t slow_stages_ns[EP_CLI_STAGES]; /* of the slowest calls */
    size_t slow_count;                     /* the slowest hundredth, at least one */
    uint64_t failed;                       /* calls */
    uint64_t unused;                       /* exchanges whose answer was not used */
    ep_cli_trace_failure *failures;        /* calls first, most first */
    size_t failures_count;
    ep_cli_trace_slow slow;
    /* without gaps, from the first call's begin to the last one's */
    ep_cli_trace_bin bins[EP_CLI_TRACE_BINS];
    size_t bins_count;
    /* [spans_count]: the request a span belongs to, as index of requests; EP_CLI_TRACE_NONE */
    uint32_t *owner_of;
    uint32_t *in_time;   /* [requests_count]: indexes of requests, by begin */
    bool *hedged;        /* [requests_count]: an answer was not used */
    int64_t requests_ns; /* total of requests */
    /* indexes of forward spans outside of gateways, and of gateway spans without their exchange;
     * slowest first */
    uint32_t *requests;
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

/* The model must be finished. NO_MEMORY. */
ep_err ep_cli_trace_figures_make(const ep_cli_trace_model *model, ep_cli_trace_figures *out_figures,
                                 ep_error *out_error);
void ep_cli_trace_figures_free(ep_cli_trace_figures *figures);

/* trace_path.c: the critical path of one request span. */
void ep_cli_trace_path_find(const ep_cli_trace_model *model, uint32_t request,
                            ep_cli_trace_path *out_path);

/* trace_calls.c: fills in the figures of calls from requests, paths and peers. values: scratch of
 * [requests_count]. NO_MEMORY. */
ep_err ep_cli_trace_calls_make(const ep_cli_trace_model *model, ep_cli_trace_figures *figures,
                               int64_t *values, ep_error *out_error);
/* Sorts values. */
ep_cli_trace_stat ep_cli_trace_stat_of(int64_t *values, size_t count);

#endif
