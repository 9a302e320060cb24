/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One operator call of the group API as plain numbers: for checking ranges, for the comparison
 * between ranks, and for the layout of rows. Letters as in expertd/group.h.
 *
 * Threads    pure values.
 */
#ifndef EP_GROUP_CALL_H
#define EP_GROUP_CALL_H

#include "base/error.h"
#include "expertd/group.h"

typedef enum ep_group_operator {
    EP_GROUP_DISPATCH = 1,
    EP_GROUP_COMBINE = 2,
    EP_GROUP_COMBINE_NORM = 3
} ep_group_operator;

typedef enum ep_group_comm {
    EP_GROUP_FULLMESH = 1,
    EP_GROUP_FULLMESH_V2 = 2,
    EP_GROUP_HIERARCHY = 3
} ep_group_comm;
/* The spelling of comm_alg. fullmesh_v1 is another name of fullmesh, and "" leaves the choice to
 * us: both give one value of `comm`, but the profiles tell them apart. */
typedef enum ep_group_comm_name {
    EP_GROUP_NAMED_NOTHING = 0,
    EP_GROUP_NAMED_FULLMESH = 1,
    EP_GROUP_NAMED_FULLMESH_V1 = 2,
    EP_GROUP_NAMED_FULLMESH_V2 = 3,
    EP_GROUP_NAMED_HIERARCHY = 4
} ep_group_comm_name;
typedef enum ep_group_mask_kind {
    EP_GROUP_MASK_NONE = 0,
    EP_GROUP_MASK_TOKENS = 1,
    EP_GROUP_MASK_SLOTS = 2
} ep_group_mask_kind;

/* All fields are 64 bits wide, so that one table describes them (group_call.c). Fields above the
 * first line must be equal on all ranks. */
typedef struct ep_group_call {
    int64_t operator; /* ep_group_operator */
    int64_t profile;
    int64_t const_rule;
    int64_t world_size;     /* the group's, before elastic_info */
    int64_t elastic_digest; /* of elastic_info, 0 without */
    int64_t moe_experts;    /* M, after elastic_info like the next four */
    int64_t shared_experts; /* S; 0 when there are no shared-expert ranks */
    int64_t shared_ranks;   /* SR */
    int64_t shared_rows;    /* rows of `scales` before those of the MoE experts */
    int64_t tp_world_size;  /* 1 or 2 */
    int64_t shard_type;
    int64_t global_bs;
    int64_t zero_experts;
    int64_t copy_experts;
    int64_t const_experts;
    int64_t comm; /* ep_group_comm */
    int64_t allow_duplicates;
    int64_t quant_mode;      /* dispatch */
    int64_t comm_quant_mode; /* combine */
    int64_t token_nums_type; /* dispatch */
    int64_t out_dtype;       /* combine, like the next */
    int64_t group_list_type;
    int64_t hidden; /* H */
    int64_t top_k;  /* K */
    int64_t dtype;  /* of x, or of the experts' results */
    int64_t ids_dtype;
    int64_t has_scales; /* smooth scales */
    int64_t has_expert_scales;
    int64_t has_shared_x;
    int64_t norm_eps_bits; /* the float's bits */
    /* combine: the dispatch that wrote assist_info_for_combine. EP_GROUP_BY_INDEX: expand_idx is
     * used instead, so frames contain (index, local expert) for each row */
    int64_t dispatch_number;
    /* ---- may differ between ranks ---- */
    int64_t tokens; /* T */
    /* a mask makes some token or slot inactive; known only when the call runs */
    int64_t has_inactive;
    /* ---- not sent to other ranks ---- */
    int64_t ranks;      /* W after elastic_info */
    int64_t local_rank; /* of this rank, after elastic_info */
    int64_t tp_rank;
    int64_t mask; /* ep_group_mask_kind */
    int64_t has_performance;
    int64_t has_elastic;
    int64_t comm_given; /* ep_group_comm_name: how comm_alg was spelled */
    int64_t by_index;   /* expand_idx instead of assist_info_for_combine */
    /* routed experts that elastic_info removed; their ids stay reserved between the other routed
     * ones and the special experts */
    int64_t gone_experts;
    /* rows for another host go there in one frame, to a gateway: a dispatch with hierarchy */
    int64_t by_host;
} ep_group_call;

#define EP_GROUP_BY_INDEX (-1)

/* Fields that must be equal, and that are sent: those above the first and the second line. */
#define EP_GROUP_CALL_COMPARED 31
#define EP_GROUP_CALL_TOLD 33
#define EP_GROUP_RECORD_BYTES (8 + 8 * EP_GROUP_CALL_TOLD)

/* Field i as a number; i < EP_GROUP_CALL_TOLD. */
int64_t ep_group_call_field(const ep_group_call *call, uint32_t i);
/* The name that users know, "quant_mode". */
const char *ep_group_call_field_name(uint32_t i);
/* Text of an operator, "ep_moe_dispatch". */
const char *ep_group_operator_name(int64_t operator);

/* The record at the front of each frame. */
void ep_group_record_encode(const ep_group_call *call, uint8_t out[EP_GROUP_RECORD_BYTES]);
/* Fills the fields that are sent. Errors: PROTOCOL (another number of fields). */
ep_err ep_group_record_decode(const uint8_t record[EP_GROUP_RECORD_BYTES], ep_group_call *out_call,
                              ep_error *out_error);

/*
 * Compares the records of all ranks; ranks[i] is the rank in the group of calls[i].
 * Errors: INVALID_ARGUMENT naming the first parameter that differs, its values and the ranks of
 * each.
 */
ep_err ep_group_calls_compare(const ep_group_call *calls, const uint32_t *ranks, uint32_t count,
                              ep_error *out_error);
/* Compares what a plan was prepared for with the present call. Errors: FAILED_PRECONDITION naming
 * the parameter and both values. */
ep_err ep_group_call_check_plan(const ep_group_call *planned, const ep_group_call *call,
                                ep_error *out_error);

/* Lists the ranks [count] that are named, as "2, 5-7"; "": none. */
void ep_group_ranks_text(const bool *named, const uint32_t *ranks, uint32_t count, char *out,
                         size_t bytes);

/* Fills comm and comm_given. name NULL or "", "fullmesh", ... Errors: INVALID_ARGUMENT listing the
 * names. */
ep_err ep_group_comm_parse(const char *name, ep_group_call *call, ep_error *out_error);
/* The spelling as text. */
const char *ep_group_comm_spelled(int64_t comm_given);

#endif
