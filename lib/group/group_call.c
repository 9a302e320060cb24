/* SPDX-License-Identifier: Apache-2.0 */
/* The table of a call's parameters: names, texts, comparison. */
#include "group/group_call.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"

typedef enum field_kind {
    NUMBER,
    OPERATOR,
    PROFILE,
    COMM,
    DTYPE,
    GIVEN,
    FLOAT_BITS,
    DIGEST,
    ASSIST
} field_kind;

typedef struct field {
    const char *name;
    size_t offset;
    field_kind kind;
} field;

#define F(member, name, kind)                                                                      \
    {                                                                                              \
        name, offsetof(ep_group_call, member), kind                                                \
    }
static const field fields[] = {
    F(operator, "the operator", OPERATOR),
    F(profile, "profile", PROFILE),
    F(const_rule, "const_rule", NUMBER),
    F(world_size, "ep_world_size", NUMBER),
    F(elastic_digest, "elastic_info", DIGEST),
    F(moe_experts, "moe_expert_num", NUMBER),
    F(shared_experts, "shared_expert_num", NUMBER),
    F(shared_ranks, "shared_expert_rank_num", NUMBER),
    F(shared_rows, "shared_expert_num", NUMBER),
    F(tp_world_size, "tp_world_size", NUMBER),
    F(shard_type, "expert_shard_type", NUMBER),
    F(global_bs, "global_bs", NUMBER),
    F(zero_experts, "zero_expert_num", NUMBER),
    F(copy_experts, "copy_expert_num", NUMBER),
    F(const_experts, "const_expert_num", NUMBER),
    F(comm, "comm_alg", COMM),
    F(allow_duplicates, "allow_duplicates", NUMBER),
    F(quant_mode, "quant_mode", NUMBER),
    F(comm_quant_mode, "comm_quant_mode", NUMBER),
    F(token_nums_type, "expert_token_nums_type", NUMBER),
    F(out_dtype, "out_dtype", NUMBER),
    F(group_list_type, "group_list_type", NUMBER),
    F(hidden, "H", NUMBER),
    F(top_k, "K", NUMBER),
    F(dtype, "the type of x", DTYPE),
    F(ids_dtype, "the type of expert_ids", DTYPE),
    F(has_scales, "scales", GIVEN),
    F(has_expert_scales, "expert_scales", GIVEN),
    F(has_shared_x, "shared_expert_x", GIVEN),
    F(norm_eps_bits, "norm eps", FLOAT_BITS),
    F(dispatch_number, "assist_info_for_combine (number of its dispatch)", ASSIST),
    F(tokens, "BS", NUMBER),
    F(has_inactive, "x_active_mask with inactive entries", GIVEN),
};
_Static_assert(EP_ARRAY_COUNT(fields) == EP_GROUP_CALL_TOLD, "one row for each field that travels");
_Static_assert(offsetof(ep_group_call, tokens) == 8 * EP_GROUP_CALL_COMPARED,
               "compared fields come first");
_Static_assert(offsetof(ep_group_call, ranks) == 8 * EP_GROUP_CALL_TOLD,
               "told fields come before the others");

int64_t ep_group_call_field(const ep_group_call *call, uint32_t i)
{
    int64_t value;
    memcpy(&value, (const char *)call + fields[i].offset, sizeof(value));
    return value;
}

const char *ep_group_call_field_name(uint32_t i)
{
    return fields[i].name;
}

const char *ep_group_operator_name(int64_t operator)
{
    switch (operator) {
    case EP_GROUP_DISPATCH:
        return "ep_moe_dispatch";
    case EP_GROUP_COMBINE:
        return "ep_moe_combine";
    case EP_GROUP_COMBINE_NORM:
        return "ep_moe_combine_add_rms_norm";
    default:
        return "unknown";
    }
}

static const char *name_of(int64_t value, const char *const *names, size_t count)
{
    return value >= 0 && (uint64_t)value < count ? names[value] : "unknown";
}

/* The value as users write it, "fullmesh_v2". */
static void field_text(uint32_t i, int64_t value, char *out, size_t bytes)
{
    static const char *const profiles[] = {"native", "a2", "a3"};
    static const char *const comms[] = {"unknown", "fullmesh", "fullmesh_v2", "hierarchy"};
    uint32_t bits = (uint32_t)value;
    float real;
    switch (fields[i].kind) {
    case OPERATOR:
        snprintf(out, bytes, "%s", ep_group_operator_name(value));
        break;
    case PROFILE:
        snprintf(out, bytes, "%s", name_of(value, profiles, EP_ARRAY_COUNT(profiles)));
        break;
    case COMM:
        snprintf(out, bytes, "%s", name_of(value, comms, EP_ARRAY_COUNT(comms)));
        break;
    case DTYPE:
        snprintf(out, bytes, "%s", ep_dtype_name((ep_dtype)value));
        break;
    case GIVEN:
        snprintf(out, bytes, "%s", value != 0 ? "given" : "not given");
        break;
    case FLOAT_BITS:
        memcpy(&real, &bits, sizeof(real));
        snprintf(out, bytes, "%g", (double)real);
        break;
    case DIGEST:
        snprintf(out, bytes, "%016" PRIx64 "%s", (uint64_t)value, value == 0 ? " (all ranks)" : "");
        break;
    case ASSIST:
        if (value == EP_GROUP_BY_INDEX) {
            snprintf(out, bytes, "absent (expand_idx)");
            break;
        }
        /* fall through */
    case NUMBER:
        snprintf(out, bytes, "%" PRId64, value);
        break;
    }
}

void ep_group_record_encode(const ep_group_call *call, uint8_t out[EP_GROUP_RECORD_BYTES])
{
    uint64_t count = EP_GROUP_CALL_TOLD;
    memcpy(out, &count, sizeof(count));
    for (uint32_t i = 0; i < EP_GROUP_CALL_TOLD; i++) {
        int64_t value = ep_group_call_field(call, i);
        memcpy(out + 8 + 8 * (size_t)i, &value, sizeof(value));
    }
}

ep_err ep_group_record_decode(const uint8_t record[EP_GROUP_RECORD_BYTES], ep_group_call *out_call,
                              ep_error *out_error)
{
    uint64_t count;
    memcpy(&count, record, sizeof(count));
    if (count != EP_GROUP_CALL_TOLD) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL,
                            "a parameter record has %" PRIu64 " fields: allowed %d", count,
                            EP_GROUP_CALL_TOLD);
    }
    memset(out_call, 0, sizeof(*out_call));
    for (uint32_t i = 0; i < EP_GROUP_CALL_TOLD; i++) {
        memcpy((char *)out_call + fields[i].offset, record + 8 + 8 * (size_t)i, sizeof(int64_t));
    }
    return EP_OK;
}

/* ---- disagreement ---- */

void ep_group_ranks_text(const bool *named, const uint32_t *ranks, uint32_t count, char *out,
                         size_t bytes)
{
    size_t used = 0;
    out[0] = 0;
    for (uint32_t i = 0; i < count && used + 24 < bytes; i++) {
        const uint32_t begin = i;
        const char *before = used == 0 ? "" : ", ";
        if (!named[i]) {
            continue;
        }
        while (i + 1 < count && named[i + 1] && ranks[i + 1] == ranks[i] + 1) {
            i++;
        }
        used +=
            (size_t)(i == begin ? snprintf(out + used, bytes - used, "%s%" PRIu32, before, ranks[i])
                                : snprintf(out + used, bytes - used, "%s%" PRIu32 "-%" PRIu32,
                                           before, ranks[begin], ranks[i]));
    }
}

static bool seen_before(const ep_group_call *calls, uint32_t c, uint32_t i)
{
    for (uint32_t b = 0; b < c; b++) {
        if (ep_group_call_field(&calls[b], i) == ep_group_call_field(&calls[c], i)) {
            return true;
        }
    }
    return false;
}

static ep_err report(const ep_group_call *calls, const uint32_t *ranks, uint32_t count, uint32_t i,
                     const char *rule, ep_error *out_error)
{
    char all[EP_ERROR_TEXT_BYTES] = "";
    size_t used = 0;
    for (uint32_t c = 0; c < count && used + 1 < sizeof(all); c++) {
        bool named[EP_GROUP_WORLD_MAX];
        char text[64];
        char at[EP_ERROR_TEXT_BYTES];
        const int64_t value = ep_group_call_field(&calls[c], i);
        if (seen_before(calls, c, i)) {
            continue;
        }
        for (uint32_t b = 0; b < count; b++) {
            named[b] = ep_group_call_field(&calls[b], i) == value;
        }
        field_text(i, value, text, sizeof(text));
        ep_group_ranks_text(named, ranks, count, at, sizeof(at));
        used += (size_t)snprintf(all + used, sizeof(all) - used, "%s%s at rank %s",
                                 used == 0 ? "" : "; ", text, at);
    }
    return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, "%s differs between ranks: %.400s%s",
                        fields[i].name, all, rule);
}

static bool differs(const ep_group_call *calls, uint32_t count, uint32_t i)
{
    for (uint32_t c = 1; c < count; c++) {
        if (ep_group_call_field(&calls[c], i) != ep_group_call_field(&calls[0], i)) {
            return true;
        }
    }
    return false;
}

/* In the profiles all batches have one size, or global_bs names the largest. */
static ep_err compare_batches(const ep_group_call *calls, const uint32_t *ranks, uint32_t count,
                              ep_error *out_error)
{
    bool uneven = differs(calls, count, EP_GROUP_CALL_COMPARED);
    uint32_t largest = 0;
    for (uint32_t c = 1; c < count; c++) {
        largest = calls[c].tokens > calls[largest].tokens ? c : largest;
    }
    if (uneven && calls[0].global_bs == 0) {
        return report(calls, ranks, count, EP_GROUP_CALL_COMPARED,
                      ": with global_bs 0 all must be equal, else global_bs is ranks * largest BS",
                      out_error);
    }
    /* from a peer, any value; 0: a TP pair, which has no batch */
    const int64_t most = calls[largest].tokens;
    if (calls[0].global_bs != 0 && most != 0 &&
        (calls[0].global_bs / (int64_t)count != most || calls[0].global_bs % (int64_t)count != 0)) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "global_bs is %" PRId64 ": allowed 0, or ep_world_size * largest BS = "
                            "%" PRIu32 " * %" PRId64 " (of rank %" PRIu32 ")",
                            calls[0].global_bs, count, most, ranks[largest]);
    }
    for (uint32_t c = 0; uneven && c < count; c++) {
        if (calls[c].has_inactive != 0) {
            return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                                "x_active_mask has inactive entries at rank %" PRIu32
                                ", and BS differs between ranks: then all tokens "
                                "must be active",
                                ranks[c]);
        }
    }
    return uneven && calls[0].comm == EP_GROUP_HIERARCHY && calls[0].profile == EP_GROUP_A3
               ? report(calls, ranks, count, EP_GROUP_CALL_COMPARED,
                        ": with comm_alg hierarchy all must be equal (profile a3)", out_error)
               : EP_OK;
}

ep_err ep_group_calls_compare(const ep_group_call *calls, const uint32_t *ranks, uint32_t count,
                              ep_error *out_error)
{
    for (uint32_t i = 0; i < EP_GROUP_CALL_COMPARED; i++) {
        if (differs(calls, count, i)) {
            return report(calls, ranks, count, i, "", out_error);
        }
    }
    return count == 0 || calls[0].profile == EP_GROUP_NATIVE
               ? EP_OK
               : compare_batches(calls, ranks, count, out_error);
}

ep_err ep_group_call_check_plan(const ep_group_call *planned, const ep_group_call *call,
                                ep_error *out_error)
{
    for (uint32_t i = 0; i < EP_GROUP_CALL_TOLD; i++) {
        size_t offset = fields[i].offset;
        if (offset == offsetof(ep_group_call, has_inactive) ||
            offset == offsetof(ep_group_call, dispatch_number)) {
            continue; /* known only when the call runs */
        }
        int64_t was = ep_group_call_field(planned, i);
        int64_t is = ep_group_call_field(call, i);
        if (was != is) {
            char was_text[64];
            char is_text[64];
            field_text(i, was, was_text, sizeof(was_text));
            field_text(i, is, is_text, sizeof(is_text));
            return ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                                "stale plan: %s is %s, the plan was prepared for %s; prepare again",
                                fields[i].name, is_text, was_text);
        }
    }
    const char *what = planned->mask != call->mask                         ? "x_active_mask"
                       : planned->has_performance != call->has_performance ? "performance_info"
                       : planned->tp_rank != call->tp_rank                 ? "tp_rank_id"
                       : planned->by_index != call->by_index               ? "expand_idx"
                                                                           : NULL;
    if (what != NULL) {
        return ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                            "stale plan: %s is not what the plan was prepared for; prepare again",
                            what);
    }
    return EP_OK;
}

/* In the order of ep_group_comm_name. */
static const struct {
    const char *name;
    ep_group_comm comm;
} comm_names[] = {{"", EP_GROUP_FULLMESH},
                  {"fullmesh", EP_GROUP_FULLMESH},
                  {"fullmesh_v1", EP_GROUP_FULLMESH},
                  {"fullmesh_v2", EP_GROUP_FULLMESH_V2},
                  {"hierarchy", EP_GROUP_HIERARCHY}};

ep_err ep_group_comm_parse(const char *name, ep_group_call *call, ep_error *out_error)
{
    for (size_t i = 0; i < EP_ARRAY_COUNT(comm_names); i++) {
        if (strcmp(name == NULL ? "" : name, comm_names[i].name) == 0) {
            call->comm = comm_names[i].comm;
            call->comm_given = (int64_t)i;
            return EP_OK;
        }
    }
    return ep_error_set(
        out_error, EP_ERR_INVALID_ARGUMENT,
        "comm_alg is \"%.60s\": allowed \"\", fullmesh, fullmesh_v1, fullmesh_v2, hierarchy", name);
}

const char *ep_group_comm_spelled(int64_t comm_given)
{
    return comm_given <= 0 || (uint64_t)comm_given >= EP_ARRAY_COUNT(comm_names)
               ? "\"\""
               : comm_names[comm_given].name;
}
