/* SPDX-License-Identifier: Apache-2.0 */
/* libacl_rt.so and libascendcl.so: devices, memory, streams, events, notifies, callbacks. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/random.h"
#include "support/cann/cann.h"

/* address space: no address is used again until it is exhausted */
#define ARENA_BYTES ((size_t)64 << 30)
#define GUARD_BYTES 4096
#define HOLD_BYTES ((size_t)1 << 20)
#define POISON 0xff /* NaN in every float type */

typedef struct block {
    uint8_t *address;
    size_t bytes;
    bool is_host; /* pinned */
    int device;
    bool freed;
    struct block *next;
} block;

typedef struct event {
    uint32_t magic;
    int device;
    uint32_t flags;
    uint64_t recorded;  /* number of aclrtRecordEvent calls */
    uint64_t completed; /* of these */
    ep_acl_code status; /* of the last completed */
    int waiters;        /* tasks that refer to it */
    uint64_t time_ns;   /* of the last completed, by its device */
    struct event *next_dead;
} event;

typedef struct notify {
    uint32_t magic;
    bool is_set;
    int users;                /* tasks that refer to it */
    struct notify *next_dead; /* notifies of a lost device that still have tasks */
} notify;

/* A due callback, in the order over all streams. */
typedef struct report {
    void (*callback)(void *arg);
    void *arg;
    uint64_t thread;
    struct report *next;
} report;

typedef struct task {
    uint64_t queued_ns;
    ep_acl_code (*run)(void *arg);
    void (*release)(void *arg);
    void *arg;
    event *recorded; /* this task records it */
    event *awaited;  /* this task waits for it */
    uint64_t target;
    notify *notified; /* this task records it */
    notify *wanted;   /* this task waits for it, and resets it */
    report *told;     /* this task makes the callback due */
    struct task *next;
} task;

typedef struct stream {
    uint32_t magic;
    int device;
    pthread_t thread;
    task *first;
    task *last;
    uint64_t open_count; /* queued or running */
    ep_acl_code error;   /* sticky until it is reported */
    bool stopping;
    bool hangs;
    uint64_t report_thread; /* 0: nobody subscribed */
    uint64_t random;
    uint64_t time_ns; /* on the device's clock: all tasks given so far are done then */
    struct stream *next;
} stream;

enum {
    NOTIFY_MAGIC = 0x6e746679,
    EVENT_MAGIC = 0x65766e74,
    STREAM_MAGIC = 0x73747265,
    DEAD_MAGIC = 0x64656164
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static bool initialised, was_finalised, task_failed;
static struct {
    bool lost;
    size_t hbm_used;
} all_devices[CANN_DEVICES_MAX];
static uint64_t lost_calls;
static uint64_t generation; /* counts aclInit: a thread's device is valid in one generation */
static _Thread_local uint64_t thread_generation;
static _Thread_local int thread_device; /* on a stream's own thread: the stream's device */
static _Thread_local bool in_callback;
static _Thread_local const char *recent_message;
static report *reports;
static event *dead_events;
static notify *dead_notifies;
static int context; /* its address is the only context */
static uint8_t *arena_given, *arena_own;
static size_t arena_used;
static block *blocks;
static stream *streams;
static int events_alive, notifies_alive, objects_alive;
static uint64_t mallocs_count, tasks_count, streams_made;
static uint64_t seed, delay_us, devices, hbm_bytes, oom_at, fault_at, hang_at, lost_at;
static uint64_t rates[CANN_RATES];
static _Thread_local stream *own_stream; /* of a stream's thread */
static bool oom_stays;
static const char *lost_file;
static const char *hold_fifo; /* NULL: none, or already opened */
static const char *refused;

_Noreturn void cann_violation(const char *format, ...)
{
    char text[512];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof(text), format, list);
    va_end(list);
    fprintf(stderr, "cann: %s\n", text);
    abort();
}

static uint64_t from_environment(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text != NULL && text[0] != '\0' ? strtoull(text, NULL, 0) : otherwise;
}

static void read_environment(void)
{
    const char *oom = getenv("EP_CANN_OOM_AT");
    seed = from_environment("EP_CANN_SEED", 1);
    rates[CANN_IN_RATE] = from_environment("EP_CANN_IN_RATE", 0);
    rates[CANN_OUT_RATE] = from_environment("EP_CANN_OUT_RATE", 0);
    rates[CANN_FLOPS] = from_environment("EP_CANN_FLOPS", 0);
    delay_us = from_environment("EP_CANN_DELAY_US", 60);
    devices = from_environment("EP_CANN_DEVICES", 1);
    hbm_bytes = from_environment("EP_CANN_HBM_BYTES", (uint64_t)4 << 30);
    oom_at = from_environment("EP_CANN_OOM_AT", 0);
    oom_stays = oom != NULL && strchr(oom, '+') != NULL;
    fault_at = from_environment("EP_CANN_FAULT_AT", 0);
    hang_at = from_environment("EP_CANN_HANG_AT", 0);
    lost_at = from_environment("EP_CANN_LOST_AT", 0);
    lost_file = getenv("EP_CANN_LOST_FILE");
    hold_fifo = getenv("EP_CANN_HOLD_FIFO");
    if (devices > CANN_DEVICES_MAX) {
        cann_violation("EP_CANN_DEVICES is %llu, allowed: up to %d", (unsigned long long)devices,
                       CANN_DEVICES_MAX);
    }
    memset(all_devices, 0, sizeof(all_devices));
    task_failed = false;
    refused = getenv("EP_CANN_REFUSED");
    mallocs_count = tasks_count = streams_made = 0;
}

/* Lock held. */
static bool is_lost(int device)
{
    bool *lost = &all_devices[device].lost;
    char path[512];
    if (!*lost && lost_file != NULL) {
        snprintf(path, sizeof(path), "%s.%d", lost_file, device);
        *lost = access(lost_file, F_OK) == 0 || access(path, F_OK) == 0;
    }
    return *lost;
}

static ep_acl_code fail(ep_acl_code code, const char *message)
{
    recent_message = message;
    return code;
}

/* Lock held. Returns 0 or CANN_LOST. */
static ep_acl_code check_device(int device)
{
    static _Thread_local char text[64];
    if (!is_lost(device)) {
        return 0;
    }
    lost_calls++;
    snprintf(text, sizeof(text), "EE9999: the heartbeat of device %d is lost", device);
    return fail(CANN_LOST, text);
}

/* Lock held. */
static ep_acl_code enter_locked(void)
{
    if (in_callback) {
        cann_violation("a callback calls the runtime");
    }
    if (!initialised) {
        return fail(100001, "EE1001: aclInit has not been called");
    }
    if (thread_generation != generation) {
        return fail(CANN_NO_CONTEXT, "EE1001: the current thread has no context");
    }
    return check_device(thread_device);
}

/* Lock held. Does enter_locked for an object of a device; fails on another device's thread. */
static ep_acl_code enter_for(int device)
{
    const ep_acl_code code = enter_locked();
    return (code == 0 || code == CANN_LOST) && device != thread_device
               ? fail(CANN_CONTEXT,
                      "EE1001: the stream or event is of another device than the thread's")
               : code;
}

ep_acl_code cann_enter(void)
{
    pthread_mutex_lock(&lock);
    const ep_acl_code code = enter_locked();
    pthread_mutex_unlock(&lock);
    return code;
}

uint64_t cann_lost_calls(void)
{
    pthread_mutex_lock(&lock);
    const uint64_t calls = lost_calls;
    pthread_mutex_unlock(&lock);
    return calls;
}

bool cann_has_failed(void)
{
    pthread_mutex_lock(&lock);
    const bool failed = task_failed;
    pthread_mutex_unlock(&lock);
    return failed;
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void cann_last(cann_rate rate, double amount)
{
    if (rates[rate] != 0 && amount > 0.0) {
        own_stream->time_ns += (uint64_t)(amount * 1e9 / (double)rates[rate]);
        const struct timespec end = {.tv_sec = (time_t)(own_stream->time_ns / 1000000000u),
                                     .tv_nsec = (long)(own_stream->time_ns % 1000000000u)};
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, NULL) == EINTR) {
        }
    }
}

bool cann_is_refused(const char *name)
{
    char padded[512];
    char word[128];
    snprintf(padded, sizeof(padded), " %s ", refused != NULL ? refused : "");
    snprintf(word, sizeof(word), " %s ", name);
    return strstr(padded, word) != NULL;
}

void cann_count_object(int change)
{
    pthread_mutex_lock(&lock);
    objects_alive += change;
    pthread_mutex_unlock(&lock);
}

/* ---- start and end ---- */

CANN_EXPORT ep_acl_code aclInit(const char *config_path)
{
    (void)config_path;
    pthread_mutex_lock(&lock);
    if (initialised) {
        pthread_mutex_unlock(&lock);
        return fail(100002, "EE1001: aclInit has been called already");
    }
    read_environment();
    if (arena_given == NULL) {
        const int fd = memfd_create("cann", MFD_CLOEXEC);
        if (fd < 0 || ftruncate(fd, (off_t)ARENA_BYTES) != 0) {
            cann_violation("no memfd for the arena");
        }
        arena_given = mmap(NULL, ARENA_BYTES, PROT_NONE, MAP_SHARED | MAP_NORESERVE, fd, 0);
        arena_own =
            mmap(NULL, ARENA_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
        if (arena_given == MAP_FAILED || arena_own == MAP_FAILED) {
            cann_violation("no addresses for the arena");
        }
        close(fd);
    }
    initialised = true;
    generation++;
    pthread_mutex_unlock(&lock);
    return 0;
}

/* Lock held. */
static void check_leaks(void)
{
    for (block *b = blocks; b != NULL; b = b->next) {
        if (!b->freed) {
            cann_violation("aclFinalize: %zu bytes of %s memory are not freed", b->bytes,
                           b->is_host ? "pinned host" : "device");
        }
    }
    if (streams != NULL || events_alive != 0 || notifies_alive != 0 || objects_alive != 0) {
        cann_violation("aclFinalize: %s streams, %d events, %d notifies, %d tensors, lists and "
                       "executors are alive",
                       streams != NULL ? "some" : "no", events_alive, notifies_alive,
                       objects_alive);
    }
}

CANN_EXPORT ep_acl_code aclFinalize(void)
{
    pthread_mutex_lock(&lock);
    if (!initialised) {
        pthread_mutex_unlock(&lock);
        return fail(was_finalised ? 100037 : 100001, "EE1001: aclFinalize without aclInit");
    }
    check_leaks();
    if (getenv("EP_CANN_TELL") != NULL) {
        fprintf(stderr, "cann: tasks %llu allocations %llu\n", (unsigned long long)tasks_count,
                (unsigned long long)mallocs_count);
    }
    while (blocks != NULL) {
        block *b = blocks;
        blocks = b->next;
        free(b);
    }
    arena_used = 0;
    initialised = false;
    was_finalised = true;
    pthread_mutex_unlock(&lock);
    return 0;
}

CANN_EXPORT const char *aclGetRecentErrMsg(void)
{
    const char *message = recent_message;
    recent_message = NULL;
    return message;
}

CANN_EXPORT ep_acl_code aclrtGetVersion(int32_t *major, int32_t *minor, int32_t *patch)
{
    *major = 1;
    *minor = 17;
    *patch = 0;
    return 0;
}

CANN_EXPORT const char *aclrtGetSocName(void)
{
    return "Emulated";
}

CANN_EXPORT ep_acl_code aclrtGetDeviceCount(uint32_t *count)
{
    pthread_mutex_lock(&lock);
    if (devices == 0) { /* a device may have been added since */
        devices = from_environment("EP_CANN_DEVICES", 1);
    }
    const ep_acl_code code = devices == 0 ? fail(207004, "EL0004: no device") : 0;
    *count = (uint32_t)devices;
    pthread_mutex_unlock(&lock);
    return code;
}

CANN_EXPORT ep_acl_code aclrtSetDevice(int32_t device)
{
    pthread_mutex_lock(&lock);
    ep_acl_code code = 0;
    if (!initialised) {
        code = fail(100001, "EE1001: aclInit has not been called");
    } else if (device < 0 || (uint64_t)device >= devices) {
        code = fail(CANN_DEVICE_ID, "EE1001: no such device");
    } else {
        thread_generation = generation;
        thread_device = device;
        code = check_device(device);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

CANN_EXPORT ep_acl_code aclrtResetDevice(int32_t device)
{
    (void)device;
    const ep_acl_code code = cann_enter();
    thread_generation = 0;
    return code;
}

CANN_EXPORT ep_acl_code aclrtGetDevice(int32_t *device)
{
    if (thread_generation != generation) {
        return fail(CANN_NO_CONTEXT, "EE1001: the current thread has no context");
    }
    *device = 0;
    return 0;
}

CANN_EXPORT ep_acl_code aclrtGetCurrentContext(ep_acl_context *out_context)
{
    int32_t device;
    const ep_acl_code code = aclrtGetDevice(&device);
    if (code == 0) {
        *out_context = &context;
    }
    return code;
}

CANN_EXPORT ep_acl_code aclrtSetCurrentContext(ep_acl_context wanted)
{
    if (wanted != &context) {
        return fail(CANN_PARAM, "EE1001: the context is none");
    }
    return aclrtSetDevice(0);
}

/* ---- memory ---- */

/* Lock held. Finds the block, live or freed, that holds all of these bytes. */
static block *find_block(const void *address, size_t bytes)
{
    const uintptr_t a = (uintptr_t)address;
    for (block *b = blocks; b != NULL; b = b->next) {
        const uintptr_t start = (uintptr_t)b->address;
        if (a >= start && a - start <= b->bytes && bytes <= b->bytes - (a - start)) {
            return b;
        }
    }
    return NULL;
}

void *cann_device_bytes(const void *address, size_t bytes, const char *what)
{
    pthread_mutex_lock(&lock);
    const block *b = find_block(address, bytes);
    if (b == NULL || b->is_host) {
        cann_violation("%s: %zu bytes at %p are not inside a block of device memory", what, bytes,
                       address);
    }
    if (b->freed) {
        cann_violation("%s: %zu bytes at %p are in device memory that has been freed", what, bytes,
                       address);
    }
    if (b->device != thread_device) {
        cann_violation("%s: %zu bytes at %p are memory of device %d, used on device %d", what,
                       bytes, address, b->device, thread_device);
    }
    pthread_mutex_unlock(&lock);
    return arena_own + ((const uint8_t *)address - arena_given);
}

static void add_block(void *address, size_t bytes, bool is_host)
{
    block *b = malloc(sizeof(*b));
    *b = (block){.address = address,
                 .bytes = bytes,
                 .is_host = is_host,
                 .device = thread_device,
                 .next = blocks};
    blocks = b;
}

static ep_acl_code malloc_locked(void **memory, size_t bytes)
{
    const ep_acl_code code = enter_locked();
    if (code != 0) {
        return code;
    }
    if (bytes == 0) {
        return fail(CANN_PARAM, "EE1001: size is 0");
    }
    mallocs_count++;
    const bool planned =
        oom_at != 0 && (mallocs_count == oom_at || (oom_stays && mallocs_count > oom_at));
    const size_t room = (bytes + 2 * GUARD_BYTES - 1) & ~(size_t)(GUARD_BYTES - 1);
    if (planned || bytes > hbm_bytes - all_devices[thread_device].hbm_used ||
        arena_used + room + GUARD_BYTES > ARENA_BYTES) {
        return fail(CANN_OOM, "EL0004: failed to allocate device memory");
    }
    uint8_t *address = arena_given + arena_used + 32; /* aligned to exactly 32 bytes */
    arena_used += room + GUARD_BYTES;
    all_devices[thread_device].hbm_used += bytes;
    memset(arena_own + (address - arena_given), POISON, bytes);
    add_block(address, bytes, false);
    *memory = address;
    return 0;
}

CANN_EXPORT ep_acl_code aclrtMalloc(void **memory, size_t bytes, ep_acl_malloc_policy policy)
{
    (void)policy;
    pthread_mutex_lock(&lock);
    const ep_acl_code code = malloc_locked(memory, bytes);
    pthread_mutex_unlock(&lock);
    return code;
}

static ep_acl_code free_block(void *memory, bool is_host)
{
    pthread_mutex_lock(&lock);
    ep_acl_code code = enter_locked();
    if (code == CANN_LOST) {
        /* memory of a lost device can be freed; other calls report the loss */
        code = 0;
    }
    if (code == 0) {
        block **link = &blocks;
        while (*link != NULL && ((*link)->address != memory || (*link)->freed)) {
            link = &(*link)->next;
        }
        block *b = *link;
        if (b == NULL || b->is_host != is_host) {
            cann_violation("%s of %p, which is no such block",
                           is_host ? "aclrtFreeHost" : "aclrtFree", memory);
        }
        if (b->device != thread_device) {
            cann_violation("%s of %p, which is of device %d, on device %d",
                           is_host ? "aclrtFreeHost" : "aclrtFree", memory, b->device,
                           thread_device);
        }
        b->freed = true; /* kept, to detect later use */
        if (!is_host) {
            all_devices[b->device].hbm_used -= b->bytes;
            uint8_t *own = arena_own + (b->address - arena_given);
            uint8_t *page =
                (uint8_t *)(((uintptr_t)own + GUARD_BYTES - 1) & ~(uintptr_t)(GUARD_BYTES - 1));
            if (own + b->bytes > page + GUARD_BYTES) {
                (void)madvise(page, (size_t)(own + b->bytes - page) & ~(size_t)(GUARD_BYTES - 1),
                              MADV_REMOVE);
            }
        } else {
            *link = b->next;
            free(b->address);
            free(b);
        }
    }
    pthread_mutex_unlock(&lock);
    return code;
}

CANN_EXPORT ep_acl_code aclrtFree(void *memory)
{
    return free_block(memory, false);
}

CANN_EXPORT ep_acl_code aclrtMallocHost(void **memory, size_t bytes)
{
    const ep_acl_code code = cann_enter();
    if (code != 0) {
        return code;
    }
    void *address = malloc(bytes);
    if (address == NULL) {
        return fail(CANN_OOM, "EL0004: failed to allocate host memory");
    }
    memset(address, POISON, bytes);
    pthread_mutex_lock(&lock);
    add_block(address, bytes, true);
    pthread_mutex_unlock(&lock);
    *memory = address;
    return 0;
}

CANN_EXPORT ep_acl_code aclrtFreeHost(void *memory)
{
    return free_block(memory, true);
}

CANN_EXPORT ep_acl_code aclrtGetMemInfo(ep_acl_memory_attribute attribute, size_t *free_bytes,
                                        size_t *total)
{
    pthread_mutex_lock(&lock);
    ep_acl_code code = enter_locked();
    if (code == 0 && attribute != EP_ACL_HBM) {
        code = fail(CANN_PARAM, "EE1001: only device memory is emulated");
    }
    if (code == 0) {
        *free_bytes = hbm_bytes - all_devices[thread_device].hbm_used;
        *total = hbm_bytes;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

/* ---- streams ---- */

static stream *check_stream(ep_acl_stream handle)
{
    stream *s = handle;
    if (s == NULL || s->magic != STREAM_MAGIC) {
        cann_violation("a stream is used that is none or has been destroyed");
    }
    return s;
}

/* Lock held, and held again on return. Does not wait on a lost device. */
static ep_acl_code wait_for_other(stream *s, task *t)
{
    if (t->awaited != NULL) {
        while (t->awaited->completed < t->target && !s->stopping) {
            pthread_cond_wait(&changed, &lock);
        }
        t->awaited->waiters--;
        s->time_ns = t->awaited->time_ns > s->time_ns ? t->awaited->time_ns : s->time_ns;
        return 0;
    }
    while (!t->wanted->is_set && !s->stopping && !is_lost(s->device)) {
        pthread_cond_wait(&changed, &lock);
    }
    const bool is_set = t->wanted->is_set;
    t->wanted->is_set = false;
    t->wanted->users--;
    return is_set ? 0 : CANN_LOST;
}

/* Lock held. */
static void tell_other(task *t)
{
    if (t->notified != NULL) {
        if (t->notified->is_set) {
            cann_violation("aclrtRecordNotify before the one in front of it was waited for");
        }
        t->notified->is_set = true;
        t->notified->users--;
        return;
    }
    report **link = &reports;
    while (*link != NULL) {
        link = &(*link)->next;
    }
    *link = t->told;
    t->told = NULL;
}

/* Lock held, and held again on return. */
static ep_acl_code run_task(stream *s, task *t)
{
    const uint64_t number = ++tasks_count;
    s->time_ns = t->queued_ns > s->time_ns ? t->queued_ns : s->time_ns;
    if (lost_at != 0 && number >= lost_at) {
        all_devices[s->device].lost = true;
    }
    if (t->awaited != NULL || t->wanted != NULL) {
        return wait_for_other(s, t);
    }
    if (hang_at != 0 && number == hang_at) {
        s->hangs = true;
        pthread_cond_broadcast(&changed);
        while (!s->stopping) {
            pthread_cond_wait(&changed, &lock);
        }
        return CANN_CORE_FAULT;
    }
    if (t->recorded != NULL) {
        return 0;
    }
    if (is_lost(s->device)) {
        return CANN_LOST;
    }
    if (t->notified != NULL || t->told != NULL) {
        tell_other(t);
        return 0;
    }
    if (fault_at != 0 && number == fault_at) {
        return CANN_CORE_FAULT;
    }
    pthread_mutex_unlock(&lock);
    const ep_acl_code code = t->run(t->arg);
    pthread_mutex_lock(&lock);
    return code;
}

static void finish_task(stream *s, task *t, ep_acl_code code)
{
    s->error = s->error != 0 ? s->error : code;
    task_failed = task_failed || code != 0;
    if (t->recorded != NULL) {
        t->recorded->time_ns = s->time_ns;
        t->recorded->completed++;
        t->recorded->status = is_lost(s->device) ? CANN_LOST : s->error;
        t->recorded->waiters--;
    }
    if (t->notified != NULL && code != 0) {
        t->notified->users--; /* the notify never comes */
    }
    pthread_mutex_unlock(&lock);
    if (t->release != NULL) {
        t->release(t->arg);
    }
    free(t->told);
    free(t);
    pthread_mutex_lock(&lock);
    s->open_count--;
    pthread_cond_broadcast(&changed);
}

static void *stream_main(void *arg)
{
    stream *s = arg;
    ep_acl_code code = 0;
    own_stream = s;
    thread_device = s->device;
    pthread_mutex_lock(&lock);
    for (;;) {
        task *t = s->first;
        if (t == NULL) {
            if (s->stopping) {
                break;
            }
            pthread_cond_wait(&changed, &lock);
            continue;
        }
        const uint64_t z = ep_splitmix64(&s->random);
        if (delay_us != 0 && z % 3 == 0 && !s->stopping) {
            pthread_mutex_unlock(&lock);
            usleep((useconds_t)(z / 3 % (delay_us + 1)));
            pthread_mutex_lock(&lock);
        }
        s->first = t->next;
        const bool does_something = t->run != NULL || t->notified != NULL || t->told != NULL;
        /* a stopping stream does not run tasks */
        code = s->stopping && does_something ? CANN_CORE_FAULT : run_task(s, t);
        finish_task(s, t, code);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

/* Lock held. */
static void push_task(stream *s, task *t)
{
    t->next = NULL;
    t->queued_ns = now_ns();
    if (s->first == NULL) {
        s->first = t;
    } else {
        s->last->next = t;
    }
    s->last = t;
    s->open_count++;
    pthread_cond_broadcast(&changed);
}

ep_acl_code cann_enqueue(ep_acl_stream handle, ep_acl_code (*run)(void *arg),
                         void (*release)(void *arg), void *arg)
{
    stream *s = check_stream(handle);
    task *t = calloc(1, sizeof(*t));
    pthread_mutex_lock(&lock);
    const ep_acl_code code = enter_for(s->device);
    if (code == 0) {
        *t = (task){.run = run, .release = release, .arg = arg};
        push_task(s, t);
    } else {
        free(t);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

CANN_EXPORT ep_acl_code aclrtCreateStream(ep_acl_stream *out_stream)
{
    const ep_acl_code code = cann_enter();
    if (code != 0) {
        return code;
    }
    stream *s = calloc(1, sizeof(*s));
    pthread_mutex_lock(&lock);
    s->magic = STREAM_MAGIC;
    s->device = thread_device;
    s->random = seed * 1000003u + ++streams_made;
    s->next = streams;
    streams = s;
    pthread_mutex_unlock(&lock);
    if (pthread_create(&s->thread, NULL, stream_main, s) != 0) {
        cann_violation("no thread for a stream");
    }
    *out_stream = s;
    return 0;
}

/* Lock held. Whether some stream of the device has a task that never ends. */
static bool anything_hangs(int device)
{
    for (const stream *s = streams; s != NULL; s = s->next) {
        if (s->hangs && s->device == device) {
            return true;
        }
    }
    return false;
}

static ep_acl_code destroy_stream(ep_acl_stream handle, bool force)
{
    stream *s = check_stream(handle);
    pthread_mutex_lock(&lock);
    ep_acl_code code = enter_for(s->device);
    if (code == CANN_NO_CONTEXT || code == CANN_CONTEXT || (code == CANN_LOST && !force)) {
        pthread_mutex_unlock(&lock);
        return code;
    }
    while (!force && s->open_count > 0 && !anything_hangs(s->device)) {
        pthread_cond_wait(&changed, &lock);
    }
    s->stopping = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    pthread_join(s->thread, NULL);
    pthread_mutex_lock(&lock);
    stream **link = &streams;
    while (*link != s) {
        link = &(*link)->next;
    }
    *link = s->next;
    s->magic = DEAD_MAGIC;
    pthread_mutex_unlock(&lock);
    free(s);
    return 0;
}

CANN_EXPORT ep_acl_code aclrtDestroyStream(ep_acl_stream handle)
{
    return destroy_stream(handle, false);
}

CANN_EXPORT ep_acl_code aclrtDestroyStreamForce(ep_acl_stream handle)
{
    return destroy_stream(handle, true);
}

CANN_EXPORT ep_acl_code aclrtSynchronizeStreamWithTimeout(ep_acl_stream handle, int32_t timeout_ms)
{
    stream *s = check_stream(handle);
    (void)timeout_ms;
    pthread_mutex_lock(&lock);
    ep_acl_code code = enter_for(s->device);
    while (code == 0 && s->open_count > 0 && !anything_hangs(s->device)) {
        pthread_cond_wait(&changed, &lock);
    }
    if (code == 0 && s->open_count > 0) {
        code = fail(CANN_STREAM_TIMEOUT, "EE9999: synchronising the stream timed out");
    } else if (code == 0 && s->error != 0) {
        code = fail(s->error, "EZ9999: a task of the stream failed");
        s->error = 0;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

/* ---- copies ---- */

typedef struct copy {
    void *to;
    const void *from;
    size_t bytes;
    ep_acl_memcpy_kind kind;
} copy;

static void check_pinned(const void *address, size_t bytes)
{
    pthread_mutex_lock(&lock);
    const block *b = find_block(address, bytes);
    if (b == NULL || !b->is_host) {
        cann_violation("aclrtMemcpyAsync: %zu bytes at %p are pageable host memory, which may be "
                       "read after the call returned",
                       bytes, address);
    }
    pthread_mutex_unlock(&lock);
}

static void hold(const copy *c)
{
    pthread_mutex_lock(&lock);
    const char *path = c->bytes >= HOLD_BYTES ? hold_fifo : NULL;
    hold_fifo = path != NULL ? NULL : hold_fifo;
    pthread_mutex_unlock(&lock);
    if (path != NULL) {
        char byte;
        const int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0 || read(fd, &byte, 1) != 0) {
            cann_violation("EP_CANN_HOLD_FIFO cannot be read");
        }
        close(fd);
    }
}

static ep_acl_code run_copy(void *arg)
{
    const copy *c = arg;
    hold(c);
    const bool in = c->kind == EP_ACL_HOST_TO_DEVICE;
    check_pinned(in ? c->from : c->to, c->bytes);
    void *device = cann_device_bytes(in ? c->to : c->from, c->bytes, "aclrtMemcpyAsync");
    memcpy(in ? device : c->to, in ? c->from : device, c->bytes);
    cann_last(in ? CANN_IN_RATE : CANN_OUT_RATE, (double)c->bytes);
    return 0;
}

CANN_EXPORT ep_acl_code aclrtMemcpyAsync(void *to, size_t to_bytes, const void *from, size_t bytes,
                                         ep_acl_memcpy_kind kind, ep_acl_stream handle)
{
    if (to == NULL || from == NULL || bytes == 0 || bytes > to_bytes ||
        (kind != EP_ACL_HOST_TO_DEVICE && kind != EP_ACL_DEVICE_TO_HOST)) {
        return fail(CANN_PARAM, "EE1001: a parameter of aclrtMemcpyAsync is wrong");
    }
    check_pinned(kind == EP_ACL_HOST_TO_DEVICE ? from : to, bytes);
    (void)cann_device_bytes(kind == EP_ACL_HOST_TO_DEVICE ? to : from, bytes, "aclrtMemcpyAsync");
    copy *c = malloc(sizeof(*c));
    *c = (copy){.to = to, .from = from, .bytes = bytes, .kind = kind};
    const ep_acl_code code = cann_enqueue(handle, run_copy, free, c);
    if (code != 0) {
        free(c);
    }
    return code;
}

/* ---- events ---- */

static event *check_event(ep_acl_event handle)
{
    event *e = handle;
    if (e == NULL || e->magic != EVENT_MAGIC) {
        cann_violation("an event is used that is none or has been destroyed");
    }
    return e;
}

CANN_EXPORT ep_acl_code aclrtCreateEventExWithFlag(ep_acl_event *out_event, uint32_t flag)
{
    pthread_mutex_lock(&lock);
    ep_acl_code code = enter_locked();
    if (code == 0 && flag == 0) {
        code = fail(CANN_PARAM, "EE1001: flag is 0");
    }
    if (code == 0) {
        event *e = calloc(1, sizeof(*e));
        e->magic = EVENT_MAGIC;
        e->device = thread_device;
        e->flags = flag;
        events_alive++;
        *out_event = e;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

CANN_EXPORT ep_acl_code aclrtDestroyEvent(ep_acl_event handle)
{
    event *e = check_event(handle);
    pthread_mutex_lock(&lock);
    const ep_acl_code code = enter_for(e->device);
    if (code == CANN_NO_CONTEXT || code == CANN_CONTEXT) {
        pthread_mutex_unlock(&lock);
        return code;
    }
    if (e->waiters != 0 && code != CANN_LOST) {
        cann_violation("aclrtDestroyEvent before the streams have passed it");
    }
    e->magic = DEAD_MAGIC;
    events_alive--;
    if (e->waiters != 0) {
        e->next_dead = dead_events;
        dead_events = e;
    } else {
        free(e);
    }
    pthread_mutex_unlock(&lock);
    return 0;
}

static ep_acl_code push_event(ep_acl_event event_handle, ep_acl_stream stream_handle, bool record)
{
    event *e = check_event(event_handle);
    stream *s = check_stream(stream_handle);
    if (!record && (e->flags & EP_ACL_EVENT_SYNC) == 0) {
        cann_violation("aclrtStreamWaitEvent for an event without ACL_EVENT_SYNC");
    }
    pthread_mutex_lock(&lock);
    const ep_acl_code code = enter_for(e->device);
    if (code == 0 && s->device != e->device) {
        cann_violation("an event of device %d on a stream of device %d", e->device, s->device);
    }
    if (code == 0) {
        task *t = calloc(1, sizeof(*t));
        if (record) {
            e->recorded++;
            t->recorded = e;
        } else {
            t->awaited = e;
            t->target = e->recorded; /* later records do not count */
        }
        e->waiters++;
        push_task(s, t);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

CANN_EXPORT ep_acl_code aclrtRecordEvent(ep_acl_event event_handle, ep_acl_stream stream_handle)
{
    return push_event(event_handle, stream_handle, true);
}

CANN_EXPORT ep_acl_code aclrtStreamWaitEvent(ep_acl_stream stream_handle, ep_acl_event event_handle)
{
    return push_event(event_handle, stream_handle, false);
}

CANN_EXPORT ep_acl_code aclrtSynchronizeEventWithTimeout(ep_acl_event handle, int32_t timeout_ms)
{
    /* generation in which this thread's wait has timed out */
    static _Thread_local uint64_t in_vain;
    event *e = check_event(handle);
    (void)timeout_ms;
    if ((e->flags & EP_ACL_EVENT_PROGRESS) == 0) {
        cann_violation("aclrtSynchronizeEventWithTimeout of an event without "
                       "ACL_EVENT_CAPTURE_STREAM_PROGRESS");
    }
    pthread_mutex_lock(&lock);
    ep_acl_code code = enter_for(e->device);
    while (code == 0 && e->completed < e->recorded && !anything_hangs(e->device)) {
        pthread_cond_wait(&changed, &lock);
    }
    if (code == 0 && e->completed < e->recorded) {
        if (in_vain == generation) {
            cann_violation("aclrtSynchronizeEventWithTimeout: a thread waits a second time for a "
                           "device that hangs");
        }
        in_vain = generation;
        code = fail(CANN_EVENT_TIMEOUT, "EE9999: synchronising the event timed out");
    } else if (code == 0 && e->status != 0) {
        code = fail(e->status, "EZ9999: a task in front of the event failed");
    }
    pthread_mutex_unlock(&lock);
    return code;
}

CANN_EXPORT ep_acl_code aclrtQueryEventStatus(ep_acl_event handle, ep_acl_event_status *status)
{
    event *e = check_event(handle);
    pthread_mutex_lock(&lock);
    const ep_acl_code code = enter_locked();
    if (code == 0) {
        *status = e->completed == e->recorded; /* 1: complete; for a stream 0 is complete */
    }
    pthread_mutex_unlock(&lock);
    return code;
}

/* ---- notifies ---- */

static notify *check_notify(ep_acl_notify handle)
{
    notify *n = handle;
    if (n == NULL || n->magic != NOTIFY_MAGIC) {
        cann_violation("a notify is used that is none or has been destroyed");
    }
    return n;
}

CANN_EXPORT ep_acl_code aclrtCreateNotify(ep_acl_notify *out_notify, uint64_t flag)
{
    pthread_mutex_lock(&lock);
    ep_acl_code code = enter_locked();
    if (code == 0 && flag != 0) {
        code = fail(CANN_PARAM, "EE1001: flag is not 0");
    }
    if (code == 0) {
        notify *n = calloc(1, sizeof(*n));
        n->magic = NOTIFY_MAGIC;
        notifies_alive++;
        *out_notify = n;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

CANN_EXPORT ep_acl_code aclrtDestroyNotify(ep_acl_notify handle)
{
    notify *n = check_notify(handle);
    pthread_mutex_lock(&lock);
    const ep_acl_code code = enter_locked();
    if (code == CANN_NO_CONTEXT) {
        pthread_mutex_unlock(&lock);
        return code;
    }
    if (n->users != 0 && code != CANN_LOST) {
        cann_violation("aclrtDestroyNotify before the streams have passed it");
    }
    n->magic = DEAD_MAGIC;
    notifies_alive--;
    if (n->users != 0) {
        n->next_dead = dead_notifies;
        dead_notifies = n;
    } else {
        free(n);
    }
    pthread_mutex_unlock(&lock);
    return 0;
}

static ep_acl_code push_notify(ep_acl_notify notify_handle, ep_acl_stream stream_handle,
                               bool record)
{
    notify *n = check_notify(notify_handle);
    stream *s = check_stream(stream_handle);
    pthread_mutex_lock(&lock);
    const ep_acl_code code = enter_locked();
    if (code == 0) {
        task *t = calloc(1, sizeof(*t));
        *(record ? &t->notified : &t->wanted) = n;
        n->users++;
        push_task(s, t);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

CANN_EXPORT ep_acl_code aclrtRecordNotify(ep_acl_notify notify_handle, ep_acl_stream stream_handle)
{
    return push_notify(notify_handle, stream_handle, true);
}

CANN_EXPORT ep_acl_code aclrtWaitAndResetNotify(ep_acl_notify notify_handle,
                                                ep_acl_stream stream_handle, uint32_t timeout)
{
    if (timeout != 0) {
        /* the header and the documentation name different units */
        return fail(CANN_PARAM, "EE1001: timeouts are not emulated");
    }
    return push_notify(notify_handle, stream_handle, false);
}

/* ---- callbacks ---- */

CANN_EXPORT ep_acl_code aclrtSubscribeReport(uint64_t thread, ep_acl_stream handle)
{
    stream *s = check_stream(handle);
    pthread_mutex_lock(&lock);
    ep_acl_code code = enter_locked();
    if (code == 0 && s->report_thread != 0) {
        code = fail(107011, "EE1001: the stream has a thread already");
    }
    if (code == 0) {
        s->report_thread = thread;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

CANN_EXPORT ep_acl_code aclrtUnSubscribeReport(uint64_t thread, ep_acl_stream handle)
{
    stream *s = check_stream(handle);
    pthread_mutex_lock(&lock);
    ep_acl_code code = enter_locked();
    if (code == 0 && s->report_thread != thread) {
        code = fail(107012, "EE1001: the stream has another thread");
    }
    if (code == 0 && s->open_count > 0) {
        cann_violation("aclrtUnSubscribeReport of a stream that has tasks");
    }
    if (code == 0) {
        s->report_thread = 0;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

CANN_EXPORT ep_acl_code aclrtLaunchCallback(void (*callback)(void *arg), void *arg,
                                            ep_acl_callback_block waits, ep_acl_stream handle)
{
    stream *s = check_stream(handle);
    pthread_mutex_lock(&lock);
    ep_acl_code code = enter_locked();
    if (code == 0 && waits != EP_ACL_CALLBACK_NO_BLOCK) {
        code = fail(CANN_PARAM, "EE1001: callbacks that block are not emulated");
    }
    if (code == 0 && s->report_thread == 0) {
        code = fail(107011, "EE1001: nobody has subscribed to the stream");
    }
    if (code == 0) {
        task *t = calloc(1, sizeof(*t));
        t->told = malloc(sizeof(*t->told));
        *t->told = (report){.callback = callback, .arg = arg, .thread = s->report_thread};
        push_task(s, t);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

CANN_EXPORT ep_acl_code aclrtProcessReport(int32_t timeout_ms)
{
    const uint64_t me = (uint64_t)pthread_self();
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += timeout_ms / 1000;
    until.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    pthread_mutex_lock(&lock);
    ep_acl_code code = enter_locked();
    report *due = NULL;
    for (int timeout = 0; code == 0 && due == NULL;) {
        report **link = &reports;
        while (*link != NULL && (*link)->thread != me) {
            link = &(*link)->next;
        }
        due = *link;
        if (due != NULL) {
            *link = due->next;
        } else if (timeout != 0) {
            code = fail(507012, "EE9999: no callback came in time");
        } else {
            timeout = pthread_cond_timedwait(&changed, &lock, &until);
        }
    }
    pthread_mutex_unlock(&lock);
    if (due != NULL) {
        in_callback = true;
        due->callback(due->arg);
        in_callback = false;
        free(due);
    }
    return code;
}
