/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One device of one backend: the libraries, which a process opens and initialises once for all its
 * backends, and the one place where the vendor's codes become ours. A device that failed in a way
 * nobody can work with any more is lost for good: its jobs end with DEVICE_LOST, so that callers go
 * to other copies, and the process lives on.
 */
#ifndef EP_BACKENDS_ASCEND_ASCEND_DEVICE_H
#define EP_BACKENDS_ASCEND_ASCEND_DEVICE_H

#include <stdatomic.h>

#include "backends/ascend/acl_symbols.h"
#include "backends/backend.h"

/* What not every release of the operators does, or not on every device. */
typedef enum ep_ascend_ability {
    EP_ASCEND_BIASES = 1,
    EP_ASCEND_CLIPPED = 2, /* ClippedSwiglu */
    EP_ASCEND_GELU = 4,    /* GeGluV3 */
    EP_ASCEND_W8A8 = 8,
    EP_ASCEND_W8A8_BIASES = 16,
    EP_ASCEND_FUSED = 32, /* GroupedMatmulSwigluQuant */
} ep_ascend_ability;

typedef struct ep_ascend_device {
    ep_acl_symbols acl;
    int32_t number;                /* among those that ASCEND_RT_VISIBLE_DEVICES leaves */
    uint32_t abilities;            /* bits of ep_ascend_ability; set before others share it */
    bool has_served;               /* its backend was opened */
    _Atomic uint64_t memory_bytes; /* of the last look */
    _Atomic uint64_t free_bytes;
    _Atomic bool lost;
    void (*on_lost)(void *arg, const char *why); /* NULL: nobody asks */
    void *arg;
    /* the log has the last failure that was not a loss; cleared when a job is well again */
    _Atomic bool told;
} ep_ascend_device;

/* number is set. Errors: UNAVAILABLE (no library, no device) with the reason. The calling thread
 * works on the device from now on. */
ep_err ep_ascend_device_open(ep_ascend_device *device, ep_error *out_error);
/* The runtime stays initialised, as after an open that fails. */
ep_err ep_ascend_device_probe(uint32_t *out_devices, ep_error *out_error);
/* Everything made on the device is gone by now. */
void ep_ascend_device_close(ep_ascend_device *device);

/* Once in each thread that is not known to have done so, before any other call: a device belongs to
 * a thread. A lost device is not asked, nor by ep_ascend_device_look: DEVICE_LOST. */
ep_err ep_ascend_device_enter(ep_ascend_device *device, ep_error *out_error);

/*
 * What a call returned, as ours; call names it. A failure goes into out_error, or into the log when
 * that is NULL; a loss goes into the log in any case, once.
 */
ep_err ep_ascend_check(ep_ascend_device *device, ep_acl_code code, const char *call,
                       ep_error *out_error);

/* Asks for the device's memory. The calling thread is on the device. */
ep_err ep_ascend_device_look(ep_ascend_device *device, ep_error *out_error);

/* From now on everything ends with DEVICE_LOST: a failure that left the device in a state nobody
 * knows. */
void ep_ascend_device_lose(ep_ascend_device *device, const char *reason);

#define EP_ASCEND_CALL(device, out_error, name, ...)                                               \
    ep_ascend_check(device, (device)->acl.name(__VA_ARGS__), #name, out_error)

#endif
