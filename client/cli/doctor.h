/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finds what is wrong with a service and what to do: facts in, findings out. Pure; cmd_doctor.c
 * gathers the facts.
 */
#ifndef EP_CLI_DOCTOR_H
#define EP_CLI_DOCTOR_H

#include "node_list.h"
#include "rpc/rpc_look.h"

#define EP_DOCTOR_FINDINGS_MAX 256

typedef enum ep_doctor_severity {
    EP_DOCTOR_INFO,
    EP_DOCTOR_WARN,
    EP_DOCTOR_ERROR
} ep_doctor_severity;
extern const char *const ep_doctor_severity_words[]; /* as the enum */

typedef struct ep_doctor_facts {
    const char *coordinator_url;                    /* NULL: only nodes were asked */
    ep_error coordinator_error;                     /* code EP_OK: it answered */
    ep_rpc_look coordinator_look;                   /* look at its port, when it did not answer */
    const Expertd__V1__ClusterStatusReply *cluster; /* NULL: no answer */
    const ep_cli_node_list *nodes;
    const ep_rpc_look *node_looks; /* [nodes->count]: the same for nodes */
    bool has_token;                /* this program has a token */
    bool has_trace_library;
    bool has_lttng;
} ep_doctor_facts;

typedef struct ep_doctor_finding {
    ep_doctor_severity severity;
    /* stable word for programs; borrowed from the reply if it is a coordinator's problem */
    const char *code;
    char text[EP_ERROR_TEXT_BYTES + 256];
    char advice[320];
} ep_doctor_finding;

typedef struct ep_doctor_findings {
    size_t count;   /* kept */
    size_t dropped; /* beyond EP_DOCTOR_FINDINGS_MAX */
    ep_doctor_finding list[EP_DOCTOR_FINDINGS_MAX];
} ep_doctor_findings;

/* advice "": none. Returns the finding; NULL when full. */
ep_doctor_finding *ep_doctor_add(ep_doctor_findings *findings, ep_doctor_severity severity,
                                 const char *code, const char *advice, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
/* Appends findings from the facts. */
void ep_doctor_examine(const ep_doctor_facts *facts, ep_doctor_findings *io_findings);
/* Whether a finding is more than information. */
bool ep_doctor_is_ill(const ep_doctor_findings *findings);

#endif
