/* SPDX-License-Identifier: Apache-2.0 */
/* Batches as files: for expertctl forward, and for the oracle that says what it must give. */
#ifndef EP_TESTS_INTEGRATION_CLUSTER_BATCH_H
#define EP_TESTS_INTEGRATION_CLUSTER_BATCH_H

#include "support/cluster.h"

/* Two of 8 experts for each token. is_wild: x of f32, some of it denormal, and always the same
 * scales; else of bf16. */
void batch_write(const char *path, uint32_t tokens, uint32_t hidden, bool is_wild, uint64_t seed);
void batch_run_oracle(const char *model_dir, uint32_t layer, const char *in, const char *out,
                      const char *more_options);

#endif
