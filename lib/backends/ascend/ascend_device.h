/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One device of one backend: the libraries, which a process opens and initialises once for all its
 * backends, and the only place where the vendor's codes become ours. A device whose failure cannot
 * be recovered from is lost for good: its jobs end with DEVICE_LOST, so that callers use other
 * copies, and the process goes on.
 */
#ifndef EP_BACKENDS_ASCEND_ASCEND_DEVICE_H
#define EP_BACKENDS_ASCEND_ASCEND_DEVICE_H

#include <stdatomic.h>

#include "backends/ascend/acl_symbols.h"
#include "backends/backend.h"

/* What some releases of the operators, or some devices, cannot do. */
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
    int32_t number; /* among the devices that ASCEND_RT_VISIBLE_DEVICES leaves */
    /* bits of ep_ascend_ability; set before other threads use the device */
    uint32_t abilities;
    bool has_served;               /* its backend was opened successfully */
    _Atomic uint64_t memory_bytes; /* as last read, like the next */
    _Atomic uint64_t free_bytes;
    _Atomic bool lost;
    void (*on_lost)(void *arg, const char *why); /* NULL: nobody asks */
    void *arg;
    /* the last failure that was not a loss is in the log; cleared when a job succeeds */
    _Atomic bool told;
} ep_ascend_device;

/* number must be set. The calling thread works on the device from now on. Errors: UNAVAILABLE (no
 * library, no device) with the reason. */
ep_err ep_ascend_device_open(ep_ascend_device *device, ep_error *out_error);
/* Counts the devices. The runtime stays initialised, as after an open that fails. */
ep_err ep_ascend_device_probe(uint32_t *out_devices, ep_error *out_error);
/* Everything created on the device must be gone. */
void ep_ascend_device_close(ep_ascend_device *device);

/* Call once in each thread that may not have done so, before any other call: the runtime sets the
 * device per thread. A lost device is not called, neither here nor by ep_ascend_device_look:
 * DEVICE_LOST. */
ep_err ep_ascend_device_enter(ep_ascend_device *device, ep_error *out_error);

/*
 * Turns the result of a call into an error; call is its name. A failure goes to out_error, or to
 * the log when that is NULL. A loss is always logged, once.
 */
ep_err ep_ascend_check(ep_ascend_device *device, ep_acl_code code, const char *call,
                       ep_error *out_error);

/* Reads the device's memory figures. The calling thread must be on the device. */
ep_err ep_ascend_device_look(ep_ascend_device *device, ep_error *out_error);

/* Marks the device as lost after a failure that left it in an unknown state: from now on everything
 * ends with DEVICE_LOST. */
void ep_ascend_device_lose(ep_ascend_device *device, const char *reason);

#define EP_ASCEND_CALL(device, out_error, name, ...)                                               \
    ep_ascend_check(device, (device)->acl.name(__VA_ARGS__), #name, out_error)

#endif
