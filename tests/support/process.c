/* SPDX-License-Identifier: Apache-2.0 */
/* Starts, watches and ends child processes for tests. */
#include "support/process.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <jansson.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/pidfd.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define ARGS_MAX 128
#define OUTPUT_BYTES_MAX (4u << 20)

bool ep_test_dir_create(char out_path[EP_TEST_PATH_BYTES])
{
    const char *base = getenv("TMPDIR");
    snprintf(out_path, EP_TEST_PATH_BYTES, "%s/expertd-test-XXXXXX",
             base != NULL && base[0] != '\0' ? base : "/tmp");
    if (mkdtemp(out_path) == NULL) {
        perror(out_path);
        return false;
    }
    return true;
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *where)
{
    (void)st;
    (void)kind;
    (void)where;
    remove(path);
    return 0;
}

void ep_test_dir_remove(const char *path)
{
    if (path[0] != 0) {
        nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    }
}

bool ep_test_write_file(const char *path, const char *text, mode_t mode)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, mode);
    size_t bytes = strlen(text);
    bool ok = fd >= 0 && fchmod(fd, mode) == 0 && write(fd, text, bytes) == (ssize_t)bytes;
    if (!ok) {
        perror(path);
    }
    if (fd >= 0) {
        close(fd);
    }
    return ok;
}

char *ep_test_read_file(const char *path)
{
    char *text = calloc(1, OUTPUT_BYTES_MAX + 1);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    size_t have = 0;
    ssize_t n = 1;
    while (text != NULL && fd >= 0 && n > 0 && have < OUTPUT_BYTES_MAX) {
        n = read(fd, text + have, OUTPUT_BYTES_MAX - have);
        have += n > 0 ? (size_t)n : 0;
    }
    if (fd >= 0) {
        close(fd);
    }
    return text;
}

bool ep_test_files_equal(const char *a, const char *b)
{
    FILE *first = fopen(a, "rb"), *second = fopen(b, "rb");
    bool equal = first != NULL && second != NULL;
    for (int x = 0; equal && x != EOF;) {
        x = fgetc(first);
        equal = x == fgetc(second);
    }
    equal = equal && ftell(first) > 0 && !ferror(first) && !ferror(second);
    if (first != NULL) {
        fclose(first);
    }
    if (second != NULL) {
        fclose(second);
    }
    return equal;
}

/* Runs between fork and exec: only calls that are safe in a copy of a threaded process. */
static void become_child(const char *program, char *const *argv, char *const *environment,
                         int output, pid_t parent)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) {
        _exit(126); /* the test died before the line above */
    }
    dup2(output, STDOUT_FILENO);
    dup2(output, STDERR_FILENO);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    execve(program, argv, environment);
    _exit(127);
}

static bool has_name(const char *const *strings, const char *string)
{
    size_t name_bytes = strcspn(string, "=") + 1;
    for (size_t i = 0; strings != NULL && strings[i] != NULL; i++) {
        if (strncmp(strings[i], string, name_bytes) == 0) {
            return true;
        }
    }
    return false;
}

/*
 * Returns the test's environment with the extra strings in front, where they override the old ones
 * of the same name. The defaults keep a daemon from colliding with those of tests that run at the
 * same time.
 */
static char **make_environment(const char *runtime_dir, const char *const *extra)
{
    size_t count = 0, extra_count = 0;
    while (environ[count] != NULL) {
        count++;
    }
    while (extra != NULL && extra[extra_count] != NULL) {
        extra_count++;
    }
    const char *const defaults[] = {"EXPERTD_DOOR_LISTEN=tcp://127.0.0.1:0",
                                    "EXPERTD_COORDINATOR_DOOR_LISTEN=tcp://127.0.0.1:0",
                                    runtime_dir};
    char **all = calloc(count + extra_count + 4, sizeof(*all));
    size_t n = 0;
    for (size_t i = 0; all != NULL && i < extra_count; i++) {
        all[n++] = (char *)(uintptr_t)extra[i];
    }
    for (size_t i = 0; all != NULL && i < 3; i++) {
        if (!has_name(extra, defaults[i]) && !has_name((const char *const *)environ, defaults[i])) {
            all[n++] = (char *)(uintptr_t)defaults[i];
        }
    }
    for (size_t i = 0; all != NULL && i < count; i++) {
        if (!has_name(extra, environ[i])) {
            all[n++] = environ[i];
        }
    }
    return all;
}

static pid_t spawn(const char *program, const char *const *args, const char *ports_flag,
                   char *const *environment, int output)
{
    const char *argv[ARGS_MAX + 3] = {program};
    size_t n = 1;
    for (size_t i = 0; args != NULL && args[i] != NULL && n <= ARGS_MAX; i++) {
        argv[n++] = args[i];
    }
    if (ports_flag != NULL) {
        argv[n++] = ports_flag;
    }
    pid_t parent = getpid();
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        become_child(program, (char *const *)(uintptr_t)argv, environment, output, parent);
    }
    return pid;
}

bool ep_test_process_start(ep_test_process *process, const char *dir, const char *name,
                           const char *program, const char *const *args,
                           const char *const *extra_environment, bool wants_ports)
{
    char ports_flag[EP_TEST_PATH_BYTES + 32];
    char runtime_dir[EP_TEST_PATH_BYTES + 32]; /* folder of the daemon's shared memory socket */
    memset(process, 0, sizeof(*process));
    process->pid_fd = -1;
    snprintf(process->output_path, sizeof(process->output_path), "%s/%s.out", dir, name);
    snprintf(process->ports_path, sizeof(process->ports_path), "%s/%s.ports", dir, name);
    snprintf(ports_flag, sizeof(ports_flag), "--ports-file=%s", process->ports_path);
    snprintf(runtime_dir, sizeof(runtime_dir), "RUNTIME_DIRECTORY=%s", dir);
    unlink(process->ports_path);
    int output =
        open(process->output_path, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0600);
    char **environment = make_environment(runtime_dir, extra_environment);
    pid_t pid = output >= 0 && environment != NULL
                    ? spawn(program, args, wants_ports ? ports_flag : NULL, environment, output)
                    : -1;
    free(environment);
    if (output >= 0) {
        close(output);
    }
    if (pid < 0) {
        perror(program);
        return false;
    }
    process->pid = pid;
    process->pid_fd = pidfd_open(pid, 0);
    return process->pid_fd >= 0;
}

static long now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static bool read_ports(ep_test_process *process)
{
    json_t *object = json_load_file(process->ports_path, 0, NULL);
    const char *rpc = json_string_value(json_object_get(object, "rpc_url"));
    const char *probe = json_string_value(json_object_get(object, "probe_url"));
    snprintf(process->rpc_url, sizeof(process->rpc_url), "%s", rpc != NULL ? rpc : "");
    const char *admin = json_string_value(json_object_get(object, "admin_url"));
    snprintf(process->admin_url, sizeof(process->admin_url), "%s", admin != NULL ? admin : "");
    const char *door = json_string_value(json_object_get(object, "door_url"));
    snprintf(process->door_url, sizeof(process->door_url), "%s", door != NULL ? door : "");
    snprintf(process->probe_url, sizeof(process->probe_url), "%s", probe != NULL ? probe : "");
    json_decref(object);
    return object != NULL;
}

bool ep_test_process_wait_ports(ep_test_process *process, int timeout_ms)
{
    char dir[EP_TEST_PATH_BYTES];
    char events[4096];
    long end = now_ms() + timeout_ms;
    int watch = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    snprintf(dir, sizeof(dir), "%s", process->ports_path);
    *strrchr(dir, '/') = 0;
    if (watch < 0 || inotify_add_watch(watch, dir, IN_MOVED_TO | IN_CLOSE_WRITE) < 0) {
        perror(dir);
    }
    bool found = false;
    for (bool alive = true; alive && !found;) {
        found = access(process->ports_path, R_OK) == 0 && read_ports(process);
        long left = end - now_ms();
        if (found || left <= 0) {
            break;
        }
        struct pollfd fds[2] = {{.fd = watch, .events = POLLIN},
                                {.fd = process->pid_fd, .events = POLLIN}};
        poll(fds, 2, (int)left);
        alive = (fds[1].revents & POLLIN) == 0;
        while (read(watch, events, sizeof(events)) > 0) {
        }
    }
    close(watch);
    if (!found) {
        char *output = ep_test_process_output(process);
        fprintf(stderr, "no ports file %s; the program printed:\n%s\n", process->ports_path,
                output != NULL ? output : "");
        free(output);
    }
    return found;
}

bool ep_test_process_signal(const ep_test_process *process, int signal_number)
{
    if (process->pid <= 0 || pidfd_send_signal(process->pid_fd, signal_number, NULL, 0) != 0) {
        return false;
    }
    siginfo_t info;
    int result = 0;
    do { /* its other threads run on for a moment after the signal */
        result = signal_number == SIGSTOP ? waitid(P_PID, (id_t)process->pid, &info, WSTOPPED) : 0;
    } while (result != 0 && errno == EINTR);
    return result == 0;
}

int ep_test_process_wait(ep_test_process *process, int timeout_ms)
{
    struct pollfd fd = {.fd = process->pid_fd, .events = POLLIN};
    int status = 0;
    long end = now_ms() + timeout_ms;
    int rc;
    if (process->pid <= 0) {
        return -1;
    }
    do {
        long left = end - now_ms();
        rc = poll(&fd, 1, left > 0 ? (int)left : 0);
    } while (rc < 0 && errno == EINTR);
    if (rc <= 0 || waitpid(process->pid, &status, 0) != process->pid) {
        return -1;
    }
    process->pid = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int ep_test_process_stop(ep_test_process *process, int signal_number, int timeout_ms)
{
    ep_test_process_signal(process, signal_number);
    return ep_test_process_wait(process, timeout_ms);
}

void ep_test_process_destroy(ep_test_process *process)
{
    if (process->pid > 0) {
        kill(process->pid, SIGCONT);
        kill(process->pid, SIGKILL);
        waitpid(process->pid, NULL, 0);
    }
    if (process->output_path[0] != 0 && process->pid_fd >= 0) {
        close(process->pid_fd);
    }
    memset(process, 0, sizeof(*process));
    process->pid_fd = -1;
}

char *ep_test_process_output(const ep_test_process *process)
{
    return ep_test_read_file(process->output_path);
}

int ep_test_process_run(const char *dir, const char *name, const char *program,
                        const char *const *args, const char *const *extra_environment,
                        int timeout_ms, char **out_output)
{
    ep_test_process process;
    int code = -1;
    if (ep_test_process_start(&process, dir, name, program, args, extra_environment, false)) {
        code = ep_test_process_wait(&process, timeout_ms);
        if (out_output != NULL) {
            *out_output = ep_test_process_output(&process);
        }
    } else if (out_output != NULL) {
        *out_output = calloc(1, 1);
    }
    ep_test_process_destroy(&process);
    return code;
}

/* Cuts the next word off *io_rest, in place; NULL: no more. */
static char *next_word(char **io_rest)
{
    char *word = *io_rest + strspn(*io_rest, " ");
    const bool is_quoted = *word == '\'';
    if (*word == 0) {
        return NULL;
    }
    word += is_quoted;
    char *end = word + strcspn(word, is_quoted ? "'" : " ");
    *io_rest = end + (*end != 0);
    *end = 0;
    return word;
}

int ep_test_process_run_line(const char *dir, const char *program,
                             const char *const *extra_environment, int timeout_ms,
                             char **out_output, const char *line, ...)
{
    const char *args[ARGS_MAX] = {NULL};
    size_t count = 0;
    char *words = NULL;
    va_list values;
    va_start(values, line);
    const int length = vasprintf(&words, line, values);
    va_end(values);
    if (length < 0) {
        return -1;
    }
    char *rest = words;
    for (char *word; count + 1 < ARGS_MAX && (word = next_word(&rest)) != NULL;) {
        args[count++] = word;
    }
    const int code =
        ep_test_process_run(dir, "line", program, args, extra_environment, timeout_ms, out_output);
    free(words);
    return code;
}

int ep_test_tcp_connect(const char *url)
{
    struct sockaddr_in address = {.sin_family = AF_INET};
    struct timeval patience = {.tv_sec = 20};
    const char *colon = strrchr(url, ':');
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons((uint16_t)(colon != NULL ? atoi(colon + 1) : 0));
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof(address)) != 0) {
        close(fd);
        return -1;
    }
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    return fd;
}

int ep_test_http_get(const char *url, const char *path, char **out_body)
{
    char request[512];
    char *text = calloc(1, OUTPUT_BYTES_MAX + 1);
    int fd = ep_test_tcp_connect(url);
    int status = -1;
    size_t have = 0;
    ssize_t n = 1;
    int bytes = snprintf(request, sizeof(request),
                         "GET %s HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n", path);
    bool sent = text != NULL && fd >= 0 && send(fd, request, (size_t)bytes, MSG_NOSIGNAL) == bytes;
    while (sent && n > 0 && have < OUTPUT_BYTES_MAX) {
        n = recv(fd, text + have, OUTPUT_BYTES_MAX - have, 0);
        have += n > 0 ? (size_t)n : 0;
    }
    if (fd >= 0) {
        close(fd);
    }
    if (sent && sscanf(text, "HTTP/1.%*d %d", &status) != 1) {
        status = -1;
    }
    if (out_body != NULL) {
        const char *body = text != NULL ? strstr(text, "\r\n\r\n") : NULL;
        *out_body = strdup(body != NULL ? body + 4 : "");
    }
    free(text);
    return status;
}

double ep_test_metric(const ep_test_process *process, const char *series)
{
    char *body = NULL, line[192];
    ep_test_http_get(process->probe_url, "/metrics", &body);
    snprintf(line, sizeof(line), "\n%s ", series);
    const char *at = body != NULL ? strstr(body, line) : NULL;
    const double value = at != NULL ? strtod(at + strlen(line), NULL) : -1;
    free(body);
    return value;
}

static long number_after(const char *text, const char *key)
{
    const char *at = text != NULL ? strstr(text, key) : NULL;
    return at != NULL ? strtol(at + strlen(key), NULL, 10) : -1;
}

ep_test_usage ep_test_process_usage(pid_t pid)
{
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/status", (int)pid);
    char *text = ep_test_read_file(path);
    ep_test_usage usage = {number_after(text, "VmRSS:"), number_after(text, "Threads:"), -1};
    free(text);
    snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
    DIR *dir = opendir(path);
    if (dir != NULL) {
        usage.descriptors = 0;
        for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
            usage.descriptors += entry->d_name[0] != '.';
        }
        closedir(dir);
    }
    return usage;
}
