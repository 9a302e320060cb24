/* SPDX-License-Identifier: Apache-2.0 */
#include "backends/ascend/ascend_device.h"

#include <pthread.h>
#include <stdio.h>

#include "base/check.h"
#include "base/error.h"
#include "base/log.h"

/* The vendor's libraries do not survive being closed, so they stay open. aclInit may run once in a
 * process, so aclFinalize comes after the last device that served; after a probe or a failed open,
 * another device may follow. */
static struct {
    pthread_mutex_t lock;
    bool loaded;
    bool initialised;
    uint32_t users;
    ep_acl_symbols acl;
} process = {.lock = PTHREAD_MUTEX_INITIALIZER};

static ep_err process_enter(ep_acl_symbols *out_acl, ep_error *out_error)
{
    pthread_mutex_lock(&process.lock);
    ep_err err = process.loaded
                     ? EP_OK
                     : ep_acl_symbols_load(ep_acl_opener_system(), &process.acl, out_error);
    process.loaded = err == EP_OK;
    if (err == EP_OK && !process.initialised) {
        const ep_acl_code code = process.acl.aclInit(NULL);
        process.initialised = code == EP_ACL_SUCCESS;
        if (code != EP_ACL_SUCCESS) {
            err = ep_error_set(out_error, EP_ERR_UNAVAILABLE, "aclInit: %s (%s, code %d)",
                               ep_acl_code_text(code), ep_acl_code_name(code), code);
        }
    }
    if (err == EP_OK) {
        process.users++;
        *out_acl = process.acl;
    }
    pthread_mutex_unlock(&process.lock);
    return err;
}

static void process_leave(bool has_served)
{
    pthread_mutex_lock(&process.lock);
    EP_ASSERT(process.users > 0);
    if (--process.users == 0 && has_served) {
        (void)process.acl.aclFinalize();
        process.initialised = false;
    }
    pthread_mutex_unlock(&process.lock);
}

void ep_ascend_device_lose(ep_ascend_device *device, const char *reason)
{
    if (atomic_exchange(&device->lost, true)) {
        return;
    }
    ep_log(
        EP_LOG_ERROR, "device-lost", EP_KV(backend, "ascend"), EP_KV(device, device->number),
        EP_KV(reason, reason),
        EP_KV(effect, "its jobs fail and callers go to other copies; this process uses it no more"),
        EP_KV(hint,
              "npu-smi info shows the device; restart expertd once it is well, or without it by "
              "ASCEND_RT_VISIBLE_DEVICES"));
    if (device->on_lost != NULL) {
        device->on_lost(device->arg, reason);
    }
}

ep_err ep_ascend_check(ep_ascend_device *device, ep_acl_code code, const char *call,
                       ep_error *out_error)
{
    if (code == EP_ACL_SUCCESS) {
        return EP_OK;
    }
    ep_error error;
    const ep_err err = ep_acl_error_set(&error, &device->acl, device->number, code, call);
    if (err == EP_ERR_DEVICE_LOST) {
        ep_ascend_device_lose(device, error.text);
    }
    if (out_error != NULL) {
        *out_error = error;
    } else if (err != EP_ERR_DEVICE_LOST && !atomic_exchange(&device->told, true)) {
        ep_log(EP_LOG_ERROR, "device-failure", EP_KV(backend, "ascend"),
               EP_KV(device, device->number), EP_KV(reason, error.text),
               EP_KV(effect, "jobs fail; further failures are not told until a job is well again"));
    }
    return err;
}

/* A lost device is not called any more: an answer could take long, and a node unloads many
 * experts. */
static ep_err check_lost(ep_ascend_device *device, ep_error *out_error)
{
    return atomic_load(&device->lost)
               ? ep_error_set(out_error, EP_ERR_DEVICE_LOST, "device %d is lost", device->number)
               : EP_OK;
}

ep_err ep_ascend_device_enter(ep_ascend_device *device, ep_error *out_error)
{
    const ep_err err = check_lost(device, out_error);
    return err == EP_OK ? EP_ASCEND_CALL(device, out_error, aclrtSetDevice, device->number) : err;
}

static ep_err count_devices(ep_ascend_device *device, uint32_t *out_count, ep_error *out_error)
{
    const ep_err err = EP_ASCEND_CALL(device, out_error, aclrtGetDeviceCount, out_count);
    return err == EP_OK && *out_count == 0
               ? ep_error_set(out_error, EP_ERR_UNAVAILABLE, "the driver shows no device")
               : err;
}

/* Logs one line with what a fault report needs. */
static void tell_device(const ep_ascend_device *device)
{
    const char *soc = device->acl.aclrtGetSocName();
    int32_t version[3] = {0, 0, 0};
    char text[48] = "unknown";
    if (device->acl.aclrtGetVersion != NULL &&
        device->acl.aclrtGetVersion(&version[0], &version[1], &version[2]) == EP_ACL_SUCCESS) {
        snprintf(text, sizeof(text), "%d.%d.%d", version[0], version[1], version[2]);
    }
    ep_log(EP_LOG_INFO, "device-open", EP_KV(backend, "ascend"), EP_KV(device, device->number),
           EP_KV(soc, soc != NULL ? soc : "unknown"), EP_KV(acl_version, text),
           EP_KV(runtime, device->acl.libraries[EP_ACL_LIBRARY_RUNTIME]),
           EP_KV(operators, device->acl.libraries[EP_ACL_LIBRARY_TRANSFORMER]),
           EP_KV(matmul,
                 device->acl.aclnnGroupedMatmulV5 != NULL ? "GroupedMatmulV5" : "GroupedMatmulV4"));
}

ep_err ep_ascend_device_probe(uint32_t *out_devices, ep_error *out_error)
{
    ep_ascend_device device = {.number = 0};
    uint32_t count = 0;
    ep_err err = process_enter(&device.acl, out_error);
    if (err == EP_OK) {
        err = count_devices(&device, &count, out_error);
        process_leave(false);
    }
    if (err == EP_OK) {
        *out_devices = count;
    }
    return err;
}

ep_err ep_ascend_device_open(ep_ascend_device *device, ep_error *out_error)
{
    ep_err err = process_enter(&device->acl, out_error);
    if (err != EP_OK) {
        return err;
    }
    uint32_t count = 0;
    err = count_devices(device, &count, out_error);
    err = err == EP_OK ? ep_ascend_device_enter(device, out_error) : err;
    if (err != EP_OK) {
        process_leave(false);
        return err;
    }
    tell_device(device);
    return EP_OK;
}

void ep_ascend_device_close(ep_ascend_device *device)
{
    (void)device->acl.aclrtResetDevice(device->number);
    process_leave(device->has_served);
}

ep_err ep_ascend_device_look(ep_ascend_device *device, ep_error *out_error)
{
    size_t left = 0;
    size_t total = 0;
    ep_err err = check_lost(device, out_error);
    err = err == EP_OK
              ? EP_ASCEND_CALL(device, out_error, aclrtGetMemInfo, EP_ACL_HBM, &left, &total)
              : err;
    if (err == EP_OK) {
        atomic_store(&device->memory_bytes, total);
        atomic_store(&device->free_bytes, left);
    }
    return err;
}
