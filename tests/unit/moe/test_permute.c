/* SPDX-License-Identifier: Apache-2.0 */
/* Permute and unpermute against plain loops written from the header's text: random shapes, masks,
 * sentinels, ranges, capacities. */
#include "expertd/permute.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "base/numeric.h"
#include "moe/convert.h"
#include "moe/row_stream.h"
#include "support/expect.h"
#include "unit/moe/random_batch.h"

#define SLOTS_MAX 512
#define FILL 0x5a

typedef struct {
    ep_permute_config config;
    uint32_t end;
    int32_t ids[SLOTS_MAX];
    uint8_t mask[SLOTS_MAX];
    float probs[SLOTS_MAX];
    float scales[64];
    uint8_t *x;
    ep_permute_in in;
} permute_case;

static const ep_dtype types[] = {EP_DTYPE_F32, EP_DTYPE_BF16, EP_DTYPE_F16, EP_DTYPE_I8};

static void random_case(permute_case *c, uint64_t *state)
{
    memset(c, 0, sizeof(*c));
    ep_permute_config_init(&c->config);
    ep_permute_config *p = &c->config;
    p->tokens = random_below(state, 20);
    p->top_k = 1 + random_below(state, 6);
    p->hidden = 1 + random_below(state, 70);
    p->experts = 1 + random_below(state, 9);
    p->dtype = types[random_below(state, 4)];
    p->counts = random_below(state, 2) ? EP_PERMUTE_CUMULATIVE : EP_PERMUTE_COUNTS;
    c->end = p->experts;
    if (random_below(state, 2)) {
        p->expert_begin = random_below(state, p->experts);
        c->end = p->expert_end =
            p->expert_begin + 1 + random_below(state, p->experts - p->expert_begin);
    }
    if (random_below(state, 2)) {
        p->drop = EP_PERMUTE_DROP_PAD;
        p->capacity = 1 + random_below(state, 12);
    } else if (random_below(state, 2) && p->tokens > 0) {
        p->row_begin = random_below(state, p->tokens * p->top_k);
        p->row_end = p->row_begin + random_below(state, 2 * p->tokens);
        p->row_end = p->row_end == 0 ? 1 : p->row_end;
    }
    size_t row = p->hidden * ep_dtype_bytes(p->dtype);
    c->x = malloc(p->tokens * row + 1);
    for (size_t i = 0; i < p->tokens * row; i++) {
        c->x[i] = (uint8_t)random_below(state, 256);
    }
    for (uint32_t i = 0; i < p->tokens * p->top_k; i++) {
        c->ids[i] = (int32_t)random_below(state, p->experts + 2) - 1;
        c->mask[i] = random_below(state, 3) != 0;
        c->probs[i] = random_float(state);
    }
    for (uint32_t t = 0; t < p->tokens; t++) {
        c->scales[t] = random_float(state);
    }
    c->in = (ep_permute_in){.struct_bytes = sizeof(c->in),
                            .x = c->x,
                            .x_scales = c->scales,
                            .ids = c->ids,
                            .probs = c->probs,
                            .mask = random_below(state, 2) ? c->mask : NULL};
}

/* For each row the slot it must come from, -1 padding; by looking through all slots for each
 * expert. */
static uint32_t oracle(const permute_case *c, int32_t *row_slots, int32_t *slot_rows,
                       int64_t *counts, int64_t *before)
{
    const ep_permute_config *p = &c->config;
    uint32_t slots = p->tokens * p->top_k;
    uint32_t last = p->row_end == 0 || p->row_end > slots ? slots : p->row_end;
    uint32_t position = 0, rows = 0;
    int64_t sum = 0, sum_before = 0;
    for (uint32_t s = 0; s < slots; s++) {
        slot_rows[s] = -1;
    }
    for (uint32_t e = p->expert_begin; e < c->end; e++) {
        uint32_t here = 0, kept = 0;
        for (uint32_t s = 0; s < slots; s++) {
            if (c->ids[s] != (int32_t)e || (c->in.mask != NULL && !c->mask[s])) {
                continue;
            }
            bool keep = p->drop == EP_PERMUTE_DROP_PAD
                            ? here < p->capacity
                            : position >= p->row_begin && position < last;
            if (keep) {
                slot_rows[s] = (int32_t)rows;
                row_slots[rows++] = (int32_t)s;
                kept++;
            }
            here++;
            position++;
        }
        for (uint32_t n = kept; p->drop == EP_PERMUTE_DROP_PAD && n < p->capacity; n++) {
            row_slots[rows++] = -1;
        }
        sum += kept;
        sum_before += here;
        counts[e - p->expert_begin] = p->counts == EP_PERMUTE_CUMULATIVE ? sum : kept;
        before[e - p->expert_begin] = p->counts == EP_PERMUTE_CUMULATIVE ? sum_before : here;
    }
    return rows;
}

static bool all_fill(const void *bytes, size_t count)
{
    const uint8_t *b = bytes;
    for (size_t i = 0; i < count; i++) {
        if (b[i] != FILL) {
            return false;
        }
    }
    return true;
}

Test(permute, equals_the_plain_loops)
{
    uint64_t state = 11;
    unsigned dropped = 0, padded = 0;
    for (int round = 0; round < 20000; round++) {
        permute_case c;
        int32_t want_rows[SLOTS_MAX], want_slots[SLOTS_MAX], row_slots[SLOTS_MAX + 1],
            slot_rows[SLOTS_MAX];
        int64_t want_counts[16], want_before[16], counts[16], before[16];
        float probs[SLOTS_MAX], scales[SLOTS_MAX];
        uint64_t workspace[16];
        ep_error error;
        random_case(&c, &state);
        size_t row = c.config.hidden * ep_dtype_bytes(c.config.dtype);
        uint64_t rows_max = ep_permute_rows_max(&c.config);
        uint8_t *rows = malloc(rows_max * row + 64);
        memset(rows, FILL, rows_max * row + 64);
        memset(row_slots, FILL, sizeof(row_slots));
        uint32_t rows_wanted = oracle(&c, want_rows, want_slots, want_counts, want_before);
        ep_permute_out out = {.struct_bytes = sizeof(out),
                              .rows = rows,
                              .row_scales = scales,
                              .row_probs = probs,
                              .slot_rows = slot_rows,
                              .row_slots = row_slots,
                              .counts = counts,
                              .counts_before = before};
        size_t bytes = ep_permute_workspace_bytes(&c.config);
        cr_assert_leq(bytes, sizeof(workspace));
        ASSERT_OK(ep_moe_permute(&c.config, &c.in, workspace, bytes, &out, &error), error);
        cr_assert_eq(out.rows_count, rows_wanted);
        cr_assert_leq(rows_wanted, rows_max);
        size_t experts = c.end - c.config.expert_begin;
        cr_assert_eq(memcmp(counts, want_counts, experts * sizeof(*counts)), 0);
        cr_assert_eq(memcmp(before, want_before, experts * sizeof(*before)), 0);
        cr_assert_eq(
            memcmp(slot_rows, want_slots, c.config.tokens * c.config.top_k * sizeof(*slot_rows)),
            0);
        cr_assert_eq(memcmp(row_slots, want_rows, rows_wanted * sizeof(*row_slots)), 0);
        for (uint32_t r = 0; r < rows_wanted; r++) {
            int32_t s = want_rows[r];
            static const uint8_t zero[70 * 4];
            const uint8_t *from = s < 0 ? zero : c.x + (uint32_t)s / c.config.top_k * row;
            cr_assert_eq(memcmp(rows + r * row, from, row), 0);
            cr_assert_eq(probs[r], s < 0 ? 0.0f : c.probs[s]);
            cr_assert_eq(scales[r], s < 0 ? 0.0f : c.scales[(uint32_t)s / c.config.top_k]);
            padded += s < 0;
        }
        cr_assert(all_fill(rows + rows_wanted * row, rows_max * row + 64 - rows_wanted * row),
                  "written behind the rows");
        cr_assert(all_fill(&row_slots[rows_wanted], sizeof(row_slots[0])));
        for (uint32_t s = 0; s < c.config.tokens * c.config.top_k; s++) {
            dropped += slot_rows[s] < 0;
        }
        free(rows);
        free(c.x);
    }
    cr_assert(dropped > 10000 && padded > 10000);
}

Test(permute, large_outputs_take_the_streaming_way_with_the_same_bytes)
{
    enum { T = 600, K = 4, H = 2048, E = 5 };
    uint64_t state = 3;
    uint16_t *x = malloc(T * H * 2), *rows = aligned_alloc(64, (size_t)T * K * H * 2);
    int32_t ids[T * K], row_slots[T * K];
    uint64_t workspace[E];
    for (size_t i = 0; i < T * H; i++) {
        x[i] = (uint16_t)random_below(&state, 65536);
    }
    for (size_t i = 0; i < T * K; i++) {
        ids[i] = (int32_t)random_below(&state, E);
    }
    ep_permute_config config;
    ep_permute_config_init(&config);
    config.tokens = T;
    config.top_k = K;
    config.hidden = H;
    config.experts = E;
    ep_permute_in in = {.struct_bytes = sizeof(in), .x = x, .ids = ids};
    ep_permute_out out = {.struct_bytes = sizeof(out), .rows = rows, .row_slots = row_slots};
    cr_assert_eq(ep_moe_permute(&config, &in, workspace, sizeof(workspace), &out, NULL), EP_OK);
    cr_assert(EP_ROW_STREAM_BYTES_MIN == UINT64_MAX ||
                  out.rows_count * H * 2 >= EP_ROW_STREAM_BYTES_MIN,
              "not large where there is a streaming way");
    for (size_t r = 0; r < T * K; r++) {
        cr_assert_eq(memcmp(rows + r * H, x + (size_t)row_slots[r] / K * H, H * 2), 0);
    }
    free(x);
    free(rows);
}

static float value_at(const void *rows, ep_dtype dtype, size_t i)
{
    float value;
    ep_row_widen((const uint8_t *)rows + i * ep_dtype_bytes(dtype), dtype, 1, &value);
    return value;
}

static void *random_values(uint64_t *state, ep_dtype dtype, size_t count)
{
    uint8_t *data = malloc(count * 4 + 4);
    for (size_t i = 0; i < count; i++) {
        float value = random_float(state);
        if (dtype == EP_DTYPE_I8) {
            ((int8_t *)data)[i] = (int8_t)((int)random_below(state, 255) - 127);
        } else {
            ep_row_narrow(&value, 1, dtype, data + i * ep_dtype_bytes(dtype));
        }
    }
    return data;
}

/* One element, from the header's formula. */
static float oracle_element(const ep_unpermute_args *a, uint32_t t, uint32_t h)
{
    ep_dtype other = a->dtype == EP_DTYPE_I8 ? EP_DTYPE_F32 : a->dtype;
    float sum = 0.0f;
    if (a->x1 != NULL) {
        sum = sum + value_at(a->x1, other, (size_t)t * a->hidden + h);
    }
    if (a->x2 != NULL) {
        sum = sum + value_at(a->x2, other, (size_t)t * a->hidden + h);
    }
    for (uint32_t k = 0; k < a->top_k; k++) {
        uint32_t by_token = t * a->top_k + k;
        int32_t row = a->slot_rows[a->order == EP_PERMUTE_BY_TOKEN ? by_token : t + k * a->tokens];
        float value = 0.0f;
        bool adds = row >= 0;
        if (row >= 0 && a->dtype == EP_DTYPE_I8) {
            value =
                (float)((const int8_t *)a->rows)[(size_t)row * a->hidden + h] * a->row_scales[row];
        } else if (row >= 0) {
            value = value_at(a->rows, a->dtype, (size_t)row * a->hidden + h);
        }
        if (a->bias != NULL) {
            adds = a->ids[by_token] >= 0 && a->ids[by_token] < (int32_t)a->experts;
            value = adds
                        ? value + value_at(a->bias, other, (size_t)a->ids[by_token] * a->hidden + h)
                        : 0.0f;
        }
        if (adds) {
            float product = (a->weights != NULL ? a->weights[by_token] : 1.0f) * value;
            sum = sum + product;
        }
    }
    return sum;
}

Test(unpermute, equals_the_formula_bit_for_bit)
{
    uint64_t state = 5;
    for (int round = 0; round < 5000; round++) {
        ep_unpermute_args a;
        int32_t slot_rows[128], ids[128];
        float weights[128], scales[64];
        float workspace[3 * 80];
        uint8_t out[10 * 40 * 4];
        ep_error error;
        ep_unpermute_args_init(&a);
        a.tokens = random_below(&state, 10);
        a.top_k = 1 + random_below(&state, 6);
        a.hidden = 1 + random_below(&state, 40);
        a.experts = 1 + random_below(&state, 6);
        a.rows_count = 1 + random_below(&state, 30);
        a.order = random_below(&state, 2) ? EP_PERMUTE_BY_CHOICE : EP_PERMUTE_BY_TOKEN;
        a.dtype = types[random_below(&state, 4)];
        a.out_dtype = types[random_below(&state, 3)];
        ep_dtype other = a.dtype == EP_DTYPE_I8 ? EP_DTYPE_F32 : a.dtype;
        void *data[] = {random_values(&state, a.dtype, a.rows_count * a.hidden),
                        random_values(&state, other, a.tokens * a.hidden),
                        random_values(&state, other, a.tokens * a.hidden),
                        random_values(&state, other, a.experts * a.hidden)};
        for (uint32_t i = 0; i < 128; i++) {
            slot_rows[i] = (int32_t)random_below(&state, (uint32_t)a.rows_count + 1) - 1;
            ids[i] = (int32_t)random_below(&state, a.experts + 2) - 1;
            weights[i] = random_float(&state);
        }
        for (uint32_t i = 0; i < 64; i++) {
            scales[i] = random_float(&state);
        }
        a.rows = data[0];
        a.row_scales = scales;
        a.slot_rows = slot_rows;
        a.ids = ids;
        a.x1 = random_below(&state, 2) ? data[1] : NULL;
        a.x2 = random_below(&state, 2) ? data[2] : NULL;
        a.bias = random_below(&state, 2) ? data[3] : NULL;
        a.weights = random_below(&state, 2) ? weights : NULL;
        a.out = out;
        size_t bytes = ep_unpermute_workspace_bytes(&a);
        cr_assert_leq(bytes, sizeof(workspace));
        ASSERT_OK(ep_moe_unpermute(&a, workspace, bytes, &error), error);
        for (uint32_t t = 0; t < a.tokens; t++) {
            for (uint32_t h = 0; h < a.hidden; h++) {
                uint8_t wanted[4];
                float value = oracle_element(&a, t, h);
                size_t element = ep_dtype_bytes(a.out_dtype);
                ep_row_narrow(&value, 1, a.out_dtype, wanted);
                cr_assert_eq(memcmp(wanted, out + ((size_t)t * a.hidden + h) * element, element),
                             0);
            }
        }
        for (size_t i = 0; i < 4; i++) {
            free(data[i]);
        }
    }
}

Test(unpermute, undoes_permute)
{
    uint64_t state = 9;
    for (int round = 0; round < 2000; round++) {
        permute_case c;
        random_case(&c, &state);
        int32_t slot_rows[SLOTS_MAX];
        uint64_t workspace[64];
        float weights[SLOTS_MAX];
        c.config.dtype = EP_DTYPE_I8;
        c.config.drop = EP_PERMUTE_DROPLESS;
        size_t row = c.config.hidden;
        uint8_t *rows = malloc(ep_permute_rows_max(&c.config) * row + 1);
        float *row_scales = malloc((ep_permute_rows_max(&c.config) + 1) * sizeof(float));
        float *y = malloc((c.config.tokens * row + 1) * sizeof(float));
        ep_permute_out out = {.struct_bytes = sizeof(out),
                              .rows = rows,
                              .row_scales = row_scales,
                              .slot_rows = slot_rows};
        cr_assert_eq(ep_moe_permute(&c.config, &c.in, workspace, sizeof(workspace), &out, NULL),
                     EP_OK);
        for (uint32_t t = 0; t < c.config.tokens; t++) { /* all weight on one slot that has a row */
            bool given = false;
            for (uint32_t k = 0; k < c.config.top_k; k++) {
                uint32_t s = t * c.config.top_k + k;
                weights[s] = !given && slot_rows[s] >= 0;
                given = given || slot_rows[s] >= 0;
            }
        }
        ep_unpermute_args a;
        ep_unpermute_args_init(&a);
        a.tokens = c.config.tokens;
        a.top_k = c.config.top_k;
        a.hidden = c.config.hidden;
        a.rows_count = out.rows_count;
        a.dtype = EP_DTYPE_I8;
        a.out_dtype = EP_DTYPE_F32;
        a.rows = rows;
        a.row_scales = row_scales;
        a.slot_rows = slot_rows;
        a.weights = weights;
        a.out = y;
        float scratch[3 * 80];
        cr_assert_eq(ep_moe_unpermute(&a, scratch, sizeof(scratch), NULL), EP_OK);
        for (uint32_t t = 0; t < a.tokens; t++) {
            bool has = false;
            for (uint32_t k = 0; k < a.top_k; k++) {
                has = has || slot_rows[t * a.top_k + k] >= 0;
            }
            for (uint32_t h = 0; h < a.hidden; h++) {
                float wanted = has ? (float)(int8_t)c.x[t * row + h] * c.scales[t] : 0.0f;
                cr_assert_eq(y[t * row + h], wanted);
            }
        }
        free(rows);
        free(row_scales);
        free(y);
        free(c.x);
    }
}

Test(permute, names_what_is_wrong_and_writes_nothing)
{
    int32_t ids[4] = {0, 1, 7, 2};
    uint16_t x[2 * 4] = {0};
    int32_t slot_rows[4] = {9, 9, 9, 9};
    int64_t counts[3] = {9, 9, 9};
    uint64_t workspace[3];
    ep_error error;
    ep_permute_config good, c;
    ep_permute_config_init(&good);
    good.tokens = 2;
    good.top_k = 2;
    good.hidden = 4;
    good.experts = 3;
    ep_permute_in in = {.struct_bytes = sizeof(in), .x = x, .ids = ids};
    ep_permute_out out = {.struct_bytes = sizeof(out), .slot_rows = slot_rows, .counts = counts};
#define REFUSED(change, wanted)                                                                    \
    c = good;                                                                                      \
    change;                                                                                        \
    cr_assert_eq(ep_moe_permute(&c, &in, workspace, sizeof(workspace), &out, &error),              \
                 EP_ERR_INVALID_ARGUMENT, wanted);                                                 \
    cr_assert_str_eq(error.text, wanted)
    REFUSED((void)0, "ids: token 1, choice 0 is 7: allowed -1..3");
    ids[2] = -2;
    REFUSED((void)0, "ids: token 1, choice 0 is -2: allowed -1..3");
    ids[2] = 3;
    REFUSED(c.struct_bytes = 1, "struct_bytes of the configuration is 1: allowed is its sizeof, 52 "
                                "in this libexpertd, 20 to 16384 in others");
    REFUSED(c.tokens = 65537, "tokens is 65537: allowed 0..65536");
    REFUSED(c.top_k = 0, "top_k is 0: allowed 1..64");
    REFUSED(c.hidden = 0, "hidden is 0: allowed 1..65536");
    REFUSED(c.experts = 0, "experts is 0: allowed 1..65535");
    REFUSED(c.expert_end = 4, "expert_end is 4: allowed 1..3");
    REFUSED(c.expert_begin = 3, "expert_begin is 3: allowed 0..2");
    REFUSED(c.row_begin = 5, "row_begin is 5: allowed 0..4");
    REFUSED(c.drop = EP_PERMUTE_DROP_PAD, "capacity is 0: allowed 1..65536");
    REFUSED(c.dtype = EP_DTYPE_I32, "dtype is i32 (6): allowed bf16, f16, f32, i8");
    out.row_probs = (float *)workspace;
    REFUSED((void)0, "probs is NULL, and what it gives is asked for");
    out.row_probs = NULL;
#undef REFUSED
    cr_assert_eq(ep_moe_permute(&good, &in, workspace, 23, &out, &error), EP_ERR_INVALID_ARGUMENT);
    cr_assert_str_eq(error.text,
                     "workspace has 23 bytes: 24 are needed (8 per expert of the range)");
    cr_assert(slot_rows[0] == 9 && counts[0] == 9, "written on failure");
    cr_assert_eq(ep_moe_permute(&good, &in, workspace, 24, &out, &error), EP_OK);
    cr_assert(slot_rows[2] == -1 && counts[2] == 1, "E is a sentinel");

    uint16_t y[2 * 4];
    float scratch[48];
    ep_unpermute_args a;
    ep_unpermute_args_init(&a);
    a.tokens = 2;
    a.top_k = 2;
    a.hidden = 4;
    a.rows = x;
    a.rows_count = 2;
    a.slot_rows = slot_rows;
    a.out = y;
    slot_rows[1] = 2;
    slot_rows[3] = 0;
    cr_assert_eq(ep_moe_unpermute(&a, scratch, sizeof(scratch), &error), EP_ERR_INVALID_ARGUMENT);
    cr_assert_str_eq(error.text, "slot_rows[1] is 2: there are 2 rows");
    slot_rows[1] = 1;
    cr_assert_eq(ep_moe_unpermute(&a, scratch, 191, &error), EP_ERR_INVALID_ARGUMENT);
    cr_assert_str_eq(error.text, "workspace has 191 bytes: 192 are needed (12 per element of "
                                 "hidden, rounded up to 16 elements)");
    cr_assert_eq(ep_moe_unpermute(&a, scratch, sizeof(scratch), &error), EP_OK);
}
