/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls to coordinators and nodes without libexpertd: one connection and one call per URL, all URLs
 * at once.
 *
 * Threads  one at a time.
 */
#ifndef EP_CLI_CONTROL_H
#define EP_CLI_CONTROL_H

#include "admin.pb-c.h"
#include "connect.h"
#include "coordinator.pb-c.h"
#include "rpc/rpc.h"
#include "rpc/rpc_look.h"

typedef struct ep_cli_control ep_cli_control;

/* connect is borrowed until _close. Errors: NO_MEMORY, IO. */
ep_err ep_cli_control_open(const ep_cli_connect *connect, ep_cli_control **out_control,
                           ep_error *out_error);
/* The same as an operator, with --admin-token-file; URLs must be of admin listeners. */
ep_err ep_cli_control_open_operator(const ep_cli_connect *connect, ep_cli_control **out_control,
                                    ep_error *out_error);
void ep_cli_control_close(ep_cli_control *control);
/* For a channel of one's own, to be closed before; borrowed. */
const ep_rpc_common *ep_cli_control_common(const ep_cli_control *control);

/* on_wait is called repeatedly while answers are awaited; when it returns true, the wait ends with
 * CANCELLED. no_look: nor is there time to look at what stands at ports without an answer. */
void ep_cli_control_on_wait(ep_cli_control *control, bool (*on_wait)(void *arg), void *arg,
                            bool no_look);

typedef struct ep_cli_answer {
    ProtobufCMessage *message; /* NULL on an error */
    ep_error error;            /* code EP_OK when there is a message; the text names the URL */
    uint64_t arrived_us;       /* local wall clock on arrival; 0 without a message */
} ep_cli_answer;

/*
 * Sends the same request (NULL: Empty) to every URL and waits up to timeout_us for all answers. The
 * first message of a stream is its answer. out_answers [count] is always filled; free it with
 * ep_cli_answers_free. A peer that cannot be connected to is UNAVAILABLE.
 */
void ep_cli_control_ask(ep_cli_control *control, const char *const *urls, size_t count,
                        const char *service, const char *method, const ProtobufCMessage *request,
                        uint64_t timeout_us, ep_cli_answer *out_answers);
/* Looks at all these ports at once (a NULL: at none there). Takes a few seconds at most. */
void ep_cli_control_look(const ep_cli_control *control, const char *const *urls, size_t count,
                         ep_rpc_look *out_looks);
void ep_cli_answers_free(ep_cli_answer *answers, size_t count);

/* The same for one URL with the common timeout. Free *out_message with
 * protobuf_c_message_free_unpacked(m, NULL). */
ep_err ep_cli_control_ask_one(ep_cli_control *control, const char *url, const char *service,
                              const char *method, const ProtobufCMessage *request,
                              ProtobufCMessage **out_message, ep_error *out_error);

/* The same for a method of the Admin service at --admin. */
ep_err ep_cli_admin_call(ep_cli_control *control, const char *method,
                         const ProtobufCMessage *request, uint64_t timeout_us,
                         ProtobufCMessage **out_message, ep_error *out_error);
/* The same on a new operator's connection with the common timeout, for commands of one call. */
ep_err ep_cli_admin_call_once(const ep_cli_connect *connect, const char *method,
                              const ProtobufCMessage *request, ProtobufCMessage **out_message,
                              ep_error *out_error);

/*
 * Checks that the coordinator, or at least one node, answers Health, so that a wrong address or
 * token is reported at once and not after the whole timeout. Errors: UNAVAILABLE, UNAUTHENTICATED,
 * ... of the first one asked.
 */
ep_err ep_cli_control_probe(const ep_cli_connect *connect, ep_error *out_error);

#endif
