/* SPDX-License-Identifier: Apache-2.0 */
#include "fuzz_peer.h"

#include <string.h>

void fuzz_peer_control(raw_peer *p, const uint8_t *rest, size_t bytes)
{
    uint8_t credit[EP_FRAME_CREDIT_BYTES] = {0};
    if (bytes < 2 || rest[0] < EP_FRAME_CANCEL || rest[0] > EP_FRAME_KIND_LAST) {
        return;
    }
    ep_frame frame = {.kind = (ep_frame_kind)rest[0]};
    frame.call_id = frame.kind == EP_FRAME_CANCEL ? rest[1] : 0;
    memcpy(credit, rest + 2, bytes - 2 < sizeof(credit) ? bytes - 2 : sizeof(credit));
    if (frame.kind == EP_FRAME_CREDIT) {
        frame.header_bytes = sizeof(credit);
    }
    raw_peer_send(p, frame, credit, NULL, false);
}

void fuzz_peer_wait_read(raw_peer *p)
{
    ep_frame frame = {.kind = EP_FRAME_PING};
    ep_buffer *reply;
    raw_peer_send(p, frame, NULL, NULL, false);
    while ((reply = raw_peer_receive(p, &frame)) != NULL) {
        ep_buffer_unref(reply);
        if (frame.kind == EP_FRAME_PONG) {
            break;
        }
    }
}
