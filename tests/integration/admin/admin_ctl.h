/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl against a cluster, with the arguments as they stand. */
#ifndef ADMIN_CTL_H
#define ADMIN_CTL_H

#include "fault_fixture.h"

/* Runs expertctl with args (NULL-terminated) and fails the test unless it ends with code and prints
 * text (NULL: anything). */
void admin_ctl(ep_test_cluster *cluster, int code, const char *text, const char *const *args);
#define ADMIN_CTL(cluster, code, text, ...)                                                        \
    admin_ctl(cluster, code, text, (const char *const[]){__VA_ARGS__, NULL})

/* Until the coordinator says that of the node, and it holds experts (or none). */
void admin_wait_node(ep_test_cluster *cluster, uint32_t node, const char *state, bool has_experts);

#endif
