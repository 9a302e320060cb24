/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writing a public struct that the caller's header may know smaller (or larger) than ours: as many
 * bytes as both have, and never past the caller's struct_bytes. struct_bytes 0 means this version's
 * size.
 */
#ifndef EP_CLIENT_STRUCT_OUT_H
#define EP_CLIENT_STRUCT_OUT_H

#include <stdint.h>
#include <string.h>

/* Both begin with uint32_t struct_bytes; the caller's is kept, or set when it was 0. */
static inline void ep_struct_out(void *out, const void *ours, uint32_t ours_bytes)
{
    uint32_t asked;
    memcpy(&asked, out, sizeof(asked));
    uint32_t bytes = asked == 0 || asked > ours_bytes ? ours_bytes : asked;
    memcpy(out, ours, bytes < sizeof(asked) ? sizeof(asked) : bytes);
    memcpy(out, asked == 0 ? &ours_bytes : &asked, sizeof(asked));
}

#endif
