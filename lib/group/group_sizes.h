/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The most bytes that a call may need, from its parameters alone. The call must have passed
 * ep_group_profile_check; max_bs is the largest BS of any rank.
 *
 * Errors     none. Threads: pure.
 */
#ifndef EP_GROUP_SIZES_H
#define EP_GROUP_SIZES_H

#include "group/group_call.h"

/* The largest frame that a rank may have to send in a dispatch or combine, with its header. */
uint64_t ep_group_worst_frame_bytes(const ep_group_call *call, int64_t max_bs);
/*
 * The HCCL_BUFFSIZE of group_ep and of group_tp that the vendor's documentation requires
 * (op-plugin, npu_moe_distribute_dispatch_v2, August 2026). 0: profile native; no TP.
 */
uint64_t ep_group_vendor_bytes(const ep_group_call *call, int64_t max_bs);
uint64_t ep_group_vendor_tp_bytes(const ep_group_call *call, int64_t max_bs);

#endif
