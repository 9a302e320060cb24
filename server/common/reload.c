/* SPDX-License-Identifier: Apache-2.0 */
/* Reading the configuration again. */
#include "common/reload.h"

#include <unistd.h>

#include "base/log.h"
#include "common/options_internal.h"
#include "common/sd_notify.h"
#include "common/service_config.h"

static void log_change(void *arg, const ep_option *option)
{
    const ep_options *options = arg;
    if (!option->reloadable) {
        return;
    }
    if (option->type == EP_OPTION_LIST) {
        ep_log(EP_LOG_INFO, "config-reload", "%s changed", option->name);
    } else {
        ep_log(EP_LOG_INFO, "config-reload", "%s is %s (%s)", option->name,
               ep_options_text(options, option->name), ep_options_origin(options, option->name));
    }
}

static void log_waiting(void *arg, const ep_option *option)
{
    (void)arg;
    if (!option->reloadable) {
        ep_log(EP_LOG_WARN, "config-reload", "%s changed; it takes effect after a restart", option->name);
    }
}

const ep_options *ep_reload_run(ep_reload *reload)
{
    const ep_options *before = reload->current != NULL ? reload->current : reload->started;
    ep_options *options = NULL;
    ep_error error;
    ep_sd_notify_reloading();
    ep_error_clear(&error);
    ep_err err =
        ep_options_load(reload->started->spec, reload->argc, reload->argv, environ, &options, &error);
    err = err == EP_OK && reload->check != NULL ? reload->check(options, &error) : err;
    if (err != EP_OK) {
        ep_log(EP_LOG_ERROR, "config-reload", "refused, nothing changed: %s", error.text);
        ep_options_free(options);
        return NULL;
    }
    ep_service_log_start(options);
    ep_options_diff(before, options, log_change, options);
    ep_options_diff(reload->started, options, log_waiting, NULL);
    ep_log(EP_LOG_INFO, "config-reload", "done");
    ep_options_free(reload->current);
    reload->current = options;
    return options;
}

void ep_reload_fini(ep_reload *reload)
{
    ep_options_free(reload->current);
    reload->current = NULL;
}
