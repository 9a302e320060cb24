/* SPDX-License-Identifier: Apache-2.0 */
#include "support/caller_device.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { KEPT_MAX = 16384 };

ep_acl_symbols device_acl;
ep_acl_stream device_streams[DEVICE_STREAMS];
bool device_tolerates;
bool device_failed;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *pinned[KEPT_MAX], *memory[KEPT_MAX];
static ep_acl_event events[KEPT_MAX];
static size_t pinned_count, memory_count, events_count;
static ep_acl_notify gate;

void device_must(ep_acl_code code, const char *call)
{
    if (code != EP_ACL_SUCCESS && device_tolerates) {
        device_failed = true;
    } else if (code != EP_ACL_SUCCESS) {
        fprintf(stderr, "scene: %s: %s (%d)\n", call, ep_acl_code_name(code), code);
        exit(3);
    }
}

void device_open(const char *home, uint64_t seed, const char *delay_us)
{
    ep_error error;
    char number[32];
    snprintf(number, sizeof(number), "%llu", (unsigned long long)seed);
    setenv("ASCEND_HOME_PATH", home, 1);
    setenv("EP_CANN_SEED", number, 1);
    setenv("EP_CANN_DELAY_US", delay_us, 1);
    if (ep_acl_symbols_load(ep_acl_opener_system(), &device_acl, &error) != EP_OK) {
        fprintf(stderr, "scene: %s\n", error.text);
        exit(3);
    }
    DEVICE_MUST(device_acl.aclInit(NULL));
    DEVICE_MUST(device_acl.aclrtSetDevice(0));
    for (int i = 0; i < DEVICE_STREAMS; i++) {
        DEVICE_MUST(device_acl.aclrtCreateStream(&device_streams[i]));
    }
    DEVICE_MUST(device_acl.aclrtCreateNotify(&gate, 0));
}

void device_close(void)
{
    for (int i = 0; i < DEVICE_STREAMS; i++) {
        device_sync(device_streams[i]);
    }
    for (; pinned_count > 0; pinned_count--) {
        DEVICE_MUST(device_acl.aclrtFreeHost(pinned[pinned_count - 1]));
    }
    for (; memory_count > 0; memory_count--) {
        DEVICE_MUST(device_acl.aclrtFree(memory[memory_count - 1]));
    }
    for (; events_count > 0; events_count--) {
        DEVICE_MUST(device_acl.aclrtDestroyEvent(events[events_count - 1]));
    }
    DEVICE_MUST(device_acl.aclrtDestroyNotify(gate));
    for (int i = 0; i < DEVICE_STREAMS; i++) {
        DEVICE_MUST(device_acl.aclrtDestroyStream(device_streams[i]));
    }
    DEVICE_MUST(device_acl.aclFinalize());
}

static void *keep(void **list, size_t *count, void *one)
{
    pthread_mutex_lock(&lock);
    if (*count == KEPT_MAX) {
        fprintf(stderr, "scene: too many buffers\n");
        exit(3);
    }
    list[(*count)++] = one;
    pthread_mutex_unlock(&lock);
    return one;
}

void *device_alloc(size_t bytes)
{
    void *one = NULL;
    DEVICE_MUST(device_acl.aclrtMalloc(&one, bytes == 0 ? 1 : bytes, EP_ACL_MALLOC_HUGE_FIRST));
    return keep(memory, &memory_count, one);
}

static void *alloc_pinned(size_t bytes)
{
    void *one = NULL;
    DEVICE_MUST(device_acl.aclrtMallocHost(&one, bytes));
    return one != NULL ? keep(pinned, &pinned_count, one) : NULL;
}

void device_put(ep_acl_stream stream, void *to, const void *from, size_t bytes)
{
    if (bytes > 0) {
        void *stage = alloc_pinned(bytes);
        if (stage == NULL) {
            return;
        }
        memcpy(stage, from, bytes);
        DEVICE_MUST(
            device_acl.aclrtMemcpyAsync(to, bytes, stage, bytes, EP_ACL_HOST_TO_DEVICE, stream));
    }
}

const void *device_get(ep_acl_stream stream, const void *from, size_t bytes)
{
    void *stage = alloc_pinned(bytes + 1);
    if (bytes > 0 && stage != NULL) {
        DEVICE_MUST(
            device_acl.aclrtMemcpyAsync(stage, bytes, from, bytes, EP_ACL_DEVICE_TO_HOST, stream));
    }
    return stage;
}

void device_close_gate(ep_acl_stream stream)
{
    DEVICE_MUST(device_acl.aclrtWaitAndResetNotify(gate, stream, 0));
}

void device_open_gate(ep_acl_stream stream)
{
    DEVICE_MUST(device_acl.aclrtRecordNotify(gate, stream));
}

void device_sync(ep_acl_stream stream)
{
    DEVICE_MUST(device_acl.aclrtSynchronizeStreamWithTimeout(stream, -1));
}

ep_acl_event device_mark(ep_acl_stream stream)
{
    ep_acl_event mark = NULL;
    DEVICE_MUST(
        device_acl.aclrtCreateEventExWithFlag(&mark, EP_ACL_EVENT_SYNC | EP_ACL_EVENT_PROGRESS));
    DEVICE_MUST(device_acl.aclrtRecordEvent(mark, stream));
    return keep(events, &events_count, mark);
}

bool device_has_passed(ep_acl_event mark)
{
    ep_acl_event_status status = 0;
    DEVICE_MUST(device_acl.aclrtQueryEventStatus(mark, &status));
    return status == 1;
}

void device_order(ep_acl_stream stream, ep_acl_stream other)
{
    DEVICE_MUST(device_acl.aclrtStreamWaitEvent(stream, device_mark(other)));
}

ep_tensor device_tensor(const ep_tensor *host, void *bytes, ep_acl_stream sync)
{
    ep_tensor tensor = *host;
    tensor.memory = EP_MEMORY_ASCEND;
    tensor.data = bytes;
    tensor.sync_handle = (uint64_t)(uintptr_t)sync;
    return tensor;
}
