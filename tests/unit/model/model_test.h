/* SPDX-License-Identifier: Apache-2.0 */
/* Small helpers of the model tests: a directory per test, and raw files in it. */
#ifndef EP_TEST_MODEL_TEST_H
#define EP_TEST_MODEL_TEST_H

#include <criterion/criterion.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/checkpoint_fixture.h"
#include "support/expect.h"

static char test_dir[EP_FIXTURE_PATH_BYTES];

static inline void make_test_dir(void)
{
    ep_fixture_temp_dir(test_dir);
}

static inline void remove_test_dir(void)
{
    ep_fixture_remove(test_dir);
}

/* Good until the fourth call after it. */
static inline const char *test_path(const char *name)
{
    static char paths[4][EP_FIXTURE_PATH_BYTES + 256];
    static size_t next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof(paths[0]), "%s/%s", test_dir, name);
    return path;
}

static inline void write_raw(const char *name, const void *bytes, size_t count)
{
    FILE *file = fopen(test_path(name), "wb");
    cr_assert_not_null(file);
    cr_assert_eq(fwrite(bytes, 1, count, file), count);
    cr_assert_eq(fclose(file), 0);
}

static inline void write_text(const char *name, const char *text)
{
    write_raw(name, text, strlen(text));
}

/* The whole file; free() it. */
static inline char *read_raw(const char *name, size_t *out_count)
{
    FILE *file = fopen(test_path(name), "rb");
    cr_assert_not_null(file);
    fseek(file, 0, SEEK_END);
    long count = ftell(file);
    rewind(file);
    char *bytes = malloc((size_t)count + 1);
    cr_assert_eq(fread(bytes, 1, (size_t)count, file), (size_t)count);
    bytes[count] = '\0';
    fclose(file);
    *out_count = (size_t)count;
    return bytes;
}

/* Replaces the first occurrence of a text in a file of the test directory. */
static inline void edit_file(const char *name, const char *from, const char *to)
{
    size_t count = 0;
    char *text = read_raw(name, &count);
    char *at = strstr(text, from);
    cr_assert_not_null(at, "%s does not contain %s", name, from);
    FILE *file = fopen(test_path(name), "wb");
    fprintf(file, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    fclose(file);
    free(text);
}

#endif
