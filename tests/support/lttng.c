/* SPDX-License-Identifier: Apache-2.0 */
/* Runs lttng-sessiond and lttng as children. */
#include "support/lttng.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LTTNG "/usr/bin/lttng"
#define SESSIOND "/usr/bin/lttng-sessiond"
#define READY_MS 30000
#define POLL_MS 20
#define PATIENCE_MS 60000
#define ARGS_MAX 32

static bool write_all(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    bool good = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    if (fd >= 0) {
        close(fd);
    }
    return good;
}

static bool be_somebody(void)
{
    return geteuid() != 0 ||
           (unshare(CLONE_NEWUSER) == 0 && write_all("/proc/self/setgroups", "deny") &&
            write_all("/proc/self/uid_map", "1000 0 1") &&
            write_all("/proc/self/gid_map", "1000 0 1"));
}

bool ep_test_lttng_prepare(void)
{
    return access(LTTNG, X_OK) == 0 && access(SESSIOND, X_OK) == 0 && be_somebody();
}

static int run(ep_test_lttng *lttng, const char *const *args, char **out_text)
{
    const char *all[ARGS_MAX + 2] = {"--no-sessiond"};
    for (size_t i = 0; i < ARGS_MAX && args[i] != NULL; i++) {
        all[i + 1] = args[i];
    }
    return ep_test_process_run(lttng->dir, "lttng", LTTNG, all, lttng->environment, PATIENCE_MS,
                               out_text);
}

bool ep_test_lttng_run(ep_test_lttng *lttng, const char *const *args, char **out_text)
{
    char *text = NULL;
    bool good = run(lttng, args, &text) == 0;
    if (!good) {
        fprintf(stderr, "lttng %s: %s\n", args[0], text != NULL ? text : "");
    }
    if (out_text != NULL) {
        *out_text = text;
    } else {
        free(text);
    }
    return good;
}

bool ep_test_lttng_start(ep_test_lttng *lttng, const char *dir)
{
    static const char *const daemon_args[] = {"--no-kernel", NULL};
    static const char *const list_args[] = {"list", NULL};
    memset(lttng, 0, sizeof(*lttng));
    snprintf(lttng->dir, sizeof(lttng->dir), "%s", dir);
    snprintf(lttng->home, sizeof(lttng->home), "LTTNG_HOME=%s", dir);
    lttng->environment[0] = lttng->home;
    if (!ep_test_process_start(&lttng->daemon, dir, "sessiond", SESSIOND, daemon_args,
                               lttng->environment, false)) {
        return false;
    }
    for (int waited = 0; waited < READY_MS; waited += POLL_MS) {
        struct timespec pause = {.tv_nsec = POLL_MS * 1000000L};
        if (run(lttng, list_args, NULL) == 0) {
            return true;
        }
        nanosleep(&pause, NULL);
    }
    char *text = ep_test_process_output(&lttng->daemon);
    fprintf(stderr, "lttng-sessiond does not answer: %s\n", text);
    free(text);
    return false;
}

bool ep_test_lttng_record(ep_test_lttng *lttng, const char *out_dir)
{
    char output[EP_TEST_PATH_BYTES + 16];
    snprintf(output, sizeof(output), "--output=%s", out_dir);
    const char *const commands[][12] = {
        {"create", "test", output},
        {"enable-channel", "--userspace", "--subbuf-size=1024k", "--num-subbuf=4", "--discard",
         "expertd"},
        {"add-context", "--userspace", "--channel", "expertd", "--type=vpid", "--type=vtid",
         "--type=procname"},
        {"enable-event", "--userspace", "--channel", "expertd", "expertd:*"},
        {"start"},
    };
    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
        if (!ep_test_lttng_run(lttng, commands[i], NULL)) {
            return false;
        }
    }
    return true;
}

void ep_test_lttng_stop(ep_test_lttng *lttng)
{
    if (lttng->daemon.pid > 0) {
        ep_test_process_stop(&lttng->daemon, SIGTERM, PATIENCE_MS);
    }
    ep_test_process_destroy(&lttng->daemon);
}
