/* SPDX-License-Identifier: Apache-2.0 */
/* The canonical combine against a plain loop over single elements, bit for bit, on random batches;
 * and cases worked by hand. */
#include "moe/combine.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/numeric.h"
#include "moe/convert.h"
#include "unit/moe/random_batch.h"

/* ---- the plain loop: one element of one token, nothing shared with lib/moe but the scalar formats
 * ---- */

static float x_at(const ep_batch *b, uint32_t t, uint32_t i)
{
    const char *row = (const char *)b->x.data + (int64_t)t * b->x.stride_bytes;
    if (b->x.dtype == EP_DTYPE_I8) {
        volatile float q = (float)((const int8_t *)row)[i];
        return q * b->x_scales[t];
    }
    return random_batch_element(row, b->x.dtype, i);
}

static float table_at(const ep_rows *rows, uint32_t r, uint32_t i)
{
    return random_batch_element((const char *)rows->data + (int64_t)r * rows->stride_bytes,
                                rows->dtype, i);
}

static float const_at(const ep_batch *b, uint32_t t, uint32_t j, uint32_t i)
{
    const ep_special_experts *s = &b->special;
    volatile float left;
    volatile float right;
    if (s->const_rule == EP_CONST_LINEAR) {
        left = table_at(&s->const_alpha1, j, i) * x_at(b, t, i);
        right = table_at(&s->const_alpha2, j, i) * table_at(&s->const_v, j, i);
        return left + right;
    }
    float a1 = 0.0f;
    float a2 = 0.0f;
    for (uint32_t h = 0; h < b->hidden; h++) {
        a1 = fmaf(table_at(&s->const_alpha1, j, h), x_at(b, t, h), a1);
        a2 = fmaf(table_at(&s->const_alpha2, j, h), x_at(b, t, h), a2);
    }
    float max = fmaxf(a1, a2);
    float e1 = ep_expf(a1 - max);
    float e2 = ep_expf(a2 - max);
    volatile float sum = e1 + e2;
    left = (e1 / sum) * x_at(b, t, i);
    right = (e2 / sum) * table_at(&s->const_v, j, i);
    return left + right;
}

static bool flag(const ep_rows *rows, uint32_t t, uint32_t k)
{
    return ((const uint8_t *)rows->data)[(int64_t)t * rows->stride_bytes + k] != 0;
}

static bool active(const ep_batch *b, uint32_t t)
{
    bool any = b->mask_slots.data == NULL;
    for (uint32_t k = 0; k < b->top_k && !any; k++) {
        any = flag(&b->mask_slots, t, k);
    }
    return any && (b->mask_tokens == NULL || b->mask_tokens[t]);
}

static int64_t id_at(const ep_batch *b, uint32_t t, uint32_t k)
{
    const char *row = (const char *)b->ids.data + (int64_t)t * b->ids.stride_bytes;
    int64_t wide;
    int32_t narrow;
    if (b->ids.dtype == EP_DTYPE_I64) {
        memcpy(&wide, row + 8 * k, 8);
        return wide;
    }
    memcpy(&narrow, row + 4 * k, 4);
    return narrow;
}

static bool counts(const ep_batch *b, uint32_t t, uint32_t k)
{
    return active(b, t) && (b->mask_slots.data == NULL || flag(&b->mask_slots, t, k)) &&
           (b->form != EP_RESULT_PARTIAL || flag(&b->partial_slots, t, k));
}

/* r of slot k at element i, rounded as a slot of an uncombined result; *out_kind 0 nothing, 1
 * routed, 2 special. */
static float slot_value(const ep_batch *b, const ep_layer_shape *s, const void *const *rows,
                        uint32_t spt, uint32_t t, uint32_t k, uint32_t i, int *out_kind)
{
    int64_t id = id_at(b, t, k);
    int64_t copies = s->experts + b->special.zero_count;
    int64_t consts = copies + b->special.copy_count;
    *out_kind = 0;
    if (!counts(b, t, k) || id < 0) {
        return 0.0f;
    }
    if (id < s->experts) {
        *out_kind = 1;
        return random_batch_element(rows[t * spt + k], b->wire_dtype, i);
    }
    if (id >= copies && id < consts) {
        *out_kind = 2;
        return x_at(b, t, i);
    }
    if (id >= consts && id < consts + b->special.const_count) {
        *out_kind = 2;
        return const_at(b, t, (uint32_t)(id - consts), i);
    }
    return 0.0f;
}

static float combined(const ep_batch *b, const ep_layer_shape *s, const void *const *rows,
                      uint32_t t, uint32_t i)
{
    uint32_t shared = b->shared_source == EP_SHARED_SERVICE ? s->shared_experts : 0;
    uint32_t spt = b->top_k + shared;
    volatile float acc = 0.0f;
    if (!active(b, t)) {
        return 0.0f;
    }
    for (uint32_t k = 0; k < b->top_k; k++) {
        int kind;
        float r = slot_value(b, s, rows, spt, t, k, i, &kind);
        if (kind == 1 && b->weight_on == EP_WEIGHT_ON_INPUT) {
            acc = acc + r;
        } else if (kind != 0) {
            volatile float product = table_at(&b->scales, t, k) * r;
            acc = acc + product;
        }
    }
    for (uint32_t k = b->top_k; k < spt; k++) {
        acc = acc + random_batch_element(rows[t * spt + k], b->wire_dtype, i);
    }
    if (b->shared_source == EP_SHARED_CALLER) {
        acc = acc + table_at(&b->shared, t, i);
    }
    return acc;
}

static bool same_bits(float a, float b)
{
    return ep_f32_bits(a) == ep_f32_bits(b);
}

/* ---- random batches ---- */

static const void **make_rows(random_batch *rb, uint32_t spt)
{
    size_t row_bytes = rb->batch.hidden * ep_dtype_bytes(rb->batch.wire_dtype);
    size_t stride = row_bytes + 1; /* every other row is misaligned */
    uint32_t count = rb->batch.tokens * spt;
    const void **rows = random_batch_alloc(rb, count * sizeof(*rows));
    uint8_t *data = random_batch_alloc(rb, count * stride);
    for (uint32_t s = 0; s < count; s++) {
        uint32_t expert;
        ep_slot_kind kind = ep_batch_slot(&rb->batch, &rb->shape, s / spt, s % spt, &expert);
        if (kind != EP_SLOT_ROUTED && kind != EP_SLOT_SHARED) {
            continue; /* NULL: must not be touched */
        }
        for (uint32_t i = 0; i < rb->batch.hidden; i++) {
            float value = random_float(&rb->state);
            ep_row_narrow(&value, 1, rb->batch.wire_dtype,
                          data + s * stride + i * ep_dtype_bytes(rb->batch.wire_dtype));
        }
        rows[s] = data + s * stride;
    }
    return rows;
}

static unsigned run_one(uint64_t seed, unsigned *out_compared)
{
    random_batch rb;
    random_batch_init(&rb, seed);
    const ep_batch *b = &rb.batch;
    cr_assert_eq(ep_batch_check(b, &rb.shape, NULL), EP_OK);
    uint32_t spt = ep_batch_slots_per_token(b, &rb.shape);
    const void **rows = make_rows(&rb, spt);
    bool uncombined = b->form == EP_RESULT_UNCOMBINED;
    uint32_t per_token = uncombined ? b->top_k : 1;
    size_t row_bytes = b->hidden * ep_dtype_bytes(b->out_dtype);
    uint8_t *data = malloc((size_t)b->tokens * per_token * row_bytes + 1);
    memset(data, 0xa5, (size_t)b->tokens * per_token * row_bytes + 1);
    float *scratch = aligned_alloc(64, ep_combine_scratch_floats(b->hidden) * sizeof(float));
    ep_combine_out out = {data, (int64_t)(per_token * row_bytes), (int64_t)row_bytes};

    uint32_t split = random_below(&rb.state, b->tokens + 1);
    ep_combine(b, &rb.shape, rows, NULL, split, b->tokens, scratch, &out);
    ep_combine(b, &rb.shape, rows, NULL, 0, split, scratch, &out);
    unsigned wrong = 0;
    for (uint32_t t = 0; t < b->tokens; t++) {
        for (uint32_t k = 0; k < per_token; k++) {
            for (uint32_t i = 0; i < b->hidden; i++) {
                int kind;
                float want =
                    uncombined
                        ? random_batch_rounded(slot_value(b, &rb.shape, rows, spt, t, k, i, &kind),
                                               b->wire_dtype)
                        : combined(b, &rb.shape, rows, t, i);
                wrong += !same_bits(
                    random_batch_rounded(want, b->out_dtype),
                    random_batch_element(data + (t * per_token + k) * row_bytes, b->out_dtype, i));
                (*out_compared)++;
            }
        }
    }
    cr_assert_eq(data[(size_t)b->tokens * per_token * row_bytes], 0xa5, "wrote past its end");
    free(data);
    free(scratch);
    random_batch_fini(&rb);
    return wrong;
}

Test(combine, equals_the_plain_loop_bit_for_bit_on_random_batches)
{
    unsigned compared = 0;
    for (uint64_t seed = 0; seed < 6000; seed++) {
        unsigned wrong = run_one(seed, &compared);
        cr_assert_eq(wrong, 0, "seed %llu: %u elements differ", (unsigned long long)seed, wrong);
    }
    cr_assert_gt(compared, 500000u);
}

/* ---- by hand ---- */

typedef struct {
    ep_batch batch;
    ep_layer_shape shape;
    int32_t ids[4];
    float scales[4];
    float x[4];
    float row_data[4][4];
    const void *rows[4];
    float out[16];
    float scratch[512] __attribute__((aligned(64)));
} hand;

static void hand_init(hand *h, uint32_t top_k)
{
    memset(h, 0, sizeof(*h));
    h->shape = (ep_layer_shape){.hidden = 1, .inner = 1, .experts = 8, .top_k = top_k};
    h->batch = (ep_batch){.tokens = 1,
                          .top_k = top_k,
                          .hidden = 1,
                          .x = {h->x, 4, EP_DTYPE_F32},
                          .ids = {h->ids, 16, EP_DTYPE_I32},
                          .scales = {h->scales, 16, EP_DTYPE_F32},
                          .wire_dtype = EP_DTYPE_F32,
                          .out_dtype = EP_DTYPE_F32,
                          .shared_source = EP_SHARED_NONE};
    for (int k = 0; k < 4; k++) {
        h->ids[k] = k;
        h->scales[k] = 1.0f;
        h->rows[k] = h->row_data[k];
    }
}

static float hand_run(hand *h)
{
    ep_combine_out out = {h->out, 16, 4};
    ep_combine(&h->batch, &h->shape, h->rows, NULL, 0, 1, h->scratch, &out);
    return h->out[0];
}

Test(combine, another_order_of_the_sum_is_caught)
{
    hand h;
    hand_init(&h, 3);
    h.row_data[0][0] = 0x1p24f;
    h.row_data[1][0] = 1.0f;
    h.row_data[2][0] = -0x1p24f;
    cr_assert(same_bits(hand_run(&h), 0.0f), "in slot order the 1 is rounded away");
    h.rows[1] = h.row_data[2];
    h.rows[2] = h.row_data[1];
    cr_assert(same_bits(hand_run(&h), 1.0f), "in another order it would not be");
}

Test(combine, multiply_and_add_are_rounded_separately)
{
    hand h;
    hand_init(&h, 2);
    float a = 1.0f + 0x1p-12f;
    h.row_data[0][0] = -(1.0f + 0x1p-11f);
    h.scales[1] = a;
    h.row_data[1][0] = a;
    cr_assert(same_bits(hand_run(&h), 0.0f));
    cr_assert(!same_bits(fmaf(a, a, h.row_data[0][0]), 0.0f),
              "a fused multiply-add would give 2^-24");
}

Test(combine, special_experts_join_without_rounding_to_the_wire_type)
{
    hand h;
    hand_init(&h, 1);
    h.batch.wire_dtype = EP_DTYPE_BF16;
    h.batch.special.copy_count = 1;
    h.ids[0] = 8;
    h.x[0] = 1.0f + 0x1p-20f;
    cr_assert(same_bits(hand_run(&h), h.x[0]));
    h.batch.form = EP_RESULT_UNCOMBINED;
    cr_assert(same_bits(hand_run(&h), 1.0f), "as a row of its own it is a bf16");
}

Test(combine, weight_on_input_adds_routed_rows_as_they_are_and_weights_copies)
{
    hand h;
    hand_init(&h, 2);
    h.batch.weight_on = EP_WEIGHT_ON_INPUT;
    h.batch.special.copy_count = 1;
    h.ids[1] = 8;
    h.x[0] = 3.0f;
    h.row_data[0][0] = 10.0f;
    h.scales[0] = 100.0f;
    h.scales[1] = 0.5f;
    cr_assert(same_bits(hand_run(&h), 11.5f));
}

Test(combine, an_inactive_token_is_zero_and_an_idle_one_still_gets_shared_rows)
{
    hand h;
    hand_init(&h, 2);
    h.shape.shared_experts = 1;
    h.batch.shared_source = EP_SHARED_SERVICE;
    h.ids[0] = -1;
    h.ids[1] = 8; /* the total: the other sentinel */
    h.row_data[2][0] = 7.0f;
    cr_assert(same_bits(hand_run(&h), 7.0f));
    uint8_t mask = 0;
    h.batch.mask_tokens = &mask;
    cr_assert(same_bits(hand_run(&h), 0.0f));
    uint8_t none[2] = {0, 0};
    h.batch.mask_tokens = NULL;
    h.batch.mask_slots = (ep_rows){none, 2, EP_DTYPE_BOOL};
    cr_assert(same_bits(hand_run(&h), 0.0f));
}

Test(combine, a_missing_row_contributes_nothing)
{
    hand h;
    hand_init(&h, 2);
    h.row_data[0][0] = 1.0f;
    h.row_data[1][0] = 2.0f;
    h.rows[0] = NULL;
    cr_assert(same_bits(hand_run(&h), 2.0f));
}

/* ---- rows that are not finite ---- */

#define NAN_HIDDEN 8

typedef struct spoilt {
    ep_layer_shape shape;
    float weights[2];
    int32_t ids[2];
    float rows[2][NAN_HIDDEN];
    const void *row_of[2];
    ep_batch batch;
} spoilt;

static void spoilt_init(spoilt *s)
{
    *s = (spoilt){.shape = {.hidden = NAN_HIDDEN, .experts = 2, .top_k = 2},
                  .weights = {1.0f, 1.0f},
                  .ids = {0, 1},
                  .rows = {{0}, {1.0f, NAN, 3.0f, -INFINITY, 2.0f, 2.0f, 2.0f, 2.0f}}};
    s->row_of[0] = s->rows[0];
    s->row_of[1] = s->rows[1];
    s->batch = (ep_batch){.tokens = 1,
                          .top_k = 2,
                          .hidden = NAN_HIDDEN,
                          .ids = {s->ids, 8, EP_DTYPE_I32},
                          .scales = {s->weights, 8, EP_DTYPE_F32},
                          .shared_source = EP_SHARED_NONE,
                          .wire_dtype = EP_DTYPE_F32,
                          .out_dtype = EP_DTYPE_F32};
}

static void spoilt_sum(const spoilt *s, float *out)
{
    _Alignas(64) float scratch[5 * 16];
    ep_combine_out to = {out, 2 * NAN_HIDDEN * 4, NAN_HIDDEN * 4};
    cr_assert_leq(ep_combine_scratch_floats(NAN_HIDDEN), sizeof(scratch) / sizeof(scratch[0]));
    ep_combine(&s->batch, &s->shape, s->row_of, NULL, 0, 1, scratch, &to);
}

Test(combine, rows_that_are_not_finite_follow_their_policy)
{
    spoilt s;
    float out[2 * NAN_HIDDEN];
    spoilt_init(&s);
    spoilt_sum(&s, out);
    cr_expect(isnan(out[1]) && out[3] == -INFINITY && same_bits(out[2], 3.0f), "pass");
    s.batch.rows_policy = EP_NAN_ZERO;
    spoilt_sum(&s, out);
    cr_expect(same_bits(out[0], 1.0f) && same_bits(out[1], 0.0f) && same_bits(out[3], 0.0f),
              "zero");
    s.batch.rows_policy = EP_NAN_MEAN; /* of 1, 3, 2, 2, 2, 2 */
    spoilt_sum(&s, out);
    cr_expect(same_bits(out[0], 1.0f) && same_bits(out[1], 2.0f) && same_bits(out[3], 2.0f),
              "mean");
    s.batch.form = EP_RESULT_UNCOMBINED;
    spoilt_sum(&s, out);
    cr_expect(same_bits(out[NAN_HIDDEN + 1], 2.0f) && same_bits(out[NAN_HIDDEN + 2], 3.0f),
              "mean, uncombined");
}

Test(combine, the_first_element_that_is_not_finite_is_named)
{
    spoilt s;
    float scratch[5 * 16];
    ep_nonfinite found = {0};
    spoilt_init(&s);
    cr_assert(ep_combine_find_nonfinite(&s.batch, &s.shape, s.row_of, NULL, 0, 1, scratch, &found));
    cr_expect(found.token == 0 && found.slot == 1 && found.element == 1 && isnan(found.value));
    s.row_of[1] = NULL; /* missing */
    cr_expect(
        !ep_combine_find_nonfinite(&s.batch, &s.shape, s.row_of, NULL, 0, 1, scratch, &found));
    s.row_of[1] = s.rows[1];
    s.ids[1] = -1; /* inactive: its row is not looked at */
    cr_expect(
        !ep_combine_find_nonfinite(&s.batch, &s.shape, s.row_of, NULL, 0, 1, scratch, &found));
    /* A constant expert's row is made here, of x and its table. */
    float x[NAN_HIDDEN] = {0};
    float table[3][NAN_HIDDEN] = {{0}, {0}, {0, 0, INFINITY}};
    s.batch.special.const_count = 1;
    s.batch.special.const_alpha1 = (ep_rows){table[0], sizeof(table[0]), EP_DTYPE_F32};
    s.batch.special.const_alpha2 = (ep_rows){table[1], sizeof(table[1]), EP_DTYPE_F32};
    s.batch.special.const_v = (ep_rows){table[2], sizeof(table[2]), EP_DTYPE_F32};
    s.batch.x = (ep_rows){x, sizeof(x), EP_DTYPE_F32};
    s.ids[1] = (int32_t)s.shape.experts;
    cr_assert(ep_combine_find_nonfinite(&s.batch, &s.shape, s.row_of, NULL, 0, 1, scratch, &found));
    cr_expect(found.slot == 1);
}
