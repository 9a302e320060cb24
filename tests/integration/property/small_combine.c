/* SPDX-License-Identifier: Apache-2.0 */
#include "small_combine.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"

struct small_combine {
    const layer_case *c;
    combine_mistake mistake;
    float *rows;   /* [T,K,H] rounded to the wire type; zero where a slot has none */
    float *x;      /* [H] */
    float *row;    /* [H] */
    float *hidden; /* an expert's scratch */
    float *acc;    /* [H] */
};

const char *combine_mistake_name(combine_mistake mistake)
{
    static const char *const names[] = {"none",          "other order", "fused",
                                        "rounded twice", "slot lost",   "gate late"};
    return names[mistake];
}

bool small_combine_covers(const layer_case *c)
{
    return c->batch.form != REF_UNCOMBINED && !c->node_sum && c->layer.copy_count == 0 &&
           c->layer.constant_count == 0 && c->batch.dispatch == REF_DISPATCH_PLAIN &&
           !c->batch.combine_int8;
}

static bool is_routed(const layer_case *c, size_t at)
{
    const struct ref_batch *b = &c->batch;
    int64_t id =
        b->ids_dtype == REF_I64 ? ((const int64_t *)b->ids)[at] : ((const int32_t *)b->ids)[at];
    return id >= 0 && id < (int64_t)c->layer.expert_count &&
           (b->mask_slots == NULL || b->mask_slots[at]) &&
           (b->form != REF_PARTIAL || b->partial_slots[at]);
}

static bool is_active(const layer_case *c, size_t token)
{
    const struct ref_batch *b = &c->batch;
    bool any = b->mask_slots == NULL || b->top_k == 0;
    for (size_t k = 0; !any && k < b->top_k; k++) {
        any = b->mask_slots[token * b->top_k + k] != 0;
    }
    return any && (b->mask_tokens == NULL || b->mask_tokens[token]);
}

/* Rows of all slots, by the oracle's uncombined result. */
static void compute_rows(small_combine *s)
{
    struct ref_batch batch = s->c->batch;
    batch.form = REF_UNCOMBINED;
    batch.out_dtype = REF_F32;
    batch.partial_slots = NULL;
    batch.allow_duplicates = true; /* among unmarked slots they are legal */
    enum ref_refusal why = ref_layer_forward(&s->c->layer, &batch, s->rows, NULL);
    EP_ASSERT(why == REF_OK);
}

/* The row as an expert sees it: a copy expert gives just that. */
static void read_x(small_combine *s, size_t token)
{
    const struct ref_batch *b = &s->c->batch;
    size_t hidden = s->c->layer.hidden;
    int32_t id = 0;
    float one = 1.0f;
    float scale = b->x_scales != NULL ? b->x_scales[token] : 0.0f;
    struct ref_layer copy = {.hidden = hidden, .copy_count = 1};
    struct ref_batch single = {.tokens = 1,
                               .top_k = 1,
                               .x_dtype = b->x_dtype,
                               .x_scales = &scale,
                               .ids = &id,
                               .ids_dtype = REF_I32,
                               .scales = &one,
                               .scales_dtype = REF_F32,
                               .form = REF_UNCOMBINED,
                               .nan_policy = b->nan_policy,
                               .wire_dtype = REF_F32,
                               .out_dtype = REF_F32};
    single.x = (const uint8_t *)b->x + token * hidden * ref_dtype_bytes(b->x_dtype);
    enum ref_refusal why = ref_layer_forward(&copy, &single, s->x, NULL);
    EP_ASSERT(why == REF_OK);
}

static void add_slots(small_combine *s, size_t token)
{
    const struct ref_batch *b = &s->c->batch;
    size_t hidden = s->c->layer.hidden;
    size_t last = b->top_k;
    for (size_t k = 0; k < b->top_k; k++) {
        last = is_routed(s->c, token * b->top_k + k) ? k : last;
    }
    for (size_t n = 0; n < b->top_k; n++) {
        size_t k = s->mistake == COMBINE_OTHER_ORDER ? b->top_k - 1 - n : n;
        size_t at = token * b->top_k + k;
        if (!is_routed(s->c, at) || (s->mistake == COMBINE_SLOT_LOST && k == last)) {
            continue;
        }
        float scale = b->weight_on_input ? 1.0f : ref_load(b->scales, b->scales_dtype, at);
        for (size_t i = 0; i < hidden; i++) {
            float product = scale * s->rows[at * hidden + i];
            s->acc[i] = s->mistake == COMBINE_FUSED
                            ? fmaf(scale, s->rows[at * hidden + i], s->acc[i])
                            : s->acc[i] + product;
        }
    }
}

/* What the expert's own gate multiplies its row with. */
static float gate_of(const struct ref_expert *expert, const float *x, size_t hidden)
{
    float sum = 0.0f;
    for (size_t i = 0; i < hidden; i++) {
        sum = fmaf(expert->output_gate[i],
                   ref_family_has_pairs(expert->family) ? ref_pair_input(x[i]) : x[i], sum);
    }
    return ref_sigmoid(sum);
}

static void add_shared(small_combine *s, size_t token)
{
    const struct ref_batch *b = &s->c->batch;
    size_t hidden = s->c->layer.hidden;
    read_x(s, token);
    for (size_t e = 0; e < s->c->layer.shared_count; e++) {
        struct ref_expert expert = s->c->layer.shared[e];
        float gate = 1.0f;
        if (s->mistake == COMBINE_GATE_LATE && expert.output_gate != NULL) {
            gate = gate_of(&expert, s->x, hidden);
            expert.output_gate = NULL;
        }
        ref_expert_forward(&expert, hidden, s->x, s->hidden, s->row);
        for (size_t i = 0; i < hidden; i++) {
            s->acc[i] = s->acc[i] + gate * ref_round(s->row[i], b->wire_dtype);
        }
    }
}

static void combine_token(small_combine *s, size_t token, uint8_t *out)
{
    const struct ref_batch *b = &s->c->batch;
    size_t hidden = s->c->layer.hidden;
    memset(s->acc, 0, hidden * sizeof(*s->acc));
    if (is_active(s->c, token)) {
        add_slots(s, token);
        if (!b->no_service_shared && s->c->layer.shared_count > 0) {
            add_shared(s, token);
        }
        for (size_t i = 0; b->caller_shared != NULL && i < hidden; i++) {
            s->acc[i] =
                s->acc[i] + ref_load(b->caller_shared, b->caller_shared_dtype, token * hidden + i);
        }
    }
    for (size_t i = 0; i < hidden; i++) {
        float value =
            s->mistake == COMBINE_ROUNDED_TWICE ? ref_round(s->acc[i], REF_F16) : s->acc[i];
        ref_store(out, b->out_dtype, token * hidden + i, value);
    }
}

small_combine *small_combine_open(const layer_case *c)
{
    size_t hidden = c->layer.hidden;
    size_t inner = c->layer.shared_count > 0 ? c->layer.shared[0].inner : 1;
    size_t rows = c->batch.tokens * c->batch.top_k;
    small_combine *s = calloc(1, sizeof(*s));
    EP_ASSERT(s != NULL);
    s->c = c;
    s->rows = calloc((rows + 3) * hidden + ref_expert_scratch(hidden, inner), sizeof(*s->rows));
    EP_ASSERT(s->rows != NULL);
    s->x = s->rows + rows * hidden;
    s->row = s->x + hidden;
    s->acc = s->row + hidden;
    s->hidden = s->acc + hidden;
    compute_rows(s);
    return s;
}

void small_combine_run(small_combine *s, combine_mistake mistake, uint8_t *out)
{
    s->mistake = mistake;
    for (size_t t = 0; t < s->c->batch.tokens; t++) {
        combine_token(s, t, out);
    }
}

void small_combine_close(small_combine *s)
{
    free(s->rows);
    free(s);
}
