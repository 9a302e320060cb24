/* SPDX-License-Identifier: Apache-2.0 */
/* A lane alone: every frame has the 64 bytes of our wire format, written and checked with their
 * CRC; nothing above it. */
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench/bench_report.h"
#include "bench/lanes_form.h"
#include "wire/frame.h"

/* A frame on its way; used again once its done() has come, which may be long after the reply. */
typedef struct frame_out {
    ep_send send;
    uint8_t head[EP_FRAME_FIXED_BYTES];
    ep_buffer *echoed;
    struct lane_state *state;
    struct frame_out *next; /* free ones */
} frame_out;

typedef struct lane_state {
    const ep_lane_ops *lane;
    ep_conn *conn;
    ep_buffer_pool *pool;
    ep_buffer *payload_buffer; /* as a client's tensors are: in large pages */
    uint8_t *payload;
    size_t bytes;
    lanes_pipeline pipeline;
    pthread_mutex_t lock;
    frame_out *free_outs; /* guarded by lock */
    sem_t ready;
    char url[EP_ADDRESS_BYTES];
} lane_state;

static void sent(ep_send *send, ep_err result)
{
    frame_out *out = send->arg;
    (void)result;
    ep_buffer_unref(out->echoed);
    out->echoed = NULL;
    pthread_mutex_lock(&out->state->lock);
    out->next = out->state->free_outs;
    out->state->free_outs = out;
    pthread_mutex_unlock(&out->state->lock);
}

static frame_out *take_out(lane_state *s)
{
    pthread_mutex_lock(&s->lock);
    frame_out *out = s->free_outs;
    s->free_outs = out != NULL ? out->next : NULL;
    pthread_mutex_unlock(&s->lock);
    if (out == NULL) {
        out = calloc(1, sizeof(*out));
        if (out == NULL) {
            lanes_fail("lane echo", "no memory");
        }
        out->state = s;
    }
    return out;
}

static void send_frame(ep_conn *conn, frame_out *out, uint64_t id, const uint8_t *tensor,
                       size_t bytes)
{
    ep_frame frame = {.kind = EP_FRAME_REQUEST,
                      .call_id = id,
                      .method_id = 1,
                      .deadline_us = EP_FRAME_DEADLINE_NONE,
                      .tensor_offset = ep_frame_tensor_offset(0),
                      .tensor_bytes = bytes};
    ep_frame_encode(&frame, out->head);
    out->send.parts[0] = (ep_send_part){.data = out->head, .bytes = sizeof(out->head)};
    out->send.parts[1] = (ep_send_part){.data = tensor, .bytes = bytes};
    out->send.parts_count = 2;
    out->send.done = sent;
    out->send.done_inside = true;
    out->send.arg = out;
    ep_err err = ep_conn_send(conn, &out->send);
    if (err != EP_OK) {
        lanes_fail("lane send", ep_err_name(err));
    }
}

static uint64_t frame_id(const ep_buffer *buffer)
{
    ep_frame frame;
    ep_error error;
    if (ep_frame_decode(buffer->data, EP_FRAME_BYTES_CEILING, 4096, &frame, NULL, &error) !=
        EP_OK) {
        lanes_fail("frame", error.text);
    }
    return frame.call_id;
}

static void echo_frame(void *arg, ep_conn *conn, ep_buffer *taken)
{
    lane_state *s = arg;
    frame_out *out = take_out(s);
    out->echoed = taken;
    send_frame(conn, out, frame_id(taken), taken->data + EP_FRAME_FIXED_BYTES,
               taken->bytes - EP_FRAME_FIXED_BYTES);
}

static void reply_frame(void *arg, ep_conn *conn, ep_buffer *taken)
{
    lane_state *s = arg;
    (void)conn;
    int slot = (int)frame_id(taken);
    ep_buffer_unref(taken);
    lanes_pipeline_reply(&s->pipeline, slot);
}

static void on_closed(void *arg, ep_conn *conn, const ep_error *error)
{
    (void)arg;
    (void)error;
    ep_conn_release(conn);
}

static void on_accept(void *arg, ep_conn *conn)
{
    ep_conn_handler handler = {.on_frame = echo_frame, .on_closed = on_closed, .arg = arg};
    ep_conn_start(conn, &handler);
}

static void on_dial(void *arg, ep_conn *conn, const ep_error *error)
{
    lane_state *s = arg;
    if (conn == NULL) {
        lanes_fail("lane dial", error->text);
    }
    ep_conn_handler handler = {.on_frame = reply_frame, .on_closed = on_closed, .arg = s};
    s->conn = conn;
    ep_conn_start(conn, &handler);
    sem_post(&s->ready);
}

static ep_lane_limits limits_of(const lane_state *s)
{
    return (ep_lane_limits){.frame_bytes = ep_frame_read_bytes,
                            .pool = s->pool,
                            .frame_bytes_max = LANES_BYTES_MAX + EP_FRAME_FIXED_BYTES,
                            .send_queue_bytes_max =
                                2 * LANES_DEPTH_MAX * (LANES_BYTES_MAX + EP_FRAME_FIXED_BYTES),
                            .connections_max = 8};
}

static void serve(lane_state *s, const char *url, int url_fd)
{
    ep_lane_address address = {.url = url};
    ep_lane_limits limits = limits_of(s);
    ep_listener *listener;
    ep_error error;
    char real[EP_ADDRESS_BYTES] = "";
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (ep_lane_listen(s->lane, &address, &limits, on_accept, s, &listener, &error) != EP_OK) {
        lanes_fail("lane listen", error.text);
    }
    ep_listener_url(listener, real, sizeof(real));
    if (write(url_fd, real, sizeof(real)) != (ssize_t)sizeof(real)) {
        _exit(1);
    }
    for (;;) {
        pause();
    }
}

static void send_slot(void *arg, int slot)
{
    lane_state *s = arg;
    send_frame(s->conn, take_out(s), (uint64_t)slot, s->payload, s->bytes);
}

static double lane_run(lanes_form *form, size_t bytes, int count, int depth, double *out_us)
{
    lane_state *s = form->state;
    s->bytes = bytes;
    s->pipeline = (lanes_pipeline){
        .count = count, .depth = depth, .out_us = out_us, .send = send_slot, .arg = s};
    ep_stream_lane_set_busy_poll(form->busy_poll_us);
    double seconds = lanes_pipeline_run(&s->pipeline);
    ep_stream_lane_set_busy_poll(0);
    return seconds;
}

static void lane_close(lanes_form *form)
{
    lane_state *s = form->state;
    ep_conn_close(s->conn);
    kill(form->server, SIGKILL);
    waitpid(form->server, NULL, 0);
    /* the state and its pool end with the process: on_closed may be on its way */
    ep_buffer_unref(s->payload_buffer);
}

static void lane_connect(lanes_form *form)
{
    lane_state *s = form->state;
    ep_lane_address address = {.url = s->url};
    ep_lane_limits limits = limits_of(s);
    ep_error error;
    ep_dial *dial;
    if (ep_buffer_acquire(s->pool, LANES_BYTES_MAX, &s->payload_buffer) != EP_OK) {
        lanes_fail("lane echo", "no memory");
    }
    s->payload = s->payload_buffer->data;
    memset(s->payload, 1, LANES_BYTES_MAX);
    sem_init(&s->ready, 0, 0);
    if (ep_lane_dial_begin(s->lane, &address, &limits, on_dial, s, &dial, &error) != EP_OK) {
        lanes_fail("lane dial", error.text);
    }
    sem_wait(&s->ready);
    ep_dial_release(dial);
}

void lanes_lane_open(lanes_form *form, const ep_lane_ops *lane, const char *url)
{
    lane_state *s = calloc(1, sizeof(*s));
    int fds[2];
    if (s == NULL || pipe(fds) != 0 ||
        ep_buffer_pool_create(0, (size_t)1 << 30, &s->pool) != EP_OK) {
        lanes_fail("lane echo", "no memory");
    }
    s->lane = lane;
    pthread_mutex_init(&s->lock, NULL);
    form->server = fork();
    if (form->server == 0) {
        ep_stream_lane_set_busy_poll(form->busy_poll_us);
        serve(s, url, fds[1]);
    }
    if (read(fds[0], s->url, sizeof(s->url)) != (ssize_t)sizeof(s->url)) {
        lanes_fail("lane echo", "no server");
    }
    close(fds[0]);
    close(fds[1]);
    form->state = s;
    form->connect = lane_connect;
    form->run = lane_run;
    form->close = lane_close;
}
