/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Public structs of a caller whose header may know fewer fields than this version, or more. All
 * begin with uint32_t struct_bytes, the size that the caller's compiler knows: nothing beyond it is
 * read or written. A new field begins at or past the old sizeof: in padding at the old end an older
 * library would not see it, and ignore it. ep_tensor and ep_error stand inside other structs: their
 * sizes are fixed.
 */
#ifndef EP_BASE_STRUCT_SIZE_H
#define EP_BASE_STRUCT_SIZE_H

#include "expertd/error.h"

/* Ends the fields that a caller's struct must at least have. */
#define EP_STRUCT_UPTO(type, field) (offsetof(type, field) + sizeof(((type *)0)->field))

/* For _init_sized functions: ours into the caller's struct of bytes bytes; fields it has beyond
 * ours are 0. Below 4 bytes nothing is written. */
void ep_struct_init(void *out, size_t bytes, const void *ours, size_t ours_bytes);
/*
 * The caller's struct as one of this version. Fields that it lacks keep the values they have in
 * out. least: EP_STRUCT_UPTO the last field without which nothing works. Errors: INVALID_ARGUMENT
 * (NULL, shorter than least), UNIMPLEMENTED (a field beyond ours is not 0).
 */
ep_err ep_struct_in(const char *name, const void *given, size_t least, void *out, size_t ours_bytes,
                    ep_error *out_error);
/* A result into the caller's struct, whose struct_bytes is kept; 0 means the size in version 0.1,
 * which is ours as long as no field was added, and is set. */
void ep_struct_out(void *out, const void *ours, size_t ours_bytes);

#endif
