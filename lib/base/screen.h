/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The size of a terminal, the width of text on it, and text cut to a width.
 *
 * Threads  any.
 */
#ifndef EP_BASE_SCREEN_H
#define EP_BASE_SCREEN_H

#include <stddef.h>

#define EP_SCREEN_COLUMNS_DEFAULT 80 /* for a terminal that does not tell its size */
#define EP_SCREEN_ROWS_DEFAULT 24

typedef struct ep_screen {
    size_t columns; /* 0: it is no terminal, so nothing needs to be cut */
    size_t rows;
} ep_screen;

ep_screen ep_screen_of(int fd);

/* Columns of text: a wide character takes two, a combining one none. text is printable
 * (printable.h). */
size_t ep_text_columns(const char *text);
/* How many bytes of text, in whole characters, fit into this many columns. */
size_t ep_text_fit(const char *text, size_t columns);
/* Copies text; if it is wider than columns, its middle is replaced: "node-..rd-7". What does not
 * fit into out is left out. Returns out. */
char *ep_text_cut(const char *text, size_t columns, char *out, size_t out_bytes);

#endif
