/* SPDX-License-Identifier: Apache-2.0 */
#include "gateway_draw.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/numeric.h"
#include "base/random.h"
#include "moe/convert.h"

enum { WILD_EVERY = 16 }; /* such calls are not mended: most are refused */

static uint64_t state;

static uint32_t below(uint32_t limit)
{
    return (uint32_t)(ep_splitmix64(&state) % limit);
}

static bool chance(uint32_t percent)
{
    return below(100) < percent;
}

static float draw(void)
{
    return (float)(ep_splitmix64(&state) >> 40) * 0x1p-23f - 1.0f;
}

static ep_dtype draw_float_type(void)
{
    return (ep_dtype)(EP_DTYPE_BF16 + below(3));
}

static void fill_rows(uint8_t *out, ep_dtype dtype, uint32_t rows)
{
    float row[GATEWAY_HIDDEN];
    for (uint32_t r = 0; r < rows; r++) {
        for (uint32_t h = 0; h < GATEWAY_HIDDEN; h++) {
            row[h] = draw();
        }
        uint8_t *to = out + (size_t)r * GATEWAY_HIDDEN * ep_dtype_bytes(dtype);
        if (dtype != EP_DTYPE_I8) {
            ep_row_narrow(row, GATEWAY_HIDDEN, dtype, to);
        }
        for (uint32_t h = 0; dtype == EP_DTYPE_I8 && h < GATEWAY_HIDDEN; h++) {
            to[h] = (uint8_t)(int8_t)(row[h] * 127.0f);
        }
    }
}

static void fill_flags(uint8_t *out, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        out[i] = chance(75);
    }
}

/* ---- numbers, by the tables ---- */

static uint32_t words_count(const ep_parameter *row)
{
    uint32_t count = 1;
    for (const char *c = row->words; *c != '\0'; c++) {
        count += *c == '|';
    }
    return count;
}

static void draw_number(const ep_parameter *row, uint8_t *at)
{
    static const float reals[] = {0.5f, 1.0f, 2.5f, 1e6f};
    const uint32_t span = row->most < DRAW_SPECIAL_MAX ? row->most : DRAW_SPECIAL_MAX;
    uint32_t number = row->least + below(span - row->least + 1);
    const uint64_t wide = 1 + ep_splitmix64(&state);
    const float real = reals[below(EP_ARRAY_COUNT(reals))];
    if (row->words != NULL) {
        number = below(words_count(row));
        number = row->numbers != NULL ? row->numbers[number] : number;
    }
    switch (row->kind) {
    case EP_PARAMETER_U32:
        memcpy(at, &number, sizeof(number));
        break;
    case EP_PARAMETER_U64:
        memcpy(at, &wide, sizeof(wide));
        break;
    case EP_PARAMETER_F32:
    case EP_PARAMETER_F32_POSITIVE:
        memcpy(at, &real, sizeof(real));
        break;
    case EP_PARAMETER_FLAG:
        *(bool *)at = true;
        break;
    }
}

static void draw_numbers(const ep_parameters *set, uint32_t percent, void *base)
{
    for (size_t i = 0; i < set->count; i++) {
        if (chance(percent)) {
            draw_number(&set->rows[i], (uint8_t *)base + set->rows[i].at);
        }
    }
}

/* Makes of most draws a call that is allowed. */
static void mend(ep_moe_args *args)
{
    args->x_abs_max = args->x_abs_max > 0.0f && chance(80) ? 1e6f : args->x_abs_max;
    args->step_group_size = args->step_group == 0 ? 0 : 1; /* one rank, or it would wait */
    /* With sums the bits tell who summed, which neither a way chosen by times nor hierarchy while
     * nodes still learn of each other fixes. */
    if (args->combine_at == EP_MOE_COMBINE_NODE_SUM) {
        args->comm_alg =
            args->comm_alg == EP_MOE_COMM_DEFAULT ? EP_MOE_COMM_DEFAULT : EP_MOE_COMM_FULLMESH;
        args->result = args->result == EP_MOE_UNCOMBINED ? EP_MOE_COMBINED : args->result;
        args->weight_on = EP_MOE_WEIGHT_ON_OUTPUT;
        args->rows_nan_policy = EP_MOE_NAN_PASS;
    }
}

/* ---- tensors ---- */

static void draw_slots(draw_call *c)
{
    const ep_dtype id_type = chance(50) ? EP_DTYPE_I32 : EP_DTYPE_I64;
    const ep_dtype scale_type = chance(50) ? EP_DTYPE_F32 : EP_DTYPE_BF16;
    const uint32_t total =
        GATEWAY_EXPERTS + c->args.zero_experts + c->args.copy_experts + c->args.const_experts;
    for (uint32_t t = 0; t < c->tokens; t++) {
        const uint32_t first = below(total);
        for (uint32_t k = 0; k < c->top_k; k++) {
            const uint32_t i = t * c->top_k + k;
            /* -1 and the total are inactive */
            const int64_t id = chance(4)   ? -1
                               : chance(4) ? (int64_t)total
                                           : (int64_t)((first + k) % total);
            const int32_t narrow = (int32_t)id;
            const float scale = draw();
            const uint16_t half = ep_f32_to_bf16(scale);
            memcpy(c->ids + i * ep_dtype_bytes(id_type),
                   id_type == EP_DTYPE_I64 ? (const void *)&id : &narrow, ep_dtype_bytes(id_type));
            memcpy(c->scales + i * ep_dtype_bytes(scale_type),
                   scale_type == EP_DTYPE_F32 ? (const void *)&scale : &half,
                   ep_dtype_bytes(scale_type));
        }
    }
    c->args.expert_ids = ep_tensor_2d(c->ids, id_type, c->tokens, c->top_k);
    c->args.expert_scales = ep_tensor_2d(c->scales, scale_type, c->tokens, c->top_k);
}

static void draw_x(draw_call *c)
{
    const bool may_be_i8 = c->args.dispatch_quant == EP_MOE_DISPATCH_PLAIN;
    const ep_dtype type = may_be_i8 && chance(25) ? EP_DTYPE_I8 : draw_float_type();
    fill_rows(c->x, type, c->tokens);
    c->args.x = ep_tensor_2d(c->x, type, c->tokens, GATEWAY_HIDDEN);
    if (type == EP_DTYPE_I8) {
        for (uint32_t t = 0; t < c->tokens; t++) {
            c->x_scales[t] = 0.01f + 0.001f * (float)below(7);
        }
        c->args.x_scales = ep_tensor_1d(c->x_scales, EP_DTYPE_F32, c->tokens);
    }
    /* a value that is not finite, for the policies of it */
    if (type == EP_DTYPE_BF16 && c->tokens > 0 && c->args.nan_policy != EP_MOE_NAN_PASS &&
        chance(50)) {
        const uint16_t nan = 0x7fc0;
        memcpy(c->x + 2 * (size_t)below(c->tokens * GATEWAY_HIDDEN), &nan, sizeof(nan));
    }
}

static void draw_optional(draw_call *c, bool wild)
{
    ep_moe_args *args = &c->args;
    ep_tensor *tables[] = {&args->const_alpha1, &args->const_alpha2, &args->const_v};
    const size_t slots = (size_t)c->tokens * c->top_k;
    const uint32_t mask = below(3);
    fill_flags(c->mask, slots);
    fill_flags(c->partial, slots);
    if (mask != 0) {
        args->active_mask = mask == 1 ? ep_tensor_1d(c->mask, EP_DTYPE_BOOL, c->tokens)
                                      : ep_tensor_2d(c->mask, EP_DTYPE_BOOL, c->tokens, c->top_k);
    }
    if (args->result == EP_MOE_PARTIAL || (wild && chance(30))) {
        args->partial_slots = ep_tensor_2d(c->partial, EP_DTYPE_BOOL, c->tokens, c->top_k);
    }
    if (args->shared_source == EP_MOE_SHARED_CALLER || (wild && chance(30))) {
        const ep_dtype type = draw_float_type();
        fill_rows(c->shared, type, c->tokens);
        args->shared = ep_tensor_2d(c->shared, type, c->tokens, GATEWAY_HIDDEN);
    }
    for (uint32_t i = 0; i < 3 && args->const_experts > 0; i++) {
        const ep_dtype type = draw_float_type();
        fill_rows(c->tables[i], type, args->const_experts);
        *tables[i] = ep_tensor_2d(c->tables[i], type, args->const_experts, GATEWAY_HIDDEN);
    }
    const bool may_smooth = args->dispatch_quant == EP_MOE_DISPATCH_INT8 &&
                            args->combine_at == EP_MOE_COMBINE_ROWS &&
                            args->comm_alg <= EP_MOE_COMM_FULLMESH;
    if ((may_smooth || wild) && chance(60)) {
        for (uint32_t i = 0; i < DRAW_SMOOTH_ROWS * GATEWAY_HIDDEN; i++) {
            c->smooth[i] = 1.5f + draw();
        }
        args->smooth_scales =
            ep_tensor_2d(c->smooth, EP_DTYPE_F32, DRAW_SMOOTH_ROWS, GATEWAY_HIDDEN);
    }
}

static bool is_left_out(const draw_call *c, uint32_t token)
{
    const uint32_t rank = c->args.active_mask.rank;
    const uint32_t count = rank == 1 ? 1 : c->top_k;
    bool active = rank == 0;
    for (uint32_t k = 0; k < count; k++) {
        active |= c->mask[token * count + k] != 0;
    }
    return !active;
}

static void draw_gate(draw_call *c, const ep_gate_config *gate)
{
    c->gate = *gate;
    c->free_gate = chance(50);
    c->gate.noise_temperature = chance(50) ? 1.5f : 0.0f;
    c->gate.expert_dropout = chance(50) ? 0.25f : 0.0f;
    if (c->gate.noise_temperature > 0 || c->gate.expert_dropout > 0) {
        c->gate.seed = ep_splitmix64(&state);
    }
    for (uint32_t i = 0; i < c->tokens * GATEWAY_EXPERTS; i++) { /* padding may hold anything */
        c->logit_rows[i] = is_left_out(c, i / GATEWAY_EXPERTS) ? __builtin_nanf("") : 4.0f * draw();
    }
    for (uint32_t e = 0; e < GATEWAY_EXPERTS; e++) {
        c->bias[e] = draw();
        c->factors[e] = 1.5f + draw();
    }
    for (uint32_t i = 0; i < c->tokens * c->top_k; i++) {
        c->chosen[i] = (int32_t)((i * 3 + i / c->top_k) % GATEWAY_EXPERTS);
    }
    if (c->free_gate) {
        draw_numbers(&ep_gate_parameters, 25, &c->gate);
        c->gate.expert_dropout = c->gate.expert_dropout > 0.5f ? 0.5f : c->gate.expert_dropout;
        c->gate.noise_temperature =
            c->gate.noise_temperature > 10.0f ? 10.0f : c->gate.noise_temperature;
        c->gate.groups = c->gate.groups == 3 ? 2 : c->gate.groups;
        c->gate.groups_kept =
            c->gate.groups_kept > c->gate.groups ? c->gate.groups : c->gate.groups_kept;
        c->gate.bias = chance(50) ? c->bias : NULL;
        c->gate.expert_factors = chance(50) ? c->factors : NULL;
        if (chance(20)) {
            c->gate.chosen = c->chosen;
            c->gate.noise_temperature = c->gate.expert_dropout = 0.0f;
        }
    }
    c->logits = ep_tensor_2d(c->logit_rows, EP_DTYPE_F32, c->tokens, GATEWAY_EXPERTS);
}

void draw_call_make(draw_call *c, uint64_t number, const ep_gate_config *gate)
{
    state = number;
    const bool wild = below(WILD_EVERY) == 0;
    const uint32_t size = below(20);
    memset(c, 0, sizeof(*c));
    ep_moe_args_init(&c->args);
    c->args.model = "deepseek";
    c->args.layer = 1;
    draw_numbers(&ep_moe_parameters, 30, &c->args);
    if (!wild) {
        mend(&c->args);
    }
    c->tokens = size == 0 ? 0 : size == 1 ? DRAW_TOKENS_MAX : 1 + below(24);
    c->gated = chance(30);
    c->top_k = c->gated ? GATEWAY_TOP_K : 1 + below(DRAW_TOP_K_MAX);
    c->out_dtype = draw_float_type();
    if (c->gated) { /* as many experts as logits; expertctl asks the checkpoint */
        c->args.zero_experts = c->args.copy_experts = c->args.const_experts = 0;
    }
    draw_x(c);
    draw_optional(c, wild);
    c->logits = ep_tensor_none();
    if (c->gated) {
        draw_gate(c, gate);
    } else {
        draw_slots(c);
    }
    c->must_succeed = !wild && !c->free_gate && c->args.nan_policy != EP_MOE_NAN_REJECT &&
                      (c->args.x_abs_max == 0.0f || c->args.x_abs_max > 1.0f);
}

/* ---- the same for expertctl ---- */

static const char *word_of(const ep_parameter *row, uint32_t number, int *out_bytes)
{
    const char *word = row->words;
    for (uint32_t place = 0;; place++) {
        *out_bytes = (int)strcspn(word, "|");
        if ((row->numbers != NULL ? row->numbers[place] : place) == number) {
            return word;
        }
        word += *out_bytes + 1;
    }
}

static bool is_set(const ep_parameter *row, const void *base)
{
    const uint8_t *at = (const uint8_t *)base + row->at;
    uint64_t wide = 0;
    memcpy(&wide, at,
           row->kind == EP_PARAMETER_U64    ? sizeof(wide)
           : row->kind == EP_PARAMETER_FLAG ? sizeof(bool)
                                            : sizeof(uint32_t));
    return wide != 0;
}

static int option_text(const ep_parameter *row, const uint8_t *at, char *out, size_t bytes)
{
    uint32_t number;
    uint64_t wide;
    float real;
    int word_bytes;
    memcpy(&number, at, sizeof(number));
    memcpy(&real, at, sizeof(real));
    if (row->words != NULL) {
        const char *word = word_of(row, number, &word_bytes);
        return snprintf(out, bytes, " --%s=%.*s", row->option, word_bytes, word);
    }
    switch (row->kind) {
    case EP_PARAMETER_FLAG:
        return snprintf(out, bytes, " --%s", row->option);
    case EP_PARAMETER_U64:
        memcpy(&wide, at, sizeof(wide));
        return snprintf(out, bytes, " --%s=%" PRIu64, row->option, wide);
    case EP_PARAMETER_F32:
    case EP_PARAMETER_F32_POSITIVE:
        return snprintf(out, bytes, " --%s=%.9g", row->option, (double)real);
    case EP_PARAMETER_U32:
        break;
    }
    return snprintf(out, bytes, " --%s=%" PRIu32, row->option, number);
}

void draw_options(const draw_call *c, char out[DRAW_LINE_BYTES])
{
    size_t used =
        (size_t)snprintf(out, DRAW_LINE_BYTES, " --out-dtype=%s", ep_dtype_name(c->out_dtype));
    for (size_t i = 0; i < ep_moe_parameters.count; i++) {
        const ep_parameter *row = &ep_moe_parameters.rows[i];
        if (row->option != NULL && is_set(row, &c->args)) {
            used += (size_t)option_text(row, (const uint8_t *)&c->args + row->at, out + used,
                                        DRAW_LINE_BYTES - used);
            EP_TEST_CHECK(used < DRAW_LINE_BYTES, "a line too long");
        }
    }
    if (c->gated && (c->gate.noise_temperature > 0 || c->gate.expert_dropout > 0)) {
        snprintf(out + used, DRAW_LINE_BYTES - used, " --gate-seed=%" PRIu64 "%s%s", c->gate.seed,
                 c->gate.noise_temperature > 0 ? " --noise-temperature=1.5" : "",
                 c->gate.expert_dropout > 0 ? " --expert-dropout=0.25" : "");
    }
}

size_t draw_tensors(draw_call *c, ep_named_tensor out[DRAW_TENSORS_MAX])
{
    ep_moe_tensor row;
    size_t count = 0;
    for (uint32_t at = 0; ep_moe_tensor_next(&at, &row);) {
        const ep_tensor *tensor = ep_moe_tensor_of(&row, &c->args);
        if (tensor->rank == strlen(row.dims)) {
            out[count++] = (ep_named_tensor){row.name, *tensor};
        }
    }
    if (c->gated) {
        out[count++] = (ep_named_tensor){"logits", c->logits};
    }
    return count;
}

/* ---- what was shown ---- */

void draw_cover(draw_call *c, draw_coverage *covered)
{
    ep_moe_tensor row;
    for (size_t i = 0; !c->free_gate && i < ep_moe_parameters.count; i++) {
        const ep_parameter *p = &ep_moe_parameters.rows[i];
        covered->moe[i] += is_set(p, &c->args);
        for (uint32_t w = 0; p->words != NULL && w < words_count(p); w++) {
            uint32_t number;
            memcpy(&number, (const uint8_t *)&c->args + p->at, sizeof(number));
            covered->words[i][w] += number == (p->numbers != NULL ? p->numbers[w] : w);
        }
    }
    for (size_t i = 0; c->gated && i < ep_gate_parameters.count; i++) {
        covered->gate[i] += is_set(&ep_gate_parameters.rows[i], &c->gate);
    }
    for (uint32_t at = 0; !c->free_gate && ep_moe_tensor_next(&at, &row);) {
        covered->tensors[at - 1] += ep_moe_tensor_of(&row, &c->args)->rank == strlen(row.dims);
    }
    covered->gate_arrays[0] += c->gated && c->gate.bias != NULL;
    covered->gate_arrays[1] += c->gated && c->gate.expert_factors != NULL;
    covered->gate_arrays[2] += c->gated && c->gate.chosen != NULL;
}

static void report(const char *what, uint32_t count, bool must)
{
    printf("  %-32s %u\n", what, count);
    EP_TEST_CHECK(count > 0 || !must, "no call that succeeded had %s", what);
}

void draw_report(const draw_coverage *covered, bool must)
{
    ep_moe_tensor row;
    char what[96];
    EP_TEST_CHECK(ep_moe_parameters.count <= DRAW_ROWS_MAX, "too many rows");
    for (size_t i = 0; i < ep_moe_parameters.count; i++) {
        const ep_parameter *p = &ep_moe_parameters.rows[i];
        report(p->name, covered->moe[i], must);
        for (uint32_t w = 0; p->words != NULL && w < words_count(p); w++) {
            snprintf(what, sizeof(what), "%s of word %u", p->name, w);
            report(what, covered->words[i][w], must);
        }
    }
    for (size_t i = 0; i < ep_gate_parameters.count; i++) {
        report(ep_gate_parameters.rows[i].name, covered->gate[i], must);
    }
    for (uint32_t at = 0; ep_moe_tensor_next(&at, &row);) {
        snprintf(what, sizeof(what), "%s [%s]", row.name, row.dims);
        report(what, covered->tensors[at - 1], must);
    }
    report("gate.bias", covered->gate_arrays[0], must);
    report("gate.expert_factors", covered->gate_arrays[1], must);
    report("gate.chosen", covered->gate_arrays[2], must);
}
