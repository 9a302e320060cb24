/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The canonical combine, one token at a time. Elements of a row are independent, so the compiler
 * may compute many at once. For each element, order and separate roundings are as written (the
 * build forbids fusing).
 */
#include "moe/combine.h"

#include <math.h>
#include <string.h>

#include "base/buffer.h"
#include "base/check.h"
#include "base/float_env.h"
#include "base/numeric.h"
#include "moe/convert.h"
#include "moe/node_sum.h"
#include "moe/quantize.h"

#define SCRATCH_ROWS 5
#define SCRATCH_ALIGN_FLOATS 16
/* how many elements of an int8 row are widened at a time; whole blocks */
#define QUANT_PIECE 512u

/* A row as it arrived: of the wire type, or int8 with its scales. */
typedef struct {
    const void *row;
    const void *scales; /* NULL: plain */
} sent_row;

typedef struct {
    const void *const *rows;
    const void *const *scales; /* NULL: plain */
} sent_rows;

static sent_row row_at(const sent_rows *rows, size_t slot_number)
{
    return (sent_row){rows->rows[slot_number],
                      rows->scales != NULL ? rows->scales[slot_number] : NULL};
}

typedef struct {
    float *acc;  /* [H] */
    float *x;    /* [H] widened once per token, when a special expert needs it */
    float *row;  /* [H] */
    float *work; /* [2*H] */
    bool has_x;
} token_scratch;

size_t ep_combine_scratch_floats(uint32_t hidden)
{
    return SCRATCH_ROWS * ep_align_up(hidden, SCRATCH_ALIGN_FLOATS);
}

static token_scratch split_scratch(float *scratch, uint32_t hidden)
{
    size_t row = ep_align_up(hidden, SCRATCH_ALIGN_FLOATS);
    return (token_scratch){scratch, scratch + row, scratch + 2 * row, scratch + 3 * row, false};
}

static void add_floats(const float *row, bool weighted, float weight, size_t n, float *acc)
{
    if (weighted) {
        ep_floats_add_weighted(row, weight, n, acc);
    } else {
        ep_floats_add(row, n, acc);
    }
}

static const float *widened_x(const ep_batch *batch, uint32_t token, token_scratch *s)
{
    if (!s->has_x) {
        ep_batch_widen_row(batch, token, s->x);
        s->has_x = true;
    }
    return s->x;
}

static void kernel_rule(uint32_t hidden, const float *x, const float *alpha1, const float *alpha2,
                        float *out_p1, float *out_p2)
{
    float a1 = ep_dotf(alpha1, x, hidden);
    float a2 = ep_dotf(alpha2, x, hidden);
    float max = a1 > a2 ? a1 : a2;
    float e1 = ep_expf(a1 - max);
    float e2 = ep_expf(a2 - max);
    float sum = e1 + e2;
    *out_p1 = e1 / sum;
    *out_p2 = e2 / sum;
}

/*
 * Writes r of a constant expert to s->row, in f32: neither rounded to the wire type nor weighted.
 *     kernel  (p1, p2) = softmax(dot(alpha1, x), dot(alpha2, x)); r = p1*x + p2*v, products
 *             rounded, then the sum
 *     linear  r = alpha1*x + alpha2*v, element by element
 * Source of the kernel rule: the Ascend A3 combine kernel; of the linear one: its documentation.
 */
static void const_expert(const ep_batch *batch, uint32_t index, const float *x, token_scratch *s)
{
    const ep_special_experts *special = &batch->special;
    const uint32_t hidden = batch->hidden;
    float *alpha1 = s->work;
    float *alpha2 = s->work + hidden;
    float *out = s->row;
    float p1, p2;
    ep_row_widen(ep_rows_at(&special->const_alpha1, index), special->const_alpha1.dtype, hidden,
                 alpha1);
    ep_row_widen(ep_rows_at(&special->const_alpha2, index), special->const_alpha2.dtype, hidden,
                 alpha2);
    ep_row_widen(ep_rows_at(&special->const_v, index), special->const_v.dtype, hidden, out);
    if (special->const_rule == EP_CONST_LINEAR) {
        for (uint32_t i = 0; i < hidden; i++) {
            out[i] = alpha1[i] * x[i] + alpha2[i] * out[i];
        }
        return;
    }
    kernel_rule(hidden, x, alpha1, alpha2, &p1, &p2);
    for (uint32_t i = 0; i < hidden; i++) {
        out[i] = p1 * x[i] + p2 * out[i];
    }
}

static bool repairs(const ep_batch *batch)
{
    return batch->rows_policy == EP_NAN_ZERO || batch->rows_policy == EP_NAN_MEAN;
}

/* r of a copy or constant expert. */
static const float *special_row(const ep_batch *batch, uint32_t token, ep_slot_kind kind,
                                uint32_t index, token_scratch *s)
{
    const float *x = widened_x(batch, token, s);
    if (kind == EP_SLOT_COPY) {
        return x;
    }
    const_expert(batch, index, x, s);
    if (repairs(batch)) {
        ep_floats_repair(s->row, batch->hidden, batch->rows_policy, batch->wire_dtype);
    }
    return s->row;
}

/* Widens pieces that stay in the first-level cache, so that a row is read once, never stored. */
static void add_quantized(const ep_batch *batch, const int8_t *row, const uint8_t *scales,
                          bool weighted, float weight, token_scratch *s)
{
    size_t piece_scale_bytes = QUANT_PIECE / EP_QUANT_BLOCK_I8 * ep_dtype_bytes(batch->wire_dtype);
    _Alignas(EP_BUFFER_ALIGN) float wide[QUANT_PIECE];
    for (size_t done = 0; done < batch->hidden; done += QUANT_PIECE, scales += piece_scale_bytes) {
        size_t n = batch->hidden - done < QUANT_PIECE ? batch->hidden - done : QUANT_PIECE;
        ep_row_dequantize_i8_blocks(row + done, scales, batch->wire_dtype, n, wide);
        add_floats(wide, weighted, weight, n, s->acc + done);
    }
}

/* A whole row, widened to floats with values of the wire type. */
static void widen_sent(const ep_batch *batch, sent_row sent, float *out)
{
    if (sent.scales != NULL) {
        ep_row_dequantize_i8_blocks(sent.row, sent.scales, batch->wire_dtype, batch->hidden, out);
    } else {
        ep_row_widen(sent.row, batch->wire_dtype, batch->hidden, out);
    }
}

static void widen_repaired(const ep_batch *batch, sent_row sent, float *out)
{
    widen_sent(batch, sent, out);
    if (repairs(batch)) {
        ep_floats_repair(out, batch->hidden, batch->rows_policy, batch->wire_dtype);
    }
}

/* A NULL row is missing; the caller has allowed that and reports it. */
static void add_expert_row(const ep_batch *batch, sent_row sent, bool weighted, float weight,
                           token_scratch *s)
{
    const void *row = sent.row;
    if (row == NULL || row == ep_row_covered) {
        return;
    }
    if (repairs(batch)) {
        widen_repaired(batch, sent, s->row);
        add_floats(s->row, weighted, weight, batch->hidden, s->acc);
        return;
    }
    if (sent.scales != NULL) {
        add_quantized(batch, row, sent.scales, weighted, weight, s);
        return;
    }
    if (weighted) {
        ep_row_add_weighted(row, batch->wire_dtype, weight, batch->hidden, s->row, s->acc);
        return;
    }
    ep_row_widen(row, batch->wire_dtype, batch->hidden, s->row);
    ep_floats_add(s->row, batch->hidden, s->acc);
}

static void combine_token(const ep_batch *batch, const ep_layer_shape *shape, const sent_rows *rows,
                          uint32_t token, token_scratch *s)
{
    uint32_t slots = ep_batch_slots_per_token(batch, shape);
    for (uint32_t k = 0; k < slots; k++) {
        uint32_t expert;
        sent_row row = row_at(rows, (size_t)token * slots + k);
        ep_slot_kind kind = ep_batch_slot(batch, shape, token, k, &expert);
        switch (kind) {
        case EP_SLOT_ROUTED:
            /* With the weight on the input, or in a partial sum, the node has applied the
             * weight. */
            add_expert_row(batch, row, batch->weight_on == EP_WEIGHT_ON_OUTPUT && !batch->node_sum,
                           ep_batch_scale(batch, token, k), s);
            break;
        case EP_SLOT_SHARED:
            add_expert_row(batch, row, false, 0.0f, s);
            break;
        case EP_SLOT_COPY:
        case EP_SLOT_CONST:
            ep_floats_add_weighted(special_row(batch, token, kind, expert, s),
                                   ep_batch_scale(batch, token, k), batch->hidden, s->acc);
            break;
        case EP_SLOT_INACTIVE:
            break;
        }
    }
    if (batch->shared_source == EP_SHARED_CALLER) {
        ep_row_widen(ep_rows_at(&batch->shared, token), batch->shared.dtype, batch->hidden, s->row);
        ep_floats_add(s->row, batch->hidden, s->acc);
    }
}

static void write_slots(const ep_batch *batch, const ep_layer_shape *shape, const sent_rows *rows,
                        uint32_t token, token_scratch *s, const ep_combine_out *out)
{
    uint32_t slots = ep_batch_slots_per_token(batch, shape);
    uint8_t *out_token = (uint8_t *)out->data + (int64_t)token * out->token_stride_bytes;
    size_t row_bytes = batch->hidden * ep_dtype_bytes(batch->out_dtype);
    for (uint32_t k = 0; k < batch->top_k; k++) {
        uint32_t expert;
        sent_row sent = row_at(rows, (size_t)token * slots + k);
        uint8_t *out_row = out_token + (int64_t)k * out->slot_stride_bytes;
        ep_slot_kind kind = ep_batch_slot(batch, shape, token, k, &expert);
        if (kind == EP_SLOT_ROUTED && sent.row != NULL && (sent.scales != NULL || repairs(batch))) {
            widen_repaired(batch, sent, s->acc);
            ep_row_narrow(s->acc, batch->hidden, batch->out_dtype, out_row);
        } else if (kind == EP_SLOT_ROUTED && sent.row != NULL) {
            ep_row_convert(sent.row, batch->wire_dtype, batch->hidden, batch->out_dtype, out_row);
        } else if (kind == EP_SLOT_COPY || kind == EP_SLOT_CONST) {
            /* Rounded to the wire type first, like a row that travelled. */
            const float *r = special_row(batch, token, kind, expert, s);
            ep_row_narrow(r, batch->hidden, batch->wire_dtype, s->acc);
            ep_row_convert(s->acc, batch->wire_dtype, batch->hidden, batch->out_dtype, out_row);
        } else {
            memset(out_row, 0, row_bytes);
        }
    }
}

static EP_FLOAT_WORK void combine_rows(const ep_batch *batch, const ep_layer_shape *shape,
                                       const sent_rows *rows, uint32_t token_begin,
                                       uint32_t token_end, float *scratch,
                                       const ep_combine_out *out)
{
    token_scratch s = split_scratch(scratch, batch->hidden);
    for (uint32_t t = token_begin; t < token_end; t++) {
        s.has_x = false;
        if (batch->form == EP_RESULT_UNCOMBINED) {
            write_slots(batch, shape, rows, t, &s, out);
            continue;
        }
        memset(s.acc, 0, batch->hidden * sizeof(float));
        if (ep_batch_token_active(batch, t)) {
            combine_token(batch, shape, rows, t, &s);
        }
        ep_row_narrow(s.acc, batch->hidden, batch->out_dtype,
                      (uint8_t *)out->data + (int64_t)t * out->token_stride_bytes);
    }
}

void ep_combine(const ep_batch *batch, const ep_layer_shape *shape, const void *const *rows,
                const void *const *row_scales, uint32_t token_begin, uint32_t token_end,
                float *scratch, const ep_combine_out *out)
{
    sent_rows sent = {rows, row_scales};
    const ep_float_env env = ep_float_env_begin();
    combine_rows(batch, shape, &sent, token_begin, token_end, scratch, out);
    ep_float_env_end(env);
}

static EP_FLOAT_WORK bool find_in_token(const ep_batch *batch, const ep_layer_shape *shape,
                                        const sent_rows *rows, uint32_t token, token_scratch *s,
                                        ep_nonfinite *out_found)
{
    uint32_t slots = ep_batch_slots_per_token(batch, shape);
    for (uint32_t k = 0; k < slots; k++) {
        uint32_t expert;
        const float *row = s->row;
        sent_row sent = row_at(rows, (size_t)token * slots + k);
        ep_slot_kind kind = ep_batch_slot(batch, shape, token, k, &expert);
        if (kind == EP_SLOT_CONST) {
            row = special_row(batch, token, kind, expert, s);
        } else if ((kind == EP_SLOT_ROUTED || kind == EP_SLOT_SHARED) && sent.row != NULL) {
            widen_sent(batch, sent, s->row);
        } else {
            continue;
        }
        for (uint32_t i = 0; i < batch->hidden; i++) {
            if (!isfinite(row[i])) {
                *out_found = (ep_nonfinite){token, k, i, row[i]};
                return true;
            }
        }
    }
    return false;
}

bool ep_combine_find_nonfinite(const ep_batch *batch, const ep_layer_shape *shape,
                               const void *const *rows, const void *const *row_scales,
                               uint32_t token_begin, uint32_t token_end, float *scratch,
                               ep_nonfinite *out_found)
{
    sent_rows sent = {rows, row_scales};
    token_scratch s = split_scratch(scratch, batch->hidden);
    bool found = false;
    const ep_float_env env = ep_float_env_begin();
    for (uint32_t t = token_begin; t < token_end && !found; t++) {
        s.has_x = false;
        found =
            ep_batch_token_active(batch, t) && find_in_token(batch, shape, &sent, t, &s, out_found);
    }
    ep_float_env_end(env);
    return found;
}
