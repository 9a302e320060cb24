/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The YAML file. libyaml's document keeps the line of every node for error messages; values stay
 * text until the table's parser reads them.
 */
#include "options/options_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <yaml.h>

#define ORIGIN_BYTES 400
/* Our tables are at most three levels deep. libyaml's time is quadratic in depth and anchors. */
#define DEPTH_MAX 16
#define ANCHORS_MAX 256

typedef struct reader {
    ep_options *options;
    const char *path;
    yaml_document_t document;
    ep_error *error;
} reader;

static void origin_of(const reader *r, const yaml_node_t *node, char *out, size_t bytes)
{
    snprintf(out, bytes, "file %.300s:%zu", r->path, node->start_mark.line + 1);
}

__attribute__((format(printf, 3, 4))) static ep_err
fail_at(const reader *r, const yaml_node_t *node, const char *format, ...)
{
    char origin[ORIGIN_BYTES];
    char text[256];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    origin_of(r, node, origin, sizeof(origin));
    return ep_error_set(r->error, EP_ERR_BAD_CONFIG, "%s: %s", origin, text);
}

/* The scalar's text. NULL with an error: another kind of node, no value, or a NUL inside. */
static const char *scalar_text(const reader *r, const yaml_node_t *node, const char *label)
{
    if (node->type != YAML_SCALAR_NODE) {
        fail_at(r, node, "%.100s: a single value is expected here", label);
        return NULL;
    }
    const char *value = (const char *)node->data.scalar.value;
    bool plain = node->data.scalar.style == YAML_PLAIN_SCALAR_STYLE;
    if ((plain && node->data.scalar.length == 0) || strlen(value) != node->data.scalar.length) {
        fail_at(r, node, "%.100s: there is no value (write \"\" for an empty one)", label);
        return NULL;
    }
    return value;
}

static ep_err read_scalar(const reader *r, const ep_option *option, const char *label,
                          const yaml_node_t *node, ep_option_value *out_value)
{
    char origin[ORIGIN_BYTES];
    const char *text = scalar_text(r, node, label);
    if (text == NULL) {
        return EP_ERR_BAD_CONFIG;
    }
    origin_of(r, node, origin, sizeof(origin));
    return ep_option_set_scalar(option, label, text, (ep_value_source){EP_ORIGIN_FILE, origin},
                                out_value, r->error);
}

static ep_err unknown_key(const reader *r, const yaml_node_t *node, const char *key,
                          const ep_option *options, size_t count)
{
    const char *nearest = ep_options_nearest(options, count, key);
    if (nearest != NULL) {
        return fail_at(r, node, "unknown key '%.80s'; did you mean '%s'? (%s --help lists all)",
                       key, nearest, r->options->spec->program);
    }
    return fail_at(r, node, "unknown key '%.80s' (%s --help lists those of this program)", key,
                   r->options->spec->program);
}

/* Finds the pair's option; a key given twice is an error. seen: [count], the line where a key was
 * first seen, 0 none. */
static ep_err find_key(const reader *r, const yaml_node_t *key, const ep_option *options,
                       size_t count, size_t *seen, size_t *out_index)
{
    const char *name = scalar_text(r, key, "key");
    if (name == NULL) {
        return EP_ERR_BAD_CONFIG;
    }
    size_t index = ep_options_find(options, count, name);
    if (index == SIZE_MAX) {
        return unknown_key(r, key, name, options, count);
    }
    if (seen[index] != 0) {
        return fail_at(r, key, "%.80s: given twice, first at line %zu", name, seen[index]);
    }
    seen[index] = key->start_mark.line + 1;
    *out_index = index;
    return EP_OK;
}

static ep_err read_list(reader *r, const ep_option *option, const yaml_node_t *node,
                        ep_option_value *list);

/* Reads a mapping of these options, the file's own or a list's item, into values: [count].
 * prefix: of the labels, "" or "models[0].". */
static ep_err read_mapping(reader *r, const yaml_node_t *node, const ep_option *options,
                           size_t count, const char *prefix, ep_option_value *values)
{
    size_t *seen = calloc(count, sizeof(*seen));
    ep_err err = seen == NULL
                     ? ep_error_set(r->error, EP_ERR_NO_MEMORY, "no memory to read %s", r->path)
                     : EP_OK;
    for (yaml_node_pair_t *pair = node->data.mapping.pairs.start;
         err == EP_OK && pair < node->data.mapping.pairs.top; pair++) {
        const yaml_node_t *value = yaml_document_get_node(&r->document, pair->value);
        char label[160];
        size_t i = 0;
        err =
            find_key(r, yaml_document_get_node(&r->document, pair->key), options, count, seen, &i);
        if (err == EP_OK && options[i].type == EP_OPTION_LIST) {
            err = read_list(r, &options[i], value, &values[i]);
        } else if (err == EP_OK) {
            snprintf(label, sizeof(label), "%s%s", prefix, options[i].name);
            err = read_scalar(r, &options[i], label, value, &values[i]);
        }
    }
    free(seen);
    return err;
}

static ep_err read_item(reader *r, const ep_option *option, const yaml_node_t *node,
                        ep_option_value *list)
{
    char origin[ORIGIN_BYTES];
    origin_of(r, node, origin, sizeof(origin));
    ep_value_source source = {EP_ORIGIN_FILE, origin};
    ep_option_value *item;
    ep_err err = ep_option_list_grow(option, list, source, &item, r->error);
    if (err != EP_OK) {
        return err;
    }
    size_t index = list->items_count - 1;
    if (option->fields_count == 1 && node->type == YAML_SCALAR_NODE) {
        err = read_scalar(r, &option->fields[0], option->name, node, &item[0]);
    } else if (node->type == YAML_MAPPING_NODE) {
        char prefix[80];
        snprintf(prefix, sizeof(prefix), "%s[%zu].", option->name, index);
        err = read_mapping(r, node, option->fields, option->fields_count, prefix, item);
    } else {
        err = fail_at(r, node, "%s[%zu]: a mapping with %s is expected here", option->name, index,
                      option->fields[0].name);
    }
    return err != EP_OK ? err : ep_option_list_complete(option, index, item, source, r->error);
}

static ep_err read_list(reader *r, const ep_option *option, const yaml_node_t *node,
                        ep_option_value *list)
{
    char origin[ORIGIN_BYTES];
    if (node->type != YAML_SEQUENCE_NODE) {
        return fail_at(r, node, "%s: a list is expected here (lines that begin with \"- \")",
                       option->name);
    }
    ep_option_value_clear(option, list);
    list->is_set = true;
    list->kind = EP_ORIGIN_FILE;
    origin_of(r, node, origin, sizeof(origin));
    list->origin = strdup(origin);
    for (yaml_node_item_t *i = node->data.sequence.items.start; i < node->data.sequence.items.top;
         i++) {
        ep_err err = read_item(r, option, yaml_document_get_node(&r->document, *i), list);
        if (err != EP_OK) {
            return err;
        }
    }
    return ep_option_list_check_count(option, list, r->error);
}

static ep_err read_root(reader *r, const yaml_node_t *root)
{
    const ep_options_spec *spec = r->options->spec;
    return root->type == YAML_MAPPING_NODE
               ? read_mapping(r, root, spec->options, spec->options_count, "", r->options->values)
               : fail_at(r, root, "the file must hold 'key: value' lines");
}

/* Reads the whole file; the caller frees *out_text. */
static ep_err read_bytes(const char *path, unsigned char **out_text, size_t *out_bytes,
                         ep_error *out_error)
{
    struct stat st;
    char why[EP_ERRNO_TEXT_BYTES];
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (fd < 0) {
        const int number = errno;
        return ep_error_set(out_error, number == ENOENT ? EP_ERR_NOT_FOUND : EP_ERR_IO,
                            "config file %.300s: %s%s", path, ep_errno_text(number, why),
                            number == ENOENT ? "; --print-config-sample prints one to begin with"
                                             : "");
    }
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) ||
        (uint64_t)st.st_size > EP_OPTIONS_FILE_BYTES_MAX) {
        close(fd);
        return ep_error_set(out_error, EP_ERR_BAD_CONFIG,
                            "config file %.300s is not a regular file of at most %u bytes", path,
                            EP_OPTIONS_FILE_BYTES_MAX);
    }
    unsigned char *text = malloc((size_t)st.st_size + 1);
    if (text == NULL) {
        close(fd);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory to read %.300s", path);
    }
    ssize_t n = pread(fd, text, (size_t)st.st_size, 0);
    int saved = errno;
    close(fd);
    if (n < 0) {
        free(text);
        return ep_error_set(out_error, EP_ERR_IO, "config file %.300s: %s", path,
                            ep_errno_text(saved, why));
    }
    *out_text = text;
    *out_bytes = (size_t)n;
    return EP_OK;
}

/* libyaml's message names where it gave up. This adds where the construct began, and names a
 * character that nobody sees. */
static ep_err fail_parser(const char *path, const unsigned char *text, size_t bytes,
                          const yaml_parser_t *parser, ep_error *out_error)
{
    char begun[96] = "";
    bool is_tab = parser->problem_mark.index < bytes && text[parser->problem_mark.index] == '\t';
    if (parser->context != NULL) {
        snprintf(begun, sizeof(begun), " %.60s that begins in line %zu", parser->context,
                 parser->context_mark.line + 1);
    }
    return ep_error_set(out_error, EP_ERR_BAD_CONFIG,
                        "file %.300s:%zu: column %zu: not YAML: %s%s%s", path,
                        parser->problem_mark.line + 1, parser->problem_mark.column + 1,
                        parser->problem != NULL ? parser->problem : "no reason given", begun,
                        is_tab ? ": a tab; YAML is indented with blanks" : "");
}

/* Counts the event; an error when it exceeds a bound. */
static ep_err count_event(const char *path, const yaml_event_t *event, size_t *depth,
                          size_t *anchors, ep_error *out_error)
{
    const bool is_sequence = event->type == YAML_SEQUENCE_START_EVENT;
    const bool is_mapping = event->type == YAML_MAPPING_START_EVENT;
    *depth += is_sequence || is_mapping;
    *depth -= event->type == YAML_SEQUENCE_END_EVENT || event->type == YAML_MAPPING_END_EVENT;
    *anchors += (is_sequence && event->data.sequence_start.anchor != NULL) ||
                (is_mapping && event->data.mapping_start.anchor != NULL) ||
                (event->type == YAML_SCALAR_EVENT && event->data.scalar.anchor != NULL);
    if (*depth > DEPTH_MAX) {
        return ep_error_set(
            out_error, EP_ERR_BAD_CONFIG,
            "file %.300s:%zu: lists and mappings nest deeper than %d; no option needs more than 3",
            path, event->start_mark.line + 1, DEPTH_MAX);
    }
    if (*anchors > ANCHORS_MAX) {
        return ep_error_set(out_error, EP_ERR_BAD_CONFIG,
                            "file %.300s:%zu: more than %d anchors (&name); write the values out",
                            path, event->start_mark.line + 1, ANCHORS_MAX);
    }
    return EP_OK;
}

/* Runs before a document is built: an event beyond a bound ends the reading, so time is bounded
 * too. */
static ep_err check_shape(const char *path, const unsigned char *text, size_t bytes,
                          ep_error *out_error)
{
    yaml_parser_t parser;
    size_t depth = 0, anchors = 0;
    bool is_end = false;
    ep_err err = EP_OK;
    if (!yaml_parser_initialize(&parser)) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory to read %.300s", path);
    }
    yaml_parser_set_input_string(&parser, text, bytes);
    while (err == EP_OK && !is_end) {
        yaml_event_t event;
        if (!yaml_parser_parse(&parser, &event)) {
            err = fail_parser(path, text, bytes, &parser, out_error);
            break;
        }
        is_end = event.type == YAML_DOCUMENT_END_EVENT || event.type == YAML_STREAM_END_EVENT;
        err = count_event(path, &event, &depth, &anchors, out_error);
        yaml_event_delete(&event);
    }
    yaml_parser_delete(&parser);
    return err;
}

ep_err ep_options_read_file(ep_options *options, const char *path, ep_error *out_error)
{
    unsigned char *text = NULL;
    size_t bytes = 0;
    yaml_parser_t parser;
    reader r = {.options = options, .path = path, .error = out_error};
    ep_err err = read_bytes(path, &text, &bytes, out_error);
    if (err != EP_OK) {
        return err;
    }
    err = check_shape(path, text, bytes, out_error);
    if (err != EP_OK) {
        free(text);
        return err;
    }
    if (!yaml_parser_initialize(&parser)) {
        free(text);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory to read %.300s", path);
    }
    yaml_parser_set_input_string(&parser, text, bytes);
    if (!yaml_parser_load(&parser, &r.document)) {
        err = fail_parser(path, text, bytes, &parser, out_error);
    } else {
        yaml_node_t *root = yaml_document_get_root_node(&r.document);
        err = root != NULL ? read_root(&r, root) : EP_OK; /* an empty file sets nothing */
        yaml_document_delete(&r.document);
    }
    yaml_parser_delete(&parser);
    free(text);
    return err;
}
