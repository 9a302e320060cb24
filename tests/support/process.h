/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Real programs as children of a test. Each child dies with the thread that started it
 * (PR_SET_PDEATHSIG), so call ep_test_process_start on the thread that lives as long as the test.
 * Nothing here sleeps for a fixed time: the ports file and the child's end are events. Failures are
 * reported on stderr and by the return value; nothing asserts.
 */
#ifndef EP_TESTS_SUPPORT_PROCESS_H
#define EP_TESTS_SUPPORT_PROCESS_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#define EP_TEST_PATH_BYTES 256

/* Makes a new directory for this test under $TMPDIR. False on failure. */
bool ep_test_dir_create(char out_path[EP_TEST_PATH_BYTES]);
/* Removes it with everything in it. */
void ep_test_dir_remove(const char *path);
/* Writes a whole file. */
bool ep_test_write_file(const char *path, const char *text, mode_t mode);
/* Reads a whole file as text, malloc'ed; "": there is no file. NULL only without memory. */
char *ep_test_read_file(const char *path);

/* True if both exist, are not empty, and have the same bytes. */
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
 * Starts program with args (NULL-terminated, without argv[0]); with wants_ports
 * "--ports-file=<dir>/<name>.ports" is added. Output goes to <dir>/<name>.out. extra_environment:
 * NULL or NULL-terminated "NAME=value", which overrides the test's own. Doors get any free port
 * unless extra_environment or args name one, so that daemons of different tests never collide.
 */
bool ep_test_process_start(ep_test_process *process, const char *dir, const char *name,
                           const char *program, const char *const *args,
                           const char *const *extra_environment, bool wants_ports);
/* Waits until the program has written its ports file. False: it ended or timeout_ms passed; its
 * output goes to stderr. */
bool ep_test_process_wait_ports(ep_test_process *process, int timeout_ms);
/* Sends a signal. With SIGSTOP it returns once the process has stopped. */
bool ep_test_process_signal(const ep_test_process *process, int signal_number);
/* Waits until the process ended. Returns its exit code, 128 + signal number if a signal ended it,
 * or -1 if it still runs after timeout_ms. */
int ep_test_process_wait(ep_test_process *process, int timeout_ms);
/* Signal and wait. */
int ep_test_process_stop(ep_test_process *process, int signal_number, int timeout_ms);
/* For teardown: kills it with SIGKILL if it still runs, reaps it, closes. Also for a zeroed or
 * half-started one. */
void ep_test_process_destroy(ep_test_process *process);
/* Returns its output so far, malloc'ed. */
char *ep_test_process_output(const ep_test_process *process);
/* Runs a program to its end. Returns as ep_test_process_wait; *out_output (may be NULL) is
 * malloc'ed. */
int ep_test_process_run(const char *dir, const char *name, const char *program,
                        const char *const *args, const char *const *extra_environment,
                        int timeout_ms, char **out_output);

/* Does the same with the arguments as one line: words separated by spaces; '..' quotes spaces or an
 * empty word. */
__attribute__((format(printf, 6, 7))) int
ep_test_process_run_line(const char *dir, const char *program, const char *const *extra_environment,
                         int timeout_ms, char **out_output, const char *line, ...);

/* Requests url ("http://127.0.0.1:port") + path. Returns the status code, or -1. *out_body (may be
 * NULL) is malloc'ed. */
int ep_test_http_get(const char *url, const char *path, char **out_body);
/* Resources of a running process; -1: /proc does not tell. */
typedef struct ep_test_usage {
    long rss_kib;
    long threads;
    long descriptors;
} ep_test_usage;
ep_test_usage ep_test_process_usage(pid_t pid);
/* Returns the value of a series of /metrics, named with its labels; -1: there is none. */
double ep_test_metric(const ep_test_process *process, const char *series);
/* Returns a TCP socket connected to the host and port of "scheme://127.0.0.1:port", or -1. */
int ep_test_tcp_connect(const char *url);

#endif
