/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"

/* Of targets that do not define them. */
__attribute__((weak)) void fuzz_start(void)
{
}

static size_t mutate(uint8_t *data, size_t bytes, size_t bytes_max, uint32_t random)
{
    (void)random;
    return fuzz_mutate_bytes(data, bytes, bytes_max);
}

__attribute__((weak)) size_t (*const fuzz_mutate)(uint8_t *, size_t, size_t, uint32_t) = mutate;

size_t fuzz_seed_text(const char *text, uint8_t *out)
{
    const size_t bytes = strlen(text);
    memcpy(out, text, bytes);
    return bytes;
}

void fuzz_broken(const char *file, int line, const char *condition)
{
    fprintf(stderr, "%s:%d: the input breaks: %s\n", file, line, condition);
    abort();
}

void fuzz_touch(const void *data, size_t bytes)
{
    const volatile uint8_t *at = data;
    for (size_t i = 0; i < bytes; i++) {
        (void)at[i];
    }
}
