/* SPDX-License-Identifier: Apache-2.0 */
#include "case_draw.h"

#include <math.h>
#include <string.h>

enum { TOP_K_MAX = 64 };

/* How the elements of one tensor look. */
typedef enum value_kind {
    VALUES_PLAIN,
    VALUES_WIDE,
    VALUES_TINY,
    VALUES_HUGE,
    VALUES_SPECIAL
} value_kind;

static const enum ref_dtype float_dtypes[] = {REF_BF16, REF_F16, REF_F32};

static enum ref_dtype draw_float_dtype(random_source *random)
{
    return float_dtypes[random_below(random, 3)];
}

static value_kind draw_value_kind(random_source *random)
{
    uint32_t n = random_below(random, 20);
    return n < 11   ? VALUES_PLAIN
           : n < 14 ? VALUES_WIDE
           : n < 15 ? VALUES_TINY
           : n < 16 ? VALUES_HUGE
                    : VALUES_SPECIAL;
}

static float draw_special_value(random_source *random)
{
    switch (random_below(random, 8)) {
    case 0:
    case 1:
        return NAN;
    case 2:
        return INFINITY;
    case 3:
        return -INFINITY;
    case 4:
        return -0.0f;
    case 5:
        return 0x1p-149f;
    case 6:
        return 0x1.fffffep+127f;
    default:
        return 0.0f;
    }
}

static float draw_value(random_source *random, value_kind kind)
{
    float value = 2.0f * random_unit(random);
    switch (kind) {
    case VALUES_PLAIN:
        return value;
    case VALUES_WIDE:
        return ldexpf(value, (int)random_below(random, 49) - 24);
    case VALUES_TINY:
        return ldexpf(value, -(int)random_between(random, 110, 140));
    case VALUES_HUGE:
        return ldexpf(value, (int)random_between(random, 60, 126));
    case VALUES_SPECIAL:
        return random_below(random, 60) == 0 ? draw_special_value(random) : value;
    }
    return value;
}

static void *draw_values(layer_case *c, random_source *random, enum ref_dtype dtype,
                         value_kind kind, size_t count)
{
    uint8_t *data = case_alloc(c, count * ref_dtype_bytes(dtype));
    for (size_t i = 0; i < count; i++) {
        ref_store(data, dtype, i, draw_value(random, kind));
    }
    return data;
}

static uint8_t *draw_flags(layer_case *c, random_source *random, size_t count)
{
    static const uint32_t percents[] = {0, 5, 50, 80, 95, 100};
    uint32_t percent = percents[random_below(random, 6)];
    uint8_t *flags = case_alloc(c, count);
    for (size_t i = 0; i < count; i++) {
        flags[i] = random_chance(random, percent);
    }
    return flags;
}

static void draw_shape(layer_case *c, random_source *random)
{
    uint32_t tokens = random_below(random, 100);
    uint32_t slots = random_below(random, 100);
    struct ref_batch *b = &c->batch;
    b->tokens = tokens < 3    ? 0
                : tokens < 15 ? 1
                : tokens < 95 ? random_between(random, 2, 24)
                : tokens < 99 ? random_between(random, 25, 90)
                              : random_between(random, 91, 300);
    b->top_k = slots < 10   ? 1
               : slots < 97 ? random_between(random, 1, 8)
                            : random_between(random, 9, TOP_K_MAX);
    b->tokens = b->top_k > 8 && b->tokens > 24 ? 24 : b->tokens;
    if (c->number >= CASES_MANY_SLOTS) {
        b->tokens = random_between(random, 200, 700);
        b->top_k = random_between(random, 4, 8);
    }
}

static void draw_choices(layer_case *c, random_source *random)
{
    struct ref_batch *b = &c->batch;
    uint32_t form = random_below(random, 10);
    uint32_t source = random_below(random, 10);
    b->form = form < 6 ? REF_COMBINED : form < 8 ? REF_PARTIAL : REF_UNCOMBINED;
    b->weight_on_input = random_chance(random, 25);
    b->nan_policy = (enum ref_nan)random_below(random, 4);
    b->allow_duplicates = random_chance(random, 30);
    b->wire_dtype = random_chance(random, 40) ? REF_BF16 : draw_float_dtype(random);
    b->out_dtype = draw_float_dtype(random);
    b->no_service_shared = source >= 6;
    if (source >= 8) {
        b->caller_shared_dtype = draw_float_dtype(random);
        b->caller_shared = draw_values(c, random, b->caller_shared_dtype, draw_value_kind(random),
                                       b->tokens * c->layer.hidden);
    }
    if (random_chance(random, 10)) {
        b->x_abs_max =
            random_chance(random, 50) ? 1.9f : ldexpf(1.0f, (int)random_below(random, 30));
    }
    /* Without slots there must be something else to compute. */
    if (!b->no_service_shared && c->layer.shared_count > 0 && random_chance(random, 3)) {
        b->top_k = 0;
    }
}

static void draw_i8_rows(layer_case *c, random_source *random, value_kind kind)
{
    struct ref_batch *b = &c->batch;
    size_t count = b->tokens * c->layer.hidden;
    uint8_t *q = case_alloc(c, count);
    float *scales = (float *)(void *)case_alloc(c, b->tokens * sizeof(*scales));
    for (size_t i = 0; i < count; i++) {
        q[i] = (uint8_t)random_below(random, 256);
    }
    for (size_t t = 0; t < b->tokens; t++) {
        bool special = kind == VALUES_SPECIAL && random_chance(random, 30);
        scales[t] = special ? draw_special_value(random)
                            : draw_value(random, kind == VALUES_HUGE ? VALUES_WIDE : kind) / 127.0f;
    }
    b->x = q;
    b->x_dtype = REF_I8;
    b->x_scales = scales;
}

static void draw_x(layer_case *c, random_source *random)
{
    struct ref_batch *b = &c->batch;
    value_kind kind = draw_value_kind(random);
    if (random_chance(random, 20)) {
        draw_i8_rows(c, random, kind);
        return;
    }
    b->x_dtype = draw_float_dtype(random);
    b->x = draw_values(c, random, b->x_dtype, kind, b->tokens * c->layer.hidden);
}

/* Rows of 8 bits for the way to the nodes and back. x in i8 is quantised already. */
static void draw_quant(layer_case *c, random_source *random)
{
    struct ref_batch *b = &c->batch;
    const struct ref_layer *l = &c->layer;
    uint32_t dispatch = random_below(random, 10);
    b->combine_int8 = random_chance(random, 30);
    if (b->x_dtype == REF_I8 || dispatch >= 5) {
        return;
    }
    b->dispatch = dispatch < 3 ? REF_DISPATCH_INT8 : REF_DISPATCH_FP8;
    if (dispatch == 0) {
        size_t count = (l->shared_count + l->expert_count) * l->hidden;
        float *smooth = (float *)(void *)case_alloc(c, count * sizeof(*smooth));
        value_kind kind = random_chance(random, 80) ? VALUES_PLAIN : draw_value_kind(random);
        for (size_t i = 0; i < count; i++) {
            smooth[i] = draw_value(random, kind);
        }
        b->smooth = smooth;
    }
}

static const float *widen(layer_case *c, const void *data, enum ref_dtype dtype, size_t count)
{
    float *wide = (float *)(void *)case_alloc(c, count * sizeof(*wide));
    for (size_t i = 0; i < count; i++) {
        wide[i] = ref_load(data, dtype, i);
    }
    return wide;
}

/* The tables are of x's type; beside i8 rows any float type serves. */
static void draw_special_experts(layer_case *c, random_source *random, case_constants *constants)
{
    struct ref_layer *l = &c->layer;
    if (!random_chance(random, 35)) {
        return;
    }
    l->zero_count = random_below(random, 4);
    l->copy_count = random_below(random, 4);
    l->constant_count = random_below(random, 4);
    l->constant_linear = random_chance(random, 50);
    if (l->constant_count == 0) {
        return;
    }
    size_t count = l->constant_count * l->hidden;
    value_kind kind = draw_value_kind(random);
    constants->dtype = c->batch.x_dtype == REF_I8 ? draw_float_dtype(random) : c->batch.x_dtype;
    constants->alpha1 = draw_values(c, random, constants->dtype, kind, count);
    constants->alpha2 = draw_values(c, random, constants->dtype, kind, count);
    constants->v = draw_values(c, random, constants->dtype, kind, count);
    l->alpha1 = widen(c, constants->alpha1, constants->dtype, count);
    l->alpha2 = widen(c, constants->alpha2, constants->dtype, count);
    l->constant = widen(c, constants->v, constants->dtype, count);
}

/* How a case fills its slots, in percent; the rest is routed. */
typedef struct id_mix {
    uint32_t sentinel;
    uint32_t special;
    uint32_t hot; /* routed ids that fall on the first two experts */
} id_mix;

static int64_t draw_routed(const layer_case *c, random_source *random, const id_mix *mix)
{
    uint32_t experts = (uint32_t)c->layer.expert_count;
    uint32_t range = experts > 2 && random_chance(random, mix->hot) ? 2 : experts;
    return random_below(random, range);
}

static bool is_taken(const int64_t *row, size_t count, int64_t id)
{
    for (size_t k = 0; k < count; k++) {
        if (row[k] == id) {
            return true;
        }
    }
    return false;
}

static int64_t draw_id(const layer_case *c, random_source *random, const id_mix *mix,
                       const int64_t *row, size_t before)
{
    const struct ref_layer *l = &c->layer;
    uint32_t special = (uint32_t)(l->zero_count + l->copy_count + l->constant_count);
    int64_t total = (int64_t)l->expert_count + special;
    int64_t sentinel = random_chance(random, 50) ? -1 : total;
    if (random_chance(random, mix->sentinel)) {
        return sentinel;
    }
    if (special > 0 && random_chance(random, mix->special)) {
        return (int64_t)l->expert_count + random_below(random, special);
    }
    int64_t id = draw_routed(c, random, mix);
    if (c->batch.allow_duplicates) {
        return id;
    }
    for (size_t tries = 0; tries < l->expert_count; tries++) {
        if (!is_taken(row, before, id)) {
            return id;
        }
        id = (id + 1) % (int64_t)l->expert_count;
    }
    return sentinel; /* more slots than experts */
}

/* A few batches carry one id that may be wrong; whether it is, the oracle decides: it may lie in a
 * masked slot. */
static void spoil_an_id(const layer_case *c, random_source *random, int64_t *ids)
{
    static const int64_t far[] = {-2, INT32_MIN, INT32_MAX, 1 << 20};
    const struct ref_batch *b = &c->batch;
    int64_t total = (int64_t)(c->layer.expert_count + c->layer.zero_count + c->layer.copy_count +
                              c->layer.constant_count);
    size_t token = random_below(random, (uint32_t)b->tokens);
    size_t slot = random_below(random, (uint32_t)b->top_k);
    int64_t *at = &ids[token * b->top_k + slot];
    if (random_chance(random, 50)) {
        *at = random_chance(random, 40) ? total + 1 : far[random_below(random, 4)];
        *at = b->ids_dtype == REF_I64 && random_chance(random, 20) ? INT64_MIN + (*at == -2) : *at;
    } else {
        *at = ids[token * b->top_k + random_below(random, (uint32_t)b->top_k)];
    }
}

static void draw_ids(layer_case *c, random_source *random)
{
    static const id_mix mixes[] = {{0, 0, 0},  {0, 0, 0},   {10, 20, 0}, {30, 50, 0},
                                   {0, 0, 70}, {90, 30, 0}, {100, 0, 0}};
    struct ref_batch *b = &c->batch;
    const id_mix *mix = &mixes[random_below(random, sizeof(mixes) / sizeof(mixes[0]))];
    size_t slots = b->tokens * b->top_k;
    int64_t *ids = (int64_t *)(void *)case_alloc(c, slots * sizeof(*ids));
    b->ids_dtype = random_chance(random, 50) ? REF_I32 : REF_I64;
    b->ids = ids;
    for (size_t t = 0; t < b->tokens; t++) {
        int64_t *row = ids + t * b->top_k;
        for (size_t k = 0; k < b->top_k; k++) {
            row[k] = draw_id(c, random, mix, row, k);
        }
    }
    if (slots > 0 && random_chance(random, 8)) {
        spoil_an_id(c, random, ids);
    }
    if (b->ids_dtype == REF_I32) {
        int32_t *narrow = (int32_t *)(void *)case_alloc(c, slots * sizeof(*narrow));
        for (size_t i = 0; i < slots; i++) {
            narrow[i] = (int32_t)ids[i];
        }
        b->ids = narrow;
    }
}

/* Router weights are positive and small; others are legal. */
static void draw_scales(layer_case *c, random_source *random)
{
    struct ref_batch *b = &c->batch;
    size_t slots = b->tokens * b->top_k;
    bool any = random_chance(random, 20);
    value_kind kind = draw_value_kind(random);
    b->scales_dtype = random_chance(random, 50) ? REF_F32 : REF_BF16;
    uint8_t *scales = case_alloc(c, slots * ref_dtype_bytes(b->scales_dtype));
    for (size_t i = 0; i < slots; i++) {
        ref_store(scales, b->scales_dtype, i,
                  any ? draw_value(random, kind) : fabsf(random_unit(random)));
    }
    b->scales = scales;
}

static void draw_masks(layer_case *c, random_source *random)
{
    struct ref_batch *b = &c->batch;
    size_t slots = b->tokens * b->top_k;
    uint32_t mask = random_below(random, 4);
    if (mask == 0) {
        b->mask_tokens = draw_flags(c, random, b->tokens);
    } else if (mask == 1 && b->top_k > 0) {
        b->mask_slots = draw_flags(c, random, slots);
    }
    if (b->form == REF_PARTIAL) {
        b->partial_slots = draw_flags(c, random, slots);
    }
}

void case_draw(layer_case *c, random_source *random, case_constants *out_constants)
{
    draw_shape(c, random);
    draw_choices(c, random);
    draw_x(c, random);
    draw_quant(c, random);
    draw_special_experts(c, random, out_constants);
    draw_ids(c, random);
    draw_scales(c, random);
    draw_masks(c, random);
}
