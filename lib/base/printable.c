/* SPDX-License-Identifier: Apache-2.0 */
/* See printable.h. */
#include "base/printable.h"

#include <stdint.h>
#include <string.h>

/* Bytes of the character at text, and its number; 0: it is no valid UTF-8 (RFC 3629: shortest form,
 * no surrogates, up to U+10FFFF). */
static size_t read_character(const char *text, uint32_t *out_code)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    const unsigned char *p = (const unsigned char *)text;
    size_t bytes = p[0] < 0x80   ? 1
                   : p[0] < 0xc2 ? 0
                   : p[0] < 0xe0 ? 2
                   : p[0] < 0xf0 ? 3
                   : p[0] < 0xf5 ? 4
                                 : 0;
    if (bytes < 2) {
        *out_code = p[0];
        return bytes;
    }
    uint32_t code = p[0] & (0x7fu >> bytes);
    for (size_t i = 1; i < bytes; i++) {
        if ((p[i] & 0xc0) != 0x80) { /* also at the end of text */
            return 0;
        }
        code = code << 6 | (p[i] & 0x3fu);
    }
    *out_code = code;
    return code < least[bytes] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000) ? 0 : bytes;
}

static bool steers(uint32_t code)
{
    return code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0x61c || code == 0x200e ||
           code == 0x200f || (code >= 0x2028 && code <= 0x202e) ||
           (code >= 0x2066 && code <= 0x2069);
}

/* Unicode's spaces, and characters without width, which would make two names look alike. */
static bool is_blank(uint32_t code)
{
    return code == ' ' || code == 0xa0 || code == 0xad || code == 0x1680 ||
           (code >= 0x2000 && code <= 0x200d) || code == 0x202f || code == 0x205f ||
           code == 0x2060 || code == 0x3000 || code == 0xfeff;
}

size_t ep_text_escape_part(const char *text, char *out, size_t out_bytes)
{
    static const char digits[] = "0123456789abcdef";
    size_t at = 0, from = 0;
    while (text[from] != 0) {
        uint32_t code = 0;
        size_t bytes = read_character(text + from, &code);
        bool is_good = bytes > 0 && !steers(code);
        bytes = bytes > 0 ? bytes : 1;
        if (at + (is_good ? bytes : 4 * bytes) >= out_bytes) {
            break;
        }
        for (size_t i = 0; i < bytes; i++) {
            unsigned char c = (unsigned char)text[from + i];
            if (is_good) {
                out[at++] = text[from + i];
            } else {
                memcpy(out + at, (const char[]){'\\', 'x', digits[c >> 4], digits[c & 15]}, 4);
                at += 4;
            }
        }
        from += bytes;
    }
    out[at] = 0;
    return from;
}

char *ep_text_escape(const char *text, char *out, size_t out_bytes)
{
    (void)ep_text_escape_part(text, out, out_bytes);
    return out;
}

size_t ep_text_printable_bytes(const char *text, bool blanks_allowed)
{
    size_t at = 0;
    while (text[at] != 0) {
        uint32_t code = 0;
        size_t bytes = read_character(text + at, &code);
        if (bytes == 0 || steers(code) || (!blanks_allowed && is_blank(code))) {
            break;
        }
        at += bytes;
    }
    return at;
}
