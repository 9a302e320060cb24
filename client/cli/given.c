/* SPDX-License-Identifier: Apache-2.0 */
#include "given.h"

#include <ctype.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "usage/usage.h"

#define KEY_FIRST 0x10000 /* + index of the row */

size_t ep_cli_given_find(const ep_cli_given *given, const char *flag)
{
    size_t i = 0;
    while (i < given->count && strcmp(given->rows[i]->name, flag) != 0) {
        i++;
    }
    return i;
}

static void add_row(void *arg, const struct argp_option *row)
{
    ep_cli_given *given = arg;
    bool is_flag = row->name != NULL && strcmp(row->name, "help") != 0;
    if (is_flag && ep_cli_given_find(given, row->name) == given->count) {
        EP_ASSERT(given->count < EP_CLI_ROWS_MAX);
        given->rows[given->count++] = row;
    }
}

void ep_cli_given_add(ep_cli_given *given, const struct argp *argp)
{
    ep_usage_walk(argp, add_row, given);
}

bool ep_cli_may_be_repeated(const struct argp_option *row)
{
    return row->arg != NULL && row->doc != NULL && strstr(row->doc, "may be repeated") != NULL;
}

static bool take_given(ep_cli_given *given, size_t index, const char *text)
{
    char *before = given->texts[index];
    const char *first =
        before != NULL && ep_cli_may_be_repeated(given->rows[index]) ? before : NULL;
    char *joined = NULL;
    if (asprintf(&joined, "%s%s%s", first != NULL ? first : "", first != NULL ? "," : "",
                 text != NULL ? text : "true") < 0) {
        return false;
    }
    free(before);
    given->texts[index] = joined;
    return true;
}

/* Makes getopt's tables. */
static void make_table(const ep_cli_given *given, struct option *longs, char *shorts)
{
    for (size_t i = 0; i < given->count; i++) {
        const struct argp_option *row = given->rows[i];
        const int kind = row->arg == NULL                          ? no_argument
                         : (row->flags & OPTION_ARG_OPTIONAL) != 0 ? optional_argument
                                                                   : required_argument;
        longs[i] = (struct option){row->name, kind, NULL, KEY_FIRST + (int)i};
        if (isalnum((unsigned char)ep_usage_letter(row))) {
            *shorts++ = ep_usage_letter(row);
            shorts = stpcpy(shorts, kind == no_argument         ? ""
                                    : kind == required_argument ? ":"
                                                                : "::");
        }
    }
}

bool ep_cli_given_read(const struct argp *argp, int argc, char **argv, ep_cli_given *out_given)
{
    struct option longs[EP_CLI_ROWS_MAX + 1] = {{0}};
    char shorts[3 * EP_CLI_ROWS_MAX + 1] = "";
    char **copy = calloc((size_t)argc + 1, sizeof(*copy)); /* a copy, as getopt permutes it */
    ep_cli_given *given = out_given;
    *given = (ep_cli_given){.count = 0};
    ep_cli_given_add(given, argp);
    make_table(given, longs, shorts);
    bool good = copy != NULL;
    if (good) {
        memcpy(copy, argv, (size_t)argc * sizeof(*copy));
    }
    optind = 0;
    opterr = 0;
    for (int key; good && (key = getopt_long(argc, copy, shorts, longs, NULL)) != -1;) {
        size_t index = key >= KEY_FIRST ? (size_t)(key - KEY_FIRST) : 0;
        while (key < KEY_FIRST && index < given->count &&
               ep_usage_letter(given->rows[index]) != key) {
            index++;
        }
        good = index == given->count || take_given(given, index, optarg);
    }
    free(copy);
    if (!good) {
        ep_cli_given_fini(given);
    }
    return good;
}

void ep_cli_given_fini(ep_cli_given *given)
{
    for (size_t i = 0; i < given->count; i++) {
        free(given->texts[i]);
        given->texts[i] = NULL;
    }
}

const struct argp_option *ep_cli_given_row(const ep_cli_given *given, const char *flag)
{
    size_t index = ep_cli_given_find(given, flag);
    return index < given->count ? given->rows[index] : NULL;
}

const char *ep_cli_given_text(const ep_cli_given *given, const char *flag)
{
    size_t index = ep_cli_given_find(given, flag);
    return index < given->count ? given->texts[index] : NULL;
}

void ep_cli_key_of(const char *flag, char *out, size_t bytes)
{
    snprintf(out, bytes, "%s", flag);
    for (char *p = out; *p != '\0'; p++) {
        *p = *p == '-' ? '_' : *p;
    }
}
