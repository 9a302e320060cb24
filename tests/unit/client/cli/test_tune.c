/* SPDX-License-Identifier: Apache-2.0 */
/* What measured times allow to say, and what they do not. */
#include <criterion/criterion.h>
#include <string.h>

#include "cli/tune.h"

#define ROUNDS 9

static ep_cli_tune_size sizes[4];
static ep_cli_tune_verdict verdicts[4];

/* Prefill takes ratio of decode's time, but for `odd` rounds, in which it takes 1 / ratio. */
static void measured(size_t index, uint32_t tokens, double ratio, uint32_t odd)
{
    sizes[index] = (ep_cli_tune_size){.tokens = tokens, .rounds = ROUNDS};
    for (uint32_t r = 0; r < ROUNDS; r++) {
        sizes[index].decode_us[r] = 100 + 10 * (r % 3);
        sizes[index].prefill_us[r] = sizes[index].decode_us[r] * (r < odd ? 1 / ratio : ratio);
    }
    ep_cli_tune_judge(&sizes[index], &verdicts[index]);
}

static void refuse(size_t count, const char *text)
{
    const char *why = NULL;
    cr_assert_eq(ep_cli_tune_choose(sizes, verdicts, count, &why), 0u);
    cr_assert_not_null(strstr(why, text), "'%s' is not in '%s'", text, why);
}

/* The binomial table, both sides together at most 5 %. */
Test(tune, wins_that_chance_does_not_give)
{
    cr_assert_gt(ep_cli_tune_wins_needed(5), 5u, "five rounds prove nothing");
    cr_assert_eq(ep_cli_tune_wins_needed(6), 6u);
    cr_assert_eq(ep_cli_tune_wins_needed(8), 8u);
    cr_assert_eq(ep_cli_tune_wins_needed(9), 8u);
    cr_assert_eq(ep_cli_tune_wins_needed(20), 15u);
    cr_assert_eq(ep_cli_tune_wins_needed(64), 41u);
}

Test(tune, a_mode_is_faster_when_it_wins_often_and_by_enough)
{
    measured(0, 16, 1.3, 0);
    cr_assert_eq(verdicts[0].winner, EP_CLI_TUNE_DECODE);
    cr_assert_float_eq(verdicts[0].ratio, 1.3, 1e-9);
    cr_assert_float_eq(verdicts[0].decode_us, 110, 1e-9);
    measured(0, 16, 1.3, 1);
    cr_assert_eq(verdicts[0].winner, EP_CLI_TUNE_DECODE);
    cr_assert(verdicts[0].decode_wins == 8 && verdicts[0].prefill_wins == 1);
    measured(0, 16, 1.3, 2);
    cr_assert_eq(verdicts[0].winner, EP_CLI_TUNE_NOISE, "7 of 9 is what chance gives now and then");
    measured(0, 16, 1.01, 0);
    cr_assert_eq(verdicts[0].winner, EP_CLI_TUNE_NOISE, "a hundredth is nothing");
    measured(0, 16, 1 / 1.3, 0);
    cr_assert_eq(verdicts[0].winner, EP_CLI_TUNE_PREFILL);
    measured(0, 16, 1, 0);
    cr_assert(verdicts[0].winner == EP_CLI_TUNE_NOISE && verdicts[0].decode_wins == 0 &&
              verdicts[0].prefill_wins == 0);
}

Test(tune, the_largest_size_at_which_prefill_does_not_win)
{
    const char *why = "";
    measured(0, 16, 1.5, 0);
    measured(1, 64, 1.2, 0);
    measured(2, 256, 0.8, 0);
    measured(3, 1024, 0.5, 0);
    cr_assert_eq(ep_cli_tune_choose(sizes, verdicts, 4, &why), 64u);
    cr_assert_null(why);
    measured(2, 256, 1.0, 0);
    cr_assert_eq(ep_cli_tune_choose(sizes, verdicts, 4, &why), 256u, "equal there: decode does");
    measured(3, 1024, 0.8, 3);
    refuse(4, "up to the largest size measured");
}

Test(tune, what_the_figures_do_not_tell_is_not_said)
{
    for (size_t s = 0; s < 4; s++) {
        measured(s, 16u << s, s % 2 == 0 ? 1.4 : 0.7, 4);
    }
    refuse(4, "no more than noise at every size");
    for (size_t s = 0; s < 4; s++) {
        measured(s, 16u << s, 1.4, 0);
    }
    refuse(4, "measure larger");
    for (size_t s = 0; s < 4; s++) {
        measured(s, 16u << s, 0.7, 0);
    }
    refuse(4, "measure smaller");
    measured(0, 16, 1.4, 0);
    measured(2, 64, 1.4, 0);
    refuse(4, "no single size");
}
