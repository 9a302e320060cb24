/* SPDX-License-Identifier: Apache-2.0 */
#include "origin.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "output.h"

ep_cli_origins ep_cli_origins_noted;
static const ep_cli_origins *const noted = &ep_cli_origins_noted;

const char *ep_cli_setting_name(const char *option, const char *arg)
{
    for (size_t i = 0; i < noted->count; i++) {
        uintptr_t at = (uintptr_t)arg, begin = (uintptr_t)noted->flags[i].flag;
        if (at >= begin && at <= begin + strlen(noted->flags[i].flag)) {
            return noted->flags[i].name;
        }
    }
    return option;
}

bool ep_cli_setting_is_given(const char *flag)
{
    size_t i = 0;
    while (i < noted->given_count && strcmp(noted->given[i], flag) != 0) {
        i++;
    }
    return i < noted->given_count;
}

const char *ep_cli_settings_context(void)
{
    return noted->context[0] != '\0' ? noted->context : NULL;
}

void ep_cli_settings_say(const char *program, const char *url)
{
    if (noted->context[0] != '\0') {
        ep_cli_line(stderr, "%s: context %s, %s%s%s%s", program, noted->context, url,
                    noted->others[0] != '\0' ? " (not from it: " : "", noted->others,
                    noted->others[0] != '\0' ? ")" : "");
    }
}
