/* SPDX-License-Identifier: Apache-2.0 */
/* Other programs as children. Threads: any. */
#ifndef EP_CLI_CHILD_H
#define EP_CLI_CHILD_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

/* Starts argv with a shell's signal settings; own_group keeps a terminal's ^C from it. Its stdout
 * and stderr go to output_fd, and it has no input; -1: it has this program's. Returns 0 or errno.
 */
int ep_cli_child_start(pid_t *out_pid, char *const *argv, bool own_group, int output_fd);
/* The exit code of a status of waitpid; 128 + the number of a signal that ended it. */
int ep_cli_child_code(int status);
int ep_cli_child_wait(pid_t pid);
/* Runs argv to its end; what it prints goes to text, cut to bytes. Returns the exit code, or -errno
 * if it could not be started. */
int ep_cli_child_run(char *const *argv, bool own_group, char *out_text, size_t bytes);

#endif
