/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by the files of the option table: values, their origin, and how one is set. */
#ifndef EP_OPTIONS_OPTIONS_INTERNAL_H
#define EP_OPTIONS_OPTIONS_INTERNAL_H

#include "options/options.h"

typedef struct ep_option_value {
    bool is_set;
    ep_origin_kind kind;
    uint64_t number;               /* BOOL, INT, SIZE, MS, US, ENUM */
    char *text;                    /* as given; sizes and times in their shortest form */
    char *origin;                  /* NULL: default */
    struct ep_option_value *items; /* LIST: [items_count * option->fields_count] */
    size_t items_count;
} ep_option_value;

struct ep_options {
    const ep_options_spec *spec;
    ep_option_value *values; /* [spec->options_count] */
    ep_options_action action;
    const char *shell; /* for EP_ACTION_COMPLETION; borrowed from argv */
    char *config_path; /* NULL: no file */
    char **warnings;
    size_t warnings_count;
};

typedef struct ep_value_source {
    ep_origin_kind kind;
    const char *origin; /* "file PATH:LINE"; NULL for a default */
} ep_value_source;

/* Checks text against the option and stores it. label: "key" or "models[0].path" for messages. */
ep_err ep_option_set_scalar(const ep_option *option, const char *label, const char *text,
                            ep_value_source source, ep_option_value *out_value,
                            ep_error *out_error);
/* Appends one item; out_item points to its fields, still unset. */
ep_err ep_option_list_grow(const ep_option *option, ep_option_value *list, ep_value_source source,
                           ep_option_value **out_item, ep_error *out_error);
/* Sets the fields that were not given to their defaults. Fields without a default are required. */
ep_err ep_option_list_complete(const ep_option *option, size_t index, ep_option_value *item,
                               ep_value_source source, ep_error *out_error);
/* Adds one item from "value" or "first=second". */
ep_err ep_option_list_add_text(const ep_option *option, ep_option_value *list, const char *text,
                               ep_value_source source, ep_error *out_error);
ep_err ep_option_list_check_count(const ep_option *option, const ep_option_value *list,
                                  ep_error *out_error);
void ep_option_value_clear(const ep_option *option, ep_option_value *value);
/* Writes the allowed values: "0..10m", "true, false". */
void ep_option_describe_allowed(const ep_option *option, char *out, size_t bytes);
/* How --help, the sample and the man page explain sizes and times. */
#define EP_OPTIONS_UNITS_HELP(line_end)                                                            \
    "Sizes: bytes, or with K, M, G, T (or KiB, MiB, GiB, TiB), powers of 1024." line_end           \
    "Times: with us, ms, s, m or h, else of the unit in the key's name." line_end                  \
    "Fractions are taken where they are exact: 1.5G."

/* Index in the table, or SIZE_MAX. */
size_t ep_options_find(const ep_option *options, size_t count, const char *name);
/* The name most similar to a misspelt one, or NULL. */
const char *ep_options_nearest(const ep_option *options, size_t count, const char *name);
/* The flag without leading dashes: "drain-ms"; the variable: "EXPERTD_DRAIN_MS". */
void ep_option_flag_name(const ep_option *option, char *out, size_t bytes);
void ep_option_env_name(const ep_options_spec *spec, const ep_option *option, char *out,
                        size_t bytes);

ep_err ep_options_read_file(ep_options *options, const char *path, ep_error *out_error);

/* One flag as given: index in the table, text (NULL: no argument). */
typedef struct ep_flag {
    size_t index;
    const char *text;
} ep_flag;
typedef struct ep_flags {
    ep_flag *flags;
    size_t count;
    const char *config_path;
    ep_options_action action;
    const char *shell; /* for EP_ACTION_COMPLETION */
    bool json;
} ep_flags;
/* argp's table of all flags; *out_texts is what it points at; free() both. Errors: NO_MEMORY. */
struct argp_option;
ep_err ep_flags_build(const ep_options_spec *spec, struct argp_option **out_options,
                      void **out_texts);
/* flags->flags is malloc'ed; text points into argv. */
ep_err ep_flags_parse(const ep_options_spec *spec, int argc, char **argv, ep_flags *out_flags,
                      ep_error *out_error);

#endif
