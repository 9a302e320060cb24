/* SPDX-License-Identifier: Apache-2.0 */
#include "backends/host_common.h"

#include <fenv.h>
#include <math.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/host.h"
#include "moe/convert.h"

static ep_err check_shape_and_types(const ep_expert_source *source, ep_error *out_error)
{
    if (source->hidden < 1 || source->hidden > EP_HIDDEN_MAX) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "expert width H is %u, allowed 1 to %u", source->hidden, EP_HIDDEN_MAX);
    }
    if (source->inner < 1 || source->inner > EP_INNER_MAX) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "expert inner width I is %u, allowed 1 to %u", source->inner,
                            EP_INNER_MAX);
    }
    if ((unsigned)source->activation >= EP_ACT_COUNT) {
        return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED,
                            "activation %u is not implemented, allowed 0..%u",
                            (unsigned)source->activation, (unsigned)EP_ACT_COUNT - 1);
    }
    if (source->format == EP_WEIGHTS_NONE || (unsigned)source->format >= EP_WEIGHTS_COUNT) {
        return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED,
                            "weight format %u is not implemented, allowed 1..%u",
                            (unsigned)source->format, (unsigned)EP_WEIGHTS_COUNT - 1);
    }
    const ep_weight_format down = ep_expert_down_format(source);
    const bool rounds = source->format == EP_WEIGHTS_W8A8 || down == EP_WEIGHTS_W8A8;
    if ((unsigned)down >= EP_WEIGHTS_COUNT || (rounds && down != source->format)) {
        return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED,
                            "down of weight format %u beside gate and up of %u is not implemented",
                            (unsigned)down, (unsigned)source->format);
    }
    const uint32_t columns_max = source->hidden > source->inner ? source->hidden : source->inner;
    if (source->format == EP_WEIGHTS_W8A8 && columns_max > EP_W8A8_COLUMNS_MAX) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "w8a8 matrices of %u columns, allowed 1 to %u", columns_max,
                            EP_W8A8_COLUMNS_MAX);
    }
    if (source->shared_gate != NULL && !ep_dtype_is_float(source->shared_gate_dtype)) {
        return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED,
                            "a shared gate of type %s is not implemented, allowed: bf16, f16, f32",
                            ep_dtype_name(source->shared_gate_dtype));
    }
    bool has_bias =
        source->gate_bias != NULL || source->up_bias != NULL || source->down_bias != NULL;
    if (has_bias && !ep_dtype_is_float(source->bias_dtype)) {
        return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED,
                            "biases of type %s are not implemented, allowed: bf16, f16, f32",
                            ep_dtype_name(source->bias_dtype));
    }
    return EP_OK;
}

static ep_err check_numbers(const ep_expert_source *source, ep_error *out_error)
{
    const ep_activation_numbers *n = &source->numbers;
    bool finite = isfinite(n->alpha) && isfinite(n->beta) && isfinite(n->limit) && n->limit >= 0.0f;
    bool divides = source->activation == EP_ACT_SITU; /* SiTU divides by alpha and beta */
    if (!finite || (divides && (n->alpha <= 0.0f || n->beta <= 0.0f))) {
        return ep_error_set(
            out_error, EP_ERR_INVALID_ARGUMENT,
            "activation %s with alpha %g, beta %g, limit %g, allowed finite ones, limit >= 0%s",
            ep_activation_name(source->activation), (double)n->alpha, (double)n->beta,
            (double)n->limit, divides ? ", alpha and beta > 0" : "");
    }
    return EP_OK;
}

ep_err ep_expert_source_check(const ep_expert_source *source, ep_error *out_error)
{
    ep_err err = check_shape_and_types(source, out_error);
    if (err == EP_OK) {
        err = check_numbers(source, out_error);
    }
    if (err != EP_OK) {
        return err;
    }
    const struct {
        const char *name;
        const void *values;
        const void *scales;
        ep_weight_format format;
    } matrices[] = {{"gate", source->gate, source->gate_scales, source->format},
                    {"up", source->up, source->up_scales, source->format},
                    {"down", source->down, source->down_scales, ep_expert_down_format(source)}};
    for (size_t i = ep_activation_has_gate(source->activation) ? 0 : 1;
         i < EP_ARRAY_COUNT(matrices); i++) {
        bool lacks_scales =
            !ep_weight_format_is_float(matrices[i].format) && matrices[i].scales == NULL;
        if (matrices[i].values == NULL || lacks_scales) {
            return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                                "the expert's %s matrix %s missing", matrices[i].name,
                                matrices[i].values == NULL ? "is" : "has its scales");
        }
    }
    return EP_OK;
}

ep_expert_source ep_expert_source_outline(const ep_expert_source *source)
{
    ep_expert_source outline = *source;
    const void **const addresses[] = {
        &outline.gate,      &outline.up,          &outline.down,      &outline.gate_scales,
        &outline.up_scales, &outline.down_scales, &outline.gate_bias, &outline.up_bias,
        &outline.down_bias, &outline.shared_gate, &outline.places};
    for (size_t i = 0; i < EP_ARRAY_COUNT(addresses); i++) {
        *addresses[i] = *addresses[i] != NULL ? (const void *)(uintptr_t)1 : NULL;
    }
    return outline;
}

bool ep_expert_source_supported(const ep_expert_source *source)
{
    return check_shape_and_types(source, NULL) == EP_OK;
}

ep_ffn_family ep_numerics_family(ep_numerics numerics, ep_weight_format format)
{
    if (numerics == EP_NUMERICS_AUTO || numerics == EP_NUMERICS_AUTO_WIDE) {
        return ep_ffn_family_fastest(format, numerics == EP_NUMERICS_AUTO_WIDE);
    }
    if (numerics == EP_NUMERICS_W4A8) {
        return ep_ffn_family_has(EP_FFN_FAMILY_W4A8, format)
                   ? EP_FFN_FAMILY_W4A8
                   : ep_numerics_family(EP_NUMERICS_BF16DP, format);
    }
    const ep_ffn_family family = numerics == EP_NUMERICS_BF16DP    ? EP_FFN_FAMILY_BF16DP
                                 : numerics == EP_NUMERICS_BF16ODD ? EP_FFN_FAMILY_BF16ODD
                                                                   : EP_FFN_FAMILY_PORTABLE;
    return ep_ffn_family_has(family, format) ? family : EP_FFN_FAMILY_PORTABLE;
}

ep_ffn_family ep_numerics_expert_family(ep_numerics numerics, ep_weight_format format,
                                        ep_weight_format down_format)
{
    const ep_ffn_family family = ep_numerics_family(numerics, format);
    const ep_weight_format down = down_format == EP_WEIGHTS_NONE ? format : down_format;
    if (ep_ffn_family_has(family, down)) {
        return family;
    }
    const ep_ffn_family other = ep_numerics_family(numerics, down);
    return ep_ffn_family_has(other, format) ? other : EP_FFN_FAMILY_PORTABLE;
}

ep_err ep_job_check(const ep_job *job)
{
    if (job->weights == NULL || job->rows == NULL || job->done == NULL) {
        return EP_ERR_INVALID_ARGUMENT;
    }
    if (job->rows_count < 1 || job->rows_count > EP_JOB_ROWS_MAX) {
        return EP_ERR_INVALID_ARGUMENT;
    }
    bool has_blocks = job->x_dtype == EP_DTYPE_F8E4M3;
    if (!ep_dtype_is_float(job->out_dtype) ||
        !(ep_dtype_is_float(job->x_dtype) || job->x_dtype == EP_DTYPE_I8 || has_blocks)) {
        return EP_ERR_INVALID_ARGUMENT;
    }
    const size_t element = ep_dtype_bytes(job->out_dtype);
    for (uint32_t r = 0; r < job->rows_count; r++) {
        if (job->rows[r].x == NULL || job->rows[r].out == NULL ||
            (has_blocks && job->rows[r].x_scales == NULL) ||
            (uintptr_t)job->rows[r].out % element != 0) {
            return EP_ERR_INVALID_ARGUMENT;
        }
    }
    return EP_OK;
}

ep_err ep_backend_budget_take(ep_backend_budget *budget, size_t bytes, ep_error *out_error)
{
    uint64_t used = atomic_load(&budget->used_bytes);
    do {
        if (budget->limit_bytes != 0 &&
            (bytes > budget->limit_bytes || used > budget->limit_bytes - bytes)) {
            return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                                "an expert of %zu bytes does not fit: %llu of %llu bytes of the "
                                "weight budget are used",
                                bytes, (unsigned long long)used,
                                (unsigned long long)budget->limit_bytes);
        }
    } while (!atomic_compare_exchange_weak(&budget->used_bytes, &used, used + bytes));
    return EP_OK;
}

void ep_backend_budget_give(ep_backend_budget *budget, size_t bytes)
{
    uint64_t before = atomic_fetch_sub(&budget->used_bytes, bytes);
    EP_ASSERT(before >= bytes);
}

void ep_host_floats_reset(void)
{
    (void)fesetenv(FE_DFL_ENV);
}

uint32_t ep_host_cpus_count(void)
{
    const uint32_t count = ep_host_cpus();
    return count > EP_BACKEND_THREADS_MAX ? EP_BACKEND_THREADS_MAX : count;
}
