/* SPDX-License-Identifier: Apache-2.0 */
/* main of expertd-coordinator. */
#include "base/log.h"
#include "common/process_setup.h"
#include "common/program_options.h"
#include "common/service_config.h"
#include "coordinator/coordinator.h"
#include "observe/trace.h"

int main(int argc, char **argv)
{
    ep_options *options;
    ep_coordinator_config config;
    ep_error error;
    ep_process_setup();
    int code =
        ep_options_main(&ep_coordinator_options, argc, argv, ep_coordinator_config_check, &options);
    if (code >= 0) {
        return code;
    }
    ep_service_log_start(options);
    ep_service_trace_start(options);
    ep_service_lane_start(options);
    ep_service_warn_exposed(options);
    ep_trace_set_process("gateway");
    ep_process_raise_fd_limit();
    if (ep_coordinator_config_load(options, &config, &error) != EP_OK) {
        ep_log(EP_LOG_ERROR, "start-failed", EP_KV(code, ep_err_name(error.code)),
               EP_KV(reason, error.text));
        ep_options_free(options);
        return 1;
    }
    ep_reload reload = {
        .started = options, .argc = argc, .argv = argv, .check = ep_coordinator_config_check};
    code = ep_coordinator_run(&config, &reload);
    ep_reload_fini(&reload);
    ep_coordinator_config_fini(&config);
    ep_options_free(options);
    return code;
}
