/* SPDX-License-Identifier: Apache-2.0 */
/* What a node says of its state, and how many threads load its experts. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/log.h"
#include "common/process_setup.h"
#include "expertd/node.h"
#include "expertd/node_config.h"
#include "support/checkpoint_fixture.h"
#include "support/expect.h"
#include "support/forward_call.h"
#include "transport/transport.h"

static const ep_backend_ops *plain_ops;
static ep_backend_ops failing_ops;
static ep_err reason;
static _Atomic bool has_loaded;
static FILE *said;
static char line[EP_LOG_LINE_BYTES]; /* of said */

static ep_err open_failing(const ep_backend_config *config, ep_backend **out_backend,
                           ep_error *out_error)
{
    const ep_err err = plain_ops->open(config, out_backend, out_error);
    if (err == EP_OK) {
        (*out_backend)->ops = &failing_ops;
    }
    return err;
}

/* One expert loads. */
static ep_err load_failing(ep_backend *base, const ep_expert_source *source,
                           ep_backend_weights **out_weights, ep_error *out_error)
{
    return atomic_exchange(&has_loaded, true)
               ? ep_error_set(out_error, reason, "made up")
               : plain_ops->weights_load(base, source, out_weights, out_error);
}

static _Atomic uint32_t helpers; /* that were started */

int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *arg);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *arg);

/* Only helpers have attributes here. */
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *arg)
{
    atomic_fetch_add(&helpers, attributes != NULL);
    return __real_pthread_create(thread, attributes, run, arg);
}

static void await_line(const char *event)
{
    while (fgets(line, sizeof(line), said) != NULL && strstr(line, event) == NULL) {
    }
}

/* Calls for one expert each, whatever comes of them. */
static void ask_for_experts(const char *url)
{
    static const uint16_t x[32];
    ep_test_peer peer;
    ep_error e;
    ASSERT_OK(ep_test_peer_open(&peer, url, &e), e);
    for (uint16_t expert = 0; expert < 8; expert++) {
        const ep_wire_slot slot = {0, expert};
        const ep_test_forward f = {.layer = 1,
                                   .rows = 1,
                                   .slots = 1,
                                   .hidden = 32,
                                   .x_dtype = EP_DTYPE_BF16,
                                   .reply_dtype = EP_DTYPE_BF16,
                                   .x = x,
                                   .wire_slots = &slot};
        (void)ep_test_forward_run(&peer, &f, NULL, &e);
    }
    ep_test_peer_close(&peer);
}

/* Until the node tells its state, or with a caller the next one; then it ends. */
static void *read_state(void *has_caller)
{
    char url[64];
    await_line("event=node-start");
    cr_assert_eq(sscanf(strstr(line, "rpc_url="), "rpc_url=%63s", url), 1, "%s", line);
    await_line("event=node-state");
    if (has_caller != NULL) {
        cr_expect_not_null(strstr(line, " state=serving experts=16 experts_failed=0 "), "%s", line);
        ask_for_experts(url);
        await_line("event=node-state");
    }
    kill(getpid(), SIGTERM);
    return NULL;
}

/* The line of a node whose loads fail for the reason. */
static void run_node(const char *budget, bool has_caller)
{
    const char *const flags[] = {"--backend=failing",
                                 "--listen=tcp://127.0.0.1:0",
                                 "--admin-listen=",
                                 "--door-listen=",
                                 "--probe-address=",
                                 "--threads=8",
                                 budget};
    const ep_fixture_config fixture = ep_fixture_default();
    char model_path[EP_FIXTURE_PATH_BYTES], model_flag[EP_FIXTURE_PATH_BYTES + 32];
    char *argv[2 + EP_ARRAY_COUNT(flags)] = {(char *)(uintptr_t) "node", model_flag};
    ep_node_source source = {0};
    ep_options *options = NULL;
    ep_node_config config;
    ep_node *node;
    ep_error e;
    pthread_t reader;
    int ends[2];
    plain_ops = ep_backend_by_name("reference");
    failing_ops = *plain_ops;
    failing_ops.name = "failing";
    failing_ops.open = open_failing;
    failing_ops.weights_load = load_failing;
    ep_backend_register(&failing_ops);
    ep_process_setup();
    ep_fixture_new(&fixture, model_path);
    snprintf(model_flag, sizeof(model_flag), "--model=demo=%s", model_path);
    for (size_t i = 0; i < EP_ARRAY_COUNT(flags); i++) {
        argv[2 + i] = (char *)(uintptr_t)flags[i];
    }
    ASSERT_OK(ep_options_load(&ep_node_options, EP_ARRAY_COUNT(argv), argv, NULL, &options, &e), e);
    source.options = options;
    ASSERT_OK(ep_node_config_load(options, &config, &e), e);
    cr_assert_eq(pipe(ends), 0);
    cr_assert_geq(dup2(ends[1], STDERR_FILENO), 0);
    said = fdopen(ends[0], "r");
    ep_log_start(EP_LOG_INFO, EP_LOG_TEXT);
    cr_assert_eq(pthread_create(&reader, NULL, read_state, has_caller ? &reader : NULL), 0);
    ASSERT_OK(ep_node_create(&config, &source, &node, &e), e);
    ep_node_run(node);
    pthread_join(reader, NULL);
    ep_node_destroy(node);
    ep_node_config_fini(&config);
    ep_options_free(options);
    ep_fixture_remove(model_path);
    ep_transport_fini();
}

Test(node, experts_for_which_there_is_no_memory_are_not_the_files_fault)
{
    reason = EP_ERR_NO_MEMORY;
    run_node("--weight-bytes-max=0", false);
    cr_expect_not_null(strstr(line, " state=degraded experts=1 experts_failed=15 "), "%s", line);
    cr_expect_not_null(strstr(line, "more memory, with fewer experts, or with weight_bytes_max"),
                       "%s", line);
}

Test(node, a_node_whose_cold_experts_cannot_be_loaded_does_not_say_that_it_serves)
{
    reason = EP_ERR_NO_MEMORY;
    run_node("--weight-bytes-max=1GiB", true);
    cr_expect_not_null(strstr(line, " state=degraded experts=16 experts_failed=0 "), "%s", line);
    cr_expect_not_null(strstr(line, ": made up"), "%s", line);
    cr_expect_not_null(strstr(line, "cold experts are loaded again when they are asked for"), "%s",
                       line);
}

Test(node, experts_that_cannot_be_used_are_said_to_be_the_files_fault)
{
    reason = EP_ERR_BAD_FILE;
    run_node("--weight-bytes-max=0", false);
    cr_expect_not_null(strstr(line, " state=degraded experts=1 experts_failed=15 "), "%s", line);
    cr_expect_not_null(strstr(line, "put the checkpoint's files right"), "%s", line);
}

/* Whatever computes. */
Test(node, no_more_threads_load_than_there_are_cpus)
{
    cpu_set_t all, one;
    cr_assert_eq(sched_getaffinity(0, sizeof(all), &all), 0);
    int cpu = 0;
    while (!CPU_ISSET(cpu, &all)) {
        cpu++;
    }
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    cr_assert_eq(sched_setaffinity(0, sizeof(one), &one), 0);
    reason = EP_ERR_BAD_FILE;
    run_node("--weight-bytes-max=0", false);
    cr_expect_eq(atomic_load(&helpers), 0, "%u helpers", atomic_load(&helpers));
}
