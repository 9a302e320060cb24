/* SPDX-License-Identifier: Apache-2.0 */
/* A daemon's command line, and the documents made of its option table. */
#ifndef EP_SERVER_COMMON_PROGRAM_OPTIONS_H
#define EP_SERVER_COMMON_PROGRAM_OPTIONS_H

#include "options/options.h"

/* Writes a file with every key commented out, with its default, allowed values and purpose. */
void ep_options_print_sample(const ep_options_spec *spec, FILE *out);
/* The man pages of the program (section 8) and of its file (section 5). */
void ep_options_print_man(const ep_options_spec *spec, FILE *out);
void ep_options_print_man_file(const ep_options_spec *spec, FILE *out);
/* False, with a line on stderr: no such shell, or no memory. */
bool ep_options_print_completion(const ep_options_spec *spec, const char *shell, FILE *out);

/*
 * Handles the command line in main: loads the options, runs check (rules beyond the table; may be
 * NULL) and serves --help, --version, --check-config, --print-config. Returns -1 to go on with
 * *out_options (caller frees), else the exit code: 0, or 1 with the reason on stderr.
 */
int ep_options_main(const ep_options_spec *spec, int argc, char **argv, ep_options_check_func check,
                    ep_options **out_options);

#endif
