/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A rank program with two micro-batches, layer after layer: dispatch, experts, combine. A layer's
 * dispatch of a micro-batch comes after its combine of the layer before. Run one thing after the
 * other, or with the exchange of one micro-batch beside the experts of the other.
 *
 * Each rank's experts run on a device of its own: the rank computes rows of small experts and then
 * waits until GROUP_PIPELINE_DEVICE_US are over, whatever the number of rows, as where the time is
 * that of reading weights. It is long enough that this host's own work, one core for all ranks,
 * does not count.
 *
 * Threads    one, and the group's that calls back.
 */
#ifndef EP_BENCH_GROUP_PIPELINE_H
#define EP_BENCH_GROUP_PIPELINE_H

#include <stdint.h>

#include "bench/layer_local.h"

#define GROUP_PIPELINE_TOKENS 64 /* of a micro-batch */
#define GROUP_PIPELINE_LAYERS 12
#define GROUP_PIPELINE_DEVICE_US 100000 /* the experts of a layer, for one micro-batch */

typedef struct group_pipeline group_pipeline;

/* Of each rank: its expert is the one of its number, of ranks many; K is 2. x: bf16 [2 *
 * GROUP_PIPELINE_TOKENS, hidden], ids and scales [.., K]. Ends the program when it fails. */
group_pipeline *group_pipeline_open(uint32_t rank, uint32_t ranks, const char *const *addresses,
                                    uint16_t port, layer_local *local, uint32_t hidden,
                                    const uint16_t *x, const int32_t *ids, const float *scales);
void group_pipeline_close(group_pipeline *p);
/* All layers of both micro-batches. */
void group_pipeline_exchange(group_pipeline *p); /* without the experts */
void group_pipeline_compute(group_pipeline *p);  /* these alone */
void group_pipeline_blocking(group_pipeline *p);
/* Ends the program unless its sums are the blocking form's bit for bit. */
void group_pipeline_overlapped(group_pipeline *p);

#endif
