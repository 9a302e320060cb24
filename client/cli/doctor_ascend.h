/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What an Ascend NPU needs on this host, from files alone: driver, device nodes, CANN, and the way
 * of the loader to it. Whether the libraries open and have what is asked of them, expertd
 * --check-config says.
 */
#ifndef EP_CLI_DOCTOR_ASCEND_H
#define EP_CLI_DOCTOR_ASCEND_H

#include "doctor.h"

#define EP_DOCTOR_ASCEND_TEXT_BYTES 128

typedef struct ep_doctor_ascend_facts {
    char driver[EP_DOCTOR_ASCEND_TEXT_BYTES]; /* its version; "" there is none */
    uint32_t devices_count;                   /* davinci0 and so on */
    const char *node_missing; /* the first of those that every device needs; NULL none */
    char node_closed[EP_DOCTOR_ASCEND_TEXT_BYTES]; /* the first that we may not open; "" none */
    char node_group[33];                           /* of that one */
    const char *home;                              /* where CANN is, borrowed; NULL nowhere */
    char version[EP_DOCTOR_ASCEND_TEXT_BYTES];     /* of its toolkit, "unknown" */
    bool has_runtime;         /* its lib64 has libacl_rt.so or libascendcl.so */
    bool has_operators;       /* and libopapi_nn.so with libopapi_transformer.so, or libopapi.so */
    bool home_is_set;         /* ASCEND_HOME_PATH is that one */
    bool library_path_is_set; /* LD_LIBRARY_PATH has its lib64 */
    bool is_container;
    /* expertd.service is installed, and no drop-in of it lets a device in */
    bool unit_lacks_devices;
} ep_doctor_ascend_facts;

/* Files below root ("": this host); home and library_path: the two variables, NULL not set. */
void ep_doctor_ascend_look(const char *root, const char *home, const char *library_path,
                           ep_doctor_ascend_facts *out_facts);

/* is_wanted: a configuration names backend ascend; else only what is there is told. Pure. */
void ep_doctor_ascend_examine(const ep_doctor_ascend_facts *facts, bool is_wanted,
                              ep_doctor_findings *io_findings);

#endif
