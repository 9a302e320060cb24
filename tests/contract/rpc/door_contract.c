/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the door promises to callers in any language, and that no caller can harm another. After
 * every attack the same door must answer an honest call. A plain program, so that it runs under
 * every sanitizer.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "door_client.h"
#include "rpc/rpc_door.h"
#include "rpc_fixture.h"
#include "support/process.h"

#define CONTEXTS 64
#define UNREAD_REQUESTS 128 /* of 512 KiB: far more than queues and socket buffers hold */
#define TOKEN "a token of sixteen"
#define NODE_TOKEN "a token of nodes...."
#define OPERATOR_TOKEN "a token of operators"

typedef struct door_test {
    fixture f;
    char url[EP_ADDRESS_BYTES];
} door_test;

static void plain(ep_rpc_server_config *config)
{
    config->common.payload_crc = true;
}

static ep_rpc_credentials *credentials;

static void with_token(ep_rpc_server_config *config)
{
    plain(config);
    ep_rpc_tokens tokens = {.of = {{TOKEN}, {NODE_TOKEN}, {OPERATOR_TOKEN}}};
    CHECK(ep_rpc_credentials_create(&tokens, &credentials, NULL) == EP_OK, "no memory");
    config->common.credentials = credentials;
}

static void small_frames(ep_rpc_server_config *config)
{
    plain(config);
    config->common.limits.frame_bytes_max = 1 << 20;
}

static void begin(door_test *t, void (*server)(ep_rpc_server_config *config))
{
    static unsigned number;
    char url[64];
    ep_error error;
    const ep_lane_address address = {.url = "tcp://127.0.0.1:0"};
    snprintf(url, sizeof(url), "loopback://door-%u", number++);
    fixture_init(&t->f, &(fixture_options){.url = url, .server = server, .no_channel = true});
    CHECK(ep_rpc_server_open_door(t->f.server, &address, CONTEXTS, &error) == EP_OK, "%s",
          error.text);
    ep_rpc_server_door_url(t->f.server, t->url, sizeof(t->url));
}

static void end(door_test *t)
{
    ep_rpc_server_stats stats;
    uint64_t until_ns = in_ms(SECONDS * 1000);
    do { /* a call leaves just after its reply */
        usleep(1000);
        ep_rpc_server_read_stats(t->f.server, &stats);
    } while (stats.calls_in_flight > 0 && ep_clock_now_ns() < until_ns);
    CHECK(stats.calls_in_flight == 0, "%llu calls are left",
          (unsigned long long)stats.calls_in_flight);
    fixture_fini(&t->f);
}

/* Asks with nng's client; takes the request. */
static bytes ask(door_test *t, bytes taken_request, reply_view *out_view)
{
    bytes reply = nng_ask(t->url, taken_request);
    reply_read(t->f.pool, reply, out_view);
    free(taken_request.data);
    return reply;
}

static void expect_status(door_test *t, bytes taken_request, ep_err code, const char *words)
{
    reply_view view;
    bytes reply = ask(t, taken_request, &view);
    CHECK(view.status.code == code, "%d: %s", view.status.code, view.status.text);
    CHECK(strstr(view.status.text, words) != NULL, "'%s' lacks '%s'", view.status.text, words);
    free(reply.data);
}

static bytes echo(door_test *t, size_t tensor_bytes, const char *token)
{
    return forward_make(
        t->f.pool, "echo",
        &(request_options){
            .tensor_bytes = tensor_bytes, .fill = 0x5a, .token = token, .call_id = 77});
}

static void expect_echo(door_test *t, size_t tensor_bytes, const char *token)
{
    reply_view view;
    bytes reply = ask(t, echo(t, tensor_bytes, token), &view);
    CHECK(view.status.code == EP_OK, "%s", view.status.text);
    CHECK(view.frame.call_id == 77 && view.frame.tensor_bytes == tensor_bytes, "%llu tensor bytes",
          (unsigned long long)view.frame.tensor_bytes);
    for (size_t i = 0; i < tensor_bytes; i++) {
        CHECK(view.tensors[i] == 0x5a, "byte %zu", i);
    }
    free(reply.data);
}

static bytes text(const char *words)
{
    return (bytes){.data = (uint8_t *)strdup(words), .count = strlen(words)};
}

static uint16_t method(const char *service, const char *name)
{
    return ep_rpc_method_by_name(service, name)->id;
}

/* ---- answers ---- */

static void answers_and_refuses(void)
{
    Expertd__V1__Empty empty = EXPERTD__V1__EMPTY__INIT;
    door_test t;
    begin(&t, plain);
    expect_echo(&t, 0, NULL);
    expect_echo(&t, 100000, NULL);
    expect_echo(&t, 0, "a token where none is needed");
    CHECK(t.f.seen_peer[0] == 0, "peer '%s'", t.f.seen_peer);
    expect_status(&t, forward_make(t.f.pool, "error", &(request_options){0}), EP_ERR_NOT_OWNER,
                  "expert 9 of layer 4");
    expect_status(&t, forward_make(t.f.pool, "none", &(request_options){0}), EP_ERR_INTERNAL,
                  "gave no reply");
    expect_status(&t, forward_make(t.f.pool, "big", &(request_options){0}), EP_ERR_INVALID_ARGUMENT,
                  "ask for less");
    expect_status(&t, forward_make(t.f.pool, "echo", &(request_options){.deadline_us = EXPIRED}),
                  EP_ERR_DEADLINE_EXCEEDED, "no time left");
    expect_status(&t, request_make(t.f.pool, &empty.base, &(request_options){.method_id = 0x7777}),
                  EP_ERR_UNIMPLEMENTED, "0x7777");
    expect_status(
        &t,
        request_make(t.f.pool, &empty.base,
                     &(request_options){.method_id = method("expertd.v1.NodeInfo", "NodeStatus")}),
        EP_ERR_UNIMPLEMENTED, "not served");
    expect_status(&t,
                  request_make(t.f.pool, &empty.base,
                               &(request_options){.method_id = method("expertd.v1.Coordinator",
                                                                      "WatchPlacement")}),
                  EP_ERR_UNIMPLEMENTED, "streams its replies");
    expect_status(&t,
                  request_make(t.f.pool, &empty.base,
                               &(request_options){
                                   .method_id = method("expertd.v1.Coordinator", "RegisterNode")}),
                  EP_ERR_PERMISSION_DENIED, "needs role node");
    expect_status(&t, forward_make(t.f.pool, "echo", &(request_options){.extra_metadata = 70000}),
                  EP_ERR_RESOURCE_EXHAUSTED, "header_bytes_max");
    ep_rpc_server_set_state(t.f.server, "draining");
    expect_status(&t, echo(&t, 0, NULL), EP_ERR_DRAINING, "takes no new work");
    end(&t);
}

static void token_decides(void)
{
    door_test t;
    begin(&t, with_token);
    expect_status(&t, echo(&t, 0, NULL), EP_ERR_UNAUTHENTICATED, "missing");
    expect_status(&t, echo(&t, 0, "a token of fifteen"), EP_ERR_UNAUTHENTICATED, "wrong");
    expect_status(&t, echo(&t, 0, TOKEN "x"), EP_ERR_UNAUTHENTICATED, "wrong");
    expect_echo(&t, 64, TOKEN);
    /* Whoever has a better token is still a client here. */
    bytes request = request_make(
        t.f.pool, &(Expertd__V1__Empty)EXPERTD__V1__EMPTY__INIT.base,
        &(request_options){.method_id = method("expertd.v1.Coordinator", "RegisterNode"),
                           .token = NODE_TOKEN});
    expect_status(&t, request, EP_ERR_PERMISSION_DENIED, "needs role node");
    request = request_make(
        t.f.pool, &(Expertd__V1__Empty)EXPERTD__V1__EMPTY__INIT.base,
        &(request_options){.method_id = method("expertd.v1.Admin", "Drain"), .token = TOKEN});
    expect_status(&t, request, EP_ERR_PERMISSION_DENIED, "needs role operator");
    ep_rpc_door_stats stats;
    ep_rpc_server_read_door_stats(t.f.server, &stats);
    CHECK(stats.refused_total[EP_DOOR_TOKEN] == 3 && stats.requests_total == 6, "%llu",
          (unsigned long long)stats.requests_total);
    end(&t);
    ep_rpc_credentials_destroy(credentials);
}

/* Every method with every token: a good one makes a client of its owner, never more. */
static void role_matrix(void)
{
    static const char *const tokens[] = {NULL, "a token of nobody...", TOKEN, NODE_TOKEN,
                                         OPERATOR_TOKEN};
    Expertd__V1__Empty empty = EXPERTD__V1__EMPTY__INIT;
    size_t count;
    const ep_rpc_method *methods = ep_rpc_methods(&count);
    door_test t;
    begin(&t, with_token);
    for (size_t m = 0; m < count; m++) {
        for (size_t i = 0; i < EP_ARRAY_COUNT(tokens); i++) {
            const request_options options = {.method_id = methods[m].id, .token = tokens[i]};
            reply_view view;
            bytes reply = ask(&t, request_make(t.f.pool, &empty.base, &options), &view);
            ep_err code = view.status.code;
            bool right = i < 2                               ? code == EP_ERR_UNAUTHENTICATED
                         : methods[m].role != EP_ROLE_CLIENT ? code == EP_ERR_PERMISSION_DENIED
                         : methods[m].stream == EP_RPC_SERVER_STREAM
                             ? code == EP_ERR_UNIMPLEMENTED
                             : code != EP_ERR_UNAUTHENTICATED && code != EP_ERR_PERMISSION_DENIED;
            CHECK(right, "%s/%s with token %zu: %s: %s", methods[m].service->name,
                  methods[m].method->name, i, ep_err_name(code), view.status.text);
            free(reply.data);
        }
    }
    expect_echo(&t, 64, OPERATOR_TOKEN);
    end(&t);
    ep_rpc_credentials_destroy(credentials);
}

static void broken_frames_get_words(void)
{
    door_test t;
    bytes request;
    begin(&t, plain);
    expect_status(&t, text("hello"), EP_ERR_PROTOCOL, "offset 0 has 0x68, allowed is 0x45");
    expect_status(&t, text(""), EP_ERR_PROTOCOL, "ends at offset 0");
    expect_status(&t, text("EPD1 and no more"), EP_ERR_PROTOCOL,
                  "ends at offset 16, allowed is 64 or more");
    expect_status(&t, text("EPD2"), EP_ERR_PROTOCOL, "offset 3 has 0x32");
    request = echo(&t, 64, NULL);
    request.data[30] ^= 1;
    expect_status(&t, request, EP_ERR_PROTOCOL, "CRC32C");
    request = echo(&t, 64, NULL);
    request.data[request.count - 1] ^= 1;
    expect_status(&t, request, EP_ERR_DATA_LOSS, "payload");
    request = echo(&t, 64, NULL);
    request.count--;
    expect_status(&t, request, EP_ERR_PROTOCOL, "offset 40");
    request = echo(&t, 64, NULL);
    ep_frame_encode(&(ep_frame){.kind = EP_FRAME_PING, .tensor_offset = 64}, request.data);
    expect_status(&t, request, EP_ERR_PROTOCOL, "ping frame");
    request = request_make(t.f.pool, &(Expertd__V1__Empty)EXPERTD__V1__EMPTY__INIT.base,
                           &(request_options){.method_id = 0});
    expect_status(&t, request, EP_ERR_PROTOCOL, "no Hello");
    expect_echo(&t, 64, NULL);
    end(&t);
}

/* A server without payload CRC refuses one, rather than trust what nobody checks. */
static void crc_follows_the_server(void)
{
    door_test t;
    begin(&t, NULL);
    bytes request = echo(&t, 64, NULL);
    bytes reply = nng_ask(t.url, request);
    ep_frame frame;
    CHECK(ep_frame_decode(reply.data, EP_FRAME_BYTES_CEILING, EP_FRAME_HEADER_BYTES_CEILING, &frame,
                          NULL, NULL) == EP_OK,
          "no frame");
    CHECK(frame.payload_crc == 0 && frame.status == ep_err_grpc_code(EP_ERR_PROTOCOL), "status %u",
          frame.status);
    free(request.data);
    free(reply.data);
    end(&t);
}

/* ---- attacks on the SP layer ---- */

static void lengths_do_no_harm(void)
{
    door_test t;
    begin(&t, small_frames);
    for (uint64_t k = 1; k <= 80; k++) {
        int fd = sp_connect(t.url, SP_PROTOCOL_REQ);
        sp_send_length(fd, UINT64_MAX - k + 1);
        sp_wait_closed(fd);
    }
    int fd = sp_connect(t.url, SP_PROTOCOL_REQ);
    sp_send_length(fd, (1 << 20) + 1000);
    sp_wait_closed(fd);
    expect_echo(&t, (1 << 20) - 4096, NULL);
    /* A frame a little above the limit is still read, and told so. */
    expect_status(
        &t, forward_make(t.f.pool, "echo", &(request_options){.tensor_bytes = (1 << 20) - 90}),
        EP_ERR_RESOURCE_EXHAUSTED, "frame_bytes_max");
    end(&t);
}

static void strangers_do_no_harm(void)
{
    static const char http[] = "GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n";
    door_test t;
    begin(&t, plain);
    int fd = ep_test_tcp_connect(t.url);
    CHECK(fd >= 0, "no connection");
    sp_send_raw(fd, http, strlen(http));
    sp_wait_closed(fd);
    fd = sp_connect(t.url, 0x10); /* PAIR */
    if (fd >= 0) {
        sp_wait_closed(fd);
    }
    fd = sp_connect(t.url, SP_PROTOCOL_REQ);
    sp_send_length(fd, 1000); /* and 10 bytes of it */
    sp_send_raw(fd, http, 10);
    close(fd);
    fd = sp_connect(t.url, SP_PROTOCOL_REQ);
    sp_send_length(fd, 2); /* less than a request id */
    sp_send_raw(fd, http, 2);
    sp_wait_closed(fd);
    expect_echo(&t, 64, NULL);
    end(&t);
}

/* ---- callers that go ---- */

static void masses_of_abandoned_requests(void)
{
    door_test t;
    begin(&t, plain);
    bytes request = echo(&t, 4096, NULL);
    for (int round = 0; round < 100; round++) {
        int fd = sp_connect(t.url, SP_PROTOCOL_REQ);
        for (uint32_t i = 0; i < 20; i++) {
            sp_send(fd, i, request);
        }
        close(fd);
    }
    free(request.data);
    expect_echo(&t, 64, NULL);
    fixture_wait(&t.f, &t.f.forwards, 1);
    ep_rpc_door_stats stats;
    do { /* the last of them may still be in work */
        ep_rpc_server_read_door_stats(t.f.server, &stats);
        usleep(1000);
    } while (stats.requests_in_flight > 0 || stats.connections > 1);
    end(&t);
}

static void a_gone_caller_cancels(void)
{
    door_test t;
    begin(&t, plain);
    bytes request = forward_make(t.f.pool, "hold", &(request_options){0});
    for (uint32_t i = 1; i <= 2 * CONTEXTS; i++) { /* more than there are contexts: none is lost */
        int fd = sp_connect(t.url, SP_PROTOCOL_REQ);
        sp_send(fd, i, request);
        fixture_wait(&t.f, &t.f.forwards, i);
        close(fd);
        fixture_wait(&t.f, &t.f.cancels, i);
    }
    free(request.data);
    expect_echo(&t, 64, NULL);
    end(&t);
}

static void a_deadline_is_told(void)
{
    door_test t;
    begin(&t, plain);
    expect_status(&t, forward_make(t.f.pool, "hold", &(request_options){.deadline_us = 20000}),
                  EP_ERR_DEADLINE_EXCEEDED, "before the deadline");
    expect_echo(&t, 64, NULL);
    end(&t);
}

/* ---- slow handlers ---- */

static void slow_calls_fill_the_contexts(void)
{
    door_test t;
    int fds[CONTEXTS];
    reply_view view;
    begin(&t, plain);
    bytes slow = forward_make(t.f.pool, "hold", &(request_options){0});
    bytes quick = echo(&t, 64, NULL);
    for (uint32_t i = 0; i < CONTEXTS - 1; i++) {
        fds[i] = sp_connect(t.url, SP_PROTOCOL_REQ);
        sp_send(fds[i], i, slow);
    }
    fixture_wait(&t.f, &t.f.forwards, CONTEXTS - 1);
    expect_echo(&t, 64, NULL); /* the last context serves everybody else */
    fds[CONTEXTS - 1] = sp_connect(t.url, SP_PROTOCOL_REQ);
    sp_send(fds[CONTEXTS - 1], CONTEXTS - 1, slow);
    fixture_wait(&t.f, &t.f.forwards, CONTEXTS + 1);
    /* a handler is counted a moment before its call is held */
    fixture_wait(&t.f, &t.f.held_count, CONTEXTS);
    int waiting = sp_connect(t.url, SP_PROTOCOL_REQ);
    sp_send(waiting, 9999, quick);
    ep_rpc_door_stats stats;
    ep_rpc_server_read_door_stats(t.f.server, &stats);
    CHECK(stats.requests_in_flight == CONTEXTS, "%llu",
          (unsigned long long)stats.requests_in_flight);
    CHECK(fixture_release(&t.f, EP_ERR_UNAVAILABLE) == CONTEXTS, "held");
    uint32_t id;
    bytes reply = sp_receive(waiting, &id);
    reply_read(t.f.pool, reply, &view);
    CHECK(id == 9999 && view.status.code == EP_OK, "%s", view.status.text);
    free(reply.data);
    close(waiting);
    for (uint32_t i = 0; i < CONTEXTS; i++) {
        reply = sp_receive(fds[i], &id);
        reply_read(t.f.pool, reply, &view);
        CHECK(id == i && view.status.code == EP_ERR_UNAVAILABLE, "%u %s", id, view.status.text);
        free(reply.data);
        close(fds[i]);
    }
    free(slow.data);
    free(quick.data);
    end(&t);
}

/* More requests than may wait: told at once and when to come again, while those before them are
 * served. */
static void overload_is_told(void)
{
    door_test t;
    uint32_t id;
    reply_view view;
    ep_rpc_door_stats stats;
    bool seen[2 * CONTEXTS] = {false};
    begin(&t, plain);
    bytes slow = forward_make(t.f.pool, "hold", &(request_options){0});
    bytes quick = echo(&t, 64, NULL);
    int fd = sp_connect(t.url, SP_PROTOCOL_REQ);
    for (uint32_t i = 0; i < CONTEXTS; i++) {
        sp_send(fd, i, slow);
    }
    fixture_wait(&t.f, &t.f.forwards, CONTEXTS);
    for (uint32_t i = CONTEXTS; i < 2 * CONTEXTS; i++) { /* they wait */
        sp_send(fd, i, quick);
    }
    sp_send(fd, 9999, quick);
    bytes reply = sp_receive(fd, &id);
    reply_read(t.f.pool, reply, &view);
    CHECK(id == 9999 && view.status.code == EP_ERR_RESOURCE_EXHAUSTED, "%u: %s", id,
          view.status.text);
    CHECK(view.status.retry_after_us > 0 && strstr(view.status.text, "door_contexts") != NULL, "%s",
          view.status.text);
    CHECK(view.frame.call_id == 77, "call %llu", (unsigned long long)view.frame.call_id);
    free(reply.data);
    ep_rpc_server_read_door_stats(t.f.server, &stats);
    CHECK(stats.refused_total[EP_DOOR_OVERLOAD] == 1, "%llu",
          (unsigned long long)stats.refused_total[EP_DOOR_OVERLOAD]);
    CHECK(fixture_release(&t.f, EP_ERR_UNAVAILABLE) == CONTEXTS, "held");
    for (uint32_t i = 0; i < 2 * CONTEXTS; i++) {
        reply = sp_receive(fd, &id);
        reply_read(t.f.pool, reply, &view);
        CHECK(id < 2 * CONTEXTS && !seen[id], "reply %u", id);
        CHECK(view.status.code == (id < CONTEXTS ? EP_ERR_UNAVAILABLE : EP_OK), "%u: %s", id,
              view.status.text);
        seen[id] = true;
        free(reply.data);
    }
    close(fd);
    free(slow.data);
    free(quick.data);
    end(&t);
}

/* A caller that never reads loses its connection once its queue is full; others are answered all
 * the time. */
static void a_caller_that_never_reads(void)
{
    door_test t;
    ep_rpc_door_stats stats;
    begin(&t, small_frames);
    bytes request = echo(&t, 512 << 10, NULL);
    int fd = sp_connect(t.url, SP_PROTOCOL_REQ);
    for (uint32_t i = 0; i < UNREAD_REQUESTS; i++) {
        sp_send(fd, i, request);
    }
    expect_echo(&t, 64, NULL);
    do { /* its replies are dropped with the connection */
        usleep(1000);
        ep_rpc_server_read_door_stats(t.f.server, &stats);
    } while (stats.replies_dropped == 0 || stats.connections > 1);
    close(fd);
    free(request.data);
    expect_echo(&t, 64, NULL);
    end(&t);
}

/* A server that ends answers what is in work. */
static void an_end_answers(void)
{
    door_test t;
    reply_view view;
    begin(&t, plain);
    bytes slow = forward_make(t.f.pool, "hold", &(request_options){0});
    int fd = sp_connect(t.url, SP_PROTOCOL_REQ);
    sp_send(fd, 1, slow);
    fixture_wait(&t.f, &t.f.forwards, 1);
    fixture_server_stop(&t.f);
    bytes reply = sp_receive(fd, NULL);
    reply_read(t.f.pool, reply, &view);
    CHECK(view.status.code == EP_ERR_CANCELLED, "%s", view.status.text);
    free(reply.data);
    free(slow.data);
    close(fd);
    fixture_fini(&t.f);
}

/* Arguments: names of cases; none: all. */
int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {
        {"answers_and_refuses", answers_and_refuses},
        {"token_decides", token_decides},
        {"role_matrix", role_matrix},
        {"broken_frames_get_words", broken_frames_get_words},
        {"crc_follows_the_server", crc_follows_the_server},
        {"lengths_do_no_harm", lengths_do_no_harm},
        {"strangers_do_no_harm", strangers_do_no_harm},
        {"masses_of_abandoned_requests", masses_of_abandoned_requests},
        {"a_gone_caller_cancels", a_gone_caller_cancels},
        {"a_deadline_is_told", a_deadline_is_told},
        {"slow_calls_fill_the_contexts", slow_calls_fill_the_contexts},
        {"overload_is_told", overload_is_told},
        {"a_caller_that_never_reads", a_caller_that_never_reads},
        {"an_end_answers", an_end_answers},
    };
    for (size_t i = 0; i < EP_ARRAY_COUNT(cases); i++) {
        bool wanted = argc == 1;
        for (int a = 1; a < argc; a++) {
            wanted = wanted || strcmp(argv[a], cases[i].name) == 0;
        }
        if (wanted) {
            fprintf(stderr, "%s\n", cases[i].name);
            cases[i].run();
        }
    }
    fflush(NULL);
    ep_transport_fini();
    return 0;
}
