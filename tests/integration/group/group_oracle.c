/* SPDX-License-Identifier: Apache-2.0 */
/* Plain loops; the order of every sum is the one the contract names. */
#include "group_oracle.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- number formats ---- */

static uint32_t f32_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static float f32_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

float oracle_value(oracle_dtype dtype, uint32_t bits)
{
    if (dtype == ORACLE_F32) {
        return f32_of(bits);
    }
    if (dtype == ORACLE_BF16) {
        return f32_of(bits << 16);
    }
    int exponent = (int)(bits >> 10 & 31);
    int mantissa = (int)(bits & 1023);
    double magnitude = exponent == 31  ? (mantissa != 0 ? NAN : INFINITY)
                       : exponent == 0 ? ldexp(mantissa, -24)
                                       : ldexp(1024 + mantissa, exponent - 25);
    return (float)((bits & 0x8000) != 0 ? -magnitude : magnitude);
}

static uint32_t bf16_bits(float value)
{
    uint32_t high = f32_bits(value) >> 16;
    uint32_t low = f32_bits(value) & 0xffff;
    if (isnan(value)) {
        return high | 0x40;
    }
    return high + (low > 0x8000 || (low == 0x8000 && (high & 1) != 0) ? 1 : 0);
}

/* Between the two neighbours in 16 bits, ties to the even one. */
uint32_t oracle_bits(oracle_dtype dtype, float value)
{
    if (dtype != ORACLE_F16) {
        return dtype == ORACLE_F32 ? f32_bits(value) : bf16_bits(value);
    }
    uint32_t sign = f32_bits(value) >> 31 << 15;
    if (isnan(value)) {
        return sign | 0x7e00;
    }
    double magnitude = fabs((double)value);
    uint32_t infinity = 0x7c00;
    uint32_t low = 0;
    uint32_t high = infinity;
    while (high - low > 1) { /* the greatest number not above it */
        uint32_t middle = (low + high) / 2;
        if ((double)oracle_value(dtype, middle) <= magnitude) {
            low = middle;
        } else {
            high = middle;
        }
    }
    if (isinf(value)) {
        return sign | infinity;
    }
    double below = oracle_value(dtype, low);
    double above = high == infinity
                       ? 2 * (double)oracle_value(dtype, low) - (double)oracle_value(dtype, low - 1)
                       : (double)oracle_value(dtype, high);
    double to_below = magnitude - below;
    double to_above = above - magnitude;
    bool up = to_above < to_below || (to_above == to_below && (low & 1) != 0);
    return sign | (up ? high : low);
}

float oracle_round(oracle_dtype dtype, float value)
{
    return oracle_value(dtype, oracle_bits(dtype, value));
}

/* ---- who holds what ---- */

int oracle_local(const oracle_case *c, int rank, int *out_first)
{
    if (rank < c->shared_ranks) {
        int shared = 0;
        for (int source = 0; source < c->ranks * c->shared_ranks + 1; source++) {
            if (oracle_serves(c, rank, source, &shared)) {
                break;
            }
        }
        *out_first = -1 - shared;
        return 1;
    }
    int holders = c->ranks - c->shared_ranks;
    int first = 0;
    int count = 0;
    for (int r = 0; r <= rank - c->shared_ranks; r++) {
        first += count;
        count = c->experts / holders + (r < c->experts % holders ? 1 : 0);
    }
    *out_first = first;
    return count;
}

/* Shared rank numbers dealt out to the shared experts: the first get one more. */
bool oracle_serves(const oracle_case *c, int rank, int source, int *out_shared)
{
    int next = 0;
    for (int s = 0; s < c->shared_experts; s++) {
        int size =
            c->shared_ranks / c->shared_experts + (s < c->shared_ranks % c->shared_experts ? 1 : 0);
        if (rank >= next && rank < next + size) {
            *out_shared = s;
            return source % size == rank - next;
        }
        next += size;
    }
    return false;
}

bool oracle_token_active(const oracle_case *c, const oracle_batch *batch, int token)
{
    if (batch->mask_tokens != NULL && !batch->mask_tokens[token]) {
        return false;
    }
    if (batch->mask_slots == NULL) {
        return true;
    }
    for (int k = 0; k < c->top_k; k++) {
        if (batch->mask_slots[token * c->top_k + k]) {
            return true;
        }
    }
    return false;
}

bool oracle_slot_active(const oracle_case *c, const oracle_batch *batch, int token, int slot)
{
    return oracle_token_active(c, batch, token) &&
           (batch->mask_slots == NULL || batch->mask_slots[token * c->top_k + slot] != 0);
}

/* ---- rows ---- */

static float quantise_row(const oracle_case *c, const float *x, int smooth_row, float *out)
{
    float greatest = 0;
    bool finite = true;
    float *scaled = malloc(sizeof(float) * (size_t)c->hidden);
    for (int h = 0; h < c->hidden; h++) {
        scaled[h] = c->smooth == NULL ? x[h] : x[h] * c->smooth[smooth_row * c->hidden + h];
        finite = finite && isfinite(scaled[h]);
        greatest = fabsf(scaled[h]) > greatest ? fabsf(scaled[h]) : greatest;
    }
    float d = 127.0f / greatest;
    bool zero = !finite || greatest == 0 || isinf(d);
    for (int h = 0; h < c->hidden; h++) {
        out[h] = zero ? 0 : (float)nearbyint((double)(scaled[h] * d));
    }
    free(scaled);
    return !finite ? NAN : zero ? 0 : 1.0f / d;
}

/* What a rank gets of token x for a smooth row; returns the scale. */
static float transmit(const oracle_case *c, const float *x, int smooth_row, float *out)
{
    if (c->quantise) {
        return quantise_row(c, x, smooth_row, out);
    }
    memcpy(out, x, sizeof(float) * (size_t)c->hidden);
    return 0;
}

static int smooth_rows_before(const oracle_case *c)
{
    return c->shared_ranks > 0 ? c->shared_experts : 0;
}

int oracle_dispatch(const oracle_case *c, int rank, oracle_row **out_rows, float **out_values)
{
    int first;
    int local = oracle_local(c, rank, &first);
    int room = 1;
    for (int r = 0; r < c->ranks; r++) {
        room += c->batch[r].tokens * c->top_k;
    }
    oracle_row *rows = malloc(sizeof(*rows) * (size_t)room);
    float *values = malloc(sizeof(float) * (size_t)room * (size_t)c->hidden);
    int n = 0;
    for (int e = 0; e < local; e++) {
        for (int source = 0; source < c->ranks; source++) {
            const oracle_batch *batch = &c->batch[source];
            for (int t = 0; t < batch->tokens; t++) {
                for (int k = 0; k < c->top_k + c->shared_experts; k++) {
                    int shared;
                    bool here = rank < c->shared_ranks
                                    ? k >= c->top_k && oracle_token_active(c, batch, t) &&
                                          oracle_serves(c, rank, source, &shared) &&
                                          shared == k - c->top_k
                                    : k < c->top_k && oracle_slot_active(c, batch, t, k) &&
                                          batch->ids[t * c->top_k + k] == first + e;
                    if (!here) {
                        continue;
                    }
                    int smooth = k >= c->top_k ? k - c->top_k : smooth_rows_before(c) + first + e;
                    float scale = transmit(c, batch->x + t * c->hidden, smooth,
                                           values + (size_t)n * (size_t)c->hidden);
                    rows[n++] = (oracle_row){
                        e,    source, t, k, k < c->top_k ? batch->weights[t * c->top_k + k] : 0,
                        scale};
                }
            }
        }
    }
    *out_rows = rows;
    *out_values = values;
    return n;
}

void oracle_expert(const oracle_case *c, int expert, const float *row, float *out)
{
    float factor = c->identity  ? 1.0f
                   : expert < 0 ? 0.5f * (float)(1 - expert)
                                : 1.0f + 0.25f * (float)(expert % 5);
    for (int h = 0; h < c->hidden; h++) {
        out[h] = oracle_round(c->dtype, row[h] * factor);
    }
}

/* ---- combine ---- */

static void there_and_back(const oracle_case *c, float *row)
{
    for (int begin = 0; c->quantise_back && begin < c->hidden; begin += 8) {
        int end = begin + 8 < c->hidden ? begin + 8 : c->hidden;
        float greatest = 0;
        bool finite = true;
        for (int h = begin; h < end; h++) {
            finite = finite && isfinite(row[h]);
            greatest = fabsf(row[h]) > greatest ? fabsf(row[h]) : greatest;
        }
        float s = greatest * (1.0f / 127.0f);
        float sent = finite ? oracle_round(c->dtype, s) : NAN;
        for (int h = begin; h < end; h++) {
            float q = !finite || s == 0
                          ? 0
                          : (float)nearbyint((double)oracle_round(ORACLE_F16, row[h] / s));
            q = q > 127 ? 127 : q < -127 ? -127 : q;
            row[h] = oracle_round(c->dtype, q * sent);
        }
    }
}

/* The row of expert for token x as the combining rank gets it. */
static void row_of(const oracle_case *c, const float *x, int expert, float *out)
{
    float *sent = malloc(sizeof(float) * (size_t)c->hidden);
    int smooth = expert < 0 ? -1 - expert : smooth_rows_before(c) + expert;
    float scale = transmit(c, x, smooth, sent);
    for (int h = 0; c->quantise && !c->undescaled && h < c->hidden; h++) {
        sent[h] = sent[h] * scale;
    }
    oracle_expert(c, expert, sent, out);
    there_and_back(c, out);
    free(sent);
}

static void constant_row(const oracle_case *c, const float *x, int j, float *out)
{
    const float *a1 = c->alpha1 + j * c->hidden;
    const float *a2 = c->alpha2 + j * c->hidden;
    const float *v = c->v + j * c->hidden;
    double d1 = 0;
    double d2 = 0;
    for (int h = 0; h < c->hidden; h++) {
        d1 += (double)a1[h] * (double)x[h];
        d2 += (double)a2[h] * (double)x[h];
    }
    double greatest = d1 > d2 ? d1 : d2; /* as softmax is defined: infinities give NaN */
    double e1 = exp(d1 - greatest);
    double p1 = e1 / (e1 + exp(d2 - greatest));
    for (int h = 0; h < c->hidden; h++) {
        out[h] = c->linear ? a1[h] * x[h] + a2[h] * v[h]
                           : (float)(p1 * (double)x[h] + (1 - p1) * (double)v[h]);
    }
}

static void sum_token(const oracle_case *c, const oracle_batch *batch, int t, float *acc)
{
    const float *x = batch->x + t * c->hidden;
    float *row = malloc(sizeof(float) * (size_t)c->hidden);
    memset(acc, 0, sizeof(float) * (size_t)c->hidden);
    for (int k = 0; k < c->top_k; k++) {
        int id = batch->ids[t * c->top_k + k];
        int copies = c->experts + c->zero;
        int constants = copies + c->copy;
        if (!oracle_slot_active(c, batch, t, k) || id < 0 || (id >= c->experts && id < copies) ||
            id >= constants + c->constant) {
            continue;
        }
        if (id < c->experts) {
            row_of(c, x, id, row);
        } else if (id < constants) {
            memcpy(row, x, sizeof(float) * (size_t)c->hidden);
        } else {
            constant_row(c, x, id - constants, row);
        }
        for (int h = 0; h < c->hidden; h++) {
            float product = batch->weights[t * c->top_k + k] * row[h];
            acc[h] = acc[h] + product;
        }
    }
    for (int s = 0;
         s < c->shared_experts && c->shared_ranks > 0 && oracle_token_active(c, batch, t); s++) {
        row_of(c, x, -1 - s, row);
        for (int h = 0; h < c->hidden; h++) {
            acc[h] = acc[h] + row[h];
        }
    }
    for (int h = 0; h < c->hidden && batch->shared_x != NULL && oracle_token_active(c, batch, t);
         h++) {
        acc[h] = acc[h] + batch->shared_x[t * c->hidden + h];
    }
    free(row);
}

static float norm_token(const oracle_case *c, const float *residual, float *acc, float *out_sum)
{
    float mean = 0;
    for (int h = 0; h < c->hidden; h++) {
        acc[h] = acc[h] + residual[h];
        out_sum[h] = oracle_round(c->dtype, acc[h]);
        float square = acc[h] * acc[h];
        float part = square * (1.0f / (float)c->hidden);
        mean = mean + part;
    }
    float rstd = 1.0f / sqrtf(mean + c->eps);
    for (int h = 0; h < c->hidden; h++) {
        acc[h] = oracle_round(c->dtype, oracle_round(c->dtype, acc[h] * rstd) * c->gamma[h]);
    }
    return rstd;
}

void oracle_combine(const oracle_case *c, int rank, float *out, float *out_sum, float *out_rstd)
{
    const oracle_batch *batch = &c->batch[rank];
    for (int t = 0; t < batch->tokens; t++) {
        float *acc = out + t * c->hidden;
        sum_token(c, batch, t, acc);
        if (c->gamma != NULL) {
            out_rstd[t] =
                norm_token(c, batch->residual + t * c->hidden, acc, out_sum + t * c->hidden);
        } else {
            for (int h = 0; h < c->hidden; h++) {
                acc[h] = oracle_round(c->dtype, acc[h]);
            }
        }
    }
}
