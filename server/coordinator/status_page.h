/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The status page at the probe address, and the documents that it polls (status_json.h):
 *     /status            one HTML file that loads nothing but the two below
 *     /status.json       made at most once in STATUS_AGE_MS, however often it is read
 *     /placement.json    ?model=NAME&layer=N[&version=V]; the default version if none is given
 *
 * Threads    one at a time: the probes' own.
 */
#ifndef EP_COORDINATOR_STATUS_PAGE_H
#define EP_COORDINATOR_STATUS_PAGE_H

#include "common/probes.h"
#include "coordinator/service.h"

typedef struct ep_status_page ep_status_page;

/* service is borrowed. Errors: NO_MEMORY. */
ep_err ep_status_page_create(ep_coordinator_service *service, ep_status_page **out_page);
/* Call it after the probes were stopped, since answers borrow from it. NULL allowed. */
void ep_status_page_destroy(ep_status_page *page);
/* For ep_probes_config.page. */
bool ep_status_page_answer(ep_status_page *page, bool stopping, const char *path,
                           const ep_probe_query *query, ep_probe_page *out_answer);

#endif
