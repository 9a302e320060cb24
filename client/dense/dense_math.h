/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The operations of a Mixtral model outside its experts, in f32. Each dot product is one chain of
 * fused multiply-adds in ascending index, and all other operations are rounded separately, so bits
 * are the same on every machine and for every batch.
 *
 * Threads  pure.
 */
#ifndef EP_CLI_DENSE_MATH_H
#define EP_CLI_DENSE_MATH_H

#include <stddef.h>
#include <stdint.h>

/* Heads of the attention; kv_heads divides heads, head_dim is even. */
typedef struct ep_dense_heads {
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t head_dim;
} ep_dense_heads;

/* y [rows] = w [rows,columns] x [columns] */
void ep_dense_matrix(const float *w, const float *x, size_t rows, size_t columns, float *out_y);
/* y[i] = (x[i] / sqrt(mean of squares + eps)) * w[i]; y may be x. */
void ep_dense_rms_norm(const float *x, const float *w, size_t n, float eps, float *out_y);
/* values [n], n >= 1, become their softmax. */
void ep_dense_softmax(float *values, size_t n);
/* inv_freq[j] = theta^(-2j/head_dim), j < head_dim / 2 */
void ep_dense_rope_table(float theta, uint32_t head_dim, float *out_inv_freq);
/* Rotates x [count,head_dim] to a position; the halves of a head are the pairs. */
void ep_dense_rotate(float *x, uint32_t count, uint32_t head_dim, const float *inv_freq,
                     size_t position);
/*
 * Causal attention of one position over positions 0..position.
 * q, out_o [heads,head_dim]; keys, values [position+1, kv_heads*head_dim]; scores: scratch
 * [position+1].
 */
void ep_dense_attend(const ep_dense_heads *heads, const float *q, const float *keys,
                     const float *values, size_t position, float *scores, float *out_o);

#endif
