/* SPDX-License-Identifier: Apache-2.0 */
/* The running coordinator: rpc server, probes, loop, wired together. One per process. */
#ifndef EP_COORDINATOR_COORDINATOR_H
#define EP_COORDINATOR_COORDINATOR_H

#include "common/reload.h"
#include "coordinator/coordinator_config.h"

/* Serves until stopped by a signal; reload is what SIGHUP does. Both are borrowed. Logs its own
 * failures. Returns the exit code. */
int ep_coordinator_run(const ep_coordinator_config *config, ep_reload *reload);

#endif
