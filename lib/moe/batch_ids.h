/* SPDX-License-Identifier: Apache-2.0 */
/* Reading expert ids of a batch; private to lib/moe. */
#ifndef EP_MOE_BATCH_IDS_H
#define EP_MOE_BATCH_IDS_H

#include <string.h>

#include "moe/batch.h"

/* ids[t,k] as given, at any alignment. */
static inline int64_t ep_batch_id(const ep_batch *batch, uint32_t token, uint32_t slot)
{
    const uint8_t *row = ep_rows_at(&batch->ids, token);
    if (batch->ids.dtype == EP_DTYPE_I64) {
        int64_t id;
        memcpy(&id, row + (size_t)slot * sizeof(id), sizeof(id));
        return id;
    }
    int32_t id;
    memcpy(&id, row + (size_t)slot * sizeof(id), sizeof(id));
    return id;
}

/* Ids below this are experts of some kind; this number itself is the second sentinel. */
static inline int64_t ep_batch_ids_total(const ep_batch *batch, const ep_layer_shape *shape)
{
    return (int64_t)shape->experts + batch->special.first_gap + batch->special.zero_count +
           batch->special.copy_count + batch->special.const_count;
}

#endif
