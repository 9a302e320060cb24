/* SPDX-License-Identifier: Apache-2.0 */
/* The running coordinator: connects rpc server, probes and loop. One per process. */
#ifndef EP_COORDINATOR_COORDINATOR_H
#define EP_COORDINATOR_COORDINATOR_H

#include "common/reload.h"
#include "coordinator/coordinator_config.h"

/* Serves until a signal stops it; SIGHUP runs reload. Borrows both. Logs its own failures. Returns
 * the exit code. */
int ep_coordinator_run(const ep_coordinator_config *config, ep_reload *reload);

#endif
