/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Strict values of options. A wrong one ends the program through argp_error: a line naming option,
 * value and what is allowed, exit code 2.
 */
#ifndef EP_CLI_ARGUMENTS_H
#define EP_CLI_ARGUMENTS_H

#include <argp.h>
#include <stddef.h>
#include <stdint.h>

#include "base/quantity.h"

/* A decimal whole number min..max. */
uint64_t ep_cli_arg_whole(struct argp_state *state, const char *option, const char *text,
                          uint64_t min, uint64_t max);
/* A decimal number min..max, read as f32 directly: the nearest float of the text. */
float ep_cli_arg_float(struct argp_state *state, const char *option, const char *text, float min,
                       float max);
/* A size or a time of a kind, min..max of unit, in which it is returned; plain: what a number alone
 * counts. */
uint64_t ep_cli_arg_quantity(struct argp_state *state, const char *option, const char *text,
                             ep_unit plain, ep_unit unit, uint64_t min, uint64_t max);
/* The same for times in microseconds; a number alone is seconds. */
uint64_t ep_cli_arg_time_us(struct argp_state *state, const char *option, const char *text,
                            uint64_t min, uint64_t max);
/* The index of text in words (NULL-terminated). */
size_t ep_cli_arg_word(struct argp_state *state, const char *option, const char *text,
                       const char *const *words);
/* Text of 1..bytes_max bytes; returns it. */
const char *ep_cli_arg_text(struct argp_state *state, const char *option, const char *text,
                            size_t bytes_max);
/* A required option that is not there. */
void ep_cli_arg_required(struct argp_state *state, const char *option, const void *value);
/* What a command says whose verb is missing, or is none of `allowed`. */
error_t ep_cli_arg_verb(struct argp_state *state, int key, const char *text, const char *allowed);
/* An argument where only options are allowed. */
error_t ep_cli_arg_unexpected(struct argp_state *state, const char *text);

#endif
