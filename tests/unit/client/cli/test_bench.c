/* SPDX-License-Identifier: Apache-2.0 */
/* The random batches of expertctl bench: what the service accepts, and the same again for a
 * seed. */
#include <criterion/criterion.h>
#include <string.h>

#include "cli/bench.h"

Test(bench, batches_are_legal_and_repeatable)
{
    const ep_layer_desc layer = {.struct_bytes = sizeof(layer), .hidden = 16, .experts = 5};
    const uint32_t tokens = 7;
    const uint32_t top_k = 5; /* every expert: the hardest draw */
    ep_cli_bench_batch a, b, c;
    cr_assert(ep_cli_bench_batch_fill(&a, &layer, tokens, top_k, 1));
    cr_assert(ep_cli_bench_batch_fill(&b, &layer, tokens, top_k, 1));
    cr_assert(ep_cli_bench_batch_fill(&c, &layer, tokens, top_k, 2));
    size_t rows = (size_t)tokens * EP_CLI_BENCH_ROUTINGS;
    for (size_t r = 0; r < rows; r++) {
        unsigned seen = 0;
        float sum = 0.0f;
        for (uint32_t k = 0; k < top_k; k++) {
            int32_t id = a.ids[r * top_k + k];
            cr_assert(id >= 0 && id < 5);
            cr_assert_eq(seen & (1u << id), 0, "row %zu has expert %d twice", r, id);
            seen |= 1u << id;
            sum += a.scales[r * top_k + k];
        }
        cr_assert_float_eq(sum, 1.0f, 1e-5);
    }
    cr_assert_arr_eq(a.x, b.x, tokens * 16 * sizeof(uint16_t));
    cr_assert_arr_eq(a.ids, b.ids, rows * top_k * sizeof(int32_t));
    cr_assert_neq(memcmp(a.x, c.x, tokens * 16 * sizeof(uint16_t)), 0);
    for (size_t i = 0; i < (size_t)tokens * 16; i++) {
        cr_assert_lt(a.x[i] & 0x7fff, 0x3f81, "x is beyond -1..1");
    }
    ep_cli_bench_batch_free(&a);
    ep_cli_bench_batch_free(&b);
    ep_cli_bench_batch_free(&c);
}
