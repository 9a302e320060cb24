/* SPDX-License-Identifier: Apache-2.0 */
/* Messages to the service manager, received by a socket of the test's own. */
#include <criterion/criterion.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "common/sd_notify.h"
#include "support/process.h"

static char dir[EP_TEST_PATH_BYTES];
static int manager = -1;

static void listen_on(const char *name, bool is_abstract)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t bytes = strlen(name);
    memcpy(address.sun_path, name, bytes);
    if (is_abstract) {
        address.sun_path[0] = 0;
    }
    manager = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    cr_assert(manager >= 0);
    cr_assert_eq(bind(manager, (struct sockaddr *)&address,
                      (socklen_t)(offsetof(struct sockaddr_un, sun_path) + bytes)),
                 0);
    cr_assert_eq(setenv("NOTIFY_SOCKET", name, 1), 0);
}

static void setup(void)
{
    cr_assert(ep_test_dir_create(dir));
}

static void teardown(void)
{
    if (manager >= 0) {
        close(manager);
    }
    ep_test_dir_remove(dir);
}

static const char *received(void)
{
    static char text[1024];
    ssize_t n = recv(manager, text, sizeof(text) - 1, MSG_DONTWAIT);
    text[n > 0 ? n : 0] = 0;
    return text;
}

TestSuite(sd_notify, .init = setup, .fini = teardown);

Test(sd_notify, each_message_is_one_datagram)
{
    char path[EP_TEST_PATH_BYTES + 16];
    snprintf(path, sizeof(path), "%s/notify", dir);
    listen_on(path, false);
    cr_assert(ep_sd_notify_ready("58 experts"));
    cr_expect_str_eq(received(), "READY=1\nSTATUS=58 experts");
    cr_assert(ep_sd_notify_status("%d of %d\nREADY=1", 3, 4));
    cr_expect_str_eq(received(), "STATUS=3 of 4 READY=1",
                     "a newline must not begin another assignment");
    cr_assert(ep_sd_notify_stopping("draining"));
    cr_expect_str_eq(received(), "STOPPING=1\nSTATUS=draining");
    cr_assert(ep_sd_notify_watchdog());
    cr_expect_str_eq(received(), "WATCHDOG=1");
    cr_assert(ep_sd_notify_extend_timeout(1500));
    cr_expect_str_eq(received(), "EXTEND_TIMEOUT_USEC=1500");
    cr_assert(ep_sd_notify_reloading());
    unsigned long long us = 0;
    cr_expect_eq(sscanf(received(), "RELOADING=1\nMONOTONIC_USEC=%llu", &us), 1);
    cr_expect_gt(us, 0);
}

Test(sd_notify, abstract_sockets_work)
{
    char name[64];
    snprintf(name, sizeof(name), "@expertd-test-%d", (int)getpid());
    listen_on(name, true);
    cr_assert(ep_sd_notify_watchdog());
    cr_expect_str_eq(received(), "WATCHDOG=1");
}

Test(sd_notify, without_a_manager_nothing_is_sent)
{
    unsetenv("NOTIFY_SOCKET");
    cr_expect_not(ep_sd_notify_ready("x"));
    setenv("NOTIFY_SOCKET", "relative", 1);
    cr_expect_not(ep_sd_notify_ready("x"));
    setenv("NOTIFY_SOCKET", "/nobody/listens/here", 1);
    cr_expect_not(ep_sd_notify_ready("x"));
}

Test(sd_notify, the_watchdog_is_for_the_named_process_only)
{
    char pid[32];
    unsetenv("WATCHDOG_USEC");
    unsetenv("WATCHDOG_PID");
    cr_expect_eq(ep_sd_watchdog_us(), 0);
    setenv("WATCHDOG_USEC", "2000000", 1);
    cr_expect_eq(ep_sd_watchdog_us(), 2000000);
    snprintf(pid, sizeof(pid), "%d", (int)getpid() + 1);
    setenv("WATCHDOG_PID", pid, 1);
    cr_expect_eq(ep_sd_watchdog_us(), 0);
    snprintf(pid, sizeof(pid), "%d", (int)getpid());
    setenv("WATCHDOG_PID", pid, 1);
    cr_expect_eq(ep_sd_watchdog_us(), 2000000);
    setenv("WATCHDOG_USEC", "2s", 1);
    cr_expect_eq(ep_sd_watchdog_us(), 0);
}
