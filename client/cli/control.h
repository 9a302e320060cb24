/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Questions to coordinators and nodes, outside of libexpertd: one connection and one call per URL,
 * all URLs at once.
 *
 * Threads  one at a time.
 */
#ifndef EP_CLI_CONTROL_H
#define EP_CLI_CONTROL_H

#include "admin.pb-c.h"
#include "connect.h"
#include "coordinator.pb-c.h"
#include "rpc/rpc.h"

typedef struct ep_cli_control ep_cli_control;

/* connect is borrowed until _close. Errors: NO_MEMORY, IO. */
ep_err ep_cli_control_open(const ep_cli_connect *connect, ep_cli_control **out_control,
                           ep_error *out_error);
/* The same as an operator, with --admin-token-file; its URLs must be those of admin listeners. */
ep_err ep_cli_control_open_operator(const ep_cli_connect *connect, ep_cli_control **out_control,
                                    ep_error *out_error);
void ep_cli_control_close(ep_cli_control *control);

/* on_wait is called again and again while answers are waited for; once it returns true, no answer
 * is: CANCELLED. NULL: none. */
void ep_cli_control_on_wait(ep_cli_control *control, bool (*on_wait)(void *arg), void *arg);

typedef struct ep_cli_answer {
    ProtobufCMessage *message; /* NULL on an error */
    ep_error error;            /* code EP_OK when there is a message; the text names the URL */
    uint64_t arrived_us;       /* our wall clock then; 0 without a message */
} ep_cli_answer;

/*
 * Sends the same request (NULL: Empty) to every URL and waits for all answers, timeout_us at most.
 * Of a stream the first message is the answer. out_answers [count] is filled in every case;
 * ep_cli_answers_free it. A peer that cannot be connected to is UNAVAILABLE.
 */
void ep_cli_control_ask(ep_cli_control *control, const char *const *urls, size_t count,
                        const char *service, const char *method, const ProtobufCMessage *request,
                        uint64_t timeout_us, ep_cli_answer *out_answers);
void ep_cli_answers_free(ep_cli_answer *answers, size_t count);

/* The same to one URL with the common timeout. *out_message:
 * protobuf_c_message_free_unpacked(m, NULL). */
ep_err ep_cli_control_ask_one(ep_cli_control *control, const char *url, const char *service,
                              const char *method, const ProtobufCMessage *request,
                              ProtobufCMessage **out_message, ep_error *out_error);

/* The same of the Admin service to the program whose admin listener --admin names. */
ep_err ep_cli_admin_call(ep_cli_control *control, const char *method,
                         const ProtobufCMessage *request, uint64_t timeout_us,
                         ProtobufCMessage **out_message, ep_error *out_error);
/* The same as an operator, with a connection of its own and the common timeout: for commands of one
 * call. */
ep_err ep_cli_admin_call_once(const ep_cli_connect *connect, const char *method,
                              const ProtobufCMessage *request, ProtobufCMessage **out_message,
                              ep_error *out_error);

/*
 * Whether somebody is there and lets us in: the coordinator, or at least one of the nodes, answers
 * Health. So that a wrong address or token is told at once, and not after the whole timeout.
 * Errors: UNAVAILABLE, UNAUTHENTICATED, ... of the first one asked.
 */
ep_err ep_cli_control_probe(const ep_cli_connect *connect, ep_error *out_error);

#endif
