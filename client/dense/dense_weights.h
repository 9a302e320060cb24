/* SPDX-License-Identifier: Apache-2.0 */
/* Internals of ep_dense_model: memory that open fills and forward uses. */
#ifndef EP_CLI_DENSE_WEIGHTS_H
#define EP_CLI_DENSE_WEIGHTS_H

#include "dense/dense_model.h"

/* Matrices are [out,in], f32, owned. */
typedef struct ep_dense_layer {
    ep_layer_shape moe;
    float *input_norm; /* [H] */
    float *q;          /* [heads*d,H] */
    float *k;          /* [kv_heads*d,H] */
    float *v;
    float *o;         /* [H,heads*d] */
    float *post_norm; /* [H] */
    float *router;    /* [E,H] */
    float *keys;      /* [positions_max, kv_heads*d], rotated */
    float *values;
} ep_dense_layer;

struct ep_dense_model {
    ep_dense_shape shape;
    float *embedding; /* [256,H] */
    float *norm;      /* [H] */
    float *head;      /* [256,H]; may be the embedding */
    ep_dense_layer *layers;
    float *inv_freq; /* [d/2] */
    /* of one pass */
    float *x;             /* [positions_max,H] */
    uint16_t *rows;       /* [positions_max,H] */
    uint16_t *result;     /* [positions_max,H] */
    float *router_logits; /* [positions_max, largest E] */
    int32_t *ids;         /* [positions_max, largest K] */
    float *scales;
    /* of one token */
    float *normed;   /* [H] */
    float *query;    /* [heads*d] */
    float *attended; /* [heads*d] */
    float *scores;   /* [positions_max] */
};

#endif
