/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Options as rows of a table: a row says all of an option, for --help, for the check of its value
 * and for where that goes. A wrong value ends the program through argp_error: a line naming option,
 * value and what is allowed, exit code 2.
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
/* A size or a time of a kind, min..max of unit, in which it is returned; plain: what a number alone
 * counts. */
uint64_t ep_cli_arg_quantity(struct argp_state *state, const char *option, const char *text,
                             ep_unit plain, ep_unit unit, uint64_t min, uint64_t max);
/* The place of text in words, "table|json". */
uint32_t ep_cli_arg_word(struct argp_state *state, const char *option, const char *text,
                         const char *words);
/* Text of 1..bytes_max bytes; returns it. */
const char *ep_cli_arg_text(struct argp_state *state, const char *option, const char *text,
                            size_t bytes_max);
/* A required option that is not there. */
void ep_cli_arg_required(struct argp_state *state, const char *option, const void *value);

/* One of flag .. take is set; static memory that the value goes to. */
typedef struct ep_cli_option {
    const char *name; /* NULL: a heading, in help */
    char letter;      /* 0: none */
    const char *arg;  /* as --help calls the value; of a word those allowed: "table|json" */
    const char *help;
    int group;         /* of --help, the least first */
    bool *flag;        /* without a value: true once it is there */
    bool *off;         /* the same: false */
    const char **text; /* 1..max bytes; max 0: any. Borrowed from argv */
    uint32_t *u32;     /* a whole number min..max, or one of unit */
    uint64_t *u64;     /* the same */
    float *f32;        /* least..most */
    double *f64;       /* the same */
    unsigned *word;    /* its place in words */
    void (*take)(struct argp_state *state, const char *option, char *text);
    uint64_t min, max;
    float least, most;
    ep_unit unit;            /* NONE: a plain number */
    ep_unit plain;           /* what a number alone counts; NONE: unit */
    const char *words;       /* NULL: as arg */
    const unsigned *numbers; /* for each word what word gets instead of the place; NULL: none */
    bool *given;             /* true once it is there; NULL: nobody asks */
    bool required;           /* of a text, or with given */
} ep_cli_option;

/* Options that belong together; several commands may have them. */
typedef struct ep_cli_options {
    const ep_cli_option *rows;
    size_t count;
    const char *heading;                       /* of --help, above them; NULL: none */
    int group;                                 /* of the heading */
    const char **first;                        /* gets the name of what is given first; NULL */
    void (*init)(void);                        /* before the first is read; NULL: none */
    void (*check)(struct argp_state *state);   /* all are read; NULL: none */
    void (*success)(struct argp_state *state); /* all of the command's are good; NULL: none */
} ep_cli_options;

#define EP_CLI_USES_MAX 6

/* argp's form of own with uses below it, and of what reads them. Stays. */
const struct argp *ep_cli_options_argp(const ep_cli_options *own,
                                       const ep_cli_options *const uses[EP_CLI_USES_MAX],
                                       const struct argp *root);
/* What root's parser does with a key of its own options. */
error_t ep_cli_options_parse(const ep_cli_options *options, int key, char *arg,
                             struct argp_state *state);

#endif
