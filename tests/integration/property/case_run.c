/* SPDX-License-Identifier: Apache-2.0 */
#include "case_run.h"

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"

/* ---- the service ---- */

typedef struct completion {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint32_t count;
    ep_moe_result result;
} completion;

static void on_done(void *arg, const ep_moe_result *result)
{
    completion *done = arg;
    pthread_mutex_lock(&done->lock);
    done->count++;
    done->result = *result;
    pthread_cond_broadcast(&done->changed);
    pthread_mutex_unlock(&done->lock);
}

static ep_err call_with_callback(const layer_case *c, ep_client *client, ep_moe_result *out_result)
{
    completion done = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    ep_err err =
        ep_moe_forward_async(client, &c->args, &c->out, on_done, &done, NULL, &out_result->error);
    if (err == EP_OK) {
        pthread_mutex_lock(&done.lock);
        while (done.count == 0) {
            pthread_cond_wait(&done.changed, &done.lock);
        }
        pthread_mutex_unlock(&done.lock);
        *out_result = done.result;
        err = done.result.error.code;
    }
    pthread_mutex_destroy(&done.lock);
    pthread_cond_destroy(&done.changed);
    return err;
}

/* Twice: the second run meets what the first left in the call's buffers. */
static ep_err call_prepared(const layer_case *c, ep_client *client, ep_moe_result *out_result)
{
    ep_call *call = NULL;
    ep_err err = ep_call_create(client, &c->args, &c->out, &call, &out_result->error);
    for (int run = 0; err == EP_OK && run < 2; run++) {
        err = ep_call_begin(call, (uint32_t)c->batch.tokens, &out_result->error);
        if (err == EP_OK) {
            err = ep_call_finish(call, out_result);
        }
    }
    ep_call_destroy(call);
    return err;
}

static ep_err call_service(const layer_case *c, ep_client *client, ep_moe_result *out_result)
{
    switch (c->form) {
    case CALL_CALLBACK:
        return call_with_callback(c, client, out_result);
    case CALL_PREPARED:
        return call_prepared(c, client, out_result);
    case CALL_BLOCKING:
        break;
    }
    return ep_moe_forward(client, &c->args, &c->out, out_result);
}

/* ---- tokens told of while the call runs ---- */

typedef struct told_rows {
    const layer_case *c;
    uint8_t *rows;   /* as they were then, packed */
    uint64_t tokens; /* of all runs */
    bool is_in_order;
} told_rows;

static void on_tokens(void *arg, ep_call *call, uint32_t first, uint32_t count)
{
    told_rows *told = arg;
    const layer_case *c = told->c;
    const size_t row_bytes = case_row_bytes(c);
    const size_t per_token = case_rows(c) / c->batch.tokens;
    (void)call;
    told->is_in_order = told->is_in_order && first == told->tokens % c->batch.tokens && count > 0;
    for (size_t row = first * per_token; row < (first + count) * per_token; row++) {
        memcpy(told->rows + row * row_bytes, c->out_block.data + case_row_offset(c, row),
               row_bytes);
    }
    told->tokens += count;
}

/* ---- comparison ---- */

static uint32_t element_bits(const uint8_t *data, size_t index, size_t bytes)
{
    uint32_t bits = 0;
    memcpy(&bits, data + index * bytes, bytes);
    return bits;
}

uint64_t count_differences(const layer_case *c, const uint8_t *wanted, const uint8_t *got,
                           size_t *out_first)
{
    enum ref_dtype dtype = c->batch.out_dtype;
    size_t bytes = ref_dtype_bytes(dtype);
    size_t count = case_rows(c) * c->layer.hidden;
    uint64_t differences = 0;
    for (size_t i = 0; i < count; i++) {
        bool same = element_bits(wanted, i, bytes) == element_bits(got, i, bytes) ||
                    (isnan(ref_load(wanted, dtype, i)) && isnan(ref_load(got, dtype, i)));
        if (!same && differences++ == 0 && out_first != NULL) {
            *out_first = i;
        }
    }
    return differences;
}

static void fail(case_result *result, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

static void fail(case_result *result, const char *format, ...)
{
    if (!result->same) {
        return; /* the first reason is the one to tell */
    }
    va_list args;
    va_start(args, format);
    vsnprintf(result->text, sizeof(result->text), format, args);
    va_end(args);
    result->same = false;
}

/* Bytes that are no result: around the rows, between them, and all of them after a failure. */
static void check_guards(const layer_case *c, bool rows_written, case_result *result)
{
    size_t rows = rows_written ? case_rows(c) : 0;
    size_t next = 0;
    for (size_t row = 0; row <= rows; row++) {
        size_t end = row < rows ? case_row_offset(c, row) : c->out_block.bytes;
        for (; next < end; next++) {
            if (c->out_block.data[next] != case_guard(next)) {
                fail(result, "byte %zu of the out block was written: it is %s", next,
                     rows_written ? "outside the result" : "to stay untouched on failure");
                return;
            }
        }
        next = end + case_row_bytes(c);
    }
}

static void collect_rows(const layer_case *c, case_result *result)
{
    size_t row_bytes = case_row_bytes(c);
    result->got = malloc(case_rows(c) * row_bytes + 1);
    EP_ASSERT(result->got != NULL);
    for (size_t row = 0; row < case_rows(c); row++) {
        memcpy(result->got + row * row_bytes, c->out_block.data + case_row_offset(c, row),
               row_bytes);
    }
}

static void compare_rows(const layer_case *c, case_result *result)
{
    size_t first = 0;
    size_t bytes = ref_dtype_bytes(c->batch.out_dtype);
    result->differing_elements = count_differences(c, result->wanted, result->got, &first);
    if (result->differing_elements > 0) {
        fail(result,
             "%" PRIu64
             " of %zu elements differ; the first is row %zu element %zu: 0x%0*x (%g), the oracle "
             "has 0x%0*x (%g)",
             result->differing_elements, case_rows(c) * c->layer.hidden, first / c->layer.hidden,
             first % c->layer.hidden, (int)(2 * bytes), element_bits(result->got, first, bytes),
             (double)ref_load(result->got, c->batch.out_dtype, first), (int)(2 * bytes),
             element_bits(result->wanted, first, bytes),
             (double)ref_load(result->wanted, c->batch.out_dtype, first));
    }
}

/* Each token once and in order, and its rows final by then. */
static void check_told(const layer_case *c, const told_rows *told, const ep_moe_result *answer,
                       case_result *result)
{
    const uint64_t runs = c->form == CALL_PREPARED ? 2 : 1;
    const bool is_ok = answer->error.code == EP_OK;
    if (!told->is_in_order || told->tokens != (is_ok ? runs * c->batch.tokens : 0) ||
        (is_ok && answer->tokens_delivered != c->batch.tokens)) {
        fail(result, "told of %" PRIu64 " of %zu tokens%s, %" PRIu64 " runs", told->tokens,
             (size_t)c->batch.tokens, told->is_in_order ? "" : ", not in order", runs);
    }
    if (is_ok && memcmp(told->rows, result->got, case_rows(c) * case_row_bytes(c)) != 0) {
        fail(result, "a row has changed after it was told of");
    }
}

/* Half of the cases are streamed. */
static void begin_told(layer_case *c, told_rows *out_told)
{
    *out_told = (told_rows){.c = c, .is_in_order = true};
    c->args.on_tokens = c->inputs_digest % 2 == 0 ? on_tokens : NULL;
    c->args.on_tokens_arg = out_told;
    out_told->rows = malloc(case_rows(c) * case_row_bytes(c) + 1);
    EP_ASSERT(out_told->rows != NULL);
}

void case_run(layer_case *c, ep_client *client, const char *version, case_result *out_result)
{
    char refusal[REF_TEXT_BYTES] = "";
    ep_moe_result result = {0};
    case_result *r = out_result;
    *r = (case_result){.same = true};
    r->wanted = malloc(case_rows(c) * case_row_bytes(c) + 1);
    EP_ASSERT(r->wanted != NULL);
    enum ref_refusal why = ref_layer_forward(&c->layer, &c->batch, r->wanted, refusal);
    EP_ASSERT(why != REF_NO_MEMORY);
    r->refused = why != REF_OK;

    c->args.version = c->names_version ? version : NULL;
    told_rows told;
    begin_told(c, &told);
    ep_err err = call_service(c, client, &result);
    ep_err wanted_err = r->refused ? EP_ERR_INVALID_ARGUMENT : EP_OK;
    if (err != wanted_err) {
        fail(r, "the service says %s (%s), the oracle %s%s%s", ep_err_name(err), result.error.text,
             ep_err_name(wanted_err), r->refused ? ": " : "", refusal);
    }
    check_guards(c, err == EP_OK, r);
    if (case_digest_inputs(c) != c->inputs_digest) {
        fail(r, "the call wrote to its inputs");
    }
    if (err == EP_OK) {
        r->nodes = result.nodes;
        r->frames = result.frames;
        collect_rows(c, r);
    }
    if (c->args.on_tokens != NULL) {
        check_told(c, &told, &result, r);
    }
    free(told.rows);
    if (err == EP_OK && !r->refused) {
        compare_rows(c, r);
    }
    if (r->refused) {
        free(r->wanted);
        r->wanted = NULL;
    }
}

void case_result_free(case_result *result)
{
    free(result->wanted);
    free(result->got);
    result->wanted = NULL;
    result->got = NULL;
}
