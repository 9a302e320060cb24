/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where an expert's matrices are in the files, decided by names, types and shapes, before anything
 * is read.
 *
 * A matrix has values, perhaps scales, perhaps a bias. Each is a run of bytes in a tensor: the
 * whole tensor, or the slab of expert e in a tensor that stacks all experts of a layer. gate and up
 * may share a run (a fused tensor): then row n of the matrix is row first + n * step of the run, or
 * that column if the run is transposed.
 *
 * Threads  pure.
 */
#ifndef EP_MODEL_EXPERT_PLAN_H
#define EP_MODEL_EXPERT_PLAN_H

#include "model/weight_container.h"

/* of three matrices: values, scales, factor, zero points, order, bias; and the shared gate */
#define EP_PLAN_RUNS_MAX 19

/* A range of a tensor that is read and hashed. */
typedef struct ep_plan_run {
    const ep_checkpoint_entry *entry;
    size_t offset;
    size_t bytes;
} ep_plan_run;

typedef struct ep_plan_matrix {
    bool present;
    uint32_t rows; /* of the matrix: outputs */
    uint32_t columns;
    int values; /* indexes of runs, like the next ones; -1 none */
    int scales;
    int factor;
    int zeros;
    int order;       /* the group of each column, int32 */
    bool is_ordered; /* the columns of a group need not be contiguous */
    int bias;
    int offset; /* offsets of w8a8, which must all be zero; used instead of zero points */
    ep_weight_container container;
    uint32_t first;    /* where row 0 is in the run */
    uint32_t step;     /* 1, or 2 where gate and up rows alternate */
    uint32_t run_rows; /* outputs in the run; gate and up together if they share it */
    bool transposed;   /* the run is [columns, run_rows] */
} ep_plan_matrix;

typedef struct ep_expert_plan {
    ep_weight_format format;
    ep_weight_format down_format; /* NONE: the same */
    uint32_t inner;
    ep_plan_matrix matrices[EP_MATRIX_COUNT];
    ep_plan_run runs[EP_PLAN_RUNS_MAX]; /* each run once, in the order of reading and hashing */
    int runs_count;
    bool has_places; /* the columns of gate and up are in another order than the expert's inputs */
    int shared_gate; /* index of its run; -1 none */
    ep_dtype shared_gate_dtype;
    ep_dtype bias_dtype;
} ep_expert_plan;

/*
 * Plans expert index ([0,E) routed, [E,E+S) shared) of a layer; shape is of the checkpoint's own
 * list. Errors: NOT_FOUND (tensor named), BAD_FILE (file, tensor, dtype or shape, allowed),
 * UNIMPLEMENTED.
 */
ep_err ep_expert_plan_make(const ep_checkpoint *checkpoint, const ep_layer_shape *shape,
                           uint32_t index, ep_expert_plan *out_plan, ep_error *out_error);

#endif
