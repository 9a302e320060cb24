/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Types that every file of the token path shares: the shape of a layer and the options of a batch.
 *
 * Shape letters: T tokens, K slots per token, E routed experts, S shared experts, H width on the
 * wire, I inner, N nodes. Expert indexes used inside ("table index"): [0,E) routed, [E,E+S) shared.
 * Expert ids as callers give them: [0,E) routed, then Z zero, then C copy, then N constant experts;
 * -1 and the total are inactive.
 */
#ifndef EP_MOE_FLOW_H
#define EP_MOE_FLOW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/expert_form.h"
#include "expertd/tensor.h"

#define EP_TOP_K_MAX 64
#define EP_TOKENS_MAX 65536
#define EP_EXPERTS_MAX 65535 /* routed + shared of one layer */
#define EP_HIDDEN_MAX 65536
#define EP_INNER_MAX 1048576
#define EP_NO_EXPERT UINT32_MAX

typedef struct ep_layer_shape {
    uint32_t layer;
    uint32_t hidden;         /* H */
    uint32_t inner;          /* I */
    uint32_t experts;        /* E */
    uint32_t shared_experts; /* S */
    uint32_t top_k;          /* of the model; a batch may have another K */
    ep_activation activation;
    /* callers compare the fields below with their model's layer; no computation uses them */
    /* false: the fields below are unknown, because nodes of an older version do not report them */
    bool form_told;
    uint32_t shared_inner; /* I of the shared expert; 0 none */
    ep_activation_numbers numbers;
} ep_layer_shape;

typedef enum ep_nan_policy { EP_NAN_PASS, EP_NAN_REJECT, EP_NAN_ZERO, EP_NAN_MEAN } ep_nan_policy;
typedef enum ep_result_form {
    EP_RESULT_COMBINED,
    EP_RESULT_PARTIAL,
    EP_RESULT_UNCOMBINED
} ep_result_form;
typedef enum ep_weight_on { EP_WEIGHT_ON_OUTPUT, EP_WEIGHT_ON_INPUT } ep_weight_on;
typedef enum ep_mode { EP_MODE_AUTO, EP_MODE_DECODE, EP_MODE_PREFILL } ep_mode;
typedef enum ep_shared_source {
    EP_SHARED_SERVICE,
    EP_SHARED_CALLER,
    EP_SHARED_NONE
} ep_shared_source;
typedef enum ep_const_rule { EP_CONST_KERNEL, EP_CONST_LINEAR } ep_const_rule;

#endif
