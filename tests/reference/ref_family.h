/* SPDX-License-Identifier: Apache-2.0 */
/* Numerics families of the oracle, and which of them daemons are told of when nobody says. */
#ifndef TESTS_REFERENCE_REF_FAMILY_H
#define TESTS_REFERENCE_REF_FAMILY_H

#include <stdbool.h>

enum ref_family { REF_PORTABLE, REF_BF16DP, REF_BF16ODD, REF_W4A8, REF_AUTO_VNNI };
/* No expert's: what auto is with AVX-512 VNNI and no AVX-512 BF16, or where the CPU ends at AVX2.
 * w4a8, and beside it portable. */
enum { REF_FAMILIES = REF_AUTO_VNNI };

/* "portable", "bf16dp", "bf16odd", "w4a8"; "auto" of REF_AUTO_VNNI */
const char *ref_family_name(enum ref_family family);
/* Whether dot products go over pairs of bf16. */
bool ref_family_has_pairs(enum ref_family family);
/* By name, also at the head of a numerics id ("bf16dp/bf16/rne/.."); "auto" is
 * ref_family_default(). False: another word. */
bool ref_family_parse(const char *text, enum ref_family *out_family);
/*
 * What daemons started with this environment take: what EXPERTD_NUMERICS names, else what this CPU
 * is fastest with, cut at the level of EXPERTD_CPU_FEATURES. Read once more from
 * deploy/manual/numerics.md: no code of theirs.
 */
enum ref_family ref_family_default(void);

#endif
