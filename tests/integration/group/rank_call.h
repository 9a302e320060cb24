/* SPDX-License-Identifier: Apache-2.0 */
/* One rank's part of a case: buffers, calls, and the comparison of every output with the
 * oracle's. */
#ifndef EP_TESTS_GROUP_RANK_CALL_H
#define EP_TESTS_GROUP_RANK_CALL_H

#include <semaphore.h>

#include "expertd/group.h"
#include "group_oracle.h"

/* How the end of a begun operation is met. INSIDE: finished in its callback. */
typedef enum rank_form { RANK_FINISH, RANK_POLL, RANK_CALLBACK, RANK_INSIDE, RANK_FORMS } rank_form;

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
    const uint8_t *spare_counts; /* what follows the counts in ep_recv_counts as it was made */
    void *memory[40];
    int memory_count;
    /* begun */
    rank_form form;
    ep_group_plan *under_way;
    sem_t done;
    ep_err finished;
    ep_error error;
} rank_call;

/* Buffers of the right sizes (expand_x: as many rows as come, plus spare_rows). dispatch.params
 * points into call. */
void rank_call_init(rank_call *call, const oracle_case *c, uint32_t rank, int spare_rows);
/* expand_x with rows_max rows: where the other ranks' batches are not known. */
void rank_call_init_rows(rank_call *call, const oracle_case *c, uint32_t rank, int64_t rows_max);
/* expand_idx instead of assist_info_for_combine, in both operators. */
void rank_call_use_index(rank_call *call);
void rank_call_free(rank_call *call);

/* Prepare and run. */
ep_err rank_call_dispatch(rank_call *call, ep_group *group, ep_error *out_error);
/* Compares all outputs of the dispatch; prints the first difference. */
bool rank_call_check_dispatch(const rank_call *call);
/* Rows of expand_x that the dispatch wrote: the last of its counts, which spare entries follow. */
int32_t rank_call_rows_received(const rank_call *call);
/* Runs the experts over what came; the combine's expand_x is ready then. */
void rank_call_experts(rank_call *call);
ep_err rank_call_combine(rank_call *call, ep_group *group, ep_error *out_error);
/* Prepare and begin; one at a time of a call. */
ep_err rank_call_begin_dispatch(rank_call *call, ep_group *group, rank_form form,
                                ep_error *out_error);
ep_err rank_call_begin_combine(rank_call *call, ep_group *group, rank_form form,
                               ep_error *out_error);
/* Waits for what was begun, as its form says, and finishes it. */
ep_err rank_call_finish(rank_call *call, ep_error *out_error);
/* All outputs that two calls of one case have are the same bits, but for times; prints the first
 * difference. Without spare rows. */
bool rank_call_same(const rank_call *a, const rank_call *b, const char *forms);
/* tolerance: of the greatest difference relative to max(1, |value|); 0: bit for bit. */
bool rank_call_check_combine(const rank_call *call, double tolerance);

/* A dispatch, the experts and a combine whose outputs are the oracle's. What is not is printed. */
bool rank_call_round(rank_call *call, ep_group *group, ep_error *out_error);
/* All of the words, up to NULL, are in the text. */
bool rank_error_says(const ep_error *error, const char *const *words);

#endif
