/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A whole node behind the loopback lane. An input is a script: what one peer does on one
 * connection. After each script the peer waits until the node has read it all, then leaves. Another
 * client's call must give the right rows all the while.
 */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/process_setup.h"
#include "expertd/node.h"
#include "expertd/node_private.h"
#include "fuzz.h"
#include "fuzz_peer.h"
#include "fuzz_script.h"
#include "proto_mutator.h"
#include "support/checkpoint_fixture.h"
#include "support/forward_call.h"

#define URL "loopback://fuzz-node"
#define H 32
#define GOOD_CALL_EVERY 128

/* Of a RECORD_FORWARD, to be joined. */
enum { FORM_QUANT = 32, FORM_NODE_SUM = 64, FORM_STEP_GROUP = 128 };

enum {
    /* method index, call id, attempt, deadline code, message bytes (2), message, tensors */
    RECORD_CALL,
    /* call id (5 bits) and form (3), then changes (place 2, value 1) of the good request's tensors
     * and header */
    RECORD_FORWARD,
    RECORD_BYTES,   /* a frame's bytes; its CRCs are made right */
    RECORD_BROKEN,  /* a frame's bytes as they are */
    RECORD_CONTROL, /* frame kind, call id: cancel, ping, pong, credit, goodbye */
    RECORD_HELLO,   /* a Hello message, as the first frame or again */
    RECORD_KINDS
};

static ep_node *node;
static ep_test_peer good_peer;
static uint16_t x[4 * H], wanted[5 * H];
static const ep_wire_slot slots[] = {{0, 0}, {1, 0}, {2, 3}, {3, 6}, {0, 7}};
static char model_path[EP_FIXTURE_PATH_BYTES];

static ep_test_forward good_request(void)
{
    return (ep_test_forward){.layer = 1,
                             .rows = 4,
                             .slots = 5,
                             .hidden = H,
                             .x_dtype = EP_DTYPE_BF16,
                             .reply_dtype = EP_DTYPE_BF16,
                             .x = x,
                             .wire_slots = slots};
}

static void expect_good(void)
{
    uint16_t rows[5 * H];
    ep_test_forward request = good_request();
    ep_error error;
    ep_err err;
    bool had_started;
    do { /* at the beginning its weights may still be loading */
        had_started = node->has_started;
        err = ep_test_forward_run(&good_peer, &request, rows, &error);
    } while (!had_started && err != EP_OK);
    if (err != EP_OK) {
        fprintf(stderr, "%s\n", error.text);
    }
    FUZZ_CHECK(err == EP_OK && memcmp(rows, wanted, sizeof(rows)) == 0);
}

static void *run_node(void *arg)
{
    (void)arg;
    ep_node_run(node);
    return NULL;
}

static void remove_model(void)
{
    ep_fixture_remove(model_path);
}

static void start_node(const ep_options *options)
{
    static ep_node_config config;
    static ep_node_source source;
    ep_error error = {0};
    ep_lane_address address = {.url = URL};
    pthread_t thread;
    source.options = options;
    if (ep_node_config_load(options, &config, &error) != EP_OK ||
        ep_node_create(&config, &source, &node, &error) != EP_OK ||
        ep_rpc_server_listen(node->server, &address, EP_ROLES_MAIN, &error) != EP_OK) {
        fprintf(stderr, "%s\n", error.text);
        exit(1);
    }
    pthread_create(&thread, NULL, run_node, NULL);
    pthread_detach(thread);
}

void fuzz_start(void)
{
    static char model_flag[EP_FIXTURE_PATH_BYTES + 32];
    ep_fixture_config checkpoint = ep_fixture_default();
    ep_options *options;
    ep_error error = {0};
    ep_process_setup();
    ep_fixture_temp_dir(model_path);
    atexit(remove_model);
    snprintf(model_flag, sizeof(model_flag), "--model=demo=%s", model_path);
    static const char *const flags[] = {"--listen=tcp://127.0.0.1:0", "--admin-listen=",
                                        "--probe-address=", "--door-listen=tcp://127.0.0.1:0",
                                        "--log-level=error"};
    char *argv[16] = {(char *)(uintptr_t) "fuzz", model_flag};
    int argc = 2;
    for (size_t i = 0; i < sizeof(flags) / sizeof(flags[0]); i++) {
        argv[argc++] = (char *)(uintptr_t)flags[i];
    }
    ep_test_forward request = good_request();
    ep_test_fill_rows(1, EP_DTYPE_BF16, 4 * H, x);
    if (ep_fixture_write(&checkpoint, model_path, &error) != EP_OK ||
        ep_test_expected_rows(model_path, &request, wanted, &error) != EP_OK ||
        ep_options_load(&ep_node_options, argc, argv, NULL, &options, &error) != EP_OK) {
        fprintf(stderr, "%s\n", error.text);
        exit(1);
    }
    start_node(options);
    FUZZ_CHECK(ep_test_peer_open(&good_peer, URL, &error) == EP_OK);
    expect_good();
}

/* ---- the script ---- */

size_t fuzz_seed(size_t index, uint8_t *out)
{
    size_t rows, at = 0;
    const ep_rpc_method *methods = ep_rpc_methods(&rows);
    uint8_t rest[512] = {0};
    if (index >= rows + 12) {
        return 0;
    }
    if (index < rows) { /* each method with some fields set */
        size_t bytes = proto_mutate(methods[index].method->input, rest + 6, 0, 200,
                                    (uint32_t)index * 2654435761u);
        rest[0] = (uint8_t)index;
        rest[1] = 2;
        rest[4] = (uint8_t)bytes;
        at = fuzz_record_put(out, RECORD_CALL, rest, 6 + bytes + 64);
    }
    const uint8_t forward[] = {(uint8_t)(4 | index % 8 * FORM_QUANT), 0, 0, 0};
    at += fuzz_record_put(out + at, RECORD_FORWARD, forward, index % 4 == 3 ? 4 : 1);
    const uint8_t controls[][2] = {
        {EP_FRAME_CANCEL, 4}, {EP_FRAME_PING, 0}, {EP_FRAME_CREDIT, 0}, {EP_FRAME_GOODBYE, 0}};
    at += fuzz_record_put(out + at, RECORD_CONTROL, controls[index % 4], 2);
    if (index == rows) {
        uint8_t frame[EP_FRAME_FIXED_BYTES];
        ep_frame ping = {.kind = EP_FRAME_PING, .tensor_offset = EP_FRAME_FIXED_BYTES};
        ep_frame_encode(&ping, frame);
        at += fuzz_record_put(out + at, RECORD_BYTES, frame, sizeof(frame));
        at += fuzz_record_put(out + at, RECORD_BROKEN, frame, sizeof(frame));
    } else if (index > rows) {
        at += fuzz_record_put(out + at, RECORD_HELLO, rest, 0);
    }
    return at;
}

/* The message of a RECORD_CALL is changed along its descriptor; everything else byte by byte. */
static size_t change(uint8_t kind, uint8_t *rest, size_t bytes, size_t bytes_max, uint32_t random)
{
    size_t rows;
    const ep_rpc_method *methods = ep_rpc_methods(&rows);
    size_t message = bytes < 6 ? 0 : (size_t)rest[4] | (size_t)rest[5] << 8;
    if (bytes < 6 || kind % RECORD_KINDS != RECORD_CALL || random % 3 == 0 || message > bytes - 6 ||
        message > 1024) {
        return fuzz_mutate_bytes(rest, bytes, bytes_max);
    }
    uint8_t changed[4096];
    memcpy(changed, rest + 6, message);
    size_t now = proto_mutate(methods[rest[0] % rows].method->input, changed, message,
                              sizeof(changed), random);
    if (bytes - message + now > bytes_max) {
        return bytes;
    }
    memmove(rest + 6 + now, rest + 6 + message, bytes - 6 - message);
    memcpy(rest + 6, changed, now);
    rest[4] = (uint8_t)now;
    rest[5] = (uint8_t)(now >> 8);
    return bytes - message + now;
}

static size_t mutate(uint8_t *data, size_t bytes, size_t bytes_max, uint32_t random)
{
    return fuzz_script_mutate(data, bytes, bytes_max, random, change);
}

size_t (*const fuzz_mutate)(uint8_t *, size_t, size_t, uint32_t) = mutate;

static void send_request(raw_peer *p, ep_frame frame, const uint8_t *message, size_t message_bytes,
                         const uint8_t *tensors, size_t tensor_bytes)
{
    uint8_t *header = calloc(1, 4 + message_bytes);
    FUZZ_CHECK(header != NULL);
    memcpy(header + 4, message, message_bytes);
    frame.kind = EP_FRAME_REQUEST;
    frame.header_bytes = (uint32_t)(4 + message_bytes);
    frame.tensor_bytes = tensor_bytes;
    raw_peer_send(p, frame, header, tensors, false);
    free(header);
}

static void send_call(raw_peer *p, const uint8_t *rest, size_t bytes)
{
    size_t rows;
    const ep_rpc_method *methods = ep_rpc_methods(&rows);
    static const uint32_t deadlines[] = {EP_FRAME_DEADLINE_NONE, 0, 1, 1000, 1000000};
    if (bytes < 6) {
        return;
    }
    size_t message = (size_t)rest[4] | (size_t)rest[5] << 8;
    message = message > bytes - 6 ? bytes - 6 : message;
    ep_frame frame = {.method_id = methods[rest[0] % rows].id,
                      .call_id = rest[1],
                      .attempt = rest[2],
                      .deadline_us = deadlines[rest[3] % 5]};
    send_request(p, frame, rest + 6, message, rest + 6 + message, bytes - 6 - message);
}

static void send_forward(raw_peer *p, const uint8_t *rest, size_t bytes)
{
    static const float slot_scales[] = {1.0f, -0.5f, 2.0f, 0.0f, 0.25f};
    static const uint16_t slot_places[] = {1, 0, 0, 7, 0};
    const uint8_t first = bytes > 0 ? rest[0] : 1;
    uint8_t tensors[4096] = {0}, packed[256];
    Expertd__V1__ForwardRequest message = EXPERTD__V1__FORWARD_REQUEST__INIT;
    ep_forward_layout layout;
    message.model = (char *)(uintptr_t) "demo";
    message.layer = 1;
    message.rows = 4;
    message.slots = 5;
    message.hidden = H;
    message.x_dtype = EP_DTYPE_BF16;
    message.reply_dtype = EP_DTYPE_BF16;
    message.reply_quant = first & FORM_QUANT ? EP_COMBINE_INT8 : EP_COMBINE_PLAIN;
    message.node_sum = (first & FORM_NODE_SUM) != 0;
    message.step_group = first & FORM_STEP_GROUP ? 1 : 0;
    message.step_group_size = 2;
    FUZZ_CHECK(ep_forward_layout_make(4, 5, H, EP_DTYPE_BF16, message.node_sum, &layout));
    FUZZ_CHECK(!message.node_sum || ep_forward_layout_add_places(&layout, 5));
    FUZZ_CHECK(layout.total_bytes <= sizeof(tensors));
    if (message.node_sum) {
        memcpy(tensors + layout.slot_scales_offset, slot_scales, sizeof(slot_scales));
        memcpy(tensors + layout.slot_places_offset, slot_places, sizeof(slot_places));
    }
    memcpy(tensors + layout.x_offset, x, sizeof(x));
    memcpy(tensors + layout.slots_offset, slots, sizeof(slots));
    size_t packed_bytes = expertd__v1__forward_request__pack(&message, packed);
    for (size_t i = 1; i + 3 <= bytes; i += 3) {
        size_t place = (size_t)rest[i] | (size_t)rest[i + 1] << 8;
        if (place >= 0x8000) {
            packed[place % packed_bytes] = rest[i + 2];
        } else {
            tensors[place % layout.total_bytes] = rest[i + 2];
        }
    }
    ep_frame frame = {.method_id = 0x0101,
                      .call_id = first & (FORM_QUANT - 1),
                      .deadline_us = EP_FRAME_DEADLINE_NONE};
    send_request(p, frame, packed, packed_bytes, tensors, layout.total_bytes);
}

/* Only a whole frame passes the sending lane: the length it announces must be the one there is. */
static void send_bytes(raw_peer *p, const uint8_t *rest, size_t bytes, bool make_right)
{
    size_t frame_bytes;
    if (bytes < EP_FRAME_FIXED_BYTES) {
        return;
    }
    uint8_t *frame = malloc(bytes);
    FUZZ_CHECK(frame != NULL);
    memcpy(frame, rest, bytes);
    if (make_right) {
        memcpy(frame, "EPD1\1", 5);
        uint32_t crc = ep_crc32c(0, frame, EP_FRAME_FIXED_BYTES - 4);
        memcpy(frame + EP_FRAME_FIXED_BYTES - 4, &crc, 4);
        if (ep_frame_read_bytes(frame, &frame_bytes, NULL) != EP_OK || frame_bytes != bytes) {
            bytes = EP_FRAME_FIXED_BYTES;
        }
    }
    raw_peer_send_bytes(p, frame, bytes);
    free(frame);
}

static void send_hello(raw_peer *p, const uint8_t *rest, size_t bytes)
{
    ep_frame frame = {.call_id = 1, .deadline_us = EP_FRAME_DEADLINE_NONE};
    send_request(p, frame, rest, bytes, NULL, 0);
}

static void play(raw_peer *p, const uint8_t *data, size_t bytes)
{
    fuzz_record r;
    for (int records = 0; records < FUZZ_RECORDS_MAX && fuzz_record_next(&data, &bytes, &r);
         records++) {
        switch (r.kind % RECORD_KINDS) {
        case RECORD_CALL:
            send_call(p, r.rest, r.bytes);
            break;
        case RECORD_FORWARD:
            send_forward(p, r.rest, r.bytes);
            break;
        case RECORD_BYTES:
            send_bytes(p, r.rest, r.bytes, true);
            break;
        case RECORD_BROKEN:
            send_bytes(p, r.rest, r.bytes, false);
            break;
        case RECORD_CONTROL:
            fuzz_peer_control(p, r.rest, r.bytes);
            break;
        case RECORD_HELLO:
            send_hello(p, r.rest, r.bytes);
            break;
        }
    }
}

void fuzz_one(const uint8_t *data, size_t bytes)
{
    static unsigned runs;
    raw_peer p;
    raw_peer_dial(&p, URL);
    if (bytes == 0 || data[0] % RECORD_KINDS != RECORD_HELLO) {
        FUZZ_CHECK(raw_peer_hello(&p, NULL) == 0);
    }
    play(&p, data, bytes);
    fuzz_peer_wait_read(&p);
    raw_peer_fini(&p);
    if (++runs % GOOD_CALL_EVERY == 0) {
        expect_good();
    }
}
