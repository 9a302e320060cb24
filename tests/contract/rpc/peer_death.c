/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A peer that dies, on every lane between processes. Killed, it is noticed because the kernel
 * tells: no ping is ever sent here. Stopped, its kernel says nothing: the pings notice, and not
 * before so many went unanswered.
 *
 * The peer is this program again: "serve LANE URL" writes its real URL to stdout.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "rpc_fixture.h"
#include "support/check.h"
#include "transport/transport.h"

#define PING_MS 100
#define DEAD_COUNT 3

typedef struct way {
    const char *name;
    const char *stream_lane;
    const char *url; /* NULL: a socket in a directory of this test */
} way;

static const way ways[] = {
    {"uv", "uv", "tcp://127.0.0.1:0"},
#ifndef __SANITIZE_THREAD__ /* races inside the packaged libnng are not ours to fail on */
    {"nng", "nng", "tcp://127.0.0.1:0"},
#endif
    {"shm", "uv", NULL},
};

static void common_init(ep_rpc_common *common, const char *role)
{
    memset(common, 0, sizeof(*common));
    CHECK(ep_timer_service_create("death-timer", &common->timers) == EP_OK, "timers");
    CHECK(ep_buffer_pool_create(0, 0, &common->pool) == EP_OK, "pool");
    ep_rpc_limits_default(&common->limits);
    common->limits.ping_ms = 0;
    common->token = "";
    common->node = "death";
    common->role = role;
    common->incarnation = 1;
    common->payload_crc = true;
}

static int serve(const char *stream_lane, const char *url)
{
    ep_rpc_server_config config = {0};
    ep_rpc_server *server;
    ep_error error;
    const ep_lane_address address = {.url = url};
    char real[EP_ADDRESS_BYTES] = "";
    CHECK(ep_stream_lane_choose(stream_lane, &error) == EP_OK, "%s", error.text);
    common_init(&config.common, "node");
    CHECK(ep_rpc_server_create(&config, &server, &error) == EP_OK, "%s", error.text);
    CHECK(ep_rpc_server_listen(server, &address, EP_ROLES_MAIN, &error) == EP_OK, "%s", error.text);
    ep_rpc_server_set_state(server, "serving");
    ep_rpc_server_url(server, 0, real, sizeof(real));
    CHECK(write(STDOUT_FILENO, real, sizeof(real)) == (ssize_t)sizeof(real), "stdout");
    for (;;) {
        pause();
    }
}

/* Dies with us. */
static pid_t start_peer(const way *w, const char *url, char out_url[EP_ADDRESS_BYTES])
{
    int fds[2];
    CHECK(pipe(fds) == 0, "pipe");
    pid_t parent = getpid();
    pid_t peer = fork();
    CHECK(peer >= 0, "fork");
    if (peer == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() == parent && dup2(fds[1], STDOUT_FILENO) >= 0) {
            close(fds[0]);
            close(fds[1]);
            execl("/proc/self/exe", "peer_death", "serve", w->stream_lane, url, (char *)NULL);
        }
        _exit(127);
    }
    close(fds[1]);
    size_t have = 0;
    while (have < EP_ADDRESS_BYTES) {
        ssize_t n = read(fds[0], out_url + have, EP_ADDRESS_BYTES - have);
        CHECK(n > 0, "%s: the peer did not start", w->name);
        have += (size_t)n;
    }
    close(fds[0]);
    return peer;
}

typedef struct watched {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool broken;
    uint64_t broken_ns;
    ep_error error;
} watched;

static void on_state(void *arg, ep_rpc_channel *channel, ep_rpc_channel_state state,
                     const Expertd__V1__Hello *peer, const ep_error *error)
{
    watched *w = arg;
    (void)channel;
    (void)peer;
    if (state != EP_CHANNEL_BROKEN) {
        return;
    }
    pthread_mutex_lock(&w->lock);
    w->broken = true;
    w->broken_ns = ep_clock_now_ns();
    w->error = *error;
    pthread_cond_signal(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

static void wait_broken(const way *by, watched *w)
{
    struct timespec until;
    int timeout = 0;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += SECONDS;
    pthread_mutex_lock(&w->lock);
    while (!w->broken && timeout == 0) {
        timeout = pthread_cond_clockwait(&w->changed, &w->lock, CLOCK_MONOTONIC, &until);
    }
    pthread_mutex_unlock(&w->lock);
    CHECK(w->broken, "%s: the peer's end was never noticed", by->name);
}

/* What happens to the peer once the channel is ready. */
static void run(const way *by, const char *url, int signal_number, uint32_t ping_ms, watched *out)
{
    char real[EP_ADDRESS_BYTES];
    ep_error error;
    ep_rpc_channel *channel;
    pid_t peer = start_peer(by, url, real);
    ep_rpc_channel_config config = {
        .address = {.url = real}, .connection_class = "decode", .on_state = on_state, .arg = out};
    CHECK(ep_stream_lane_choose(by->stream_lane, &error) == EP_OK, "%s", error.text);
    common_init(&config.common, "client");
    config.common.limits.ping_ms = ping_ms;
    config.common.limits.ping_dead_count = DEAD_COUNT;
    CHECK(ep_rpc_channel_create(&config, &channel, &error) == EP_OK, "%s", error.text);
    CHECK(ep_rpc_channel_wait_ready(channel, ep_clock_now_ns() + SECONDS * EP_NS_PER_S, &error) ==
              EP_OK,
          "%s: %s", by->name, error.text);
    uint64_t begin_ns = ep_clock_now_ns();
    CHECK(kill(peer, signal_number) == 0, "kill");
    wait_broken(by, out);
    CHECK(out->error.code == EP_ERR_CONNECTION_LOST, "%s: %s", by->name, out->error.text);
    out->broken_ns -= begin_ns;
    kill(peer, SIGKILL);
    CHECK(waitpid(peer, NULL, 0) == peer, "waitpid");
    ep_rpc_channel_destroy(channel);
    ep_timer_service_destroy(config.common.timers);
    ep_buffer_pool_destroy(config.common.pool);
}

static watched nothing_seen(void)
{
    return (watched){.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
}

static void test_lane(const way *w, const char *folder)
{
    char socket_url[EP_ADDRESS_BYTES];
    snprintf(socket_url, sizeof(socket_url), "shm://%s/peer.sock", folder);
    const char *url = w->url != NULL ? w->url : socket_url;
    watched killed = nothing_seen();
    run(w, url, SIGKILL, 0, &killed);
    CHECK(strstr(killed.error.text, "pings") == NULL, "%s: without pings: %s", w->name,
          killed.error.text);

    watched stopped = nothing_seen();
    run(w, url, SIGSTOP, PING_MS, &stopped);
    CHECK(strstr(stopped.error.text, "answered none of 3 pings") != NULL, "%s: %s", w->name,
          stopped.error.text);
    /* All pings but the last may have left before the stop, as a peer on a busy machine answers
     * late. */
    CHECK(stopped.broken_ns >= PING_MS * EP_NS_PER_MS, "%s: given up after %llu us", w->name,
          (unsigned long long)(stopped.broken_ns / EP_NS_PER_US));
    printf("%s: killed, noticed after %.1f ms; stopped, after %.0f ms\n", w->name,
           (double)killed.broken_ns / 1e6, (double)stopped.broken_ns / 1e6);
}

int main(int argc, char **argv)
{
    if (argc == 4 && strcmp(argv[1], "serve") == 0) {
        return serve(argv[2], argv[3]);
    }
    char folder[] = "/tmp/ep-death-XXXXXX";
    char path[64];
    CHECK(mkdtemp(folder) != NULL, "mkdtemp");
    for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++) {
        test_lane(&ways[i], folder);
    }
    ep_transport_fini();
    snprintf(path, sizeof(path), "%s/peer.sock", folder);
    unlink(path);
    snprintf(path, sizeof(path), "%s/peer.sock.lock", folder);
    unlink(path);
    CHECK(rmdir(folder) == 0, "%s is not empty", folder);
    return 0;
}
