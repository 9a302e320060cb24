/* SPDX-License-Identifier: Apache-2.0 */
#include "model/expert_quant.h"

#include <string.h>

#include <openssl/evp.h>

#include "base/check.h"

/* Explains refused values and errors beyond the bound, naming the tensor. */
static ep_err explain(const ep_weight_quant *quant, const ep_plan_run *run, ep_err err,
                      const ep_weight_quant_result *result, ep_error *out_error)
{
    const char *file = ep_safetensors_name(run->entry->shard);
    if (err == EP_ERR_NO_MEMORY) {
        return ep_error_set(out_error, err, "no memory to quantise an expert");
    }
    if (err != EP_OK) {
        return ep_error_set(out_error, err,
                            "%s: tensor %.200s: row %u column %u of the expert's matrix is %g, "
                            "weight_quant %s takes finite values up to %g: take it out, or repair "
                            "the checkpoint",
                            file, run->entry->name, result->row, result->column,
                            (double)result->value, quant->name, (double)quant->value_max);
    }
    return ep_error_set(out_error, EP_ERR_BAD_FILE,
                        "%s: tensor %.200s: weight_quant %s makes an error of %.3g, allowed %g: "
                        "take %s",
                        file, run->entry->name, quant->name, result->error, quant->error_max,
                        quant->format == EP_WEIGHTS_INT8_F16 ? "weight_quant out"
                        : quant->format == EP_WEIGHTS_Q4_K
                            ? "int4-g32 or int8-g32, or weight_quant out"
                            : "int8-g32, or weight_quant out");
}

/* Sizes of all parts. Float formats never have an order of columns. */
enum { SHARED_GATE = 3 * EP_MATRIX_COUNT, PARTS };

static void size_parts(const ep_weight_quant *quant, ep_expert_source *source, size_t bytes[PARTS])
{
    EP_ASSERT(source->places == NULL);
    for (ep_matrix m = 0; m < EP_MATRIX_COUNT; m++) {
        const ep_source_matrix form = ep_source_matrix_of(source, m);
        if (*form.values != NULL) {
            bytes[3 * m] = form.rows * ep_weight_row_bytes(quant->format, form.columns);
            bytes[3 * m + 1] = ep_weight_scales_bytes(quant->format, form.rows, form.columns);
            bytes[3 * m + 2] =
                *form.bias != NULL ? form.rows * ep_dtype_bytes(source->bias_dtype) : 0;
        }
    }
    bytes[SHARED_GATE] = source->shared_gate != NULL
                             ? source->hidden * ep_dtype_bytes(source->shared_gate_dtype)
                             : 0;
}

static ep_err fill_parts(const ep_weight_quant *quant, const ep_expert_plan *plan,
                         ep_expert_source *source, const size_t bytes[PARTS],
                         uint8_t *const to[PARTS], double *out_worst, ep_error *out_error)
{
    *out_worst = 0;
    for (ep_matrix m = 0; m < EP_MATRIX_COUNT; m++) {
        const ep_source_matrix form = ep_source_matrix_of(source, m);
        ep_weight_quant_result result;
        if (*form.values == NULL) {
            continue;
        }
        const ep_err err =
            ep_weight_quantize(quant, ep_weight_format_dtype(form.format), *form.values, form.rows,
                               form.columns, to[3 * m], to[3 * m + 1], &result);
        if (err != EP_OK || result.error > quant->error_max) {
            return explain(quant, &plan->runs[plan->matrices[m].values], err, &result, out_error);
        }
        *out_worst = result.error > *out_worst ? result.error : *out_worst;
        *form.values = to[3 * m];
        *form.scales = to[3 * m + 1];
        if (*form.bias != NULL) {
            memcpy(to[3 * m + 2], *form.bias, bytes[3 * m + 2]);
            *form.bias = to[3 * m + 2];
        }
    }
    if (source->shared_gate != NULL) {
        memcpy(to[SHARED_GATE], source->shared_gate, bytes[SHARED_GATE]);
        source->shared_gate = to[SHARED_GATE];
    }
    source->format = quant->format;
    source->down_format = EP_WEIGHTS_NONE;
    return EP_OK;
}

static ep_err hash_parts(const size_t bytes[PARTS], uint8_t *const to[PARTS],
                         uint8_t out_digest[EP_SHA256_BYTES], ep_error *out_error)
{
    EVP_MD_CTX *hash = EVP_MD_CTX_new();
    bool is_good = hash != NULL && EVP_DigestInit_ex(hash, EVP_sha256(), NULL) == 1;
    for (int i = 0; is_good && i < PARTS; i++) {
        is_good = EVP_DigestUpdate(hash, to[i], bytes[i]) == 1;
    }
    is_good = is_good && EVP_DigestFinal_ex(hash, out_digest, NULL) == 1;
    EVP_MD_CTX_free(hash);
    return is_good ? EP_OK
                   : ep_error_set(out_error, EP_ERR_INTERNAL, "SHA-256 failed in libcrypto");
}

ep_err ep_expert_quantize(const ep_weight_quant *quant, const ep_expert_plan *plan,
                          ep_expert_room *room, ep_expert_data *io_expert, ep_error *out_error)
{
    size_t bytes[PARTS] = {0};
    uint8_t *to[PARTS];
    ep_expert_data made = {.source = io_expert->source,
                           /* the other block holds nothing of the expert */
                           .block = !io_expert->block};
    size_parts(quant, &made.source, bytes);
    ep_err err = ep_expert_parts_place(room, made.block, bytes, PARTS, to, out_error);
    if (err != EP_OK) {
        return err;
    }
    err = fill_parts(quant, plan, &made.source, bytes, to, &made.quant_error, out_error);
    if (err == EP_OK) {
        err = hash_parts(bytes, to, made.sha256, out_error);
    }
    if (err == EP_OK) {
        *io_expert = made;
    }
    return err;
}
