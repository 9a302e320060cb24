/* SPDX-License-Identifier: Apache-2.0 */
#include "expertd/node_devices.h"

#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/log.h"

static void lose(ep_node_device *device, const char *why)
{
    snprintf(device->lost_why, sizeof(device->lost_why), "%s", why);
    atomic_store(&device->is_lost, true);
}

static void on_lost(void *arg, const char *why)
{
    ep_node_device *device = arg;
    lose(device, why);
    device->owner->on_lost(device->owner->arg);
}

/* Counts a device as lost, since another one can be opened. */
static void leave_out(ep_node_device *device, uint32_t number, const ep_backend_ops *ops,
                      const ep_error *error)
{
    if (atomic_load(&device->is_lost)) {
        return; /* the backend has given its reason */
    }
    lose(device, error->text);
    ep_log(
        EP_LOG_ERROR, "device-lost", EP_KV(backend, ops->name), EP_KV(device, number),
        EP_KV(reason, error->text), EP_KV(effect, "the node starts without it"),
        EP_KV(hint, "restart expertd once it is well, or without it by ASCEND_RT_VISIBLE_DEVICES"));
}

static ep_err open_all(ep_node_devices *devices, const ep_backend_ops *ops,
                       ep_backend_config *config, uint32_t count, ep_error *out_error)
{
    ep_error errors[EP_BACKEND_DEVICES_MAX];
    ep_err first = EP_OK;
    for (uint32_t d = 0; d < count; d++) {
        ep_node_device *device = &devices->devices[d];
        device->owner = devices;
        config->device = d;
        config->on_lost = on_lost;
        config->arg = device;
        const ep_err err = ops->open(config, &device->backend, &errors[d]);
        if (err == EP_OK) {
            device->store_index = devices->backends_count;
            devices->backends[devices->backends_count++] = device->backend;
            continue;
        }
        if (first == EP_OK) {
            first = err;
            *out_error = errors[d];
        }
        if (err == EP_ERR_INVALID_ARGUMENT) { /* the configuration does not fit */
            *out_error = errors[d];
            return err;
        }
    }
    for (uint32_t d = 0; devices->backends_count > 0 && d < count; d++) {
        if (devices->devices[d].backend == NULL) {
            leave_out(&devices->devices[d], d, ops, &errors[d]);
        }
    }
    return devices->backends_count > 0 ? EP_OK : first;
}

ep_err ep_node_devices_open(ep_node_devices *devices, const ep_backend_ops *ops,
                            const ep_backend_config *config, ep_error *out_error)
{
    ep_backend_config each = *config;
    uint32_t count;
    ep_err err = EP_OK;
    /* they may hold what a backend tried before left */
    memset(devices->devices, 0, sizeof(devices->devices));
    if (ops->probe == NULL || ops->probe(&count, out_error) != EP_OK) {
        count = 1; /* the driver has failed: open reports why */
    }
    if (count > EP_BACKEND_DEVICES_MAX) {
        err = ep_error_set(
            out_error, EP_ERR_UNAVAILABLE,
            "the driver shows %u devices, allowed: up to %d; ASCEND_RT_VISIBLE_DEVICES picks some",
            count, EP_BACKEND_DEVICES_MAX);
    }
    err = err == EP_OK ? open_all(devices, ops, &each, count, out_error) : err;
    if (err != EP_OK) {
        ep_node_devices_close(devices);
        return err;
    }
    devices->count = ops->device_read != NULL ? count : 0;
    return EP_OK;
}

void ep_node_devices_close(ep_node_devices *devices)
{
    for (uint32_t b = 0; b < devices->backends_count; b++) {
        devices->backends[b]->ops->close(devices->backends[b]);
    }
    devices->backends_count = 0;
}

uint64_t ep_node_devices_lost(const ep_node_devices *devices)
{
    uint64_t lost = 0;
    for (uint32_t d = 0; d < devices->count; d++) {
        lost |= (uint64_t)atomic_load(&devices->devices[d].is_lost) << d;
    }
    return lost;
}

void ep_node_devices_describe(const ep_node_devices *devices, char *out, size_t bytes)
{
    const uint64_t lost = ep_node_devices_lost(devices);
    if (lost == 0) {
        snprintf(out, bytes, "%u devices", devices->count);
        return;
    }
    const uint32_t first = (uint32_t)__builtin_ctzll(lost);
    snprintf(out, bytes, "%d of %u devices lost: device %u: %s", __builtin_popcountll(lost),
             devices->count, first, devices->devices[first].lost_why);
}
