/* SPDX-License-Identifier: Apache-2.0 */
/* Backend "ascend" over the emulated device: passes of every kind, of as many jobs as one may have
 * and of many rows. */
#include <criterion/criterion.h>
#include <semaphore.h>

#include "backends/ascend/ascend_slot.h"
#include "contract/backend/backend_variants.h"
#include "contract/backend/expert_fixture.h"

enum { ROWS = 9, MANY_ROWS = 600, JOBS = 2 * EP_ACL_GROUPS_MAX, SLOTS = 4 };

/* Holds the thread that tells of ends, so that no slot becomes free: what is submitted meanwhile
 * waits. */
typedef struct gate {
    sem_t open;
    sem_t reached;
} gate;

static void wait_at_gate(ep_job *job, ep_err result)
{
    gate *g = job->arg;
    cr_assert_eq(result, EP_OK);
    sem_post(&g->reached);
    sem_wait(&g->open);
}

/* Jobs of experts that ride with no others take the slots; then the full passes come. */
static void run_full_passes(ep_backend *backend, const expert_fixture *f)
{
    gate g;
    expert_fixture others[SLOTS];
    fixture_job first;
    fixture_job busy[SLOTS];
    static fixture_job jobs[JOBS];
    ep_backend_weights *weights = fixture_load(f, backend);
    ep_backend_weights *other_weights[SLOTS];
    sem_init(&g.open, 0, 0);
    sem_init(&g.reached, 0, 0);
    for (int s = 0; s < SLOTS; s++) {
        others[s] = expert_fixture_make((uint64_t)s, 8 + (uint32_t)s, 8, 1, EP_DTYPE_BF16);
        other_weights[s] = fixture_load(&others[s], backend);
        fixture_job_init(&busy[s], &others[s], other_weights[s], 0, 1);
    }
    fixture_job_init(&first, &others[0], other_weights[0], 0, 1);
    first.job.done = wait_at_gate;
    first.job.arg = &g;
    cr_assert_eq(ep_backend_run(backend, &first.job), EP_OK);
    sem_wait(&g.reached);
    for (int s = 0; s < SLOTS; s++) {
        cr_assert_eq(ep_backend_run(backend, &busy[s].job), EP_OK);
    }
    for (uint32_t j = 0; j < JOBS; j++) {
        const uint32_t count = 1 + j % 3;
        fixture_job_init(&jobs[j], f, weights, j % (ROWS + 1 - count), count);
        jobs[j].job.priority = 1;
        cr_assert_eq(ep_backend_run(backend, &jobs[j].job), EP_OK);
    }
    sem_post(&g.open);
    for (uint32_t j = 0; j < JOBS; j++) {
        cr_assert_eq(fixture_job_wait(&jobs[j]), EP_OK);
        const char *wrong = fixture_job_check(&jobs[j]);
        cr_assert_null(wrong, "job %u: %s", j, wrong != NULL ? wrong : "");
        fixture_job_fini(&jobs[j]);
    }
    for (int s = 0; s < SLOTS; s++) {
        cr_assert_eq(fixture_job_wait(&busy[s]), EP_OK);
        fixture_job_fini(&busy[s]);
        backend->ops->weights_unload(backend, other_weights[s]);
        expert_fixture_free(&others[s]);
    }
    fixture_job_fini(&first);
    backend->ops->weights_unload(backend, weights);
    sem_destroy(&g.open);
    sem_destroy(&g.reached);
}

static const struct {
    uint32_t hidden;
    uint32_t inner;
    ep_dtype dtype;
    ep_activation activation;
    bool has_biases;
} kinds[] = {{37, 21, EP_DTYPE_BF16, EP_ACT_SILU, false},
             {37, 21, EP_DTYPE_BF16, EP_ACT_SWIGLU_OAI, true},
             {40, 20, EP_DTYPE_F16, EP_ACT_GELU, true},
             {64, 64, EP_DTYPE_I8, EP_ACT_SILU, false},     /* GroupedMatmulSwigluQuant */
             {64, 40, EP_DTYPE_I8, EP_ACT_SILU, false},     /* not in whole fractals */
             {64, 64, EP_DTYPE_I8, EP_ACT_GELU_TANH, true}, /* every list there is */
             {64, 48, EP_DTYPE_I8, EP_ACT_SWIGLU_LIMIT, false},
             {37, 21, EP_DTYPE_I8, EP_ACT_SILU, false}}; /* one job in a pass */
enum { KINDS = sizeof(kinds) / sizeof(kinds[0]) };

static expert_fixture fixture_of(size_t kind, uint32_t rows)
{
    expert_fixture f = expert_fixture_make(70 + kind, kinds[kind].hidden, kinds[kind].inner, rows,
                                           kinds[kind].dtype);
    expert_fixture_reshape(&f, kind, kinds[kind].activation, kinds[kind].has_biases);
    return f;
}

Test(ascend_passes, one_job_of_many_rows_of_every_kind)
{
    ep_backend *backend = backend_variant_open(0, 1, 0);
    for (size_t k = 0; k < KINDS; k++) {
        expert_fixture f = fixture_of(k, MANY_ROWS);
        ep_backend_weights *weights = fixture_load(&f, backend);
        const char *wrong = fixture_run(&f, backend, weights, 0, MANY_ROWS);
        cr_assert_null(wrong, "kind %zu: %s", k, wrong != NULL ? wrong : "");
        backend->ops->weights_unload(backend, weights);
        expert_fixture_free(&f);
    }
    backend->ops->close(backend);
}

Test(ascend_passes, as_many_jobs_as_one_may_have_of_every_kind)
{
    ep_backend *backend = backend_variant_open(0, 1, 0);
    for (size_t k = 0; k < KINDS; k++) {
        expert_fixture f = fixture_of(k, ROWS);
        run_full_passes(backend, &f);
        expert_fixture_free(&f);
    }
    backend->ops->close(backend);
}
