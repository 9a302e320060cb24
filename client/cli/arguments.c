/* SPDX-License-Identifier: Apache-2.0 */
/* Strict values of options. */
#include "arguments.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WORDS_TEXT_BYTES 256

uint64_t ep_cli_arg_whole(struct argp_state *state, const char *option, const char *text, uint64_t min,
                          uint64_t max)
{
    char *end = NULL;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    /* strtoull takes signs and leading spaces; we do not. */
    if (text[0] < '0' || text[0] > '9' || *end != '\0' || errno != 0 || value < min || value > max) {
        argp_error(state, "%s is '%s', allowed: a whole number %" PRIu64 "..%" PRIu64, option, text, min,
                   max);
    }
    return value;
}

double ep_cli_arg_number(struct argp_state *state, const char *option, const char *text, double min,
                         double max)
{
    char *end = NULL;
    double value = strtod(text, &end);
    if (end == text || *end != '\0' || !isfinite(value) || value < min || value > max) {
        argp_error(state, "%s is '%s', allowed: a number %g..%g", option, text, min, max);
    }
    return value;
}

float ep_cli_arg_float(struct argp_state *state, const char *option, const char *text, float min, float max)
{
    char *end = NULL;
    float value = strtof(text, &end);
    if (end == text || *end != '\0' || !isfinite(value) || value < min || value > max) {
        argp_error(state, "%s is '%s', allowed: a number %g..%g", option, text, (double)min, (double)max);
    }
    return value;
}

uint64_t ep_cli_arg_duration_us(struct argp_state *state, const char *option, const char *text, double min, double max)
{
    char *end = NULL;
    double value = strtod(text, &end);
    double unit = *end == '\0' || strcmp(end, "s") == 0 ? 1.0
                  : strcmp(end, "ms") == 0            ? 1e-3
                  : strcmp(end, "m") == 0             ? 60.0
                                                      : 0.0;
    value *= unit;
    if (end == text || unit == 0.0 || !isfinite(value) || value < min || value > max) {
        argp_error(state, "%s is '%s', allowed: a number %g..%g of seconds, as 5, 5s, 500ms or 2m", option, text, min, max);
    }
    return (uint64_t)(value * 1e6);
}

size_t ep_cli_arg_word(struct argp_state *state, const char *option, const char *text,
                       const char *const *words)
{
    char allowed[WORDS_TEXT_BYTES] = "";
    size_t used = 0;
    for (size_t i = 0; words[i] != NULL; i++) {
        if (strcmp(text, words[i]) == 0) {
            return i;
        }
        if (used < sizeof(allowed)) {
            used +=
                (size_t)snprintf(allowed + used, sizeof(allowed) - used, "%s%s", i > 0 ? ", " : "", words[i]);
        }
    }
    argp_error(state, "%s is '%s', allowed: %s", option, text, allowed);
    return 0;
}

const char *ep_cli_arg_text(struct argp_state *state, const char *option, const char *text, size_t bytes_max)
{
    size_t bytes = strlen(text);
    if (bytes == 0 || bytes > bytes_max) {
        argp_error(state, "%s has %zu characters, allowed: 1..%zu", option, bytes, bytes_max);
    }
    return text;
}

void ep_cli_arg_required(struct argp_state *state, const char *option, const void *value)
{
    if (value == NULL) {
        argp_error(state, "%s is missing; it is required", option);
    }
}

error_t ep_cli_arg_unexpected(struct argp_state *state, const char *text)
{
    argp_error(state, "unexpected argument '%s', allowed: options only", text);
    return EINVAL;
}
