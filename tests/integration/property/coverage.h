/* SPDX-License-Identifier: Apache-2.0 */
/* What the drawn cases really exercised: a generator that quietly stops making some kind of case
 * must not pass. */
#ifndef PROPERTY_COVERAGE_H
#define PROPERTY_COVERAGE_H

#include "case_run.h"

enum { COVERAGE_KINDS_MAX = 64, COVERAGE_CASES_MIN = 1000 };

typedef struct case_coverage {
    uint64_t counts[COVERAGE_KINDS_MAX];
} case_coverage;

/* Not locked. */
void coverage_add(case_coverage *covered, const layer_case *c, const case_result *result);
/* Prints all counts; true when none is 0. Meaningful from COVERAGE_CASES_MIN cases on. */
bool coverage_report(const case_coverage *covered);

#endif
