/* SPDX-License-Identifier: Apache-2.0 */
/* See lane_fixture.h. */
#include "lane_fixture.h"

#include <dirent.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "support/sim_lane.h"
#include "support/tls_certs.h"

#define FIXTURE_MAGIC 0x3152544e4f435045ull
#define CHILD_LIFE_S 300 /* longer than a test */

__thread bool inside_lane_call;

typedef struct prefix {
    uint64_t magic;
    uint64_t bytes;
    uint64_t sequence;
} prefix;

static void wait_changed(pthread_cond_t *cond, pthread_mutex_t *lock, const char *what)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_sec += WAIT_S;
    CHECK(pthread_cond_clockwait(cond, lock, CLOCK_MONOTONIC, &t) == 0, "waited %d s for %s",
          WAIT_S, what);
}

/* ---- frames ---- */

ep_err fixture_frame_bytes(const uint8_t bytes[EP_FRAME_PREFIX_BYTES], size_t *out_frame_bytes,
                           ep_error *out_error)
{
    prefix p;
    memcpy(&p, bytes, sizeof(p));
    if (p.magic != FIXTURE_MAGIC) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL, "not a frame of this test");
    }
    *out_frame_bytes = p.bytes;
    return EP_OK;
}

static uint8_t pattern(uint64_t sequence, size_t i)
{
    return (uint8_t)(sequence * 31 + i * 7 + (i >> 8) + (i >> 16));
}

void fixture_fill(uint8_t *frame, uint64_t sequence, size_t bytes)
{
    prefix p = {.magic = FIXTURE_MAGIC, .bytes = bytes, .sequence = sequence};
    memcpy(frame, &p, sizeof(p));
    for (size_t i = sizeof(p); i < bytes; i++) {
        frame[i] = pattern(sequence, i);
    }
}

uint64_t fixture_sequence(const ep_buffer *frame)
{
    prefix p;
    memcpy(&p, frame->data, sizeof(p));
    return p.sequence;
}

const char *fixture_verify(const ep_buffer *frame, uint64_t sequence)
{
    prefix p;
    memcpy(&p, frame->data, sizeof(p));
    if (p.magic != FIXTURE_MAGIC || p.bytes != frame->bytes) {
        return "frame has another length than its prefix says";
    }
    if (p.sequence != sequence) {
        return "frame out of order";
    }
    if ((uintptr_t)frame->data % EP_BUFFER_ALIGN != 0) {
        return "frame is not aligned";
    }
    for (size_t i = sizeof(p); i < frame->bytes; i++) {
        if (frame->data[i] != pattern(sequence, i)) {
            return "frame has wrong bytes";
        }
    }
    return NULL;
}

/* ---- sides ---- */

static void fault(side *s, const char *text)
{
    if (text != NULL && s->fault == NULL) {
        s->fault = text;
    }
}

static void handle_frame(void *arg, ep_conn *conn, ep_buffer *frame)
{
    side *s = arg;
    pthread_mutex_lock(&s->lock);
    fault(s, inside_lane_call ? "on_frame inside a lane call" : NULL);
    fault(s, s->in_frame ? "two on_frame at a time" : NULL);
    fault(s, s->closed != 0 ? "on_frame after on_closed" : NULL);
    fault(s, conn != s->conn ? "on_frame for another connection" : NULL);
    s->in_frame = true;
    pthread_mutex_unlock(&s->lock);
    if (s->on_frame != NULL) {
        s->on_frame(s, frame);
    } else {
        /* only this callback changes frames */
        const char *wrong = fixture_verify(frame, s->frames);
        ep_buffer_unref(frame);
        pthread_mutex_lock(&s->lock);
        fault(s, wrong);
        s->frames++;
        pthread_mutex_unlock(&s->lock);
    }
    pthread_mutex_lock(&s->lock);
    s->in_frame = false;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

static void handle_closed(void *arg, ep_conn *conn, const ep_error *error)
{
    side *s = arg;
    (void)conn;
    if (s->on_closed != NULL) {
        s->on_closed(s);
    } else {
        ep_conn_release(s->conn);
    }
    pthread_mutex_lock(&s->lock);
    fault(s, inside_lane_call ? "on_closed inside a lane call" : NULL);
    fault(s, s->in_frame ? "on_closed beside on_frame" : NULL);
    s->closed++;
    s->end = *error;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

void side_init(side *s)
{
    memset(s, 0, sizeof(*s));
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
}

void side_start(side *s)
{
    ep_conn_handler handler = {.on_frame = handle_frame, .on_closed = handle_closed, .arg = s};
    inside_lane_call = true;
    ep_conn_start(s->conn, &handler);
    inside_lane_call = false;
}

void side_close(side *s)
{
    inside_lane_call = true;
    ep_conn_close(s->conn);
    inside_lane_call = false;
}

void side_wait_closed(side *s)
{
    pthread_mutex_lock(&s->lock);
    while (s->closed == 0) {
        wait_changed(&s->changed, &s->lock, "on_closed");
    }
    CHECK(s->closed == 1, "on_closed came %u times", s->closed);
    CHECK(s->fault == NULL, "%s", s->fault);
    pthread_mutex_unlock(&s->lock);
}

void side_wait_frames(side *s, uint64_t frames)
{
    pthread_mutex_lock(&s->lock);
    while (s->frames < frames && s->fault == NULL) {
        wait_changed(&s->changed, &s->lock, "frames");
    }
    CHECK(s->fault == NULL, "%s", s->fault);
    pthread_mutex_unlock(&s->lock);
}

void pair_wait_closed(side *client, side *server)
{
    side_wait_closed(client);
    side_wait_closed(server);
}

void pair_close(side *client, side *server)
{
    side_close(client);
    pair_wait_closed(client, server);
}

/* ---- messages ---- */

/* A patient frame is not written by its sender where the lane has a thread for that: shared memory
 * needs none. */
static bool may_end_inside(const message *m)
{
    return m->send.done_inside && (!m->send.is_patient || m->from->conn->ops == &ep_shm_lane);
}

static void message_done(ep_send *send, ep_err result)
{
    message *m = send->arg;
    side *s = m->from;
    pthread_mutex_lock(&s->lock);
    fault(s, inside_lane_call && !may_end_inside(m) ? "done inside a lane call" : NULL);
    fault(s, s->closed != 0 ? "done after on_closed" : NULL);
    fault(s, m->done_calls != 0 ? "done twice" : NULL);
    m->done_calls++;
    m->result = result;
    if (result == EP_OK) {
        s->done_ok++;
    } else {
        s->done_failed++;
    }
    void (*on_done)(message *) = m->on_done;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    if (on_done != NULL) {
        on_done(m);
    }
}

message *message_create(side *from, uint64_t sequence, size_t bytes)
{
    message *m = calloc(1, sizeof(*m));
    CHECK(m != NULL);
    m->bytes = malloc(bytes);
    CHECK(m->bytes != NULL);
    fixture_fill(m->bytes, sequence, bytes);
    m->from = from;
    m->send.done = message_done;
    m->send.arg = m;
    m->send.parts[0] = (ep_send_part){.data = m->bytes, .bytes = bytes};
    m->send.parts_count = 1;
    return m;
}

void message_split(message *m, uint32_t parts)
{
    size_t left = m->send.parts[0].bytes;
    const uint8_t *at = m->bytes;
    for (uint32_t i = 0; i < parts; i++) {
        size_t bytes = left / (parts - i);
        if (i % 3 == 1 && i + 1 < parts) {
            bytes = 0;
        }
        m->send.parts[i] = (ep_send_part){.data = bytes == 0 ? NULL : at, .bytes = bytes};
        at += bytes;
        left -= bytes;
    }
    m->send.parts_count = parts;
}

ep_err message_send(message *m)
{
    inside_lane_call = true;
    ep_err err = ep_conn_send(m->from->conn, &m->send);
    inside_lane_call = false;
    return err;
}

void message_wait(message *m)
{
    pthread_mutex_lock(&m->from->lock);
    while (m->done_calls == 0) {
        wait_changed(&m->from->changed, &m->from->lock, "done");
    }
    pthread_mutex_unlock(&m->from->lock);
}

void message_free(message *m)
{
    free(m->bytes);
    free(m);
}

ep_err send_and_forget(side *from, uint64_t sequence, size_t bytes)
{
    message *m = message_create(from, sequence, bytes);
    m->on_done = message_free;
    ep_err err = message_send(m);
    if (err != EP_OK) {
        message_free(m);
    }
    return err;
}

/* ---- the simulated network, whose time a thread moves along with the real one ---- */

static ep_sim *network;
static pthread_t pump;
static bool pump_stops; /* atomic */

static void *pump_main(void *arg)
{
    (void)arg;
    while (!__atomic_load_n(&pump_stops, __ATOMIC_ACQUIRE)) {
        ep_sim_run_until(network, ep_clock_now_ns());
        uint64_t now_ns = ep_sim_now_ns(network);
        uint64_t next_ns = ep_sim_next_ns(network);
        if (next_ns > now_ns) {
            ep_sim_wait_posted(network,
                               next_ns - now_ns > EP_NS_PER_MS ? EP_NS_PER_MS : next_ns - now_ns);
        }
    }
    while (ep_sim_run_one(network)) { /* connections that were just released */
    }
    return NULL;
}

static void network_start(void)
{
    CHECK(ep_sim_create(1, ep_clock_now_ns(), &network) == EP_OK);
    CHECK(pthread_create(&pump, NULL, pump_main, NULL) == 0);
}

static void network_stop(void)
{
    __atomic_store_n(&pump_stops, true, __ATOMIC_RELEASE);
    pthread_join(pump, NULL);
    ep_sim_destroy(network);
}

/* ---- certificates ---- */

static ep_test_cert *make_cert(lane_world *w, int file, const char *name,
                               const ep_test_cert *issuer)
{
    char *path = w->tls_files[file];
    snprintf(path, sizeof(w->tls_files[0]), "/tmp/lane-contract-XXXXXX");
    int fd = mkstemp(path);
    CHECK(fd >= 0 && close(fd) == 0);
    ep_test_cert *cert = ep_test_cert_new(name, issuer, -1, 2);
    ep_test_cert_write(cert, path);
    if (issuer != NULL) {
        ep_test_cert_write_key(cert, path);
    }
    return cert;
}

static void tls_files_create(lane_world *w)
{
    ep_test_cert *ca = make_cert(w, TLS_CA, "ca", NULL);
    ep_test_cert_free(make_cert(w, TLS_OTHER_CA, "other-ca", NULL));
    ep_test_cert_free(make_cert(w, TLS_SERVER, "localhost", ca));
    ep_test_cert_free(make_cert(w, TLS_CLIENT, "client", ca));
    ep_test_cert_free(ca);
    w->server_tls.ca_file = w->tls_files[TLS_CA];
    w->server_tls.cert_key_file = w->tls_files[TLS_SERVER];
    w->client_tls.ca_file = w->tls_files[TLS_CA];
    w->client_tls.server_name = "localhost";
}

/* ---- world ---- */

bool world_is(const lane_world *w, const char *scheme)
{
    size_t n = strlen(scheme);
    return strncmp(w->url, scheme, n) == 0 && strncmp(w->url + n, "://", 3) == 0;
}

const lane_kind lane_kinds[] = {
    {.name = "loopback", .url = "loopback://contract", .is_named = true, .is_trusted = true},
    {.name = "shm", .is_named = true, .is_trusted = true},
    {.name = "tcp/uv", .url = "tcp://127.0.0.1:0"},
    {.name = "tcp/nng", .url = "tcp://127.0.0.1:0"},
    {.name = "tls+tcp", .url = "tls+tcp://localhost:0", .is_trusted = true},
    {.name = "sim", .url = "sim://contract", .is_named = true},
    {.name = NULL},
};

void world_open(lane_world *w, const char *name)
{
    const char *slash = strchr(name, '/');
    ep_error error;
    memset(w, 0, sizeof(*w));
    for (w->kind = lane_kinds; w->kind->name != NULL && strcmp(w->kind->name, name) != 0;) {
        w->kind++;
    }
    CHECK(w->kind->name != NULL, "no lane %s in lane_kinds", name);
    if (slash != NULL) {
        CHECK(ep_stream_lane_choose(slash + 1, &error) == EP_OK, "%s", error.text);
    }
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->changed, NULL);
    if (strcmp(name, "sim") == 0) {
        network_start();
    }
    if (w->kind->url != NULL) {
        snprintf(w->url, sizeof(w->url), "%s", w->kind->url);
    } else {
        snprintf(w->folder, sizeof(w->folder), "/tmp/ep-lane-XXXXXX");
        CHECK(mkdtemp(w->folder) != NULL);
        snprintf(w->url, sizeof(w->url), "%s://%s/lane", name, w->folder);
    }
    w->ops = ep_lane_for_url(w->url);
    CHECK(w->ops != NULL, "no lane serves %s: lib/transport/lanes.c does not list it", w->url);
    CHECK(ep_buffer_pool_create(0, (size_t)64 << 20, &w->pool) == EP_OK);
    w->limits = (ep_lane_limits){.frame_bytes = fixture_frame_bytes,
                                 .pool = w->pool,
                                 .frame_bytes_max = FRAME_BYTES_MAX,
                                 .send_queue_bytes_max = 16 * FRAME_BYTES_MAX,
                                 .connections_max = 4096};
    if (world_is(w, "tls+tcp")) {
        tls_files_create(w);
    }
}

void world_address(lane_world *w, bool for_listen, ep_lane_address *out_address)
{
    *out_address = (ep_lane_address){.url = for_listen ? w->url : w->dial_url};
    if (world_is(w, "tls+tcp")) {
        out_address->tls = for_listen ? &w->server_tls : &w->client_tls;
    }
}

static void handle_accept(void *arg, ep_conn *conn)
{
    lane_world *w = arg;
    pthread_mutex_lock(&w->lock);
    CHECK(w->accepted == NULL);
    w->accepted = conn;
    w->accepts++;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

void world_listen(lane_world *w)
{
    ep_lane_address address;
    ep_error error;
    world_address(w, true, &address);
    CHECK(ep_lane_listen(w->ops, &address, &w->limits, handle_accept, w, &w->listener, &error) ==
              EP_OK,
          "%s", error.text);
    ep_listener_url(w->listener, w->dial_url, sizeof(w->dial_url));
}

ep_conn *world_take_accepted(lane_world *w)
{
    pthread_mutex_lock(&w->lock);
    while (w->accepted == NULL) {
        wait_changed(&w->changed, &w->lock, "on_accept");
    }
    ep_conn *conn = w->accepted;
    w->accepted = NULL;
    pthread_mutex_unlock(&w->lock);
    return conn;
}

void side_accept(lane_world *w, side *s)
{
    s->conn = world_take_accepted(w);
    side_start(s);
}

typedef struct dialing {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    ep_conn *conn;
    ep_error error;
    unsigned calls;
} dialing;

static void handle_dial(void *arg, ep_conn *conn, const ep_error *error)
{
    dialing *d = arg;
    pthread_mutex_lock(&d->lock);
    CHECK(!inside_lane_call, "on_dial inside a lane call");
    d->conn = conn;
    if (error != NULL) {
        d->error = *error;
    }
    d->calls++;
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->lock);
}

ep_conn *world_dial(lane_world *w, ep_error *out_error)
{
    dialing d = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    ep_lane_address address;
    ep_dial *dial = NULL;
    world_address(w, false, &address);
    inside_lane_call = true;
    ep_err err =
        ep_lane_dial_begin(w->ops, &address, &w->limits, handle_dial, &d, &dial, out_error);
    inside_lane_call = false;
    if (err != EP_OK) {
        return NULL;
    }
    pthread_mutex_lock(&d.lock);
    while (d.calls == 0) {
        wait_changed(&d.changed, &d.lock, "on_dial");
    }
    pthread_mutex_unlock(&d.lock);
    ep_dial_release(dial);
    CHECK(d.calls == 1, "on_dial came %u times", d.calls);
    CHECK((d.conn == NULL) == (d.error.code != EP_OK));
    if (d.conn == NULL && out_error != NULL) {
        *out_error = d.error;
    }
    return d.conn;
}

void pair_open(lane_world *w, side *client, side *server)
{
    ep_error error;
    side_init(client);
    side_init(server);
    client->conn = world_dial(w, &error);
    CHECK(client->conn != NULL, "%s", error.text);
    server->conn = world_take_accepted(w);
}

void pair_start(lane_world *w, side *client, side *server)
{
    pair_open(w, client, server);
    side_start(client);
    side_start(server);
}

void world_close(lane_world *w)
{
    if (w->listener != NULL) {
        ep_listener_close(w->listener);
    }
    ep_transport_fini();
    if (world_is(w, "sim")) {
        network_stop();
    }
    ep_buffer_pool_stats stats;
    ep_buffer_pool_read_stats(w->pool, &stats);
    CHECK(stats.lent_bytes == 0, "%llu bytes of buffers are still lent",
          (unsigned long long)stats.lent_bytes);
    ep_buffer_pool_destroy(w->pool);
    if (world_is(w, "tls+tcp")) {
        for (int file = 0; file < TLS_FILES; file++) {
            unlink(w->tls_files[file]);
        }
    }
    if (w->folder[0] != '\0') {
        CHECK(rmdir(w->folder) == 0, "something was left in %s", w->folder);
    }
}

unsigned open_descriptors(void)
{
    unsigned count = 0;
    DIR *folder = opendir("/proc/self/fd");
    CHECK(folder != NULL);
    while (readdir(folder) != NULL) {
        count++;
    }
    closedir(folder);
    return count;
}

pid_t fork_child(void)
{
    pid_t parent = getpid();
    pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        signal(SIGALRM, SIG_DFL);
        alarm(CHILD_LIFE_S);
        if (getppid() != parent) {
            _exit(126); /* it died before the lines above */
        }
    }
    CHECK(child >= 0);
    return child;
}

void expect_child_exits(pid_t child)
{
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %d", status);
}
