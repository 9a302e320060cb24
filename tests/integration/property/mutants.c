/* SPDX-License-Identifier: Apache-2.0 */
#include "mutants.h"

#include <inttypes.h>
#include <stdlib.h>

#include "base/check.h"
#include "case_run.h"
#include "small_combine.h"

typedef enum ref_refusal (*layer_func)(const struct ref_layer *layer, const struct ref_batch *batch,
                                       void *out, char text[REF_TEXT_BYTES]);

/* reference_layer.c, compiled once more for each REF_MUTATE_x; see CMakeLists.txt. */
enum ref_refusal ref_layer_forward_order(const struct ref_layer *layer,
                                         const struct ref_batch *batch, void *out,
                                         char text[REF_TEXT_BYTES]);
enum ref_refusal ref_layer_forward_fma(const struct ref_layer *layer, const struct ref_batch *batch,
                                       void *out, char text[REF_TEXT_BYTES]);
enum ref_refusal ref_layer_forward_round(const struct ref_layer *layer,
                                         const struct ref_batch *batch, void *out,
                                         char text[REF_TEXT_BYTES]);
enum ref_refusal ref_layer_forward_slot(const struct ref_layer *layer,
                                        const struct ref_batch *batch, void *out,
                                        char text[REF_TEXT_BYTES]);
enum ref_refusal ref_layer_forward_gate(const struct ref_layer *layer,
                                        const struct ref_batch *batch, void *out,
                                        char text[REF_TEXT_BYTES]);
enum ref_refusal ref_layer_forward_scale(const struct ref_layer *layer,
                                         const struct ref_batch *batch, void *out,
                                         char text[REF_TEXT_BYTES]);
enum ref_refusal ref_layer_forward_truncate(const struct ref_layer *layer,
                                            const struct ref_batch *batch, void *out,
                                            char text[REF_TEXT_BYTES]);
enum ref_refusal ref_layer_forward_chain(const struct ref_layer *layer,
                                         const struct ref_batch *batch, void *out,
                                         char text[REF_TEXT_BYTES]);

enum ref_refusal ref_layer_forward_unfused(const struct ref_layer *layer,
                                           const struct ref_batch *batch, void *out,
                                           char text[REF_TEXT_BYTES]);
enum ref_refusal ref_layer_forward_group(const struct ref_layer *layer,
                                         const struct ref_batch *batch, void *out,
                                         char text[REF_TEXT_BYTES]);
enum ref_refusal ref_layer_forward_ties(const struct ref_layer *layer,
                                        const struct ref_batch *batch, void *out,
                                        char text[REF_TEXT_BYTES]);
enum ref_refusal ref_layer_forward_bias(const struct ref_layer *layer,
                                        const struct ref_batch *batch, void *out,
                                        char text[REF_TEXT_BYTES]);

static const struct {
    const char *name;
    layer_func forward;
    bool is_of_w4a8; /* a mistake in what only that family does */
} oracles[] = {
    {"other order", ref_layer_forward_order, false},
    {"fused", ref_layer_forward_fma, false},
    {"rounded twice", ref_layer_forward_round, false},
    {"slot lost", ref_layer_forward_slot, false},
    {"gate late", ref_layer_forward_gate, false},
    {"scale not rounded", ref_layer_forward_scale, false},
    {"codes cut off", ref_layer_forward_truncate, false},
    {"dot backwards", ref_layer_forward_chain, false},
    {"groups not fused", ref_layer_forward_unfused, true},
    {"scale of the row", ref_layer_forward_group, true},
    {"ties away", ref_layer_forward_ties, true},
    {"bias left in", ref_layer_forward_bias, true},
};

enum { ORACLES_COUNT = sizeof(oracles) / sizeof(oracles[0]) };
_Static_assert((int)ORACLES_COUNT + (int)COMBINE_MISTAKES_COUNT <= (int)MUTANTS_MAX,
               "room for every mutant");

void mutant_board_init(mutant_board *board)
{
    *board = (mutant_board){.lock = PTHREAD_MUTEX_INITIALIZER};
}

static void count(mutant_board *board, size_t index, const layer_case *c, const uint8_t *wrong,
                  const uint8_t *got)
{
    bool caught = count_differences(c, wrong, got, NULL) > 0;
    mutant_tally *tally = &board->tallies[case_family(c)][index];
    pthread_mutex_lock(&board->lock);
    tally->judged++;
    tally->caught += caught;
    pthread_mutex_unlock(&board->lock);
}

void mutants_judge(mutant_board *board, const layer_case *c, const uint8_t *got)
{
    uint8_t *wrong = malloc(case_rows(c) * case_row_bytes(c) + 1);
    EP_ASSERT(wrong != NULL);
    for (size_t i = 0; i < ORACLES_COUNT; i++) {
        if (oracles[i].is_of_w4a8 && case_family(c) != REF_W4A8) {
            continue;
        }
        enum ref_refusal why = oracles[i].forward(&c->layer, &c->batch, wrong, NULL);
        EP_ASSERT(why == REF_OK);
        count(board, i, c, wrong, got);
    }
    if (small_combine_covers(c)) {
        small_combine *combine = small_combine_open(c);
        for (size_t i = 0; i < COMBINE_MISTAKES_COUNT; i++) {
            small_combine_run(combine, (combine_mistake)i, wrong);
            count(board, ORACLES_COUNT + i, c, wrong, got);
        }
        small_combine_close(combine);
    }
    free(wrong);
}

static bool report_one(const char *family, const char *set, const char *name, const mutant_tally *t,
                       bool must_differ)
{
    bool good = t->judged > 0 && (must_differ ? t->caught > 0 : t->caught == 0);
    printf("mutant %-8s %-14s %-17s judged %" PRIu64 " differs %" PRIu64 " (%.1f %%)%s\n", family,
           set, name, t->judged, t->caught,
           t->judged > 0 ? 100.0 * (double)t->caught / (double)t->judged : 0.0,
           good          ? ""
           : must_differ ? "  NOT CAUGHT"
                         : "  WRONG");
    return good;
}

static bool report_family(const mutant_tally *tallies, enum ref_family of)
{
    const char *family = ref_family_name(of);
    bool good = true;
    for (size_t i = 0; i < ORACLES_COUNT; i++) {
        good &= (oracles[i].is_of_w4a8 && of != REF_W4A8) ||
                report_one(family, "oracle", oracles[i].name, &tallies[i], true);
    }
    for (size_t i = 0; i < COMBINE_MISTAKES_COUNT; i++) {
        good &= report_one(family, "small combine", combine_mistake_name((combine_mistake)i),
                           &tallies[ORACLES_COUNT + i], i != COMBINE_RIGHT);
    }
    return good;
}

bool mutants_report(const mutant_board *board, const bool due[REF_FAMILIES])
{
    bool good = true;
    for (int family = 0; family < REF_FAMILIES; family++) {
        good = (!due[family] || report_family(board->tallies[family], (enum ref_family)family)) &&
               good;
    }
    return good;
}
