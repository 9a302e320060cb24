/* SPDX-License-Identifier: Apache-2.0 */
/* Exit codes from errors. */
#include "exit_code.h"

#include "output.h"

ep_cli_exit ep_cli_exit_of(ep_err err)
{
    switch (err) {
    case EP_ERR_OK:
        return EP_CLI_EXIT_OK;
    case EP_ERR_UNAVAILABLE:
    case EP_ERR_CONNECTION_LOST:
    case EP_ERR_CLOSED:
        return EP_CLI_EXIT_UNREACHABLE;
    case EP_ERR_DEADLINE_EXCEEDED:
        return EP_CLI_EXIT_DEADLINE;
    default:
        return EP_CLI_EXIT_FAILED;
    }
}

int ep_cli_fail(const char *program, const ep_error *error)
{
    ep_cli_line(stderr, "%s: %s", program,
                error->text[0] != '\0' ? error->text : ep_err_text(error->code));
    return ep_cli_exit_of(error->code);
}
