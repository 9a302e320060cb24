/* SPDX-License-Identifier: Apache-2.0 */
/* Numerics families of the oracle, and the default one of daemons. */
#ifndef TESTS_REFERENCE_REF_FAMILY_H
#define TESTS_REFERENCE_REF_FAMILY_H

#include <stdbool.h>

enum ref_family { REF_PORTABLE, REF_BF16DP, REF_BF16ODD, REF_W4A8, REF_AUTO_VNNI };
/* Not an expert's family: auto where the highest level is AVX-512 VNNI or AVX2. It means w4a8, and
 * portable for formats that w4a8 lacks. */
enum { REF_FAMILIES = REF_AUTO_VNNI };

/* "portable", "bf16dp", "bf16odd", "w4a8"; "auto" of REF_AUTO_VNNI */
const char *ref_family_name(enum ref_family family);
/* Whether dot products are over pairs of bf16. */
bool ref_family_has_pairs(enum ref_family family);
/* Parses a name, also at the head of a numerics id ("bf16dp/bf16/rne/.."); "auto" is
 * ref_family_default(). False: unknown. */
bool ref_family_parse(const char *text, enum ref_family *out_family);
/*
 * Returns the family of daemons started with this environment: the one that EXPERTD_NUMERICS names,
 * else the fastest one of this CPU, limited by EXPERTD_CPU_FEATURES. Written from
 * deploy/manual/numerics.md; it shares no code with the daemons.
 */
enum ref_family ref_family_default(void);

#endif
