/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>

#include "fuzz.h"

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
