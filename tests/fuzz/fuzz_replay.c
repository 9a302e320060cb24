/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs a target without libFuzzer: its seeds, each seed with every byte changed in a few ways, and
 * the files named on the command line (inputs that once broke something).
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"

size_t fuzz_mutate_bytes(uint8_t *data, size_t bytes, size_t bytes_max)
{
    (void)data;
    (void)bytes_max;
    return bytes;
}

/* A copy of exactly these bytes, so that a sanitizer sees a read past the end. */
static void run(const uint8_t *data, size_t bytes)
{
    uint8_t *copy = malloc(bytes + (bytes == 0));
    if (copy == NULL) {
        exit(1);
    }
    memcpy(copy, data, bytes);
    fuzz_one(copy, bytes);
    free(copy);
}

static size_t run_changes(uint8_t *seed, size_t bytes, size_t changes_max)
{
    static const uint8_t masks[] = {0x01, 0x80, 0xff};
    size_t step = bytes / changes_max + 1;
    size_t count = 0;
    for (size_t i = 0; i < bytes; i += step) {
        for (size_t m = 0; m < sizeof(masks); m++, count++) {
            seed[i] ^= masks[m];
            run(seed, bytes);
            seed[i] ^= masks[m];
        }
        run(seed, i);
    }
    return count;
}

static size_t run_folder(const char *path)
{
    static uint8_t data[FUZZ_BYTES_MAX];
    size_t count = 0;
    DIR *folder = opendir(path);
    struct dirent *entry;
    while (folder != NULL && (entry = readdir(folder)) != NULL) {
        char name[4096];
        snprintf(name, sizeof(name), "%s/%s", path, entry->d_name);
        FILE *file = entry->d_name[0] != '.' ? fopen(name, "rb") : NULL;
        if (file != NULL) {
            run(data, fread(data, 1, sizeof(data), file));
            fclose(file);
            count++;
        }
    }
    if (folder != NULL) {
        closedir(folder);
    }
    return count;
}

int main(int argc, char **argv)
{
    static uint8_t seed[FUZZ_BYTES_MAX];
    size_t changes_max = argc > 1 ? strtoul(argv[1], NULL, 10) : 100;
    size_t bytes, seeds = 0, changes = 0, files = 0;
    fuzz_start();
    run(seed, 0);
    for (; (bytes = fuzz_seed(seeds, seed)) > 0; seeds++) {
        run(seed, bytes);
        changes += run_changes(seed, bytes, changes_max);
    }
    for (int i = 2; i < argc; i++) {
        files += run_folder(argv[i]);
    }
    printf("%zu seeds, %zu changed ones, %zu files\n", seeds, changes, files);
    return seeds > 0 ? 0 : 1;
}
