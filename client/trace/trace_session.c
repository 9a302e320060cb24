/* SPDX-License-Identifier: Apache-2.0 */
/* Runs lttng and lttng-sessiond as children. */
#include "trace/trace_session.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cli/child.h"

#define LTTNG "lttng"
#define SESSIOND "lttng-sessiond"
#define PACKAGE_HINT "is not installed; it is in the package lttng-tools"
#define CHANNEL "expertd"
#define ARGS_MAX 24
#define OUTPUT_BYTES 65536
#define DAEMON_READY_S 20
#define REGISTER_WAIT_MS 8000 /* a process that lost its daemon looks for a new one every 5 s */
#define REGISTER_POLL_MS 20
#define PATH_BYTES 600
#define REGISTER_TIMEOUT_MS "10000"
#define TRACE_LIBRARY "libexpertd-trace.so"

/* ---- lttng ---- */

/* Runs lttng; its output goes to text, cut to bytes. Returns as ep_cli_child_run. */
static int run_lttng(char *text, size_t bytes, const char *const *args)
{
    char *argv[ARGS_MAX + 3] = {LTTNG, "--no-sessiond"};
    for (size_t i = 0; args[i] != NULL && i < ARGS_MAX; i++) {
        argv[i + 2] = (char *)args[i];
    }
    return ep_cli_child_run(argv, true, text, bytes);
}

static ep_err lttng_error(const char *what, int code, const char *text, ep_error *out_error)
{
    if (code == -ENOENT) {
        return ep_error_set(out_error, EP_ERR_UNAVAILABLE, "the program %s " PACKAGE_HINT, LTTNG);
    }
    if (code < 0) {
        return ep_error_set(out_error, EP_ERR_IO, "cannot run %s: %s", LTTNG, strerror(-code));
    }
    size_t length = strlen(text);
    while (length > 0 && isspace((unsigned char)text[length - 1])) {
        length--;
    }
    return ep_error_set(out_error, EP_ERR_IO, "%s: lttng failed with exit code %d: %.*s", what,
                        code, (int)(length < 300 ? length : 300), text);
}

/* Runs one lttng command; the arguments end with NULL. */
static ep_err lttng(ep_error *out_error, const char *what, ...)
{
    static char text[OUTPUT_BYTES];
    const char *args[ARGS_MAX + 1] = {NULL};
    va_list list;
    va_start(list, what);
    for (size_t i = 0; i < ARGS_MAX && (args[i] = va_arg(list, const char *)) != NULL; i++) {
    }
    va_end(list);
    int code = run_lttng(text, sizeof(text), args);
    return code == 0 ? EP_OK : lttng_error(what, code, text, out_error);
}

/* ---- the session daemon ---- */

static const char *state_path(char *out_path, size_t bytes)
{
    const char *home = getenv("LTTNG_HOME");
    home = home != NULL ? home : getenv("HOME");
    if (geteuid() == 0) {
        snprintf(out_path, bytes, "/var/run/lttng/expertctl-daemon.pid");
    } else {
        snprintf(out_path, bytes, "%s/.lttng/expertctl-daemon.pid", home != NULL ? home : "");
    }
    return out_path;
}

/* 0: reachable; 1: not; < 0: -errno of starting lttng. */
static int daemon_reachable(void)
{
    static char text[OUTPUT_BYTES];
    static const char *const args[] = {"list", NULL};
    int code = run_lttng(text, sizeof(text), args);
    return code < 0 ? code : code != 0;
}

/* The daemon sends SIGUSR1 when it is ready. */
static ep_err start_daemon(ep_cli_session *session, ep_error *out_error)
{
    char *argv[] = {SESSIOND, "--no-kernel", "--sig-parent", NULL};
    char path[PATH_BYTES];
    sigset_t set;
    sigset_t old;
    siginfo_t info;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    sigaddset(&set, SIGCHLD);
    sigprocmask(SIG_BLOCK, &set, &old);
    int quiet = open("/dev/null", O_WRONLY | O_CLOEXEC);
    int failed = ep_cli_child_start(&session->daemon, argv, true, quiet);
    close(quiet);
    struct timespec limit = {.tv_sec = DAEMON_READY_S};
    int got = failed == 0 ? sigtimedwait(&set, &info, &limit) : -1;
    while (got == SIGCHLD && waitpid(session->daemon, NULL, WNOHANG) == 0) {
        got = sigtimedwait(&set, &info, &limit);
    }
    sigprocmask(SIG_SETMASK, &old, NULL);
    if (got != SIGUSR1) {
        if (failed == 0 && got != SIGCHLD) {
            kill(session->daemon, SIGTERM);
            ep_cli_child_wait(session->daemon);
        }
        session->daemon = 0;
        return ep_error_set(out_error, EP_ERR_UNAVAILABLE,
                            failed == ENOENT ? "the program %s " PACKAGE_HINT
                                             : "%s did not start; run it by hand to see why",
                            SESSIOND);
    }
    FILE *file = fopen(state_path(path, sizeof(path)), "w");
    if (file == NULL || fprintf(file, "%d\n", (int)session->daemon) < 0 || fclose(file) != 0) {
        fprintf(stderr, "expertctl trace: cannot write %s; end %s (pid %d) by hand if it stays\n",
                path, SESSIOND, (int)session->daemon);
    }
    return EP_OK;
}

static ep_err need_daemon(ep_cli_session *session, ep_error *out_error)
{
    int state = daemon_reachable();
    if (state < 0) {
        return lttng_error("list", state, "", out_error);
    }
    return state == 0 ? EP_OK : start_daemon(session, out_error);
}

/* Returns the running daemon that an expertctl started; 0: none. */
static pid_t kept_daemon(void)
{
    char path[PATH_BYTES];
    char comm[32] = "";
    int pid = 0;
    FILE *file = fopen(state_path(path, sizeof(path)), "r");
    if (file == NULL) {
        return 0;
    }
    bool good = fscanf(file, "%d", &pid) == 1 && pid > 1;
    fclose(file);
    snprintf(path, sizeof(path), "/proc/%d/comm", pid);
    file = good ? fopen(path, "r") : NULL;
    good = file != NULL && fgets(comm, sizeof(comm), file) != NULL &&
           strncmp(comm, SESSIOND, strlen(SESSIOND)) == 0;
    if (file != NULL) {
        fclose(file);
    }
    return good ? pid : 0; /* only if the pid is still that daemon's */
}

/* Ends the daemon that an expertctl started, unless another session uses it: the expertctl that
 * ends the last session ends the daemon. */
static void end_daemon(ep_cli_session *session)
{
    static char text[OUTPUT_BYTES];
    static const char *const args[] = {"--mi=xml", "list", NULL};
    char path[PATH_BYTES];
    pid_t pid = kept_daemon();
    pid = pid != 0 ? pid : session->daemon;
    if (pid <= 0 ||
        (run_lttng(text, sizeof(text), args) == 0 && strstr(text, "<session>") != NULL)) {
        return;
    }
    unlink(state_path(path, sizeof(path)));
    int fd = (int)syscall(SYS_pidfd_open, pid, 0);
    kill(pid, SIGTERM);
    if (pid == session->daemon) {
        ep_cli_child_wait(pid);
    } else if (fd >= 0) { /* not our child: its locks must be free before the next one starts */
        poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, DAEMON_READY_S * 1000);
    }
    if (fd >= 0) {
        close(fd);
    }
    session->daemon = 0;
}

/* ---- who can be traced ---- */

/* Counts processes with an event of expertd in the output of `lttng list -u`: "PID: 12 - Name: x"
 * and its events below. */
static int count_providers(const char *text)
{
    int count = 0;
    bool counted = true;
    for (const char *line = text; line != NULL && *line != '\0';
         line = strchr(line, '\n') != NULL ? strchr(line, '\n') + 1 : NULL) {
        const char *end = strchrnul(line, '\n');
        if (strncmp(line, "PID:", 4) == 0) {
            counted = false;
        } else if (!counted && memmem(line, (size_t)(end - line), "expertd:", 8) != NULL) {
            counted = true;
            count++;
        }
    }
    return count;
}

int ep_cli_session_providers(void)
{
    static char text[16 * OUTPUT_BYTES];
    static const char *const args[] = {"list", "--userspace", NULL};
    return run_lttng(text, sizeof(text), args) == 0 ? count_providers(text) : -1;
}

/* Counts processes that have the trace library mapped and that this user may inspect. */
static int count_loaded(void)
{
    int count = 0;
    DIR *proc = opendir("/proc");
    for (struct dirent *entry; proc != NULL && (entry = readdir(proc)) != NULL;) {
        char path[PATH_BYTES];
        char line[1024];
        snprintf(path, sizeof(path), "/proc/%s/maps", entry->d_name);
        FILE *maps = isdigit((unsigned char)entry->d_name[0]) ? fopen(path, "r") : NULL;
        while (maps != NULL && fgets(line, sizeof(line), maps) != NULL) {
            if (strstr(line, TRACE_LIBRARY) != NULL && atoi(entry->d_name) != getpid()) {
                count++;
                break;
            }
        }
        if (maps != NULL) {
            fclose(maps);
        }
    }
    if (proc != NULL) {
        closedir(proc);
    }
    return count;
}

/* Running processes find a new daemon by themselves; nothing reports when all have: poll. */
static void wait_registered(void)
{
    int loaded = count_loaded();
    for (int waited = 0; waited < REGISTER_WAIT_MS && ep_cli_session_providers() < loaded;
         waited += REGISTER_POLL_MS) {
        struct timespec pause = {.tv_nsec = REGISTER_POLL_MS * 1000000L};
        nanosleep(&pause, NULL);
    }
}

/* ---- sessions ---- */

static ep_err create(ep_cli_session *session, const ep_cli_session_options *options,
                     ep_error *out_error)
{
    char output[PATH_BYTES];
    char size[32];
    char count[32];
    const char *name = session->name;
    snprintf(output, sizeof(output), "--output=%s", options->dir);
    snprintf(size, sizeof(size), "--subbuf-size=%" PRIu32 "k", options->subbuf_kib);
    snprintf(count, sizeof(count), "--num-subbuf=%" PRIu32, options->subbufs);
    ep_err err =
        options->overwrite
            ? lttng(out_error, "create the session", "create", name, "--snapshot", output, NULL)
            : lttng(out_error, "create the session", "create", name, output, NULL);
    session->created = err == EP_OK;
    err = err != EP_OK ? err
                       : lttng(out_error, "enable the channel", "enable-channel", "--userspace",
                               "--session", name, size, count,
                               options->overwrite ? "--overwrite" : "--discard", CHANNEL, NULL);
    err = err != EP_OK ? err
                       : lttng(out_error, "add the contexts", "add-context", "--userspace",
                               "--session", name, "--channel", CHANNEL, "--type=vpid",
                               "--type=vtid", "--type=procname", NULL);
    err = err != EP_OK ? err
                       : lttng(out_error, "enable the events", "enable-event", "--userspace",
                               "--session", name, "--channel", CHANNEL, "expertd:*", NULL);
    return err != EP_OK ? err : lttng(out_error, "start the session", "start", name, NULL);
}

ep_err ep_cli_session_start(ep_cli_session *session, const ep_cli_session_options *options,
                            ep_error *out_error)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    *session = (ep_cli_session){0};
    if (options->name != NULL) {
        snprintf(session->name, sizeof(session->name), "%s", options->name);
    } else {
        snprintf(session->name, sizeof(session->name), "expertctl-%d-%lld", (int)getpid(),
                 (long long)now.tv_sec);
    }
    ep_err err = need_daemon(session, out_error);
    if (err != EP_OK) {
        return err;
    }
    err = create(session, options, out_error);
    if (err != EP_OK) {
        ep_cli_session_end(session, NULL);
        return err;
    }
    wait_registered();
    return EP_OK;
}

ep_err ep_cli_session_end(ep_cli_session *session, ep_error *out_error)
{
    ep_err err = EP_OK;
    if (session->created) {
        err = lttng(out_error, "stop the session", "stop", session->name, NULL);
        ep_err gone = lttng(err == EP_OK ? out_error : NULL, "destroy the session", "destroy",
                            session->name, NULL);
        err = err != EP_OK ? err : gone;
        session->created = false;
    }
    end_daemon(session);
    return err;
}

ep_err ep_cli_session_snapshot(const char *name, const char *dir, ep_error *out_error)
{
    char url[PATH_MAX + 8];
    char real[PATH_MAX]; /* required by realpath */
    if (realpath(dir, real) == NULL ||
        snprintf(url, sizeof(url), "file://%s", real) >= (int)sizeof(url)) {
        return ep_error_set(out_error, EP_ERR_IO, "%s: %s", dir, strerror(errno));
    }
    return lttng(out_error,
                 "take what the flight recorder has (expertctl trace snapshot start starts it)",
                 "snapshot", "record", "--session", name, url, NULL);
}

ep_err ep_cli_session_drop(const char *name, ep_error *out_error)
{
    ep_cli_session none = {0};
    ep_err err =
        lttng(out_error, "stop the flight recorder (expertctl trace snapshot start starts it)",
              "destroy", name, NULL);
    if (err == EP_OK) {
        end_daemon(&none);
    }
    return err;
}

/* ---- waiting ---- */

static void held_signals(sigset_t *out_set)
{
    sigemptyset(out_set);
    sigaddset(out_set, SIGINT);
    sigaddset(out_set, SIGTERM);
    sigaddset(out_set, SIGHUP);
}

void ep_cli_session_hold_signals(void)
{
    sigset_t set;
    held_signals(&set);
    sigprocmask(SIG_BLOCK, &set, NULL);
}

static struct timespec span_of(double seconds)
{
    return (struct timespec){.tv_sec = (time_t)seconds,
                             .tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9)};
}

ep_err ep_cli_session_wait(char *const *command, double seconds, int *out_code, ep_error *out_error)
{
    sigset_t set;
    pid_t pid = 0;
    held_signals(&set);
    sigaddset(&set, SIGCHLD);
    *out_code = 0;
    sigprocmask(SIG_BLOCK, &set, NULL);
    if (command == NULL) {
        struct timespec limit = span_of(seconds);
        sigtimedwait(&set, NULL, &limit);
        return EP_OK;
    }
    /* The command may be short-lived: make it wait until the session daemon told it what to
     * record. */
    setenv("LTTNG_UST_REGISTER_TIMEOUT", REGISTER_TIMEOUT_MS, 1);
    int failed = ep_cli_child_start(&pid, command, false, -1);
    unsetenv("LTTNG_UST_REGISTER_TIMEOUT");
    if (failed != 0) {
        return ep_error_set(out_error, EP_ERR_NOT_FOUND, "cannot run %s: %s", command[0],
                            strerror(failed));
    }
    for (;;) {
        int status = 0;
        if (waitpid(pid, &status, WNOHANG) == pid) {
            *out_code = ep_cli_child_code(status);
            return EP_OK;
        }
        int number = sigwaitinfo(&set, NULL);
        if (number > 0 && number != SIGCHLD) {
            kill(pid, number);
        }
    }
}
