/* SPDX-License-Identifier: Apache-2.0 */
/* The stream lane of programs that only use our client: by the environment, strictly read, and
 * after the program's own word. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "transport/transport.h"

static void set(const char *lane, const char *poll)
{
    lane != NULL ? setenv("LIBEXPERTD_STREAM_LANE", lane, 1) : unsetenv("LIBEXPERTD_STREAM_LANE");
    poll != NULL ? setenv("LIBEXPERTD_BUSY_POLL_US", poll, 1) : unsetenv("LIBEXPERTD_BUSY_POLL_US");
}

static void expect_bad(const char *lane, const char *poll, const char *part)
{
    ep_error error;
    set(lane, poll);
    cr_expect_eq(ep_stream_lane_read_environment(&error), EP_ERR_INVALID_ARGUMENT);
    cr_expect_not_null(strstr(error.text, part), "no '%s' in: %s", part, error.text);
}

static void expect_now(const char *name, uint32_t poll_us)
{
    ep_stream_lane_stats now;
    ep_stream_lane_read_stats(&now);
    cr_expect_str_eq(now.name, name);
    cr_expect_eq(now.busy_poll_us, poll_us);
    cr_expect_str_eq(ep_lane_for_url("tcp://127.0.0.1:1")->name,
                     strcmp(name, "uv") == 0 ? "uv-stream" : "nng-stream");
}

Test(stream_choice, wrong_values_are_named_with_what_is_allowed)
{
    static const char *const bad_us[] = {
        "-1", "100001", "1x", " 1", "+1", "0x10", "101ms", "1K", "99999999999999999999"};
    expect_bad("libuv", NULL, "LIBEXPERTD_STREAM_LANE is 'libuv', allowed: uv, nng");
    for (size_t i = 0; i < sizeof(bad_us) / sizeof(bad_us[0]); i++) {
        expect_bad(NULL, bad_us[i], "allowed: 0 to 100000");
        expect_bad(NULL, bad_us[i], "LIBEXPERTD_BUSY_POLL_US");
    }
    expect_now("uv", 0);
}

Test(stream_choice, the_environment_chooses_until_the_program_does)
{
    ep_error error;
    expect_now("uv", 0);
    set("", "");
    cr_assert_eq(ep_stream_lane_read_environment(&error), EP_OK);
    expect_now("uv", 0);
    set("nng", "0.1s");
    cr_assert_eq(ep_stream_lane_read_environment(&error), EP_OK);
    expect_now("nng", 100000);
    cr_assert_eq(ep_stream_lane_choose("uv", &error), EP_OK);
    ep_stream_lane_set_busy_poll(7);
    cr_assert_eq(ep_stream_lane_read_environment(&error), EP_OK);
    expect_now("uv", 7);
    cr_assert_eq(ep_stream_lane_choose("UV", &error), EP_ERR_INVALID_ARGUMENT);
}
