/* SPDX-License-Identifier: Apache-2.0 */
/* Frames that come to a client: replies (matched to a call, ordered, delivered) and credit. */
#include "base/check.h"
#include "rpc/rpc_channel.h"

typedef enum reply_fate {
    REPLY_DROP,
    REPLY_BREAK,
    REPLY_FAIL,
    REPLY_MESSAGE,
    REPLY_END
} reply_fate;

/*
 * What a reply frame means for the call that it names. Lock held. Except for DROP and BREAK,
 * *out_call is the call, with a reference. For FAIL and END the call has ended, and the reference
 * is the table's (*out_deliver: on_reply must run).
 */
static reply_fate judge_locked(ep_rpc_client_link *link, const ep_frame *frame,
                               ep_rpc_client_call **out_call, bool *out_deliver,
                               ep_error *out_error)
{
    ep_rpc_channel *channel = link->channel;
    ep_rpc_client_call *call = ep_rpc_client_call_find(channel, frame->call_id);
    if (call == NULL && !ep_rpc_call_id_was_given(frame->call_id)) {
        ep_error_set(out_error, EP_ERR_PROTOCOL,
                     "a %s frame answers call %016llx, which was never begun here",
                     ep_frame_kind_name(frame->kind), (unsigned long long)frame->call_id);
        return REPLY_BREAK;
    }
    if (call == NULL || call->link != link) {
        if (channel->late_replies != NULL) {
            __atomic_fetch_add(channel->late_replies, 1, __ATOMIC_RELAXED);
        }
        return REPLY_DROP;
    }
    /* an id is used once, so this is no late reply to an earlier attempt */
    if (call->attempt != frame->attempt) {
        ep_error_set(out_error, EP_ERR_PROTOCOL,
                     "a %s frame answers attempt %u of a call that is attempt %u",
                     ep_frame_kind_name(frame->kind), frame->attempt, call->attempt);
        return REPLY_BREAK;
    }
    bool stream = call->method->stream == EP_RPC_SERVER_STREAM;
    bool more = frame->kind == EP_FRAME_REPLY_MORE;
    bool end_flag = (frame->flags & EP_FRAME_FLAG_END_OF_STREAM) != 0;
    if (frame->method_id != call->method->id || (more && (!stream || end_flag)) ||
        (!more && end_flag != stream)) {
        ep_error_set(
            out_error, EP_ERR_PROTOCOL,
            "a %s frame of method 0x%04x with flags 0x%04x answers a call of method 0x%04x",
            ep_frame_kind_name(frame->kind), frame->method_id, frame->flags, call->method->id);
        return REPLY_BREAK;
    }
    *out_call = call;
    if (frame->stream_sequence != call->sequence) {
        ep_error_set(out_error, EP_ERR_DATA_LOSS, "reply %u of %s.%s is missing, %u arrived",
                     call->sequence, call->method->service->name, call->method->method->name,
                     frame->stream_sequence);
        *out_deliver = ep_rpc_client_call_end(call, out_error);
        return REPLY_FAIL;
    }
    call->sequence++;
    if (more) {
        ep_rpc_client_call_ref(call);
        call->delivering = true;
        return REPLY_MESSAGE;
    }
    *out_deliver = ep_rpc_client_call_end(call, NULL);
    /* frames of a connection come one at a time, so nothing else is being delivered */
    EP_ASSERT(*out_deliver);
    return REPLY_END;
}

/* Checks and unpacks the content of a good reply; *out_error is set only on failure. */
static void read_message(const ep_rpc_client_call *call, const ep_frame *frame, ep_buffer *buffer,
                         ep_rpc_budget *budget, ep_rpc_reply *reply, ep_error *out_error)
{
    ProtobufCMessage *message = NULL;
    ep_err err =
        ep_rpc_unpack(budget, call->method->method->output, buffer->data + EP_FRAME_FIXED_BYTES,
                      frame->header_bytes, &message, out_error);
    if (err == EP_ERR_INVALID_ARGUMENT) {
        out_error->code = EP_ERR_PROTOCOL; /* the request was valid, the answer is not */
    } else if (err == EP_OK) {
        reply->header = message;
        reply->tensors = frame->tensor_bytes > 0 ? buffer->data + frame->tensor_offset : NULL;
        reply->tensor_bytes = (size_t)frame->tensor_bytes;
        reply->frame = buffer;
    }
}

/* Delivers one message of a stream, and the end if the call ended meanwhile. */
static void deliver_message(ep_rpc_client_call *call, const ep_rpc_reply *reply,
                            const ep_error *failure)
{
    ep_rpc_channel *channel = call->channel;
    bool in_table = true;
    if (failure == NULL) {
        call->on_reply(call->arg, reply, NULL);
    }
    pthread_mutex_lock(&channel->lock);
    call->delivering = false;
    bool end_left = call->end_left;
    ep_error error = call->ending_error;
    if (end_left) {
        in_table = false;
    } else if (failure != NULL && !call->ended) {
        error = *failure;
        end_left = ep_rpc_client_call_end(call, failure);
    }
    pthread_mutex_unlock(&channel->lock);
    if (failure != NULL) {
        ep_rpc_client_call_abandon(call);
    }
    if (end_left) {
        ep_rpc_client_call_deliver_end(call, error.code != EP_OK ? &error : NULL);
        if (in_table) {
            ep_rpc_client_call_unref(call); /* the table's reference, from the end */
        }
    }
}

/* Delivers the last frame of a call: its message, the end of its stream, or the peer's error. */
static void deliver_last(ep_rpc_client_call *call, const ep_frame *frame, ep_buffer *buffer,
                         ep_rpc_budget *budget, ep_rpc_reply *reply, ep_error *io_error)
{
    if (io_error->code == EP_OK && frame->status != 0) {
        ep_rpc_status_read(call->channel->common.pool, frame->status,
                           buffer->data + EP_FRAME_FIXED_BYTES, frame->header_bytes, io_error);
    } else if (io_error->code == EP_OK && call->method->stream == EP_RPC_UNARY) {
        read_message(call, frame, buffer, budget, reply, io_error);
    }
    reply->end = true;
    call->on_reply(call->arg, reply, io_error->code != EP_OK ? io_error : NULL);
}

static void reply_arrived(ep_rpc_client_link *link, const ep_frame *frame, ep_buffer *taken_buffer)
{
    ep_rpc_channel *channel = link->channel;
    ep_rpc_client_call *call = NULL;
    ep_rpc_budget budget;
    ep_rpc_reply reply = {.draining = (frame->flags & EP_FRAME_FLAG_DRAINING) != 0};
    ep_error error = {.code = EP_OK}; /* of the payload, or why the call or the link ends */
    bool deliver = false;
    reply_fate fate = REPLY_BREAK;
    if (ep_rpc_payload_check(frame, taken_buffer->data, link->link.payload_crc, &error) !=
        EP_ERR_PROTOCOL) {
        pthread_mutex_lock(&channel->lock);
        fate = judge_locked(link, frame, &call, &deliver, &error);
        pthread_mutex_unlock(&channel->lock);
    }
    ep_rpc_budget_init(&budget, channel->common.pool, channel->common.limits.unpack_bytes_max);
    switch (fate) {
    case REPLY_DROP:
        break;
    case REPLY_BREAK:
        ep_rpc_link_close(&link->link, &error);
        break;
    case REPLY_FAIL:
        ep_rpc_client_call_abandon(call);
        if (deliver) {
            reply.end = true;
            call->on_reply(call->arg, &reply, &error);
        }
        break;
    case REPLY_MESSAGE:
        if (error.code == EP_OK) {
            read_message(call, frame, taken_buffer, &budget, &reply, &error);
        }
        deliver_message(call, &reply, error.code != EP_OK ? &error : NULL);
        break;
    case REPLY_END:
        deliver_last(call, frame, taken_buffer, &budget, &reply, &error);
        break;
    }
    ep_rpc_budget_fini(&budget);
    if (call != NULL && fate != REPLY_BREAK) {
        ep_rpc_client_call_unref(call);
    }
    ep_buffer_unref(taken_buffer);
}

static void credit_arrived(ep_rpc_client_link *link, const ep_frame *frame, const ep_buffer *buffer)
{
    ep_rpc_channel *channel = link->channel;
    ep_frame_credit credit;
    ep_error why;
    if (ep_rpc_payload_check(frame, buffer->data, link->link.payload_crc, &why) != EP_OK) {
        ep_rpc_link_close(&link->link, &why); /* a lost grant of credit could stop us for ever */
        return;
    }
    ep_frame_credit_decode(buffer->data + EP_FRAME_FIXED_BYTES, &credit);
    pthread_mutex_lock(&channel->lock);
    if (credit.bytes > link->granted_bytes) {
        link->granted_bytes = credit.bytes;
    }
    pthread_mutex_unlock(&channel->lock);
    ep_rpc_channel_pump(channel);
}

void ep_rpc_client_frame(ep_rpc_link *base, const ep_frame *frame, ep_buffer *taken_buffer)
{
    ep_rpc_client_link *link = (ep_rpc_client_link *)base;
    ep_error why;
    if (!link->ready) {
        ep_rpc_client_hello(link, frame, taken_buffer);
    } else if (frame->kind == EP_FRAME_REPLY || frame->kind == EP_FRAME_REPLY_MORE) {
        reply_arrived(link, frame, taken_buffer);
        return;
    } else if (frame->kind == EP_FRAME_CREDIT) {
        credit_arrived(link, frame, taken_buffer);
    } else {
        ep_error_set(&why, EP_ERR_PROTOCOL, "a %s frame may not be sent to a client",
                     ep_frame_kind_name(frame->kind));
        ep_rpc_link_close(base, &why);
    }
    ep_buffer_unref(taken_buffer);
}

void ep_rpc_client_sent(ep_rpc_link *base)
{
    ep_rpc_channel *channel = ((ep_rpc_client_link *)base)->channel;
    if (!__atomic_load_n(&channel->blocked, __ATOMIC_SEQ_CST)) {
        return;
    }
    pthread_mutex_lock(&channel->lock);
    __atomic_store_n(&channel->blocked, false, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&channel->lock);
    ep_rpc_channel_pump(channel);
}
