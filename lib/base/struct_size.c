/* SPDX-License-Identifier: Apache-2.0 */
#include "base/struct_size.h"

#include <inttypes.h>
#include <string.h>

#include "base/error.h"

/* a larger value was probably never set, so nothing must be read by it */
#define STRUCT_BYTES_MAX 16384

static size_t least_of(size_t a, size_t b)
{
    return a < b ? a : b;
}

void ep_struct_init(void *out, size_t bytes, const void *ours, size_t ours_bytes)
{
    uint32_t struct_bytes = (uint32_t)bytes;
    if (bytes < sizeof(struct_bytes)) {
        return;
    }
    memset(out, 0, bytes);
    memcpy(out, ours, least_of(bytes, ours_bytes));
    memcpy(out, &struct_bytes, sizeof(struct_bytes));
}

ep_err ep_struct_in(const char *name, const void *given, size_t least, void *out, size_t ours_bytes,
                    ep_error *out_error)
{
    uint32_t given_bytes;
    uint32_t struct_bytes = (uint32_t)ours_bytes;
    if (given == NULL) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, "%s is NULL", name);
    }
    memcpy(&given_bytes, given, sizeof(given_bytes));
    if (given_bytes < least || given_bytes > STRUCT_BYTES_MAX) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "struct_bytes of %s is %" PRIu32
                            ": allowed is its sizeof, %zu in this libexpertd, %zu to %d in others",
                            name, given_bytes, ours_bytes, least, STRUCT_BYTES_MAX);
    }
    for (size_t i = ours_bytes; i < given_bytes; i++) {
        if (((const uint8_t *)given)[i] != 0) {
            return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED,
                                "%s has a value at byte %zu of %" PRIu32
                                ": this libexpertd knows %zu bytes of it; leave later fields 0, or "
                                "install the libexpertd of your header",
                                name, i, given_bytes, ours_bytes);
        }
    }
    memcpy(out, given, least_of(given_bytes, ours_bytes));
    memcpy(out, &struct_bytes, sizeof(struct_bytes));
    return EP_OK;
}

void ep_struct_out(void *out, const void *ours, size_t ours_bytes)
{
    uint32_t asked;
    memcpy(&asked, out, sizeof(asked));
    if (asked == 0) {
        asked = (uint32_t)ours_bytes;
        memcpy(out, &asked, sizeof(asked));
    }
    if (asked > sizeof(asked)) {
        memcpy((uint8_t *)out + sizeof(asked), (const uint8_t *)ours + sizeof(asked),
               least_of(asked, ours_bytes) - sizeof(asked));
    }
}
