/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One expert on the device, in one block: gate and up side by side, the gate's columns first, then down, each as the
 * operators multiply by it, [K,N] without a gap: gate_up [H,2I]   gate_up[h][i] = gate[i][h], gate_up[h][I + i] =
 * up[i][h] down    [I,H]    down[i][h] = down of the file[h][i] and for w8a8, whose elements are int8, the scales of
 * their columns: f32 [2I] and [H].
 */
#ifndef EP_BACKENDS_ASCEND_ASCEND_WEIGHTS_H
#define EP_BACKENDS_ASCEND_ASCEND_WEIGHTS_H

#include <pthread.h>

#include "backends/ascend/ascend_device.h"
#include "backends/backend.h"

typedef struct ep_ascend_weights {
    ep_backend_weights base;
    uint8_t *memory; /* of the device */
    size_t bytes;
    size_t down_offset;
    size_t gate_up_scales_offset; /* w8a8 */
    size_t down_scales_offset;
    float *shared_gate; /* [H], host memory; NULL none */
    struct ep_ascend_weights *next;
} ep_ascend_weights;

/* Brings weights to the device, one expert at a time, on a stream of its own. */
typedef struct ep_ascend_uploader {
    pthread_mutex_t lock; /* one upload at a time; below */
    ep_acl_stream stream;
    uint8_t *stage; /* pinned */
    /* Of a lost device. Its streams may still be at work with them, so their memory stays until those are gone. */
    ep_ascend_weights *abandoned;
} ep_ascend_uploader;

ep_err ep_ascend_uploader_init(ep_ascend_uploader *uploader, ep_ascend_device *device, ep_error *out_error);
/* All other streams are gone. Copes with one that was not wholly made. */
void ep_ascend_uploader_fini(ep_ascend_uploader *uploader, ep_ascend_device *device);

/* EP_OK, or UNIMPLEMENTED with what the operators cannot do; looks at shapes and types only. */
ep_err ep_ascend_weights_check(const ep_ascend_device *device, const ep_expert_source *source, ep_error *out_error);
/* Bytes on the device. */
size_t ep_ascend_weights_bytes(const ep_expert_source *source);
/* The calling thread is on the device. Blocks. Errors: NO_MEMORY, DEVICE_LOST. */
ep_err ep_ascend_weights_create(ep_ascend_device *device, ep_ascend_uploader *uploader, const ep_expert_source *source,
                                ep_ascend_weights **out_weights, ep_error *out_error);
/* NULL allowed. */
void ep_ascend_weights_destroy(ep_ascend_device *device, ep_ascend_uploader *uploader, ep_ascend_weights *weights);

#endif
