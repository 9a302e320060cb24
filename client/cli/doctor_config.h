/* SPDX-License-Identifier: Apache-2.0 */
/* Checks a configuration file, and the checkpoints that it names, on this host. */
#ifndef EP_CLI_DOCTOR_CONFIG_H
#define EP_CLI_DOCTOR_CONFIG_H

#include "doctor.h"

/*
 * Runs the file's daemon with --check-config and --print-config. program NULL: expertd-coordinator
 * for a file whose name begins with "coordinator", else expertd; beside this program, else on the
 * PATH. True: the file is valid and names backend ascend.
 */
bool ep_doctor_check_config(const char *file, const char *program, ep_doctor_findings *io_findings);

/* Adds the warning of a log line in form text; ignores other lines. Pure. */
void ep_doctor_take_warning(const char *line, ep_doctor_findings *io_findings);

/* Whether the output of --print-config has backend ascend, alone or among others. Pure. */
bool ep_doctor_names_ascend(const char *text);

/* The path of the next model in the output of --print-config, from *io_at on, and whether it is a
 * mirror; false: no more. Pure. */
bool ep_doctor_next_model_path(const char **io_at, char *out_path, size_t bytes,
                               bool *out_is_mirrored);

#endif
