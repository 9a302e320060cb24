/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The numbers of a layer call, of its gate and of its result as tables: a row says where a number
 * is in the public struct and in the gateway's message, and what it may be. Pure.
 */
#ifndef EP_WIRE_MOE_PARAMETERS_H
#define EP_WIRE_MOE_PARAMETERS_H

#include "expertd/client.h"

typedef enum ep_parameter_kind {
    EP_PARAMETER_U32,
    EP_PARAMETER_U64,
    EP_PARAMETER_F32,          /* what it may be, who knows the rule says */
    EP_PARAMETER_F32_POSITIVE, /* 0 or more */
    EP_PARAMETER_FLAG,         /* bool; in the message an int */
} ep_parameter_kind;

typedef struct ep_parameter {
    const char *name; /* of the field, in both */
    ep_parameter_kind kind;
    size_t at; /* in the struct */
    size_t in_message;
    uint32_t least; /* of a U32 */
    uint32_t most;
    const char *words;       /* of a U32 that is a choice, "auto|decode"; NULL: a count */
    const unsigned *numbers; /* of the words; NULL: their places */
    const char *option;      /* of expertctl forward; NULL: none */
} ep_parameter;

typedef struct ep_parameters {
    const ep_parameter *rows;
    size_t count;
} ep_parameters;

extern const ep_parameters ep_moe_parameters;        /* ep_moe_args, GatewayForwardRequest */
extern const ep_parameters ep_gate_parameters;       /* ep_gate_config, GateConfig */
extern const ep_parameters ep_moe_result_parameters; /* ep_moe_result, GatewayForwardReply */

/* Numbers of the words in moe_parameters.def. */
extern const unsigned ep_moe_dispatch_numbers[];
extern const unsigned ep_moe_combine_numbers[];

void ep_parameters_to_message(const ep_parameters *set, const void *from, void *message);
void ep_parameters_from_message(const ep_parameters *set, const void *message, void *to);
/* Of the struct, or of the message. Errors: INVALID_ARGUMENT naming field, value, what is
 * allowed. */
ep_err ep_parameters_check(const ep_parameters *set, const void *base, bool is_message,
                           ep_error *out_error);

/* NULL, or the name of a set field that has no meaning outside of the caller's process. */
const char *ep_moe_args_local(const ep_moe_args *args);

#endif
