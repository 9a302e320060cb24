/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a node tells the coordinator of its load: slots computed per routed expert since it started,
 * of the layers where something changed, at most once a second and a bounded number of experts at a
 * time. Counts are cumulative, so a message that is lost costs nothing.
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
/* Tells everything again: the coordinator may not have it. */
void ep_load_report_forget(ep_load_report *report);
/*
 * The loads to send now (hurry: although the second is not over), *out_count 0 when there is
 * nothing new; freed with ep_load_report_free. Names in them belong to the models. Without memory
 * it says nothing and tells them the next time.
 */
void ep_load_report_make(ep_load_report *report, uint64_t now_ns, bool hurry,
                         Expertd__V1__LayerLoad ***out_loads, size_t *out_count);
void ep_load_report_free(Expertd__V1__LayerLoad **loads, size_t count);

#endif
