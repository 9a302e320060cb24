/* SPDX-License-Identifier: Apache-2.0 */
#include "tune.h"

#include <math.h>
#include <stdlib.h>

#define ERROR_SHARE 0.05 /* how often one of two equal modes may seem faster */

uint32_t ep_cli_tune_wins_needed(uint32_t rounds)
{
    /* ways to get `wins` heads in `rounds` throws; probability of so many or more */
    double ways = 1, tail = 0;
    for (uint32_t wins = rounds;; wins--) {
        tail += ways / pow(2, rounds);
        if (2 * tail > ERROR_SHARE) {
            return wins + 1;
        }
        ways = ways * wins / (rounds - wins + 1);
    }
}

static int compare(const void *left, const void *right)
{
    const double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static double median(const double *values, uint32_t count)
{
    double sorted[EP_CLI_TUNE_ROUNDS_MAX];
    for (uint32_t i = 0; i < count; i++) {
        sorted[i] = values[i];
    }
    qsort(sorted, count, sizeof(*sorted), compare);
    return (sorted[(count - 1) / 2] + sorted[count / 2]) / 2;
}

void ep_cli_tune_judge(const ep_cli_tune_size *size, ep_cli_tune_verdict *out_verdict)
{
    double ratios[EP_CLI_TUNE_ROUNDS_MAX];
    ep_cli_tune_verdict verdict = {
        .decode_us = median(size->decode_us, size->rounds),
        .prefill_us = median(size->prefill_us, size->rounds),
        .decode_compute_us = median(size->decode_compute_us, size->rounds),
        .prefill_compute_us = median(size->prefill_compute_us, size->rounds)};
    for (uint32_t r = 0; r < size->rounds; r++) {
        ratios[r] = size->prefill_us[r] / size->decode_us[r];
        verdict.decode_wins += ratios[r] > 1;
        verdict.prefill_wins += ratios[r] < 1;
    }
    const uint32_t needed = ep_cli_tune_wins_needed(size->rounds);
    verdict.ratio = median(ratios, size->rounds);
    if (verdict.decode_wins >= needed && verdict.ratio > 1 + EP_CLI_TUNE_SHARE_MIN) {
        verdict.winner = EP_CLI_TUNE_DECODE;
    } else if (verdict.prefill_wins >= needed && verdict.ratio < 1 / (1 + EP_CLI_TUNE_SHARE_MIN)) {
        verdict.winner = EP_CLI_TUNE_PREFILL;
    }
    *out_verdict = verdict;
}

uint32_t ep_cli_tune_choose(const ep_cli_tune_size *sizes, const ep_cli_tune_verdict *verdicts,
                            size_t count, const char **out_why)
{
    size_t first_prefill = count, decodes = 0;
    *out_why = NULL;
    for (size_t i = 0; i < count; i++) {
        if (verdicts[i].winner == EP_CLI_TUNE_DECODE && first_prefill < count) {
            *out_why = "prefill is the faster at a size below one where decode is: there is no "
                       "single size where that changes";
            return 0;
        }
        decodes += verdicts[i].winner == EP_CLI_TUNE_DECODE;
        first_prefill =
            first_prefill == count && verdicts[i].winner == EP_CLI_TUNE_PREFILL ? i : first_prefill;
    }
    if (decodes == 0 && first_prefill == count) {
        *out_why = "the modes differ by no more than noise at every size: any value does as well, "
                   "or more --rounds and longer ones tell them apart";
    } else if (first_prefill == count) {
        *out_why = "decode is the faster, or no slower, up to the largest size measured: measure "
                   "larger ones (--tokens)";
    } else if (decodes == 0) {
        *out_why = "prefill is the faster, or no slower, from the smallest size measured on: "
                   "measure smaller ones (--tokens)";
    } else {
        return sizes[first_prefill - 1].tokens;
    }
    return 0;
}
