/* SPDX-License-Identifier: Apache-2.0 */
/* A layer as a service: real nodes of one model, a client of theirs, drawn tokens, and calls of
 * them. What fails ends the program. */
#ifndef EP_BENCH_SERVICE_H
#define EP_BENCH_SERVICE_H

#include "bench/bench_report.h"
#include "expertd/client.h"
#include "moe/batch.h"
#include "support/process.h"

#define BENCH_MODEL "bench"
#define BENCH_PATIENCE_MS 120000

typedef struct bench_node {
    const char *name;
    const char *checkpoint;
    const char *experts;            /* NULL: all */
    const char *keys;               /* more lines of its configuration; NULL: none */
    const char *address;            /* where it listens; NULL: 127.0.0.1 */
    const char *netns;              /* a network namespace; NULL: ours */
    const char *program;            /* NULL: expertd */
    const char *const *environment; /* NULL, or NULL-terminated "NAME=value" */
} bench_node;

/* Of `name` in dir, until it listens; it may still load. It has probes, and neither admin port nor
 * door. */
void bench_node_start(const bench_node *node, const char *dir, ep_test_process *out_process);
/* Any daemon; of node it takes name, netns, program, environment. */
void bench_daemon_start(const bench_node *node, const char *dir, const char *config,
                        ep_test_process *out_process);
/* Of nodes at urls, ready. change (may be NULL) edits the configuration first. */
ep_client *bench_client_open(const char *const *urls, size_t count,
                             void (*change)(ep_client_config *config));
/* The same of processes. */
ep_client *bench_client_of(const ep_test_process *nodes, size_t count,
                           void (*change)(ep_client_config *config));

/* A series of a node's /metrics, named with its labels. */
double bench_metric(const ep_test_process *node, const char *series);

/* bf16 from -1 to 1. */
void bench_draw_rows(uint64_t *seed, size_t count, uint16_t *out);
/* [T,K]: experts of a token differ; scales of 1 / K. */
void bench_draw_routing(uint64_t *seed, uint32_t tokens, uint32_t top_k, uint32_t experts,
                        int32_t *out_ids, float *out_scales);

typedef struct bench_tokens {
    uint32_t tokens;
    uint32_t top_k;
    uint32_t hidden;
    const uint16_t *x;   /* [T,H] bf16 */
    const int32_t *ids;  /* [T,K]; NULL: none yet */
    const float *scales; /* [T,K]; NULL: none yet */
} bench_tokens;

ep_batch bench_batch(const bench_tokens *of);
/* Of layer 0, with ten minutes. */
ep_moe_args bench_args(const bench_tokens *of);
/* y [T,H] bf16; microseconds. */
double bench_call_us(ep_client *client, const ep_moe_args *args, uint16_t *y);

#endif
