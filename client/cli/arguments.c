/* SPDX-License-Identifier: Apache-2.0 */
/* Strict values of options. */
#include "arguments.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "settings.h"

#define WORDS_TEXT_BYTES 256

uint64_t ep_cli_arg_whole(struct argp_state *state, const char *option, const char *text,
                          uint64_t min, uint64_t max)
{
    uint64_t value = 0;
    if (ep_quantity_parse(text, EP_UNIT_NONE, EP_UNIT_NONE, &value) != NULL || value < min ||
        value > max) {
        argp_error(state, "%s is '%s', allowed: a whole number %" PRIu64 "..%" PRIu64,
                   ep_cli_setting_name(option, text), text, min, max);
    }
    return value;
}

float ep_cli_arg_float(struct argp_state *state, const char *option, const char *text, float min,
                       float max)
{
    char *end = NULL;
    float value = strtof(text, &end);
    if (end == text || *end != '\0' || !isfinite(value) || value < min || value > max) {
        argp_error(state, "%s is '%s', allowed: a number %g..%g", ep_cli_setting_name(option, text),
                   text, (double)min, (double)max);
    }
    return value;
}

uint64_t ep_cli_arg_quantity(struct argp_state *state, const char *option, const char *text,
                             ep_unit plain, ep_unit unit, uint64_t min, uint64_t max)
{
    uint64_t value = 0;
    const char *wrong = ep_quantity_parse(text, plain, unit, &value);
    if (wrong == NULL && (value < min || value > max)) {
        wrong = "is out of range";
    }
    if (wrong != NULL) {
        char least[EP_QUANTITY_BYTES], most[EP_QUANTITY_BYTES];
        argp_error(state, "%s is '%s', allowed: %s..%s%s (it %s)",
                   ep_cli_setting_name(option, text), text, ep_quantity_format(min, unit, least),
                   ep_quantity_format(max, unit, most), ep_quantity_hint(plain), wrong);
    }
    return value;
}

uint64_t ep_cli_arg_time_us(struct argp_state *state, const char *option, const char *text,
                            uint64_t min, uint64_t max)
{
    return ep_cli_arg_quantity(state, option, text, EP_UNIT_S, EP_UNIT_US, min, max);
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
            used += (size_t)snprintf(allowed + used, sizeof(allowed) - used, "%s%s",
                                     i > 0 ? ", " : "", words[i]);
        }
    }
    argp_error(state, "%s is '%s', allowed: %s", ep_cli_setting_name(option, text), text, allowed);
    return 0;
}

const char *ep_cli_arg_text(struct argp_state *state, const char *option, const char *text,
                            size_t bytes_max)
{
    size_t bytes = strlen(text);
    if (bytes == 0 || bytes > bytes_max) {
        argp_error(state, "%s has %zu characters, allowed: 1..%zu",
                   ep_cli_setting_name(option, text), bytes, bytes_max);
    }
    return text;
}

static const struct argp_option *find_option(const struct argp *argp, const char *option)
{
    bool is_long = strncmp(option, "--", 2) == 0;
    const struct argp_option *o = argp->options;
    for (; o != NULL && (o->name != NULL || o->key != 0 || o->doc != NULL); o++) {
        if (is_long ? o->name != NULL && strcmp(o->name, option + 2) == 0
                    : option[0] == '-' && o->key == option[1]) {
            return o;
        }
    }
    const struct argp_option *found = NULL;
    for (const struct argp_child *c = argp->children; found == NULL && c != NULL && c->argp != NULL;
         c++) {
        found = find_option(c->argp, option);
    }
    return found;
}

void ep_cli_arg_required(struct argp_state *state, const char *option, const void *value)
{
    if (value == NULL) {
        const struct argp_option *found = find_option(state->root_argp, option);
        if (found == NULL) {
            argp_error(state, "%s is missing; it is required", option);
        } else {
            argp_error(state, "%s is missing; it is required. %s: %s", option, found->arg,
                       found->doc);
        }
    }
}

error_t ep_cli_arg_unexpected(struct argp_state *state, const char *text)
{
    argp_error(state, "unexpected argument '%s', allowed: options only", text);
    return EINVAL;
}

error_t ep_cli_arg_verb(struct argp_state *state, int key, const char *text, const char *allowed)
{
    if (key == ARGP_KEY_ARG) {
        argp_error(state, "there is no verb '%s', allowed: %s", text, allowed);
        return EINVAL;
    }
    if (key == ARGP_KEY_NO_ARGS) {
        argp_error(state, "no verb given, allowed: %s", allowed);
        return EINVAL;
    }
    return ARGP_ERR_UNKNOWN;
}
