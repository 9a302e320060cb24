/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every weight format in families `portable` and `bf16dp`, and those of `w4a8` in it, through the
 * cpu backend as a daemon opens it: the bits of the family's reference for rows from 1 to the most
 * of a job, and for 1 to 16 threads: where there are fewer CPUs tasks fall to them in any order,
 * and threads lose their CPUs in the middle. `bf16odd` has bf16 only: test_families.c.
 */
#include <criterion/criterion.h>
#include <stdlib.h>

#include "backends/host_common.h"
#include "base/check.h"
#include "contract/backend/expert_fixture.h"
#include "support/expect.h"

static ep_backend *open_with(ep_numerics numerics, uint32_t threads)
{
    const ep_backend_config config = {.numerics = numerics, .threads = threads};
    ep_backend *backend;
    ep_error error;
    ASSERT_OK(ep_backend_by_name("cpu")->open(&config, &backend, &error), error);
    return backend;
}

static expert_fixture make(ep_numerics numerics, ep_weight_format format, uint32_t hidden,
                           uint32_t inner, uint32_t rows)
{
    expert_fixture f =
        expert_fixture_make_of(100 * (uint64_t)numerics + format, hidden, inner, rows, format);
    expert_fixture_answer(&f, ep_numerics_family(numerics, format));
    return f;
}

/* What is asked of a family: w4a8 leaves most formats to bf16dp. */
static bool is_asked(ep_numerics numerics, unsigned format)
{
    return numerics != EP_NUMERICS_W4A8 ||
           ep_numerics_family(numerics, (ep_weight_format)format) == EP_FFN_FAMILY_W4A8;
}

/* A pass holds 256 rows, a chunk 6: their ends and both sides of them, and a whole job. */
static void expect_all_numbers_of_rows(ep_numerics numerics)
{
    static const uint32_t counts[] = {
        1, 2, 3, 4, 5, 6, 7, 12, 13, 64, 96, 97, 255, 256, 257, 1000, EP_JOB_ROWS_MAX};
    ep_backend *backend = open_with(numerics, 3);
    for (unsigned format = EP_WEIGHTS_NONE + 1; format < EP_WEIGHTS_COUNT; format++) {
        if (!is_asked(numerics, format)) {
            continue;
        }
        expert_fixture f = make(numerics, (ep_weight_format)format, 23, 17, EP_JOB_ROWS_MAX);
        fixture_run_counts(&f, backend, "cpu", 3, counts, EP_ARRAY_COUNT(counts));
        expert_fixture_free(&f);
    }
    backend->ops->close(backend);
}

Test(backend_formats, bits_are_equal_for_all_numbers_of_rows)
{
    expect_all_numbers_of_rows(EP_NUMERICS_PORTABLE);
    expect_all_numbers_of_rows(EP_NUMERICS_BF16DP);
    expect_all_numbers_of_rows(EP_NUMERICS_W4A8);
}

/* Wide enough that each stage has tasks for several threads. */
static void expect_all_numbers_of_threads(ep_numerics numerics)
{
    static const uint32_t counts[] = {7, 19, 100};
    static const uint32_t threads[] = {1, 2, 3, 4, 5, 7, 8, 11, 16};
    expert_fixture fixtures[EP_WEIGHTS_COUNT];
    for (unsigned format = EP_WEIGHTS_NONE + 1; format < EP_WEIGHTS_COUNT; format++) {
        fixtures[format] = make(numerics, (ep_weight_format)format, 150, 101, 100);
    }
    for (size_t t = 0; t < EP_ARRAY_COUNT(threads); t++) {
        ep_backend *backend = open_with(numerics, threads[t]);
        for (unsigned format = EP_WEIGHTS_NONE + 1; format < EP_WEIGHTS_COUNT; format++) {
            if (is_asked(numerics, format)) {
                fixture_run_counts(&fixtures[format], backend, "cpu", threads[t], counts,
                                   EP_ARRAY_COUNT(counts));
            }
        }
        backend->ops->close(backend);
    }
    for (unsigned format = EP_WEIGHTS_NONE + 1; format < EP_WEIGHTS_COUNT; format++) {
        expert_fixture_free(&fixtures[format]);
    }
}

Test(backend_formats, bits_are_equal_for_1_to_16_threads)
{
    expect_all_numbers_of_threads(EP_NUMERICS_PORTABLE);
    expect_all_numbers_of_threads(EP_NUMERICS_BF16DP);
    expect_all_numbers_of_threads(EP_NUMERICS_W4A8);
}
