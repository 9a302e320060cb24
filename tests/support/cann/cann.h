/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An emulated accelerator: shared objects with the names and symbols of CANN, strict where the real
 * one is silent. What a program does wrong without a code of the vendor for it ends the process
 * with a line "cann: ..."; what the vendor has a code for returns that code.
 *
 * Set by environment variables, read by aclInit:
 *   EP_CANN_SEED       of the delays of streams (1)
 *   EP_CANN_IN_RATE    bytes per second of a copy to the device (0: as quick as it goes)
 *   EP_CANN_OUT_RATE   the same from the device
 *   EP_CANN_FLOPS      multiplications and additions per second of a matrix product (0: as quick as
 *                      it goes). With rates streams have a time of their own: a task begins when
 *                      the one before it and what it waits for have ended, not when a thread of
 *                      this host got round to it
 *   EP_CANN_DELAY_US   longest delay before a task (60)
 *   EP_CANN_DEVICES    devices (1); read again when none were there
 *   EP_CANN_HBM_BYTES  memory of each device (4 GiB)
 *   EP_CANN_OOM_AT     the n-th aclrtMalloc of the process fails with 207001 (0: none); "n+" all
 *                      from there on
 *   EP_CANN_FAULT_AT   the n-th task fails with 507015
 *   EP_CANN_HANG_AT    the n-th task never ends; waits behind it time out at once
 *   EP_CANN_LOST_AT    from the n-th task on its device is lost: everything returns 507010
 *   EP_CANN_LOST_FILE  all devices are lost once this file exists, device D once this file with
 *                      ".D" behind its name does
 *   EP_CANN_HOLD_FIFO  the first copy of 1 MiB or more waits for somebody to open this FIFO and to
 *                      close it
 *   EP_CANN_REFUSED    operators that take nothing, "aclnnSwiGlu aclnnDynamicQuant": their first
 *                      phase returns 161002
 *   EP_CANN_TELL       aclFinalize writes "cann: tasks N allocations N" to standard error
 *
 * This header is for the objects among themselves.
 */
#ifndef EP_TESTS_SUPPORT_CANN_CANN_H
#define EP_TESTS_SUPPORT_CANN_CANN_H

#include "backends/ascend/acl_symbols.h"

#define CANN_EXPORT __attribute__((visibility("default")))
#define CANN_RANK_MAX 8
#define CANN_DEVICES_MAX 16

/* What the product will call, by the product's own table: another prototype here does not
 * compile. */
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

/* Ends the process. */
CANN_EXPORT _Noreturn void cann_violation(const char *format, ...)
    __attribute__((format(printf, 1, 2)));
/* 0, or the code a call with no device set or a lost device brings. */
CANN_EXPORT ep_acl_code cann_enter(void);
/* Whether EP_CANN_REFUSED has the operator. */
CANN_EXPORT bool cann_is_refused(const char *name);
/* Whether a planned failure has come: what later tasks find in device memory is nobody's mistake
 * then. */
CANN_EXPORT bool cann_has_failed(void);
/* How many calls have brought that a device is lost. For tests, by dlsym. */
CANN_EXPORT uint64_t cann_lost_calls(void);
/* Where the device itself finds bytes at a device address; a violation when they are not inside one
 * live block. */
CANN_EXPORT void *cann_device_bytes(const void *address, size_t bytes, const char *what);
/* Runs run(arg) on the stream's own thread, in order; then release(arg), also when the stream is
 * torn down before. */
CANN_EXPORT ep_acl_code cann_enqueue(ep_acl_stream stream, ep_acl_code (*run)(void *arg),
                                     void (*release)(void *arg), void *arg);
/* In a task: the device's time goes on by what so much takes at the rate; returns once it is
 * there. */
CANN_EXPORT void cann_last(cann_rate rate, double amount);
/* Objects of libnnopbase alive, for the check at aclFinalize. */
CANN_EXPORT void cann_count_object(int change);

/* ---- libnnopbase ---- */

struct aclTensor {
    ep_acl_tensor *next_dead; /* dead ones are kept: whoever uses them is told */
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
    double flops; /* 0: it takes no time beside the products */
    uint64_t inputs_count;
    ep_acl_code (*run)(const struct cann_launch *launch);
    const char *name;
    uint64_t workspace_bytes;
    void *workspace;
    int64_t numbers[5];
    double reals[3];
} cann_launch;

/* Makes the one-shot executor of a first phase: takes a use of every input. */
CANN_EXPORT ep_acl_code cann_plan(const cann_launch *plan, uint64_t *workspace_bytes,
                                  ep_acl_executor **executor);
/* Second phase of every operator; name is that of its function. */
CANN_EXPORT ep_acl_code cann_launch_executor(const char *name, void *workspace,
                                             uint64_t workspace_bytes, ep_acl_executor *executor,
                                             ep_acl_stream stream);
/* A live tensor, or a violation. */
CANN_EXPORT const ep_acl_tensor *cann_tensor(const ep_acl_tensor *tensor, const char *what);
CANN_EXPORT const ep_acl_tensor_list *cann_list(const ep_acl_tensor_list *list, const char *what);
/* Bytes of a contiguous tensor on the device. */
CANN_EXPORT void *cann_tensor_bytes(const ep_acl_tensor *tensor, const char *what);
/* And in no format but ND. */
CANN_EXPORT bool cann_is_contiguous(const ep_acl_tensor *tensor);

#endif
