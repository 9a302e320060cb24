/* SPDX-License-Identifier: Apache-2.0 */
/* Fills ep_error, in which every library reports failures. */
#ifndef EP_BASE_ERROR_H
#define EP_BASE_ERROR_H

#include "expertd/error.h"

/*
 * Clears *error, sets code and text, and returns code, for use as "return ep_error_set(...)". error
 * may be NULL. Text longer than the field is cut.
 */
ep_err ep_error_set(ep_error *error, ep_err code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Puts "prefix: " before the existing text and returns the error's code; error NULL: returns
 * code. */
ep_err ep_error_prefix(ep_error *error, ep_err code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* A number and what is allowed for it. */
typedef struct ep_range {
    const char *name;
    uint64_t value;
    uint64_t min;
    uint64_t max;
} ep_range;
/* Checks one after the other. Errors: INVALID_ARGUMENT with name, value and allowed range. */
ep_err ep_ranges_check(const ep_range *ranges, size_t count, ep_error *out_error);

/*
 * strerror with advice: for denied access which user was denied ("Permission denied (this process
 * is user 998)"), for a full disk what to do. Returns out.
 */
#define EP_ERRNO_TEXT_BYTES 128
const char *ep_errno_text(int number, char out[EP_ERRNO_TEXT_BYTES]);

/* Sets every field to "does not apply" and code to EP_OK. */
void ep_error_clear(ep_error *error);

#endif
