/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The vendor's accelerator libraries (CANN), as one struct of function pointers that dlopen fills
 * once. Building needs no header of CANN. tests/unit/backends/test_acl_headers compares every
 * prototype, value and code of the runtime below with the vendor's headers. test_acl_operators
 * compares those of the operators, whose headers are C++, with the vendor's documents.
 *
 * Handle types are as the vendor's: void *, or a pointer to an opaque struct.
 */
#ifndef EP_BACKENDS_ASCEND_ACL_SYMBOLS_H
#define EP_BACKENDS_ASCEND_ACL_SYMBOLS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "expertd/error.h"

typedef int ep_acl_code; /* 0: success; of the runtime and, as aclnnStatus, of the operators */
typedef void *ep_acl_stream;
typedef void *ep_acl_event;
typedef void *ep_acl_notify;
typedef void *ep_acl_context;
typedef struct aclTensor ep_acl_tensor;
typedef struct aclTensorList ep_acl_tensor_list;
typedef struct aclIntArray ep_acl_int_array;
typedef struct aclOpExecutor ep_acl_executor;

/* The vendor's enums have the type that C gives them: unsigned, or int if a value is negative. */
typedef unsigned ep_acl_malloc_policy;
typedef unsigned ep_acl_memcpy_kind;
typedef unsigned ep_acl_memory_attribute;
typedef unsigned ep_acl_callback_block;
typedef unsigned ep_acl_event_status;
typedef int ep_acl_data_type;
typedef int ep_acl_format;

/* our name, the vendor's name, value */
#define EP_ACL_VALUE_MAP(X)                                                                        \
    X(EP_ACL_SUCCESS, ACL_SUCCESS, 0)                                                              \
    X(EP_ACL_MALLOC_HUGE_FIRST, ACL_MEM_MALLOC_HUGE_FIRST, 0)                                      \
    X(EP_ACL_HOST_TO_DEVICE, ACL_MEMCPY_HOST_TO_DEVICE, 1)                                         \
    X(EP_ACL_DEVICE_TO_HOST, ACL_MEMCPY_DEVICE_TO_HOST, 2)                                         \
    X(EP_ACL_HBM, ACL_HBM_MEM, 1)                                                                  \
    X(EP_ACL_EVENT_SYNC, ACL_EVENT_SYNC, 1)                                                        \
    X(EP_ACL_EVENT_PROGRESS, ACL_EVENT_CAPTURE_STREAM_PROGRESS, 2)                                 \
    X(EP_ACL_CALLBACK_NO_BLOCK, ACL_CALLBACK_NO_BLOCK, 0)                                          \
    X(EP_ACL_FLOAT, ACL_FLOAT, 0)                                                                  \
    X(EP_ACL_FLOAT16, ACL_FLOAT16, 1)                                                              \
    X(EP_ACL_INT8, ACL_INT8, 2)                                                                    \
    X(EP_ACL_INT64, ACL_INT64, 9)                                                                  \
    X(EP_ACL_BF16, ACL_BF16, 27)                                                                   \
    X(EP_ACL_ND, ACL_FORMAT_ND, 2)                                                                 \
    X(EP_ACL_FRACTAL_NZ, ACL_FORMAT_FRACTAL_NZ, 29)

enum {
#define EP_ACL_VALUE_ROW(ours, theirs, value) ours = value,
    EP_ACL_VALUE_MAP(EP_ACL_VALUE_ROW)
#undef EP_ACL_VALUE_ROW
};

/* Values of operator parameters for which no header has names. */
enum {
    EP_ACL_SPLIT_SINGLE = 2, /* GroupedMatmul splitItem: one output tensor */
    EP_ACL_GROUP_ROWS = 0,   /* groupType: groups of rows */
    /* groupListType: number of rows of each group; 0 would mean running sums */
    EP_ACL_GROUP_LIST_COUNTS = 1,
    EP_ACL_NO_ACTIVATION = 0,   /* actType */
    EP_ACL_GROUPS_MAX = 128,    /* tensors in a list of GroupedMatmul */
    EP_ACL_COLUMNS_MAX = 65535, /* of its x and weights */
    EP_ACL_ALIGN = 32,          /* of a tensor's address; also a block of a core's local memory */
    /* GeGluV3 approximate, as its kernels read it; its header says otherwise */
    EP_ACL_GELU_ERF = 0,
    EP_ACL_GELU_TANH = 1,
    EP_ACL_NZ_ROWS = 16, /* of a fractal of int8 weights: [N/32][K/16][16][32] */
    EP_ACL_NZ_COLUMNS = 32,
    EP_ACL_FUSED_COLUMNS_MAX = 10240, /* columns of GroupedMatmulSwigluQuant's weights */
};

/* vendor's name, code, what it is to callers, what happened. Codes without a row:
 * ep_acl_code_err. */
#define EP_ACL_CODE_MAP(X)                                                                         \
    X(ACL_ERROR_INVALID_PARAM, 100000, INTERNAL, "a parameter is wrong")                           \
    X(ACL_ERROR_UNINITIALIZE, 100001, INTERNAL, "the runtime is not initialised")                  \
    X(ACL_ERROR_REPEAT_INITIALIZE, 100002, INTERNAL, "the runtime is initialised already")         \
    X(ACL_ERROR_REPEAT_FINALIZE, 100037, INTERNAL, "the runtime is finalised already")             \
    X(ACL_ERROR_INVALID_OPP_PATH, 148049, UNAVAILABLE,                                             \
      "ASCEND_OPP_PATH does not lead to the operators")                                            \
    X(ACL_ERROR_BAD_ALLOC, 200000, NO_MEMORY, "no memory")                                         \
    X(ACL_ERROR_API_NOT_SUPPORT, 200001, UNIMPLEMENTED, "the function is not supported")           \
    X(ACL_ERROR_INVALID_DEVICE, 200002, UNAVAILABLE, "no such device")                             \
    X(ACL_ERROR_STORAGE_OVER_LIMIT, 300000, NO_MEMORY, "a storage limit is reached")               \
    X(ACL_ERROR_INTERNAL_ERROR, 500000, INTERNAL, "an internal error")                             \
    X(ACL_ERROR_RT_FAILURE, 500003, INTERNAL, "a failure in the runtime")                          \
    X(ACL_ERROR_DRV_FAILURE, 500004, DEVICE_LOST, "a failure in the driver")                       \
    X(ACL_ERROR_RT_PARAM_INVALID, 107000, INTERNAL, "a parameter is wrong")                        \
    X(ACL_ERROR_RT_INVALID_DEVICEID, 107001, UNAVAILABLE, "no such device")                        \
    X(ACL_ERROR_RT_CONTEXT_NULL, 107002, INTERNAL, "the thread has no device set")                 \
    X(ACL_ERROR_RT_STREAM_CONTEXT, 107003, INTERNAL, "the stream is another device's")             \
    X(ACL_ERROR_RT_WAIT_TIMEOUT, 107019, DEVICE_LOST, "a wait took too long")                      \
    X(ACL_ERROR_RT_TASK_TIMEOUT, 107020, DEVICE_LOST, "a task took too long")                      \
    X(ACL_ERROR_RT_DEVICE_TASK_ABORT, 107022, DEVICE_LOST, "the device's tasks were aborted")      \
    X(ACL_ERROR_RT_STREAM_ABORT, 107023, DEVICE_LOST, "the stream was aborted")                    \
    X(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, 207000, UNIMPLEMENTED,                                     \
      "not supported by this device or driver")                                                    \
    X(ACL_ERROR_RT_MEMORY_ALLOCATION, 207001, NO_MEMORY, "no device memory")                       \
    X(ACL_ERROR_RT_AICORE_OVER_FLOW, 207003, INTERNAL, "an overflow in a core")                    \
    X(ACL_ERROR_RT_NO_DEVICE, 207004, UNAVAILABLE, "there is no device")                           \
    X(ACL_ERROR_RT_RESOURCE_ALLOC_FAIL, 207005, NO_MEMORY, "no resources left")                    \
    X(ACL_ERROR_RT_NO_PERMISSION, 207006, UNAVAILABLE, "no permission for the device")             \
    X(ACL_ERROR_RT_NO_EVENT_RESOURCE, 207007, NO_MEMORY, "no events left")                         \
    X(ACL_ERROR_RT_NO_STREAM_RESOURCE, 207008, NO_MEMORY, "no streams left")                       \
    X(ACL_ERROR_RT_AIVEC_OVER_FLOW, 207016, INTERNAL, "an overflow in a vector core")              \
    X(ACL_ERROR_RT_DEVICE_OOM, 207018, NO_MEMORY, "no device memory")                              \
    X(ACL_ERROR_RT_LOST_HEARTBEAT, 507010, DEVICE_LOST, "the device's heartbeat is lost")          \
    X(ACL_ERROR_RT_REPORT_TIMEOUT, 507012, DEADLINE_EXCEEDED, "no callback came in time")          \
    X(ACL_ERROR_RT_AICORE_TIMEOUT, 507014, DEVICE_LOST, "a core took too long")                    \
    X(ACL_ERROR_RT_AICORE_EXCEPTION, 507015, DEVICE_LOST, "an exception in a core")                \
    X(ACL_ERROR_RT_AICPU_EXCEPTION, 507018, DEVICE_LOST, "an exception in a control core")         \
    X(ACL_ERROR_RT_VECTOR_CORE_TIMEOUT, 507034, DEVICE_LOST, "a vector core took too long")        \
    X(ACL_ERROR_RT_VECTOR_CORE_EXCEPTION, 507035, DEVICE_LOST, "an exception in a vector core")    \
    X(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, 507046, DEVICE_LOST, "waiting for a stream took too long") \
    X(ACL_ERROR_RT_EVENT_SYNC_TIMEOUT, 507047, DEVICE_LOST, "waiting for an event took too long")  \
    X(ACL_ERROR_RT_DEVICE_MEM_ERROR, 507053, DEVICE_LOST, "device memory is damaged")              \
    X(ACL_ERROR_RT_HBM_MULTI_BIT_ECC_ERROR, 507054, DEVICE_LOST,                                   \
      "device memory has several wrong bits")                                                      \
    X(ACL_ERROR_RT_DRV_INTERNAL_ERROR, 507899, DEVICE_LOST, "an internal error of the driver")

/* The same for operators, whose headers the test does not have. */
#define EP_ACL_OPERATOR_CODE_MAP(X)                                                                \
    X(ACLNN_ERR_PARAM_NULLPTR, 161001, INTERNAL, "an operator misses a tensor")                    \
    X(ACLNN_ERR_PARAM_INVALID, 161002, UNIMPLEMENTED,                                              \
      "an operator does not take these types or shapes")                                           \
    X(ACLNN_ERR_RUNTIME_ERROR, 361001, INTERNAL, "an operator could not call the runtime")         \
    X(ACLNN_ERR_INNER_TILING_ERROR, 561002, UNIMPLEMENTED,                                         \
      "an operator does not take these shapes")                                                    \
    X(ACLNN_ERR_INNER_CREATE_EXECUTOR, 561101, NO_MEMORY, "an operator could not be prepared")     \
    X(ACLNN_ERR_INNER_NULLPTR, 561103, INTERNAL, "an operator met a null pointer")

/* Where a symbol is: the library, and the one of older releases that stands for it. Sets are never
 * mixed (see below).
 */
#define EP_ACL_LIBRARY_MAP(X)                                                                      \
    X(RUNTIME, "libacl_rt.so", "libascendcl.so")                                                   \
    X(META, "libnnopbase.so", "libnnopbase.so")                                                    \
    X(NN, "libopapi_nn.so", "libopapi.so")                                                         \
    X(TRANSFORMER, "libopapi_transformer.so", "libopapi.so")

typedef enum ep_acl_library {
#define EP_ACL_LIBRARY_ROW(name, library, older) EP_ACL_LIBRARY_##name,
    EP_ACL_LIBRARY_MAP(EP_ACL_LIBRARY_ROW)
#undef EP_ACL_LIBRARY_ROW
        EP_ACL_LIBRARIES
} ep_acl_library;

/* symbol, result, parameters, need, the release it was read in. REQUIRED, OPTIONAL, or CALLER:
 * required only for tensors of callers. */
#define EP_ACL_RUNTIME_SYMBOLS(X)                                                                  \
    X(aclInit, ep_acl_code, (const char *config_path), REQUIRED, "acl 1.17")                       \
    X(aclFinalize, ep_acl_code, (void), REQUIRED, "acl 1.17")                                      \
    X(aclGetRecentErrMsg, const char *, (void), OPTIONAL, "acl 1.17")                              \
    X(aclrtGetVersion, ep_acl_code, (int32_t * major, int32_t * minor, int32_t * patch), OPTIONAL, \
      "acl 1.17")                                                                                  \
    X(aclrtGetSocName, const char *, (void), REQUIRED, "acl 1.17")                                 \
    X(aclrtGetDeviceCount, ep_acl_code, (uint32_t * count), REQUIRED, "acl 1.17")                  \
    X(aclrtSetDevice, ep_acl_code, (int32_t device), REQUIRED, "acl 1.17")                         \
    X(aclrtResetDevice, ep_acl_code, (int32_t device), REQUIRED, "acl 1.17")                       \
    X(aclrtGetMemInfo, ep_acl_code,                                                                \
      (ep_acl_memory_attribute attribute, size_t * free, size_t * total), REQUIRED, "acl 1.17")    \
    X(aclrtMalloc, ep_acl_code, (void **memory, size_t bytes, ep_acl_malloc_policy policy),        \
      REQUIRED, "acl 1.17")                                                                        \
    X(aclrtFree, ep_acl_code, (void *memory), REQUIRED, "acl 1.17")                                \
    X(aclrtMallocHost, ep_acl_code, (void **memory, size_t bytes), REQUIRED, "acl 1.17")           \
    X(aclrtFreeHost, ep_acl_code, (void *memory), REQUIRED, "acl 1.17")                            \
    X(aclrtMemcpyAsync, ep_acl_code,                                                               \
      (void *to, size_t to_bytes, const void *from, size_t bytes, ep_acl_memcpy_kind kind,         \
       ep_acl_stream stream),                                                                      \
      REQUIRED, "acl 1.17")                                                                        \
    X(aclrtCreateStream, ep_acl_code, (ep_acl_stream * stream), REQUIRED, "acl 1.17")              \
    X(aclrtDestroyStream, ep_acl_code, (ep_acl_stream stream), REQUIRED, "acl 1.17")               \
    X(aclrtDestroyStreamForce, ep_acl_code, (ep_acl_stream stream), OPTIONAL, "acl 1.17")          \
    X(aclrtSynchronizeStreamWithTimeout, ep_acl_code, (ep_acl_stream stream, int32_t timeout_ms),  \
      REQUIRED, "acl 1.17")                                                                        \
    X(aclrtCreateEventExWithFlag, ep_acl_code, (ep_acl_event * event, uint32_t flag), REQUIRED,    \
      "acl 1.17")                                                                                  \
    X(aclrtDestroyEvent, ep_acl_code, (ep_acl_event event), REQUIRED, "acl 1.17")                  \
    X(aclrtRecordEvent, ep_acl_code, (ep_acl_event event, ep_acl_stream stream), REQUIRED,         \
      "acl 1.17")                                                                                  \
    X(aclrtStreamWaitEvent, ep_acl_code, (ep_acl_stream stream, ep_acl_event event), REQUIRED,     \
      "acl 1.17")                                                                                  \
    X(aclrtSynchronizeEventWithTimeout, ep_acl_code, (ep_acl_event event, int32_t timeout_ms),     \
      REQUIRED, "acl 1.17")                                                                        \
    X(aclrtQueryEventStatus, ep_acl_code, (ep_acl_event event, ep_acl_event_status * status),      \
      CALLER, "acl 1.17")                                                                          \
    X(aclrtGetDevice, ep_acl_code, (int32_t * device), CALLER, "acl 1.17")                         \
    X(aclrtGetCurrentContext, ep_acl_code, (ep_acl_context * context), CALLER, "acl 1.17")         \
    X(aclrtSetCurrentContext, ep_acl_code, (ep_acl_context context), CALLER, "acl 1.17")           \
    X(aclrtSubscribeReport, ep_acl_code, (uint64_t thread, ep_acl_stream stream), CALLER,          \
      "acl 1.17")                                                                                  \
    X(aclrtUnSubscribeReport, ep_acl_code, (uint64_t thread, ep_acl_stream stream), CALLER,        \
      "acl 1.17")                                                                                  \
    X(aclrtLaunchCallback, ep_acl_code,                                                            \
      (void (*callback)(void *arg), void *arg, ep_acl_callback_block block, ep_acl_stream stream), \
      CALLER, "acl 1.17")                                                                          \
    X(aclrtProcessReport, ep_acl_code, (int32_t timeout_ms), CALLER, "acl 1.17")                   \
    X(aclrtCreateNotify, ep_acl_code, (ep_acl_notify * notify, uint64_t flag), CALLER, "acl 1.17") \
    X(aclrtDestroyNotify, ep_acl_code, (ep_acl_notify notify), CALLER, "acl 1.17")                 \
    X(aclrtRecordNotify, ep_acl_code, (ep_acl_notify notify, ep_acl_stream stream), CALLER,        \
      "acl 1.17")                                                                                  \
    X(aclrtWaitAndResetNotify, ep_acl_code,                                                        \
      (ep_acl_notify notify, ep_acl_stream stream, uint32_t timeout), CALLER, "acl 1.17")

#define EP_ACL_META_SYMBOLS(X)                                                                     \
    X(aclCreateTensor, ep_acl_tensor *,                                                            \
      (const int64_t *shape, uint64_t rank, ep_acl_data_type type, const int64_t *strides,         \
       int64_t offset, ep_acl_format format, const int64_t *storage_shape, uint64_t storage_rank,  \
       void *memory),                                                                              \
      REQUIRED, "opbase 8.5")                                                                      \
    X(aclDestroyTensor, ep_acl_code, (const ep_acl_tensor *tensor), REQUIRED, "opbase 8.5")        \
    X(aclCreateTensorList, ep_acl_tensor_list *,                                                   \
      (const ep_acl_tensor *const *tensors, uint64_t count), REQUIRED, "opbase 8.5")               \
    X(aclDestroyTensorList, ep_acl_code, (const ep_acl_tensor_list *list), REQUIRED, "opbase 8.5") \
    X(aclDestroyAclOpExecutor, ep_acl_code, (ep_acl_executor * executor), OPTIONAL, "opbase 8.5")

/* The first 12 parameters of GroupedMatmul, alike in every version, and the last ones. */
#define EP_ACL_GROUPED_MATMUL_INPUTS                                                               \
    const ep_acl_tensor_list *x, const ep_acl_tensor_list *weight, const ep_acl_tensor_list *bias, \
        const ep_acl_tensor_list *scale, const ep_acl_tensor_list *offset,                         \
        const ep_acl_tensor_list *antiquant_scale, const ep_acl_tensor_list *antiquant_offset,     \
        const ep_acl_tensor_list *per_token_scale, const ep_acl_tensor *group_list,                \
        const ep_acl_tensor_list *activation_input,                                                \
        const ep_acl_tensor_list *activation_quant_scale,                                          \
        const ep_acl_tensor_list *activation_quant_offset, int64_t split_item, int64_t group_type, \
        int64_t group_list_type, int64_t activation
#define EP_ACL_GROUPED_MATMUL_OUTPUTS                                                              \
    ep_acl_tensor_list *out, ep_acl_tensor_list *activation_feature_out,                           \
        ep_acl_tensor_list *dynamic_scale_out, uint64_t *workspace_bytes,                          \
        ep_acl_executor **executor

/* The second phase of every operator; its row follows that of the first phase. */
#define EP_ACL_LAUNCH_PARAMETERS                                                                   \
    (void *workspace, uint64_t workspace_bytes, ep_acl_executor *executor, ep_acl_stream stream)

#define EP_ACL_NN_SYMBOLS(X)                                                                       \
    X(aclnnSwiGluGetWorkspaceSize, ep_acl_code,                                                    \
      (const ep_acl_tensor *x, int64_t axis, const ep_acl_tensor *out, uint64_t *workspace_bytes,  \
       ep_acl_executor **executor),                                                                \
      REQUIRED, "ops-nn 2026-08")                                                                  \
    X(aclnnSwiGlu, ep_acl_code, EP_ACL_LAUNCH_PARAMETERS, REQUIRED, "ops-nn 2026-08")              \
    X(aclnnDynamicQuantGetWorkspaceSize, ep_acl_code,                                              \
      (const ep_acl_tensor *x, const ep_acl_tensor *smooth_scales, const ep_acl_tensor *out,       \
       const ep_acl_tensor *scale_out, uint64_t *workspace_bytes, ep_acl_executor **executor),     \
      OPTIONAL, "ops-nn 2026-08")                                                                  \
    X(aclnnDynamicQuant, ep_acl_code, EP_ACL_LAUNCH_PARAMETERS, OPTIONAL, "ops-nn 2026-08")        \
    X(aclnnClippedSwigluGetWorkspaceSize, ep_acl_code,                                             \
      (const ep_acl_tensor *x, const ep_acl_tensor *group_index, int64_t axis, double alpha,       \
       double limit, double bias, bool interleaved, const ep_acl_tensor *out,                      \
       uint64_t *workspace_bytes, ep_acl_executor **executor),                                     \
      OPTIONAL, "ops-nn 2026-08")                                                                  \
    X(aclnnClippedSwiglu, ep_acl_code, EP_ACL_LAUNCH_PARAMETERS, OPTIONAL, "ops-nn 2026-08")       \
    X(aclnnGeGluV3GetWorkspaceSize, ep_acl_code,                                                   \
      (const ep_acl_tensor *x, int64_t axis, int64_t approximate, bool activate_left,              \
       ep_acl_tensor *out, ep_acl_tensor *gelu_out, uint64_t *workspace_bytes,                     \
       ep_acl_executor **executor),                                                                \
      OPTIONAL, "ops-nn 2026-08")                                                                  \
    X(aclnnGeGluV3, ep_acl_code, EP_ACL_LAUNCH_PARAMETERS, OPTIONAL, "ops-nn 2026-08")

/* The newest of V5 and V4 that exists is used; one must exist. */
#define EP_ACL_TRANSFORMER_SYMBOLS(X)                                                              \
    X(aclnnGroupedMatmulV5GetWorkspaceSize, ep_acl_code,                                           \
      (EP_ACL_GROUPED_MATMUL_INPUTS, ep_acl_int_array * tuning, EP_ACL_GROUPED_MATMUL_OUTPUTS),    \
      OPTIONAL, "ops-transformer 8.5")                                                             \
    X(aclnnGroupedMatmulV5, ep_acl_code, EP_ACL_LAUNCH_PARAMETERS, OPTIONAL,                       \
      "ops-transformer 8.5")                                                                       \
    X(aclnnGroupedMatmulV4GetWorkspaceSize, ep_acl_code,                                           \
      (EP_ACL_GROUPED_MATMUL_INPUTS, EP_ACL_GROUPED_MATMUL_OUTPUTS), OPTIONAL,                     \
      "ops-transformer 8.5")                                                                       \
    X(aclnnGroupedMatmulV4, ep_acl_code, EP_ACL_LAUNCH_PARAMETERS, OPTIONAL,                       \
      "ops-transformer 8.5")                                                                       \
    X(aclnnGroupedMatmulSwigluQuantGetWorkspaceSize, ep_acl_code,                                  \
      (const ep_acl_tensor *x, const ep_acl_tensor *weight, const ep_acl_tensor *bias,             \
       const ep_acl_tensor *offset, const ep_acl_tensor *scale,                                    \
       const ep_acl_tensor *per_token_scale, const ep_acl_tensor *group_list, ep_acl_tensor *out,  \
       ep_acl_tensor *scale_out, ep_acl_tensor *offset_out, uint64_t *workspace_bytes,             \
       ep_acl_executor **executor),                                                                \
      OPTIONAL, "ops-transformer 8.5")                                                             \
    X(aclnnGroupedMatmulSwigluQuant, ep_acl_code, EP_ACL_LAUNCH_PARAMETERS, OPTIONAL,              \
      "ops-transformer 8.5")

#define EP_ACL_SYMBOLS(X)                                                                          \
    EP_ACL_RUNTIME_SYMBOLS(X)                                                                      \
    EP_ACL_META_SYMBOLS(X) EP_ACL_NN_SYMBOLS(X) EP_ACL_TRANSFORMER_SYMBOLS(X)

/* Filled once; a NULL member is a missing optional symbol. An operator has both phases or none. */
typedef struct ep_acl_symbols {
#define EP_ACL_FIELD(name, result, parameters, need, release) result(*name) parameters;
    EP_ACL_SYMBOLS(EP_ACL_FIELD)
#undef EP_ACL_FIELD
    /* the libraries that the symbols came from, such as "libopapi_nn.so" */
    const char *libraries[EP_ACL_LIBRARIES];
} ep_acl_symbols;

/* How libraries are opened, so that a test can stand in for dlopen. */
typedef struct ep_acl_opener {
    /* NULL with text when it is missing. */
    void *(*open)(void *arg, const char *library, char text[EP_ERROR_TEXT_BYTES]);
    void *(*symbol)(void *arg, void *handle, const char *name);
    void *arg;
} ep_acl_opener;

/*
 * Opens the libraries and fills *out_symbols. The operators all come from the per-domain libraries
 * or, when the first of those is missing, all from libopapi.so: the vendor forbids both in one
 * process. Libraries stay open for the life of the process. Errors: UNAVAILABLE, with the library
 * or symbol that is missing.
 */
ep_err ep_acl_symbols_load(const ep_acl_opener *opener, ep_acl_symbols *out_symbols,
                           ep_error *out_error);

/*
 * Loads only the runtime, for a process that has streams of its own. No operator library is opened,
 * since a set of them may be loaded already. Symbols marked CALLER must exist; the rest of
 * *out_symbols is NULL. Errors: as above.
 */
ep_err ep_acl_symbols_load_runtime(const ep_acl_opener *opener, ep_acl_symbols *out_symbols,
                                   ep_error *out_error);

/* dlopen by name, then below $ASCEND_HOME_PATH/lib64. */
const ep_acl_opener *ep_acl_opener_system(void);
/* The same, but prefers the runtime that this process has already loaded: a stream of one runtime
 * cannot be used with another. */
const ep_acl_opener *ep_acl_opener_caller(void);

/* Turns the result of a call into an error, with the code and the vendor's text: "device 0:
 * aclrtMalloc: no device memory (...)". */
ep_err ep_acl_error_set(ep_error *out_error, const ep_acl_symbols *acl, int32_t device,
                        ep_acl_code code, const char *call);

/* The error for a code. Codes without a row: DEVICE_LOST for 507000..507999, which are the
 * device's, otherwise INTERNAL. */
ep_err ep_acl_code_err(ep_acl_code code);
/* "ACL_ERROR_RT_CONTEXT_NULL"; "unknown code" */
const char *ep_acl_code_name(ep_acl_code code);
/* "the thread has no device set"; "no text for this code" */
const char *ep_acl_code_text(ep_acl_code code);

#endif
