/* SPDX-License-Identifier: Apache-2.0 */
/* A unary call that waits, for control paths. */
#include <pthread.h>
#include <stdlib.h>

#include "rpc/rpc.h"

typedef struct sync_call {
    pthread_mutex_t lock;
    pthread_cond_t done;
    bool ended;
    ep_err err;
    ep_error error;
    ProtobufCMessage *reply;
} sync_call;

ProtobufCMessage *ep_rpc_message_copy(const ProtobufCMessage *message)
{
    size_t bytes = protobuf_c_message_get_packed_size(message);
    uint8_t *packed = malloc(bytes + 1);
    if (packed == NULL) {
        return NULL;
    }
    protobuf_c_message_pack(message, packed);
    ProtobufCMessage *copy = protobuf_c_message_unpack(message->descriptor, NULL, bytes, packed);
    free(packed);
    return copy;
}

static void sync_reply(void *arg, const ep_rpc_reply *reply, const ep_error *error)
{
    sync_call *call = arg;
    pthread_mutex_lock(&call->lock);
    if (error != NULL) {
        call->error = *error;
        call->err = error->code;
    } else {
        call->reply = ep_rpc_message_copy(reply->header);
        call->err = call->reply != NULL
                        ? EP_OK
                        : ep_error_set(&call->error, EP_ERR_NO_MEMORY, "no memory for a reply");
    }
    call->ended = true;
    pthread_cond_signal(&call->done);
    pthread_mutex_unlock(&call->lock);
}

ep_err ep_rpc_call_sync(ep_rpc_channel *channel, const char *service, const char *method,
                        const ProtobufCMessage *header, uint64_t deadline_ns,
                        ProtobufCMessage **out_reply, ep_error *out_error)
{
    ep_rpc_request request = {.method = ep_rpc_method_by_name(service, method),
                              .header = header,
                              .deadline_ns = deadline_ns,
                              .wait_for_ready = true};
    if (request.method == NULL) {
        return ep_error_set(out_error, EP_ERR_NOT_FOUND, "method %s.%s is not known", service,
                            method);
    }
    if (request.method->stream != EP_RPC_UNARY) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "method %s.%s streams; only unary calls can be waited for", service,
                            method);
    }
    sync_call call = {.err = EP_OK};
    pthread_mutex_init(&call.lock, NULL);
    pthread_cond_init(&call.done, NULL);
    ep_err err = ep_rpc_call_start(channel, &request, sync_reply, &call, NULL, out_error);
    if (err == EP_OK) {
        pthread_mutex_lock(&call.lock);
        while (!call.ended) {
            pthread_cond_wait(&call.done, &call.lock);
        }
        pthread_mutex_unlock(&call.lock);
        err = call.err;
        if (err == EP_OK) {
            *out_reply = call.reply;
        } else if (out_error != NULL) {
            *out_error = call.error;
        }
    }
    pthread_cond_destroy(&call.done);
    pthread_mutex_destroy(&call.lock);
    return err;
}
