/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What only the model's type tells, one row per type: the rule of its router, what its shared
 * experts are, and what config.json does not say because it is in the framework's code. The
 * manual's table of models is printed from these rows (expertctl model types).
 *
 * Threads  pure.
 */
#ifndef EP_MODEL_MODEL_TYPES_H
#define EP_MODEL_MODEL_TYPES_H

#include "expertd/gate.h"

/* Whether the weights are divided by their sum. KEY_...: by config.json; the name tells the
 * default. */
typedef enum ep_renorm {
    EP_RENORM_NEVER,
    EP_RENORM_ALWAYS,
    EP_RENORM_KEY_ON,
    EP_RENORM_KEY_OFF
} ep_renorm;

/* The use of the vector beside the router's matrix. LOGIT: part of the logits, which callers
 * compute. */
typedef enum ep_router_bias { EP_BIAS_NONE, EP_BIAS_SELECT, EP_BIAS_LOGIT } ep_router_bias;

enum {
    /* config.json names the score for selection and weight */
    EP_ROUTER_SCORING_KEY = 1,
    EP_ROUTER_WEIGHT_KEY = 2, /* config.json names what the selected logits become */
    /* experts of masked groups get score 0; otherwise they cannot be selected */
    EP_ROUTER_MASK_ZERO = 4,
    EP_ROUTER_SCALED = 8,            /* multiplied by the factor of config.json */
    EP_ROUTER_SCALED_OR_NORMED = 16, /* multiplied by the factor unless divided by the sum */
    EP_ROUTER_FACTORS = 32,          /* multiplied by a factor for each expert */
    EP_ROUTER_ON_INPUT = 64,         /* the weight multiplies the expert's input */
    EP_ROUTER_HASH = 128,            /* some layers take their experts from a table by token id */
    /* there is one more logit than experts: an expert that gives 0 */
    EP_ROUTER_ZERO_LAST = 256
};

typedef struct ep_router_rule {
    ep_gate_score select; /* 0: not computed, see why_not */
    ep_gate_score weight;
    uint32_t group_best; /* 0: the type has no groups */
    ep_renorm renorm;
    float epsilon;
    ep_router_bias bias;
    uint32_t marks; /* EP_ROUTER_... */
    const char *why_not;
} ep_router_rule;

enum {
    EP_TYPE_INNER_IS_DENSE = 1, /* intermediate_size is the experts' own width */
    EP_TYPE_INNER_IS_1 = 2,     /* I of the experts is 1 */
    EP_TYPE_SHARED_GATED = 4,   /* the shared expert always has a gate */
    /* there is one shared expert, as wide as a routed one, unless config.json says otherwise */
    EP_TYPE_SHARED_ALWAYS = 8,
    EP_TYPE_SHARED_CALLERS = 16,    /* has shared experts, which the caller computes */
    EP_TYPE_SHARED_TIMES = 32,      /* the number of shared experts multiplies the stated width */
    EP_TYPE_ALTERNATES = 128,       /* rows of gate and up alternate in their common tensor */
    EP_TYPE_SHARED_AVERAGED = 64,   /* averaged with the routed ones, unless config.json says sum */
    EP_TYPE_SHARED_UNLIMITED = 512, /* the activation's limit applies only to routed experts */
    EP_TYPE_TWO_STACKS = 256        /* encoder layers, then decoder layers */
};

#define EP_TYPE_BESIDE_MAX 4

typedef struct ep_model_type {
    const char *name;    /* model_type, without a suffix _text */
    const char *aliases; /* other names, separated by spaces; NULL none */
    const char *models;  /* models of this type; NULL: the manual does not list it */
    ep_router_rule router;
    uint32_t marks;       /* EP_TYPE_... */
    uint32_t top_k;       /* default when config.json has no key for it; 0: the key is required */
    const char *function; /* the activation, when config.json has no key for it; NULL: silu */
    /* tensors among the experts' that belong to the caller; each up to the next dot */
    const char *beside[EP_TYPE_BESIDE_MAX];
    const char *refused; /* why checkpoints of this type cannot be served; NULL: they can */
} ep_model_type;

/* NULL when there is no row: the experts may still be served, but the router is not computed. */
const ep_model_type *ep_model_type_find(const char *name);
/* Rows from 0; NULL after the last one. */
const ep_model_type *ep_model_type_at(size_t index);

#endif
