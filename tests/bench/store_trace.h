/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which experts a model's layers use, step by step, made like what is measured on real models: a
 * lognormal popularity of the experts per layer and domain, K distinct experts of a token drawn by
 * it, a slot that often keeps the expert of the sequence's last token, domains that come and go,
 * popularity that drifts. A second family has kinds of tokens besides, more or less frequent in
 * each domain: what a token uses in one layer says something of the next. A step passes all layers
 * in order; a visit is one layer of one step.
 */
#ifndef EP_BENCH_STORE_TRACE_H
#define EP_BENCH_STORE_TRACE_H

#include <stdbool.h>
#include <stdint.h>

typedef struct trace_setting {
    const char *name;
    uint32_t layers;
    uint32_t experts;
    uint32_t top_k;
    uint32_t sequences; /* tokens of a step */
    uint32_t domains;
    float sigma; /* of the log popularity */
    float reuse; /* chance that a slot keeps its expert */
    float drift; /* part of log popularity drawn anew after each request of all sequences */
    uint32_t request_steps; /* a sequence's tokens of one request */
    uint32_t prefill;       /* tokens of a request's first step; 1: as the others */
    /* all sequences keep their domain for so many requests; 0: each draws its own for each
     * request */
    uint32_t stay_requests;
    uint32_t steps;
    uint32_t types;   /* kinds of tokens: each has experts of its own in all layers; 0: none */
    float type_sigma; /* of the log popularity that a kind adds to its domain's */
} trace_setting;

typedef struct trace_visit {
    uint32_t layer;
    uint32_t first; /* into experts */
    uint32_t count;
} trace_visit;

typedef struct store_trace {
    trace_setting setting;
    trace_visit *visits;
    uint32_t visits_count;
    uint32_t *experts; /* distinct ones of each visit */
    uint32_t *rows;    /* of the visit, for each of them */
    uint32_t uses_count;
} store_trace;

/* A setting drawn at random from the ranges that models and loads span; has_types: of the family
 * with kinds of tokens. */
trace_setting store_trace_draw(uint64_t seed, bool has_types);
store_trace *store_trace_make(const trace_setting *setting, uint64_t seed);
void store_trace_free(store_trace *trace);

#endif
