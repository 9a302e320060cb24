/* SPDX-License-Identifier: Apache-2.0 */
/* What a daemon does with its option table beside running: its command line, and the documents made
 * from it. */
#ifndef EP_SERVER_COMMON_PROGRAM_OPTIONS_H
#define EP_SERVER_COMMON_PROGRAM_OPTIONS_H

#include "options/options.h"

/* A file with every key, commented out, with default, allowed values and what it is for. */
void ep_options_print_sample(const ep_options_spec *spec, FILE *out);
/* The program's page of section 8, and that of its file of section 5. */
void ep_options_print_man(const ep_options_spec *spec, FILE *out);
void ep_options_print_man_file(const ep_options_spec *spec, FILE *out);
/* False, with a line on stderr: no such shell, or no memory. */
bool ep_options_print_completion(const ep_options_spec *spec, const char *shell, FILE *out);

/*
 * What every program's main does with its command line. Loads, runs check (rules beyond the table;
 * may be NULL), and serves --help, --version, --check-config, --print-config. Returns -1 to go on
 * with *out_options (caller frees), else the exit code: 0, or 1 with the reason on stderr.
 */
int ep_options_main(const ep_options_spec *spec, int argc, char **argv, ep_options_check_func check,
                    ep_options **out_options);

#endif
