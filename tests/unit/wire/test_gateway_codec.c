/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tables of parameters against the messages and the public structs: no field of either is
 * without a row, each row is carried there and back, and what is out of its range is refused with
 * its name.
 */
#include "wire/gateway_codec.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "moe/flow.h"
#include "support/expect.h"
#include "wire/moe_parameters.h"

typedef Expertd__V1__GatewayForwardRequest request_message;
typedef Expertd__V1__GateConfig gate_message;

enum { T = 3, H = 4, K = 2, E = 5, C = 2, S = 6 };

static const char *field_of(const ep_parameter *row)
{
    return strncmp(row->name, "gate.", 5) == 0 ? row->name + 5 : row->name;
}

static bool is_listed(const char *name, const char *const *names)
{
    for (; *names != NULL; names++) {
        if (strcmp(*names, name) == 0) {
            return true;
        }
    }
    return false;
}

/* ---- the tables and the messages ---- */

static void compare_rows(const ep_parameters *set, const ProtobufCMessageDescriptor *message)
{
    static const ProtobufCType types[] = {
        [EP_PARAMETER_U32] = PROTOBUF_C_TYPE_UINT32,
        [EP_PARAMETER_U64] = PROTOBUF_C_TYPE_UINT64,
        [EP_PARAMETER_F32] = PROTOBUF_C_TYPE_FLOAT,
        [EP_PARAMETER_F32_POSITIVE] = PROTOBUF_C_TYPE_FLOAT,
        [EP_PARAMETER_FLAG] = PROTOBUF_C_TYPE_BOOL,
    };
    for (size_t i = 0; i < set->count; i++) {
        const ep_parameter *row = &set->rows[i];
        const ProtobufCFieldDescriptor *field =
            protobuf_c_message_descriptor_get_field_by_name(message, field_of(row));
        cr_assert_not_null(field, "%s is no field of %s", row->name, message->name);
        cr_assert(field->label == PROTOBUF_C_LABEL_NONE && field->type == types[row->kind],
                  "%s has another type in %s", row->name, message->name);
        cr_assert_eq(field->offset, row->in_message, "%s", row->name);
    }
}

/* others: what stands for tensors, and where the call goes. */
static void expect_all_fields(const ep_parameters *set, const ProtobufCMessageDescriptor *message,
                              const char *const *others)
{
    for (unsigned f = 0; f < message->n_fields; f++) {
        const char *name = message->fields[f].name;
        bool found = is_listed(name, others);
        for (size_t i = 0; !found && i < set->count; i++) {
            found = strcmp(field_of(&set->rows[i]), name) == 0;
        }
        cr_assert(found, "%s of %s has no row", name, message->name);
    }
}

Test(gateway_codec, rows_and_fields_of_the_messages_are_the_same)
{
    static const char *const request[] = {"model",
                                          "version",
                                          "layer",
                                          "tokens",
                                          "hidden",
                                          "top_k",
                                          "x_dtype",
                                          "ids_dtype",
                                          "scales_dtype",
                                          "out_dtype",
                                          "gate",
                                          "experts",
                                          "numerics",
                                          "smooth_rows",
                                          "has_active_mask",
                                          "shared_dtype",
                                          "const_v_dtype",
                                          "has_active_slots",
                                          "const_alpha1_dtype",
                                          "const_alpha2_dtype",
                                          "has_partial_slots",
                                          NULL};
    static const char *const gate[] = {"has_bias", "has_expert_factors", "has_chosen", NULL};
    static const char *const reply[] = {"tokens",        "hidden", "dtype", "numerics",
                                        "missing_slots", "epoch",  NULL};
    compare_rows(&ep_moe_parameters, &expertd__v1__gateway_forward_request__descriptor);
    compare_rows(&ep_gate_parameters, &expertd__v1__gate_config__descriptor);
    compare_rows(&ep_moe_result_parameters, &expertd__v1__gateway_forward_reply__descriptor);
    expect_all_fields(&ep_moe_parameters, &expertd__v1__gateway_forward_request__descriptor,
                      request);
    expect_all_fields(&ep_gate_parameters, &expertd__v1__gate_config__descriptor, gate);
    expect_all_fields(&ep_moe_result_parameters, &expertd__v1__gateway_forward_reply__descriptor,
                      reply);
}

/* ---- the tables and the public structs ---- */

static size_t bytes_of(const ep_parameter *row)
{
    return row->kind == EP_PARAMETER_FLAG  ? sizeof(bool)
           : row->kind == EP_PARAMETER_U64 ? sizeof(uint64_t)
                                           : sizeof(uint32_t);
}

/* Gaps between fields are shorter than what they align. */
static void expect_no_gap(const char *name, const bool *known, size_t bytes)
{
    size_t gap = 0;
    for (size_t i = 0; i < bytes; i++) {
        gap = known[i] ? 0 : gap + 1;
        cr_assert_lt(gap, sizeof(uint64_t), "%s has a field without a row that ends at byte %zu",
                     name, i);
    }
}

static void mark(bool *known, size_t at, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        cr_assert_not(known[at + i], "byte %zu has two rows", at + i);
        known[at + i] = true;
    }
}

static void mark_rows(const ep_parameters *set, bool *known)
{
    for (size_t i = 0; i < set->count; i++) {
        mark(known, set->rows[i].at, bytes_of(&set->rows[i]));
    }
}

#define MARK(type, field) mark(known, offsetof(type, field), sizeof(((type *)0)->field))

Test(gateway_codec, every_field_of_the_arguments_has_a_row)
{
    static bool known[sizeof(ep_moe_args)];
    ep_moe_tensor row;
    size_t last = 0; /* no tensor is the first field */
    mark_rows(&ep_moe_parameters, known);
    for (uint32_t at = 0; ep_moe_tensor_next(&at, &row);) {
        if (row.at != last) { /* the two forms of one follow each other */
            mark(known, row.at, sizeof(ep_tensor));
        }
        last = row.at;
    }
    MARK(ep_moe_args, struct_bytes);
#define EP_LOCAL(field) MARK(ep_moe_args, field);
#define EP_BESIDE(field) MARK(ep_moe_args, field);
#include "wire/moe_parameters.def"
    expect_no_gap("ep_moe_args", known, sizeof(known));
}

/* But what is of one process, and what the reply has in a form of its own. */
Test(gateway_codec, every_field_of_the_result_has_a_row)
{
    static bool known[sizeof(ep_moe_result)];
    mark_rows(&ep_moe_result_parameters, known);
    MARK(ep_moe_result, struct_bytes);
    MARK(ep_moe_result, missing_first_slot); /* of missing_slots */
    MARK(ep_moe_result, epoch_term);
    MARK(ep_moe_result, epoch_number);
    MARK(ep_moe_result, bytes_sent); /* the gateway's, to nodes */
    MARK(ep_moe_result, bytes_received);
    MARK(ep_moe_result, numerics);
    MARK(ep_moe_result, error);
    MARK(ep_moe_result, tokens_delivered);
    expect_no_gap("ep_moe_result", known, sizeof(known));
}

Test(gateway_codec, every_field_of_the_gate_has_a_row)
{
    static bool known[sizeof(ep_gate_config)];
    mark_rows(&ep_gate_parameters, known);
    MARK(ep_gate_config, struct_bytes);
    MARK(ep_gate_config, experts);
    MARK(ep_gate_config, top_k);
    MARK(ep_gate_config, bias);
    MARK(ep_gate_config, expert_factors);
    MARK(ep_gate_config, chosen);
    MARK(ep_gate_config, weight_func); /* the caller's process alone, as the next two */
    MARK(ep_gate_config, weight_func_arg);
    MARK(ep_gate_config, load);
    expect_no_gap("ep_gate_config", known, sizeof(known));
}

/* ---- there and back ---- */

typedef struct sent_call {
    ep_moe_args args;
    ep_gate_config gate;
    ep_tensor logits;
    request_message header;
    gate_message gate_message;
    ep_gateway_layout layout;
    uint8_t x[T * H * 2 * 2]; /* every second row */
    uint8_t other[4][16 * H * 4];
    uint8_t flags[T * K];
    uint8_t choice[2][T * K * 4];
    float wide[T * E];
    uint8_t section[8192] __attribute__((aligned(64)));
} sent_call;

static ep_error error;

static ep_tensor table(sent_call *c, uint32_t index, ep_dtype type, int64_t rows)
{
    return ep_tensor_2d(c->other[index], type, rows, H);
}

/* All that one call can have: distinct numbers in each row. */
static void make_call(sent_call *c, bool gated)
{
    memset(c, 0, sizeof(*c));
    for (size_t i = 0; i < sizeof(c->x); i++) {
        c->x[i] = (uint8_t)(i * 7);
    }
    for (size_t i = 0; i < sizeof(c->other); i++) {
        ((uint8_t *)c->other)[i] = (uint8_t)(i * 5 + 1);
    }
    ep_moe_args *args = &c->args;
    args->struct_bytes = sizeof(*args);
    args->model = "m";
    ep_moe_tensors_none(args);
    for (size_t i = 0; i < ep_moe_parameters.count; i++) {
        const ep_parameter *row = &ep_moe_parameters.rows[i];
        const float real = 1.5f;
        const uint64_t number = row->numbers != NULL            ? row->numbers[1]
                                : row->kind == EP_PARAMETER_U64 ? 1ull << 40
                                                                : 1;
        memcpy((uint8_t *)args + row->at,
               row->kind == EP_PARAMETER_F32_POSITIVE ? (const void *)&real : &number,
               bytes_of(row));
    }
    args->const_experts = C;
    args->x = ep_tensor_2d(c->x, EP_DTYPE_BF16, T, H);
    args->x.stride_bytes[0] = 2 * H * 2;
    args->active_mask = ep_tensor_2d(c->flags, EP_DTYPE_U8, T, K);
    args->partial_slots = ep_tensor_2d(c->flags, EP_DTYPE_BOOL, T, K);
    args->shared = table(c, 0, EP_DTYPE_F16, T);
    args->const_alpha1 = table(c, 1, EP_DTYPE_BF16, C);
    args->const_alpha2 = table(c, 2, EP_DTYPE_F16, C);
    args->const_v = table(c, 3, EP_DTYPE_F32, C);
    args->smooth_scales = table(c, 0, EP_DTYPE_F32, S);
    if (gated) {
        c->gate = (ep_gate_config){.experts = E,
                                   .top_k = K,
                                   .bias = c->wide,
                                   .expert_factors = c->wide + 1,
                                   .chosen = (const int32_t *)(const void *)c->choice[0]};
        for (size_t i = 0; i < ep_gate_parameters.count; i++) {
            const uint64_t number = 1;
            memcpy((uint8_t *)&c->gate + ep_gate_parameters.rows[i].at, &number,
                   bytes_of(&ep_gate_parameters.rows[i]));
        }
        c->logits = ep_tensor_2d(c->wide, EP_DTYPE_F32, T, E);
    } else {
        args->expert_ids = ep_tensor_2d(c->choice[0], EP_DTYPE_I32, T, K);
        args->expert_scales = ep_tensor_2d(c->choice[1], EP_DTYPE_BF16, T, K);
    }
}

static ep_err fill(sent_call *c)
{
    ep_err err =
        ep_gateway_request_fill(&c->args, c->gate.experts > 0 ? &c->gate : NULL, &c->logits,
                                EP_DTYPE_F32, &c->header, &c->gate_message, &error);
    return err != EP_OK ? err : ep_gateway_layout_make(&c->header, &c->layout, &error);
}

static void expect_same_rows(const ep_parameters *set, const void *sent, const void *seen)
{
    for (size_t i = 0; i < set->count; i++) {
        const ep_parameter *row = &set->rows[i];
        cr_assert_eq(
            memcmp((const uint8_t *)sent + row->at, (const uint8_t *)seen + row->at, bytes_of(row)),
            0, "%s", row->name);
    }
}

static void expect_same_tensors(sent_call *c, ep_moe_args *seen)
{
    ep_moe_tensor row;
    for (uint32_t at = 0; ep_moe_tensor_next(&at, &row);) {
        const ep_tensor *a = ep_moe_tensor_of(&row, &c->args);
        const ep_tensor *b = ep_moe_tensor_of(&row, seen);
        cr_assert_eq(a->rank, b->rank, "%s", row.name);
        for (int64_t r = 0; a->rank == 2 && r < a->shape[0]; r++) {
            cr_assert_eq(a->shape[1], b->shape[1], "%s", row.name);
            cr_assert_eq(memcmp((const uint8_t *)a->data + r * a->stride_bytes[0],
                                (const uint8_t *)b->data + r * b->stride_bytes[0],
                                (size_t)a->shape[1] * ep_dtype_bytes(b->dtype)),
                         0, "%s, row %d", row.name, (int)r);
        }
    }
}

Test(gateway_codec, all_of_a_call_arrives)
{
    static sent_call c;
    for (int gated = 0; gated < 2; gated++) {
        ep_gateway_view view;
        make_call(&c, gated != 0);
        ASSERT_OK(fill(&c), error);
        cr_assert_leq(c.layout.total_bytes, sizeof(c.section));
        ep_gateway_request_pack(&c.args, &c.gate, &c.logits, &c.layout, c.section);
        ASSERT_OK(ep_gateway_view_make(&c.header, c.section, c.layout.total_bytes, &view, &error),
                  error);
        expect_same_rows(&ep_moe_parameters, &c.args, &view.args);
        expect_same_tensors(&c, &view.args);
        if (gated != 0) {
            expect_same_rows(&ep_gate_parameters, &c.gate, &view.gate);
            cr_assert(memcmp(view.gate.bias, c.gate.bias, E * sizeof(float)) == 0 &&
                      memcmp(view.gate.expert_factors, c.gate.expert_factors, E * sizeof(float)) ==
                          0 &&
                      memcmp(view.gate.chosen, c.gate.chosen, T * K * sizeof(int32_t)) == 0);
            cr_assert_eq(memcmp(view.logits.data, c.wide, sizeof(c.wide)), 0);
        }
    }
}

/* ---- refusals ---- */

static void expect_out_of_range(const ep_parameters *set, const ep_parameter *row, uint32_t value,
                                const void *base, bool is_message)
{
    char wanted[64];
    snprintf(wanted, sizeof(wanted), "%s ", row->name);
    ASSERT_FAILS(ep_parameters_check(set, base, is_message, &error), EP_ERR_INVALID_ARGUMENT, error,
                 wanted);
    ASSERT_TEXT(error, ": allowed ");
    if (row->kind == EP_PARAMETER_U32) {
        snprintf(wanted, sizeof(wanted), "%s %u: allowed ", row->name, value);
        ASSERT_TEXT(error, wanted);
    }
}

Test(gateway_codec, what_is_out_of_range_is_refused_by_name)
{
    static sent_call c;
    uint32_t count = 0;
    make_call(&c, true);
    for (size_t i = 0; i < ep_moe_parameters.count + ep_gate_parameters.count; i++) {
        const bool in_gate = i >= ep_moe_parameters.count;
        const ep_parameters *set = in_gate ? &ep_gate_parameters : &ep_moe_parameters;
        const ep_parameter *row = &set->rows[in_gate ? i - ep_moe_parameters.count : i];
        uint8_t *base = in_gate ? (uint8_t *)&c.gate : (uint8_t *)&c.args;
        const float below = -1.0f;
        uint32_t value = row->most + 1;
        if (row->kind == EP_PARAMETER_F32_POSITIVE) {
            memcpy(&value, &below, sizeof(value));
        } else if (row->kind != EP_PARAMETER_U32 || row->most == UINT32_MAX) {
            continue;
        } else if (row->words != NULL) {
            value = 9;
        }
        make_call(&c, true);
        ASSERT_OK(fill(&c), error);
        uint8_t *message = in_gate ? (uint8_t *)&c.gate_message : (uint8_t *)&c.header;
        memcpy(base + row->at, &value, sizeof(value));
        memcpy(message + row->in_message, &value, sizeof(value));
        expect_out_of_range(set, row, value, base, false);
        expect_out_of_range(set, row, value, message, true);
        cr_assert_eq(ep_gateway_layout_make(&c.header, &c.layout, &error), EP_ERR_INVALID_ARGUMENT,
                     "%s", row->name);
        ASSERT_TEXT(error, row->name);
        count++;
    }
    cr_assert_geq(count, 20, "%u rows only", count);
}

Test(gateway_codec, a_field_of_a_newer_version_is_refused)
{
    static sent_call c;
    ProtobufCMessageUnknownField field = {.tag = 99};
    make_call(&c, true);
    ASSERT_OK(fill(&c), error);
    c.header.base.n_unknown_fields = 1;
    c.header.base.unknown_fields = &field;
    ASSERT_FAILS(ep_gateway_layout_make(&c.header, &c.layout, &error), EP_ERR_UNIMPLEMENTED, error,
                 "the request has field 99, which this version does not know");
    c.header.base.n_unknown_fields = 0;
    c.gate_message.base.n_unknown_fields = 1;
    c.gate_message.base.unknown_fields = &field;
    ASSERT_FAILS(ep_gateway_layout_make(&c.header, &c.layout, &error), EP_ERR_UNIMPLEMENTED, error,
                 "gate has field 99");
    c.gate_message.base.n_unknown_fields = 0;
}

Test(gateway_codec, what_would_be_left_out_is_refused)
{
    static sent_call c;
    uint32_t slots[1];
    make_call(&c, false);
    c.args.missing_slots = slots;
    ASSERT_FAILS(fill(&c), EP_ERR_INVALID_ARGUMENT, error, "missing_slots is set");
    make_call(&c, false);
    c.args.shared.rank = 1;
    ASSERT_FAILS(fill(&c), EP_ERR_INVALID_ARGUMENT, error, "shared is given");
    make_call(&c, false);
    c.args.x_scales = ep_tensor_1d(c.wide, EP_DTYPE_F32, T);
    ASSERT_FAILS(fill(&c), EP_ERR_INVALID_ARGUMENT, error, "x_scales is given");
    make_call(&c, false);
    c.args.active_mask.shape[1] = K + 1;
    ASSERT_FAILS(fill(&c), EP_ERR_INVALID_ARGUMENT, error,
                 "active_mask has rank 2 and shape 3 x 3: the call needs rank 2 and 3 x 2");
    make_call(&c, false);
    c.args.smooth_scales.dtype = EP_DTYPE_BF16;
    ASSERT_FAILS(fill(&c), EP_ERR_INVALID_ARGUMENT, error,
                 "smooth_scales has type bf16: allowed f32");
    make_call(&c, false);
    c.args.shared.dtype = EP_DTYPE_I8;
    ASSERT_FAILS(fill(&c), EP_ERR_INVALID_ARGUMENT, error, "shared_dtype 4: allowed 0 (none), 1");
    make_call(&c, false);
    ASSERT_OK(fill(&c), error);
    c.header.has_active_mask = true;
    ASSERT_FAILS(ep_gateway_layout_make(&c.header, &c.layout, &error), EP_ERR_INVALID_ARGUMENT,
                 error, "has_active_mask and has_active_slots");
}
