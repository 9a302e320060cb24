/* SPDX-License-Identifier: Apache-2.0 */
#include "base/words.h"

#include <string.h>

bool ep_words_find(const char *words, const char *text, uint32_t *out_place)
{
    const size_t bytes = strlen(text);
    for (uint32_t place = 0;; place++) {
        const size_t word_bytes = strcspn(words, "|");
        if (bytes == word_bytes && memcmp(words, text, bytes) == 0) {
            *out_place = place;
            return true;
        }
        if (words[word_bytes] == '\0') {
            return false;
        }
        words += word_bytes + 1;
    }
}

void ep_words_list(const char *words, char *out, size_t bytes)
{
    size_t n = 0;
    for (; *words != '\0' && n + 3 < bytes; words++) {
        out[n++] = *words == '|' ? ',' : *words;
        if (*words == '|') {
            out[n++] = ' ';
        }
    }
    out[n] = '\0';
}
