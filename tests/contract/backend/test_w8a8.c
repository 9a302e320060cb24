/* SPDX-License-Identifier: Apache-2.0 */
/* Weights in w8a8 on every backend and kernel: the bits of the reference for all numbers of rows
 * and threads, in passes of one task, in those whose inner rows are rounded by the thread that ends
 * gate and up, and in those that round in a stage. */
#include <criterion/criterion.h>

#include "base/check.h"
#include "contract/backend/backend_variants.h"
#include "contract/backend/expert_fixture.h"

enum { ROWS = 600 };

Test(w8a8, bits_are_equal_for_all_numbers_of_rows_and_threads)
{
    uint32_t counts[74] = {[70] = 255, 256, 257, ROWS};
    for (uint32_t i = 0; i < 70; i++) {
        counts[i] = i + 1;
    }
    const uint32_t shapes[][2] = {{33, 15}, {67, 303}, {67, 303}};
    for (uint32_t s = 0; s < 3; s++) {
        expert_fixture f =
            expert_fixture_make(40 + s, shapes[s][0], shapes[s][1], ROWS, EP_DTYPE_I8);
        /* kernels may write rows at once; with one thread unit.kernels.ffn_pass has it */
        if (s == 2) {
            f.source.shared_gate = NULL;
            expert_fixture_answer(&f, EP_FFN_FAMILY_PORTABLE);
        }
        cr_assert(s != 1 || f.source.shared_gate != NULL);
        for (size_t v = 0; v < backend_variants_count(); v++) {
            for (uint32_t threads = s == 2 ? 2 : 1; threads <= 4; threads++) {
                ep_backend *backend = backend_variant_open(v, threads, 0);
                fixture_run_counts(&f, backend, backend_variant_name(v), threads, counts,
                                   EP_ARRAY_COUNT(counts));
                backend->ops->close(backend);
            }
        }
        expert_fixture_free(&f);
    }
}
