/* SPDX-License-Identifier: Apache-2.0 */
/* Ties a target to libFuzzer. `PROGRAM --write-seeds=DIR` writes the seeds as files and ends. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);
int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed);

size_t fuzz_mutate_bytes(uint8_t *data, size_t bytes, size_t bytes_max)
{
    return LLVMFuzzerMutate(data, bytes, bytes_max);
}

static void write_seeds(const char *dir)
{
    static uint8_t seed[FUZZ_BYTES_MAX];
    size_t bytes;
    for (size_t i = 0; (bytes = fuzz_seed(i, seed)) > 0; i++) {
        char path[4096];
        snprintf(path, sizeof(path), "%s/seed-%03zu", dir, i);
        FILE *file = fopen(path, "wb");
        if (file == NULL || fwrite(seed, 1, bytes, file) != bytes || fclose(file) != 0) {
            perror(path);
            exit(1);
        }
    }
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    static const char flag[] = "--write-seeds=";
    if (*argc > 1 && strncmp((*argv)[1], flag, sizeof(flag) - 1) == 0) {
        write_seeds((*argv)[1] + sizeof(flag) - 1);
        exit(0);
    }
    fuzz_start();
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size <= FUZZ_BYTES_MAX) {
        fuzz_one(data, size);
    }
    return 0;
}

/* One mutation of four is libFuzzer's own, so that broken forms come too. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed)
{
    if (seed % 4 == 0) {
        return LLVMFuzzerMutate(data, size, max_size);
    }
    return fuzz_mutate(data, size, max_size, seed / 4);
}
