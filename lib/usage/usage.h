/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Man pages and shell completion, made from the argp tables that parse the command line, so that
 * they document what exists. A command that is added to its program's table needs nothing here.
 *
 * Meaning of the tables' texts:
 *   argument "a|b|c"       one of these words
 *   argument FILE, PATH    a file
 *   argument CONTEXT       a line that list_command prints; anything else is free text
 *   args_doc "a|b REST"    the first free word is one of these; one alternative per line
 *   doc "before\vafter"    lines of after that begin with a space are shown unchanged
 *
 * Threads: none of it keeps state.
 */
#ifndef EP_USAGE_USAGE_H
#define EP_USAGE_USAGE_H

#include <argp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

typedef struct ep_usage_command {
    const char *name;
    const char *help;        /* one line */
    const struct argp *argp; /* may be NULL */
    const char *parent;      /* "trace" of "trace record"; NULL: a verb of the program itself */
} ep_usage_command;

/* A section of the man page. Text as in argp's docs. */
typedef struct ep_usage_section {
    const char *title; /* "EXIT STATUS" */
    const char *text;
} ep_usage_section;

/* Either argp (a program with options) or commands (a program with verbs). */
typedef struct ep_usage {
    const char *program;
    const char *version;
    int man_section;     /* 1, 8 */
    const char *summary; /* half a sentence, for NAME */
    const struct argp *argp;
    const ep_usage_command *commands;
    size_t commands_count;
    const ep_usage_section *sections;
    size_t sections_count;
    const char *list_command; /* a shell command, one line */
} ep_usage;

void ep_usage_print_man(const ep_usage *usage, FILE *out);
/* shell: bash, zsh or fish. False, with nothing printed, for another word. */
bool ep_usage_print_completion(const ep_usage *usage, const char *shell, FILE *out);
/* "bash, zsh, fish". */
#define EP_USAGE_SHELLS "bash, zsh, fish"

/* ---- for other writers of man pages ---- */

void ep_man_title(const char *name, int section, const char *version, FILE *out);
void ep_man_section(const char *title, FILE *out);
/* Writes macros and texts by turns, macros first, up to NULL; special characters of the texts are
 * escaped. */
void ep_man_put(FILE *out, const char *macros, ...) __attribute__((sentinel));
/* Paragraphs, separated by blank lines; lines that begin with a space are unchanged. */
void ep_man_paragraphs(const char *text, size_t bytes, FILE *out);

/* ---- shared by the files of this folder ---- */

typedef enum ep_usage_value {
    EP_USAGE_NO_VALUE,
    EP_USAGE_WORDS,
    EP_USAGE_FILE,
    EP_USAGE_LISTED,
    EP_USAGE_TEXT
} ep_usage_value;

/* Calls func for each visible option of argp and its children, then for --help. A row without name
 * and key is a heading. */
void ep_usage_walk(const struct argp *argp,
                   void (*func)(void *arg, const struct argp_option *option), void *arg);
ep_usage_value ep_usage_value_of(const struct argp_option *option);
/* The short option's letter, or 0. */
char ep_usage_letter(const struct argp_option *option);
/* The words that the first free argument may be, "a b c"; empty when any word is allowed, or for
 * EP_USAGE_LISTED. */
void ep_usage_first_words(const struct argp *argp, char *out, size_t bytes);
bool ep_usage_first_is_listed(const struct argp *argp);

#endif
