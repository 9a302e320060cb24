/* SPDX-License-Identifier: Apache-2.0 */
/* See printable.h. */
#include "base/printable.h"

#include <stdint.h>
#include <string.h>

/* Bytes of the character at text and its number; 0: they are no UTF-8 (RFC 3629: shortest form, no surrogates, up to U+10FFFF). */
static size_t read_character(const char *text, uint32_t *out_code)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    const unsigned char *p = (const unsigned char *)text;
    size_t bytes = p[0] < 0x80 ? 1 : p[0] >= 0xc2 && p[0] < 0xe0 ? 2 : p[0] >= 0xe0 && p[0] < 0xf0 ? 3 : p[0] >= 0xf0 && p[0] < 0xf5 ? 4 : 0;
    if (bytes < 2) {
        *out_code = p[0];
        return bytes;
    }
    uint32_t code = p[0] & (0x7fu >> bytes);
    for (size_t i = 1; i < bytes; i++) {
        if ((p[i] & 0xc0) != 0x80) { /* the end of the text too */
            return 0;
        }
        code = code << 6 | (p[i] & 0x3fu);
    }
    *out_code = code;
    return code < least[bytes] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000) ? 0 : bytes;
}

static bool steers(uint32_t code)
{
    return code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0x200e || code == 0x200f || (code >= 0x2028 && code <= 0x202e) ||
           (code >= 0x2066 && code <= 0x2069);
}

void ep_text_make_printable(char *text, char substitute)
{
    while (*text != 0) {
        uint32_t code = 0;
        size_t bytes = read_character(text, &code);
        if (bytes == 0 || steers(code)) {
            bytes = bytes > 0 ? bytes : 1;
            memset(text, substitute, bytes);
        }
        text += bytes;
    }
}

size_t ep_text_printable_bytes(const char *text, bool blanks_allowed)
{
    size_t at = 0;
    while (text[at] != 0) {
        uint32_t code = 0;
        size_t bytes = read_character(text + at, &code);
        bool blank = code == ' ' || code == 0xa0 || code == 0x3000;
        if (bytes == 0 || steers(code) || (blank && !blanks_allowed)) {
            break;
        }
        at += bytes;
    }
    return at;
}
