/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One expert on the device, in one block: gate and up side by side, the gate's columns first, then
 * down, each as the operators multiply by it, without gaps:
 *
 *     gate_up  [H,2I]  gate_up[h][i] = gate[i][h], gate_up[h][I + i] = up[i][h]
 *     down     [I,H]   down[i][h] = down of the file[h][i]
 *     scales   f32 [2I] and [H], of w8a8: one per column
 *     biases   [2I] and [H]: f32 for bf16 weights, f16 for f16, bf16 for w8a8; 0 where the expert
 *              has only others
 *
 * Where the fused operator is used, gate and up of w8a8 are in FRACTAL_NZ: [2I/32][H/16][16][32].
 */
#ifndef EP_BACKENDS_ASCEND_ASCEND_WEIGHTS_H
#define EP_BACKENDS_ASCEND_ASCEND_WEIGHTS_H

#include <pthread.h>

#include "backends/ascend/ascend_device.h"
#include "backends/backend.h"

/* Offsets of the parts of a matrix in the block; 0 for parts that it does not have. */
typedef struct ep_ascend_matrix {
    size_t values;
    size_t scales;
    size_t biases;
} ep_ascend_matrix;

typedef struct ep_ascend_weights {
    ep_backend_weights base;
    ep_activation activation;
    ep_activation_numbers numbers;
    bool has_biases;
    bool is_fused;   /* GroupedMatmulSwigluQuant computes gate and up */
    uint8_t *memory; /* on the device */
    size_t bytes;
    ep_ascend_matrix gate_up;
    ep_ascend_matrix down;
    float *shared_gate; /* [H], host memory; NULL none */
    /* [H], host memory: w8a8 with biases only, for rows whose scales the device cannot compute */
    float *down_bias;
    struct ep_ascend_weights *next;
} ep_ascend_weights;

/* Loads weights to the device, one expert at a time, on its own stream. */
typedef struct ep_ascend_uploader {
    pthread_mutex_t lock; /* one upload at a time; guards the fields below */
    ep_acl_stream stream;
    uint8_t *stage; /* pinned */
    /* Weights of a lost device. Its streams may still use their memory, so that stays until the
     * streams are gone. */
    ep_ascend_weights *abandoned;
} ep_ascend_uploader;

ep_err ep_ascend_uploader_init(ep_ascend_uploader *uploader, ep_ascend_device *device,
                               ep_error *out_error);
/* All other streams must be gone. Also accepts an uploader that was created only in part. */
void ep_ascend_uploader_fini(ep_ascend_uploader *uploader, ep_ascend_device *device);

/* EP_OK, or UNIMPLEMENTED with what the operators cannot do; looks only at shapes and types. */
ep_err ep_ascend_weights_check(const ep_ascend_device *device, const ep_expert_source *source,
                               ep_error *out_error);
/* Whether jobs of both can be computed together: equal shapes, types and operators. */
bool ep_ascend_weights_alike(const ep_backend_weights *a, const ep_backend_weights *b);
/* Bytes on the device. */
size_t ep_ascend_weights_bytes(const ep_expert_source *source);
/* The calling thread must be on the device. Blocks. Errors: NO_MEMORY, DEVICE_LOST. */
ep_err ep_ascend_weights_create(ep_ascend_device *device, ep_ascend_uploader *uploader,
                                const ep_expert_source *source, ep_ascend_weights **out_weights,
                                ep_error *out_error);
/* NULL allowed. */
void ep_ascend_weights_destroy(ep_ascend_device *device, ep_ascend_uploader *uploader,
                               ep_ascend_weights *weights);

#endif
