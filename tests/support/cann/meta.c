/* SPDX-License-Identifier: Apache-2.0 */
/* libnnopbase.so: tensors, lists, executors. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/cann/cann.h"

enum {
    TENSOR_MAGIC = 0x74656e73,
    LIST_MAGIC = 0x6c697374,
    EXECUTOR_MAGIC = 0x65786563,
    DEAD_MAGIC = 0x64656164
};

struct aclOpExecutor {
    ep_acl_executor *next_dead;
    uint32_t magic;
    cann_launch *launch;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static ep_acl_tensor *dead_tensors;
static ep_acl_executor *dead_executors;

static size_t bytes_of(ep_acl_data_type type)
{
    switch (type) {
    case EP_ACL_FLOAT:
        return 4;
    case EP_ACL_FLOAT16:
    case EP_ACL_BF16:
        return 2;
    case EP_ACL_INT8:
        return 1;
    case EP_ACL_INT64:
        return 8;
    default:
        return 0;
    }
}

CANN_EXPORT ep_acl_tensor *aclCreateTensor(const int64_t *shape, uint64_t rank,
                                           ep_acl_data_type type, const int64_t *strides,
                                           int64_t offset, ep_acl_format format,
                                           const int64_t *storage_shape, uint64_t storage_rank,
                                           void *memory)
{
    const size_t element = bytes_of(type);
    int64_t last = offset; /* index of the view's last element */
    int64_t stored = 1;
    if (shape == NULL || strides == NULL || storage_shape == NULL || rank < 1 ||
        rank > CANN_RANK_MAX || element == 0 || offset < 0 ||
        (format != EP_ACL_ND && format != EP_ACL_FRACTAL_NZ)) {
        return NULL;
    }
    ep_acl_tensor *tensor = calloc(1, sizeof(*tensor));
    *tensor = (ep_acl_tensor){.magic = TENSOR_MAGIC,
                              .type = type,
                              .format = format,
                              .element_bytes = element,
                              .rank = rank,
                              .offset = offset,
                              .elements = 1,
                              .memory = memory};
    for (uint64_t i = 0; i < rank; i++) {
        tensor->shape[i] = shape[i];
        tensor->strides[i] = strides[i];
        tensor->elements *= shape[i];
        last += (shape[i] - 1) * strides[i];
    }
    for (uint64_t i = 0; i < storage_rank; i++) {
        stored *= storage_shape[i];
    }
    if ((uintptr_t)memory % EP_ACL_ALIGN != 0) {
        cann_violation("aclCreateTensor: address %p is not aligned to %d bytes", memory,
                       EP_ACL_ALIGN);
    }
    if (tensor->elements < 1 || last >= stored) {
        cann_violation("aclCreateTensor: the view's last element is %lld of %lld; strides and "
                       "offset are in elements",
                       (long long)last, (long long)stored);
    }
    (void)cann_device_bytes(memory, (size_t)stored * element, "aclCreateTensor");
    cann_count_object(1);
    return tensor;
}

const ep_acl_tensor *cann_tensor(const ep_acl_tensor *tensor, const char *what)
{
    if (tensor->magic != TENSOR_MAGIC) {
        cann_violation("%s: a tensor is used that is none or has been destroyed", what);
    }
    return tensor;
}

const ep_acl_tensor_list *cann_list(const ep_acl_tensor_list *list, const char *what)
{
    if (list->magic != LIST_MAGIC) {
        cann_violation("%s: a list is used that is none or has been destroyed", what);
    }
    return list;
}

bool cann_is_contiguous(const ep_acl_tensor *tensor)
{
    int64_t stride = 1;
    if (tensor->format != EP_ACL_ND) {
        return false;
    }
    for (uint64_t i = tensor->rank; i-- > 0;) {
        if (tensor->shape[i] != 1 && tensor->strides[i] != stride) {
            return false;
        }
        stride *= tensor->shape[i];
    }
    return true;
}

void *cann_tensor_bytes(const ep_acl_tensor *tensor, const char *what)
{
    const size_t skipped = (size_t)tensor->offset * tensor->element_bytes;
    return cann_device_bytes(tensor->memory + skipped,
                             (size_t)tensor->elements * tensor->element_bytes, what);
}

static void destroy_tensor(ep_acl_tensor *tensor)
{
    (void)cann_tensor(tensor, "aclDestroyTensor");
    pthread_mutex_lock(&lock);
    if (tensor->uses != 0) {
        cann_violation("aclDestroyTensor before the stream has passed the operator that uses it");
    }
    tensor->magic = DEAD_MAGIC;
    tensor->next_dead = dead_tensors;
    dead_tensors = tensor;
    pthread_mutex_unlock(&lock);
    cann_count_object(-1);
}

CANN_EXPORT ep_acl_code aclDestroyTensor(const ep_acl_tensor *tensor)
{
    destroy_tensor((ep_acl_tensor *)(uintptr_t)tensor);
    return 0;
}

CANN_EXPORT ep_acl_tensor_list *aclCreateTensorList(const ep_acl_tensor *const *tensors,
                                                    uint64_t count)
{
    if (tensors == NULL || count < 1) {
        return NULL;
    }
    ep_acl_tensor_list *list = calloc(1, sizeof(*list));
    list->magic = LIST_MAGIC;
    list->count = count;
    list->tensors = malloc(count * sizeof(*list->tensors));
    for (uint64_t i = 0; i < count; i++) {
        list->tensors[i] =
            (ep_acl_tensor *)(uintptr_t)cann_tensor(tensors[i], "aclCreateTensorList");
    }
    cann_count_object(1);
    return list;
}

CANN_EXPORT ep_acl_code aclDestroyTensorList(const ep_acl_tensor_list *list)
{
    ep_acl_tensor_list *own =
        (ep_acl_tensor_list *)(uintptr_t)cann_list(list, "aclDestroyTensorList");
    for (uint64_t i = 0; i < own->count; i++) { /* the list owns its tensors */
        destroy_tensor(own->tensors[i]);
    }
    own->magic = DEAD_MAGIC;
    free(own->tensors);
    free(own);
    cann_count_object(-1);
    return 0;
}

static void count_uses(const cann_launch *launch, int change)
{
    pthread_mutex_lock(&lock);
    for (uint64_t i = 0; i < launch->inputs_count; i++) {
        ((ep_acl_tensor *)(uintptr_t)launch->inputs[i])->uses += change;
    }
    pthread_mutex_unlock(&lock);
}

ep_acl_code cann_plan(const cann_launch *plan, uint64_t *workspace_bytes,
                      ep_acl_executor **executor)
{
    if (cann_is_refused(plan->name)) {
        return CANN_OP_INVALID;
    }
    ep_acl_executor *made = calloc(1, sizeof(*made));
    made->magic = EXECUTOR_MAGIC;
    made->launch = malloc(sizeof(*plan));
    *made->launch = *plan;
    count_uses(made->launch, 1);
    cann_count_object(1);
    *workspace_bytes = plan->workspace_bytes;
    *executor = made;
    return 0;
}

static ep_acl_code run_launch(void *arg)
{
    const cann_launch *launch = arg;
    /* overwritten, so that sharing it with live data is detected */
    if (launch->workspace_bytes != 0) {
        memset(cann_device_bytes(launch->workspace, launch->workspace_bytes, launch->name), 0xfe,
               launch->workspace_bytes);
    }
    const ep_acl_code code = launch->run(launch);
    cann_last(CANN_FLOPS, launch->flops);
    return code;
}

static void release_launch(void *arg)
{
    count_uses(arg, -1);
    free(arg);
}

/* Ends the executor; the caller owns its launch then. */
static cann_launch *end_executor(ep_acl_executor *executor, const char *what)
{
    pthread_mutex_lock(&lock);
    if (executor == NULL || executor->magic != EXECUTOR_MAGIC) {
        cann_violation("%s: an executor is used that is none, or for the second time", what);
    }
    executor->magic = DEAD_MAGIC;
    executor->next_dead = dead_executors;
    dead_executors = executor;
    pthread_mutex_unlock(&lock);
    cann_count_object(-1);
    return executor->launch;
}

ep_acl_code cann_launch_executor(const char *name, void *workspace, uint64_t workspace_bytes,
                                 ep_acl_executor *executor, ep_acl_stream stream)
{
    cann_launch *launch = end_executor(executor, name);
    if (strcmp(launch->name, name) != 0) {
        cann_violation("%s: the executor is one of %s", name, launch->name);
    }
    if (workspace_bytes < launch->workspace_bytes ||
        (launch->workspace_bytes != 0 && workspace == NULL)) {
        cann_violation("%s: a workspace of %llu bytes, asked for %llu", name,
                       (unsigned long long)workspace_bytes,
                       (unsigned long long)launch->workspace_bytes);
    }
    launch->workspace = workspace;
    const ep_acl_code code = cann_enqueue(stream, run_launch, release_launch, launch);
    if (code != 0) {
        release_launch(launch);
    }
    return code;
}

CANN_EXPORT ep_acl_code aclDestroyAclOpExecutor(ep_acl_executor *executor)
{
    release_launch(end_executor(executor, "aclDestroyAclOpExecutor"));
    return 0;
}
