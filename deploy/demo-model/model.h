/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The demo model for training: a byte-level language model with exactly Mixtral's layers. Forward,
 * loss and the hand-written backward pass over a batch of MODEL_SEQUENCES windows of MODEL_CONTEXT
 * bytes. One model per process.
 */
#ifndef DEMO_MODEL_MODEL_H
#define DEMO_MODEL_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    MODEL_VOCAB = 256,
    MODEL_HIDDEN = 128,
    MODEL_LAYERS = 4,
    MODEL_HEADS = 4,
    MODEL_KV_HEADS = 2,
    MODEL_HEAD_DIM = MODEL_HIDDEN / MODEL_HEADS,
    MODEL_KV_WIDTH = MODEL_KV_HEADS * MODEL_HEAD_DIM,
    MODEL_EXPERTS = 16,
    MODEL_EXPERTS_PER_TOKEN = 2,
    MODEL_INNER = 128,
    MODEL_CONTEXT = 256,
    MODEL_SEQUENCES = 8,
    MODEL_TOKENS = MODEL_SEQUENCES * MODEL_CONTEXT,
};

#define MODEL_NORM_EPS 1e-5f
#define MODEL_ROPE_THETA 10000.0
#define MODEL_AUX_LOSS 0.01f

struct layer_weights {
    float *input_norm;    /* [H] */
    float *q, *k, *v, *o; /* [H,H] [KV,H] [KV,H] [H,H] */
    float *post_norm;     /* [H] */
    float *router;        /* [E,H] */
    float *w1, *w3, *w2;  /* [E,I,H] [E,I,H] [E,H,I] */
};

/* All weights in one flat array; the pointers are views of it. Gradients have the same shape. */
struct weights {
    float *flat;
    size_t count;
    float *embed; /* [V,H] */
    struct layer_weights layer[MODEL_LAYERS];
    float *norm; /* [H] */
    float *head; /* [V,H] */
};

/* One tensor of the checkpoint. columns is 0 for a vector. */
struct tensor_info {
    char name[96];
    const float *data;
    size_t rows;
    size_t columns;
};

enum { MODEL_TENSORS = 3 + MODEL_LAYERS * (7 + 3 * MODEL_EXPERTS) };

/* Allocates zeroed weights; exits on no memory. */
void weights_create(struct weights *out);
void weights_destroy(struct weights *weights);
/* Lists every tensor under its Hugging Face Mixtral name. */
void weights_list(const struct weights *weights, struct tensor_info out[MODEL_TENSORS]);

/*
 * Mean cross-entropy in nats of bytes[s][1..CONTEXT] given the bytes before them; bytes is
 * [SEQUENCES][CONTEXT + 1]. With grads, adds the gradient of (loss + auxiliary balance loss) to it.
 * Uses static scratch: one caller at a time.
 */
float model_loss(const struct weights *weights, const uint8_t *bytes, struct weights *grads);
/* The auxiliary balance loss of the last model_loss call, summed over layers (1 per layer is
 * perfect balance). */
float model_balance(void);

#endif
