/* SPDX-License-Identifier: Apache-2.0 */
/* A layer computed in this very process: the same kernels and combine, no service. What a remote
 * layer is compared with. */
#ifndef EP_BENCH_LAYER_LOCAL_H
#define EP_BENCH_LAYER_LOCAL_H

#include "backends/backend.h"
#include "model/model.h"
#include "moe/batch.h"

typedef struct layer_local layer_local;

/* Loads every expert of the layer into a `cpu` backend with the given threads. Numerics:
 * $EXPERTD_NUMERICS auto, or portable. */
ep_err layer_local_open(const char *checkpoint, uint32_t layer, uint32_t threads,
                        layer_local **out_local, ep_error *out_error);
/* The same with experts first .. first + count - 1 only; the rows of a batch must not want
 * others. */
ep_err layer_local_open_share(const char *checkpoint, uint32_t layer, uint32_t first,
                              uint32_t count, uint32_t threads, layer_local **out_local,
                              ep_error *out_error);
void layer_local_close(layer_local *local);
const ep_layer_shape *layer_local_shape(const layer_local *local);
/* Combined form. out [T,H] of batch->out_dtype, contiguous. */
ep_err layer_local_run(layer_local *local, const ep_batch *batch, void *out);
/* Rows that come sorted by expert, counts[i] of the i-th expert of the share: x and out [sum of
 * counts, H] of bf16. */
ep_err layer_local_rows(layer_local *local, const uint32_t *counts, const void *x, void *out);

#endif
