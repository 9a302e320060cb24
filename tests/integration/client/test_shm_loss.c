/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shared memory ends while the node and its stream live: what was in flight on it goes to the same
 * node again, over the stream, also when no other node has the expert.
 */
#include <criterion/criterion.h>
#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/clock.h"
#include "call/client_core.h"
#include "cluster/cluster.h"
#include "harness.h"
#include "support/expect.h"

static harness h;
static char folder[] = "/tmp/shm-loss-XXXXXX";
static char path[64];

/* One node with every expert, with shared memory, and a client that has moved to it. */
static ep_peer *open_service(void)
{
    ep_error error;
    ep_client_config config;
    char shm_url[80];
    uint32_t owned[8];
    cr_assert_not_null(mkdtemp(folder));
    snprintf(path, sizeof(path), "%s/n.sock", folder);
    snprintf(shm_url, sizeof(shm_url), "shm://%s", path);
    h = (harness){
        .shape = {.layer = FAKE_LAYER, .hidden = 32, .inner = 8, .experts = 8, .top_k = 2},
        .nodes_count = 1};
    for (uint32_t e = 0; e < 8; e++) {
        owned[e] = e;
        h.owners[e] = 1;
    }
    const fake_node_config node = {.name = "n0",
                                   .url = "tcp://127.0.0.1:0",
                                   .shm_url = shm_url,
                                   .shape = h.shape,
                                   .owned = owned,
                                   .owned_count = 8};
    h.nodes[0] = fake_node_start(&node);
    h.urls[0] = strdup(fake_node_url(h.nodes[0]));
    ep_client_config_init(&config);
    config.node_urls = h.urls;
    config.node_urls_count = 1;
    ASSERT_OK(ep_client_create(&config, &h.client, &error), error);
    ASSERT_OK(ep_client_wait_ready(h.client, 60 * 1000 * 1000, &error), error);
    ep_view *view = ep_cluster_acquire_view(h.client->cluster);
    ep_peer *peer = ep_peer_ref(view->peers[0]);
    ep_view_unref(view);
    for (int i = 0; i < EP_PEER_CLASSES; i++) {
        while (!__atomic_load_n(&peer->links[i].shm_ready, __ATOMIC_ACQUIRE) ||
               !__atomic_load_n(&peer->links[i].ready, __ATOMIC_ACQUIRE)) {
            usleep(1000); /* the test's timeout bounds it */
        }
    }
    return peer;
}

static void close_service(ep_peer *peer)
{
    ep_peer_unref(peer);
    harness_close(&h);
    rmdir(folder);
}

/* Ends every connection to the socket, under whatever is in flight; nobody can dial it again. */
static void cut(void)
{
    cr_assert_eq(unlink(path), 0);
    DIR *fds = opendir("/proc/self/fd");
    unsigned ended = 0;
    cr_assert_not_null(fds);
    for (const struct dirent *at = readdir(fds); at != NULL; at = readdir(fds)) {
        struct sockaddr_un name = {0};
        socklen_t bytes = sizeof(name);
        int fd = atoi(at->d_name);
        if (getpeername(fd, (struct sockaddr *)&name, &bytes) == 0 && name.sun_family == AF_UNIX &&
            strcmp(name.sun_path, path) == 0) {
            ended += shutdown(fd, SHUT_RDWR) == 0;
        }
    }
    closedir(fds);
    cr_assert_eq(ended, EP_PEER_CLASSES);
}

static void *run(void *arg)
{
    batch *b = arg;
    ep_moe_result *result = calloc(1, sizeof(*result));
    if (ep_moe_forward(h.client, &b->args, &b->out_tensor, result) == EP_OK) {
        cr_expect_eq(result->rerouted_frames, 1u, "%u frames sent again", result->rerouted_frames);
    } else {
        cr_expect(false, "%s", result->error.text);
    }
    free(result);
    return NULL;
}

TestSuite(shm_loss, .timeout = 240);

Test(shm_loss, a_call_in_flight_goes_over_the_stream_of_the_same_node)
{
    batch b;
    pthread_t thread;
    ep_peer *peer = open_service();
    batch_make(&b, &h, 4, 2, 7);
    batch_expect(&b, &h);
    fake_node_set_fault(h.nodes[0], FAKE_HANG, EP_OK, 0);
    cr_assert_eq(pthread_create(&thread, NULL, run, &b), 0);
    fake_node_wait_held(h.nodes[0]);
    fake_node_set_fault(h.nodes[0], FAKE_OK, EP_OK, 0);
    cut();
    pthread_join(thread, NULL);
    cr_expect(batch_equal(&b));
    cr_expect_eq(fake_node_requests(h.nodes[0]), 2u);
    fake_node_release(h.nodes[0]);
    batch_free(&b);
    close_service(peer);
}

/* Why it need not wait for another copy or for time to pass: the node is not counted as tried. */
Test(shm_loss, is_told_from_the_loss_of_a_node)
{
    ep_peer *peer = open_service();
    ep_peer_link *link = &peer->links[EP_PEER_DECODE];
    const ep_rpc_channel *shm = __atomic_load_n(&link->shm, __ATOMIC_ACQUIRE);
    cr_expect_not(ep_peer_link_lost_only_shm(link, shm), "nothing is lost");
    cut();
    while (__atomic_load_n(&link->shm_ready, __ATOMIC_ACQUIRE)) {
        usleep(1000);
    }
    cr_expect(ep_peer_link_lost_only_shm(link, shm));
    cr_expect_not(ep_peer_link_lost_only_shm(link, link->channel), "a frame of the stream");
    harness_stop_node(&h, 0);
    while (__atomic_load_n(&link->ready, __ATOMIC_ACQUIRE)) {
        usleep(1000);
    }
    cr_expect_not(ep_peer_link_lost_only_shm(link, shm), "the node is lost");
    close_service(peer);
}
