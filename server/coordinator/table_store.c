/* SPDX-License-Identifier: Apache-2.0 */
/* Functions common to all stores. */
#include "coordinator/table_store.h"

#include <stdlib.h>

#include "wire/placement_codec.h"

ep_err ep_table_store_begin_term(ep_table_store *store, uint64_t term_min,
                                 ep_coordinator_kept *out_kept, uint64_t *out_term,
                                 ep_error *out_error)
{
    return store->ops->begin_term(store, term_min, out_kept, out_term, out_error);
}

ep_err ep_table_store_write(ep_table_store *store, const ep_coordinator_kept *kept,
                            ep_error *out_error)
{
    return store->ops->write(store, kept, out_error);
}

void ep_table_store_close(ep_table_store *store)
{
    if (store != NULL) {
        store->ops->close(store);
    }
}

ep_err ep_table_store_pack(const ep_routing_table *table, uint8_t **out_bytes, size_t *out_count)
{
    Expertd__V1__PlacementSnapshot *snapshot;
    ep_err err = ep_placement_encode(table, &snapshot);
    if (err != EP_OK) {
        return err;
    }
    size_t count = expertd__v1__placement_snapshot__get_packed_size(snapshot);
    uint8_t *bytes = malloc(count + 1);
    if (bytes != NULL) {
        *out_count = expertd__v1__placement_snapshot__pack(snapshot, bytes);
        *out_bytes = bytes;
    }
    ep_placement_snapshot_free(snapshot);
    return bytes != NULL ? EP_OK : EP_ERR_NO_MEMORY;
}

ep_err ep_table_store_unpack(const uint8_t *bytes, size_t count, ep_routing_table **out_table,
                             ep_error *out_error)
{
    ep_error error;
    Expertd__V1__PlacementSnapshot *snapshot =
        expertd__v1__placement_snapshot__unpack(NULL, count, bytes);
    if (snapshot == NULL) {
        return ep_error_set(out_error, EP_ERR_DATA_LOSS, "%zu bytes are not a placement snapshot",
                            count);
    }
    ep_err err = ep_placement_decode(snapshot, out_table, &error);
    expertd__v1__placement_snapshot__free_unpacked(snapshot, NULL);
    if (err != EP_OK) {
        return ep_error_set(out_error, err == EP_ERR_NO_MEMORY ? err : EP_ERR_DATA_LOSS, "%s",
                            error.text);
    }
    return EP_OK;
}
