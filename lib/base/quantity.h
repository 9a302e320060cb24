/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sizes and times as people write them, read exactly: 60G, 1.5MiB, 250ms, 2m. Files, variables and
 * flags all use this reader.
 *
 *     sizes   B, K, M, G, T, or KiB, MiB, GiB, TiB: powers of 1024
 *     times   us, ms, s, m, h
 *
 * A number without a suffix has the unit of its place. A fraction is accepted where the result is
 * whole: 1.5G, but not 0.5us.
 *
 * Threads  pure functions.
 */
#ifndef EP_BASE_QUANTITY_H
#define EP_BASE_QUANTITY_H

#include <stdint.h>

typedef enum ep_unit {
    EP_UNIT_NONE,
    EP_UNIT_BYTES,
    EP_UNIT_KIB,
    EP_UNIT_US,
    EP_UNIT_MS,
    EP_UNIT_S
} ep_unit;

#define EP_QUANTITY_BYTES 32 /* size of a formatted quantity */
/*
 * plain: unit of a number without suffix; unit: that of *out_number, of the same kind. With
 * EP_UNIT_NONE for both, only digits are allowed. Returns NULL, or what is wrong, to be written
 * after the value: "is a size, not a time".
 */
const char *ep_quantity_parse(const char *text, ep_unit plain, ep_unit unit, uint64_t *out_number);

/* Text to follow a range in messages: ", with us, ms, s, m or h; a number alone is ms"; "" for
 * EP_UNIT_NONE. */
const char *ep_quantity_hint(ep_unit plain);

/* The shortest text without fraction that is exactly number: 64424509440 bytes are 60G, 90000 ms
 * are 90s. Returns out. */
char *ep_quantity_format(uint64_t number, ep_unit unit, char out[EP_QUANTITY_BYTES]);

#endif
