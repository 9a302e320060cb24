/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The devices of this node: one instance of the backend for each device that its driver shows, or a
 * single instance if the backend knows no devices. A device that cannot be opened counts as lost,
 * as long as another one can be opened.
 *
 * Threads    open and close on one thread, the others on any.
 */
#ifndef EP_EXPERTD_NODE_DEVICES_H
#define EP_EXPERTD_NODE_DEVICES_H

#include <stdatomic.h>

#include "backends/backend.h"

typedef struct ep_node_devices ep_node_devices;

typedef struct ep_node_device {
    ep_backend *backend;  /* NULL: it could not be opened */
    uint32_t store_index; /* its number among the opened instances */
    _Atomic bool is_lost;
    char lost_why[EP_ERROR_TEXT_BYTES]; /* written before is_lost */
    ep_node_devices *owner;
} ep_node_device;

struct ep_node_devices {
    uint32_t count; /* devices; 0: the backend knows none */
    uint32_t backends_count;
    ep_backend *backends[EP_BACKEND_DEVICES_MAX];
    ep_node_device devices[EP_BACKEND_DEVICES_MAX];
    void (*on_lost)(void *arg); /* called on any thread, must not block */
    void *arg;
};

/* config is for each device. Set on_lost and arg before. Errors: those of the backend's open, when
 * no device can be opened or the configuration does not fit one; then nothing is open. */
ep_err ep_node_devices_open(ep_node_devices *devices, const ep_backend_ops *ops,
                            const ep_backend_config *config, ep_error *out_error);
/* Zeroed allowed. */
void ep_node_devices_close(ep_node_devices *devices);

/* Bit d: device d is lost. */
uint64_t ep_node_devices_lost(const ep_node_devices *devices);
/* Writes "1 of 2 devices lost: device 1: .." with the first lost one's reason, or "2 devices". */
void ep_node_devices_describe(const ep_node_devices *devices, char *out, size_t bytes);

#endif
