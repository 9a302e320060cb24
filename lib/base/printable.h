/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Text from peers and files before it reaches a log, a terminal, JSON or a page. Printable is UTF-8
 * without control characters: C0, DEL, C1 and those that change the direction or end a line
 * (U+061C, U+200E, U+200F, U+2028 to U+202E, U+2066 to U+2069).
 *
 * Threads  pure functions.
 */
#ifndef EP_BASE_PRINTABLE_H
#define EP_BASE_PRINTABLE_H

#include <stdbool.h>
#include <stddef.h>

/* what ep_text_escape needs at most for so many bytes */
#define EP_TEXT_ESCAPED_BYTES(length) (4 * (length) + 1)

/* Copies text to out with each byte of what is not printable as \xNN: out is UTF-8 that steers
 * nothing. What does not fit is left out, from a whole character on. out_bytes at least 1. Returns
 * out. */
char *ep_text_escape(const char *text, char *out, size_t out_bytes);
/* The same; returns how many bytes of text that were: at a 0 it was all. */
size_t ep_text_escape_part(const char *text, char *out, size_t out_bytes);
/* Where text stops being printable, or at its first blank (of any kind) if those are not allowed;
 * its length when all of it is good. */
size_t ep_text_printable_bytes(const char *text, bool blanks_allowed);

#endif
