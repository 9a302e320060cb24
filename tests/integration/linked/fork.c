/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fork COORDINATOR_URL before|after|during|nng|left: forks where a client is none, is there, is in
 * the midst of calls, and where nng was used. Children make clients of their own, the parent goes
 * on; all get the same bits. left: it dies with its client, and leaves a child, whose pid it
 * prints.
 */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "expertd/client.h"

#define T 2
#define K 2
#define H 128
#define CALLERS 3
#define CHILDREN 12
#define CHILD_LIFE_S 60
#define FDS_MAX 1024
#define NEED(condition)                                                                            \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%d: not so: %s: %s\n", __LINE__, #condition, error.text);             \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

static const char *url;
static float x[T * H];
static float wanted[T * H];
static int32_t ids[T * K] = {0, 3, 9, 15};
static float scales[T * K] = {0.5f, 0.25f, 1, 2};
static bool stopping; /* atomic */

static ep_client *connect_to(void)
{
    ep_error error = {.text = ""};
    ep_client *client = NULL;
    ep_client_config config;
    ep_client_config_init(&config);
    config.coordinator_url = url;
    NEED(ep_client_create(&config, &client, &error) == EP_OK);
    NEED(ep_client_wait_ready(client, 30000000, &error) == EP_OK);
    return client;
}

static ep_err forward(ep_client *client, float *y, ep_error *out_error)
{
    ep_moe_args args;
    ep_moe_result result = {.struct_bytes = sizeof(result)};
    ep_tensor out = ep_tensor_2d(y, EP_DTYPE_F32, T, H);
    ep_moe_args_init(&args);
    args.model = "demo";
    args.layer = 2;
    args.x = ep_tensor_2d(x, EP_DTYPE_F32, T, H);
    args.expert_ids = ep_tensor_2d(ids, EP_DTYPE_I32, T, K);
    args.expert_scales = ep_tensor_2d(scales, EP_DTYPE_F32, T, K);
    ep_err err = ep_moe_forward(client, &args, &out, &result);
    *out_error = result.error;
    return err;
}

static void check_call(ep_client *client)
{
    ep_error error;
    float y[T * H];
    NEED(forward(client, y, &error) == EP_OK);
    NEED(memcmp(y, wanted, sizeof(y)) == 0);
}

static void check_own_client(void)
{
    ep_client *client = connect_to();
    check_call(client);
    ep_client_destroy(client);
}

static void check_parents_client(ep_client *client)
{
    ep_error error;
    float y[T * H];
    NEED(forward(client, y, &error) == EP_ERR_FAILED_PRECONDITION);
    NEED(strstr(error.text, "forked") != NULL);
    NEED(ep_client_wait_ready(client, 1, &error) == EP_ERR_FAILED_PRECONDITION);
    ep_client_destroy(client);
}

/* The parent's, which hide its end from the peers. nng gives its away to nobody. */
static void check_no_sockets(void)
{
    const char *lane = getenv("LIBEXPERTD_STREAM_LANE");
    for (int fd = 0; fd < FDS_MAX; fd++) {
        ep_error error = {.text = ""};
        int family = AF_UNSPEC;
        socklen_t bytes = sizeof(family);
        snprintf(error.text, sizeof(error.text), "descriptor %d", fd);
        NEED(getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &family, &bytes) != 0 ||
             (family == AF_INET && lane != NULL && strcmp(lane, "nng") == 0));
    }
}

static pid_t fork_child(void)
{
    pid_t child = fork();
    if (child == 0) {
        signal(SIGALRM, SIG_DFL);
        alarm(CHILD_LIFE_S); /* one that hangs ends, and is seen */
        check_no_sockets();
    }
    return child;
}

static void wait_child(pid_t child)
{
    ep_error error = {.text = "the child failed or hung"};
    int status = 0;
    NEED(waitpid(child, &status, 0) == child);
    NEED(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void fork_before(void)
{
    pid_t child = fork_child();
    ep_error error;
    ep_client *client = connect_to(); /* both */
    NEED(forward(client, wanted, &error) == EP_OK);
    check_call(client);
    ep_client_destroy(client);
    if (child == 0) {
        exit(0);
    }
    wait_child(child);
}

/* And the child's child, of which the same holds. */
static void fork_after(ep_client *client)
{
    check_call(client);
    pid_t child = fork_child();
    if (child == 0) {
        check_parents_client(client);
        ep_client *own = connect_to();
        check_call(own);
        pid_t grandchild = fork_child();
        if (grandchild == 0) {
            check_parents_client(own);
            check_own_client();
            exit(0);
        }
        check_call(own);
        wait_child(grandchild);
        ep_client_destroy(own);
        exit(0);
    }
    check_call(client);
    wait_child(child);
    check_call(client);
}

static void *call_on(void *client)
{
    while (!__atomic_load_n(&stopping, __ATOMIC_ACQUIRE)) {
        check_call(client);
    }
    return NULL;
}

/* What cannot work in the child says so at once, and what to do. */
static void check_nng_refused(void)
{
    ep_error error;
    ep_client *own = NULL;
    ep_client_config config;
    ep_client_config_init(&config);
    config.coordinator_url = url;
    NEED(ep_client_create(&config, &own, &error) == EP_ERR_FAILED_PRECONDITION);
    NEED(strstr(error.text, "fork before the first client") != NULL);
}

static void fork_during(ep_client *client, void (*check_child)(void))
{
    ep_error error = {.text = ""};
    pthread_t callers[CALLERS];
    for (int i = 0; i < CALLERS; i++) {
        NEED(pthread_create(&callers[i], NULL, call_on, client) == 0);
    }
    for (int i = 0; i < CHILDREN; i++) {
        pid_t child = fork_child();
        if (child == 0) {
            check_parents_client(client);
            check_child();
            _exit(0);
        }
        wait_child(child);
    }
    __atomic_store_n(&stopping, true, __ATOMIC_RELEASE);
    for (int i = 0; i < CALLERS; i++) {
        pthread_join(callers[i], NULL);
    }
}

static void fork_after_nng(ep_client *client)
{
    check_call(client);
    pid_t child = fork_child();
    if (child == 0) {
        check_parents_client(client);
        check_nng_refused();
        setenv("LIBEXPERTD_STREAM_LANE", "uv", 1);
        check_own_client();
        exit(0);
    }
    wait_child(child);
    check_call(client);
    fork_during(client, check_nng_refused);
}

static void leave_child(ep_client *client)
{
    check_call(client);
    pid_t child = fork_child();
    if (child == 0) {
        close(STDOUT_FILENO); /* else who reads them waits for this process */
        close(STDERR_FILENO);
        pause();
    }
    printf("%d\n", (int)child);
    fflush(stdout);
    kill(getpid(), SIGKILL);
}

int main(int argc, char **argv)
{
    ep_error error = {.text = ""};
    ep_client *client = NULL;
    if (argc != 3) {
        return 2;
    }
    url = argv[1];
    for (int i = 0; i < T * H; i++) {
        x[i] = (float)(i * 37 % 64 - 32) / 32.0f;
    }
    const char *how = argv[2];
    if (strcmp(how, "before") != 0) {
        client = connect_to();
        NEED(forward(client, wanted, &error) == EP_OK);
    }
    if (strcmp(how, "before") == 0) {
        fork_before();
    } else if (strcmp(how, "after") == 0) {
        fork_after(client);
    } else if (strcmp(how, "during") == 0) {
        fork_during(client, check_own_client);
    } else if (strcmp(how, "left") == 0) {
        leave_child(client);
    } else {
        fork_after_nng(client);
    }
    ep_client_destroy(client);
    return 0;
}
