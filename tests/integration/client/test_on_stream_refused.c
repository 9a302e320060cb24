/* SPDX-License-Identifier: Apache-2.0 */
/* What calls on tensors of a device refuse, and in which words. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"
#include "support/caller_device.h"
#include "support/expect.h"

static harness h;
static batch b;
static ep_moe_args args;
static ep_tensor out;
static ep_call *call;
static ep_error error;

/* A batch whose tokens, ids, scales and result are on the device. */
static void open_all(void)
{
    device_open(EP_TEST_CANN, 1, "0");
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 1);
    batch_make(&b, &h, 4, 2, 1);
    args = b.args;
    args.x = device_tensor(&args.x, device_alloc(b.out_bytes), NULL);
    args.expert_ids = device_tensor(&args.expert_ids, device_alloc(4 * 2 * sizeof(*b.ids)), NULL);
    args.expert_scales =
        device_tensor(&args.expert_scales, device_alloc(4 * 2 * sizeof(*b.scales)), NULL);
    out = device_tensor(&b.out_tensor, device_alloc(b.out_bytes), NULL);
}

static void close_all(void)
{
    ep_call_destroy(call);
    batch_free(&b);
    harness_close(&h);
    device_close();
}

static void on_tokens(void *arg, ep_call *own_call, uint32_t first, uint32_t count)
{
    cr_assert_fail("%p %p %u %u", arg, (void *)own_call, first, count);
}

static void expect(ep_err err, ep_err wanted, const char *part)
{
    cr_expect_eq(err, wanted, "%s, want %s '%s'", error.text, ep_err_name(wanted), part);
    EXPECT_TEXT(error, part);
}

static void refused(ep_err wanted, const char *part)
{
    expect(ep_call_create(h.client, &args, &out, &call, &error), wanted, part);
    cr_expect_null(call);
}

Test(on_stream_refused, tensors_that_cannot_be_taken)
{
    open_all();
    const ep_moe_args good = args;
    const ep_tensor good_out = out;

    args.x = b.args.x;
    refused(EP_ERR_INVALID_ARGUMENT,
            "x is in host memory, other tensors are on a device: x and out must both be there");
    args = good;
    out = b.out_tensor;
    refused(EP_ERR_INVALID_ARGUMENT, "out is in host memory");
    out = good_out;
    args.expert_ids.device_id = 1;
    refused(EP_ERR_INVALID_ARGUMENT, "expert_ids is on device 1: this thread's is 0");
    args = good;
    args.expert_ids.sync_handle = 7;
    refused(EP_ERR_INVALID_ARGUMENT,
            "expert_ids has sync_handle 0x7, a tensor before it 0x0: allowed one for all");
    args.x.sync_handle = args.expert_scales.sync_handle = out.sync_handle = 7;
    refused(EP_ERR_INVALID_ARGUMENT, "x has sync_handle 0x7: allowed 0, ep_moe_begin_on_stream and "
                                     "ep_moe_finish_on_stream name the stream");
    args = good;
    out = good_out;
    args.on_tokens = on_tokens;
    refused(EP_ERR_INVALID_ARGUMENT, "on_tokens is set with tensors on a device: allowed NULL");
    args = good;
    out.stride_bytes[0] *= 2;
    refused(
        EP_ERR_INVALID_ARGUMENT,
        "out has stride 128 in dimension 0: allowed 64, since a result on a device has no gaps");
    out = good_out;
    args.x.shape[0] = -1;
    refused(EP_ERR_INVALID_ARGUMENT, "x has -1 and stride 64 in dimension 0");
    args = good;
    args.x.shape[0] = UINT32_MAX;
    args.x.stride_bytes[0] = INT64_MAX;
    refused(EP_ERR_INVALID_ARGUMENT, "x is larger than memory");
    args = good;
    args.x.shape[0] = INT64_C(1) << 28; /* 16 GiB are some, and looked at further */
    args.x.device_id = 1;
    refused(EP_ERR_INVALID_ARGUMENT, "x is on device 1: this thread's is 0");
    args = good;
    args.x.data = NULL;
    refused(EP_ERR_INVALID_ARGUMENT, "x has no data");
    args = good;
    args.x.memory = (ep_memory_kind)2;
    refused(EP_ERR_UNIMPLEMENTED, "x is in memory of kind 2: allowed here is 0, the host's");
    args = good;
    args.x.shape[1]--; /* the form that all calls want is checked too */
    refused(EP_ERR_INVALID_ARGUMENT, "x has hidden 31");
    close_all();
}

Test(on_stream_refused, other_functions_take_host_memory)
{
    ep_moe_result result;
    open_all();
    expect(ep_moe_forward(h.client, &args, &out, &result), EP_ERR_UNIMPLEMENTED, "");
    ASSERT_TEXT(result.error, "x is in memory of kind 1: allowed here is 0");
    ASSERT_OK(ep_call_create(h.client, &args, &out, &call, &error), error);
    expect(ep_call_begin(call, 4, &error), EP_ERR_FAILED_PRECONDITION,
           "the call's tensors are on a device: ep_moe_begin_on_stream begins it");
    ep_call_destroy(call);
    ASSERT_OK(ep_call_create(h.client, &b.args, &b.out_tensor, &call, &error), error);
    expect(ep_moe_begin_on_stream(call, 4, device_streams[0], &error), EP_ERR_FAILED_PRECONDITION,
           "the call's tensors are in host memory: ep_call_begin and ep_call_finish are its "
           "functions");
    expect(ep_moe_finish_on_stream(call, device_streams[0], &error), EP_ERR_FAILED_PRECONDITION,
           "in host memory");
    close_all();
}

Test(on_stream_refused, what_is_not_its_turn)
{
    ep_moe_result result;
    open_all();
    expect(ep_moe_begin_on_stream(NULL, 4, device_streams[0], &error), EP_ERR_FAILED_PRECONDITION,
           "was not made by ep_call_create");
    ASSERT_OK(ep_call_create(h.client, &args, &out, &call, &error), error);
    expect(ep_moe_finish_on_stream(call, device_streams[0], &error), EP_ERR_FAILED_PRECONDITION,
           "the call has not begun");
    expect(ep_call_finish(call, &result), EP_ERR_FAILED_PRECONDITION, "");
    expect(ep_moe_begin_on_stream(call, 4, NULL, &error), EP_ERR_INVALID_ARGUMENT,
           "stream is NULL");
    expect(ep_moe_begin_on_stream(call, 5, device_streams[0], &error), EP_ERR_INVALID_ARGUMENT,
           "n_active is 5: allowed 0..4");
    ASSERT_OK(ep_moe_begin_on_stream(call, 0, device_streams[0], &error), error); /* no tokens are
                                                                                     some, too */
    expect(ep_moe_begin_on_stream(call, 0, device_streams[0], &error), EP_ERR_FAILED_PRECONDITION,
           "ep_call_finish comes first");
    ASSERT_OK(ep_moe_finish_on_stream(call, device_streams[0], &error), error);
    expect(ep_moe_finish_on_stream(call, device_streams[0], &error), EP_ERR_FAILED_PRECONDITION,
           "came already: ep_call_finish is next");
    ASSERT_OK(ep_call_finish(call, &result), result.error);
    close_all();
}

Test(on_stream_refused, a_call_of_no_tokens_is_none)
{
    ep_moe_result result;
    open_all();
    args.x.shape[0] = args.expert_ids.shape[0] = args.expert_scales.shape[0] = out.shape[0] = 0;
    args.x.data = args.expert_ids.data = args.expert_scales.data = out.data = NULL;
    ASSERT_OK(ep_call_create(h.client, &args, &out, &call, &error), error);
    ASSERT_OK(ep_moe_begin_on_stream(call, 0, device_streams[0], &error), error);
    ASSERT_OK(ep_moe_finish_on_stream(call, device_streams[0], &error), error);
    ep_call_cancel(call); /* or not: it may have ended */
    const ep_err err = ep_call_finish(call, &result);
    cr_assert(err == EP_OK || err == EP_ERR_CANCELLED, "%s", result.error.text);
    close_all();
}

static void *create_elsewhere(void *arg)
{
    *(ep_err *)arg = ep_call_create(h.client, &args, &out, &call, &error);
    return NULL;
}

Test(on_stream_refused, a_thread_without_a_device)
{
    pthread_t thread;
    ep_err err = EP_OK;
    open_all();
    cr_assert_eq(pthread_create(&thread, NULL, create_elsewhere, &err), 0);
    pthread_join(thread, NULL);
    expect(err, EP_ERR_FAILED_PRECONDITION,
           "x is on device 0, and this thread works on none: aclrtSetDevice comes first (");
    cr_expect_null(call);
    close_all();
}

Test(on_stream_refused, without_the_runtime_it_names_the_library)
{
    int64_t memory = 0;
    setenv("ASCEND_HOME_PATH", "/nonexistent", 1);
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 1);
    batch_make(&b, &h, 4, 2, 1);
    args = b.args;
    args.x = device_tensor(&args.x, &memory, NULL);
    out = device_tensor(&b.out_tensor, &memory, NULL);
    refused(EP_ERR_FAILED_PRECONDITION, "x is on an Ascend device, which needs CANN's runtime");
    EXPECT_TEXT(error, "neither libacl_rt.so nor libascendcl.so can be opened");
    batch_free(&b);
    harness_close(&h);
}
