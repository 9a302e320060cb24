/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What quantising an expert costs its results: rows of some of its inner units, with the file's
 * weights and with those made of them, for drawn inputs.
 *
 * Threads  pure but for reading the checkpoint.
 */
#ifndef EP_EXPERTD_WEIGHT_JUDGE_H
#define EP_EXPERTD_WEIGHT_JUDGE_H

#include "model/model.h"

typedef struct ep_weight_judgement {
    double weights; /* as ep_expert_data.quant_error, of these units' weights */
    /* Root mean square of the error over that of the rows; biases of down left out. 0 where the
     * file's weights make rows of zeros or beyond f32; infinite where only those made of them do.
     */
    double outputs;
} ep_weight_judgement;

/* Of a checkpoint that is quantised. The same inputs for each call. Errors: those of
 * ep_checkpoint_read_expert. */
ep_err ep_weight_judge(const ep_checkpoint *checkpoint, uint32_t layer, uint32_t expert,
                       ep_weight_judgement *out_judgement, ep_error *out_error);

#endif
