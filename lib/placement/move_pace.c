/* SPDX-License-Identifier: Apache-2.0 */
#include "placement/move_pace.h"

#include <math.h>

#include "base/clock.h"

#define EXCHANGE_COPIES 2

void ep_move_pace_tick(ep_move_pace *pace, uint64_t bytes_per_s, uint64_t now_ns)
{
    const double second = (double)bytes_per_s;
    if (bytes_per_s != pace->bytes_per_s) {
        *pace = (ep_move_pace){.bytes_per_s = bytes_per_s, .left_bytes = second, .seen_ns = now_ns};
        return;
    }
    const double gained = (double)(now_ns - pace->seen_ns) / (double)EP_NS_PER_S * second;
    pace->left_bytes = fmin(pace->left_bytes + gained, second);
    pace->seen_ns = now_ns;
}

uint32_t ep_move_pace_copies(const ep_move_pace *pace, uint64_t copy_bytes, uint32_t copies_max)
{
    if (pace->bytes_per_s == 0 || copy_bytes == 0) {
        return copies_max;
    }
    if (pace->left_bytes <= 0) {
        return 0;
    }
    const double copies = fmax(ceil(pace->left_bytes / (double)copy_bytes), EXCHANGE_COPIES);
    return copies < copies_max ? (uint32_t)copies : copies_max;
}

void ep_move_pace_charge(ep_move_pace *pace, uint64_t copy_bytes)
{
    const double debt_max = fmax((double)pace->bytes_per_s, EXCHANGE_COPIES * (double)copy_bytes);
    pace->left_bytes = fmax(pace->left_bytes - (double)copy_bytes, -debt_max);
}
