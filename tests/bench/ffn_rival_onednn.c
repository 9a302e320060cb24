/* SPDX-License-Identifier: Apache-2.0 */
/*
 * oneDNN (2.x): up = x Wu; h = swish(x Wg) * up by post-operations; y = h Wd. Weights in the
 * layouts it asks for. w8a8: x and h are bytes (u8, 128 means 0) by one scale for all rows, which
 * is less work than a scale for each: x is rounded beforehand, h by the post-operations that make
 * it. The 128 is taken off again by a bias.
 */
#include <math.h>
#include <oneapi/dnnl/dnnl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/numeric.h"
#include "bench/ffn_rival.h"

#define CHECK(call)                                                                                \
    do {                                                                                           \
        dnnl_status_t status_ = (call);                                                            \
        if (status_ != dnnl_success) {                                                             \
            fprintf(stderr, "oneDNN: %s is status %d\n", #call, (int)status_);                     \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

typedef struct {
    dnnl_primitive_t primitive;
    dnnl_memory_desc_t weights;
    size_t bytes;       /* of the weights */
    dnnl_memory_t bias; /* w8a8; else NULL */
} product;

static dnnl_engine_t engine;
static dnnl_stream_t stream;
static ffn_case the_case;
static dnnl_data_type_t row_type, weight_type, result_type; /* x and h; weights; up and y */
static ffn_matrix matrices[FFN_MATRICES];
static product products[FFN_MATRICES];
static char *packed;
static dnnl_memory_t (*weights)[FFN_MATRICES]; /* [experts] */
static dnnl_memory_t *inputs;                  /* [experts] */
static dnnl_memory_t up, inner, output;
static char *output_memory;

static const float x_scale = 1.0f / 127;
static float h_scale;

static dnnl_memory_desc_t matrix(uint32_t rows, uint32_t columns, dnnl_data_type_t type,
                                 dnnl_format_tag_t tag)
{
    dnnl_memory_desc_t desc;
    dnnl_dims_t dims = {rows, columns};
    CHECK(dnnl_memory_desc_init_by_tag(&desc, 2, dims, type, tag));
    return desc;
}

/* at NULL: memory of its own. */
static dnnl_memory_t in_memory(const dnnl_memory_desc_t *desc, void *at)
{
    dnnl_memory_t memory;
    CHECK(dnnl_memory_create(&memory, desc, engine,
                             at != NULL ? at : ffn_case_alloc(dnnl_memory_desc_get_size(desc))));
    return memory;
}

/* A bias that takes off what the 128 in each input adds, and the scales of the outputs. */
static dnnl_memory_desc_t add_int8(int which, dnnl_primitive_attr_t attributes)
{
    const ffn_matrix *m = &matrices[which];
    const dnnl_memory_desc_t desc = matrix(1, m->rows, dnnl_f32, dnnl_ab);
    float *bias = ffn_case_alloc(m->rows * sizeof(*bias));
    float *scales = ffn_case_alloc(m->rows * sizeof(*scales));
    for (uint32_t r = 0; r < m->rows; r++) {
        int sum = 0;
        for (uint32_t k = 0; k < m->columns; k++) {
            sum += ((const int8_t *)m->values)[(size_t)r * m->columns + k];
        }
        bias[r] = -128.0f * (float)sum;
        scales[r] = ((const float *)m->scales)[r] * (which == FFN_DOWN ? h_scale : x_scale);
    }
    CHECK(dnnl_primitive_attr_set_output_scales(attributes, m->rows, 2, scales));
    free(scales);
    products[which].bias = in_memory(&desc, bias);
    return desc;
}

static void make_product(int which, const dnnl_memory_desc_t *x, const dnnl_memory_desc_t *y)
{
    const bool is_int8 = the_case.format == EP_WEIGHTS_W8A8;
    const dnnl_memory_desc_t any =
        matrix(matrices[which].columns, matrices[which].rows, weight_type, dnnl_format_tag_any);
    dnnl_primitive_attr_t attributes;
    dnnl_post_ops_t after;
    dnnl_matmul_desc_t operation;
    dnnl_primitive_desc_t described;
    dnnl_memory_desc_t bias;
    CHECK(dnnl_primitive_attr_create(&attributes));
    if (is_int8) {
        bias = add_int8(which, attributes);
    }
    if (which == FFN_GATE) {
        const dnnl_memory_desc_t factor =
            matrix(the_case.rows, the_case.inner, result_type, dnnl_ab);
        CHECK(dnnl_post_ops_create(&after));
        CHECK(dnnl_post_ops_append_eltwise(after, 1.0f, dnnl_eltwise_swish, 1.0f, 0.0f));
        CHECK(dnnl_post_ops_append_binary(after, dnnl_binary_mul, &factor));
        if (is_int8) {
            CHECK(dnnl_post_ops_append_eltwise(after, 1.0f, dnnl_eltwise_linear, 1.0f / h_scale,
                                               128.0f));
        }
        CHECK(dnnl_primitive_attr_set_post_ops(attributes, after));
    }
    CHECK(dnnl_matmul_desc_init(&operation, x, &any, is_int8 ? &bias : NULL, y));
    CHECK(dnnl_primitive_desc_create(&described, &operation, attributes, engine, NULL));
    products[which].weights = *dnnl_primitive_desc_query_md(described, dnnl_query_weights_md, 0);
    products[which].bytes =
        (dnnl_memory_desc_get_size(&products[which].weights) + 4095) / 4096 * 4096;
    CHECK(dnnl_primitive_create(&products[which].primitive, described));
}

/* Expert 0 by the library's own reorder, the others as copies. */
static void pack(int which, size_t offset, size_t expert_bytes)
{
    /* [rows,columns] row-major, seen transposed */
    const dnnl_memory_desc_t plain =
        matrix(matrices[which].columns, matrices[which].rows, weight_type, dnnl_ba);
    for (uint32_t e = 0; e < the_case.experts; e++) {
        char *to = packed + e * expert_bytes + offset;
        weights[e][which] = in_memory(&products[which].weights, to);
        if (e > 0) {
            memcpy(to, packed + offset, products[which].bytes);
            continue;
        }
        dnnl_primitive_desc_t described;
        dnnl_primitive_t reorder;
        CHECK(dnnl_reorder_primitive_desc_create(&described, &plain, engine,
                                                 &products[which].weights, engine, NULL));
        CHECK(dnnl_primitive_create(&reorder, described));
        dnnl_exec_arg_t args[] = {{DNNL_ARG_FROM, in_memory(&plain, matrices[which].values)},
                                  {DNNL_ARG_TO, weights[0][which]}};
        CHECK(dnnl_primitive_execute(reorder, stream, 2, args));
        CHECK(dnnl_stream_wait(stream));
    }
}

static void *filled_input(void)
{
    char *x =
        ffn_case_alloc((size_t)the_case.rows * the_case.hidden * dnnl_data_type_size(row_type));
    for (uint32_t r = 0; r < the_case.rows; r++) {
        for (uint32_t k = 0; k < the_case.hidden; k++) {
            size_t at = (size_t)r * the_case.hidden + k;
            float value = ffn_case_input(r, k);
            if (row_type == dnnl_bf16) {
                ((uint16_t *)(void *)x)[at] = ep_f32_to_bf16(value);
            } else if (row_type == dnnl_u8) {
                ((uint8_t *)x)[at] = (uint8_t)(lrintf(value / x_scale) + 128);
            } else {
                ((float *)(void *)x)[at] = value;
            }
        }
    }
    return x;
}

/* A scale that row 0 does not leave. */
static float find_h_scale(void)
{
    double most = 0;
    for (uint32_t i = 0; i < the_case.inner && i < FFN_MATRIX_PERIOD; i++) {
        most = fmax(most, fabs(ffn_case_inner(&the_case, matrices, i)));
    }
    return (float)(most / 127);
}

static int onednn_open(const ffn_case *c)
{
    const bool is_int8 = c->format == EP_WEIGHTS_W8A8;
    the_case = *c;
    weight_type = c->format == EP_WEIGHTS_BF16 ? dnnl_bf16 : is_int8 ? dnnl_s8 : dnnl_f32;
    row_type = is_int8 ? dnnl_u8 : weight_type;
    result_type = is_int8 ? dnnl_bf16 : weight_type;
    if (!is_int8 && c->format != EP_WEIGHTS_BF16 && c->format != EP_WEIGHTS_F32) {
        fprintf(stderr, "oneDNN: no weights of format %s\n", ep_weight_format_name(c->format));
        return 1;
    }
    for (int m = 0; m < FFN_MATRICES; m++) {
        ffn_case_matrix(c, m, &matrices[m]);
    }
    h_scale = find_h_scale();
    CHECK(dnnl_engine_create(&engine, dnnl_cpu, 0));
    CHECK(dnnl_stream_create(&stream, engine, dnnl_stream_default_flags));
    const dnnl_memory_desc_t x = matrix(c->rows, c->hidden, row_type, dnnl_ab);
    const dnnl_memory_desc_t h = matrix(c->rows, c->inner, row_type, dnnl_ab);
    const dnnl_memory_desc_t factor = matrix(c->rows, c->inner, result_type, dnnl_ab);
    const dnnl_memory_desc_t y = matrix(c->rows, c->hidden, result_type, dnnl_ab);
    make_product(FFN_GATE, &x, &h);
    make_product(FFN_UP, &x, &factor);
    make_product(FFN_DOWN, &h, &y);
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
    up = in_memory(&factor, NULL);
    inner = in_memory(&h, NULL);
    output_memory = ffn_case_alloc(dnnl_memory_desc_get_size(&y));
    output = in_memory(&y, output_memory);
    return 0;
}

static void multiply(int which, dnnl_memory_t x, dnnl_memory_t w, dnnl_memory_t y,
                     dnnl_memory_t factor)
{
    dnnl_exec_arg_t args[5] = {{DNNL_ARG_SRC, x}, {DNNL_ARG_WEIGHTS, w}, {DNNL_ARG_DST, y}};
    int count = 3;
    if (products[which].bias != NULL) {
        args[count++] = (dnnl_exec_arg_t){DNNL_ARG_BIAS, products[which].bias};
    }
    if (factor != NULL) {
        args[count++] =
            (dnnl_exec_arg_t){DNNL_ARG_ATTR_MULTIPLE_POST_OP(1) | DNNL_ARG_SRC_1, factor};
    }
    CHECK(dnnl_primitive_execute(products[which].primitive, stream, count, args));
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

static const void *onednn_output(ep_dtype *out_dtype)
{
    *out_dtype = result_type == dnnl_bf16 ? EP_DTYPE_BF16 : EP_DTYPE_F32;
    return output_memory;
}

int main(int argc, char **argv)
{
    static const ffn_rival rival = {
        .open = onednn_open, .pass = onednn_pass, .output = onednn_output};
    return ffn_rival_main(&rival, argc, argv);
}
