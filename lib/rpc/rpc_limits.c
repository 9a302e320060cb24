/* SPDX-License-Identifier: Apache-2.0 */
/* The limits of the RPC layer in one table: default and allowed range. */
#include "rpc/rpc_limits.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/host.h"
#include "wire/frame.h"

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)

void ep_rpc_limits_default(ep_rpc_limits *out_limits)
{
    *out_limits = (ep_rpc_limits){
        .frame_bytes_max = 16 * MIB,
        .header_bytes_max = 64 * KIB,
        .unpack_bytes_max = 1 * MIB,
        .credit_bytes = 64 * MIB,
        .send_queue_bytes_max = 96 * MIB,
        .connections_max = 4096,
        .calls_per_connection_max = 1024,
        .hello_timeout_ms = 5000,
        .ping_ms = 500,
        .ping_dead_count = 3,
        .redial_min_ms = 10,
        .redial_max_ms = 200,
    };
}

void ep_rpc_limits_raise_for_control(ep_rpc_limits *limits)
{
    size_t header = 4 * MIB, unpack = 32 * MIB;
    limits->header_bytes_max =
        limits->header_bytes_max > header ? limits->header_bytes_max : header;
    limits->unpack_bytes_max =
        limits->unpack_bytes_max > unpack ? limits->unpack_bytes_max : unpack;
    if (limits->frame_bytes_max < 2 * limits->header_bytes_max) {
        limits->frame_bytes_max = 2 * limits->header_bytes_max;
    }
    if (limits->send_queue_bytes_max < limits->frame_bytes_max) {
        limits->send_queue_bytes_max = limits->frame_bytes_max;
    }
}

ep_err ep_rpc_limits_check(const ep_rpc_limits *l, ep_error *out_error)
{
    const struct {
        const char *name;
        uint64_t value;
        uint64_t min;
        uint64_t max;
    } rows[] = {
        {"frame_bytes_max", l->frame_bytes_max, 1024, EP_FRAME_BYTES_CEILING},
        {"header_bytes_max", l->header_bytes_max, 256,
         l->frame_bytes_max / 2 < EP_FRAME_HEADER_BYTES_CEILING ? l->frame_bytes_max / 2
                                                                : EP_FRAME_HEADER_BYTES_CEILING},
        {"unpack_bytes_max", l->unpack_bytes_max, 4096, (uint64_t)1 << 30},
        {"credit_bytes", l->credit_bytes, 1024, (uint64_t)1 << 40},
        {"send_queue_bytes_max", l->send_queue_bytes_max, l->frame_bytes_max, (uint64_t)1 << 40},
        {"connections_max", l->connections_max, 1, 1u << 20},
        {"calls_per_connection_max", l->calls_per_connection_max, 1, 1u << 20},
        {"hello_timeout_ms", l->hello_timeout_ms, 1, 3600000},
        {"ping_ms", l->ping_ms, 0, 3600000},
        {"ping_dead_count", l->ping_dead_count, 1, 1000},
        {"redial_min_ms", l->redial_min_ms, 1, 3600000},
        {"redial_max_ms", l->redial_max_ms, l->redial_min_ms, 3600000},
    };
    for (size_t i = 0; i < EP_ARRAY_COUNT(rows); i++) {
        if (rows[i].value < rows[i].min || rows[i].value > rows[i].max) {
            return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                                "%s is %llu, allowed %llu to %llu", rows[i].name,
                                (unsigned long long)rows[i].value, (unsigned long long)rows[i].min,
                                (unsigned long long)rows[i].max);
        }
    }
    return EP_OK;
}

size_t ep_rpc_first_frame_bytes_max(const ep_rpc_limits *limits, bool accepted)
{
    size_t header_bytes = limits->header_bytes_max;
    if (accepted && header_bytes > EP_RPC_HELLO_REQUEST_BYTES_MAX) {
        header_bytes = EP_RPC_HELLO_REQUEST_BYTES_MAX;
    }
    return ep_frame_tensor_offset((uint32_t)header_bytes);
}

ep_err ep_rpc_common_copy(const ep_rpc_common *common, ep_rpc_common *out_copy, ep_error *out_error)
{
    ep_err err = ep_rpc_limits_check(&common->limits, out_error);
    if (err != EP_OK) {
        return err;
    }
    if (common->node != NULL && strlen(common->node) >= EP_NODE_NAME_BYTES) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "node name has %zu bytes, allowed up to %d", strlen(common->node),
                            EP_NODE_NAME_BYTES - 1);
    }
    if (common->host != NULL && strlen(common->host) >= EP_HOST_BYTES) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "host has %zu bytes, allowed up to %d", strlen(common->host),
                            EP_HOST_BYTES - 1);
    }
    char boot_id[EP_HOST_BYTES];
    ep_host_boot_id(boot_id);
    ep_rpc_common copy = *common;
    copy.token = strdup(common->token == NULL ? "" : common->token);
    copy.node = strdup(common->node == NULL ? "" : common->node);
    copy.host = strdup(common->host == NULL ? boot_id : common->host);
    copy.role = strdup(common->role == NULL ? "" : common->role);
    if (copy.token == NULL || copy.node == NULL || copy.host == NULL || copy.role == NULL) {
        ep_rpc_common_free(&copy);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the RPC configuration");
    }
    *out_copy = copy;
    return EP_OK;
}

void ep_rpc_common_free(ep_rpc_common *copy)
{
    /* the strings are ours: ep_rpc_common_copy allocated them */
    free((void *)(uintptr_t)copy->token);
    free((void *)(uintptr_t)copy->node);
    free((void *)(uintptr_t)copy->host);
    free((void *)(uintptr_t)copy->role);
}
