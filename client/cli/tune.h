/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Suggests a value of decode_tokens_max from measured times, or says why it cannot.
 *
 * Each size is measured in rounds, both modes in each. A mode is faster at a size if it wins so
 * many rounds that two equal modes would do so in less than 1 of 20 cases (two-sided sign test),
 * and by more than EP_CLI_TUNE_SHARE_MIN in the median. Otherwise the difference is noise.
 *
 * Pure: no clock, no I/O.
 */
#ifndef EP_CLI_TUNE_H
#define EP_CLI_TUNE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EP_CLI_TUNE_SIZES_MAX 16
#define EP_CLI_TUNE_ROUNDS_MIN 6 /* fewer can prove nothing */
#define EP_CLI_TUNE_ROUNDS_MAX 64
#define EP_CLI_TUNE_SHARE_MIN 0.02

typedef enum ep_cli_tune_winner {
    EP_CLI_TUNE_NOISE,
    EP_CLI_TUNE_DECODE,
    EP_CLI_TUNE_PREFILL
} ep_cli_tune_winner;

/* One size of a batch. */
typedef struct ep_cli_tune_size {
    uint32_t tokens;
    uint32_t rounds;
    double decode_us[EP_CLI_TUNE_ROUNDS_MAX]; /* median of a round */
    double prefill_us[EP_CLI_TUNE_ROUNDS_MAX];
    double decode_compute_us[EP_CLI_TUNE_ROUNDS_MAX]; /* the slowest node's computing in these */
    double prefill_compute_us[EP_CLI_TUNE_ROUNDS_MAX];
} ep_cli_tune_size;

typedef struct ep_cli_tune_verdict {
    ep_cli_tune_winner winner;
    double decode_us; /* median of the rounds */
    double prefill_us;
    double decode_compute_us;
    double prefill_compute_us;
    double ratio;         /* median over the rounds of prefill / decode */
    uint32_t decode_wins; /* rounds */
    uint32_t prefill_wins;
} ep_cli_tune_verdict;

/* How many of the rounds a mode must win. */
uint32_t ep_cli_tune_wins_needed(uint32_t rounds);
void ep_cli_tune_judge(const ep_cli_tune_size *size, ep_cli_tune_verdict *out_verdict);

/*
 * sizes ascend. Suggests the largest measured size at which prefill does not win, if decode wins at
 * that or a smaller size and prefill at the next one. 0: no suggestion; *out_why is the reason
 * (static text).
 */
uint32_t ep_cli_tune_choose(const ep_cli_tune_size *sizes, const ep_cli_tune_verdict *verdicts,
                            size_t count, const char **out_why);

#endif
