/* SPDX-License-Identifier: Apache-2.0 */
/* One option's effective value as a line of text. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "options/options_internal.h"

/* Prints "value" or "first=second", and further set fields as " name=value". */
static void print_item(const ep_option *option, const ep_option_value *fields, FILE *out)
{
    for (size_t f = 0; f < option->fields_count; f++) {
        if (!fields[f].is_set) {
            continue;
        }
        if (f > 1) {
            fprintf(out, " %s", option->fields[f].name);
        }
        fprintf(out, "%s%s", f > 0 ? "=" : "", fields[f].text);
    }
}

static void print_value(const ep_option *option, const ep_option_value *value, FILE *out)
{
    if (option->type != EP_OPTION_LIST) {
        fputs(value->text, out);
        return;
    }
    for (size_t i = 0; i < value->items_count; i++) {
        fputs(i > 0 ? "," : "", out);
        print_item(option, &value->items[i * option->fields_count], out);
    }
}

size_t ep_options_count(const ep_options *options)
{
    return options->spec->options_count;
}

ep_err ep_options_entry_read(const ep_options *options, size_t index, ep_options_entry *out_entry)
{
    const ep_option *option = &options->spec->options[index];
    const ep_option_value *value = &options->values[index];
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    if (out == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    if (value->is_set) {
        print_value(option, value, out);
    }
    bool good = ferror(out) == 0;
    good = fclose(out) == 0 && good;
    if (!good) {
        free(text);
        return EP_ERR_NO_MEMORY;
    }
    *out_entry = (ep_options_entry){
        .option = option,
        .value = text,
        .origin = !value->is_set          ? "not set"
                  : value->origin != NULL ? value->origin
                                          : "default",
    };
    return EP_OK;
}
