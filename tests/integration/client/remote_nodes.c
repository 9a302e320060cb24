/* SPDX-License-Identifier: Apache-2.0 */
/* See remote_nodes.h. */
#include "remote_nodes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <signal.h>
#include <unistd.h>

static void fill(harness *h, const char *prefix, uint32_t nodes_count, uint32_t copies,
                 uint32_t hidden)
{
    *h = (harness){
        .shape = {.layer = FAKE_LAYER, .hidden = hidden, .inner = 8, .experts = 8, .top_k = 2},
        .nodes_count = nodes_count};
    for (uint32_t e = 0; e < h->shape.experts; e++) {
        for (uint32_t c = 0; c < copies; c++) {
            h->owners[e] |= 1u << ((e + c) % nodes_count);
        }
    }
    for (uint32_t n = 0; n < nodes_count; n++) {
        snprintf(h->names[n], sizeof(h->names[n]), "%s%u", prefix, n);
    }
}

#define RELEASE 255

static _Noreturn void child_main(harness *h, int url_fd, int control_fd)
{
    uint8_t byte;
    FILE *out = fdopen(url_fd, "w");
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (uint32_t n = 0; n < h->nodes_count; n++) {
        harness_start_node(h, n, "tcp://127.0.0.1:0", NULL);
        fprintf(out, "%s\n", fake_node_url(h->nodes[n]));
    }
    fclose(out);
    while (read(control_fd, &byte, 1) == 1) {
        for (uint32_t n = 0; n < h->nodes_count; n++) {
            if (byte == RELEASE) {
                fake_node_release(h->nodes[n]);
            } else if (byte == n) {
                fake_node_set_fault(h->nodes[n], FAKE_HANG, EP_OK, 0);
            }
        }
        if (write(control_fd, &byte, 1) != 1) {
            break;
        }
    }
    for (uint32_t n = 0; n < h->nodes_count; n++) {
        fake_node_stop(h->nodes[n]);
    }
    ep_transport_fini();
    exit(0);
}

void remote_nodes_start(remote_nodes *r, const char *prefix, uint32_t nodes_count, uint32_t copies,
                        uint32_t hidden)
{
    int urls[2];
    int control[2];
    char line[256];
    fill(&r->h, prefix, nodes_count, copies, hidden);
    if (pipe(urls) != 0 || socketpair(AF_UNIX, SOCK_STREAM, 0, control) != 0) {
        abort();
    }
    r->child = fork();
    if (r->child == 0) {
        close(urls[0]);
        close(control[1]);
        child_main(&r->h, urls[1], control[0]);
    }
    close(urls[1]);
    close(control[0]);
    r->control_fd = control[1];
    FILE *in = fdopen(urls[0], "r");
    for (uint32_t n = 0; n < nodes_count; n++) {
        if (fgets(line, sizeof(line), in) == NULL) {
            abort();
        }
        line[strcspn(line, "\n")] = 0;
        r->h.urls[n] = strdup(line);
    }
    fclose(in);
}

static void control(remote_nodes *r, uint8_t byte)
{
    if (write(r->control_fd, &byte, 1) != 1 || read(r->control_fd, &byte, 1) != 1) {
        abort();
    }
}

void remote_nodes_hang(remote_nodes *r, uint32_t node)
{
    control(r, (uint8_t)node);
}

void remote_nodes_release(remote_nodes *r)
{
    control(r, RELEASE);
}

int remote_nodes_stop(remote_nodes *r)
{
    int status = 1;
    shutdown(r->control_fd, SHUT_RDWR); /* children forked later hold a copy of it */
    close(r->control_fd);
    waitpid(r->child, &status, 0);
    for (uint32_t n = 0; n < r->h.nodes_count; n++) {
        free((void *)(uintptr_t)r->h.urls[n]);
    }
    return status;
}

ep_client *remote_nodes_client(remote_nodes *r, remote_nodes *others)
{
    ep_error error;
    ep_client_config config;
    ep_client *client = NULL;
    const char *urls[2 * NODES_MAX];
    size_t count = 0;
    for (uint32_t n = 0; n < r->h.nodes_count; n++) {
        urls[count++] = r->h.urls[n];
    }
    for (uint32_t n = 0; others != NULL && n < others->h.nodes_count; n++) {
        urls[count++] = others->h.urls[n];
    }
    ep_client_config_init(&config);
    config.node_urls = urls;
    config.node_urls_count = count;
    if (ep_client_create(&config, &client, &error) != EP_OK ||
        ep_client_wait_ready(client, 20000000, &error) != EP_OK) {
        fprintf(stderr, "client: %s\n", error.text);
        abort();
    }
    return client;
}
