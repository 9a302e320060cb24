/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inputs that are scripts: what a peer does, record by record.
 *
 *     kind (1)  length of the rest (2)  rest
 */
#ifndef EP_TESTS_FUZZ_SCRIPT_H
#define EP_TESTS_FUZZ_SCRIPT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FUZZ_RECORDS_MAX 24 /* the rest of a longer script is not played */

typedef struct fuzz_record {
    uint8_t kind;
    const uint8_t *rest;
    size_t bytes;
} fuzz_record;

/* Returns what it wrote. */
size_t fuzz_record_put(uint8_t *out, uint8_t kind, const void *rest, size_t bytes);
/* Takes the next record off a script; one that is cut short has what is left. False: no more. */
bool fuzz_record_next(const uint8_t **script, size_t *bytes, fuzz_record *out_record);

/* Changes the rest of a record in place; the new length. */
typedef size_t (*fuzz_change_func)(uint8_t kind, uint8_t *rest, size_t bytes, size_t bytes_max,
                                   uint32_t random);
/* For fuzz_mutate: takes a record out, repeats one, or changes one. */
size_t fuzz_script_mutate(uint8_t *script, size_t bytes, size_t bytes_max, uint32_t random,
                          fuzz_change_func change);

/* Whatever URL an input names, nothing outside the program is dialed: breaks the schemes that leave
 * it. */
void fuzz_stay_inside(uint8_t *data, size_t bytes);

#endif
