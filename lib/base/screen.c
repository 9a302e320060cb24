/* SPDX-License-Identifier: Apache-2.0 */
/* See screen.h. */
#include "base/screen.h"

#include <locale.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>
#include <wchar.h>

#define MARK ".."

ep_screen ep_screen_of(int fd)
{
    struct winsize size = {0};
    if (isatty(fd) != 1) {
        return (ep_screen){0};
    }
    ioctl(fd, TIOCGWINSZ, &size);
    return (ep_screen){.columns = size.ws_col > 0 ? size.ws_col : EP_SCREEN_COLUMNS_DEFAULT,
                       .rows = size.ws_row > 0 ? size.ws_row : EP_SCREEN_ROWS_DEFAULT};
}

static pthread_once_t once = PTHREAD_ONCE_INIT;
/* independent of the program's locale. 0: none; each character then counts as one column */
static locale_t unicode;

static void open_locale(void)
{
    unicode = newlocale(LC_CTYPE_MASK, "C.UTF-8", (locale_t)0);
}

/* Bytes and columns of the character at text, which is not empty. Under the locale. */
static size_t measure(const char *text, size_t *out_columns)
{
    wchar_t character;
    mbstate_t state = {0};
    size_t bytes = mbrtowc(&character, text, strlen(text), &state);
    if (bytes == 0 || bytes > 4) { /* in the C locale, or no UTF-8 */
        *out_columns = ((unsigned char)*text & 0xc0) != 0x80;
        return 1;
    }
    int columns = wcwidth(character);
    *out_columns = columns >= 0 ? (size_t)columns : 1;
    return bytes;
}

/* How many bytes of text fit into columns_max columns, and how many columns they take. */
static size_t walk(const char *text, size_t columns_max, size_t *out_columns)
{
    size_t at = 0;
    size_t used = 0;
    pthread_once(&once, open_locale);
    locale_t before = unicode != (locale_t)0 ? uselocale(unicode) : (locale_t)0;
    while (text[at] != '\0') {
        size_t columns;
        size_t bytes = measure(text + at, &columns);
        if (used + columns > columns_max) {
            break;
        }
        used += columns;
        at += bytes;
    }
    if (before != (locale_t)0) {
        uselocale(before);
    }
    *out_columns = used;
    return at;
}

size_t ep_text_columns(const char *text)
{
    size_t columns;
    walk(text, SIZE_MAX, &columns);
    return columns;
}

size_t ep_text_fit(const char *text, size_t columns)
{
    size_t used;
    return walk(text, columns, &used);
}

char *ep_text_cut(const char *text, size_t columns, char *out, size_t out_bytes)
{
    size_t whole = ep_text_columns(text);
    /* with fewer columns the mark would leave no room for text */
    size_t mark = columns > 2 * strlen(MARK) ? strlen(MARK) : 0;
    if (whole <= columns) {
        snprintf(out, out_bytes, "%s", text);
        return out;
    }
    size_t tail_columns = mark > 0 ? (columns - mark) / 2 : 0;
    size_t head = ep_text_fit(text, columns - mark - tail_columns);
    const char *tail = text + strlen(text);
    if (tail_columns > 0) {
        tail = text + ep_text_fit(text, whole - tail_columns);
        while (ep_text_columns(tail) > tail_columns) { /* the cut went through a wide character */
            tail += ep_text_fit(tail, 2);
        }
    }
    snprintf(out, out_bytes, "%.*s%.*s%s", (int)head, text, (int)mark, MARK, tail);
    return out;
}
