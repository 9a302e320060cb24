/* SPDX-License-Identifier: Apache-2.0 */
#include "coverage.h"

#include <inttypes.h>
#include <math.h>

typedef struct kind {
    const char *name;
    bool (*fits)(const layer_case *c, const case_result *r);
} kind;

#define KIND(id, expression)                                                                       \
    static bool id(const layer_case *c, const case_result *r)                                      \
    {                                                                                              \
        (void)c;                                                                                   \
        (void)r;                                                                                   \
        return expression;                                                                         \
    }

static bool has_shared(const layer_case *c)
{
    return c->layer.shared_count > 0 && !c->batch.no_service_shared &&
           c->batch.form != REF_UNCOMBINED;
}

static bool result_has_nan(const layer_case *c, const case_result *r)
{
    size_t count = r->wanted != NULL ? case_rows(c) * c->layer.hidden : 0;
    for (size_t i = 0; i < count; i++) {
        if (isnan(ref_load(r->wanted, c->batch.out_dtype, i))) {
            return true;
        }
    }
    return false;
}

KIND(is_refused, r->refused)
KIND(is_empty, c->batch.tokens == 0)
KIND(is_shared_only, !r->refused && c->batch.top_k == 0 && c->batch.tokens > 0)
KIND(is_long, !r->refused && c->batch.tokens > 90)
KIND(is_wide, !r->refused && c->batch.top_k > 8)
KIND(is_blocking, !r->refused && c->form == CALL_BLOCKING)
KIND(is_callback, !r->refused && c->form == CALL_CALLBACK)
KIND(is_prepared, !r->refused && c->form == CALL_PREPARED)
KIND(is_decode, !r->refused && c->args.mode == EP_MOE_DECODE)
KIND(is_prefill, !r->refused && c->args.mode == EP_MOE_PREFILL)
KIND(is_partial, !r->refused && c->batch.form == REF_PARTIAL)
KIND(is_uncombined, !r->refused && c->batch.form == REF_UNCOMBINED)
KIND(is_weighted_input, !r->refused && c->batch.weight_on_input)
KIND(is_i8, !r->refused && c->batch.x_dtype == REF_I8)
KIND(is_i8_to_f32, !r->refused && c->batch.x_dtype == REF_I8 && c->batch.wire_dtype == REF_F32)
KIND(is_i64, !r->refused && c->batch.ids_dtype == REF_I64)
KIND(is_bf16_scales, !r->refused && c->batch.scales_dtype == REF_BF16)
KIND(is_f16_wire, !r->refused && c->batch.wire_dtype == REF_F16)
KIND(is_masked_by_token, !r->refused && c->batch.mask_tokens != NULL)
KIND(is_masked_by_slot, !r->refused && c->batch.mask_slots != NULL)
KIND(is_zero_expert, !r->refused && c->layer.zero_count > 0)
KIND(is_copy_expert, !r->refused && c->layer.copy_count > 0)
KIND(is_constant_kernel, !r->refused && c->layer.constant_count > 0 && !c->layer.constant_linear)
KIND(is_constant_linear, !r->refused && c->layer.constant_count > 0 && c->layer.constant_linear)
KIND(is_shared_plain, !r->refused && has_shared(c) && c->layer.shared[0].output_gate == NULL)
KIND(is_shared_gated, !r->refused && has_shared(c) && c->layer.shared[0].output_gate != NULL)
KIND(is_shared_caller, !r->refused && c->batch.caller_shared != NULL)
KIND(is_int8_out, !r->refused && c->batch.dispatch == REF_DISPATCH_INT8 && c->batch.smooth == NULL)
KIND(is_smooth, !r->refused && c->batch.smooth != NULL)
KIND(is_smooth_shared, !r->refused && c->batch.smooth != NULL && has_shared(c))
KIND(is_fp8_out, !r->refused && c->batch.dispatch == REF_DISPATCH_FP8)
KIND(is_fp8_on_input,
     !r->refused && c->batch.dispatch == REF_DISPATCH_FP8 && c->batch.weight_on_input)
KIND(is_int8_back, !r->refused && c->batch.combine_int8)
KIND(is_int8_back_f16, !r->refused && c->batch.combine_int8 && c->batch.wire_dtype == REF_F16)
KIND(is_int8_back_uncombined,
     !r->refused && c->batch.combine_int8 && c->batch.form == REF_UNCOMBINED)
KIND(is_quantised_both,
     !r->refused && c->batch.combine_int8 && c->batch.dispatch != REF_DISPATCH_PLAIN)
KIND(is_quantised_prepared, !r->refused && c->batch.combine_int8 && c->form == CALL_PREPARED)
KIND(is_quantised_mean,
     !r->refused && c->batch.dispatch != REF_DISPATCH_PLAIN && c->batch.nan_policy == REF_NAN_MEAN)
KIND(is_quantised_by_daemons, !r->refused && case_uses_daemons(c->number) &&
                                  c->batch.combine_int8 && c->batch.dispatch != REF_DISPATCH_PLAIN)
KIND(is_duplicates, !r->refused && c->batch.allow_duplicates)
KIND(is_nan_zero, !r->refused && c->batch.nan_policy == REF_NAN_ZERO)
KIND(is_nan_mean, !r->refused && c->batch.nan_policy == REF_NAN_MEAN)
KIND(is_limited, !r->refused && c->batch.x_abs_max > 0.0f)
KIND(is_version_named, !r->refused && c->names_version)
KIND(is_streamed, !r->refused && c->args.on_tokens != NULL)
KIND(is_hierarchy, !r->refused && c->args.comm_alg == EP_MOE_COMM_HIERARCHY)
KIND(is_node_sum, !r->refused && c->node_sum)
KIND(is_node_sum_special,
     !r->refused && c->node_sum && c->layer.copy_count + c->layer.constant_count > 0)
KIND(is_node_sum_shared, !r->refused && c->node_sum && has_shared(c))
KIND(is_mxfp4, !r->refused && c->layer.experts[0].format == REF_FORMAT_MXFP4)
KIND(is_int4, !r->refused && c->layer.experts[0].format == REF_FORMAT_INT4)
KIND(is_nibbles_by_daemons, !r->refused && case_uses_daemons(c->number) &&
                                (is_mxfp4(c, r) || is_int4(c, r)) && c->layer.shared_count > 0)
KIND(is_several_nodes, r->nodes > 1)
KIND(is_several_frames, r->frames > r->nodes)

static const kind kinds[] = {
    {"refused", is_refused},
    {"T = 0", is_empty},
    {"shared experts only", is_shared_only},
    {"T > 90", is_long},
    {"K > 8", is_wide},
    {"blocking", is_blocking},
    {"callback", is_callback},
    {"prepared", is_prepared},
    {"decode", is_decode},
    {"prefill", is_prefill},
    {"partial", is_partial},
    {"uncombined", is_uncombined},
    {"weight on input", is_weighted_input},
    {"i8 rows", is_i8},
    {"i8 rows, f32 wire", is_i8_to_f32},
    {"i64 ids", is_i64},
    {"bf16 scales", is_bf16_scales},
    {"f16 wire", is_f16_wire},
    {"mask per token", is_masked_by_token},
    {"mask per slot", is_masked_by_slot},
    {"zero experts", is_zero_expert},
    {"copy experts", is_copy_expert},
    {"constant experts, kernel rule", is_constant_kernel},
    {"constant experts, linear rule", is_constant_linear},
    {"shared expert", is_shared_plain},
    {"gated shared expert", is_shared_gated},
    {"caller's shared tensor", is_shared_caller},
    {"duplicates allowed", is_duplicates},
    {"int8 rows out", is_int8_out},
    {"smooth scales", is_smooth},
    {"smooth scales, shared experts", is_smooth_shared},
    {"fp8 rows out", is_fp8_out},
    {"fp8 rows out, weight on input", is_fp8_on_input},
    {"int8 rows back", is_int8_back},
    {"int8 rows back, f16 wire", is_int8_back_f16},
    {"int8 rows back, uncombined", is_int8_back_uncombined},
    {"8 bits both ways", is_quantised_both},
    {"int8 rows back, prepared", is_quantised_prepared},
    {"8 bits out, NaN policy mean", is_quantised_mean},
    {"8 bits both ways, daemons", is_quantised_by_daemons},
    {"NaN in the result", result_has_nan},
    {"NaN policy zero", is_nan_zero},
    {"NaN policy mean", is_nan_mean},
    {"limit of |x|", is_limited},
    {"version named", is_version_named},
    {"told of tokens", is_streamed},
    {"hierarchy", is_hierarchy},
    {"node sums", is_node_sum},
    {"node sums, special experts", is_node_sum_special},
    {"node sums, shared expert", is_node_sum_shared},
    {"mxfp4 experts", is_mxfp4},
    {"int4 experts", is_int4},
    {"4-bit experts, daemons", is_nibbles_by_daemons},
    {"several nodes", is_several_nodes},
    {"several frames per node", is_several_frames},
};

enum { KINDS_COUNT = sizeof(kinds) / sizeof(kinds[0]) };
_Static_assert((int)KINDS_COUNT <= (int)COVERAGE_KINDS_MAX, "room for every kind");

void coverage_add(case_coverage *covered, const layer_case *c, const case_result *result)
{
    for (size_t i = 0; i < KINDS_COUNT; i++) {
        covered->counts[i] += kinds[i].fits(c, result);
    }
}

bool coverage_report(const case_coverage *covered)
{
    bool good = true;
    for (size_t i = 0; i < KINDS_COUNT; i++) {
        printf("%s %s %" PRIu64 "%s", i == 0 ? "cases:" : "", kinds[i].name, covered->counts[i],
               i + 1 < KINDS_COUNT ? "," : "\n");
        good = good && covered->counts[i] > 0;
    }
    if (!good) {
        printf("a kind of case did not occur\n");
    }
    return good;
}
