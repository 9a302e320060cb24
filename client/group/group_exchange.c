/* SPDX-License-Identifier: Apache-2.0 */
/* One call: sends and receives its frames, checks that ranks agree, and handles missing ranks. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "group/group_core.h"
#include "base/struct_size.h"
#include "wire/frame.h"

#define RANKS_TEXT_BYTES 160
/* within this time every rank notices its lost connections */
#define NOTICE_NS EP_NS_PER_S

/* ---- naming ranks ---- */

/* A condition on a call's member. Lock held. */
typedef bool (*rank_test)(const group_op *op, uint32_t member);

/* Lists members for which test is true. Lock held. */
static void name_ranks(const group_op *op, rank_test test, char *out, size_t bytes)
{
    const ep_group *group = op->group;
    bool named[EP_GROUP_WORLD_MAX];
    for (uint32_t m = 0; m < group->members_count; m++) {
        named[m] = test(op, m);
    }
    ep_group_ranks_text(named, group->members, group->members_count, out, bytes);
}

static group_peer *peer_of(const group_op *op, uint32_t member)
{
    return &op->group->peers[op->group->members[member]];
}

/* The waiting frame of a member: of this call, or the first of a later generation; NULL: none. Lock
 * held. */
static const group_inbox_frame *answer_of(const group_op *op, uint32_t member)
{
    group_peer *peer = peer_of(op, member);
    const ep_group *group = op->group;
    const group_inbox_frame *answer = ep_group_inbox_find(peer, group->generation, op->number);
    for (uint32_t i = 0; i < peer->ring_count && answer == NULL; i++) {
        answer = peer->ring[i].head.generation > group->generation ? &peer->ring[i] : NULL;
    }
    return answer;
}

/* A frame of this call or of a later generation has come. */
static bool has_frame(const group_op *op, uint32_t member)
{
    return member == op->own || answer_of(op, member) != NULL;
}

static bool has_no_frame(const group_op *op, uint32_t member)
{
    return !has_frame(op, member);
}

/* Only a frame of a later generation has come: the rank calls with other members, or this call's
 * frame is slower on its other way. */
static bool is_elsewhere(const group_op *op, uint32_t member)
{
    const group_inbox_frame *answer = member == op->own ? NULL : answer_of(op, member);
    return answer != NULL && answer->head.generation != op->group->generation;
}

/* Of a later generation, but this call's frame may still come. */
static bool is_overtaken(const group_op *op, uint32_t member)
{
    return is_elsewhere(op, member) && ep_group_has_two_ways(op->group, op->group->members[member]);
}

/* Of a later generation, and this call's frame will not come. */
static bool is_elsewhere_for_good(const group_op *op, uint32_t member)
{
    return is_elsewhere(op, member) && !is_overtaken(op, member);
}

static bool is_gone(const group_op *op, uint32_t member)
{
    return member != op->own && peer_of(op, member)->gone;
}

/* The rank that sends a member's frame here: itself, or a gateway. Lock or calling thread. */
static uint32_t way_of(const group_op *op, uint32_t member)
{
    const ep_group *group = op->group;
    uint32_t gateway = op->call->by_host != 0
                           ? ep_group_gateway(&group->hosts, member, group->hosts.host_of[op->own])
                           : member;
    return group->members[gateway == op->own ? member : gateway];
}

/* The rank to blame if a member's frame will not come; GROUP_NO_RANK: it may still come, even from
 * a rank that is gone. Lock held. */
static uint32_t culprit_of(const group_op *op, uint32_t member)
{
    const ep_group *group = op->group;
    uint32_t rank = group->members[member];
    if (has_frame(op, member) && !is_overtaken(op, member)) {
        return GROUP_NO_RANK;
    }
    uint32_t way = way_of(op, member);
    if (way != rank && (group->peers[rank].lost_at[way / 64] >> way % 64 & 1) != 0) {
        return rank;
    }
    return group->peers[way].gone ? way : GROUP_NO_RANK;
}

static bool is_lost(const group_op *op, uint32_t member)
{
    return culprit_of(op, member) != GROUP_NO_RANK;
}

static bool is_culprit(const group_op *op, uint32_t member)
{
    for (uint32_t m = 0; m < op->group->members_count; m++) {
        if (culprit_of(op, m) == op->group->members[member]) {
            return true;
        }
    }
    return false;
}

/* A gateway whose frames are still missing. */
static bool is_awaited_way(const group_op *op, uint32_t member)
{
    for (uint32_t m = 0; m < op->group->members_count; m++) {
        if (m != member && has_no_frame(op, m) && way_of(op, m) == op->group->members[member]) {
            return true;
        }
    }
    return false;
}

/* It has not answered a call that is so old that this one may not begin. */
static bool is_behind(const group_op *op, uint32_t member)
{
    const group_arrivals *seen = &peer_of(op, member)->seen;
    uint32_t generation = op->group->generation;
    if (member == op->own || op->number < EP_GROUP_OPERATIONS_MAX) {
        return false;
    }
    return !seen->any || seen->generation < generation ||
           (seen->generation == generation &&
            seen->next_number + EP_GROUP_OPERATIONS_MAX <= op->number);
}

static bool any(const group_op *op, rank_test test)
{
    for (uint32_t m = 0; m < op->group->members_count; m++) {
        if (test(op, m)) {
            return true;
        }
    }
    return false;
}

/* Lock held. */
static ep_err gone_error(const group_op *op, rank_test test, ep_error *out_error)
{
    const ep_group *group = op->group;
    char ranks[RANKS_TEXT_BYTES];
    const char *why = "";
    name_ranks(op, test, ranks, sizeof(ranks));
    for (uint32_t m = 0; m < group->members_count && why[0] == 0; m++) {
        why = test(op, m) ? peer_of(op, m)->why : why;
    }
    return ep_error_set(out_error, EP_ERR_UNAVAILABLE, "group %.40s: rank %s is gone (%s)",
                        group->name, ranks, why);
}

/* ---- beginning ---- */

static uint32_t ops_under_way(const ep_group *group)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < EP_GROUP_OPERATIONS_MAX; i++) {
        count += group->ops[i] != NULL;
    }
    return count;
}

/* Sets the members; a change begins a generation. Lock held. */
static ep_err set_members(ep_group *group, const ep_group_call *call, const uint32_t *members,
                          ep_error *out_error)
{
    uint32_t count = (uint32_t)call->ranks;
    if (count == group->members_count && call->elastic_digest == group->members_digest) {
        return EP_OK;
    }
    if (ops_under_way(group) > 0) {
        return ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                            "group %.40s: %" PRIu32
                            " operations with another elastic_info are under way: finish them "
                            "before the members change",
                            group->name, ops_under_way(group));
    }
    memcpy(group->members, members, count * sizeof(*members));
    group->members_count = count;
    group->members_digest = call->elastic_digest;
    ep_group_hosts_build(group->same_host, members, count, &group->hosts);
    group->generation++;
    group->number = 0;
    ep_error_clear(&group->broken);
    return EP_OK;
}

/* Tells the other members that the generation is broken from a call on; they may still finish
 * earlier ones. Lock not held. */
static void tell_broken(ep_group *group, const ep_error *error, uint32_t generation,
                        uint64_t number)
{
    for (uint32_t m = 0; m < group->members_count; m++) {
        group_link *link = ep_group_peer_link(group, group->members[m]);
        if (link != NULL) {
            ep_group_send_text(link, EP_GROUP_FRAME_BROKEN, generation, number, error->code,
                               error->text);
        }
    }
}

/* Marks this generation as broken and tells the others the cause, so that they do not take this
 * rank's leaving for it. Lock held; released meanwhile. */
static ep_err break_generation(const group_op *op, const ep_error *error)
{
    ep_group *group = op->group;
    uint32_t generation = group->generation;
    uint64_t number = op->number;
    group->broken = *error;
    group->broken_from = number;
    group->broken_generation = generation;
    pthread_mutex_unlock(&group->lock);
    tell_broken(group, error, generation, number);
    pthread_mutex_lock(&group->lock);
    return error->code;
}

/* The error at the deadline: names what is missing. Lock held. */
static void late_error(const group_op *op, rank_test test, ep_error *out_error)
{
    const ep_group *group = op->group;
    char ranks[RANKS_TEXT_BYTES];
    char ways[RANKS_TEXT_BYTES] = "";
    name_ranks(op, test, ranks, sizeof(ranks));
    if (test == has_no_frame) {
        name_ranks(op, is_awaited_way, ways, sizeof(ways));
    }
    ep_error_set(out_error, EP_ERR_DEADLINE_EXCEEDED,
                 "group %.40s: rank %" PRIu32 " has waited %" PRIu64 " us for rank %s in %s%s%s",
                 group->name, group->rank, op->deadline_us, ranks,
                 ep_group_operator_name(op->call->operator),
                 ways[0] == 0 ? "" : ", for rows passed on by rank ", ways);
}

/* Passes another rank's report on to this rank's members, which may differ from that one's. Lock
 * held; released meanwhile. */
static ep_err pass_on(ep_group *group, ep_error *out_error)
{
    uint32_t generation = group->broken_generation;
    uint64_t from = group->broken_from;
    *out_error = group->broken;
    pthread_mutex_unlock(&group->lock);
    tell_broken(group, out_error, generation, from);
    pthread_mutex_lock(&group->lock);
    return out_error->code;
}

/* Lock held. */
static bool is_broken(const group_op *op)
{
    return op->group->broken.code != EP_OK && op->number >= op->group->broken_from;
}

/* The error of a cancelled call: the cause that broke the generation, if there is one, so that the
 * others learn it. Lock held. */
static ep_err cancelled(const group_op *op, ep_error *out_error)
{
    if (op->group->broken.code != EP_OK) {
        *out_error = op->group->broken;
        return out_error->code;
    }
    return ep_error_set(out_error, EP_ERR_CANCELLED,
                        "group %.40s: rank %" PRIu32 " has cancelled its %s", op->group->name,
                        op->group->rank, ep_group_operator_name(op->call->operator));
}

/* Whether waiting is in vain: the call is cancelled, its generation is broken, or a frame will not
 * come. Lock held; released meanwhile. */
static ep_err check_hope(const group_op *op, ep_error *out_error)
{
    if (op->given_up) {
        return cancelled(op, out_error);
    }
    if (is_broken(op)) {
        return pass_on(op->group, out_error);
    }
    if (any(op, is_lost)) {
        gone_error(op, is_culprit, out_error);
        return break_generation(op, out_error);
    }
    return EP_OK;
}

/* Waits until test is true for no member. Lock held. */
static ep_err wait_for(const group_op *op, rank_test test, ep_error *out_error)
{
    ep_err err = check_hope(op, out_error);
    while (err == EP_OK && any(op, test)) {
        if (!ep_group_wait_until(op->group, op->deadline_ns) && any(op, test)) {
            late_error(op, test, out_error);
            return break_generation(op, out_error);
        }
        err = check_hope(op, out_error);
    }
    return err;
}

ep_err ep_group_op_init(uint32_t world, group_op *out_op, ep_error *out_error)
{
    memset(out_op, 0, sizeof(*out_op));
    out_op->frames = calloc(world, sizeof(*out_op->frames));
    out_op->told = calloc(world, sizeof(*out_op->told));
    if (out_op->frames != NULL && out_op->told != NULL) {
        return EP_OK;
    }
    ep_group_op_fini(out_op);
    return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a call of %" PRIu32 " ranks",
                        world);
}

void ep_group_op_fini(group_op *op)
{
    free(op->frames);
    free(op->told);
    memset(op, 0, sizeof(*op));
}

/* Gives the call a place in ops and a number. Lock held. */
static ep_err enter(group_op *op, const uint32_t *members, ep_error *out_error)
{
    ep_group *group = op->group;
    ep_err err = set_members(group, op->call, members, out_error);
    if (err != EP_OK) {
        return err;
    }
    uint32_t place = 0;
    while (place < EP_GROUP_OPERATIONS_MAX && group->ops[place] != NULL) {
        place++;
    }
    if (place == EP_GROUP_OPERATIONS_MAX) {
        return ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                            "group %.40s: %d operations are under way, as many as are allowed: "
                            "finish one first",
                            group->name, EP_GROUP_OPERATIONS_MAX);
    }
    group->ops[place] = op;
    op->number = group->number++;
    return EP_OK;
}

/* Lock held. */
static void leave(group_op *op)
{
    ep_group *group = op->group;
    for (uint32_t i = 0; i < EP_GROUP_OPERATIONS_MAX; i++) {
        group->ops[i] = group->ops[i] == op ? NULL : group->ops[i];
    }
    for (uint32_t r = 0; r < group->world; r++) {
        ep_group_drop_old_frames(group, &group->peers[r]);
    }
}

ep_err ep_group_op_begin(group_op *op, ep_group *group, const ep_group_call *call,
                         const uint32_t *members, uint64_t deadline_us, ep_error *out_error)
{
    if (ep_fork_guard_in_child(&group->fork)) {
        return ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                            "group %.40s was made before fork: it belongs to the parent",
                            group->name);
    }
    *op = (group_op){.group = group,
                     .call = call,
                     .own = (uint32_t)call->local_rank,
                     .deadline_us = ep_group_deadline_us(group, deadline_us),
                     .frames = op->frames,
                     .told = op->told,
                     .is_beginning = true};
    op->deadline_ns = ep_clock_after_us(op->deadline_us);
    ep_error error;
    pthread_mutex_lock(&group->lock);
    ep_err err = enter(op, members, &error);
    if (err == EP_OK) {
        for (uint32_t r = 0; r < group->world; r++) {
            ep_group_drop_old_frames(group, &group->peers[r]);
        }
        /* A rank that is gone may have sent its frame of this call before, so gone ranks are no
         * error. */
        err = wait_for(op, is_behind, &error);
        op->is_beginning = false;
        if (err == EP_OK) {
            group->stats.calls++;
        } else {
            leave(op);
        }
    }
    pthread_mutex_unlock(&group->lock);
    if (err != EP_OK && out_error != NULL) {
        *out_error = error;
    }
    return err;
}

/* ---- sending ---- */

static group_link *link_of(ep_group *group, uint32_t member)
{
    pthread_mutex_lock(&group->lock);
    group_link *link = group->peers[group->members[member]].link;
    pthread_mutex_unlock(&group->lock);
    return link; /* valid: links of peers live as long as the group */
}

ep_err ep_group_op_body(group_op *op, uint32_t member, size_t body_bytes, uint32_t rows,
                        uint8_t **out_body, ep_error *out_error)
{
    ep_group *group = op->group;
    uint8_t *frame;
    ep_err err = ep_group_frame_acquire(group, EP_GROUP_BODY_OFFSET + body_bytes,
                                        &op->frames[member].outgoing, &frame, out_error);
    if (err != EP_OK) {
        return err;
    }
    memset(frame + EP_GROUP_FRAME_FIXED_BYTES, 0,
           EP_GROUP_BODY_OFFSET - EP_GROUP_FRAME_FIXED_BYTES);
    ep_group_record_encode(op->call, frame + EP_GROUP_FRAME_FIXED_BYTES);
    op->frames[member].outgoing_rows = rows;
    *out_body = frame + EP_GROUP_BODY_OFFSET;
    return EP_OK;
}

ep_err ep_group_op_send(group_op *op, ep_error *out_error)
{
    ep_group *group = op->group;
    ep_err err = EP_OK;
    /* each rank begins with the next one, so that no rank is the first for all */
    for (uint32_t i = 1; i < group->members_count; i++) {
        uint32_t member = (op->own + i) % group->members_count;
        bool whole_host =
            op->call->by_host != 0 && !ep_group_hosts_share(&group->hosts, op->own, member);
        ep_group_frame frame = {.kind = whole_host ? EP_GROUP_FRAME_HOST_ROWS : EP_GROUP_FRAME_ROWS,
                                .generation = group->generation,
                                .number = op->number};
        ep_buffer *buffer = op->frames[member].outgoing;
        if (buffer == NULL) { /* its gateway gets its rows */
            continue;
        }
        op->frames[member].outgoing = NULL;
        ep_err sent = ep_group_frame_send(link_of(group, member), &frame, buffer);
        if (sent == EP_OK) {
            pthread_mutex_lock(&group->lock);
            group->peers[group->members[member]].traffic.rows_sent +=
                op->frames[member].outgoing_rows;
            pthread_mutex_unlock(&group->lock);
        }
        /* CLOSED is no error here: the wait will find the rank gone */
        if (sent != EP_OK && sent != EP_ERR_CLOSED && err == EP_OK) {
            err = ep_error_set(out_error, sent, "cannot send to rank %" PRIu32 ": %s",
                               group->members[member], ep_err_text(sent));
        }
    }
    op->answered = err == EP_OK;
    return err;
}

void ep_group_op_fail(group_op *op, const ep_error *error)
{
    ep_group *group = op->group;
    for (uint32_t m = 0; m < group->members_count; m++) {
        ep_buffer_unref(op->frames[m].outgoing);
        op->frames[m].outgoing = NULL;
        if (m != op->own) {
            ep_group_send_text(link_of(group, m), EP_GROUP_FRAME_FAILED, group->generation,
                               op->number, error->code, error->text);
        }
    }
    op->answered = true;
}

/* ---- receiving ---- */

/* Takes this call's frames out of the rings. Lock held. */
static void take_frames(group_op *op)
{
    ep_group *group = op->group;
    for (uint32_t m = 0; m < group->members_count; m++) {
        group_peer *peer = peer_of(op, m);
        if (m == op->own) {
            continue;
        }
        group_inbox_frame *frame = ep_group_inbox_find(peer, group->generation, op->number);
        op->frames[m].incoming = frame->buffer;
        op->frames[m].incoming_ns = frame->arrived_ns;
        op->frames[m].incoming_via = frame->via;
        ep_group_inbox_remove(peer, frame);
    }
    op->taken = true;
}

/* The error when ranks call with other members than this one; lists what their frames say. Lock
 * held. */
static void name_generations(group_op *op, ep_error *out_error)
{
    ep_group *group = op->group;
    bool known = true;
    for (uint32_t m = 0; m < group->members_count && known; m++) {
        if (m == op->own) {
            op->told[m] = *op->call;
        } else {
            const ep_buffer *buffer = answer_of(op, m)->buffer;
            known = buffer->bytes >= EP_GROUP_BODY_OFFSET &&
                    ep_group_record_decode(buffer->data + EP_GROUP_FRAME_FIXED_BYTES, &op->told[m],
                                           out_error) == EP_OK;
        }
    }
    if (!known || ep_group_calls_compare(op->told, group->members, group->members_count,
                                         out_error) == EP_OK) {
        ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                     "group %.40s: elastic_info differs between ranks: some call with other "
                     "members than rank %" PRIu32,
                     group->name, group->rank);
    }
}

static ep_err damaged(const ep_group *group, uint32_t member, const char *what, ep_error *out_error)
{
    return ep_error_set(out_error, EP_ERR_DATA_LOSS,
                        "rank %" PRIu32 " sent a frame that is damaged (%s)",
                        group->members[member], what);
}

static ep_err check_frame(group_op *op, uint32_t member, ep_error *out_error)
{
    ep_group *group = op->group;
    const ep_buffer *buffer = op->frames[member].incoming;
    ep_group_frame frame;
    ep_err err = ep_group_frame_decode(buffer->data, &frame, out_error);
    if (err != EP_OK) {
        return err;
    }
    if ((frame.flags & EP_GROUP_FRAME_FLAG_CRC) != 0 &&
        ep_crc32c(0, buffer->data + EP_GROUP_FRAME_FIXED_BYTES, (size_t)frame.payload_bytes) !=
            frame.payload_crc) {
        return damaged(group, member, "CRC", out_error);
    }
    if (frame.kind == EP_GROUP_FRAME_FAILED) {
        ep_error theirs;
        ep_group_read_text(buffer, &theirs);
        return ep_error_set(out_error, theirs.code, "rank %" PRIu32 ": %.*s",
                            group->members[member], EP_ERROR_TEXT_BYTES - 24, theirs.text);
    }
    if (frame.membership != group->membership || buffer->bytes < EP_GROUP_BODY_OFFSET) {
        return damaged(group, member, "length or membership", out_error);
    }
    if (ep_group_record_decode(buffer->data + EP_GROUP_FRAME_FIXED_BYTES, &op->told[member],
                               out_error) != EP_OK) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL,
                            "rank %" PRIu32
                            " sent a parameter record of another number of fields than %d",
                            group->members[member], EP_GROUP_CALL_TOLD);
    }
    return EP_OK;
}

/* Checks that a frame came the way that all ranks agree on. */
static ep_err check_way(const group_op *op, uint32_t member, ep_error *out_error)
{
    const ep_group *group = op->group;
    uint32_t way = way_of(op, member);
    bool gateway_is_us = op->call->by_host != 0 && way == group->members[member] &&
                         !ep_group_hosts_share(&group->hosts, op->own, member);
    uint32_t expected = gateway_is_us ? group->rank : way;
    return op->frames[member].incoming_via == expected
               ? EP_OK
               : ep_error_set(out_error, EP_ERR_PROTOCOL,
                              "rank %" PRIu32 " brought the rows of rank %" PRIu32
                              ", which come through rank %" PRIu32,
                              op->frames[member].incoming_via, group->members[member], expected);
}

/*
 * All have answered, some with frames of a later generation. Waits for overtaken frames, and for
 * the reason why others call with other members, which may be on its way. *out_differs: no reason
 * has come. Lock held.
 */
static ep_err wait_for_same(group_op *op, bool *out_differs, ep_error *out_error)
{
    ep_group *group = op->group;
    uint64_t notice_ns = 0;
    *out_differs = false;
    while (any(op, is_elsewhere)) {
        ep_err err = check_hope(op, out_error);
        if (err != EP_OK) {
            return err;
        }
        bool for_good = any(op, is_elsewhere_for_good);
        bool explained = any(op, is_gone); /* they call without the rank that is gone */
        if ((for_good || explained) && notice_ns == 0) {
            notice_ns = ep_clock_now_ns() + NOTICE_NS;
        }
        uint64_t until_ns =
            notice_ns != 0 && notice_ns < op->deadline_ns ? notice_ns : op->deadline_ns;
        if ((for_good && explained) || !ep_group_wait_until(group, until_ns)) {
            *out_differs = !explained;
            return explained ? gone_error(op, is_gone, out_error) : EP_OK;
        }
    }
    return EP_OK;
}

void ep_group_op_give_up(group_op *op)
{
    pthread_mutex_lock(&op->group->lock);
    op->given_up = true;
    pthread_cond_broadcast(&op->group->changed);
    pthread_mutex_unlock(&op->group->lock);
}

void ep_group_op_wake(ep_group *group, const ep_group_frame *frame)
{
    for (uint32_t i = 0; i < EP_GROUP_OPERATIONS_MAX; i++) {
        const group_op *op = group->ops[i];
        /* a frame of a later generation counts as an answer to any call */
        bool may_go_on = op != NULL && (op->is_beginning || op->number == frame->number ||
                                        frame->generation != group->generation);
        if (may_go_on && !any(op, op->is_beginning ? is_behind : has_no_frame)) {
            pthread_cond_broadcast(&group->changed);
            return;
        }
    }
}

bool ep_group_op_is_over_locked(const group_op *op)
{
    return op->taken || op->given_up || is_broken(op) || any(op, is_lost) ||
           !any(op, has_no_frame) || ep_clock_now_ns() >= op->deadline_ns;
}

bool ep_group_op_is_over(const group_op *op)
{
    pthread_mutex_lock(&op->group->lock);
    bool over = ep_group_op_is_over_locked(op);
    pthread_mutex_unlock(&op->group->lock);
    return over;
}

ep_err ep_group_op_wait(group_op *op, ep_error *out_error)
{
    ep_group *group = op->group;
    ep_error error;
    bool differs = false;
    op->wait_began_ns = ep_clock_now_ns();
    pthread_mutex_lock(&group->lock);
    ep_err err = wait_for(op, has_no_frame, &error);
    if (err == EP_OK) {
        err = wait_for_same(op, &differs, &error);
    }
    if (differs) {
        name_generations(op, &error);
        group->broken = error;
        group->broken_from = op->number;
        /* the others are told of the later one below */
        group->broken_generation = group->generation;
        err = error.code;
    }
    if (err == EP_OK) {
        take_frames(op);
    }
    uint32_t generation = group->generation;
    pthread_mutex_unlock(&group->lock);
    if (differs) {
        tell_broken(group, &error, generation + 1, 0);
    }
    for (uint32_t m = 0; m < group->members_count && err == EP_OK; m++) {
        if (m == op->own) {
            op->told[m] = *op->call;
        } else {
            err = check_frame(op, m, &error);
        }
    }
    if (err == EP_OK) {
        err = ep_group_calls_compare(op->told, group->members, group->members_count, &error);
    }
    for (uint32_t m = 0; m < group->members_count && err == EP_OK; m++) {
        err = m == op->own ? EP_OK : check_way(op, m, &error);
    }
    if (err != EP_OK && out_error != NULL) {
        *out_error = error;
    }
    return err;
}

const uint8_t *ep_group_op_received(const group_op *op, uint32_t member, size_t *out_bytes)
{
    const ep_buffer *buffer = op->frames[member].incoming;
    *out_bytes = buffer->bytes - EP_GROUP_BODY_OFFSET;
    return buffer->data + EP_GROUP_BODY_OFFSET;
}

int64_t ep_group_op_waited_us(const group_op *op, uint32_t member)
{
    uint64_t arrived = op->frames[member].incoming_ns;
    return member == op->own || arrived <= op->wait_began_ns
               ? 0
               : (int64_t)((arrived - op->wait_began_ns) / EP_NS_PER_US);
}

/* ---- ending ---- */

void ep_group_op_end(group_op *op)
{
    ep_group *group = op->group;
    for (uint32_t m = 0; m < group->members_count; m++) {
        ep_buffer_unref(op->frames[m].incoming);
        ep_buffer_unref(op->frames[m].outgoing);
        op->frames[m] = (group_op_frames){.incoming = NULL};
    }
    pthread_mutex_lock(&group->lock);
    leave(op);
    pthread_mutex_unlock(&group->lock);
}

void ep_group_read_traffic(ep_group *group, uint32_t rank, ep_group_traffic *out_traffic)
{
    ep_group_traffic traffic = {0};
    pthread_mutex_lock(&group->lock);
    if (rank < group->world) {
        traffic = group->peers[rank].traffic;
    }
    pthread_mutex_unlock(&group->lock);
    ep_struct_out(out_traffic, &traffic, sizeof(traffic));
}

void ep_group_read_stats(ep_group *group, ep_group_stats *out_stats)
{
    ep_buffer_pool_stats pool;
    ep_buffer_pool_read_stats(group->pool, &pool);
    pthread_mutex_lock(&group->lock);
    ep_group_stats stats = group->stats;
    pthread_mutex_unlock(&group->lock);
    stats.buffer_bytes = pool.lent_bytes + pool.kept_bytes;
    stats.buffer_bytes_peak = pool.lent_bytes_peak;
    stats.system_allocations = pool.system_allocations;
    ep_struct_out(out_stats, &stats, sizeof(stats));
}
