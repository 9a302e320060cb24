/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ranges of a call's parameters: what the layout always needs (profile native), and the vendor
 * operator's table for profiles a2 and a3. Checks that need data (ids, masks) or other ranks are
 * elsewhere.
 *
 * Threads    pure.
 */
#ifndef EP_GROUP_PROFILE_H
#define EP_GROUP_PROFILE_H

#include "group/group_call.h"

#define EP_GROUP_HIDDEN_MAX 16777216
#define EP_GROUP_TOP_K_MAX 64
/* the vendor's server_num is ep_world_size / 8 */
#define EP_GROUP_RANKS_PER_SERVER 8

/* Errors: INVALID_ARGUMENT naming parameter, value, allowed range. */
ep_err ep_group_profile_check(const ep_group_call *call, ep_error *out_error);

#endif
