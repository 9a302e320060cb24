/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a terminal shows: its size, how wide a text is on it, and texts cut to a width.
 *
 * Threads  any.
 */
#ifndef EP_BASE_SCREEN_H
#define EP_BASE_SCREEN_H

#include <stddef.h>

#define EP_SCREEN_COLUMNS_DEFAULT 80 /* of a terminal that does not tell its size */
#define EP_SCREEN_ROWS_DEFAULT 24

typedef struct ep_screen {
    size_t columns; /* 0: no terminal, so nothing is to be cut */
    size_t rows;
} ep_screen;

ep_screen ep_screen_of(int fd);

/* Columns of text: a wide character takes two, a combining one none. text has nothing that is not
 * printable (printable.h). */
size_t ep_text_columns(const char *text);
/* Bytes at the begin of text that take so many columns at most, whole characters. */
size_t ep_text_fit(const char *text, size_t columns);
/* Copies text; a wider one than columns loses its middle: "node-..rd-7". What does not fit into out
 * is left out. Returns out. */
char *ep_text_cut(const char *text, size_t columns, char *out, size_t out_bytes);

#endif
