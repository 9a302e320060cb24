/* SPDX-License-Identifier: Apache-2.0 */
/* Strict values of options, and their tables for argp. */
#include "arguments.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/words.h"
#include "origin.h"

#define WORDS_TEXT_BYTES 256
#define OPTION_BYTES 64
#define KEY_FIRST 0x200 /* + index of the row */
/* room for all commands twice */
#define ROWS_MAX 1536
#define TABLES_MAX 512

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

/* Read as f32 directly, which gives the float nearest to the text. */
static float arg_float(struct argp_state *state, const char *option, const char *text, float min,
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

uint32_t ep_cli_arg_word(struct argp_state *state, const char *option, const char *text,
                         const char *words)
{
    char allowed[WORDS_TEXT_BYTES];
    uint32_t place = 0;
    if (!ep_words_find(words, text, &place)) {
        ep_words_list(words, allowed, sizeof(allowed));
        argp_error(state, "%s is '%s', allowed: %s", ep_cli_setting_name(option, text), text,
                   allowed);
    }
    return place;
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

/* ---- rows ---- */

static uint64_t number_of(struct argp_state *state, const ep_cli_option *row, const char *option,
                          const char *text)
{
    const ep_unit plain = row->plain != EP_UNIT_NONE ? row->plain : row->unit;
    return row->unit == EP_UNIT_NONE
               ? ep_cli_arg_whole(state, option, text, row->min, row->max)
               : ep_cli_arg_quantity(state, option, text, plain, row->unit, row->min, row->max);
}

static void take(struct argp_state *state, const ep_cli_option *row, char *text)
{
    char option[OPTION_BYTES];
    snprintf(option, sizeof(option), "--%s", row->name);
    if (row->flag != NULL) {
        *row->flag = true;
    } else if (row->off != NULL) {
        *row->off = false;
    } else if (row->text != NULL) {
        *row->text = row->max > 0 ? ep_cli_arg_text(state, option, text, row->max) : text;
    } else if (row->u32 != NULL) {
        *row->u32 = (uint32_t)number_of(state, row, option, text);
    } else if (row->u64 != NULL) {
        *row->u64 = number_of(state, row, option, text);
    } else if (row->f32 != NULL) {
        *row->f32 = arg_float(state, option, text, row->least, row->most);
    } else if (row->f64 != NULL) {
        *row->f64 = (double)arg_float(state, option, text, row->least, row->most);
    } else if (row->word != NULL) {
        const uint32_t place =
            ep_cli_arg_word(state, option, text, row->words != NULL ? row->words : row->arg);
        *row->word = row->numbers != NULL ? row->numbers[place] : place;
    } else {
        row->take(state, option, text);
    }
    if (row->given != NULL) {
        *row->given = true;
    }
}

static void check(struct argp_state *state, const ep_cli_options *options)
{
    for (size_t i = 0; i < options->count; i++) {
        const ep_cli_option *row = &options->rows[i];
        char option[OPTION_BYTES];
        if (row->required) {
            snprintf(option, sizeof(option), "--%s", row->name);
            ep_cli_arg_required(state, option,
                                row->text != NULL ? *row->text
                                : *row->given     ? row->name
                                                  : NULL);
        }
    }
    if (options->check != NULL) {
        options->check(state);
    }
}

static int key_of(const ep_cli_options *options, size_t index)
{
    const ep_cli_option *row = &options->rows[index];
    return row->name == NULL ? 0 : row->letter != 0 ? row->letter : KEY_FIRST + (int)index;
}

error_t ep_cli_options_parse(const ep_cli_options *options, int key, char *arg,
                             struct argp_state *state)
{
    if (key == ARGP_KEY_INIT && options->init != NULL) {
        options->init();
    } else if (key == ARGP_KEY_END) {
        check(state, options);
    } else if (key == ARGP_KEY_SUCCESS && options->success != NULL) {
        options->success(state);
    }
    for (size_t i = 0; key != ARGP_KEY_ARG && i < options->count; i++) {
        if (key_of(options, i) == key) {
            take(state, &options->rows[i], arg);
            if (options->first != NULL && *options->first == NULL) {
                *options->first = options->rows[i].name;
            }
            return 0;
        }
    }
    return key == ARGP_KEY_INIT || key == ARGP_KEY_END || key == ARGP_KEY_SUCCESS
               ? 0
               : ARGP_ERR_UNKNOWN;
}

static error_t parse_used(int key, char *arg, struct argp_state *state)
{
    return ep_cli_options_parse(state->input, key, arg, state);
}

/* Made only a few times in a process, so never freed. */
static const struct argp_option *argp_rows(const ep_cli_options *options)
{
    static struct argp_option rows[ROWS_MAX];
    static size_t used;
    struct argp_option *out = &rows[used];
    if (options->count == 0) {
        return NULL; /* argp's help leaks memory for an empty table */
    }
    used += options->count + 1; /* a row of zeros ends them */
    EP_ASSERT(used <= ROWS_MAX);
    for (size_t i = 0; i < options->count; i++) {
        const ep_cli_option *row = &options->rows[i];
        out[i] =
            (struct argp_option){row->name, key_of(options, i), row->arg, 0, row->help, row->group};
    }
    return out;
}

const struct argp *ep_cli_options_argp(const ep_cli_options *own,
                                       const ep_cli_options *const uses[EP_CLI_USES_MAX],
                                       const struct argp *root)
{
    static struct argp tables[TABLES_MAX];
    static struct argp_child children[TABLES_MAX];
    static size_t used;
    struct argp *out = &tables[used];
    struct argp_child *child = &children[used];
    EP_ASSERT(used + 1 + EP_CLI_USES_MAX <= TABLES_MAX);
    *out = *root;
    out->options = argp_rows(own);
    out->children = child;
    used++; /* a child of zeros ends them */
    for (size_t i = 0; i < EP_CLI_USES_MAX && uses[i] != NULL; i++) {
        tables[used] = (struct argp){.options = argp_rows(uses[i]), .parser = parse_used};
        child[i] = (struct argp_child){&tables[used++], 0, uses[i]->heading, uses[i]->group};
    }
    return out;
}
