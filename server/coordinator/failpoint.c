/* SPDX-License-Identifier: Apache-2.0 */
/* Compiled only into the coordinator's test build. */
#include "coordinator/failpoint.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool ep_failpoint_hit(const char *name)
{
    static unsigned long hits;
    const char *chosen = getenv("EP_FAILPOINT");
    size_t length = strlen(name);
    if (chosen == NULL || strncmp(chosen, name, length) != 0 || chosen[length] != '=') {
        return false;
    }
    const char *action = chosen + length + 1;
    const char *colon = strchr(action, ':');
    if (strncmp(action, "error", 5) == 0) {
        return colon != NULL && access(colon + 1, F_OK) == 0;
    }
    unsigned long wanted = colon != NULL ? strtoul(colon + 1, NULL, 10) : 1;
    if (__atomic_add_fetch(&hits, 1, __ATOMIC_RELAXED) == wanted) {
        fprintf(stderr, "failpoint %s\n", chosen);
        raise(strncmp(action, "stop", 4) == 0 ? SIGSTOP : SIGKILL);
    }
    return false;
}
