/* SPDX-License-Identifier: Apache-2.0 */
/* Probe paths, their codes and bodies, over a real socket. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/probes.h"
#include "support/expect.h"
#include "support/process.h"

static bool is_ready;
static ep_metrics *metrics;
static ep_timer_service *timers;
static ep_probes *probes;
static char url[128];

static size_t checks(void *arg, ep_probe_kind kind, ep_probe_check *out)
{
    (void)arg;
    out[0] = (ep_probe_check){.name = "loop", .ok = true, .text = "turns"};
    out[1] = (ep_probe_check){
        .name = "state", .ok = kind == EP_PROBE_LIVE || is_ready, .text = "loading"};
    return 2;
}

static int released;

static void release(void *arg)
{
    released++;
    free(arg);
}

/* Says what it was asked. */
static bool page(void *arg, const char *path, const ep_probe_query *query, ep_probe_page *out_page)
{
    const char *a = ep_probe_query_value(query, "a");
    char *text = NULL;
    (void)arg;
    if (strcmp(path, "/mirror") != 0 ||
        asprintf(&text, "a is %s", a != NULL ? a : "not there") < 0) {
        return false;
    }
    *out_page = (ep_probe_page){.status = 200,
                                .type = "text/plain",
                                .policy = "default-src 'none'",
                                .body = text,
                                .bytes = strlen(text),
                                .release = release,
                                .release_arg = text};
    return true;
}

static void start_with_page(void)
{
    ep_error e;
    const ep_probes_config config = {.address = "127.0.0.1:0",
                                     .checks = checks,
                                     .page = page,
                                     .front = "mirror",
                                     .rpc_url = "tcp://c:1",
                                     .admin_url = "",
                                     .metrics = metrics,
                                     .timers = timers};
    ep_probes_stop(probes);
    ASSERT_OK(ep_probes_start(&config, &probes, &e), e);
    ep_probes_url(probes, url, sizeof(url));
}

/* All that comes back, head and body. */
static void send_text(const char *text, char *out_answer, size_t bytes)
{
    size_t used = 0;
    ssize_t got = 1;
    int fd = ep_test_tcp_connect(url);
    cr_assert(fd >= 0);
    send(fd, text, strlen(text), MSG_NOSIGNAL);
    while (got > 0 && used + 1 < bytes) {
        got = recv(fd, out_answer + used, bytes - used - 1, 0);
        used += got > 0 ? (size_t)got : 0;
    }
    out_answer[used] = 0;
    close(fd);
}

static void setup(void)
{
    ep_error e;
    ep_probes_config config = {.address = "127.0.0.1:0",
                               .checks = checks,
                               .node = "a",
                               .rpc_url = "tcp://127.0.0.1:7420",
                               .admin_url = ""};
    cr_assert_eq(ep_metrics_create(&metrics), EP_OK);
    cr_assert_eq(ep_timer_service_create("timers", &timers), EP_OK);
    config.metrics = metrics;
    config.timers = timers;
    ASSERT_OK(ep_probes_start(&config, &probes, &e), e);
    ep_probes_url(probes, url, sizeof(url));
}

static void teardown(void)
{
    ep_probes_stop(probes);
    ep_timer_service_destroy(timers);
    ep_metrics_destroy(metrics);
}

static void expect(const char *path, int status, const char *body)
{
    char *got;
    cr_expect_eq(ep_test_http_get(url, path, &got), status, "%s", path);
    cr_expect_str_eq(got, body, "%s", path);
    free(got);
}

TestSuite(probes, .init = setup, .fini = teardown);

Test(probes, codes_and_bodies_follow_the_checks)
{
    expect("/livez", 200, "ok\n");
    expect("/readyz", 503, "[-] state: loading\nnot ok\n");
    expect("/health", 503, "[-] state: loading\nnot ok\n");
    expect("/startupz", 503, "[-] state: loading\nnot ok\n");
    expect("/v2/health/live", 200, "");
    expect("/v2/health/ready", 503, "");
    is_ready = true;
    expect("/readyz", 200, "ok\n");
    expect("/readyz?verbose", 200, "[+] loop: turns\n[+] state: loading\nok\n");
    expect("/v2/health/ready", 200, "");
}

Test(probes, unknown_paths_are_404_and_metrics_are_text)
{
    char *body;
    cr_expect_eq(ep_test_http_get(url, "/secret", NULL), 404);
    ep_counter_add(ep_metrics_counter(metrics, "expertd_q_total", "Q", NULL, 0), 9);
    cr_expect_eq(ep_test_http_get(url, "/metrics", &body), 200);
    cr_expect(strstr(body, "expertd_q_total 9\n") != NULL, "%s", body);
    free(body);
}

Test(probes, other_methods_and_garbage_are_refused_and_the_server_goes_on)
{
    static const char *const rubbish[] = {
        "POST /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc", "\x01\x02\x03\r\n\r\n",
        "GET\r\n\r\n", "EPD1\x01\x01"};
    for (size_t i = 0; i < sizeof(rubbish) / sizeof(rubbish[0]); i++) {
        char answer[64] = "";
        int fd = ep_test_tcp_connect(url);
        cr_assert(fd >= 0);
        send(fd, rubbish[i], strlen(rubbish[i]), MSG_NOSIGNAL);
        shutdown(fd, SHUT_WR);
        recv(fd, answer, sizeof(answer) - 1, 0);
        cr_expect(strstr(answer, " 200 ") == NULL, "case %zu: %s", i, answer);
        close(fd);
    }
    expect("/livez", 200, "ok\n");
}

Test(probes, a_page_gets_the_query_and_its_body_is_released)
{
    start_with_page();
    expect("/mirror", 200, "a is not there");
    expect("/mirror?a", 200, "a is ");
    expect("/mirror?b=1&a=x%20%3Cy%3E&a=2", 200, "a is x <y>");
    expect("/livez", 200, "ok\n");
    cr_expect_eq(ep_test_http_get(url, "/mirrors", NULL), 404);
    ep_probes_stop(probes);
    probes = NULL;
    cr_expect_eq(released, 3);
}

/* rpc_look.c reads the first words of the body whatever the status. */
Test(probes, the_root_leads_to_the_page_and_says_what_the_port_is)
{
    char answer[2048];
    cr_expect_eq(ep_test_http_get(url, "/", NULL), 404, "without a page");
    start_with_page();
    send_text("GET / HTTP/1.0\r\n\r\n", answer, sizeof(answer));
    cr_expect(strstr(answer, " 302 ") != NULL && strstr(answer, "\r\nLocation: mirror\r\n") != NULL,
              "%s", answer);
    cr_expect(strstr(answer, "\r\n\r\nexpertd: the coordinator: calls go to tcp://c:1\n") != NULL,
              "%s", answer);
    send_text("HEAD /mirror?a=1 HTTP/1.1\r\nHost: x\r\n\r\n", answer, sizeof(answer));
    cr_expect(strstr(answer, " 200 ") != NULL && strstr(answer, "Content-Length: 6\r\n") != NULL &&
                  strstr(answer, "a is") == NULL,
              "%s", answer);
    cr_expect(strstr(answer, "Content-Security-Policy: default-src 'none'\r\n") != NULL, "%s",
              answer);
}

Test(probes, pages_take_no_other_methods_and_no_huge_query)
{
    static char request[40000];
    char answer[2048];
    start_with_page();
    send_text("POST /mirror HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", answer,
              sizeof(answer));
    cr_expect(strstr(answer, " 405 ") != NULL, "%s", answer);
    memset(request, 'a', sizeof(request) - 1);
    memcpy(request, "GET /mirror?a=", strlen("GET /mirror?a="));
    strcpy(request + sizeof(request) - 32, " HTTP/1.1\r\nHost: x\r\n\r\n");
    send_text(request, answer, sizeof(answer));
    cr_expect(strstr(answer, " 200 ") == NULL, "%s", answer);
    expect("/mirror?a=1", 200, "a is 1");
}

Test(probes, addresses_are_checked)
{
    static const char *const bad[] = {
        "",       "127.0.0.1", "127.0.0.1:", "127.0.0.1:70000", "localhost:1",
        "::1:80", "[::1]",     "1.2.3.4:5x"};
    ep_error e;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        cr_expect_eq(ep_probes_check_address(bad[i], &e), EP_ERR_INVALID_ARGUMENT, "'%s'", bad[i]);
    }
    cr_expect_eq(ep_probes_check_address("[::1]:0", &e), EP_OK);
    cr_expect_eq(ep_probes_check_address("0.0.0.0:7421", &e), EP_OK);
}

Test(probes, a_taken_port_is_reported)
{
    ep_probes *second = NULL;
    ep_error e;
    ep_probes_config config = {
        .address = url + strlen("http://"), .checks = checks, .metrics = metrics, .timers = timers};
    EXPECT_FAILS(ep_probes_start(&config, &second, &e), EP_ERR_UNAVAILABLE, e, config.address);
}
