/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gateway's part of comm_alg = hierarchy. A frame for a whole host is split when it arrives.
 * Each rank's part becomes the frame that it would get with fullmesh, sent in the origin's name;
 * the gateway's own part waits with frames that came straight. A part that cannot be passed on
 * becomes a failed frame of the origin, so that every call gets an answer.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "group/group_core.h"
#include "group/group_host_rows.h"
#include "wire/frame.h"

typedef struct relay {
    ep_group *group;
    uint32_t origin;
    const ep_group_frame *frame; /* as received */
    const uint8_t *data;         /* its first byte */
    ep_group_host_body body;
} relay;

static bool is_neighbour(const ep_group *group, uint32_t rank)
{
    return rank < group->world && rank != group->rank &&
           group->same_host[rank] == group->same_host[group->rank];
}

/* ---- failed frames instead of rows ---- */

static ep_group_frame passed_on(const relay *r, ep_group_frame_kind kind)
{
    return (ep_group_frame){.kind = kind,
                            .flags = EP_GROUP_FRAME_FLAG_PASSED_ON,
                            .generation = r->frame->generation,
                            .number = r->frame->number,
                            .origin = r->origin};
}

static void send_failed(const relay *r, group_link *link, const ep_error *error)
{
    ep_group_frame frame = passed_on(r, EP_GROUP_FRAME_FAILED);
    ep_err err = ep_group_send_text_as(link, &frame, error->code, error->text);
    /* it waits for a frame that will not come, and learns of that by the close */
    if (err != EP_OK && err != EP_ERR_CLOSED) {
        ep_group_link_close_badly(link, "frames cannot be passed on to it");
    }
}

/* Adds a frame of the origin, of payload_bytes, to this rank's own inbox. */
static ep_err keep(const relay *r, ep_group_frame_kind kind, size_t payload_bytes,
                   ep_buffer *taken_buffer)
{
    ep_group *group = r->group;
    ep_group_frame frame = passed_on(r, kind);
    frame.flags = 0;
    frame.rank = r->origin;
    frame.membership = group->membership;
    frame.payload_bytes = payload_bytes;
    ep_group_frame_encode(&frame, taken_buffer->data);
    bool good = ep_group_inbox_add(group, r->origin, group->rank, &frame, &taken_buffer);
    ep_buffer_unref(taken_buffer);
    return good ? EP_OK : EP_ERR_PROTOCOL;
}

static void close_origin(const relay *r, const char *why)
{
    group_link *link = ep_group_peer_link(r->group, r->origin);
    if (link != NULL) {
        ep_group_link_close_badly(link, why);
    }
}

static void keep_failed(const relay *r, const ep_error *error)
{
    uint8_t payload[GROUP_TEXT_PAYLOAD_MAX];
    ep_buffer *buffer;
    size_t bytes = ep_group_put_text(payload, error->code, error->text);
    if (ep_buffer_acquire(r->group->pool, EP_GROUP_FRAME_FIXED_BYTES + bytes, &buffer) != EP_OK) {
        close_origin(r, "no memory for what it sent");
        return;
    }
    memcpy(buffer->data + EP_GROUP_FRAME_FIXED_BYTES, payload, bytes);
    if (keep(r, EP_GROUP_FRAME_FAILED, bytes, buffer) != EP_OK) {
        close_origin(r, "it sent frames out of order");
    }
}

/* The members of the frame's call, known only for this rank's own generation. False: not known. */
static bool members_of_call(const relay *r, bool out_is_member[EP_GROUP_WORLD_MAX])
{
    ep_group *group = r->group;
    memset(out_is_member, 0, EP_GROUP_WORLD_MAX * sizeof(*out_is_member));
    pthread_mutex_lock(&group->lock);
    bool known = r->frame->generation == group->generation;
    for (uint32_t m = 0; m < group->members_count; m++) {
        out_is_member[group->members[m]] = true;
    }
    pthread_mutex_unlock(&group->lock);
    return known;
}

/* Sends failed frames to all ranks of this host, except those that elastic_info leaves out. */
static void fail_all(const relay *r, const ep_error *error)
{
    bool is_member[EP_GROUP_WORLD_MAX];
    if (!members_of_call(r, is_member) || !is_member[r->origin]) {
        close_origin(r, error->text);
        return;
    }
    for (uint32_t rank = 0; rank < r->group->world; rank++) {
        group_link *link = is_member[rank] && is_neighbour(r->group, rank)
                               ? ep_group_peer_link(r->group, rank)
                               : NULL;
        if (link != NULL) {
            send_failed(r, link, error);
        }
    }
    keep_failed(r, error);
}

/* ---- checking ---- */

/* Checks that the frame names each rank of this host once, and no other. */
static ep_err check_ranks(const relay *r, ep_error *out_error)
{
    uint64_t seen[(EP_GROUP_WORLD_MAX + 63) / 64] = {0};
    ep_group_host_part part;
    for (uint32_t i = 0; ep_group_host_next(&r->body, i, &part); i++) {
        if (part.rank != r->group->rank && !is_neighbour(r->group, part.rank)) {
            return ep_error_set(out_error, EP_ERR_PROTOCOL,
                                "its frame for the host of rank %" PRIu32
                                " has rows for rank %" PRIu32,
                                r->group->rank, part.rank);
        }
        if ((seen[part.rank / 64] >> part.rank % 64 & 1) != 0) {
            return ep_error_set(out_error, EP_ERR_PROTOCOL,
                                "its frame for a host names rank %" PRIu32 " twice", part.rank);
        }
        seen[part.rank / 64] |= (uint64_t)1 << part.rank % 64;
    }
    if ((seen[r->group->rank / 64] >> r->group->rank % 64 & 1) == 0) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL,
                            "its frame for the host of rank %" PRIu32 " has nothing for that rank",
                            r->group->rank);
    }
    return EP_OK;
}

/* A violation of the protocol: the frame is not passed on, and the origin is blamed. NULL: none. */
static const char *fault_of(const relay *r)
{
    ep_group *group = r->group;
    pthread_mutex_lock(&group->lock);
    const char *fault = group->same_host[r->origin] == group->same_host[group->rank]
                            ? "it sent rows for its own host to be passed on"
                        : !ep_group_inbox_has_place(group, r->origin, r->frame)
                            ? "it sent frames out of order"
                            : NULL;
    pthread_mutex_unlock(&group->lock);
    return fault;
}

/* Lock held. UINT32_MAX: not a member. */
static uint32_t member_of(const ep_group *group, uint32_t rank)
{
    uint32_t m = 0;
    while (m < group->members_count && group->members[m] != rank) {
        m++;
    }
    return m < group->members_count ? m : UINT32_MAX;
}

/* Whether the origin's rows come through this rank. Its own call may have other members. */
static bool comes_through_us(const relay *r, const ep_group_call *told)
{
    ep_group *group = r->group;
    pthread_mutex_lock(&group->lock);
    bool good = true;
    if (r->frame->generation == group->generation &&
        told->elastic_digest == group->members_digest) {
        uint32_t origin = member_of(group, r->origin);
        uint32_t own = member_of(group, group->rank);
        good = origin != UINT32_MAX && own != UINT32_MAX &&
               ep_group_gateway(&group->hosts, origin, group->hosts.host_of[own]) == own;
    }
    pthread_mutex_unlock(&group->lock);
    return good;
}

static ep_err check(relay *r, size_t bytes, ep_error *out_error)
{
    const ep_group_frame *frame = r->frame;
    if ((frame->flags & EP_GROUP_FRAME_FLAG_CRC) != 0 &&
        ep_crc32c(0, r->data + EP_GROUP_FRAME_FIXED_BYTES, (size_t)frame->payload_bytes) !=
            frame->payload_crc) {
        return ep_error_set(out_error, EP_ERR_DATA_LOSS,
                            "its frame for a host came to rank %" PRIu32 " damaged (CRC)",
                            r->group->rank);
    }
    if (frame->membership != r->group->membership || bytes < EP_GROUP_BODY_OFFSET) {
        return ep_error_set(out_error, EP_ERR_DATA_LOSS,
                            "its frame for a host came to rank %" PRIu32
                            " damaged (length or membership)",
                            r->group->rank);
    }
    ep_group_call told;
    if (ep_group_record_decode(r->data + EP_GROUP_FRAME_FIXED_BYTES, &told, NULL) != EP_OK) {
        return ep_error_set(
            out_error, EP_ERR_PROTOCOL,
            "its frame for a host has a parameter record of another number of fields than %d",
            EP_GROUP_CALL_TOLD);
    }
    ep_err err = ep_group_host_open(&told, r->data + EP_GROUP_BODY_OFFSET,
                                    bytes - EP_GROUP_BODY_OFFSET, &r->body, out_error);
    if (err == EP_OK && !comes_through_us(r, &told)) {
        err = ep_error_set(out_error, EP_ERR_PROTOCOL,
                           "its frame for a host came to rank %" PRIu32
                           ", through which its rows do not come",
                           r->group->rank);
    }
    return err == EP_OK ? check_ranks(r, out_error) : err;
}

/* ---- passing on ---- */

/* Fills a rank's frame, whose record is the origin's. data: its first byte. */
static void fill(const relay *r, const ep_group_host_part *part, uint8_t *data)
{
    memcpy(data + EP_GROUP_FRAME_FIXED_BYTES, r->data + EP_GROUP_FRAME_FIXED_BYTES,
           EP_GROUP_BODY_OFFSET - EP_GROUP_FRAME_FIXED_BYTES);
    ep_group_host_part_fill(&r->body, part, data + EP_GROUP_BODY_OFFSET);
}

static void pass_on(const relay *r, const ep_group_host_part *part)
{
    ep_group *group = r->group;
    group_link *link = ep_group_peer_link(group, part->rank);
    ep_buffer *buffer;
    uint8_t *data;
    ep_error error;
    if (link == NULL) {
        return;
    }
    ep_err err = ep_group_frame_acquire(
        group, EP_GROUP_BODY_OFFSET + ep_group_host_part_bytes(&r->body, part), &buffer, &data,
        &error);
    if (err == EP_OK) {
        fill(r, part, data);
        ep_group_frame frame = passed_on(r, EP_GROUP_FRAME_ROWS);
        err = ep_group_frame_send(link, &frame, buffer);
        if (err != EP_OK) {
            ep_error_set(&error, err, "rank %" PRIu32 " cannot pass its rows on: %s", group->rank,
                         ep_err_text(err));
        }
    }
    if (err == EP_OK) {
        pthread_mutex_lock(&group->lock);
        group->peers[part->rank].traffic.rows_passed_on += part->slots;
        pthread_mutex_unlock(&group->lock);
    } else if (err != EP_ERR_CLOSED) {
        send_failed(r, link, &error);
    }
}

static void keep_part(const relay *r, const ep_group_host_part *part)
{
    ep_group *group = r->group;
    size_t bytes = EP_GROUP_BODY_OFFSET + ep_group_host_part_bytes(&r->body, part);
    ep_buffer *buffer;
    ep_error error;
    if (bytes > group->frame_bytes_max || ep_buffer_acquire(group->pool, bytes, &buffer) != EP_OK) {
        ep_error_set(&error, EP_ERR_RESOURCE_EXHAUSTED,
                     "rank %" PRIu32 " has no memory for its rows, %zu bytes", group->rank, bytes);
        keep_failed(r, &error);
        return;
    }
    fill(r, part, buffer->data);
    if (keep(r, EP_GROUP_FRAME_ROWS, bytes - EP_GROUP_FRAME_FIXED_BYTES, buffer) != EP_OK) {
        close_origin(r, "it sent frames out of order");
    }
}

static void take_apart(ep_group *group, uint32_t origin, const ep_group_frame *frame,
                       const ep_buffer *buffer)
{
    relay r = {.group = group, .origin = origin, .frame = frame, .data = buffer->data};
    ep_group_host_part part;
    ep_group_host_part own = {.rank = GROUP_NO_RANK};
    ep_error error;
    const char *fault = fault_of(&r);
    if (fault == NULL && check(&r, buffer->bytes, &error) != EP_OK) {
        fail_all(&r, &error);
        return;
    }
    if (fault != NULL) {
        close_origin(&r, fault);
        return;
    }
    for (uint32_t i = 0; ep_group_host_next(&r.body, i, &part); i++) {
        if (part.rank == group->rank) {
            own = part;
        } else {
            pass_on(&r, &part);
        }
    }
    /* last, because this rank's call may then end and the rank leave */
    if (own.rank != GROUP_NO_RANK) {
        keep_part(&r, &own);
    }
}

void ep_group_relay_frame(ep_group *group, uint32_t origin, const ep_group_frame *frame,
                          ep_buffer *taken_buffer)
{
    group_held_frame *held = NULL;
    pthread_mutex_lock(&group->lock);
    bool hold = !group->joined;
    uint32_t count = 0;
    for (const group_held_frame *h = STAILQ_FIRST(&group->held); h != NULL;
         h = STAILQ_NEXT(h, entry)) {
        count += h->origin == origin;
    }
    const char *why =
        count < GROUP_RING_FRAMES ? "no memory for what it sent" : "it sent frames out of order";
    if (hold && count < GROUP_RING_FRAMES) {
        held = calloc(1, sizeof(*held));
    }
    if (held != NULL) {
        *held = (group_held_frame){.buffer = taken_buffer, .head = *frame, .origin = origin};
        STAILQ_INSERT_TAIL(&group->held, held, entry);
    }
    pthread_mutex_unlock(&group->lock);
    if (held != NULL) {
        return;
    }
    if (hold) {
        relay r = {.group = group, .origin = origin, .frame = frame};
        close_origin(&r, why);
    } else {
        take_apart(group, origin, frame, taken_buffer);
    }
    ep_buffer_unref(taken_buffer);
}

void ep_group_relay_loss(ep_group *group, uint32_t rank)
{
    char why[GROUP_WHY_BYTES];
    pthread_mutex_lock(&group->lock);
    bool tell =
        group->joined && !group->closing && group->same_host[rank] != group->same_host[group->rank];
    snprintf(why, sizeof(why), "%s", group->peers[rank].why);
    pthread_mutex_unlock(&group->lock);
    for (uint32_t r = 0; r < group->world && tell; r++) {
        group_link *link = is_neighbour(group, r) ? ep_group_peer_link(group, r) : NULL;
        if (link != NULL) {
            ep_group_frame frame = {.kind = EP_GROUP_FRAME_LOST,
                                    .flags = EP_GROUP_FRAME_FLAG_PASSED_ON,
                                    .origin = rank};
            ep_group_send_text_as(link, &frame, EP_ERR_UNAVAILABLE, why);
        }
    }
}

/* Lock held. */
static group_held_frame *pop_held(ep_group *group)
{
    group_held_frame *held = STAILQ_FIRST(&group->held);
    if (held != NULL) {
        STAILQ_REMOVE_HEAD(&group->held, entry);
    }
    return held;
}

void ep_group_relay_open(ep_group *group)
{
    for (;;) {
        pthread_mutex_lock(&group->lock);
        group_held_frame *held = pop_held(group);
        group->joined = held == NULL;
        pthread_mutex_unlock(&group->lock);
        if (held == NULL) {
            break;
        }
        take_apart(group, held->origin, &held->head, held->buffer);
        ep_buffer_unref(held->buffer);
        free(held);
    }
    for (uint32_t r = 0; r < group->world; r++) { /* ranks that left while their frames were held */
        pthread_mutex_lock(&group->lock);
        bool gone = group->peers[r].gone;
        pthread_mutex_unlock(&group->lock);
        if (gone) {
            ep_group_relay_loss(group, r);
        }
    }
}

void ep_group_relay_drop(ep_group *group)
{
    for (group_held_frame *held; (held = pop_held(group)) != NULL;) {
        ep_buffer_unref(held->buffer);
        free(held);
    }
}
