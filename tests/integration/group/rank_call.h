/* SPDX-License-Identifier: Apache-2.0 */
/* One rank's part of a case: buffers, calls, and the comparison of every output with the
 * oracle's. */
#ifndef EP_TESTS_GROUP_RANK_CALL_H
#define EP_TESTS_GROUP_RANK_CALL_H

#include "expertd/group.h"
#include "group_oracle.h"

typedef struct rank_call {
    const oracle_case *c;
    uint32_t rank;
    ep_group_params params;
    ep_moe_dispatch_args dispatch;
    ep_moe_combine_args combine;
    ep_moe_add_rms_norm norm;
    ep_group_plan *dispatch_plan;
    ep_group_plan *combine_plan;
    void *dispatch_workspace;
    void *combine_workspace;
    size_t dispatch_workspace_bytes;
    size_t combine_workspace_bytes;
    int64_t rows_max;
    void *memory[40];
    int memory_count;
} rank_call;

/* Buffers of the right sizes (expand_x: as many rows as come, plus spare_rows). dispatch.params
 * points into call. */
void rank_call_init(rank_call *call, const oracle_case *c, uint32_t rank, int spare_rows);
/* expand_x with rows_max rows: where the other ranks' batches are not known. */
void rank_call_init_rows(rank_call *call, const oracle_case *c, uint32_t rank, int64_t rows_max);
void rank_call_free(rank_call *call);

/* Prepare and run. */
ep_err rank_call_dispatch(rank_call *call, ep_group *group, ep_error *out_error);
/* Compares all outputs of the dispatch; prints the first difference. */
bool rank_call_check_dispatch(const rank_call *call);
/* Runs the experts over what came; the combine's expand_x is ready then. */
void rank_call_experts(rank_call *call);
ep_err rank_call_combine(rank_call *call, ep_group *group, ep_error *out_error);
/* tolerance: of the greatest difference relative to max(1, |value|); 0: bit for bit. */
bool rank_call_check_combine(const rank_call *call, double tolerance);

/* All of the words, up to NULL, are in the text. */
bool rank_error_says(const ep_error *error, const char *const *words);

#endif
