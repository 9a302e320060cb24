/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What dispatch and combine must give, by plain loops over all ranks' data. Shares no file with lib
 * or client: own number formats, own placement of experts, own quantisation.
 */
#ifndef EP_TESTS_GROUP_ORACLE_H
#define EP_TESTS_GROUP_ORACLE_H

#include <stdbool.h>
#include <stdint.h>

#define ORACLE_RANKS_MAX 64

typedef enum oracle_dtype { ORACLE_BF16, ORACLE_F16, ORACLE_F32 } oracle_dtype;

/* One rank's input. */
typedef struct oracle_batch {
    int tokens;
    float *x;             /* [T,H] values of the type */
    int32_t *ids;         /* [T,K] */
    float *weights;       /* [T,K] */
    uint8_t *mask_tokens; /* [T] or NULL */
    uint8_t *mask_slots;  /* [T,K] or NULL */
    float *shared_x;      /* [T,H] or NULL */
    float *residual;      /* [T,H] or NULL */
} oracle_batch;

typedef struct oracle_case {
    int ranks, shared_ranks, shared_experts, experts, top_k, hidden;
    int zero, copy, constant;
    bool linear; /* rule of constant experts */
    bool quantise, quantise_back;
    /* every expert returns its row: a combine of a dispatch is the canonical sum of x itself */
    bool identity;
    bool undescaled; /* with quantise: experts get the integers as they are */
    oracle_dtype dtype;
    float *smooth;              /* [S+M,H] or NULL */
    float *alpha1, *alpha2, *v; /* [N,H] */
    float *gamma;               /* [H] or NULL */
    float eps;
    oracle_batch batch[ORACLE_RANKS_MAX];
} oracle_case;

float oracle_round(oracle_dtype dtype, float value);
/* Bits of a value of the type: 2 or 4 bytes. */
uint32_t oracle_bits(oracle_dtype dtype, float value);
float oracle_value(oracle_dtype dtype, uint32_t bits);

/* Experts of a rank: a shared expert's number is -1 - s. Returns how many. */
int oracle_local(const oracle_case *c, int rank, int *out_first);
/* Whether shared expert s of tokens of rank source is served by rank. */
bool oracle_serves(const oracle_case *c, int rank, int source, int *out_shared);
bool oracle_token_active(const oracle_case *c, const oracle_batch *batch, int token);
bool oracle_slot_active(const oracle_case *c, const oracle_batch *batch, int token, int slot);

typedef struct oracle_row {
    int local, source, token, slot;
    float weight; /* 0 for shared experts */
    float scale;  /* quantised */
} oracle_row;

/* The rows rank receives, in order; row_values [rows,H]: as transmitted (integers when quantised).
 * Both malloc'ed. */
int oracle_dispatch(const oracle_case *c, int rank, oracle_row **out_rows, float **out_values);

/* The experts of the tests: what expert e (shared: -1-s) makes of a row, rounded to the type. */
void oracle_expert(const oracle_case *c, int expert, const float *row, float *out);
/* x_out of a rank [T,H]; with c->gamma: y, and sum and rstd. NULL: not wanted. */
void oracle_combine(const oracle_case *c, int rank, float *out, float *out_sum, float *out_rstd);

#endif
