/* SPDX-License-Identifier: Apache-2.0 */
/* Backends of the numerics families of pairs: the reference and the cpu backend with each of its kernels give equal bits and equal
 * ids, whatever the rows of a job and the threads; weights that a family does not have stay with `portable`. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backends/cpu/cpu_backend.h"
#include "backends/host_common.h"
#include "contract/backend/expert_fixture.h"

enum { BACKENDS_MAX = 8 };

typedef struct {
    ep_backend *all[BACKENDS_MAX];
    const char *names[BACKENDS_MAX];
    size_t count;
} opened;

static void add(opened *o, ep_backend *backend, const char *name)
{
    o->all[o->count] = backend;
    o->names[o->count++] = name;
}

/* The reference, the cpu backend as a daemon opens it, and with each kernel, with 1, 2, .. threads. */
static opened open_all(ep_numerics numerics)
{
    opened o = {.count = 0};
    ep_error error;
    ep_backend *backend;
    ep_backend_config config = {.numerics = numerics, .threads = 1};
    cr_assert_eq(ep_backend_by_name("reference")->open(&config, &backend, &error), EP_OK, "%s", error.text);
    add(&o, backend, "reference");
    config.threads = 2;
    cr_assert_eq(ep_backend_by_name("cpu")->open(&config, &backend, &error), EP_OK, "%s", error.text);
    add(&o, backend, "cpu");
    const ep_ffn_kernel *kernel;
    for (size_t n = 0; (kernel = ep_ffn_kernel_at(n)) != NULL && o.count < BACKENDS_MAX; n++) {
        if (kernel->family == ep_numerics_family(numerics, EP_WEIGHTS_BF16)) {
            config.threads = 1 + (uint32_t)o.count;
            cr_assert_eq(ep_cpu_backend_open_with(kernel, &config, &backend, &error), EP_OK, "%s", error.text);
            add(&o, backend, kernel->name);
        }
    }
    return o;
}

static void close_all(opened *o)
{
    for (size_t b = 0; b < o->count; b++) {
        o->all[b]->ops->close(o->all[b]);
    }
}

static void expect_rows(const opened *o, const expert_fixture *f, const uint32_t *sizes, size_t sizes_count)
{
    for (size_t b = 0; b < o->count; b++) {
        ep_backend_weights *weights = NULL;
        ep_error error;
        cr_assert_eq(o->all[b]->ops->weights_load(o->all[b], &f->source, &weights, &error), EP_OK, "%s", error.text);
        for (size_t i = 0; i < sizes_count; i++) {
            const uint32_t first = f->rows_count - sizes[i];
            const char *wrong = fixture_run(f, o->all[b], weights, first, sizes[i]);
            cr_assert_null(wrong, "%s, %u rows: %s", o->names[b], sizes[i], wrong);
        }
        o->all[b]->ops->weights_unload(o->all[b], weights);
    }
}

static void expect_all_numbers_of_rows(ep_numerics numerics)
{
    enum { SIZES = 75 };
    uint32_t sizes[SIZES];
    for (uint32_t i = 0; i < 70; i++) {
        sizes[i] = i + 1;
    }
    memcpy(sizes + 70, (const uint32_t[]){255, 256, 257, 1000, EP_JOB_ROWS_MAX}, 5 * sizeof(sizes[0]));
    opened o = open_all(numerics);
    expert_fixture f = expert_fixture_make(5, 23, 17, EP_JOB_ROWS_MAX, EP_DTYPE_BF16);
    expert_fixture_answer(&f, ep_numerics_family(numerics, EP_WEIGHTS_BF16));
    expect_rows(&o, &f, sizes, SIZES);
    expert_fixture_free(&f);
    close_all(&o);
}

Test(families, bits_are_equal_for_all_numbers_of_rows)
{
    expect_all_numbers_of_rows(EP_NUMERICS_BF16DP);
    expect_all_numbers_of_rows(EP_NUMERICS_BF16ODD);
}

static void expect_shapes_and_types(ep_numerics numerics)
{
    const uint32_t shapes[][2] = {{1, 1}, {64, 32}, {65, 33}, {150, 101}, {300, 270}};
    const uint32_t sizes[] = {1, 6, 7, 40};
    opened o = open_all(numerics);
    for (uint32_t s = 0; s < 5; s++) {
        for (uint64_t seed = 0; seed < 4; seed++) {
            expert_fixture f = expert_fixture_make(seed, shapes[s][0], shapes[s][1], 40, EP_DTYPE_BF16);
            expert_fixture_answer(&f, ep_numerics_family(numerics, EP_WEIGHTS_BF16));
            expect_rows(&o, &f, sizes, 4);
            expert_fixture_free(&f);
        }
    }
    close_all(&o);
}

Test(families, bits_are_equal_over_shapes_and_types)
{
    expect_shapes_and_types(EP_NUMERICS_BF16DP);
    expect_shapes_and_types(EP_NUMERICS_BF16ODD);
}

Test(families, other_weights_stay_with_portable)
{
    const uint32_t sizes[] = {7};
    opened o = open_all(EP_NUMERICS_BF16DP);
    expert_fixture f = expert_fixture_make(11, 65, 33, 7, EP_DTYPE_F16);
    expect_rows(&o, &f, sizes, 1);
    expert_fixture_free(&f);
    close_all(&o);
}

static void expect_ids(ep_numerics numerics, const char *start)
{
    opened o = open_all(numerics);
    char first[EP_NUMERICS_ID_BYTES];
    char id[EP_NUMERICS_ID_BYTES];
    cr_assert_eq(o.all[0]->ops->numerics_id(o.all[0], EP_WEIGHTS_BF16, first), EP_OK);
    cr_assert(strncmp(first, start, strlen(start)) == 0, "%s", first);
    for (size_t b = 1; b < o.count; b++) {
        cr_assert_eq(o.all[b]->ops->numerics_id(o.all[b], EP_WEIGHTS_BF16, id), EP_OK);
        cr_assert_str_eq(id, first, "%s", o.names[b]);
        for (unsigned f = EP_WEIGHTS_BF16; f < EP_WEIGHTS_COUNT; f++) {
            const bool has_groups = f >= EP_WEIGHTS_F8_BLOCK && f <= EP_WEIGHTS_INT4;
            const bool has = f == EP_WEIGHTS_BF16 || (numerics == EP_NUMERICS_BF16DP && has_groups);
            char want[EP_NUMERICS_ID_BYTES];
            snprintf(want, sizeof(want), "%.*s/%s/rne/", (int)(has ? strcspn(start, "/") : strlen("portable")), has ? start : "portable",
                     ep_weight_format_name((ep_weight_format)f));
            cr_assert_eq(o.all[b]->ops->numerics_id(o.all[b], (ep_weight_format)f, id), EP_OK);
            cr_assert(strncmp(id, want, strlen(want)) == 0, "%s, not %s", id, want);
        }
    }
    opened portable = open_all(EP_NUMERICS_PORTABLE);
    cr_assert_eq(portable.all[1]->ops->numerics_id(portable.all[1], EP_WEIGHTS_BF16, id), EP_OK);
    cr_assert_str_neq(id + strlen("portable"), strchr(first, '/'), "the answers are the same");
    close_all(&portable);
    close_all(&o);
}

Test(families, ids_name_the_family_and_its_answer)
{
    expect_ids(EP_NUMERICS_BF16DP, "bf16dp/bf16/rne/");
    expect_ids(EP_NUMERICS_BF16ODD, "bf16odd/bf16/rne/");
}

/* The variable is read when a backend opens; this program opens none before. */
Test(families, the_variable_forces_a_lower_path)
{
    ep_error error;
    ep_backend *backend;
    const ep_backend_config config = {.numerics = EP_NUMERICS_AUTO, .threads = 1};
    char id[EP_NUMERICS_ID_BYTES];
    const char *const forced[] = {"portable", "avx2", "avx512f"};
    for (size_t i = 0; i < 3; i++) {
        setenv("EXPERTD_CPU_FEATURES", forced[i], 1);
        if (ep_backend_by_name("cpu")->open(&config, &backend, &error) != EP_OK) {
            cr_assert_neq(i, 0);
            continue; /* this CPU is lower still */
        }
        cr_assert_eq(backend->ops->numerics_id(backend, EP_WEIGHTS_BF16, id), EP_OK);
        cr_assert(strncmp(id, "portable/", 9) == 0, "%s with %s", id, forced[i]);
        cr_assert(i != 0 || strcmp(ep_ffn_kernel_of(EP_FFN_FAMILY_PORTABLE)->name, "generic") == 0);
        cr_assert(i != 1 || strcmp(ep_ffn_kernel_of(EP_FFN_FAMILY_PORTABLE)->name, "avx2") == 0);
        backend->ops->close(backend);
    }
    setenv("EXPERTD_CPU_FEATURES", "avx1024", 1);
    cr_assert_eq(ep_backend_by_name("cpu")->open(&config, &backend, &error), EP_ERR_INVALID_ARGUMENT);
    cr_assert(strstr(error.text, "EXPERTD_CPU_FEATURES is 'avx1024', allowed on this CPU: portable") != NULL, "%s", error.text);
    unsetenv("EXPERTD_CPU_FEATURES");
}
