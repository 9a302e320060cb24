/* SPDX-License-Identifier: Apache-2.0 */
/*
 * When a node that holds a frame counts as silent: it has said nothing at all for some time, and a
 * ping that left for it got no answer, or cannot leave because the node takes nothing any more. A
 * node that only computes for long answers pings. Much quicker than the connection's own pings (1
 * s, over shared memory 2 s), since nothing is lost by a wrong guess: the connection stays, the
 * frame is sent to a copy as well, and the first answer counts. Pure.
 *
 * A process that was itself stopped wakes to long silences that are its own: it only pings then,
 * and has read what came in the meantime when the ping's time is over.
 */
#ifndef EP_CLIENT_SILENCE_H
#define EP_CLIENT_SILENCE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"

#define EP_SILENCE_PING_NS (100 * EP_NS_PER_MS)   /* without a sign of life: a ping */
#define EP_SILENCE_ANSWER_NS (150 * EP_NS_PER_MS) /* from the ping's leaving on: silent */
/* While nothing leaves: silent. The largest frame (16 MiB) leaves in 134 ms on a link of 1 Gbit/s.
 * A ping that leaves just before and is not answered still ends within 500 ms. */
#define EP_SILENCE_BLOCKED_NS (200 * EP_NS_PER_MS)

typedef enum ep_silence_verdict {
    EP_SILENCE_NOT,
    EP_SILENCE_PING,
    EP_SILENCE_SILENT
} ep_silence_verdict;

/*
 * Times by ep_clock_now_ns(), 0 never.
 *   sent_ns    the frame was sent
 *   heard_ns   anything came on its connection
 *   pinged_ns  the oldest ping that has had no answer left there; the newest when all have had one
 *   blocked_ns a ping waits to leave since then, and nothing leaves
 * *out_next_ns: when to look again; not set with SILENT.
 */
static inline ep_silence_verdict ep_silence_judge(uint64_t now_ns, uint64_t sent_ns,
                                                  uint64_t heard_ns, uint64_t pinged_ns,
                                                  uint64_t blocked_ns, uint64_t *out_next_ns)
{
    uint64_t since_ns = heard_ns > sent_ns ? heard_ns : sent_ns;
    if (now_ns < since_ns + EP_SILENCE_PING_NS) {
        *out_next_ns = since_ns + EP_SILENCE_PING_NS;
        return EP_SILENCE_NOT;
    }
    if (blocked_ns > heard_ns) {
        *out_next_ns = blocked_ns + EP_SILENCE_BLOCKED_NS;
        return now_ns < *out_next_ns ? EP_SILENCE_NOT : EP_SILENCE_SILENT;
    }
    if (pinged_ns <= heard_ns) {
        *out_next_ns = now_ns + EP_SILENCE_ANSWER_NS;
        return EP_SILENCE_PING;
    }
    if (now_ns < pinged_ns + EP_SILENCE_ANSWER_NS) {
        *out_next_ns = pinged_ns + EP_SILENCE_ANSWER_NS;
        return EP_SILENCE_NOT;
    }
    return EP_SILENCE_SILENT;
}

#endif
