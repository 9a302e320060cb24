/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One option table serves flags, environment and YAML file alike: name, type, unit, range, allowed
 * values, default, help. Precedence: flag > environment > file > default. Parsing is strict: every
 * value is text first, "3x" and "flase" are errors, an unknown key of the file is an error. Each
 * value remembers where it came from.
 *
 *     key in the file   drain_ms: 5000
 *     environment       EXPERTD_DRAIN_MS=5000
 *     flag              --drain-ms=5000
 *
 * Errors     BAD_CONFIG: "file /etc/expertd.yaml:12: drain_ms: '3x' is not a time; allowed:
 *            0..10m". Unknown environment variables with our prefix are only warnings: other
 *            software sets such names too (Kubernetes makes EXPERTD_SERVICE_HOST for a service
 *            named expertd).
 * Ownership  an ep_options owns all text it hands out. The spec is static and outlives it.
 * Threads    immutable after load.
 */
#ifndef EP_OPTIONS_OPTIONS_H
#define EP_OPTIONS_OPTIONS_H

#include <stdio.h>

#include "base/error.h"

#define EP_OPTIONS_FILE_BYTES_MAX (1u << 20)
#define EP_OPTIONS_LIST_MAX 4096

typedef enum ep_option_type {
    EP_OPTION_BOOL,   /* true | false */
    EP_OPTION_INT,    /* decimal, min..max */
    EP_OPTION_SIZE,   /* bytes, min..max, as base/quantity.h reads them */
    EP_OPTION_MS,     /* milliseconds, likewise */
    EP_OPTION_US,     /* microseconds, likewise */
    EP_OPTION_ENUM,   /* one word of allowed, "text|json"; its number is the word's position */
    EP_OPTION_STRING, /* min..max characters; max 0: EP_OPTION_TEXT_MAX */
    EP_OPTION_PATH,   /* as EP_OPTION_STRING */
    EP_OPTION_LIST    /* items made of fields, min..max items; max 0: EP_OPTIONS_LIST_MAX */
} ep_option_type;

#define EP_OPTION_TEXT_MAX 4096

typedef struct ep_option {
    const char *name; /* key: lower case, underscores; flag and environment names follow from it */
    ep_option_type type;
    const char *unit; /* of INT: "tokens"; NULL none */
    uint64_t min;
    uint64_t max;
    const char *allowed;      /* ENUM */
    const char *default_text; /* parsed like any other value; NULL: the option is then not set */
    const char *help;
    bool reloadable; /* false: a change needs a restart */
    /* LIST only. File: a sequence of mappings, or of plain values when there is one field. Flag
     * (repeated) and environment (comma-separated): "value", or "first=second" for the first two
     * fields. */
    const struct ep_option *fields;
    size_t fields_count;
    const char *flag; /* the flag's name when it differs from the key's: "model" for models */
} ep_option;

typedef struct ep_options_spec {
    const char *program;    /* "expertd" */
    const char *env_prefix; /* "EXPERTD_" */
    /* prefixes of variables that other software reads, so that they cause no warning; ended by
     * NULL. NULL: none */
    const char *const *env_foreign;
    const char *summary; /* first line of --help */
    /* where the packages install its file; NULL: <PREFIX>CONFIG names none */
    const char *config_file;
    const ep_option *options;
    size_t options_count;
} ep_options_spec;

typedef enum ep_origin_kind {
    EP_ORIGIN_DEFAULT,
    EP_ORIGIN_FILE,
    EP_ORIGIN_ENVIRONMENT,
    EP_ORIGIN_FLAG
} ep_origin_kind;

typedef enum ep_options_action {
    EP_ACTION_RUN,
    EP_ACTION_HELP,
    EP_ACTION_VERSION,
    EP_ACTION_VERSION_JSON,
    EP_ACTION_CHECK,
    EP_ACTION_CHECK_KEYS, /* checks only the table's rules */
    EP_ACTION_PRINT,
    EP_ACTION_SAMPLE,
    EP_ACTION_MAN,      /* for the build */
    EP_ACTION_MAN_FILE, /* likewise */
    EP_ACTION_COMPLETION
} ep_options_action;

typedef struct ep_options ep_options;
/* Checks rules that the table cannot state. */
typedef ep_err (*ep_options_check_func)(const ep_options *options, ep_error *out_error);

/*
 * Reads flags (argv[0] is skipped; may be NULL with argc 0), environment ("NAME=value" strings,
 * NULL-terminated) and the file that --config or <PREFIX>CONFIG names. Errors: BAD_CONFIG,
 * NOT_FOUND (no such file), IO, NO_MEMORY. The flag parser itself reports an unknown or malformed
 * flag on stderr; the error then says so.
 */
ep_err ep_options_load(const ep_options_spec *spec, int argc, char **argv, char *const *environment,
                       ep_options **out_options, ep_error *out_error);
void ep_options_free(ep_options *options);

/* Values by key. The key must be in the table with a fitting type. */
bool ep_options_is_set(const ep_options *options, const char *key);
bool ep_options_bool(const ep_options *options, const char *key);
/* INT, SIZE, MS, US; for ENUM the word's position. 0 when not set. */
uint64_t ep_options_number(const ep_options *options, const char *key);
/* STRING, PATH, ENUM; "" when not set. */
const char *ep_options_text(const ep_options *options, const char *key);
size_t ep_options_list_count(const ep_options *options, const char *key);
const char *ep_options_list_text(const ep_options *options, const char *key, size_t index,
                                 const char *field);
/* As ep_options_origin. */
const char *ep_options_list_origin(const ep_options *options, const char *key, size_t index,
                                   const char *field);

/* "default", "file PATH:LINE", "environment NAME", "flag --name". */
const char *ep_options_origin(const ep_options *options, const char *key);
/* Makes a BAD_CONFIG error with the value's origin and key before the text, for rules that the
 * table cannot state. Returns the code. */
ep_err ep_options_fail(const ep_options *options, const char *key, ep_error *out_error,
                       const char *format, ...) __attribute__((format(printf, 4, 5)));
/* The same for a field of a list's item. */
ep_err ep_options_fail_item(const ep_options *options, const char *key, size_t index,
                            const char *field, ep_error *out_error, const char *format, ...)
    __attribute__((format(printf, 6, 7)));

ep_options_action ep_options_get_action(const ep_options *options);
/* Lines without newline, NULL after the last. */
const char *ep_options_warning(const ep_options *options, size_t index);
/* Every effective value as YAML that can be used as a file again, each with its origin in a
 * comment. */
void ep_options_print(const ep_options *options, FILE *out);
void ep_options_print_help(const ep_options_spec *spec, FILE *out);
/* Writes as YAML a text that the table accepts. */
void ep_options_print_text(const char *text, FILE *out);
/* One option of the table as a line of text. */
typedef struct ep_options_entry {
    const ep_option *option;
    /* freed by the caller; "" not set; items of a list joined with ",", their fields with "=" */
    char *value;
    const char *origin; /* as ep_options_origin, or "not set" */
} ep_options_entry;
size_t ep_options_count(const ep_options *options);
/* index below _count. Errors: NO_MEMORY. */
ep_err ep_options_entry_read(const ep_options *options, size_t index, ep_options_entry *out_entry);
/* Calls func for each key whose value differs. */
void ep_options_diff(const ep_options *before, const ep_options *after,
                     void (*func)(void *arg, const ep_option *option), void *arg);

#endif
