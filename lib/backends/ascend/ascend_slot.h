/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A slot carries a group of jobs through the device. Their rows are gathered into pinned memory,
 * and steps are queued that need no host in between. Several slots are in flight, so that copies of
 * one overlap computing of others.
 *
 *     in stream       rows and the number of rows of each job -> device, event ready
 *     compute stream  after ready: products with gate and up, the activation, products with down,
 *                     event computed
 *     out stream      after computed: results -> pinned memory, event done
 *
 * Products in bf16 and f16 cover all jobs in one GroupedMatmul. Scales of rows need a tensor per
 * job, so w8a8 has one GroupedMatmul per job, and a job's rows begin where each of its tensors is
 * aligned; activation and DynamicQuant in between cover all rows. GroupedMatmulSwigluQuant does
 * these three in one step where it can be used.
 *
 * Buffers only grow, to the largest size needed so far.
 */
#ifndef EP_BACKENDS_ASCEND_ASCEND_SLOT_H
#define EP_BACKENDS_ASCEND_ASCEND_SLOT_H

#include "backends/ascend/ascend_device.h"
#include "backends/ascend/ascend_weights.h"
#include "backends/backend.h"

/* far longer than any job takes; after that a device counts as lost */
#define EP_ASCEND_TIMEOUT_MS 60000
#define EP_ASCEND_ROWS_MAX 1024    /* of a group with several jobs */
#define EP_ASCEND_W8A8_JOBS_MAX 32 /* of a group */

typedef struct ep_ascend_streams {
    ep_acl_stream in;
    ep_acl_stream compute;
    ep_acl_stream out;
} ep_ascend_streams;

enum {
    EP_ASCEND_STEPS_MAX = 2 * EP_ASCEND_W8A8_JOBS_MAX + 2,
    EP_ASCEND_LISTS_MAX = 12 * EP_ASCEND_W8A8_JOBS_MAX, /* two products of six lists */
    /* seven for the fused operator, and the counts of the product */
    EP_ASCEND_TENSORS_MAX = 8 * EP_ASCEND_W8A8_JOBS_MAX + 8,
};

/* An operator whose first phase is done. */
typedef struct ep_ascend_step {
    ep_acl_executor *executor; /* NULL: already launched */
    uint64_t workspace_bytes;
    ep_acl_code(*launch) EP_ACL_LAUNCH_PARAMETERS;
    const char *name;
} ep_ascend_step;

typedef struct ep_ascend_slot {
    ep_job *jobs[EP_ACL_GROUPS_MAX]; /* all of the same kind (ep_ascend_weights_alike) */
    uint32_t jobs_count;
    uint32_t places[EP_ACL_GROUPS_MAX]; /* each job's first row */
    uint32_t rows_count;                /* with gaps between jobs */
    ep_err result;                      /* result of the launch */
    bool launched;                      /* something was queued */

    ep_acl_event ready;
    ep_acl_event computed;
    ep_acl_event done;
    uint8_t *stage; /* pinned: counts and rows, then results */
    size_t stage_bytes;
    uint8_t *memory; /* of the device: counts and rows, gate and up, inner rows, results */
    size_t memory_bytes;
    void *workspace;
    size_t workspace_bytes;
    float *factors; /* [rows] sigmoid of the shared gate, 1 without; host */
    float *wide;    /* [H] */
    size_t factors_count;
    size_t wide_count;

    /* Objects of the present launch: they live until the streams have passed it. */
    ep_acl_tensor *tensors[EP_ASCEND_TENSORS_MAX];
    uint32_t tensors_count;
    ep_acl_tensor_list *lists[EP_ASCEND_LISTS_MAX];
    uint32_t lists_count;
    ep_ascend_step steps[EP_ASCEND_STEPS_MAX];
    uint32_t steps_count;
    struct ep_ascend_slot *next;
} ep_ascend_slot;

/* NULL allowed; destroyed by force when the device is lost. */
void ep_ascend_stream_destroy(ep_ascend_device *device, ep_acl_stream stream);

ep_err ep_ascend_slot_init(ep_ascend_slot *slot, ep_ascend_device *device, ep_error *out_error);
/* No stream may work on it any more. Also accepts a zeroed or partly created slot. */
void ep_ascend_slot_fini(ep_ascend_slot *slot, ep_ascend_device *device);

/* How many jobs with such weights a group may have. */
uint32_t ep_ascend_slot_jobs_max(const ep_backend_weights *weights);
/* Gathers the jobs' rows and queues all steps; sets result. If it fails with launched set, the
 * device is lost. */
void ep_ascend_slot_launch(ep_ascend_slot *slot, ep_ascend_device *device,
                           const ep_ascend_streams *streams);
/* Waits for the slot's last step, unless the device is lost, and writes the jobs' results. Errors:
 * DEVICE_LOST, and those of the launch. */
ep_err ep_ascend_slot_finish(ep_ascend_slot *slot, ep_ascend_device *device);

#endif
