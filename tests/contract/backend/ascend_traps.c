/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backend "ascend" over the emulated device: a scene of loads and jobs, and what must come of it.
 *     well HOME FIRST COUNT    with COUNT seeds of delays all rows are right
 *     find HOME COUNT [TEXT]   for a mutant: within COUNT seeds the scene ends otherwise, saying TEXT
 *     faults HOME COUNT        failures at each of the first COUNT places of every kind: no wrong row, no leak, no
 * hang Every scene is a process of its own.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/log.h"
#include "base/random.h"
#include "contract/backend/expert_fixture.h"

enum { EXPERTS = 5, W8A8 = 4, JOBS = 24, ROWS = 10, SECONDS_MAX = 100 };

typedef struct loading {
    ep_backend *backend;
    const expert_fixture *fixture;
    ep_backend_weights *weights;
    ep_error error;
    ep_err err;
} loading;

/* Loader threads of the daemon know nothing of devices. */
static void *load(void *arg)
{
    loading *l = arg;
    l->err = l->backend->ops->weights_load(l->backend, &l->fixture->source, &l->weights, &l->error);
    return NULL;
}

static bool tolerate; /* failures are planned: what must not happen is a wrong row */
static int failures;

static void fail(const char *what, const char *why)
{
    fprintf(stderr, "scene: %s: %s\n", what, why);
    failures++;
}

static void load_all(ep_backend *backend, const expert_fixture *fixtures, ep_backend_weights **weights)
{
    for (int e = 0; e < EXPERTS; e++) {
        pthread_t thread;
        loading l = {.backend = backend, .fixture = &fixtures[e]};
        if (pthread_create(&thread, NULL, load, &l) != 0) {
            exit(2);
        }
        pthread_join(thread, NULL);
        weights[e] = l.weights;
        const bool has =
            e != W8A8 || backend->ops->weights_bytes(backend, &fixtures[e].source) != 0; /* older releases */
        if (has && l.err != EP_OK && (!tolerate || l.error.text[0] == '\0')) {
            fail("load", l.error.text);
        }
    }
}

static void run_jobs(ep_backend *backend, const expert_fixture *fixtures, ep_backend_weights **weights,
                     uint64_t *state)
{
    fixture_job jobs[JOBS];
    bool taken[JOBS];
    for (int j = 0; j < JOBS; j++) {
        int e = (int)(ep_splitmix64(state) % EXPERTS);
        e = e == W8A8 && weights[e] == NULL ? 0 : e;
        const uint32_t count = 1 + (uint32_t)(ep_splitmix64(state) % ROWS);
        fixture_job_init(&jobs[j], &fixtures[e], weights[e], (uint32_t)(ep_splitmix64(state) % (ROWS + 1 - count)),
                         count);
        jobs[j].job.priority = ep_splitmix64(state) % 3;
        const ep_err err = weights[e] != NULL ? ep_backend_run(backend, &jobs[j].job) : EP_ERR_NO_MEMORY;
        taken[j] = err == EP_OK;
        if (err != EP_OK && !tolerate) {
            fail("submit", ep_err_name(err));
        }
    }
    for (int j = 0; j < JOBS; j++) {
        const ep_err err = taken[j] ? fixture_job_wait(&jobs[j]) : EP_ERR_ABORTED;
        const char *wrong = err == EP_OK ? fixture_job_check(&jobs[j]) : NULL;
        if (wrong != NULL) {
            fail("rows", wrong);
        } else if (err != EP_OK && !tolerate) {
            fail("job", ep_err_name(err));
        }
        fixture_job_fini(&jobs[j]);
    }
}

/* The process of one scene. */
static int scene(uint64_t seed)
{
    const ep_backend_config config = {.numerics = EP_NUMERICS_AUTO};
    const ep_dtype dtypes[EXPERTS] = {EP_DTYPE_BF16, EP_DTYPE_BF16, EP_DTYPE_BF16, EP_DTYPE_F16, EP_DTYPE_I8};
    expert_fixture fixtures[EXPERTS];
    ep_backend_weights *weights[EXPERTS] = {NULL};
    ep_backend *backend = NULL;
    ep_error error;
    char text[32];
    snprintf(text, sizeof(text), "%llu", (unsigned long long)seed);
    setenv("EP_CANN_SEED", text, 1);
    ep_log_start(EP_LOG_INFO, EP_LOG_TEXT);
    if (ep_backend_by_name("ascend")->open(&config, &backend, &error) != EP_OK) {
        fprintf(stderr, "open: %s\n", error.text);
        return tolerate && error.text[0] != '\0' ? 0 : 1;
    }
    for (int e = 0; e < EXPERTS; e++) { /* three of one shape ride together; odd sizes leave gaps */
        fixtures[e] = expert_fixture_make(7 * seed + (uint64_t)e, e < 3 ? 37 : 64, e < 3 ? 21 : 40, ROWS, dtypes[e]);
    }
    memset((void *)(uintptr_t)fixtures[W8A8].rows[0].x, 0, 64 * ep_dtype_bytes(fixtures[W8A8].x_dtype));
    expert_fixture_answer(&fixtures[W8A8], EP_FFN_FAMILY_PORTABLE);
    load_all(backend, fixtures, weights);
    uint64_t state = seed;
    run_jobs(backend, fixtures, weights, &state);
    for (int e = 0; e < EXPERTS; e++) {
        backend->ops->weights_unload(backend, weights[e]);
        expert_fixture_free(&fixtures[e]);
    }
    backend->ops->close(backend);
    return failures != 0;
}

/* What a scene's process ended with; out_text: what it said. */
static bool scene_is_well(uint64_t seed, char *out_text, size_t bytes)
{
    int ends[2];
    size_t used = 0;
    int status = 0;
    if (pipe(ends) != 0) {
        exit(2);
    }
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        alarm(SECONDS_MAX); /* a scene that hangs has failed */
        exit(scene(seed));
    }
    close(ends[1]);
    char piece[4096];
    for (ssize_t n; (n = read(ends[0], piece, sizeof(piece))) > 0;) {
        const size_t kept = (size_t)n < bytes - 1 - used ? (size_t)n : bytes - 1 - used;
        memcpy(out_text + used, piece, kept);
        used += kept;
    }
    out_text[used] = '\0';
    close(ends[0]);
    if (waitpid(child, &status, 0) != child) {
        exit(2);
    }
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static char text[65536];

static int run_well(uint64_t first, uint64_t count)
{
    for (uint64_t seed = first; seed < first + count; seed++) {
        if (!scene_is_well(seed, text, sizeof(text))) {
            fprintf(stderr, "seed %llu:\n%s\n", (unsigned long long)seed, text);
            return 1;
        }
    }
    printf("%llu seeds\n", (unsigned long long)count);
    return 0;
}

static int run_find(uint64_t count, const char *wanted)
{
    for (uint64_t seed = 1; seed <= count; seed++) {
        if (!scene_is_well(seed, text, sizeof(text))) {
            const bool found = strstr(text, wanted) != NULL;
            printf("seed %llu: %s, %.1000s\n", (unsigned long long)seed,
                   found ? "found" : "ended otherwise than wanted", text);
            return found ? 0 : 1;
        }
    }
    fprintf(stderr, "not found within %llu seeds\n", (unsigned long long)count);
    return 1;
}

static int run_faults(uint64_t count)
{
    static const char *const kinds[] = {"EP_CANN_OOM_AT", "EP_CANN_FAULT_AT", "EP_CANN_HANG_AT", "EP_CANN_LOST_AT"};
    tolerate = true;
    for (size_t k = 0; k < sizeof(kinds) / sizeof(kinds[0]); k++) {
        for (uint64_t at = 1; at <= count; at++) {
            char number[32];
            snprintf(number, sizeof(number), "%llu", (unsigned long long)at);
            setenv(kinds[k], number, 1);
            if (!scene_is_well(at, text, sizeof(text))) {
                fprintf(stderr, "%s=%s:\n%s\n", kinds[k], number, text);
                return 1;
            }
            unsetenv(kinds[k]);
        }
    }
    printf("%llu failures\n", 4 * (unsigned long long)count);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc >= 4) {
        setenv("ASCEND_HOME_PATH", argv[2], 1);
        const uint64_t number = strtoull(argv[3], NULL, 0);
        if (strcmp(argv[1], "well") == 0 && argc == 5) {
            return run_well(number, strtoull(argv[4], NULL, 0));
        }
        if (strcmp(argv[1], "find") == 0) {
            return run_find(number, argc == 5 ? argv[4] : "");
        }
        if (strcmp(argv[1], "faults") == 0) {
            return run_faults(number);
        }
    }
    fprintf(stderr, "usage: %s well HOME FIRST COUNT | find HOME COUNT TEXT | faults HOME COUNT\n", argv[0]);
    return 2;
}
