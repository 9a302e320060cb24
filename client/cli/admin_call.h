/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One call of the Admin service, as an operator, to the program whose admin listener --admin names.
 *
 * Threads  one at a time.
 */
#ifndef EP_CLI_ADMIN_CALL_H
#define EP_CLI_ADMIN_CALL_H

#include "admin.pb-c.h"
#include "control.h"

/*
 * request NULL: Empty. *out_message: protobuf_c_message_free_unpacked(m, NULL). Errors: as
 * ep_cli_control_ask, with a word on what to do where a wrong kind of listener or token was tried.
 */
ep_err ep_cli_admin_call(ep_cli_control *control, const ep_cli_connect *connect, const char *method,
                         const ProtobufCMessage *request, uint64_t timeout_us,
                         ProtobufCMessage **out_message, ep_error *out_error);
/* The same with a connection of its own and the common timeout, for commands of one call. */
ep_err ep_cli_admin_call_once(const ep_cli_connect *connect, const char *method,
                              const ProtobufCMessage *request, ProtobufCMessage **out_message,
                              ep_error *out_error);

#endif
