/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One random layer call, a pure function of (seed, number): packed arrays for the oracle, and the
 * same batch as a caller would hand it over, with row strides, odd addresses and, for a prepared
 * call, more rows than are used.
 */
#ifndef PROPERTY_LAYER_CASE_H
#define PROPERTY_LAYER_CASE_H

#include <stdio.h>

#include "expertd/client.h"
#include "models.h"
#include "random.h"

typedef enum call_form { CALL_BLOCKING, CALL_CALLBACK, CALL_PREPARED } call_form;

enum { CASE_BLOCKS_MAX = 32 };

/* Every 16th case goes to real daemons, the others to nodes of this process. */
enum { CASE_DAEMON_EVERY = 16 };

typedef struct case_block {
    uint8_t *data;
    size_t bytes;
} case_block;

/* Cases from this number on have hundreds of tokens. */
#define CASES_MANY_SLOTS (UINT64_C(1) << 32)

typedef struct layer_case {
    uint64_t seed;
    uint64_t number;
    const test_model *model;
    uint32_t layer_index;
    struct ref_layer layer; /* the model's, with this case's special experts */
    struct ref_batch batch; /* packed */
    ep_moe_args args;       /* the same for the service; version is left NULL */
    ep_tensor out;
    case_block out_block; /* out lies inside; filled with case_guard() */
    call_form form;
    uint32_t tokens_max; /* rows of the buffers; only a prepared call has more than batch.tokens */
    uint32_t client_choice; /* any number */
    /* over one node that has every expert, so that the oracle knows what is summed */
    bool node_sum;
    bool names_version; /* the caller asks for the model's version by name */
    case_block blocks[CASE_BLOCKS_MAX];
    uint32_t blocks_count;
    uint64_t inputs_digest;
} layer_case;

void layer_case_make(layer_case *c, uint64_t seed, uint64_t number,
                     const test_model models[MODELS_COUNT]);
void layer_case_free(layer_case *c);

/* True when the case goes over real daemons. */
static inline bool case_uses_daemons(uint64_t number)
{
    return number % CASE_DAEMON_EVERY == 0;
}

/* What its routed experts are computed with. */
static inline enum ref_family case_family(const layer_case *c)
{
    return c->layer.experts[0].family;
}

/* What byte `index` of the out block holds before the call. */
static inline uint8_t case_guard(size_t index)
{
    return (uint8_t)(0xa5u ^ (index * 29u));
}

/* Bytes and rows of the result as the oracle gives it: packed. */
size_t case_row_bytes(const layer_case *c);
size_t case_rows(const layer_case *c);
/* Offset of packed row `row` in the out block. */
size_t case_row_offset(const layer_case *c, size_t row);
/* Of all input blocks: a call must not write to them. */
uint64_t case_digest_inputs(const layer_case *c);
/* All that is needed to talk about the case, over several lines. */
void case_describe(const layer_case *c, FILE *to);

#endif
