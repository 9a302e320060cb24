/* SPDX-License-Identifier: Apache-2.0 */
/* Calls to peers that say nothing, and what a user learns when a question fails half way. */
#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/random.h"
#include "cli/control.h"
#include "support/process.h"

#define TIMEOUT_MS 60000

/* ---- a peer that listens and says nothing ---- */

static int listen_silently(char *out_url, size_t bytes)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof(address);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    cr_assert_eq(bind(fd, (struct sockaddr *)&address, length), 0);
    cr_assert_eq(listen(fd, 8), 0);
    cr_assert_eq(getsockname(fd, (struct sockaddr *)&address, &length), 0);
    snprintf(out_url, bytes, "tcp://127.0.0.1:%u", ntohs(address.sin_port));
    return fd;
}

static int accept_one(int listener)
{
    struct pollfd caller = {.fd = listener, .events = POLLIN};
    return poll(&caller, 1, TIMEOUT_MS) == 1 ? accept(listener, NULL, NULL) : -1;
}

static bool has_a_caller(void *arg)
{
    struct pollfd listener = {.fd = *(int *)arg, .events = POLLIN};
    return poll(&listener, 1, 0) == 1;
}

static int callers_of(int listener)
{
    int count = 0;
    for (int fd; (fd = accept(listener, NULL, NULL)) >= 0; count++) {
        close(fd);
    }
    return count;
}

Test(control, whoever_ends_a_wait_gets_no_look_at_the_port)
{
    static ep_cli_connect connect = {.timeout_us = 60000000, .payload_crc = true};
    ep_cli_control *control;
    ep_cli_answer answer;
    ep_error error;
    char url[64];
    const char *const urls[] = {url};
    int listener = listen_silently(url, sizeof(url));
    cr_assert_eq(ep_cli_control_open(&connect, &control, &error), EP_OK, "%s", error.text);
    ep_cli_control_on_wait(control, has_a_caller, &listener, false);
    ep_cli_control_ask(control, urls, 1, "expertd.v1.Coordinator", "ClusterStatus", NULL,
                       connect.timeout_us, &answer);
    cr_assert_null(answer.message);
    cr_assert_eq(answer.error.code, EP_ERR_CANCELLED, "%s", answer.error.text);
    const char *named = strstr(answer.error.text, url);
    cr_assert_not_null(named, "%s", answer.error.text);
    cr_assert_null(strstr(named + 1, url), "the URL is there twice: %s", answer.error.text);
    cr_assert_eq(callers_of(listener), 1, "the port was looked at, which may take seconds");
    ep_cli_control_close(control);
    close(listener);
}

/* Both ports are looked at when the second connection to the second one comes. */
static void *see_both_looks(void *arg)
{
    const int *listeners = arg;
    int calls[2], looks[2];
    for (int i = 0; i < 2; i++) {
        calls[i] = accept_one(listeners[i]);
    }
    for (int i = 0; i < 2; i++) {
        looks[i] = accept_one(listeners[i]);
    }
    struct pollfd first = {.fd = looks[0], .events = POLLRDHUP};
    bool is_open = poll(&first, 1, 0) == 0;
    for (int i = 0; i < 2; i++) {
        close(calls[i]);
        close(looks[i]);
    }
    return is_open ? arg : NULL;
}

Test(control, silent_ports_are_looked_at_all_at_once)
{
    static ep_cli_connect connect = {.payload_crc = true};
    static ep_cli_answer answers[2];
    ep_cli_control *control;
    ep_error error;
    char text[2][64];
    const char *const urls[] = {text[0], text[1]};
    int listeners[2];
    pthread_t thread;
    void *saw_both;
    for (int i = 0; i < 2; i++) {
        listeners[i] = listen_silently(text[i], sizeof(text[i]));
    }
    cr_assert_eq(pthread_create(&thread, NULL, see_both_looks, listeners), 0);
    cr_assert_eq(ep_cli_control_open(&connect, &control, &error), EP_OK, "%s", error.text);
    ep_cli_control_ask(control, urls, 2, "expertd.v1.Coordinator", "ClusterStatus", NULL, 100000,
                       answers);
    pthread_join(thread, &saw_both);
    cr_assert_not_null(saw_both, "the first look was over when the second one began");
    for (int i = 0; i < 2; i++) {
        cr_expect_eq(answers[i].error.code, EP_ERR_UNAVAILABLE, "%s", answers[i].error.text);
        cr_expect_eq(strncmp(answers[i].error.text, urls[i], strlen(urls[i])), 0, "%s",
                     answers[i].error.text);
        close(listeners[i]);
    }
    ep_cli_control_close(control);
}

/* ---- a coordinator that fails after it took a policy ---- */

static void take_then_fail(Expertd__V1__Admin_Service *service,
                           const Expertd__V1__PolicyRequest *request,
                           Expertd__V1__PolicyReply_Closure closure, void *call)
{
    Expertd__V1__PolicyReply reply = EXPERTD__V1__POLICY_REPLY__INIT;
    ep_error error;
    (void)service;
    if (request->n_changes == 0) {
        ep_error_set(&error, EP_ERR_UNAVAILABLE, "another coordinator leads now");
        ep_rpc_call_finish(call, EP_ERR_UNAVAILABLE, &error);
        return;
    }
    reply.revision = 7;
    closure(&reply, call);
    ep_rpc_call_finish(call, EP_OK, NULL);
}

Test(control, a_policy_that_was_taken_is_named_when_the_next_question_fails)
{
    Expertd__V1__Admin_Service service;
    ep_rpc_server_config config = {.common = {.token = "",
                                              .node = "coordinator",
                                              .role = "coordinator",
                                              .incarnation = ep_random_id(),
                                              .payload_crc = true}};
    ep_rpc_server *server;
    ep_error error;
    char dir[EP_TEST_PATH_BYTES], url[256];
    char *text = NULL;
    expertd__v1__admin__init(&service, NULL);
    service.policy = take_then_fail;
    ep_rpc_limits_default(&config.common.limits);
    cr_assert_eq(ep_timer_service_create("fake", &config.common.timers), EP_OK);
    cr_assert_eq(ep_buffer_pool_create(0, 0, &config.common.pool), EP_OK);
    cr_assert_eq(ep_rpc_server_create(&config, &server, &error), EP_OK, "%s", error.text);
    cr_assert_eq(ep_rpc_server_add_service(server, &service.base, &error), EP_OK);
    cr_assert_eq(ep_rpc_server_listen(server, &(ep_lane_address){.url = "tcp://127.0.0.1:0"},
                                      EP_ROLES_ADMIN, &error),
                 EP_OK, "%s", error.text);
    ep_rpc_server_url(server, 0, url, sizeof(url));
    ep_rpc_server_set_state(server, "serving");
    cr_assert(ep_test_dir_create(dir));
    int code = ep_test_process_run_line(dir, EP_EXPERTCTL, NULL, TIMEOUT_MS, &text,
                                        "policy set copies=2 --timeout 60s --admin %s", url);
    cr_expect_eq(code, 3, "%d: %s", code, text);
    cr_expect_not_null(strstr(text, "policy revision 7 is taken, but perhaps not written"), "%s",
                       text);
    cr_expect_not_null(strstr(text, "another coordinator leads now"), "%s", text);
    free(text);
    ep_test_dir_remove(dir);
    ep_rpc_server_destroy(server);
    ep_timer_service_destroy(config.common.timers);
    ep_buffer_pool_destroy(config.common.pool);
}
