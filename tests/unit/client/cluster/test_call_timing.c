/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>

#include "cluster/call_timing.h"

static uint64_t wire_us(uint64_t wait_us, uint64_t queue_us, uint64_t compute_us,
                        uint64_t service_us)
{
    const ep_frame_timing timing = {wait_us, queue_us, compute_us, service_us};
    return ep_timing_wire_us(&timing);
}

Test(call_timing, wire_is_what_the_node_does_not_claim)
{
    cr_assert_eq(wire_us(100, 20, 50, 80), 20);
    cr_assert_eq(wire_us(100, 20, 50, 0), 30, "a node that tells no service time");
    cr_assert_eq(wire_us(100, 20, 50, 60), 30, "service below its parts");
    cr_assert_eq(wire_us(100, 0, 0, 0), 100);
}

Test(call_timing, a_lying_node_gives_no_negative_wire)
{
    cr_assert_eq(wire_us(100, 200, 50, 0), 0);
    cr_assert_eq(wire_us(100, 0, 0, UINT64_MAX), 0);
    cr_assert_eq(wire_us(100, UINT64_MAX, UINT64_MAX, 3), 0, "a sum that overflows");
    cr_assert_eq(wire_us(0, 0, 0, 0), 0);
}
