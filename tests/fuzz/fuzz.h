/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a fuzz target is made of. Each fuzz_<target>.c defines fuzz_one and fuzz_seed, and may
 * define fuzz_mutate. The same file makes two programs: with libFuzzer (tests/fuzz/run, clang), and
 * a replay of seeds and found inputs in every ordinary test run.
 *
 * A target checks more than "does not crash": what a decoder accepts is read to its last byte, and
 * written again must give the same.
 */
#ifndef EP_TESTS_FUZZ_H
#define EP_TESTS_FUZZ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FUZZ_BYTES_MAX 65536

/* Runs once before the first input; a target that needs nothing has none. */
void fuzz_start(void);
/* One input. */
void fuzz_one(const uint8_t *data, size_t bytes);
/* Writes the index-th seed to out [FUZZ_BYTES_MAX]; its length, 0 past the last one. */
size_t fuzz_seed(size_t index, uint8_t *out);
/* The text without its 0; its length. */
size_t fuzz_seed_text(const char *text, uint8_t *out);
/* Changes data in place so that it still looks right to the first checks; the new length. A target
 * that has none of its own gets libFuzzer's. */
extern size_t (*const fuzz_mutate)(uint8_t *data, size_t bytes, size_t bytes_max, uint32_t random);

/* Ends the program: the input broke a promise. */
#define FUZZ_CHECK(condition)                                                                      \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fuzz_broken(__FILE__, __LINE__, #condition);                                           \
        }                                                                                          \
    } while (0)
void fuzz_broken(const char *file, int line, const char *condition) __attribute__((noreturn));

/* Reads every byte, so that a sanitizer sees whether it may be read. */
void fuzz_touch(const void *data, size_t bytes);

/* libFuzzer's own mutation; in the replay program it changes nothing. */
size_t fuzz_mutate_bytes(uint8_t *data, size_t bytes, size_t bytes_max);

#endif
