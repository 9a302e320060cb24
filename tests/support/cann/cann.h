/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An emulated accelerator: shared objects with the names and symbols of CANN, which detect misuse
 * that the real ones do not report. Misuse for which the vendor has an error code returns it; other
 * misuse (a "violation") ends the process with a line "cann: ...".
 *
 * Environment variables, read by aclInit:
 *   EP_CANN_SEED       seed of the delays of streams (1)
 *   EP_CANN_IN_RATE    bytes per second of a copy to the device (0: no limit)
 *   EP_CANN_OUT_RATE   bytes per second of a copy from the device (0: no limit)
 *   EP_CANN_FLOPS      multiplications and additions per second of a matrix product (0: no limit).
 *                      With rates the device has a clock of its own: a task begins when the task
 *                      before it and those it waits for have ended on that clock
 *   EP_CANN_DELAY_US   longest delay before a task (60)
 *   EP_CANN_DEVICES    devices (1); read again when none were there
 *   EP_CANN_HBM_BYTES  memory of each device (4 GiB)
 *   EP_CANN_OOM_AT     the n-th aclrtMalloc of the process fails with 207001 (0: none); "n+" all
 *                      from there on
 *   EP_CANN_FAULT_AT   the n-th task fails with 507015
 *   EP_CANN_HANG_AT    the n-th task never ends; waits behind it time out at once
 *   EP_CANN_LOST_AT    from the n-th task on, its device is lost: everything returns 507010
 *   EP_CANN_LOST_FILE  all devices are lost once this file exists; device D once FILE.D does
 *   EP_CANN_HOLD_FIFO  the first copy of 1 MiB or more waits until another process opens and
 *                      closes this FIFO
 *   EP_CANN_REFUSED    operators whose first phase returns 161002, parted by blanks
 *   EP_CANN_TELL       aclFinalize writes "cann: tasks N allocations N" to standard error
 *
 * Private to the emulated shared objects.
 */
#ifndef EP_TESTS_SUPPORT_CANN_CANN_H
#define EP_TESTS_SUPPORT_CANN_CANN_H

#include "backends/ascend/acl_symbols.h"

#define CANN_EXPORT __attribute__((visibility("default")))
#define CANN_RANK_MAX 8
#define CANN_DEVICES_MAX 16

/* Declares the functions that the product calls, from its own table: a definition here with another
 * prototype does not compile. */
#define CANN_PROTOTYPE(name, result, parameters, need, release) CANN_EXPORT result name parameters;
EP_ACL_SYMBOLS(CANN_PROTOTYPE)

#define CANN_INPUTS_MAX 272

enum {
    CANN_PARAM = 107000,
    CANN_DEVICE_ID = 107001,
    CANN_NO_CONTEXT = 107002,
    CANN_CONTEXT = 107003,
    CANN_OOM = 207001,
    CANN_LOST = 507010,
    CANN_CORE_FAULT = 507015,
    CANN_EVENT_TIMEOUT = 507047,
    CANN_STREAM_TIMEOUT = 507046,
    CANN_OP_NULL = 161001,
    CANN_OP_INVALID = 161002,
    CANN_OP_TILING = 561002,
};

typedef enum cann_rate { CANN_IN_RATE, CANN_OUT_RATE, CANN_FLOPS, CANN_RATES } cann_rate;

/* Reports misuse by the product and ends the process. */
CANN_EXPORT _Noreturn void cann_violation(const char *format, ...)
    __attribute__((format(printf, 1, 2)));
/* Returns 0, or the code of a call without a set device or on a lost device. */
CANN_EXPORT ep_acl_code cann_enter(void);
/* Whether EP_CANN_REFUSED lists the operator. */
CANN_EXPORT bool cann_is_refused(const char *name);
/* Whether a planned failure has happened: later tasks may then find wrong bytes. */
CANN_EXPORT bool cann_has_failed(void);
/* Counts the calls that returned a lost device. For tests, by dlsym. */
CANN_EXPORT uint64_t cann_lost_calls(void);
/* Translates a device address for the emulated device; a violation unless the bytes are inside one
 * live block. */
CANN_EXPORT void *cann_device_bytes(const void *address, size_t bytes, const char *what);
/* Runs run(arg) on the stream's own thread, in order, then release(arg); if the stream is destroyed
 * before, release(arg) only. */
CANN_EXPORT ep_acl_code cann_enqueue(ep_acl_stream stream, ep_acl_code (*run)(void *arg),
                                     void (*release)(void *arg), void *arg);
/* In a task: advances the device's time by amount at the rate, and waits until then. */
CANN_EXPORT void cann_last(cann_rate rate, double amount);
/* Counts live objects of libnnopbase, for the check at aclFinalize. */
CANN_EXPORT void cann_count_object(int change);

/* ---- libnnopbase ---- */

struct aclTensor {
    ep_acl_tensor *next_dead; /* destroyed tensors are kept, to detect use after destruction */
    uint32_t magic;
    int uses; /* by executors that are not done */
    ep_acl_data_type type;
    ep_acl_format format;
    size_t element_bytes;
    uint64_t rank;
    int64_t shape[CANN_RANK_MAX];
    int64_t strides[CANN_RANK_MAX];
    int64_t offset;
    int64_t elements; /* of the view */
    uint8_t *memory;
};

struct aclTensorList {
    uint32_t magic;
    uint64_t count;
    ep_acl_tensor **tensors;
};

typedef struct cann_launch {
    const ep_acl_tensor *inputs[CANN_INPUTS_MAX];
    double flops; /* 0: the operator takes no time */
    uint64_t inputs_count;
    ep_acl_code (*run)(const struct cann_launch *launch);
    const char *name;
    uint64_t workspace_bytes;
    void *workspace;
    int64_t numbers[5];
    double reals[3];
} cann_launch;

/* Makes the one-shot executor of a first phase; counts a use of every input. */
CANN_EXPORT ep_acl_code cann_plan(const cann_launch *plan, uint64_t *workspace_bytes,
                                  ep_acl_executor **executor);
/* Runs the second phase of any operator; name: its function. */
CANN_EXPORT ep_acl_code cann_launch_executor(const char *name, void *workspace,
                                             uint64_t workspace_bytes, ep_acl_executor *executor,
                                             ep_acl_stream stream);
/* Returns the tensor or list if it is live; else a violation. */
CANN_EXPORT const ep_acl_tensor *cann_tensor(const ep_acl_tensor *tensor, const char *what);
CANN_EXPORT const ep_acl_tensor_list *cann_list(const ep_acl_tensor_list *list, const char *what);
/* Returns the bytes of a contiguous tensor on the device. */
CANN_EXPORT void *cann_tensor_bytes(const ep_acl_tensor *tensor, const char *what);
/* Whether it is contiguous and in format ND. */
CANN_EXPORT bool cann_is_contiguous(const ep_acl_tensor *tensor);

#endif
