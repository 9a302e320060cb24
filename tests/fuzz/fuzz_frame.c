/* SPDX-License-Identifier: Apache-2.0 */
/* The fixed part of a frame. A decoded one, encoded again, gives the same 64 bytes. */
#include <string.h>

#include "fuzz.h"
#include "wire/frame.h"

static void fix_crc(uint8_t *data)
{
    uint32_t crc = ep_crc32c(0, data, EP_FRAME_FIXED_BYTES - 4);
    memcpy(data + EP_FRAME_FIXED_BYTES - 4, &crc, 4);
}

static size_t mutate(uint8_t *data, size_t bytes, size_t bytes_max, uint32_t random)
{
    static const uint8_t edges[] = {0, 1, 2, 7, 8, 9, 0x3f, 0x40, 0x7f, 0x80, 0xc0, 0xfe, 0xff};
    bytes = fuzz_mutate_bytes(data, bytes, bytes_max);
    if (bytes < EP_FRAME_FIXED_BYTES) {
        return bytes;
    }
    if (random % 2 == 0) {
        data[4 + random / 2 % 56] = edges[random / 128 % sizeof(edges)];
    }
    memcpy(data, "EPD1\1", 5);
    if (random % 3 != 0) { /* an offset that fits the header's length */
        uint32_t header_bytes, offset;
        memcpy(&header_bytes, data + 28, 4);
        header_bytes %= 100000;
        offset = ep_frame_tensor_offset(header_bytes);
        memcpy(data + 28, &header_bytes, 4);
        memcpy(data + 32, &offset, 4);
        memset(data + 44, 0, 4);
        memset(data + 52, 0, 8);
    }
    fix_crc(data);
    return bytes;
}

size_t (*const fuzz_mutate)(uint8_t *, size_t, size_t, uint32_t) = mutate;

static const ep_frame frames[] = {
    {.kind = EP_FRAME_REQUEST,
     .call_id = 7,
     .method_id = 0x0101,
     .deadline_us = EP_FRAME_DEADLINE_NONE,
     .header_bytes = 40,
     .tensor_bytes = 4096,
     .payload_crc = 0x12345678},
    {.kind = EP_FRAME_REPLY,
     .call_id = UINT64_MAX,
     .status = 14,
     .header_bytes = 3,
     .flags = EP_FRAME_FLAG_DRAINING},
    {.kind = EP_FRAME_REPLY_MORE, .call_id = 3, .stream_sequence = 9, .header_bytes = 1},
    {.kind = EP_FRAME_CANCEL, .call_id = 1ull << 40},
    {.kind = EP_FRAME_PING},
    {.kind = EP_FRAME_PONG},
    {.kind = EP_FRAME_CREDIT, .header_bytes = EP_FRAME_CREDIT_BYTES},
    {.kind = EP_FRAME_GOODBYE},
};

size_t fuzz_seed(size_t index, uint8_t *out)
{
    if (index >= sizeof(frames) / sizeof(frames[0])) {
        return 0;
    }
    ep_frame frame = frames[index];
    frame.tensor_offset = ep_frame_tensor_offset(frame.header_bytes);
    ep_frame_encode(&frame, out);
    memset(out + EP_FRAME_FIXED_BYTES, 0x5a, EP_FRAME_CREDIT_BYTES);
    return EP_FRAME_FIXED_BYTES + EP_FRAME_CREDIT_BYTES;
}

void fuzz_one(const uint8_t *data, size_t bytes)
{
    ep_frame frame;
    ep_frame_credit credit;
    uint8_t again[EP_FRAME_FIXED_BYTES], credit_again[EP_FRAME_CREDIT_BYTES];
    size_t frame_bytes = 0, lane_bytes = 0;
    ep_error error;
    if (bytes < EP_FRAME_FIXED_BYTES) {
        return;
    }
    ep_err err = ep_frame_decode(data, (size_t)16 << 20, 65536, &frame, &frame_bytes, &error);
    ep_err lane = ep_frame_read_bytes(data, &lane_bytes, &error);
    if (err == EP_OK) {
        FUZZ_CHECK(lane == EP_OK && lane_bytes == frame_bytes);
        FUZZ_CHECK(frame_bytes >= EP_FRAME_FIXED_BYTES && frame_bytes <= (size_t)16 << 20);
        FUZZ_CHECK(frame.tensor_offset % EP_FRAME_ALIGN == 0 &&
                   frame.tensor_offset + frame.tensor_bytes <= frame_bytes);
        FUZZ_CHECK(frame.header_bytes <= 65536);
        ep_frame_encode(&frame, again);
        FUZZ_CHECK(memcmp(again, data, sizeof(again)) == 0);
        FUZZ_CHECK(ep_frame_kind_name(frame.kind)[0] != 'u');
    } else {
        FUZZ_CHECK(error.text[0] != 0);
    }
    if (bytes >= EP_FRAME_FIXED_BYTES + EP_FRAME_CREDIT_BYTES) {
        ep_frame_credit_decode(data + EP_FRAME_FIXED_BYTES, &credit);
        ep_frame_credit_encode(&credit, credit_again);
        FUZZ_CHECK(memcmp(credit_again, data + EP_FRAME_FIXED_BYTES, sizeof(credit_again)) == 0);
    }
}
