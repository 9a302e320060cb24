/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The list of lanes, and which one serves a URL. tcp:// has two: the program chooses, else the
 * environment, else it is uv. No lane needs this file.
 */
#include "transport/transport.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/quantity.h"
#include "transport/address.h"
#include "transport/lane_common.h"
#include "transport/uv/uv_lane.h"

#define BUSY_POLL_US_MAX 100000
#define FINI_WAIT_MS 5000

/* If two serve a scheme, the first is used; nng instead of uv if chosen. */
static const ep_lane_ops *const lanes[] = {&ep_loopback_lane, &ep_shm_lane, &ep_uv_stream_lane,
                                           &ep_nng_stream_lane};
static const ep_lane_ops *registered; /* atomic */

static bool by_nng; /* atomic */
static bool chosen; /* atomic: the program has chosen */

static bool is_by_nng(void)
{
    return __atomic_load_n(&by_nng, __ATOMIC_ACQUIRE);
}

static ep_err set_by_name(const char *name, const char *what, ep_error *out_error)
{
    bool nng = strcmp(name, "nng") == 0;
    if (!nng && strcmp(name, "uv") != 0) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, "%s is '%.32s', allowed: uv, nng",
                            what, name);
    }
    __atomic_store_n(&by_nng, nng, __ATOMIC_RELEASE);
    return EP_OK;
}

ep_err ep_stream_lane_choose(const char *name, ep_error *out_error)
{
    ep_err err = set_by_name(name, "the stream lane", out_error);
    if (err == EP_OK) {
        __atomic_store_n(&chosen, true, __ATOMIC_RELEASE);
    }
    return err;
}

ep_err ep_stream_lane_read_environment(ep_error *out_error)
{
    const char *lane = getenv("LIBEXPERTD_STREAM_LANE");
    const char *poll = getenv("LIBEXPERTD_BUSY_POLL_US");
    ep_err err = EP_OK;
    if (__atomic_load_n(&chosen, __ATOMIC_ACQUIRE)) {
        return EP_OK;
    }
    if (lane != NULL && lane[0] != 0) {
        err = set_by_name(lane, "LIBEXPERTD_STREAM_LANE", out_error);
    }
    if (err == EP_OK && poll != NULL && poll[0] != 0) {
        uint64_t value = 0;
        const char *wrong = ep_quantity_parse(poll, EP_UNIT_US, EP_UNIT_US, &value);
        if (wrong != NULL || value > BUSY_POLL_US_MAX) {
            return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                                "LIBEXPERTD_BUSY_POLL_US is '%.32s', allowed: 0 to %d us", poll,
                                BUSY_POLL_US_MAX);
        }
        ep_stream_lane_set_busy_poll((uint32_t)value);
    }
    return err;
}

void ep_stream_lane_read_stats(ep_stream_lane_stats *out_stats)
{
    out_stats->name = is_by_nng() ? "nng" : "uv";
    out_stats->busy_poll_us = (uint32_t)(ep_stream_lane_busy_poll_ns() / EP_NS_PER_US);
    out_stats->polls_total = ep_uv_polls();
}

void ep_lane_register(const ep_lane_ops *ops)
{
    __atomic_store_n(&registered, ops, __ATOMIC_RELEASE);
}

static bool serves(const ep_lane_ops *ops, const char *url)
{
    for (const char *const *scheme = ops->schemes; *scheme != NULL; scheme++) {
        if (ep_url_has_scheme(url, *scheme)) {
            return true;
        }
    }
    return false;
}

const ep_lane_ops *ep_lane_for_url(const char *url)
{
    for (size_t i = 0; i < EP_ARRAY_COUNT(lanes); i++) {
        const bool is_left_out = lanes[i] == &ep_uv_stream_lane && is_by_nng();
        if (!is_left_out && serves(lanes[i], url)) {
            return lanes[i];
        }
    }
    const ep_lane_ops *more = __atomic_load_n(&registered, __ATOMIC_ACQUIRE);
    return more != NULL && serves(more, url) ? more : NULL;
}

ep_err ep_lane_check_fork(const char *url, ep_error *out_error)
{
    const ep_lane_ops *ops = ep_lane_for_url(url);
    return ops != NULL && ops->check_fork != NULL ? ops->check_fork(out_error) : EP_OK;
}

void ep_transport_fini(void)
{
    if (!ep_lane_wait_dropped(FINI_WAIT_MS)) {
        return; /* keep the threads: they may still be needed */
    }
    for (size_t i = 0; i < EP_ARRAY_COUNT(lanes); i++) {
        if (lanes[i]->fini != NULL) {
            lanes[i]->fini();
        }
    }
}
