/* SPDX-License-Identifier: Apache-2.0 */
/* Envelope of the frames between ranks. */
#include "group/group_frame.h"

#include <inttypes.h>
#include <string.h>

#include "wire/frame.h"

#define MAGIC 0x31475045u /* "EPG1" */
#define VERSION 2
#define PAYLOAD_BYTES_CEILING ((uint64_t)1 << 40)

static void put(uint8_t *out, uint64_t value, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        out[i] = (uint8_t)(value >> (8 * i));
    }
}

static uint64_t get(const uint8_t *in, size_t bytes)
{
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; i++) {
        value |= (uint64_t)in[i] << (8 * i);
    }
    return value;
}

void ep_group_frame_encode(const ep_group_frame *frame, uint8_t out[EP_GROUP_FRAME_FIXED_BYTES])
{
    memset(out, 0, EP_GROUP_FRAME_FIXED_BYTES);
    put(out, MAGIC, 4);
    out[4] = VERSION;
    out[5] = (uint8_t)frame->kind;
    put(out + 6, frame->flags, 2);
    put(out + 8, frame->membership, 8);
    put(out + 16, frame->rank, 4);
    put(out + 20, frame->generation, 4);
    put(out + 24, frame->number, 8);
    put(out + 32, frame->payload_bytes, 8);
    put(out + 40, frame->payload_crc, 4);
    put(out + 44, frame->origin, 4);
    put(out + 60, ep_crc32c(0, out, 60), 4);
}

ep_err ep_group_frame_decode(const uint8_t fixed[EP_GROUP_FRAME_FIXED_BYTES],
                             ep_group_frame *out_frame, ep_error *out_error)
{
    if (get(fixed, 4) != MAGIC || fixed[4] != VERSION) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL, "not a frame of a group of version %d",
                            VERSION);
    }
    if (get(fixed + 60, 4) != ep_crc32c(0, fixed, 60)) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL,
                            "a group frame's fixed part is damaged (CRC)");
    }
    if (fixed[5] < EP_GROUP_FRAME_HELLO || fixed[5] > EP_GROUP_FRAME_KIND_LAST) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL, "a group frame has kind %u: allowed 1..%d",
                            fixed[5], EP_GROUP_FRAME_KIND_LAST);
    }
    uint64_t payload = get(fixed + 32, 8);
    if (payload > PAYLOAD_BYTES_CEILING) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL, "a group frame announces %" PRIu64 " bytes",
                            payload);
    }
    *out_frame = (ep_group_frame){.kind = (ep_group_frame_kind)fixed[5],
                                  .flags = (uint16_t)get(fixed + 6, 2),
                                  .membership = get(fixed + 8, 8),
                                  .rank = (uint32_t)get(fixed + 16, 4),
                                  .generation = (uint32_t)get(fixed + 20, 4),
                                  .number = get(fixed + 24, 8),
                                  .payload_bytes = payload,
                                  .payload_crc = (uint32_t)get(fixed + 40, 4),
                                  .origin = (uint32_t)get(fixed + 44, 4)};
    return EP_OK;
}

ep_err ep_group_frame_read_bytes(const uint8_t fixed[EP_GROUP_FRAME_FIXED_BYTES],
                                 size_t *out_frame_bytes, ep_error *out_error)
{
    ep_group_frame frame;
    ep_err err = ep_group_frame_decode(fixed, &frame, out_error);
    if (err == EP_OK) {
        *out_frame_bytes = EP_GROUP_FRAME_FIXED_BYTES + (size_t)frame.payload_bytes;
    }
    return err;
}

void ep_group_hello_encode(const ep_group_hello *hello, uint8_t out[EP_GROUP_HELLO_BYTES])
{
    put(out, hello->world_size, 4);
    put(out + 4, hello->rank, 4);
    uint8_t *at = out + 8;
    memcpy(at, hello->name, sizeof(hello->name));
    at += sizeof(hello->name);
    memcpy(at, hello->url, sizeof(hello->url));
    at += sizeof(hello->url);
    memcpy(at, hello->token, sizeof(hello->token));
    at += sizeof(hello->token);
    memcpy(at, hello->host, sizeof(hello->host));
}

ep_err ep_group_hello_decode(const uint8_t *payload, size_t bytes, ep_group_hello *out_hello,
                             ep_error *out_error)
{
    if (bytes != EP_GROUP_HELLO_BYTES) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL, "a group hello has %zu bytes: allowed %d",
                            bytes, EP_GROUP_HELLO_BYTES);
    }
    out_hello->world_size = (uint32_t)get(payload, 4);
    out_hello->rank = (uint32_t)get(payload + 4, 4);
    const uint8_t *at = payload + 8;
    memcpy(out_hello->name, at, sizeof(out_hello->name));
    at += sizeof(out_hello->name);
    memcpy(out_hello->url, at, sizeof(out_hello->url));
    at += sizeof(out_hello->url);
    memcpy(out_hello->token, at, sizeof(out_hello->token));
    at += sizeof(out_hello->token);
    memcpy(out_hello->host, at, sizeof(out_hello->host));
    if (memchr(out_hello->name, 0, sizeof(out_hello->name)) == NULL ||
        memchr(out_hello->url, 0, sizeof(out_hello->url)) == NULL ||
        memchr(out_hello->token, 0, sizeof(out_hello->token)) == NULL ||
        memchr(out_hello->host, 0, sizeof(out_hello->host)) == NULL) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL, "a group hello has a string without end");
    }
    return EP_OK;
}
