/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the configuration again. */
#include "common/reload.h"

#include <unistd.h>

#include "base/log.h"
#include "options/options_internal.h"
#include "common/sd_notify.h"
#include "common/service_config.h"

typedef struct change_list {
    const ep_options *options;
    ep_reload_report *report;
} change_list;

static void on_change(void *arg, const ep_option *option)
{
    const change_list *list = arg;
    if (!option->reloadable) {
        return;
    }
    if (list->report->changed_count < EP_RELOAD_KEYS_MAX) {
        list->report->changed[list->report->changed_count++] = option->name;
    }
    const bool has_text = option->type != EP_OPTION_LIST;
    ep_log(EP_LOG_INFO, "config-reload", EP_KV(outcome, "changed"), EP_KV(key, option->name),
           EP_KV(value, has_text ? ep_options_text(list->options, option->name) : NULL),
           EP_KV(origin, ep_options_origin(list->options, option->name)));
}

static void on_waiting(void *arg, const ep_option *option)
{
    const change_list *list = arg;
    if (option->reloadable) {
        return;
    }
    if (list->report->need_restart_count < EP_RELOAD_KEYS_MAX) {
        list->report->need_restart[list->report->need_restart_count++] = option->name;
    }
    ep_log(EP_LOG_WARN, "config-reload", EP_KV(outcome, "waiting"), EP_KV(key, option->name),
           EP_KV(reason, "it is read at start only"), EP_KV(effect, "the value before is in force"),
           EP_KV(hint, "restart the service to use the new one"));
}

const ep_options *ep_reload_run(ep_reload *reload, ep_reload_report *out_report,
                                ep_error *out_error)
{
    const ep_options *before = reload->current != NULL ? reload->current : reload->started;
    ep_options *options = NULL;
    ep_reload_report report = {.changed_count = 0};
    ep_error error;
    ep_sd_notify_reloading();
    ep_error_clear(&error);
    ep_err err = ep_options_load(reload->started->spec, reload->argc, reload->argv, environ,
                                 &options, &error);
    err = err == EP_OK && reload->check != NULL ? reload->check(options, &error) : err;
    if (err != EP_OK) {
        ep_log(EP_LOG_ERROR, "config-reload", EP_KV(outcome, "refused"), EP_KV(reason, error.text),
               EP_KV(effect, "nothing changed"));
        ep_options_free(options);
        ep_error_set(out_error, err, "nothing changed: %s", error.text);
        return NULL;
    }
    change_list list = {.options = options, .report = &report};
    ep_service_log_start(options);
    ep_options_diff(before, options, on_change, &list);
    ep_options_diff(reload->started, options, on_waiting, &list);
    ep_log(EP_LOG_INFO, "config-reload", EP_KV(outcome, "done"));
    ep_options_free(reload->current);
    reload->current = options;
    if (out_report != NULL) {
        *out_report = report;
    }
    return options;
}

const ep_options *ep_reload_in_force(const ep_reload *reload, const ep_option *option)
{
    return option->reloadable && reload->current != NULL ? reload->current : reload->started;
}

void ep_reload_fini(ep_reload *reload)
{
    ep_options_free(reload->current);
    reload->current = NULL;
}
