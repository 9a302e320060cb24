/* SPDX-License-Identifier: Apache-2.0 */
/* ep_backend_run over memory the host cannot touch: order, faults at every stage, nothing
 * leaked. */
#include <criterion/criterion.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "contract/backend/backend_variants.h"
#include "contract/backend/expert_fixture.h"
#include "support/expect.h"
#include "support/slow_backend.h"

typedef struct {
    expert_fixture f;
    ep_backend *backend;
    ep_backend_weights *weights;
} bench;

static bench open_bench(void)
{
    const ep_backend_config config = {.threads = 1};
    bench b = {.f = expert_fixture_make(8, 33, 21, 10, EP_DTYPE_BF16)};
    ep_error error;
    ep_slow_backend_reset(1);
    ASSERT_OK(ep_slow_backend_ops.open(&config, &b.backend, &error), error);
    b.weights = fixture_load(&b.f, b.backend);
    ep_slow_backend_reset(1);
    return b;
}

static void close_bench(bench *b)
{
    cr_assert_eq(ep_slow_backend_blocks_alive(), 0, "%llu blocks leaked",
                 (unsigned long long)ep_slow_backend_blocks_alive());
    b->backend->ops->weights_unload(b->backend, b->weights);
    b->backend->ops->close(b->backend);
    expert_fixture_free(&b->f);
}

Test(staging, goes_in_computes_and_comes_out_once)
{
    bench b = open_bench();
    cr_assert_null(fixture_run(&b.f, b.backend, b.weights, 0, 10));
    for (int operation = 0; operation < EP_SLOW_OPERATIONS; operation++) {
        cr_assert_eq(ep_slow_backend_count((ep_slow_operation)operation), 1);
    }
    close_bench(&b);
}

Test(staging, completes_out_of_order)
{
    enum { JOBS = 64 };
    bench b = open_bench();
    fixture_job jobs[JOBS];
    for (uint32_t j = 0; j < JOBS; j++) {
        fixture_job_init(&jobs[j], &b.f, b.weights, j % 10, 1);
        cr_assert_eq(ep_backend_run(b.backend, &jobs[j].job), EP_OK);
    }
    for (uint32_t j = 0; j < JOBS; j++) {
        cr_assert_eq(fixture_job_wait(&jobs[j]), EP_OK);
        cr_assert_null(fixture_job_check(&jobs[j]));
        fixture_job_fini(&jobs[j]);
    }
    cr_assert_gt(ep_slow_backend_overtakings(), 10);
    close_bench(&b);
}

/* One fault: the run, or its done(), brings just that error, once; outputs stay untouched; the next
 * run works. */
static void expect_fault(ep_slow_operation operation, ep_slow_moment moment, ep_err err)
{
    bench b = open_bench();
    fixture_job job;
    fixture_job_init(&job, &b.f, b.weights, 0, 10);
    ep_slow_backend_fail(operation, moment, 1, err);
    ep_err got = ep_backend_run(b.backend, &job.job);
    if (got == EP_OK) {
        got = fixture_job_wait(&job);
        cr_assert_eq(job.done_count, 1);
    } else {
        cr_assert_eq(job.done_count, 0);
    }
    cr_assert_eq(got, err, "operation %d moment %d: got %s, want %s", (int)operation, (int)moment,
                 ep_err_name(got), ep_err_name(err));
    for (size_t i = 0; i < job.out_bytes; i++) {
        cr_assert_eq(job.out[i], 0xa5, "outputs are written only on success");
    }
    fixture_job_fini(&job);
    cr_assert_null(fixture_run(&b.f, b.backend, b.weights, 0, 10));
    close_bench(&b);
}

Test(staging, brings_the_error_of_each_stage_once)
{
    expect_fault(EP_SLOW_ALLOC, EP_SLOW_AT_CALL, EP_ERR_NO_MEMORY);
    expect_fault(EP_SLOW_COPY_IN, EP_SLOW_AT_CALL, EP_ERR_RESOURCE_EXHAUSTED);
    expect_fault(EP_SLOW_COPY_IN, EP_SLOW_AT_DONE, EP_ERR_DEVICE_LOST);
    expect_fault(EP_SLOW_SUBMIT, EP_SLOW_AT_CALL, EP_ERR_RESOURCE_EXHAUSTED);
    expect_fault(EP_SLOW_SUBMIT, EP_SLOW_AT_DONE, EP_ERR_DEVICE_LOST);
    expect_fault(EP_SLOW_COPY_OUT, EP_SLOW_AT_CALL, EP_ERR_DEVICE_LOST);
    expect_fault(EP_SLOW_COPY_OUT, EP_SLOW_AT_DONE, EP_ERR_IO);
}

Test(staging, a_lost_device_fails_everything_in_flight_and_after)
{
    enum { JOBS = 32 };
    bench b = open_bench();
    fixture_job jobs[JOBS];
    for (uint32_t j = 0; j < JOBS; j++) {
        fixture_job_init(&jobs[j], &b.f, b.weights, 0, 10);
        cr_assert_eq(ep_backend_run(b.backend, &jobs[j].job), EP_OK);
    }
    cr_assert_eq(fixture_job_wait(&jobs[0]), EP_OK);
    ep_slow_backend_lose_device();
    for (uint32_t j = 0; j < JOBS; j++) { /* how many were still in flight depends on timing */
        ep_err err = fixture_job_wait(&jobs[j]);
        cr_assert(err == EP_OK || err == EP_ERR_DEVICE_LOST);
        cr_assert(err != EP_OK || fixture_job_check(&jobs[j]) == NULL);
        fixture_job_fini(&jobs[j]);
    }
    fixture_job after;
    fixture_job_init(&after, &b.f, b.weights, 0, 10);
    cr_assert_eq(ep_backend_run(b.backend, &after.job), EP_ERR_DEVICE_LOST);
    fixture_job_fini(&after);

    ep_backend_weights *weights = NULL;
    ep_error error;
    cr_assert_eq(b.backend->ops->weights_load(b.backend, &b.f.source, &weights, &error),
                 EP_ERR_DEVICE_LOST);
    cr_assert_str_eq(error.text, "backend slow: the device is lost");
    close_bench(&b);
}

Test(staging, host_addresses_are_refused_by_submit)
{
    bench b = open_bench();
    fixture_job job;
    fixture_job_init(&job, &b.f, b.weights, 0, 10);
    cr_assert_eq(b.backend->ops->submit(b.backend, &job.job), EP_ERR_INVALID_ARGUMENT);
    cr_assert_eq(job.done_count, 0);
    fixture_job_fini(&job);
    close_bench(&b);
}

static void nothing(void *arg, ep_err result)
{
    (void)arg;
    (void)result;
}

Test(staging, copies_past_a_block_are_refused)
{
    bench b = open_bench();
    ep_backend_memory *memory = NULL;
    uint8_t row[64] = {0};
    const void *in[2] = {row, row};
    void *out[2] = {row, row};
    cr_assert_eq(b.backend->ops->memory_alloc(b.backend, 100, &memory), EP_OK);
    cr_assert_eq(b.backend->ops->copy_in(b.backend, memory, 0, in, 64, 2, nothing, NULL),
                 EP_ERR_INVALID_ARGUMENT);
    cr_assert_eq(b.backend->ops->copy_in(b.backend, memory, 101, in, 0, 1, nothing, NULL),
                 EP_ERR_INVALID_ARGUMENT);
    cr_assert_eq(b.backend->ops->copy_out(b.backend, memory, 50, out, 51, 1, nothing, NULL),
                 EP_ERR_INVALID_ARGUMENT);
    cr_assert_eq(b.backend->ops->copy_out(b.backend, memory, SIZE_MAX, out, 51, 1, nothing, NULL),
                 EP_ERR_INVALID_ARGUMENT);
    b.backend->ops->memory_free(b.backend, memory);
    close_bench(&b);
}

/* The property that gives the suite its teeth: device memory touched by the host is a crash. */
Test(staging, touching_device_memory_from_the_host_crashes)
{
    bench b = open_bench();
    ep_backend_memory *memory = NULL;
    cr_assert_eq(b.backend->ops->memory_alloc(b.backend, 4096, &memory), EP_OK);
    volatile uint8_t *address = b.backend->ops->memory_address(memory);
    pid_t child = fork();
    cr_assert_geq(child, 0);
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);
        _exit(*address == 0 ? 0 : 1);
    }
    int status = 0;
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV,
              "the read went through, status %d", status);
    b.backend->ops->memory_free(b.backend, memory);
    close_bench(&b);
}
