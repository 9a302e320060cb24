/* SPDX-License-Identifier: Apache-2.0 */
/* Sends frames. The lane's send descriptor is in the same pooled buffer as the frame, so a send
 * allocates nothing. */
#include <string.h>

#include "group/group_core.h"
#include "wire/frame.h"

typedef struct group_send {
    ep_send send;
    group_link *link;
    bool passed_on;
    ep_buffer *buffer;
} group_send;

#define SEND_BYTES ((sizeof(group_send) + EP_BUFFER_ALIGN - 1) / EP_BUFFER_ALIGN * EP_BUFFER_ALIGN)

static uint8_t *data_of(ep_buffer *buffer)
{
    return buffer->data + SEND_BYTES;
}

ep_err ep_group_frame_too_large(const ep_group *group, size_t frame_bytes, ep_error *out_error)
{
    return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                        "the rows for one rank or host take %zu bytes: allowed %zu "
                        "(frame_bytes_max of ep_group_config)",
                        frame_bytes, group->frame_bytes_max);
}

ep_err ep_group_frame_acquire(ep_group *group, size_t frame_bytes, ep_buffer **out_buffer,
                              uint8_t **out_frame, ep_error *out_error)
{
    if (frame_bytes > group->frame_bytes_max) {
        return ep_group_frame_too_large(group, frame_bytes, out_error);
    }
    ep_err err = ep_buffer_acquire(group->pool, SEND_BYTES + frame_bytes, out_buffer);
    if (err != EP_OK) {
        return ep_error_set(out_error, err, "no memory for a frame of %zu bytes", frame_bytes);
    }
    *out_frame = data_of(*out_buffer);
    return EP_OK;
}

/* Lock held. ep_group_destroy waits for the last one. */
static void send_is_over(ep_group *group)
{
    if (--group->sends_in_flight == 0 && group->closing) {
        pthread_cond_broadcast(&group->changed);
    }
}

static void send_done(ep_send *send, ep_err result)
{
    group_send *s = (group_send *)(void *)((char *)send - offsetof(group_send, send));
    group_link *link = s->link;
    ep_group *group = link->group;
    size_t bytes = send->total_bytes;
    bool passed_on = s->passed_on;
    ep_buffer_unref(s->buffer);
    pthread_mutex_lock(&group->lock);
    if (result == EP_OK) {
        group->stats.frames_sent++;
        group->stats.frames_passed_on += passed_on;
        group->stats.bytes_sent += bytes;
    }
    if (result == EP_OK && link->rank != GROUP_NO_RANK) {
        ep_group_traffic *traffic = &group->peers[link->rank].traffic;
        traffic->frames_sent++;
        traffic->frames_passed_on += passed_on;
        traffic->bytes_sent += bytes;
    }
    send_is_over(group);
    pthread_mutex_unlock(&group->lock);
}

ep_err ep_group_frame_send(group_link *link, ep_group_frame *frame, ep_buffer *taken_buffer)
{
    ep_group *group = link->group;
    uint8_t *data = data_of(taken_buffer);
    frame->rank = group->rank;
    frame->membership = group->membership;
    frame->payload_bytes = taken_buffer->bytes - SEND_BYTES - EP_GROUP_FRAME_FIXED_BYTES;
    frame->flags &= EP_GROUP_FRAME_FLAG_PASSED_ON;
    frame->payload_crc = 0;
    if (group->payload_crc && !ep_conn_is_trusted(link->conn)) {
        frame->flags |= EP_GROUP_FRAME_FLAG_CRC;
        frame->payload_crc =
            ep_crc32c(0, data + EP_GROUP_FRAME_FIXED_BYTES, (size_t)frame->payload_bytes);
    }
    ep_group_frame_encode(frame, data);

    group_send *s = (group_send *)(void *)taken_buffer->data;
    memset(s, 0, sizeof(*s));
    s->link = link;
    s->passed_on = (frame->flags & EP_GROUP_FRAME_FLAG_PASSED_ON) != 0;
    s->buffer = taken_buffer;
    s->send.parts[0] = (ep_send_part){data, taken_buffer->bytes - SEND_BYTES};
    s->send.parts_count = 1;
    s->send.done = send_done;
    s->send.done_inside = true; /* allowed, since senders do not hold the group's lock */
    pthread_mutex_lock(&group->lock);
    group->sends_in_flight++;
    pthread_mutex_unlock(&group->lock);
    ep_err err = ep_conn_send(link->conn, &s->send);
    if (err != EP_OK) {
        pthread_mutex_lock(&group->lock);
        send_is_over(group);
        pthread_mutex_unlock(&group->lock);
        ep_buffer_unref(taken_buffer);
    }
    return err;
}

size_t ep_group_put_text(uint8_t *payload, ep_err code, const char *text)
{
    uint32_t wire_code = (uint32_t)code;
    size_t bytes = text == NULL ? 0 : strnlen(text, EP_ERROR_TEXT_BYTES - 1);
    memcpy(payload, &wire_code, sizeof(wire_code));
    if (bytes > 0) {
        memcpy(payload + sizeof(wire_code), text, bytes);
    }
    return sizeof(wire_code) + bytes;
}

ep_err ep_group_send_text_as(group_link *link, ep_group_frame *frame, ep_err code, const char *text)
{
    ep_buffer *buffer;
    uint8_t *data;
    uint8_t payload[GROUP_TEXT_PAYLOAD_MAX];
    size_t bytes = ep_group_put_text(payload, code, text);
    ep_err err = ep_group_frame_acquire(link->group, EP_GROUP_FRAME_FIXED_BYTES + bytes, &buffer,
                                        &data, NULL);
    if (err != EP_OK) {
        return err;
    }
    memcpy(data + EP_GROUP_FRAME_FIXED_BYTES, payload, bytes);
    return ep_group_frame_send(link, frame, buffer);
}

void ep_group_send_text(group_link *link, ep_group_frame_kind kind, uint32_t generation,
                        uint64_t number, ep_err code, const char *text)
{
    ep_group_frame frame = {.kind = kind, .generation = generation, .number = number};
    /* after a failure the others' calls end at their deadline */
    ep_group_send_text_as(link, &frame, code, text);
}

void ep_group_read_text(const ep_buffer *buffer, ep_error *out_error)
{
    uint32_t code = EP_ERR_UNKNOWN;
    size_t offset = EP_GROUP_FRAME_FIXED_BYTES + sizeof(code);
    size_t bytes = buffer->bytes > offset ? buffer->bytes - offset : 0;
    if (buffer->bytes >= offset) {
        memcpy(&code, buffer->data + EP_GROUP_FRAME_FIXED_BYTES, sizeof(code));
    }
    ep_err err = ep_err_from_wire(code, EP_ERR_UNKNOWN);
    int shown = (int)(bytes < EP_ERROR_TEXT_BYTES - 1 ? bytes : EP_ERROR_TEXT_BYTES - 1);
    ep_error_set(out_error, err == EP_OK ? EP_ERR_UNKNOWN : err, "%.*s", shown,
                 (const char *)buffer->data + offset);
}
