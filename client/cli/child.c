/* SPDX-License-Identifier: Apache-2.0 */
#include "child.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

int ep_cli_child_start(pid_t *out_pid, char *const *argv, bool own_group, int output_fd)
{
    posix_spawnattr_t attributes;
    posix_spawn_file_actions_t actions;
    sigset_t none;
    sigset_t defaults;
    short flags = POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF;
    sigemptyset(&none);
    sigemptyset(&defaults);
    sigaddset(&defaults, SIGPIPE);
    posix_spawnattr_init(&attributes);
    posix_spawn_file_actions_init(&actions);
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawnattr_setsigdefault(&attributes, &defaults);
    if (own_group) {
        posix_spawnattr_setpgroup(&attributes, 0);
        flags |= POSIX_SPAWN_SETPGROUP;
    }
    posix_spawnattr_setflags(&attributes, flags);
    if (output_fd >= 0) {
        posix_spawn_file_actions_adddup2(&actions, output_fd, STDOUT_FILENO);
        posix_spawn_file_actions_adddup2(&actions, output_fd, STDERR_FILENO);
        posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    }
    int failed = posix_spawnp(out_pid, argv[0], &actions, &attributes, argv, environ);
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
    return failed;
}

int ep_cli_child_code(int status)
{
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int ep_cli_child_wait(pid_t pid)
{
    int status = 0;
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    return ep_cli_child_code(status);
}

int ep_cli_child_run(char *const *argv, bool own_group, char *out_text, size_t bytes)
{
    int ends[2];
    pid_t pid = 0;
    size_t used = 0;
    out_text[0] = '\0';
    if (pipe2(ends, O_CLOEXEC) != 0) {
        return -errno;
    }
    int failed = ep_cli_child_start(&pid, argv, own_group, ends[1]);
    close(ends[1]);
    char piece[4096];
    for (ssize_t got; failed == 0 && ((got = read(ends[0], piece, sizeof(piece))) > 0 ||
                                      (got < 0 && errno == EINTR));) {
        size_t room = bytes - 1 - used;
        size_t take = got > 0 ? ((size_t)got < room ? (size_t)got : room) : 0;
        memcpy(out_text + used, piece, take);
        used += take;
    }
    close(ends[0]);
    out_text[used] = '\0';
    return failed != 0 ? -failed : ep_cli_child_wait(pid);
}
