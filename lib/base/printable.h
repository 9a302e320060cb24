/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Makes text from peers and files safe for a log, a terminal, JSON or a page. Printable is UTF-8
 * without control characters: C0, DEL, C1 and those that change the direction or end a line
 * (U+061C, U+200E, U+200F, U+2028 to U+202E, U+2066 to U+2069).
 *
 * Threads  pure functions.
 */
#ifndef EP_BASE_PRINTABLE_H
#define EP_BASE_PRINTABLE_H

#include <stdbool.h>
#include <stddef.h>

/* the most that ep_text_escape needs for this many bytes */
#define EP_TEXT_ESCAPED_BYTES(length) (4 * (length) + 1)

/* Copies text to out and writes each byte that is not printable as \xNN, so that out is UTF-8
 * without control characters. What does not fit is left out, in whole characters. out_bytes at
 * least 1. Returns out. */
char *ep_text_escape(const char *text, char *out, size_t out_bytes);
/* The same; returns how many bytes of text were copied. If text has a 0 there, all was. */
size_t ep_text_escape_part(const char *text, char *out, size_t out_bytes);
/* The number of bytes before the first character that is not printable, or (unless allowed) the
 * first blank of any kind; the length of text when there is none. */
size_t ep_text_printable_bytes(const char *text, bool blanks_allowed);

#endif
