/* SPDX-License-Identifier: Apache-2.0 */
/* Names of options: found, guessed, and written as flag and variable. */
#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "options/options_internal.h"

#define NAME_BYTES 128

size_t ep_options_find(const ep_option *options, size_t count, const char *name)
{
    for (size_t i = 0; i < count; i++) {
        if (strcmp(options[i].name, name) == 0) {
            return i;
        }
    }
    return SIZE_MAX;
}

/* Levenshtein distance, for names up to the length of ours. */
static size_t distance(const char *a, const char *b)
{
    size_t row[NAME_BYTES];
    size_t b_bytes = strlen(b);
    if (strlen(a) >= NAME_BYTES || b_bytes >= NAME_BYTES) {
        return NAME_BYTES;
    }
    for (size_t j = 0; j <= b_bytes; j++) {
        row[j] = j;
    }
    for (size_t i = 1; a[i - 1] != 0; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b_bytes; j++) {
            size_t change = diagonal + (a[i - 1] != b[j - 1]);
            size_t other = 1 + (row[j] < row[j - 1] ? row[j] : row[j - 1]);
            diagonal = row[j];
            row[j] = change < other ? change : other;
        }
    }
    return row[b_bytes];
}

const char *ep_options_nearest(const ep_option *options, size_t count, const char *name)
{
    const char *best = NULL;
    size_t best_distance = strlen(name) / 3 + 1;
    for (size_t i = 0; i < count; i++) {
        size_t d = distance(name, options[i].name);
        if (d <= best_distance) {
            best = options[i].name;
            best_distance = d == 0 ? 0 : d - 1;
        }
    }
    return best;
}

void ep_option_env_name(const ep_options_spec *spec, const ep_option *option, char *out,
                        size_t bytes)
{
    snprintf(out, bytes, "%s%s", spec->env_prefix, option->name);
    for (char *p = out; *p != 0; p++) {
        *p = (char)toupper((unsigned char)*p);
    }
}

void ep_option_flag_name(const ep_option *option, char *out, size_t bytes)
{
    snprintf(out, bytes, "%s", option->flag != NULL ? option->flag : option->name);
    for (char *p = out; *p != 0; p++) {
        *p = *p == '_' ? '-' : *p;
    }
}
