/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The numbers of a layer call, of its gate and of its result, as tables. A row says where a number
 * is in the public struct and in the gateway's message, and which values are allowed. The rows of a
 * call come from moe_parameters.def.
 *
 * Threads    pure; the tables are constant.
 */
#ifndef EP_WIRE_MOE_PARAMETERS_H
#define EP_WIRE_MOE_PARAMETERS_H

#include "expertd/client.h"

typedef enum ep_parameter_kind {
    EP_PARAMETER_U32,
    EP_PARAMETER_U64,
    EP_PARAMETER_F32,          /* any value; the gate checks it */
    EP_PARAMETER_F32_POSITIVE, /* 0 or more */
    EP_PARAMETER_FLAG,         /* bool in the struct, int in the message */
} ep_parameter_kind;

typedef struct ep_parameter {
    const char *name; /* of the field, in struct and message */
    ep_parameter_kind kind;
    size_t at;         /* offset in the struct */
    size_t in_message; /* offset in the message */
    uint32_t least;    /* of a U32 that is a count: the range least..most */
    uint32_t most;
    const char *words;       /* of a U32 that is a choice: "auto|decode"; NULL: it is a count */
    const unsigned *numbers; /* values of the words; NULL: their positions */
    const char *option;      /* option of expertctl forward; NULL: none */
} ep_parameter;

typedef struct ep_parameters {
    const ep_parameter *rows;
    size_t count;
} ep_parameters;

extern const ep_parameters ep_moe_parameters;        /* ep_moe_args, GatewayForwardRequest */
extern const ep_parameters ep_gate_parameters;       /* ep_gate_config, GateConfig */
extern const ep_parameters ep_moe_result_parameters; /* ep_moe_result, GatewayForwardReply */

/* Words and help of rows in moe_parameters.def, for other commands with the same option. */
#define EP_MODE_WORDS "auto|decode|prefill"
#define EP_MODE_HELP "How rows travel (default: auto)"
#define EP_COMM_ALG_WORDS "default|fullmesh|hierarchy|auto"
#define EP_COMM_ALG_HELP                                                                           \
    "Rows straight to each owner, or once per host; auto: by measured times (default: fullmesh)"
#define EP_COMBINE_AT_WORDS "rows|node_sum"
#define EP_COMBINE_AT_HELP "Where rows are summed (default: rows, the exact sum)"

/* Numbers of the words in moe_parameters.def. */
extern const unsigned ep_moe_dispatch_numbers[];
extern const unsigned ep_moe_combine_numbers[];

/* Copies every number of the set between an initialised struct and an initialised message. Touches
 * no other field and checks nothing. */
void ep_parameters_to_message(const ep_parameters *set, const void *from, void *message);
void ep_parameters_from_message(const ep_parameters *set, const void *message, void *to);
/* Checks each number separately. base: the struct or, with is_message, the message. Errors:
 * INVALID_ARGUMENT naming field, value, what is allowed. */
ep_err ep_parameters_check(const ep_parameters *set, const void *base, bool is_message,
                           ep_error *out_error);

/* The name of a set field that has no meaning outside the caller's process; NULL: none is set. */
const char *ep_moe_args_local(const ep_moe_args *args);

#endif
