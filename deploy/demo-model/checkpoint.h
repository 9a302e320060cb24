/* SPDX-License-Identifier: Apache-2.0 */
/* Writes the demo model as a Hugging Face Mixtral checkpoint: config.json, sharded bf16
 * safetensors, index.
 */
#ifndef DEMO_MODEL_CHECKPOINT_H
#define DEMO_MODEL_CHECKPOINT_H

#include "model.h"

/* Rounds every weight to bf16 (nearest even) in place, so that what is measured is what is
 * written. */
void checkpoint_round(struct weights *weights);
/* Writes into an existing folder; 0, or -1 after printing what failed. The weights must have been
 * rounded. */
int checkpoint_write(const struct weights *weights, const char *folder);

#endif
