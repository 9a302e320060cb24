/* SPDX-License-Identifier: Apache-2.0 */
/* main of expertd. Exit code: 0 after a drain, 1 when it could not start. */
#include <stdio.h>

#include "base/log.h"
#include "common/process_setup.h"
#include "common/program_options.h"
#include "expertd/node.h"
#include "transport/transport.h"

static int run(const ep_options *options, int argc, char **argv)
{
    ep_node_config config;
    ep_node_source source = {.options = options, .argc = argc, .argv = argv};
    ep_node *node = NULL;
    ep_error error;
    ep_error_clear(&error);
    ep_service_log_start(options);
    ep_service_trace_start(options);
    ep_service_lane_start(options);
    ep_service_warn_exposed(options);
    ep_err err = ep_node_config_load(options, &config, &error);
    if (err == EP_OK) {
        err = ep_node_create(&config, &source, &node, &error);
        if (err == EP_OK) {
            ep_node_run(node);
            ep_node_destroy(node);
            ep_log(EP_LOG_INFO, "node-end", EP_KV(outcome, "drained"));
        }
        ep_node_config_fini(&config);
    }
    if (err != EP_OK) {
        ep_log(EP_LOG_ERROR, "node-start", EP_KV(code, ep_err_name(err)),
               EP_KV(reason, error.text));
    }
    ep_transport_fini();
    return err == EP_OK ? 0 : 1;
}

int main(int argc, char **argv)
{
    ep_options *options = NULL;
    ep_process_setup();
    int code = ep_options_main(&ep_node_options, argc, argv, ep_node_config_check, &options);
    if (code < 0) {
        code = run(options, argc, argv);
        ep_options_free(options);
    }
    return code;
}
