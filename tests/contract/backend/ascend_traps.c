/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backend "ascend" over the emulated device: a scene of loads and jobs, and what must come of it.
 *     well HOME FIRST COUNT [LONG]     with COUNT seeds of delays all rows are right
 *     find HOME COUNT [TEXT]           for a mutant: within COUNT seeds the scene ends otherwise,
 *                                      saying TEXT
 *     faults HOME COUNT [LONG]         COUNT failures of every kind, anywhere in it: no wrong row,
 *                                      no leak, no hang
 *     suite PROGRAM FIRST COUNT [LONG] another test over the device, with COUNT seeds of delays
 * EP_TEST_LONG=1: LONG in the place of COUNT. Every scene is a process of its own.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/log.h"
#include "base/random.h"
#include "contract/backend/expert_fixture.h"

enum { JOBS = 36, ROWS = 10, SECONDS_MAX = 100 };

/* Those of one shape and kind ride together; odd sizes leave gaps. I of 64 is for the fused
 * operator, of 48 almost. */
static const struct {
    uint32_t hidden;
    uint32_t inner;
    ep_dtype dtype;
    ep_activation activation;
    bool has_biases;
    bool needed; /* every release has what it takes */
} experts[] = {
    {37, 21, EP_DTYPE_BF16, EP_ACT_SILU, false, true},
    {37, 21, EP_DTYPE_BF16, EP_ACT_SILU, false, true},
    {37, 21, EP_DTYPE_BF16, EP_ACT_SILU, true, true},
    {37, 21, EP_DTYPE_BF16, EP_ACT_SWIGLU_OAI, true, true},
    {37, 21, EP_DTYPE_BF16, EP_ACT_SWIGLU_OAI, true, true},
    {37, 21, EP_DTYPE_BF16, EP_ACT_GELU_TANH, false, true},
    {64, 40, EP_DTYPE_F16, EP_ACT_SILU, false, true},
    {64, 40, EP_DTYPE_F16, EP_ACT_GELU, true, true},
    {64, 40, EP_DTYPE_F16, EP_ACT_SWIGLU_LIMIT, false, true},
    {64, 40, EP_DTYPE_I8, EP_ACT_SILU, false, false},
    {64, 40, EP_DTYPE_I8, EP_ACT_SILU, false, false},
    {64, 48, EP_DTYPE_I8, EP_ACT_SILU, false, false},
    {64, 64, EP_DTYPE_I8, EP_ACT_SILU, false, false},
    {64, 64, EP_DTYPE_I8, EP_ACT_SILU, false, false},
    {64, 64, EP_DTYPE_I8, EP_ACT_SWIGLU_OAI, true, false},
};
enum { EXPERTS = sizeof(experts) / sizeof(experts[0]) };

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

static void set_number(const char *name, uint64_t value)
{
    char number[32];
    snprintf(number, sizeof(number), "%llu", (unsigned long long)value);
    setenv(name, number, 1);
}

static void load_all(ep_backend *backend, const expert_fixture *fixtures,
                     ep_backend_weights **weights)
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
            experts[e].needed || backend->ops->weights_bytes(backend, &fixtures[e].source) != 0;
        if (has && l.err != EP_OK && (!tolerate || l.error.text[0] == '\0')) {
            fail("load", l.error.text);
        }
    }
}

static void run_jobs(ep_backend *backend, const expert_fixture *fixtures,
                     ep_backend_weights **weights, uint64_t *state)
{
    fixture_job jobs[JOBS];
    bool taken[JOBS];
    for (int j = 0; j < JOBS; j++) {
        int e = (int)(ep_splitmix64(state) % EXPERTS);
        e = !experts[e].needed && weights[e] == NULL ? 0 : e;
        const uint32_t count = 1 + (uint32_t)(ep_splitmix64(state) % ROWS);
        fixture_job_init(&jobs[j], &fixtures[e], weights[e],
                         (uint32_t)(ep_splitmix64(state) % (ROWS + 1 - count)), count);
        jobs[j].job.priority = ep_splitmix64(state) % 3;
        const ep_err err =
            weights[e] != NULL ? ep_backend_run(backend, &jobs[j].job) : EP_ERR_NO_MEMORY;
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

/* A backend that could not be opened leaves the runtime to others: its end finds what was left
 * behind. */
static void end_runtime(void)
{
    void *runtime = dlopen("libacl_rt.so", RTLD_NOW | RTLD_NOLOAD);
    void *symbol = runtime != NULL ? dlsym(runtime, "aclFinalize") : NULL;
    int (*finalize)(void);
    memcpy(&finalize, &symbol, sizeof(finalize));
    if (finalize == NULL || finalize() != 0) {
        fail("open", "aclFinalize");
    }
}

/* The process of one scene. */
static int scene(uint64_t seed)
{
    const ep_backend_config config = {.numerics = EP_NUMERICS_AUTO};
    expert_fixture fixtures[EXPERTS];
    ep_backend_weights *weights[EXPERTS] = {NULL};
    ep_backend *backend = NULL;
    ep_error error;
    set_number("EP_CANN_SEED", seed);
    ep_log_start(EP_LOG_INFO, EP_LOG_TEXT);
    if (ep_backend_by_name("ascend")->open(&config, &backend, &error) != EP_OK) {
        fprintf(stderr, "open: %s\n", error.text);
        if (!tolerate || error.text[0] == '\0') {
            return 1;
        }
        end_runtime();
        return failures != 0;
    }
    for (int e = 0; e < EXPERTS; e++) {
        fixtures[e] = expert_fixture_make(EXPERTS * seed + (uint64_t)e, experts[e].hidden,
                                          experts[e].inner, ROWS, experts[e].dtype);
        if (experts[e].dtype == EP_DTYPE_I8) { /* a row of zeros */
            memset((void *)(uintptr_t)fixtures[e].rows[0].x, 0,
                   experts[e].hidden * ep_dtype_bytes(fixtures[e].x_dtype));
        }
        expert_fixture_reshape(&fixtures[e], seed, experts[e].activation, experts[e].has_biases);
    }
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

/* What a scene's process, or a program's, ended with; out_text: what it said. */
static bool process_is_well(const char *program, uint64_t seed, char *out_text, size_t bytes)
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
        if (program != NULL) {
            dup2(STDERR_FILENO, STDOUT_FILENO);
            set_number("EP_CANN_SEED", seed);
            /* a device has none */
            execl(program, program, "--filter", "backend/!(*_with_one_thread)", (char *)NULL);
            _exit(2);
        }
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

static bool scene_is_well(uint64_t seed)
{
    return process_is_well(NULL, seed, text, sizeof(text));
}

static int run_well(const char *program, uint64_t first, uint64_t count)
{
    for (uint64_t seed = first; seed < first + count; seed++) {
        if (!process_is_well(program, seed, text, sizeof(text))) {
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
        if (!scene_is_well(seed)) {
            const bool found = strstr(text, wanted) != NULL;
            printf("seed %llu: %s, %.1000s\n", (unsigned long long)seed,
                   found ? "found" : "ended otherwise than wanted", text);
            return found ? 0 : 1;
        }
    }
    fprintf(stderr, "not found within %llu seeds\n", (unsigned long long)count);
    return 1;
}

/* How many tasks and allocations a scene has in which nothing fails. */
static bool count_places(unsigned long long *tasks, unsigned long long *allocations)
{
    setenv("EP_CANN_TELL", "1", 1);
    const bool well = scene_is_well(1);
    unsetenv("EP_CANN_TELL");
    const char *told = strstr(text, "cann: tasks ");
    return well && told != NULL &&
           sscanf(told, "cann: tasks %llu allocations %llu", tasks, allocations) == 2;
}

static int run_faults(uint64_t count)
{
    static const char *const kinds[] = {"EP_CANN_OOM_AT", "EP_CANN_FAULT_AT", "EP_CANN_HANG_AT",
                                        "EP_CANN_LOST_AT"};
    unsigned long long tasks = 0;
    unsigned long long allocations = 0;
    if (!count_places(&tasks, &allocations)) {
        fprintf(stderr, "the scene without failures:\n%s\n", text);
        return 1;
    }
    tolerate = true;
    for (uint64_t i = 1; i <= count; i++) {
        const char *kind = kinds[i % 4];
        uint64_t state = i;
        const uint64_t at = 1 + ep_splitmix64(&state) % (i % 4 == 0 ? allocations : tasks);
        set_number(kind, at);
        if (!scene_is_well(i)) {
            fprintf(stderr, "seed %llu, %s=%llu:\n%s\n", (unsigned long long)i, kind,
                    (unsigned long long)at, text);
            return 1;
        }
        unsetenv(kind);
    }
    printf("%llu failures in %llu tasks and %llu allocations\n", (unsigned long long)count, tasks,
           allocations);
    return 0;
}

/* The count at argv[at], or that behind it in the long form. */
static uint64_t count_of(int argc, char **argv, int at)
{
    const bool is_long = getenv("EP_TEST_LONG") != NULL && argc > at + 1;
    return strtoull(argv[is_long ? at + 1 : at], NULL, 0);
}

int main(int argc, char **argv)
{
    const char *mode = argc >= 4 ? argv[1] : "";
    if (strcmp(mode, "suite") == 0 && argc >= 5) {
        return run_well(argv[2], strtoull(argv[3], NULL, 0), count_of(argc, argv, 4));
    }
    if (argc >= 4) {
        setenv("ASCEND_HOME_PATH", argv[2], 1);
    }
    if (strcmp(mode, "well") == 0 && argc >= 5) {
        return run_well(NULL, strtoull(argv[3], NULL, 0), count_of(argc, argv, 4));
    }
    if (strcmp(mode, "find") == 0) {
        return run_find(strtoull(argv[3], NULL, 0), argc == 5 ? argv[4] : "");
    }
    if (strcmp(mode, "faults") == 0) {
        return run_faults(count_of(argc, argv, 3));
    }
    fprintf(stderr,
            "usage: %s well HOME FIRST COUNT [LONG] | find HOME COUNT [TEXT] | faults HOME COUNT "
            "[LONG] | suite PROGRAM FIRST COUNT [LONG]\n",
            argv[0]);
    return 2;
}
