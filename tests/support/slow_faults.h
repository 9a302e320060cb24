/* SPDX-License-Identifier: Apache-2.0 */
/* The slow backend's planned faults and counters. */
#ifndef EP_TESTS_SUPPORT_SLOW_FAULTS_H
#define EP_TESTS_SUPPORT_SLOW_FAULTS_H

#include "support/slow_backend.h"

/* Counts a call. Returns the call's planned error, and in *out_later the error for its done(). */
ep_err slow_faults_at_call(ep_slow_operation operation, ep_err *out_later);
/* Returns DEVICE_LOST once the device is lost, else planned. */
ep_err slow_faults_at_done(ep_err planned);
/* Draws a number below limit from the shuffle seed. */
uint64_t slow_faults_random_below(uint64_t limit);
void slow_faults_block_born(void);
void slow_faults_block_died(void);
void slow_faults_overtaken(void);

#endif
