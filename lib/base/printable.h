/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Text from peers and files before it reaches a log, a terminal, JSON or a page. Printable is UTF-8 without control characters:
 * C0, DEL, C1 and those that change the direction or end a line (U+200E, U+200F, U+2028 to U+202E, U+2066 to U+2069).
 *
 * Threads  pure functions.
 */
#ifndef EP_BASE_PRINTABLE_H
#define EP_BASE_PRINTABLE_H

#include <stdbool.h>
#include <stddef.h>

/* Puts substitute in the place of each byte of what is not printable: afterwards text is UTF-8 that steers nothing. */
void ep_text_make_printable(char *text, char substitute);
/* Where text stops being printable, or at its first blank if those are not allowed; its length when all of it is good. */
size_t ep_text_printable_bytes(const char *text, bool blanks_allowed);

#endif
