/* SPDX-License-Identifier: Apache-2.0 */
/* Converts between message Status and ep_error. */
#include "rpc/rpc_status.h"

#include <stdio.h>
#include <string.h>

#define STATUS_UNPACK_BYTES_MAX 16384

void ep_rpc_status_fill(ep_err code, const ep_error *error, ep_rpc_status_fields *out_fields)
{
    Expertd__V1__Status *status = &out_fields->status;
    expertd__v1__status__init(status);
    expertd__v1__epoch__init(&out_fields->epoch);
    status->reason = (uint32_t)code;
    status->layer = -1;
    status->expert = -1;
    status->waited_us = -1;
    status->text = ep_rpc_unconst(ep_err_text(code));
    if (error == NULL) {
        return;
    }
    if (error->text[0] != 0) {
        status->text = ep_rpc_unconst(error->text);
    }
    status->node = ep_rpc_unconst(error->node);
    status->layer = error->layer;
    status->expert = error->expert;
    status->waited_us = error->waited_us;
    status->retry_after_us = error->retry_after_us;
    if (error->current_epoch != 0) {
        out_fields->epoch.number = error->current_epoch;
        status->current_epoch = &out_fields->epoch;
    }
}

void ep_rpc_status_read(ep_buffer_pool *pool, uint32_t grpc_code, const uint8_t *data, size_t bytes,
                        ep_error *out_error)
{
    ep_rpc_budget budget;
    ProtobufCMessage *message = NULL;
    ep_rpc_budget_init(&budget, pool, STATUS_UNPACK_BYTES_MAX);
    ep_err err =
        ep_rpc_unpack(&budget, &expertd__v1__status__descriptor, data, bytes, &message, NULL);
    if (err != EP_OK) {
        ep_err code = ep_err_from_wire(0, grpc_code);
        ep_error_set(out_error, code, "%s (the peer gave no readable reason)", ep_err_text(code));
    } else {
        const Expertd__V1__Status *status = (const Expertd__V1__Status *)message;
        ep_err code = ep_err_from_wire(status->reason, grpc_code);
        if (code == EP_OK || ep_err_grpc_code(code) != grpc_code) {
            /* the frame's code decides when they disagree */
            code = ep_err_from_wire(0, grpc_code);
        }
        ep_error_set(out_error, code, "%s",
                     status->text[0] != 0 ? status->text : ep_err_text(code));
        snprintf(out_error->node, sizeof(out_error->node), "%s", status->node);
        out_error->layer = status->layer;
        out_error->expert = status->expert;
        out_error->waited_us = status->waited_us;
        out_error->retry_after_us = status->retry_after_us;
        out_error->current_epoch =
            status->current_epoch != NULL ? status->current_epoch->number : 0;
    }
    ep_rpc_budget_fini(&budget);
}
