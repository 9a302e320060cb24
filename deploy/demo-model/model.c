/* SPDX-License-Identifier: Apache-2.0 */
/* Forward and backward of the demo model. Every backward function mirrors the forward one above
 * it. */
#include "model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gemm.h"

enum {
    H = MODEL_HIDDEN,
    I = MODEL_INNER,
    E = MODEL_EXPERTS,
    K = MODEL_EXPERTS_PER_TOKEN,
    N = MODEL_TOKENS,
    S = MODEL_CONTEXT,
    D = MODEL_HEAD_DIM,
    KV = MODEL_KV_WIDTH,
    V = MODEL_VOCAB,
    ROWS = N * K,
    ATTENTION_BLOCK = 64,
};

/* What the backward pass needs of one layer. */
struct layer_state {
    float x[N * H], inv1[N], y1[N * H];
    float q[N * H], k[N * KV], v[N * KV], o[N * H];
    float attention[MODEL_SEQUENCES * MODEL_HEADS][S * S];
    float mid[N * H], inv2[N], y2[N * H];
    float prob[N * E], scale[ROWS];
    int expert[ROWS];    /* of (token, slot) */
    size_t row_of[ROWS]; /* (token, slot) -> row in expert order */
    size_t first_row[E + 1];
    float xs[ROWS * H], gate[ROWS * I], up[ROWS * I], hidden[ROWS * I], ys[ROWS * H];
};

static struct layer_state layers[MODEL_LAYERS];
static float final_x[N * H], final_inv[N], final_y[N * H], logits[N * V];
static float dx[N * H], dy[N * H], dq[N * H], dk[N * KV], dv[N * KV], dscore[S * S];
static float dys[ROWS * H], dhidden[ROWS * I], dup[ROWS * I], dxs[ROWS * H], dlogit[N * E];
static float rope_cos[S * D / 2], rope_sin[S * D / 2];
static float balance;

float model_balance(void)
{
    return balance;
}

static void bind_views(struct weights *w, float *flat)
{
    float *next = flat;
#define TAKE(field, n) ((field) = next, next += (n))
    TAKE(w->embed, V * H);
    for (size_t l = 0; l < MODEL_LAYERS; l++) {
        struct layer_weights *p = &w->layer[l];
        TAKE(p->input_norm, H);
        TAKE(p->q, H * H);
        TAKE(p->k, KV * H);
        TAKE(p->v, KV * H);
        TAKE(p->o, H * H);
        TAKE(p->post_norm, H);
        TAKE(p->router, E * H);
        TAKE(p->w1, E * I * H);
        TAKE(p->w3, E * I * H);
        TAKE(p->w2, E * H * I);
    }
    TAKE(w->norm, H);
    TAKE(w->head, V * H);
#undef TAKE
}

void weights_create(struct weights *out)
{
    out->count =
        2 * V * H + H + MODEL_LAYERS * (2 * H + 2 * H * H + 2 * KV * H + E * H + 3 * E * I * H);
    out->flat = aligned_alloc(64, (out->count * sizeof(float) + 63) / 64 * 64);
    if (out->flat == NULL) {
        fprintf(stderr, "train: no memory for %zu weights\n", out->count);
        exit(1);
    }
    memset(out->flat, 0, out->count * sizeof(float));
    bind_views(out, out->flat);
}

void weights_destroy(struct weights *weights)
{
    free(weights->flat);
    weights->flat = NULL;
}

void weights_list(const struct weights *w, struct tensor_info out[MODEL_TENSORS])
{
    struct tensor_info *t = out;
#define ADD(pointer, n, m, ...)                                                                    \
    (snprintf(t->name, sizeof(t->name), __VA_ARGS__), t->data = (pointer), t->rows = (n),          \
     t->columns = (m), t++)
    ADD(w->embed, V, H, "model.embed_tokens.weight");
    for (int l = 0; l < MODEL_LAYERS; l++) {
        const struct layer_weights *p = &w->layer[l];
        ADD(p->input_norm, H, 0, "model.layers.%d.input_layernorm.weight", l);
        ADD(p->q, H, H, "model.layers.%d.self_attn.q_proj.weight", l);
        ADD(p->k, KV, H, "model.layers.%d.self_attn.k_proj.weight", l);
        ADD(p->v, KV, H, "model.layers.%d.self_attn.v_proj.weight", l);
        ADD(p->o, H, H, "model.layers.%d.self_attn.o_proj.weight", l);
        ADD(p->post_norm, H, 0, "model.layers.%d.post_attention_layernorm.weight", l);
        ADD(p->router, E, H, "model.layers.%d.block_sparse_moe.gate.weight", l);
        for (int e = 0; e < E; e++) {
            ADD(p->w1 + e * I * H, I, H, "model.layers.%d.block_sparse_moe.experts.%d.w1.weight", l,
                e);
            ADD(p->w2 + e * H * I, H, I, "model.layers.%d.block_sparse_moe.experts.%d.w2.weight", l,
                e);
            ADD(p->w3 + e * I * H, I, H, "model.layers.%d.block_sparse_moe.experts.%d.w3.weight", l,
                e);
        }
    }
    ADD(w->norm, H, 0, "model.norm.weight");
    ADD(w->head, V, H, "lm_head.weight");
#undef ADD
}

/* y [n,out] = x [n,in] * w^T, w [out,in]. */
static void linear(size_t n, size_t in, size_t out, const float *x, const float *w, float *y,
                   bool accumulate)
{
    gemm(n, out, in, plain(x, in), transposed(w, in), y, out, accumulate);
}

static void linear_back(size_t n, size_t in, size_t out, const float *dy_, const float *x,
                        const float *w, float *dw, float *dx_, bool accumulate)
{
    gemm(out, in, n, transposed(dy_, out), plain(x, in), dw, in, true);
    gemm(n, in, out, plain(dy_, out), plain(w, in), dx_, in, accumulate);
}

static void rms_norm(const float *x, const float *w, float *inv, float *y)
{
    for (size_t t = 0; t < N; t++, x += H, y += H) {
        float sum = 0.0f;
        for (size_t i = 0; i < H; i++) {
            sum += x[i] * x[i];
        }
        inv[t] = 1.0f / sqrtf(sum / H + MODEL_NORM_EPS);
        for (size_t i = 0; i < H; i++) {
            y[i] = x[i] * inv[t] * w[i];
        }
    }
}

/* Adds to dx_: the residual path carries its own part already. */
static void rms_norm_back(const float *x, const float *w, const float *inv, const float *dy_,
                          float *dw, float *dx_)
{
    for (size_t t = 0; t < N; t++, x += H, dy_ += H, dx_ += H) {
        float dot = 0.0f;
        for (size_t i = 0; i < H; i++) {
            dw[i] += dy_[i] * x[i] * inv[t];
            dot += dy_[i] * w[i] * x[i];
        }
        float pull = dot * inv[t] * inv[t] * inv[t] / H;
        for (size_t i = 0; i < H; i++) {
            dx_[i] += dy_[i] * w[i] * inv[t] - x[i] * pull;
        }
    }
}

static void rope_prepare(void)
{
    for (size_t pos = 0; pos < S; pos++) {
        for (size_t j = 0; j < D / 2; j++) {
            double angle = (double)pos * pow(MODEL_ROPE_THETA, -2.0 * (double)j / D);
            rope_cos[pos * D / 2 + j] = (float)cos(angle);
            rope_sin[pos * D / 2 + j] = (float)sin(angle);
        }
    }
}

/* Rotates in place; sign -1 is the inverse, which is also the backward pass. */
static void rope(float *x, size_t width, float sign)
{
    for (size_t t = 0; t < N; t++) {
        const float *c = rope_cos + (t % S) * (D / 2);
        const float *s = rope_sin + (t % S) * (D / 2);
        for (size_t head = 0; head < width / D; head++) {
            float *a = x + t * width + head * D;
            float *b = a + D / 2;
            for (size_t j = 0; j < D / 2; j++) {
                float first = a[j];
                float second = b[j];
                a[j] = first * c[j] - sign * second * s[j];
                b[j] = second * c[j] + sign * first * s[j];
            }
        }
    }
}

/* Softmax of scale * row[0..n), zeros in row[n..size). */
static void softmax_row(float *row, size_t n, size_t size, float scale)
{
    float max = row[0];
    float sum = 0.0f;
    for (size_t i = 1; i < n; i++) {
        max = row[i] > max ? row[i] : max;
    }
    for (size_t i = 0; i < n; i++) {
        row[i] = expf((row[i] - max) * scale);
        sum += row[i];
    }
    float inv = 1.0f / sum;
    for (size_t i = 0; i < n; i++) {
        row[i] *= inv;
    }
    memset(row + n, 0, (size - n) * sizeof(*row));
}

static void attention(struct layer_state *a)
{
    const float scale = 1.0f / sqrtf((float)D);
    for (size_t s = 0; s < MODEL_SEQUENCES; s++) {
        for (size_t h = 0; h < MODEL_HEADS; h++) {
            size_t kv = h / (MODEL_HEADS / MODEL_KV_HEADS);
            const float *k = a->k + s * S * KV + kv * D;
            const float *v = a->v + s * S * KV + kv * D;
            float *p = a->attention[s * MODEL_HEADS + h];
            for (size_t i = 0; i < S; i += ATTENTION_BLOCK) {
                size_t seen = i + ATTENTION_BLOCK;
                const float *q = a->q + (s * S + i) * H + h * D;
                gemm(ATTENTION_BLOCK, seen, D, plain(q, H), transposed(k, KV), p + i * S, S, false);
                for (size_t r = i; r < seen; r++) {
                    softmax_row(p + r * S, r + 1, seen, scale);
                }
                gemm(ATTENTION_BLOCK, D, seen, plain(p + i * S, S), plain(v, KV),
                     a->o + (s * S + i) * H + h * D, H, false);
            }
        }
    }
}

/* do_ [N,H] -> dq, dk, dv (dk and dv zeroed here; grouped heads add into them). */
static void attention_back(const struct layer_state *a, const float *do_)
{
    const float scale = 1.0f / sqrtf((float)D);
    memset(dk, 0, sizeof(dk));
    memset(dv, 0, sizeof(dv));
    for (size_t s = 0; s < MODEL_SEQUENCES; s++) {
        for (size_t h = 0; h < MODEL_HEADS; h++) {
            size_t kv = s * S * KV + h / (MODEL_HEADS / MODEL_KV_HEADS) * D;
            const float *all = a->attention[s * MODEL_HEADS + h];
            for (size_t i = 0; i < S; i += ATTENTION_BLOCK) {
                size_t seen = i + ATTENTION_BLOCK;
                size_t at = (s * S + i) * H + h * D;
                const float *p = all + i * S;
                gemm(seen, D, ATTENTION_BLOCK, transposed(p, S), plain(do_ + at, H), dv + kv, KV,
                     true);
                gemm(ATTENTION_BLOCK, seen, D, plain(do_ + at, H), transposed(a->v + kv, KV),
                     dscore, S, false);
                for (size_t r = 0; r < ATTENTION_BLOCK; r++) {
                    const float *pr = p + r * S;
                    float *ds = dscore + r * S;
                    float dot = 0.0f;
                    for (size_t j = 0; j < seen; j++) {
                        dot += pr[j] * ds[j];
                    }
                    for (size_t j = 0; j < seen; j++) {
                        ds[j] = pr[j] * (ds[j] - dot) * scale;
                    }
                }
                gemm(ATTENTION_BLOCK, D, seen, plain(dscore, S), plain(a->k + kv, KV), dq + at, H,
                     false);
                gemm(seen, D, ATTENTION_BLOCK, transposed(dscore, S), plain(a->q + at, H), dk + kv,
                     KV, true);
            }
        }
    }
}

/* Top-k of the logits in prob, softmax over the chosen ones; then prob becomes the softmax over all
 * experts.
 */
static void route(struct layer_state *a)
{
    size_t count[E] = {0};
    for (size_t t = 0; t < N; t++) {
        float *l = a->prob + t * E;
        bool taken[E] = {false};
        for (size_t k = 0; k < K; k++) {
            int best = -1;
            for (int e = 0; e < E; e++) {
                if (!taken[e] && (best < 0 || l[e] > l[best])) {
                    best = e;
                }
            }
            taken[best] = true;
            a->expert[t * K + k] = best;
            a->scale[t * K + k] = l[best];
            count[best]++;
        }
        softmax_row(a->scale + t * K, K, K, 1.0f);
        softmax_row(l, E, E, 1.0f);
    }
    a->first_row[0] = 0;
    for (size_t e = 0; e < E; e++) {
        a->first_row[e + 1] = a->first_row[e] + count[e];
        count[e] = a->first_row[e];
    }
    for (size_t i = 0; i < ROWS; i++) {
        a->row_of[i] = count[a->expert[i]]++;
    }
}

/* The Switch balance loss E * sum(f * P) and, with dl, its gradient added to the router logits'
 * gradient. */
static float balance_loss(const struct layer_state *a, float *dl)
{
    float pull[E];
    float loss = 0.0f;
    for (size_t e = 0; e < E; e++) {
        float mean = 0.0f;
        for (size_t t = 0; t < N; t++) {
            mean += a->prob[t * E + e];
        }
        float share = (float)(a->first_row[e + 1] - a->first_row[e]) / ROWS;
        loss += E * share * mean / N;
        pull[e] = MODEL_AUX_LOSS * E * share / N;
    }
    for (size_t t = 0; dl != NULL && t < N; t++) {
        const float *p = a->prob + t * E;
        float dot = 0.0f;
        for (size_t e = 0; e < E; e++) {
            dot += p[e] * pull[e];
        }
        for (size_t e = 0; e < E; e++) {
            dl[t * E + e] += p[e] * (pull[e] - dot);
        }
    }
    return loss;
}

static void experts(const struct layer_weights *w, struct layer_state *a, float *out)
{
    for (size_t i = 0; i < ROWS; i++) {
        memcpy(a->xs + a->row_of[i] * H, a->y2 + i / K * H, H * sizeof(float));
    }
    for (size_t e = 0; e < E; e++) {
        size_t r = a->first_row[e];
        size_t n = a->first_row[e + 1] - r;
        linear(n, H, I, a->xs + r * H, w->w1 + e * I * H, a->gate + r * I, false);
        linear(n, H, I, a->xs + r * H, w->w3 + e * I * H, a->up + r * I, false);
        for (size_t i = r * I; i < (r + n) * I; i++) {
            a->hidden[i] = a->gate[i] / (1.0f + expf(-a->gate[i])) * a->up[i];
        }
        linear(n, I, H, a->hidden + r * I, w->w2 + e * H * I, a->ys + r * H, false);
    }
    memcpy(out, a->mid, sizeof(a->mid));
    for (size_t i = 0; i < ROWS; i++) {
        const float *y = a->ys + a->row_of[i] * H;
        for (size_t j = 0; j < H; j++) {
            out[i / K * H + j] += a->scale[i] * y[j];
        }
    }
}

/* dx (the gradient of the layer's output) -> dy, the gradient of y2. */
static void experts_back(const struct layer_weights *w, const struct layer_state *a,
                         struct layer_weights *g)
{
    memset(dlogit, 0, sizeof(dlogit));
    for (size_t t = 0; t < N; t++) {
        float dscale[K];
        float mean = 0.0f;
        for (size_t k = 0; k < K; k++) {
            const float *y = a->ys + a->row_of[t * K + k] * H;
            float *out = dys + a->row_of[t * K + k] * H;
            dscale[k] = 0.0f;
            for (size_t j = 0; j < H; j++) {
                dscale[k] += dx[t * H + j] * y[j];
                out[j] = dx[t * H + j] * a->scale[t * K + k];
            }
            mean += dscale[k] * a->scale[t * K + k];
        }
        for (size_t k = 0; k < K; k++) {
            dlogit[t * E + (size_t)a->expert[t * K + k]] = a->scale[t * K + k] * (dscale[k] - mean);
        }
    }
    balance += balance_loss(a, dlogit);
    linear_back(N, H, E, dlogit, a->y2, w->router, g->router, dy, false);
    for (size_t e = 0; e < E; e++) {
        size_t r = a->first_row[e];
        size_t n = a->first_row[e + 1] - r;
        if (n == 0) {
            continue;
        }
        linear_back(n, I, H, dys + r * H, a->hidden + r * I, w->w2 + e * H * I, g->w2 + e * H * I,
                    dhidden + r * I, false);
        for (size_t i = r * I; i < (r + n) * I; i++) {
            float sigmoid = 1.0f / (1.0f + expf(-a->gate[i]));
            dup[i] = dhidden[i] * a->gate[i] * sigmoid;
            dhidden[i] *= a->up[i] * sigmoid * (1.0f + a->gate[i] * (1.0f - sigmoid));
        }
        linear_back(n, H, I, dhidden + r * I, a->xs + r * H, w->w1 + e * I * H, g->w1 + e * I * H,
                    dxs + r * H, false);
        linear_back(n, H, I, dup + r * I, a->xs + r * H, w->w3 + e * I * H, g->w3 + e * I * H,
                    dxs + r * H, true);
    }
    for (size_t i = 0; i < ROWS; i++) {
        const float *from = dxs + a->row_of[i] * H;
        for (size_t j = 0; j < H; j++) {
            dy[i / K * H + j] += from[j];
        }
    }
}

static void layer_forward(const struct layer_weights *w, struct layer_state *a, float *out)
{
    rms_norm(a->x, w->input_norm, a->inv1, a->y1);
    linear(N, H, H, a->y1, w->q, a->q, false);
    linear(N, H, KV, a->y1, w->k, a->k, false);
    linear(N, H, KV, a->y1, w->v, a->v, false);
    rope(a->q, H, 1.0f);
    rope(a->k, KV, 1.0f);
    attention(a);
    memcpy(a->mid, a->x, sizeof(a->mid));
    linear(N, H, H, a->o, w->o, a->mid, true);
    rms_norm(a->mid, w->post_norm, a->inv2, a->y2);
    linear(N, H, E, a->y2, w->router, a->prob, false);
    route(a);
    experts(w, a, out);
}

/* In and out: dx, the gradient of the layer's output and then of its input. */
static void layer_back(const struct layer_weights *w, const struct layer_state *a,
                       struct layer_weights *g)
{
    experts_back(w, a, g);
    rms_norm_back(a->mid, w->post_norm, a->inv2, dy, g->post_norm, dx);
    linear_back(N, H, H, dx, a->o, w->o, g->o, dy, false);
    attention_back(a, dy);
    rope(dq, H, -1.0f);
    rope(dk, KV, -1.0f);
    linear_back(N, H, H, dq, a->y1, w->q, g->q, dy, false);
    linear_back(N, H, KV, dk, a->y1, w->k, g->k, dy, true);
    linear_back(N, H, KV, dv, a->y1, w->v, g->v, dy, true);
    rms_norm_back(a->x, w->input_norm, a->inv1, dy, g->input_norm, dx);
}

static uint8_t byte_at(const uint8_t *bytes, size_t t, size_t ahead)
{
    return bytes[t / S * (S + 1) + t % S + ahead];
}

float model_loss(const struct weights *w, const uint8_t *bytes, struct weights *grads)
{
    double loss = 0.0;
    if (rope_cos[0] == 0.0f) {
        rope_prepare();
    }
    for (size_t t = 0; t < N; t++) {
        memcpy(layers[0].x + t * H, w->embed + byte_at(bytes, t, 0) * H, H * sizeof(float));
    }
    for (size_t l = 0; l < MODEL_LAYERS; l++) {
        layer_forward(&w->layer[l], &layers[l], l + 1 < MODEL_LAYERS ? layers[l + 1].x : final_x);
    }
    rms_norm(final_x, w->norm, final_inv, final_y);
    linear(N, H, V, final_y, w->head, logits, false);
    for (size_t t = 0; t < N; t++) {
        float *p = logits + t * V;
        uint8_t target = byte_at(bytes, t, 1);
        softmax_row(p, V, V, 1.0f);
        loss -= logf(fmaxf(p[target], 1e-30f));
        p[target] -= 1.0f;
    }
    if (grads == NULL) {
        return (float)(loss / N);
    }

    balance = 0.0f;
    for (size_t i = 0; i < N * V; i++) {
        logits[i] /= N;
    }
    linear_back(N, H, V, logits, final_y, w->head, grads->head, dy, false);
    memset(dx, 0, sizeof(dx));
    rms_norm_back(final_x, w->norm, final_inv, dy, grads->norm, dx);
    for (size_t l = MODEL_LAYERS; l-- > 0;) {
        layer_back(&w->layer[l], &layers[l], &grads->layer[l]);
    }
    for (size_t t = 0; t < N; t++) {
        for (size_t i = 0; i < H; i++) {
            grads->embed[byte_at(bytes, t, 0) * H + i] += dx[t * H + i];
        }
    }
    return (float)(loss / N);
}
