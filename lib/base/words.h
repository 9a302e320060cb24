/* SPDX-License-Identifier: Apache-2.0 */
/* The words that a value may be, in one string: "table|json". Pure. */
#ifndef EP_BASE_WORDS_H
#define EP_BASE_WORDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* *out_place: position of the word, from 0; written only when text is one of the words. */
bool ep_words_find(const char *words, const char *text, uint32_t *out_place);
/* "table, json", cut to what fits. */
void ep_words_list(const char *words, char *out, size_t bytes);

#endif
