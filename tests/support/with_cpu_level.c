/* SPDX-License-Identifier: Apache-2.0 */
/* with_cpu_level LEVEL PROGRAM [ARGS..]: runs the program and its children with the CPU limited to
 * LEVEL. Exits with 77 (skipped) if this CPU has no such level. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/cpu_features.h"

int main(int argc, char **argv)
{
    ep_error error;
    if (argc < 3) {
        fprintf(stderr, "usage: %s LEVEL PROGRAM [ARGS..]\n", argv[0]);
        return 2;
    }
    if (setenv(EP_CPU_FEATURES_VARIABLE, argv[1], 1) != 0) {
        perror("setenv");
        return 2;
    }
    if (ep_cpu_features_check(&error) != EP_OK) {
        printf("skipped: this machine has no such level: %s\n", error.text);
        return 77;
    }
    execv(argv[2], argv + 2);
    perror(argv[2]);
    return 2;
}
