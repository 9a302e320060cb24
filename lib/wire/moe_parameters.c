/* SPDX-License-Identifier: Apache-2.0 */
#include "wire/moe_parameters.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "gateway.pb-c.h"
#include "moe/flow.h"

#define ALLOWED_BYTES 160

const unsigned ep_moe_dispatch_numbers[] = {EP_MOE_DISPATCH_PLAIN, EP_MOE_DISPATCH_INT8,
                                            EP_MOE_DISPATCH_FP8};
const unsigned ep_moe_combine_numbers[] = {EP_MOE_COMBINE_PLAIN, EP_MOE_COMBINE_INT8};

typedef Expertd__V1__GatewayForwardRequest request_message;
typedef Expertd__V1__GateConfig gate_message;
typedef Expertd__V1__GatewayForwardReply reply_message;

#define AT(own, message, field)                                                                    \
    .name = #field, .at = offsetof(own, field), .in_message = offsetof(message, field)

static const ep_parameter moe_rows[] = {
#define MOE(field) AT(ep_moe_args, request_message, field)
#define EP_CHOICE(field, option_, words_, numbers_, help)                                          \
    {MOE(field), .kind = EP_PARAMETER_U32, .words = (words_), .numbers = (numbers_),               \
     .option = (option_)},
#define EP_COUNT(field, option_, most_, help)                                                      \
    {MOE(field), .kind = EP_PARAMETER_U32, .most = (most_), .option = (option_)},
#define EP_NUMBER(field, option_, help) {MOE(field), .kind = EP_PARAMETER_U64, .option = (option_)},
#define EP_REAL(field, option_, help)                                                              \
    {MOE(field), .kind = EP_PARAMETER_F32_POSITIVE, .option = (option_)},
#define EP_FLAG(field, option_, help) {MOE(field), .kind = EP_PARAMETER_FLAG, .option = (option_)},
#define EP_QUIET(field) {MOE(field), .kind = EP_PARAMETER_FLAG},
#include "wire/moe_parameters.def"
};

static const ep_parameter gate_rows[] = {
#define GATE_AT(field)                                                                             \
    .name = "gate." #field, .at = offsetof(ep_gate_config, field),                                 \
    .in_message = offsetof(gate_message, field)
#define COUNT(field, least_, most_)                                                                \
    {                                                                                              \
        GATE_AT(field), .kind = EP_PARAMETER_U32, .least = (least_), .most = (most_)               \
    }
#define GATE(field, kind_)                                                                         \
    {                                                                                              \
        GATE_AT(field), .kind = (kind_)                                                            \
    }
    COUNT(select, EP_GATE_LOGIT, EP_GATE_SPARSEMIXER),
    COUNT(weight, EP_GATE_LOGIT, EP_GATE_SPARSEMIXER),
    COUNT(groups, 0, EP_GATE_GROUPS_MAX),
    COUNT(groups_kept, 0, EP_GATE_GROUPS_MAX),
    COUNT(group_best, 0, 2),
    COUNT(group_mask, 0, EP_GROUP_MASK_MINUS_INF),
    GATE(renormalise, EP_PARAMETER_FLAG),
    GATE(epsilon, EP_PARAMETER_F32),
    GATE(sum_min, EP_PARAMETER_F32),
    GATE(scaling_factor, EP_PARAMETER_F32),
    GATE(softcap, EP_PARAMETER_F32),
    GATE(jitter, EP_PARAMETER_F32),
    GATE(noise_temperature, EP_PARAMETER_F32),
    GATE(expert_dropout, EP_PARAMETER_F32),
    GATE(seed, EP_PARAMETER_U64),
};

static const ep_parameter result_rows[] = {
#define RESULT(field, kind_, most_)                                                                \
    {                                                                                              \
        AT(ep_moe_result, reply_message, field), .kind = (kind_), .most = (most_)                  \
    }
    RESULT(mode, EP_PARAMETER_U32, EP_MOE_PREFILL),
    RESULT(comm_alg, EP_PARAMETER_U32, EP_MOE_COMM_HIERARCHY),
    RESULT(combine_at, EP_PARAMETER_U32, EP_MOE_COMBINE_NODE_SUM),
    RESULT(nodes, EP_PARAMETER_U32, UINT32_MAX),
    RESULT(frames, EP_PARAMETER_U32, UINT32_MAX),
    RESULT(rerouted_frames, EP_PARAMETER_U32, UINT32_MAX),
    RESULT(hedged_frames, EP_PARAMETER_U32, UINT32_MAX),
    RESULT(missing_count, EP_PARAMETER_U32, UINT32_MAX),
    RESULT(total_us, EP_PARAMETER_U64, 0),
    RESULT(pack_us, EP_PARAMETER_U64, 0),
    RESULT(wire_us, EP_PARAMETER_U64, 0),
    RESULT(queue_us, EP_PARAMETER_U64, 0),
    RESULT(compute_us, EP_PARAMETER_U64, 0),
    RESULT(combine_us, EP_PARAMETER_U64, 0),
    RESULT(comm_why, EP_PARAMETER_U32, EP_MOE_COMM_WHY_MEASURED),
    RESULT(fullmesh_us, EP_PARAMETER_U64, 0),
    RESULT(hierarchy_us, EP_PARAMETER_U64, 0),
};

const ep_parameters ep_moe_parameters = {moe_rows, EP_ARRAY_COUNT(moe_rows)};
const ep_parameters ep_gate_parameters = {gate_rows, EP_ARRAY_COUNT(gate_rows)};
const ep_parameters ep_moe_result_parameters = {result_rows, EP_ARRAY_COUNT(result_rows)};

/* ---- a number in the struct and in the message ---- */

static void copy_one(const ep_parameter *row, const uint8_t *from, uint8_t *to, bool to_message)
{
    const uint8_t *source = from + (to_message ? row->at : row->in_message);
    uint8_t *target = to + (to_message ? row->in_message : row->at);
    if (row->kind != EP_PARAMETER_FLAG) {
        memcpy(target, source, row->kind == EP_PARAMETER_U64 ? sizeof(uint64_t) : sizeof(uint32_t));
    } else if (to_message) {
        *(protobuf_c_boolean *)(void *)target = *(const bool *)source;
    } else {
        *(bool *)target = *(const protobuf_c_boolean *)(const void *)source != 0;
    }
}

void ep_parameters_to_message(const ep_parameters *set, const void *from, void *message)
{
    for (size_t i = 0; i < set->count; i++) {
        copy_one(&set->rows[i], from, message, true);
    }
}

void ep_parameters_from_message(const ep_parameters *set, const void *message, void *to)
{
    for (size_t i = 0; i < set->count; i++) {
        copy_one(&set->rows[i], message, to, false);
    }
}

/* ---- allowed values ---- */

static bool is_among(const ep_parameter *row, uint32_t value)
{
    const char *word = row->words;
    for (unsigned place = 0; word != NULL; place++) {
        if ((row->numbers != NULL ? row->numbers[place] : place) == value) {
            return true;
        }
        word = strchr(word, '|');
        word = word != NULL ? word + 1 : NULL;
    }
    return false;
}

/* Lists the choices as "0 (auto), 1 (decode)". */
static void list_words(const ep_parameter *row, char text[ALLOWED_BYTES])
{
    size_t used = 0;
    const char *word = row->words;
    for (unsigned place = 0; *word != '\0' && used < ALLOWED_BYTES; place++) {
        const unsigned number = row->numbers != NULL ? row->numbers[place] : place;
        const int bytes = (int)strcspn(word, "|");
        used += (size_t)snprintf(text + used, ALLOWED_BYTES - used, "%s%u (%.*s)",
                                 place == 0 ? "" : ", ", number, bytes, word);
        word += bytes + (word[bytes] == '|');
    }
}

static ep_err check_one(const ep_parameter *row, const uint8_t *value, ep_error *out_error)
{
    char allowed[ALLOWED_BYTES];
    float real;
    uint32_t number;
    memcpy(&real, value, sizeof(real));
    memcpy(&number, value, sizeof(number));
    if (row->kind == EP_PARAMETER_F32_POSITIVE && !(real >= 0.0f)) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, "%s %g: allowed 0 (off) or more",
                            row->name, (double)real);
    }
    if (row->kind != EP_PARAMETER_U32 ||
        (row->words != NULL ? is_among(row, number)
                            : number >= row->least && number <= row->most)) {
        return EP_OK;
    }
    if (row->words == NULL) {
        snprintf(allowed, sizeof(allowed), "%" PRIu32 "..%" PRIu32, row->least, row->most);
    } else {
        list_words(row, allowed);
    }
    return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, "%s %" PRIu32 ": allowed %s", row->name,
                        number, allowed);
}

ep_err ep_parameters_check(const ep_parameters *set, const void *base, bool is_message,
                           ep_error *out_error)
{
    ep_err err = EP_OK;
    for (size_t i = 0; err == EP_OK && i < set->count; i++) {
        const ep_parameter *row = &set->rows[i];
        if (row->kind != EP_PARAMETER_FLAG && row->kind != EP_PARAMETER_U64) {
            err = check_one(row, (const uint8_t *)base + (is_message ? row->in_message : row->at),
                            out_error);
        }
    }
    return err;
}

const char *ep_moe_args_local(const ep_moe_args *args)
{
    const ep_moe_args none = {0};
#define EP_LOCAL(field)                                                                            \
    if (memcmp(&args->field, &none.field, sizeof(none.field)) != 0) {                              \
        return #field;                                                                             \
    }
#include "wire/moe_parameters.def"
    return NULL;
}
