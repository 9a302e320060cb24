/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decides when a node with an unanswered frame counts as silent: nothing has come from it for some
 * time, and a ping got no answer or cannot be sent because the node reads nothing. A node that
 * computes for long answers pings. The limits are much shorter than those of the connection (1 s,
 * over shared memory 2 s), since a wrong guess costs little: the connection stays, the frame is
 * sent to a copy too, and the first answer counts. Pure.
 *
 * A process that was itself stopped sees long silences afterwards. It only sends a ping then; when
 * the ping's time is over, it has read what came in the meantime.
 */
#ifndef EP_CLIENT_SILENCE_H
#define EP_CLIENT_SILENCE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"

#define EP_SILENCE_PING_NS (100 * EP_NS_PER_MS)   /* nothing heard for so long: send a ping */
#define EP_SILENCE_ANSWER_NS (150 * EP_NS_PER_MS) /* ping unanswered for so long: silent */
/* Nothing can be sent for so long: silent. The largest frame (16 MiB) takes 134 ms at 1 Gbit/s. A
 * ping that is sent just before and not answered still ends within 500 ms. */
#define EP_SILENCE_BLOCKED_NS (200 * EP_NS_PER_MS)

typedef enum ep_silence_verdict {
    EP_SILENCE_NOT,
    EP_SILENCE_PING,
    EP_SILENCE_SILENT
} ep_silence_verdict;

/*
 * Times of ep_clock_now_ns(); 0: never.
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
