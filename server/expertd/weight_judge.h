/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Measures how much quantising an expert changes its results: computes rows for random inputs, over
 * some of the inner units, with the file's weights and with the quantised ones.
 *
 * Threads  pure, except that it reads the checkpoint.
 */
#ifndef EP_EXPERTD_WEIGHT_JUDGE_H
#define EP_EXPERTD_WEIGHT_JUDGE_H

#include "model/model.h"

typedef struct ep_weight_judgement {
    double weights; /* as ep_expert_data.quant_error, for the weights of these units */
    /* Root mean square of the error relative to that of the rows, without biases of down. 0 where
     * the file's weights make rows of zeros or beyond f32; infinite where only the others do. */
    double outputs;
} ep_weight_judgement;

/* checkpoint is one with weight_quant. Every call uses the same inputs. Errors: those of
 * ep_checkpoint_read_expert. */
ep_err ep_weight_judge(const ep_checkpoint *checkpoint, uint32_t layer, uint32_t expert,
                       ep_weight_judgement *out_judgement, ep_error *out_error);

#endif
