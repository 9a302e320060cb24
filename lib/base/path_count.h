/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Counts copied bytes of rows on the token path, per stage, since the process began. A token row is
 * copied three times and no more (packed by the caller, widened into the kernel's panel, written as
 * a result); tests compare these sums with what ids and shapes require. Counted once per frame or
 * task, which costs too little to be switched off.
 *
 * Threads  any.
 */
#ifndef EP_BASE_PATH_COUNT_H
#define EP_BASE_PATH_COUNT_H

#include <stdint.h>

typedef enum ep_path_stage {
    EP_PATH_PACKED, /* caller: rows into a request */
    EP_PATH_PANEL,  /* node: rows into a kernel's panel */
    EP_PATH_RESULT, /* node: a kernel's result into the reply */
    /* caller: the result of a prefill call, from where its tokens were combined to out */
    EP_PATH_SCRATCH,
    EP_PATH_LANE, /* bytes of frames that a lane copied inside this process; including headers */
    EP_PATH_STAGES
} ep_path_stage;

extern uint64_t ep_path_bytes[EP_PATH_STAGES]; /* atomic */

static inline void ep_path_count(ep_path_stage stage, uint64_t bytes)
{
    __atomic_fetch_add(&ep_path_bytes[stage], bytes, __ATOMIC_RELAXED);
}

static inline uint64_t ep_path_read(ep_path_stage stage)
{
    return __atomic_load_n(&ep_path_bytes[stage], __ATOMIC_RELAXED);
}

#endif
