/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Public structs of callers whose header may know fewer or more fields than this version. All begin
 * with uint32_t struct_bytes, the size that the caller's compiler knows: nothing beyond it is read
 * or written. A new field must begin at or after the old sizeof: in padding at the old end, an
 * older library would ignore it. ep_tensor and ep_error are parts of other structs, so their sizes
 * are fixed.
 */
#ifndef EP_BASE_STRUCT_SIZE_H
#define EP_BASE_STRUCT_SIZE_H

#include "expertd/error.h"

/* The size up to and including `field`, the last field that a caller's struct must have. */
#define EP_STRUCT_UPTO(type, field) (offsetof(type, field) + sizeof(((type *)0)->field))

/* For _init_sized functions: copies ours to the caller's struct of this size, and zeroes fields
 * beyond ours. With less than 4 bytes nothing is written. */
void ep_struct_init(void *out, size_t bytes, const void *ours, size_t ours_bytes);
/*
 * Copies the caller's struct to one of this version. Fields that it lacks keep their values in out.
 * least: EP_STRUCT_UPTO the last required field. Errors: INVALID_ARGUMENT (NULL, shorter than
 * least), UNIMPLEMENTED (a field beyond ours is not 0).
 */
ep_err ep_struct_in(const char *name, const void *given, size_t least, void *out, size_t ours_bytes,
                    ep_error *out_error);
/* Copies a result to the caller's struct, whose struct_bytes is kept. 0 means the size in version
 * 0.1, which is ours as long as no field is added; it is then set. */
void ep_struct_out(void *out, const void *ours, size_t ours_bytes);

#endif
