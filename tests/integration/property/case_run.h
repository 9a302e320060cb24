/* SPDX-License-Identifier: Apache-2.0 */
/* One case through the service and through the oracle, and the comparison of the two. */
#ifndef PROPERTY_CASE_RUN_H
#define PROPERTY_CASE_RUN_H

#include "layer_case.h"

enum { CASE_TEXT_BYTES = 1024 };

typedef struct case_result {
    bool same;                   /* the two agree in everything */
    bool refused;                /* by the oracle */
    uint64_t differing_elements; /* result elements with other bits */
    uint32_t nodes;              /* that got rows */
    uint32_t frames;
    uint8_t *wanted;            /* packed rows of the oracle; NULL when refused */
    uint8_t *got;               /* packed rows of the service; NULL when it failed */
    char text[CASE_TEXT_BYTES]; /* what is wrong, when not the same */
} case_result;

/* version: of the case's model, for cases that name it. */
void case_run(layer_case *c, ep_client *client, const char *version, case_result *out_result);
void case_result_free(case_result *result);

/*
 * Elements of packed rows whose bits differ. Any NaN equals any NaN: which payload survives depends
 * on the order of an instruction's operands, and the contract leaves it open. *out_first (may be
 * NULL): index of the first.
 */
uint64_t count_differences(const layer_case *c, const uint8_t *wanted, const uint8_t *got,
                           size_t *out_first);

#endif
