/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checks by files alone what an Ascend NPU needs on this host: driver, device nodes, CANN, and the
 * loader's path to it. Whether the libraries can be opened and have all symbols, expertd
 * --check-config tells.
 */
#ifndef EP_CLI_DOCTOR_ASCEND_H
#define EP_CLI_DOCTOR_ASCEND_H

#include "doctor.h"

#define EP_DOCTOR_ASCEND_TEXT_BYTES 128

typedef struct ep_doctor_ascend_facts {
    char driver[EP_DOCTOR_ASCEND_TEXT_BYTES]; /* its version; "": no driver */
    uint32_t devices_count;                   /* number of davinci0, davinci1, ... */
    /* the first missing one of the nodes that every device needs; NULL: none */
    const char *node_missing;
    char node_closed[EP_DOCTOR_ASCEND_TEXT_BYTES]; /* the first that may not be opened; "": none */
    char node_group[33];                           /* group of that one */
    const char *home;                              /* folder of CANN, borrowed; NULL: not found */
    char version[EP_DOCTOR_ASCEND_TEXT_BYTES];     /* of its toolkit, or "unknown" */
    bool has_runtime;         /* its lib64 has libacl_rt.so or libascendcl.so */
    bool has_operators;       /* and libopapi_nn.so with libopapi_transformer.so, or libopapi.so */
    bool home_is_set;         /* ASCEND_HOME_PATH is that one */
    bool library_path_is_set; /* LD_LIBRARY_PATH has its lib64 */
    bool is_container;
    /* expertd.service is installed without a drop-in that allows a device */
    bool unit_lacks_devices;
} ep_doctor_ascend_facts;

/* Looks at files below root ("": this host); home and library_path: the two variables; NULL: not
 * set. */
void ep_doctor_ascend_look(const char *root, const char *home, const char *library_path,
                           ep_doctor_ascend_facts *out_facts);

/* is_wanted: a configuration names backend ascend; otherwise only reports what there is. Pure. */
void ep_doctor_ascend_examine(const ep_doctor_ascend_facts *facts, bool is_wanted,
                              ep_doctor_findings *io_findings);

#endif
