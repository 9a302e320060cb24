/* SPDX-License-Identifier: Apache-2.0 */
/* The loop of a generation: the prompt in one batch, then one byte per step. */
#include "generate.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "dense/sampler.h"

typedef struct expert_caller {
    ep_client *client; /* NULL: the gateway routes */
    ep_cli_gateway *gateway;
    ep_moe_args args;
    ep_cli_generate_result *result;
} expert_caller;

void ep_cli_generate_check(const ep_cli_generate_request *request, const ep_dense_shape *shape,
                           char *out_text, size_t bytes)
{
    size_t prompt_bytes = strlen(request->prompt);
    out_text[0] = '\0';
    if (prompt_bytes == 0 || prompt_bytes > shape->positions_max ||
        request->bytes > shape->positions_max - prompt_bytes) {
        snprintf(out_text, bytes,
                 "--prompt has %zu bytes and --bytes is %" PRIu32
                 ", allowed: a prompt of at least 1 byte, and %" PRIu32 " together",
                 prompt_bytes, request->bytes, shape->positions_max);
    }
}

/* ---- is it the same model? ---- */

static ep_err no_such_model(ep_client *client, const char *name, const char *version,
                            ep_error *out_error)
{
    char served[256] = "nothing";
    size_t used = 0;
    ep_model_desc desc = {.struct_bytes = sizeof(desc)};
    for (uint32_t i = 0; used < sizeof(served) && ep_client_model(client, i, &desc) == EP_OK; i++) {
        used += (size_t)snprintf(served + used, sizeof(served) - used, "%s%s version %s",
                                 i > 0 ? ", " : "", desc.name, desc.version);
    }
    return ep_error_set(
        out_error, EP_ERR_NOT_FOUND,
        "the service has no model '%s' of version %s, which is the checkpoint's with "
        "--weight-quant; it has: %s",
        name, version, served);
}

static bool find_layer(ep_client *client, const char *name, const char *version, uint32_t layer,
                       ep_layer_desc *out_desc)
{
    for (uint32_t i = 0; ep_client_layer(client, name, version, i, out_desc) == EP_OK; i++) {
        if (out_desc->layer == layer) {
            return true;
        }
        out_desc->struct_bytes = sizeof(*out_desc);
    }
    return false;
}

ep_err ep_cli_generate_match(ep_client *client, const ep_cli_generate_request *request,
                             const ep_dense_model *model, ep_error *out_error)
{
    const ep_dense_shape *shape = ep_dense_model_shape(model);
    const char *model_name = request->model;
    ep_layer_desc desc = {.struct_bytes = sizeof(desc)};
    if (ep_client_layer(client, model_name, request->version, 0, &desc) != EP_OK) {
        return no_such_model(client, model_name, request->version, out_error);
    }
    for (uint32_t l = 0; l < shape->layers; l++) {
        const ep_layer_shape *own = ep_dense_model_layer(model, l);
        desc = (ep_layer_desc){.struct_bytes = sizeof(desc)};
        if (!find_layer(client, model_name, request->version, own->layer, &desc)) {
            return ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                                "the service has no layer %" PRIu32 " of model '%s'", own->layer,
                                model_name);
        }
        if (desc.hidden != own->hidden || desc.experts != own->experts) {
            return ep_error_set(
                out_error, EP_ERR_FAILED_PRECONDITION,
                "layer %" PRIu32 " of model '%s' has %" PRIu32 " experts of width %" PRIu32
                " at the service, %" PRIu32 " of width %" PRIu32 " in the checkpoint",
                own->layer, model_name, desc.experts, desc.hidden, own->experts, own->hidden);
        }
    }
    return EP_OK;
}

/* ---- the experts of one layer ---- */

static ep_err call_experts(void *arg, const ep_layer_shape *shape, uint32_t tokens,
                           const uint16_t *rows, const int32_t *ids, const float *scales,
                           uint16_t *out, ep_error *out_error)
{
    expert_caller *caller = arg;
    ep_cli_layer_record *record = NULL;
    ep_moe_args args = caller->args;
    ep_moe_result result = {.struct_bytes = sizeof(result)};
    ep_tensor y = ep_tensor_2d(out, EP_DTYPE_BF16, tokens, shape->hidden);
    for (uint32_t i = 0; i < caller->result->layers_count; i++) {
        record =
            caller->result->layers[i].layer == shape->layer ? &caller->result->layers[i] : record;
    }
    args.layer = shape->layer;
    /* Inputs are only read; the tensor type has no const pointer. */
    args.x = ep_tensor_2d((void *)(uintptr_t)rows, EP_DTYPE_BF16, tokens, shape->hidden);
    args.expert_ids = ep_tensor_2d((void *)(uintptr_t)ids, EP_DTYPE_I32, tokens, shape->top_k);
    args.expert_scales =
        ep_tensor_2d((void *)(uintptr_t)scales, EP_DTYPE_F32, tokens, shape->top_k);
    uint64_t begin_ns = ep_clock_now_ns();
    ep_err err = caller->client != NULL
                     ? ep_moe_forward(caller->client, &args, &y, &result)
                     : ep_cli_gateway_forward(caller->gateway, &args, NULL, NULL, &y, &result);
    if (err != EP_OK) {
        *out_error = result.error;
        out_error->code = err;
        return err;
    }
    ep_latency_add(&record->latency, (ep_clock_now_ns() - begin_ns) / EP_NS_PER_US);
    record->frames += result.frames;
    record->rerouted_frames += result.rerouted_frames;
    caller->result->epoch_term = result.epoch_term;
    caller->result->epoch_number = result.epoch_number;
    memcpy(caller->result->numerics, result.numerics, sizeof(caller->result->numerics));
    return EP_OK;
}

/* ---- the loop ---- */

static ep_err prepare(const ep_dense_model *model, const ep_cli_generate_request *request,
                      ep_cli_generate_result *result, ep_error *out_error)
{
    const ep_dense_shape *shape = ep_dense_model_shape(model);
    size_t prompt_bytes = strlen(request->prompt);
    result->text = malloc(prompt_bytes + request->bytes);
    result->layers = calloc(shape->layers, sizeof(*result->layers));
    if (result->text == NULL || result->layers == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for %zu bytes of text",
                            prompt_bytes + request->bytes);
    }
    result->layers_count = shape->layers;
    for (uint32_t l = 0; l < shape->layers; l++) {
        result->layers[l].layer = ep_dense_model_layer(model, l)->layer;
    }
    memcpy(result->text, request->prompt, prompt_bytes);
    result->text_bytes = prompt_bytes;
    return EP_OK;
}

static ep_err stream_bytes(FILE *stream, const uint8_t *text, size_t bytes, ep_error *out_error)
{
    if (stream != NULL && (fwrite(text, 1, bytes, stream) != bytes || fflush(stream) != 0)) {
        return ep_error_set(out_error, EP_ERR_IO, "cannot write the text: %s", strerror(errno));
    }
    return EP_OK;
}

ep_err ep_cli_generate_run(ep_client *client, ep_cli_gateway *gateway, ep_dense_model *model,
                           const ep_cli_generate_request *request,
                           ep_cli_generate_result *out_result, ep_error *out_error)
{
    float logits[EP_DENSE_VOCAB];
    uint64_t state = request->seed;
    uint64_t begin_ns = ep_clock_now_ns();
    expert_caller caller = {.client = client, .gateway = gateway, .result = out_result};
    memset(out_result, 0, sizeof(*out_result));
    ep_moe_args_init(&caller.args);
    caller.args.model = request->model;
    caller.args.version = request->version;
    caller.args.wire_dtype = EP_DTYPE_BF16;
    caller.args.deadline_us = request->deadline_us;
    caller.args.traceparent = request->traceparent;
    ep_err err = prepare(model, request, out_result, out_error);
    err = err != EP_OK
              ? err
              : stream_bytes(request->stream, out_result->text, out_result->text_bytes, out_error);
    for (uint32_t done = 0; err == EP_OK && done < request->bytes; done++) {
        uint32_t end = (uint32_t)out_result->text_bytes;
        uint32_t first = done == 0 ? 0 : end - 1;
        err = ep_dense_model_forward(model, out_result->text + first, end - first, first,
                                     call_experts, &caller, logits, out_error);
        if (err != EP_OK) {
            ep_error_prefix(out_error, err, "byte %" PRIu32 " of %" PRIu32, done + 1,
                            request->bytes);
            break;
        }
        out_result->text[end] =
            (uint8_t)ep_sampler_pick(logits, EP_DENSE_VOCAB, request->temperature, &state);
        out_result->text_bytes++;
        err = stream_bytes(request->stream, out_result->text + end, 1, out_error);
    }
    out_result->total_us = (ep_clock_now_ns() - begin_ns) / EP_NS_PER_US;
    return err;
}

void ep_cli_generate_free(ep_cli_generate_result *result)
{
    for (uint32_t i = 0; i < result->layers_count; i++) {
        ep_latency_fini(&result->layers[i].latency);
    }
    free(result->layers);
    free(result->text);
    memset(result, 0, sizeof(*result));
}
