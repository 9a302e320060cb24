/* SPDX-License-Identifier: Apache-2.0 */
/* sd_notify(3) without libsystemd. */
#include "common/sd_notify.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/clock.h"

#define TEXT_BYTES 512
#define SEND_TIMEOUT_S 2

static bool send_text(const char *text)
{
    const char *path = getenv("NOTIFY_SOCKET");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t path_bytes = path != NULL ? strlen(path) : 0;
    if (path_bytes < 2 || path_bytes >= sizeof(address.sun_path) ||
        (path[0] != '/' && path[0] != '@')) {
        return false;
    }
    memcpy(address.sun_path, path, path_bytes);
    if (path[0] == '@') {
        address.sun_path[0] = 0; /* abstract name */
    }
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return false;
    }
    /* The manager's queue holds only a few messages: READY must not be lost while it is slow. */
    struct timeval patience = {.tv_sec = SEND_TIMEOUT_S};
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
    socklen_t address_bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + path_bytes);
    ssize_t n;
    do {
        n = sendto(fd, text, strlen(text), MSG_NOSIGNAL, (struct sockaddr *)&address,
                   address_bytes);
    } while (n < 0 && errno == EINTR);
    close(fd);
    return n == (ssize_t)strlen(text);
}

/* Writes a single line, since a newline would begin another assignment. */
static void put_status(char *out, size_t bytes, const char *prefix, const char *status)
{
    size_t n = (size_t)snprintf(out, bytes, "%sSTATUS=", prefix);
    for (; *status != 0 && n + 1 < bytes; status++) {
        out[n++] = *status == '\n' ? ' ' : *status;
    }
    out[n] = 0;
}

bool ep_sd_notify_ready(const char *status)
{
    char text[TEXT_BYTES];
    put_status(text, sizeof(text), "READY=1\n", status);
    return send_text(text);
}

bool ep_sd_notify_status(const char *format, ...)
{
    char status[TEXT_BYTES / 2];
    char text[TEXT_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(status, sizeof(status), format, args);
    va_end(args);
    put_status(text, sizeof(text), "", status);
    return send_text(text);
}

bool ep_sd_notify_stopping(const char *status)
{
    char text[TEXT_BYTES];
    put_status(text, sizeof(text), "STOPPING=1\n", status);
    return send_text(text);
}

bool ep_sd_notify_reloading(void)
{
    char text[TEXT_BYTES];
    snprintf(text, sizeof(text), "RELOADING=1\nMONOTONIC_USEC=%llu",
             (unsigned long long)ep_clock_now_ns() / EP_NS_PER_US);
    return send_text(text);
}

bool ep_sd_notify_watchdog(void)
{
    return send_text("WATCHDOG=1");
}

bool ep_sd_notify_extend_timeout(uint64_t us)
{
    char text[TEXT_BYTES];
    snprintf(text, sizeof(text), "EXTEND_TIMEOUT_USEC=%" PRIu64, us);
    return send_text(text);
}

uint64_t ep_sd_watchdog_us(void)
{
    const char *us = getenv("WATCHDOG_USEC");
    const char *pid = getenv("WATCHDOG_PID");
    if (us == NULL || (pid != NULL && strtol(pid, NULL, 10) != (long)getpid())) {
        return 0;
    }
    char *end;
    errno = 0;
    unsigned long long value = strtoull(us, &end, 10);
    return errno == 0 && end != us && *end == 0 ? value : 0;
}
