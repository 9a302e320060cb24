/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/ffn_options.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backends/host_common.h"
#include "bench/ffn_limit.h"

const uint32_t ffn_shapes[FFN_OPTIONS_SHAPES][2] = {{2048, 768}, {7168, 2048}, {4096, 14336}};

static bool read_number(const char *text, uint32_t most, uint32_t *out)
{
    char *end;
    const unsigned long value = strtoul(text, &end, 10);
    *out = (uint32_t)value;
    return end != text && *end == '\0' && value >= 1 && value <= most;
}

static bool read_shape(ffn_options *o, const char *text)
{
    o->shapes_count = 1;
    return sscanf(text, "%ux%u", &o->shapes[0][0], &o->shapes[0][1]) == 2 && o->shapes[0][0] >= 1 &&
           o->shapes[0][1] >= 1;
}

static bool read_format(ffn_options *o, const char *text)
{
    for (int f = EP_WEIGHTS_NONE + 1; f < EP_WEIGHTS_COUNT; f++) {
        if (strcmp(text, ep_weight_format_name((ep_weight_format)f)) == 0) {
            o->formats[o->formats_count++] = (ep_weight_format)f;
            return true;
        }
    }
    return false;
}

static const struct {
    const char *name;
    ep_numerics numerics;
} families[] = {{"portable", EP_NUMERICS_PORTABLE}, {"bf16dp", EP_NUMERICS_BF16DP},
                {"bf16odd", EP_NUMERICS_BF16ODD},   {"w4a8", EP_NUMERICS_W4A8},
                {"auto", EP_NUMERICS_AUTO},         {"auto-wide", EP_NUMERICS_AUTO_WIDE}};
enum { FAMILIES = sizeof(families) / sizeof(families[0]) };

ep_numerics ffn_options_numerics(const ffn_options *o)
{
    return o->portable ? EP_NUMERICS_PORTABLE : EP_NUMERICS_AUTO;
}

static bool read_family(ffn_options *o, const char *text)
{
    for (int i = 0; i < FAMILIES; i++) {
        if (strcmp(text, families[i].name) == 0) {
            o->families[o->families_count++] = families[i].numerics;
            return true;
        }
    }
    return false;
}

static bool read_rows(ffn_options *o, const char *text)
{
    return read_number(text, EP_JOB_ROWS_MAX, &o->rows[o->rows_count++]);
}

/* Each part between commas. */
static bool read_list(ffn_options *o, const char *text,
                      bool (*read)(ffn_options *o, const char *text))
{
    char parts[256];
    size_t count = 0;
    snprintf(parts, sizeof(parts), "%s", text);
    for (char *part = strtok(parts, ","); part != NULL; part = strtok(NULL, ","), count++) {
        if (count == FFN_OPTIONS_LIST || !read(o, part)) {
            return false;
        }
    }
    return count > 0;
}

static bool read_seconds(ffn_options *o, const char *text)
{
    char *end;
    o->seconds = strtod(text, &end);
    return end != text && *end == '\0' && o->seconds >= 0 && o->seconds <= 3600;
}

static bool read_argument(ffn_options *o, const char *argument)
{
    const char *value = strchr(argument, '=');
    if (value == NULL) {
        const bool is_first = o->json == NULL;
        o->json = argument;
        return is_first && argument[0] != '-'; /* --help is no file */
    }
    const size_t length = (size_t)(++value - argument);
    if (strncmp(argument, "shape=", length) == 0) {
        return read_shape(o, value);
    }
    if (strncmp(argument, "m=", length) == 0) {
        o->rows_count = 0;
        return read_list(o, value, read_rows);
    }
    if (strncmp(argument, "format=", length) == 0) {
        o->formats_count = 0;
        return read_list(o, value, read_format);
    }
    if (strncmp(argument, "family=", length) == 0) {
        o->families_count = 0;
        return read_list(o, value, read_family);
    }
    if (strncmp(argument, "seconds=", length) == 0) {
        return read_seconds(o, value);
    }
    if (strncmp(argument, "threads=", length) == 0) {
        return read_number(value, FFN_TEAM_THREADS_MAX, &o->threads);
    }
    if (strncmp(argument, "experts=", length) == 0) {
        return read_number(value, 4096, &o->experts);
    }
    o->portable = o->portable || strcmp(argument, "numerics=portable") == 0;
    o->rivals = o->rivals && strcmp(argument, "rivals=no") != 0;
    return strcmp(argument, "numerics=portable") == 0 || strcmp(argument, "rivals=no") == 0;
}

bool ffn_options_read(int argc, char **argv, ffn_options *o)
{
    for (int i = 1; i < argc; i++) {
        if (!read_argument(o, argv[i])) {
            fprintf(stderr,
                    "%s: argument '%s'\nusage: %s [JSON] [shape=HxI] [m=1,4,..%d] "
                    "[format=bf16,w8a8,..] "
                    "[seconds=S] [threads=N] [experts=N]"
                    " [numerics=portable] [family=auto,w4a8,..] [rivals=no]\n",
                    argv[0], argv[i], argv[0], EP_JOB_ROWS_MAX);
            return false;
        }
    }
    if (o->shapes_count == 0) {
        o->shapes_count = FFN_OPTIONS_SHAPES;
        memcpy(o->shapes, ffn_shapes, sizeof(ffn_shapes));
    }
    o->threads = o->threads > 0 ? o->threads : ep_host_cpus_count();
    return true;
}
