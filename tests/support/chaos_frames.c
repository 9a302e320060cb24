/* SPDX-License-Identifier: Apache-2.0 */
/* Makes frames with one flipped bit, and frames with false contents. */
#include "support/chaos_frames.h"

#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "expert.pb-c.h"
#include "expertd/tensor.h"
#include "rpc/rpc.h"

#define LENGTH_BYTES 4 /* length in front of the packed CallHeader */

static uint64_t draw(uint64_t *random, uint64_t count)
{
    return (ep_splitmix64(random) >> 20) % count;
}

static bool read_forward(const uint8_t *data, ep_frame *out_frame)
{
    return ep_frame_decode(data, EP_FRAME_BYTES_CEILING, EP_FRAME_HEADER_BYTES_CEILING, out_frame,
                           NULL, NULL) == EP_OK &&
           out_frame->method_id == ep_rpc_method_by_name("expertd.v1.ExpertService", "Forward")->id;
}

/* Returns where a request's message begins in the header section; header_bytes if the section is
 * wrong. */
static size_t message_offset(const ep_frame *frame, const uint8_t *data)
{
    uint32_t length = 0;
    if (frame->kind != EP_FRAME_REQUEST) {
        return 0;
    }
    if (frame->header_bytes >= LENGTH_BYTES) {
        memcpy(&length, data + EP_FRAME_FIXED_BYTES, LENGTH_BYTES);
    }
    return frame->header_bytes < LENGTH_BYTES || length > frame->header_bytes - LENGTH_BYTES
               ? frame->header_bytes
               : LENGTH_BYTES + (size_t)length;
}

static Expertd__V1__ForwardRequest *read_request(const ep_frame *frame, const uint8_t *data)
{
    size_t offset = message_offset(frame, data);
    return expertd__v1__forward_request__unpack(NULL, frame->header_bytes - offset,
                                                data + EP_FRAME_FIXED_BYTES + offset);
}

void chaos_calls_note(chaos_calls *calls, const uint8_t *data, size_t bytes)
{
    ep_frame frame;
    (void)bytes;
    if (!read_forward(data, &frame)) {
        return;
    }
    if (frame.kind == EP_FRAME_REPLY) {
        for (uint32_t i = 0; i < calls->count; i++) {
            if (calls->items[i].id == frame.call_id) {
                calls->count--;
                memmove(&calls->items[i], &calls->items[i + 1],
                        (calls->count - i) * sizeof(calls->items[0]));
                return;
            }
        }
        return;
    }
    Expertd__V1__ForwardRequest *request =
        frame.kind == EP_FRAME_REQUEST ? read_request(&frame, data) : NULL;
    if (request == NULL) {
        return;
    }
    if (calls->count == CHAOS_CALLS_MAX) {
        memmove(calls->items, calls->items + 1, (CHAOS_CALLS_MAX - 1) * sizeof(calls->items[0]));
        calls->count--;
    }
    calls->items[calls->count++] = (chaos_call){frame.call_id, request->slots};
    expertd__v1__forward_request__free_unpacked(request, NULL);
}

static uint8_t *copy_of(const uint8_t *data, size_t bytes)
{
    uint8_t *copy = malloc(bytes);
    if (copy != NULL) {
        memcpy(copy, data, bytes);
    }
    return copy;
}

/* Copies data with one bit of bytes [begin, end) flipped; NULL if the range is empty. */
static uint8_t *flip(const uint8_t *data, size_t bytes, size_t begin, size_t end, uint64_t *random)
{
    uint8_t *copy = begin < end && end <= bytes ? copy_of(data, bytes) : NULL;
    if (copy != NULL) {
        copy[begin + draw(random, end - begin)] ^= (uint8_t)(1u << draw(random, 8));
    }
    return copy;
}

/* Builds a frame of these sections with right lengths and CRCs. */
static uint8_t *build(ep_frame frame, const uint8_t *header, size_t header_bytes,
                      const uint8_t *tensors, size_t tensor_bytes, size_t *out_bytes)
{
    bool has_crc = frame.payload_crc != 0;
    frame.header_bytes = (uint32_t)header_bytes;
    frame.tensor_offset = ep_frame_tensor_offset((uint32_t)header_bytes);
    frame.tensor_bytes = tensor_bytes;
    *out_bytes = frame.tensor_offset + tensor_bytes;
    uint8_t *out = calloc(1, *out_bytes);
    if (out == NULL) {
        return NULL;
    }
    if (header_bytes > 0) {
        memcpy(out + EP_FRAME_FIXED_BYTES, header, header_bytes);
    }
    if (tensor_bytes > 0) {
        memcpy(out + frame.tensor_offset, tensors, tensor_bytes);
    }
    frame.payload_crc =
        has_crc ? ep_crc32c(0, out + EP_FRAME_FIXED_BYTES, *out_bytes - EP_FRAME_FIXED_BYTES) : 0;
    ep_frame_encode(&frame, out);
    return out;
}

static uint8_t *same_payload(const ep_frame *frame, const uint8_t *data, size_t *out_bytes)
{
    return build(*frame, data + EP_FRAME_FIXED_BYTES, frame->header_bytes,
                 data + frame->tensor_offset, (size_t)frame->tensor_bytes, out_bytes);
}

/* Names the newest other call whose answer has another length (old calls may have ended). The
 * frame's own call must still be in calls. */
static bool name_other_call(ep_frame *frame, const chaos_calls *calls)
{
    uint32_t slots = 0;
    for (uint32_t i = 0; i < calls->count; i++) {
        slots = calls->items[i].id == frame->call_id ? calls->items[i].slots : slots;
    }
    for (uint32_t i = calls->count; slots > 0 && i-- > 0;) {
        const chaos_call *other = &calls->items[i];
        if (other->slots != slots) {
            frame->call_id = other->id;
            return true;
        }
    }
    return false;
}

/* Makes lies in the fixed part of a reply. */
static uint8_t *lie_in_frame(ep_chaos_fault fault, ep_frame frame, const uint8_t *data,
                             const chaos_calls *calls, uint64_t *random, size_t *out_bytes)
{
    if (frame.kind != EP_FRAME_REPLY) {
        return NULL;
    }
    switch ((int)fault) {
    case EP_CHAOS_LIE_CALL:
        if (!name_other_call(&frame, calls)) {
            return NULL;
        }
        break;
    case EP_CHAOS_LIE_NO_CALL:
        /* the high half identifies the sender's process */
        frame.call_id ^= 1ull << (40 + draw(random, 20));
        break;
    case EP_CHAOS_LIE_ATTEMPT:
        frame.attempt ^= (uint16_t)(1u << (8 + draw(random, 8)));
        break;
    case EP_CHAOS_LIE_METHOD:
        frame.method_id ^= (uint16_t)(1u << draw(random, 16));
        break;
    default: /* EP_CHAOS_LIE_SEQUENCE */
        frame.stream_sequence = 1 + (uint32_t)draw(random, 1000);
    }
    return same_payload(&frame, data, out_bytes);
}

/* None is as wide as bf16: x of another type with as many bytes would be valid. */
static const uint32_t other_dtypes[] = {EP_DTYPE_F32, EP_DTYPE_I8, EP_DTYPE_NONE, 99};

static uint32_t other_dtype(uint64_t *random)
{
    return other_dtypes[draw(random, sizeof(other_dtypes) / sizeof(other_dtypes[0]))];
}

static char lying_numerics[] = "numerics-of-nobody";

static uint8_t *lie_in_request(ep_chaos_fault fault, const ep_frame *frame, const uint8_t *data,
                               uint64_t *random, size_t *out_bytes)
{
    size_t offset = message_offset(frame, data);
    Expertd__V1__ForwardRequest *request = read_request(frame, data);
    uint8_t *packed = NULL;
    uint8_t *out = NULL;
    if (request == NULL) {
        return NULL;
    }
    char *numerics = request->numerics;
    switch ((int)fault) {
    case EP_CHAOS_LIE_SLOTS:
        request->slots++;
        break;
    case EP_CHAOS_LIE_HIDDEN:
        request->hidden += 64;
        break;
    case EP_CHAOS_LIE_DTYPE:
        request->x_dtype = other_dtype(random);
        break;
    default: /* EP_CHAOS_LIE_NUMERICS */
        request->numerics = lying_numerics;
    }
    size_t bytes = offset + expertd__v1__forward_request__get_packed_size(request);
    if ((packed = malloc(bytes)) != NULL) {
        memcpy(packed, data + EP_FRAME_FIXED_BYTES, offset);
        expertd__v1__forward_request__pack(request, packed + offset);
        out = build(*frame, packed, bytes, data + frame->tensor_offset, (size_t)frame->tensor_bytes,
                    out_bytes);
    }
    request->numerics = numerics;
    expertd__v1__forward_request__free_unpacked(request, NULL);
    free(packed);
    return out;
}

static uint8_t *lie_in_reply(ep_chaos_fault fault, const ep_frame *frame, const uint8_t *data,
                             uint64_t *random, size_t *out_bytes)
{
    Expertd__V1__ForwardReply *reply =
        frame->kind == EP_FRAME_REPLY && frame->status == 0
            ? expertd__v1__forward_reply__unpack(NULL, frame->header_bytes,
                                                 data + EP_FRAME_FIXED_BYTES)
            : NULL;
    uint8_t *out = NULL;
    if (reply == NULL) {
        return NULL;
    }
    char *numerics = reply->numerics;
    switch ((int)fault) {
    case EP_CHAOS_LIE_SLOTS:
        reply->slots++;
        break;
    case EP_CHAOS_LIE_HIDDEN:
        reply->hidden += 64;
        break;
    case EP_CHAOS_LIE_DTYPE:
        reply->dtype = other_dtype(random);
        break;
    default: /* EP_CHAOS_LIE_NUMERICS */
        reply->numerics = lying_numerics;
    }
    size_t bytes = expertd__v1__forward_reply__get_packed_size(reply);
    uint8_t *packed = malloc(bytes);
    if (packed != NULL) {
        expertd__v1__forward_reply__pack(reply, packed);
        out = build(*frame, packed, bytes, data + frame->tensor_offset, (size_t)frame->tensor_bytes,
                    out_bytes);
    }
    reply->numerics = numerics;
    expertd__v1__forward_reply__free_unpacked(reply, NULL);
    free(packed);
    return out;
}

static uint8_t *lie(ep_chaos_fault fault, const uint8_t *data, size_t bytes,
                    const chaos_calls *calls, uint64_t *random, size_t *out_bytes)
{
    ep_frame frame;
    if (!read_forward(data, &frame)) {
        return NULL;
    }
    switch ((int)fault) {
    case EP_CHAOS_LIE_SLOTS:
    case EP_CHAOS_LIE_HIDDEN:
    case EP_CHAOS_LIE_DTYPE:
    case EP_CHAOS_LIE_NUMERICS:
        return frame.kind == EP_FRAME_REQUEST
                   ? lie_in_request(fault, &frame, data, random, out_bytes)
                   : lie_in_reply(fault, &frame, data, random, out_bytes);
    case EP_CHAOS_LIE_ROWS:
        return frame.tensor_bytes <= EP_FRAME_ALIGN
                   ? NULL
                   : build(frame, data + EP_FRAME_FIXED_BYTES, frame.header_bytes,
                           data + frame.tensor_offset, (size_t)frame.tensor_bytes - EP_FRAME_ALIGN,
                           out_bytes);
    case EP_CHAOS_LIE_HEADER: {
        size_t end = EP_FRAME_FIXED_BYTES + frame.header_bytes;
        uint8_t *flipped = frame.kind == EP_FRAME_REPLY
                               ? flip(data, bytes, EP_FRAME_FIXED_BYTES, end, random)
                               : NULL;
        uint8_t *out = flipped != NULL ? same_payload(&frame, flipped, out_bytes) : NULL;
        free(flipped);
        return out;
    }
    default:
        return lie_in_frame(fault, frame, data, calls, random, out_bytes);
    }
}

uint8_t *chaos_frame_change(ep_chaos_fault fault, const uint8_t *data, size_t bytes,
                            const chaos_calls *calls, uint64_t *random, size_t *out_bytes)
{
    ep_frame frame;
    *out_bytes = bytes;
    if (fault >= EP_CHAOS_LIE_CALL) {
        return lie(fault, data, bytes, calls, random, out_bytes);
    }
    if (ep_frame_decode(data, EP_FRAME_BYTES_CEILING, EP_FRAME_HEADER_BYTES_CEILING, &frame, NULL,
                        NULL) != EP_OK) {
        return NULL;
    }
    if (fault == EP_CHAOS_FLIP_FIXED) {
        return flip(data, bytes, 0, EP_FRAME_FIXED_BYTES, random);
    }
    if (fault == EP_CHAOS_FLIP_HEADER) {
        return flip(data, bytes, EP_FRAME_FIXED_BYTES, EP_FRAME_FIXED_BYTES + frame.header_bytes,
                    random);
    }
    return flip(data, bytes, frame.tensor_offset, bytes, random);
}
