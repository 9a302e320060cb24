/* SPDX-License-Identifier: Apache-2.0 */
#include "admin_call.h"

ep_err ep_cli_admin_call(ep_cli_control *control, const ep_cli_connect *connect, const char *method,
                         const ProtobufCMessage *request, uint64_t timeout_us,
                         ProtobufCMessage **out_message, ep_error *out_error)
{
    Expertd__V1__Empty empty = EXPERTD__V1__EMPTY__INIT;
    ep_cli_answer answer;
    ep_cli_control_ask(control, &connect->admin_url, 1, "expertd.v1.Admin", method,
                       request != NULL ? request : &empty.base, timeout_us, &answer);
    *out_message = answer.message;
    if (answer.message != NULL) {
        return EP_OK;
    }
    *out_error = answer.error;
    return out_error->code;
}

ep_err ep_cli_admin_call_once(const ep_cli_connect *connect, const char *method,
                              const ProtobufCMessage *request, ProtobufCMessage **out_message,
                              ep_error *out_error)
{
    ep_cli_control *control = NULL;
    ep_err err = ep_cli_control_open_operator(connect, &control, out_error);
    err = err != EP_OK ? err
                       : ep_cli_admin_call(control, connect, method, request, connect->timeout_us,
                                           out_message, out_error);
    ep_cli_control_close(control);
    return err;
}
