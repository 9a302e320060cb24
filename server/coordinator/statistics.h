/* SPDX-License-Identifier: Apache-2.0 */
/* Load statistics for Coordinator.Statistics and /metrics. Threads: any. */
#ifndef EP_COORDINATOR_STATISTICS_H
#define EP_COORDINATOR_STATISTICS_H

#include "common/metrics.h"
#include "coordinator/load_sums.h"
#include "coordinator/state.h"
#include "rpc/rpc.h"

/* Balance of a layer over the nodes; false: not known. Called without any lock of load_sums. */
typedef bool (*ep_statistics_balance_func)(void *arg, const char *model, const char *version,
                                           uint32_t layer, ep_coordinator_balance *out_balance);

/* Answers and finishes the call; NOT_FOUND for a model, version or layer without reports. */
void ep_statistics_answer(ep_load_sums *loads, ep_statistics_balance_func balance_of, void *arg,
                          const Expertd__V1__StatisticsRequest *request,
                          Expertd__V1__StatisticsReply_Closure closure, ep_rpc_call *call);
/* Sets the series of every layer, and of each model's placement; for ep_metrics_on_collect. */
void ep_statistics_collect(ep_load_sums *loads, ep_statistics_balance_func balance_of, void *arg,
                           ep_metrics *metrics, bool per_expert);

#endif
