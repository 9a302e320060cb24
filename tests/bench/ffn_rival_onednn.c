/* SPDX-License-Identifier: Apache-2.0 */
/* oneDNN (2.x): up = x Wu; h = swish(x Wg) * up by post-operations; y = h Wd. Weights in the layouts it asks for. */
#include <oneapi/dnnl/dnnl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/numeric.h"
#include "bench/ffn_rival.h"

#define CHECK(call)                                                                                                                              \
    do {                                                                                                                                         \
        dnnl_status_t status_ = (call);                                                                                                          \
        if (status_ != dnnl_success) {                                                                                                           \
            fprintf(stderr, "oneDNN: %s is status %d\n", #call, (int)status_);                                                                   \
            exit(1);                                                                                                                             \
        }                                                                                                                                        \
    } while (0)

typedef struct {
    dnnl_primitive_t primitive;
    dnnl_memory_desc_t weights;
    size_t bytes; /* of the weights */
} product;

static dnnl_engine_t engine;
static dnnl_stream_t stream;
static ffn_case the_case;
static dnnl_data_type_t type;
static product products[3]; /* FFN_GATE, FFN_UP, FFN_DOWN */
static char *packed;
static dnnl_memory_t (*weights)[3]; /* [experts] */
static dnnl_memory_t *inputs;       /* [experts] */
static dnnl_memory_t up, inner, output;
static char *output_memory;

static dnnl_memory_desc_t matrix(uint32_t rows, uint32_t columns, dnnl_format_tag_t tag)
{
    dnnl_memory_desc_t desc;
    dnnl_dims_t dims = {rows, columns};
    CHECK(dnnl_memory_desc_init_by_tag(&desc, 2, dims, type, tag));
    return desc;
}

static dnnl_memory_t in_memory(const dnnl_memory_desc_t *desc, void *at)
{
    dnnl_memory_t memory;
    CHECK(dnnl_memory_create(&memory, desc, engine, at));
    return memory;
}

static void make_product(int which, const dnnl_memory_desc_t *x, const dnnl_memory_desc_t *y)
{
    const bool is_down = which == FFN_DOWN;
    const dnnl_memory_desc_t any = matrix(is_down ? the_case.inner : the_case.hidden,
                                          is_down ? the_case.hidden : the_case.inner, dnnl_format_tag_any);
    dnnl_primitive_attr_t attributes;
    dnnl_post_ops_t after;
    dnnl_matmul_desc_t operation;
    dnnl_primitive_desc_t described;
    CHECK(dnnl_primitive_attr_create(&attributes));
    if (which == FFN_GATE) {
        CHECK(dnnl_post_ops_create(&after));
        CHECK(dnnl_post_ops_append_eltwise(after, 1.0f, dnnl_eltwise_swish, 1.0f, 0.0f));
        CHECK(dnnl_post_ops_append_binary(after, dnnl_binary_mul, y));
        CHECK(dnnl_primitive_attr_set_post_ops(attributes, after));
    }
    CHECK(dnnl_matmul_desc_init(&operation, x, &any, NULL, y));
    CHECK(dnnl_primitive_desc_create(&described, &operation, attributes, engine, NULL));
    products[which].weights = *dnnl_primitive_desc_query_md(described, dnnl_query_weights_md, 0);
    products[which].bytes = (dnnl_memory_desc_get_size(&products[which].weights) + 4095) / 4096 * 4096;
    CHECK(dnnl_primitive_create(&products[which].primitive, described));
}

/* Expert 0 by the library's own reorder, the others as copies. */
static void pack(int which, size_t offset, size_t expert_bytes)
{
    const uint32_t columns = which == FFN_DOWN ? the_case.inner : the_case.hidden;
    const uint32_t rows = which == FFN_DOWN ? the_case.hidden : the_case.inner;
    const dnnl_memory_desc_t plain = matrix(columns, rows, dnnl_ba); /* [rows,columns] row-major, seen transposed */
    ffn_matrix source;
    ffn_case_matrix(&the_case, which, &source);
    for (uint32_t e = 0; e < the_case.experts; e++) {
        char *to = packed + e * expert_bytes + offset;
        weights[e][which] = in_memory(&products[which].weights, to);
        if (e > 0) {
            memcpy(to, packed + offset, products[which].bytes);
            continue;
        }
        dnnl_primitive_desc_t described;
        dnnl_primitive_t reorder;
        CHECK(dnnl_reorder_primitive_desc_create(&described, &plain, engine, &products[which].weights, engine, NULL));
        CHECK(dnnl_primitive_create(&reorder, described));
        dnnl_exec_arg_t args[] = {{DNNL_ARG_FROM, in_memory(&plain, source.values)}, {DNNL_ARG_TO, weights[0][which]}};
        CHECK(dnnl_primitive_execute(reorder, stream, 2, args));
        CHECK(dnnl_stream_wait(stream));
    }
    ffn_matrix_free(&source);
}

static void *filled_input(void)
{
    const size_t element = ep_dtype_bytes(ep_weight_format_dtype(the_case.format));
    char *x = ffn_case_alloc((size_t)the_case.rows * the_case.hidden * element);
    for (uint32_t r = 0; r < the_case.rows; r++) {
        for (uint32_t k = 0; k < the_case.hidden; k++) {
            size_t at = (size_t)r * the_case.hidden + k;
            float value = ffn_case_input(r, k);
            if (the_case.format == EP_WEIGHTS_BF16) {
                ((uint16_t *)(void *)x)[at] = ep_f32_to_bf16(value);
            } else {
                ((float *)(void *)x)[at] = value;
            }
        }
    }
    return x;
}

static int onednn_open(const ffn_case *c)
{
    the_case = *c;
    type = c->format == EP_WEIGHTS_BF16 ? dnnl_bf16 : dnnl_f32;
    CHECK(dnnl_engine_create(&engine, dnnl_cpu, 0));
    CHECK(dnnl_stream_create(&stream, engine, dnnl_stream_default_flags));
    const dnnl_memory_desc_t x = matrix(c->rows, c->hidden, dnnl_ab);
    const dnnl_memory_desc_t h = matrix(c->rows, c->inner, dnnl_ab);
    const size_t element = ep_dtype_bytes(ep_weight_format_dtype(c->format));
    make_product(FFN_GATE, &x, &h);
    make_product(FFN_UP, &x, &h);
    make_product(FFN_DOWN, &h, &x);
    const size_t expert_bytes = products[0].bytes + products[1].bytes + products[2].bytes;
    packed = ffn_case_alloc(expert_bytes * c->experts);
    weights = calloc(c->experts, sizeof(*weights));
    inputs = calloc(c->experts, sizeof(*inputs));
    if (weights == NULL || inputs == NULL) {
        return 1;
    }
    pack(FFN_GATE, 0, expert_bytes);
    pack(FFN_UP, products[0].bytes, expert_bytes);
    pack(FFN_DOWN, products[0].bytes + products[1].bytes, expert_bytes);
    for (uint32_t e = 0; e < c->experts; e++) {
        inputs[e] = in_memory(&x, filled_input());
    }
    up = in_memory(&h, ffn_case_alloc((size_t)c->rows * c->inner * element));
    inner = in_memory(&h, ffn_case_alloc((size_t)c->rows * c->inner * element));
    output_memory = ffn_case_alloc((size_t)c->rows * c->hidden * element);
    output = in_memory(&x, output_memory);
    return 0;
}

static void multiply(int which, dnnl_memory_t x, dnnl_memory_t w, dnnl_memory_t y, dnnl_memory_t factor)
{
    dnnl_exec_arg_t args[4] = {{DNNL_ARG_SRC, x},
                               {DNNL_ARG_WEIGHTS, w},
                               {DNNL_ARG_DST, y},
                               {DNNL_ARG_ATTR_MULTIPLE_POST_OP(1) | DNNL_ARG_SRC_1, factor}};
    CHECK(dnnl_primitive_execute(products[which].primitive, stream, factor == NULL ? 3 : 4, args));
}

static void onednn_pass(void)
{
    for (uint32_t e = 0; e < the_case.experts; e++) {
        multiply(FFN_UP, inputs[e], weights[e][FFN_UP], up, NULL);
        multiply(FFN_GATE, inputs[e], weights[e][FFN_GATE], inner, up);
        multiply(FFN_DOWN, inner, weights[e][FFN_DOWN], output, NULL);
    }
    CHECK(dnnl_stream_wait(stream));
}

static const void *onednn_weights(void)
{
    return packed;
}

static const void *onednn_output(ep_dtype *out_dtype)
{
    *out_dtype = ep_weight_format_dtype(the_case.format);
    return output_memory;
}

int main(int argc, char **argv)
{
    static const ffn_rival rival = {
        .open = onednn_open, .pass = onednn_pass, .weights = onednn_weights, .output = onednn_output};
    return ffn_rival_main(&rival, argc, argv);
}
