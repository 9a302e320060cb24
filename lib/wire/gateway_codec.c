/* SPDX-License-Identifier: Apache-2.0 */
/* Parts, layout and checks of a gateway request. */
#include "wire/gateway_codec.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/buffer.h"
#include "base/check.h"
#include "moe/convert.h"
#include "moe/flow.h"
#include "wire/moe_parameters.h"

#define BAD(...) ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, __VA_ARGS__)

typedef Expertd__V1__GatewayForwardRequest request_message;
typedef Expertd__V1__GateConfig gate_message;

/* ---- the parts of the section ---- */

typedef enum part_place { IN_ARGS, IN_GATE, IN_LOGITS } part_place;

/* A part of the section. Present when the field `given`, a u32 or bool of the message, is not 0. */
typedef struct gateway_part {
    const char *name;
    part_place place;
    size_t at; /* of the tensor in ep_moe_args, or of the pointer in ep_gate_config */
    /* offset of the field in the request; for a part in the gate, in the gate's message */
    size_t given;
    /* name of `given` when that is the element type; NULL: the element type is fixed */
    const char *type_name;
    uint32_t types; /* a bit for each allowed type */
    ep_dtype type;
    bool is_optional; /* `given` may be 0 */
    size_t rows;      /* offset of a u32 of the request */
    size_t columns;   /* the same; 0: one dimension */
} gateway_part;

#define BIT(name) (1u << EP_DTYPE_##name)
#define FLOATS (BIT(BF16) | BIT(F16) | BIT(F32))
#define FIELD(field) offsetof(request_message, field)
#define ARG(field) .name = #field, .place = IN_ARGS, .at = offsetof(ep_moe_args, field)
#define GATE(field)                                                                                \
    .name = "gate." #field, .place = IN_GATE, .at = offsetof(ep_gate_config, field),               \
    .given = offsetof(gate_message, has_##field)
#define TYPED(field, types_)                                                                       \
    .given = FIELD(field##_dtype), .type_name = #field "_dtype", .types = (types_)
#define BY(rows_, columns_) .rows = FIELD(rows_), .columns = FIELD(columns_)

static const gateway_part parts[EP_GATEWAY_PARTS] = {
    {ARG(x), TYPED(x, FLOATS | BIT(I8)), BY(tokens, hidden)},
    /* present when x is i8 */
    {ARG(x_scales), .given = FIELD(x_dtype), .type = EP_DTYPE_F32, .rows = FIELD(tokens)},
    {ARG(expert_ids), TYPED(ids, BIT(I32) | BIT(I64)), BY(tokens, top_k), .is_optional = true},
    {ARG(expert_scales), TYPED(scales, BIT(BF16) | BIT(F32)), BY(tokens, top_k),
     .is_optional = true},
    {.name = "logits",
     .place = IN_LOGITS,
     .given = FIELD(experts),
     .type = EP_DTYPE_F32,
     BY(tokens, experts)},
    {GATE(bias), .type = EP_DTYPE_F32, .rows = FIELD(experts)},
    {GATE(expert_factors), .type = EP_DTYPE_F32, .rows = FIELD(experts)},
    {GATE(chosen), .type = EP_DTYPE_I32, BY(tokens, top_k)},
    {ARG(active_mask), .given = FIELD(has_active_mask), .type = EP_DTYPE_BOOL,
     .rows = FIELD(tokens)},
    {ARG(active_mask), .given = FIELD(has_active_slots), .type = EP_DTYPE_BOOL, BY(tokens, top_k)},
    {ARG(partial_slots), .given = FIELD(has_partial_slots), .type = EP_DTYPE_BOOL,
     BY(tokens, top_k)},
    {ARG(shared), TYPED(shared, FLOATS), BY(tokens, hidden), .is_optional = true},
    {ARG(const_alpha1), TYPED(const_alpha1, FLOATS), BY(const_experts, hidden),
     .is_optional = true},
    {ARG(const_alpha2), TYPED(const_alpha2, FLOATS), BY(const_experts, hidden),
     .is_optional = true},
    {ARG(const_v), TYPED(const_v, FLOATS), BY(const_experts, hidden), .is_optional = true},
    {ARG(smooth_scales), .given = FIELD(smooth_rows), .type = EP_DTYPE_F32,
     BY(smooth_rows, hidden)},
};

static uint32_t read_u32(const void *message, size_t at)
{
    uint32_t value;
    memcpy(&value, (const uint8_t *)message + at, sizeof(value));
    return value;
}

static const ep_tensor *tensor_of(const gateway_part *part, const ep_moe_args *args)
{
    return (const ep_tensor *)(const void *)((const uint8_t *)args + part->at);
}

static uint32_t rank_of(const gateway_part *part)
{
    return part->columns == 0 ? 1 : 2;
}

/* Element type of a part; NONE where it is absent. */
static ep_dtype type_of(const gateway_part *part, const request_message *header)
{
    if (part->place == IN_GATE) {
        return header->gate != NULL && read_u32(header->gate, part->given) != 0 ? part->type
                                                                                : EP_DTYPE_NONE;
    }
    const uint32_t given = read_u32(header, part->given);
    if (part->type_name != NULL) {
        return (ep_dtype)given;
    }
    const bool is_given = part->given == FIELD(x_dtype) ? given == EP_DTYPE_I8 : given != 0;
    return is_given ? part->type : EP_DTYPE_NONE;
}

static char dim_of(size_t field)
{
    return field == 0                      ? '\0'
           : field == FIELD(tokens)        ? 'T'
           : field == FIELD(top_k)         ? 'K'
           : field == FIELD(hidden)        ? 'H'
           : field == FIELD(const_experts) ? 'C'
                                           : 'S';
}

bool ep_moe_tensor_next(uint32_t *at, ep_moe_tensor *out_row)
{
    while (*at < EP_GATEWAY_PARTS) {
        const gateway_part *part = &parts[(*at)++];
        if (part->place == IN_ARGS) {
            *out_row = (ep_moe_tensor){
                part->name, part->at, {dim_of(part->rows), dim_of(part->columns), '\0'}};
            return true;
        }
    }
    return false;
}

ep_tensor *ep_moe_tensor_of(const ep_moe_tensor *row, ep_moe_args *args)
{
    return (ep_tensor *)(void *)((uint8_t *)args + row->at);
}

void ep_moe_tensors_none(ep_moe_args *args)
{
    ep_moe_tensor row;
    for (uint32_t at = 0; ep_moe_tensor_next(&at, &row);) {
        *ep_moe_tensor_of(&row, args) = ep_tensor_none();
    }
}

bool ep_moe_token_is_masked(const ep_moe_args *args, int64_t token)
{
    const ep_tensor *mask = &args->active_mask;
    if (mask->rank < 1 || mask->rank > 2 || mask->data == NULL || token >= mask->shape[0]) {
        return false;
    }
    const uint8_t *flags = (const uint8_t *)mask->data + token * mask->stride_bytes[0];
    const int64_t count = mask->rank == 1 ? 1 : mask->shape[1];
    bool active = count == 0;
    for (int64_t k = 0; k < count; k++) {
        active |= flags[k] != 0;
    }
    return !active;
}

/* ---- checks ---- */

static ep_err check_range(const char *field, uint32_t value, uint32_t min, uint32_t max,
                          const char *why, ep_error *out_error)
{
    if (value >= min && value <= max) {
        return EP_OK;
    }
    return min == max ? BAD("%s %" PRIu32 ": allowed %" PRIu32 "%s", field, value, min, why)
                      : BAD("%s %" PRIu32 ": allowed %" PRIu32 "..%" PRIu32 "%s", field, value, min,
                            max, why);
}

static ep_err check_type(const char *field, uint32_t value, uint32_t types, bool is_optional,
                         ep_error *out_error)
{
    char allowed[96] = "";
    size_t used = 0;
    if ((value == 0 && is_optional) || (value > 0 && value < 32 && (types >> value & 1u) != 0)) {
        return EP_OK;
    }
    for (uint32_t t = is_optional ? 0 : 1; t < 32 && used < sizeof(allowed); t++) {
        if (t == 0 || (types >> t & 1u) != 0) {
            used += (size_t)snprintf(allowed + used, sizeof(allowed) - used, "%s%" PRIu32 " (%s)",
                                     used == 0 ? "" : ", ", t, ep_dtype_name((ep_dtype)t));
        }
    }
    return BAD("%s %" PRIu32 ": allowed %s", field, value, allowed);
}

static ep_err check_types(const request_message *header, ep_error *out_error)
{
    const char *no_slots = header->gate != NULL ? " with gate"
                           : header->top_k == 0 ? " with top_k 0"
                                                : NULL;
    ep_err err = check_type("out_dtype", header->out_dtype, FLOATS, false, out_error);
    for (size_t i = 0; err == EP_OK && i < EP_GATEWAY_PARTS; i++) {
        const gateway_part *part = &parts[i];
        const bool is_choice =
            part->given == FIELD(ids_dtype) || part->given == FIELD(scales_dtype);
        const uint32_t given = part->type_name != NULL ? read_u32(header, part->given) : 0;
        if (part->type_name != NULL) {
            err = is_choice && no_slots != NULL
                      ? check_range(part->type_name, given, 0, 0, no_slots, out_error)
                      : check_type(part->type_name, given, part->types,
                                   part->is_optional && !is_choice, out_error);
        }
    }
    return err;
}

/* Refuses fields of a newer client: what they ask for would be ignored. */
static ep_err check_known(const char *what, const ProtobufCMessage *message, ep_error *out_error)
{
    return message->n_unknown_fields == 0
               ? EP_OK
               : ep_error_set(out_error, EP_ERR_UNIMPLEMENTED,
                              "%s has field %" PRIu32 ", which this version does not know: leave "
                              "it away, or upgrade the coordinator",
                              what, message->unknown_fields[0].tag);
}

static ep_err check_gate(const request_message *header, ep_error *out_error)
{
    ep_err err;
    if (header->gate == NULL) {
        return check_range("experts", header->experts, 0, 0, " without gate", out_error);
    }
    if ((err = check_known("gate", &header->gate->base, out_error)) != EP_OK ||
        (err = check_range("experts", header->experts, 1, EP_EXPERTS_MAX, " with gate",
                           out_error)) != EP_OK ||
        (err = check_range("top_k", header->top_k, 1, EP_TOP_K_MAX, " with gate", out_error)) !=
            EP_OK) {
        return err;
    }
    return ep_parameters_check(&ep_gate_parameters, header->gate, true, out_error);
}

static ep_err check_header(const request_message *header, ep_error *out_error)
{
    ep_err err;
    if ((err = check_known("the request", &header->base, out_error)) != EP_OK ||
        (err = check_range("tokens", header->tokens, 0, EP_TOKENS_MAX, "", out_error)) != EP_OK ||
        (err = check_range("hidden", header->hidden, 1, EP_HIDDEN_MAX, "", out_error)) != EP_OK ||
        (err = check_range("top_k", header->top_k, 0, EP_TOP_K_MAX, "", out_error)) != EP_OK ||
        (err = check_range("smooth_rows", header->smooth_rows, 0, EP_EXPERTS_MAX, "", out_error)) !=
            EP_OK ||
        (err = ep_parameters_check(&ep_moe_parameters, header, true, out_error)) != EP_OK ||
        (err = check_gate(header, out_error)) != EP_OK ||
        (err = check_types(header, out_error)) != EP_OK) {
        return err;
    }
    return header->has_active_mask && header->has_active_slots
               ? BAD("has_active_mask and has_active_slots are both true: allowed one of them")
               : EP_OK;
}

/* ---- layout ---- */

/* Appends rows x columns elements at the next multiple of 64 after *end; false on overflow. */
static bool add_part(uint32_t rows, uint32_t columns, size_t element_bytes, size_t *end,
                     size_t *out_offset, size_t *out_bytes)
{
    size_t count;
    if (*end > SIZE_MAX - EP_BUFFER_ALIGN || !ep_mul_size(rows, columns, &count) ||
        !ep_mul_size(count, element_bytes, out_bytes)) {
        return false;
    }
    *out_offset = ep_align_up(*end, EP_BUFFER_ALIGN);
    return *out_bytes == 0 || ep_add_size(*out_offset, *out_bytes, end);
}

ep_err ep_gateway_layout_make(const request_message *header, ep_gateway_layout *out_layout,
                              ep_error *out_error)
{
    ep_gateway_layout layout = {0};
    size_t end = 0;
    size_t offset;
    ep_err err = check_header(header, out_error);
    if (err != EP_OK) {
        return err;
    }
    bool fits = true;
    for (size_t i = 0; fits && i < EP_GATEWAY_PARTS; i++) {
        const gateway_part *part = &parts[i];
        const uint32_t columns = part->columns == 0 ? 1 : read_u32(header, part->columns);
        fits =
            add_part(read_u32(header, part->rows), columns, ep_dtype_bytes(type_of(part, header)),
                     &end, &layout.offset[i], &layout.bytes[i]);
    }
    layout.total_bytes = end;
    end = 0;
    const uint32_t rows = /* at most 2^16 * 2^6 */
        header->tokens * (header->result == EP_MOE_UNCOMBINED ? header->top_k : 1);
    if (!fits || !add_part(rows, header->hidden, ep_dtype_bytes((ep_dtype)header->out_dtype), &end,
                           &offset, &layout.reply_bytes)) {
        return BAD("tokens %" PRIu32 ", hidden %" PRIu32 ", top_k %" PRIu32 ", experts %" PRIu32
                   ": the tensors do not fit in memory",
                   header->tokens, header->hidden, header->top_k, header->experts);
    }
    *out_layout = layout;
    return EP_OK;
}

/* ---- the caller's side ---- */

/* The part for a tensor of this rank; NULL: none. */
static const gateway_part *part_for(const gateway_part *any, uint32_t rank)
{
    for (size_t i = 0; i < EP_GATEWAY_PARTS; i++) {
        if (parts[i].place == IN_ARGS && parts[i].at == any->at && rank_of(&parts[i]) == rank) {
            return &parts[i];
        }
    }
    return NULL;
}

/* Whether the tensor can be copied to the part as the header describes it. */
static ep_err check_tensor(const gateway_part *part, const ep_tensor *tensor,
                           const request_message *header, ep_error *out_error)
{
    const ep_dtype type = type_of(part, header);
    const uint32_t rank = rank_of(part);
    const uint32_t rows = read_u32(header, part->rows);
    const uint32_t columns = rank == 1 ? 1 : read_u32(header, part->columns);
    const bool is_flag = type == EP_DTYPE_BOOL && tensor->dtype == EP_DTYPE_U8;
    if (type == EP_DTYPE_NONE) {
        return BAD("%s is given: this call does not use it", part->name);
    }
    if (tensor->dtype != type && !is_flag) {
        return BAD("%s has type %s: allowed %s", part->name, ep_dtype_name(tensor->dtype),
                   ep_dtype_name(type));
    }
    if (tensor->rank != rank || tensor->shape[0] != rows ||
        (rank == 2 && tensor->shape[1] != columns)) {
        return BAD("%s has rank %" PRIu32 " and shape %" PRId64 " x %" PRId64
                   ": the call needs rank %" PRIu32 " and %" PRIu32 " x %" PRIu32,
                   part->name, tensor->rank, tensor->shape[0], rank == 1 ? 1 : tensor->shape[1],
                   rank, rows, columns);
    }
    const size_t element = ep_dtype_bytes(type);
    if (tensor->shape[rank - 1] > 1 && tensor->stride_bytes[rank - 1] != (int64_t)element) {
        return BAD("%s has innermost stride %" PRId64 ": allowed %zu, the element size", part->name,
                   tensor->stride_bytes[rank - 1], element);
    }
    return EP_OK;
}

static ep_err check_tensors(const ep_moe_args *args, const ep_tensor *logits,
                            const request_message *header, ep_error *out_error)
{
    ep_err err = EP_OK;
    for (size_t i = 0; err == EP_OK && i < EP_GATEWAY_PARTS; i++) {
        const gateway_part *part = &parts[i];
        if (part->place == IN_LOGITS && header->gate != NULL) {
            err = check_tensor(part, logits, header, out_error);
        } else if (part->place == IN_ARGS && tensor_of(part, args)->rank != 0) {
            const ep_tensor *tensor = tensor_of(part, args);
            const gateway_part *carrier = part_for(part, tensor->rank);
            err = check_tensor(carrier != NULL ? carrier : part, tensor, header, out_error);
        }
    }
    return err;
}

static void fill_given(const ep_moe_args *args, request_message *header)
{
    for (size_t i = 0; i < EP_GATEWAY_PARTS; i++) {
        const gateway_part *part = &parts[i];
        if (part->place == IN_ARGS && tensor_of(part, args)->rank == rank_of(part) &&
            part->given != FIELD(x_dtype)) {
            const ep_tensor *tensor = tensor_of(part, args);
            const uint32_t given = part->type_name != NULL     ? (uint32_t)tensor->dtype
                                   : part->given == part->rows ? (uint32_t)tensor->shape[0]
                                                               : 1;
            memcpy((uint8_t *)header + part->given, &given, sizeof(given));
        }
    }
    header->x_dtype = (uint32_t)args->x.dtype;
}

ep_err ep_gateway_request_fill(const ep_moe_args *args, const ep_gate_config *gate,
                               const ep_tensor *logits, ep_dtype out_dtype, request_message *header,
                               gate_message *out_gate_message, ep_error *out_error)
{
    const char *local = ep_moe_args_local(args);
    if (local != NULL) {
        return BAD("%s is set: the gateway does not take it", local);
    }
    if (args->x.rank != 2) {
        return BAD("x has rank %" PRIu32 ": allowed 2", args->x.rank);
    }
    expertd__v1__gateway_forward_request__init(header);
    expertd__v1__gate_config__init(out_gate_message);
    header->model = (char *)(uintptr_t)args->model;
    header->version = (char *)(uintptr_t)(args->version != NULL ? args->version : "");
    header->layer = args->layer;
    header->tokens = (uint32_t)args->x.shape[0];
    header->hidden = (uint32_t)args->x.shape[1];
    header->out_dtype = (uint32_t)out_dtype;
    ep_parameters_to_message(&ep_moe_parameters, args, header);
    if (gate != NULL) {
        ep_parameters_to_message(&ep_gate_parameters, gate, out_gate_message);
        out_gate_message->has_bias = gate->bias != NULL;
        out_gate_message->has_expert_factors = gate->expert_factors != NULL;
        out_gate_message->has_chosen = gate->chosen != NULL;
        header->gate = out_gate_message;
        header->experts = gate->experts;
        header->top_k = gate->top_k;
    } else if (args->expert_ids.rank == 2) {
        header->top_k = (uint32_t)args->expert_ids.shape[1];
    }
    fill_given(args, header);
    ep_err err = check_header(header, out_error);
    return err != EP_OK ? err : check_tensors(args, logits, header, out_error);
}

void ep_gateway_request_pack(const ep_moe_args *args, const ep_gate_config *gate,
                             const ep_tensor *logits, const ep_gateway_layout *layout,
                             uint8_t *out_section)
{
    memset(out_section, 0, layout->total_bytes);
    for (size_t i = 0; i < EP_GATEWAY_PARTS; i++) {
        const gateway_part *part = &parts[i];
        uint8_t *to = out_section + layout->offset[i];
        const size_t bytes = layout->bytes[i];
        const ep_tensor *tensor = part->place == IN_ARGS ? tensor_of(part, args) : logits;
        const void *array = NULL;
        if (bytes == 0) {
            continue;
        }
        if (part->place == IN_GATE) {
            memcpy(&array, (const uint8_t *)gate + part->at, sizeof(array));
            memcpy(to, array, bytes);
        } else if (tensor->rank == 1) {
            memcpy(to, tensor->data, bytes);
        } else {
            const size_t row_bytes = bytes / (size_t)tensor->shape[0];
            for (int64_t r = 0; r < tensor->shape[0]; r++) {
                memcpy(to + (size_t)r * row_bytes,
                       (const uint8_t *)tensor->data + r * tensor->stride_bytes[0], row_bytes);
            }
        }
    }
}

/* ---- the gateway's side ---- */

static void view_parts(const request_message *header, const uint8_t *tensors,
                       const ep_gateway_layout *layout, ep_gateway_view *view)
{
    for (size_t i = 0; i < EP_GATEWAY_PARTS; i++) {
        const gateway_part *part = &parts[i];
        const uint8_t *data = layout->bytes[i] > 0 ? tensors + layout->offset[i] : NULL;
        if (type_of(part, header) == EP_DTYPE_NONE) {
            continue;
        }
        if (part->place == IN_GATE) {
            memcpy((uint8_t *)&view->gate + part->at, &data, sizeof(data));
            continue;
        }
        /* only read, but the public type has one pointer for reading and writing */
        void *at = (void *)(uintptr_t)data;
        const ep_dtype type = type_of(part, header);
        const uint32_t rows = read_u32(header, part->rows);
        const ep_tensor tensor =
            part->columns == 0 ? ep_tensor_1d(at, type, rows)
                               : ep_tensor_2d(at, type, rows, read_u32(header, part->columns));
        if (part->place == IN_LOGITS) {
            view->logits = tensor;
        } else {
            memcpy((uint8_t *)&view->args + part->at, &tensor, sizeof(tensor));
        }
    }
}

ep_err ep_gateway_view_make(const request_message *header, const uint8_t *tensors,
                            size_t tensor_bytes, ep_gateway_view *out_view, ep_error *out_error)
{
    ep_gateway_layout layout;
    ep_err err = ep_gateway_layout_make(header, &layout, out_error);
    if (err != EP_OK) {
        return err;
    }
    if (tensor_bytes != layout.total_bytes) {
        return BAD("the tensor section has %zu bytes: tokens %" PRIu32 ", hidden %" PRIu32
                   ", top_k %" PRIu32 ", experts %" PRIu32 " and their types need %zu",
                   tensor_bytes, header->tokens, header->hidden, header->top_k, header->experts,
                   layout.total_bytes);
    }
    const ep_dtype out = (ep_dtype)header->out_dtype;
    ep_gateway_view view = {
        .args = {.struct_bytes = sizeof(view.args),
                 .model = header->model,
                 .version = header->version[0] != 0 ? header->version : NULL,
                 .layer = header->layer},
        .out = header->result == EP_MOE_UNCOMBINED
                   ? ep_tensor_3d(NULL, out, header->tokens, header->top_k, header->hidden)
                   : ep_tensor_2d(NULL, out, header->tokens, header->hidden),
        .reply_bytes = layout.reply_bytes,
    };
    ep_moe_tensors_none(&view.args);
    ep_parameters_from_message(&ep_moe_parameters, header, &view.args);
    if (header->gate != NULL) {
        view.gate = (ep_gate_config){
            .struct_bytes = sizeof(view.gate), .experts = header->experts, .top_k = header->top_k};
        ep_parameters_from_message(&ep_gate_parameters, header->gate, &view.gate);
    }
    view_parts(header, tensors, &layout, &view);
    *out_view = view;
    return EP_OK;
}
