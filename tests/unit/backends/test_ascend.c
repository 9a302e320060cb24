/* SPDX-License-Identifier: Apache-2.0 */
/* What backend "ascend" says when it is not available, and what it refuses, over the emulated
 * device. */
#include <criterion/criterion.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "backends/ascend/acl_symbols.h"
#include "backends/backend.h"
#include "base/check.h"
#include "support/expect.h"

static ep_error error; /* of the last call */

static uint16_t matrix[64 * 64];

static ep_expert_source expert(uint32_t hidden, uint32_t inner)
{
    return (ep_expert_source){.hidden = hidden,
                              .inner = inner,
                              .format = EP_WEIGHTS_BF16,
                              .activation = EP_ACT_SILU,
                              .gate = matrix,
                              .up = matrix,
                              .down = matrix};
}

static ep_err open_on(const char *home, ep_numerics numerics, ep_backend **out_backend,
                      ep_error *out_error)
{
    const ep_backend_config config = {.numerics = numerics};
    setenv("ASCEND_HOME_PATH", home, 1);
    return ep_backend_by_name("ascend")->open(&config, out_backend, out_error);
}

static ep_backend *open_emulated(void)
{
    ep_backend *backend = NULL;
    ASSERT_OK(open_on(EP_TEST_CANN, EP_NUMERICS_AUTO, &backend, &error), error);
    return backend;
}

static void expect_text(const char *part)
{
    ASSERT_TEXT(error, part);
}

Test(ascend, without_libraries_it_says_which_and_what_to_do)
{
    ep_backend *backend = NULL;
    cr_assert_eq(open_on("/nonexistent", EP_NUMERICS_AUTO, &backend, &error), EP_ERR_UNAVAILABLE);
    expect_text("not available (backend: cpu computes without a device): neither "
                "libacl_rt.so nor libascendcl.so can be opened: ");
    cr_assert_null(backend);
}

Test(ascend, without_a_device_it_says_so)
{
    ep_backend *backend = NULL;
    setenv("EP_CANN_DEVICES", "0", 1);
    cr_assert_eq(open_on(EP_TEST_CANN, EP_NUMERICS_AUTO, &backend, &error), EP_ERR_UNAVAILABLE);
    expect_text("there is no device (ACL_ERROR_RT_NO_DEVICE, code 207004) EL0004: no device");
    setenv("EP_CANN_DEVICES", "1", 1);
    backend = open_emulated(); /* nothing is left of the first try */
    backend->ops->close(backend);
}

Test(ascend, two_share_the_runtime_and_the_last_ends_it)
{
    ep_backend_weights *weights = NULL;
    const ep_expert_source source = expert(8, 8);
    ep_backend *first = open_emulated();
    ep_backend *second = open_emulated();
    first->ops->close(first);
    ASSERT_OK(second->ops->weights_load(second, &source, &weights, &error), error);
    second->ops->weights_unload(second, weights);
    second->ops->close(second);
}

Test(ascend, numerics_are_its_own)
{
    ep_backend *backend = NULL;
    char id[EP_NUMERICS_ID_BYTES];
    cr_assert_eq(open_on(EP_TEST_CANN, EP_NUMERICS_BF16DP, &backend, &error),
                 EP_ERR_INVALID_ARGUMENT);
    expect_text("numerics must be auto");
    backend = open_emulated();
    cr_assert_eq(backend->ops->numerics_id(backend, EP_WEIGHTS_F16, false, 0, id), EP_OK);
    cr_assert_eq(strncmp(id, "ascend/f16/rne/", 15), 0, "%s", id);
    cr_assert_eq(backend->ops->numerics_id(backend, EP_WEIGHTS_F32, false, 0, id),
                 EP_ERR_UNIMPLEMENTED);
    cr_assert_eq(backend->ops->numerics_id(backend, EP_WEIGHTS_MXFP4, false, 0, id),
                 EP_ERR_UNIMPLEMENTED);
    backend->ops->close(backend);
}

static void expect_refused(ep_backend *backend, const ep_expert_source *source, const char *part)
{
    ep_backend_weights *weights = NULL;
    cr_assert_eq(backend->ops->weights_load(backend, source, &weights, &error),
                 EP_ERR_UNIMPLEMENTED);
    expect_text(part);
    expect_text("ascend");
    cr_assert_null(weights);
    cr_assert_eq(backend->ops->weights_bytes(backend, source), 0);
}

Test(ascend, refuses_what_the_operators_do_not_do)
{
    ep_backend *backend = open_emulated();
    ep_expert_source source = expert(8, 8);
    source.format = EP_WEIGHTS_F32;
    expect_refused(backend, &source, "f32 weights, allowed: bf16, f16");
    source = expert(8, 8);
    source.activation = EP_ACT_SITU;
    source.numbers = (ep_activation_numbers){.alpha = 1.0f, .beta = 1.0f};
    expect_refused(backend, &source,
                   "no operator for activation situ, allowed: silu, gelu, gelu_tanh, swiglu_oai, "
                   "swiglu_limit; ");
    source = expert(8, 8);
    source.activation = EP_ACT_SILU_NO_GATE;
    source.gate = NULL;
    expect_refused(backend, &source, "a gate only, not activation silu_no_gate, allowed: silu");
    source = expert(8, 32768);
    expect_refused(backend, &source, "at most 65535 columns; here H is 8 and twice I is 65536");
    backend->ops->close(backend);
}

static bool can_load(ep_backend *backend, const ep_expert_source *source)
{
    ep_backend_weights *weights = NULL;
    const ep_err err = backend->ops->weights_load(backend, source, &weights, &error);
    backend->ops->weights_unload(backend, weights);
    return err == EP_OK;
}

Test(ascend, what_an_operator_does_not_do_on_this_device_is_refused_and_the_rest_is_not)
{
    static const float scales[64] = {1.0f};
    ep_expert_source oai = expert(8, 8);
    ep_expert_source gelu = expert(8, 8);
    ep_expert_source quant = expert(16, 32); /* the fused operator takes these shapes */
    oai.activation = EP_ACT_SWIGLU_OAI;
    oai.numbers = (ep_activation_numbers){.alpha = 1.702f, .beta = 1.0f, .limit = 7.0f};
    gelu.activation = EP_ACT_GELU;
    quant.format = EP_WEIGHTS_W8A8;
    quant.gate_scales = quant.up_scales = quant.down_scales = scales;
    static const struct {
        const char *refused;
        bool oai;
        bool gelu;
        bool quant;
    } rows[] = {{"", true, true, true},
                {"aclnnClippedSwiglu", false, true, true},
                {"aclnnGeGluV3", true, false, true},
                {"aclnnGroupedMatmulSwigluQuant", true, true, true},
                {"aclnnDynamicQuant", true, true, false}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        setenv("EP_CANN_REFUSED", rows[i].refused, 1);
        ep_backend *backend = open_emulated();
        cr_assert_eq(can_load(backend, &oai), rows[i].oai, "without %s", rows[i].refused);
        cr_assert_eq(can_load(backend, &gelu), rows[i].gelu, "without %s", rows[i].refused);
        cr_assert_eq(can_load(backend, &quant), rows[i].quant, "without %s", rows[i].refused);
        if (!rows[i].oai) {
            expect_refused(backend, &oai,
                           "activation swiglu_oai, allowed: silu, gelu, gelu_tanh; ");
        }
        backend->ops->close(backend);
    }
    setenv("EP_CANN_REFUSED", "aclnnSwiGlu", 1);
    ep_backend *backend = NULL;
    cr_assert_eq(open_on(EP_TEST_CANN, EP_NUMERICS_AUTO, &backend, &error), EP_ERR_UNIMPLEMENTED);
    expect_text("not available");
}

/* Else its bits would not be those of the node's other devices. */
Test(ascend, without_memory_for_a_known_answer_run_it_is_not_opened)
{
    static const ep_weight_format formats[] = {EP_WEIGHTS_BF16, EP_WEIGHTS_F16, EP_WEIGHTS_W8A8};
    char ids[EP_ARRAY_COUNT(formats)][EP_NUMERICS_ID_BYTES];
    ep_backend *backend = open_emulated();
    for (size_t f = 0; f < EP_ARRAY_COUNT(formats); f++) {
        cr_assert_eq(backend->ops->numerics_id(backend, formats[f], false, 0, ids[f]), EP_OK);
    }
    backend->ops->close(backend);
    for (int at = 1; at < 32; at++) { /* it makes 19 allocations */
        char text[16];
        snprintf(text, sizeof(text), "%d", at);
        setenv("EP_CANN_OOM_AT", text, 1);
        const ep_err err = open_on(EP_TEST_CANN, EP_NUMERICS_AUTO, &backend, &error);
        for (size_t f = 0; err == EP_OK && f < EP_ARRAY_COUNT(formats); f++) {
            char id[EP_NUMERICS_ID_BYTES] = "";
            (void)backend->ops->numerics_id(backend, formats[f], false, 0, id);
            cr_expect_str_eq(id, ids[f], "allocation %d: %s in the place of %s", at, id, ids[f]);
        }
        if (err == EP_OK) {
            backend->ops->close(backend);
        } else {
            cr_expect_eq(err, EP_ERR_NO_MEMORY, "%s", error.text);
        }
    }
}

/* The older set has no GroupedMatmul that adds bf16 to int8 products, nor f32 scales. */
Test(ascend, an_older_release_adds_biases_to_floats)
{
    ep_backend *backend = NULL;
    ep_expert_source source = expert(8, 8);
    source.bias_dtype = EP_DTYPE_BF16;
    source.down_bias = matrix;
    ASSERT_OK(open_on(EP_TEST_CANN_OLDER, EP_NUMERICS_AUTO, &backend, &error), error);
    cr_assert(can_load(backend, &source));
    source.format = EP_WEIGHTS_W8A8;
    source.gate_scales = source.up_scales = source.down_scales = matrix;
    expect_refused(backend, &source, "w8a8 weights, allowed: bf16, f16; ");
    backend->ops->close(backend);
}

Test(ascend, a_full_device_is_refused_with_figures_and_the_key)
{
    ep_backend_weights *weights = NULL;
    const ep_expert_source source = expert(64, 64);
    setenv("EP_CANN_HBM_BYTES", "400000", 1); /* the known-answer run's buffers stay */
    ep_backend *backend = open_emulated();
    int loaded = 0;
    ep_backend_weights *all[16];
    ep_backend *other = open_emulated(); /* takes of what the first one's budget stands for */
    ep_backend_weights *others[3];
    for (int i = 0; i < 3; i++) {
        ASSERT_OK(other->ops->weights_load(other, &source, &others[i], &error), error);
    }
    while ((backend->ops->weights_load(backend, &source, &weights, &error)) == EP_OK) {
        cr_assert_lt(loaded, 16);
        all[loaded++] = weights;
        weights = NULL;
    }
    cr_assert_gt(loaded, 0);
    cr_assert_eq(error.code, EP_ERR_NO_MEMORY);
    expect_text("an expert of 24576 bytes does not fit: ");
    expect_text("of 400000 bytes of device 0 are free");
    expect_text("lower weight_bytes_max");
    for (int i = 0; i < 3; i++) {
        other->ops->weights_unload(other, others[i]);
    }
    other->ops->close(other);
    backend->ops->weights_unload(backend, all[--loaded]); /* room again */
    ASSERT_OK(backend->ops->weights_load(backend, &source, &all[loaded], &error), error);
    for (int i = 0; i <= loaded; i++) {
        backend->ops->weights_unload(backend, all[i]);
    }
    backend->ops->close(backend);
}

static _Atomic int losses;

static void count_loss(void *arg, const char *why)
{
    cr_assert_eq(arg, &losses);
    cr_assert_not_null(strstr(why, "code 507010"), "%s", why);
    losses++;
}

static ep_backend *open_device(uint32_t device, uint64_t memory_bytes)
{
    const ep_backend_config config = {.numerics = EP_NUMERICS_AUTO,
                                      .device = device,
                                      .memory_bytes = memory_bytes,
                                      .on_lost = count_loss,
                                      .arg = &losses};
    ep_backend *backend = NULL;
    setenv("ASCEND_HOME_PATH", EP_TEST_CANN, 1);
    ASSERT_OK(ep_backend_by_name("ascend")->open(&config, &backend, &error), error);
    return backend;
}

static ep_backend_device read_device(ep_backend *backend)
{
    ep_backend_device device;
    backend->ops->device_read(backend, &device);
    return device;
}

Test(ascend, each_device_has_its_memory_and_its_fate)
{
    enum { DEVICES = 3, LOST = 1 };
    const ep_expert_source source = expert(64, 64);
    ep_backend *all[DEVICES];
    ep_backend_weights *weights[DEVICES];
    uint32_t count = 0;
    char lost_file[64], one[80];
    snprintf(lost_file, sizeof(lost_file), "/tmp/ep-test-lost-%d", (int)getpid());
    snprintf(one, sizeof(one), "%s.%d", lost_file, LOST);
    setenv("EP_CANN_LOST_FILE", lost_file, 1);
    setenv("EP_CANN_DEVICES", "3", 1);
    setenv("EP_CANN_HBM_BYTES", "1000000", 1);
    setenv("ASCEND_HOME_PATH", EP_TEST_CANN, 1);
    ASSERT_OK(ep_backend_by_name("ascend")->probe(&count, &error), error);
    cr_assert_eq(count, DEVICES);
    for (uint32_t d = 0; d < DEVICES; d++) {
        all[d] = open_device(d, 0);
    }
    const ep_backend_device before = read_device(all[0]);
    cr_assert_eq(before.memory_bytes, 1000000);
    cr_assert_eq(before.weight_bytes_max, before.free_bytes - before.free_bytes / 10);
    for (uint32_t d = 0; d < DEVICES; d++) {
        ASSERT_OK(all[d]->ops->weights_load(all[d], &source, &weights[d], &error), error);
    }
    cr_assert_eq(read_device(all[0]).free_bytes,
                 before.free_bytes - all[0]->ops->weights_bytes(all[0], &source));
    fclose(fopen(one, "w"));
    ep_backend_weights *none = NULL;
    cr_assert_eq(all[LOST]->ops->weights_load(all[LOST], &source, &none, &error),
                 EP_ERR_DEVICE_LOST);
    cr_assert_eq(losses, 1);
    for (uint32_t d = 0; d < DEVICES; d++) {
        cr_assert_eq(read_device(all[d]).memory_bytes, d == LOST ? 0 : 1000000);
        cr_assert_eq(d != LOST &&
                         all[d]->ops->weights_load(all[d], &source, &none, &error) != EP_OK,
                     false, "%s", error.text);
        if (d != LOST) {
            all[d]->ops->weights_unload(all[d], none);
        }
        all[d]->ops->weights_unload(all[d], weights[d]);
    }
    for (uint32_t d = 0; d < DEVICES; d++) {
        all[d]->ops->close(all[d]);
    }
    cr_assert_eq(losses, 1);
    cr_assert_eq(unlink(one), 0);
}

/* The emulated runtime reads its environment when it is initialised. */
Test(ascend, the_runtime_is_initialised_once_where_the_first_device_cannot_be_opened)
{
    const ep_backend_config first = {.numerics = EP_NUMERICS_AUTO};
    ep_backend *backend = NULL;
    char lost_file[64], one[80];
    snprintf(lost_file, sizeof(lost_file), "/tmp/ep-test-lost-first-%d", (int)getpid());
    snprintf(one, sizeof(one), "%s.0", lost_file);
    fclose(fopen(one, "w"));
    setenv("EP_CANN_LOST_FILE", lost_file, 1);
    setenv("EP_CANN_DEVICES", "2", 1);
    setenv("EP_CANN_HBM_BYTES", "1000000", 1);
    setenv("ASCEND_HOME_PATH", EP_TEST_CANN, 1);
    cr_assert_eq(ep_backend_by_name("ascend")->open(&first, &backend, &error), EP_ERR_DEVICE_LOST);
    setenv("EP_CANN_HBM_BYTES", "2000000", 1);
    backend = open_device(1, 0);
    cr_expect_eq(read_device(backend).memory_bytes, 1000000);
    backend->ops->close(backend);
    cr_assert_eq(unlink(one), 0);
}

/* The emulated runtime's own count: the product has opened it. */
static uint64_t lost_calls(void)
{
    void *runtime = dlopen("libacl_rt.so", RTLD_NOW | RTLD_NOLOAD);
    void *symbol = runtime != NULL ? dlsym(runtime, "cann_lost_calls") : NULL;
    uint64_t (*count)(void);
    cr_assert_not_null(symbol);
    memcpy(&count, &symbol, sizeof(count));
    return count();
}

/* Each call may be long in coming back, and a node lets go of thousands of experts. */
Test(ascend, a_lost_device_is_not_asked_for_each_expert_that_goes)
{
    enum { EXPERTS = 10 };
    const ep_expert_source source = expert(64, 64);
    ep_backend_weights *weights[EXPERTS], *none = NULL;
    char lost_file[64];
    snprintf(lost_file, sizeof(lost_file), "/tmp/ep-test-lost-all-%d", (int)getpid());
    setenv("EP_CANN_LOST_FILE", lost_file, 1);
    ep_backend *backend = open_device(0, 0);
    for (int e = 0; e < EXPERTS; e++) {
        ASSERT_OK(backend->ops->weights_load(backend, &source, &weights[e], &error), error);
    }
    fclose(fopen(lost_file, "w"));
    cr_assert_eq(backend->ops->weights_load(backend, &source, &none, &error), EP_ERR_DEVICE_LOST);
    const uint64_t before = lost_calls();
    for (int e = 0; e < EXPERTS; e++) {
        backend->ops->weights_unload(backend, weights[e]);
    }
    cr_assert_eq(backend->ops->weights_load(backend, &source, &none, &error), EP_ERR_DEVICE_LOST);
    cr_expect_leq(lost_calls(), before + 1, "the one: the look that was under way");
    backend->ops->close(backend);
    cr_assert_eq(unlink(lost_file), 0);
}

Test(ascend, a_budget_beyond_the_device_is_refused)
{
    const ep_backend_config config = {.numerics = EP_NUMERICS_AUTO, .memory_bytes = 1000001};
    ep_backend *backend = NULL;
    setenv("EP_CANN_HBM_BYTES", "1000000", 1);
    setenv("ASCEND_HOME_PATH", EP_TEST_CANN, 1);
    cr_assert_eq(ep_backend_by_name("ascend")->open(&config, &backend, &error),
                 EP_ERR_INVALID_ARGUMENT);
    expect_text("weight_bytes_max is 1000001, and ");
    expect_text(" of 1000000 bytes of device 0 are free; allowed: up to what is free");
    backend = open_device(0, 500000);
    cr_assert_eq(read_device(backend).weight_bytes_max, 500000);
    backend->ops->close(backend);
}

typedef struct upload {
    ep_backend *backend;
    ep_expert_source source;
    ep_backend_weights *weights;
    _Atomic bool is_done;
} upload;

static void *load_large(void *arg)
{
    ep_error own;
    upload *u = arg;
    ASSERT_OK(u->backend->ops->weights_load(u->backend, &u->source, &u->weights, &own), own);
    u->is_done = true;
    return NULL;
}

static void *load_in_vain(void *arg)
{
    ep_error own;
    upload *u = arg;
    cr_expect_eq(u->backend->ops->weights_load(u->backend, &u->source, &u->weights, &own),
                 EP_ERR_DEVICE_LOST);
    return NULL;
}

/* By the runtime itself, in the thread that opened the device. */
static size_t free_bytes(void)
{
    void *runtime = dlopen("libacl_rt.so", RTLD_NOW | RTLD_NOLOAD);
    void *symbol = runtime != NULL ? dlsym(runtime, "aclrtGetMemInfo") : NULL;
    int (*look)(int attribute, size_t *free, size_t *total);
    size_t left = 0, total;
    cr_assert_not_null(symbol);
    memcpy(&look, &symbol, sizeof(look));
    cr_assert_eq(look(EP_ACL_HBM, &left, &total), 0);
    return left;
}

/* Each call may take until its timeout. One load is held in the middle of a copy when the device is
 * lost, the others have their memory and wait for it. */
Test(ascend, a_lost_device_is_not_asked_by_loads_that_wait_for_one_another)
{
    enum { SIDE = 1024, LOADS = 4 };
    uint16_t *large = calloc((size_t)SIDE * SIDE, sizeof(*large));
    char fifo[64], lost_file[72];
    pthread_t threads[LOADS];
    upload loads[LOADS];
    snprintf(fifo, sizeof(fifo), "/tmp/ep-test-lose-%d", (int)getpid());
    snprintf(lost_file, sizeof(lost_file), "%s-lost", fifo);
    cr_assert_eq(mkfifo(fifo, 0600), 0);
    setenv("EP_CANN_HOLD_FIFO", fifo, 1);
    setenv("EP_CANN_LOST_FILE", lost_file, 1);
    ep_backend *backend = open_emulated();
    const size_t free_before = free_bytes();
    for (int i = 0; i < LOADS; i++) {
        loads[i] = (upload){.backend = backend, .source = expert(SIDE, SIDE)};
        loads[i].source.gate = loads[i].source.up = loads[i].source.down = large;
        cr_assert_eq(pthread_create(&threads[i], NULL, load_in_vain, &loads[i]), 0);
    }
    const int fd = open(fifo, O_WRONLY | O_CLOEXEC); /* returns once the copy is there */
    cr_assert_geq(fd, 0);
    const size_t each = backend->ops->weights_bytes(backend, &loads[0].source);
    while (free_bytes() + LOADS * each > free_before) {
        sched_yield();
    }
    const uint64_t before = lost_calls();
    fclose(fopen(lost_file, "w"));
    close(fd);
    for (int i = 0; i < LOADS; i++) {
        pthread_join(threads[i], NULL);
    }
    cr_expect_leq(lost_calls(), before + 2, "the one that was under way, and the idle look");
    backend->ops->close(backend);
    free(large);
    unlink(fifo);
    unlink(lost_file);
}

static void post(ep_job *job, ep_err result)
{
    cr_assert_eq(result, EP_OK);
    sem_post(job->arg);
}

/* The upload is held in the middle of a copy; passes need nothing that it has. */
Test(ascend, passes_go_on_while_an_expert_is_uploaded)
{
    enum { SIDE = 1024 };
    ep_backend_weights *small = NULL;
    const ep_expert_source small_source = expert(32, 32);
    uint16_t *large = calloc((size_t)SIDE * SIDE, sizeof(*large));
    uint16_t x[32] = {0}, out[32];
    const ep_job_row row = {.x = x, .x_scale = 1.0f, .input_weight = 1.0f, .out = out};
    char fifo[64];
    pthread_t thread;
    sem_t done;
    snprintf(fifo, sizeof(fifo), "/tmp/ep-test-hold-%d", (int)getpid());
    cr_assert_eq(mkfifo(fifo, 0600), 0);
    setenv("EP_CANN_HOLD_FIFO", fifo, 1);
    upload u = {.backend = open_emulated(), .source = expert(SIDE, SIDE)};
    u.source.gate = u.source.up = u.source.down = large;
    ASSERT_OK(u.backend->ops->weights_load(u.backend, &small_source, &small, &error), error);
    cr_assert_eq(pthread_create(&thread, NULL, load_large, &u), 0);
    const int fd = open(fifo, O_WRONLY | O_CLOEXEC); /* returns once the copy is there */
    cr_assert_geq(fd, 0);
    sem_init(&done, 0, 0);
    for (int i = 0; i < 20; i++) {
        ep_job job = {.weights = small,
                      .rows = &row,
                      .rows_count = 1,
                      .x_dtype = EP_DTYPE_BF16,
                      .out_dtype = EP_DTYPE_BF16,
                      .done = post,
                      .arg = &done};
        cr_assert_eq(ep_backend_run(u.backend, &job), EP_OK);
        sem_wait(&done);
    }
    cr_assert_not(u.is_done);
    close(fd);
    pthread_join(thread, NULL);
    u.backend->ops->weights_unload(u.backend, u.weights);
    u.backend->ops->weights_unload(u.backend, small);
    u.backend->ops->close(u.backend);
    free(large);
    unlink(fifo);
}
