/* SPDX-License-Identifier: Apache-2.0 */
#include "common/program_options.h"

#include <unistd.h>

#include "base/log.h"
#include "base/printable.h"
#include "common/version.h"
#include "options/options_internal.h"

static int finish_action(const ep_options_spec *spec, const ep_options *options)
{
    switch (options->action) {
    case EP_ACTION_HELP:
        ep_options_print_help(spec, stdout);
        return 0;
    case EP_ACTION_VERSION:
        ep_version_print(spec->program, false, stdout);
        return 0;
    case EP_ACTION_VERSION_JSON:
        ep_version_print(spec->program, true, stdout);
        return 0;
    case EP_ACTION_PRINT:
        ep_options_print(options, stdout);
        return 0;
    case EP_ACTION_CHECK:
    case EP_ACTION_CHECK_KEYS:
        printf("%s: the configuration is right\n", spec->program);
        return 0;
    case EP_ACTION_SAMPLE:
        ep_options_print_sample(spec, stdout);
        return 0;
    case EP_ACTION_MAN:
        ep_options_print_man(spec, stdout);
        return 0;
    case EP_ACTION_MAN_FILE:
        ep_options_print_man_file(spec, stdout);
        return 0;
    case EP_ACTION_COMPLETION:
        return ep_options_print_completion(spec, options->shell, stdout) ? 0 : 1;
    case EP_ACTION_RUN:
        break;
    }
    return -1;
}

int ep_options_main(const ep_options_spec *spec, int argc, char **argv, ep_options_check_func check,
                    ep_options **out_options)
{
    ep_options *options = NULL;
    ep_error error;
    ep_error_clear(&error);
    ep_err err = ep_options_load(spec, argc, argv, environ, &options, &error);
    bool has_values =
        err == EP_OK && (options->action == EP_ACTION_RUN || options->action == EP_ACTION_CHECK);
    if (has_values && options->action == EP_ACTION_CHECK) {
        ep_log_start(EP_LOG_WARN, EP_LOG_TEXT); /* shows warnings of the check */
        for (size_t i = 0; i < options->warnings_count; i++) {
            ep_log(EP_LOG_WARN, "config", EP_KV(reason, options->warnings[i]));
        }
    }
    if (has_values && check != NULL) {
        err = check(options, &error);
    }
    if (err != EP_OK) {
        /* escaped, so that a file's bytes cannot control a terminal */
        char text[EP_TEXT_ESCAPED_BYTES(sizeof(error.text))];
        fprintf(stderr, "%s: %s\n", spec->program, ep_text_escape(error.text, text, sizeof(text)));
        ep_options_free(options);
        return 1;
    }
    int code = finish_action(spec, options);
    if (code >= 0) {
        fflush(stdout);
        ep_options_free(options);
        return ferror(stdout) ? 1 : code;
    }
    *out_options = options;
    return -1;
}
