/* SPDX-License-Identifier: Apache-2.0 */
/* Filling ep_error, the one way every library reports a failure. */
#ifndef EP_BASE_ERROR_H
#define EP_BASE_ERROR_H

#include "expertd/error.h"

/*
 * Clears *error and sets code and text; returns code, so that "return ep_error_set(...)" reads
 * well. error may be NULL: then only the code is returned. Text longer than the field is cut.
 */
ep_err ep_error_set(ep_error *error, ep_err code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Puts "prefix: " before the text already there. error may be NULL. Returns its code, or code when
 * NULL. */
ep_err ep_error_prefix(ep_error *error, ep_err code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/*
 * strerror; where access was denied also to whom: "Permission denied (this process is user 998)";
 * where a disk is full what to do. Returns out.
 */
#define EP_ERRNO_TEXT_BYTES 128
const char *ep_errno_text(int number, char out[EP_ERRNO_TEXT_BYTES]);

/* Sets every field to "does not apply" and code to EP_OK. */
void ep_error_clear(ep_error *error);

#endif
