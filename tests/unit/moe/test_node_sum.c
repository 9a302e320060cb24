/* SPDX-License-Identifier: Apache-2.0 */
/* Sums at nodes and their combine against plain loops over single elements, bit for bit, for any
 * way of spreading a batch's slots over frames. */
#include "moe/node_sum.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "moe/combine.h"
#include "moe/convert.h"
#include "unit/moe/random_batch.h"

#define FRAMES 4

/* ---- the plain loops ---- */

static bool same(float a, float b)
{
    return memcmp(&a, &b, sizeof(a)) == 0 || (isnan(a) && isnan(b));
}

typedef struct sum_case {
    random_batch rb;
    uint32_t per_token;
    uint32_t slots_total;
    uint32_t *frame_of;   /* [slots_total] FRAMES: none */
    uint8_t *expert_rows; /* [slots_total,H] wire type */
    const void **rows;    /* [slots_total] */
    uint8_t partials[FRAMES][16 * 40 * 4];
} sum_case;

static float scale_of(const sum_case *c, uint32_t t, uint32_t k)
{
    return k < c->rb.batch.top_k ? ep_batch_scale(&c->rb.batch, t, k) : 1.0f;
}

/* Element i of the partial sum of token t in a frame. */
static float partial_at(const sum_case *c, uint32_t frame, uint32_t t, uint32_t i)
{
    const ep_batch *b = &c->rb.batch;
    volatile float acc = 0.0f;
    for (uint32_t k = 0; k < c->per_token; k++) {
        uint32_t s = t * c->per_token + k;
        if (c->frame_of[s] == frame) {
            volatile float product =
                scale_of(c, t, k) *
                random_batch_element(c->expert_rows, b->wire_dtype, (size_t)s * b->hidden + i);
            acc = acc + product;
        }
    }
    return random_batch_rounded(acc, b->wire_dtype);
}

/* Element i of the result without special experts. */
static float result_at(const sum_case *c, uint32_t t, uint32_t i)
{
    const ep_batch *b = &c->rb.batch;
    volatile float acc = 0.0f;
    bool done[FRAMES] = {false};
    for (uint32_t k = 0; k < c->per_token; k++) {
        uint32_t frame = c->frame_of[t * c->per_token + k];
        if (frame < FRAMES && !done[frame]) {
            done[frame] = true;
            acc = acc + partial_at(c, frame, t, i);
        }
    }
    if (b->shared_source == EP_SHARED_CALLER && ep_batch_token_active(b, t)) {
        acc = acc + random_batch_element((const char *)b->shared.data +
                                             (int64_t)t * b->shared.stride_bytes,
                                         b->shared.dtype, i);
    }
    return random_batch_rounded(acc, b->out_dtype);
}

/* ---- the case ---- */

static void case_init(sum_case *c, uint64_t seed)
{
    memset(c, 0, sizeof(*c));
    random_batch_init(&c->rb, seed);
    ep_batch *b = &c->rb.batch;
    uint32_t expert;
    b->weight_on = EP_WEIGHT_ON_OUTPUT;
    b->form = b->form == EP_RESULT_UNCOMBINED ? EP_RESULT_COMBINED : b->form;
    b->special = (ep_special_experts){.zero_count = b->special.zero_count + b->special.copy_count +
                                                    b->special.const_count};
    b->node_sum = true;
    c->per_token = ep_batch_slots_per_token(b, &c->rb.shape);
    c->slots_total = b->tokens * c->per_token;
    c->frame_of = random_batch_alloc(&c->rb, c->slots_total * sizeof(uint32_t) + 1);
    c->rows = random_batch_alloc(&c->rb, c->slots_total * sizeof(void *) + 1);
    c->expert_rows = random_batch_alloc(&c->rb, (size_t)c->slots_total * b->hidden * 4 + 4);
    for (uint32_t s = 0; s < c->slots_total; s++) {
        ep_slot_kind kind =
            ep_batch_slot(b, &c->rb.shape, s / c->per_token, s % c->per_token, &expert);
        bool is_needed = kind == EP_SLOT_ROUTED || kind == EP_SLOT_SHARED;
        c->frame_of[s] = is_needed ? random_below(&c->rb.state, FRAMES) : FRAMES;
        for (uint32_t i = 0; i < b->hidden; i++) {
            float value = random_float(&c->rb.state);
            ep_row_narrow(&value, 1, b->wire_dtype,
                          c->expert_rows +
                              ((size_t)s * b->hidden + i) * ep_dtype_bytes(b->wire_dtype));
        }
    }
}

/* A node's part: the slots of one frame, shuffled as they come, and the sums of their rows. */
static void sum_frame(sum_case *c, uint32_t frame)
{
    const ep_batch *b = &c->rb.batch;
    size_t row_bytes = b->hidden * ep_dtype_bytes(b->wire_dtype);
    uint32_t numbers[128];
    uint32_t slot_rows[128][2];
    uint16_t places[128];
    float scales[128];
    uint32_t begins[129];
    uint32_t order[128];
    uint32_t count = 0;
    uint32_t tokens = 0;
    uint32_t row_of_token[16];
    memset(row_of_token, 0xff, sizeof(row_of_token));
    for (uint32_t s = 0; s < c->slots_total; s++) {
        if (c->frame_of[s] == frame) {
            if (count == 0 || numbers[count - 1] / c->per_token != s / c->per_token) {
                row_of_token[s / c->per_token] = tokens++;
            }
            numbers[count++] = s;
        }
    }
    for (uint32_t i = count; i > 1; i--) {
        uint32_t j = random_below(&c->rb.state, i);
        uint32_t number = numbers[i - 1];
        numbers[i - 1] = numbers[j];
        numbers[j] = number;
    }
    static uint8_t rows[128 * 40 * 4];
    static float scratch[2 * 40];
    uint8_t *out = c->partials[frame];
    cr_assert(count <= 128 && tokens <= 16 && b->hidden <= 40);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t t = numbers[i] / c->per_token;
        slot_rows[i][0] = row_of_token[t];
        places[i] = (uint16_t)(numbers[i] % c->per_token);
        scales[i] = scale_of(c, t, places[i]);
        memcpy(rows + i * row_bytes, c->expert_rows + numbers[i] * row_bytes, row_bytes);
    }
    const ep_node_sum_slots slots = {tokens, count, &slot_rows[0][0], 2, places, scales};
    ep_node_sum_order(&slots, begins, order);
    ep_node_sum(&slots, begins, order, rows, b->wire_dtype, b->hidden, scratch, out);
    for (uint32_t t = 0, r = 0; t < b->tokens; t++) {
        if (r < tokens && row_of_token[t] == r) {
            for (uint32_t i = 0; i < b->hidden; i++) {
                float got = random_batch_element(out, b->wire_dtype, r * b->hidden + i);
                float wanted = partial_at(c, frame, t, i);
                cr_assert(same(got, wanted));
            }
            r++;
        }
    }
    cr_assert_eq(ep_partials_place(numbers, count, c->per_token, out, row_bytes, c->rows), tokens);
}

Test(node_sum, sums_and_their_combine_equal_plain_loops)
{
    unsigned covered = 0;
    for (uint64_t seed = 0; seed < 3000; seed++) {
        static sum_case c;
        case_init(&c, seed);
        const ep_batch *b = &c.rb.batch;
        size_t out_row = b->hidden * ep_dtype_bytes(b->out_dtype);
        for (uint32_t f = 0; f < FRAMES; f++) {
            sum_frame(&c, f);
        }
        /* each slot is in one partial sum, or needs none */
        for (uint32_t s = 0; s < c.slots_total; s++) {
            cr_assert_eq(c.rows[s] != NULL, c.frame_of[s] < FRAMES);
            covered += c.rows[s] == ep_row_covered;
        }
        static uint8_t out[16 * 40 * 4];
        float *scratch = aligned_alloc(
            64, (ep_combine_scratch_floats(b->hidden) * sizeof(float) + 63) & ~(size_t)63);
        ep_combine_out place = {.data = out, .token_stride_bytes = (int64_t)out_row};
        ep_combine(b, &c.rb.shape, c.rows, NULL, 0, b->tokens, scratch, &place);
        for (uint32_t t = 0; t < b->tokens; t++) {
            for (uint32_t i = 0; i < b->hidden; i++) {
                float got = random_batch_element(out, b->out_dtype, (size_t)t * b->hidden + i);
                float wanted = result_at(&c, t, i);
                cr_assert(same(got, wanted), "seed %u token %u element %u: %g, %g wanted",
                          (unsigned)seed, t, i, (double)got, (double)wanted);
            }
        }
        free(scratch);
        random_batch_fini(&c.rb);
    }
    cr_assert_gt(covered, 1000u);
}

/* By hand: 1 + 2^-8 + 2^-8 would lose both small parts if each addition were rounded to bf16. */
Test(node_sum, one_sum_rounds_once)
{
    const uint16_t rows[3] = {0x3f80, 0x3b00, 0x3b00}; /* 1, 2^-9, 2^-9 */
    const float scales[3] = {1.0f, 2.0f, 2.0f};
    const uint16_t places[3] = {0, 1, 2};
    const uint32_t of_row[3] = {0, 0, 0};
    uint32_t begins[2];
    uint32_t order[3];
    float scratch[2];
    uint16_t out;
    const ep_node_sum_slots slots = {1, 3, of_row, 1, places, scales};
    ep_node_sum_order(&slots, begins, order);
    ep_node_sum(&slots, begins, order, rows, EP_DTYPE_BF16, 1, scratch, &out);
    cr_assert_eq(out, 0x3f81); /* 1 + 2^-7 */
}

/* A frame may give all its slots to one row, in the worst order: that must not keep the node busy
 * for minutes. */
Test(node_sum, all_slots_of_a_frame_for_one_row, .timeout = 100)
{
    const uint32_t count = 2000000;
    uint32_t *slot_rows = calloc(count, sizeof(*slot_rows));
    uint32_t *order = malloc(count * sizeof(*order));
    uint16_t *places = malloc(count * sizeof(*places));
    uint32_t begins[3];
    cr_assert(slot_rows != NULL && order != NULL && places != NULL);
    for (uint32_t i = 0; i < count; i++) {
        places[i] = (uint16_t)((count - i) / 64);
    }
    const ep_node_sum_slots slots = {.rows_count = 2,
                                     .slots_count = count,
                                     .slot_rows = slot_rows,
                                     .slot_stride = 1,
                                     .places = places};
    ep_node_sum_order(&slots, begins, order);
    cr_assert(begins[0] == 0 && begins[1] == count && begins[2] == count);
    for (uint32_t i = 1; i < count; i++) {
        uint16_t before = places[order[i - 1]], here = places[order[i]];
        cr_assert(before < here || (before == here && order[i - 1] < order[i]), "slot %u", i);
    }
    free(slot_rows);
    free(order);
    free(places);
}
