/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The oracle's layer: checks, then computes token by token and slot by slot, in the order of the
 * contract. Built with REF_MUTATE_ORDER, _FMA, _ROUND, _SLOT, _GATE, _SCALE, _TRUNCATE, _CHAIN, or
 * one of reference_w4a8.h, it makes one deliberate mistake: with such copies the property test
 * proves that it would detect that mistake in the service.
 */
#include "reference_layer.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "reference_quant.h"
#include "reference_w4a8.h"

enum slot_kind { SLOT_INACTIVE, SLOT_ROUTED, SLOT_ZERO, SLOT_COPY, SLOT_CONSTANT, SLOT_INVALID };

struct slot {
    enum slot_kind kind;
    size_t index; /* index within the kind of expert */
    int64_t id;
};

/* Rows of one token. */
struct scratch {
    float *x;      /* [H] widened, after the NaN policy */
    float *sent;   /* [H] x as an expert receives it */
    float *scaled; /* [H] */
    float *row;    /* [H] */
    float *acc;    /* [H] */
    float *hidden; /* inner row of an expert */
};

static enum ref_refusal refuse(char *text, enum ref_refusal why, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static enum ref_refusal refuse(char *text, enum ref_refusal why, const char *format, ...)
{
    if (text != NULL) {
        va_list args;
        va_start(args, format);
        vsnprintf(text, REF_TEXT_BYTES, format, args);
        va_end(args);
    }
    return why;
}

static bool token_active(const struct ref_batch *batch, size_t t)
{
    if (batch->mask_tokens != NULL && !batch->mask_tokens[t]) {
        return false;
    }
    if (batch->mask_slots == NULL || batch->top_k == 0) {
        return true;
    }
    for (size_t k = 0; k < batch->top_k; k++) {
        if (batch->mask_slots[t * batch->top_k + k]) {
            return true;
        }
    }
    return false;
}

static int64_t id_at(const struct ref_batch *batch, size_t at)
{
    if (batch->ids_dtype == REF_I64) {
        int64_t id;
        memcpy(&id, (const char *)batch->ids + at * sizeof(id), sizeof(id));
        return id;
    }
    int32_t id;
    memcpy(&id, (const char *)batch->ids + at * sizeof(id), sizeof(id));
    return id;
}

/* Returns the slot of an id, by its value alone. */
static struct slot slot_of_id(const struct ref_layer *layer, int64_t id)
{
    const size_t counts[] = {layer->expert_count, layer->zero_count, layer->copy_count,
                             layer->constant_count};
    const enum slot_kind kinds[] = {SLOT_ROUTED, SLOT_ZERO, SLOT_COPY, SLOT_CONSTANT};
    int64_t left = id;
    for (size_t i = 0; i < 4 && left >= 0; i++) {
        if (left < (int64_t)counts[i]) {
            return (struct slot){kinds[i], (size_t)left, id};
        }
        left -= (int64_t)counts[i];
    }
    return (struct slot){id == -1 || left == 0 ? SLOT_INACTIVE : SLOT_INVALID, 0, id};
}

/* Returns slot (t, k) of an active token, after both masks and the marks of a partial result. */
static struct slot slot_at(const struct ref_layer *layer, const struct ref_batch *batch, size_t t,
                           size_t k)
{
    size_t at = t * batch->top_k + k;
    bool masked = batch->mask_slots != NULL && !batch->mask_slots[at];
    bool unmarked = batch->form == REF_PARTIAL && !batch->partial_slots[at];
    if (masked || unmarked) {
        return (struct slot){SLOT_INACTIVE, 0, -1};
    }
    return slot_of_id(layer, id_at(batch, at));
}

static enum ref_refusal check_ids(const struct ref_layer *layer, const struct ref_batch *batch,
                                  size_t t, char *text)
{
    size_t total =
        layer->expert_count + layer->zero_count + layer->copy_count + layer->constant_count;
    for (size_t k = 0; k < batch->top_k; k++) {
        int64_t id = id_at(batch, t * batch->top_k + k);
        if (slot_of_id(layer, id).kind == SLOT_INVALID) {
            return refuse(text, REF_BAD_ID,
                          "token %zu slot %zu has expert id %" PRId64 ", allowed -1 to %zu", t, k,
                          id, total);
        }
    }
    return REF_OK;
}

static enum ref_refusal check_duplicates(const struct ref_layer *layer,
                                         const struct ref_batch *batch, size_t t, char *text)
{
    for (size_t k = 0; k < batch->top_k; k++) {
        struct slot slot = slot_at(layer, batch, t, k);
        for (size_t j = 0; slot.kind == SLOT_ROUTED && j < k; j++) {
            struct slot before = slot_at(layer, batch, t, j);
            if (before.kind == SLOT_ROUTED && before.id == slot.id) {
                return refuse(text, REF_DUPLICATE_ID,
                              "token %zu has expert id %" PRId64 " in slots %zu and %zu", t,
                              slot.id, j, k);
            }
        }
    }
    return REF_OK;
}

static bool replaces(const struct ref_batch *batch)
{
    return batch->nan_policy == REF_NAN_ZERO || batch->nan_policy == REF_NAN_MEAN;
}

/* Returns an element of x[t] in f32, unchanged. */
static float element_at(const struct ref_layer *layer, const struct ref_batch *batch, size_t t,
                        size_t i)
{
    float x = ref_load(batch->x, batch->x_dtype, t * layer->hidden + i);
    return batch->x_dtype == REF_I8 ? x * batch->x_scales[t] : x;
}

static enum ref_refusal check_values(const struct ref_layer *layer, const struct ref_batch *batch,
                                     size_t t, char *text)
{
    if (batch->x_dtype == REF_I8 && batch->nan_policy == REF_NAN_REJECT &&
        !isfinite(batch->x_scales[t])) {
        return refuse(text, REF_NOT_FINITE, "token %zu has row scale %g", t,
                      (double)batch->x_scales[t]);
    }
    for (size_t i = 0; i < layer->hidden; i++) {
        float x = element_at(layer, batch, t, i);
        if (batch->nan_policy == REF_NAN_REJECT && !isfinite(x)) {
            return refuse(text, REF_NOT_FINITE, "token %zu element %zu is %g", t, i, (double)x);
        }
        bool replaced = replaces(batch) && !isfinite(x);
        if (batch->x_abs_max > 0.0f && !replaced && fabsf(x) > batch->x_abs_max) {
            return refuse(text, REF_TOO_LARGE, "token %zu element %zu is %g, allowed +-%g", t, i,
                          (double)x, (double)batch->x_abs_max);
        }
    }
    return REF_OK;
}

/* Computes x[t] in f32 and applies the NaN policy. */
static void widen(const struct ref_layer *layer, const struct ref_batch *batch, size_t t, float *x)
{
    size_t hidden = layer->hidden;
    for (size_t i = 0; i < hidden; i++) {
        x[i] = element_at(layer, batch, t, i);
    }
    if (!replaces(batch)) {
        return;
    }
    if (batch->x_dtype == REF_I8) {
        for (size_t i = 0; !isfinite(batch->x_scales[t]) && i < hidden; i++) {
            x[i] = ref_load(batch->x, REF_I8, t * hidden + i) * 0.0f;
        }
        return;
    }
    double sum = 0.0;
    size_t finite_count = 0;
    for (size_t i = 0; i < hidden; i++) {
        if (isfinite(x[i])) {
            sum = sum + (double)x[i];
            finite_count++;
        }
    }
    float fill = 0.0f;
    if (batch->nan_policy == REF_NAN_MEAN && finite_count > 0) {
        fill = ref_round((float)(sum / (double)finite_count), batch->x_dtype);
    }
    for (size_t i = 0; i < hidden; i++) {
        if (!isfinite(x[i])) {
            x[i] = fill;
        }
    }
}

static float dot(const struct ref_expert *expert, const float *a, const float *b, size_t n)
{
#ifdef REF_MUTATE_CHAIN
    /* the mutant adds from the last element to the first */
    float *back = malloc((2 * n + 1) * sizeof(*back));
    for (size_t i = 0; back != NULL && i < n; i++) {
        back[i] = a[n - 1 - i];
        back[n + i] = b[n - 1 - i];
    }
    float sum = back != NULL ? ref_dot_of(expert->family, back, back + n, n) : NAN;
    free(back);
    return sum;
#else
    return ref_dot_of(expert->family, a, b, n);
#endif
}

static enum ref_format format_of(const struct ref_expert *expert, const struct ref_matrix *m)
{
    return m == &expert->down && expert->down_differs ? expert->down_format : expert->format;
}

/* Computes one output of a matrix. x_scales: for a row of x in integers. */
static float output(const struct ref_expert *expert, const struct ref_matrix *m, size_t row,
                    const float *x, const float *x_scales, size_t n)
{
    const float *values = m->values + row * n;
    enum ref_format format = format_of(expert, m);
    size_t group = ref_format_group(format);
    float y;
    if (m->group > 0) {
        size_t first = row * ((n + m->group - 1) / m->group);
        const float *offsets = m->offsets != NULL ? m->offsets + first : NULL;
        y = expert->family == REF_W4A8
                ? ref_w4a8_dot(format, values, m->scales + first, offsets, x, x_scales, n)
                : ref_dot_codes(expert->family, values, m->scales + first, offsets, m->group, x, n);
    } else if (group > 0) {
        const float *scales = m->scales + row * ((n + group - 1) / group);
        y = expert->family == REF_W4A8
                ? ref_w4a8_dot(format, values, scales, NULL, x, x_scales, n)
                : ref_dot_groups(format, expert->family, values, scales, x, n);
    } else if (format == REF_FORMAT_W8A8) {
        y = ref_dot_int8(values, m->scales[row], x, x_scales[0], n);
    } else {
        y = dot(expert, values, x, n);
    }
    return m->bias != NULL ? y + m->bias[row] : y;
}

/* Rounds x to the expert's integers; false: the expert's format and family have none. */
static bool to_integers(const struct ref_expert *expert, const float *x, size_t n, float *q,
                        float *scales)
{
    if (expert->format == REF_FORMAT_W8A8) {
        ref_round_int8(x, n, q, scales);
    } else if (expert->family == REF_W4A8) {
        ref_w4a8_round_row(x, n, q, scales);
    } else {
        return false;
    }
    return true;
}

/* Returns values in the order of a matrix's columns, to be freed; NULL: it is the same order. */
static float *in_order(const struct ref_matrix *matrix, const float *values, size_t n)
{
    float *ordered = matrix->order == NULL ? NULL : calloc(n + 1, sizeof(*ordered));
    for (size_t i = 0; ordered != NULL && i < n; i++) {
        ordered[i] = values[matrix->order[i]];
    }
    return ordered;
}

void ref_expert_forward(const struct ref_expert *expert, size_t hidden, const float *x,
                        float *hidden_scratch, float *y)
{
    float *ordered_x = in_order(&expert->up, x, hidden);
    float *ordered_gate =
        expert->output_gate == NULL ? NULL : in_order(&expert->up, expert->output_gate, hidden);
    const float *output_gate = ordered_gate != NULL ? ordered_gate : expert->output_gate;
    x = ordered_x != NULL ? ordered_x : x;
    bool has_pairs = ref_family_has_pairs(expert->family);
    float *h = hidden_scratch;
    float *rounded = hidden_scratch + expert->inner;
    float *scales = rounded + hidden; /* scales of x, then of h */
    for (size_t i = 0; has_pairs && i < hidden; i++) {
        rounded[i] = ref_pair_input(x[i]);
    }
    x = has_pairs ? rounded : x;
    const float *gate_x = x; /* input of the expert's own gate */
    x = to_integers(expert, x, hidden, rounded, scales) ? rounded : x;
    for (size_t j = 0; j < expert->inner; j++) {
        float up = output(expert, &expert->up, j, x, scales, hidden);
        if (expert->gate.values != NULL) {
            float gate = output(expert, &expert->gate, j, x, scales, hidden);
            h[j] = ref_activate(&expert->activation, gate, up);
        } else {
            h[j] = ref_activate_alone(&expert->activation, up);
        }
        h[j] = has_pairs ? ref_pair_input(h[j]) : h[j];
    }
    float *ordered_h = in_order(&expert->down, h, expert->inner);
    h = ordered_h != NULL ? ordered_h : h;
    (void)to_integers(expert, h, expert->inner, h, scales);
    for (size_t i = 0; i < hidden; i++) {
        y[i] = output(expert, &expert->down, i, h, scales, expert->inner);
    }
    if (output_gate != NULL) {
        float open = ref_sigmoid(ref_dot(output_gate, gate_x, hidden));
        for (size_t i = 0; i < hidden; i++) {
            y[i] = open * y[i];
        }
    }
    free(ordered_x);
    free(ordered_gate);
    free(ordered_h);
}

static void constant_row(const struct ref_layer *layer, size_t index, const float *x, float *row)
{
    size_t hidden = layer->hidden;
    const float *alpha1 = layer->alpha1 + index * hidden;
    const float *alpha2 = layer->alpha2 + index * hidden;
    const float *v = layer->constant + index * hidden;
    if (layer->constant_linear) {
        for (size_t i = 0; i < hidden; i++) {
            float from_x = alpha1[i] * x[i];
            float from_v = alpha2[i] * v[i];
            row[i] = from_x + from_v;
        }
        return;
    }
    float p[2] = {ref_dot(alpha1, x, hidden), ref_dot(alpha2, x, hidden)};
    ref_softmax(p, 2);
    for (size_t i = 0; i < hidden; i++) {
        float from_x = p[0] * x[i];
        float from_v = p[1] * v[i];
        row[i] = from_x + from_v;
    }
}

/* Rounds a row element once to the wire type. */
static float round_to_wire(float y, enum ref_dtype wire_dtype)
{
#ifdef REF_MUTATE_ROUND
    y = ref_round(y, REF_F16);
#endif
    return ref_round(y, wire_dtype);
}

/* Returns x as the expert receives it; smooth_row: its row of the smooth scales. */
static const float *sent_x(const struct ref_layer *layer, const struct ref_batch *batch,
                           size_t smooth_row, const struct scratch *s)
{
    size_t hidden = layer->hidden;
    if (batch->dispatch == REF_DISPATCH_PLAIN) {
        return s->x;
    }
    memcpy(s->sent, s->x, hidden * sizeof(*s->sent));
    if (batch->dispatch == REF_DISPATCH_FP8) {
        ref_quant_fp8_row(s->sent, hidden);
    } else {
        ref_quant_int8_row(s->sent, hidden,
                           batch->smooth != NULL ? batch->smooth + smooth_row * hidden : NULL);
    }
    return s->sent;
}

/* Turns an expert's row into the row that arrives at the caller. */
static void send_back(const struct ref_batch *batch, size_t hidden, float *row)
{
    for (size_t i = 0; i < hidden; i++) {
        row[i] = round_to_wire(row[i], batch->wire_dtype);
    }
    if (batch->combine_int8 && batch->owner_of == NULL) {
        ref_quant_int8_reply(row, hidden, batch->wire_dtype);
    }
}

/* Computes row(t,k) of a slot that has one: only routed rows are rounded to the wire type. */
static void slot_row(const struct ref_layer *layer, const struct ref_batch *batch, struct slot slot,
                     float scale, const struct scratch *s, float *row)
{
    if (slot.kind == SLOT_COPY) {
        memcpy(row, s->x, layer->hidden * sizeof(*row));
        return;
    }
    if (slot.kind == SLOT_CONSTANT) {
        constant_row(layer, slot.index, s->x, row);
        return;
    }
    const float *x = sent_x(layer, batch, layer->shared_count + slot.index, s);
    if (batch->weight_on_input) {
        for (size_t i = 0; i < layer->hidden; i++) {
            s->scaled[i] = scale * x[i];
        }
        x = s->scaled;
    }
    ref_expert_forward(&layer->experts[slot.index], layer->hidden, x, s->hidden, row);
    send_back(batch, layer->hidden, row);
}

static bool has_row(struct slot slot)
{
    return slot.kind == SLOT_ROUTED || slot.kind == SLOT_COPY || slot.kind == SLOT_CONSTANT;
}

/* Returns the n-th slot to be added. */
static size_t slot_in_order(size_t top_k, size_t n)
{
#ifdef REF_MUTATE_ORDER
    return top_k - 1 - n;
#else
    (void)top_k;
    return n;
#endif
}

static float add_weighted(float acc, float scale, float row)
{
#ifdef REF_MUTATE_FMA
    return fmaf(scale, row, acc);
#else
    float term = scale * row;
    return acc + term;
#endif
}

static bool is_lost(size_t top_k, size_t k)
{
#ifdef REF_MUTATE_SLOT
    return k == top_k - 1;
#else
    (void)top_k;
    (void)k;
    return false;
#endif
}

/* Computes a shared expert's row as it arrives. */
static void shared_row(const struct ref_layer *layer, const struct ref_batch *batch, size_t index,
                       const struct scratch *s)
{
    size_t hidden = layer->hidden;
    const struct ref_expert *shared = &layer->shared[index];
    struct ref_expert expert = *shared;
    const float *x = sent_x(layer, batch, index, s);
#ifdef REF_MUTATE_GATE
    expert.output_gate = NULL;
#endif
    ref_expert_forward(&expert, hidden, x, s->hidden, s->row);
    send_back(batch, hidden, s->row);
#ifdef REF_MUTATE_GATE
    float open =
        shared->output_gate != NULL ? ref_sigmoid(ref_dot(shared->output_gate, x, hidden)) : 1.0f;
    for (size_t i = 0; i < hidden; i++) {
        s->row[i] = open * s->row[i];
    }
#endif
}

/* Returns slot k's expert; shared experts follow the routed slots. SIZE_MAX: none. */
static size_t expert_at(const struct ref_layer *layer, const struct ref_batch *batch, size_t t,
                        size_t k)
{
    if (k >= batch->top_k) {
        return layer->expert_count + (k - batch->top_k);
    }
    struct slot slot = slot_at(layer, batch, t, k);
    return slot.kind == SLOT_ROUTED && !is_lost(batch->top_k, k) ? slot.index : SIZE_MAX;
}

/* Adds slot k to sum[] as a node does. */
static void add_to_sum(const struct ref_layer *layer, const struct ref_batch *batch, size_t t,
                       size_t k, const struct scratch *s, float *sum)
{
    float scale = 1.0f;
    if (k >= batch->top_k) {
        shared_row(layer, batch, k - batch->top_k, s);
    } else {
        scale = ref_load(batch->scales, batch->scales_dtype, t * batch->top_k + k);
        slot_row(layer, batch, slot_at(layer, batch, t, k), scale, s, s->row);
    }
    for (size_t i = 0; i < layer->hidden; i++) {
        sum[i] = add_weighted(sum[i], scale, s->row[i]);
    }
}

/* Adds the sum of slot k's node if k is the node's first slot of the token, else nothing. */
static void add_node_sum(const struct ref_layer *layer, const struct ref_batch *batch, size_t t,
                         size_t k, size_t slots, const struct scratch *s)
{
    size_t hidden = layer->hidden;
    size_t owner = batch->owner_of[expert_at(layer, batch, t, k)];
    for (size_t before = 0; before < k; before++) {
        size_t expert = expert_at(layer, batch, t, before);
        if (expert != SIZE_MAX && batch->owner_of[expert] == owner) {
            return;
        }
    }
    for (size_t i = 0; i < hidden; i++) {
        s->scaled[i] = 0.0f; /* unused here: weights are on the output */
    }
    for (size_t n = k; n < slots; n++) {
        size_t at = n < batch->top_k ? k + slot_in_order(batch->top_k - k, n - k) : n;
        size_t expert = expert_at(layer, batch, t, at);
        if (expert != SIZE_MAX && batch->owner_of[expert] == owner) {
            add_to_sum(layer, batch, t, at, s, s->scaled);
        }
    }
    for (size_t i = 0; i < hidden; i++) {
        s->scaled[i] = round_to_wire(s->scaled[i], batch->wire_dtype);
    }
    if (batch->combine_int8) {
        ref_quant_int8_reply(s->scaled, hidden, batch->wire_dtype);
    }
    for (size_t i = 0; i < hidden; i++) {
        s->acc[i] = s->acc[i] + s->scaled[i];
    }
}

static void combine_token_sums(const struct ref_layer *layer, const struct ref_batch *batch,
                               size_t t, const struct scratch *s, void *out)
{
    size_t hidden = layer->hidden;
    size_t slots = batch->top_k + (batch->no_service_shared ? 0 : layer->shared_count);
    for (size_t i = 0; i < hidden; i++) {
        s->acc[i] = 0.0f;
    }
    for (size_t k = 0; k < slots; k++) {
        if (expert_at(layer, batch, t, k) != SIZE_MAX) {
            add_node_sum(layer, batch, t, k, slots, s);
        } else if (has_row(slot_at(layer, batch, t, k)) && !is_lost(batch->top_k, k)) {
            float scale = ref_load(batch->scales, batch->scales_dtype, t * batch->top_k + k);
            slot_row(layer, batch, slot_at(layer, batch, t, k), scale, s, s->row);
            for (size_t i = 0; i < hidden; i++) {
                s->acc[i] = add_weighted(s->acc[i], scale, s->row[i]);
            }
        }
    }
    for (size_t i = 0; i < hidden; i++) {
        float sum = s->acc[i];
        if (batch->caller_shared != NULL) {
            sum = sum + ref_load(batch->caller_shared, batch->caller_shared_dtype, t * hidden + i);
        }
        ref_store(out, batch->out_dtype, t * hidden + i, sum);
    }
}

static void combine_token(const struct ref_layer *layer, const struct ref_batch *batch, size_t t,
                          const struct scratch *s, void *out)
{
    size_t hidden = layer->hidden;
    for (size_t i = 0; i < hidden; i++) {
        s->acc[i] = 0.0f;
    }
    for (size_t n = 0; n < batch->top_k; n++) {
        size_t k = slot_in_order(batch->top_k, n);
        size_t at = t * batch->top_k + k;
        struct slot slot = slot_at(layer, batch, t, k);
        if (!has_row(slot) || is_lost(batch->top_k, k)) {
            continue;
        }
        float scale = ref_load(batch->scales, batch->scales_dtype, at);
        slot_row(layer, batch, slot, scale, s, s->row);
        bool weighted = !(batch->weight_on_input && slot.kind == SLOT_ROUTED);
        for (size_t i = 0; i < hidden; i++) {
            s->acc[i] =
                weighted ? add_weighted(s->acc[i], scale, s->row[i]) : s->acc[i] + s->row[i];
        }
    }
    for (size_t e = 0; !batch->no_service_shared && e < layer->shared_count; e++) {
        shared_row(layer, batch, e, s);
        for (size_t i = 0; i < hidden; i++) {
            s->acc[i] = s->acc[i] + s->row[i];
        }
    }
    for (size_t i = 0; batch->caller_shared != NULL && i < hidden; i++) {
        s->acc[i] =
            s->acc[i] + ref_load(batch->caller_shared, batch->caller_shared_dtype, t * hidden + i);
    }
    for (size_t i = 0; i < hidden; i++) {
        ref_store(out, batch->out_dtype, t * hidden + i, s->acc[i]);
    }
}

static void list_token(const struct ref_layer *layer, const struct ref_batch *batch, size_t t,
                       const struct scratch *s, void *out)
{
    size_t hidden = layer->hidden;
    for (size_t k = 0; k < batch->top_k; k++) {
        size_t at = t * batch->top_k + k;
        struct slot slot = slot_at(layer, batch, t, k);
        if (!has_row(slot)) {
            continue;
        }
        slot_row(layer, batch, slot, ref_load(batch->scales, batch->scales_dtype, at), s, s->row);
        for (size_t i = 0; i < hidden; i++) {
            ref_store(out, batch->out_dtype, at * hidden + i,
                      ref_round(s->row[i], batch->wire_dtype));
        }
    }
}

static float *scratch_open(const struct ref_layer *layer, struct scratch *out_scratch)
{
    size_t inner_max = 1;
    size_t hidden = layer->hidden;
    for (size_t e = 0; e < layer->expert_count; e++) {
        inner_max = layer->experts[e].inner > inner_max ? layer->experts[e].inner : inner_max;
    }
    for (size_t e = 0; e < layer->shared_count; e++) {
        inner_max = layer->shared[e].inner > inner_max ? layer->shared[e].inner : inner_max;
    }
    float *memory = calloc(5 * hidden + ref_expert_scratch(hidden, inner_max), sizeof(*memory));
    if (memory != NULL) {
        *out_scratch = (struct scratch){memory,
                                        memory + hidden,
                                        memory + 2 * hidden,
                                        memory + 3 * hidden,
                                        memory + 4 * hidden,
                                        memory + 5 * hidden};
    }
    return memory;
}

enum ref_refusal ref_layer_forward(const struct ref_layer *layer, const struct ref_batch *batch,
                                   void *out, char text[REF_TEXT_BYTES])
{
    for (size_t t = 0; t < batch->tokens; t++) {
        enum ref_refusal why = check_ids(layer, batch, t, text);
        if (why == REF_OK && token_active(batch, t) && !batch->allow_duplicates) {
            why = check_duplicates(layer, batch, t, text);
        }
        if (why == REF_OK && token_active(batch, t)) {
            why = check_values(layer, batch, t, text);
        }
        if (why != REF_OK) {
            return why;
        }
    }
    struct scratch scratch;
    float *memory = scratch_open(layer, &scratch);
    if (memory == NULL) {
        return refuse(text, REF_NO_MEMORY, "no memory for the oracle's rows");
    }

    size_t rows = batch->tokens * (batch->form == REF_UNCOMBINED ? batch->top_k : 1);
    if (rows > 0) {
        memset(out, 0, rows * layer->hidden * ref_dtype_bytes(batch->out_dtype));
    }
    for (size_t t = 0; t < batch->tokens; t++) {
        if (!token_active(batch, t)) {
            continue;
        }
        widen(layer, batch, t, scratch.x);
        if (batch->form == REF_UNCOMBINED) {
            list_token(layer, batch, t, &scratch, out);
        } else if (batch->owner_of != NULL) {
            combine_token_sums(layer, batch, t, &scratch, out);
        } else {
            combine_token(layer, batch, t, &scratch, out);
        }
    }
    free(memory);
    return REF_OK;
}
