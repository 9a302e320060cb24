/* SPDX-License-Identifier: Apache-2.0 */
/* Handles events of a group's connections: hellos, rows, losses. Runs on the lanes' threads. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "group/group_core.h"
#include "rpc/rpc_credentials.h"
#include "transport/address.h"

/* Lock held. Marks a peer that was ready as gone. True: tell the neighbours. */
static bool peer_is_gone(ep_group *group, group_peer *peer, const char *why)
{
    bool news = !peer->gone;
    if (news) {
        peer->gone = true;
        snprintf(peer->why, sizeof(peer->why), "%.199s", why);
    }
    pthread_cond_broadcast(&group->changed);
    return news;
}

void ep_group_link_close_badly(group_link *link, const char *why)
{
    ep_group *group = link->group;
    bool news = false;
    pthread_mutex_lock(&group->lock);
    if (link->rank != GROUP_NO_RANK && group->peers[link->rank].link == link) {
        news = peer_is_gone(group, &group->peers[link->rank], why);
    }
    pthread_mutex_unlock(&group->lock);
    if (news) {
        ep_group_relay_loss(group, link->rank);
    }
    ep_conn_close(link->conn);
}

group_link *ep_group_peer_link(ep_group *group, uint32_t rank)
{
    const group_peer *peer = &group->peers[rank];
    pthread_mutex_lock(&group->lock);
    group_link *link = rank != group->rank && !peer->gone ? peer->link : NULL;
    pthread_mutex_unlock(&group->lock);
    return link;
}

/* ---- hello ---- */

#define BAD(...) ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, __VA_ARGS__)

/* Lock held. */
static ep_err check_hello(ep_group *group, const ep_group_hello *hello, const ep_group_frame *frame,
                          ep_error *out_error)
{
    if (!ep_rpc_token_equal(group->token, hello->token)) {
        return ep_error_set(out_error, EP_ERR_UNAUTHENTICATED, "the token is missing or wrong");
    }
    if (strcmp(hello->name, group->name) != 0) {
        return BAD("name differs between ranks: \"%s\" at rank %" PRIu32
                   "; \"%s\" at rank %" PRIu32,
                   group->name, group->rank, hello->name, hello->rank);
    }
    if (hello->world_size != group->world) {
        return BAD("world_size differs between ranks: %" PRIu32 " at rank %" PRIu32 "; %" PRIu32
                   " at rank %" PRIu32,
                   group->world, group->rank, hello->world_size, hello->rank);
    }
    if (hello->rank <= group->rank || hello->rank >= group->world) {
        return BAD("rank is %" PRIu32 ": allowed %" PRIu32 "..%" PRIu32
                   " for a rank that connects to rank %" PRIu32,
                   hello->rank, group->rank + 1, group->world - 1, group->rank);
    }
    if (group->peers[hello->rank].link != NULL) {
        return BAD("rank %" PRIu32 " is there already: two processes have the same rank",
                   hello->rank);
    }
    ep_lane_address address;
    ep_error error;
    if (ep_address_for_dial(hello->url, &group->tls, group->guards_token, &address, &error) !=
        EP_OK) {
        return BAD("url of rank %" PRIu32 ": %.300s", hello->rank, error.text);
    }
    bool has_table = group->membership != 0 && group->rank != 0;
    if (has_table && frame->membership != group->membership) {
        return BAD("rank %" PRIu32 " belongs to another membership of group %s", hello->rank,
                   group->name);
    }
    if (has_table && strcmp(hello->host, group->peers[hello->rank].host) != 0) {
        return BAD("host of rank %" PRIu32
                   " differs between ranks: \"%s\" at rank 0; \"%s\" at rank %" PRIu32,
                   hello->rank, group->peers[hello->rank].host, hello->host, hello->rank);
    }
    return EP_OK;
}

static void refuse(group_link *link, const ep_error *why)
{
    ep_group *group = link->group;
    pthread_mutex_lock(&group->lock);
    snprintf(group->last_refusal, sizeof(group->last_refusal), "%s", why->text);
    pthread_mutex_unlock(&group->lock);
    ep_group_send_text(link, EP_GROUP_FRAME_REFUSED, 0, 0, why->code, why->text);
    /* The refused side closes, since closing here could overtake the text. */
}

static void take_hello(group_link *link, const ep_group_frame *frame, const ep_buffer *buffer)
{
    ep_group *group = link->group;
    ep_group_hello hello;
    ep_error error;
    if (link->dialed || link->rank != GROUP_NO_RANK ||
        ep_group_hello_decode(buffer->data + EP_GROUP_FRAME_FIXED_BYTES,
                              (size_t)frame->payload_bytes, &hello, NULL) != EP_OK) {
        ep_conn_close(link->conn);
        return;
    }
    pthread_mutex_lock(&group->lock);
    ep_err err = check_hello(group, &hello, frame, &error);
    bool welcome = false;
    bool all_here = false;
    if (err == EP_OK) {
        group_peer *peer = &group->peers[hello.rank];
        link->rank = hello.rank;
        peer->link = link;
        snprintf(peer->url, sizeof(peer->url), "%s", hello.url);
        snprintf(peer->host, sizeof(peer->host), "%s", hello.host);
        if (group->rank == 0) {
            peer->ready = true;
            all_here = true;
            for (uint32_t r = 1; r < group->world; r++) {
                all_here = all_here && group->peers[r].ready;
            }
            all_here = all_here && !group->table_sent;
            group->table_sent = group->table_sent || all_here;
            if (all_here) {
                ep_group_find_hosts(group);
            }
        } else if (group->membership == 0) {
            peer->hello_waits = true;
            peer->hello_membership = frame->membership;
        } else {
            peer->ready = true;
            welcome = true;
        }
    }
    pthread_mutex_unlock(&group->lock);
    if (err != EP_OK) {
        refuse(link, &error);
        return;
    }
    ep_conn_allow_large(link->conn, NULL);
    if (welcome) {
        ep_group_send_welcome(link);
    }
    bool table_out = all_here && ep_group_send_table(group);
    pthread_mutex_lock(&group->lock);
    group->table_out = group->table_out || table_out;
    pthread_cond_broadcast(&group->changed);
    pthread_mutex_unlock(&group->lock);
}

/* Reads a rank's reason, which becomes the caller's error, so the text is never empty. */
static void read_reason(const group_link *link, const ep_buffer *buffer, ep_error *out_error)
{
    ep_group_read_text(buffer, out_error);
    if (out_error->text[0] == 0) {
        ep_error_set(out_error, out_error->code, "rank %" PRIu32 " gives no reason", link->rank);
    }
}

static void take_refusal(group_link *link, const ep_buffer *buffer)
{
    ep_group *group = link->group;
    ep_error error;
    read_reason(link, buffer, &error);
    pthread_mutex_lock(&group->lock);
    if (link->dialed && !group->peers[link->rank].ready && group->create_error.code == EP_OK) {
        group->create_error = error;
    }
    pthread_cond_broadcast(&group->changed);
    pthread_mutex_unlock(&group->lock);
}

static void take_welcome(group_link *link)
{
    ep_group *group = link->group;
    if (!link->dialed) {
        ep_group_link_close_badly(link, "it broke the protocol");
        return;
    }
    pthread_mutex_lock(&group->lock);
    group->peers[link->rank].ready = true;
    pthread_cond_broadcast(&group->changed);
    pthread_mutex_unlock(&group->lock);
}

/* The next text of a table, shorter than room; NULL: invalid. */
static const char *next_text(const char *table, size_t bytes, size_t room, size_t *inout_at)
{
    const char *text = table + *inout_at;
    size_t length = *inout_at < bytes ? strnlen(text, bytes - *inout_at) : 0;
    if (*inout_at + length >= bytes || length >= room) {
        return NULL;
    }
    *inout_at += length + 1;
    return text;
}

/* Reads every rank's URL and host, each ended by 0. Hosts of ranks that have sent a hello, and this
 * rank's own, are known already. Lock held; false: invalid. */
static bool read_table(ep_group *group, const char *table, size_t bytes)
{
    size_t at = 0;
    for (uint32_t r = 0; r < group->world; r++) {
        group_peer *peer = &group->peers[r];
        const char *url = next_text(table, bytes, sizeof(peer->url), &at);
        const char *host = url == NULL ? NULL : next_text(table, bytes, sizeof(peer->host), &at);
        if (host == NULL) {
            return false;
        }
        if ((peer->hello_waits || r == group->rank) && strcmp(peer->host, host) != 0) {
            ep_error_set(&group->create_error, EP_ERR_INVALID_ARGUMENT,
                         "host of rank %" PRIu32
                         " differs between ranks: \"%s\" at rank 0; \"%s\" at rank %" PRIu32,
                         r, host, peer->host, r);
            return false;
        }
        snprintf(peer->url, sizeof(peer->url), "%s", url);
        snprintf(peer->host, sizeof(peer->host), "%s", host);
    }
    if (at == bytes) {
        ep_group_find_hosts(group);
    }
    return at == bytes;
}

static void take_table(group_link *link, const ep_group_frame *frame, const ep_buffer *buffer)
{
    ep_group *group = link->group;
    pthread_mutex_lock(&group->lock);
    bool good = link->dialed && link->rank == 0 && group->membership == 0 &&
                frame->membership != 0 &&
                read_table(group, (const char *)buffer->data + EP_GROUP_FRAME_FIXED_BYTES,
                           (size_t)frame->payload_bytes);
    if (good) {
        group->membership = frame->membership;
        group->peers[0].ready = true;
    }
    pthread_cond_broadcast(&group->changed);
    pthread_mutex_unlock(&group->lock);
    if (!good) {
        ep_group_link_close_badly(link, "it broke the protocol");
        return;
    }
    ep_group_answer_hellos(group);
}

/* ---- calls ---- */

group_inbox_frame *ep_group_inbox_find(group_peer *peer, uint32_t generation, uint64_t number)
{
    for (uint32_t i = 0; i < peer->ring_count; i++) {
        const ep_group_frame *head = &peer->ring[i].head;
        if (head->generation == generation && head->number == number) {
            return &peer->ring[i];
        }
    }
    return NULL;
}

void ep_group_inbox_remove(group_peer *peer, group_inbox_frame *frame)
{
    const group_inbox_frame *end = &peer->ring[peer->ring_count--];
    memmove(frame, frame + 1, (size_t)(end - (frame + 1)) * sizeof(*frame));
}

/* The frame's call is over on this rank. */
static bool is_old(const ep_group *group, const ep_group_frame *frame)
{
    bool old = frame->generation < group->generation ||
               (frame->generation == group->generation && frame->number < group->number);
    for (uint32_t i = 0; i < EP_GROUP_OPERATIONS_MAX && old; i++) {
        const group_op *op = group->ops[i];
        old = op == NULL || op->taken || frame->generation != group->generation ||
              op->number != frame->number;
    }
    return old;
}

void ep_group_drop_old_frames(ep_group *group, group_peer *peer)
{
    for (uint32_t i = peer->ring_count; i-- > 0;) {
        if (is_old(group, &peer->ring[i].head)) {
            ep_buffer_unref(peer->ring[i].buffer);
            ep_group_inbox_remove(peer, &peer->ring[i]);
        }
    }
}

/* The sender may have sent it, by the frames it got from this rank. Lock held. */
static bool is_due(const ep_group *group, const ep_group_frame *frame)
{
    uint64_t begun = frame->generation == group->generation ? group->number : 0;
    return frame->generation < group->generation || frame->number < begun + EP_GROUP_OPERATIONS_MAX;
}

static uint32_t arrival_bit(const ep_group_frame *frame)
{
    return (uint32_t)1 << frame->number % 32;
}

/*
 * Notes a frame. They may come out of order, through a neighbour (two_ways) or from calls with a
 * pair. Lock held; false: it has come already or is too far ahead.
 */
static bool note_arrival(group_arrivals *seen, const ep_group_frame *frame, bool two_ways)
{
    if (!seen->any || frame->generation > seen->generation) {
        *seen = (group_arrivals){.generation = frame->generation, .any = true};
    }
    if (frame->generation < seen->generation) {
        return two_ways;
    }
    /* of an earlier one: wraps to a large number */
    uint64_t place = frame->number - seen->next_number;
    if (place > GROUP_AHEAD_MAX || (seen->ahead >> place & 1) != 0) {
        return false;
    }
    seen->failed &= ~arrival_bit(frame);
    seen->failed |= frame->kind == EP_GROUP_FRAME_FAILED ? arrival_bit(frame) : 0;
    for (seen->ahead |= (uint32_t)1 << place; (seen->ahead & 1) != 0; seen->ahead >>= 1) {
        seen->next_number++;
    }
    return true;
}

static bool has_come(const group_arrivals *seen, const ep_group_frame *frame)
{
    uint64_t place = frame->number - seen->next_number;
    return seen->any && (frame->generation < seen->generation ||
                         (frame->generation == seen->generation &&
                          (frame->number < seen->next_number ||
                           (place <= GROUP_AHEAD_MAX && (seen->ahead >> place & 1) != 0))));
}

static bool is_before(const ep_group_frame *a, const ep_group_frame *b)
{
    return a->generation < b->generation ||
           (a->generation == b->generation && a->number < b->number);
}

/* Finds a frame's place in the ring. Lock held; false: one of the same call waits already, or too
 * many do. */
static bool ring_place(const group_peer *peer, const ep_group_frame *head, uint32_t *out_place)
{
    uint32_t place = peer->ring_count;
    while (place > 0 && is_before(head, &peer->ring[place - 1].head)) {
        place--;
    }
    *out_place = place;
    return peer->ring_count < GROUP_RING_FRAMES &&
           (place == 0 || is_before(&peer->ring[place - 1].head, head));
}

static bool ring_insert(group_peer *peer, const group_inbox_frame *added)
{
    uint32_t place;
    if (!ring_place(peer, &added->head, &place)) {
        return false;
    }
    memmove(&peer->ring[place + 1], &peer->ring[place],
            (peer->ring_count - place) * sizeof(*added));
    peer->ring[place] = *added;
    peer->ring_count++;
    return true;
}

bool ep_group_has_two_ways(const ep_group *group, uint32_t origin)
{
    return group->has_neighbours && group->same_host[origin] != group->same_host[group->rank];
}

/* Rows that were revoked by a failed frame, which has overtaken them. Lock held. */
static bool is_overtaken(const group_arrivals *seen, bool two_ways, const ep_group_frame *frame)
{
    return two_ways && frame->kind != EP_GROUP_FRAME_FAILED && has_come(seen, frame) &&
           frame->generation == seen->generation && (seen->failed & arrival_bit(frame)) != 0;
}

bool ep_group_inbox_has_place(ep_group *group, uint32_t origin, const ep_group_frame *frame)
{
    group_peer *peer = &group->peers[origin];
    group_arrivals seen = peer->seen;
    uint32_t place;
    ep_group_drop_old_frames(group, peer);
    const bool two_ways = ep_group_has_two_ways(group, origin);
    return is_due(group, frame) && note_arrival(&seen, frame, two_ways)
               ? is_old(group, frame) || ring_place(peer, frame, &place)
               : is_overtaken(&peer->seen, two_ways, frame);
}

/* Whether via may pass on frames of origin. The call checks later that it is the right gateway.
 * Lock held. */
static bool may_bring(const ep_group *group, uint32_t origin, uint32_t via)
{
    const uint32_t *same = group->same_host;
    return origin == via || (origin < group->world && same[origin] != same[group->rank] &&
                             same[via] == same[group->rank]);
}

/*
 * Handles a second frame of a call: a failed frame that revokes the rows, or rows that such a frame
 * has overtaken. Lock held; false: neither.
 */
static bool take_back(group_peer *peer, bool two_ways, const ep_group_frame *frame,
                      ep_buffer **inout_buffer)
{
    if (is_overtaken(&peer->seen, two_ways, frame)) {
        peer->seen.failed &= ~arrival_bit(frame); /* once */
        return true;
    }
    if (frame->kind != EP_GROUP_FRAME_FAILED) {
        return false;
    }
    if (!has_come(&peer->seen, frame)) {
        return false;
    }
    group_inbox_frame *first = ep_group_inbox_find(peer, frame->generation, frame->number);
    if (first != NULL) {
        ep_buffer *rows = first->buffer;
        first->buffer = *inout_buffer;
        first->head = *frame;
        *inout_buffer = rows;
    }
    return true;
}

bool ep_group_inbox_add(ep_group *group, uint32_t origin, uint32_t via, const ep_group_frame *frame,
                        ep_buffer **inout_buffer)
{
    pthread_mutex_lock(&group->lock);
    group_peer *peer = &group->peers[origin];
    bool two_ways = ep_group_has_two_ways(group, origin);
    bool first = is_due(group, frame) && note_arrival(&peer->seen, frame, two_ways);
    bool good = first || take_back(peer, two_ways, frame, inout_buffer);
    ep_group_drop_old_frames(group, peer);
    if (first && !is_old(group, frame)) {
        group_inbox_frame added = {*inout_buffer, *frame, ep_clock_now_ns(), via};
        good = ring_insert(peer, &added);
        *inout_buffer = good ? NULL : *inout_buffer;
    }
    ep_group_op_wake(group, frame);
    pthread_mutex_unlock(&group->lock);
    return good;
}

static void take_call_frame(group_link *link, const ep_group_frame *frame, ep_buffer **buffer)
{
    ep_group *group = link->group;
    bool passed_on = (frame->flags & EP_GROUP_FRAME_FLAG_PASSED_ON) != 0;
    uint32_t origin = passed_on ? frame->origin : link->rank;
    pthread_mutex_lock(&group->lock);
    bool good = may_bring(group, origin, link->rank);
    pthread_mutex_unlock(&group->lock);
    if (!good) {
        ep_group_link_close_badly(link, "it passed on rows that do not come through it");
        return;
    }
    /* gateways pass frames on in the order in which they get them */
    group_link *sender = passed_on ? ep_group_peer_link(group, origin) : link;
    if (!ep_group_inbox_add(group, origin, link->rank, frame, buffer) && sender != NULL) {
        ep_group_link_close_badly(sender, "it sent frames out of order");
    }
}

/* A neighbour reports the loss of a rank of another host, whose rows may come through it. */
static void take_loss(group_link *link, const ep_group_frame *frame, const ep_buffer *buffer)
{
    ep_group *group = link->group;
    ep_error why;
    ep_group_read_text(buffer, &why);
    pthread_mutex_lock(&group->lock);
    bool good = frame->origin != link->rank && may_bring(group, frame->origin, link->rank);
    if (good) {
        group_peer *peer = &group->peers[frame->origin];
        peer->lost_at[link->rank / 64] |= (uint64_t)1 << link->rank % 64;
        if (peer->why[0] == 0) {
            snprintf(peer->why, sizeof(peer->why), "rank %" PRIu32 ": %.170s", link->rank,
                     why.text);
        }
        pthread_cond_broadcast(&group->changed);
    }
    pthread_mutex_unlock(&group->lock);
    if (!good) {
        ep_group_link_close_badly(link, "it broke the protocol");
    }
}

static void take_broken(group_link *link, const ep_group_frame *frame, const ep_buffer *buffer)
{
    ep_group *group = link->group;
    ep_error error;
    read_reason(link, buffer, &error);
    pthread_mutex_lock(&group->lock);
    uint64_t from = frame->generation > group->generation ? 0 : frame->number;
    if (frame->generation >= group->generation &&
        (group->broken.code == EP_OK || from < group->broken_from)) {
        group->broken = error;
        group->broken_from = from;
        group->broken_generation = frame->generation;
    }
    pthread_cond_broadcast(&group->changed);
    pthread_mutex_unlock(&group->lock);
}

static void take_bye(group_link *link, const ep_buffer *buffer)
{
    ep_group *group = link->group;
    ep_error why;
    char text[EP_ERROR_TEXT_BYTES];
    ep_group_read_text(buffer, &why);
    snprintf(text, sizeof(text), "it left the group%s%.200s", why.text[0] != 0 ? " as " : "",
             why.text);
    pthread_mutex_lock(&group->lock);
    bool news = peer_is_gone(group, &group->peers[link->rank], text);
    pthread_mutex_unlock(&group->lock);
    if (news) {
        ep_group_relay_loss(group, link->rank);
    }
}

static void take_frame(group_link *link, const ep_group_frame *frame, ep_buffer **buffer)
{
    if (frame->kind == EP_GROUP_FRAME_HELLO) {
        take_hello(link, frame, *buffer);
        return;
    }
    /* a stranger: nothing but a hello is accepted from it */
    if (link->rank == GROUP_NO_RANK) {
        ep_conn_close(link->conn);
        return;
    }
    switch (frame->kind) {
    case EP_GROUP_FRAME_REFUSED:
        take_refusal(link, *buffer);
        break;
    case EP_GROUP_FRAME_WELCOME:
        take_welcome(link);
        break;
    case EP_GROUP_FRAME_TABLE:
        take_table(link, frame, *buffer);
        break;
    case EP_GROUP_FRAME_ROWS:
    case EP_GROUP_FRAME_FAILED:
        take_call_frame(link, frame, buffer);
        break;
    case EP_GROUP_FRAME_BROKEN:
        take_broken(link, frame, *buffer);
        break;
    case EP_GROUP_FRAME_HOST_ROWS:
        ep_group_relay_frame(link->group, link->rank, frame, *buffer);
        *buffer = NULL;
        break;
    case EP_GROUP_FRAME_LOST:
        take_loss(link, frame, *buffer);
        break;
    case EP_GROUP_FRAME_BYE:
        take_bye(link, *buffer);
        break;
    case EP_GROUP_FRAME_HELLO:
        break;
    }
}

static void on_frame(void *arg, ep_conn *conn, ep_buffer *taken_frame)
{
    group_link *link = arg;
    ep_group *group = link->group;
    ep_group_frame frame;
    (void)conn;
    bool good = ep_group_frame_decode(taken_frame->data, &frame, NULL) == EP_OK &&
                taken_frame->bytes == EP_GROUP_FRAME_FIXED_BYTES + frame.payload_bytes &&
                (link->rank == GROUP_NO_RANK || frame.rank == link->rank);
    pthread_mutex_lock(&group->lock);
    group->stats.frames_received++;
    group->stats.bytes_received += taken_frame->bytes;
    if (link->rank != GROUP_NO_RANK) {
        group->peers[link->rank].traffic.frames_received++;
        group->peers[link->rank].traffic.bytes_received += taken_frame->bytes;
    }
    pthread_mutex_unlock(&group->lock);
    if (good) {
        take_frame(link, &frame, &taken_frame);
    } else {
        ep_group_link_close_badly(link, "it broke the protocol");
    }
    ep_buffer_unref(taken_frame);
}

/* ---- life of a link ---- */

static void on_closed(void *arg, ep_conn *conn, const ep_error *error)
{
    group_link *link = arg;
    ep_group *group = link->group;
    bool news = false;
    pthread_mutex_lock(&group->lock);
    link->closed = true;
    if (link->rank != GROUP_NO_RANK && group->peers[link->rank].link == link) {
        group_peer *peer = &group->peers[link->rank];
        if (peer->ready) {
            news = peer_is_gone(group, peer, error->text);
        } else { /* dialing may be tried again */
            peer->link = NULL;
            peer->hello_waits = false;
            snprintf(group->last_refusal, sizeof(group->last_refusal), "%s", error->text);
        }
    }
    if (news) {
        pthread_mutex_unlock(&group->lock);
        ep_group_relay_loss(group, link->rank);
        pthread_mutex_lock(&group->lock);
    }
    bool stranger = link->rank == GROUP_NO_RANK;
    /* only strangers' links are freed here; others live as long as the group, which may be sending
     * on them */
    if (stranger) {
        LIST_REMOVE(link, entry);
        ep_conn_release(conn);
    }
    group->links_open--;
    pthread_cond_broadcast(&group->changed);
    pthread_mutex_unlock(&group->lock); /* after this the group may be freed */
    if (stranger) {
        free(link);
    }
}

group_link *ep_group_link_start(ep_group *group, ep_conn *taken_conn, uint32_t rank)
{
    group_link *link = calloc(1, sizeof(*link));
    if (link == NULL) {
        ep_conn_release(taken_conn);
        return NULL;
    }
    link->group = group;
    link->conn = taken_conn;
    link->rank = rank;
    link->dialed = rank != GROUP_NO_RANK;
    pthread_mutex_lock(&group->lock);
    LIST_INSERT_HEAD(&group->links, link, entry);
    group->links_open++;
    if (rank != GROUP_NO_RANK) {
        group->peers[rank].link = link;
    }
    bool closing = group->closing;
    pthread_mutex_unlock(&group->lock);
    ep_conn_handler handler = {.on_frame = on_frame, .on_closed = on_closed, .arg = link};
    ep_conn_start(taken_conn, &handler);
    if (closing) {
        ep_conn_close(taken_conn);
    } else if (rank != GROUP_NO_RANK) {
        ep_conn_allow_large(taken_conn, NULL);
    }
    return link;
}

void ep_group_accepted(void *arg, ep_conn *taken_conn)
{
    ep_group_link_start(arg, taken_conn, GROUP_NO_RANK);
}
