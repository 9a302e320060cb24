/* SPDX-License-Identifier: Apache-2.0 */
/* Random but valid batches of every form, for the property tests of lib/moe and lib/wire. One seed
 * gives one batch. */
#ifndef TESTS_UNIT_MOE_RANDOM_BATCH_H
#define TESTS_UNIT_MOE_RANDOM_BATCH_H

#include "moe/batch.h"

typedef struct random_batch {
    ep_batch batch;
    ep_layer_shape shape;
    uint64_t state;
    /* owned */
    void *storage[16];
    unsigned storage_count;
} random_batch;

uint32_t random_below(uint64_t *state, uint32_t bound);
float random_float(uint64_t *state); /* -2..2, sometimes 0, tiny or large */

void random_batch_init(random_batch *rb, uint64_t seed);
void random_batch_fini(random_batch *rb);
/* Memory freed with the batch, zeroed. */
void *random_batch_alloc(random_batch *rb, size_t bytes);

/* Element i of data, and x as a value of dtype: bf16, f16 or f32. */
float random_batch_element(const void *data, ep_dtype dtype, size_t i);
float random_batch_rounded(float x, ep_dtype dtype);

#endif
