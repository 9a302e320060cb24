/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Real programs as children of a test. Each child dies with the test, however the test ends
 * (PR_SET_PDEATHSIG), so call ep_test_process_start on the thread that lives as long as the test.
 * Nothing here waits by time: the ports file and the child's end are events. Failures are reported
 * on stderr and by the return value; nothing asserts.
 */
#ifndef EP_TESTS_SUPPORT_PROCESS_H
#define EP_TESTS_SUPPORT_PROCESS_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#define EP_TEST_PATH_BYTES 256

/* A directory of this test's own under $TMPDIR. False on failure. */
bool ep_test_dir_create(char out_path[EP_TEST_PATH_BYTES]);
/* Removes it with everything in it. */
void ep_test_dir_remove(const char *path);
/* Writes a whole file. */
bool ep_test_write_file(const char *path, const char *text, mode_t mode);
/* Reads a whole file as text (malloc'ed, never NULL unless out of memory; "" when there is
 * none). */
char *ep_test_read_file(const char *path);

/* Both are there, are not empty, and have the same bytes. */
bool ep_test_files_equal(const char *a, const char *b);

typedef struct ep_test_process {
    pid_t pid; /* 0: none, or already reaped */
    int pid_fd;
    char output_path[EP_TEST_PATH_BYTES]; /* stdout and stderr together */
    char ports_path[EP_TEST_PATH_BYTES];
    char rpc_url[EP_TEST_PATH_BYTES];   /* after ep_test_process_wait_ports */
    char admin_url[EP_TEST_PATH_BYTES]; /* the same; "" off */
    char door_url[EP_TEST_PATH_BYTES];  /* the same */
    char probe_url[EP_TEST_PATH_BYTES]; /* "" when the program has none */
} ep_test_process;

/*
 * Starts program with args (NULL-terminated, without argv[0]); a daemon gets
 * "--ports-file=<dir>/<name>.ports" added when wants_ports. Output goes to <dir>/<name>.out.
 * extra_environment: NULL or NULL-terminated "NAME=value", set on top of our own. Doors get any
 * free port unless it or args say otherwise, so that daemons of different tests never meet.
 */
bool ep_test_process_start(ep_test_process *process, const char *dir, const char *name,
                           const char *program, const char *const *args,
                           const char *const *extra_environment, bool wants_ports);
/* Until the program has written its ports file (true), or has ended or timeout_ms passed (false;
 * its output goes to stderr). */
bool ep_test_process_wait_ports(ep_test_process *process, int timeout_ms);
/* After SIGSTOP it returns once the process has stopped. */
bool ep_test_process_signal(const ep_test_process *process, int signal_number);
/* Until it ended: its exit code, 128 + signal number when a signal ended it, -1 when it still runs
 * after timeout_ms. */
int ep_test_process_wait(ep_test_process *process, int timeout_ms);
/* Signal and wait. */
int ep_test_process_stop(ep_test_process *process, int signal_number, int timeout_ms);
/* For teardown: SIGKILL when it still runs, reap, close. Also for a zeroed or half-started one. */
void ep_test_process_destroy(ep_test_process *process);
/* What it printed so far (malloc'ed). */
char *ep_test_process_output(const ep_test_process *process);
/* Runs a program to its end: exit code as in _wait; *out_output (may be NULL) is malloc'ed. */
int ep_test_process_run(const char *dir, const char *name, const char *program,
                        const char *const *args, const char *const *extra_environment,
                        int timeout_ms, char **out_output);

/* The same with the arguments as one types them: words parted by spaces, '..' holds spaces or
 * nothing. */
__attribute__((format(printf, 6, 7))) int
ep_test_process_run_line(const char *dir, const char *program, const char *const *extra_environment,
                         int timeout_ms, char **out_output, const char *line, ...);

/* GET of url ("http://127.0.0.1:port") + path: status code, or -1. *out_body (may be NULL) is
 * malloc'ed. */
int ep_test_http_get(const char *url, const char *path, char **out_body);
/* What a running process has; -1: /proc does not tell. */
typedef struct ep_test_usage {
    long rss_kib;
    long threads;
    long descriptors;
} ep_test_usage;
ep_test_usage ep_test_process_usage(pid_t pid);
/* The value of a series of /metrics, named with its labels; -1 when it is not there. */
double ep_test_metric(const ep_test_process *process, const char *series);
/* A connected TCP socket to the host and port of "scheme://127.0.0.1:port", or -1. */
int ep_test_tcp_connect(const char *url);

#endif
