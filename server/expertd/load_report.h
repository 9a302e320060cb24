/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The load that a node reports to the coordinator: slots computed per routed expert since the
 * start. Only layers that changed are sent, at most once a second, with a bounded number of experts
 * per message. Counts are cumulative, so a lost message does no harm.
 *
 * Threads    one at a time; the counters it reads are atomic.
 */
#ifndef EP_EXPERTD_LOAD_REPORT_H
#define EP_EXPERTD_LOAD_REPORT_H

#include "coordinator.pb-c.h"
#include "expertd/node_models.h"

#define EP_LOAD_REPORT_MS 1000
#define EP_LOAD_REPORT_EXPERTS_MAX 32768 /* of one message: 0.5 MiB at most */

typedef struct ep_load_report ep_load_report;

/* models is borrowed. Errors: NO_MEMORY. */
ep_err ep_load_report_create(const ep_node_models *models, ep_load_report **out_report);
void ep_load_report_destroy(ep_load_report *report);
/* Makes the next report a full one: the coordinator may not have the old ones. */
void ep_load_report_forget(ep_load_report *report);
/*
 * The loads to send now; *out_count is 0 when there is nothing new or no memory. hurry: also before
 * the second is over. Free them with ep_load_report_free; names in them belong to the models. What
 * is not sent comes with the next report.
 */
void ep_load_report_make(ep_load_report *report, uint64_t now_ns, bool hurry,
                         Expertd__V1__LayerLoad ***out_loads, size_t *out_count);
void ep_load_report_free(Expertd__V1__LayerLoad **loads, size_t count);

#endif
