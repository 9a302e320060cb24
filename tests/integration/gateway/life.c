/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What happens around a gateway call: before the first table, beyond the limit, cancelled, out of
 * time, with slots that nobody can compute, while the coordinator stops, and with the gateway off.
 * The nodes are stopped (SIGSTOP) while a call must stay in flight.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "gateway_fixture.h"

enum { TOKENS = 4, SECTION = TOKENS * GATEWAY_HIDDEN * 2 + 64 + TOKENS * GATEWAY_TOP_K * 4 };

#define IN_FLIGHT "expertd_gateway_calls_in_flight"

/* All ids differ, so that every node is asked. */
static uint8_t section[SECTION];

static void request_init(Expertd__V1__GatewayForwardRequest *header)
{
    expertd__v1__gateway_forward_request__init(header);
    header->model = (char *)(uintptr_t) "mixtral";
    header->tokens = TOKENS;
    header->hidden = GATEWAY_HIDDEN;
    header->top_k = GATEWAY_TOP_K;
    header->x_dtype = EP_DTYPE_BF16;
    header->out_dtype = EP_DTYPE_BF16;
    header->ids_dtype = EP_DTYPE_I32;
    header->scales_dtype = EP_DTYPE_F32;
    int32_t *ids = (int32_t *)(section + TOKENS * GATEWAY_HIDDEN * 2);
    for (int32_t i = 0; i < TOKENS * GATEWAY_TOP_K; i++) {
        ids[i] = i;
    }
}

static void signal_nodes(gateway_fixture *f, int number)
{
    for (uint32_t i = 0; i < GATEWAY_NODES; i++) {
        EP_TEST_CHECK(ep_test_process_signal(&f->cluster.nodes[i], number), "signal %d", number);
    }
}

static void limit_and_cancel(gateway_fixture *f)
{
    Expertd__V1__GatewayForwardRequest header;
    gateway_raw *first = gateway_raw_open(f);
    gateway_raw *second = gateway_raw_open(f);
    ep_error error;
    request_init(&header);
    signal_nodes(f, SIGSTOP);
    gateway_raw_begin(first, &header, section, SECTION, EP_TEST_PATIENCE_MS);
    gateway_wait_metric(f, IN_FLIGHT, 1);
    gateway_raw_begin(second, &header, section, SECTION, EP_TEST_PATIENCE_MS);
    EP_TEST_CHECK(
        gateway_raw_wait(second, &error, NULL) == EP_ERR_RESOURCE_EXHAUSTED &&
            strstr(error.text, "gateway_calls_max allows 1") != NULL && error.retry_after_us > 0,
        "beyond the limit: %s (%llu us)", error.text, (unsigned long long)error.retry_after_us);
    gateway_raw_cancel(first);
    EP_TEST_CHECK(gateway_raw_wait(first, &error, NULL) == EP_ERR_CANCELLED, "cancelled: %s",
                  error.text);
    gateway_wait_metric(f, IN_FLIGHT, 0);
    gateway_wait_metric(f, "expertd_gateway_requests_total{result=\"CANCELLED\"}", 1);
    /* The caller goes away. */
    gateway_raw_begin(first, &header, section, SECTION, EP_TEST_PATIENCE_MS);
    gateway_wait_metric(f, IN_FLIGHT, 1);
    gateway_raw_close(first);
    gateway_wait_metric(f, IN_FLIGHT, 0);
    /* Out of time: the reason comes from the gateway, which knows the node. */
    gateway_raw_begin(second, &header, section, SECTION, 400);
    ep_err err = gateway_raw_wait(second, &error, NULL);
    EP_TEST_CHECK(err == EP_ERR_DEADLINE_EXCEEDED || err == EP_ERR_UNAVAILABLE,
                  "out of time: %s: %s", ep_err_name(err), error.text);
    gateway_wait_metric(f, IN_FLIGHT, 0);
    signal_nodes(f, SIGCONT);
    gateway_raw_begin(second, &header, section, SECTION, EP_TEST_PATIENCE_MS);
    EP_TEST_CHECK(gateway_raw_wait(second, &error, NULL) == EP_OK, "after all that: %s",
                  error.text);
    gateway_raw_close(second);
}

/*
 * A call whose end is the gateway's answer. That comes shortly before the deadline, so a stall may
 * let the caller's own clock end the call first, which says nothing about the gateway.
 */
static ep_err call_until_answered(gateway_fixture *f, gateway_raw *raw,
                                  const Expertd__V1__GatewayForwardRequest *header,
                                  ep_error *out_error, uint32_t *out_missing)
{
    uint64_t end_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    ep_err err;
    do {
        gateway_wait_metric(f, IN_FLIGHT, 0); /* the call before has left its place */
        gateway_raw_begin(raw, header, section, SECTION, 2000);
        err = gateway_raw_wait(raw, out_error, out_missing);
    } while (err == EP_ERR_DEADLINE_EXCEEDED && ep_clock_now_ns() < end_ns);
    return err;
}

/* An expert that nobody holds any more: named in an error, or counted as missing when the caller
 * allows it. */
static void missing_expert(gateway_fixture *f)
{
    Expertd__V1__GatewayForwardRequest header;
    gateway_raw *raw = gateway_raw_open(f);
    ep_error error;
    uint32_t missing = 0;
    request_init(&header);
    EP_TEST_CHECK(ep_test_process_stop(&f->cluster.nodes[2], SIGKILL, EP_TEST_PATIENCE_MS) ==
                      128 + SIGKILL,
                  "the node lives");
    ep_err err = call_until_answered(f, raw, &header, &error, NULL);
    EP_TEST_CHECK(err == EP_ERR_UNAVAILABLE && error.layer == 0 && error.expert >= 0, "%s: %s",
                  ep_err_name(err), error.text);
    header.allow_missing = true;
    err = call_until_answered(f, raw, &header, &error, &missing);
    EP_TEST_CHECK(err == EP_OK && missing > 0 && missing < TOKENS * GATEWAY_TOP_K,
                  "%u slots missing: %s", missing, error.text);
    gateway_raw_close(raw);
}

/* A stopping coordinator takes no new calls and ends those it has. */
static void drain(gateway_fixture *f)
{
    Expertd__V1__GatewayForwardRequest header;
    gateway_raw *first = gateway_raw_open(f);
    gateway_raw *second = gateway_raw_open(f);
    ep_error error;
    request_init(&header);
    signal_nodes(f, SIGSTOP);
    gateway_raw_begin(first, &header, section, SECTION, EP_TEST_PATIENCE_MS);
    gateway_wait_metric(f, IN_FLIGHT, 1);
    EP_TEST_CHECK(ep_test_process_signal(&f->cluster.coordinator, SIGTERM), "no coordinator");
    ep_err err;
    do { /* the signal is on its way; meanwhile the limit of one call refuses */
        gateway_raw_begin(second, &header, section, SECTION, EP_TEST_PATIENCE_MS);
        err = gateway_raw_wait(second, &error, NULL);
    } while (err == EP_ERR_RESOURCE_EXHAUSTED);
    EP_TEST_CHECK(err == EP_ERR_DRAINING, "while it drains: %s: %s", ep_err_name(err), error.text);
    signal_nodes(f, SIGCONT);
    EP_TEST_CHECK(gateway_raw_wait(first, &error, NULL) == EP_OK, "the call in flight: %s: %s",
                  ep_err_name(error.code), error.text);
    EP_TEST_CHECK(ep_test_process_wait(&f->cluster.coordinator, EP_TEST_PATIENCE_MS) == 0,
                  "the coordinator did not end well");
    gateway_raw_close(first);
    gateway_raw_close(second);
}

static void switched_off(void)
{
    static const char *const args[] = {"--gateway=false", NULL};
    static gateway_fixture f;
    Expertd__V1__GatewayForwardRequest header;
    ep_error error;
    gateway_fixture_init(&f, 1, args);
    gateway_raw *raw = gateway_raw_open(&f);
    request_init(&header);
    gateway_raw_begin(raw, &header, section, SECTION, EP_TEST_PATIENCE_MS);
    EP_TEST_CHECK(gateway_raw_wait(raw, &error, NULL) == EP_ERR_UNIMPLEMENTED &&
                      strstr(error.text, "gateway: true") != NULL,
                  "off: %s", error.text);
    gateway_raw_close(raw);
    gateway_fixture_fini(&f);
}

/* Asks until the coordinator's readiness is so, and its text holds the part. */
static void wait_ready(gateway_fixture *f, int code, const char *part)
{
    const uint64_t end_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    char *body = NULL;
    while (ep_test_http_get(f->cluster.coordinator.probe_url, "/readyz?verbose", &body) != code ||
           strstr(body, part) == NULL) {
        EP_TEST_CHECK(ep_clock_now_ns() < end_ns, "not %d with '%s': %s", code, part, body);
        free(body);
        body = NULL;
    }
    free(body);
    EP_TEST_CHECK(ep_test_http_get(f->cluster.coordinator.probe_url, "/livez", NULL) == 200,
                  "it lives without nodes");
    EP_TEST_CHECK(ep_test_http_get(f->cluster.coordinator.probe_url, "/startupz", NULL) == 200,
                  "it has started without nodes");
}

/* Ready is a coordinator that has something to serve. */
static void readiness(void)
{
    static const char *const args[] = {"--heartbeat-dead-count=2", "--restore-ms=100000", NULL};
    static gateway_fixture f;
    gateway_fixture_init(&f, 1, args);
    gateway_wait_table(&f);
    wait_ready(&f, 200, "[+] service: experts are served");
    for (uint32_t i = 0; i < GATEWAY_NODES; i++) {
        EP_TEST_CHECK(ep_test_process_stop(&f.cluster.nodes[i], SIGKILL, EP_TEST_PATIENCE_MS) ==
                          128 + SIGKILL,
                      "the node lives");
    }
    wait_ready(&f, 503, "[-] service: no expert is served: 0 nodes take part, min_nodes is 3");
    EP_TEST_CHECK(ep_test_process_stop(&f.cluster.coordinator, SIGTERM, EP_TEST_PATIENCE_MS) == 0,
                  "the coordinator did not end well");
    ep_test_cluster_spawn_coordinator(&f.cluster);
    EP_TEST_CHECK(ep_test_process_wait_ports(&f.cluster.coordinator, EP_TEST_PATIENCE_MS),
                  "no coordinator");
    wait_ready(&f, 503,
               "[-] service: there is no routing table yet: 0 of min_nodes 3 nodes are here");
    gateway_fixture_fini(&f);
}

int main(void)
{
    static const char *const args[] = {"--gateway-calls-max=1", "--drain-ms=60000", NULL};
    static gateway_fixture f;
    gateway_fixture_init(&f, 1, args);
    gateway_wait_table(&f);
    limit_and_cancel(&f);
    drain(&f);
    gateway_fixture_fini(&f);
    gateway_fixture_init(&f, 1, NULL);
    gateway_wait_table(&f);
    missing_expert(&f);
    gateway_fixture_fini(&f);
    switched_off();
    readiness();
    return 0;
}
