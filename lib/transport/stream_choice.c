/* SPDX-License-Identifier: Apache-2.0 */
/* Which lane serves tcp:// in this process, and how: by its program, else by the environment, else
 * uv. */
#include <stdlib.h>
#include <string.h>

#include "base/quantity.h"
#include "transport/lane_common.h"

#define BUSY_POLL_US_MAX 100000

static bool by_nng; /* atomic */
static bool chosen; /* atomic: by the program */

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
    out_stats->name = ep_stream_lane_is_nng() ? "nng" : "uv";
    out_stats->busy_poll_us = ep_uv_stream_busy_poll(&out_stats->polls_total);
}

bool ep_stream_lane_is_nng(void)
{
    return __atomic_load_n(&by_nng, __ATOMIC_ACQUIRE);
}
