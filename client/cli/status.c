/* SPDX-License-Identifier: Apache-2.0 */
/* Lists of problems. */
#include "status.h"

#include <stdarg.h>

#include "output.h"

void ep_cli_problem_add(ep_cli_problems *problems, const char *format, ...)
{
    if (problems->count < EP_CLI_PROBLEMS_MAX) {
        va_list args;
        va_start(args, format);
        vsnprintf(problems->texts[problems->count], EP_CLI_PROBLEM_BYTES, format, args);
        va_end(args);
    }
    problems->count++;
}

static size_t kept(const ep_cli_problems *problems)
{
    return problems->count < EP_CLI_PROBLEMS_MAX ? problems->count : EP_CLI_PROBLEMS_MAX;
}

json_t *ep_cli_problems_json(const ep_cli_problems *problems)
{
    json_t *list = json_array();
    for (size_t i = 0; i < kept(problems); i++) {
        json_array_append_new(list, ep_cli_json_text(problems->texts[i]));
    }
    return list;
}

void ep_cli_problems_print(const ep_cli_problems *problems, FILE *out)
{
    if (problems->count == 0) {
        fputs("healthy\n", out);
    }
    for (size_t i = 0; i < kept(problems); i++) {
        ep_cli_line(out, "not healthy: %s", problems->texts[i]);
    }
    if (problems->count > kept(problems)) {
        ep_cli_line(out, "not healthy: %zu more", problems->count - kept(problems));
    }
}
