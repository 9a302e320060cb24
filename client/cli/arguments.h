/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Options as rows of a table. A row describes an option completely: its help, the check of its
 * value and where the value goes. A wrong value ends the program through argp_error with exit code
 * 2 and a line naming option, value and what is allowed.
 */
#ifndef EP_CLI_ARGUMENTS_H
#define EP_CLI_ARGUMENTS_H

#include <argp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/check.h"
#include "base/quantity.h"

/* A decimal whole number min..max. */
uint64_t ep_cli_arg_whole(struct argp_state *state, const char *option, const char *text,
                          uint64_t min, uint64_t max);
/* A size or a time, min..max of unit, in which it is returned; plain: the unit of a number without
 * one. */
uint64_t ep_cli_arg_quantity(struct argp_state *state, const char *option, const char *text,
                             ep_unit plain, ep_unit unit, uint64_t min, uint64_t max);
/* The index of text among words such as "table|json". */
uint32_t ep_cli_arg_word(struct argp_state *state, const char *option, const char *text,
                         const char *words);
/* Text of 1..bytes_max bytes; returns it. */
const char *ep_cli_arg_text(struct argp_state *state, const char *option, const char *text,
                            size_t bytes_max);
/* Ends the program if value is NULL: a required option is missing. */
void ep_cli_arg_required(struct argp_state *state, const char *option, const void *value);

/* Exactly one of flag .. take is set: where the value goes, in static memory. */
typedef struct ep_cli_option {
    const char *name; /* NULL: a heading, in help */
    char letter;      /* 0: none */
    const char *arg;  /* name of the value in --help; for a word the allowed ones: "table|json" */
    const char *help;
    int group;         /* order in --help, the least first */
    bool *flag;        /* option without a value: set to true */
    bool *off;         /* option without a value: set to false */
    const char **text; /* 1..max bytes; max 0: any. Borrowed from argv */
    uint32_t *u32;     /* a whole number min..max, or one of unit */
    uint64_t *u64;     /* the same */
    float *f32;        /* least..most */
    double *f64;       /* the same */
    unsigned *word;    /* its index in words */
    void (*take)(struct argp_state *state, const char *option, char *text);
    uint64_t min, max;
    float least, most;
    ep_unit unit;            /* NONE: a plain number */
    ep_unit plain;           /* unit of a number without one; NONE: unit */
    const char *words;       /* NULL: as arg */
    const unsigned *numbers; /* value for each word instead of its index; NULL: the index */
    bool *given;             /* set to true when the option is there; may be NULL */
    bool required;           /* of a text, or with given */
} ep_cli_option;

/* Options that belong together; several commands may have them. */
typedef struct ep_cli_options {
    const ep_cli_option *rows;
    size_t count;
    const char *heading; /* of --help, above them; NULL: none */
    int group;           /* of the heading */
    /* gets the name of the option given first; may be NULL */
    const char **first;
    /* called before the first option is read; NULL: none */
    void (*init)(void);
    void (*check)(struct argp_state *state); /* called when all are read; NULL: none */
    /* called when all options of the command are valid; NULL: none */
    void (*success)(struct argp_state *state);
} ep_cli_options;

#define EP_CLI_USES_MAX 6

/* The argp of own with uses as its children; never freed. */
const struct argp *ep_cli_options_argp(const ep_cli_options *own,
                                       const ep_cli_options *const uses[EP_CLI_USES_MAX],
                                       const struct argp *root);
/* Handles a key of root's own options in root's parser. */
error_t ep_cli_options_parse(const ep_cli_options *options, int key, char *arg,
                             struct argp_state *state);

#endif
