/* SPDX-License-Identifier: Apache-2.0 */
/* Connections: Hello and its refusals, loss, ping, goodbye, connecting again, and peers that
 * misbehave towards a client. */
#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "raw_peer.h"
#include "rpc/rpc_look.h"
#include "rpc_fixture.h"
#include "support/expect.h"

#define LANE_TEST(name) RPC_LANE_TEST(rpc_connection, name)

/* ---- Hello at the server ---- */

LANE_TEST(hello_tells_the_host_of_the_peer_unless_it_is_older)
{
    fixture f;
    fixture_init(&f, &(fixture_options){.url = url});
    fixture_wait(&f, &f.states[EP_CHANNEL_READY], 1);
#ifdef EP_WIRE_TEST_OLDER
    cr_assert_str_eq(f.peer_host, "");
#else
    char boot_id[EP_HOST_BYTES]; /* what is told when the configuration names no host */
    ep_host_boot_id(boot_id);
    cr_assert_str_eq(f.peer_host, boot_id);
    cr_assert_eq(strlen(boot_id), 36);
#endif
    fixture_fini(&f);
}

static ep_rpc_credentials *credentials; /* of the test's process; freed with it */

static void with_token(ep_rpc_server_config *config)
{
    ep_rpc_tokens tokens = {.of = {{"s3cret"}, {"s3cret"}, {"s3cret"}}};
    cr_assert_eq(ep_rpc_credentials_create(&tokens, &credentials, NULL), EP_OK);
    config->common.credentials = credentials;
}

static void expect_refusal(const char *url, const Expertd__V1__Hello *hello, uint32_t code,
                           const char *text)
{
    raw_peer p;
    raw_peer_dial(&p, url);
    cr_assert_eq(raw_peer_hello(&p, hello), (int)code, "%s", p.refusal.text);
    cr_assert(strstr(p.refusal.text, text) != NULL, "got: %s", p.refusal.text);
    raw_peer_wait_closed(&p);
    raw_peer_fini(&p);
}

LANE_TEST(each_hello_failure_is_named_and_closes)
{
    fixture f;
    Expertd__V1__Hello hello;
    char *feature[] = {(char *)(uintptr_t) "time-travel"};
    fixture_init(&f, &(fixture_options){.url = url, .server = with_token, .no_channel = true});
    raw_hello_init(&hello);
    expect_refusal(f.url, &hello, 16, "the token is missing");
    hello.token = (char *)(uintptr_t) "s3creT";
    expect_refusal(f.url, &hello, 16, "the token is wrong");
    hello.token = (char *)(uintptr_t) "s3cret-and-more";
    hello.protocol_min = 7; /* the token is looked at first */
    hello.protocol_max = 9;
    expect_refusal(f.url, &hello, 16, "the token is wrong");
    hello.token = (char *)(uintptr_t) "s3cret";
    expect_refusal(f.url, &hello, 12, "versions 7 to 9, this build speaks 1");
    hello.protocol_min = 0;
    hello.protocol_max = 0;
    expect_refusal(f.url, &hello, 12, "versions 0 to 0");
    hello.protocol_max = 9; /* a range that holds ours is fine */
    hello.required_features = feature;
    hello.n_required_features = 1;
    expect_refusal(f.url, &hello, 12, "requires feature \"time-travel\"");
    hello.n_required_features = 0;
    hello.payload_crc = true;
    expect_refusal(f.url, &hello, 9, "payload_crc is on at the peer and off here");
    hello.payload_crc = false;
    hello.role = (char *)(uintptr_t) "king";
    expect_refusal(f.url, &hello, 3, "role is \"king\"");
    hello.role = (char *)(uintptr_t) "operator";
    hello.optional_features = feature; /* unknown optional ones are fine */
    hello.n_optional_features = 1;
    raw_peer p;
    raw_peer_dial(&p, f.url);
    cr_assert_eq(raw_peer_hello(&p, &hello), 0, "%s", p.refusal.text);
    raw_peer_fini(&p);
    ep_rpc_server_stats stats;
    uint64_t until_ns = in_ms(SECONDS * 1000);
    do { /* the server may see the end of the last one a moment after its peer */
        sched_yield();
        ep_rpc_server_read_stats(f.server, &stats);
    } while (stats.connections_refused < 8 && ep_clock_now_ns() < until_ns);
    cr_assert_eq(stats.connections_refused, 8);
    fixture_fini(&f);
}

LANE_TEST(an_unknown_hello_field_is_ignored)
{
    fixture f;
    raw_peer p;
    uint8_t header[] = {0, 0,    0,    0, 0x08, 1,   0x10,
                        1, 0xfa, 0x3f, 3, 'n',  'e', 'w'}; /* min, max, field 1023 */
    ep_frame frame = raw_request(9, 0);
    frame.header_bytes = sizeof(header);
    fixture_init(&f, &(fixture_options){.url = url, .no_channel = true});
    raw_peer_dial(&p, f.url);
    raw_peer_send(&p, frame, header, NULL, false);
    ep_buffer *reply = raw_peer_receive(&p, &frame);
    cr_assert_not_null(reply);
    cr_assert(frame.status == 0 && frame.call_id == 9 && frame.method_id == 0);
    ep_buffer_unref(reply);
    raw_peer_fini(&p);
    fixture_fini(&f);
}

static void many_models(void *arg, Expertd__V1__Hello *hello)
{
    enum { MODELS = 300 };
    static Expertd__V1__ModelInfo models[MODELS];
    static Expertd__V1__ModelInfo *list[MODELS];
    (void)arg;
    for (size_t i = 0; i < MODELS; i++) {
        expertd__v1__model_info__init(&models[i]);
        models[i].name = (char *)(uintptr_t) "a-model-with-a-name";
        list[i] = &models[i];
    }
    hello->models = list;
    hello->n_models = MODELS;
}

static void with_models(ep_rpc_server_config *config)
{
    config->hello_fill = many_models;
}

LANE_TEST(hello_is_no_larger_than_the_peer_takes)
{
    fixture f;
    raw_peer p;
    Expertd__V1__Hello hello;
    ep_frame frame = raw_request(9, 0);
    fixture_init(&f, &(fixture_options){.url = url, .server = with_models, .no_channel = true});
    raw_peer_dial(&p, f.url);
    raw_hello_init(&hello);
    hello.header_bytes_max = 1024; /* enough without the models */
    raw_peer_send_message(&p, frame, &hello.base, true, false);
    ep_buffer *reply = raw_peer_receive(&p, &frame);
    cr_assert_not_null(reply);
    cr_assert(frame.status == 0 && frame.header_bytes > 0 && frame.header_bytes <= 1024,
              "status %u, %u bytes", frame.status, frame.header_bytes);
    ep_buffer_unref(reply);
    raw_peer_fini(&p);
    hello.header_bytes_max = 4;
    expect_refusal(f.url, &hello, 8, "header_bytes_max is 4");
    fixture_fini(&f);
}

static void impatient(ep_rpc_server_config *config)
{
    config->common.limits.hello_timeout_ms = 20;
}

LANE_TEST(no_hello_in_time_closes)
{
    fixture f;
    raw_peer p;
    fixture_init(&f, &(fixture_options){.url = url, .server = impatient, .no_channel = true});
    raw_peer_dial(&p, f.url);
    cr_assert_eq(raw_peer_wait_closed(&p), 0);
    raw_peer_fini(&p);
    fixture_fini(&f);
}

static void quick_redial(ep_rpc_channel_config *config)
{
    config->common.limits.redial_min_ms = 1;
    config->common.limits.redial_max_ms = 5;
}

LANE_TEST(a_refused_client_reports_the_reason)
{
    fixture f;
    ep_error error;
    answer a;
    fixture_init(&f,
                 &(fixture_options){
                     .url = url, .server = with_token, .channel = quick_redial, .not_ready = true});
    fixture_wait(&f, &f.states[EP_CHANNEL_BROKEN], 2); /* and it tries again */
    ep_rpc_channel_last_error(f.channel, &error);
    cr_assert_eq(error.code, EP_ERR_UNAUTHENTICATED);
    cr_assert(strstr(error.text, "the token is missing") != NULL &&
                  strstr(error.text, f.url) != NULL,
              "%s", error.text);
    ASSERT_FAILS(ep_rpc_channel_wait_ready(f.channel, in_ms(10), &error), EP_ERR_DEADLINE_EXCEEDED,
                 error, "the token is missing");
    cr_assert_eq(forward(&f, "echo", 0, 1, in_ms(30), &a), EP_ERR_UNAVAILABLE);
    ASSERT_TEXT(a.error, "the token is missing");
    fixture_fini(&f);
}

/* ---- loss, goodbye, again ---- */

LANE_TEST(a_stopping_server_says_goodbye_and_ends_every_call_once)
{
    enum { N = 20 };
    fixture f;
    answer a[N];
    answer stream;
    fixture_init(&f, &(fixture_options){.url = url});
    for (uint32_t i = 0; i < N; i++) {
        cr_assert_eq(forward_start(&f, "hold", 100, 1, EP_TIME_NEVER, &a[i], NULL, NULL), EP_OK);
    }
    cr_assert_eq(watch_start(&f, 5, true, EP_TIME_NEVER, &stream, NULL), EP_OK);
    fixture_wait(&f, &f.held_count, N + 1);
    fixture_server_stop(&f);
    for (uint32_t i = 0; i < N; i++) {
        answer_wait_end(&a[i]);
        cr_assert_eq(a[i].error.code, EP_ERR_UNAVAILABLE, "%s", a[i].error.text);
        ASSERT_TEXT(a[i].error, "peer said goodbye");
        cr_assert_eq(a[i].ends, 1);
    }
    answer_wait_end(&stream);
    cr_assert(stream.ends == 1 && stream.messages == 5);
    cr_assert_eq(f.cancels, N + 1);
    fixture_fini(&f);
}

LANE_TEST(closing_the_channel_cancels_every_call_once)
{
    enum { N = 20 };
    fixture f;
    answer a[N];
    fixture_init(&f, &(fixture_options){.url = url});
    for (uint32_t i = 0; i < N; i++) {
        cr_assert_eq(forward_start(&f, "hold", 100, 1, in_ms(SECONDS * 1000), &a[i], NULL, NULL),
                     EP_OK);
    }
    fixture_wait(&f, &f.held_count, N);
    ep_rpc_channel_destroy(f.channel);
    f.channel = NULL;
    for (uint32_t i = 0; i < N; i++) {
        cr_assert_eq(a[i].ends, 1);
        cr_assert_eq(a[i].error.code, EP_ERR_CANCELLED, "%s", a[i].error.text);
    }
    cr_assert_eq(f.states[EP_CHANNEL_CLOSED], 1);
    fixture_wait(&f, &f.cancels, N);
    fixture_fini(&f);
}

Test(rpc_connection_tcp, a_restarted_server_is_found_again_and_waiting_calls_go_through)
{
    fixture f;
    answer a;
    answer b;
    ep_error error;
    char url[EP_ADDRESS_BYTES];
    fixture_init(&f, &(fixture_options){.url = "tcp://127.0.0.1:0", .channel = quick_redial});
    snprintf(url, sizeof(url), "%s", f.url);
    fixture_server_stop(&f);
    fixture_wait(&f, &f.states[EP_CHANNEL_BROKEN], 1);
    cr_assert_eq(forward_start(&f, "echo", 100, 9, EP_TIME_NEVER, &a, NULL, &error), EP_OK);
    ep_rpc_server_config config = {.hello_fill = NULL};
    fixture_common(&f, &config.common);
    config.common.node = "node-b";
    cr_assert_eq(ep_rpc_server_create(&config, &f.server, &error), EP_OK);
    cr_assert_eq(ep_rpc_server_add_service(f.server, &f.expert.service.base, &error), EP_OK);
    ASSERT_OK(ep_rpc_server_listen(f.server, &(ep_lane_address){.url = url}, EP_ROLES_MAIN, &error),
              error);
    answer_wait_end(&a);
    ASSERT_OK(a.error.code, a.error);
    cr_assert_eq(a.first_byte, 9);
    cr_assert_eq(forward(&f, "echo", 0, 1, EP_TIME_NEVER, &b), EP_OK);
    fixture_fini(&f);
}

LANE_TEST(a_call_that_does_not_wait_fails_at_once_when_not_ready)
{
    fixture f;
    ep_error error;
    Expertd__V1__ForwardRequest header = EXPERTD__V1__FORWARD_REQUEST__INIT;
    ep_rpc_request request = {.method = ep_rpc_method_by_id(0x0101),
                              .header = &header.base,
                              .deadline_ns = EP_TIME_NEVER};
    answer a;
    fixture_init(&f, &(fixture_options){.url = url});
    fixture_server_stop(&f);
    fixture_wait(&f, &f.states[EP_CHANNEL_BROKEN], 1);
    answer_init(&a, &f);
    ASSERT_FAILS(ep_rpc_call_start(f.channel, &request, answer_reply, &a, NULL, &error),
                 EP_ERR_UNAVAILABLE, error, f.url);
    fixture_fini(&f);
    cr_assert_eq(a.ends, 0);
}

static void give_up(ep_rpc_channel_config *config)
{
    config->reconnect = false;
}

Test(rpc_connection_tcp, nobody_listening_is_unavailable)
{
    fixture f;
    ep_error error;
    answer a;
    raw_peer gone;
    fixture_init(
        &f, &(fixture_options){.url = "tcp://127.0.0.1:0", .channel = give_up, .not_ready = true});
    ep_rpc_channel_destroy(f.channel);
    raw_peer_listen(&gone, "tcp://127.0.0.1:0");
    snprintf(f.url, sizeof(f.url), "%s", gone.url);
    raw_peer_fini(&gone);
    ep_rpc_channel_config config = {.address = {.url = f.url}};
    fixture_common(&f, &config.common);
    cr_assert_eq(ep_buffer_pool_create_child(f.pool, 1, &config.common.pool), EP_OK);
    cr_assert_eq(ep_rpc_channel_create(&config, &f.channel, &error), EP_OK);
    cr_assert_neq(ep_rpc_channel_wait_ready(f.channel, EP_TIME_NEVER, &error), EP_OK);
    ASSERT_TEXT(error, f.url);
    /* nor does it matter that there is no buffer for the request */
    cr_assert_eq(forward(&f, "echo", 0, 1, EP_TIME_NEVER, &a), EP_ERR_UNAVAILABLE);
    ep_rpc_channel_destroy(f.channel);
    f.channel = NULL;
    ep_buffer_pool_destroy(config.common.pool);
    fixture_fini(&f);
}

static void pings(ep_rpc_channel_config *config)
{
    config->common.limits.ping_ms = 10;
    config->common.limits.ping_dead_count = 3;
    config->reconnect = false;
}

/* ---- a client against a server that misbehaves ---- */

typedef struct bad_server {
    fixture f;
    raw_peer p;
    uint64_t call_id; /* of the last request */
    uint16_t method_id;
} bad_server;

/* How far the server plays along before it misbehaves. */
typedef enum server_manners { LISTENS, ACCEPTS, ANSWERS_HELLO } server_manners;

static void bad_server_init(bad_server *s, const char *url,
                            void (*change)(ep_rpc_channel_config *config), server_manners manners)
{
    ep_error error;
    fixture_init(&s->f, &(fixture_options){.url = "loopback://rpc-unused", .no_channel = true});
    raw_peer_listen(&s->p, url);
    snprintf(s->f.url, sizeof(s->f.url), "%s", s->p.url);
    fixture *f = &s->f;
    ep_rpc_channel_config config = {
        .address = {.url = f->url}, .arg = f, .late_replies = &f->late_replies};
    fixture_common(f, &config.common);
    if (change != NULL) {
        change(&config);
    }
    cr_assert_eq(ep_rpc_channel_create(&config, &f->channel, &error), EP_OK);
    if (manners >= ACCEPTS) {
        raw_peer_accept(&s->p);
    }
    if (manners == ANSWERS_HELLO) {
        ep_frame frame;
        Expertd__V1__Hello reply;
        ep_buffer *request = raw_peer_receive(&s->p, &frame);
        cr_assert_not_null(request);
        cr_assert(frame.kind == EP_FRAME_REQUEST && frame.method_id == 0);
        ep_buffer_unref(request);
        raw_hello_init(&reply);
        reply.node = (char *)(uintptr_t) "bad";
        raw_peer_send_message(&s->p, (ep_frame){.kind = EP_FRAME_REPLY, .call_id = frame.call_id},
                              &reply.base, false, false);
        ASSERT_OK(ep_rpc_channel_wait_ready(f->channel, in_ms(SECONDS * 1000), &error), error);
    }
}

static void bad_server_take(bad_server *s)
{
    ep_frame frame;
    ep_buffer *request = raw_peer_receive(&s->p, &frame);
    cr_assert_not_null(request);
    cr_assert_eq(frame.kind, EP_FRAME_REQUEST);
    s->call_id = frame.call_id;
    s->method_id = frame.method_id;
    ep_buffer_unref(request);
}

/* A call of which the server knows. */
static void bad_server_call(bad_server *s, size_t bytes, uint64_t deadline_ns, answer *out_answer,
                            ep_rpc_call_id *out_id)
{
    cr_assert_eq(forward_start(&s->f, "echo", bytes, 1, deadline_ns, out_answer, out_id, NULL),
                 EP_OK);
    bad_server_take(s);
}

static void bad_server_fini(bad_server *s)
{
    ep_rpc_channel_destroy(s->f.channel);
    s->f.channel = NULL;
    raw_peer_fini(&s->p);
    fixture_fini(&s->f);
}

LANE_TEST(a_server_that_answers_no_ping_is_lost)
{
    bad_server s;
    answer a;
    bad_server_init(&s, url, pings, ANSWERS_HELLO);
    cr_assert_eq(forward_start(&s.f, "echo", 0, 1, EP_TIME_NEVER, &a, NULL, NULL), EP_OK);
    answer_wait_end(&a);
    cr_assert_eq(a.error.code, EP_ERR_CONNECTION_LOST, "%s", a.error.text);
    ASSERT_TEXT(a.error, "answered none of 3 pings");
    bad_server_fini(&s);
}

static void impatient_channel(ep_rpc_channel_config *config)
{
    config->common.limits.hello_timeout_ms = 20;
    config->reconnect = false;
}

LANE_TEST(a_server_that_never_answers_hello_is_given_up)
{
    bad_server s;
    ep_error error;
    bad_server_init(&s, url, impatient_channel, LISTENS);
    /* on a busy machine the dial alone may take that long */
    ASSERT_FAILS(ep_rpc_channel_wait_ready(s.f.channel, EP_TIME_NEVER, &error), EP_ERR_UNAVAILABLE,
                 error, "no Hello within 20 ms");
    bad_server_fini(&s);
}

static void patient_channel(ep_rpc_channel_config *config)
{
    config->common.limits.hello_timeout_ms = 600000;
    config->reconnect = true;
}

/* What was dialled while the network lost everything hangs, the next dial does not. */
LANE_TEST(a_dial_without_answer_gives_way_to_the_next_before_the_timeout)
{
    bad_server s;
    bad_server_init(&s, url, patient_channel, ACCEPTS);
    raw_peer_wait_closed(&s.p);
    bad_server_fini(&s);
}

static void many_pings(ep_rpc_channel_config *config)
{
    config->common.limits.ping_ms = 10;
    config->common.limits.ping_dead_count = 1000;
    config->reconnect = false;
}

static void take_pings(bad_server *s, uint32_t count, ep_rpc_channel_life *out_life)
{
    for (uint32_t i = 0; i < count; i++) {
        ep_frame frame;
        ep_buffer *ping = raw_peer_receive(&s->p, &frame);
        cr_assert_not_null(ping);
        cr_assert_eq(frame.kind, EP_FRAME_PING);
        ep_buffer_unref(ping);
    }
    cr_assert(ep_rpc_channel_read_life(s->f.channel, out_life));
}

/* Who waits for an answer to a ping does not begin anew with each later one. */
LANE_TEST(the_oldest_ping_without_an_answer_counts)
{
    bad_server s;
    ep_rpc_channel_life first;
    ep_rpc_channel_life later;
    bad_server_init(&s, url, many_pings, ANSWERS_HELLO);
    take_pings(&s, 2, &first); /* the second leaves after the first one's end is noted */
    take_pings(&s, 3, &later);
    cr_assert_neq(first.pinged_ns, 0);
    cr_assert_eq(later.pinged_ns, first.pinged_ns);
    bad_server_fini(&s);
}

LANE_TEST(a_channel_may_be_destroyed_while_hello_is_open)
{
    bad_server s;
    bad_server_init(&s, url, NULL, ACCEPTS);
    ep_rpc_channel_destroy(s.f.channel);
    s.f.channel = NULL;
    raw_peer_wait_closed(&s.p);
    bad_server_fini(&s);
}

/* Its Hello names no feature: a flag that it does not know would end the connection. */
LANE_TEST(an_older_server_gets_a_plain_cancel)
{
    bad_server s;
    answer a;
    ep_frame frame;
    ep_rpc_call_id id;
    bad_server_init(&s, url, give_up, ANSWERS_HELLO);
    bad_server_call(&s, 10, EP_TIME_NEVER, &a, &id);
    ep_rpc_call_cancel_answered(s.f.channel, id);
    answer_wait_end(&a);
    ep_buffer *cancel = raw_peer_receive(&s.p, &frame);
    cr_assert(cancel != NULL && frame.kind == EP_FRAME_CANCEL && frame.call_id == s.call_id &&
              frame.flags == 0);
    ep_buffer_unref(cancel);
    bad_server_fini(&s);
}

LANE_TEST(a_server_that_never_answers_meets_the_deadline_and_gets_a_cancel)
{
    bad_server s;
    answer a;
    ep_frame frame;
    bad_server_init(&s, url, give_up, ANSWERS_HELLO);
    bad_server_call(&s, 10, in_ms(30), &a, NULL);
    answer_wait_end(&a);
    cr_assert_eq(a.error.code, EP_ERR_DEADLINE_EXCEEDED);
    ep_buffer *cancel = raw_peer_receive(&s.p, &frame);
    cr_assert(cancel != NULL && frame.kind == EP_FRAME_CANCEL && frame.call_id == s.call_id);
    ep_buffer_unref(cancel);
    /* a late reply and a repeated one change nothing */
    Expertd__V1__ForwardReply reply = EXPERTD__V1__FORWARD_REPLY__INIT;
    ep_frame late = {.kind = EP_FRAME_REPLY, .call_id = s.call_id, .method_id = s.method_id};
    raw_peer_send_message(&s.p, late, &reply.base, false, false);
    answer b;
    bad_server_call(&s, 10, EP_TIME_NEVER, &b, NULL);
    late.call_id = s.call_id;
    raw_peer_send_message(&s.p, late, &reply.base, false, false);
    raw_peer_send_message(&s.p, late, &reply.base, false, false);
    answer_wait_end(&b);
    cr_assert_eq(b.error.code, EP_OK);
    bad_server_call(&s, 10, EP_TIME_NEVER, &b, NULL);
    late.call_id = s.call_id;
    raw_peer_send_message(&s.p, late, &reply.base, false, false);
    answer_wait_end(&b);
    cr_assert_eq(a.ends, 1);
    cr_assert_eq(__atomic_load_n(&s.f.late_replies, __ATOMIC_RELAXED), 2);
    bad_server_fini(&s);
}

LANE_TEST(a_gap_in_a_stream_is_data_loss)
{
    bad_server s;
    answer a;
    ep_frame frame;
    Expertd__V1__PlacementSnapshot message = EXPERTD__V1__PLACEMENT_SNAPSHOT__INIT;
    Expertd__V1__Epoch epoch = EXPERTD__V1__EPOCH__INIT;
    message.epoch = &epoch;
    bad_server_init(&s, url, give_up, ANSWERS_HELLO);
    cr_assert_eq(watch_start(&s.f, 0, true, EP_TIME_NEVER, &a, NULL), EP_OK);
    bad_server_take(&s);
    ep_frame more = {.kind = EP_FRAME_REPLY_MORE, .call_id = s.call_id, .method_id = s.method_id};
    raw_peer_send_message(&s.p, more, &message.base, false, false);
    more.stream_sequence = 2;
    raw_peer_send_message(&s.p, more, &message.base, false, false);
    answer_wait_end(&a);
    cr_assert_eq(a.error.code, EP_ERR_DATA_LOSS);
    cr_assert(a.messages == 1 && a.ends == 1);
    ep_buffer *cancel = raw_peer_receive(&s.p, &frame);
    cr_assert(cancel != NULL && frame.kind == EP_FRAME_CANCEL);
    ep_buffer_unref(cancel);
    bad_server_fini(&s);
}

/* Each of these frames, sent instead of a reply, must end the call with a typed error and break the
 * connection. */
LANE_TEST(wrong_frames_from_a_server_break_the_connection)
{
    const ep_frame wrong[] = {
        {.kind = EP_FRAME_REQUEST, .call_id = 5, .method_id = 0x0101},
        {.kind = EP_FRAME_CANCEL, .call_id = 5},
        {.kind = EP_FRAME_REPLY, .method_id = 0x0102},
        {.kind = EP_FRAME_REPLY_MORE, .method_id = 0x0101},
        {.kind = EP_FRAME_REPLY, .method_id = 0x0101, .flags = EP_FRAME_FLAG_END_OF_STREAM},
        {.kind = EP_FRAME_REPLY, .method_id = 0x0101, .payload_crc = 1},
        /* of an attempt that never was */
        {.kind = EP_FRAME_REPLY, .method_id = 0x0101, .attempt = 1},
        /* to a call that nobody began */
        {.kind = EP_FRAME_REPLY, .method_id = 0x0101, .call_id = 5},
        {.kind = EP_FRAME_REPLY, .method_id = 0x0101, .call_id = 1ull << 63 | 5},
    };
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        bad_server s;
        answer a;
        bad_server_init(&s, url, give_up, ANSWERS_HELLO);
        bad_server_call(&s, 0, EP_TIME_NEVER, &a, NULL);
        ep_frame frame = wrong[i];
        frame.call_id = frame.call_id == 0 ? s.call_id : frame.call_id;
        raw_peer_send(&s.p, frame, NULL, NULL, false);
        answer_wait_end(&a);
        cr_assert_eq(a.error.code, EP_ERR_PROTOCOL, "%zu: %s", i, a.error.text);
        raw_peer_wait_closed(&s.p);
        bad_server_fini(&s);
    }
}

LANE_TEST(an_undecodable_reply_fails_its_call_only)
{
    bad_server s;
    answer a;
    uint8_t junk[] = {0xff, 0xff, 0xff};
    bad_server_init(&s, url, give_up, ANSWERS_HELLO);
    for (int i = 0; i < 2; i++) {
        bad_server_call(&s, 0, EP_TIME_NEVER, &a, NULL);
        ep_frame frame = {.kind = EP_FRAME_REPLY,
                          .call_id = s.call_id,
                          .method_id = s.method_id,
                          .header_bytes = sizeof(junk)};
        frame.status = i == 0 ? 0 : 14;
        raw_peer_send(&s.p, frame, junk, NULL, false);
        answer_wait_end(&a);
        cr_assert_eq(a.error.code, i == 0 ? EP_ERR_PROTOCOL : EP_ERR_UNAVAILABLE, "%s",
                     a.error.text);
    }
    cr_assert_eq(ep_rpc_channel_get_state(s.f.channel), EP_CHANNEL_READY);
    bad_server_fini(&s);
}

/* ---- payload CRC ---- */

static void server_crc(ep_rpc_server_config *config)
{
    config->common.payload_crc = true;
}

static void channel_crc(ep_rpc_channel_config *config)
{
    config->common.payload_crc = true;
    config->reconnect = false;
}

LANE_TEST(payload_crc_works_when_both_want_it)
{
    fixture f;
    answer a;
    fixture_init(&f, &(fixture_options){.url = url, .server = server_crc, .channel = channel_crc});
    for (size_t bytes = 0; bytes < 1000; bytes += 37) {
        ASSERT_OK(forward(&f, "echo", bytes, 3, EP_TIME_NEVER, &a), a.error);
        cr_assert_eq(a.tensor_bytes, bytes);
    }
    cr_assert_eq(watch_start(&f, 10, false, EP_TIME_NEVER, &a, NULL), EP_OK);
    answer_wait_end(&a);
    cr_assert(a.error.code == EP_OK && a.messages == 10);
    fixture_fini(&f);
}

/* A server that stops may say so before it has read Hello, and so without a CRC. */
LANE_TEST(a_goodbye_in_place_of_hello_tells_its_reason)
{
    bad_server s;
    ep_error error;
    Expertd__V1__Status status = EXPERTD__V1__STATUS__INIT;
    ep_frame goodbye = {.kind = EP_FRAME_GOODBYE, .status = 14};
    bad_server_init(&s, url, channel_crc, ACCEPTS);
    status.reason = EP_ERR_UNAVAILABLE;
    status.text = (char *)(uintptr_t) "the server stops";
    raw_peer_send_message(&s.p, goodbye, &status.base, false, false);
    ASSERT_FAILS(ep_rpc_channel_wait_ready(s.f.channel, EP_TIME_NEVER, &error), EP_ERR_UNAVAILABLE,
                 error, "peer said goodbye: the server stops");
    bad_server_fini(&s);
}

Test(rpc_connection_tcp, payload_crc_mismatch_is_refused_by_name)
{
    fixture f;
    ep_error error;
    fixture_init(&f, &(fixture_options){
                         .url = "tcp://127.0.0.1:0", .channel = channel_crc, .not_ready = true});
    ASSERT_FAILS(ep_rpc_channel_wait_ready(f.channel, EP_TIME_NEVER, &error),
                 EP_ERR_FAILED_PRECONDITION, error, "payload_crc is on at the peer and off here");
    fixture_fini(&f);
}

Test(rpc_connection_tcp, a_damaged_payload_fails_its_call_and_keeps_the_connection)
{
    fixture f;
    raw_peer p;
    Expertd__V1__Hello hello;
    Expertd__V1__ForwardRequest request = EXPERTD__V1__FORWARD_REQUEST__INIT;
    ep_frame frame = raw_request(1, 0);
    fixture_init(&f, &(fixture_options){
                         .url = "tcp://127.0.0.1:0", .server = server_crc, .no_channel = true});
    raw_peer_dial(&p, f.url);
    raw_hello_init(&hello);
    hello.payload_crc = true;
    raw_peer_send_message(&p, frame, &hello.base, true, true);
    ep_buffer *reply = raw_peer_receive(&p, &frame);
    cr_assert(reply != NULL && frame.status == 0);
    ep_buffer_unref(reply);
    for (uint32_t i = 0; i < 2; i++) {
        ep_frame call = raw_request(2 + i, 0x0101);
        call.payload_crc = 0x12345678; /* the first time it stays: a wrong one */
        raw_peer_send_message(&p, call, &request.base, true, i == 1);
        reply = raw_peer_receive(&p, &frame);
        cr_assert_not_null(reply);
        cr_assert_eq(frame.status, i == 0 ? 15u : 0u);
        ep_buffer_unref(reply);
    }
    raw_peer_fini(&p);
    fixture_fini(&f);
}

/* ---- a look ---- */

static void *look_at(void *arg)
{
    const ep_lane_address address = {.url = arg};
    ep_rpc_look look;
    ep_rpc_look_at(&address, NULL, NULL, &look);
    return NULL;
}

/* Whose peer has this port. Only calls of a forked child. */
static bool has_socket_to(in_port_t port)
{
    for (int fd = 0; fd < 1024; fd++) {
        struct sockaddr_in peer = {0};
        socklen_t bytes = sizeof(peer);
        if (getpeername(fd, (struct sockaddr *)&peer, &bytes) == 0 && peer.sin_port == port) {
            return true;
        }
    }
    return false;
}

/* It would hide the end of the look from who is looked at. */
Test(rpc_connection, a_forked_child_does_not_hold_the_socket_of_a_look)
{
    struct sockaddr_in own = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof(own);
    char url[64];
    pthread_t looker;
    int status;
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    cr_assert_eq(bind(listener, (struct sockaddr *)&own, sizeof(own)), 0);
    cr_assert_eq(listen(listener, 8), 0);
    cr_assert_eq(getsockname(listener, (struct sockaddr *)&own, &bytes), 0);
    snprintf(url, sizeof(url), "tcp://127.0.0.1:%u", ntohs(own.sin_port));
    cr_assert_eq(pthread_create(&looker, NULL, look_at, url), 0);
    const int taken = accept(listener, NULL, NULL); /* it waits for an answer now */
    cr_assert_geq(taken, 0);
    const pid_t child = fork();
    cr_assert_geq(child, 0);
    if (child == 0) {
        _exit(has_socket_to(own.sin_port));
    }
    cr_assert_eq(waitpid(child, &status, 0), child);
    close(taken);
    close(listener); /* further looks are refused */
    pthread_join(looker, NULL);
    cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %d", status);
}
