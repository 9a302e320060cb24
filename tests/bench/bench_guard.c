/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/bench_guard.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/checkpoint_fixture.h"

void bench_guard(const char *const *dirs, size_t count)
{
    sigset_t signals, before;
    int status = 0, number;
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGHUP);
    sigaddset(&signals, SIGCHLD);
    sigprocmask(SIG_BLOCK, &signals, &before);
    pid_t parent = getpid();
    pid_t child = fork();
    if (child < 0) {
        perror("fork");
        exit(1);
    }
    if (child == 0) {
        sigprocmask(SIG_SETMASK, &before, NULL);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) {
            _exit(1);
        }
        return;
    }
    /* SIGCHLD also comes when the child is stopped: whether it has ended says waitpid */
    while (waitpid(child, &status, WNOHANG) == 0) {
        if (sigwait(&signals, &number) == 0 && number != SIGCHLD) {
            kill(child, SIGKILL);
            waitpid(child, &status, 0);
            status = number; /* as if it had ended by that */
            break;
        }
    }
    for (size_t i = 0; i < count; i++) {
        ep_fixture_remove(dirs[i]);
    }
    exit(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
}
