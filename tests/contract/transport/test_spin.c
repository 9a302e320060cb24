/* SPDX-License-Identifier: Apache-2.0 */
/* How long a peer can make the receiver of shared memory look for bytes. */
#include <criterion/criterion.h>

#include "transport/shm/shm_spin.h"

/* Looks as long as it may, once after each of these pieces. Returns the whole time. */
static uint64_t look_after_each(size_t pieces, size_t bytes, unsigned frames)
{
    shm_spin spin;
    uint64_t looked_ns = 0;
    shm_spin_init(&spin);
    for (size_t i = 0; i < pieces; i++) {
        uint64_t allowed_ns = shm_spin_allowed_ns(&spin);
        cr_assert_leq(allowed_ns, SHM_SPIN_NS);
        looked_ns += allowed_ns;
        shm_spin_pay(&spin, allowed_ns);
        shm_spin_earn(&spin, bytes, frames);
    }
    return looked_ns;
}

Test(spin, a_peer_that_dribbles_is_waited_for_a_moment_in_all)
{
    cr_assert_leq(look_after_each(10000, 1, 0), SHM_SPINS_NS + SHM_SPIN_NS);
    cr_assert_leq(look_after_each(1000000, 0, 0), SHM_SPINS_NS);
}

Test(spin, one_that_copies_or_answers_is_waited_for_each_time)
{
    cr_assert_eq(look_after_each(1000, SHM_SPIN_BYTES, 0), 1000 * SHM_SPIN_NS);
    cr_assert_eq(look_after_each(1000, 64, 1), 1000 * SHM_SPIN_NS);
}

Test(spin, nothing_is_saved_up_beyond_a_turn)
{
    shm_spin spin;
    shm_spin_init(&spin);
    shm_spin_earn(&spin, SIZE_MAX, 1000);
    cr_assert_eq(spin.left_ns, SHM_SPINS_NS);
    shm_spin_pay(&spin, UINT64_MAX);
    cr_assert_eq(shm_spin_allowed_ns(&spin), 0u);
}
