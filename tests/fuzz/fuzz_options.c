/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Configuration files of both daemons. First byte: whose, and whether the text comes as a file or
 * as a variable of the environment. What is accepted, printed and read again, gives the same
 * values.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "options/options.h"
#include "coordinator/coordinator_config.h"
#include "expertd/node_config.h"
#include "fuzz.h"

static const char *const seeds[] = {
    "nlisten:\n  - tcp://127.0.0.1:0\nnode_name: a\nthreads: 2\nspill_bytes: 64MiB\nlog_level: "
    "debug\ninsecure: false\n",
    "nmodels:\n  - name: demo\n    path: /models/demo\n    experts: 0-3,7\n  - {name: b, path: "
    "/b}\ndrain_ms: 3x\n",
    "n# nothing\n---\ninflight_tokens: 0x10\n...\n",
    "ccopies: 2\nmin_nodes: 3\nplacement: static\nexpert_map_file: /nowhere\nnode_order: [a, b, "
    "c]\n",
    "cheartbeat_ms: 99999999999999999999\ninsecure: flase\n",
    "clisten: {url: x}\n*a: &a [b, *a]\n? [x]\n: y\n",
    "n\"listen\": [ \"tcp://[::1]:7\" , tls+tcp://0.0.0.0:1 ]\nnode_name: !!str a\nnode_name: b\n",
    "NEXPERTD_LISTEN=tcp://127.0.0.1:1,tcp://127.0.0.1:2",
    "NEXPERTD_MODEL=demo=/m,b=/c",
    "CEXPERTD_COORDINATOR_COPIES=2",
};

size_t fuzz_seed(size_t index, uint8_t *out)
{
    return index < sizeof(seeds) / sizeof(seeds[0]) ? fuzz_seed_text(seeds[index], out) : 0;
}

/* A path under which the bytes can be read as a file. */
static int text_file(const void *data, size_t bytes, char out_path[64])
{
    int file = memfd_create("options", MFD_CLOEXEC);
    FUZZ_CHECK(file >= 0 && write(file, data, bytes) == (ssize_t)bytes);
    snprintf(out_path, 64, "/proc/self/fd/%d", file);
    return file;
}

static ep_err load_file(const ep_options_spec *spec, const void *data, size_t bytes,
                        ep_options **out, ep_error *error)
{
    char path[64], flag[] = "--config", name[] = "fuzz";
    int file = text_file(data, bytes, path);
    char *argv[] = {name, flag, path, NULL};
    char *environment[] = {NULL};
    ep_err err = ep_options_load(spec, 3, argv, environment, out, error);
    close(file);
    return err;
}

static ep_err load_variable(const ep_options_spec *spec, const void *data, size_t bytes,
                            ep_options **out, ep_error *error)
{
    char *text = calloc(1, bytes + 1);
    FUZZ_CHECK(text != NULL);
    memcpy(text, data, bytes);
    char *environment[] = {text, NULL};
    ep_err err = memchr(data, '=', bytes) != NULL && strstr(text, "CONFIG=") == NULL
                     ? ep_options_load(spec, 0, NULL, environment, out, error)
                     : ep_error_set(error, EP_ERR_BAD_CONFIG, "not a variable");
    free(text);
    return err;
}

static void differ(void *arg, const ep_option *option)
{
    (void)arg;
    fprintf(stderr, "%s differs\n", option->name);
    FUZZ_CHECK(!"printed and read again, a value differs");
}

static void check_round_trip(const ep_options_spec *spec, const ep_options *options)
{
    char *text = NULL;
    size_t bytes = 0;
    ep_options *again;
    ep_error error;
    FILE *out = open_memstream(&text, &bytes);
    FUZZ_CHECK(out != NULL);
    ep_options_print(options, out);
    fclose(out);
    ep_err err = load_file(spec, text, bytes, &again, &error);
    if (err != EP_OK) {
        fprintf(stderr, "%s\n%s", error.text, text);
    }
    FUZZ_CHECK(err == EP_OK);
    ep_options_diff(options, again, differ, NULL);
    ep_options_free(again);
    free(text);
}

void fuzz_one(const uint8_t *data, size_t bytes)
{
    ep_options *options;
    ep_error error = {0};
    if (bytes == 0) {
        return;
    }
    const ep_options_spec *spec =
        (data[0] | 0x20) == 'c' ? &ep_coordinator_options : &ep_node_options;
    bool is_variable = data[0] == 'C' || data[0] == 'N';
    ep_err err = is_variable ? load_variable(spec, data + 1, bytes - 1, &options, &error)
                             : load_file(spec, data + 1, bytes - 1, &options, &error);
    if (err == EP_OK) {
        check_round_trip(spec, options);
        ep_options_free(options);
    } else {
        FUZZ_CHECK(error.text[0] != 0);
    }
}
