/* SPDX-License-Identifier: Apache-2.0 */
/* How a caller hands the drawn batch over, and what a case looks like in a report. */
#include "layer_case.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "case_draw.h"

enum { OUT_GUARD_BYTES = 64 };

static const ep_dtype dtypes[] = {
    [REF_BF16] = EP_DTYPE_BF16, [REF_F16] = EP_DTYPE_F16, [REF_F32] = EP_DTYPE_F32,
    [REF_I8] = EP_DTYPE_I8,     [REF_I32] = EP_DTYPE_I32, [REF_I64] = EP_DTYPE_I64};

uint8_t *case_alloc(layer_case *c, size_t bytes)
{
    EP_ASSERT(c->blocks_count < CASE_BLOCKS_MAX);
    uint8_t *data = calloc(1, bytes > 0 ? bytes : 1);
    EP_ASSERT(data != NULL);
    c->blocks[c->blocks_count++] = (case_block){data, bytes};
    return data;
}

static void fill_garbage(random_source *random, uint8_t *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        data[i] = (uint8_t)random_below(random, 256);
    }
}

/* rows of the packed array as a tensor of rows_max rows. What is not part of the batch is
 * garbage. */
static ep_tensor spread(layer_case *c, random_source *random, const void *packed, ep_dtype dtype,
                        uint32_t rows, uint32_t rows_max, uint32_t n)
{
    size_t row_bytes = n * ep_dtype_bytes(dtype);
    size_t stride = row_bytes + (random_chance(random, 50) ? random_below(random, 24) : 0);
    size_t offset = random_chance(random, 50) ? random_below(random, 16) : 0;
    size_t bytes = offset + rows_max * stride;
    if (rows_max == 0 && random_chance(random, 50)) {
        return ep_tensor_2d(NULL, dtype, 0, n);
    }
    uint8_t *data = case_alloc(c, bytes);
    fill_garbage(random, data, bytes);
    for (uint32_t r = 0; r < rows; r++) {
        memcpy(data + offset + r * stride, (const uint8_t *)packed + r * row_bytes, row_bytes);
    }
    ep_tensor tensor = ep_tensor_2d(data + offset, dtype, rows_max, n);
    tensor.stride_bytes[0] = (int64_t)stride;
    return tensor;
}

static ep_tensor lengthen(layer_case *c, random_source *random, const void *packed, ep_dtype dtype,
                          uint32_t n, uint32_t n_max)
{
    size_t element = ep_dtype_bytes(dtype);
    uint8_t *data = case_alloc(c, n_max * element);
    fill_garbage(random, data, n_max * element);
    if (n > 0) {
        memcpy(data, packed, n * element);
    }
    return ep_tensor_1d(data, dtype, n_max);
}

static ep_tensor per_token(layer_case *c, random_source *random, const void *packed, ep_dtype dtype,
                           uint32_t n)
{
    return spread(c, random, packed, dtype, (uint32_t)c->batch.tokens, c->tokens_max, n);
}

static ep_dtype draw_flag_dtype(random_source *random)
{
    return random_chance(random, 50) ? EP_DTYPE_BOOL : EP_DTYPE_U8;
}

static void hand_over_inputs(layer_case *c, random_source *random)
{
    const struct ref_batch *b = &c->batch;
    ep_moe_args *args = &c->args;
    uint32_t tokens = (uint32_t)b->tokens;
    uint32_t hidden = (uint32_t)c->layer.hidden;
    uint32_t top_k = (uint32_t)b->top_k;
    args->x = per_token(c, random, b->x, dtypes[b->x_dtype], hidden);
    if (b->x_dtype == REF_I8) {
        args->x_scales = lengthen(c, random, b->x_scales, EP_DTYPE_F32, tokens, c->tokens_max);
    }
    if (top_k > 0) {
        args->expert_ids = per_token(c, random, b->ids, dtypes[b->ids_dtype], top_k);
        args->expert_scales = per_token(c, random, b->scales, dtypes[b->scales_dtype], top_k);
    }
    if (b->mask_tokens != NULL) {
        args->active_mask =
            lengthen(c, random, b->mask_tokens, draw_flag_dtype(random), tokens, c->tokens_max);
    } else if (b->mask_slots != NULL) {
        args->active_mask = per_token(c, random, b->mask_slots, draw_flag_dtype(random), top_k);
    }
    if (b->form == REF_PARTIAL) {
        args->partial_slots =
            per_token(c, random, b->partial_slots, draw_flag_dtype(random), top_k);
    }
    args->dispatch_quant = (ep_moe_dispatch_quant)b->dispatch; /* the same numbers */
    args->combine_quant = b->combine_int8 ? EP_MOE_COMBINE_INT8 : EP_MOE_COMBINE_PLAIN;
    if (b->smooth != NULL) {
        uint32_t rows = (uint32_t)(c->layer.shared_count + c->layer.expert_count);
        args->smooth_scales =
            ep_tensor_2d((void *)(uintptr_t)b->smooth, EP_DTYPE_F32, rows, hidden);
    }
    if (b->caller_shared != NULL) {
        args->shared =
            per_token(c, random, b->caller_shared, dtypes[b->caller_shared_dtype], hidden);
    }
}

static void hand_over_special(layer_case *c, random_source *random, const case_constants *constants)
{
    ep_moe_args *args = &c->args;
    uint32_t count = (uint32_t)c->layer.constant_count;
    uint32_t hidden = (uint32_t)c->layer.hidden;
    ep_dtype dtype = dtypes[constants->dtype];
    args->zero_experts = (uint32_t)c->layer.zero_count;
    args->copy_experts = (uint32_t)c->layer.copy_count;
    args->const_experts = count;
    args->const_rule = c->layer.constant_linear ? EP_MOE_CONST_LINEAR : EP_MOE_CONST_KERNEL;
    if (count > 0) {
        args->const_alpha1 = spread(c, random, constants->alpha1, dtype, count, count, hidden);
        args->const_alpha2 = spread(c, random, constants->alpha2, dtype, count, count, hidden);
        args->const_v = spread(c, random, constants->v, dtype, count, count, hidden);
    }
}

static void hand_over_choices(layer_case *c, random_source *random)
{
    const struct ref_batch *b = &c->batch;
    ep_moe_args *args = &c->args;
    args->model = c->model->name;
    args->layer = c->model->layer_numbers[c->layer_index];
    args->result = b->form == REF_PARTIAL      ? EP_MOE_PARTIAL
                   : b->form == REF_UNCOMBINED ? EP_MOE_UNCOMBINED
                                               : EP_MOE_COMBINED;
    args->weight_on = b->weight_on_input ? EP_MOE_WEIGHT_ON_INPUT : EP_MOE_WEIGHT_ON_OUTPUT;
    args->shared_source = b->caller_shared != NULL ? EP_MOE_SHARED_CALLER
                          : b->no_service_shared   ? EP_MOE_SHARED_NONE
                                                   : EP_MOE_SHARED_SERVICE;
    args->nan_policy = (ep_moe_nan)b->nan_policy; /* the same numbers */
    args->x_abs_max = b->x_abs_max;
    args->mode = (ep_moe_mode)random_below(random, 3);
    args->wire_dtype = b->wire_dtype == REF_BF16 && random_chance(random, 50)
                           ? EP_DTYPE_NONE
                           : dtypes[b->wire_dtype];
    args->allow_duplicates = b->allow_duplicates;
    /* no hierarchy with them */
    static const ep_moe_comm algorithms[] = {EP_MOE_COMM_DEFAULT, EP_MOE_COMM_FULLMESH,
                                             EP_MOE_COMM_AUTO, EP_MOE_COMM_HIERARCHY};
    args->comm_alg = algorithms[random_below(random, b->smooth != NULL ? 3 : 4)];
    args->combine_at = c->node_sum ? EP_MOE_COMBINE_NODE_SUM : EP_MOE_COMBINE_ROWS;
    args->allow_missing = random_chance(random, 10);
    args->traceparent = random_chance(random, 10)
                            ? "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
                            : NULL;
    args->tenant = random_chance(random, 10) ? "tenant-a" : NULL;
}

static void make_out(layer_case *c, random_source *random)
{
    bool uncombined = c->batch.form == REF_UNCOMBINED;
    ep_dtype dtype = dtypes[c->batch.out_dtype];
    size_t row_bytes = case_row_bytes(c);
    size_t slot_stride = row_bytes + (random_chance(random, 30) ? random_below(random, 16) : 0);
    size_t slots = uncombined ? c->batch.top_k : 1;
    size_t token_bytes = slots > 0 ? (slots - 1) * slot_stride + row_bytes : 0;
    size_t token_stride = token_bytes + (random_chance(random, 50) ? random_below(random, 24) : 0);
    size_t offset = OUT_GUARD_BYTES + (random_chance(random, 50) ? random_below(random, 16) : 0);
    size_t bytes = offset + c->tokens_max * token_stride + OUT_GUARD_BYTES;
    uint8_t *data = malloc(bytes);
    EP_ASSERT(data != NULL);
    for (size_t i = 0; i < bytes; i++) {
        data[i] = case_guard(i);
    }
    c->out_block = (case_block){data, bytes};
    int64_t hidden = (int64_t)c->layer.hidden;
    if (uncombined) {
        c->out = ep_tensor_3d(data + offset, dtype, c->tokens_max, (int64_t)c->batch.top_k, hidden);
        c->out.stride_bytes[1] = (int64_t)slot_stride;
    } else {
        c->out = ep_tensor_2d(data + offset, dtype, c->tokens_max, hidden);
    }
    c->out.stride_bytes[0] = (int64_t)token_stride;
}

void layer_case_make(layer_case *c, uint64_t seed, uint64_t number,
                     const test_model models[MODELS_COUNT])
{
    random_source random = random_begin(seed, number);
    case_constants constants = {0};
    memset(c, 0, sizeof(*c));
    c->seed = seed;
    c->number = number;
    c->model = &models[random_below(&random, MODELS_COUNT)];
    c->layer_index = random_below(&random, c->model->layers_count);
    c->layer =
        c->model->layers[case_uses_daemons(number) ? PLACE_DAEMONS : PLACE_LOCAL][c->layer_index];
    c->client_choice = random_below(&random, 1u << 30);
    c->names_version = random_chance(&random, 30);
    c->node_sum = random_chance(&random, 15) && !case_uses_daemons(number);
    uint32_t form = random_below(&random, 10);
    c->form = form < 5 ? CALL_BLOCKING : form < 7 ? CALL_CALLBACK : CALL_PREPARED;
    case_draw(c, &random, &constants);
    c->node_sum = c->node_sum && c->batch.form != REF_UNCOMBINED && !c->batch.weight_on_input &&
                  c->batch.smooth == NULL;
    if (c->node_sum) {
        c->batch.owner_of = (size_t *)(void *)case_alloc(
            c, (c->layer.expert_count + c->layer.shared_count) * sizeof(size_t));
    }
    c->tokens_max =
        (uint32_t)c->batch.tokens + (c->form == CALL_PREPARED ? random_below(&random, 5) : 0);
    ep_moe_args_init(&c->args);
    hand_over_choices(c, &random);
    hand_over_inputs(c, &random);
    hand_over_special(c, &random, &constants);
    make_out(c, &random);
    c->inputs_digest = case_digest_inputs(c);
}

void layer_case_free(layer_case *c)
{
    for (uint32_t i = 0; i < c->blocks_count; i++) {
        free(c->blocks[i].data);
    }
    free(c->out_block.data);
}

size_t case_row_bytes(const layer_case *c)
{
    return c->layer.hidden * ref_dtype_bytes(c->batch.out_dtype);
}

size_t case_rows(const layer_case *c)
{
    return c->batch.tokens * (c->batch.form == REF_UNCOMBINED ? c->batch.top_k : 1);
}

size_t case_row_offset(const layer_case *c, size_t row)
{
    size_t base = (size_t)((const uint8_t *)c->out.data - c->out_block.data);
    size_t slots = c->batch.form == REF_UNCOMBINED ? c->batch.top_k : 1;
    size_t slot_stride = c->batch.form == REF_UNCOMBINED ? (size_t)c->out.stride_bytes[1] : 0;
    return base + row / slots * (size_t)c->out.stride_bytes[0] + row % slots * slot_stride;
}

uint64_t case_digest_inputs(const layer_case *c)
{
    uint64_t digest = 0xcbf29ce484222325ull; /* FNV-1a */
    for (uint32_t i = 0; i < c->blocks_count; i++) {
        for (size_t b = 0; b < c->blocks[i].bytes; b++) {
            digest = (digest ^ c->blocks[i].data[b]) * 0x100000001b3ull;
        }
    }
    return digest;
}

static const char *mask_name(const struct ref_batch *b)
{
    return b->mask_tokens != NULL ? "per token" : b->mask_slots != NULL ? "per slot" : "none";
}

static void describe_ids(const layer_case *c, FILE *to)
{
    const struct ref_batch *b = &c->batch;
    for (size_t t = 0; t < b->tokens && t < 12; t++) {
        fprintf(to, "    token %zu%s ids", t,
                b->mask_tokens != NULL && !b->mask_tokens[t] ? " (masked)" : "");
        for (size_t k = 0; k < b->top_k; k++) {
            size_t at = t * b->top_k + k;
            int64_t id = b->ids_dtype == REF_I64 ? ((const int64_t *)b->ids)[at]
                                                 : ((const int32_t *)b->ids)[at];
            fprintf(to, " %" PRId64 "%s%s", id,
                    b->mask_slots != NULL && !b->mask_slots[at] ? "(masked)" : "",
                    b->form == REF_PARTIAL && !b->partial_slots[at] ? "(unmarked)" : "");
        }
        fprintf(to, "\n");
    }
}

void case_describe(const layer_case *c, FILE *to)
{
    static const char *const algorithms[] = {"default", "fullmesh", "hierarchy", "auto"};
    static const char *const forms[] = {"blocking", "callback", "prepared"};
    static const char *const results[] = {"combined", "partial", "uncombined"};
    static const char *const policies[] = {"pass", "reject", "zero", "mean"};
    static const char *const modes[] = {"auto", "decode", "prefill"};
    static const char *const sources[] = {"service", "caller", "none"};
    const struct ref_batch *b = &c->batch;
    const struct ref_layer *l = &c->layer;
    const ep_fixture_config *model = &c->model->config;
    fprintf(to, "  seed %" PRIu64 " case %" PRIu64 ", over %s\n", c->seed, c->number,
            case_uses_daemons(c->number) ? "daemons" : "nodes of this process");
    fprintf(
        to, "  model %s (%s weights, experts %s, shared inner %u%s) layer %u of H %zu I %u E %zu\n",
        c->model->name, ep_dtype_name(model->dtype), ep_weight_format_name(model->expert_format),
        model->shared_inner, model->shared_gate ? ", gated" : "", c->args.layer, l->hidden,
        model->inner, l->expert_count);
    fprintf(to, "  family %s\n", ref_family_name(case_family(c)));
    fprintf(to, "  T %zu (buffers %u) K %zu, zero %zu copy %zu constant %zu (%s)\n", b->tokens,
            c->tokens_max, b->top_k, l->zero_count, l->copy_count, l->constant_count,
            l->constant_linear ? "linear" : "kernel");
    fprintf(to, "  x %s ids %s scales %s wire %s out %s\n", ep_dtype_name(dtypes[b->x_dtype]),
            ep_dtype_name(dtypes[b->ids_dtype]), ep_dtype_name(dtypes[b->scales_dtype]),
            ep_dtype_name(dtypes[b->wire_dtype]), ep_dtype_name(dtypes[b->out_dtype]));
    fprintf(to,
            "  result %s, weight on %s, shared %s, nan %s, |x| limit %g, mask %s, duplicates %s\n",
            results[b->form], b->weight_on_input ? "input" : "output",
            sources[c->args.shared_source], policies[b->nan_policy], (double)b->x_abs_max,
            mask_name(b), b->allow_duplicates ? "allowed" : "refused");
    fprintf(to, "  dispatch %s%s, combine %s\n",
            b->dispatch == REF_DISPATCH_INT8  ? "int8"
            : b->dispatch == REF_DISPATCH_FP8 ? "fp8"
                                              : "plain",
            b->smooth != NULL ? " with smooth scales" : "", b->combine_int8 ? "int8" : "plain");
    fprintf(to, "  %s call, mode %s, %s, version %s, %s\n", forms[c->form], modes[c->args.mode],
            algorithms[c->args.comm_alg], c->names_version ? "named" : "newest",
            c->node_sum ? "node sums" : "rows");
    describe_ids(c, to);
}
