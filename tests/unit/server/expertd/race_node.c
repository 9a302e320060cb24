/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A whole node in one process, called by several threads while probes are read, the configuration
 * is read again and experts come and go, of several tenants and in step groups, then drained by a
 * signal. A plain program, so that ThreadSanitizer can watch it. Exit code 0: each caller got its
 * number of right replies, and between them nothing but right replies and the allowed error.
 */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/process_setup.h"
#include "expertd/node.h"
#include "expertd/node_private.h"
#include "support/checkpoint_fixture.h"
#include "support/forward_call.h"
#include "support/process.h"
#include "transport/transport.h"

#define CALLERS 4
#define CALLS 100 /* served, of each caller */
#define H 32

static ep_node *node;
static char model_path[EP_FIXTURE_PATH_BYTES];
static uint16_t x[4 * H];
static uint16_t plain[5 * H]; /* the rows that all replies are made of */
static _Atomic int bad;
static _Atomic int served;
static _Atomic int refused;
static _Atomic bool churn_ends;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER; /* a call was served, or churn_ends */
static const ep_wire_slot slots[] = {{0, 0}, {1, 0}, {2, 3}, {3, 6}, {0, 7}};

static const float slot_scales[] = {0.5f, 1.0f, -2.0f, 0.25f, 1.5f};
static const uint16_t slot_places[] = {1, 0, 3, 2, 0};

/* Each caller has its own form. */
static ep_test_forward request(size_t caller)
{
    return (ep_test_forward){.layer = 1,
                             .tenant = caller == 0   ? "one"
                                       : caller == 1 ? "two"
                                                     : NULL,
                             .prefill = caller == 3,
                             .node_sum = caller >= 2,
                             .slot_scales = slot_scales,
                             .slot_places = slot_places,
                             .reply_quant =
                                 caller == 1 || caller == 3 ? EP_COMBINE_INT8 : EP_COMBINE_PLAIN,
                             .rows = 4,
                             .slots = 5,
                             .hidden = H,
                             .x_dtype = EP_DTYPE_BF16,
                             .reply_dtype = EP_DTYPE_BF16,
                             .x = x,
                             .wire_slots = slots};
}

static void tell(void)
{
    pthread_mutex_lock(&lock);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* How long an expert is away depends on the loader, so calls that are refused meanwhile do not
 * count. */
static void *call_node(void *arg)
{
    ep_test_peer peer;
    ep_error error;
    uint16_t rows[5 * H], wanted[5 * H];
    const size_t caller = *(const size_t *)arg;
    ep_test_forward f = request(caller);
    const size_t wanted_bytes = ep_test_expected_reply(&f, plain, wanted);
    if (ep_test_peer_open(&peer, node->url, &error) != EP_OK) {
        atomic_fetch_add(&bad, 1);
        return NULL;
    }
    for (int i = 0; i < CALLS;) {
        f.step_group = f.prefill ? 0 : (uint64_t)(i / 2 + 1); /* some steps are met, some are not */
        f.step_group_size = f.prefill ? 0 : 3;
        ep_err err = ep_test_forward_run(&peer, &f, rows, &error);
        bool is_right = err == EP_OK && memcmp(rows, wanted, wanted_bytes) == 0;
        if (!is_right && err == EP_ERR_NOT_OWNER) {
            atomic_fetch_add(&refused, 1);
            continue;
        }
        if (is_right) {
            atomic_fetch_add(&served, 1);
            tell();
        } else {
            fprintf(stderr, "call %d: %s %s\n", i, ep_err_name(err), error.text);
            atomic_fetch_add(&bad, 1);
        }
        i++;
    }
    ep_test_peer_close(&peer);
    return NULL;
}

static void await_served(int count)
{
    pthread_mutex_lock(&lock);
    while (atomic_load(&served) < count && !atomic_load(&churn_ends)) {
        pthread_cond_wait(&changed, &lock);
    }
    pthread_mutex_unlock(&lock);
}

/*
 * Lets expert 6 of the layer go and come back, and reads what operators read. It goes only after it
 * was of use: else a loader that gets little of the processor never has it there.
 */
static void *churn(void *arg)
{
    (void)arg;
    uint8_t experts[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    for (int i = 0; !atomic_load(&churn_ends); i++) {
        experts[6] = i % 2;
        ep_weight_store_want(node->store, node->models.models[0].layers[1].store_slot, experts);
        ep_weight_store_drop_unwanted(node->store);
        if (i % 4 == 0) {
            kill(getpid(), SIGHUP);
        }
        ep_test_http_get(node->probe_url, i % 3 == 0 ? "/metrics" : "/readyz?verbose", NULL);
        if (experts[6] != 0) {
            await_served(atomic_load(&served) + 1);
        }
    }
    return NULL;
}

static void *drive(void *arg)
{
    pthread_t callers[CALLERS], churner;
    size_t numbers[CALLERS];
    (void)arg;
    pthread_create(&churner, NULL, churn, NULL);
    for (int i = 0; i < CALLERS; i++) {
        numbers[i] = (size_t)i;
        pthread_create(&callers[i], NULL, call_node, &numbers[i]);
    }
    for (int i = 0; i < CALLERS; i++) {
        pthread_join(callers[i], NULL);
    }
    atomic_store(&churn_ends, true);
    tell();
    pthread_join(churner, NULL);
    kill(getpid(), SIGTERM);
    return NULL;
}

static int run(const ep_options *options, int argc, char **argv)
{
    ep_node_config config;
    ep_node_source source = {.options = options, .argc = argc, .argv = argv};
    ep_error error;
    pthread_t driver;
    if (ep_node_config_load(options, &config, &error) != EP_OK ||
        ep_node_create(&config, &source, &node, &error) != EP_OK) {
        fprintf(stderr, "%s\n", error.text);
        return 1;
    }
    pthread_create(&driver, NULL, drive, NULL);
    ep_node_run(node);
    pthread_join(driver, NULL);
    ep_node_destroy(node);
    ep_node_config_fini(&config);
    printf("served %d refused %d bad %d\n", atomic_load(&served), atomic_load(&refused),
           atomic_load(&bad));
    return atomic_load(&bad) == 0 && atomic_load(&served) == CALLERS * CALLS ? 0 : 1;
}

/* race_node [WEIGHT_BYTES_MAX]: with a budget experts come and go under the callers. */
int main(int own_argc, char **own_argv)
{
    ep_fixture_config fixture = ep_fixture_default();
    char model_flag[EP_FIXTURE_PATH_BYTES + 32];
    char budget_flag[64];
    ep_options *options = NULL;
    ep_error error;
    ep_process_setup();
    ep_fixture_temp_dir(model_path);
    snprintf(model_flag, sizeof(model_flag), "--model=demo=%s", model_path);
    snprintf(budget_flag, sizeof(budget_flag), "--weight-bytes-max=%s",
             own_argc > 1 ? own_argv[1] : "0");
    char *argv[] = {(char *)(uintptr_t) "race",
                    model_flag,
                    (char *)(uintptr_t) "--listen=tcp://127.0.0.1:0",
                    (char *)(uintptr_t) "--probe-address=127.0.0.1:0",
                    (char *)(uintptr_t) "--admin-listen=",
                    (char *)(uintptr_t) "--door-listen=tcp://127.0.0.1:0",
                    (char *)(uintptr_t) "--threads=2",
                    (char *)(uintptr_t) "--tenant=one=3",
                    (char *)(uintptr_t) "--tenant=two=1",
                    (char *)(uintptr_t) "--step-group-us=300",
                    budget_flag};
    ep_test_forward f = request(0);
    ep_test_fill_rows(1, EP_DTYPE_BF16, 4 * H, x);
    int argc = (int)(sizeof(argv) / sizeof(argv[0]));
    int code = 1;
    if (ep_fixture_write(&fixture, model_path, &error) == EP_OK &&
        ep_test_expected_rows(model_path, &f, plain, &error) == EP_OK &&
        ep_options_load(&ep_node_options, argc, argv, NULL, &options, &error) == EP_OK) {
        code = run(options, argc, argv);
    } else {
        fprintf(stderr, "%s\n", error.text);
    }
    ep_options_free(options);
    ep_fixture_remove(model_path);
    ep_transport_fini();
    return code;
}
