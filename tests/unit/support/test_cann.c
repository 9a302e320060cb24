/* SPDX-License-Identifier: Apache-2.0 */
/* The emulated accelerator is as strict as it says: each mistake ends the process with its line, or
 * brings the vendor's code. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backends/ascend/acl_symbols.h"
#include "base/numeric.h"

enum { ROWS = 3, INNER = 4, COLUMNS = 2 };

static ep_acl_symbols acl;
static ep_acl_stream main_stream;

static void must(ep_acl_code code, const char *what)
{
    if (code != 0) {
        fprintf(stderr, "%s: %d %s\n", what, code, ep_acl_code_name(code));
        exit(3);
    }
}
#define MUST(call) must(call, #call)

static void begin(void)
{
    ep_error error;
    setenv("ASCEND_HOME_PATH", EP_TEST_CANN, 1);
    if (ep_acl_symbols_load(ep_acl_opener_system(), &acl, &error) != EP_OK) {
        fprintf(stderr, "%s\n", error.text);
        exit(3);
    }
    MUST(acl.aclInit(NULL));
    MUST(acl.aclrtSetDevice(0));
    MUST(acl.aclrtCreateStream(&main_stream));
}

/* The process of mistake() must end by itself, with this line. */
static void expect_line(void (*mistake)(void), const char *line)
{
    int ends[2];
    char text[2048] = "";
    cr_assert_eq(pipe(ends), 0);
    const pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        begin();
        mistake();
        _exit(0);
    }
    close(ends[1]);
    size_t used = 0;
    for (ssize_t n; used < sizeof(text) - 1 &&
                    (n = read(ends[0], text + used, sizeof(text) - 1 - used)) > 0;) {
        used += (size_t)n;
    }
    int status = 0;
    cr_assert_eq(waitpid(child, &status, 0), child);
    close(ends[0]);
    cr_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT, "no abort for '%s', text '%s'",
              line, text);
    cr_assert_not_null(strstr(text, line), "want '%s', got '%s'", line, text);
}

static void *device(size_t bytes)
{
    void *memory = NULL;
    MUST(acl.aclrtMalloc(&memory, bytes, EP_ACL_MALLOC_HUGE_FIRST));
    return memory;
}

static void *pinned(size_t bytes)
{
    void *memory = NULL;
    MUST(acl.aclrtMallocHost(&memory, bytes));
    return memory;
}

static void upload(void *to, const void *from, size_t bytes)
{
    void *stage = pinned(bytes);
    memcpy(stage, from, bytes);
    MUST(acl.aclrtMemcpyAsync(to, bytes, stage, bytes, EP_ACL_HOST_TO_DEVICE, main_stream));
    MUST(acl.aclrtSynchronizeStreamWithTimeout(main_stream, 1000));
    MUST(acl.aclrtFreeHost(stage));
}

static void download(void *to, const void *from, size_t bytes)
{
    void *stage = pinned(bytes);
    MUST(acl.aclrtMemcpyAsync(stage, bytes, from, bytes, EP_ACL_DEVICE_TO_HOST, main_stream));
    MUST(acl.aclrtSynchronizeStreamWithTimeout(main_stream, 1000));
    memcpy(to, stage, bytes);
    MUST(acl.aclrtFreeHost(stage));
}

static ep_acl_tensor *tensor(int64_t rank, const int64_t *shape, ep_acl_data_type type,
                             void *memory)
{
    int64_t strides[3];
    int64_t stride = 1;
    for (int64_t i = rank; i-- > 0;) {
        strides[i] = stride;
        stride *= shape[i];
    }
    return acl.aclCreateTensor(shape, (uint64_t)rank, type, strides, 0, EP_ACL_ND, shape,
                               (uint64_t)rank, memory);
}

static ep_acl_tensor_list *list_of(ep_acl_tensor *one)
{
    const ep_acl_tensor *tensors[1] = {one};
    return acl.aclCreateTensorList(tensors, 1);
}

/* x [ROWS,INNER] of one matrix [INNER,COLUMNS] in one group of rows_counted rows. */
typedef struct product {
    ep_acl_tensor_list *x;
    ep_acl_tensor_list *weight;
    ep_acl_tensor_list *out;
    ep_acl_tensor *counts;
    void *memory[4];
    uint64_t workspace_bytes;
    void *workspace;
    ep_acl_executor *executor;
} product;

static product make_product(int64_t rows_counted, ep_acl_data_type list_type)
{
    uint16_t x[ROWS * INNER], w[INNER * COLUMNS];
    product p = {.executor = NULL};
    for (int i = 0; i < ROWS * INNER; i++) {
        x[i] = ep_f32_to_bf16((float)i);
    }
    for (int i = 0; i < INNER * COLUMNS; i++) {
        w[i] = ep_f32_to_bf16((float)(i % 3));
    }
    const int64_t shapes[3][3] = {{ROWS, INNER}, {1, INNER, COLUMNS}, {ROWS, COLUMNS}};
    const int64_t one = 1;
    p.memory[0] = device(sizeof(x));
    p.memory[1] = device(sizeof(w));
    p.memory[2] = device(ROWS * COLUMNS * 2);
    p.memory[3] = device(64);
    upload(p.memory[0], x, sizeof(x));
    upload(p.memory[1], w, sizeof(w));
    upload(p.memory[3], &rows_counted, sizeof(rows_counted));
    p.x = list_of(tensor(2, shapes[0], EP_ACL_BF16, p.memory[0]));
    p.weight = list_of(tensor(3, shapes[1], EP_ACL_BF16, p.memory[1]));
    p.out = list_of(tensor(2, shapes[2], EP_ACL_BF16, p.memory[2]));
    p.counts = tensor(1, &one, list_type, p.memory[3]);
    return p;
}

static ep_acl_code plan(product *p)
{
    const ep_acl_code code = acl.aclnnGroupedMatmulV5GetWorkspaceSize(
        p->x, p->weight, NULL, NULL, NULL, NULL, NULL, NULL, p->counts, NULL, NULL, NULL, 2, 0, 1,
        0, NULL, p->out, NULL, NULL, &p->workspace_bytes, &p->executor);
    if (code == 0) {
        p->workspace = device(p->workspace_bytes);
    }
    return code;
}

static ep_acl_code launch(product *p)
{
    return acl.aclnnGroupedMatmulV5(p->workspace, p->workspace_bytes, p->executor, main_stream);
}

static void free_product(product *p)
{
    MUST(acl.aclDestroyTensorList(p->x));
    MUST(acl.aclDestroyTensorList(p->weight));
    MUST(acl.aclDestroyTensorList(p->out));
    MUST(acl.aclDestroyTensor(p->counts));
    for (int i = 0; i < 4; i++) {
        MUST(acl.aclrtFree(p->memory[i]));
    }
    if (p->workspace != NULL) {
        MUST(acl.aclrtFree(p->workspace));
    }
}

Test(cann, multiplies_a_group_and_leaves_the_rows_behind_it_as_garbage)
{
    begin();
    product p = make_product(ROWS - 1, EP_ACL_INT64);
    uint16_t out[ROWS * COLUMNS];
    MUST(plan(&p));
    MUST(launch(&p));
    MUST(acl.aclrtSynchronizeStreamWithTimeout(main_stream, 1000));
    download(out, p.memory[2], sizeof(out));
    for (int r = 0; r < ROWS; r++) {
        for (int n = 0; n < COLUMNS; n++) {
            float sum = 0.0f;
            for (int k = 0; k < INNER; k++) {
                sum += (float)(r * INNER + k) * (float)((k * COLUMNS + n) % 3);
            }
            const float got = ep_bf16_to_f32(out[r * COLUMNS + n]);
            cr_expect(r == ROWS - 1 ? isnan(got) : got == sum, "row %d column %d is %g, want %g", r,
                      n, (double)got, (double)sum);
        }
    }
    free_product(&p);
    MUST(acl.aclrtDestroyStream(main_stream));
    cr_assert_eq(acl.aclFinalize(), 0);
    cr_assert_eq(acl.aclFinalize(), 100037);
}

static void read_device(void)
{
    volatile uint8_t *memory = device(64);
    fprintf(stderr, "%d", memory[0]);
}

Test(cann, host_code_cannot_touch_device_memory)
{
    const pid_t child = fork();
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);
        begin();
        read_device();
        _exit(0);
    }
    int status = 0;
    cr_assert_eq(waitpid(child, &status, 0), child);
    /* a sanitizer makes 1 of it */
    cr_assert(WIFSIGNALED(status) || WEXITSTATUS(status) == 1, "status %d", status);
}

static void copy_pageable(void)
{
    char bytes[64] = "";
    (void)acl.aclrtMemcpyAsync(device(64), 64, bytes, 64, EP_ACL_HOST_TO_DEVICE, main_stream);
}

static void free_stage_too_early(void)
{
    setenv("EP_CANN_DELAY_US", "1000", 1);
    for (int i = 0; i < 200; i++) {
        void *stage = pinned(64);
        MUST(acl.aclrtMemcpyAsync(device(64), 64, stage, 64, EP_ACL_HOST_TO_DEVICE, main_stream));
        MUST(acl.aclrtFreeHost(stage));
    }
    MUST(acl.aclrtSynchronizeStreamWithTimeout(main_stream, 1000));
}

static void use_after_free(void)
{
    void *memory = device(64);
    MUST(acl.aclrtFree(memory));
    (void)acl.aclrtMemcpyAsync(memory, 64, pinned(64), 64, EP_ACL_HOST_TO_DEVICE, main_stream);
}

static void past_the_end(void)
{
    (void)acl.aclrtMemcpyAsync(device(64), 65, pinned(65), 65, EP_ACL_HOST_TO_DEVICE, main_stream);
}

static void leak_memory(void)
{
    MUST(acl.aclrtDestroyStream(main_stream));
    (void)device(64);
    (void)acl.aclFinalize();
}

static void leak_stream(void)
{
    (void)acl.aclFinalize();
}

static void launch_twice(void)
{
    product p = make_product(1, EP_ACL_INT64);
    MUST(plan(&p));
    MUST(launch(&p));
    (void)launch(&p);
}

static void destroy_too_early(void)
{
    product p = make_product(1, EP_ACL_INT64);
    MUST(plan(&p));
    MUST(acl.aclDestroyTensor(p.counts));
}

static void destroy_member_again(void)
{
    const int64_t shape[1] = {4};
    ep_acl_tensor *one = tensor(1, shape, EP_ACL_FLOAT, device(64));
    MUST(acl.aclDestroyTensorList(list_of(one)));
    (void)acl.aclDestroyTensor(one);
}

static void unaligned_tensor(void)
{
    const int64_t shape[1] = {4};
    (void)tensor(1, shape, EP_ACL_FLOAT, (uint8_t *)device(64) + 16);
}

static void strides_in_bytes(void)
{
    const int64_t shape[2] = {ROWS, INNER};
    const int64_t strides[2] = {INNER * 2, 2};
    (void)acl.aclCreateTensor(shape, 2, EP_ACL_BF16, strides, 0, EP_ACL_ND, shape, 2,
                              device(ROWS * INNER * 2));
}

static void groups_past_the_rows(void)
{
    product p = make_product(ROWS + 1, EP_ACL_INT64);
    MUST(plan(&p));
    MUST(launch(&p));
    (void)acl.aclrtSynchronizeStreamWithTimeout(main_stream, 1000);
}

static void small_workspace(void)
{
    product p = make_product(1, EP_ACL_INT64);
    MUST(plan(&p));
    p.workspace_bytes--;
    (void)launch(&p);
}

static void event_too_early(void)
{
    ep_acl_event event = NULL;
    MUST(acl.aclrtCreateEventExWithFlag(&event, EP_ACL_EVENT_SYNC));
    product p = make_product(1, EP_ACL_INT64);
    for (int i = 0; i < 50; i++) {
        void *stage = pinned(64);
        MUST(acl.aclrtMemcpyAsync(p.memory[3], 64, stage, 64, EP_ACL_HOST_TO_DEVICE, main_stream));
    }
    MUST(acl.aclrtRecordEvent(event, main_stream));
    MUST(acl.aclrtDestroyEvent(event));
}

static void use_other_devices_memory(void)
{
    float value = 0.0f;
    void *memory = device(64);
    MUST(acl.aclrtSetDevice(1));
    MUST(acl.aclrtCreateStream(&main_stream));
    download(&value, memory, sizeof(value));
}

static void free_on_other_device(void)
{
    void *memory = device(64);
    MUST(acl.aclrtSetDevice(1));
    MUST(acl.aclrtFree(memory));
}

static void call_from_callback(void *arg)
{
    (void)acl.aclrtMemcpyAsync(arg, 64, pinned(64), 64, EP_ACL_HOST_TO_DEVICE, main_stream);
}

static void callback_that_calls(void)
{
    MUST(acl.aclrtSubscribeReport((uint64_t)pthread_self(), main_stream));
    MUST(acl.aclrtLaunchCallback(call_from_callback, device(64), EP_ACL_CALLBACK_NO_BLOCK,
                                 main_stream));
    (void)acl.aclrtProcessReport(1000);
}

static void record_twice(void)
{
    ep_acl_notify notify = NULL;
    MUST(acl.aclrtCreateNotify(&notify, 0));
    MUST(acl.aclrtRecordNotify(notify, main_stream));
    MUST(acl.aclrtRecordNotify(notify, main_stream));
    (void)acl.aclrtSynchronizeStreamWithTimeout(main_stream, 1000);
}

static void notify_too_early(void)
{
    ep_acl_notify notify = NULL;
    MUST(acl.aclrtCreateNotify(&notify, 0));
    MUST(acl.aclrtWaitAndResetNotify(notify, main_stream, 0));
    (void)acl.aclrtDestroyNotify(notify);
}

Test(cann, each_mistake_ends_the_process_with_its_line)
{
    setenv("EP_CANN_DELAY_US", "2000", 1);
    expect_line(copy_pageable, "pageable host memory");
    expect_line(free_stage_too_early, "pageable host memory");
    expect_line(use_after_free, "has been freed");
    expect_line(past_the_end, "not inside a block of device memory");
    expect_line(leak_memory, "64 bytes of device memory are not freed");
    expect_line(leak_stream, "some streams");
    expect_line(launch_twice, "for the second time");
    expect_line(destroy_too_early, "before the stream has passed");
    expect_line(destroy_member_again, "none or has been destroyed");
    expect_line(unaligned_tensor, "not aligned to 32 bytes");
    expect_line(strides_in_bytes, "strides and offset are in elements");
    expect_line(groups_past_the_rows, "ends with row 4");
    expect_line(small_workspace, "a workspace of");
    expect_line(event_too_early, "before the streams have passed it");
    expect_line(callback_that_calls, "a callback calls the runtime");
    expect_line(record_twice, "before the one in front of it was waited for");
    expect_line(notify_too_early, "aclrtDestroyNotify before the streams have passed it");
    setenv("EP_CANN_DEVICES", "2", 1);
    expect_line(use_other_devices_memory, "memory of device 0, used on device 1");
    expect_line(free_on_other_device, "which is of device 0, on device 1");
}

static void *other_thread(void *arg)
{
    void *memory = NULL;
    *(ep_acl_code *)arg = acl.aclrtMalloc(&memory, 64, EP_ACL_MALLOC_HUGE_FIRST);
    return NULL;
}

Test(cann, codes_of_the_vendor)
{
    ep_acl_code code = 0;
    pthread_t thread;
    void *memory = NULL;
    ep_acl_stream stream = NULL;
    setenv("EP_CANN_HBM_BYTES", "1000000", 1);
    begin();
    cr_assert_eq(acl.aclInit(NULL), 100002);
    cr_assert_eq(acl.aclrtSetDevice(1), 107001);
    cr_assert_eq(pthread_create(&thread, NULL, other_thread, &code), 0);
    pthread_join(thread, NULL);
    cr_assert_eq(code, 107002);
    cr_assert_eq(acl.aclrtMalloc(&memory, 1000001, EP_ACL_MALLOC_HUGE_FIRST), 207001);
    cr_assert_str_eq(acl.aclGetRecentErrMsg(), "EL0004: failed to allocate device memory");
    cr_assert_null(acl.aclGetRecentErrMsg());
    product p = make_product(1, EP_ACL_FLOAT);
    cr_assert_eq(plan(&p), 161002); /* counts of another width */
    free_product(&p);
    cr_assert_eq(acl.aclrtCreateStream(&stream), 0);
    cr_assert_eq(acl.aclrtDestroyStream(stream), 0);
}

static void set_flag(void *arg)
{
    *(int *)arg = 1;
}

/* A notify is kept until it is waited for, and may be waited for before it is recorded. A callback
 * runs behind what is in front of it. */
Test(cann, notifies_and_callbacks_order_streams_and_the_host)
{
    begin();
    ep_acl_notify notify = NULL;
    ep_acl_stream other = NULL;
    int told = 0;
    MUST(acl.aclrtCreateNotify(&notify, 0));
    MUST(acl.aclrtCreateStream(&other));
    cr_assert_eq(acl.aclrtLaunchCallback(set_flag, &told, EP_ACL_CALLBACK_NO_BLOCK, other), 107011);
    MUST(acl.aclrtSubscribeReport((uint64_t)pthread_self(), other));
    for (int i = 0; i < 2; i++) {
        told = 0;
        MUST(acl.aclrtWaitAndResetNotify(notify, other, 0));
        MUST(acl.aclrtLaunchCallback(set_flag, &told, EP_ACL_CALLBACK_NO_BLOCK, other));
        cr_assert_eq(acl.aclrtProcessReport(20), 507012);
        cr_assert_eq(told, 0);
        MUST(acl.aclrtRecordNotify(notify, main_stream));
        cr_assert_eq(acl.aclrtProcessReport(10000), 0);
        cr_assert_eq(told, 1);
    }
    MUST(acl.aclrtRecordNotify(notify, main_stream));
    MUST(acl.aclrtSynchronizeStreamWithTimeout(main_stream, 1000));
    MUST(acl.aclrtWaitAndResetNotify(notify, other, 0));
    MUST(acl.aclrtSynchronizeStreamWithTimeout(other, 1000));
    MUST(acl.aclrtUnSubscribeReport((uint64_t)pthread_self(), other));
    MUST(acl.aclrtDestroyNotify(notify));
    MUST(acl.aclrtDestroyStream(other));
    MUST(acl.aclrtDestroyStream(main_stream));
    MUST(acl.aclFinalize());
}

static ep_acl_code run_one(const char *name, const char *value)
{
    setenv("EP_CANN_DELAY_US", "0", 1);
    setenv(name, value, 1);
    begin();
    void *stage = pinned(64);
    void *memory = device(64);
    ep_acl_code code = 0;
    for (int i = 0; i < 4 && code == 0; i++) {
        code = acl.aclrtMemcpyAsync(memory, 64, stage, 64, EP_ACL_HOST_TO_DEVICE, main_stream);
        code = code == 0 ? acl.aclrtSynchronizeStreamWithTimeout(main_stream, 10) : code;
    }
    if (code != 507010 && code != 507046) {
        MUST(acl.aclrtFree(memory));
        MUST(acl.aclrtFreeHost(stage));
    }
    return code;
}

Test(cann, a_planned_fault_comes)
{
    cr_assert_eq(run_one("EP_CANN_FAULT_AT", "3"), 507015);
}

Test(cann, a_lost_device_stays_lost)
{
    void *memory = NULL;
    cr_assert_eq(run_one("EP_CANN_LOST_AT", "2"), 507010);
    cr_assert_eq(acl.aclrtMalloc(&memory, 64, EP_ACL_MALLOC_HUGE_FIRST), 507010);
}

Test(cann, one_lost_device_leaves_the_others)
{
    ep_acl_stream second = NULL;
    void *memory = NULL;
    setenv("EP_CANN_DEVICES", "2", 1);
    cr_assert_eq(run_one("EP_CANN_LOST_AT", "2"), 507010);
    cr_assert_eq(acl.aclrtSetDevice(1), 0);
    cr_assert_eq(acl.aclrtMalloc(&memory, 64, EP_ACL_MALLOC_HUGE_FIRST), 0);
    cr_assert_eq(acl.aclrtCreateStream(&second), 0);
    cr_assert_eq(acl.aclrtSynchronizeStreamWithTimeout(second, 1000), 0);
    cr_assert_eq(acl.aclrtSynchronizeStreamWithTimeout(main_stream, 1000), 107003,
                 "a stream of device 0");
    cr_assert_eq(acl.aclrtSetDevice(0), 507010);
}

Test(cann, a_task_that_hangs_times_out_and_can_be_torn_down)
{
    cr_assert_eq(run_one("EP_CANN_HANG_AT", "2"), 507046);
    cr_assert_eq(acl.aclrtDestroyStreamForce(main_stream), 0);
}

Test(cann, no_device)
{
    uint32_t count = 7;
    ep_error error;
    setenv("EP_CANN_DEVICES", "0", 1);
    setenv("ASCEND_HOME_PATH", EP_TEST_CANN, 1);
    cr_assert_eq(ep_acl_symbols_load(ep_acl_opener_system(), &acl, &error), EP_OK, "%s",
                 error.text);
    cr_assert_eq(acl.aclInit(NULL), 0);
    cr_assert_eq(acl.aclrtGetDeviceCount(&count), 207004);
}
