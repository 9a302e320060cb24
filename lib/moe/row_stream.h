/* SPDX-License-Identifier: Apache-2.0 */
/* Copies rows to memory that is not read again soon, past the caches: a line is then not fetched
 * just to be overwritten. */
#ifndef EP_MOE_ROW_STREAM_H
#define EP_MOE_ROW_STREAM_H

#include <stddef.h>
#include <stdint.h>

#if defined(__SSE2__)
/* From this size on, outputs do not fit the nearer caches anyway. */
#define EP_ROW_STREAM_BYTES_MIN ((uint64_t)8 << 20)
#else
#define EP_ROW_STREAM_BYTES_MIN UINT64_MAX
#endif

/* Copies a row. next is the row that will be copied after it, or NULL; it is fetched meanwhile,
 * since hardware cannot guess its place. */
void ep_row_stream(void *restrict to, const void *restrict from, size_t bytes, const void *next);
/* Call after the last row, so that other threads see the rows. */
void ep_row_stream_end(void);

#endif
